"""Pretraining text that is read from a dataset of the hub while the model trains: no limit, and nothing of it on disk.

Each process reads its part of the dataset, which `datasets.distributed.split_dataset_by_node` gives it: in every pass over the data
each document goes to one process. Rows follow each other as the text does, end of text between documents, so a process trains on
every token of its part once a pass. Only the tokenizer and the held-out text are made before, and kept.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pocketgpt.corpus import Documents
from pocketgpt.errors import UserError
from pocketgpt.token_files import Ids, batches
from pocketgpt.tokenizer import Tokenizer

BATCH = 1 << 16  # characters that are encoded at a time
TOKENIZER_BYTES = 1 << 26  # of text at most that the tokenizer learns from
HELD_OUT_BYTES = 1 << 22  # of text at most that is held out


class Stream:
    """What stands in a corpus for text whose size nobody knows. docs: those of this process."""

    def __init__(self, docs: Documents, tok: Tokenizer) -> None:
        self.docs, self.tok = docs, tok
        self.meta: dict[str, Any] = {"bytes": 0}

    def __len__(self) -> int:
        return sys.maxsize

    def windows(self, block_size: int, seed: int) -> StreamRows:
        """The seed changes nothing: the text comes in its own order."""
        return StreamRows(self.docs, self.tok, block_size)


class StreamRows:
    """Rows of a stream in an endless order, of which a process reads its own and knows nothing of the others.

    A pure function of the number, so that a run can be resumed: what lies behind is then read again and passed over.
    """

    def __init__(self, docs: Documents, tok: Tokenizer, block_size: int) -> None:
        self.docs, self.tok, self.block_size = docs, tok, block_size
        self.mine: Callable[[int], bool] = lambda number: True  # whether this process runs a row, by its number
        self.next = 0  # the number that `rows` goes on with
        self.rows = self._read()

    def row(self, number: int) -> Ids:
        """(block_size + 1,) int64: row `number`, counted from 0; zeros for a row of another process.

        Raises:
            UserError: if there is no document for this process in a whole pass.
        """
        if not self.mine(number):
            return np.zeros(self.block_size + 1, np.int64)
        if number < self.next:
            self.next, self.rows = 0, self._read()
        behind = sum(map(self.mine, range(self.next, number)))
        self.next = number + 1
        return next(itertools.islice(self.rows, behind, None))

    def _read(self) -> Iterator[Ids]:
        left = np.empty(0, np.int64)
        while True:
            found = False
            for texts in batches(self.docs(), BATCH):
                found = True
                ids = [id_ for text in self.tok.encode_batch(texts) for id_ in (*text, self.tok.eot_id)]
                left = np.concatenate([left, np.array(ids, np.int64)])
                while len(left) > self.block_size:
                    yield left[: self.block_size + 1]
                    left = left[self.block_size :]
            if not found:
                raise UserError("the dataset has no document for one of the processes: start fewer")
