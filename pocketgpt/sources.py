"""Text and rows from where the user has them: files, folders, or a dataset of the Hugging Face hub.

Everything streams: memory holds one document, one row or one batch of a parquet file, whatever the size of the data.
Whatever cannot be read raises a UserError that says where: `file.jsonl:17`, `file.parquet row 17`, a byte offset.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import hashlib
import http.client
import itertools
import json
import math
import random
import ssl
import sys
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pocketgpt import files
from pocketgpt.config import DataConfig
from pocketgpt.errors import UserError

T = TypeVar("T")
Row = dict[str, Any]  # column name -> value

TEXT = (".txt",)
ROWS = (".jsonl", ".jsonl.gz", ".parquet")
ARRAY = (".json",)  # not looked for in folders, where a .json is rather a manifest or a config
PIECE = 1 << 20  # bytes; a longer text file becomes several documents
HUB_SECONDS = 5.0  # how long the hub may take to give a first sign of life


# --- files ----------------------------------------------------------------------------------------------------------


def documents(path: Path, field: str = "text") -> Iterator[str]:
    """The documents in a .txt, .jsonl, .jsonl.gz or .parquet file, or in all of these in a folder, in order of path.

    A .txt file is one document, in pieces of at most 1 MiB cut at line ends if it is longer; a row is one document,
    its column `field`. Blank documents are skipped. Raises UserError when nothing is left, and for all that is
    unreadable: no such file, other kinds of file, bytes that are not UTF-8, invalid JSON, a field missing or not text.
    """
    found = False
    for file in _data_files(path, TEXT + ROWS):
        texts = (
            _text_pieces(file)
            if file.name.lower().endswith(TEXT)
            else (text_of(row, field, where) for where, row in _file_rows(file, field))
        )
        for text in texts:
            if text.strip():
                found = True
                yield text
    if not found:
        raise UserError(f"{path}: there is no text in it")


def any_text(path: Path) -> Iterator[str]:
    """`documents`, and a file whose name says nothing of its kind is read as .txt is: source code, a README."""
    if not path.is_file() or path.name.lower().endswith(TEXT + ROWS + ARRAY):
        yield from documents(path)
        return
    found = False
    for text in _text_pieces(path):
        if text.strip():
            found = True
            yield text
    if not found:
        raise UserError(f"{path}: there is no text in it")


def rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(where, row) for each row of a .jsonl, .jsonl.gz, .parquet or .json (one array) file or a folder of the first
    three; `where` names file and line for messages about that row. Raises UserError like `documents`."""
    found = False
    for file in _data_files(path, ROWS + ARRAY):
        for where, row in _file_rows(file):
            found = True
            yield where, row
    if not found:
        raise UserError(f"{path}: there are no rows in it")


def first_row(path: Path) -> tuple[str, Row] | None:
    """(where, row) of the first row of the first data file, to tell what is in there; None if that file is a .txt."""
    first = _data_files(path, TEXT + ROWS + ARRAY)[0]
    return None if first.name.lower().endswith(TEXT) else next(rows(first))


def fingerprint(path: Path) -> str:
    """Hex digest of the contents of the file, or of all data files in the folder, that `documents` or `rows` read."""
    with _reading(path):
        return files.fingerprint(_data_files(path, TEXT + ROWS + ARRAY))


def fingerprints(data: DataConfig) -> dict[str, str]:
    """Hex digest of each file of data=mine by its name below `data.path`; other kinds have none that could change. Those of
    a mixture by the name of their source, too."""
    if data.kind == "mix":
        parts = ((part.name, fingerprints(part.data)) for part in data.parts())
        return {f"{name}: {file}": digest for name, found in parts for file, digest in found.items()}
    if data.kind != "mine":
        return {}
    root = Path(data.path)
    with _reading(root):
        return {str(file.relative_to(root)): files.sha256_file(file) for file in _data_files(root, TEXT + ROWS + ARRAY)}


def columns_of(row: Row) -> str:
    """The names of a row's columns, for messages about it."""
    return ", ".join(f"{name}{' (null)' if value is None else ''}" for name, value in row.items()) or "(none)"


def text_of(row: Row, field: str, where: str) -> str:
    """The text in column `field` of a row. UserError if the column is missing or holds something else."""
    if field not in row:
        raise UserError(f'{where}: no field "{field}", found: {", ".join(map(str, row)) or "none"}')
    return as_text(row[field], f'{where}: field "{field}"')


