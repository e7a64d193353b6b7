"""Every shape of a row: recognised by its columns, and brought to the one form with the values it should have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketgpt import shapes
from pocketgpt.errors import UserError
from pocketgpt.shapes import CHATS, PREFERENCES, Chat, Preference, recognise

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
MORE, BAD = {"role": "user", "content": "and?"}, {"role": "assistant", "content": "go away"}
SYSTEM = {"role": "system", "content": "Be kind."}
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}


def said(*contents: str) -> list[dict[str, str]]:
    """Turns of user and assistant, the user first."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


# --- fine-tuning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        # what trl documents
        ("text", {"text": "The sky is blue."}, "The sky is blue."),
        ("messages", {"messages": [USER, ANSWER]}, Chat([USER, ANSWER])),
        ("prompt-completion", {"prompt": "hi", "completion": "hello"}, Chat([USER, ANSWER], 1)),
        ("prompt-completion", {"prompt": [USER], "completion": [ANSWER]}, Chat([USER, ANSWER], 1)),
        ("prompt-completion", {"prompt": "The sky is", "completion": " blue."}, Chat(said("The sky is", " blue."), 1)),
        # answers in the prompt are read, not learned; completions may be of several turns, and either side text
        (
            "prompt-completion",
            {"prompt": [SYSTEM, USER, ANSWER, MORE], "completion": "hello"},
            Chat([SYSTEM, USER, ANSWER, MORE, ANSWER], 4),
        ),
        ("prompt-completion", {"prompt": "hi", "completion": [ANSWER, MORE, ANSWER]}, Chat([USER, ANSWER, MORE, ANSWER], 1)),
        # Alpaca
        ("Alpaca", {"instruction": "hi", "output": "hello"}, Chat([USER, ANSWER])),
        ("Alpaca", {"instruction": "hi", "input": "", "output": "hello"}, Chat([USER, ANSWER])),
        ("Alpaca", {"instruction": "hi", "input": None, "output": "hello"}, Chat([USER, ANSWER])),
        ("Alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, Chat(said("Add.\n\n1 2", "3"))),
        # ShareGPT
        ("ShareGPT", {"conversations": [HUMAN, GPT]}, Chat([USER, ANSWER])),
        (
            "ShareGPT",
            {"conversations": [{"from": "system", "value": "Be kind."}, {"from": "user", "value": "hi"}, GPT]},
            Chat([SYSTEM, USER, ANSWER]),
        ),
        # either kind of turn in either column
        ("ShareGPT", {"conversations": [USER, ANSWER]}, Chat([USER, ANSWER])),
        ("messages", {"messages": [HUMAN, GPT]}, Chat([USER, ANSWER])),
        ("messages", {"messages": [{**HUMAN, "role": None, "content": None}, ANSWER]}, Chat([USER, ANSWER])),
        # a system column
        ("messages", {"system": "Be kind.", "messages": [USER, ANSWER]}, Chat([SYSTEM, USER, ANSWER])),
        ("messages", {"system": "Be kind.", "messages": [SYSTEM, USER, ANSWER]}, Chat([SYSTEM, USER, ANSWER])),
        ("messages", {"system": "", "system_prompt": None, "messages": [USER, ANSWER]}, Chat([USER, ANSWER])),
        ("ShareGPT", {"system_prompt": "Be kind.", "conversations": [HUMAN, GPT]}, Chat([SYSTEM, USER, ANSWER])),
        ("prompt-completion", {"system": "Be kind.", "prompt": "hi", "completion": "hello"}, Chat([SYSTEM, USER, ANSWER], 2)),
        ("Alpaca", {"system": "Be kind.", "instruction": "hi", "output": "hello"}, Chat([SYSTEM, USER, ANSWER])),
        # other columns and keys are ignored, and so are empty ones of what could not be seen
        ("messages", {"messages": [{**USER, "name": None}, ANSWER], "id": 7, "score": 0.5, "source": "x"}, Chat([USER, ANSWER])),
        ("messages", {"messages": [USER, {**ANSWER, "tool_calls": None, "thinking": "", "weight": 1, "train": True}], "tools": [], "images": None}, Chat([USER, ANSWER])),
        ("prompt-completion", {"prompt": "hi", "completion": "hello", "label": "greeting"}, Chat([USER, ANSWER], 1)),
        # content in parts, all of them text
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}, ANSWER]},
            Chat([USER, ANSWER]),
        ),
        # empty turns are turns
        ("messages", {"messages": said("hi", "")}, Chat(said("hi", ""))),
        ("messages", {"messages": [{"role": "system", "content": ""}, USER, ANSWER]}, Chat([{"role": "system", "content": ""}, USER, ANSWER])),
    ],
)  # fmt: skip
def test_rows_for_fine_tuning(name, row, expected):
    assert recognise(row, "f:1", CHATS).name == name
    assert shapes.chat(row, "f:1") == expected


