"""What a family of tasks is: slots drawn at random, a question posed from them, an answer a program can check."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pocketgpt.errors import UserError
from pocketgpt.tasks.corpus import Corpus

Slots = dict[str, str]
Messages = list[dict[str, str]]

HELDOUT_ONE_IN = 10
MAX_DRAWS = 10_000  # a side with anything in it is found long before


@dataclass(frozen=True)
class Item:
    """One checkable question.

    `slots` is the combination asked for (plain strings); `messages` is an optional system prompt, earlier turns, and
    last the user turn to answer; `answer` is one reference answer that passes the check.
    """

    family: str
    slots: Slots
    messages: Messages
    answer: str

    def conversation(self) -> Messages:
        """The messages with the reference answer as the assistant's last turn."""
        return [*self.messages, turn("assistant", self.answer)]


def turn(role: str, content: str) -> dict[str, str]:
    """One chat message."""
    return {"role": role, "content": content}


class Family:
    """A kind of question. `passes` says in one line which answers pass.

    `content` names the slots that decide the split between training and held-out items; families of one `group`
    share it, so a story kept out of training is kept out of every family that tells stories.
    """

    name: str
    passes: str
    content: tuple[str, ...]
    group: ClassVar[str] = ""

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        """A random slot combination, from either side of the split."""
        raise NotImplementedError

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        """The question for these slots, in one of several wordings, with a reference answer."""
        raise NotImplementedError

    def check(self, slots: Slots, text: str) -> bool:
        """Whether `text` answers the question that `slots` asks."""
        raise NotImplementedError

    def available(self, corpus: Corpus) -> bool:
        """Whether the corpus holds what the family needs; most need nothing."""
        return True

    def heldout(self, slots: Slots) -> bool:
        """Whether the combination belongs to the held-out tenth: a hash, the same on every machine and in every run."""
        # Sorted, so that 3 + 4 and 4 + 3, or counting up and down, fall on the same side.
        key = "\n".join([self.group or self.name, *sorted(slots[name] for name in self.content)])
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % HELDOUT_ONE_IN == 0

    def draw_from(self, rng: random.Random, corpus: Corpus, *, heldout: bool) -> Slots:
        """A random slot combination from one side of the split. UserError if it is empty (a tiny corpus)."""
        for _ in range(MAX_DRAWS):
            slots = self.draw(rng, corpus)
            if self.heldout(slots) == heldout:
                return slots
        side = "held-out" if heldout else "training"
        raise UserError(f"the speeches are too few: the task family {self.name!r} finds no {side} combination in them")

    def make(self, rng: random.Random, corpus: Corpus, *, heldout: bool = False) -> Item:
        """A random item from one side of the split."""
        return self.pose(rng, self.draw_from(rng, corpus, heldout=heldout), corpus)

    def item(self, slots: Slots, question: str, answer: str, before: Sequence[dict[str, str]] = ()) -> Item:
        """An item of this family that asks `question` after the messages `before`."""
        return Item(self.name, slots, [*before, turn("user", question)], answer)
