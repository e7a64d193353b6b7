"""Whatever stops a save, the old checkpoint or the new one is there, whole, and the message says which file and why."""

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from test_resume import arguments, data  # noqa: F401
from test_scripts import ROOT

import pretrain
from base_model import GPT
from pocketgpt import checkpoint, files, hf, optim, sharded, trainer
from pocketgpt.errors import UserError, run
from pocketgpt.metrics import RunLog
from pocketgpt.token_files import write_tokens
from pocketgpt.tokenizer import Tokenizer

MODEL = tiny(vocab_size=400)
OPTIMIZER = optim.Optimizer(MODEL, optim.OptimConfig("adamw", 0.9, 0.95, 1e-8, 0.1, 0.0, 0.0), 0.1)
STAGE: Any = trainer.Stage("sft", lambda step: [], lambda batch: None, dict, str, 1.0)  # type: ignore[arg-type,return-value]


LOG: Any = types.SimpleNamespace(say=print)


def save(out: Path, tok: Tokenizer, number: int, **changes: Any) -> None:
    """Everything that a stage saves, with a number in it that says which save it was."""
    model = tiny(vocab_size=400, **changes) if changes else MODEL
    with torch.no_grad():
        model.norm.weight.fill_(number)
    weights = checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok, step=number)
    trainer.save_resume(sharded.Writer(), out / "resume_sft.pt", MODEL, OPTIMIZER, STAGE, trainer.State(step=number))
    checkpoint.save(out, weights)


def numbers(out: Path) -> tuple[float, float, int]:
    """Which save there is: in the .pt, in the folder, and to resume from, with the one before it if need be."""
    read = [GPT.from_checkpoint(out / name).norm.weight for name in ("ckpt_sft.pt", "latest")]
    _, state = trainer.load_resume(out / "resume_sft.pt", MODEL, OPTIMIZER, LOG)
    assert all(bool((weight == weight[0]).all()) for weight in read)
    return read[0][0].item(), read[1][0].item(), state.step


def test_killed_at_a_hundred_moments(tmp_path: Path, tok: Tokenizer) -> None:
    save(tmp_path, tok, 0)
    start = time.perf_counter()
    save(tmp_path, tok, 1)
    took = time.perf_counter() - start
    draw = random.Random(0)
    seen: set[tuple[bool, bool]] = set()
    for kill in range(1, 101):
        child = os.fork()
        if child == 0:
            for n in range(1000 * kill, 1000 * kill + 999):
                save(tmp_path, tok, n)
        time.sleep(draw.uniform(0, 2 * took))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it was saving"
        pt, folder, step = numbers(tmp_path)
        assert step >= pt >= folder, "in the order in which they are written"
        seen.add((step > pt, pt > folder))
    assert step > 50_000 and len(seen) >= 2, "kills between the files and elsewhere"
    save(tmp_path, tok, 200_000)
    assert numbers(tmp_path) == (200_000, 200_000, 200_000)
    assert not [path for path in tmp_path.rglob("*.tmp") if path.name != ".latest.tmp"], "leftovers are swept"


Calls = list[tuple[Any, str]]
WRITES: Calls = [
    (os, "fsync"), (os, "replace"), (os, "chmod"), (torch, "save"), (hf, "save_file"), (Path, "write_text"),
    (Path, "symlink_to"), (Path, "mkdir"),
]  # fmt: skip


