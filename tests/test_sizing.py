"""model=auto: the choice of a size, given a speed."""

import itertools
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume import call, interrupted

import pretrain
from base_model import GPT, GPTConfig
from pocketgpt import config, distributed, sizing
from pocketgpt.errors import UserError
from pocketgpt.optim import OptimConfig
from pocketgpt.sizing import Curve, Speed

MUON = OptimConfig("muon", 0.9, 0.95, 1e-8, 0.1, 0.02, 0.95)
QWEN3 = config.load("pretrain", pretrain.Config, ["model=auto"]).model


def line(start: float, slope: float) -> Curve:
    return Curve(((0.0, start), (1e12, start + slope * 1e12)))


# About what a processor with 2 cores does: 6 x 192 trains some 6,000 tokens/s.
CPU = Speed(line(1e-5, 8e-12), line(1e-3, 1e-11), 1e12, "measured: ...")


def network(sizes: dict[str, int]) -> GPT:
    return GPT(GPTConfig.from_dict(QWEN3 | sizes))


SIZES = sizing.ladder(network, MUON, 512)


def parameters(choice: sizing.Choice) -> int:
    return next(size.parameters for size in SIZES if size.model == choice.model)


def choose(minutes: float, text: float = 1e12, speed: Speed = CPU, **more: Any) -> sizing.Choice:
    return sizing.choose(SIZES, speed, minutes, 512, [(text, 1.0)], 4096, **more)


def test_the_ladder_goes_up_from_300_thousand_to_300_million_parameters_in_small_steps() -> None:
    counts = [size.parameters for size in SIZES]
    assert 0.3e6 < counts[0] < 0.5e6 and 250e6 < counts[-1] < 350e6
    assert all(1 < b / a < 2.5 for a, b in itertools.pairwise(counts))
    default = GPT(GPTConfig())
    assert {name for name, _ in network(SIZES[6].model).named_parameters()} == {
        n for n, _ in default.named_parameters()
    }
    assert sizing.sizes_of(6, 192) == {"n_layer": 6, "n_embd": 192, "n_head": 3, "n_kv_head": 1}  # the default


def test_optimizer_work_is_what_newton_schulz_multiplies() -> None:
    model = network(sizing.sizes_of(2, 64))
    # a block has four square matrices and three of the MLP
    square = 4 * (4 * 64**3 + 2 * 64**3)
    wide = 4 * (4 * 64 * 64 * 192 + 2 * 64**3)
    assert sizing.optimizer_work(model, MUON) == 2 * (4 * square + 3 * wide)
    assert sizing.optimizer_work(model, OptimConfig("adamw", 0.9, 0.95, 1e-8, 0.1, 0, 0)) == model.n_parameters()


@settings(deadline=None, max_examples=60)
@given(
    minutes=st.floats(0.1, 1e4),
    more=st.floats(1.01, 100),
    text=st.floats(1e5, 1e12),
    start=st.floats(0, 1e-4),
    slope=st.floats(1e-15, 1e-10),
    step=st.floats(1e-16, 1e-10),
)
def test_more_time_never_gives_a_smaller_model(
    minutes: float, more: float, text: float, start: float, slope: float, step: float
) -> None:
    speed = Speed(line(start, slope), line(0.0, step), 1e18)
    few, many = choose(minutes, text, speed), choose(minutes * more, text, speed)
    assert parameters(many) >= parameters(few)
    assert few == choose(minutes, text, speed)  # and the same again
    for choice in (few, many):
        assert parameters(choice) <= sizing.PARAMETERS_PER_TOKEN * text or choice.model == SIZES[0].model
        assert 1 <= choice.micro_batch_size <= min(8, choice.batch_size)
        assert choice.steps * choice.batch_size * 512 <= 1.01 * sizing.EPOCHS * text + choice.batch_size * 512


