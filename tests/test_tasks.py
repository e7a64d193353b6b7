"""The generated instruction data: what passes each check, the split, and what the conversations are made of."""

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data import instruct
from pocketgpt.errors import UserError
from pocketgpt.tasks import FAMILIES, Item, Speech, check, conversations, drill_text, in_style, is_heldout, make_items
from pocketgpt.tasks.chats import SINGLE, _questions
from pocketgpt.tasks.corpus import ANY, MIN_SPEECHES, OPENINGS, Corpus
from pocketgpt.tasks.stories import CAST, mentioned, words_of
from pocketgpt.tasks.system import RULES

VERSE = ("line", "question", "dialogue")


def _speeches() -> list[Speech]:
    """A made-up corpus: 75 speakers, each with a statement and a question for every opening word."""
    names = [
        first + last for first, last in product(("BEL", "COR", "MAR", "OR", "SIL"), ("INDO", "IA", "AN", "O", "US"))
    ]
    speakers = names + [f"{title} {name}" for title in ("LORD", "LADY") for name in names]
    tails = ("the moon is bright to-night", "my heart is full of care", "sweet music, play again")
    spoken = []
    for i, speaker in enumerate(speakers):
        for j, opening in enumerate(OPENINGS):
            tail = tails[(i + j) % 3]
            spoken.append(Speech(speaker, f"{opening} say {tail},\nAnd so the day is done;\nFarewell, {tail}."))
            spoken.append(Speech(speaker, f"{opening} know, {tail}?"))
            spoken.append(Speech(speaker, f"{opening} think {tail}.\nSo be it, {tail}!"))
    return spoken


SPEECHES = _speeches()
HELDOUT = make_items(300, heldout=True, seed=0, speeches=SPEECHES)
TRAIN = make_items(300, heldout=False, seed=0, speeches=SPEECHES)
BY_FAMILY = {name: [item for item in HELDOUT if item.family == name] for name in FAMILIES}


def item(family: str, **slots: str) -> Item:
    return Item(family, slots, [], "")


# --- the checks, by hand ----------------------------------------------------------------------------------------------

STORY = {"hero": "Viola", "place": "mill", "ending": "feast"}
TOLD = "Viola walked to the mill. There she found a key. A fox came by. That night there was a feast."
HARK_ADD = {"rule": "hark", "inner": "add", "a": "2", "b": "3"}


