"""The shared loop: accumulation, the clock, resuming, skipping, and what it writes."""

import itertools
import math
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_ids, tiny
from torch import nn

from base_model import GPT
from pocketgpt import kernels, optim, trainer
from pocketgpt.errors import UserError
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.metrics import RunLog, read_jsonl
from pocketgpt.trainer import Batch, Stage, TrainConfig, train

ADAMW = optim.OptimConfig("adamw", 0.9, 0.95, 1e-8, 0.1, 0.0, 0.0)


def settings(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "steps": 6, "minutes": 0.0, "batch_size": 8, "micro_batch_size": 8, "lr": 0.1, "warmup": 0.0, "decay": 0.0,
        "decay_shape": "linear", "grad_clip": 0.0, "eval_every": 3, "log_every": 1, "seed": 1, "dtype": "float32",
        "compile": False, "resume": False,
    }  # fmt: skip
    return TrainConfig(**values | changes)


class Line(nn.Module):
    """y = w x, with dropout so that randomness matters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))
        self.drop = nn.Dropout(dropout)


def line_stage(
    model: Line, micro: int, weights: list[int] | None = None, broken_at: int = -1, monitor: str | None = None
) -> Stage:
    def batches(step: int) -> list[Batch]:
        x = torch.arange(1.0, 9.0) + step
        if step == broken_at:
            x = x * float("nan")
        return [
            Batch((part,), len(part) if weights is None else weights[i], len(part))
            for i, part in enumerate(x.split(micro))
        ]

    def loss(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        (x,) = batch.inputs
        return (model.drop(model.w * x) - 3.0 * x).square().sum(), {}

    return Stage("toy", batches, loss, lambda: {"w": model.w.item()}, lambda: "a sample", 1.0, monitor=monitor)


def interrupt(stage: Stage, at: int, number: int) -> None:
    """A signal arrives while step `at`, counted from 0, computes the first of its two losses."""
    right, calls = stage.loss, itertools.count()

    def interrupted(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if next(calls) == 2 * at:
            signal.raise_signal(number)
        return right(batch)

    stage.loss = interrupted


def run(tmp_path: Path, model: Line, stage: Stage, config: TrainConfig) -> trainer.Result:
    return train(model, stage, config, ADAMW, tmp_path, RunLog(tmp_path, "toy", {}, resume=config.resume))


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulation_does_not_change_the_step(tmp_path: Path, micro: int) -> None:
    reference, model = Line(), Line()
    run(tmp_path / "a", reference, line_stage(reference, 8), settings())
    run(tmp_path / "b", model, line_stage(model, micro), settings())
    assert model.w.item() == pytest.approx(reference.w.item(), abs=1e-6)
    losses = [
        [row["loss"] for row in read_jsonl(tmp_path / side / "metrics_toy.jsonl") if row["kind"] == "train"]
        for side in "ab"
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    # the logged loss is the mean over the whole step: (1 - 3)^2 times the mean of 1, 4, ..., 64
    assert losses[0][0] == pytest.approx(4 * 204 / 8)


def test_gradient_is_divided_by_what_the_whole_step_supervises(tmp_path: Path) -> None:
    model = Line()
    stage = line_stage(model, 4, weights=[1, 3])
    seen = []
    step = torch.optim.AdamW.step

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(model.w.grad.item())
        return step(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", spy)
        run(tmp_path, model, stage, settings(steps=1))
    assert seen == pytest.approx([2 * (1 - 3) * 204 / 4])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, number: int) -> None:
    whole, half = Line(0.5), Line(0.5)
    run(tmp_path / "whole", whole, line_stage(whole, 4), settings())
    stage = line_stage(half, 4)
    interrupt(stage, 3, number)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "half", half, stage, settings())
    assert stop.value.code == 128 + number
    assert (
        torch.load(tmp_path / "half" / "resume_toy.pt", weights_only=True)["state"]["step"] == 4
    )  # the step was finished
    again = Line(0.5)
    run(tmp_path / "half", again, line_stage(again, 4), settings(resume=True))
    assert torch.equal(again.w, whole.w)
    rows = [
        [
            {k: r[k] for k in ("step", "loss")}
            for r in read_jsonl(tmp_path / side / "metrics_toy.jsonl")
            if r["kind"] == "train"
        ]
        for side in ("whole", "half")
    ]
    assert rows[0] == rows[1] and [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5, 6]


def test_second_interrupt_stops_at_once(tmp_path: Path) -> None:
    model = Line()
    stage = line_stage(model, 4)

    def twice(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    stage.loss = twice
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model, stage, settings())
    assert signal.getsignal(signal.SIGINT) is before and not (tmp_path / "resume_toy.pt").exists()


def test_nothing_to_resume_and_damaged_resume_are_named(tmp_path: Path) -> None:
    model = Line()
    with pytest.raises(UserError, match="resume_toy.pt: nothing to resume from"):
        run(tmp_path, model, line_stage(model, 8), settings(resume=True))
    (tmp_path / "resume_toy.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match="resume_toy.pt: not a readable checkpoint"):
        run(tmp_path, model, line_stage(model, 8), settings(resume=True))


def test_non_finite_step_changes_nothing_and_too_many_end_the_run(tmp_path: Path) -> None:
    model, skipping = Line(), Line()
    run(tmp_path / "a", model, line_stage(model, 8), settings(steps=1))
    run(tmp_path / "b", skipping, line_stage(skipping, 8, broken_at=1), settings(steps=2))
    assert torch.equal(model.w, skipping.w)
    broken = Line()
    stage = line_stage(broken, 8)
    stage.loss = lambda batch: (broken.w.sum() * float("nan"), {})
    with pytest.raises(
        UserError, match=r"toy: step 10: loss or gradient not finite \(batch [0-9a-f]{12}\), the 10th in a row"
    ):
        run(tmp_path / "c", broken, stage, settings(steps=50))
    assert broken.w.item() == 1.0


def test_skipped_steps_are_counted_with_their_batch_and_leave_the_files_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad step among good ones, by its loss alone; then a run that only goes wrong after its first save."""
    model = Line()
    stage = line_stage(model, 4)
    right = stage.loss

    def loss(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        total, numbers = right(batch)
        step = int(batch.inputs[0][0]) - 1
        return total + (float("inf") if step == 1 else 0.0), numbers  # its gradient is finite

    stage.loss = loss
    run(tmp_path, model, stage, settings())
    said = [line for line in capsys.readouterr().out.splitlines() if "not finite" in line]
    digests = " ".join(batch.digest() for batch in stage.batches(1))
    assert said == [f"step 2: loss or gradient not finite (batch {digests}), skipped, 1 so far"]
    assert torch.load(tmp_path / "resume_toy.pt", weights_only=True)["state"]["skipped"] == 1
    assert stage.batches(1)[0].digest() != stage.batches(2)[0].digest()

    model = Line()
    stage = line_stage(model, 8)
    good = stage.batches

    def later_bad(step: int) -> list[Batch]:
        if step < 3:
            return good(step)
        return [Batch((batch.inputs[0] * float("inf"),), batch.weight, batch.tokens) for batch in good(step)]

    stage.batches = later_bad
    with pytest.raises(UserError, match="toy: step 13: .* the 10th in a row: lower train.lr"):
        run(tmp_path / "b", model, stage, settings(steps=50, eval_every=3))
    resume = torch.load(tmp_path / "b" / "resume_toy.pt", weights_only=True)
    assert resume["model"]["w"].item() == model.w.item() and model.w.isfinite().all()


def test_running_out_of_memory_says_what_to_lower(tmp_path: Path) -> None:
    model = Line()
    stage = line_stage(model, 8)
    stage.loss = lambda batch: (torch.zeros(1 << 60).sum() * model.w, {})
    with pytest.raises(UserError, match=r"toy: out of memory in step 1: try train\.micro_batch_size=4 \(8 now"):
        run(tmp_path, model, stage, settings())
    stage.loss = lambda batch: (_ for _ in ()).throw(RuntimeError("a fault of ours"))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(tmp_path, model, stage, settings())


def test_resume_knows_three_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train.resume is 'yes': choose false, true, force, or a file stable_"):
        settings(resume="yes").check()
    for word in (False, True, "force"):
        settings(resume=word).check()


def test_step_without_supervision_changes_nothing(tmp_path: Path) -> None:
    model = Line()
    run(tmp_path, model, line_stage(model, 8, weights=[0]), settings(steps=3))
    assert model.w.item() == 1.0


def test_short_runs_are_evaluated_at_their_end(tmp_path: Path) -> None:
    model = Line()
    result = run(tmp_path, model, line_stage(model, 8), settings(steps=2, eval_every=100))
    assert result.step == 2 and result.metrics == {"w": model.w.item()}
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics_toy.jsonl") if r["kind"] == "val"] == [2]


def test_the_clock_ends_a_run_with_its_decay_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now[0])
    model = Line()
    stage = line_stage(model, 8)
    right = stage.loss
    stage.loss = lambda batch: (now.__setitem__(0, now[0] + 6.0), right(batch))[1]
    result = run(tmp_path, model, stage, settings(steps=0, minutes=1.0, decay=1.0, eval_every=100))
    rates = [row["lr"] for row in read_jsonl(tmp_path / "metrics_toy.jsonl") if row["kind"] == "train"]
    assert result.step == 10
    assert rates[0] > 0 and rates == sorted(rates, reverse=True) and rates[-1] == pytest.approx(0.1 * 0.05)


