"""A run that is interrupted and resumed is the run that was not: every stage, every way to stop, on the CPU bit for bit."""

import itertools
import json
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_scripts import TINY, WORDS

import dpo
import pretrain
import sft
from pocketgpt import metrics, optim, trainer
from pocketgpt.errors import UserError
from pocketgpt.metrics import read_jsonl

STEPS = 4
CLOCK = {"tokens_per_s", "mfu", "memory_bytes", "elapsed_s", "loader_share"}  # what two runs cannot have in common
MAINS = {"base": pretrain.main, "sft": sft.main, "dpo": dpo.main}
FILES = {"base": ("base",), "sft": ("sft",), "dpo": ("control", "dpo")}  # the runs of a stage


class Killed(BaseException):
    """As much of a kill -9 as a test can survive: nothing runs after it that catches exceptions."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, conversations and pairs."""
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(400)]
    (folder / "text.txt").write_text("\n".join(lines))
    chats = [{"prompt": f"Say {a}.", "completion": f"{a} {b}"} for a, b in itertools.pairwise(WORDS)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    pairs = [{"prompt": f"Say {a}.", "chosen": a, "rejected": b} for a, b in itertools.pairwise(WORDS) if a != b]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder


def arguments(stage: str, data: Path, out: Path) -> list[str]:
    """Dropout, two micro-batches a step, a rate that changes at every step, saving at every second."""
    name = {"base": "text.txt", "sft": "chats.jsonl", "dpo": "pairs.jsonl"}[stage]
    own = {
        "base": [f"cache={data / 'cache'}", "vocab_size=280", "model.dropout=0.2", "sample_tokens=2", *TINY],
        "sft": ["data.val_fraction=0.2"],
        "dpo": ["data.val_fraction=0.2", "dpo.control_lr=0.01", "train.lr=0.01"],
    }[stage]
    return [
        "data=mine", f"data.path={data / name}", f"out={out}", "device=cpu", "train.minutes=0", f"train.steps={STEPS}",
        "train.batch_size=4", "train.micro_batch_size=2", "train.dtype=float32", "train.eval_every=2",
        "train.log_every=1", *own,
    ]  # fmt: skip


def call(main: Callable[[], None], arguments: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", *arguments])
        main()


def interrupted(main: Callable[[], None], arguments: list[str], at: int, how: int | type[BaseException]) -> Any:
    """Run until the optimizer's step number `at`, then a signal arrives, or the process dies. How it ended."""
    count = 0
    step = optim.Optimizer.step

    def counting(self: optim.Optimizer, scale: float) -> None:
        nonlocal count
        count += 1
        if count == at and not isinstance(how, int):
            raise how()
        step(self, scale)
        if count == at:
            signal.raise_signal(how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.Optimizer, "step", counting)
        with pytest.raises((SystemExit, Killed)) as end:
            call(main, arguments)
    return end.value.args[0] if end.value.args else None


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted runs of all stages."""
    out = tmp_path_factory.mktemp("whole")
    for stage, main in MAINS.items():
        call(main, arguments(stage, data, out))
    return out


def result(out: Path, name: str) -> tuple[Any, ...]:
    """All that a run leaves and that must not depend on interruptions."""
    resume = torch.load(out / f"resume_{name}.pt", weights_only=True)
    state = {key: value for key, value in resume["state"].items() if key != "elapsed"}
    rows = [{k: v for k, v in row.items() if k not in CLOCK} for row in read_jsonl(out / f"metrics_{name}.jsonl")]
    weights = torch.load(out / f"ckpt_{name}.pt", weights_only=True)["state_dict"]
    return weights, resume["model"], resume["optimizer"], state, rows


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("stage", "at", "how"),
    [
        ("base", 1, signal.SIGINT),
        ("base", 3, signal.SIGTERM),
        ("base", STEPS, signal.SIGINT),  # all steps are done, and nothing of what follows
        ("base", 4, Killed),
        ("sft", 2, signal.SIGTERM),
        ("sft", 4, Killed),
        ("dpo", 1, signal.SIGINT),
        ("dpo", STEPS, signal.SIGTERM),
        ("dpo", STEPS + 3, signal.SIGINT),
        ("dpo", STEPS + 4, Killed),
    ],
)
def test_interrupted_and_resumed_is_as_if_nothing_had_been(
    whole: Path, data: Path, tmp_path: Path, stage: str, at: int, how: Any
) -> None:
    for name in ("ckpt_base.pt", "ckpt_sft.pt") if stage != "base" else ():
        shutil.copy(whole / name, tmp_path)
    given = arguments(stage, data, tmp_path)
    code = interrupted(MAINS[stage], given, at, how)
    assert code == (None if how is Killed else 128 + how)
    with (tmp_path / f"metrics_{FILES[stage][0]}.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # what a kill leaves of a line
    call(MAINS[stage], [*given, "train.resume=true"])
    for name in FILES[stage]:
        for part, ours, theirs in zip(
            ("weights", "model", "optimizer", "state", "log"), result(tmp_path, name), result(whole, name), strict=True
        ):
            assert same(ours, theirs), (name, part)
    steps = [
        row["step"] for row in read_jsonl(tmp_path / f"metrics_{FILES[stage][-1]}.jsonl") if row["kind"] == "train"
    ]
    assert steps == [1, 2, 3, 4]


def test_the_comparison_sees_a_different_seed_and_the_same_seed_gives_the_same_run(
    whole: Path, data: Path, tmp_path: Path
) -> None:
    call(pretrain.main, arguments("base", data, tmp_path / "again"))
    assert same(result(whole, "base"), result(tmp_path / "again", "base"))
    call(pretrain.main, [*arguments("base", data, tmp_path / "other"), "train.seed=2"])
    for ours, theirs in zip(result(whole, "base")[:3], result(tmp_path / "other", "base")[:3], strict=True):
        assert not same(ours, theirs)


@pytest.fixture
def half(whole: Path, data: Path, tmp_path: Path) -> list[str]:
    """The arguments of a pretraining run that was interrupted in its second step."""
    given = arguments("base", data, tmp_path / "out")
    interrupted(pretrain.main, given, 2, signal.SIGINT)
    return given


def test_a_changed_configuration_is_named_and_refused_unless_forced(
    half: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (tmp_path / "out" / "resume_base.pt").read_bytes()
    changed = [*half, "train.lr=0.001", "model.dropout=0.1", "prompt=O"]
    with pytest.raises(UserError) as refusal:
        call(pretrain.main, [*changed, "train.resume=true"])
    line = str(refusal.value)
    for part in (
        "resume_base.pt",
        "train.lr was 0.003, is 0.001",
        "model.dropout was 0.2, is 0.1",
        "prompt was ROMEO.",
    ):
        assert part in line
    assert "train.resume=force" in line and "seed" not in line
    assert (tmp_path / "out" / "resume_base.pt").read_bytes() == before
    call(pretrain.main, [*changed, "train.resume=force"])
    assert "resuming although this has changed: " in capsys.readouterr().out
    rates = [row["lr"] for row in read_jsonl(tmp_path / "out" / "metrics_base.jsonl") if row["kind"] == "train"]
    assert rates[2] / rates[1] < 0.5  # what is set now counts


def test_a_base_model_branches_from_its_stable_phase(whole: Path, data: Path, tmp_path: Path) -> None:
    """With Muon, dropout and accumulation: a run of four steps becomes the run that was meant to have seven."""

    def given(out: str, *more: str) -> list[str]:
        return [*arguments("base", data, tmp_path / out), "train.warmup=1", *more]

    longer = ("train.steps=7", "train.decay=0.4", "train.decay_shape=cosine")
    call(pretrain.main, given("long", *longer))
    call(pretrain.main, given("short", "train.decay=0.25"))
    source = tmp_path / "short" / "stable_base.pt"
    call(pretrain.main, given("branch", *longer, f"train.resume={source}"))
    ours, theirs = result(tmp_path / "branch", "base"), result(tmp_path / "long", "base")
    assert same(ours[:4], theirs[:4]) and not same(ours[0], result(tmp_path / "short", "base")[0])
    assert [row["step"] for row in ours[4] if row["kind"] == "train"] == [4, 5, 6, 7]
    assert ours[4] == [row for row in theirs[4] if row["step"] > 3]
    with pytest.raises(UserError, match="another run than this one: train.lr was 0.003, is 0.1"):
        call(pretrain.main, given("branch", *longer, f"train.resume={source}", "train.lr=0.1"))
    with pytest.raises(UserError, match="control and DPO cannot both branch from it"):
        call(dpo.main, [*arguments("dpo", data, tmp_path / "dpo"), f"train.resume={source}"])


def test_a_run_may_move(half: list[str], tmp_path: Path, data: Path) -> None:
    """Where things lie is not what they are."""
    shutil.copytree(tmp_path / "out", tmp_path / "elsewhere", symlinks=True)
    shutil.copy(data / "text.txt", tmp_path / "moved.txt")
    moved = [f"out={tmp_path / 'elsewhere'}" if a.startswith("out=") else a for a in half]
    moved = [f"data.path={tmp_path / 'moved.txt'}" if a.startswith("data.path=") else a for a in moved]
    call(pretrain.main, [*moved, "train.resume=true"])


def test_what_lack_of_memory_asks_for_may_change(
    half: list[str], whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Moments stay where they are on a CPU, which is said; recomputing gives the same bits, other micro-batches other dropout."""
    call(pretrain.main, [*half, "train.recompute=true", "optim.offload=true", "train.resume=true"])
    assert capsys.readouterr().out.count("optim.offload: moments on cpu are in main memory anyway") == 1
    assert same(result(tmp_path / "out", "base"), result(whole, "base"))
    with pytest.raises(UserError, match=r"parallel=fsdp: moments are divided .* or set optim.offload=false"):
        call(pretrain.main, [*half, "optim.offload=true", "parallel=fsdp"])
    given = arguments("base", data, tmp_path / "smaller")
    interrupted(pretrain.main, given, 2, signal.SIGINT)
    call(pretrain.main, [*given, "train.micro_batch_size=1", "train.resume=true"])
    assert torch.load(tmp_path / "smaller" / "ckpt_base.pt", weights_only=True)["step"] == STEPS


def test_data_that_has_changed_is_named(whole: Path, data: Path, tmp_path: Path) -> None:
    files = tmp_path / "texts"
    files.mkdir()
    text = (data / "text.txt").read_text()
    for name in ("a.txt", "b.txt"):
        (files / name).write_text(f"{name}\n{text}")
    given = [f"data.path={files}" if a.startswith("data.path=") else a for a in arguments("base", data, tmp_path / "o")]
    interrupted(pretrain.main, given, 2, signal.SIGINT)
    (files / "b.txt").write_text(text)
    (files / "c.txt").write_text(text)
    with pytest.raises(UserError) as refusal:
        call(pretrain.main, [*given, "train.resume=true"])
    line = str(refusal.value)
    assert "files.b.txt was " in line and "files.c.txt was None" in line and "text was " in line
    assert "a.txt" not in line


def test_another_start_is_named(whole: Path, data: Path, tmp_path: Path) -> None:
    for name in ("ckpt_base.pt", "ckpt_sft.pt"):
        shutil.copy(whole / name, tmp_path)
    given = arguments("sft", data, tmp_path)
    interrupted(sft.main, given, 2, signal.SIGINT)
    shutil.copy(whole / "ckpt_sft.pt", tmp_path / "ckpt_base.pt")
    with pytest.raises(UserError, match="another run than this one: start was "):
        call(sft.main, [*given, "train.resume=true"])


def test_a_damaged_resume_file_gives_way_to_the_one_before(
    whole: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments("base", data, tmp_path)
    interrupted(pretrain.main, given, 3, signal.SIGINT)
    path = tmp_path / "resume_base.pt"
    assert torch.load(path, weights_only=True)["state"]["step"] == 3
    assert torch.load(trainer.previous(path), weights_only=True)["state"]["step"] == 2
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    call(pretrain.main, [*given, "train.resume=true"])
    out = capsys.readouterr().out
    assert "resume_base.pt: not a readable checkpoint (wrong checksum of " in out
    assert "going on from the one before it, " in out and "resumed at step 2" in out
    assert same(result(whole, "base"), result(tmp_path, "base"))
    for file in (path, trainer.previous(path)):
        file.write_bytes(damaged)
    with pytest.raises(UserError, match="resume_base.previous.pt: not a readable checkpoint"):
        call(pretrain.main, [*given, "train.resume=true"])


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    started: list[dict[str, Any]] = []

    class Run:
        log = finish = print

    def init(**given: Any) -> Run:
        started.append(given)
        return Run()

    monkeypatch.setattr(wandb, "login", lambda **given: True)
    monkeypatch.setattr(wandb, "init", init)
    for resume in (False, True, "force", False):
        metrics.RunLog(tmp_path, "base", {}, "wandb", resume)
    ids = [given["id"] for given in started]
    assert ids[0] == ids[1] == ids[2] != ids[3] and all(given["resume"] == "allow" for given in started)
