"""Families with exactly one right answer: small sums, numbers in order, spaced letters.

Letters are written with spaces ("t r e e") so that a byte-pair tokenizer gives each its own token.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from pocketgpt.tasks.corpus import Corpus
from pocketgpt.tasks.family import Family, Item, Slots

STEPS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Drill(Family):
    """A family whose answer is a function of its slots.

    `wordings` are the ways to ask, `statement` says the same as plain text for pretraining, with the answer last so
    that predicting it takes the skill.
    """

    name: str
    content: tuple[str, ...]
    propose: Callable[[random.Random], Slots]
    wordings: tuple[str, ...]
    solve: Callable[[Slots], str]
    statement: str
    passes: str = "exactly the reference answer"

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        return self.propose(rng)

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        return self.item(slots, rng.choice(self.wordings).format(**slots), self.solve(slots))

    def check(self, slots: Slots, text: str) -> bool:
        return text.strip() == self.solve(slots)

    def state(self, slots: Slots) -> str:
        """The plain-text form: "37 + 45 = 82."."""
        return self.statement.format(**slots, answer=self.solve(slots))


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    """Two numbers whose sum is below 100, every pair equally likely."""
    low, high = sorted(rng.sample(range(101), 2))  # two bars among 101 places leave two gaps
    return low, high - low - 1


def _add(rng: random.Random) -> Slots:
    a, b = _two_numbers(rng)
    return {"a": str(a), "b": str(b)}


def _subtract(rng: random.Random) -> Slots:
    a, b = _two_numbers(rng)
    return {"a": str(a + b), "b": str(b)}


def _compare(rng: random.Random) -> Slots:
    a, b = rng.sample(range(100), 2)
    return {"a": str(a), "b": str(b), "which": rng.choice(("larger", "smaller"))}


def _larger_or_smaller(slots: Slots) -> str:
    pick = max if slots["which"] == "larger" else min
    return str(pick(int(slots["a"]), int(slots["b"])))


def _sequence(rng: random.Random) -> Slots:
    step, length = rng.choice(STEPS), rng.randint(3, 8)
    low = rng.randrange(100 - step * (length - 1))
    ends = [str(low), str(low + step * (length - 1))]
    rng.shuffle(ends)
    return {"first": ends[0], "last": ends[1], "by": "" if step == 1 else f" by {step}"}


def _count_through(slots: Slots) -> str:
    first, last = int(slots["first"]), int(slots["last"])
    step = int(slots["by"].removeprefix(" by ") or 1)
    numbers = range(first, last + 1, step) if first < last else range(first, last - 1, -step)
    return " ".join(map(str, numbers))


def _reverse(rng: random.Random) -> Slots:
    # Four letters to choose from, so that some repeat, as in "t r e e".
    return {"word": " ".join(rng.choices(rng.sample(string.ascii_lowercase, 4), k=rng.randint(3, 5)))}


def _count(rng: random.Random) -> Slots:
    letter, *others = rng.sample(string.ascii_lowercase, 26)
    times = rng.randint(0, 4)  # each answer equally often: no guess is better than another
    letters = [letter] * times + rng.choices(others, k=rng.randint(max(4, times + 1), 6) - times)
    rng.shuffle(letters)
    return {"letter": letter, "word": " ".join(letters)}


DRILLS = (
    Drill(
        name="add",
        content=("a", "b"),
        propose=_add,
        wordings=("What is {a} + {b}?", "Add {a} and {b}.", "How much is {a} + {b}?"),
        solve=lambda slots: str(int(slots["a"]) + int(slots["b"])),
        statement="{a} + {b} = {answer}.",
    ),
    Drill(
        name="subtract",
        content=("a", "b"),
        propose=_subtract,
        wordings=("What is {a} - {b}?", "Take {b} from {a}.", "How much is {a} - {b}?"),
        solve=lambda slots: str(int(slots["a"]) - int(slots["b"])),
        statement="{a} - {b} = {answer}.",
    ),
    Drill(
        name="compare",
        content=("a", "b"),
        propose=_compare,
        wordings=("Which is {which}, {a} or {b}?", "Give me the {which} of {a} and {b}."),
        solve=_larger_or_smaller,
        statement="Of {a} and {b} the {which} is {answer}.",
    ),
    Drill(
        name="sequence",
        content=("first", "last", "by"),
        propose=_sequence,
        wordings=("Count from {first} to {last}{by}.", "Count{by} from {first} to {last}."),
        solve=_count_through,
        statement="From {first} to {last}{by}: {answer}.",
    ),
    Drill(
        name="reverse",
        content=("word",),
        propose=_reverse,
        wordings=("Reverse these letters: {word}", "Say these letters backwards: {word}"),
        solve=lambda slots: slots["word"][::-1],
        statement="The letters {word} backwards: {answer}.",
    ),
    Drill(
        name="count",
        content=("letter", "word"),
        propose=_count,
        wordings=("How many times is {letter} in {word}?", "How often does {letter} appear in {word}?"),
        solve=lambda slots: str(slots["word"].split().count(slots["letter"])),
        statement="The letter {letter} in {word}: {answer}.",
    ),
)
