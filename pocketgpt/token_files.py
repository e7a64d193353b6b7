"""Token ids on disk: how a corpus is encoded once, recognised again, and read in windows without loading it.

`train.bin` holds raw little-endian uint16, or uint32 for vocabularies beyond 65,536 ids; `train.bin.json` says so, and
which tokenizer and text the ids come from. Every document ends with the end-of-text id, the last one too.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, sha256_file, write_json
from pocketgpt.loss import IGNORE
from pocketgpt.tokenizer import Tokenizer

FORMAT = 1
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BATCH = 1 << 22  # characters that are encoded at a time: enough to keep all cores busy, little memory

Ids = NDArray[np.int64]


def meta_path(path: Path) -> Path:
    """Where the description of a token file lies."""
    return path.with_name(path.name + ".json")


def token_type(vocab_size: int) -> tuple[str, np.dtype[Any]]:
    """The smallest type that holds all ids, by name and as numpy knows it."""
    name = "uint16" if vocab_size <= 1 << 16 else "uint32"
    return name, DTYPES[name]


def write_tokens(
    path: Path,
    docs: Iterable[str],
    tok: Tokenizer,
    *,
    source: str = "",
    progress: Callable[[int], None] | None = None,
    batch: int = BATCH,
) -> dict[str, Any]:
    """Encode `docs` into `path`, atomically, and describe them in `path`.json; returns that description:

    format, dtype, count (ids), documents, bytes (UTF-8 text), ids, tokenizer and data (hex digests), source (whatever the
    caller recognises the data by, see `is_current`). `progress` is told the bytes of text done since it was last
    called; about `batch` characters are encoded at a time. UserError if there is no document or `path` cannot be
    written; an older file then stays.
    """
    name, dtype = token_type(tok.vocab_size)
    data, written = hashlib.sha256(), hashlib.sha256()
    count = documents = size = 0
    with atomic_path(path) as temporary:
        with open(temporary, "wb") as file:
            for texts in batches(docs, batch):
                done = 0
                for text, ids in zip(texts, tok.encode_batch(texts), strict=True):
                    raw = text.encode()
                    data.update(len(raw).to_bytes(8, "little") + raw)  # the length, for where documents end counts
                    encoded = np.array([*ids, tok.eot_id], dtype=dtype).tobytes()
                    written.update(encoded)
                    file.write(encoded)
                    count += len(ids) + 1
                    done += len(raw)
                documents += len(texts)
                size += done
                if progress:
                    progress(done)
        if not documents:
            raise UserError(f"no documents to encode into {path}")
        meta_path(path).unlink(missing_ok=True)  # never the old description beside new ids, even after a crash
    meta = {
        "format": FORMAT,
        "dtype": name,
        "count": count,
        "documents": documents,
        "bytes": size,
        "ids": written.hexdigest(),
        "tokenizer": tok.fingerprint,
        "data": data.hexdigest(),
        "source": source,
    }
    write_json(meta_path(path), meta)
    return meta


def batches(docs: Iterable[str], limit: int) -> Iterator[list[str]]:
    """The documents in lists of about `limit` characters, at least one in each."""
    texts: list[str] = []
    size = 0
    for text in docs:
        texts.append(text)
        size += len(text)
        if size >= limit:
            yield texts
            texts, size = [], 0
    if texts:
        yield texts


def is_current(path: Path, tok: Tokenizer, source: str) -> bool:
    """Whether `path` can be reused: complete, and the ids that `tok` gives to the data called `source`. Damage is told."""
    try:
        return TokenFile.open(path, tok).meta["source"] == source
    except UserError as error:
        if meta_path(path).exists():
            print(f"{error}; that is done now", file=sys.stderr)
        return False


@dataclass(frozen=True)
class TokenFile:
    """An encoded corpus, mapped into memory and read only where it is touched."""

    path: Path
    meta: dict[str, Any]
    tokens: NDArray[np.unsignedinteger[Any]]  # (count,) uint16 or uint32, read-only

    @classmethod
    def open(cls, path: Path, tok: Tokenizer) -> TokenFile:
        """Map `path`. UserError if it or its description is missing or damaged, or if its ids are not of `tok`."""
        again = "delete it, and it is made again"
        try:
            meta = json.loads(meta_path(path).read_text("utf-8"))
            known, dtype, count = meta["format"] == FORMAT, DTYPES[meta["dtype"]], int(meta["count"])
            tokenizer, digest, size = meta["tokenizer"], meta["ids"], path.stat().st_size
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{meta_path(path)}: not a description of token ids: {again}") from error
        if not known:
            raise UserError(f"{path}: written in format {meta['format']}, this program reads {FORMAT}: {again}")
        if size != count * dtype.itemsize:
            raise UserError(
                f"{path}: {size:,} bytes instead of {count * dtype.itemsize:,}, cut short or damaged: {again}"
            )
        if tokenizer != tok.fingerprint:
            raise UserError(f"{path}: its ids come from another tokenizer: {again}")
        if sha256_file(path) != digest:
            raise UserError(f"{path}: its checksum is wrong, the file is damaged: {again}")
        return cls(path, meta, np.memmap(path, dtype=dtype, mode="r", shape=(count,)))

    def __len__(self) -> int:
        return len(self.tokens)

    def windows(self, block_size: int, seed: int) -> Windows:
        return Windows(self, block_size, seed)

    def val_windows(
        self, block_size: int, *, batch_size: int = 1, max_tokens: int | None = None
    ) -> Iterator[tuple[Ids, Ids]]:
        """(x, y) pairs, each (batch_size, block_size) int64, that score every token once: y[:, t] follows x[:, t].

        The windows follow each other from the start of the file, so the number they give is over the same tokens each
        time. The first token has nothing before it and is never a target. Scored are the next min(count - 1,
        max_tokens); where the last window goes beyond them x is 0 and y is IGNORE. The last batch may be smaller.
        """
        scored = min(len(self) - 1, len(self) if max_tokens is None else max_tokens)
        if scored < 1:
            raise UserError(f"{self.path}: {len(self)} tokens leave nothing to validate on, give more text")
        windows = -(-scored // block_size)
        for first in range(0, windows, batch_size):
            shape = (min(batch_size, windows - first), block_size)
            start = first * block_size
            end = min(start + shape[0] * block_size, scored)
            x, y = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
            x.flat[: end - start] = self.tokens[start:end]
            y.flat[: end - start] = self.tokens[start + 1 : end + 1]
            yield x, y


class Windows:
    """Training windows in random order: which ones a step sees is a pure function of seed and step.

    An epoch cuts the file, taken as a ring, into windows of block_size tokens from a random place on, and shuffles
    them: no token is a target twice in it, less than one window is left out, and another epoch cuts elsewhere. That
    the ring closes is harmless, the last token of the file being an end of text.
    """

    def __init__(self, file: TokenFile, block_size: int, seed: int) -> None:
        """`seed` >= 0. UserError if the file holds fewer than block_size + 1 tokens."""
        if len(file) <= block_size:
            raise UserError(
                f"{file.path}: {len(file):,} tokens are too few for windows of {block_size} and the token after: "
                f"give more text or set the block size to {max(1, len(file) - 1)} or less"
            )
        self.tokens = file.tokens
        self.block_size = block_size
        self.per_epoch = len(file) // block_size
        # two epochs at a time: a batch may lie across the border
        self._starts = lru_cache(maxsize=2)(lambda epoch: self._epoch(seed, epoch))

    def _epoch(self, seed: int, epoch: int) -> Ids:
        rng = np.random.default_rng([seed, epoch])
        offset = rng.integers(len(self.tokens))
        return offset + self.block_size * rng.permutation(self.per_epoch)

    def row(self, number: int) -> Ids:
        """(block_size + 1,) int64: window `number` of the endless order."""
        start = self._starts(number // self.per_epoch)[number % self.per_epoch]
        return self.tokens[(start + np.arange(self.block_size + 1)) % len(self.tokens)].astype(np.int64)

    def batch(self, step: int, batch_size: int) -> Ids:
        """(batch_size, block_size + 1) int64: inputs are [:, :-1], targets [:, 1:]. Steps count from 0.

        Step s takes windows s * batch_size and on; after the last window of an epoch comes the first of the next.
        """
        return np.stack([self.row(number) for number in range(step * batch_size, (step + 1) * batch_size)])
