"""Several sources as one: exact shares, every source's own order, and the same picks for a resumed run."""

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume import call
from test_scripts import TINY, WORDS

import dpo
import pretrain
import sft
from pocketgpt.config import DataConfig
from pocketgpt.errors import UserError
from pocketgpt.metrics import read_jsonl
from pocketgpt.mixture import BLOCK, Mixture

weights = st.lists(st.floats(0.001, 1000), min_size=1, max_size=5)


@settings(max_examples=30)
@given(weights, st.integers(0, 5), st.integers(0, 3))
def test_every_block_holds_the_shares_to_one_row(given_weights, seed, block):
    mixture = Mixture(given_weights, seed)
    counts = Counter(mixture.pick(n)[0] for n in range(block * BLOCK, (block + 1) * BLOCK))
    for source, weight in enumerate(given_weights):
        assert abs(counts[source] - BLOCK * weight / sum(given_weights)) < 1 + 1e-6


def test_the_shares_are_exact_in_expectation():
    """A source that is due 0.3 rows a block gets one in 3 of 10 blocks."""
    share = 0.3 / BLOCK
    counts = [Mixture([share, 1 - share], seed)._draw(0)[0].tolist().count(0) for seed in range(2000)]
    assert set(counts) == {0, 1}
    assert np.mean(counts) == pytest.approx(0.3, abs=0.04)  # 4 standard deviations


@settings(max_examples=20)
@given(weights, st.integers(0, 5))
def test_each_source_gives_its_rows_in_order(given_weights, seed):
    mixture = Mixture(given_weights, seed)
    picks = [mixture.pick(n) for n in range(2 * BLOCK + 100)]
    for source in range(len(given_weights)):
        numbers = [k for s, k in picks if s == source]
        assert numbers == list(range(len(numbers)))
    # as a run finds them that begins there
    assert [Mixture(given_weights, seed).pick(n) for n in (5, BLOCK, 2 * BLOCK + 99)] == [
        picks[n] for n in (5, BLOCK, 2 * BLOCK + 99)
    ]


def test_sources_are_mixed_and_seeds_differ():
    picks = [[Mixture([1, 1], seed).pick(n)[0] for n in range(200)] for seed in range(2)]
    assert picks[0] != picks[1]
    assert 70 < sum(a != b for a, b in pairwise(picks[0])) < 130  # neither in runs nor in turns


def test_one_source_is_read_as_if_there_were_no_mixture():
    mixture = Mixture([0.1], 3)
    assert [mixture.pick(n) for n in (0, 1, BLOCK, 5 * BLOCK + 7)] == [(0, 0), (0, 1), (0, BLOCK), (0, 5 * BLOCK + 7)]


def test_the_rows_of_a_step():
    class Numbers:
        def __init__(self, name):
            self.name = name

        def row(self, number):
            return self.name, number

    mixture = Mixture([3, 1], 0)
    rows = mixture.rows([Numbers("a"), Numbers("b")], step=3, batch_size=5)
    assert rows == [("ab"[source], number) for source, number in map(mixture.pick, range(15, 20))]


# --- as configured --------------------------------------------------------------------------------------------------


def mixed(mix: dict[str, float] | None, **changes) -> DataConfig:
    return DataConfig(**({"kind": "mix", "path": "", "name": "", "subset": "", "split": "train", "streaming": False,
                          "limit": 7, "field": "body", "val_fraction": 0.2, "generate": 0, "mix": mix} | changes))  # fmt: skip


