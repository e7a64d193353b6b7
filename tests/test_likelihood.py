"""Log-likelihoods: against a plain loop that runs one text at a time, without a cache, and against numbers known in advance."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from base_model import GPT
from kv_cache import CachedGPT
from pocketgpt import likelihood
from pocketgpt.likelihood import Encoded, batches, encode_pair, ratio_interval, segments, text_bits, windows
from pocketgpt.tokenizer import Tokenizer
from tests.helpers import BLOCK, SHAPES, VOCAB, cached, random_ids, tiny

MODELS = {name: cached(tiny(**SHAPES[name])) for name in ("qwen3", "qwen3 gqa", "gpt2", "llama untied")}
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def log_prob(model: GPT, before: list[int], token: int) -> float:
    """log p(token) after these ids, by the plain forward pass."""
    with torch.no_grad():
        logits = model.lm_head(model.hidden_states(torch.tensor([before])))[0, -1]
    return float(logits.double().log_softmax(-1)[token])


# --- how work is cut ------------------------------------------------------------------------------------------------


@given(lengths, st.integers(1, 200))
def test_batches_take_everything_once_and_stay_within_their_size(sizes: list[int], most: int) -> None:
    groups = batches(sizes, most)
    assert sorted(i for group in groups for i in group) == list(range(len(sizes)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(sizes[i] for i in group) <= most
    firsts = [sizes[group[0]] for group in groups]
    assert firsts == sorted(firsts, reverse=True), "the largest comes first, so that a lack of memory shows at once"


@given(st.integers(1, 200), st.integers(1, 40), st.data())
def test_windows_count_every_token_once(length: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context))
    found = windows(length, context, stride)
    assert [t for _, first, end in found for t in range(first, end)] == list(range(length))
    for begin, first, end in found:
        assert 0 <= begin <= first < end <= length and end - begin <= context
        assert begin == 0 or first - begin >= context - stride, "what is counted has this much before it"
        assert begin == 0 or end - begin == context


def test_windows_as_drawn_in_the_docs() -> None:
    assert windows(10, 4, 2) == [(0, 0, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert windows(7, 4, 2) == [(0, 0, 4), (2, 4, 6), (3, 6, 7)]
    assert windows(4, 4, 1) == [(0, 0, 4)]
    assert windows(9, 4, 4) == [(0, 0, 4), (4, 4, 8), (5, 8, 9)]


# --- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stride", [1, 10, BLOCK])
def test_documents_equal_a_plain_loop(name: str, stride: int) -> None:
    """Token t is counted in the first window that reaches it; that window's last BLOCK ids are all the model sees."""
    model = MODELS[name]
    documents = [random_ids(n, seed=n).numpy() for n in (1, 20, BLOCK, BLOCK + 1, 75)]
    got = likelihood.document_log_probs(model, documents, 5, stride=stride, batch_tokens=100)
    for ids, values in zip(documents, got, strict=True):
        text = [5, *ids.tolist()]
        for t in range(0, len(ids), 7):
            end = BLOCK
            while end <= t:
                end = min(end + stride, len(ids))
            begin = max(0, end - BLOCK)
            assert values[t] == pytest.approx(log_prob(model, text[begin : t + 1], text[t + 1]), abs=1e-4)


def test_documents_do_not_depend_on_the_batch() -> None:
    documents = [random_ids(n, seed=n).numpy() for n in (0, 3, 90, 33, 3, 60)]
    seen: list[int] = []
    run = lambda most: likelihood.document_log_probs(  # noqa: E731
        MODELS["qwen3"], documents, 5, stride=9, batch_tokens=most, tick=seen.append
    )
    for alone, together in zip(run(1), run(10_000), strict=True):
        np.testing.assert_allclose(alone, together, atol=1e-5)
    assert sum(seen) == 2 * sum(map(len, documents)), "progress is counted to the end"


