"""Speculative decoding: whatever is guessed, the text is that of plain decoding.

The models are in float64 where ids are compared: a chunk and single tokens differ by 1e-15 there, so no choice hangs on it.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import BLOCK, SHAPES, VOCAB, cached, random_ids, tiny
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

import kv_cache
from kv_cache import CachedGPT
from pocketgpt import checkpoint, kernels, packed, speculative
from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings, probabilities
from pocketgpt.speculative import Draft, Drafter, ModelDraft, PromptLookup, Tally, generate
from pocketgpt.tokenizer import Tokenizer

GREEDY = Settings(temperature=0)


@cache
def model_of(shape: str = "qwen3 gqa", seed: int = 0, **changes: Any) -> CachedGPT:
    return cached(tiny(seed, **SHAPES[shape] | {"tie_embeddings": False} | changes).double())


def plain(
    model: CachedGPT, prompt: list[int], new: int, settings: Settings, seed: int | None = None, stop_ids: Any = ()
) -> list[int]:
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    out = model.generate(torch.tensor([prompt]), new, **vars(settings), generator=generator, stop_ids=stop_ids)
    return out[0].tolist()


def guessed(
    model: CachedGPT,
    prompt: list[int],
    new: int,
    settings: Settings,
    drafter: Drafter,
    seed: int | None = None,
    stop_ids: Any = (),
) -> tuple[list[int], Tally]:
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    idx = torch.tensor([prompt])
    out, tally = generate(model, idx, new, settings, drafter, generator=generator, stop_ids=stop_ids)
    assert tally.tokens == out.size(1) - len(prompt)
    assert 0 <= tally.accepted <= tally.guessed
    # Every step writes one token and what it accepts; a stop id that was guessed is the last one.
    stopped = bool(tally.tokens) and int(out[0, -1]) in stop_ids
    assert tally.tokens - tally.steps - tally.accepted in ((-1, 0) if stopped else (0,))
    return out[0].tolist(), tally


class Oracle(Drafter):
    """Knows the text, and guesses `how`: "right", "wrong", or right up to a place that is drawn, and wrong behind it."""

    def __init__(self, text: list[int], how: str, most: int = 8, seed: int = 0) -> None:
        super().__init__(most)
        self.text, self.how, self.random = text, how, torch.Generator().manual_seed(seed)

    def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
        guess = self.text[len(ids) : len(ids) + min(room, self.most)]
        right = {"right": len(guess), "wrong": 0}.get(self.how)
        if right is None:
            right = int(torch.randint(self.most + 1, (), generator=self.random))
        return Draft([*guess[:right], *((token + 1) % VOCAB for token in guess[right:])])


class Noise(Drafter):
    """Guesses at random, as many as there is room for."""

    def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
        return Draft(random_ids(min(room, self.most), seed=len(ids)).tolist())


# Every kind of drafter, the adversarial ones included: (text that will be written) -> drafter
DRAFTERS: dict[str, Callable[[list[int]], Drafter]] = {
    "right": lambda text: Oracle(text, "right"),
    "wrong": lambda text: Oracle(text, "wrong"),
    "partly right": lambda text: Oracle(text, "partly", most=5),
    "noise": lambda text: Noise(31),
    "lookup": lambda text: PromptLookup(),
    "lookup of one token": lambda text: PromptLookup(most=3, runs=[1]),
    "the model itself": lambda text: ModelDraft(model_of()),
    "another model": lambda text: ModelDraft(model_of("gpt2", 1), most=3),
    "a model of half the context": lambda text: ModelDraft(model_of(block_size=BLOCK // 2), most=31),
}
CHOICES = [
    Settings(),
    Settings(temperature=0.5, top_k=5, repetition_penalty=1.3),
    Settings(temperature=1.5, top_p=0.8, min_p=0.02, repetition_penalty=0.8),
]


@given(
    shape=st.sampled_from(["qwen3 gqa", "gpt2 gqa"]),
    block=st.sampled_from([1, 2, 3, 9, BLOCK]),
    prompt=st.integers(1, BLOCK + 10).flatmap(
        lambda n: st.integers(0, 3).map(lambda seed: random_ids(n, seed=seed, high=8 if seed % 2 else VOCAB).tolist())
    ),
    new=st.integers(0, 2 * BLOCK),
    kind=st.sampled_from(list(DRAFTERS)),
    penalty=st.sampled_from([1.0, 1.0, 1.5, 0.7]),
    stop_at=st.none() | st.integers(0, BLOCK),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_greedy_ids_are_those_of_plain_decoding_whatever_is_guessed(
    shape: str, block: int, prompt: list[int], new: int, kind: str, penalty: float, stop_at: int | None
) -> None:
    model, choice = model_of(shape, block_size=block), Settings(temperature=0, repetition_penalty=penalty)
    text = plain(model, prompt, new, choice)
    stop_ids = [text[len(prompt) + stop_at]] if stop_at is not None and stop_at < new else []
    right = plain(model, prompt, new, choice, stop_ids=stop_ids)
    assert guessed(model, prompt, new, choice, DRAFTERS[kind](text), stop_ids=stop_ids)[0] == right


@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if "model" not in kind])
@pytest.mark.parametrize("choice", CHOICES)
def test_sampled_ids_are_those_of_the_same_seed_where_nothing_is_drawn_to_guess(kind: str, choice: Settings) -> None:
    for seed, length, new in ((0, 3, 25), (1, 8, 60), (2, BLOCK + 3, 9)):
        prompt = random_ids(length, seed=seed).tolist()
        text = plain(model_of(), prompt, new, choice, seed)
        assert guessed(model_of(), prompt, new, choice, DRAFTERS[kind](text), seed)[0] == text
        stop = text[-3]
        right = plain(model_of(), prompt, new, choice, seed, stop_ids=[stop])
        assert guessed(model_of(), prompt, new, choice, DRAFTERS[kind](text), seed, stop_ids=[stop])[0] == right


def test_the_drafters_of_the_tests_guess_as_they_should() -> None:
    prompt = random_ids(4).tolist()
    text = plain(model_of(), prompt, 24, GREEDY)
    tallies = {kind: guessed(model_of(), prompt, 24, GREEDY, make(text))[1] for kind, make in DRAFTERS.items()}
    # the prompt gives one token, two guesses of 8 nine each, and one of the 4 for which there is room five
    assert tallies["right"] == Tally(tokens=24, steps=4, guessed=20, accepted=20)
    assert tallies["wrong"].accepted == 0 and tallies["wrong"].steps == 24
    assert 0 < tallies["partly right"].accepted < tallies["partly right"].guessed
    assert tallies["the model itself"].acceptance == 1 and tallies["the model itself"].tokens_per_step > 3
    assert tallies["another model"].acceptance < 0.5


@pytest.mark.parametrize("choice", [GREEDY, Settings(temperature=0, repetition_penalty=1.5), *CHOICES])
def test_a_model_that_guesses_for_itself_is_always_right(choice: Settings) -> None:
    """So guesses are drawn with the same settings, and with the same text seen."""
    _, tally = guessed(model_of(), random_ids(4).tolist(), 28, choice, ModelDraft(model_of()), seed=0)
    assert tally.guessed > 15 and tally.acceptance == 1


# --- the ends of a text ---------------------------------------------------------------------------------------------


def test_a_stop_id_inside_an_accepted_guess_ends_the_text() -> None:
    prompt = random_ids(4).tolist()
    text = plain(model_of(), prompt, 20, GREEDY)
    place = next(i for i in range(8, 20) if text[i] not in text[4:i])  # in the first guess
    out, tally = guessed(model_of(), prompt, 20, GREEDY, Oracle(text, "right", most=16), stop_ids=[5000, text[place]])
    assert out == text[: place + 1]
    assert tally.steps == 2 and tally.accepted == place - 4
    # A stop id in the prompt, even as its end, stops nothing.
    assert guessed(model_of(), [*prompt, 7], 3, GREEDY, PromptLookup(), stop_ids=[7])[1].tokens == 3


def test_a_guess_never_goes_past_what_is_wanted_or_fits() -> None:
    rooms = []

    class Asked(Oracle):
        def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
            rooms.append((len(ids), room))
            return super().propose(ids, room, settings, generator)

    prompt = random_ids(3).tolist()
    text = plain(model_of(), prompt, 60, GREEDY)
    out, _ = guessed(model_of(), prompt, 12, GREEDY, Asked(text, "wrong", most=100))
    assert out == text[:15]
    assert rooms == [(n, 15 - n - 1) for n in range(4, 14)]
    rooms.clear()
    assert guessed(model_of(), prompt, 60, GREEDY, Asked(text, "right", most=100))[0] == text
    # To the end of the block, after which half of it is read again; to the end of that; as many as are wanted.
    assert rooms == [(4, 28), (34, 14), (50, 12)]


def test_no_new_tokens_and_texts_that_cannot_be_continued() -> None:
    assert guessed(model_of(), [1, 2], 0, GREEDY, PromptLookup()) == ([1, 2], Tally())
    assert Tally().acceptance == 0 and Tally().tokens_per_step == 0
    for shape in ((2, 3), (1, 0)):
        with pytest.raises(ValueError, match="continues one text of at least one token"):
            generate(model_of(), random_ids(*shape), 3, GREEDY, PromptLookup())


def test_drafters_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="at most 0 tokens guesses nothing"):
        PromptLookup(most=0)
    for runs in ([], [2, 0]):
        with pytest.raises(UserError, match="name at least one, of at least 1 token"):
            PromptLookup(runs=runs)
    with pytest.raises(UserError, match="the draft model has 50 tokens and the model 97"):
        generate(model_of(), random_ids(1, 3), 3, GREEDY, ModelDraft(cached(tiny(vocab_size=50))))


def test_randomness_is_the_generator_s_alone() -> None:
    model, drafters = model_of(), (PromptLookup(), ModelDraft(model_of("gpt2", 1)))  # making them is random
    state = torch.get_rng_state()
    texts = {
        tuple(generate(model, random_ids(1, 3), 20, Settings(), drafter)[0][0].tolist())
        for drafter in drafters
        for _ in range(2)
    }
    assert len(texts) == 4
    assert torch.equal(torch.get_rng_state(), state)


# --- drafters -------------------------------------------------------------------------------------------------------


def lookup(ids: list[int], room: int = 100, most: int = 31, runs: Sequence[int] = (3, 2)) -> list[int]:
    drafter = PromptLookup(most, runs)
    drafter.begin(model_of())
    drafter.length = drafter.most
    return drafter.propose(ids, room, GREEDY, None).ids


def test_lookup_takes_the_longest_match_and_of_equal_ones_the_most_recent() -> None:
    assert lookup([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], most=2) == [4, 9]  # the most recent 1 2
    assert lookup([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], most=2) == [9, 5]  # the older match is longer
    assert lookup([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], most=2, runs=[2]) == [8, 1]
    assert lookup([1, 2, 3, 4, 1, 9, 1], most=2) == []  # one token is too little
    assert lookup([1, 2, 3, 4, 1, 9, 1], most=2, runs=[1, 2]) == [9, 1]
    assert lookup([1, 2], runs=[1]) == lookup([7], runs=[1]) == []


def test_lookup_goes_round_when_the_text_repeats_itself() -> None:
    assert lookup([8, 1, 2, 3, 1, 2, 3], room=7) == [1, 2, 3, 1, 2, 3, 1]
    assert lookup([5, 5, 5], most=4) == [5, 5, 5, 5]


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    runs=st.sets(st.integers(1, 6), min_size=1),
    step=st.integers(1, 7),
)
@hypothesis_settings(max_examples=100, deadline=None)
def test_lookup_finds_step_by_step_what_a_search_finds(ids: list[int], runs: set[int], step: int) -> None:
    drafter = PromptLookup(5, sorted(runs))
    drafter.begin(model_of())
    for end in range(1, len(ids) + 1, step):
        text = ids[:end]
        found = [
            place
            for n in sorted(runs, reverse=True)
            for place in range(end - 1, n - 1, -1)
            if text[place - n : place] == text[end - n :]
        ]
        right = []
        if found:
            right = list(text)
            for i in range(min(drafter.length, 4)):
                right.append(right[found[0] + i])
        assert drafter.propose(text, 4, GREEDY, None).ids == right[end:]


def test_guesses_grow_while_they_come_true_and_shrink_when_they_do_not() -> None:
    drafter = PromptLookup(most=31)
    drafter.begin(model_of())
    lengths = []
    for guess, accepted in ((4, 4), (8, 8), (16, 16), (31, 31), (31, 9), (9, 0), (1, 0), (1, 1), (2, 2)):
        drafter.judged(guess, accepted)
        lengths.append(drafter.length)
    assert lengths == [8, 16, 31, 31, 15, 4, 1, 2, 4]


def test_a_drafter_can_be_used_again_and_starts_anew() -> None:
    for drafter in (PromptLookup(runs=[3, 2, 1]), ModelDraft(model_of("gpt2", 1))):
        for prompt, new in (([1, 2, 3, 1, 2], 40), ([4, 5, 4], 9), ([1, 2, 3, 1, 2], 40)):
            text = plain(model_of(), prompt, new, GREEDY)
            fresh = PromptLookup(runs=[3, 2, 1]) if isinstance(drafter, PromptLookup) else ModelDraft(drafter.model)
            assert guessed(model_of(), prompt, new, GREEDY, drafter) == guessed(model_of(), prompt, new, GREEDY, fresh)
            assert guessed(model_of(), prompt, new, GREEDY, drafter)[0] == text


def test_a_draft_model_reads_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, read = model_of("gpt2", 1), []
    right = draft.extend
    monkeypatch.setattr(
        draft, "extend", lambda ids, cache: (read.append((cache.length, ids.size(1))), right(ids, cache))[1]
    )
    prompt = random_ids(5).tolist()
    text = plain(model_of(), prompt, 20, GREEDY)
    drafter = ModelDraft(draft, most=2)
    drafter.begin(model_of())
    drafter.propose(text[:6], 9, GREEDY, None)
    drafter.judged(2, 2)  # the second was never read: it was the last
    drafter.propose(text[:9], 9, GREEDY, None)
    drafter.judged(2, 0)
    drafter.propose(text[:10], 9, GREEDY, None)
    assert read == [(0, 6), (6, 1), (7, 2), (9, 1), (9, 1)]


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", packed.FORMATS)
@pytest.mark.parametrize("shape", ["qwen3 gqa", "llama untied", "gpt2", "relu2"])
@torch.inference_mode()
def test_a_chunk_gives_the_bits_of_single_tokens_on_the_kernels(shape: str, format: str) -> None:
    """So greedy text is the same to the last token, also where two ids are nearly equally good."""
    if kernels.build():
        pytest.skip(kernels.build())
    model = cached(tiny(**SHAPES[shape], n_inner=64, block_size=96)).pack(format)
    ids = random_ids(1, 90)

    def logits(chunks: list[int]) -> Tensor:
        held = model.new_cache()
        return torch.cat([model.lm_head(model.extend(part, held)) for part in ids.split(chunks, 1)], 1)

    single = logits([8] + [1] * 82)
    for chunks in ([8, *[2] * 41], [8, 32, 32, 18], [1] * 90, [90], [60, 5, 1, 24]):
        assert torch.equal(logits(chunks), single), chunks


def test_compiled_steps_check_guesses_in_two_graphs() -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    small = tiny(**SHAPES["qwen3 gqa"], n_layer=1, n_inner=64, block_size=64)
    torch._dynamo.utils.counters.clear()
    right, fast = cached(small), cached(small).compile_decode(tokens=32)
    for prompt, new in (([1, 2, 3, 4], 90), ([5, 6, 7, 5, 6], 20), ([9], 50)):
        text = plain(right, prompt, new, GREEDY)
        for drafter in (PromptLookup(), Oracle(text, "right", most=31), Oracle(text, "partly", most=31)):
            assert guessed(fast, prompt, new, GREEDY, drafter)[0] == text
        assert plain(fast, prompt, new, GREEDY) == text
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one token, and several


# --- distributions --------------------------------------------------------------------------------------------------


def p_value(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Of Pearson's chi-square test: how probable it is to be as far from the expected probabilities by chance.

    Cells with less than 5 expected are one; a cell of probability 0 must be empty."""
    n = sum(counts.values())
    assert all(expected[cell] > 0 for cell in counts), "something came out that cannot"
    large = [cell for cell, p in expected.items() if n * p >= 5]
    observed = [counts[cell] for cell in large] + [n - sum(counts[cell] for cell in large)]
    wanted = [n * expected[cell] for cell in large] + [n - n * sum(expected[cell] for cell in large)]
    pairs = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 1e-3]
    statistic = sum((o - w) ** 2 / w for o, w in pairs)
    return float(torch.special.gammaincc(torch.tensor((len(pairs) - 1) / 2).double(), torch.tensor(statistic / 2)))