@pytest.mark.parametrize(
    ("family", "slots", "right", "wrong"),
    [
        ("add", {"a": "37", "b": "45"}, ["82", " 82\n"], ["81", "83", "82.", "8 2", "082", "", "37 + 45"]),
        ("subtract", {"a": "82", "b": "82"}, ["0"], ["1", "-0", "", "82"]),
        ("compare", {"a": "9", "b": "10", "which": "larger"}, ["10"], ["9", "9 10", "", "larger"]),
        ("compare", {"a": "9", "b": "10", "which": "smaller"}, ["9"], ["10"]),
        (
            "sequence",
            {"first": "7", "last": "12", "by": ""},
            ["7 8 9 10 11 12"],
            ["7 8 9 10 11", "7, 8, 9, 10, 11, 12"],
        ),
        ("sequence", {"first": "30", "last": "15", "by": " by 5"}, ["30 25 20 15"], ["15 20 25 30", "30 25 20 15 10"]),
        ("reverse", {"word": "t r e e"}, ["e e r t"], ["t r e e", "eert", "e e r", "e e r t t"]),
        ("count", {"letter": "a", "word": "b a n a n a"}, ["3"], ["2", "4", "a a a", ""]),
        ("count", {"letter": "z", "word": "b a n a n a"}, ["0"], ["1", ""]),
        (
            "story",
            STORY,
            [TOLD, TOLD.replace("There she", "There the young lady")],
            [
                TOLD.replace("Viola", "Portia"),
                TOLD.replace("A fox", "Old Portia"),  # a second hero
                TOLD.replace("mill", "castle"),
                TOLD.replace("A fox came by", "A fox left the castle"),  # a second place
                TOLD.replace("a feast", "a dance"),
                TOLD.replace("a feast", "a feast and a dance"),  # a second ending
                TOLD.replace("A fox came by.", "They had a feast there."),  # the ending comes too early
                TOLD + " They went home at last.",  # and goes on after it
                TOLD.replace("A fox came by.", "There she found a key."),  # repeats itself
                TOLD.replace(" A fox came by.", "\nA fox came by."),
                TOLD.removesuffix("."),
                TOLD[: TOLD.rindex(". That") + 1],
                "Viola walked to the mill. That night there was a feast.",
                "Viola. Mill. Feast.",
            ],
        ),
        (
            "reading",
            STORY | {"thing": "key", "friend": "fox", "question": "where", "told_by": "user"},
            ["In the mill.", "the mill", "Viola walked to the mill."],
            [
                "In the castle.",
                "In the mill castle.",
                "In the castle mill.",
                "In the mill the mill",
                "",
                "Viola.",
                TOLD,
            ],
        ),
        (
            "reading",
            STORY | {"thing": "key", "friend": "fox", "question": "who", "told_by": "assistant"},
            ["Viola.", "It was Viola."],
            ["Portia.", "Viola Viola.", "Portia Viola", "The mill."],
        ),
        (
            "line",
            {"speaker": "JULIET", "opening": ANY, "lines": "2"},
            ["JULIET.\nGood night, good night!\nParting is such sweet sorrow.\n"],
            [
                "JULIET.\nGood night, good night!",  # one line
                "JULIET.\nGood night, good night!\nParting is such\nsweet sorrow.",  # three
                "JULIET.\nGood night, good night!\nParting is such sweet",  # does not end
                "ROMEO.\nGood night, good night!\nParting is such sweet sorrow.",
                "JULIET\nGood night, good night!\nParting is such sweet sorrow.",
                "Good night, good night!\nParting is such sweet sorrow.",
                "JULIET.\nGood night, good night!\nROMEO.",  # a second heading
                "JULIET.\nGood night, 12 times!\nParting is such sweet sorrow.",
                "JULIET.\nGood night, good night!\n[Exit.]",
                "JULIET.\nAy, sir.\nAy, sir.",
                "JULIET.",
                "",
            ],
        ),
        (
            "line",
            {"speaker": "JULIET", "opening": "What", "lines": "1"},
            ["JULIET.\nWhat, is he gone?"],
            ["JULIET.\nWhat's in a name?", "JULIET.\nIs he gone?"],
        ),
        (
            "question",
            {"speaker": "KING LEAR", "opening": "Who", "wording": "ask"},
            ["KING LEAR.\nWho is it that can tell me?"],
            [
                "KING LEAR.\nWho is it that can tell me.",
                "KING LEAR.\nWho?",
                "KING LEAR.\nWho is it\nthat can tell me?",
                "KING LEAR.\nIs it not so?",
                "LEAR.\nWho is it that can tell me?",
                "Who is it that can tell me?",
            ],
        ),
        (
            "dialogue",
            {"first": "JULIET", "second": "ROMEO"},
            ["JULIET.\nArt thou gone so?\n\nROMEO.\nFarewell, my love.\n"],
            [
                "ROMEO.\nFarewell, my love.\n\nJULIET.\nArt thou gone so?",
                "JULIET.\nArt thou gone so?\nROMEO.\nFarewell, my love.",
                "JULIET.\nArt thou gone so?",
                "JULIET.\nArt thou gone so?\n\nROMEO.\n",
                "JULIET.\nArt thou gone so?\n\nROMEO.\nFarewell, my love.\n\nJULIET.\nO, think not so.",
            ],
        ),
        ("system", HARK_ADD, ["Hark! 5"], ["5", "Hark! 6", "Hark 5", "Hark!", "5 Hark!", ""]),
        ("system", HARK_ADD | {"rule": "lord"}, ["5, my lord."], ["5", "6, my lord.", "5 my lord.", "5, my lord"]),
        ("system", HARK_ADD | {"rule": "quotes"}, ['"5"'], ["5", '"5', '"6"', '"']),
        (
            "system",
            {"rule": "capitals", "inner": "reverse", "word": "t r e e"},
            ["E E R T"],
            ["e e r t", "E e r t", "T R E E", ""],
        ),
    ],
)
def test_check(family: str, slots: dict[str, str], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not check(item(family, **slots), text)] == []
    assert [text for text in wrong if check(item(family, **slots), text)] == []


