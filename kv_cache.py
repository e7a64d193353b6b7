"""The key/value cache: CachedGPT, the caches, and a program that proves them exact and shows their speed.

    python kv_cache.py                       # checkpoints/ckpt_sft.pt, or ckpt_base.pt
    python kv_cache.py checkpoint=checkpoints/ckpt_dpo.pt new_tokens=400

Generating a token needs the keys and values of all earlier tokens, and these never change: attention is causal, so
no later token can alter them. The naive loop computes them again for every token. A cache keeps them, and each step
runs the network on one new token only. docs/kv_cache.md tells the whole story with pictures.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

from base_model import GPT, MLP, Attention, Block, GPTConfig, KeepKV
from pocketgpt import checkpoint, config, kernels, report, sampling, speculative
from pocketgpt import device as machine
from pocketgpt.engine import Engine, Request
from pocketgpt.errors import UserError, run
from pocketgpt.evaluation import bits_per_byte
from pocketgpt.files import atomic_path, write_json
from pocketgpt.metrics import bar, console
from pocketgpt.packed import PackedEmbedding, PackedLinear, rounded
from pretrain import held_out


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

    @property
    def keep(self) -> list[KeepKV]:
        """One function per layer, which is all that the network sees of a cache.

        Made anew for each call: a stored list would hold the cache that holds it, and such a cycle keeps its megabytes
        until the garbage collector happens to come by.
        """
        return [partial(self.append, layer) for layer in range(self.config.n_layer)]

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

    @property
    def room(self) -> int:
        """Tokens until the longest row reaches block_size."""
        padding = int(self.starts.min()) if self.starts is not None else 0
        return self.config.block_size - (self.length - padding)

    def positions(self, n: int, device: torch.device) -> Tensor:
        """Positions of the next n tokens: (n,), or (B, n) in a ragged batch."""
        check_room(n, self.room, self.config.block_size)
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
        else:
            k, v = k.clone(), v.clone()  # of a fused projection they are views, and would keep its queries alive
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
        shape = (batch_size, config.n_kv_head, self.capacity, config.width_of_head)
        # A tensor per layer: in one for all, the compiled step would copy everything to write one token (docs/LOG.md).
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layer)]

    def reserve(self, capacity: int) -> None:
        """Take more memory, for `capacity` tokens, and keep what is held."""
        more = (0, 0, 0, capacity - self.capacity)
        self.k, self.v = [F.pad(k, more) for k in self.k], [F.pad(v, more) for v in self.v]
        self.capacity = capacity

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.size(2)
        check_capacity(end, self.capacity)
        self.k[layer][:, :, self.length : end] = k
        self.v[layer][:, :, self.length : end] = v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.k, self.v = [k[rows] for k in self.k], [v[rows] for v in self.v]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.k, *self.v))


class SlidingCache(KVCache):
    """A ring: each token sees itself and the `window` - 1 tokens before it, and what no later one can see is overwritten.

    Equal to the full forward pass whose mask hides all but the last `window` keys, and so to plain attention while the
    text is no longer than the window. Memory stays at `window` + `slack` tokens, however long the text grows. The
    slack is for rewinds: behind a full ring `crop` can go back by `slack` + 1 tokens, because the token after the crop
    still needs the keys of its whole window.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int = 1,
        starts: Tensor | None = None,
        *,
        window: int,
        slack: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, batch_size, starts)
        self.window, self.ring = window, window + slack  # tokens
        self.written = 0  # tokens, the most that were ever held since the last reset: the ring has the last of these
        shape = (config.n_layer, batch_size, config.n_kv_head, self.ring, config.width_of_head)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def mask(self, n: int, device: torch.device) -> Tensor | None:
        """In the order of the ring, in which a single token is already; several new ones stand behind it."""
        newest = self.length + n - 1
        last = newest if n == 1 else self.length - 1  # the newest token that stands in the ring
        live = min(self.ring, last + 1)
        plain = live <= self.window if n == 1 else not live and n <= self.window
        if self.starts is None and plain:
            return None
        keys = last - (last - torch.arange(live, device=device)) % self.ring
        queries = torch.arange(self.length, newest + 1, device=device)
        if n > 1:
            keys = torch.cat((keys, queries))
        age = queries[:, None] - keys
        visible = (age >= 0) & (age < self.window)
        if self.starts is None:
            return visible
        return (visible & (keys >= self.starts[:, None, None, None])) | (age == 0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n, held = k.size(2), min(self.ring, self.length)
        ring_k, ring_v = self.k[layer], self.v[layer]
        k, v = k.to(ring_k.dtype), v.to(ring_v.dtype)  # in the step that stores them they are seen as in all others
        if n == 1:
            ring_k[:, :, self.length % self.ring] = k[:, :, 0]
            ring_v[:, :, self.length % self.ring] = v[:, :, 0]
            live = min(self.ring, self.length + 1)
            return ring_k[:, :, :live], ring_v[:, :, :live]
        # The first of several tokens may still see what the last of them will overwrite.
        seen = torch.cat((ring_k[:, :, :held], k), dim=2), torch.cat((ring_v[:, :, :held], v), dim=2)
        slots = torch.arange(max(0, n - self.ring), n, device=k.device).add_(self.length).remainder_(self.ring)
        ring_k.index_copy_(2, slots, k[:, :, -self.ring :])
        ring_v.index_copy_(2, slots, v[:, :, -self.ring :])
        return seen

    def advance(self, n: int) -> None:
        super().advance(n)
        self.written = max(self.written, self.length)

    def crop(self, length: int) -> None:
        """Raises ValueError where the window of the next token is no longer held."""
        check_crop(length, self.length)
        least = self.written - self.ring + self.window - 1 if self.written > self.ring else 0
        if 0 < length < least:
            raise ValueError(
                f"cannot crop to {length}: of {self.written} tokens a ring of {self.ring} can go back to {least} "
                f"with a window of {self.window}; give it more slack, or reset it"
            )
        self.length = length
        if not length:
            self.written = 0

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., head_dim) -> int8 of that shape and a float32 scale (..., 1), so that x is their product but for rounding:
    by at most half a scale, which is 1/254 of the largest value of the vector."""
    scale = (x.abs().amax(-1, keepdim=True).float() / 127).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / scale).round_().to(torch.int8), scale


class QuantizedCache(KVCache):
    """Keys and values in int8, with one float32 scale per head and token: half of the bytes of bfloat16, plus the scales.

    Every token is read back from int8, also in the step that stores it, so what it sees does not depend on how the
    text was cut into chunks. `quantize` states the bound of the error.
    """

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int = 1,
        starts: Tensor | None = None,
        *,
        capacity: int | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, batch_size, starts)
        self.capacity = capacity or config.block_size
        shape = (config.n_layer, 2, batch_size, config.n_kv_head, self.capacity, config.width_of_head)
        self.kv = torch.zeros(shape, dtype=torch.int8, device=device)
        self.scale = torch.zeros(*shape[:-1], 1, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.size(2)
        check_capacity(end, self.capacity)
        kv, scale = self.kv[layer], self.scale[layer]
        kv[:, :, :, self.length : end], scale[:, :, :, self.length : end] = quantize(torch.stack((k, v)))
        held = (kv[:, :, :, :end] * scale[:, :, :, :end]).to(k.dtype)
        return held[0], held[1]

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.kv, self.scale = self.kv[:, :, rows], self.scale[:, :, rows]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return self.kv.nbytes + self.scale.nbytes


@dataclass
class Row:
    """One text in a BlockPool: which blocks hold it, in order, how many tokens it has, and the hashes of its full blocks."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    hashes: list[bytes] = field(default_factory=list)


