"""The log of a run."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pocketgpt.device import environment
from pocketgpt.errors import UserError
from pocketgpt.metrics import RunLog, read_jsonl

ROOT = Path(__file__).resolve().parents[1]


def test_unknown_log_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="log is 'mlflow': choose none, wandb, tensorboard"):
        RunLog(tmp_path / "out", "base", {}, "mlflow")
    assert not (tmp_path / "out").exists()


def test_what_wandb_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_settings: object) -> None:
        raise wandb.errors.UsageError("no such entity")

    monkeypatch.setattr(wandb, "login", lambda **_settings: True)
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="log=wandb: no such entity; or set WANDB_MODE=offline"):
        RunLog(tmp_path, "base", {}, "wandb")


WANDB_RUN = """
import sys
from pathlib import Path
from pocketgpt.errors import run
from pocketgpt.metrics import RunLog
def main():
    log = RunLog(Path(sys.argv[1]), "base", {"seed": 1}, "wandb")
    log.start(steps=2, minutes=0, step=0, elapsed=0)
    log.write({"kind": "train", "step": 1, "loss": 2.0})
    log.write({"kind": "val", "step": 1, "loss": 3.0})
    log.stop()
    log.close()
run(main)
"""


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_wandb_never_asks(tmp_path: Path, mode: str) -> None:
    """On a terminal, with no account anywhere: a refusal in one line, or an offline run. A question would wait for ever."""
    pytest.importorskip("wandb")
    ours, theirs = pty.openpty()
    home = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path / "config")}
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")} | home | {"WANDB_MODE": mode}
    command = [sys.executable, "-c", WANDB_RUN, str(tmp_path / "out")]
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(ours)
    os.close(theirs)
    runs = list(tmp_path.glob("out/wandb/offline-run-*/run-*.wandb"))
    if mode == "online":
        assert done.returncode == 1 and not runs
        assert done.stderr.splitlines()[-1].startswith("error: log=wandb: no account is set up: run wandb login, or")
    else:
        assert done.returncode == 0, done.stderr
        assert len(runs) == 1 and b"held_out/loss" in runs[0].read_bytes()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_gets_the_same_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    # Files of one second and one process are told apart by a counter and read by name, where 10 comes before 9.
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))

    def write(resume: bool, step: int, losses: list[float]) -> None:
        log = RunLog(tmp_path, "base", {"seed": 1}, "tensorboard", resume)
        log.start(steps=4, minutes=0, step=step, elapsed=0)
        for at, loss in enumerate(losses, step + 1):
            log.write({"kind": "train", "step": at, "loss": loss})
            log.write({"kind": "val", "step": at, "loss": loss + 1})
        log.stop()
        log.close()  # events are written by a thread: without it the last ones may still be on their way

    write(False, 0, [4.0, 3.0, 2.0])
    folder = tmp_path / "tensorboard" / "base"
    assert scalars(folder) == {"loss": [(1, 4.0), (2, 3.0), (3, 2.0)], "held_out/loss": [(1, 5.0), (2, 4.0), (3, 3.0)]}
    write(True, 1, [3.5, 2.5])
    assert scalars(folder)["loss"] == [(1, 4.0), (2, 3.5), (3, 2.5)], (
        "what a resumed run did again takes the place of the old"
    )
    write(False, 0, [9.0])
    assert scalars(folder)["loss"] == [(1, 9.0)], "a new run does not mix with the old"


def test_tensorboard_that_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match="^log=tensorboard: run pip install tensorboard, or set log=none$"):
        RunLog(tmp_path, "base", {}, "tensorboard")


def test_what_was_run_is_recorded(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "base", {"seed": 1})
    log.record(unit="nats", data={"text": "12"})
    log.record(readings=[])
    right = {"stage": "base", "config": {"seed": 1}, "unit": "nats", "data": {"text": "12"}, "readings": []}
    assert json.loads((tmp_path / "run_base.json").read_text()) == right


def test_the_environment_names_versions_and_commit() -> None:
    facts = environment(torch.device("cpu"))
    assert facts["torch"] == torch.__version__.split("+")[0] or facts["torch"] == torch.__version__
    assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$", facts["started"]) and facts["device"].endswith(
        ", 1 thread"
    )
    if (ROOT / ".git").exists():
        assert re.match(r"[0-9a-f]{7,40}(-dirty)?$", facts["commit"])


def test_wandb_is_not_imported_unless_asked_for() -> None:
    code = "import sys, pretrain, sft, dpo, evaluate, kv_cache, chat; print('wandb' in sys.modules, 'datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_a_resumed_log_drops_what_will_be_done_again(tmp_path: Path) -> None:
    log = RunLog(tmp_path, "base", {})
    log.start(steps=4, minutes=0, step=0, elapsed=0)
    for step in (1, 2, 3):
        log.write({"kind": "train", "step": step, "loss": 1.0 / step})
    log.stop()
    again = RunLog(tmp_path, "base", {}, resume=True)
    again.start(steps=4, minutes=0, step=2, elapsed=0)
    again.write({"kind": "train", "step": 3, "loss": 9.0})
    again.stop()
    assert [(row["step"], row["loss"]) for row in read_jsonl(again.path)] == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert again.plot([("loss", "loss (nats)")]).read_bytes().startswith(b"\x89PNG")
