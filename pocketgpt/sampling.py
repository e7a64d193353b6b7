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


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float | Tensor) -> Tensor:
    """Make ids that occur in seen (B, T) less likely: positive logits are divided, negative ones multiplied.

    penalty: one for all rows, or (B, 1)."""
    if not isinstance(penalty, Tensor) and penalty == 1.0:
        return logits
    values = logits.gather(-1, seen)
    return logits.scatter(-1, seen, torch.where(values > 0, values / penalty, values * penalty))


def filter_logits(logits: Tensor, settings: Settings | Sequence[Settings]) -> Tensor:
    """logits (B, V), already divided by the temperature -> the same with -inf for what is not to be sampled.

    settings: one for all rows, or one per row. At least one id per row survives every filter.
    """
    rows = [settings] if isinstance(settings, Settings) else settings

    def column(values: list[float]) -> Tensor | float:
        return values[0] if len(values) == 1 else torch.tensor(values, device=logits.device)[:, None]

    top_k = [min(s.top_k or logits.size(-1), logits.size(-1)) for s in rows]
    if min(top_k) < logits.size(-1):
        largest = logits.topk(max(top_k), dim=-1).values
        places = torch.tensor(top_k, device=logits.device)[:, None] - 1 if len(rows) > 1 else None
        kth = largest[:, -1:] if places is None else largest.gather(-1, places)
        logits = logits.masked_fill(logits < kth, -math.inf)
    # With a filter that is off, nothing of a row goes: the mass before an id may be rounded to 1, but never to infinity.
    top_p = [math.inf if s.top_p is None or s.top_p == 1 else s.top_p for s in rows]
    if min(top_p) < math.inf:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        mass = ordered.softmax(-1).cumsum(-1)
        # An id goes when those before it already hold the mass; the first one has none before it and always stays.
        before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=-1)
        drop = before >= column(top_p)
        drop[:, 0] = False
        logits = logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -math.inf)
    if any(s.min_p for s in rows):
        floor = logits.max(-1, keepdim=True).values + column(
            [math.log(s.min_p) if s.min_p else -math.inf for s in rows]
        )
        logits = logits.masked_fill(logits < floor, -math.inf)
    return logits


def probabilities(logits: Tensor, settings: Settings, seen: Tensor, n_tokens: int) -> Tensor:
    """What `sample` draws from at a temperature above 0: logits (B, V) and the ids so far (B, T) -> (B, n_tokens) float32."""
    logits = penalise_repetition(logits.float(), seen, settings.repetition_penalty)[:, :n_tokens]
    # The largest becomes 0 first, so that a tiny temperature divides nothing into infinity.
    logits = (logits - logits.amax(-1, keepdim=True)) / max(settings.temperature, 1e-30)
    return filter_logits(logits, settings).softmax(-1)


def sample(
    logits: Tensor, settings: Settings, seen: Tensor, n_tokens: int, generator: torch.Generator | None = None
) -> Tensor:
    """One next id per row: logits (B, V) and the ids so far (B, T) -> (B,) int64.

    Ids from n_tokens on are padding of the vocabulary and never come out.
    """
    if settings.temperature == 0:
        return penalise_repetition(logits.float(), seen, settings.repetition_penalty)[:, :n_tokens].argmax(-1)
    return torch.multinomial(probabilities(logits, settings, seen, n_tokens), 1, generator=generator).squeeze(-1)


def sample_rows(
    logits: Tensor, settings: Sequence[Settings], seen: Sequence[Sequence[int]], n_tokens: int, uniform: Sequence[float]
) -> Tensor:
    """`sample` for rows that each have their own settings, ids so far and randomness: logits (B, V) -> (B,) int64.

    uniform: per row one number in [0, 1), with at most 32 bits, as torch.rand draws them. It picks the id at which the
    cumulated probability passes it, so a row's choice follows from that row alone, whatever stands beside it.
    """
    logits = logits.float()
    device = logits.device
    if any(s.repetition_penalty != 1 for s in settings):
        longest = max(map(len, seen))
        padded = [[*ids, *[ids[0]] * (longest - len(ids))] for ids in seen]  # once more is no worse than once
        penalty = torch.tensor([s.repetition_penalty for s in settings], device=device)[:, None]
        logits = penalise_repetition(logits, torch.tensor(padded, device=device), penalty)
    logits = logits[:, :n_tokens]
    best = logits.argmax(-1)
    if all(s.temperature == 0 for s in settings):
        return best
    greedy = torch.tensor([s.temperature == 0 for s in settings], device=device)
    temperature = torch.tensor([max(s.temperature, 1e-30) for s in settings], device=device)[:, None]
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    probabilities = filter_logits(logits, settings).softmax(-1)
    if device.type == "mps":  # has no float64
        probabilities, best, greedy = probabilities.cpu(), best.cpu(), greedy.cpu()
    # In float64 the product stays below the total, and an id without probability adds nothing to pass the number with.
    passed = probabilities.double().cumsum(-1)
    wanted = passed[:, -1:] * torch.tensor(uniform, dtype=torch.float64, device=passed.device)[:, None]
    return torch.where(greedy, best, torch.searchsorted(passed, wanted, right=True).squeeze(-1))


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
