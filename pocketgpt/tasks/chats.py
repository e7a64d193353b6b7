"""Training conversations made of the families' questions, and the drills as plain text for pretraining."""

import random
from collections.abc import Sequence
from typing import TypedDict

from pocketgpt.tasks.corpus import Corpus, Speech
from pocketgpt.tasks.drills import DRILLS
from pocketgpt.tasks.family import Item, Messages, turn
from pocketgpt.tasks.registry import FAMILIES, READING, SYSTEM
from pocketgpt.tasks.stories import QUESTIONS, describe
from pocketgpt.tasks.system import RULES

# Shares of all conversations; the rest are single questions.
STORY_CHATS = 0.10
DRILL_CHATS = 0.10
SMALL_TALKS = 0.03
# Proportions among the single questions: what takes practice, sums and letters, is asked most often.
SINGLE = {
    "add": 16,
    "subtract": 16,
    "compare": 8,
    "sequence": 14,
    "reverse": 14,
    "count": 14,
    "story": 4,
    "reading": 12,
    "line": 10,
    "question": 6,
    "dialogue": 6,
    "system": 10,
}
# This share of the conversations without a rule opens with a system prompt that asks for nothing.
PLAIN_SYSTEM = 0.05
PLAIN_PROMPTS = ("You are a helpful assistant.", "You are a player on the stage.")
SMALL_TALK = (
    ("Hello!", "Good day to you, friend."),
    ("Good morning.", "Good morrow, and well met."),
    ("Who are you?", "I am a small player, made of numbers and old plays."),
    ("What can you do?", "I add, count and compare, turn letters about, tell stories and speak like the players."),
    ("Thank you.", "You are most welcome."),
    ("Goodbye.", "Fare you well."),
)
PAGE = 8  # statements in one document of drill text


class Row(TypedDict):
    """One line of a training file. `family` is that of a single question, else "chat"."""

    messages: Messages
    family: str


def conversations(n: int, *, seed: int, speeches: Sequence[Speech] = ()) -> list[Row]:
    """Training rows, every turn of them from the training side of the split.

    Without speeches the families that quote them are left out.
    """
    corpus = Corpus(speeches)
    rng = random.Random(f"conversations {seed}")
    return [_row(rng, _questions(rng, corpus)) for _ in range(n)]


def drill_text(n: int, *, seed: int) -> list[str]:
    """Plain-text documents from the training side of the split: pages of drill statements, and stories with facts."""
    corpus = Corpus()
    rng = random.Random(f"drill text {seed}")

    def page() -> str:
        drills = rng.choices(DRILLS, k=PAGE)
        return "\n".join(drill.state(drill.draw_from(rng, corpus, heldout=False)) for drill in drills)

    def story() -> str:
        return describe(rng, READING.draw_from(rng, corpus, heldout=False))

    return [rng.choice((page, story))() for _ in range(n)]


def _row(rng: random.Random, questions: list[Item]) -> Row:
    first, *later = questions
    messages = first.conversation()
    if messages[0]["role"] != "system" and rng.random() < PLAIN_SYSTEM:
        messages.insert(0, turn("system", rng.choice(PLAIN_PROMPTS)))
    for item in later:  # what went before its question is in the conversation already
        messages += item.conversation()[-2:]
    return {"messages": messages, "family": "chat" if later else first.family}


def _questions(rng: random.Random, corpus: Corpus) -> list[Item]:
    """The questions of one conversation in order."""
    kinds = (_story_chat, _drill_chat, _small_talk, _single)
    shares = (STORY_CHATS, DRILL_CHATS, SMALL_TALKS, 1 - STORY_CHATS - DRILL_CHATS - SMALL_TALKS)
    return rng.choices(kinds, shares)[0](rng, corpus)


def _single(rng: random.Random, corpus: Corpus) -> list[Item]:
    names = [name for name in SINGLE if FAMILIES[name].available(corpus)]
    (name,) = rng.choices(names, [SINGLE[name] for name in names])
    return [FAMILIES[name].make(rng, corpus)]


def _story_chat(rng: random.Random, corpus: Corpus) -> list[Item]:
    """A story told by the assistant, one to three questions about it, half of the time a drill."""
    story = READING.draw_from(rng, corpus, heldout=False) | {"told_by": "assistant"}
    asked = rng.sample(tuple(QUESTIONS), rng.randint(1, 3))
    questions = [READING.pose(rng, story | {"question": question}, corpus) for question in asked]
    return questions + [rng.choice(DRILLS).make(rng, corpus) for _ in range(rng.randint(0, 1))]


def _drill_chat(rng: random.Random, corpus: Corpus) -> list[Item]:
    """Two or three drills in a row, or two closed questions under one rule."""
    if rng.random() < 0.5:
        return [rng.choice(DRILLS).make(rng, corpus) for _ in range(rng.randint(2, 3))]
    rule = rng.choice(tuple(RULES))
    drawn = (SYSTEM.draw_from(rng, corpus, heldout=False, rule=rule) for _ in range(2))
    return [SYSTEM.pose(rng, slots, corpus) for slots in drawn]


def _small_talk(rng: random.Random, corpus: Corpus) -> list[Item]:
    """A greeting or the like, half of the time with a drill after it."""
    question, answer = rng.choice(SMALL_TALK)
    talk = Item("small talk", {}, [turn("user", question)], answer)
    return [talk] + [rng.choice(DRILLS).make(rng, corpus) for _ in range(rng.randint(0, 1))]
