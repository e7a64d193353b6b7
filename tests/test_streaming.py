"""Streamed text is the decoded text, never taken back, and shows nothing of a stop text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pocketgpt.errors import UserError
from pocketgpt.streaming import TextStream
from pocketgpt.tokenizer import Tokenizer

stops = st.lists(st.text(st.sampled_from("ab猫"), min_size=1, max_size=4), max_size=3)


def before_stop(text: str, stop: list[str]) -> str:
    """`text` up to the stop text that is complete first, found by growing it one character at a time."""
    for end in range(len(text) + 1):
        ended = [s for s in stop if text[:end].endswith(s)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


def parts(tok: Tokenizer, ids: list[int], stop: list[str]) -> list[str]:
    stream = TextStream(tok, stop)
    return [*(stream.push(i) for i in ids), stream.flush()]


def test_characters_come_whole(tok: Tokenizer) -> None:
    ids = tok.encode("a🎉猫é")
    assert [len(tok.token_bytes(i)) for i in ids] == [1] * 10
    assert parts(tok, ids, []) == ["a", "", "", "", "🎉", "", "", "猫", "", "é", ""]
    assert parts(tok, ids[:3], []) == ["a", "", "", "\ufffd"]
    assert parts(tok, [1], []) == ["<|im_start|>", ""]


def test_stop_text_across_tokens() -> None:
    tok = Tokenizer.train(["hello world"] * 9, 300)
    assert [tok.token_bytes(i) for i in tok.encode("hello world")] == [b"hello", b" world"]
    stream = TextStream(tok, ["lo w"])
    hello, world = tok.encode("hello world")
    assert (stream.push(hello), stream.stopped) == ("hel", False)
    assert (stream.push(world), stream.stopped) == ("", True)
    assert (stream.push(hello), stream.flush(), stream.stopped) == ("", "", True)


def test_what_only_began_like_a_stop_text_is_shown(tok: Tokenizer) -> None:
    ids = tok.encode("\n\na\n")
    assert parts(tok, ids, ["\n\n\n"]) == ["", "", "\n\na", "", "\n"]
    ids = [i for char in "aabaabaac" for i in tok.encode(char)]
    assert parts(tok, ids, ["aabaac"]) == ["", "", "", "", "", "aab", "", "", "", ""]


def test_of_two_stop_texts_the_first_complete_one_counts() -> None:
    """However the text is cut into tokens."""
    tok = Tokenizer.train(["xabcd"] * 9, 300)
    letters = [i for letter in "xabcd" for i in tok.encode(letter)]
    assert (len(letters), len(tok.encode("xabcd"))) == (5, 1)
    for ids in (letters, tok.encode("xabcd")):
        assert "".join(parts(tok, ids, ["abcd", "bc"])) == "xa"
        assert "".join(parts(tok, ids, ["c", "bc"])) == "xa"


def test_empty_stop_text(tok: Tokenizer) -> None:
    with pytest.raises(UserError, match="stop text is empty"):
        TextStream(tok, ["a", ""])


@given(ids=st.lists(st.integers(0, 399)))
def test_any_ids_without_stop(tok: Tokenizer, ids: list[int]) -> None:
    assert "".join(parts(tok, ids, [])) == tok.decode(ids)


@given(pieces=st.lists(st.text(st.sampled_from("ab猫"), max_size=4)), stop=stops)
def test_any_text_with_stops(tok: Tokenizer, pieces: list[str], stop: list[str]) -> None:
    ids = [i for piece in pieces for i in tok.encode(piece)]
    stream = TextStream(tok, stop)
    text, shown = "", ""
    for n, i in enumerate(ids):
        shown += stream.push(i)
        text = tok.decode(ids[: n + 1]).rstrip("\ufffd")
        # Nothing has to be taken back, and nothing is held that could not be the beginning of a stop text.
        assert before_stop(text, stop).startswith(shown)
        held = before_stop(text, stop)[len(shown) :]
        assert stream.stopped or held == "" or any(s.startswith(held) for s in stop)
    assert shown + stream.flush() == before_stop("".join(pieces), stop)
    assert stream.stopped == any(s in "".join(pieces) for s in stop)
