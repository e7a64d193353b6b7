"""From logits to tokens: the one sampler, and the one generation loop, behind cached and uncached decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pocketgpt.errors import UserError


@dataclass(frozen=True)
class Settings:
    """How to choose the next token. Filters apply in this order: repetition penalty, temperature, top_k, top_p, min_p.

    Raises:
        UserError: on a value outside its range.
    """

    temperature: float = 1.0  # >= 0; 0 is argmax, whatever the filters
    top_k: int | None = None  # keep the k most probable
    top_p: float | None = None  # in (0, 1]: keep the smallest set with at least this mass (Holtzman et al. 2020)
    min_p: float | None = None  # in [0, 1]: keep those at least this fraction of the most probable one
    repetition_penalty: float = 1.0  # > 0; 1 is off (Keskar et al. 2019)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature is {self.temperature}: it must be 0 (argmax) or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k is {self.top_k}: it must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p is {self.top_p}: it must be above 0 and at most 1")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise UserError(f"min_p is {self.min_p}: it must be between 0 and 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise UserError(f"repetition_penalty is {self.repetition_penalty}: it must be above 0 (1 is off)")


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make ids that occur in seen (B, T) less likely: positive logits are divided, negative ones multiplied."""
    if penalty == 1.0:
        return logits
    values = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(values > 0, values / penalty, values * penalty))


def filter_logits(logits: Tensor, settings: Settings) -> Tensor:
    """logits (B, V), already divided by the temperature -> the same with -inf for what is not to be sampled.

    At least one id per row survives every filter.
    """
    if settings.top_k is not None and settings.top_k < logits.size(-1):
        kth = logits.topk(settings.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if settings.top_p is not None and settings.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # An id goes when those before it already hold the mass; the first one has none before it and always stays.
        before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
        drop = before >= settings.top_p
        drop[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
    if settings.min_p:
        floor = logits.max(-1, keepdim=True).values + math.log(settings.min_p)
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def sample(
    logits: Tensor, settings: Settings, seen: Tensor, n_tokens: int, generator: torch.Generator | None = None
) -> Tensor:
    """One next id per row: logits (B, V) and the ids so far (B, T) -> (B,) int64.

    Ids from n_tokens on are padding of the vocabulary and never come out.
    """
    logits = penalise_repetition(logits.float(), seen, settings.repetition_penalty)[:, :n_tokens]
    if settings.temperature == 0:
        return logits.argmax(-1)
    # The largest becomes 0 first, so that a tiny temperature divides nothing into infinity.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(settings.temperature, 1e-30)
    probabilities = filter_logits(logits, settings).softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def own_generator(device: torch.device) -> torch.Generator:
    """A freshly seeded generator, so that sampling without a seed leaves the global one alone."""
    generator = torch.Generator(device=device)
    generator.seed()
    return generator


def window_start(length: int, block_size: int) -> int:
    """Where the context begins when `length` tokens are there: the policy past block_size, for every decoder.

    The context grows to block_size, then its older half is dropped at once, and so on. Dropping one token at a time would
    shift every position and make all cached keys and values wrong at every step; dropping half of them costs one
    prefill of half a block every half block. The start depends on the length alone, so cached and uncached
    decoding see the same context and give the same greedy tokens.
    """
    hop = max(1, block_size // 2)
    return max(0, math.ceil((length - block_size) / hop)) * hop


def generate(
    next_logits: Callable[[Tensor, int], Tensor],
    idx: Tensor,
    max_new_tokens: int,
    settings: Settings,
    *,
    block_size: int,
    n_tokens: int,
    stop_ids: Sequence[int] = (),
    pad_id: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The generation loop. `next_logits(idx, start)` gives (B, V) for the token after idx[:, start:].

    idx: (B, T) int64, T >= 1. Returns (B, T + n), n <= max_new_tokens. See GPT.generate for the arguments.
    """
    if idx.size(1) == 0:
        raise ValueError("an empty prompt has no next token: start from the end-of-text id")
    if generator is None and settings.temperature > 0:
        generator = own_generator(idx.device)
    stop = torch.tensor(list(stop_ids), dtype=torch.long, device=idx.device)
    pad = pad_id if pad_id is not None else (stop_ids[0] if stop_ids else 0)
    done = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)
    for _ in range(max_new_tokens):
        logits = next_logits(idx, window_start(idx.size(1), block_size))
        token = sample(logits, settings, idx, n_tokens, generator).masked_fill(done, pad)
        idx = torch.cat((idx, token[:, None]), dim=1)
        if stop_ids:
            done |= torch.isin(token, stop)
            if bool(done.all()):
                break
    return idx
