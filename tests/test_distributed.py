"""Runs of several processes under torchrun on this machine are the run of one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import work_folder
from hypothesis import given
from hypothesis import strategies as st

import pretrain
from pocketgpt import checkpoint, config, distributed
from pocketgpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]

# What every process runs: steps of the stages, in-process. A run may be stopped by a signal to the last process after one of
# its steps. Under torchrun it is given its orders as arguments. Without any it reads them line by line, and forks processes that are told what
# torchrun would tell them, so that Python and torch start once and not for each.
WORKER = """
import gc, json, os, signal, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import torch
torch.set_num_threads(1)
import dpo, pretrain, sft
from pocketgpt import config, device, distributed, metrics, optim, sharded, trainer
from pocketgpt.errors import run

seen = []
stop = 0
step = optim.Optimizer.step

def watched(self, scale):
    seen.append([distributed.full(p.grad).clone() for part in self.parts for g in part.param_groups for p in g["params"]])
    step(self, scale)
    if len(seen) == stop and distributed.rank() == distributed.world() - 1:
        signal.raise_signal(signal.SIGTERM)

# A micro-batch with nothing supervised in each step of fine-tuning: the last of its eight rows.
lay_out = sft.lay_out

def last_two_unsupervised(rows, length):
    laid = lay_out(rows, length)
    laid.targets[6:] = -1
    return laid

metrics.RunLog.plot = lambda self, panels: self.path  # nobody looks at it here
optim.Optimizer.step = watched
sft.lay_out = last_two_unsupervised

def work(folder, runs, patch):
    global stop
    exec(patch, globals())
    for name, out, stop, arguments in runs:
        script = dict(pretrain=pretrain, sft=sft, dpo=dpo)[name]
        seen.clear()
        own = ["vocab_size=300", "model.block_size=64", "model.n_layer=2", "model.n_head=2", "model.n_kv_head=2",
               "model.n_embd=32", f"cache={{out}}/cache", "sample_tokens=1"]
        source = folder / (name + ".jsonl")
        sys.argv = [name + ".py", "data=mine", f"data.path={{source}}", "data.val_fraction=0.2", f"out={{out}}", "device=cpu",
                    "train.dtype=float32", "train.minutes=0", "train.grad_clip=0", "train.log_every=1",
                    *(own if name == "pretrain" else [f"checkpoint={{folder}}/ckpt_sft.pt"]), *arguments]
        try:
            run(script.main)
        except SystemExit as end:
            if end.code != 143 or not stop:
                raise
        torch.save(seen, Path(out) / f"{{name}}_{{distributed.rank()}}.grads")

if len(sys.argv) > 1:
    work(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])
    sys.exit()