def as_text(value: Any, where: str) -> str:
    """`value` if it is text that can be written as UTF-8. UserError beginning with `where` if not."""
    if not isinstance(value, str):
        raise UserError(f"{where} must be text, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell "\ud83d" alone, which no encoding can write
        raise UserError(f"{where} holds half a surrogate pair at character {error.start}, which is not text") from None
    return value


def _data_files(path: Path, suffixes: tuple[str, ...]) -> list[Path]:
    with _reading(path):
        if path.is_dir():
            kinds = tuple(suffix for suffix in suffixes if suffix not in ARRAY)
            found = [
                file
                for file in sorted(path.rglob("*"))
                if file.name.lower().endswith(kinds)
                and file.is_file()
                and not any(part.startswith(".") for part in file.relative_to(path).parts)
            ]
            if not found:
                raise UserError(f"{path}: no {', '.join(kinds)} file in this folder")
            return found
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
        if not path.name.lower().endswith(suffixes):
            raise UserError(f"{path}: this kind of file is not supported here, only {', '.join(suffixes)}")
        return [path]


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the operating system or a decompressor says about `path` into one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _text_pieces(path: Path) -> Iterator[str]:
    with _reading(path), open(path, "rb") as file:
        offset = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(offset)
        piece = file.read(PIECE)
        while piece:
            end = _last_border(piece) if len(piece) == PIECE else len(piece)
            try:
                yield piece[:end].decode().replace("\r\n", "\n")
            except UnicodeDecodeError as error:
                bad = f"byte {offset + error.start} (0x{piece[error.start]:02x})"
                raise UserError(f"{path}: {bad} is not UTF-8, convert the file to UTF-8") from None
            offset += end
            piece = piece[end:] + file.read(end)


def _last_border(piece: bytes) -> int:
    """Where to cut: after the last line end, else after the last space, else before the last character."""
    for border in (b"\n", b" "):
        if end := piece.rfind(border) + 1:
            return end
    end = len(piece) - 1
    while end > 0 and piece[end] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        end -= 1
    return end or len(piece)


def _file_rows(path: Path, column: str | None = None) -> Iterator[tuple[str, Row]]:
    name = path.name.lower()
    if name.endswith(".parquet"):
        return _parquet_rows(path, column)
    return _array_rows(path) if name.endswith(ARRAY) else _json_rows(path)


def _json_rows(path: Path) -> Iterator[tuple[str, Row]]:
    compressed = path.name.lower().endswith(".gz")
    with _reading(path), gzip.open(path) if compressed else open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line := line.rstrip():
                where = f"{path}:{number}"
                yield where, _object(_parse(line, where), where)


def _array_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """Of a .json with one array, or with an object in every line, which `datasets` writes under this name, too."""
    with _reading(path), open(path, "rb") as file:
        first = file.readline().removeprefix(codecs.BOM_UTF8).strip()
    if first.startswith(b"{") and first.endswith(b"}"):
        yield from _json_rows(path)
        return
    with _reading(path):
        items = _parse(path.read_bytes(), str(path))
    if not isinstance(items, list):
        raise UserError(f"{path}: expected an array of objects, found {type(items).__name__}")
    for number, item in enumerate(items, 1):
        where = f"{path} item {number}"
        yield where, _object(item, where)


def _parse(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start} of the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets without end
        raise UserError(f"{where}: not usable JSON: {error}") from None


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object like {{...}}, found {type(value).__name__}")
    return value


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, Row]]:
    import pyarrow  # slow to import, and only parquet needs it
    import pyarrow.parquet

    number = 0
    try:
        with _reading(path), pyarrow.parquet.ParquetFile(path) as file:
            wanted = [column] if column in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    except pyarrow.ArrowException as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


# --- the hub --------------------------------------------------------------------------------------------------------