def small(seed: int) -> CachedGPT:
    """Six ids, of which the last is padding of the vocabulary; peaked enough that models differ."""
    model = cached(tiny(seed, vocab_size=6, block_size=16, n_layer=1, n_embd=8, n_head=1, n_kv_head=1, n_inner=8))
    model.n_tokens = 5
    return model


def exact(model: CachedGPT, prompt: list[int], n: int, choice: Settings) -> dict[tuple[int, ...], float]:
    """The probability of every continuation by n tokens."""
    result = {}
    with torch.inference_mode():
        for cell in product(range(5), repeat=n):
            p = 1.0
            for i, token in enumerate(cell):
                seen = torch.tensor([[*prompt, *cell[:i]]])
                p *= float(probabilities(model(seen)[0][:, -1], choice, seen, 5)[0, token])
            result[cell] = p
    return result


PROMPT = [0, 1, 2, 0, 1]
CONTINUATIONS = {
    "2 tokens": (Settings(temperature=1.2), 2),
    "3 tokens": (Settings(temperature=0.9), 3),
    "3 tokens, filtered": (Settings(temperature=0.8, top_k=4, top_p=0.95, min_p=0.01, repetition_penalty=1.4), 3),
}
WRONG = {
    "every guess is kept": lambda guess, p, q, generator: guess,
    "a refused guess is drawn again from p": lambda guess, p, q, generator: (
        guess
        if bool(torch.rand((), generator=generator) * q[guess] < p[guess])
        else int(torch.multinomial(p, 1, generator=generator))
    ),
    "kept with probability p": lambda guess, p, q, generator: (
        guess
        if bool(torch.rand((), generator=generator) < p[guess])
        else int(torch.multinomial((p - q).clamp_min(0), 1, generator=generator))
    ),
}