def test_a_model_that_knows_nothing_pays_log2_of_its_vocabulary_per_token(tok: Tokenizer) -> None:
    model = tiny(vocab_size=tok.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    texts = ["The keeper lit the lamp. " * 9, "é🎉\n"]
    tokens = [np.array(ids) for ids in tok.encode_batch(texts)]
    log_probs = likelihood.document_log_probs(model, tokens, tok.eot_id, stride=16)
    result = text_bits(texts, tokens, log_probs, tok.byte_lengths())
    n, size = sum(map(len, tokens)), 9 * 25 + 2 + 4 + 1
    assert result["bits_per_byte"] == pytest.approx(n * math.log2(tok.vocab_size) / size, abs=1e-6)
    assert (result["documents"], result["tokens"], result["bytes"]) == (2, n, size)


# --- intervals ------------------------------------------------------------------------------------------------------


def test_ratio_interval_of_equal_weights_is_that_of_the_mean() -> None:
    half = 1.96 * 1 / math.sqrt(3)  # deviation 1, three draws
    assert ratio_interval([1, 2, 3], [1, 1, 1]) == pytest.approx((2 - half, 2 + half))
    assert ratio_interval([2, 4, 6], [1, 2, 3]) == pytest.approx((2, 2)), "no draw differs from the ratio"
    assert ratio_interval([2], [1]) is None


def test_ratio_interval_is_that_of_a_bootstrap_and_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(500):
        below = rng.uniform(50, 500, 60)
        above = 2 * below + rng.normal(0, 60, 60)
        low, high = ratio_interval(above, below) or (0, 0)
        hits += low <= 2 <= high
    assert 0.92 < hits / 500 < 0.98
    picks = rng.integers(60, size=(4000, 60))
    ratios = above[picks].sum(1) / below[picks].sum(1)
    np.testing.assert_allclose((low, high), np.quantile(ratios, (0.025, 0.975)), atol=0.15 * (high - low))


def test_segments_are_documents_or_stretches_of_few_documents() -> None:
    sizes = np.arange(1, VOCAB + 1)

    def cut(*counts: int) -> tuple[Any, Any]:
        tokens = [random_ids(n, seed=n).numpy() for n in counts]
        nats, units = segments([-np.ones(n) for n in counts], tokens, sizes)
        assert nats.sum() == sum(counts) and units.sum() == sum(sizes[ids].sum() for ids in tokens)
        return nats, units

    assert len(cut(*[500] * 40)[0]) == 40
    assert len(cut(6400)[0]) == 100
    assert len(cut(*[640] * 10)[0]) == 100
    assert cut(96)[0].tolist() == [32, 32, 32]
    assert len(cut(20)[0]) == 1


# --- choices --------------------------------------------------------------------------------------------------------


def question(seed: int, context: int, choices: list[int]) -> Encoded:
    ids = [random_ids(n, seed=100 * seed + i).tolist() for i, n in enumerate([context, *choices])]
    return Encoded(ids[0], ids[1:])


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(MODELS)),
    st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=6
    ),
    st.sampled_from([1, 40, 200, 10_000]),
)
def test_choices_equal_the_full_forward_pass(name: str, shape: list[tuple[int, list[int]]], most: int) -> None:
    questions = [question(seed, *sizes) for seed, sizes in enumerate(shape)]
    got = likelihood.choice_log_probs(MODELS[name], questions, batch_tokens=most)
    for one, values in zip(questions, got, strict=True):
        for choice, value in zip(one.choices, values, strict=True):
            text = one.context + choice
            with torch.no_grad():
                full = MODELS[name].lm_head(MODELS[name].hidden_states(torch.tensor([text[:-1]])))[0].double()
            right = full.log_softmax(-1)[range(len(one.context) - 1, len(text) - 1), choice].sum()
            assert value == pytest.approx(float(right), abs=1e-4)


def test_a_context_is_read_once_and_memory_stays_within_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [question(seed, 17, [3, 1, 5]) for seed in range(12)]
    model = cached(tiny())
    read, pools, held = [0], [], [0]
    extend, new_pool = CachedGPT.extend, CachedGPT.new_pool

    def count(self: CachedGPT, idx: torch.Tensor, cache: Any) -> torch.Tensor:
        read[0] += idx.numel() - sum(cache.pads)
        hidden = extend(self, idx, cache)
        held[0] = max(held[0], cache.pool.n_blocks - len(cache.pool.free))
        return hidden

    def remember(self: CachedGPT, n_tokens: int, block_size: int) -> Any:
        pools.append(n_tokens)
        return new_pool(self, n_tokens, block_size)

    monkeypatch.setattr(CachedGPT, "extend", count)
    monkeypatch.setattr(CachedGPT, "new_pool", remember)
    likelihood.choice_log_probs(model, questions, batch_tokens=128)
    # 16 tokens of each context once; per choice the context's last one and all but its own last one
    assert read[0] == 12 * (16 + 3 + 1 + 5)
    assert len(pools) == 3 and max(pools) <= 128 + 2 * 128
    assert held[0] < 4 * 2 + 5 * 2 + 1, "choices share the blocks of their question"


def test_context_and_continuation_are_split_as_in_lm_eval(tok: Tokenizer) -> None:
    before, after = encode_pair(tok, "The keeper lit the", " lamp")
    assert before == tok.encode("The keeper lit the") and after == tok.encode(" lamp")
    assert tok.decode(before + after) == "The keeper lit the lamp"
    # the space at the end of the context moves to the continuation
    assert encode_pair(tok, "The keeper lit the ", "lamp") == (before, after)
    assert encode_pair(tok, "one \n", "two") == (tok.encode("one"), tok.encode("one \ntwo")[len(tok.encode("one")) :])
    assert encode_pair(tok, "", " lamp") == ([tok.eot_id], after)
    assert encode_pair(tok, " ", "lamp") == ([tok.eot_id], after)


def test_a_merge_across_the_border_loses_no_text_of_the_choice() -> None:
    class Merging:
        """One id per letter, but "th" and "t " are one id wherever they stand."""

        eot_id = 0

        def encode(self, text: str) -> list[int]:
            return [ord(char) for char in text.replace("th", "\u00fe").replace("t ", "\u00fd")]

        def encode_batch(self, texts: list[str]) -> list[list[int]]:
            return [self.encode(text) for text in texts]

    merging: Any = Merging()
    assert encode_pair(merging, "at", "e") == ([97, 116], [101])
    assert encode_pair(merging, "at", "he") == ([97, 116], [104, 101])  # together it would be [97, 254, 101]
    assert encode_pair(merging, "t", "h") == ([116], [104])
    assert encode_pair(merging, "at ", "e") == ([97, 116], [32, 101])