def test_monitored_runs_keep_their_best_weights(tmp_path: Path) -> None:
    model = Line()
    stage = line_stage(model, 8, monitor="w")
    stage.loss = lambda batch: (model.w.sum(), {})  # drives w down, so the first weights are the best
    result = run(tmp_path, model, stage, settings())
    assert model.w.item() == 1.0 and result.metrics == {"w": 1.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "both 0"),
        ({"batch_size": 0}, "train.batch_size is 0"),
        ({"lr": 0.0}, "train.lr is 0"),
        ({"warmup": 0.6, "decay": 0.6}, "shares of one run"),
        ({"decay_shape": "step"}, "linear or cosine"),
        ({"compile": "yes"}, "train.compile is 'yes': choose false, true or auto"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = Line()
    with pytest.raises(UserError, match=message):
        run(tmp_path, model, line_stage(model, 8), settings(**changes))


def rates(folder: Path) -> list[float]:
    return [row["lr"] for row in read_jsonl(folder / "metrics_toy.jsonl") if row["kind"] == "train"]


def test_a_warm_up_in_steps_does_not_depend_on_the_horizon(tmp_path: Path) -> None:
    for steps in (6, 12):
        model = Line()
        run(tmp_path / str(steps), model, line_stage(model, 8), settings(steps=steps, warmup=4, decay=1 / 3))
    short, long = rates(tmp_path / "6"), rates(tmp_path / "12")
    assert short == pytest.approx([0.1 * x for x in (0.125, 0.375, 0.625, 0.875, 0.75, 0.25)])
    assert long[:4] == short[:4] and long[4:8] == [0.1] * 4 and long[-1] == pytest.approx(0.1 * 0.125)
    assert max(rates(tmp_path / "6")) < 0.1  # a decay that begins within the warm-up: the lower of the two


@pytest.mark.parametrize("how", ["stopped", "ended", "decayed"])
@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_branch_of_the_stable_phase_is_the_run_that_had_its_horizon_from_the_beginning(
    tmp_path: Path, how: str, shape: str
) -> None:
    """One trunk that was interrupted in its stable phase, one that ended without a decay, and one that went on to decay."""
    horizon = settings(steps=14, warmup=2, decay=0.25, decay_shape=shape)
    whole, trunk, branch = Line(0.5), Line(0.5), Line(0.5)
    run(tmp_path / "whole", whole, line_stage(whole, 4), horizon)
    stage, source = line_stage(trunk, 4), "resume_toy.pt"
    if how == "stopped":
        interrupt(stage, 7, signal.SIGINT)
        with pytest.raises(SystemExit):
            run(tmp_path / "trunk", trunk, stage, settings(steps=1000, warmup=2))
    elif how == "ended":
        run(tmp_path / "trunk", trunk, stage, settings(steps=8, warmup=2))
        assert not (tmp_path / "trunk" / "stable_toy.pt").exists()  # where there is no decay the resume file is it
    else:
        run(tmp_path / "trunk", trunk, stage, settings(steps=10, warmup=2, decay=0.2))
        source = "stable_toy.pt"
    saved = torch.load(tmp_path / "trunk" / source, weights_only=True)
    assert (saved["state"]["step"], saved["state"]["scale"]) == (8, 1.0)
    before = (tmp_path / "trunk" / source).read_bytes()
    horizon.resume = str(tmp_path / "trunk" / source)
    run(tmp_path / "branch", branch, line_stage(branch, 4), horizon)
    assert torch.equal(branch.w, whole.w) and not torch.equal(branch.w, saved["model"]["w"])
    assert rates(tmp_path / "trunk")[:8] + rates(tmp_path / "branch") == rates(tmp_path / "whole")
    assert (tmp_path / "trunk" / source).read_bytes() == before  # from which more can branch
    ends = [torch.load(tmp_path / side / "resume_toy.pt", weights_only=True) for side in ("whole", "branch")]
    assert ends[0]["model"]["w"] == ends[1]["model"]["w"]
    moments = [end["optimizer"][0]["state"][0]["exp_avg_sq"] for end in ends]
    assert torch.equal(*moments)


def test_what_cannot_be_branched_is_named(tmp_path: Path) -> None:
    model = Line()
    stage = line_stage(model, 8)
    stage.made_from = {"train": {"lr": 0.1, "steps": 10, "decay": 0.4}}
    run(tmp_path, model, stage, settings(steps=10, warmup=2, decay=0.4))

    def branch(name: str, made_from: dict[str, Any] | None = None, **changes: Any) -> None:
        again = line_stage(model, 8)
        again.made_from = {"train": {"lr": 0.1, "steps": 20, "decay": 0.1} | (made_from or {})}
        run(tmp_path / "b", model, again, settings(**{"warmup": 2, "resume": str(tmp_path / name), **changes}))

    with pytest.raises(UserError, match="resume_toy.pt: step 10 was in the warm-up or the decay: branch from stable_"):
        branch("resume_toy.pt", steps=20, decay=0.1)
    with pytest.raises(UserError, match="at step 6, after 0.0 minutes, this run would be in its warm-up or its decay"):
        branch("stable_toy.pt", steps=8, decay=0.5)
    with pytest.raises(UserError, match="at step 6, .* would be in its warm-up"):
        branch("stable_toy.pt", steps=20, warmup=9)
    with pytest.raises(UserError, match="another run than this one: train.lr was 0.1, is 0.2"):
        branch("stable_toy.pt", {"lr": 0.2}, steps=20, decay=0.1)
    branch("stable_toy.pt", steps=12, decay=0.5)  # whose stable phase ends with this very step
    assert rates(tmp_path / "b")[0] < 0.1


def test_a_new_run_leaves_no_stable_point_of_an_older_one(tmp_path: Path) -> None:
    model = Line()
    run(tmp_path, model, line_stage(model, 8), settings(steps=10, decay=0.4))
    assert (tmp_path / "stable_toy.pt").exists()
    run(tmp_path, model, line_stage(model, 8), settings(steps=10, decay=1.0))  # has no stable phase
    assert not (tmp_path / "stable_toy.pt").exists()


def test_the_usual_cosine_schedule_is_a_decay_of_all_that_is_left(tmp_path: Path) -> None:
    model = Line()
    run(tmp_path, model, line_stage(model, 8), settings(steps=10, warmup=0.2, decay=0.8, decay_shape="cosine"))
    by_hand = [0.25, 0.75, *(0.5 + 0.5 * math.cos(math.pi * (step + 0.5) / 8) for step in range(8))]
    assert rates(tmp_path) == pytest.approx([0.1 * x for x in by_hand])


# --- torch.compile ----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("asked", "compiler", "wanted", "why"),
    [
        ({"compile": False}, True, False, "as asked"),
        ({"compile": True}, True, True, "compiled, as asked"),
        ({"compile": True}, False, False, "no C++ compiler found"),
        ({"compile": "auto", "steps": 0, "minutes": 60.0}, False, False, "no C++ compiler found"),
        ({"compile": "auto", "steps": 0, "minutes": 60.0}, True, True, "60 minutes pay for it"),
        ({"compile": "auto", "steps": 0, "minutes": 15.0}, True, True, "15 minutes pay for it"),
        ({"compile": "auto", "steps": 0, "minutes": 14.9}, True, False, "14.9 minutes would not pay for it, 15 would"),
        ({"compile": "auto", "steps": 10**6, "minutes": 0.0}, True, False, "train.steps is set"),
        ({"compile": "auto", "steps": 10**6, "minutes": 60.0}, True, False, "train.steps is set"),
    ],
)  # fmt: skip
def test_when_a_run_is_compiled(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], compiler: bool, wanted: bool, why: str
) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: "/usr/bin/g++" if compiler else None)
    found, said = trainer.pick_compile(settings(**asked), CPU)
    assert found == wanted and why in said


