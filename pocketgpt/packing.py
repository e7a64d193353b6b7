"""Rows of several conversations that cannot see each other, for training without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pocketgpt import chat_template
from pocketgpt.errors import UserError
from pocketgpt.loss import IGNORE
from pocketgpt.mixture import Shuffled
from pocketgpt.shapes import Chat
from pocketgpt.tokenizer import Tokenizer

OPEN_ROWS = 64  # rows that wait for something short at a time: enough to fill them to 97 % (README.md)


@dataclass(frozen=True)
class Example:
    """One conversation as the network reads it: the target of position t is the id at t + 1."""

    inputs: np.ndarray  # (n,) int64
    targets: np.ndarray  # (n,) int64, IGNORE where nothing is supervised

    @classmethod
    def of(cls, ids: Sequence[int], supervised: Sequence[bool]) -> Example:
        everything = np.array(ids, np.int64)
        targets = np.where(np.array(supervised, bool), everything, IGNORE)
        return cls(everything[:-1], targets[1:])

    def __len__(self) -> int:
        return len(self.inputs)


def encode(tok: Tokenizer, item: Chat | str) -> tuple[list[int], list[bool]]:
    """The ids of a conversation, or of a text as pretraining reads it, and for each id whether it is supervised."""
    if isinstance(item, Chat):
        return chat_template.render(tok, item.messages, item.learn_from)
    ids = [tok.eot_id, *tok.encode(item), tok.eot_id]
    return ids, [False] + [True] * (len(ids) - 1)


def examples(
    tok: Tokenizer, items: Iterable[Chat | str], block_size: int, side: str = "training"
) -> tuple[list[Example], int]:
    """Encode conversations and texts. Returns those that fit into block_size, and how many conversations did not. A
    longer text becomes several examples.

    Raises:
        UserError: if nothing is left, or nothing in what is left is supervised.
    """
    kept, too_long = [], 0
    for item in items:
        example = Example.of(*encode(tok, item))
        if len(example) <= block_size:
            kept.append(example)
        elif isinstance(item, Chat):
            too_long += 1
        else:
            spans = (slice(start, start + block_size) for start in range(0, len(example), block_size))
            kept += [Example(example.inputs[span], example.targets[span]) for span in spans]
    if not kept:
        raise UserError(f"no {side} conversation is left: {too_long} were longer than the block of {block_size} tokens")
    if not any((example.targets != IGNORE).any() for example in kept):
        raise UserError(f"no supervised token in the {side} data: the conversations have no assistant turn")
    return kept, too_long


@dataclass
class Packed:
    """A batch of rows, (B, T) each: ids, targets, positions within the conversation, number of the conversation."""

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    segments: Tensor


def attention_mask(segments: Tensor) -> Tensor:
    """segments (B, T) int64 -> (B, 1, T, T) bool: causal, and only within the same conversation."""
    length = segments.size(1)
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def lay_out(rows: Sequence[Sequence[Example]], length: int) -> Packed:
    """Put each row's examples one behind the other; what is left of `length` is padding that nobody sees."""
    shape = (len(rows), length)
    inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
    positions, segments = np.zeros(shape, np.int64), np.full(shape, -1, np.int64)
    for r, row in enumerate(rows):
        at = 0
        for number, example in enumerate(row):
            span = slice(at, at + len(example))
            inputs[r, span], targets[r, span] = example.inputs, example.targets
            positions[r, span], segments[r, span] = np.arange(len(example)), number
            at += len(example)
    return Packed(*map(torch.from_numpy, (inputs, targets, positions, segments)))


def longest_allowed(block_size: int, max_length: int) -> int:
    """The most tokens of an example: those that the model takes, or max_length where that is less and not 0.

    Raises:
        UserError: if max_length is negative.
    """
    if max_length < 0:
        raise UserError(f"max_length is {max_length}: it must be at least 1, or 0 for as many as the model takes")
    return min(block_size, max_length or block_size)


def row_length(items: Sequence[Example], block_size: int) -> int:
    """Tokens per row: as few as hold the longest example, in steps of 128 up to block_size, because attention inside a row
    costs its square, and examples do not see each other anyway."""
    longest = max(map(len, items))
    return min(block_size, -(-longest // 128) * 128)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit with a limited number of open rows: indices of the items, in rows of at most `capacity` in sum.

    Every length must be at most `capacity`, so that this ends.
    """
    closed: list[list[int]] = []
    rows: list[tuple[list[int], int]] = []  # open ones: members, room left
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {index} of length {length} does not fit into {capacity}")
        place = next((i for i, (_, room) in enumerate(rows) if room >= length), None)
        if place is None:
            if len(rows) == OPEN_ROWS:
                fullest = min(range(len(rows)), key=lambda i: rows[i][1])
                closed.append(rows.pop(fullest)[0])
            rows.append(([index], capacity - length))
        else:
            members, room = rows[place]
            members.append(index)
            rows[place] = (members, room - length)
    return closed + [members for members, _ in rows]


class PackedRows:
    """Training rows in random order; which ones a step sees is a pure function of seed and step."""

    def __init__(self, items: Sequence[Example], block_size: int, seed: int) -> None:
        self.items, self.block_size = items, block_size
        order = np.random.default_rng(seed).permutation(len(items))
        # Packed once: who shares a row changes nothing, since they cannot see each other, and so every epoch has the same
        # number of rows.
        self.rows = [[int(order[i]) for i in row] for row in pack([len(items[i]) for i in order], block_size)]
        self.per_epoch = len(self.rows)
        self.shuffled = Shuffled(self.rows, seed)

    def row(self, number: int) -> list[Example]:
        """What row `number` of the endless order holds."""
        return [self.items[i] for i in self.shuffled.row(number)]

    def batch(self, step: int, batch_size: int) -> Packed:
        """The rows of a step, counted from 0."""
        rows = [self.row(number) for number in range(step * batch_size, (step + 1) * batch_size)]
        return lay_out(rows, self.block_size)
