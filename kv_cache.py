"""The key/value cache: CachedGPT, the caches, and a program that proves them exact and shows their speed.

    python kv_cache.py                       # checkpoints/ckpt_sft.pt, or ckpt_base.pt
    python kv_cache.py checkpoint=checkpoints/ckpt_dpo.pt new_tokens=400

Generating a token needs the keys and values of all earlier tokens, and these never change: attention is causal, so
no later token can alter them. The naive loop computes them again for every token. A cache keeps them, and each step
runs the network on one new token only. docs/kv_cache.md tells the whole story with pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from base_model import GPT, GPTConfig, KeepKV
from pocketgpt import sampling


def kv_cache_bytes(config: GPTConfig, batch: int, length: int, bytes_per_element: int) -> int:
    """Bytes of the keys and values of `length` tokens: 2 x layers x batch x length x kv_heads x head_dim x bytes."""
    return 2 * config.n_layer * batch * length * config.n_kv_head * config.width_of_head * bytes_per_element


class KVCache:
    """What all caches share: how many tokens are held, where new ones stand, and what they may see.

    `starts` (B,) int64 gives the number of padding tokens at the left of each row of a ragged batch: they take no position
    and are seen by nobody. A chunk of any size may follow what is held: its queries see all held tokens and, within the
    chunk, those before them, so the mask is a triangle aligned to the lower right:

        held 3, chunk of 2:   1 1 1 1 0
                              1 1 1 1 1
    """

    def __init__(self, config: GPTConfig, batch_size: int = 1, starts: Tensor | None = None) -> None:
        self.config = config
        self.batch_size = batch_size
        self.starts = starts
        self.length = 0
        # One function per layer, which is all that the network sees of a cache.
        self.keep: Sequence[KeepKV] = [partial(self.append, layer) for layer in range(config.n_layer)]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new k, v (B, n_kv_head, T, head_dim) of a layer behind the held ones; return held and new."""
        raise NotImplementedError

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keep these rows (indices into the batch, int64) in this order; a row may be taken more than once."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes of memory that are allocated for keys and values."""
        raise NotImplementedError

    def advance(self, n: int) -> None:
        """Count `n` tokens as held, once every layer has stored them."""
        self.length += n

    def reset(self) -> None:
        self.crop(0)

    def positions(self, n: int, device: torch.device) -> Tensor:
        """Positions of the next n tokens: (n,), or (B, n) in a ragged batch."""
        longest = self.length + n - (int(self.starts.min()) if self.starts is not None else 0)
        if longest > self.config.block_size:
            raise ValueError(f"{longest} tokens do not fit into block_size {self.config.block_size}")
        slots = torch.arange(self.length, self.length + n, device=device)
        return slots if self.starts is None else (slots - self.starts[:, None]).clamp_min(0)

    def mask(self, n: int, device: torch.device) -> Tensor | None:
        """What the next n queries may see, (n, length + n) or (B, 1, n, length + n) bool; None where nothing is hidden
        from a single query, or plain causal attention is right."""
        if self.starts is None and (n == 1 or self.length == 0):
            return None
        total = self.length + n
        visible = torch.ones(n, total, dtype=torch.bool, device=device).tril(self.length)
        if self.starts is None:
            return visible
        real = torch.arange(total, device=device) >= self.starts[:, None, None, None]
        # A padding query sees itself, because a softmax over nothing is NaN, and NaN x 0 stays NaN in the rows that count.
        itself = torch.eye(total, dtype=torch.bool, device=device)[self.length :]
        return (visible & real) | itself


class DynamicCache(KVCache):
    """Grows with `torch.cat`: the teaching version. Every step copies all that is held, so n tokens copy O(n^2) bytes."""

    def __init__(self, config: GPTConfig, batch_size: int = 1, starts: Tensor | None = None) -> None:
        super().__init__(config, batch_size, starts)
        self.k: list[Tensor | None] = [None] * config.n_layer
        self.v: list[Tensor | None] = [None] * config.n_layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held_k, held_v = self.k[layer], self.v[layer]
        if held_k is not None and held_v is not None:
            k, v = torch.cat((held_k, k), dim=2), torch.cat((held_v, v), dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.k = (
            [k if k is None or not length else k[:, :, :length] for k in self.k] if length else [None] * len(self.k)
        )
        self.v = (
            [v if v is None or not length else v[:, :, :length] for v in self.v] if length else [None] * len(self.v)
        )
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.k = [k if k is None else k[rows] for k in self.k]
        self.v = [v if v is None else v[rows] for v in self.v]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in [*self.k, *self.v] if t is not None)


