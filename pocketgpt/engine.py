"""Many requests at once: continuous batching over a paged cache. docs/engine.md shows how it works and how to use it.

Each step runs one new token of every request that is being answered, and beside it one chunk of the prompts that came
in. A request joins as soon as there is a place for it, and leaves as soon as it ends, so no row waits for another.

What a request answers does not depend on what else is there: each row attends to its own blocks only and is sampled by
its own settings and seed. For packed weights on the kernels of a CPU that holds to the last bit. Elsewhere logits of a
product with more rows may differ in the last bits, because a library sums them in another order, which can turn a choice
between two ids that are equally good to 1e-6.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocketgpt import sampling
from pocketgpt.errors import UserError
from pocketgpt.streaming import TextStream
from pocketgpt.tokenizer import Tokenizer

if TYPE_CHECKING:  # the model and its caches live in a top-level script, which this library does not import
    from kv_cache import CachedGPT, Row


@dataclass(frozen=True)
class Request:
    """What to continue, and how. The context ends at the model's block_size, and the answer with it."""

    ids: Sequence[int]  # the prompt; one longer than block_size is cut by sampling.window_start
    max_new_tokens: int
    settings: sampling.Settings = field(default_factory=sampling.Settings)
    seed: int | None = None  # None: a new one
    stop_ids: Sequence[int] = ()  # these end the answer and are no part of it
    stop: Sequence[str] = ()  # texts that end the answer and are not shown; the engine needs a tokenizer for them
    # Called after each token with the answer so far and the text that came new ("" inside of a character, or without a
    # tokenizer); the last time with the reason set, and with no new token where a stop id was the reason.
    on_token: Callable[[Answer, str], object] | None = None


@dataclass
class Answer:
    """The answer to a request, while it is being written and after."""

    ids: list[int] = field(default_factory=list)  # new tokens, without a stop id, but with those of a stop text
    text: str = ""  # up to the stop text; "" without a tokenizer
    reason: str = ""  # why it ended: "stop", "length" (max_new_tokens), "context" (block_size) or "cancelled"


@dataclass(eq=False)
class Job:
    """A request inside of the engine."""

    number: int  # in the order of arrival
    request: Request
    answer: Answer
    ids: list[int]  # prompt and answer so far
    limit: int  # most new tokens
    uniform: list[float]  # the randomness of each of them
    stream: TextStream | None
    row: Row | None = None  # while it is active: what of ids the cache holds

    def __post_init__(self) -> None:
        self.queue()

    def queue(self) -> None:
        self.row = None
        self.key = array("q", self.ids).tobytes()  # two jobs with one key have the same text before them

    @property
    def held(self) -> Row:
        assert self.row is not None, "not active"
        return self.row

    @property
    def todo(self) -> int:
        """Tokens to read before the next one can be chosen: 1 while it is answered, more while its prompt is read."""
        return len(self.ids) - self.held.length