def test_there_is_a_hand_made_case_for_every_family() -> None:
    (mark,) = test_check.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in mark.args[1]} == set(FAMILIES)


# --- the checks, on generated items -----------------------------------------------------------------------------------


def test_reference_answers_pass_with_trailing_whitespace_too() -> None:
    assert [item for item in HELDOUT + TRAIN if not check(item, item.answer + "\n ")] == []


def test_empty_answers_and_echoes_fail() -> None:
    for one in HELDOUT:
        for text in ("", " \n", *(message["content"] for message in one.messages)):
            assert not check(one, text), (one, text)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_of_another_item_fails(family: str) -> None:
    for one, other in pairwise(BY_FAMILY[family]):
        same_wish = one.answer == other.answer or (
            family in ("line", "question") and {**one.slots, "wording": ""} == {**other.slots, "wording": ""}
        )
        assert check(one, other.answer) == same_wish, (one, other)


def test_numbers_off_by_one_fail() -> None:
    for one in BY_FAMILY["add"] + BY_FAMILY["subtract"] + BY_FAMILY["compare"] + BY_FAMILY["count"]:
        assert [delta for delta in range(-9, 10) if check(one, str(int(one.answer) + delta))] == [0]


@pytest.mark.parametrize("family", ["story", *VERSE, "sequence", "reverse"])
def test_truncated_answers_fail(family: str) -> None:
    for one in BY_FAMILY[family][:100]:
        assert not any(check(one, one.answer[:end]) for end in range(len(one.answer) - 1)), one


@pytest.mark.parametrize("family", FAMILIES)
@given(text=st.text(st.sampled_from("aA1 .?!,\"'\n:") | st.characters()))
def test_any_text_can_be_checked(family: str, text: str) -> None:
    assert not check(BY_FAMILY[family][0], text) or text.strip() == BY_FAMILY[family][0].answer


@given(rule=st.sampled_from(sorted(RULES)), answer=st.text("abc", min_size=1))
def test_a_rule_can_be_taken_off_again(rule: str, answer: str) -> None:
    styled = RULES[rule].apply(answer)
    assert styled != answer
    assert RULES[rule].undo(styled) == answer
    assert RULES[rule].undo(answer) is None


@given(a=st.integers(0, 99), b=st.integers(0, 99))
def test_arithmetic_agrees_with_python(a: int, b: int) -> None:
    assert check(item("add", a=str(a), b=str(b)), str(a + b))
    assert check(item("compare", a=str(a), b=str(b), which="larger"), str(max(a, b)))
    assert check(item("subtract", a=str(a + b), b=str(b)), str(a))


def test_drills_stay_in_range_and_cover_it() -> None:
    rng, corpus = random.Random(0), Corpus()
    drawn = {name: [FAMILIES[name].draw(rng, corpus) for _ in range(20_000)] for name in ("add", "sequence", "count")}
    sums = [(int(slots["a"]), int(slots["b"])) for slots in drawn["add"]]
    assert {a for a, _ in sums} == {b for _, b in sums} == set(range(100))
    assert max(a + b for a, b in sums) == 99
    assert all(0 <= int(slots[end]) <= 99 for slots in drawn["sequence"] for end in ("first", "last"))
    answers = Counter(slots["word"].split().count(slots["letter"]) for slots in drawn["count"])
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert max(answers.values()) < 0.22 * 20_000  # no guess beats one in five


# --- the split --------------------------------------------------------------------------------------------------------


def test_the_split_never_changes() -> None:
    """A model trained yesterday must not have seen today's held-out items."""
    pairs = [(a, b) for a, b in product(range(20), range(20)) if a <= b]
    sums = [f"{a}+{b}" for a, b in pairs if is_heldout("add", {"a": str(a), "b": str(b)})]
    known = "0+15 1+2 3+10 4+5 5+10 6+7 6+10 6+14 7+10 7+13 8+13 9+19 10+12 10+17 11+12 14+17 16+17 17+19 18+19"
    assert " ".join(sums) == known