def test_parts_are_files_and_choices_of_data(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    first, second, third = mixed({str(file): 3, "smoltalk": 2, "instruct": 5}).parts()
    assert [(part.name, part.share) for part in (first, second, third)] == [
        (str(file), 0.3), ("smoltalk", 0.2), ("instruct", 0.5)
    ]  # fmt: skip
    assert (first.data.kind, first.data.path, first.data.limit, first.data.field) == ("mine", str(file), 7, "body")
    assert (second.data.kind, second.data.name, second.data.limit) == ("hub", "HuggingFaceTB/smoltalk", 50000)
    assert (third.data.kind, third.data.generate) == ("instruct", 30000)
    alone = mixed(None, kind="mine", path="x.jsonl")
    assert [(part.name, part.share, part.data) for part in alone.parts()] == [("x.jsonl", 1.0, alone)]


@pytest.mark.parametrize(
    ("mix", "changes", "complaint"),
    [
        (None, {}, r"data=mix needs 'data\.mix="),
        ({}, {}, r"data=mix needs 'data\.mix="),
        ({".": -1}, {}, r"the weight of \. is -1, it must be above 0"),
        ({".": 0}, {}, r"the weight of \. is 0"),
        ({".": float("nan")}, {}, r"the weight of \. is nan"),
        ({".": float("inf")}, {}, r"the weight of \. is inf"),
        ({"nowhere.jsonl": 1}, {}, r"nowhere\.jsonl is no file, no folder and none of fineweb_edu, instruct, "),
        ({"shakespeare": 1}, {}, r"data\.mix, shakespeare: data\.kind is 'shakespeare': this stage takes instruct"),
        ({".": 1}, {"path": "x"}, "data.path, data.name and data.generate are those of one source"),
        ({".": 1}, {"generate": 5}, "data.path, data.name and data.generate are those of one source"),
        ({".": 1}, {"limit": -1}, r"data\.mix, \.: data\.limit is -1"),
        ({".": 1}, {"kind": "mine", "path": "."}, "data.mix is set: choose data=mix"),
    ],
)
def test_bad_mixtures(mix, changes, complaint):
    with pytest.raises(UserError, match=complaint):
        mixed(mix, **changes).check(("instruct", "mine", "hub"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    lines = [" ".join(WORDS[i % 7 : i % 7 + 5]) + f" {i}." for i in range(600)]
    for name, some in (("a", lines[::2]), ("b", lines[1::2])):
        (folder / f"{name}.txt").write_text("\n".join(some))
        chats = [{"prompt": f"{name} {a}?", "completion": f"{b}"} for a, b in pairwise(WORDS)]
        (folder / f"{name}_chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
        pairs = [{"prompt": f"{name} {a}?", "chosen": a, "rejected": b} for a, b in pairwise(WORDS) if a != b]
        (folder / f"{name}_pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "empty.jsonl").write_text("\n")
    return folder


@pytest.mark.parametrize(
    ("name", "main", "own"),
    [("base", pretrain.main, ["vocab_size=280", "sample_tokens=2", *TINY]), ("sft", sft.main, []), ("dpo", dpo.main, [])],
)  # fmt: skip
def test_every_stage_trains_on_a_mixture(sources, name, main, own, capsys):
    kind = {"base": ".txt", "sft": "_chats.jsonl", "dpo": "_pairs.jsonl"}[name]
    mix = f"data.mix={{{sources}/a{kind}:3,{sources}/b{kind}:1}}"
    own = [*own, f"cache={sources}/cache"] if name == "base" else own
    common = ["data=mix", f"out={sources}/out", "device=cpu", "train.minutes=0", "train.steps=2", "train.batch_size=4",
              "train.micro_batch_size=2", "train.dtype=float32", "train.eval_every=2", "data.val_fraction=0.2"]  # fmt: skip
    call(main, [*common, *own, mix])
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"75.0% of training from {sources}/a{kind}, " in said
    assert f"25.0% of training from {sources}/b{kind}, " in said
    assert read_jsonl(sources / "out" / f"metrics_{name}.jsonl")[-1]["step"] == 2
    with pytest.raises(UserError, match=r"empty\.jsonl: there (are no rows|is no text)"):
        call(main, [*common, *own, mix.replace(f"b{kind}", "empty.jsonl")])


def test_pairs_are_drawn_by_weight_and_every_epoch_of_a_source_has_each_once(tok):
    pairs = [dpo.Pair([{"role": "user", "content": str(i)}], "yes", "no", source=int(i >= 20)) for i in range(24)]
    rows = dpo.PairRows(tok, pairs, 128, seed=0, shares=[0.25, 0.75])
    order = rows.order(range(BLOCK))
    small = [i for i in order if i >= 20]
    assert len(small) == BLOCK * 3 // 4
    for start in range(0, len(small), 4):
        assert sorted(small[start : start + 4]) == [20, 21, 22, 23]
    assert sorted([i for i in order if i < 20][:20]) == list(range(20))
    assert rows.order(range(100, 110)) == order[100:110]
