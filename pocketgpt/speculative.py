"""Speculative decoding: guess the next tokens cheaply, check all guesses in one step. docs/speculative.md tells the idea.

A step of the model reads every weight, for one token or for several. So a drafter guesses how the text goes on, the
model reads the whole guess as one chunk, and its logits at each position decide, by the rule of plain decoding, what
stands there. The guess up to the first difference is accepted and one token more is known; the cache forgets the rest.

The text is that of plain decoding, whatever the drafter guesses; a bad one only wastes time. One text at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocketgpt import sampling
from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings, window_start

if TYPE_CHECKING:  # the model lives in a top-level script, which this library does not import
    from kv_cache import CachedGPT


@dataclass
class Draft:
    """A guess of the next tokens."""

    ids: list[int]
    # What they were drawn from, (len(ids), n_tokens) float32; None if nothing was drawn: this guess, or none.
    probabilities: Tensor | None = None


class Drafter:
    """What all drafters share: the length of the next guess, which follows how the last ones fared.

    A guess that came true doubles it, and a wrong one halves it. So text that is copied is soon checked `most` tokens at
    a time, and text that is not costs a chunk of two.
    """

    def __init__(self, most: int) -> None:
        """most: tokens that are guessed at once, at least 1. The CPU kernels attend up to 32 new tokens, 31 and one more."""
        if most < 1:
            raise UserError(f"a drafter that guesses at most {most} tokens guesses nothing: it must be at least 1")
        self.most = most

    def begin(self, model: CachedGPT) -> None:
        """A new text, for this model. Raises UserError if the two do not fit together."""
        self.length = min(4, self.most)

    def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
        """Up to `room` tokens after ids, the text so far, which has only grown since the last call."""
        raise NotImplementedError

    def judged(self, guessed: int, accepted: int) -> None:
        """How many tokens of the last draft came true."""
        self.length = min(self.most, 2 * guessed) if accepted == guessed else max(1, guessed // 2)


class PromptLookup(Drafter):
    """Guesses that what followed the last tokens before follows them again (Saxena 2023, "prompt lookup decoding").

    The longest run of last tokens that occurred before counts, at its most recent place. Every run that the text grows by
    is entered into a table once, so that a step costs a few look-ups, however long the text. Long runs tell apart places
    that begin alike: on edits of source code that more than doubled the speed (docs/LOG.md).
    """

    def __init__(self, most: int = 31, runs: Sequence[int] = (16, 8, 4, 2)) -> None:
        """most: tokens per guess. runs: numbers of last tokens that are looked up."""
        super().__init__(most)
        if not runs or min(runs) < 1:
            raise UserError(
                f"prompt lookup compares runs of {list(runs)} tokens: name at least one, of at least 1 token"
            )
        self.runs = sorted(runs, reverse=True)

    def begin(self, model: CachedGPT) -> None:
        super().begin(model)
        self.follows: dict[tuple[int, ...], int] = {}  # run of tokens -> where the token after it stands
        self.entered = 1

    def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
        for place in range(self.entered, len(ids)):  # a run at the very end has nothing after it yet
            for n in self.runs:
                if n <= place:
                    self.follows[tuple(ids[place - n : place])] = place
        self.entered = len(ids)
        found = (self.follows.get(tuple(ids[-n:])) for n in self.runs if n < len(ids))
        match = next((place for place in found if place is not None), None)
        if match is None:
            return Draft([])
        period = len(ids) - match  # a guess longer than that goes round, as a text does that repeats itself
        return Draft([ids[match + i % period] for i in range(min(room, self.length))])


class ModelDraft(Drafter):
    """Lets a smaller model of the same tokenizer write the guess, with the same sampling settings, on a cache of its own."""

    def __init__(self, model: CachedGPT, most: int = 8) -> None:
        super().__init__(most)
        self.model = model

    def begin(self, model: CachedGPT) -> None:
        super().begin(model)
        if model.n_tokens != self.model.n_tokens:
            raise UserError(
                f"the draft model has {self.model.n_tokens} tokens and the model {model.n_tokens}: "
                "both must have been trained with one tokenizer"
            )
        self.cache = self.model.new_cache(capacity=self.model.config.block_size + 1)  # see `generate`
        self.start = 0

    def propose(self, ids: list[int], room: int, settings: Settings, generator: torch.Generator | None) -> Draft:
        block, device = self.model.config.block_size, self.model.embed.weight.device
        start = window_start(len(ids), block)
        if start != self.start:
            self.cache.reset()
            self.start = start
        text, drawn_from = list(ids), []
        self.known = len(ids) - start  # tokens in the context that are no guess
        for _ in range(min(room, self.length, block - self.known + 1)):
            new = torch.tensor([text[start + self.cache.length :]], device=device)
            logits = self.model.lm_head(self.model.extend(new, self.cache)[:, -1])
            seen = torch.tensor([text], device=device)
            if settings.temperature == 0:
                token = sampling.sample(logits, settings, seen, self.model.n_tokens)
            else:
                drawn_from.append(sampling.probabilities(logits, settings, seen, self.model.n_tokens))
                token = torch.multinomial(drawn_from[-1], 1, generator=generator)
            text.append(int(token))
        return Draft(text[len(ids) :], torch.cat(drawn_from) if drawn_from else None)

    def judged(self, guessed: int, accepted: int) -> None:
        super().judged(guessed, accepted)
        self.cache.crop(min(self.cache.length, self.known + accepted))


@dataclass
class Tally:
    """How speculation went."""

    tokens: int = 0  # that were written
    steps: int = 0  # of the model, the first reading of the prompt included
    guessed: int = 0  # tokens that were proposed
    accepted: int = 0  # of those, how many came true

    @property
    def acceptance(self) -> float:
        """Share of the guessed tokens that came true; 0 when none was guessed."""
        return self.accepted / max(1, self.guessed)

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)


@torch.inference_mode()
def generate(
    model: CachedGPT,
    idx: Tensor,
    max_new_tokens: int,
    settings: Settings,
    drafter: Drafter,
    *,
    stop_ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tally]:
    """model.generate for one text, idx (1, T), with fewer steps: the ids (1, T + new), and how the guesses fared.

    Greedy, and sampled with a drafter that draws nothing (PromptLookup), these are the ids that model.generate gives for
    the same generator; with one that draws (ModelDraft), their distribution is the same. That holds up to rounding,
    where a chunk and single tokens give logits that differ in the last bits: docs/speculative.md says when they do.
    """
    if idx.size(0) != 1 or not idx.size(1):
        raise ValueError(f"speculative decoding continues one text of at least one token, not {tuple(idx.shape)}")
    if generator is None and settings.temperature > 0:
        generator = sampling.own_generator(idx.device)
    block, ids, tally = model.config.block_size, idx[0].tolist(), Tally()
    end = len(ids) + max_new_tokens
    # One place more than is used: over all of it, attention would be another graph of the compiled step.
    cache, start = model.new_cache(capacity=min(block, end) + 1), 0
    drafter.begin(model)
    while len(ids) < end and not (tally.tokens and ids[-1] in stop_ids):
        if start != window_start(len(ids), block):  # the context has lost its older half: all positions have shifted
            cache.reset()
            start = window_start(len(ids), block)
        new = ids[start + cache.length :]
        # The token after a guess must be wanted, and have the same context. A prompt is read as plain decoding reads it.
        room = min(end - len(ids) - 1, start + block - len(ids)) if len(new) == 1 else 0
        draft = drafter.propose(ids, room, settings, generator) if room > 0 else Draft([])
        hidden = model.extend(torch.tensor([new + draft.ids], device=idx.device), cache)
        logits = model.lm_head(hidden[0, -1 - len(draft.ids) :])
        written = decide(logits, ids, draft, settings, model.n_tokens, generator, stop_ids)
        ids += written
        accepted = sum(a == b for a, b in zip(written, draft.ids, strict=False))  # only the last one can differ
        if draft.ids:
            drafter.judged(len(draft.ids), accepted)
        cache.crop(len(ids) - 1 - start)
        tally.tokens, tally.steps = tally.tokens + len(written), tally.steps + 1
        tally.guessed, tally.accepted = tally.guessed + len(draft.ids), tally.accepted + accepted
    return torch.tensor([ids], device=idx.device), tally


def decide(
    logits: Tensor,
    ids: list[int],
    draft: Draft,
    settings: Settings,
    n_tokens: int,
    generator: torch.Generator | None,
    stop_ids: Sequence[int] = (),
) -> list[int]:
    """The next tokens: those of the draft that come true, then one that differs, or is the first after the draft.

    logits (len(draft.ids) + 1, V): after ids, and after each token of the draft. A stop id is the last token.
    """
    seen = torch.empty(0)
    if settings.repetition_penalty != 1:  # each position has seen the text and the draft before it
        rows = [ids + draft.ids[:i] + ids[:1] * (len(draft.ids) - i) for i in range(len(draft.ids) + 1)]
        seen = torch.tensor(rows, device=logits.device)
    if settings.temperature == 0:
        best = sampling.sample(logits, settings, seen, n_tokens).tolist()
    else:
        p, q = sampling.probabilities(logits, settings, seen, n_tokens), draft.probabilities
    written: list[int] = []
    for i, guess in enumerate([*draft.ids, None]):
        if settings.temperature == 0:
            token = best[i]
        elif guess is None or q is None:
            # A guess that was not drawn comes true with probability p(guess): as often as p chooses it.
            token = int(torch.multinomial(p[i], 1, generator=generator))
        else:
            token = accept_or_correct(guess, p[i], q[i], generator)
        written.append(token)
        if token != guess or token in stop_ids:
            break
    return written


def accept_or_correct(guess: int, p: Tensor, q: Tensor, generator: torch.Generator | None) -> int:
    """A token distributed as p (V,), given a guess that was drawn from q (V,) (Leviathan et al. 2023; Chen et al. 2023).

    The guess is kept with probability min(1, p/q). Else the token is drawn from where p exceeds q, which adds to each id what
    keeping leaves it short of: min(p, q) + max(0, p - q) = p.
    """
    uniform = torch.rand((), generator=generator, device=p.device)
    if bool(uniform * q[guess] < p[guess]):
        return guess
    short = (p - q).clamp_min_(0)
    if not bool(short.any()):  # p and q differ by rounding alone
        short = p
    return int(torch.multinomial(short, 1, generator=generator))