def test_the_order_of_operands_and_the_wording_do_not_decide_the_split() -> None:
    for a, b in product(range(40), range(40)):
        assert is_heldout("add", {"a": str(a), "b": str(b)}) == is_heldout("add", {"a": str(b), "b": str(a)})
        compare = {"a": str(a), "b": str(b)}
        assert is_heldout("compare", compare | {"which": "larger"}) == is_heldout(
            "compare", compare | {"which": "smaller"}
        )


def test_a_held_out_story_or_sum_is_held_out_of_every_family() -> None:
    inner = [one for one in HELDOUT + TRAIN if one.family == "reading"]
    assert [is_heldout("story", one.slots) for one in inner] == [True] * 300 + [False] * 300
    for one in BY_FAMILY["system"]:
        assert is_heldout(one.slots["inner"], one.slots)


def test_a_tenth_is_held_out_in_every_family() -> None:
    rng, corpus = random.Random(1), Corpus(SPEECHES)
    for name, family in FAMILIES.items():
        if name != "system":  # its inner families decide
            share = sum(family.heldout(family.draw(rng, corpus)) for _ in range(5000)) / 5000
            assert 0.07 < share < 0.13, name


def test_items_are_distinct_and_on_their_side() -> None:
    for items, side in ((HELDOUT, True), (TRAIN, False)):
        assert Counter(one.family for one in items) == dict.fromkeys(FAMILIES, 300)
        assert len({(one.family, *sorted(one.slots.items())) for one in items}) == len(items)
        assert {is_heldout(one.family, one.slots) for one in items} == {side}


def test_items_end_with_the_user_and_are_plain_strings() -> None:
    for one in HELDOUT:
        roles = [message["role"] for message in one.messages]
        assert roles in (["user"], ["system", "user"], ["user", "assistant", "user"])
        assert json.loads(json.dumps(one.slots)) == one.slots
        assert one.conversation() == [*one.messages, {"role": "assistant", "content": one.answer}]


# --- conversations and drill text -------------------------------------------------------------------------------------

ROWS = conversations(4000, seed=5, speeches=SPEECHES)
PAGES = drill_text(1000, seed=5)


def test_no_held_out_combination_in_any_turn() -> None:
    rng, corpus = random.Random(2), Corpus(SPEECHES)
    asked = [question for _ in range(4000) for question in _questions(rng, corpus)]
    assert {one.family for one in asked} == {*FAMILIES, "small talk"}
    for one in asked:
        if one.family != "small talk":
            assert not is_heldout(one.family, one.slots), one
            assert check(one, one.answer), one


def test_no_held_out_combination_in_the_texts() -> None:
    """The same again, read off the texts themselves."""
    patterns = (
        ("add", r"(\d+) \+ (\d+)"),
        ("add", r"Add (\d+) and (\d+)"),
        ("subtract", r"(\d+) - (\d+)"),
        ("subtract", r"Take (\d+) from (\d+)"),
        ("compare", r"(?:er, |er of |Of )(\d+) (?:or|and) (\d+)"),
        ("sequence", r"(?:Count f|F)rom (\d+) to (\d+)( by \d+)?"),
        ("sequence", r"Count( by \d+) from (\d+) to (\d+)"),
        ("reverse", r"letters:? ((?:[a-z] ){2,4}[a-z])\b"),
        ("count", r"\b([a-z]) (?:appear )?in ((?:[a-z] ){3,5}[a-z])\b"),
    )
    turns = [message["content"] for row in ROWS for message in row["messages"] if message["role"] != "system"]
    texts = turns + PAGES
    for family, pattern in patterns:
        found = [match.groups("") for text in texts for match in re.finditer(pattern, text)]
        assert len(found) > 100, pattern
        for values in found:
            # in any order: the split looks at the values only
            assert not is_heldout(family, dict(zip(FAMILIES[family].content, values, strict=True))), values
    stories = 0
    for text in texts:
        slots = {kind: mentioned(words_of(text), kind) for kind in ("hero", "place", "ending")}
        if all(len(names) == 1 for names in slots.values()):
            stories += 1
            assert not is_heldout("story", {kind: names.pop() for kind, names in slots.items()}), text
    assert stories > 1000