import matplotlib.pyplot, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.tensor
config.load("sft", sft.Config, [])
device.matmul_rate(torch.device("cpu"), torch.float32)
gc.collect()
gc.freeze()  # a child that looks at all there is would copy it
gc.unfreeze = lambda: None
for line in sys.stdin:
    order = json.loads(line)
    children = []
    for rank in range(order["processes"]):
        children.append(os.fork())
        if children[-1] == 0:
            signal.alarm(300)
            os.environ |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(order["processes"]),
                               LOCAL_WORLD_SIZE=str(order["processes"]), MASTER_ADDR="localhost", MASTER_PORT=order["port"])
            said = os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            work(Path(order["folder"]), order["runs"], order["patch"])
            sys.exit()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
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
def folder(tok: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data, a checkpoint, and `worker.py` at work."""
    folder = work_folder(tmp_path_factory.mktemp("work"), tok)
    (folder / "worker.py").write_text(WORKER.format(root=str(ROOT), tests=str(ROOT / "tests")))
    forks = subprocess.Popen(
        [sys.executable, str(folder / "worker.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    SERVERS[folder] = forks
    yield folder
    del SERVERS[folder]
    forks.communicate()
    assert forks.returncode == 0


SERVERS: dict[Path, subprocess.Popen] = {}  # by their folder
Run = tuple[str, str, int, list[str]]  # stage, out, the step after which it is stopped or 0, arguments


def fork_runs(folder: Path, processes: int, *runs: Run, patch: str = "") -> tuple[list[int], str]:
    """How the processes ended, and what they said."""
    forks, said = SERVERS[folder], folder / "said.txt"
    said.unlink(missing_ok=True)
    order = {"processes": processes, "runs": runs, "patch": patch, "port": str(port())}
    assert forks.stdin is not None and forks.stdout is not None
    print(json.dumps(order | {"folder": str(folder), "said": str(said)}), file=forks.stdin, flush=True)
    return json.loads(forks.stdout.readline()), said.read_text()


def launch_runs(folder: Path, processes: int, *runs: Run) -> str:
    codes, said = fork_runs(folder, processes, *runs)
    assert codes == [0] * processes, said
    return said


def launch(folder: Path, out: Path, processes: int, stages: str, *arguments: str) -> str:
    return launch_runs(folder, processes, *((stage, str(out), 0, list(arguments)) for stage in stages.split(",")))


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
    [
        (2, "pretrain,sft,dpo", "ddp"),
        (4, "pretrain,sft,dpo", "ddp"),
        (5, "sft", "ddp"),
        (2, "pretrain,sft,dpo", "fsdp"),
        (3, "sft", "fsdp"),
    ],
)
def test_gradients_and_losses_are_those_of_one_process(
    processes: int, stages: str, parallel: str, folder: Path, one: Path, tmp_path: Path
) -> None:
    """Two processes have two micro-batches each; the third of three has one, the fifth of five none. Conversations and pairs
    are of unequal lengths, so are the weights of the micro-batches."""
    said = launch(folder, tmp_path, processes, stages, *THREE, f"parallel={parallel}")
    assert said.count("step     1  loss") == (4 if "dpo" in stages else 1)  # control and DPO: one process speaks
    for name, stage in STAGES.items():
        if name in stages:
            assert_same_run(tmp_path, one, name, processes)
            assert losses(tmp_path, stage) == pytest.approx(losses(one, stage), rel=1e-4)
            assert checkpoint.load(tmp_path / f"ckpt_{stage}.pt").step == 3


def assert_same_run(ours: Path, theirs: Path, name: str, processes: int) -> None:
    """The gradients of the first of three steps are those of one process, in every process: later ones drift, Muon rounds."""
    expected = torch.load(theirs / f"{name}_0.grads")
    assert len(expected) == (6 if name == "dpo" else 3)  # control and DPO
    for rank in range(processes):
        found = torch.load(ours / f"{name}_{rank}.grads")
        assert len(found) == len(expected)
        for step in range(0, len(expected), 3):
            pairs = list(zip(found[step], expected[step], strict=True))
            size = torch.cat([b.flatten() for _, b in pairs]).norm().item()
            difference = torch.cat([(a - b).flatten() for a, b in pairs]).norm().item()
            assert size > 1e-4 and difference < 1e-6 * max(1.0, size), (name, rank)


TRAIN = config.load("pretrain", pretrain.Config, []).train


@given(world=st.integers(1, 6), batch_size=st.integers(1, 13), micro=st.integers(1, 13), step=st.integers(0, 9))
def test_every_row_of_a_step_is_run_by_one_process(world: int, batch_size: int, micro: int, step: int) -> None:
    """On any number of processes, none without work where there is enough: so a run may go on with another number."""
    train, ran = replace(TRAIN, batch_size=batch_size, micro_batch_size=micro), []
    rows = range(step * batch_size, (step + 1) * batch_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "world", lambda: world)
        for rank in range(world):
            patch.setattr(distributed, "rank", lambda rank=rank: rank)
            batches = [rows[at : at + train.rows_at_once] for at in range(0, batch_size, train.rows_at_once)]
            mine = [
                row for batch, counts in distributed.dealt(batches, torch.nn.Linear(1, 1)) for row in batch if counts
            ]
            assert mine == list(filter(train.mine, rows))
            assert mine or batch_size % world or batch_size < world
            ran += mine
    assert sorted(ran) == list(rows)


def test_two_agents_with_two_processes_each_are_one_run(folder: Path, one: Path, tmp_path: Path) -> None:
    where = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port()}", "--rdzv-id", "test")
    runs = json.dumps([("sft", str(tmp_path), 0, [*THREE, "parallel=fsdp"])])
    agents = [torchrun(2, str(folder / "worker.py"), str(folder), runs, "", nodes=where) for _ in range(2)]
    said = [agent.communicate(timeout=300)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert "".join(said).count("step     1  loss") == 1
    assert_same_run(tmp_path, one, "sft", 4)


# What the weights of a divided network have to go through, and a bound on what three steps of AdamW make of its rounding.
VARIANTS = {
    "lora": ("sft", ["lora.rank=4", "train.recompute=true", "train.grad_clip=0.5"]),
    "gpt2": (
        "pretrain",
        [
            "model=gpt2",
            "model.tie_embeddings=false",
            "model.n_embd=36",
            "model.n_head=3",
            "model.n_kv_head=3",
            "train.recompute=selective",
            "optim.cautious=true",
        ],
    ),
    "dpo": ("dpo", ["train.grad_clip=0.5"]),
}
SMOOTH = [
    "optim=adamw",
    "optim.eps=1e-3",
    "train.recompute=false",
]  # AdamW does not blow up the rounding of tiny gradients


def test_divided_weights_end_where_those_of_one_process_do(folder: Path, tmp_path: Path) -> None:
    """Adapters, recomputing, clipping, an untied head, learned positions, biases, and sizes that do not divide evenly."""
    for processes in (1, 2):
        runs = [
            (stage, f"{tmp_path}/{processes}/{name}", 0, [*THREE, *SMOOTH, *own, "parallel=fsdp"])
            for name, (stage, own) in VARIANTS.items()
        ]
        launch_runs(folder, processes, *runs)
    for name, (stage, _) in VARIANTS.items():
        assert_same_run(tmp_path / "2" / name, tmp_path / "1" / name, stage, 2)
        assert same_weights(tmp_path / "2" / name, tmp_path / "1" / name, STAGES[stage], 1e-6), name


def test_a_run_goes_on_with_another_number_of_processes(folder: Path, one: Path, tmp_path: Path) -> None:
    """The place in the data is the step's number, so nothing is seen twice or left out."""
    arguments = [*THREE[1:], "train.decay=0", "train.warmup=0"]
    launch(folder, tmp_path, 2, "sft", *arguments, "train.steps=2")
    whole, longer = tmp_path / "whole", [*arguments, "train.steps=3"]
    runs = [("sft", str(tmp_path), 0, [*longer, "train.resume=force"]), ("sft", str(whole), 0, longer)]
    launch_runs(folder, 1, *runs)
    assert losses(tmp_path, "sft") == pytest.approx(losses(whole, "sft"), rel=1e-4)


DYING = ["train.batch_size=8", "train.micro_batch_size=2", "train.steps=9", "train.eval_every=2"]


def test_a_process_that_dies_ends_the_run_in_one_line(folder: Path, tmp_path: Path) -> None:
    dying = """
def watched(self, scale):
    seen.append(0)
    if distributed.rank() == 1 and len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    step(self, scale)

optim.Optimizer.step = watched
"""
    runs = json.dumps([("sft", str(tmp_path), 0, DYING)])
    run = torchrun(2, str(folder / "worker.py"), str(folder), runs, dying)
    said, _ = run.communicate(timeout=300)
    assert run.returncode != 0
    died(tmp_path, said)


def died(out: Path, said: str) -> None:
    """One process died in or after the save of step 4: what is saved is that of step 2."""
    assert said.count("error: another process of this run has ended") == 1, said
    assert torch.load(out / "resume_sft.pt", weights_only=True)["state"]["step"] == 2


def test_shards_that_were_not_declared_do_not_exist(folder: Path, tmp_path: Path) -> None:
    """A process dies when its shard of the second save is written, and before the file names it."""
    dying = """
digests = sharded.gathered_digests

def dies(folder):
    global saves
    saves += folder.name.startswith("resume")
    if saves == 2 and distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return digests(folder)

saves = 0
sharded.gathered_digests = dies
"""
    arguments = [*DYING, "parallel=fsdp"]
    codes, said = fork_runs(folder, 2, ("sft", str(tmp_path), 0, arguments), patch=dying)
    assert codes == [1, -signal.SIGKILL]
    died(tmp_path, said)
    assert len(list(tmp_path.glob("resume_sft.????????"))) == 2
    said = launch_runs(folder, 2, ("sft", str(tmp_path), 0, [*arguments, "train.resume=true"]))
    assert "resumed at step 2" in said
    kept = {torch.load(file, weights_only=True)["shards"] for file in tmp_path.glob("resume_sft*.pt")}
    assert kept == {path.name for path in tmp_path.glob("resume_sft.????????")} and len(kept) == 2


FOUR = ["train.steps=4", "train.batch_size=8", "train.micro_batch_size=2", "train.eval_every=2", "parallel=fsdp"]
AGAIN = [*FOUR, "train.resume=true"]


@pytest.fixture(scope="module")
def halves(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two processes with divided weights: whole ones, and ones that a signal to the second process has stopped."""
    out = tmp_path_factory.mktemp("halves")
    runs = [(stage, f"{out}/{at}", at, FOUR) for stage in ("sft", "dpo") for at in (0, 3)]
    said = launch_runs(folder, 2, *runs)
    assert said.count("stopped after step 3, saved") == 2
    shutil.copytree(out / "3", out / "one", symlinks=True)
    return out


def same_weights(a: Path, b: Path, stage: str, tolerance: float) -> bool:
    ours, theirs = (checkpoint.load(out / f"ckpt_{stage}.pt").state_dict for out in (a, b))
    return all((ours[name] - theirs[name]).abs().max() <= tolerance for name in theirs) and ours.keys() == theirs.keys()


def test_a_divided_run_that_was_stopped_goes_on_exactly(halves: Path, folder: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(halves / "3", damaged, symlinks=True)
    name = torch.load(damaged / "resume_sft.pt", weights_only=True)["shards"]
    shard = max((damaged / name).iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    shutil.copytree(halves / "3", tmp_path / "again", symlinks=True)
    runs = [(stage, f"{tmp_path}/again", 0, AGAIN) for stage in ("sft", "dpo")]
    said = launch_runs(folder, 2, *runs, ("sft", str(damaged), 0, AGAIN))
    assert said.count("resumed at step 3") == 2
    assert "not readable (wrong checksum)" in said and "resumed at step 2" in said
    for out, stage in [("again", "sft"), ("again", "control"), ("again", "dpo"), ("damaged", "sft")]:
        assert same_weights(tmp_path / out, halves / "0", stage, 0.0), (out, stage)


def test_a_divided_run_goes_on_with_another_number_of_processes(halves: Path, folder: Path, tmp_path: Path) -> None:
    said = launch_runs(folder, 1, ("sft", f"{halves}/one", 0, AGAIN), ("sft", str(tmp_path), 3, FOUR))
    assert "resumed at step 3" in said and not list(tmp_path.glob("resume_sft.????????"))
    assert "resumed at step 3" in launch_runs(folder, 2, ("sft", str(tmp_path), 0, AGAIN))
    for out in (halves / "one", tmp_path):
        assert losses(out, "sft") == pytest.approx(losses(halves / "0", "sft"), rel=1e-4)
        assert same_weights(out, halves / "0", "sft", 2e-3)
