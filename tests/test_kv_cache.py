"""The cache against the full forward pass, over every row: any chunking, rewinding, ragged batches, long generation."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers import BLOCK, SHAPES, cached, max_diff, random_ids, tiny, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from base_model import GPT, GPTConfig, attend
from kv_cache import (
    ROUNDED,
    BlockPool,
    CachedGPT,
    DynamicCache,
    KVCache,
    PagedCache,
    QuantizedCache,
    Races,
    SlidingCache,
    StaticCache,
    decode,
    in_bfloat16,
    kv_cache_bytes,
    prove,
    quantize,
    race,
)
from pocketgpt import kernels
from pocketgpt.errors import UserError
from pocketgpt.evaluation import bits_per_byte
from pocketgpt.packed import rounded
from pocketgpt.sampling import Settings
from pocketgpt.token_files import TokenFile
from pocketgpt.tokenizer import Tokenizer

CHUNKINGS = ([8], [1] * 8, [3, 5], [7, 1], [1, 7], [2, 2, 4])
EXACT = 1e-5  # float32: other matrix sizes round differently, nothing else may differ
WINDOW, SLACK = 5, BLOCK  # with so much slack a ring can go back to anywhere
GREEDY = Settings(temperature=0)


def paged(config: GPTConfig, rows: int = 1, starts: Tensor | None = None, **keywords: Any) -> PagedCache:
    """With blocks of 4, so that small tests have several, and a pool that is never short of them."""
    return BlockPool(config, 100, 4, **keywords).cache(rows, starts)


KINDS: dict[str, Callable[..., KVCache]] = {
    "dynamic": lambda *args, dtype=None: DynamicCache(*args),
    "static": StaticCache,
    "sliding": partial(SlidingCache, window=WINDOW, slack=SLACK),
    "wide sliding": partial(SlidingCache, window=BLOCK),
    "int8": lambda *args, dtype=None: QuantizedCache(*args),
    "paged": paged,
    "static bfloat16": lambda *args, dtype=None: StaticCache(*args, dtype=torch.bfloat16),
    "sliding bfloat16": lambda *args, dtype=None: SlidingCache(*args, window=WINDOW, slack=SLACK, dtype=torch.bfloat16),
    "paged bfloat16": lambda *args, dtype=None: paged(*args, dtype=torch.bfloat16),
}


class Told(GPT):
    """The full forward pass of a kind whose attention is not plain: with a window, or on keys and values that went
    through int8 or bfloat16. Every cache is compared with the pass that sees what it should see, so there is one tolerance."""

    kind = ""

    def hidden_states(self, idx: Tensor, *_: Any) -> Tensor:
        n = idx.size(1)
        mask = torch.ones(n, n, dtype=torch.bool).tril() if not self.kind.startswith("sliding") else None
        if mask is None:
            mask = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - WINDOW)
        back = there_and_back if self.kind == "int8" else (lambda x: x.bfloat16().to(x.dtype))
        keep = [lambda k, v: (back(k), back(v))] * self.config.n_layer
        return super().hidden_states(idx, None, mask, keep if rounds(self.kind) else None)


def rounds(kind: str) -> bool:
    return kind.endswith(("int8", "bfloat16"))


def there_and_back(x: Tensor) -> Tensor:
    values, scale = quantize(x)
    return (values * scale).to(x.dtype)


def tiny_for(kind: str, **changes: Any) -> tuple[GPT, Callable[..., KVCache]]:
    """A tiny model whose full forward pass is what this kind of cache should give, and what makes such a cache.

    float64 where it rounds: in float32 another order of summing can put a value on the other side of a border between two steps.
    """
    told = Told(tiny_config(**changes))
    told.load_state_dict(tiny(**changes).state_dict())
    told.kind = kind
    if rounds(kind):
        told.double()
    return told.eval(), partial(KINDS[kind], dtype=told.embed.weight.dtype)


@torch.no_grad()
def through(model: CachedGPT, ids: Tensor, chunks: Sequence[int], cache: KVCache) -> Tensor:
    """Logits of all rows, with ids (B, T) fed in chunks of these sizes."""
    rows = []
    for n in chunks:
        held = cache.length
        logits, cache = model(ids[:, held : held + n], cache)
        assert cache.length == held + n
        rows.append(logits)
    return torch.cat(rows, dim=1)


@torch.no_grad()
def full(model: GPT, ids: Tensor) -> Tensor:
    return model(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [1, 3])
def test_every_row_of_every_chunking_equals_the_full_forward_pass(shape: str, kind: str, batch: int) -> None:
    model, new = tiny_for(kind, **SHAPES[shape])
    ids = random_ids(batch, 8)
    expected = full(model, ids)
    for chunks in CHUNKINGS:
        logits = through(cached(model), ids, chunks, new(model.config, batch))
        assert max_diff(logits, expected) < EXACT, chunks


def test_weights_are_loaded_by_the_same_names_and_a_cache_is_none_of_them() -> None:
    model = tiny()
    twin = cached(model)
    assert twin.state_dict().keys() == model.state_dict().keys()
    twin(random_ids(1, 4))
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(dict(twin.named_buffers())) == ["cos", "sin"]


def test_a_new_cache_is_made_when_none_is_given_and_grows() -> None:
    model = tiny()
    ids = random_ids(2, 8)
    logits, cache = cached(model)(ids[:, :6])
    assert cache.length == 6
    rows = [logits]
    for length in (7, 8):
        logits, cache = cached(model)(ids[:, length - 1 : length], cache)
        assert cache.length == length
        rows.append(logits)
    assert max_diff(torch.cat(rows, dim=1), full(model, ids)) < EXACT
    assert not logits.requires_grad


@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2"])
def test_bfloat16_says_the_same_within_its_own_rounding(shape: str) -> None:
    model = tiny(**SHAPES[shape]).bfloat16()
    ids = random_ids(2, 16)
    expected = full(model, ids)
    for chunks in ([16], [1] * 16, [3, 5, 8]):
        cache = cached(model).new_cache(2)
        assert isinstance(cache, StaticCache)
        assert cache.k[0].dtype == torch.bfloat16
        logits = through(cached(model), ids, chunks, cache)
        assert max_diff(logits, expected) < 0.25  # of logits up to 4; bfloat16 has 8 bits
        assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


def test_the_masks_of_the_class_comment() -> None:
    cpu = torch.device("cpu")
    twin = cached(tiny())
    for kind in KINDS.values():
        cache = kind(twin.config, 2)
        cache.positions(5, cpu)
        assert cache.mask(5, cpu) is None  # nothing held: plain causal
        through(twin, random_ids(2, 3), [3], cache)
        assert cache.positions(2, cpu).broadcast_to(2, 2).tolist() == [[3, 4]] * 2
        mask = cache.mask(2, cpu)
        assert mask is not None
        assert mask.broadcast_to(2, 1, 2, 5)[:, 0].int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]] * 2
        cache.positions(1, cpu)
        assert cache.mask(1, cpu) is None  # the newest sees all


def test_the_masks_of_a_ring() -> None:
    cpu = torch.device("cpu")
    twin = cached(tiny())
    cache = SlidingCache(twin.config, window=3, slack=1)
    ids = random_ids(1, BLOCK)
    through(
        twin, ids, [6], cache
    )  # the slots hold tokens 4 5 2 3; the next takes the place of 2 and sees 4, 5 and itself
    assert cache.mask(1, cpu).int().tolist() == [[1, 1, 1, 0]]  # type: ignore[union-attr]
    assert cache.mask(2, cpu).int().tolist() == [[1, 1, 0, 0, 1, 0], [0, 1, 0, 0, 1, 1]]  # type: ignore[union-attr]
    assert SlidingCache(twin.config, window=3).mask(3, cpu) is None
    assert SlidingCache(twin.config, window=3).mask(4, cpu).int().tolist()[3] == [0, 1, 1, 1]  # type: ignore[union-attr]


def test_the_masks_of_a_ragged_batch() -> None:
    cpu = torch.device("cpu")
    cache = StaticCache(tiny_config(), 2, torch.tensor([2, 0]))
    mask = cache.mask(3, cpu)
    assert mask is not None
    # row 0 has two padding tokens, each of which sees itself only
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert cache.positions(3, cpu).tolist() == [[0, 0, 0], [0, 1, 2]]
    cache.length = 3
    mask = cache.mask(1, cpu)
    assert mask is not None
    assert mask[:, 0].int().tolist() == [[[0, 0, 1, 1]], [[1, 1, 1, 1]]]
    assert cache.positions(1, cpu).tolist() == [[1], [3]]


# What a chat does to a cache: ("feed", n) tokens, ("crop", share of what is held), ("select", row of the batch)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 12)),
        st.tuples(st.just("crop"), st.floats(0, 1)),
        st.tuples(st.just("select"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    ),
    min_size=1,
    max_size=10,
)


@given(st.sampled_from(["qwen3 gqa", "gpt2", "rope with biases"]), st.sampled_from(sorted(KINDS)), STEPS)
@settings(max_examples=120, deadline=None)
@torch.no_grad()
def test_any_sequence_of_chunks_rewinds_and_choices_of_rows(shape: str, kind: str, steps: list[tuple]) -> None:
    model, new = tiny_for(kind, **SHAPES[shape])
    twin = cached(model)
    fresh = random_ids(3, 200)  # tokens to feed
    used = 0
    held = torch.empty(2, 0, dtype=torch.long)
    cache = new(model.config, 2)
    for what, value in steps:
        if what == "feed":
            n = min(value, BLOCK - held.size(1))
            if n == 0:
                continue
            held = torch.cat((held, fresh[: held.size(0), used : used + n]), dim=1)
            used += n
            logits, cache = twin(held[:, -n:], cache)
            assert max_diff(logits, model(held)[:, -n:]) < EXACT
        elif what == "crop":
            length = int(value * held.size(1))
            if kind == "wide sliding" and held.size(1) == BLOCK:
                continue  # the ring is full, and has no slack
            cache.crop(length)
            held = held[:, :length]
        else:
            rows = torch.tensor([row % held.size(0) for row in value])
            cache.select(rows)
            held = held[rows]
        assert cache.length == held.size(1)
        assert cache.batch_size == held.size(0)
    if isinstance(cache, PagedCache):
        assert_no_leak(cache.pool, [cache])
        cache.reset()
        assert_no_leak(cache.pool, [])


def assert_no_leak(pool: BlockPool, caches: Sequence[PagedCache]) -> None:
    """Every block is held as often as rows list it, and free when none does."""
    listed = [block for cache in caches for row in cache.rows for block in row.blocks]
    assert pool.refs == [listed.count(block) for block in range(pool.n_blocks)]
    assert set(pool.free) == set(range(pool.n_blocks)) - set(listed)
    for cache in caches:
        for row in cache.rows:
            assert len(row.blocks) == -(-row.length // pool.block_size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2", "learned rmsnorm swiglu"])
@torch.no_grad()
def test_each_row_of_a_ragged_batch_equals_that_row_alone(shape: str, kind: str) -> None:
    model, new = tiny_for(kind, **SHAPES[shape])
    twin = cached(model)
    lengths = [9, 4, 1, 9]
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    tails = random_ids(4, 10, seed=99)
    alone = [full(model, torch.cat((p, tails[i : i + 1]), dim=1))[0] for i, p in enumerate(prompts)]
    starts = torch.tensor([9 - n for n in lengths])
    padded = torch.cat([torch.cat((torch.full((1, 9 - p.size(1)), 50), p), dim=1) for p in prompts])
    ids = torch.cat((padded, tails), dim=1)
    for chunks in ([19], [9, *[1] * 10], [9, 4, 6], [3, 8, 1, 7], [1] * 19):
        logits = through(twin, ids, chunks, new(model.config, 4, starts))
        assert bool(logits.isfinite().all())  # padding too: NaN spreads
        for row, start in enumerate(starts.tolist()):
            assert max_diff(logits[row, start:], alone[row]) < EXACT, (chunks, row)
    # a rewind into the padding; rows that leave, and a rewind, keep each row's own padding
    cache = new(model.config, 4, starts)
    through(twin, ids, [12], cache)
    cache.crop(3)
    logits = through(twin, ids, [4, 12], cache)
    for row, start in enumerate(starts.tolist()):
        begin = max(3, start)
        assert max_diff(logits[row, begin - 3 :], alone[row][begin - start :]) < EXACT
    cache = new(model.config, 4, starts)
    through(twin, ids, [12], cache)
    cache.crop(10)
    chosen = torch.tensor([2, 1])
    cache.select(chosen)
    logits = through(twin, ids[chosen], [2, 7], cache)
    for at, row in enumerate(chosen.tolist()):
        assert max_diff(logits[at], alone[row][-9:]) < EXACT


def test_padding_takes_no_room_in_the_block() -> None:
    model = tiny(**SHAPES["gpt2"])
    long, short = random_ids(1, BLOCK, seed=1), random_ids(1, 6, seed=2)
    starts = torch.tensor([10, 36])
    ids = torch.cat([torch.cat((torch.zeros(1, 10, dtype=torch.long), long), dim=1)] * 2)
    ids[1, -6:] = short
    logits = through(cached(model), ids, [20, 22], StaticCache(model.config, 2, starts, capacity=42))
    assert max_diff(logits[:1, 10:], full(model, long)) < EXACT
    assert max_diff(logits[1:, 36:], full(model, short)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(kind: str) -> None:
    model, new = tiny_for(kind)
    twin, cache = cached(model), new(model.config, 1)
    ids = random_ids(1, BLOCK)
    through(twin, ids, [30], cache)
    with pytest.raises(ValueError, match="do not fit into block_size 32"):
        twin(ids[:, :3], cache)
    assert cache.length == 30
    for length in (-1, 31):
        with pytest.raises(ValueError, match=f"cannot crop a cache of 30 tokens to {length}"):
            cache.crop(length)
    assert max_diff(through(twin, ids, [2], cache), full(model, ids)[:, 30:]) < EXACT  # still usable


def test_a_small_cache_says_that_it_is_full() -> None:
    twin = cached(tiny())
    for cache in (twin.new_cache(1, capacity=6), QuantizedCache(twin.config, capacity=6)):
        with pytest.raises(ValueError, match="7 tokens do not fit into a cache with a capacity of 6"):
            twin(random_ids(1, 7), cache)


def test_a_small_pool_says_that_it_is_full() -> None:
    model = tiny()
    twin, ids = cached(model), random_ids(2, 12)
    pool = twin.new_pool(20, block_size=4)
    assert pool.n_blocks == 5
    first, second = pool.cache(), pool.cache()
    through(twin, ids[:1], [9], first)
    through(twin, ids[1:], [8], second)
    with pytest.raises(ValueError, match="1 more blocks are needed, and 0 of 5 are free"):
        twin(ids[1:, 8:], second)
    first.crop(5)
    logits = through(twin, ids[1:], [1, 3], second)
    assert max_diff(logits, full(model, ids[1:])[:, 8:]) < EXACT
    assert_no_leak(pool, [first, second])


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("begin", [[20], [3, 1, 16], [1] * 20])
def test_how_far_a_ring_can_go_back(slack: int, begin: list[int]) -> None:
    model, _ = tiny_for("sliding")
    twin, ids = cached(model), random_ids(1, BLOCK)
    expected = full(model, ids)
    cache = SlidingCache(twin.config, window=WINDOW, slack=slack)
    through(twin, ids, begin, cache)
    least = 19 - slack
    for _ in range(2):  # the second time shows that nothing more was lost
        for length in (1, least - 1):
            with pytest.raises(ValueError, match=f"cannot crop to {length}: .* can go back to {least} with"):
                cache.crop(length)
        cache.crop(least)
        assert max_diff(through(twin, ids, [1] * (1 + slack), cache), expected[:, least:20]) < EXACT
    cache.crop(least)
    through(twin, ids, [1], cache)
    with pytest.raises(ValueError, match=f"can go back to {least} with"):
        cache.crop(least - 1)
    cache.crop(least)
    assert max_diff(through(twin, ids, [9], cache), expected[:, least : least + 9]) < EXACT
    cache.crop(0)
    through(twin, ids, [WINDOW + slack], cache)  # not yet full: to anywhere
    cache.crop(1)
    assert max_diff(through(twin, ids, [1, 6], cache), expected[:, 1:8]) < EXACT


def test_the_bound_of_int8() -> None:
    x = torch.cat([torch.randn(50, 16, generator=torch.Generator().manual_seed(0)) * 10.0**e for e in range(-30, 30)])
    x[3], x[4, 2:] = 0, 0
    values, scale = quantize(x)
    assert values.dtype == torch.int8 and scale.shape == (3000, 1)
    assert bool(((x - values * scale).abs() <= scale / 2 * (1 + 1e-5)).all())
    assert bool((scale <= x.abs().amax(-1, keepdim=True) / 127 * (1 + 1e-6) + 2e-38).all())
    assert torch.equal((values * scale)[3], torch.zeros(16))
    assert ((x - values * scale).abs() > scale * 0.45).any()  # and it is reached


@given(st.integers(1, 60), st.integers(1, 4), st.floats(0.1, 8.0), st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_the_bound_of_bfloat16(keys: int, heads: int, size: float, seed: int) -> None:
    """A number is off by at most 1/256 of itself. So a score is off by at most d = sum |q k| / 256 / sqrt(head_dim), each
    weight of the softmax by a factor of exp(2 d) at most, and the sum of values by (exp(2 d) - 1 + 1/256) of the largest."""
    q, k, v = (size * torch.randn(3, heads, keys, 16, generator=torch.Generator().manual_seed(seed))).double()
    for x, back in zip((k, v), in_bfloat16(k, v), strict=True):
        assert bool(((x - back).abs() <= x.abs() / 256).all())
    off = (q.abs() @ k.abs().mT).amax(-1, keepdim=True) / 256 / 4
    bound = (torch.expm1(2 * off) + 1 / 256) * v.abs().amax((1, 2), keepdim=True)
    error = attend(q[None], *(x[None] for x in in_bfloat16(k, v)), None)[0] - attend(q[None], k[None], v[None], None)[0]
    assert bool((error.abs() <= bound).all())
    assert float(error.abs().max()) > 1e-5 * size


def test_int8_says_nearly_the_same() -> None:
    for shape in ("qwen3 gqa", "gpt2"):
        model = tiny(**SHAPES[shape])
        ids = random_ids(2, 16)
        expected = full(model, ids)
        logits = through(cached(model), ids, [3, 1, 12], QuantizedCache(model.config, 2))
        assert EXACT < max_diff(logits, expected) < 0.1  # of logits up to 4


def test_what_a_cache_costs_in_bits_per_byte(tok: Tokenizer, corpus: str) -> None:
    class File(TokenFile):
        def __init__(self) -> None: ...

        def val_windows(self, block_size: int, **_: Any) -> Iterator[tuple[np.ndarray, np.ndarray]]:
            ids = np.array(tok.encode(corpus)[: 8 * block_size + 1])
            yield ids[:-1].reshape(8, -1), ids[1:].reshape(8, -1)

    twin = cached(tiny(vocab_size=tok.vocab_size))

    def bits(new: Callable[[int], KVCache] | None) -> float:
        through = (lambda ids: twin.extend(ids, new(len(ids)))) if new else None
        return bits_per_byte(twin, tok, File(), torch.float32, through=through)

    plain = bits(None)
    assert abs(bits(twin.new_cache) - plain) < 1e-6
    assert abs(bits(lambda rows: twin.new_pool(rows * BLOCK).cache(rows)) - plain) < 1e-6
    assert 1e-6 < abs(bits(lambda rows: QuantizedCache(twin.config, rows)) - plain) < 0.01  # of 3.7


def test_a_fork_shares_its_past_and_copies_what_it_writes() -> None:
    model = tiny(**SHAPES["qwen3 gqa"])
    twin, ids = cached(model), random_ids(1, 10)
    pool = twin.new_pool(400, block_size=4)
    cache = pool.cache()
    through(twin, ids, [10], cache)
    one = pool.nbytes(1)
    assert one == kv_cache_bytes(twin.config, 1, 4, 4)
    assert cache.nbytes() == 3 * one
    cache.select(torch.zeros(5, dtype=torch.long))
    assert cache.nbytes() == 3 * one  # two full blocks and one with two tokens
    tails = random_ids(5, 6, seed=1)
    both = torch.cat((ids.expand(5, -1), tails), dim=1)
    logits = through(twin, both, [1, 5], cache)
    assert max_diff(logits, full(model, both)[:, 10:]) < EXACT
    assert cache.nbytes() == (2 + 5 * 2) * one
    assert_no_leak(pool, [cache])


@torch.no_grad()
def test_rows_of_different_lengths_without_padding() -> None:
    model = tiny(**SHAPES["gpt2"])
    twin = cached(model)
    pool = twin.new_pool(400, block_size=4)
    texts = [random_ids(1, 20, seed=n) for n in range(4)]
    alone = [full(model, text) for text in texts]
    caches = [pool.cache() for _ in texts]
    for cache, text, n in zip(caches, texts, (9, 1, 4, 16), strict=True):
        through(twin, text, [n], cache)
        assert cache.nbytes() == -(-n // 4) * pool.nbytes(1)
    rows = [cache.rows[0] for cache in caches]
    # 3, 1, 2 and 3 more tokens each in one chunk: a short one is padded on the left, in the middle of its text
    new = [3, 1, 2, 3]
    ids = torch.cat(
        [torch.nn.functional.pad(t[:, r.length :][:, :n], (3 - n, 0)) for t, r, n in zip(texts, rows, new, strict=True)]
    )
    logits = twin(ids, pool.join(rows, [3 - n for n in new]))[0]
    for at, row in enumerate(rows):
        assert max_diff(logits[at, 3 - new[at] :], alone[at][0, row.length - new[at] : row.length]) < EXACT
    for _ in range(2):  # then rows leave and come
        ids = torch.cat([texts[i][:, rows[i].length :][:, :1] for i in (2, 0)])
        logits = twin(ids, pool.join([rows[2], rows[0]]))[0]
        for at, i in enumerate((2, 0)):
            assert max_diff(logits[at, 0], alone[i][0, rows[i].length - 1]) < EXACT


@torch.no_grad()
def test_known_blocks_are_found_until_they_are_overwritten() -> None:
    model = tiny()
    twin = cached(model)
    pool = twin.new_pool(24, block_size=4)
    ids = random_ids(12).tolist()
    cache = pool.cache()
    through(twin, torch.tensor([ids]), [10], cache)
    pool.remember(cache.rows[0], ids)

    def known(text: list[int]) -> int:
        row = pool.recall(text)
        assert row.blocks == cache.rows[0].blocks[: len(row.blocks)]
        length = row.length
        pool.crop(row, 0)
        return length

    assert known(ids) == 8  # the third block is not full
    assert known([*ids[:7], 0]) == 4
    assert known([0, *ids]) == 0
    assert known(ids[4:]) == 0  # the same tokens, but not the same text before them
    # After a rewind into a known block other tokens are written there, and nobody may find the old text.
    cache.crop(6)
    assert known(ids) == 8
    other = [*ids[:6], 1, 2]
    logits = twin(torch.tensor([other[6:]]), cache)[0]
    assert max_diff(logits, full(model, torch.tensor([other]))[:, 6:]) < EXACT
    assert known(ids) == 4
    pool.remember(cache.rows[0], other)
    assert known(other) == 8
    # What was given back is still known, until the block is taken for something else, the end of the text first.
    cache.reset()
    row = pool.recall(other)
    assert row.length == 8
    logits = twin(torch.tensor([ids[8:]]), pool.join([row]))[0]
    assert max_diff(logits, full(model, torch.tensor([[*other, *ids[8:]]]))[:, 8:]) < EXACT
    pool.crop(row, 0)
    assert_no_leak(pool, [])
    through(twin, random_ids(1, 20, seed=3), [20], pool.cache())
    row = pool.recall(other)
    assert row.length == 4


def test_bytes_of_a_cache() -> None:
    seven_b = GPTConfig(n_layer=32, n_head=32, n_kv_head=32, n_embd=4096, block_size=4096)
    assert kv_cache_bytes(seven_b, batch=1, length=4096, bytes_per_element=2) == 2_147_483_648
    grouped = GPTConfig(n_layer=32, n_head=32, n_kv_head=8, n_embd=4096, block_size=4096)
    assert kv_cache_bytes(grouped, batch=3, length=4096, bytes_per_element=2) == 3 * 2_147_483_648 // 4
    wide = tiny_config(n_head=4, n_kv_head=1, head_dim=12)
    assert kv_cache_bytes(wide, batch=2, length=10, bytes_per_element=4) == 2 * 2 * 2 * 10 * 1 * 12 * 4


@pytest.mark.parametrize("shape", ["qwen3", "qwen3 mqa, wide heads", "gpt2"])
def test_bytes_really_held_are_those_of_the_formula(shape: str) -> None:
    twin = cached(tiny(**SHAPES[shape]))
    dynamic = DynamicCache(twin.config, 2)
    assert dynamic.nbytes() == 0
    through(twin, random_ids(2, 10), [7, 3], dynamic)
    assert dynamic.nbytes() == kv_cache_bytes(twin.config, 2, 10, 4)
    assert twin.new_cache(2, capacity=20).nbytes() == kv_cache_bytes(twin.config, 2, 20, 4)
    assert twin.new_cache().nbytes() == kv_cache_bytes(twin.config, 1, BLOCK, 4)
    ring = SlidingCache(twin.config, 2, window=5, slack=2)
    through(twin, random_ids(2, 10), [7, 3], ring)
    assert ring.nbytes() == kv_cache_bytes(twin.config, 2, 7, 4)
    scales = 2 * 2 * 2 * 20 * twin.config.n_kv_head * 4  # keys and values, layers, rows, tokens, heads, bytes
    half = kv_cache_bytes(twin.config, 2, 20, 2) // 2
    assert QuantizedCache(twin.config, 2, capacity=20).nbytes() == half + scales
    blocks = paged(twin.config, 2, torch.tensor([0, 5]))
    assert blocks.nbytes() == 0
    through(twin, random_ids(2, 10), [7, 3], blocks)
    assert blocks.nbytes() == kv_cache_bytes(twin.config, 1, 12 + 8, 4)  # of 10 and 5 tokens, in blocks of 4
    assert twin.bfloat16().new_cache().nbytes() == kv_cache_bytes(twin.config, 1, BLOCK, 2)
    pool = twin.new_pool(30)
    assert pool.kv.nbytes == pool.nbytes(3) == kv_cache_bytes(twin.config, 1, 48, 2)  # two blocks, and the spare one


@pytest.mark.parametrize("kind", KINDS)
def test_an_emptied_cache_is_as_new(kind: str) -> None:
    model, new = tiny_for(kind)
    cache = new(model.config, 1)
    through(cached(model), random_ids(1, 20, seed=1), [20], cache)
    cache.reset()
    assert cache.length == 0
    ids = random_ids(1, 9, seed=2)
    assert max_diff(through(cached(model), ids, [4, 5], cache), full(model, ids)) < EXACT


@pytest.mark.parametrize("shape", ["qwen3", "gpt2", "learned rmsnorm swiglu"])
@pytest.mark.parametrize(("prompt", "new"), [(30, 10), (30, 100), (1, 80), (32, 3), (33, 40), (75, 40)])
def test_greedy_tokens_are_the_same_with_and_without_a_cache_past_the_block(shape: str, prompt: int, new: int) -> None:
    model = tiny(**SHAPES[shape] | {"tie_embeddings": False})
    ids = random_ids(2, prompt)
    expected = model.generate(ids, new, temperature=0)
    assert expected.shape == (2, prompt + new)
    assert torch.equal(cached(model).generate(ids, new, temperature=0), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("prompt", "new"), [(30, 40), (3, 20), (75, 10)])
def test_greedy_tokens_with_every_kind_of_cache(kind: str, prompt: int, new: int) -> None:
    model, new_cache = tiny_for(kind, tie_embeddings=False, n_head=4, n_kv_head=2)
    ids = random_ids(2, prompt)
    expected = model.generate(ids, new, temperature=0)
    cache = new_cache(model.config, 2)
    assert torch.equal(cached(model).generate(ids, new, temperature=0, cache=cache), expected)


@pytest.mark.parametrize("block", [1, 2, 3, 7])
def test_greedy_tokens_are_the_same_with_tiny_blocks(block: int) -> None:
    model = tiny(block_size=block, tie_embeddings=False)
    for prompt in (1, 2, 5, 20):
        ids = random_ids(1, prompt)
        assert torch.equal(cached(model).generate(ids, 15, temperature=0), model.generate(ids, 15, temperature=0))


def test_sampled_tokens_are_the_same_with_and_without_a_cache() -> None:
    model = tiny(**SHAPES["qwen3 gqa"])
    ids = random_ids(2, 20)
    keywords: dict[str, Any] = {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2}
    with_cache, without = (
        m.generate(ids, 40, **keywords, generator=torch.Generator().manual_seed(5)) for m in (cached(model), model)
    )
    assert torch.equal(with_cache, without)
    twin = cached(model)
    before = torch.random.get_rng_state()
    twin.generate(ids, 5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_stopping_is_the_same_with_and_without_a_cache() -> None:
    model = tiny(tie_embeddings=False)
    ids = random_ids(3, 6)
    stop = int(model.generate(ids, 20, temperature=0)[1, 10])
    keywords: dict[str, Any] = {"temperature": 0, "stop_ids": (stop,), "pad_id": 96}
    expected = model.generate(ids, 30, **keywords)
    assert (expected == 96).any()
    assert torch.equal(cached(model).generate(ids, 30, **keywords), expected)


def test_a_used_cache_is_emptied_before_generation() -> None:
    model = tiny(tie_embeddings=False)
    ids = random_ids(1, 12)
    cache = StaticCache(model.config)
    cached(model)(random_ids(1, 7, seed=5), cache)
    out = cached(model).generate(ids, 8, temperature=0, cache=cache)
    assert torch.equal(out, model.generate(ids, 8, temperature=0))


def test_each_token_is_computed_once() -> None:
    """What the cache is for: the network reads the prompt, then one token at a time."""
    twin = cached(tiny())
    sizes = []
    twin.embed.register_forward_hook(lambda _module, args, _out: sizes.append(args[0].size(1)))
    twin.generate(random_ids(1, 10), 20, temperature=0)
    assert sizes == [10, *[1] * 19]
    sizes.clear()
    twin.generate(random_ids(1, 30), 20, temperature=0)  # past 32 tokens the last 17 are read anew, and at 49 again
    assert sizes == [30, 1, 1, 17, *[1] * 15, 17]


def test_a_shared_view_follows_the_training_of_its_model() -> None:
    model = tiny(**SHAPES["qwen3 gqa"]).train()
    model.n_tokens = 90
    view = CachedGPT.sharing(model)
    assert not view.training
    assert view.n_tokens == 90
    for name, parameter in view.named_parameters():
        assert parameter.data_ptr() == model.get_parameter(name).data_ptr()
    ids = random_ids(1, 8)
    before = view(ids)[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)  # in place, as optimizers do
    assert max_diff(view(ids)[0], full(model, ids)) < EXACT
    assert max_diff(view(ids)[0], before) > 0.01


def test_a_shared_view_stays_tied() -> None:
    view = CachedGPT.sharing(tiny())
    assert view.lm_head.weight is view.embed.weight
    assert view.n_parameters() == tiny().n_parameters()


def alone(model: GPT, prompt: list[int], new: int, stops: tuple[int, ...], penalty: float = 1.0) -> list[int]:
    """The answer to one prompt, uncached; it ends at a stop id, or where the block does."""
    new = min(new, model.config.block_size - len(prompt) + 1)
    out = model.generate(torch.tensor([prompt]), new, temperature=0, stop_ids=stops, repetition_penalty=penalty)
    said = out[0, len(prompt) :].tolist()
    return said[:-1] if said[-1] in stops else said


@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2"])
def test_many_answers_at_once_are_those_of_each_prompt_alone(shape: str, batch_size: int) -> None:
    model = tiny(**SHAPES[shape] | {"tie_embeddings": False})
    prompts = [random_ids(n, seed=i).tolist() for i, n in enumerate([5, 12, 1, 7, 7, 3, 10, 2])]
    free = [alone(model, prompt, 15, ()) for prompt in prompts]
    stops = (free[0][3], free[4][6])  # two rows that are known to end early, at different times
    expected = [alone(model, prompt, 15, stops) for prompt in prompts]
    assert len({len(answer) for answer in expected}) >= 3
    answers = cached(model).generate_many(prompts, 15, GREEDY, stop_ids=stops, batch_size=batch_size)
    assert answers == expected


def test_an_answer_can_be_empty_and_the_block_ends_it() -> None:
    model = tiny(tie_embeddings=False)
    prompt = random_ids(30).tolist()
    first, *_ = alone(model, prompt, 1, ())
    assert cached(model).generate_many([prompt], 9, GREEDY, stop_ids=(first,)) == [[]]
    (answer,) = cached(model).generate_many([prompt], 9, GREEDY, stop_ids=())
    assert answer == alone(model, prompt, 9, ())
    assert len(answer) == 3  # positions 30 and 31 can be read, so three tokens follow
    assert cached(model).generate_many([], 9, GREEDY, stop_ids=()) == []


def test_a_prompt_longer_than_the_block_is_cut_as_everywhere() -> None:
    model = tiny(tie_embeddings=False)
    prompts = [random_ids(n, seed=n).tolist() for n in (50, 32)]
    answers = cached(model).generate_many(prompts, 9, GREEDY, stop_ids=(), batch_size=1)
    expected = model.generate(torch.tensor([prompts[0]]), 9, temperature=0)[0, 50:].tolist()
    assert answers[0] == expected  # 18 tokens of the prompt are left, so there is room for nine more
    assert answers[1] == alone(model, prompts[1], 9, ())
    assert len(answers[1]) == 1


def test_a_long_prompt_does_not_shorten_the_answers_to_others() -> None:
    model = tiny(tie_embeddings=False)
    prompts = [random_ids(n, seed=n).tolist() for n in (5, 30, 1, 32, 20, 13)]
    expected = [alone(model, prompt, 20, ()) for prompt in prompts]
    assert [len(answer) for answer in expected] == [20, 3, 20, 1, 13, 20]
    for batch_size in (2, 3, 6):
        answers = cached(model).generate_many(prompts, 20, GREEDY, stop_ids=(), batch_size=batch_size)
        assert answers == expected


def test_padding_is_no_repetition() -> None:
    model = tiny(tie_embeddings=False)
    prompts = [random_ids(n, seed=n, high=90).add(5).tolist() for n in (3, 12)]
    (first,) = alone(model, prompts[0], 1, ())
    with torch.no_grad():
        model.lm_head.weight[0] = 1.1 * model.lm_head.weight[first]  # the shorter prompt's answer begins with id 0
    expected = [alone(model, prompt, 10, (), penalty=3.0) for prompt in prompts]
    assert expected[0][0] == 0
    settings = Settings(temperature=0, repetition_penalty=3.0)
    assert cached(model).generate_many(prompts, 10, settings, stop_ids=()) == expected


def test_many_sampled_answers_follow_from_the_seed() -> None:
    twin = cached(tiny())
    prompts = [random_ids(n, seed=n).tolist() for n in (4, 9, 2)]

    def ask(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return twin.generate_many(prompts, 10, Settings(temperature=1.5), stop_ids=(3,), generator=generator)

    before = torch.random.get_rng_state()
    assert ask(1) == ask(1) != ask(2)
    twin.generate_many(prompts, 2, Settings(), stop_ids=())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_caches_are_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        for kind in KINDS.values():
            cache: KVCache = kind(tiny_config())
            cached(tiny())(random_ids(1, 4), cache)
            gone = weakref.ref(cache)
            del cache
            assert gone() is None
    finally:
        gc.enable()


def test_a_dynamic_cache_of_a_packed_model_keeps_keys_and_values_only() -> None:
    model = cached(tiny()).pack("float32")
    cache = DynamicCache(model.config)
    model(random_ids(1, 6), cache)
    assert cache.nbytes() == kv_cache_bytes(model.config, 1, 6, 4)


def test_the_proof_of_int8_is_not_at_the_mercy_of_borders_between_steps() -> None:
    """A model of the demo's size: in float32 some of its many numbers always round to the other side."""
    model = tiny(n_layer=6, n_embd=192, n_head=3, n_kv_head=1, block_size=128, vocab_size=512)
    rows = prove(cached(model), model, random_ids(1, 96, high=512), tolerance=1e-4)
    assert {row["cache"] for row in rows} == {"dynamic", "static", "sliding", "paged", "bfloat16", "int8"}
    assert max(row["difference"] for row in rows if row["cache"] in ROUNDED) < 1e-5


