"""Several sources of training rows as one: which source a row comes from is a pure function of seed and number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import numpy as np

Item = TypeVar("Item")
T = TypeVar("T", covariant=True)
BLOCK = 1024  # rows within which the shares hold to one row


class Rows(Protocol[T]):
    """An endless order of rows, such as `PackedRows` and `Windows`."""

    def row(self, number: int) -> T:
        """Row `number`, counted from 0."""
        ...


class Shuffled(Generic[Item]):
    """Items in an endless order: every epoch has all of them once, in an order that follows from seed and epoch."""

    def __init__(self, items: Sequence[Item], seed: int) -> None:
        self.items, self.seed = items, seed
        self._order = lru_cache(maxsize=2)(self._epoch)  # two: a batch may lie across the border

    def _epoch(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.items))

    def row(self, number: int) -> Item:
        """Item `number` of the order, counted from 0."""
        epoch, at = divmod(number, len(self.items))
        return self.items[self._order(epoch)[at]]


class Mixture:
    """An endless sequence of picks among sources, each source's own rows in their own order.

    Of every block of rows a source gets its share to within one row, and exactly its share in expectation: that is
    systematic sampling, equally spaced points over the shares laid end to end, from a random start. Then the block is
    shuffled.
    """

    def __init__(self, shares: Sequence[float], seed: int) -> None:
        """`shares` > 0, of any sum; `seed` >= 0."""
        self.ends = np.cumsum(shares) / np.sum(shares)
        self.ends[-1] = 1.0  # whatever the rounding: every point lies below it
        self.seed = seed
        self._block = lru_cache(maxsize=2)(self._draw)  # two: a batch may lie across the border
        self._counts = [np.zeros(len(shares), np.int64)]  # rows of each source before each block drawn so far

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The sources of a block's rows, and for each row how many of its source come before it in the block."""
        rng = np.random.default_rng([self.seed, block])
        points = (rng.permutation(BLOCK) + rng.random()) / BLOCK
        sources = np.searchsorted(self.ends, points, side="right")
        each = sources[:, None] == np.arange(len(self.ends))
        return sources, (np.cumsum(each, axis=0) - 1)[np.arange(BLOCK), sources]

    def pick(self, number: int) -> tuple[int, int]:
        """(source, number of the row among those of that source) of row `number`, both counted from 0."""
        block, at = divmod(number, BLOCK)
        while len(self._counts) <= block:
            sources, _ = self._draw(len(self._counts) - 1)
            self._counts.append(self._counts[-1] + np.bincount(sources, minlength=len(self.ends)))
        sources, before = self._block(block)
        source = int(sources[at])
        return source, int(self._counts[block][source] + before[at])

    def rows(self, sources: Sequence[Rows[T]], step: int, batch_size: int) -> list[T]:
        """The rows of a step, counted from 0: step s takes those from s * batch_size on."""
        picks = (self.pick(number) for number in range(step * batch_size, (step + 1) * batch_size))
        return [sources[source].row(number) for source, number in picks]