COLUMNS = {
    "messages": {"messages": [USER, ANSWER]},
    "ShareGPT": {"conversations": [HUMAN, GPT]},
    "prompt-completion": {"prompt": "hi", "completion": "hello"},
    "Alpaca": {"instruction": "hi", "output": "hello"},
    "text": {"text": "hi"},
}


def test_the_first_shape_of_the_table_is_read_where_two_fit():
    assert list(COLUMNS) == [shape.name for shape in CHATS]
    names = list(COLUMNS)
    for i, name in enumerate(names):
        for later in names[i + 1 :]:
            both = COLUMNS[later] | COLUMNS[name]
            assert recognise(both, "", CHATS).name == name
            assert shapes.chat(both, "") == shapes.chat(COLUMNS[name], "")
            # a file of mixed rows has all columns in each: those of the other shape are null
            assert recognise(both | dict.fromkeys(COLUMNS[name]), "", CHATS).name == later


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"body": "x", "id": 1},
            "found the columns body, id; expected messages, or conversations, or prompt and completion, "
            r"or instruction and output, or text$",
        ),
        ({"prompt": "x", "completion": None}, r"found the columns prompt, completion \(null\); expected messages"),
        ({}, r"found the columns \(none\)"),
        ({"chosen": "a b", "rejected": "a c"}, "or text; dpo.py takes this row$"),
        ({"messages": "hi"}, 'field "messages" must be a list of messages'),
        ({"messages": ["hi"]}, 'field "messages" must be a list of messages'),
        ({"messages": [{"speaker": "x", "said": "hi"}]}, "message 1 must be like {role, content} or {from, value}, found speaker"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "message 2: content must be text, found NoneType"),
        ({"conversations": [HUMAN, {"from": "gpt"}]}, "message 2: value must be text, found NoneType"),
        ({"messages": []}, "at least one user message"),
        ({"messages": [SYSTEM]}, "at least one user message"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, "message 2: role must be 'assistant' here, not 'robot'"),
        ({"conversations": [GPT, HUMAN]}, "message 1: role must be 'user' here, not 'assistant'"),
        ({"conversations": [HUMAN, HUMAN]}, "message 2: role must be 'assistant' here, not 'user'"),
        ({"prompt": 3, "completion": "x"}, 'field "prompt" must be text, found int'),
        ({"instruction": "x", "input": 3, "output": "y"}, 'field "input" must be text, found int'),
        ({"prompt": "x", "completion": "\ud83d"}, 'field "completion" holds half a surrogate pair'),
        ({"text": " \n"}, 'field "text" is empty'),
        ({"system": 3, "text": "x", "messages": [USER, ANSWER]}, 'field "system" must be text, found int'),
        ({"system": "Be rude.", "messages": [SYSTEM, USER, ANSWER]}, "two system messages, the column system and"),
        # what this model cannot see
        ({"messages": [USER, ANSWER], "images": [{"bytes": "x"}]}, "column images: this model reads text alone"),
        ({"messages": [USER, ANSWER], "audio": {"path": "x"}}, "column audio: this model reads text alone"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, "column tools: the chat template has no tools"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, ANSWER]}, "message 1: a part of type 'image'"),
        ({"messages": [USER, CALL, {"role": "tool", "content": "3"}, ANSWER]}, "message 2: tool_calls: the chat template has no tools"),
        ({"messages": [USER, ANSWER, {"role": "tool", "content": "3"}]}, "message 3: role 'tool': the chat template has no"),
        ({"conversations": [HUMAN, {"from": "function_call", "value": "{}"}]}, "message 2: role 'function_call': the chat"),
        # what would be learned in another way than the row says
        ({"messages": [USER, {**ANSWER, "reasoning_content": "So."}]}, "message 2: reasoning_content: a turn is learned as its"),
        ({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}, "message 2: weight: a turn is learned"),
        ({"conversations": [HUMAN, {"from": "gpt", "value": "x", "train": False}]}, "message 2: train: a turn is learned as its value"),
        # an answer that is marked as a bad one is not to be learned
        ({"prompt": "x", "completion": "y", "label": False}, "unpaired preference"),
    ],
)  # fmt: skip
def test_rows_that_are_no_conversation(row, complaint):
    with pytest.raises(UserError, match=f"^f:1: .*{complaint}") as error:
        shapes.chat(row, "f:1")
    assert "\n" not in str(error.value)


