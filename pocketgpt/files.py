"""Files that are written whole or not at all, folders with one writer, and fingerprints to recognise files again."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
import secrets
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pocketgpt.errors import UserError

_reserved: dict[Path, int] = {}  # folder -> descriptor of its lock, open until this process ends


@contextlib.contextmanager
def atomic_path(path: Path, previous: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path beside `path`; write that one, and it takes the place of `path` when the block ends.

    After any exception the temporary file is gone and an older `path` is as it was. A reader sees the old file or
    the new one, never a part, even across a power failure. An old file's permissions are kept, and with `previous` the
    file itself, under that name. What writers that were killed left behind is removed. Missing folders are made.
    OSError becomes UserError.
    """
    path = Path(path)
    # same folder: a rename is atomic only within one file system
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _sweep(path)
        with open(temporary, "xb") as alive:
            with contextlib.suppress(OSError):  # not every file system can lock
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield temporary
            if path.exists():
                os.chmod(temporary, stat.S_IMODE(path.stat().st_mode))
            _flush(temporary)
            if previous is not None and path.exists():
                os.replace(path, previous)
            os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # after success there is nothing left to remove
            temporary.unlink()
    with contextlib.suppress(OSError):  # the file is in place; not every system can flush a folder
        _flush(path.parent)


def _sweep(path: Path) -> None:
    """Remove temporaries of `path` whose writer is dead: nobody holds their lock any more."""
    for left in glob.glob(f".{glob.escape(path.name)}.*.tmp", root_dir=path.parent):
        with contextlib.suppress(OSError), open(path.parent / left, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path.parent / left)


def reserve(folder: Path) -> None:
    """Make `folder` if it is missing, and keep it for this process until that ends, however it does.

    Raises:
        UserError: if another process has it, naming that one, or if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.resolve() / ".lock"
        if path in _reserved:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 20).decode()
            os.close(descriptor)
            raise UserError(
                f"{folder}: process {owner} is writing there: wait for it, or choose another folder with out="
            ) from None
        except OSError as error:  # some network file systems
            print(f"{folder} cannot be locked ({error.strerror}): let no other process write there", file=sys.stderr)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except OSError as error:
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from error
    _reserved[path] = descriptor


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
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
