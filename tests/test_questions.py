"""Rows of questions and prompts: what is read, what is refused and how, and which answers pass."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketgpt import sources
from pocketgpt.errors import UserError
from pocketgpt.questions import Prompt, Question, has_match, last_number, to_prompt, to_question

RGB = ["red", "green", "blue"]


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "choices": RGB, "gold": 2},
        {"question": "q", "choices": RGB, "answer": "C"},
        {"query": "q", "choices": RGB, "label": "2"},
        {"query": "q", "choices": RGB, "label": " C "},
        {"query": "q", "choices": RGB, "answer": "blue"},
        {"query": "q", "choices": RGB, "gold": None, "answer": 2},
        {"question": "q", "choices": {"text": RGB, "label": ["1", "2", "3"]}, "answerKey": "3"},
        {"question": "q", "choices": {"text": RGB, "label": ["A", "B", "C"]}, "answerKey": "C"},
    ],
)
def test_questions_in_all_spellings(row: dict[str, Any]) -> None:
    assert to_question(row, "") == Question("q", RGB, 2)


def test_the_text_of_a_choice_that_reads_like_a_number() -> None:
    assert to_question({"query": "q", "choices": ["3", "4", "5"], "answer": "4"}, "").gold == 1
    assert to_question({"query": "q", "choices": ["3", "4", "5"], "answer": 0}, "").gold == 0
    assert to_question({"query": "q", "choices": ["B", "A"], "answer": 0}, "").gold == 0
    assert to_question({"query": "q", "choices": ["A", "B"], "answer": "B"}, "").gold == 1
    for choices, answer in ((["B", "A"], "A"), (["2", "0", "1"], "1"), (["x", "x"], "x")):
        with pytest.raises(UserError, match=r"f:1: field \"answer\": .* can be choice 0 or|can be choice 1 or"):
            to_question({"query": "q", "choices": choices, "answer": answer}, "f:1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gold": 3}, r'field "gold" is 3: no such choice, they are 0 to 2'),
        ({"gold": -1}, r'field "gold" is -1: no such choice'),
        ({"gold": "D"}, "'D': no such choice"),
        ({"gold": "7"}, "'7': no such choice"),
        ({"gold": "violet"}, "'violet': no such choice"),
        ({"gold": True}, "number, letter or text of a choice, found bool"),
        ({"gold": 1.0}, "found float"),
        (
            {"gold": None},
            r"found the columns query, choices, gold \(null\); expected query \(or question\), choices, and gold",
        ),
        ({"query": None}, "expected query"),
        ({"query": 5}, 'field "query" must be text, found int'),
        ({"choices": "red"}, "list of at least two"),
        ({"choices": ["red"]}, "list of at least two"),
        ({"choices": ["red", ""]}, "choice 1 is empty"),
        ({"choices": ["red", 3]}, 'field "choices" must be text, found int'),
        ({"choices": {"label": [1]}}, "list of at least two"),
        ({"query": "\ud83d"}, "half a surrogate"),
    ],
)
def test_questions_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        to_question({"query": "q", "choices": RGB, "gold": 0} | change, "file:7")
    assert str(error.value).startswith("file:7: ") and "\n" not in str(error.value)


def test_parquet_and_jsonl_are_read_alike(tmp_path: Path) -> None:
    rows = [{"query": f"q{i}", "choices": RGB[: 2 + i % 2], "gold": i % 2} for i in range(4)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "q.parquet")
    read = [
        [to_question(row, where) for where, row in sources.rows(tmp_path / f"q.{kind}")]
        for kind in ("jsonl", "parquet")
    ]
    assert read[0] == read[1] == [Question(f"q{i}", RGB[: 2 + i % 2], i % 2) for i in range(4)]
    absent = {"exact": None, "number": None, "stop": None}  # columns of other rows are null in parquet
    rules = [absent | {"prompt": "a", "number": 4}, absent | {"prompt": "b", "exact": "c", "stop": "\n"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rules), tmp_path / "p.parquet")
    prompts = [to_prompt(row, where) for where, row in sources.rows(tmp_path / "p.parquet")]
    assert [prompt.rules for prompt in prompts] == [{"number": 4}, {"exact": "c"}]
    assert [prompt.stop for prompt in prompts] == [(), ("\n",)]


def prompt(**rules: Any) -> Prompt:
    return to_prompt({"prompt": "p", **rules}, "")


@pytest.mark.parametrize(
    ("rules", "passes", "fails"),
    [
        ({"exact": "Paris"}, ["Paris", " Paris\n"], ["paris", "Paris.", "", "In Paris"]),
        ({"exact": ["4", "four"]}, ["4", "four"], ["five"]),
        ({"contains": "Paris"}, ["It is Paris.", "Paris"], ["It is paris.", ""]),
        ({"regex": "(?i)^par[ie]s$"}, ["paris", " PARES \n"], ["parus", "a paris"]),
        ({"regex": r"\bcat\b"}, ["a cat."], ["concat", ""]),
        ({"number": 42}, ["42", "6 x 7 = 42.", "It is 42.0", "1 or 42!"], ["42 or 1", "", "none", "142", "4 2", "-42"]),
        ({"number": -3.5}, ["-3.5", "x = −3.50"], ["3.5", "9-3.5"]),
        ({"number": 1234567}, ["1,234,567", "1234567 in all"], ["1,234,5678"]),
        ({"number": 0.1}, ["0.1", "0.10", "1e-1"], ["0.1000001", ".2"]),
        ({"exact": "4", "number": 5}, [], ["4", "5"]),
        ({"contains": "x", "regex": "^y"}, ["yx"], ["xy", "y"]),
    ],
)  # fmt: skip
def test_rules(rules: dict[str, Any], passes: list[str], fails: list[str]) -> None:
    assert [answer for answer in passes if not prompt(**rules).check(answer)] == []
    assert [answer for answer in fails if prompt(**rules).check(answer)] == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3-4", "4"), ("3 - 4", "4"), ("= -4", "-4"), ("(-4)", "-4"), ("(3)-4", "4"), ("1,234.5.", "1234.5"), ("12,30", "30"),
        ("1,2345", "2345"), ("v2", "2"), ("2e3", "2000"), ("2e9999", "9999"), ("1/2", "2"), ("50%", "50"), ("$7", "7"), ("no", None),
        ("٤", None),
    ],
)  # fmt: skip
def test_the_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.text(), st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9))
def test_a_number_is_found_behind_any_text(before: str, number: Decimal) -> None:
    assert last_number(f"{before} {number:,}") == number
    last_number(before)  # never fails


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*$", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", "(.*){30}" * 20 + "z"]
)
def test_hostile_patterns_end(pattern: str) -> None:
    """On a backtracking engine the sun burns out first."""
    assert not has_match("a" * 5000 + "!", pattern + "\\d")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "p", "exact": "a"}, r"found the columns text, exact; expected prompt \(or messages\)"),
        ({"prompt": "p", "answer": "a"}, "expected one of exact, contains, regex, number beside prompt"),
        ({"prompt": "p", "exact": None}, "expected one of exact"),
        ({}, r"found the columns \(none\)"),
        ({"prompt": 3, "exact": "a"}, 'field "prompt" must be text, found int'),
        ({"prompt": "p", "exact": 3}, 'field "exact" must be text, found int'),
        ({"prompt": "p", "exact": []}, "empty list"),
        ({"prompt": "p", "contains": ""}, "every answer would match"),
        ({"prompt": "p", "number": "4"}, "must be a number, found '4'"),
        ({"prompt": "p", "number": True}, "must be a number"),
        ({"prompt": "p", "number": float("nan")}, "must be a number, found nan"),
        ({"prompt": "p", "regex": "("}, r"'\(' is no pattern of RE2: missing \)"),
        ({"prompt": "p", "regex": "(?=a)"}, "no pattern of RE2"),
        ({"prompt": "p", "regex": ["a", "(a{999}){999}"]}, "no pattern of RE2"),
        ({"prompt": "p", "exact": "a", "stop": ""}, 'field "stop" is empty'),
        ({"prompt": "p", "exact": "a", "stop": [3]}, 'field "stop" must be text'),
        ({"messages": [], "exact": "a"}, "at least one user message"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "exact": "a"}, "turn of the user"),
    ],
)  # fmt: skip
def test_prompts_that_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        to_prompt(row, "file:7")
    assert str(error.value).startswith("file:7: ") and "\n" not in str(error.value)
