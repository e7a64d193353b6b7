"""The engine: whatever else is there, every request gets the answer that it gets alone, and every block comes back.

The models are in float64: products of other sizes differ by 1e-15 there, so no choice hangs on how rows were batched.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from helpers import BLOCK, SHAPES, cached, random_ids, tiny
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kv_cache import BlockPool, CachedGPT
from pocketgpt import kernels
from pocketgpt.engine import Answer, Engine, Request
from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings, sample_rows
from pocketgpt.streaming import TextStream
from pocketgpt.tokenizer import Tokenizer

GREEDY = Settings(temperature=0)


@cache
def model_of(shape: str = "qwen3 gqa", **changes: Any) -> CachedGPT:
    return cached(tiny(**SHAPES[shape] | {"tie_embeddings": False} | changes).double())


@cache
def alone(shape: str, prompt: tuple[int, ...], new: int, stops: tuple[int, ...] = ()) -> list[int]:
    """The greedy answer to one prompt, by CachedGPT.generate; it ends at a stop id, or where the block does."""
    model = model_of(shape)
    new = min(new, model.config.block_size - len(prompt) + 1)
    out = model.generate(torch.tensor([prompt]), new, temperature=0, stop_ids=stops)[0, len(prompt) :].tolist()
    return out[:-1] if out[-1] in stops else out


def assert_sound(engine: Engine) -> None:
    """Every block is held as often as active rows list it, and free when none does; known blocks are known by one hash."""
    pool: BlockPool = engine.pool
    listed = [block for job in engine.active for block in job.held.blocks]
    assert pool.refs == [listed.count(block) for block in range(pool.n_blocks)]
    assert set(pool.free) == set(range(pool.n_blocks)) - set(listed)
    assert pool.block_of == {key: block for block, key in pool.hash_of.items()}
    for jobs in (engine.active, engine.waiting):
        assert [job.number for job in jobs] == sorted(job.number for job in jobs)


def finish(engine: Engine) -> None:
    """`run`, but an engine that gets nowhere fails instead of going on for ever."""
    for _ in range(1000):
        if not engine.waiting and not engine.active:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def ask(engine: Engine, prompts: Sequence[Sequence[int]], new: int, **keywords: Any) -> list[Answer]:
    answers = [engine.add(Request(prompt, new, **{"settings": GREEDY} | keywords)) for prompt in prompts]
    finish(engine)
    assert_sound(engine)
    assert not engine.active and not engine.waiting
    return answers


# Prompts of which many begin alike: (how much of a common text, own tokens)
PROMPTS = st.tuples(st.sampled_from([0, 0, 4, 8, 9, 15]), st.integers(1, 12), st.integers(0, 2)).map(
    lambda drawn: (*random_ids(drawn[0], seed=100).tolist(), *random_ids(drawn[1], seed=drawn[2]).tolist())
)
ARRIVALS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=8)


@given(
    ARRIVALS,
    st.sampled_from(["qwen3 gqa", "gpt2"]),
    st.integers(10, 30),
    st.sampled_from([1, 2, 4, 7]),
    st.sampled_from([1, 3, 6]),
    st.sampled_from([1, 5, 64]),
)
@hypothesis_settings(max_examples=120, deadline=None)
def test_each_answer_is_that_of_its_prompt_alone(
    arrivals: list, shape: str, pool_tokens: int, block_size: int, max_batch: int, prefill_chunk: int
) -> None:
    stops = (alone(shape, (5,), 4)[3], 7)
    needed = max(min(len(prompt) + new, BLOCK + 1) for prompt, new, _ in arrivals)
    engine = Engine(
        model_of(shape),
        pool_tokens=max(pool_tokens, needed),
        block_size=block_size,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk,
    )
    answers = []
    for prompt, new, steps in arrivals:
        answers.append(engine.add(Request(prompt, new, GREEDY, stop_ids=stops)))
        for _ in range(steps):
            engine.step()
            assert_sound(engine)
            assert len(engine.active) <= max_batch
    finish(engine)
    assert_sound(engine)
    for (prompt, new, _), answer in zip(arrivals, answers, strict=True):
        expected = alone(shape, prompt, new, stops)
        assert answer.ids == expected
        limit = min(new, BLOCK + 1 - len(prompt))
        assert answer.reason == ("stop" if len(expected) < limit else "length" if limit == new else "context")


@torch.inference_mode()
def test_a_step_on_the_kernels_is_one_call_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    monkeypatch.setattr(kernels, "loaded", True)
    model = cached(tiny()).pack("float32")

    class Counting:
        def __init__(self, network: Any) -> None:
            self.network, self.counts = network, []

        def run(self, ids: list[int], counts: list[int], *rest: Any) -> torch.Tensor:
            self.counts.append(counts)
            return self.network.run(ids, counts, *rest)

    counting = Counting(model.network)
    model.__dict__["network"] = counting
    engine = Engine(model, prefill_chunk=24)
    for first, length in enumerate((12, 4, 4, 4)):  # as much as a chunk; padded to 12 each, it would hold two of them
        engine.add(Request(list(range(first, first + length)), 3))
    engine.step()
    engine.add(Request([7, 8, 9], 2))
    engine.run()
    assert counting.counts == [[12, 4, 4, 4], [1, 1, 1, 1, 3], [1] * 5]


def test_on_packed_weights_too_answers_are_those_of_prompts_alone() -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    model = cached(tiny(**SHAPES["qwen3 gqa"], n_inner=64)).pack("int8")
    prompts = [random_ids(n, seed=n).tolist() for n in (9, 4, 1, 17, 12, 6, 21)]
    expected = [model.generate(torch.tensor([p]), 10, temperature=0)[0, len(p) :].tolist() for p in prompts]
    for keywords in ({}, {"pool_tokens": 48, "block_size": 3}, {"max_batch": 3, "prefill_chunk": 4, "block_size": 4}):
        engine = Engine(model, **keywords)
        assert [answer.ids for answer in ask(engine, prompts, 10)] == expected
        assert (engine.preempted > 0) == ("pool_tokens" in keywords)


def test_sampled_text_follows_from_the_seed_and_nothing_else() -> None:
    prompts = [random_ids(n, seed=n).tolist() for n in (9, 4, 9, 1, 12, 6)]
    chosen = [
        Settings(temperature=1.5),
        GREEDY,
        Settings(temperature=0.8, top_k=20, top_p=0.9),
        Settings(temperature=2.0, min_p=0.02),
        Settings(temperature=1.0, repetition_penalty=1.5),
        Settings(temperature=1.0, top_p=0.7, min_p=0.05, repetition_penalty=1.2),
    ]

    def requests(seed: int) -> list[Request]:
        return [Request(p, 14, s, seed + i) for i, (p, s) in enumerate(zip(prompts, chosen, strict=True))]

    by_itself = []
    for request in requests(3):
        engine = Engine(model_of(), max_batch=1)
        by_itself.append(engine.add(request))
        finish(engine)
    for keywords in ({}, {"pool_tokens": 40, "block_size": 4}, {"max_batch": 4, "prefill_chunk": 3, "block_size": 2}):
        engine = Engine(model_of(), **keywords)
        order = [4, 0, 5, 2, 1, 3]
        together = {i: engine.add(requests(3)[i]) for i in order}
        finish(engine)
        assert (engine.preempted > 0) == ("pool_tokens" in keywords)
        assert [together[i].ids for i in range(6)] == [answer.ids for answer in by_itself]
    other = Engine(model_of())
    others = [other.add(request) for request in requests(50)]
    finish(other)
    assert [a.ids == b.ids for a, b in zip(others, by_itself, strict=True)] == [s == GREEDY for s in chosen]
    # and it is sample_rows with the numbers that the seed gives, one per token
    ids = list(prompts[2])
    for number in torch.rand(14, generator=torch.Generator().manual_seed(5)).tolist():
        logits = model_of()(torch.tensor([ids]))[0][:, -1]
        ids += sample_rows(logits, [chosen[2]], [ids], 97, [number]).tolist()
    assert by_itself[2].ids == ids[9:]
    # fewer new tokens are the beginning of more
    engine = Engine(model_of())
    short = engine.add(Request(prompts[0], 5, chosen[0], 3))
    finish(engine)
    assert short.ids == by_itself[0].ids[:5]


def test_without_a_seed_the_text_is_new_and_the_global_generator_is_left_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = ask(Engine(model_of()), [[1, 2, 3]] * 2, 20, settings=Settings())
    assert one.ids != two.ids
    assert torch.equal(torch.random.get_rng_state(), before)


def reads(model: CachedGPT) -> tuple[list[tuple[int, ...]], Any]:
    """The shapes that the network is given from now on, and what ends that."""
    shapes: list[tuple[int, ...]] = []
    return shapes, model.embed.register_forward_hook(lambda _module, args, _out: shapes.append(tuple(args[0].shape)))


def test_requests_join_and_leave_at_every_step_and_long_prompts_stall_nobody() -> None:
    engine = Engine(model_of(), block_size=4, prefill_chunk=5)
    shapes, hook = reads(model_of())
    first = engine.add(Request([1, 2, 3], 12, GREEDY))
    engine.step()
    long = engine.add(Request(random_ids(17, seed=9).tolist(), 3, GREEDY))
    short = engine.add(Request([4], 2, GREEDY))
    for _ in range(3):
        engine.step()
    assert (len(first.ids), len(long.ids), len(short.ids), short.reason) == (4, 0, 2, "length")
    engine.step()
    assert (len(first.ids), len(long.ids)) == (5, 1)
    finish(engine)
    hook.remove()
    assert shapes == [
        (1, 3),
        (2, 1),
        (1, 5),
        (2, 1),
        (1, 5),
        (1, 1),
        (1, 5),
        (1, 1),
        (1, 2),
        *[(2, 1)] * 2,
        *[(1, 1)] * 5,
    ]
    assert_sound(engine)


def test_prompts_are_read_several_at_a_time() -> None:
    engine = Engine(model_of(), prefill_chunk=20)
    shapes, hook = reads(model_of())
    prompts = [random_ids(n, seed=n).tolist() for n in (5, 6, 4, 20)]
    answers = ask(engine, prompts, 1)
    hook.remove()
    assert shapes == [(3, 6), (1, 20)]
    assert [answer.ids for answer in answers] == [alone("qwen3 gqa", tuple(p), 1) for p in prompts]


def test_samples_of_one_prompt_share_one_reading_of_it() -> None:
    prompt = random_ids(10).tolist()
    for max_batch, begin in ((8, [(1, 10), (6, 1)]), (4, [(1, 10), (4, 1)])):
        engine = Engine(model_of(), block_size=4, max_batch=max_batch)
        shapes, hook = reads(model_of())
        answers = [engine.add(Request(prompt, 5, Settings(), seed)) for seed in range(6)]
        engine.step()
        engine.step()
        assert shapes == begin
        # Two full blocks in common; of the third, which all write into, each but the last has a copy.
        assert len(engine.pool.free) == engine.pool.n_blocks - 2 - begin[1][0]
        finish(engine)
        assert_sound(engine)
        hook.remove()
        expected = []
        for seed in range(6):
            engine = Engine(model_of())
            expected.append(engine.add(Request(prompt, 5, Settings(), seed)))
            finish(engine)
        assert [answer.ids for answer in answers] == [answer.ids for answer in expected]
        assert len({tuple(answer.ids) for answer in answers}) == 6
    shapes, hook = reads(model_of())
    model_of().generate_many([prompt] * 6, 3, Settings(), stop_ids=())
    hook.remove()
    assert shapes == [(1, 10), (6, 1), (6, 1)]


def test_a_known_beginning_is_not_read_again_but_for_the_last_token() -> None:
    engine = Engine(model_of(), block_size=4)
    prompt = random_ids(16).tolist()
    (first,) = ask(engine, [prompt], 6)
    shapes, hook = reads(model_of())
    (again,) = ask(engine, [prompt], 1)
    assert shapes == [(1, 4)]  # three blocks are known; the fourth holds the last token, whose logits are needed
    assert engine.reused == 12
    shapes.clear()
    (more,) = ask(engine, [prompt + first.ids[:5]], 1)  # a second turn: the answer is known as well
    assert shapes == [(1, 1)]
    shapes.clear()
    (other,) = ask(engine, [[*prompt[:6], 1, *prompt[7:]]], 1)
    hook.remove()
    assert shapes == [(1, 12)]
    assert again.ids == first.ids[:1]
    assert more.ids == first.ids[5:]
    assert other.ids == alone("qwen3 gqa", (*prompt[:6], 1, *prompt[7:]), 1)


def test_the_newest_gives_way_when_blocks_run_out() -> None:
    prompts = [random_ids(7, seed=n).tolist() for n in range(3)]
    engine = Engine(model_of(), pool_tokens=28, block_size=4)
    answers = [engine.add(Request(prompt, 10, GREEDY)) for prompt in prompts]
    seen = []
    while engine.active or engine.waiting:
        engine.step()
        assert_sound(engine)
        seen.append([len(answer.ids) for answer in answers])
    assert engine.preempted > 0
    assert seen[9][0] == 10  # the oldest never waited
    assert all(a >= b >= c for a, b, c in seen)
    assert [answer.ids for answer in answers] == [alone("qwen3 gqa", tuple(prompt), 10) for prompt in prompts]


def test_what_can_never_be_answered_is_refused() -> None:
    engine = Engine(model_of(), pool_tokens=16, block_size=4)
    for prompt, new, keywords, says in (
        ([], 1, {}, "an empty prompt has no next token"),
        ([1], 0, {}, "max_new_tokens is 0"),
        ([1], 1, {"stop": ["x"]}, "a stop text needs the tokenizer"),
        ([1] * 10, 8, {}, "10 prompt and 8 new tokens need 5 blocks of 4, and the pool has 4"),
    ):
        with pytest.raises(UserError) as caught:
            engine.add(Request(prompt, new, GREEDY, **keywords))
        assert says in str(caught.value)
    assert not engine.waiting
    (fits,) = ask(engine, [[1] * 10], 7)  # the last token is not stored
    assert len(fits.ids) == 7
    for keywords in ({"block_size": 0}, {"max_batch": 0}, {"prefill_chunk": 0}):
        with pytest.raises(UserError, match="must be at least 1"):
            Engine(model_of(), **keywords)


def test_a_long_prompt_is_cut_and_the_block_ends_the_answer() -> None:
    prompts = [random_ids(n, seed=n).tolist() for n in (50, BLOCK, 30)]
    cut, last, ends = ask(Engine(model_of()), prompts, 9)
    assert cut.ids == model_of().generate(torch.tensor([prompts[0]]), 9, temperature=0)[0, 50:].tolist()
    assert last.ids == alone("qwen3 gqa", tuple(prompts[1]), 1)
    assert ends.ids == alone("qwen3 gqa", tuple(prompts[2]), 3)
    assert [answer.reason for answer in (cut, last, ends)] == ["length", "context", "context"]


# --- texts ----------------------------------------------------------------------------------------------------------


def talker(tok: Tokenizer) -> CachedGPT:
    return model_of(vocab_size=tok.vocab_size)


def test_texts_stream_and_stop(tok: Tokenizer) -> None:
    model = talker(tok)
    prompt = tok.encode("the keeper")
    free = Engine(model, tok)
    whole = [free.add(Request(prompt, 20, Settings(), seed)) for seed in range(8)]
    finish(free)
    assert [answer.text for answer in whole] == [tok.decode(answer.ids) for answer in whole]
    assert any("\ufffd" in answer.text for answer in whole)  # bytes at random: characters that are held back
    engine = Engine(model, tok, max_batch=5)
    heard: list[list[tuple[int, str, str]]] = [[] for _ in whole]
    stops = [[answer.text[len(answer.text) // 2 :][:3]] if i % 2 else [] for i, answer in enumerate(whole)]
    answers = [
        engine.add(
            Request(
                prompt,
                20,
                Settings(),
                seed,
                stop=stops[seed],
                on_token=lambda answer, piece, calls=heard[seed]: calls.append((len(answer.ids), piece, answer.reason)),
            )
        )
        for seed in range(8)
    ]
    finish(engine)
    assert_sound(engine)
    for seed, answer in enumerate(answers):
        stream, expected, n = TextStream(tok, stops[seed]), "", 0
        while n < len(whole[seed].ids) and not stream.stopped:
            expected += stream.push(whole[seed].ids[n])
            n += 1
        expected += stream.flush()
        assert answer.text == expected
        assert answer.ids == whole[seed].ids[:n]
        assert answer.reason == ("stop" if stops[seed] else "length")
        assert [call[0] for call in heard[seed]] == list(range(1, n + 1))
        assert [call[2] for call in heard[seed]] == [""] * (n - 1) + [answer.reason]
        assert "".join(call[1] for call in heard[seed]) == answer.text
    assert len({answer.text for answer in answers}) == 8


def test_a_stop_id_is_the_last_call_and_no_part_of_the_answer(tok: Tokenizer) -> None:
    model = talker(tok)
    (free,) = ask(Engine(model, tok), [[5, 6]], 6)
    calls: list[tuple[list[int], str]] = []
    (answer,) = ask(
        Engine(model, tok),
        [[5, 6]],
        6,
        stop_ids=(free.ids[3], 0),
        on_token=lambda answer, _: calls.append((list(answer.ids), answer.reason)),
    )
    n = free.ids.index(free.ids[3])
    assert answer.ids == free.ids[:n]
    assert calls == [*((free.ids[: i + 1], "") for i in range(n)), (free.ids[:n], "stop")]


def test_cancelled_requests_leave_and_their_blocks_come_back() -> None:
    engine = Engine(model_of(), max_batch=2, block_size=4)
    answers = [engine.add(Request(random_ids(5, seed=n).tolist(), 10, GREEDY)) for n in range(4)]
    engine.step()
    engine.cancel(answers[1])
    engine.cancel(answers[2])
    assert_sound(engine)
    finish(engine)
    engine.cancel(answers[0])
    assert [answer.reason for answer in answers] == ["length", "cancelled", "cancelled", "length"]
    assert [len(answer.ids) for answer in answers] == [10, 1, 0, 10]
    assert answers[3].ids == alone("qwen3 gqa", tuple(random_ids(5, seed=3).tolist()), 10)
    assert_sound(engine)


def test_a_callback_may_cancel_and_add() -> None:
    engine = Engine(model_of())
    prompts = [random_ids(5, seed=n).tolist() for n in range(3)]
    heard: list[str] = []
    added: list[Answer] = []

    def first(answer: Answer, _: str) -> None:
        if len(answer.ids) == 2:
            engine.cancel(others[0])
            added.append(engine.add(Request(prompts[2], 3, GREEDY)))

    one = engine.add(Request(prompts[0], 4, GREEDY, on_token=first))
    others = [engine.add(Request(prompts[1], 4, GREEDY, on_token=lambda answer, _: heard.append(answer.reason)))]
    finish(engine)
    assert_sound(engine)
    assert (others[0].reason, heard) == ("cancelled", [""])
    assert (one.reason, added[0].ids) == ("length", alone("qwen3 gqa", tuple(prompts[2]), 3))


def test_a_callback_that_raises_harms_no_other_request() -> None:
    def fail(answer: Answer, _: str) -> None:
        if len(answer.ids) == 2:
            raise RuntimeError("the listener has gone")

    engine = Engine(model_of())
    prompts = [random_ids(5, seed=n).tolist() for n in range(3)]
    answers = [engine.add(Request(p, 6, GREEDY, on_token=fail if i == 1 else None)) for i, p in enumerate(prompts)]
    with pytest.raises(RuntimeError, match="the listener has gone"):
        engine.run()
    assert_sound(engine)
    finish(engine)
    assert [answer.ids for answer in answers] == [alone("qwen3 gqa", tuple(p), 6) for p in prompts]


def test_a_step_allocates_nothing_for_keys_and_values() -> None:
    engine = Engine(model_of(), block_size=4)
    memory = engine.pool.kv.data_ptr()
    for n in range(3):
        ask(engine, [random_ids(9, seed=n).tolist()] * 3, 9)
    assert engine.pool.kv.data_ptr() == memory
    assert engine.pool.kv.nbytes == engine.pool.nbytes(32 * BLOCK // 4 + 1)
