"""Runs of several processes under torchrun on this machine are the run of one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import work_folder

from pocketgpt import checkpoint
from pocketgpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]

# What every process of the first test runs: the steps of all three stages, in-process, without starting Python nine times.
WORKER = """
import sys, json
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import dpo, pretrain, sft
from pocketgpt import distributed, optim, trainer
from pocketgpt.errors import run

folder, out, stages, arguments = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4:]
seen = []
step = optim.Optimizer.step

def watched(self, scale):
    seen.append([distributed.full(p.grad).clone() for part in self.parts for g in part.param_groups for p in g["params"]])
    step(self, scale)

optim.Optimizer.step = watched
for script in (pretrain, sft, dpo):
    name = script.__name__
    if name not in stages:
        continue
    seen.clear()
    own = ["vocab_size=300", "model.block_size=64", "model.n_layer=2", "model.n_head=2", "model.n_kv_head=2", "model.n_embd=32",
           f"cache={{out}}/cache", "sample_tokens=1"] if name == "pretrain" else [f"checkpoint={{folder}}/ckpt_sft.pt"]
    source = folder / (name + ".jsonl")
    sys.argv = [name + ".py", "data=mine", f"data.path={{source}}", "data.val_fraction=0.2", f"out={{out}}", "device=cpu",
                "train.dtype=float32", "train.minutes=0", "train.grad_clip=0", "train.log_every=1", *own, *arguments]
    run(script.main)
    torch.save(seen, out / f"{{name}}_{{distributed.rank()}}.grads")
"""


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def torchrun(processes: int, *command: str, nodes: tuple[str, ...] = ()) -> subprocess.Popen:
    where = nodes or ("--standalone",)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", str(processes), *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tok: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = work_folder(tmp_path_factory.mktemp("work"), tok)
    (folder / "worker.py").write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    return folder


def launch(folder: Path, out: Path, processes: int, stages: str, *arguments: str) -> str:
    out.mkdir(exist_ok=True)
    run = torchrun(processes, str(folder / "worker.py"), str(folder), str(out), stages, *arguments)
    said, _ = run.communicate(timeout=300)
    assert run.returncode == 0, said
    return said


def losses(out: Path, stage: str) -> list[float]:
    rows = map(json.loads, (out / f"metrics_{stage}.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if row["kind"] == "train"]


STAGES = {"pretrain": "base", "sft": "sft", "dpo": "dpo"}
THREE = ("train.steps=3", "train.batch_size=8", "train.micro_batch_size=2")


@pytest.fixture(scope="module")
def one(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of every stage in one process, four micro-batches a step."""
    out = tmp_path_factory.mktemp("one")
    launch(folder, out, 1, "pretrain,sft,dpo", *THREE)
    return out


@pytest.mark.parametrize(
    ("processes", "stages", "parallel"),
    [(2, "pretrain,sft,dpo", "ddp"), (5, "sft", "ddp"), (2, "pretrain,sft,dpo", "fsdp"), (3, "sft", "fsdp")],
)
def test_gradients_and_losses_are_those_of_one_process(
    processes: int, stages: str, parallel: str, folder: Path, one: Path, tmp_path: Path
) -> None:
    """Two processes have two micro-batches each; the third of three has one, the fifth of five none. Conversations and pairs
    are of unequal lengths, so are the weights of the micro-batches."""
    said = launch(folder, tmp_path, processes, stages, *THREE, f"parallel={parallel}")
    assert said.count("step     1  loss") == (4 if "dpo" in stages else 1)  # control and DPO: one process speaks
    for name, stage in STAGES.items():
        if name not in stages:
            continue
        expected = torch.load(one / f"{name}_0.grads")
        assert len(expected) == (6 if name == "dpo" else 3)  # control and DPO
        for rank in range(processes):
            found = torch.load(tmp_path / f"{name}_{rank}.grads")
            assert len(found) == len(expected)
            for mine, theirs in [
                (found[i], expected[i]) for i in range(0, len(expected), 3)
            ]:  # later ones drift: Muon rounds
                size = torch.cat([gradient.flatten() for gradient in theirs]).norm().item()
                difference = torch.cat([(a - b).flatten() for a, b in zip(mine, theirs, strict=True)]).norm().item()
                assert size > 1e-4 and difference < 1e-6 * max(1.0, size), (name, rank)
        assert losses(tmp_path, stage) == pytest.approx(losses(one, stage), rel=1e-4)
        assert checkpoint.load(tmp_path / f"ckpt_{stage}.pt").step == 3


def test_a_run_goes_on_with_another_number_of_processes(folder: Path, one: Path, tmp_path: Path) -> None:
    """The place in the data is the step's number, so nothing is seen twice or left out."""
    arguments = [argument for argument in THREE if argument != "train.steps=3"]
    launch(folder, tmp_path, 2, "sft", *arguments, "train.steps=2", "train.decay=0", "train.warmup=0")
    launch(
        folder, tmp_path, 1, "sft", *arguments, "train.steps=3", "train.decay=0", "train.warmup=0", "train.resume=force"
    )
    whole = tmp_path / "whole"
    launch(folder, whole, 1, "sft", *arguments, "train.steps=3", "train.decay=0", "train.warmup=0")
    assert losses(tmp_path, "sft") == pytest.approx(losses(whole, "sft"), rel=1e-4)


def test_a_process_that_dies_ends_the_run_in_one_line(folder: Path, tmp_path: Path) -> None:
    worker = (folder / "worker.py").read_text()
    dying = """
def watched(self, scale):
    seen.append(0)
    if distributed.rank() == 1 and len(seen) == 3:
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, scale)

optim.Optimizer.step = watched
for script"""
    (tmp_path / "worker.py").write_text(worker.replace("\nfor script", dying, 1))
    run = torchrun(
        2,
        str(tmp_path / "worker.py"),
        str(folder),
        str(tmp_path),
        "sft",
        *THREE[1:],
        "train.steps=9",
        "train.eval_every=2",
    )
    said, _ = run.communicate(timeout=120)
    assert run.returncode != 0
    assert said.count("error: another process of this run has ended") == 1, said
    assert torch.load(tmp_path / "resume_sft.pt", weights_only=True)["state"]["step"] == 2