class StaticCache(KVCache):
    """Allocated once, written in place; attention reads the live length only. Nothing is copied as it grows."""

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int = 1,
        starts: Tensor | None = None,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, batch_size, starts)
        self.capacity = capacity or config.block_size
        shape = (config.n_layer, batch_size, config.n_kv_head, self.capacity, config.width_of_head)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.size(2)
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache with a capacity of {self.capacity}")
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def check_crop(length: int, held: int) -> None:
    if not 0 <= length <= held:
        raise ValueError(f"cannot crop a cache of {held} tokens to {length}")


class CachedGPT(GPT):
    """GPT with the same parameters, under the same names, that carries a cache from call to call."""

    @torch.no_grad()
    def forward(self, idx: Tensor, past_kv: KVCache | None = None) -> tuple[Tensor, KVCache]:
        """New ids (B, T) int64 behind those that past_kv holds -> (logits (B, T, vocab_size), the cache, now longer)."""
        past_kv = past_kv if past_kv is not None else DynamicCache(self.config, idx.size(0))
        return self.lm_head(self.extend(idx, past_kv)), past_kv

    @classmethod
    def sharing(cls, model: GPT) -> CachedGPT:
        """A cached view of a model: the same weights in the same memory, so that training it changes this one too."""
        view = cls(model.config).to(model.embed.weight.device).eval()
        view.load_state_dict(model.state_dict(), assign=True)
        view.n_tokens = model.n_tokens
        return view

    def extend(self, idx: Tensor, cache: KVCache) -> Tensor:
        """Run new ids (B, T) on top of the cache: what the head reads of them, (B, T, n_embd)."""
        n = idx.size(1)
        hidden = self.hidden_states(idx, cache.positions(n, idx.device), cache.mask(n, idx.device), cache.keep)
        cache.advance(n)
        return hidden

    def new_cache(self, batch_size: int = 1, starts: Tensor | None = None, capacity: int | None = None) -> StaticCache:
        """An empty StaticCache of this model's shape, type and device."""
        weight = self.embed.weight
        return StaticCache(self.config, batch_size, starts, capacity=capacity, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] = (),
        pad_id: int | None = None,
        generator: torch.Generator | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """GPT.generate, with the same arguments and result, computing each token once.

        cache: an empty cache to use, or None for a new StaticCache.
        """
        capacity = min(self.config.block_size, idx.size(1) + max_new_tokens)
        held = cache if cache is not None else self.new_cache(idx.size(0), capacity=capacity)
        began = 0

        def next_logits(ids: Tensor, start: int) -> Tensor:
            nonlocal began
            if start != began:  # the context has lost its older half: all positions have shifted
                held.reset()
                began = start
            return self.lm_head(self.extend(ids[:, start + held.length :], held)[:, -1])

        return sampling.generate(
            next_logits,
            idx,
            max_new_tokens,
            sampling.Settings(temperature, top_k, top_p, min_p, repetition_penalty),
            block_size=self.config.block_size,
            n_tokens=self.n_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            generator=generator,
        )

    @torch.inference_mode()
    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        settings: sampling.Settings,
        *,
        stop_ids: Sequence[int],
        generator: torch.Generator | None = None,
        batch_size: int = 64,
    ) -> list[list[int]]:
        """Answers to prompts of different lengths, in their order, each without its prompt and its stop id.

        Prompts of similar length share a batch, padded on the left; rows that have ended leave it. An answer also ends
        where block_size does.
        """
        device = self.embed.weight.device
        stops = set(stop_ids)
        if generator is None:
            generator = sampling.own_generator(device)
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            longest = len(prompts[rows[-1]])
            starts = torch.tensor([longest - len(prompts[i]) for i in rows], device=device)
            ids = torch.tensor([[0] * (longest - len(prompts[i])) + list(prompts[i]) for i in rows], device=device)
            capacity = min(self.config.block_size, longest + max_new_tokens)
            cache = self.new_cache(len(rows), starts if bool(starts.any()) else None, capacity)
            logits = self.lm_head(self.extend(ids, cache)[:, -1])
            alive = list(range(len(rows)))  # which rows of the batch still talk
            for _ in range(max_new_tokens):
                token = sampling.sample(logits, settings, ids, self.n_tokens, generator)
                said = token.tolist()
                alive = [row for row in alive if said[row] not in stops]
                for row in alive:
                    answers[rows[row]].append(said[row])
                if not alive or cache.length == capacity:
                    break
                if len(alive) <= 0.75 * len(rows):  # leaving copies the cache, so rows leave in groups
                    kept = torch.tensor(alive, device=device)
                    rows, ids, token = [rows[row] for row in alive], ids[kept], token[kept]
                    alive = list(range(len(rows)))
                    cache.select(kept)
                ids = torch.cat((ids, token[:, None]), dim=1)
                logits = self.lm_head(self.extend(token[:, None], cache)[:, -1])
        return answers
