"""Rows to evaluate on: questions with choices, and prompts whose answers a rule checks.

A rule cannot hang, whatever its pattern: regular expressions run on RE2, which does not backtrack. Its time is linear in
the answer, and what it cannot do that way (look-around, back-references) it refuses.
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pocketgpt.chat_template import Message, check_messages
from pocketgpt.errors import UserError
from pocketgpt.sources import Row, columns_of, text_of

QUERY = ("query", "question")
GOLD = ("gold", "answer", "label", "answerKey")
# A minus is a sign unless something stands right before it to subtract from; commas may group three digits.
NUMBER = re.compile(r"(?:(?<![\w)])[-\u2212])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?!\d))?", re.ASCII)


def _column(row: Row, names: Sequence[str], where: str, expected: str) -> str:
    """The first of these columns that the row has, with something in it."""
    for name in names:
        if row.get(name) is not None:
            return name
    raise UserError(f"{where}: found the columns {columns_of(row)}; expected {expected}")


# --- multiple choice ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A question with its choices, of which number `gold` is right."""

    query: str
    choices: list[str]
    gold: int


def to_question(row: Row, where: str) -> Question:
    """A row {query | question, choices, gold | answer | label | answerKey}.

    choices: a list of texts, or {"text": [...], "label": [...]} as in ARC. The right one is told by its number from 0, its
    letter from A, its label, or its text. Raises UserError naming `where` for everything else.
    """
    expected = "query (or question), choices, and gold (or answer, or label)"
    query = text_of(row, _column(row, QUERY, where, expected), where)
    choices = row[_column(row, ("choices",), where, expected)]
    labels: Any = None
    if isinstance(choices, dict) and "text" in choices:
        choices, labels = choices["text"], choices.get("label")
    if not isinstance(choices, list) or len(choices) < 2:
        raise UserError(f'{where}: field "choices" must be a list of at least two texts')
    texts = [text_of({"choices": choice}, "choices", where) for choice in choices]
    if not all(texts):
        raise UserError(f"{where}: choice {texts.index('')} is empty, and has no likelihood: remove it")
    column = _column(row, GOLD, where, expected)
    return Question(query, texts, _gold(row[column], texts, labels, f'{where}: field "{column}"'))


def _gold(value: Any, choices: list[str], labels: Any, where: str) -> int:
    """Which choice is meant."""
    if isinstance(value, int) and not isinstance(value, bool):
        meant = {value}
    elif isinstance(value, str) and isinstance(labels, list) and value in labels:
        meant = {labels.index(value)}
    elif isinstance(value, str):
        key = value.strip()
        meant = {i for i, choice in enumerate(choices) if choice == value}
        if len(key) == 1 and key in string.ascii_uppercase:
            meant.add(string.ascii_uppercase.index(key))
        elif key.isascii() and key.isdecimal() and len(key) < 4 and (int(key) < len(choices) or not meant):
            meant.add(int(key))
    else:
        raise UserError(f"{where} must be the number, letter or text of a choice, found {type(value).__name__}")
    if len(meant) > 1:
        raise UserError(f"{where}: {value!r} can be choice {' or '.join(map(str, sorted(meant)))}: give its number")
    if not meant or not 0 <= min(meant) < len(choices):
        raise UserError(f"{where} is {value!r}: no such choice, they are 0 to {len(choices) - 1}")
    return meant.pop()


# --- prompts with a rule --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """What to ask, and what makes an answer right: every rule of the row, by name and value."""

    messages: list[Message]  # a plain prompt is one turn of the user
    plain: str | None  # the prompt as text; None when the row is a conversation
    rules: dict[str, Any]
    stop: tuple[str, ...] = ()  # texts that end an answer

    def check(self, answer: str) -> bool:
        """Whether every rule lets the answer pass; of a list of values one is enough."""
        return all(
            any(RULES[name](answer, value) for value in (values if isinstance(values, list) else [values]))
            for name, values in self.rules.items()
        )


def to_prompt(row: Row, where: str) -> Prompt:
    """A row {prompt | query | question, or messages} with at least one of {exact, contains, regex, number}, each one value
    or a list of which one is enough, and perhaps {stop}. Raises UserError naming `where` for everything else."""
    rules = {name: row[name] for name in RULES if row.get(name) is not None}
    names = ("messages", "prompt", *QUERY)
    column = _column(row, names, where, f"prompt (or messages), and {', '.join(RULES)} or several of them")
    if not rules:
        _column(row, tuple(RULES), where, f"one of {', '.join(RULES)} beside {column}")
    for name, values in rules.items():
        at = f'{where}: field "{name}"'
        if values == []:
            raise UserError(f"{at} is an empty list, which no answer can match")
        for value in values if isinstance(values, list) else [values]:
            _check_rule(name, value, at)
    stop = row.get("stop")
    stops = stop if isinstance(stop, list) else [stop] if stop is not None else []
    for text in stops:
        if not text_of({"stop": text}, "stop", where):
            raise UserError(f'{where}: field "stop" is empty, which ends every answer at once')
    if column == "messages":
        messages, plain = row["messages"], None
        check_messages(messages, where)
        if messages[-1]["role"] != "user":
            raise UserError(f"{where}: messages must end with a turn of the user, which the model answers")
    else:
        plain = text_of(row, column, where)
        messages = [{"role": "user", "content": plain}]
    return Prompt(messages, plain, rules, tuple(stops))


def _check_rule(name: str, value: Any, where: str) -> None:
    """Refuse now what would fail, or let everything pass, on an answer."""
    if name == "number":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UserError(f"{where} must be a number, found {value!r}")
        return
    if not text_of({name: value}, name, where):
        raise UserError(f"{where} is empty, which every answer would match: remove it")
    if name == "regex":
        import pyarrow

        try:
            has_match("", value)
        except pyarrow.ArrowInvalid as error:
            reason = str(error).removeprefix("Invalid regular expression: ")
            raise UserError(f"{where}: {value!r} is no pattern of RE2: {reason}") from None


def has_match(text: str, pattern: str) -> bool:
    """Whether the pattern matches anywhere in the text, in the syntax and the linear time of RE2, which pyarrow carries.

    Raises pyarrow.ArrowInvalid when it is no such pattern.
    """
    import pyarrow  # slow to import
    import pyarrow.compute

    return bool(pyarrow.compute.match_substring_regex(pyarrow.array([text]), pattern)[0].as_py())


def last_number(text: str) -> Decimal | None:
    """The last number in the text; None if there is none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


RULES: dict[str, Callable[[str, Any], bool]] = {
    "exact": lambda answer, value: answer.strip() == value.strip(),
    "contains": lambda answer, value: value in answer,
    "regex": lambda answer, value: has_match(answer.strip(), value),
    "number": lambda answer, value: last_number(answer) == Decimal(str(value)),
}