def test_a_model_that_rounds_more_is_proven_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of thousands, as a stand-in for a large model: float32 alone exceeds the tolerance, a fault is still found."""
    model = tiny(tie_embeddings=False, n_layer=4, n_embd=64, block_size=128)
    with torch.no_grad():
        model.lm_head.weight.mul_(2000)
    rows = [
        row for row in prove(cached(model), model, random_ids(1, 96), tolerance=1e-6) if row["cache"] not in ROUNDED
    ]
    again = [row for row in rows if row["float64_difference"] is not None]
    assert again == [row for row in rows if row["difference"] > 1e-6]
    assert {row["cache"] for row in again} == {"dynamic", "static", "sliding", "paged"}
    assert all(row["ok"] and row["float64_difference"] < 1e-9 for row in again)
    assert max(row["allowed"] for row in rows) < 1

    mask = KVCache.mask

    def shifted(cache: KVCache, n: int, device: torch.device) -> torch.Tensor | None:
        seen = mask(cache, n, device)
        return seen if seen is None or n == 1 else seen.roll(-1, dims=-2)

    monkeypatch.setattr(KVCache, "mask", shifted)
    rows = prove(cached(model), model, random_ids(1, 96), tolerance=1e-6)
    wrong = {(row["cache"], row["way"]) for row in rows if not row["ok"]}
    assert ("static", "uneven chunks") in wrong
    assert ("static", "token by token") not in wrong


def test_bfloat16_in_products_is_proven_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the kernels, where a number at a border may be rounded to either side; all that rounding moves is the bound."""
    if kernels.build():
        pytest.skip(kernels.build())
    monkeypatch.setattr(kernels, "loaded", True)
    model = tiny(n_layer=3, n_embd=64, block_size=128)
    ids, fast = random_ids(1, 96), cached(model).pack("bfloat16")
    weights_only = full(rounded(copy.deepcopy(model), "bfloat16", factors=False), ids)
    right = rounded(model, "bfloat16")
    moved = max_diff(full(right, ids), weights_only)
    rows = prove(fast, right, ids, 1e-4, moved)
    assert all(row["ok"] for row in rows)
    again = [row for row in rows if row["float64_difference"] is not None]
    assert again and max(row["float64_difference"] for row in again) < 1e-9
    assert max(row["difference"] for row in rows) < moved < 0.2  # of logits up to 5

    rotated = fast.cos.roll(1, 0)  # a fault of the kernels alone: positions off by one
    fast.cos.copy_(rotated)
    del fast.network
    assert not all(row["ok"] for row in prove(fast, right, ids, 1e-4, moved) if row["cache"] == "static")


