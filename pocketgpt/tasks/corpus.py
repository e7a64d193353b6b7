"""Short quotations from a corpus of plays, found by speaker and first word."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

MIN_SPEECHES = 15  # a speaker with fewer is too rare for a small model to know the name
MAX_SPEAKERS = 100  # the most talkative; each name is then met often enough to be learned
MAX_LINES = 3
ANY = "any"  # the slot value of a quotation that may open with any word


def listed(words: str) -> tuple[str, ...]:
    """A closed list, written as words with spaces between."""
    return tuple(words.split())


# Words that often begin a sentence, and often a question.
OPENINGS = listed(
    "I O A And Are Ay But By Come Did Do For Go Good Have He Here How If Is It Let My Nay No Not Now Shall So That The "
    "Then This Thou To Was Well What Where Who Why Will You"
)

CLEAN_LINE = re.compile(r"[A-Z'a-z][A-Za-z',;:.!?\- ]+")
HEADING = re.compile(r"[A-Z][A-Z' ]*\.")
SENTENCE_ENDS = tuple(".!?")


class Speech(NamedTuple):
    """What one speaker of a play says in one go: the name in capitals ("JULIET"), and the lines joined by newlines."""

    speaker: str
    text: str


def first_word(text: str) -> str:
    """The first word of a line without its punctuation, "" if it starts with none."""
    match = re.match(r"[A-Za-z']+", text)
    return match[0] if match else ""


def is_verse(text: str, lines: int) -> bool:
    """Whether `text` is exactly that many clean lines that end a sentence: no heading, stage direction or digit."""
    rows = text.split("\n")
    return (
        len(rows) == lines == len(set(rows))
        and all(CLEAN_LINE.fullmatch(row) and not HEADING.fullmatch(row) for row in rows)
        and len(text.split()) >= 3
        and rows[-1].endswith(SENTENCE_ENDS)
    )


class Corpus:
    """The quotations of the speakers who talk most.

    `lines` maps (speaker, opening word or ANY, number of lines) and `questions` maps (speaker, opening word or ANY)
    to texts; each begins and ends a sentence of the play. Without speeches both are empty.
    """

    def __init__(self, speeches: Sequence[Speech] = ()) -> None:
        talk = Counter(speech.speaker for speech in speeches)
        often = [name for name, n in talk.most_common() if n >= MIN_SPEECHES and HEADING.fullmatch(f"{name}.")]
        speakers = set(often[:MAX_SPEAKERS])
        self.lines: dict[tuple[str, str, int], list[str]] = defaultdict(list)
        self.questions: dict[tuple[str, str], list[str]] = defaultdict(list)
        for speaker, text in speeches:
            if speaker in speakers:
                self._add(speaker, text.split("\n"))
        self.line_keys = list(self.lines)
        self.question_keys = list(self.questions)
        self.speakers = sorted({speaker for speaker, opening, lines in self.lines if (opening, lines) == (ANY, 1)})

    def _add(self, speaker: str, rows: list[str]) -> None:
        for start in range(len(rows)):
            if start and not rows[start - 1].endswith(SENTENCE_ENDS):
                continue
            word = first_word(rows[start])
            openings = [ANY, word] if word in OPENINGS else [ANY]
            for lines in range(1, min(MAX_LINES, len(rows) - start) + 1):
                quotation = "\n".join(rows[start : start + lines])
                if is_verse(quotation, lines):
                    for opening in openings:
                        self.lines[speaker, opening, lines].append(quotation)
                        if lines == 1 and quotation.endswith("?"):
                            self.questions[speaker, opening].append(quotation)
