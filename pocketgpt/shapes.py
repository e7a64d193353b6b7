"""The shapes of a row that the ecosystem uses, recognised by their columns, and the one form each is brought to.

Fine-tuning learns from a `Chat` or, without any template, from a text; preferences are a `Preference`. The shapes are
those that the documentation of `trl` names (dataset formats), and the columns of Alpaca and of ShareGPT. The first
shape of a table whose columns are all there, and not null, is the one that is read; the row's other columns are
ignored, except where that would change what is learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from pocketgpt.chat_template import Message, check_messages
from pocketgpt.errors import UserError
from pocketgpt.sources import Row, as_text, columns_of, text_of

T = TypeVar("T")


class Chat(NamedTuple):
    """A conversation, and the number of its first turn that may be learned (the assistant's turns from there on are)."""

    messages: list[Message]
    learn_from: int = 0


class Preference(NamedTuple):
    """Two answers to one conversation, the first preferred."""

    prompt: list[Message]
    chosen: str
    rejected: str


@dataclass(frozen=True)
class Shape(Generic[T]):
    """What a row looks like: `columns` it must have, `optional` ones it may have, and how it is read."""

    name: str
    columns: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Row, str], T]


# --- reading --------------------------------------------------------------------------------------------------------

# Who speaks, as ShareGPT's `from` has it, in the words of the chat template.
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
TOOL_ROLES = ("tool", "function", "function_call", "function_response", "observation", "tool_call", "tool_response")
SYSTEM = ("system", "system_prompt")  # columns with a system message for the conversation
# Columns that belong to what the model should see, of kinds that it cannot.
UNSEEN = dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "this model reads text alone")
UNSEEN["tools"] = "the chat template has no tools"
# Keys of a turn that change what it says, or whether it is learned, and the values that change nothing.
BESIDE = {"thinking": ("",), "reasoning_content": ("",), "weight": (1,), "train": (True,)}
ASKED = ("question", "query", "instruction", "messages")  # columns beside two answers that look like their prompt


def _messages(row: Row, where: str) -> Chat:
    return Chat(_with_system(_turns(row["messages"], f'{where}: field "messages"'), row, where))


def _sharegpt(row: Row, where: str) -> Chat:
    return Chat(_with_system(_turns(row["conversations"], f'{where}: field "conversations"'), row, where))


def _prompt_completion(row: Row, where: str) -> Chat:
    if isinstance(row.get("label"), bool):
        raise UserError(
            f"{where}: with a label this is an unpaired preference, which no stage learns from: "
            "keep the rows whose label is true, without that column"
        )
    prompt = _with_system(_said(row, "prompt", "user", where), row, where)
    return Chat(prompt + _said(row, "completion", "assistant", where), len(prompt))


def _alpaca(row: Row, where: str) -> Chat:
    return Chat(_with_system(_request(row, where) + _said(row, "output", "assistant", where), row, where))


def _text(row: Row, where: str) -> str:
    text = text_of(row, "text", where)
    if not text.strip():
        raise UserError(f'{where}: field "text" is empty')
    return text


def _explicit(row: Row, where: str) -> Preference:
    return _pair(_said(row, "prompt", "user", where), row, where)


def _sharegpt_pair(row: Row, where: str) -> Preference:
    return _pair(_turns(row["conversations"], f'{where}: field "conversations"'), row, where)


def _alpaca_pair(row: Row, where: str) -> Preference:
    return _pair(_request(row, where), row, where)


def _implicit(row: Row, where: str) -> Preference:
    if asked := [name for name in ASKED if name in row]:
        raise UserError(f"{where}: found the column {asked[0]} beside chosen and rejected: name it prompt")
    chosen, rejected = row["chosen"], row["rejected"]
    if not (isinstance(chosen, str) and isinstance(rejected, str)):
        return _pair([], row, where)
    # Text: what both begin with, up to a border of words, so that no word (and no token) is cut in two.
    begin = re.match(r"(?s)(.*\S)\s+", chosen[: common(chosen, rejected)])
    if not begin:
        raise UserError(f"{where}: no prompt, neither as a column nor as words with which both answers begin")
    answers = {"chosen": chosen[begin.end() :], "rejected": rejected[begin.end() :]}
    return _pair([{"role": "user", "content": as_text(begin[1], where)}], row | answers, where)


def _pair(prompt: list[Message], row: Row, where: str) -> Preference:
    """The answers are single turns after the prompt, or the ends of whole conversations that begin alike."""
    sides = []
    for column in ("chosen", "rejected"):
        said = _said(row, column, "assistant", where)
        sides.append(prompt + said if said and said[0]["role"] == "assistant" else said)
    shared = sides[0][: common(*(side[:-1] for side in sides))]
    if not all(len(side) == len(shared) + 1 for side in sides):
        raise UserError(f"{where}: chosen and rejected must be the same conversation up to their last turn")
    if any(side[-1]["role"] != "assistant" for side in sides):
        raise UserError(f"{where}: chosen and rejected must end with a turn of the assistant")
    if not shared:
        raise UserError(f"{where}: no prompt, neither as a column nor as the turns before the answer")
    if prompt not in (shared[: len(prompt)], shared[len(shared) - len(prompt) :]):
        raise UserError(f"{where}: chosen and rejected do not go on from the prompt")
    history = _with_system(shared, row, where)
    for side in sides:
        check_messages([*history, side[-1]], where)
    return Preference(history, sides[0][-1]["content"], sides[1][-1]["content"])


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many items both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _request(row: Row, where: str) -> list[Message]:
    """Alpaca's instruction, a blank line and its input, if it has one."""
    request = text_of(row, "instruction", where)
    if row.get("input", "") != "":
        request += "\n\n" + text_of(row, "input", where)
    return [{"role": "user", "content": request}]


