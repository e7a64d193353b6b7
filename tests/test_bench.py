"""What the benchmarks time: the same weights in every form, and a model that copies. Nothing is timed here."""

import sys
from pathlib import Path

import pytest
import torch

from base_model import GPT
from pocketgpt import checkpoint, gguf_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))  # which is no package: its files are run

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
