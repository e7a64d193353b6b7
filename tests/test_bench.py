"""What the benchmarks time: the same weights in every form, a model that copies, and the arithmetic. Nothing is timed here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from base_model import GPT, GPTConfig
from pocketgpt import checkpoint, config, gguf_file
from pretrain import Config as PretrainConfig

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # which is no package: its files are run

import scale as bench_scale
import train as bench_train
import weights


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights.prepare(tmp_path_factory.mktemp("bench"), weights.SHAPES["tiny"], 0, weights.GGUF_TYPES, True)


def test_every_form_holds_the_same_weights(prepared: Path) -> None:
    right = weights.random_model(weights.SHAPES["tiny"], 0).state_dict()
    folder = checkpoint.load(prepared / "hf")
    assert all(torch.equal(folder.state_dict[name], tensor) for name, tensor in right.items())
    # Of the largest number in a row: bfloat16 keeps 8 bits of each, Q8_0 divides 32 numbers by a step of 1/127.
    for kind, error in (("float32", 0.0), ("bfloat16", 2**-8), ("int8", 0.5 / 127 + 2**-11)):
        found = gguf_file.load(prepared / f"{kind}.gguf").state_dict
        assert found.keys() == right.keys(), kind
        for name, tensor in right.items():
            assert (found[name] - tensor).abs().max() <= error * tensor.abs().max(), (kind, name)


def test_the_copying_model_repeats_its_passage(prepared: Path) -> None:
    passage = [weights.PERIOD + i for i in range(weights.PERIOD)]
    model = GPT.from_checkpoint(prepared / "copying")
    model.n_tokens = model.config.vocab_size
    out = model.generate(torch.tensor([passage[:40]]), 2 * weights.PERIOD - 40, temperature=0.0)[0]
    assert out.tolist() == passage * 2


def test_what_is_there_is_kept(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    again = weights.prepare(prepared.parent, weights.SHAPES["tiny"], 0, ["float32"], False)
    assert again == prepared
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


@pytest.mark.parametrize("shape", bench_train.SHAPES)
def test_contenders_have_as_many_parameters(shape: str) -> None:
    counts = []
    for kind in ("gpt2", "llama", "qwen3"):
        keys = bench_train.model_keys(kind, *bench_train.SHAPES[shape])
        cfg = config.load("pretrain", PretrainConfig, keys)
        assert cfg.model["block_size"] == bench_train.block_size(kind)
        with torch.device("meta"):
            counts.append(GPT(GPTConfig.from_dict(cfg.model | {"vocab_size": 4096})).n_parameters())
    assert max(counts) <= (1.02 if shape != "tiny" else 1.05) * min(counts), counts


def test_time_to_a_baseline_is_the_smallest_budget_that_reaches_it() -> None:
    points = [(6.0, 2.9), (12.0, 2.6), (20.0, 2.5), (30.0, 2.55)]
    assert bench_train.reached(points, 2.6) == 12.0
    assert bench_train.reached(points, 2.55) == 20.0
    assert bench_train.reached(points, 2.4) is None
    assert bench_train.reached([], 2.4) is None


@pytest.mark.parametrize("least", [1, 3, 10, 33, 60, 61])
def test_the_search_ends_at_the_smallest_budget(least: int) -> None:
    ladder = [3, 6, 10, 15, 20, 30, 40, 60]
    tried: dict[float, float] = {}
    while (budget := bench_train.next_budget(tried, 2.5, ladder, 6)) is not None:
        assert budget not in tried
        assert tried or budget == 6  # the goal comes first
        tried[budget] = 2.4 if budget >= least else 2.6
    right = min((budget for budget in ladder if budget >= least), default=None)
    assert bench_train.reached(list(tried.items()), 2.5) == right
    assert len(tried) <= 4


def test_rates_of_a_stage_leave_out_its_first_step() -> None:
    def step(n: int, seconds: float) -> dict[str, float | str]:
        row = {"kind": "train", "step": n, "tokens": 100 * n, "elapsed_s": seconds, "loss": 5.0}
        return row | {"tokens_per_s": 50.0, "mfu": 0.2, "memory_bytes": 10 * n}

    held = {"kind": "val", "step": 5, "bits_per_byte": 2.0}
    found = bench_train.summary([step(1, 30.0), step(3, 34.0), step(5, 38.0), held], nats=0.5)
    assert found["tokens_per_s"] == 400 / 8
    assert found["mfu"] == pytest.approx(0.2)
    assert (found["seconds"], found["first_step_s"], found["tokens"], found["peak_bytes"]) == (38.0, 30.0, 500, 50)
    assert found["curve"][0] == (30.0, 100, 2.5)
    assert found["held_out"] is held
    assert bench_train.summary([step(1, 30.0), held])["tokens_per_s"] is None


def test_the_last_line_of_the_training_benchmark(tmp_path: Path) -> None:
    keys = ["quick=true", f"work={tmp_path / 'work'}", f"out={tmp_path / 'out'}", "device=cpu"]
    bench = bench_train.Bench(config.load("bench/train", bench_train.Config, keys))
    run = {"seed": 1, "tokens_per_s": 3000.0, "mfu": 0.3}
    bench.rows = [
        run | {"contender": "f32", "seconds": 60.0, "bits_per_byte": 2.6, "tokens_per_s": 1000.0},
        run | {"contender": "ours", "seconds": 6.0, "bits_per_byte": 2.7},
        run | {"contender": "ours", "seconds": 12.0, "bits_per_byte": 2.5},
        run | {"contender": "adamw", "seconds": 30.0, "bits_per_byte": 2.4},
    ]
    mine = {"samples_per_s": 30.0, "metric": 1.5}
    found = bench.results(
        {"sft": {"ours": mine, "trl": mine | {"samples_per_s": 10.0}}, "dpo": {"ours": mine, "trl": None}}
    )
    assert found["time_to_baseline_f32"] == 0.2
    assert found["time_to_baseline_bf16"] is None  # there was no such run
    assert found["time_to_adamw"] is None  # no run of ours reached it
    assert (found["tokens_per_s_vs_f32"], found["tokens_per_s_vs_transformers"], found["mfu"]) == (3.0, None, 0.3)
    assert (found["sft_vs_trl"], found["dpo_vs_trl"]) == (3.0, None)
    assert found["dpo_metric"] == {"ours": 1.5}
    assert "machine" in json.loads(json.dumps(found))


def test_a_missing_peer_is_named() -> None:
    bench = Path(bench_train.__file__).parent
    code = (
        "import peers, sys; peers.find_spec = lambda name: None; sys.argv = ['', '{\"kind\": \"dpo\"}']; peers.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=bench, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"missing": "transformers, accelerate, trl, psutil not installed"}


def test_exchanges_of_several_processes() -> None:
    """Four steps of two seconds. In the last two, which count, the first process waits for 0.5 s in each exchange, the
    second for 0.1 s; one exchange takes it 0.7 s."""
    first = [(2.0 * step, [0.5, 0.5]) for step in range(4)]
    second = [(2.0 * step + 0.1, [0.1, 0.7] if step == 3 else [0.1, 0.1]) for step in range(4)]
    first[0] = (0.0, [9.0] * 7)  # the warm-up has exchanges of its own
    found = bench_scale.shares([first, second])
    assert found["step_s"] == [2.0, 2.0]
    assert found["communication_share"] == pytest.approx((4 * 0.5 + 0.1 * 3 + 0.7) / 2 / 4)
    assert found["exchange_share"] == pytest.approx((0.1 + 0.1 + 0.1 + 0.5) / 4)
    assert bench_scale.shares([first])["communication_share"] == pytest.approx(2.0 / 4)


def test_the_last_line_of_the_scaling_benchmark() -> None:
    def shared(processes: int, seconds: list[float], loss: list[float], share: float) -> dict:
        run = {
            "kind": "shared",
            "round": 1,
            "processes": processes,
            "step_tokens": 100,
            "step_s": seconds,
            "loss": loss,
        }
        return run | {"communication_share": share, "exchange_share": share / 2, "loader_share": 0.0, "held_out": 2.5}

    rows = [
        shared(2, [1.0, 1.0, 9.0], [3.0, 2.0], 0.1),
        shared(4, [0.5], [3.0, 2.25], 0.2),
        {"kind": "apart", "round": 1, "processes": 4, "step_tokens": 100, "step_s": [0.4]},
        shared(2, [1.0, 1.0], [3.0, 2.0], 0.3),
        shared(4, [0.7, 0.8], [3.0, 2.25], 0.2),
    ]
    found = bench_scale.results(rows)
    assert found["tokens_per_s"] == {"2": 100.0, "4": round(100 / 0.7, 1)}
    assert found["scaling_efficiency"] == {"2": 1.0, "4": round(0.5 / 0.7, 3)}
    assert found["efficiency_apart"] == {"4": 1.25}
    assert found["communication_share"] == {"2": 0.2, "4": 0.2}
    assert found["loss_distance"] == {"2": 0.0, "4": 0.25}