# --- preferences ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "row", "prompt"),
    [
        # what trl documents
        ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "go away"}, [USER]),
        ("preference", {"prompt": [USER], "chosen": [ANSWER], "rejected": [BAD]}, [USER]),
        ("preference, implicit prompt", {"chosen": [USER, ANSWER], "rejected": [USER, BAD]}, [USER]),
        ("preference, implicit prompt", {"chosen": "hi hello", "rejected": "hi go away"}, [USER]),
        # text with turns
        ("preference", {"prompt": [SYSTEM, USER], "chosen": "hello", "rejected": "go away"}, [SYSTEM, USER]),
        ("preference", {"prompt": [USER], "chosen": ANSWER, "rejected": BAD}, [USER]),
        # a prompt beside whole conversations is their last question, or what they begin with
        ("preference", {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, [USER]),
        ("preference", {"prompt": "hi", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, BAD]}, [SYSTEM, USER]),
        (
            "preference",
            {"prompt": "hi", "chosen": [USER, BAD, MORE, ANSWER], "rejected": [USER, BAD, MORE, BAD]},
            [USER, BAD, MORE],
        ),
        # answers that share their first turns: those are history
        (
            "preference",
            {"prompt": [USER], "chosen": [BAD, MORE, ANSWER], "rejected": [BAD, MORE, BAD]},
            [USER, BAD, MORE],
        ),
        (
            "preference, implicit prompt",
            {"chosen": [USER, ANSWER, USER, ANSWER], "rejected": [USER, ANSWER, USER, BAD]},
            [USER, ANSWER, USER],
        ),
        ("preference, implicit prompt", {"prompt": None, "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, [USER]),
        # the columns of Alpaca and ShareGPT
        ("Alpaca preference", {"instruction": "Add.", "input": "1", "chosen": "hello", "rejected": "go away"}, said("Add.\n\n1")),
        ("ShareGPT preference", {"conversations": [HUMAN], "chosen": GPT, "rejected": {"from": "gpt", "value": "go away"}}, [USER]),
        # a system column
        ("preference", {"system": "Be kind.", "prompt": "hi", "chosen": "hello", "rejected": "go away"}, [SYSTEM, USER]),
        ("preference, implicit prompt", {"system": "Be kind.", "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, [SYSTEM, USER]),
        # other columns are ignored
        ("preference", {"prompt": "hi", "chosen": "hello", "rejected": "go away", "score": 1, "messages": None}, [USER]),
    ],
)  # fmt: skip
def test_preferences(name, row, prompt):
    assert recognise(row, "f:1", PREFERENCES).name == name
    assert shapes.preference(row, "f:1") == Preference(prompt, "hello", "go away")


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("The sky is blue.", "The sky is green.", "The sky is", ("blue.", "green.")),
        ("The sky is blue.", "The sky is black.", "The sky is", ("blue.", "black.")),  # no word is cut
        ("The sky is blue", "The sky is blue and wide", "The sky is", ("blue", "blue and wide")),
        ("Q: 1+1?\n\nA: 2", "Q: 1+1?\n\nA: 3", "Q: 1+1?\n\nA:", ("2", "3")),
        ("same words", "same words", "same", ("words", "words")),
    ],
)
def test_the_prompt_in_two_texts_is_the_words_they_begin_with(chosen, rejected, prompt, answers):
    assert shapes.preference({"chosen": chosen, "rejected": rejected}, "") == Preference(said(prompt), *answers)