class BlockPool:
    """Memory for keys and values in blocks of `block_size` tokens, which any number of rows share (Kwon et al. 2023).

    A row takes a block when it needs one, so that it wastes less than one, and rows with the same beginning can hold
    the same blocks: `refs` counts by how many each is held. A block that is held twice is never written, but copied
    first. A freed block keeps its content until it is taken, the longest unused first, so a known text can have it back.
    """

    def __init__(
        self,
        config: GPTConfig,
        n_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        self.config, self.n_blocks, self.block_size = config, n_blocks, block_size
        # One block more than is lent: padding is written there, and rows shorter than others read it, unseen.
        shape = (config.n_layer, n_blocks + 1, block_size, 2, config.n_kv_head, config.width_of_head)
        self.kv = torch.zeros(shape, dtype=dtype, device=device)
        # The keys and the values of each layer, (blocks, n_kv_head, block_size, head_dim), as kernels.cpp takes them.
        self.layers = [[layer[:, :, i].transpose(1, 2) for layer in self.kv] for i in (0, 1)]
        self.refs = [0] * n_blocks
        self.free = dict.fromkeys(range(n_blocks))  # in the order in which they will be taken
        self.block_of: dict[bytes, int] = {}  # full blocks by the hash of their text and all text before it
        self.hash_of: dict[int, bytes] = {}

    def cache(self, batch_size: int = 1, starts: Tensor | None = None) -> PagedCache:
        """An empty cache on this pool."""
        pads = starts.tolist() if starts is not None else [0] * batch_size
        return PagedCache(self, [Row() for _ in pads], pads)

    def join(self, rows: list[Row], pads: list[int] | None = None) -> PagedCache:
        """A cache over rows that are there already, of any lengths. `pads`: how many tokens at the left of each row of
        what comes next are padding."""
        return PagedCache(self, rows, pads or [0] * len(rows))

    def wanted(self, row: Row, n: int) -> list[int]:
        """Which places of row.blocks need a free block before n more tokens can be written."""
        if not n:
            return []
        first, last = row.length // self.block_size, (row.length + n - 1) // self.block_size
        return [i for i in range(first, last + 1) if i >= len(row.blocks) or self.refs[row.blocks[i]] > 1]

    def reserve(self, row: Row, n: int) -> None:
        """Make n more tokens writable. Raises ValueError when blocks run out; the row is as it was."""
        places = self.wanted(row, n)
        if len(places) > len(self.free):
            raise ValueError(f"{len(places)} more blocks are needed, and {len(self.free)} of {self.n_blocks} are free")
        for i in places:
            block = next(iter(self.free))
            self._hold(block)
            self._forget(block)
            if i < len(row.blocks):  # copy on write
                self.kv[:, block] = self.kv[:, row.blocks[i]]
                self._drop(row.blocks[i])
                row.blocks[i] = block
            else:
                row.blocks.append(block)
        if n and row.length % self.block_size:  # after a rewind, a block that was full and known changes
            self._forget(row.blocks[row.length // self.block_size])

    def fork(self, row: Row) -> Row:
        """A second row of the same text, in the same blocks."""
        for block in row.blocks:
            self._hold(block)
        return Row([*row.blocks], row.length, [*row.hashes])

    def crop(self, row: Row, length: int) -> None:
        """Forget all but the first `length` tokens of a row, and give back the blocks that only they needed."""
        keep = -(-length // self.block_size)
        for block in reversed(row.blocks[keep:]):  # the end of a text is the less likely one to be shared
            self._drop(block)
        del row.blocks[keep:], row.hashes[length // self.block_size :]
        row.length = length

    def remember(self, row: Row, ids: Sequence[int]) -> None:
        """Let later rows find the full blocks of a row, whose text is `ids`. The hash of a block covers all before it."""
        for i in range(len(row.hashes), row.length // self.block_size):
            row.hashes.append(self._hash(row.hashes[-1] if i else b"", ids, i))
            if row.hashes[i] not in self.block_of:
                self.block_of[row.hashes[i]] = row.blocks[i]
                self.hash_of[row.blocks[i]] = row.hashes[i]

    def recall(self, ids: Sequence[int]) -> Row:
        """A row that holds as much of the beginning of `ids` as is known, in whole blocks."""
        row, key = Row(), b""
        for i in range(len(ids) // self.block_size):
            key = self._hash(key, ids, i)
            block = self.block_of.get(key)
            if block is None:
                break
            self._hold(block)
            row.blocks.append(block)
            row.hashes.append(key)
        row.length = len(row.blocks) * self.block_size
        return row

    def nbytes(self, blocks: int) -> int:
        """Bytes of so many blocks."""
        return blocks * kv_cache_bytes(self.config, 1, self.block_size, self.kv.element_size())

    def _hash(self, before: bytes, ids: Sequence[int], i: int) -> bytes:
        text = array("q", ids[i * self.block_size : (i + 1) * self.block_size]).tobytes()
        return hashlib.sha256(before + text).digest()

    def _hold(self, block: int) -> None:
        if not self.refs[block]:
            del self.free[block]
        self.refs[block] += 1

    def _drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free[block] = None

    def _forget(self, block: int) -> None:
        if block in self.hash_of:
            del self.block_of[self.hash_of.pop(block)]


class PagedCache(KVCache):
    """Rows of any lengths, side by side, in blocks of one BlockPool.

    No padding is stored: left padding (`starts`) is written nowhere, and takes no position. `select` with a row taken n
    times forks it to n samples that share their past; whichever first writes into a shared block copies it.
    `reset` gives the blocks back to the pool; a cache that is merely dropped keeps them.
    """

    def __init__(self, pool: BlockPool, rows: list[Row], pads: list[int]) -> None:
        super().__init__(pool.config, len(rows))
        self.pool, self.rows = pool, rows
        self.pads = pads  # per row, padding that is still to come before its next token
        self.length = max((row.length for row in rows), default=0)

    @property
    def room(self) -> int:
        """Tokens until the longest row reaches block_size."""
        return self.config.block_size - max(row.length - pad for row, pad in zip(self.rows, self.pads, strict=True))

    def positions(self, n: int, device: torch.device) -> Tensor:
        """Positions of the next n tokens of each row, (B, n). Takes the blocks, and notes for all layers what is written
        and read where."""
        check_room(n, self.room, self.config.block_size)
        pool, size = self.pool, self.pool.block_size
        for row, pad in zip(self.rows, self.pads, strict=True):
            pool.reserve(row, max(0, n - pad))
        self.n_keys = self.config.block_size - self.room + n  # of the longest row
        width = -(-self.n_keys // size)
        # Blocks that a row has in reserve are not read, and where it has none, the spare block is.
        table = [(row.blocks + [pool.n_blocks] * width)[:width] for row in self.rows]
        self.table = torch.tensor(table, device=device)
        first = torch.tensor([row.length - pad for row, pad in zip(self.rows, self.pads, strict=True)], device=device)
        self.at = (first[:, None] + torch.arange(n, device=device)).clamp_min_(0)
        slots = self.table.gather(1, self.at // size) * size + self.at % size
        if any(self.pads):
            padding = torch.arange(n, device=device) < torch.tensor(self.pads, device=device)[:, None]
            slots = slots.masked_fill(padding, pool.n_blocks * size)
        self.slots, self.table = slots.flatten(), self.table.flatten()
        # Without a past, the new keys are all there are.
        self.fresh = not any(self.pads) and not any(row.length for row in self.rows)
        return self.at

    def mask(self, n: int, device: torch.device) -> Tensor | None:
        """Right after `positions`: a query sees the keys up to its own position, (B, 1, n, keys)."""
        even = not any(self.pads) and all(row.length == self.rows[0].length for row in self.rows)
        if self.fresh or (n == 1 and even):
            return None
        return (torch.arange(self.n_keys, device=device) <= self.at[:, :, None]).unsqueeze(1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.pool.kv[layer]
        new = torch.stack((k.transpose(1, 2), v.transpose(1, 2)), dim=2).flatten(0, 1)
        kv.view(-1, *kv.shape[2:]).index_copy_(0, self.slots, new.to(kv.dtype))
        if self.fresh:
            return k.to(kv.dtype), v.to(kv.dtype)
        held = kv.index_select(0, self.table).view(self.batch_size, -1, *kv.shape[2:])[:, : self.n_keys]
        held = held.permute(2, 0, 3, 1, 4)  # (2, B, n_kv_head, keys, head_dim)
        return held[0], held[1]

    def advance(self, n: int) -> None:
        super().advance(n)
        for i, row in enumerate(self.rows):
            pad = min(n, self.pads[i])
            self.pads[i] -= pad
            row.length += n - pad

    def crop(self, length: int) -> None:
        """Take the same number of tokens, padding included, from the end of every row."""
        check_crop(length, self.length)
        cut = self.length - length
        for i, row in enumerate(self.rows):
            self.pads[i] += max(0, cut - row.length)
            self.pool.crop(row, max(0, row.length - cut))
        self.length = length

    def select(self, rows: Tensor) -> None:
        chosen = rows.tolist()
        forks = [self.pool.fork(self.rows[i]) for i in chosen]
        for row in self.rows:
            self.pool.crop(row, 0)
        self.rows, self.pads = forks, [self.pads[i] for i in chosen]
        self.batch_size = len(chosen)

    def nbytes(self) -> int:
        """Bytes of the blocks that are held, each once, however many rows hold it."""
        return self.pool.nbytes(len({block for row in self.rows for block in row.blocks}))


def check_room(n: int, room: int, block_size: int) -> None:
    if n > room:
        raise ValueError(f"{n} more tokens do not fit into block_size {block_size}: {room} left")


def check_crop(length: int, held: int) -> None:
    if not 0 <= length <= held:
        raise ValueError(f"cannot crop a cache of {held} tokens to {length}")


def check_capacity(end: int, capacity: int) -> None:
    if end > capacity:
        raise ValueError(f"{end} tokens do not fit into a cache with a capacity of {capacity}")


class PackedAttention(Attention):
    """The same attention over packed weights: one matrix makes queries, keys and values."""

    def __init__(self, attn: Attention, format: str) -> None:
        nn.Module.__init__(self)
        self.n_head, self.n_kv_head, self.head_dim, self.dropout = attn.n_head, attn.n_kv_head, attn.head_dim, 0.0
        self.widths = [layer.out_features for layer in (attn.q_proj, attn.k_proj, attn.v_proj)]
        self.qkv_proj = PackedLinear([attn.q_proj, attn.k_proj, attn.v_proj], format)
        self.q_norm, self.k_norm, self.v_mix = attn.q_norm, attn.k_norm, attn.v_mix
        self.o_proj = PackedLinear([attn.o_proj], format)  # type: ignore[assignment]

    def project(self, x: Tensor) -> Sequence[Tensor]:
        return self.qkv_proj(x).split(self.widths, dim=-1)


class PackedMLP(MLP):
    """The same MLP over packed weights: one matrix makes gate and up."""

    def __init__(self, mlp: MLP, format: str) -> None:
        nn.Module.__init__(self)
        self.kind = mlp.kind
        if self.kind == "swiglu":
            self.gate_up_proj = PackedLinear([mlp.gate_proj, mlp.up_proj], format)
        else:
            self.up_proj = PackedLinear([mlp.up_proj], format)  # type: ignore[assignment]
        self.down_proj = PackedLinear([mlp.down_proj], format)  # type: ignore[assignment]

    def gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        return self.gate_up_proj(x).chunk(2, dim=-1)


def decode_step(model: GPT, idx: Tensor, position: Tensor, k: list[Tensor], v: list[Tensor], length: int) -> Tensor:
    """A few tokens per row on a StaticCache's tensors, as `extend` does it, in the form that compiles to one graph.

    idx (B, n); position (n,) of the tokens; length: tokens held after the step, which is all that attention reads.
    """

    def keep(layer: int, new_k: Tensor, new_v: Tensor) -> tuple[Tensor, Tensor]:
        k[layer][:, :, position] = new_k.to(k[layer].dtype)
        v[layer][:, :, position] = new_v.to(v[layer].dtype)
        return k[layer][:, :, :length], v[layer][:, :, :length]

    mask = torch.arange(length, device=idx.device) <= position[:, None] if idx.size(1) > 1 else None
    return model.hidden_states(idx, position, mask, [partial(keep, layer) for layer in range(len(k))])


def about_inputs(guards: Sequence[Any]) -> list[bool]:
    """Which of dynamo's guards to keep: those on the step's tensors and on torch's own state."""
    return [not guard.is_global and not guard.name.startswith(("model", "L['model']")) for guard in guards]


KV_TYPES = {"float32": None, "bfloat16": torch.bfloat16}  # what pack(kv=) and kv_cache.py kv= may name


class CachedGPT(GPT):
    """GPT with the same parameters, under the same names, that carries a cache from call to call."""

    kv_dtype: torch.dtype | None = None  # of keys and values; None: that of the model
    step: Callable[..., Tensor] | None = None  # the compiled decode_step
    step_tokens = 1  # the most that it takes of a single row

    @torch.no_grad()
    def forward(self, idx: Tensor, past_kv: KVCache | None = None) -> tuple[Tensor, KVCache]:
        """New ids (B, T) int64 behind those that past_kv holds -> (logits (B, T, vocab_size), the cache, now longer)."""
        past_kv = past_kv if past_kv is not None else DynamicCache(self.config, idx.size(0))
        return self.lm_head(self.extend(idx, past_kv)), past_kv

    @classmethod
    def sharing(cls, model: GPT) -> CachedGPT:
        """A cached view of a model: the same weights in the same memory, so that training it changes this one too."""
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        view = copy.deepcopy(model, shared)  # the modules anew, adapters among them
        view.__class__ = cls
        return cast(CachedGPT, view.eval())

    @cached_property
    def network(self) -> Any:
        """Packed weights as the one call of kernels.cpp, which runs all layers; None on torch's operators.

        The call knows the shapes of the world, and not the switches of model=fast that reach from block to block.
        """
        embed = self.embed
        if self.config.value_residual or self.config.x0_shortcut:
            return None
        if not (isinstance(embed, PackedEmbedding) and kernels.loaded and self.kv_place[1].type == "cpu"):
            return None
        tensors: list[Tensor | None] = []
        widths: list[int] = []

        def take(*parts: nn.Module) -> None:
            for part in parts:
                tensors.append(cast(Tensor | None, getattr(part, "weight", None)))
                if isinstance(part, PackedLinear | PackedEmbedding):
                    tensors.append(part.scale)
                    widths.append(part.n if isinstance(part, PackedLinear) else self.config.vocab_size)
                tensors.append(cast(Tensor | None, getattr(part, "bias", None)))

        take(embed)
        learned = self.config.position == "learned"
        tensors += [self.position.weight, None, None] if learned else [None, self.cos, self.sin]
        take(self.norm)
        for block in cast(Sequence[Any], self.blocks):
            attn, mlp = block.attn, block.mlp
            take(block.attn_norm, attn.q_norm, attn.k_norm, block.mlp_norm)
            take(attn.qkv_proj, attn.o_proj, mlp.gate_up_proj if mlp.kind == "swiglu" else mlp.up_proj, mlp.down_proj)
        c = self.config
        sizes = (c.n_head, c.n_kv_head, c.width_of_head, c.mlp, c.norm == "layernorm", c.norm_eps)
        return torch.classes.pocketgpt.Network(tensors, widths, *sizes)

    @property
    def in_one_call(self) -> bool:
        """Whether kernels.cpp runs all layers at once, on rows of any lengths side by side without padding."""
        return kernels.loaded and self.network is not None

    @torch.no_grad()
    def pack(self, format: str, kv: str = "float32") -> Self:
        """Turn the weights, in place and for good, into what decodes fastest: fused, and in one of packed.FORMATS. kv: what
        its caches hold, float32 or bfloat16.

        The result has the same methods and gives the logits of the model with packed.rounded weights. It can be neither
        trained nor saved. On a CPU it runs on the C++ kernels if kernels.build() has loaded them: on a StaticCache and in
        the engine all layers in one call (`network`), and then a row has the same bits however its text is cut into
        chunks and whatever stands beside it. Elsewhere it runs on torch's operators.
        """
        if kv not in KV_TYPES:
            raise UserError(f"kv={kv} is not known: choose one of {', '.join(KV_TYPES)}")
        self.kv_dtype = KV_TYPES[kv]
        head = PackedLinear([self.lm_head], format, self.config.logit_softcap)
        self.embed = PackedEmbedding(head if self.config.tie_embeddings else PackedLinear([self.embed], format))  # type: ignore[assignment]
        self.lm_head = head  # type: ignore[assignment]
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attn, block.mlp = PackedAttention(block.attn, format), PackedMLP(block.mlp, format)
        return self

    def compile_decode(self, tokens: int = 1) -> Self:
        """Compile the step of one token per row: tens of seconds, or a few once inductor has it on disk. For models that
        are not packed; `network` runs the others, which is faster and needs no compiling.

        One graph serves every length and capacity; a batch of more than one row is compiled when it comes. Needs a C++
        compiler on the CPU; torch says so if there is none.
        tokens: where it is more than 1, a second graph serves steps of 2 to so many (speculative.py checks guesses in them).
        """
        # What costs as much as the weights of a small model (docs/LOG.md): checking at each step that no module has
        # changed, which is left out; checking shapes, which `extend` fixes; threads for the few numbers between products.
        options = {
            "cpp_wrapper": True,
            "guard_filter_fn": about_inputs,
            "size_asserts": False,
            "alignment_asserts": False,
            "cpp.threads": 1,
        }
        self.step_tokens = tokens
        self.step = torch.compile(  # type: ignore[call-overload]  # whose stubs lack isolate_recompiles
            decode_step, fullgraph=True, dynamic=True, isolate_recompiles=True, options=options
        )
        # Frozen, the weights are part of the graph, which is therefore this model's alone, and not its inputs.
        with torch.inference_mode(), torch._inductor.config.patch(freezing=True):
            cache = self.new_cache(1, capacity=min(16, self.config.block_size) + 1)
            idx = torch.zeros(1, 3, dtype=torch.long, device=self.kv_place[1])
            for n in (2, 1, 3 if tokens > 2 else 1):  # the first is a prompt
                self.extend(idx[:, :n], cache)
        return self

    def extend(self, idx: Tensor, cache: KVCache) -> Tensor:
        """Run new ids (B, T) on top of the cache: what the head reads of them, (B, T, n_embd)."""
        n = idx.size(1)
        if isinstance(cache, StaticCache) and cache.starts is None and self.in_one_call:
            check_room(n, cache.room, self.config.block_size)
            check_capacity(cache.length + n, cache.capacity)
            rows = idx.size(0)
            counts, lengths = [n] * rows, [cache.length] * rows
            hidden = self.network.run(idx.flatten().tolist(), counts, lengths, list(range(rows)), cache.k, cache.v)
            cache.advance(n)
            return hidden.view(rows, n, -1)
        # Lengths of 0 and 1 would each be a graph of their own.
        few = n <= (self.step_tokens if idx.size(0) == 1 else 1)
        if self.step and few and isinstance(cache, StaticCache) and cache.starts is None and cache.length > 1:
            check_capacity(cache.length + n, cache.capacity)
            position = cache.positions(n, idx.device)
            # A slice starts elsewhere in memory for each token, and a graph is compiled for where its input starts.
            idx = idx.clone(memory_format=torch.contiguous_format)
            hidden = self.step(self, idx, position, cache.k, cache.v, cache.length + n)
            cache.advance(n)
            return hidden
        hidden = self.hidden_states(idx, cache.positions(n, idx.device), cache.mask(n, idx.device), cache.keep)
        cache.advance(n)
        return hidden

    def extend_rows(self, ids: Sequence[Sequence[int]], pool: BlockPool, rows: list[Row], last: bool = False) -> Tensor:
        """`extend` for new ids of any lengths behind rows of a pool, padded at the left: (rows, longest, n_embd); with `last`
        of the last one of each row only, (rows, n_embd)."""
        longest = max(map(len, ids))
        pads = [longest - len(new) for new in ids]
        if self.in_one_call:
            for row, new in zip(rows, ids, strict=True):
                check_room(len(new), self.config.block_size - row.length, self.config.block_size)
                pool.reserve(row, len(new))
            width = max(len(row.blocks) for row in rows)
            table = [block for row in rows for block in (row.blocks + [0] * width)[:width]]
            counts, lengths = list(map(len, ids)), [row.length for row in rows]
            flat = self.network.run([i for new in ids for i in new], counts, lengths, table, *pool.layers)
            for row, n in zip(rows, counts, strict=True):
                row.length += n
            if last:
                return flat[list(accumulate(counts, initial=-1))[1:]]
            if not any(pads):
                return flat.view(len(rows), longest, -1)
            return torch.stack([F.pad(h, (0, 0, pad, 0)) for h, pad in zip(flat.split(counts), pads, strict=True)])
        padded = [[0] * pad + list(new) for pad, new in zip(pads, ids, strict=True)]
        hidden = self.extend(torch.tensor(padded, device=pool.kv.device), pool.join(rows, pads))
        return hidden[:, -1] if last else hidden

    @property
    def place(self) -> tuple[torch.dtype, torch.device]:
        """Type and device of what is computed: those of the norms, which are never packed."""
        parameter = next(self.norm.parameters())
        return parameter.dtype, parameter.device

    @property
    def kv_place(self) -> tuple[torch.dtype, torch.device]:
        """Type and device of keys and values."""
        dtype, device = self.place
        return self.kv_dtype or dtype, device

    def new_cache(self, batch_size: int = 1, starts: Tensor | None = None, capacity: int | None = None) -> StaticCache:
        """An empty StaticCache of this model's shape, type and device."""
        dtype, device = self.kv_place
        return StaticCache(self.config, batch_size, starts, capacity=capacity, dtype=dtype, device=device)

    def new_pool(self, n_tokens: int, block_size: int = 16) -> BlockPool:
        """Blocks for n_tokens, in this model's shape, type and device: `pool.cache(rows)` is a cache on it."""
        return BlockPool(self.config, -(-n_tokens // block_size), block_size, *self.kv_place)

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
        if self.step:
            capacity += 1  # attention over a whole tensor, not a slice of it, would be a graph of its own
        held = cache if cache is not None else self.new_cache(idx.size(0), capacity=capacity)
        held.reset()
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
        batch_size: int = 128,
    ) -> list[list[int]]:
        """Answers to prompts of different lengths, in their order, each without its prompt and its stop id.

        All go through the engine, up to batch_size at a time; a prompt that comes several times is read once. A prompt
        longer than block_size is cut as everywhere (sampling.window_start); an answer also ends where block_size does.
        """
        if generator is None:
            generator = sampling.own_generator(self.embed.weight.device)
        seeds = torch.randint(2**63 - 1, (len(prompts),), generator=generator, device=generator.device).tolist()
        requests = [
            Request(prompt, max_new_tokens, settings, seed, stop_ids)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        # No row of a batch is short of blocks, and as no one waits for a first token, prompts are read many at once.
        longest = sorted(min(len(prompt) + max_new_tokens + 16, self.config.block_size + 16) for prompt in prompts)
        engine = Engine(self, pool_tokens=sum(longest[-batch_size:]), max_batch=batch_size, prefill_chunk=4096)
        return [answer.ids for answer in engine.answer_all(requests)]


# --- the program ----------------------------------------------------------------------------------------------------


PROOF_TOKENS = 96  # the proof covers this many positions
PROOF_WINDOW = 24  # tokens that a sliding cache sees in it
ROUNDING = 4.0  # two roundings of the same sum, each as far off as the one that is measured, and as much again to spare


@dataclass
class Config:
    """See configs/kv_cache.yaml for units and meaning."""

    checkpoint: str
    out: str
    device: str
    quant: str
    kv: str
    draft: str
    prompt: str
    new_tokens: int
    prompt_lengths: list[int]
    repeats: int
    race_seconds: float
    tolerance: float


def find_checkpoint(cfg: Config) -> Path:
    """The one that is named, or the newest stage of sft and base that is there."""
    if cfg.checkpoint:
        return Path(cfg.checkpoint)
    for stage in ("sft", "base"):
        path = Path(cfg.out) / f"ckpt_{stage}.pt"
        if path.exists():
            return path
    raise UserError(
        f"{cfg.out}: no ckpt_sft.pt and no ckpt_base.pt there; run `make pretrain` first, or name one with checkpoint=PATH"
    )


# What is fed to the cache in each row of the proof, as sizes of chunks; a negative number rewinds by so many tokens.
def ways_to_feed(length: int) -> dict[str, list[int]]:
    third = length // 3
    return {
        "token by token": [1] * length,
        "one prefill": [length],
        "uneven chunks": [third, 1, 2, length - third - 3],
        "after a rewind": [length - 2, -third, third, 2],
    }


def feed(model: CachedGPT, ids: Tensor, cache: KVCache, chunks: Sequence[int]) -> Tensor:
    """Logits of all positions of ids (B, T), computed chunk by chunk on the cache; those of a rewound part are replaced."""
    logits = torch.empty(*ids.shape, model.config.vocab_size, device=ids.device, dtype=model.place[0])
    for chunk in chunks:
        if chunk < 0:
            cache.crop(cache.length + chunk)
        else:
            at = slice(cache.length, cache.length + chunk)
            logits[:, at] = model(ids[:, at], cache)[0]
    assert cache.length == ids.size(1)
    return logits


# What makes an empty cache of each kind: (config, rows, starts, device, dtype) -> cache.
KINDS: dict[str, Callable[..., KVCache]] = {
    "dynamic": lambda config, rows, starts, device, dtype: DynamicCache(config, rows, starts),
    "static": lambda config, rows, starts, device, dtype: StaticCache(config, rows, starts, device=device, dtype=dtype),
    "sliding": lambda config, rows, starts, device, dtype: SlidingCache(
        config, rows, starts, window=PROOF_WINDOW, slack=PROOF_TOKENS // 3, device=device, dtype=dtype
    ),
    "paged": lambda config, rows, starts, device, dtype: BlockPool(
        config, rows * -(-config.block_size // 16), device=device, dtype=dtype
    ).cache(rows, starts),
    "bfloat16": lambda config, rows, starts, device, dtype: StaticCache(
        config, rows, starts, device=device, dtype=torch.bfloat16
    ),
    "int8": lambda config, rows, starts, device, dtype: QuantizedCache(config, rows, starts, device=device),
}


def in_bfloat16(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values as a cache in bfloat16 gives them back, each off by at most 1/256 of itself."""
    return k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype)


def in_int8(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    (k, k_scale), (v, v_scale) = quantize(k), quantize(v)
    return k * k_scale, v * v_scale


ROUNDED = {"bfloat16": in_bfloat16, "int8": in_int8}  # the kinds that round keys and values


def full_pass(reference: GPT, ids: Tensor, kind: str) -> Tensor:
    """Logits without a cache, of the attention that a kind of cache stands for: that of a sliding one sees a window, that
    of bfloat16 and int8 keys and values after rounding."""
    n = ids.size(1)
    window = torch.ones(n, n, dtype=torch.bool, device=ids.device).tril().triu(1 - PROOF_WINDOW)
    mask = window if kind == "sliding" else None
    keep = [ROUNDED[kind]] * reference.config.n_layer if kind in ROUNDED else None
    return reference.lm_head(reference.hidden_states(ids, mask=mask, keep=keep))


def both_ways(
    model: CachedGPT, reference: GPT, ids: Tensor, kind: str, ways: Sequence[str] = ()
) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits of all positions of ids (1, T) without and with a cache of this kind, for each of the ways to feed it, or all."""
    dtype, device = model.place
    # What is fed and no more: for the whole context of a real model some of these would take gigabytes.
    cache = partial(KINDS[kind], replace(model.config, block_size=ids.size(1)), device=device, dtype=dtype)
    feeds = ways_to_feed(ids.size(1))
    full, outputs = full_pass(reference, ids, kind), {}
    for way, chunks in feeds.items():
        if not ways or way in ways:
            outputs[way] = (full, feed(model, ids, cache(1, None), chunks))
    if not ways or "batch of 3" in ways:
        batch = torch.cat((ids, ids.flip(1), (ids + 1) % reference.config.vocab_size))
        fed = feed(model, batch, cache(3, None), feeds["uneven chunks"])
        outputs["batch of 3"] = (full_pass(reference, batch, kind), fed)
    if not ways or "ragged batch" in ways:  # padded on the left, and each row must equal itself alone
        cut = ids.size(1) // 4
        starts = torch.tensor([0, cut], device=ids.device)
        ragged = torch.cat((ids, torch.cat((torch.zeros_like(ids[:, :cut]), ids[:, cut:]), dim=1)))
        fed = feed(model, ragged, cache(2, starts), feeds["uneven chunks"])
        alone = torch.cat((full, full_pass(reference, ids[:, cut:], kind)), 1)
        outputs["ragged batch"] = (alone, torch.cat((fed[:1], fed[1:, cut:]), 1))
    return outputs


def prove(model: CachedGPT, reference: GPT, ids: Tensor, tolerance: float, moved: float = 0.0) -> list[dict[str, Any]]:
    """Compare cached logits with the full forward pass over all positions of ids (1, T), in every way to feed them.

    A large model rounds more: SmolLM2's logits without any cache are off by more than the tolerance, in float32 against
    float64. A way that exceeds it is run again in float64, where the tolerance must hold as it is, so that no fault
    can pass for rounding; in float32 it may then differ by ROUNDING times what its logits without a cache are off.

    Keys and values in bfloat16 and int8 are compared in float64 only. In float32 another order of summing now and then puts
    a number on the other side of a border between two steps, and a whole step of one moved the logits of a model by up to 0.06.
    So it is with bfloat16 factors in products (packed.factor). In float64 the tolerance must hold; in float32, where the
    kernels are, they may differ by `moved`, which is what rounding all of the factors, and not a few, moves the logits.
    """
    exact: GPT | None = None  # made where it is needed
    results = []

    def difference(pair: tuple[Tensor, Tensor]) -> float:
        return float((pair[0].cpu() - pair[1].cpu()).abs().max())

    with torch.inference_mode():
        for kind in KINDS:
            if kind in ROUNDED:
                reference = exact = exact if exact is not None else in_float64(reference)
                model, ids = CachedGPT.sharing(exact), ids.cpu()
            outputs = both_ways(model, reference, ids, kind)
            differences = {way: difference(pair) for way, pair in outputs.items()}
            over = [way for way, found in differences.items() if found > tolerance] if kind not in ROUNDED else []
            again = {}
            if over:
                exact = exact if exact is not None else in_float64(reference)
                again = both_ways(CachedGPT.sharing(exact), exact, ids.cpu(), kind, over)
            for way, (right, got) in outputs.items():
                allowed, in_double = tolerance, None
                if way in again:
                    in_double = difference(again[way])
                    allowed = max(tolerance, moved, ROUNDING * difference((right, again[way][0])))
                agreement = float((right.argmax(-1) == got.argmax(-1)).float().mean())
                results.append(
                    {
                        "cache": kind,
                        "way": way,
                        "difference": differences[way],
                        "allowed": allowed,
                        "float64_difference": in_double,
                        "argmax_agreement": agreement,
                        "ok": differences[way] <= allowed and (in_double is None or in_double <= tolerance),
                    }
                )
    return results


def in_float64(model: GPT) -> GPT:
    """A copy on the CPU: Apple's GPUs have no float64."""
    return copy.deepcopy(model).cpu().double()


def decode(model: GPT, ids: Tensor, n: int, device: torch.device) -> tuple[float, float, Tensor]:
    """Generate n tokens greedily: (seconds to the logits of the first, seconds from these to those of the last, the ids)."""
    moments = []

    def note(*_: object) -> None:
        machine.synchronize(device)
        moments.append(time.perf_counter())

    hook = model.lm_head.register_forward_hook(note)  # which runs once for each token
    try:
        note()
        out = model.generate(ids, n, temperature=0.0)
    finally:
        hook.remove()
    return moments[1] - moments[0], moments[-1] - moments[1], out


def race(
    cached: GPT,
    plain: GPT,
    ids: Tensor,
    n: int,
    repeats: int,
    device: torch.device,
    tick: Callable[[], object],
    allowed: float = 0.0,
) -> dict[str, float]:
    """The same greedy generation with and without the cache, alternating, medians; raises if the tokens differ.

    allowed: logits that are no further apart count as equal, and the texts may part where two ids have such.
    """
    seconds: dict[str, list[tuple[float, float]]] = {"cached": [], "plain": []}
    outputs = {}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, model in (("cached", cached), ("plain", plain)):
            first, rest, outputs[name] = decode(model, ids, n if turn else min(n, 4), device)
            if turn:
                seconds[name].append((first, rest))
        tick()
    if not torch.equal(outputs["cached"], outputs["plain"]):
        at = int((outputs["cached"] != outputs["plain"]).nonzero()[0, 1])
        where = f"greedy tokens differ with and without the cache, from new token {at - ids.size(1)} on"
        with torch.inference_mode():
            context = outputs["plain"][:, sampling.window_start(at, plain.config.block_size) : at]
            logits = plain(context)[0, -1]
        gap = float(logits[outputs["plain"][0, at]] - logits[outputs["cached"][0, at]])
        if gap > allowed:
            raise UserError(f"{where}: the cache is wrong")
        console.print(f"{where}, where the logits of two ids are {gap:.1e} apart and {allowed:.1e} is allowed")
    result = {"prompt_tokens": float(ids.size(1)), "new_tokens": float(n), "repeats": float(repeats)}
    for name, pairs in seconds.items():
        first, rest = (statistics.median(column) for column in zip(*pairs, strict=True))
        result[f"{name}_first_token_s"] = first
        result[f"{name}_tokens_per_s"] = (n - 1) / rest
    result["ratio"] = result["cached_tokens_per_s"] / result["plain_tokens_per_s"]
    return result


@dataclass
class Races:
    """What is timed, in tokens: one text of `new_tokens` behind `prompt`, and `few` behind contexts of other lengths."""

    prompt: int
    new_tokens: int
    few: int
    lengths: list[int]
    repeats: int

    def tokens(self) -> int:
        """How many the network reads without the cache, where each new token costs all before it; what it reads with the
        cache is small beside that."""
        turn = self.new_tokens * (self.prompt + self.new_tokens // 2) + self.few * sum(self.lengths)
        return self.repeats * turn + 4 * (self.prompt + sum(self.lengths))  # four tokens of each warm up

    def within(self, budget: float) -> Races:
        """The most that reads no more than `budget` tokens, or all: fewer repeats first, then fewer new tokens, then
        fewer contexts, the longest first. At the least one short text remains."""
        races = replace(self)
        while races.tokens() > budget:
            if races.repeats > 1:
                races.repeats -= 1
            elif races.new_tokens > 10 and races.few > 3:
                races.new_tokens, races.few = races.new_tokens // 2, races.few // 2
            elif races.lengths:
                races.lengths = sorted(races.lengths)[:-1]
            else:
                break
        return races


def find_drafter(cfg: Config, loaded: checkpoint.Checkpoint, device: torch.device) -> speculative.Drafter | None:
    """What draft= names: prompt lookup, or the model of a checkpoint, packed like the one that it drafts for."""
    if not cfg.draft or cfg.draft == "lookup":
        return speculative.PromptLookup() if cfg.draft else None
    small = checkpoint.load(Path(cfg.draft))
    if small.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
        raise UserError(f"draft={cfg.draft}: its tokenizer is not that of {loaded.path}: train both with one tokenizer")
    return speculative.ModelDraft(CachedGPT.from_loaded(small, device).pack(cfg.quant, cfg.kv))


def race_drafter(
    cached: CachedGPT, drafter: speculative.Drafter, ids: Tensor, n: int, repeats: int, device: torch.device
) -> dict[str, float]:
    """The same greedy generation with and without guesses, alternating, medians of whole texts; raises if tokens differ."""
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    for turn in range(repeats + 1):  # the first turn warms up
        for name in seconds:
            machine.synchronize(device)
            start = time.perf_counter()
            if name == "plain":
                right = cached.generate(ids, n, temperature=0.0)
            else:
                out, tally = speculative.generate(cached, ids, n, sampling.Settings(temperature=0.0), drafter)
            machine.synchronize(device)
            if turn:
                seconds[name].append(time.perf_counter() - start)
    if not torch.equal(out, right):
        where = int((out != right).nonzero()[0, 1]) - ids.size(1)
        raise UserError(f"greedy tokens differ with and without guesses, from new token {where} on")
    result = {f"{name}_tokens_per_s": n / statistics.median(times) for name, times in seconds.items()}
    return {
        "acceptance": tally.acceptance,
        "tokens_per_step": tally.tokens_per_step,
        **result,
        "ratio": result["drafted_tokens_per_s"] / result["plain_tokens_per_s"],
    }


def rounding_cost(
    loaded: checkpoint.Checkpoint, plain: GPT, folder: Path, device: torch.device, kv: torch.dtype | None
) -> float | None:
    """Bits per byte that the rounded model, with rounded keys and values, loses on the text held out by pretraining; None
    without that text, or where it lies in the tokens of another model."""
    if not (folder / "ckpt_base.pt").exists():
        return None
    base = checkpoint.load(folder / "ckpt_base.pt")
    if base.tokenizer.fingerprint != loaded.tokenizer.fingerprint:
        return None
    corpus = held_out(base)
    after = CachedGPT.sharing(plain)
    after.kv_dtype = kv

    def through(ids: Tensor) -> Tensor:
        return after.extend(ids, after.new_cache(len(ids)))

    before = GPT.from_loaded(loaded, device)
    bits = partial(bits_per_byte, tok=corpus.tokenizer, file=corpus.val, dtype=torch.float32)
    return bits(after, through=through) - bits(before)


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Time per token against the length of the context, with and without the cache."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lengths = [row["prompt_tokens"] for row in rows]
    for name, label in (("plain", "without cache"), ("cached", "with cache")):
        rates = [row[f"{name}_tokens_per_s"] for row in rows]
        left.plot(lengths, rates, marker="o", label=label)
        right.plot(lengths, [1000 / rate for rate in rates], marker="o", label=label)
    left.set(xlabel="context (tokens)", ylabel="decode (tokens/s)", ylim=(0, None))
    right.set(xlabel="context (tokens)", ylabel="time per token (ms)", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Generation with and without the KV cache")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


def main() -> None:
    cfg = config.load("kv_cache", Config)
    if cfg.new_tokens < 2 or cfg.repeats < 1 or min(cfg.prompt_lengths, default=1) < 1 or not cfg.prompt:
        raise UserError("new_tokens must be at least 2, repeats and prompt_lengths at least 1, and prompt not empty")
    if not 0 <= cfg.race_seconds < math.inf:
        raise UserError(f"race_seconds is {cfg.race_seconds}: it must be 0 (no limit) or above")
    path = find_checkpoint(cfg)
    device = machine.pick_device(cfg.device)
    loaded = checkpoint.load(path)
    drafter = find_drafter(cfg, loaded, device)
    plain = rounded(GPT.from_loaded(loaded, device), cfg.quant)
    cached = CachedGPT.from_loaded(loaded, device).pack(cfg.quant, cfg.kv)
    without_kernels = kernels.build() if device.type == "cpu" else ""
    if without_kernels:
        console.print(f"{without_kernels}: decoding on torch's operators, which takes longer", markup=False)
    tok, shape = loaded.tokenizer, plain.config
    lengths = [n for n in cfg.prompt_lengths if n < shape.block_size]
    text = tok.encode(cfg.prompt)
    longest = max(PROOF_TOKENS, 1 + len(text), *lengths)
    ids = torch.tensor([[tok.eot_id, *(text * (longest // len(text) + 1))][:longest]], device=device)
    prompt = ids[:, : 1 + len(text)]
    console.print(
        f"{path}: {plain.n_parameters() / 1e6:.2f} M parameters, stage {loaded.stage}; {cfg.quant} weights, {cfg.kv} keys and values, on {machine.describe(device)}",
        markup=False,
    )

    shown, moved = ids[:, : min(PROOF_TOKENS, shape.block_size)], 0.0
    if cfg.quant == "bfloat16":
        weights_only = rounded(GPT.from_loaded(loaded, device), cfg.quant, factors=False)
        with torch.inference_mode():
            moved = float((plain(shown) - weights_only(shown)).abs().max())
    proof = prove(cached, plain, shown, cfg.tolerance, moved)
    again = [row for row in proof if row["float64_difference"] is not None]
    table = Table(
        *("cache", "fed as", "max |full - cached|", "same argmax", ""),
        *(("allowed", "in float64") if again else ()),
        title=f"Correctness, over all positions, {cfg.quant} weights",
    )
    for row in proof:
        cells = [row["cache"], row["way"], f"{row['difference']:.1e}", f"{row['argmax_agreement']:.1%}"]
        cells.append("ok" if row["ok"] else "WRONG")
        if row in again:
            cells += [f"{row['allowed']:.1e}", f"{row['float64_difference']:.0e}"]
        table.add_row(*cells)
    console.print(table)
    if again:
        console.print(
            f"{len(again)} ways exceed the tolerance of {cfg.tolerance} in float32; in float64 they are off by at most "
            f"{max(row['float64_difference'] for row in again):.0e}. In float32 they may be off by {ROUNDING:.0f} times what it moves "
            f"their logits without any cache"
            + (f", or by the {moved:.1e} that bfloat16 in products moves them" if moved else ""),
            markup=False,
        )
    wrong = [row for row in proof if not row["ok"]]
    if wrong:
        raise UserError(f"{len(wrong)} of {len(proof)} ways differ by more than is allowed: the cache is wrong")

    asked = Races(prompt.size(1), cfg.new_tokens, 12, lengths, cfg.repeats)
    races = asked
    if cfg.race_seconds:
        with torch.inference_mode():
            seconds = machine.times(lambda: plain(ids[:, : shape.block_size]), device, 1)[0]
        per_token = seconds / min(ids.size(1), shape.block_size)
        races = asked.within(cfg.race_seconds / per_token)
        if races != asked:
            console.print(
                f"without the cache {min(ids.size(1), shape.block_size)} tokens take {seconds:.1f} s, so the race as it was asked "
                f"for would take {asked.tokens() * per_token / 60:.0f} minutes. For race_seconds={cfg.race_seconds:g} it is cut to "
                f"repeats={races.repeats}, new_tokens={races.new_tokens}, and {races.few} tokens behind each of "
                f"prompt_lengths={races.lengths}; race_seconds=0 runs it in full",
                markup=False,
            )
    progress, task = bar("timing", (len(races.lengths) + 1) * (races.repeats + 1))
    with progress:
        advance = partial(progress.advance, task)
        allowed = max(row["allowed"] for row in proof)
        if cached.kv_dtype:  # its texts part from those of float32 where two ids are as near as this rounding
            with torch.inference_mode():
                moved = float((full_pass(plain, shown, cfg.kv) - plain(shown)).abs().max())
            allowed = max(allowed, ROUNDING * moved)
        main_race = race(cached, plain, prompt, races.new_tokens, races.repeats, device, advance, allowed)
        by_length = [
            race(cached, plain, ids[:, :n], races.few, races.repeats, device, advance, allowed) for n in races.lengths
        ]
    table = Table(
        "",
        "first token (ms)",
        "decode (tokens/s)",
        title=f"Speed: {prompt.size(1)} prompt + {races.new_tokens} new tokens, greedy, batch 1",
    )
    for name, label in (("plain", "without cache"), ("cached", "with cache")):
        table.add_row(
            label, f"{1000 * main_race[f'{name}_first_token_s']:.1f}", f"{main_race[f'{name}_tokens_per_s']:,.0f}"
        )
    table.add_row("ratio", "", f"{main_race['ratio']:.1f}x")
    console.print(table)
    table = Table(
        "context (tokens)",
        "without (ms/token)",
        "with (ms/token)",
        "ratio",
        title="Time per token: without the cache it grows with the context",
    )
    for row in by_length:
        table.add_row(
            f"{row['prompt_tokens']:.0f}",
            f"{1000 / row['plain_tokens_per_s']:.1f}",
            f"{1000 / row['cached_tokens_per_s']:.1f}",
            f"{row['ratio']:.1f}x",
        )
    console.print(table)

    drafted = None
    if drafter:
        drafted = race_drafter(cached, drafter, prompt, cfg.new_tokens, cfg.repeats, device)
        console.print(
            f"Speculative decoding, draft={cfg.draft}: {drafted['acceptance']:.0%} of the guessed tokens accepted, "
            f"{drafted['tokens_per_step']:.1f} tokens per step; with the prompt {drafted['drafted_tokens_per_s']:,.0f} tokens/s "
            f"against {drafted['plain_tokens_per_s']:,.0f}, {drafted['ratio']:.1f}x; the tokens are the same",
            markup=False,
        )

    lost: float | None = 0.0
    if cfg.quant != "float32" or cached.kv_dtype:
        lost = rounding_cost(loaded, plain, path.parent, device, cached.kv_dtype)
        console.print(
            f"Rounding to {cfg.quant} weights and {cfg.kv} keys and values costs "
            + (
                f"{lost:+.4f} bits per byte of the text that pretraining held out"
                if lost is not None
                else "an unknown number of bits per byte: no ckpt_base.pt with a text in its tokens lies beside this checkpoint"
            ),
            markup=False,
        )

    held = min(shape.block_size, prompt.size(1) + cfg.new_tokens)
    static = cached.new_cache(1, capacity=held)
    dynamic = DynamicCache(shape)
    half = held // 2
    feed(cached, ids[:, :half], dynamic, [half])
    memory = {
        "tokens": held,
        "formula_bytes": kv_cache_bytes(shape, 1, held, static.k[0].element_size()),
        "static_bytes": static.nbytes(),
        "dynamic_tokens": dynamic.length,
        "dynamic_formula_bytes": kv_cache_bytes(shape, 1, dynamic.length, 4),
        "dynamic_bytes": dynamic.nbytes(),
    }
    console.print(
        f"Memory: 2 x {shape.n_layer} layers x 1 row x {held} tokens x {shape.n_kv_head} kv heads x {shape.width_of_head} x {static.k[0].element_size()} bytes = "
        f"{memory['formula_bytes']:,} bytes; StaticCache allocated {memory['static_bytes']:,}\n"
        f"        after {dynamic.length} tokens the formula gives {memory['dynamic_formula_bytes']:,} bytes; DynamicCache holds {memory['dynamic_bytes']:,}",
        markup=False,
    )
    folder = path.parent
    # The numbers of a model from elsewhere stand beside those of ours, not in their place.
    name = "kv_cache" if loaded.stage in checkpoint.STAGES else f"{loaded.stage}_kv_cache"
    numbers = {
        "checkpoint": str(path),
        "quant": cfg.quant,
        "kv": cfg.kv,
        "bits_per_byte_lost": lost,
        "machine": machine.describe(device),
        "max_difference": max(row["difference"] for row in proof),
        "proof": proof,
        "speed": main_race,
        "by_length": by_length,
        "speculative": drafted,
        "memory": memory,
    }
    if by_length:
        plot(by_length, folder / f"plot_{name}.png")
        console.print(f"plot {folder / f'plot_{name}.png'}, numbers {folder / f'{name}.json'}", markup=False)
    write_json(folder / f"{name}.json", numbers)
    console.print(f"report {report.refresh(folder)}", markup=False)
    print(json.dumps({key: numbers[key] for key in ("checkpoint", "machine", "max_difference", "speed", "memory")}))


if __name__ == "__main__":
    run(main)