def test_rows_are_the_questions_and_answers_in_order() -> None:
    for row in ROWS:
        roles = [message["role"] for message in row["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert all(message["content"].strip() == message["content"] != "" for message in row["messages"])


def test_a_rule_holds_in_every_turn() -> None:
    ruled = 0
    for row in ROWS:
        system = row["messages"][0]["content"]
        for rule in RULES.values():
            if row["messages"][0]["role"] == "system" and rule.prompt in system:
                ruled += 1
                answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
                assert all(rule.undo(answer) is not None for answer in answers), row
    assert ruled > 300


def test_shares() -> None:
    families = Counter(row["family"] for row in ROWS)
    assert set(families) == {*FAMILIES, "chat", "small talk"}
    assert families["chat"] / len(ROWS) == pytest.approx(0.215, abs=0.03)  # both chats and half of the small talk
    single = sum(SINGLE.values())
    for name, share in SINGLE.items():
        assert families[name] / len(ROWS) == pytest.approx(0.77 * share / single, abs=0.02), name
    assert set(SINGLE) == set(FAMILIES)
    opened = sum(row["messages"][0]["role"] == "system" for row in ROWS) / len(ROWS)
    assert 0.10 < opened < 0.25


def test_conversations_are_short() -> None:
    words = [len(re.findall(r"\w+|[^\w\s]", message["content"])) for row in ROWS for message in row["messages"]]
    assert sum(words) / len(ROWS) < 50


def test_without_speeches_nothing_is_quoted() -> None:
    assert not set(VERSE) & {row["family"] for row in conversations(2000, seed=0)}
    assert [one.family for one in make_items(1, heldout=True, seed=0)] == [
        name for name in FAMILIES if name not in VERSE
    ]


def test_drill_text_is_plain_and_states_the_answers() -> None:
    text = "\n".join(PAGES)
    assert "?" not in text
    sums = re.findall(r"^(\d+) ([+-]) (\d+) = (\d+)\.$", text, re.M)
    assert len(sums) > 1000
    assert all(int(c) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) for a, sign, b, c in sums)
    backwards = re.findall(r"^The letters ([a-z ]+) backwards: ([a-z ]+)\.$", text, re.M)
    assert len(backwards) > 500
    assert all(word == answer[::-1] for word, answer in backwards)
    facts = re.findall(
        r"^Hero: (\w+)\. Place: the (\w+)\. Found: a (\w+)\. Friend: a (\w+)\. End: a (\w+)\.$", text, re.M
    )
    assert len(facts) > 400
    assert {hero for hero, *_ in facts} == set(CAST["hero"])


# --- determinism ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_data() -> None:
    assert make_items(20, heldout=True, seed=3, speeches=SPEECHES) == make_items(
        20, heldout=True, seed=3, speeches=SPEECHES
    )
    assert conversations(200, seed=3, speeches=SPEECHES) == conversations(200, seed=3, speeches=SPEECHES)
    assert drill_text(50, seed=3) == drill_text(50, seed=3)
    assert make_items(20, heldout=True, seed=3) != make_items(20, heldout=True, seed=4)
    assert conversations(200, seed=3) != conversations(200, seed=4)
    assert drill_text(50, seed=3) != drill_text(50, seed=4)


def test_a_longer_set_begins_with_the_shorter() -> None:
    assert conversations(100, seed=3)[:40] == conversations(40, seed=3)
    assert make_items(50, heldout=True, seed=3, families=["add"])[:20] == make_items(20, heldout=True, seed=3)[:20]


def test_hash_randomization_does_not_matter() -> None:
    program = (
        "import hashlib; from pocketgpt.tasks import *\n"
        "data = [make_items(20, heldout=True, seed=1), conversations(200, seed=1), drill_text(50, seed=1)]\n"
        "print(hashlib.sha256(repr(data).encode()).hexdigest())"
    )
    root = Path(__file__).parent.parent
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


# --- the corpus, errors, files ----------------------------------------------------------------------------------------


def test_quotations_are_whole_sentences_of_their_speaker() -> None:
    text = (
        "But soft, what light\nis this? [Aside] Ay me!\nIt is the east.\nWhat 3 things?\nO speak again, bright angel!"
    )
    corpus = Corpus([Speech("ROMEO", text)] * MIN_SPEECHES + [Speech("PARIS", "Come, let us go.")] * (MIN_SPEECHES - 1))
    assert set(corpus.lines) == {
        ("ROMEO", ANY, 1),
        ("ROMEO", "It", 1),
        ("ROMEO", "O", 1),
    }
    assert set(corpus.lines["ROMEO", ANY, 1]) == {"It is the east.", "O speak again, bright angel!"}
    assert not corpus.questions
    assert corpus.speakers == ["ROMEO"]


def test_quotations_of_several_lines_and_questions() -> None:
    corpus = Corpus([Speech("ROMEO", "Shall I hear more,\nor shall I speak at this?\nShall I be bold?")] * MIN_SPEECHES)
    assert set(corpus.lines["ROMEO", "Shall", 2]) == {"Shall I hear more,\nor shall I speak at this?"}
    assert set(corpus.lines["ROMEO", "Shall", 3]) == {"Shall I hear more,\nor shall I speak at this?\nShall I be bold?"}
    assert set(corpus.questions["ROMEO", "Shall"]) == {"Shall I be bold?"}
    assert set(corpus.questions["ROMEO", ANY]) == {"Shall I be bold?"}  # not a line that begins within a sentence


def test_names_that_are_no_plain_heading_are_left_out() -> None:
    assert not Corpus([Speech("2 GENTLEMAN", "Come, let us go.")] * MIN_SPEECHES).speakers


def test_unknown_family_is_an_error() -> None:
    with pytest.raises(UserError, match="no task family 'sums'; choose from add, subtract"):
        make_items(1, heldout=True, seed=0, families=["sums"])


def test_a_corpus_family_without_speeches_is_an_error() -> None:
    with pytest.raises(UserError, match="'line' finds nothing to quote"):
        make_items(1, heldout=True, seed=0, families=["line"])


def test_more_items_than_there_are_is_an_error() -> None:
    with pytest.raises(UserError, match=r"'story' has \d{3} held-out combinations"):
        make_items(500, heldout=True, seed=0, families=["story"])


def test_a_tiny_corpus_does_not_hang() -> None:
    tiny = [Speech("ROMEO", "Come, let us go.")] * MIN_SPEECHES
    with pytest.raises(UserError, match="'line' finds no held-out combination"):
        make_items(1, heldout=True, seed=0, speeches=tiny, families=["line"])


def test_files_to_reuse(tmp_path: Path) -> None:
    manifest = instruct.build(tmp_path, 300, 7, SPEECHES)
    rows = {
        split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "heldout")
    }
    assert rows["train"] == conversations(300, seed=7, speeches=SPEECHES)
    assert manifest["heldout"] == dict.fromkeys(sorted(FAMILIES), 200)
    assert sum(manifest["train"].values()) == len(rows["train"]) == 300
    expected = make_items(200, heldout=True, seed=7, speeches=SPEECHES)
    assert [row["messages"] for row in rows["heldout"]] == [one.conversation() for one in expected]
    assert json.loads((tmp_path / "manifest.json").read_text()) == manifest
    assert instruct.build(tmp_path, 300, 7, SPEECHES) == manifest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["heldout.jsonl", "manifest.json", "train.jsonl"]


def test_the_style_rule_is_about_how_stories_open() -> None:
    story, other = (
        make_items(1, heldout=False, seed=0, families=["story"])[0],
        make_items(1, heldout=False, seed=0, families=["add"])[0],
    )
    assert in_style(story, "Once upon a time Puck lived in the mill.")
    assert not in_style(story, "One morning Puck went to the mill. It was once upon a time.")
    assert in_style(other, "anything")
    opens = [in_style(item, item.answer) for item in make_items(200, heldout=False, seed=0, families=["story"])]
    assert 0.15 < sum(opens) / len(opens) < 0.35  # fine-tuning shows it as one of four openings