words = st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=4).map(" ".join)


@given(words, words, words)
def test_an_implicit_prompt_in_text_is_the_longest_that_ends_with_a_word(prompt, chosen, rejected):
    found = shapes.preference({"chosen": f"{prompt} {chosen}", "rejected": f"{prompt} {rejected}"}, "")
    question = found.prompt[0]["content"]
    assert f"{question} {found.chosen}" == f"{prompt} {chosen}"
    assert f"{question} {found.rejected}" == f"{prompt} {rejected}"
    assert question.startswith(prompt)
    first, second = found.chosen.split(), found.rejected.split()
    assert first[0] != second[0] or 1 in (len(first), len(second))


@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=3), st.sampled_from("ab"), st.sampled_from("ab"))
def test_an_implicit_prompt_of_turns_is_all_but_the_last(before, chosen, rejected):
    history = said(*before) if len(before) % 2 else said(*before, "c")
    sides = {
        side: [*history, {"role": "assistant", "content": answer}]
        for side, answer in (("chosen", chosen), ("rejected", rejected))
    }
    assert shapes.preference(sides, "") == Preference(history, chosen, rejected)


def test_equal_answers_are_left_to_the_caller():
    assert shapes.preference({"prompt": "hi", "chosen": "a", "rejected": "a"}, "f:1") == ([USER], "a", "a")
    assert shapes.preference({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "") == ([USER], "hello", "hello")


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            {"prompt": "hi", "chosen": "hello"},
            "found the columns prompt, chosen; expected prompt and chosen and rejected, or .*or chosen and rejected$",
        ),
        ({"prompt": "hi", "completion": "x"}, "sft.py takes this row$"),
        ({"chosen": "hello", "rejected": "go away"}, "no prompt"),
        ({"chosen": [ANSWER], "rejected": [BAD]}, "no prompt"),
        ({"question": "hi", "chosen": "a b", "rejected": "a c"}, "found the column question beside chosen and rejected: name it prompt"),
        ({"prompt": "ho", "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, "do not go on from the prompt"),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, ANSWER], "rejected": [USER, BAD]}, "do not go on from the prompt"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER, USER, BAD]}, "same conversation up to their last turn"),
        ({"chosen": [USER, ANSWER, MORE, BAD], "rejected": [USER, BAD, MORE, BAD]}, "same conversation up to their last turn"),
        ({"prompt": "hi", "chosen": [], "rejected": []}, "same conversation up to their last turn"),
        ({"chosen": [USER, ANSWER, USER], "rejected": [USER, ANSWER, USER]}, "must end with a turn of the assistant"),
        ({"prompt": "hi", "chosen": 1, "rejected": "x"}, 'field "chosen" must be text, found int'),
        ({"prompt": "hi", "chosen": "x", "rejected": [{"content": "y"}]}, 'field "rejected", message 1 must be like'),
        ({"prompt": "hi", "chosen": "x", "rejected": "y", "images": ["z"]}, "column images: this model reads text alone"),
    ],
)  # fmt: skip
def test_rows_that_are_no_preference(row, complaint):
    with pytest.raises(UserError, match=f"^f:1: .*{complaint}") as error:
        shapes.preference(row, "f:1")
    assert "\n" not in str(error.value)
