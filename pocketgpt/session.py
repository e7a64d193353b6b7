"""A conversation with a model: its messages, and the cache that remembers them from turn to turn."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pocketgpt.chat_template import Message, context_ids, render_prompt
from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings, own_generator, sample
from pocketgpt.streaming import TextStream
from pocketgpt.tokenizer import Tokenizer

if TYPE_CHECKING:  # the model lives in a top-level script, which this library does not import
    from kv_cache import CachedGPT


class Session:
    """The messages are the truth, and the cache follows: between calls it holds a prefix of `context_ids` of `context()`.

    Every change is made to the messages first; then the cache is cropped to what it still has in common with them.
    This one rule covers an undone turn, a second try, turns that no longer fit, and an answer that the model wrote in
    other tokens than the tokenizer splits it into (the next turn must read it as training would have shown it).
    """

    def __init__(
        self,
        model: CachedGPT,
        tok: Tokenizer,
        settings: Settings,
        *,
        system: str = "",
        max_new_tokens: int | None = None,
        seed: int | None = None,
    ) -> None:
        """max_new_tokens: per answer; None: as many as fit. seed: in [0, 2^63); None: a new one each time.

        Raises:
            UserError: on a value outside its range, or a system prompt that leaves no room to talk.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {max_new_tokens}: it must be at least 1")
        if seed is not None and not 0 <= seed < 2**63:
            raise UserError(f"seed is {seed}: it must be at least 0 and below 2^63")
        self.model, self.tok, self.settings = model, tok, settings
        self.max_new_tokens = max_new_tokens
        device = model.embed.weight.device
        self.generator = own_generator(device) if seed is None else torch.Generator(device).manual_seed(seed)
        self.block_size = model.config.block_size
        # An answer can count on a quarter of the context, unless it needs less.
        self.reserve = min(max_new_tokens or self.block_size, self.block_size // 4)
        self.cache = model.new_cache(capacity=min(self.block_size, 1024))  # grows: a long context can take gigabytes
        self.cached: list[int] = []  # the ids whose keys and values the cache holds
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.messages: list[Message] = []  # user and assistant in pairs, all of them
        self.dropped = 0  # how many of them, from the oldest, are no longer in the context
        self.ending = ""  # why the last answer ended: "stop", "length", "context" or "interrupted"
        self.n_new = 0  # tokens of the last answer
        if self._room(render_prompt(tok, [*self.system, {"role": "user", "content": ""}])) < 1:
            raise UserError(f"the system prompt does not fit into the context of {self.block_size} tokens: shorten it")

    def context(self) -> list[Message]:
        """What the model sees."""
        return self.system + self.messages[self.dropped :]

    def context_length(self) -> int:
        """Tokens of the context that are taken."""
        return min(self.block_size, len(context_ids(self.tok, self.context())))

    def conversation(self) -> list[Message]:
        """Everything that was said, also what no longer fits into the context."""
        return self.system + self.messages

    def ask(self, text: str) -> int:
        """Add a user message, not answered yet. Returns how many old turns leave the context to make room for it.

        Raises:
            UserError: if it would not fit even alone. The conversation is as it was.
        """
        question = {"role": "user", "content": text}
        room = self._room(render_prompt(self.tok, [*self.system, question]))
        if room < 0:
            raise UserError(
                f"the message is {-room} tokens too long for the context of {self.block_size}, of which "
                f"{self.reserve} are kept for the answer: shorten it"
            )
        first = len(self.messages) - 2 * self._most_turns(question)
        newly = max(0, first - self.dropped) // 2
        self.dropped = first
        self.messages += [question, {"role": "assistant", "content": ""}]
        self._follow()
        return newly

    def _most_turns(self, question: Message) -> int:
        """How many of the last turns fit beside the question. More turns never take less room, so a few trials tell, of
        little more than fits: a trial renders its turns once for every answer in them."""
        turns = len(self.messages) // 2

        def too_many(kept: int) -> bool:
            last = self.messages[len(self.messages) - 2 * kept :]
            return self._room(render_prompt(self.tok, [*self.system, *last, question])) < 0

        tried = 1
        while tried < turns and not too_many(tried):
            tried *= 2
        return bisect_left(range(1, min(tried, turns) + 1), True, key=too_many)

    def answer(self) -> Generator[str, None, None]:
        """Sample an answer to the last question, in the place of an earlier one, and yield its text: a piece per token,
        "" inside of a character. Closing the generator ends the answer early; what was yielded stays.

        Raises:
            UserError: if there is no question.
        """
        if not self.messages:
            raise UserError("nothing has been said yet")
        return self._answer(self.messages[-1])

    def _answer(self, answer: Message) -> Generator[str, None, None]:
        answer["content"] = ""
        self.ending, self.n_new = "interrupted", 0
        stream = TextStream(self.tok)
        try:
            prompt = render_prompt(self.tok, self.context()[:-1])
            # The last token runs again where all are held, because its logits are not.
            self._crop(prompt[:-1])
            logits = self._extend(prompt[len(self.cached) :])
            while True:
                seen = torch.tensor([self.cached], device=logits.device)
                token = int(sample(logits, self.settings, seen, self.model.n_tokens, self.generator))
                if token in self.tok.control_ids:  # none of them is text
                    self.ending = "stop"
                    break
                self.n_new += 1
                piece = stream.push(token)
                answer["content"] += piece
                yield piece
                if self.n_new == self.max_new_tokens:
                    self.ending = "length"
                    break
                if len(self.cached) == self.block_size:
                    self.ending = "context"
                    break
                logits = self._extend([token])
            if rest := stream.flush():
                answer["content"] += rest
                yield rest
        finally:
            self._follow()

    def undo(self) -> str:
        """Forget the last question and its answer. Returns the question. UserError if there is none."""
        if not self.messages:
            raise UserError("nothing has been said yet")
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        self._follow()
        return question

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages.clear()
        self._follow()

    def _room(self, prompt: list[int]) -> int:
        """Tokens that are left beside a prompt and the reserve for its answer; below 0 if it does not fit."""
        return self.block_size - self.reserve - len(prompt)

    def _follow(self) -> None:
        self.dropped = min(self.dropped, len(self.messages))
        self._crop(context_ids(self.tok, self.context()))

    def _crop(self, ids: list[int]) -> None:
        """Keep of the cache what begins `ids`."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.cached, ids, strict=False)))
        del self.cached[same:]
        self.cache.crop(same)

    @torch.inference_mode()
    def _extend(self, ids: list[int]) -> Tensor:
        """Run new ids on top of the cache: the logits after the last of them, (1, vocab_size)."""
        device = self.model.embed.weight.device
        needed = len(self.cached) + len(ids)
        if needed > self.cache.capacity:
            self.cache.reserve(min(2 * needed, self.block_size))
        hidden = self.model.extend(torch.tensor([ids], device=device), self.cache)
        self.cached += ids
        return self.model.lm_head(hidden[:, -1])