def hub_rows(
    name: str,
    split: str,
    *,
    config: str | None = None,
    data_dir: str | None = None,
    streaming: bool = False,
    part: tuple[int, int] | None = None,
) -> Iterator[tuple[str, Row]]:
    """(where, row) for each row of one split of a dataset of the hub, or of a local folder of data files, read by
    `datasets.load_dataset`. `streaming` starts at once and keeps nothing on disk; without it the data is downloaded.
    part: (k, n) for the k-th part of n, counted from 0, that have no row in common.

    Raises UserError when there is no such dataset or split, and within HUB_SECONDS when the hub cannot be reached.
    With HF_HUB_OFFLINE=1 in the environment only what has been downloaded before is used.
    """
    import datasets  # slow to import, and its loggers speak up before our one line does
    from datasets.distributed import split_dataset_by_node
    from datasets.exceptions import DatasetsError
    from huggingface_hub import constants
    from huggingface_hub.errors import HTTPError

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if not (Path(name).is_dir() or constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT)):
        raise UserError(
            f"cannot reach {constants.ENDPOINT} to load {name}: check the network, name a local folder, "
            "or set HF_HUB_OFFLINE=1 to use what was downloaded before"
        )
    try:
        data = datasets.load_dataset(name, config, split=split, data_dir=data_dir, streaming=streaming)
        if part:
            data = split_dataset_by_node(data, *part)
        for number, row in enumerate(data, 1):
            yield f"{name} {split} row {number}", row
    except (OSError, ValueError, HTTPError, DatasetsError) as error:
        raise UserError(f"dataset {name}, split {split}: {' '.join(str(error.__cause__ or error).split())}") from error


def _answers(url: str) -> bool:
    """Whether a server is there. `load_dataset` itself would retry for half a minute before it says no."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HUB_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # a refusal is an answer
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ssl.SSLError):  # `datasets` brings certificates of its own
                return
        except (OSError, http.client.HTTPException):
            return
        answered.set()

    # a thread, because no timeout covers the name look-up, which can hang
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    return answered.is_set()


# --- holding out ----------------------------------------------------------------------------------------------------


def split_documents(
    docs: Callable[[], Iterable[str]],
    val_fraction: float = 0.05,
    seed: int = 0,
    part: Callable[[], Iterable[str]] | None = None,
) -> tuple[Iterator[str], Iterator[str]]:
    """(train, val) documents of data that has no validation split of its own; `docs` starts a new pass over the data.
    part: starts one over some of it, whose training documents are asked for instead.

    A hash of its text decides about a document, so that copies go the same way and new data moves no old document.
    Both sides get at least one. Fewer documents than 1 / val_fraction are cut instead, each at a line end (or a
    space) near 1 - val_fraction of its length, and the last parts are held out.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"the fraction to hold out must lie between 0 and 1, not {val_fraction}")

    def mark(text: str) -> float:
        return int.from_bytes(hashlib.sha256(f"{seed}\n{text}".encode()).digest()[:8], "big") / 2**64

    enough = math.ceil(1 / val_fraction)
    marks = [mark(text) for text in itertools.islice(docs(), enough)]
    if len(marks) < enough or min(marks) == max(marks):
        halves = (half for text in (part or docs)() if (half := _cut(text, val_fraction)[0]).strip())
        tails = (tail for text in docs() if (tail := _cut(text, val_fraction)[1]).strip())
        return halves, tails

    def held_out(text: str) -> bool:
        here = mark(text)
        return here == min(marks) or (here < val_fraction and here != max(marks))

    return (text for text in (part or docs)() if not held_out(text)), (text for text in docs() if held_out(text))


def beginning(docs: Iterable[str], most: int) -> Iterator[str]:
    """The first documents, about `most` bytes of text."""
    ends = itertools.accumulate(docs, lambda read, text: (read[0] + len(text.encode()), text), initial=(0, ""))
    return (text for _, text in itertools.takewhile(lambda read: read[0] <= most, itertools.islice(ends, 1, None)))


def _cut(text: str, val_fraction: float) -> tuple[str, str]:
    end = int(len(text) * (1 - val_fraction))
    for border in ("\n", " "):
        if cut := text.rfind(border, 0, end) + 1:
            return text[:cut], text[cut:]
    return text[:end], text[end:]


# --- as a stage's configuration asks --------------------------------------------------------------------------------


def open_rows(data: DataConfig) -> Iterator[tuple[str, Row]]:
    """(where, row) for data=mine or data=hub, at most `data.limit` of them."""
    found = (
        rows(Path(data.path))
        if data.kind == "mine"
        else hub_rows(data.name, data.split, config=data.subset or None, streaming=data.streaming)
    )
    return itertools.islice(found, data.limit or None)


def hold_out(items: list[T], data: DataConfig) -> tuple[list[T], list[T]]:
    """(training items, held-out items), shuffled the same way every time. UserError if there are fewer than two."""
    held = max(1, round(len(items) * data.val_fraction))
    if len(items) <= held:
        raise UserError(f"{data.path or data.name}: {len(items)} usable rows are too few to train and to hold some out")
    random.Random(0).shuffle(items)
    return items[held:], items[:held]


def digest(obj: Any) -> str:
    """Hex digest of plain data, to recognise it by."""
    return hashlib.sha256(json.dumps(obj, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()