def test_choices_by_hand() -> None:
    picked = [parameters(choose(minutes)) / 1e6 for minutes in (0.5, 10, 600, 100_000)]
    assert picked == sorted(set(picked)) and picked[0] < 0.5 and picked[-1] > 50
    faster = Speed(line(0.0, 8e-15), line(0.0, 0.0), 1e18)
    assert parameters(choose(10, speed=faster)) > 15e6
    # the peak of the machine bounds what two small measurements promise
    free = Speed(line(1e-6, 0.0), line(0.0, 0.0), 1e12)
    assert free.per_token(1e9) == 1e-3 and free.per_token(1e3) == 1e-6


def test_the_expected_run_is_the_arithmetic_of_the_law() -> None:
    size = SIZES[6]
    run = sizing.expect(size, Speed(line(0.0, 1e-11), line(0.05, 0.0), 1e15), 600, 512, [(1e12, 1.0)])
    free = 600 / (1e-11 * size.flops_per_token)
    batch = 0.2920 * (size.flops_per_token * free) ** 0.3271
    assert run.tokens == pytest.approx(600 / (1e-11 * size.flops_per_token + 0.05 / batch)) and run.seconds == 600
    assert run.loss == pytest.approx(1.8172 + 482.01 / size.parameters**0.3478 + 2085.43 / run.tokens**0.3658)
    assert run.batch_size in (8, 16) and not run.ends_early
    two = sizing.expect(size, Speed(line(0.0, 1e-11), line(0.0, 0.0), 1e15), 600, 512, [(1e12, 1.0)], world=2)
    assert two.tokens == pytest.approx(2 * free) and two.batch_size >= 2


def test_text_counts_up_to_four_epochs_of_each_source_and_then_the_run_ends() -> None:
    speed = Speed(line(0.0, 1e-11), line(0.0, 0.0), 1e15)
    once = sizing.expect(SIZES[0], speed, 6000, 512, [(50_000, 1.0)])
    assert once.tokens == 200_000 and once.epochs == pytest.approx(4) and once.ends_early and once.seconds < 6000
    both = sizing.expect(SIZES[0], speed, 6000, 512, [(50_000, 0.5), (100_000, 0.5)])
    assert both.tokens == 800_000  # the first is over after half of them
    assert both.loss == pytest.approx(sizing.LAW(SIZES[0].parameters, 600_000))
    choice = choose(6000, 50_000, speed)
    assert choice.steps == round(200_000 / choice.batch_size / 512) and "more than 4 epochs teach little" in choice.why


def test_what_does_not_fit_is_not_taken() -> None:
    best = choose(600)
    smaller = choose(600, fits=lambda size, rows: size.parameters < parameters(best))
    assert parameters(smaller) < parameters(best) and "among those that fit into memory" in smaller.why
    with pytest.raises(UserError, match="not even the smallest"):
        choose(600, fits=lambda size, rows: False)


def test_the_table_marks_the_chosen_size() -> None:
    choice = choose(10)
    lines = choice.why.splitlines()
    assert lines[0] == "model=auto for 10 minutes; measured: ..."
    (marked,) = [line for line in lines if line.startswith("> ")]
    assert f"{choice.model['n_layer']} x {choice.model['n_embd']}" in marked and marked.endswith("+0.00")
    rest = [line for line in lines[2:-1] if line != marked]
    assert rest and all(float(line.split()[-1]) >= 0 for line in rest)
    assert lines[-1].startswith("chosen ") and lines[-1].endswith("the end after 10 minutes")


def test_a_curve_goes_through_its_points_and_never_falls() -> None:
    curve = Curve(((1, 3), (3, 7), (7, 8)))
    assert [curve(x) for x in (0, 1, 2, 3, 5, 7, 11)] == [1, 3, 5, 7, 7.5, 8, 9]
    assert [Curve(((1, 1), (2, 4)))(x) for x in (0.5, 1, 1.5)] == [0.5, 1, 2.5]  # the line would be below 0 at 0.5
    assert [Curve(((1, 4), (2, 3)))(x) for x in (1, 2, 9)] == [4, 4, 4]