class Engine:
    """Answers requests side by side. `add` them at any time, and `step` or `run`."""

    def __init__(
        self,
        model: CachedGPT,
        tok: Tokenizer | None = None,
        *,
        pool_tokens: int | None = None,
        block_size: int = 16,
        max_batch: int = 32,
        prefill_chunk: int = 512,
    ) -> None:
        """tok: for texts; without one answers are ids. pool_tokens: room for keys and values, shared by all (None: all of
        max_batch can be as long as the context). block_size: tokens per block. prefill_chunk: tokens of prompts per step.
        """
        for name, value in (("block_size", block_size), ("max_batch", max_batch), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise UserError(f"the engine's {name} is {value}: it must be at least 1")
        self.model, self.tok = model, tok
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        context = model.config.block_size
        self.pool = model.new_pool(max_batch * context if pool_tokens is None else pool_tokens, block_size)
        self.waiting: list[Job] = []  # both in the order of arrival
        self.active: list[Job] = []
        self.added = 0
        self.preempted = 0  # times that a request had to give its blocks back and be read again
        self.reused = 0  # tokens of prompts that were not read, because their blocks were there

    def add(self, request: Request) -> Answer:
        """Queue a request. Its answer fills while the engine runs.

        Raises:
            UserError: if it could never be answered; the engine is as it was.
        """
        context = self.model.config.block_size
        ids = list(request.ids[sampling.window_start(len(request.ids), context) :])
        if not ids:
            raise UserError("an empty prompt has no next token: start from the end-of-text id")
        if request.stop and self.tok is None:
            raise UserError("a stop text needs the tokenizer: make the engine with Engine(model, tok)")
        limit = min(request.max_new_tokens, context - len(ids) + 1)
        if limit < 1:
            raise UserError(f"max_new_tokens is {request.max_new_tokens}: it must be at least 1")
        size, blocks = self.pool.block_size, self.pool.n_blocks
        needed = -(-(len(ids) + limit - 1) // size)
        if needed > blocks:
            raise UserError(
                f"{len(ids)} prompt and {limit} new tokens need {needed} blocks of {size}, and the pool has {blocks}: "
                "ask for fewer tokens, or give the engine more pool_tokens"
            )
        cpu = torch.device("cpu")  # the same text on every device
        seed = request.seed
        generator = sampling.own_generator(cpu) if seed is None else torch.Generator().manual_seed(seed)
        uniform = torch.rand(limit, generator=generator).tolist()
        stream = TextStream(self.tok, request.stop) if self.tok is not None else None
        job = Job(self.added, request, Answer(), ids, limit, uniform, stream)
        self.added += 1
        self.waiting.append(job)
        return job.answer

    def run(self) -> None:
        """Step until everything is answered."""
        while self.waiting or self.active:
            self.step()

    def answer_all(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to these, in their order. They join by length, so that those read together need little padding."""
        by_length = sorted(range(len(requests)), key=lambda i: len(requests[i].ids))
        answers = {i: self.add(requests[i]) for i in by_length}
        self.run()
        return [answers[i] for i in range(len(requests))]

    def cancel(self, answer: Answer) -> None:
        """End a request early, without a call of its on_token. Nothing happens if it has ended."""
        for job in self.waiting + self.active:
            if job.answer is answer:
                self._end(job, "cancelled")

    @torch.inference_mode()
    def step(self) -> None:
        """One new token for every request whose prompt is read, and a chunk of the prompts."""
        self._make_room()
        self._admit()
        answering = [job for job in self.active if job.todo == 1]
        prompts = self._next_prompts()
        # Where rows are padded, single tokens would be padded to whole prompts.
        calls = [answering + prompts] if self.model.in_one_call else [answering, prompts]
        hidden = [self._read(jobs) for jobs in calls if jobs]
        read = list(range(len(answering)))
        for i, job in enumerate(prompts, len(answering)):
            if not job.todo:
                twins = self._fork(job)
                answering += [job, *twins]
                read += [i] * (1 + len(twins))
        if not answering:
            return
        tokens = sampling.sample_rows(
            self.model.lm_head(torch.cat(hidden)[read]),
            [job.request.settings for job in answering],
            [job.ids for job in answering],
            self.model.n_tokens,
            [job.uniform[len(job.answer.ids)] for job in answering],
        ).tolist()
        pieces = [self._hear(job, token) for job, token in zip(answering, tokens, strict=True)]
        for job, piece in zip(
            answering, pieces, strict=True
        ):  # after all are in order: a callback may raise, or cancel
            if job.request.on_token is not None and job.answer.reason != "cancelled":
                job.request.on_token(job.answer, piece)

    def _make_room(self) -> None:
        """Blocks for the next tokens of all active requests; when they run out, the newest requests give theirs back."""
        for job in list(self.active):  # the oldest first, which so always gets on
            while job.row is not None and len(self.pool.wanted(job.row, job.todo)) > len(self.pool.free):
                newest = self.active.pop()
                self.pool.crop(newest.held, 0)
                newest.queue()
                insort(self.waiting, newest, key=lambda other: other.number)
                self.preempted += 1
            if job.row is not None:
                self.pool.reserve(job.row, job.todo)

    def _admit(self) -> None:
        """Waiting requests become active, in order, as long as there is room for all that they have to read."""
        reading = {job.key for job in self.active if job.todo > 1}
        for job in list(self.waiting):
            if len(self.active) == self.max_batch:
                break
            if job.key in reading:
                continue  # the same prompt is being read: see _fork
            # The last token is always read, because its logits are not stored.
            row = self.pool.recall(job.ids[:-1])
            if len(self.pool.wanted(row, len(job.ids) - row.length)) > len(self.pool.free):
                self.pool.crop(row, 0)
                break
            self.reused += row.length
            self._activate(job, row)
            self.pool.reserve(row, job.todo)
            if job.todo > 1:
                reading.add(job.key)

    def _activate(self, job: Job, row: Row) -> None:
        job.row = row
        self.waiting.remove(job)
        insort(self.active, job, key=lambda other: other.number)

    def _next_prompts(self) -> list[Job]:
        """The oldest requests with a prompt to read that fit into one chunk, with the padding that they need."""
        chosen: list[Job] = []
        longest = total = 0
        for job in self.active:
            if job.todo > 1:
                longest, total = max(longest, job.todo), total + job.todo
                tokens = total if self.model.in_one_call else longest * (len(chosen) + 1)
                if chosen and tokens > self.prefill_chunk:
                    break
                chosen.append(job)
        return chosen

    def _read(self, jobs: list[Job]) -> Tensor:
        """Run what each job has to read, up to a chunk: what the head reads of its last token, (jobs, n_embd)."""
        ids = [job.ids[job.held.length : job.held.length + self.prefill_chunk] for job in jobs]
        hidden = self.model.extend_rows(ids, self.pool, [job.held for job in jobs], last=True)
        for job in jobs:
            self.pool.remember(job.held, job.ids)
        return hidden

    def _fork(self, job: Job) -> list[Job]:
        """Waiting requests for the same prompt, which has just been read, share its blocks: n samples cost one prefill."""
        room = self.max_batch - len(self.active)
        twins = [other for other in self.waiting if other.key == job.key][:room]
        for twin in twins:
            self._activate(twin, self.pool.fork(job.held))
        return twins

    def _hear(self, job: Job, token: int) -> str:
        """Take the next token of a request: the text that it adds."""
        answer = job.answer
        if token in job.request.stop_ids:
            return self._end(job, "stop")
        job.ids.append(token)
        answer.ids.append(token)
        piece = job.stream.push(token) if job.stream is not None else ""
        answer.text += piece
        if job.stream is not None and job.stream.stopped:
            return piece + self._end(job, "stop")
        if len(answer.ids) == job.limit:
            return piece + self._end(job, "length" if job.limit == job.request.max_new_tokens else "context")
        return piece

    def _end(self, job: Job, reason: str) -> str:
        """Take a request out: the text that was held back."""
        rest = job.stream.flush() if job.stream is not None else ""
        job.answer.text += rest
        job.answer.reason = reason
        if job.row is None:
            self.waiting.remove(job)
        else:
            self.active.remove(job)
            self.pool.crop(job.row, 0)
        return rest