def draw(drafter: Drafter, choice: Settings, n: int, times: int) -> Counter[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    model, idx = small(0), torch.tensor([PROMPT])
    texts = (generate(model, idx, n + 1, choice, drafter, generator=generator)[0] for _ in range(times))
    return Counter(tuple(text[0, len(PROMPT) : len(PROMPT) + n].tolist()) for text in texts)


@pytest.mark.parametrize("case", CONTINUATIONS)
@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_continuations_come_with_their_probability(kind: str, case: str) -> None:
    choice, n = CONTINUATIONS[case]
    drafter = ModelDraft(small(1)) if kind == "model" else PromptLookup(runs=[2, 1])
    assert p_value(draw(drafter, choice, n, 800), exact(small(0), PROMPT, n, choice)) > 0.01


@pytest.mark.parametrize("rule", WRONG)
def test_the_test_of_probabilities_refuses_wrong_rules(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice, n = CONTINUATIONS["3 tokens"]
    monkeypatch.setattr(speculative, "accept_or_correct", WRONG[rule])
    assert p_value(draw(ModelDraft(small(1)), choice, n, 800), exact(small(0), PROMPT, n, choice)) < 1e-6


def test_a_guess_from_nearly_the_same_distribution_can_be_refused() -> None:
    """Rounding may leave nothing where p exceeds q: the token is then drawn from p itself, and no error comes."""
    p, q, generator = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.75]), torch.Generator().manual_seed(0)
    drawn = Counter(speculative.accept_or_correct(0, p, q, generator) for _ in range(200))
    assert drawn.keys() == {0, 1}


