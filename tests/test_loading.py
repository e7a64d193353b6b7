"""Batches made ahead: the same ones in the same order, faults where they belong, and nothing that keeps a program."""

import itertools
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_trainer import Line, line_stage, run, settings

from pocketgpt import loading
from pocketgpt.errors import UserError
from pocketgpt.loading import Loader
from pocketgpt.metrics import read_jsonl
from pocketgpt.trainer import Batch

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


def batch(step: int) -> list[Batch]:
    return [Batch((torch.tensor([step]),), 1, 1)]


def test_the_next_step_is_made_before_it_is_asked_for() -> None:
    made = []
    ready = {step: threading.Event() for step in range(9)}

    def make(step: int) -> list[Batch]:
        made.append((step, threading.current_thread()))
        ready[step].set()
        return batch(step)

    loader = Loader(make, CPU)
    for step in range(3, 7):  # as a resumed run does
        assert loader.batches(step)[0].inputs[0].item() == step
        assert ready[step + 1].wait(10)
    loader.close()
    assert [step for step, _ in made] == [3, 4, 5, 6, 7]  # each once
    assert threading.main_thread() not in [thread for _, thread in made]
    assert not any(thread.is_alive() for _, thread in made)


def test_a_fault_is_raised_where_the_step_is_asked_for(tmp_path: Path) -> None:
    fault = UserError("shard 7 is damaged")

    def batches(step: int) -> list[Batch]:
        if step == 3:
            raise fault
        return right(step)

    model, reference = Line(), Line()
    stage = line_stage(model, 4)
    right, stage.batches = stage.batches, batches
    run(tmp_path / "short", model, stage, settings(steps=3))  # the fault lies beyond its end
    run(tmp_path / "right", reference, line_stage(reference, 4), settings(steps=3))
    assert torch.equal(model.w, reference.w)
    with pytest.raises(UserError) as error:
        run(tmp_path / "long", model, stage, settings(steps=6))
    assert error.value is fault
    assert [row["step"] for row in read_jsonl(tmp_path / "long" / "metrics_toy.jsonl")] == [1, 2, 3, 3]  # and evaluated


def test_waiting_is_recorded_as_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = itertools.count(0.0, 0.25)  # every look at it takes a quarter of a second, so does every wait
    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model = Line()
    run(tmp_path, model, line_stage(model, 4), settings(log_every=2))
    rows = [row for row in read_jsonl(tmp_path / "metrics_toy.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 4, 6]
    for row, steps in zip(rows, (1, 1, 2, 2), strict=True):
        assert row["loader_share"] == pytest.approx(0.25 * steps / (8 * steps / row["tokens_per_s"]))
    seconds = sum(8 * steps / row["tokens_per_s"] for row, steps in zip(rows[1:], (1, 2, 2), strict=True))
    assert f"{0.25 * 5 / seconds:.2%} of the step time went into waiting for data" in capsys.readouterr().out


def test_a_source_that_hangs_does_not_keep_the_program() -> None:
    code = """
import signal, threading, torch
from pocketgpt.errors import run
from pocketgpt.loading import Loader
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background inherits that it is ignored
def make(step):
    if step == 2:
        print("hanging", flush=True)
        threading.Event().wait()
    return []
def main():
    loader = Loader(make, torch.device("cpu"))
    try:
        for step in range(9):
            loader.batches(step)
    finally:
        loader.close()
run(main)
"""
    program = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert program.stdout is not None and program.stdout.readline() == "hanging\n"
    program.send_signal(signal.SIGINT)
    try:
        _, wrong = program.communicate(timeout=30)
    finally:
        program.kill()
    assert program.returncode == 130 and wrong == "interrupted\n"