def test_a_measurement_is_of_all_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sizing.PROBES, "cpu", ((2, 64), (4, 64)))
    monkeypatch.setitem(sizing.AT_ONCE, "cpu", 64)

    def short(sizes: dict[str, int]) -> GPT:
        return GPT(GPTConfig.from_dict(QWEN3 | sizes | {"block_size": 32, "vocab_size": 300}))

    speed = sizing.measure(short, MUON, 32, torch.device("cpu"), torch.float32)
    assert speed.per_token(1e6) > 0 and speed.step(1e6) > 0 and speed.peak > 0
    assert "2 x 64" in speed.about and "4 x 64" in speed.about and "ms per optimizer step" in speed.about


# --- pretrain.py ------------------------------------------------------------------------------------------------------


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    words = random.Random(0).choices(
        "the king and queen of the forest walked by a river of gold silver bread".split(), k=6000
    )
    (tmp_path / "text.txt").write_text("\n".join(" ".join(words[i : i + 12]) for i in range(0, 6000, 12)))
    monkeypatch.setattr(sizing, "measure", lambda *_: CPU)
    return [
        "data=mine", f"data.path={tmp_path / 'text.txt'}", f"cache={tmp_path / 'cache'}", f"out={tmp_path / 'out'}", "device=cpu",
        "vocab_size=280", "model=auto", "model.block_size=32", "train.minutes=0.1", "train.dtype=float32", "sample_tokens=1",
        "train.eval_every=1000000",
    ]  # fmt: skip


def test_a_resumed_run_keeps_what_was_chosen(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(pretrain.main, arguments, 2, signal.SIGINT)
    said = capsys.readouterr().out
    assert "model=auto for 0.1 minutes" in said and "> " in said
    before = yaml.safe_load((tmp_path / "out" / "config_base.yaml").read_text())
    assert (
        before["model"]["n_embd"] == 64 and before["train"]["batch_size"] >= 1 and before["model"]["block_size"] == 32
    )
    # On another machine another size would be chosen, but is not.
    monkeypatch.setattr(sizing, "measure", lambda *_: pytest.fail("chosen again"))
    state = torch.load(tmp_path / "out" / "resume_base.pt", weights_only=True)
    state["state"]["elapsed"] = 5.99  # seconds: the end is near
    torch.save(state, tmp_path / "out" / "resume_base.pt")
    call(pretrain.main, [*arguments, "train.resume=true"])
    after = yaml.safe_load((tmp_path / "out" / "config_base.yaml").read_text())
    assert after["model"] == before["model"] and after["train"] == before["train"] | {"resume": True}
    assert "as the run that is resumed has chosen" in capsys.readouterr().out
    trained = torch.load(tmp_path / "out" / "ckpt_base.pt", weights_only=True)
    assert trained["config"]["n_embd"] == 64 and trained["run_config"]["model"] == before["model"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.steps=3"], "train.steps=0"),
        (["train.minutes=0", "train.steps=3"], "set train.minutes"),
        (["model.n_layer=2"], "set none of them"),
        (["train.resume=true"], "nothing to resume from"),
    ],
)
def test_what_auto_cannot_do_is_said(arguments: list[str], changes: list[str], message: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain.py", *arguments, *changes])
    with pytest.raises(UserError, match=message) as error:
        pretrain.main()
    assert "\n" not in str(error.value)


def test_the_first_process_decides_for_all(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process only hears the choice."""
    cfg = config.load("pretrain", pretrain.Config, arguments)
    corpus = pretrain.open_corpus(cfg.data, cfg.vocab_size, Path(cfg.cache))
    theirs = sizing.Choice(sizing.sizes_of(4, 64), 6, 3, 0, "because")
    monkeypatch.setattr(distributed, "from_main", lambda make: theirs)
    assert pretrain.settle(cfg, corpus, torch.device("cpu"), torch.float32) == "because"
    assert (cfg.model["n_layer"], cfg.model["n_embd"], cfg.train.batch_size, cfg.train.micro_batch_size) == (
        4,
        64,
        6,
        3,
    )