@contextlib.contextmanager
def failing(at: int, calls: Calls) -> Iterator[list[int]]:
    """Let the call number `at` of these fail as on a broken disk."""
    count = [0]

    def patched(right: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return right(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in calls:
            patch.setattr(owner, name, patched(getattr(owner, name)))
        yield count


def test_a_write_error_at_every_write(tmp_path: Path, tok: Tokenizer) -> None:
    save(tmp_path, tok, 0)
    with failing(0, WRITES) as count:
        save(tmp_path, tok, 0)
    assert count[0] > 30
    silent = 0
    for at in range(1, count[0] + 1):
        save(tmp_path, tok, 2 * at)
        with failing(at, WRITES):
            try:
                save(tmp_path, tok, 2 * at + 1)
                silent += 1
            except UserError as error:
                assert str(tmp_path) in str(error) and "Input/output error" in str(error)
        pt, folder, step = numbers(tmp_path)
        assert 2 * at + 1 >= step >= pt >= folder >= 2 * at
        assert not list(tmp_path.rglob(".*.tmp"))
    # After the rename the file is in place; a folder that cannot be flushed, as on some systems, is no reason to stop.
    assert silent == 7


def test_a_write_error_between_the_files_of_another_model_never_gives_a_mixture(tmp_path: Path, tok: Tokenizer) -> None:
    changes = {"n_head": 4, "n_kv_head": 4}  # of the same shapes
    with failing(0, WRITES) as count:
        save(tmp_path / "0", tok, 1, **changes)
    for at in range(1, count[0] + 1):
        out = tmp_path / str(at)
        save(out, tok, 0)
        with failing(at, WRITES), contextlib.suppress(UserError):
            save(out, tok, 1, **changes)
        heads = {GPT.from_checkpoint(out / "ckpt_sft.pt").config.n_head}
        with contextlib.suppress(UserError):
            model = GPT.from_checkpoint(out / "sft")
            heads.add(model.config.n_head)
            assert model.norm.weight[0] == (model.config.n_head == 4)
        assert heads <= {2, 4}
        shutil.rmtree(out)


def test_resuming_and_logging_on_a_full_disk_is_one_line(tmp_path: Path, tok: Tokenizer) -> None:
    save(tmp_path, tok, 0)
    log = RunLog(tmp_path, "sft", {})
    log.start(3, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*resume_sft\.pt: .*; is the disk full\?"):
            save(tmp_path, tok, 1)
        with pytest.raises(UserError, match=r"cannot write .*metrics_sft\.jsonl: File too large"):
            log.write({"kind": "x" * 30_000, "step": 1})
        with pytest.raises(UserError, match=r"cannot write .*train\.bin: File too large"):
            write_tokens(tmp_path / "train.bin", ["text " * 20_000], tok)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.file = None
    assert numbers(tmp_path) == (0, 0, 0)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a small file system: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_full(small_disk: Path, tok: Tokenizer, data: Path, capsys: Any) -> None:  # noqa: F811
    save(small_disk, tok, 0)
    filled = 0
    with contextlib.suppress(OSError), open(small_disk / "ballast", "wb", buffering=0) as ballast:
        while True:
            filled += ballast.write(bytes(4096))
    ballast.close()
    for room in (0, 20_000, 100_000, 150_000):
        os.truncate(small_disk / "ballast", filled - room)
        with pytest.raises(UserError, match=r"cannot write .*disk/.*(No space left on device|is the disk full\?)"):
            save(small_disk, tok, 1)
        pt, folder, step = numbers(small_disk)
        assert step >= pt >= folder
        assert not list(small_disk.rglob(".*.tmp"))
    # and a whole stage
    sys.argv = ["pretrain.py", *arguments("base", data, small_disk)]
    with pytest.raises(SystemExit) as end:
        run(pretrain.main)
    assert end.value.code == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"error: cannot write {small_disk}")


def test_a_real_run_keeps_its_folder_and_ends_when_told(data: Path, tmp_path: Path) -> None:  # noqa: F811
    given = [*arguments("base", data, tmp_path), "train.steps=100000"]
    command = [sys.executable, str(ROOT / "pretrain.py"), *given]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("step     4" in line for line in lines)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError, match=rf"process {process.pid} is writing"):
        patch.setattr(sys, "argv", ["pretrain.py", *given])
        pretrain.main()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "Traceback" not in err
    assert "saved" in out and "go on with train.resume=true" in out
    files.reserve(tmp_path)
    step = torch.load(tmp_path / "resume_base.pt", weights_only=True)["state"]["step"]
    assert f"stopped after step {step}," in out
