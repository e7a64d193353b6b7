"""Families over the forms of a corpus of plays: a line by a named speaker, a question, two speakers in turn."""

import random

from pocketgpt.tasks.corpus import ANY, Corpus, first_word, is_verse
from pocketgpt.tasks.family import Family, Item, Slots

COUNTS = {1: "one line", 2: "two lines", 3: "three lines"}
BEGIN = " Begin with {opening}."
LINE_REQUESTS = ("Write {count} for {speaker}.", "{speaker} speaks {count}.", "Give {speaker} {count} to say.")
# The wording of a question is a slot: speakers and openings alone give too few combinations.
QUESTION_REQUESTS = {
    "write": "Write a question for {speaker}.",
    "ask": "What might {speaker} ask?",
    "let": "Let {speaker} ask a question.",
    "want": "I want a question asked by {speaker}.",
}
DIALOGUE_REQUESTS = (
    "Write one line for {first} and one line for {second}.",
    "{first} speaks and {second} answers, one line each.",
    "{first} meets {second}. Write one line for each.",
)


def speech(speaker: str, text: str) -> str:
    """A speech in the form of the corpus: the speaker's heading, then the lines."""
    return f"{speaker}.\n{text}"


def lines_of(text: str, speaker: str) -> str | None:
    """The lines under the speaker's heading, None if the text does not begin with exactly that heading."""
    heading, _, lines = text.strip().partition("\n")
    return lines if heading == f"{speaker}." else None


def _opens(lines: str, opening: str) -> bool:
    return opening in (ANY, first_word(lines))


def _or_any(rng: random.Random, opening: str) -> str:
    # A third of the wishes name no opening, though there are far more combinations with one: people ask so.
    return ANY if rng.random() < 1 / 3 else opening


class Line(Family):
    """One to three lines by a speaker, sometimes with a given first word."""

    name = "line"
    content = ("speaker", "opening", "lines")
    passes = (
        "the speaker's heading, then exactly the number of lines asked for, at least three words, only letters and "
        "punctuation, the first word asked for if any, a sentence end at the end"
    )

    def available(self, corpus: Corpus) -> bool:
        return bool(corpus.line_keys)

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        speaker, opening, lines = rng.choice(corpus.line_keys)
        return {"speaker": speaker, "opening": _or_any(rng, opening), "lines": str(lines)}

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        speaker, opening, lines = slots["speaker"], slots["opening"], int(slots["lines"])
        wording = rng.choice(LINE_REQUESTS) + (BEGIN if opening != ANY else "")
        question = wording.format(**slots, count=COUNTS[lines])
        return self.item(slots, question, speech(speaker, rng.choice(corpus.lines[speaker, opening, lines])))

    def check(self, slots: Slots, text: str) -> bool:
        lines = lines_of(text, slots["speaker"])
        return lines is not None and is_verse(lines, int(slots["lines"])) and _opens(lines, slots["opening"])


class Question(Family):
    """A question by a speaker, sometimes with a given first word."""

    name = "question"
    content = ("speaker", "opening")
    passes = "the speaker's heading, then one line of at least three words that ends with ?, first word as asked"

    def available(self, corpus: Corpus) -> bool:
        return bool(corpus.question_keys)

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        speaker, opening = rng.choice(corpus.question_keys)
        return {"speaker": speaker, "opening": _or_any(rng, opening), "wording": rng.choice(tuple(QUESTION_REQUESTS))}

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        speaker, opening = slots["speaker"], slots["opening"]
        wording = QUESTION_REQUESTS[slots["wording"]] + (BEGIN if opening != ANY else "")
        answer = speech(speaker, rng.choice(corpus.questions[speaker, opening]))
        return self.item(slots, wording.format(**slots), answer)

    def check(self, slots: Slots, text: str) -> bool:
        lines = lines_of(text, slots["speaker"])
        return lines is not None and is_verse(lines, 1) and lines.endswith("?") and _opens(lines, slots["opening"])


class Dialogue(Family):
    """Two lines by two named speakers, who need not share a play."""

    name = "dialogue"
    content = ("first", "second")
    passes = "two speeches of one line each under the two headings in order, with a blank line between"

    def available(self, corpus: Corpus) -> bool:
        return len(corpus.speakers) > 1

    def draw(self, rng: random.Random, corpus: Corpus) -> Slots:
        first, second = rng.sample(corpus.speakers, 2)
        return {"first": first, "second": second}

    def pose(self, rng: random.Random, slots: Slots, corpus: Corpus) -> Item:
        speeches = [speech(name, rng.choice(corpus.lines[name, ANY, 1])) for name in (slots["first"], slots["second"])]
        return self.item(slots, rng.choice(DIALOGUE_REQUESTS).format(**slots), "\n\n".join(speeches))

    def check(self, slots: Slots, text: str) -> bool:
        first, _, second = text.strip().partition("\n\n")
        lines = [lines_of(first, slots["first"]), lines_of(second, slots["second"])]
        return all(line is not None and is_verse(line, 1) for line in lines)