# --- the program ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, tok: Tokenizer) -> Path:
    for stage, model in (("sft", tiny(vocab_size=400, block_size=160)), ("base", tiny(1, vocab_size=400, n_layer=1))):
        checkpoint.save(tmp_path, checkpoint.Checkpoint(stage, model.config.to_dict(), model.state_dict(), tok))
    return tmp_path


def program(monkeypatch: pytest.MonkeyPatch, folder: Path, draft: str) -> dict[str, float]:
    settings = ["new_tokens=40", "prompt_lengths=[]", "repeats=1", "tolerance=0.01", "device=cpu"]
    monkeypatch.setattr("sys.argv", ["kv_cache.py", f"out={folder}", f"draft={draft}", *settings])
    kv_cache.main()
    return json.loads((folder / "kv_cache.json").read_text())["speculative"]


def test_kv_cache_reports_how_guesses_fare(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(monkeypatch, folder, "") is None
    for draft in ("lookup", str(folder / "ckpt_base.pt"), str(folder / "sft")):
        report = program(monkeypatch, folder, draft)
        assert 0 <= report["acceptance"] <= 1 and 1 <= report["tokens_per_step"] <= 40
        assert report["ratio"] == pytest.approx(report["drafted_tokens_per_s"] / report["plain_tokens_per_s"])
        printed = " ".join(capsys.readouterr().out.split())
        assert f"draft={draft}: {report['acceptance']:.0%} of the guessed tokens accepted" in printed
    assert report["acceptance"] == 1 and report["tokens_per_step"] > 4  # the model guessed for itself


def test_kv_cache_refuses_tokens_that_differ_and_drafts_of_another_tokenizer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: str
) -> None:
    other = tiny(vocab_size=300)
    theirs = checkpoint.Checkpoint("sft", other.config.to_dict(), other.state_dict(), Tokenizer.train([corpus], 300))
    path = checkpoint.save(tmp_path / "other", theirs)
    with pytest.raises(UserError, match=f"draft={path}: its tokenizer is not that of .*ckpt_sft.pt"):
        program(monkeypatch, folder, str(path))
    with pytest.raises(UserError, match="nowhere"):
        program(monkeypatch, folder, "nowhere")
    right = speculative.decide
    monkeypatch.setattr(speculative, "decide", lambda *arguments: [token ^ 1 for token in right(*arguments)])
    with pytest.raises(UserError, match="greedy tokens differ with and without guesses, from new token 0 on"):
        program(monkeypatch, folder, "lookup")