def test_a_gpu_is_compiled_for_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "compiler", lambda: None)
    for there in (True, False):
        monkeypatch.setattr(
            trainer, "find_spec", lambda name, there=there: object() if there and name == "triton" else None
        )
        found, said = trainer.pick_compile(settings(compile=True), torch.device("cuda"))
        assert found == there and ("no Triton" in said) != there


def test_compiling_that_fails_is_said_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    tries = []

    def broken(network: Any, **_: Any) -> Any:
        def fail(*_: Any) -> None:
            tries.append(1)
            raise BackendCompilerFailed(network, RuntimeError("the linker is missing"), None)

        return fail

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(kernels, "compiler", lambda: "/usr/bin/g++")
    network = trainer.compiled(lambda x: 2 * x, settings(compile=True), CPU, RunLog(tmp_path, "toy", {}))
    assert [float(network(torch.tensor(x))) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    said = capsys.readouterr().out
    assert len(tries) == 1 and said.count("torch.compile failed") == 1 and "not compiled from here on" in said
    plain = lambda x: x  # noqa: E731
    assert trainer.compiled(plain, settings(), CPU, RunLog(tmp_path, "toy", {})) is plain


def test_a_compiled_run_has_the_losses_of_the_plain_one_and_resumes_bit_by_bit(tmp_path: Path) -> None:
    """A network of one small block, float32, with accumulation; the resumed run starts where the other was at step 3."""
    if kernels.compiler() is None:
        pytest.skip("no compiler")

    def train_gpt(out: str, steps: int, **changes: Any) -> tuple[GPT, list[float]]:
        model = tiny(n_layer=1, mlp="gelu", qk_norm=False).train()
        config = settings(lr=0.01, log_every=1, **{"steps": steps, "decay": 0.0, **changes})
        log = RunLog(tmp_path / out, "toy", {}, resume=config.resume)
        network = trainer.compiled(model.hidden_states, config, CPU, log)

        def batches(step: int) -> list[Batch]:
            return [Batch((part[:, :-1], part[:, 1:]), 2 * 16, 32) for part in random_ids(4, 17, seed=step).split(2)]

        def loss(batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            x, y = batch.inputs
            return linear_cross_entropy(network(x), model.lm_head.weight, y, torch.float32), {}

        stage = Stage("toy", batches, loss, lambda: {"w": 0.0}, lambda: "", 1.0)
        train(model, stage, config, ADAMW, tmp_path / out, log)
        return model, [
            row["loss"] for row in read_jsonl(tmp_path / out / "metrics_toy.jsonl") if row["kind"] == "train"
        ]

    _, losses = train_gpt("plain", 6)
    fast, same_losses = train_gpt("fast", 6, compile=True)
    assert same_losses == pytest.approx(losses, rel=1e-3) and losses[-1] != losses[0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1  # it was compiled
    (tmp_path / "fast" / "resume_toy.previous.pt").replace(tmp_path / "fast" / "resume_toy.pt")
    again, all_losses = train_gpt("fast", 6, compile=True, resume=True)
    assert all_losses == same_losses
    for (name, a), b in zip(again.named_parameters(), fast.parameters(), strict=True):
        assert torch.equal(a, b), name


PAGES = """
import resource, sys, torch
sys.path.insert(0, {root!r})
from pocketgpt import device
assert device.keep_freed_memory() if {keep} else True
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    # That of 40 MB is above 32 MB, from where on glibc never keeps a piece unless told; of smaller ones it learns to.
    activations = [torch.ones(n << 16) for n in (1, 5, 40, 3, 40, 2, 160, 7, 9, 20)]
    gradients = [a + 1 for a in activations]
for _ in range(25):  # holes grow until everything fits
    step()
before = faults()
for _ in range(4):
    step()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_of_a_step_is_not_taken_from_the_system_again() -> None:
    def faults(keep: bool) -> int:
        code = PAGES.format(root=str(Path(__file__).parents[1]), keep=keep)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)

    assert faults(keep=True) < faults(keep=False) / 4


def test_training_keeps_freed_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(trainer.machine, "keep_freed_memory", lambda: asked.append(True))
    model = Line()
    run(tmp_path, model, line_stage(model, 8), settings(steps=1))
    assert asked
