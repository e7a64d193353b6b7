"""Files that are written whole or not at all, and the fingerprints by which they are recognised again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pocketgpt.errors import UserError


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; write that one, and it takes the place of `path` when the block ends.

    After any exception the temporary file is gone and an older `path` is as it was. A reader sees the old file or
    the new one, never a part, even across a power failure. Missing folders are made. OSError becomes UserError.
    """
    path = Path(path)
    # same folder: a rename is atomic only within one file system
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # after success there is nothing left to remove
            temporary.unlink()
    with contextlib.suppress(OSError):  # the file is in place; not every system can flush a folder
        _flush(path.parent, os.O_RDONLY)


def _flush(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with Unix line ends, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as indented JSON, atomically."""
    write_text(path, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")


def sha256_file(path: Path) -> str:
    """Hex digest of the file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(paths: Iterable[Path]) -> str:
    """One hex digest for several files in this order: it changes with their contents, not with names or dates."""
    return hashlib.sha256("".join(map(sha256_file, paths)).encode()).hexdigest()
