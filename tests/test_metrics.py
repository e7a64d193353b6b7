"""The log of a run."""

import subprocess
import sys
from pathlib import Path

import pytest

from pocketgpt.errors import UserError
from pocketgpt.metrics import RunLog, read_jsonl

ROOT = Path(__file__).resolve().parents[1]


def test_unknown_log_is_named_and_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="log is 'tensorboard': choose none or wandb"):
        RunLog(tmp_path / "out", "base", {}, "tensorboard")
    assert not (tmp_path / "out").exists()


def test_wandb_without_an_account_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")

    def refuse(**_settings: object) -> None:
        raise wandb.errors.UsageError("No API key configured")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match="log=wandb: No API key configured; or set WANDB_MODE=offline"):
        RunLog(tmp_path, "base", {}, "wandb")


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