def test_texts_may_part_only_where_two_ids_are_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(), random_ids(1, 4)
    text = model.generate(ids, 6, temperature=0)
    logits = full(model, text[:, :8])[0, -1]
    second = logits.topk(2).indices[1]
    other = text.clone()
    other[0, 8] = second
    gap = float(logits.max() - logits[second])
    monkeypatch.setattr("kv_cache.decode", lambda one, *_: (1.0, 1.0, other if one is twin else text))
    twin = cached(model)
    measure = partial(race, twin, model, ids, 6, 1, torch.device("cpu"), lambda: None)
    assert measure(gap * 1.001)["ratio"] == 1.0
    with pytest.raises(UserError, match="from new token 4 on: the cache is wrong"):
        measure(gap * 0.999)


def test_a_fault_as_small_as_rounding_is_found_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 with a bound as loose as can be would let it pass."""
    model = tiny(tie_embeddings=False, n_layer=4, n_embd=64, block_size=128)
    with torch.no_grad():
        model.lm_head.weight.mul_(2000)
    monkeypatch.setattr("kv_cache.ROUNDING", 1e9)
    append = StaticCache.append

    def leaky(self: StaticCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return append(self, layer, k * (1 + 1e-7), v)

    monkeypatch.setattr(StaticCache, "append", leaky)
    rows = prove(cached(model), model, random_ids(1, 96), tolerance=1e-6)
    assert {row["cache"] for row in rows if not row["ok"]} == {"static"}


@given(
    st.integers(1, 50),
    st.integers(2, 400),
    st.lists(st.integers(1, 500), max_size=6),
    st.integers(1, 5),
    st.floats(0, 1e6),
)
def test_a_race_is_cut_to_its_budget(prompt: int, new: int, lengths: list[int], repeats: int, budget: float) -> None:
    asked = Races(prompt, new, 12, lengths, repeats)
    got = asked.within(budget)
    assert asked == Races(prompt, new, 12, lengths, repeats) and got.prompt == prompt
    if asked.tokens() <= budget:
        assert got == asked
    else:
        assert got.tokens() < asked.tokens() or (got == asked and repeats == 1 and not lengths and new <= 10)
        assert got.tokens() <= budget or (got.repeats == 1 and not got.lengths)
        assert got.new_tokens >= min(new, 5) and got.few >= 3 and set(got.lengths) <= set(lengths)


def test_what_a_race_reads_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the text of four tokens that warms up."""
    model, read = tiny(block_size=64), 0
    forward = type(model).hidden_states

    def counting(self: GPT, idx: torch.Tensor, *args: object, **more: object) -> torch.Tensor:
        nonlocal read
        read += idx.numel()
        return forward(self, idx, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(model), "hidden_states", counting)
    for ids, new in ((random_ids(1, 5), 20), (random_ids(1, 9), 12)):
        model.generate(ids, new, temperature=0.0)
    warm = 4 * (5 + 9)
    assert Races(5, 20, 12, [9], 1).tokens() - warm == pytest.approx(read, rel=0.2)


@pytest.mark.parametrize("kind", [GPT, CachedGPT])
def test_the_clock_of_a_race(kind: type[GPT], monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once for each product with the head: the first token is not in the rate of the others."""
    model = tiny(block_size=32)
    model = model if kind is GPT else cached(model)
    ticks = iter(range(0, 1000, 7))
    monkeypatch.setattr("kv_cache.time.perf_counter", lambda: next(ticks))
    first, rest, out = decode(model, random_ids(1, 5), 9, torch.device("cpu"))
    assert (first, rest, out.shape) == (7, 8 * 7, (1, 14))
    assert not model.lm_head._forward_hooks