def _with_system(messages: list[Message], row: Row, where: str) -> list[Message]:
    for column in SYSTEM:
        said = text_of(row, column, where) if column in row else ""
        if said and messages and messages[0]["role"] == "system":
            if messages[0]["content"] != said:
                raise UserError(f"{where}: two system messages, the column {column} and the first turn: keep one")
        elif said:
            messages = [{"role": "system", "content": said}, *messages]
    return messages


def _said(row: Row, column: str, role: str, where: str) -> list[Message]:
    """Text is one turn of `role`; turns are turns."""
    value, at = row[column], f'{where}: field "{column}"'
    return _turns(value, at) if isinstance(value, (list, dict)) else [{"role": role, "content": as_text(value, at)}]


def _turns(value: Any, where: str) -> list[Message]:
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise UserError(f"{where} must be a list of messages like {{role, content}}")
    return [_turn(turn, f"{where}, message {number}") for number, turn in enumerate(turns, 1)]


def _turn(turn: dict[Any, Any], where: str) -> Message:
    role, said = (turn.get("role"), "content") if turn.get("role") is not None else (turn.get("from"), "value")
    if role is None:
        raise UserError(f"{where} must be like {{role, content}} or {{from, value}}, found {', '.join(map(str, turn))}")
    calls = next((key for key in ("tool_calls", "function_call") if turn.get(key)), None)
    if calls or role in TOOL_ROLES:
        raise UserError(f"{where}: {calls or f'role {role!r}'}: the chat template has no tools, leave such rows out")
    if beside := next((key for key, plain in BESIDE.items() if turn.get(key) not in (None, *plain)), None):
        raise UserError(
            f"{where}: {beside}: a turn is learned as its {said} and nothing else, leave such rows out, or drop the key"
        )
    content = turn.get(said)
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        if other := [part.get("type") for part in content if part.get("type") != "text"]:
            raise UserError(f"{where}: a part of type {other[0]!r}: this model reads text alone, leave such rows out")
        content = "".join(as_text(part.get("text"), f"{where}: {said}") for part in content)
    return {"role": ROLES.get(str(role), str(role)), "content": as_text(content, f"{where}: {said}")}


# --- the tables -----------------------------------------------------------------------------------------------------

CHATS: tuple[Shape[Chat | str], ...] = (
    Shape("messages", ("messages",), SYSTEM, _messages),
    Shape("ShareGPT", ("conversations",), SYSTEM, _sharegpt),
    Shape("prompt-completion", ("prompt", "completion"), SYSTEM, _prompt_completion),
    Shape("Alpaca", ("instruction", "output"), ("input", *SYSTEM), _alpaca),
    Shape("text", ("text",), (), _text),
)
PREFERENCES: tuple[Shape[Preference], ...] = (
    Shape("preference", ("prompt", "chosen", "rejected"), SYSTEM, _explicit),
    Shape("ShareGPT preference", ("conversations", "chosen", "rejected"), SYSTEM, _sharegpt_pair),
    Shape("Alpaca preference", ("instruction", "chosen", "rejected"), ("input", *SYSTEM), _alpaca_pair),
    Shape("preference, implicit prompt", ("chosen", "rejected"), SYSTEM, _implicit),
)


def recognise(row: Row, where: str, table: Sequence[Shape[T]]) -> Shape[T]:
    """The first shape of the table whose columns the row has. A column that is null counts as missing, because a file
    of mixed rows has every column in each. UserError listing what was found and what is expected."""
    found = {name for name, value in row.items() if value is not None}
    for shape in table:
        if found.issuperset(shape.columns):
            return shape
    expected = ", or ".join(" and ".join(shape.columns) for shape in table)
    other, stage = (PREFERENCES, "dpo.py") if table is CHATS else (CHATS, "sft.py")
    fits = any(found.issuperset(shape.columns) for shape in other)
    advice = f"; {stage} takes this row" if fits else ""
    raise UserError(f"{where}: found the columns {columns_of(row)}; expected {expected}{advice}")


def read(row: Row, where: str, table: Sequence[Shape[T]]) -> T:
    """What the row holds, in the one form. UserError naming `where` for anything that is not what its shape says, and
    for pictures, sound and tools."""
    shape = recognise(row, where, table)
    row = {name: value for name, value in row.items() if value is not None}
    for name, why in UNSEEN.items():
        if row.get(name) not in (None, "", [], {}, "[]"):
            raise UserError(f"{where}: column {name}: {why}, leave such rows out, or drop the column")
    value = shape.read(row, where)
    if isinstance(value, Chat):
        check_messages(value.messages, where)
    return value


def chat(row: Row, where: str) -> Chat | str:
    """The conversation or the text in a row for fine-tuning. UserError like `read`."""
    return read(row, where, CHATS)


def preference(row: Row, where: str) -> Preference:
    """The preference in a row. Equal answers are not an error: the caller drops and counts. UserError like `read`."""
    return read(row, where, PREFERENCES)
