"""A corpus larger than memory: fixed-size token files ("shards") in a folder, and training windows drawn from them.

The ids of all documents follow each other; shard k holds ids k * shard_tokens and on, so a document may begin in one and end in
the next. Each `train-00000.bin` is a token file as `token_files` describes; `shards.json` lists them, and says whether
all are there. Ids in shard order read as a ring, like those of a single token file.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pocketgpt.corpus import Corpus
from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, sha256_file, write_json
from pocketgpt.token_files import FORMAT, Ids, TokenFile, batches, meta_path, token_type
from pocketgpt.tokenizer import Tokenizer

INDEX = "shards.json"
MIXED = 8  # shards whose windows are shuffled together: what is mapped at a time, with those before and after
BATCH = 1 << 20  # characters that a process encodes at a time
Encoded = tuple[NDArray[Any], int]  # ids of a document with its end of text, and its bytes of UTF-8
Encode = Callable[[Iterable[list[str]]], Iterator[list[Encoded]]]  # batches of texts -> the same, encoded, in order


# --- writing --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def encoders(tok: Tokenizer, processes: int) -> Iterator[Encode]:
    """What encodes batches of texts in so many processes, two batches ahead for each; in this one if it is one."""
    if processes == 1:
        yield partial(map, partial(_encode, tok))
        return
    # spawn: the tokenizer has threads of its own, which a fork would break
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin, (tok,)) as pool:

        def in_order(texts: Iterable[list[str]]) -> Iterator[list[Encoded]]:
            ahead: deque[Future[list[Encoded]]] = deque()
            for batch in texts:
                ahead.append(pool.submit(_encode_here, batch))
                if len(ahead) == 2 * processes:
                    yield ahead.popleft().result()
            yield from (future.result() for future in ahead)

        try:
            yield in_order
        except BrokenProcessPool:
            raise UserError(
                "an encoding process was killed, by lack of memory perhaps: run it again with fewer processes=, "
                "finished shards are kept"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _encode(tok: Tokenizer, texts: list[str]) -> list[Encoded]:
    dtype = token_type(tok.vocab_size)[1]
    return [
        (np.array([*ids, tok.eot_id], dtype), len(text.encode()))
        for text, ids in zip(texts, tok.encode_batch(texts), strict=True)
    ]


def _begin(tok: Tokenizer) -> None:
    """In a new process: keep the tokenizer, leave Ctrl-C to the parent, and end with it, even if that was killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for each processor already
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _tokenizer.append(tok)


_tokenizer: list[Tokenizer] = []  # of an encoding process


def _encode_here(texts: list[str]) -> list[Encoded]:
    return _encode(_tokenizer[0], texts)


def write_shards(
    folder: Path,
    name: str,
    docs: Callable[[], Iterable[str]],
    tok: Tokenizer,
    encode: Encode,
    size: int,
    *,
    most: int | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> list[dict[str, Any]]:
    """Encode `docs` into shards `name`-00000.bin and on of `size` ids each, the last one shorter; their descriptions.

    Shards that are there, whole and of this tokenizer, are kept, and encoding goes on where the last of them ends: with the
    document it ends in, whose first ids it holds. The caller sees to it that they come from the same documents.
    most: end after so many shards. progress: told the bytes of text done since the last call. A shard appears whole or not
    at all. UserError if there is no document.
    """
    done: list[dict[str, Any]] = []
    while (most is None or len(done) < most) and (found := _finished(folder / f"{name}-{len(done):05d}.bin", tok)):
        done.append(found)
        progress(found["bytes"])
    document, at = done[-1]["end"] if done else (0, 0)

    parts: list[NDArray[Any]] = []
    room, documents, text_bytes = size, 0, 0

    def write(end: tuple[int, int]) -> None:
        nonlocal parts, room, documents, text_bytes
        path = folder / f"{name}-{len(done):05d}.bin"
        done.append(_write(path, np.concatenate(parts), tok, documents=documents, bytes=text_bytes, end=[*end]))
        parts, room, documents, text_bytes = [], size, 0, 0

    if most is None or len(done) < most:
        texts = batches(itertools.islice(docs(), document, None), BATCH)
        for ids, length in itertools.chain.from_iterable(encode(texts)):
            while at < len(ids):
                parts.append(ids[at : at + room])
                at += len(parts[-1])
                room -= len(parts[-1])
                if at == len(ids):
                    documents += 1
                    text_bytes += length
                    progress(length)
                if room == 0:
                    write((document + 1, 0) if at == len(ids) else (document, at))
                    if len(done) == most:
                        return done
            document, at = document + 1, 0
        if parts:
            write((document, 0))
    if not done:
        raise UserError(f"no documents to encode into {folder}")
    return done


def _write(path: Path, ids: NDArray[Any], tok: Tokenizer, **facts: Any) -> dict[str, Any]:
    meta = {"format": FORMAT, "dtype": token_type(tok.vocab_size)[0], "count": len(ids)} | facts
    with atomic_path(path) as temporary:
        ids.tofile(temporary)
        meta |= {"ids": sha256_file(temporary), "tokenizer": tok.fingerprint}
        meta_path(path).unlink(missing_ok=True)  # never the old description beside new ids, even after a crash
    write_json(meta_path(path), meta)
    return meta


def _finished(path: Path, tok: Tokenizer) -> dict[str, Any] | None:
    """The description of a shard that is there and whole. Damage is told; the shard is made again."""
    if not meta_path(path).exists():
        return None
    try:
        return TokenFile.open(path, tok).meta
    except UserError as error:
        print(f"{error}; that is done now")
        return None


def begin(folder: Path, about: dict[str, Any]) -> None:
    """Say in the index what the folder is going to hold. UserError if it holds shards of something else."""
    path = folder / INDEX
    if path.exists():
        before = _index(folder)
        if changed := [key for key, value in about.items() if before.get(key) != value]:
            raise UserError(
                f"{folder}: holds shards made with another {', '.join(changed)}: choose another folder with out=, or delete it"
            )
    write_json(path, {"format": FORMAT, "complete": False} | about)


def finish(folder: Path, train: list[dict[str, Any]], val: list[dict[str, Any]]) -> None:
    """List the shards in the index, with their checksums, and call the folder complete."""
    keys = ("count", "documents", "bytes", "ids")
    listed = {
        side: [
            {"file": f"{side}-{number:05d}.bin"} | {key: meta[key] for key in keys} for number, meta in enumerate(metas)
        ]
        for side, metas in (("train", train), ("val", val))
    }
    write_json(folder / INDEX, _index(folder) | {"complete": True} | listed)


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = dict(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read: {error.strerror}; python data/shard.py out={folder} makes shards"
        ) from error
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: not an index of shards: delete it and run python data/shard.py again") from error
    if index.get("format") != FORMAT:
        raise UserError(f"{path}: written in format {index.get('format')}, this program reads {FORMAT}: make it again")
    return index


# --- reading --------------------------------------------------------------------------------------------------------


def open_shards(folder: Path) -> Corpus:
    """The corpus in a folder of shards. Sizes are checked now, checksums when a shard is first read.

    Raises:
        UserError: if the folder is no complete set of shards, or a shard is missing or cut short.
    """
    index = _index(folder)
    if not index.get("complete"):
        raise UserError(f"{folder}: its shards are not all made: run the same python data/shard.py again, it goes on")
    tok = Tokenizer.load(folder)
    try:
        train = Shards(folder, index["train"], tok)
        val = folder / index["val"][0]["file"]
        digest = hashlib.sha256("".join(row["ids"] for row in index["train"] + index["val"]).encode()).hexdigest()
    except (KeyError, TypeError, IndexError) as error:
        raise UserError(f"{folder / INDEX}: damaged: delete it and run python data/shard.py again") from error
    return Corpus(tok, [train], TokenFile.open(val, tok), digest)


class Shards:
    """The ids of all training shards as one long ring, of which few are mapped into memory at a time."""

    def __init__(self, folder: Path, rows: list[dict[str, Any]], tok: Tokenizer) -> None:
        """rows: as in the index. UserError if a shard is missing or of the wrong size."""
        self.path = folder
        self.meta = {key: sum(row[key] for row in rows) for key in ("bytes", "documents")}
        self.starts = np.cumsum([0] + [row["count"] for row in rows])  # (shards + 1,) of each in the ring, and the end
        item = token_type(tok.vocab_size)[1].itemsize
        for row in rows:
            path = folder / row["file"]
            size = path.stat().st_size if path.exists() else 0
            if size != row["count"] * item:
                raise UserError(
                    f"{path}: {size:,} bytes instead of {row['count'] * item:,}: run the same python data/shard.py again, "
                    "it makes what is missing"
                )

        @lru_cache(maxsize=MIXED + 2)  # the oldest is unmapped: memory does not grow with what has been read
        def tokens(number: int) -> NDArray[np.unsignedinteger[Any]]:
            file = TokenFile.open(folder / rows[number]["file"], tok)
            if file.meta["ids"] != rows[number]["ids"]:
                raise UserError(
                    f"{file.path}: not the shard that {INDEX} lists: run the same python data/shard.py again"
                )
            return file.tokens

        self._tokens = tokens

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, count: int) -> Ids:
        """(count,) int64: the ids from place `start` of the ring on."""
        found = np.empty(count, np.int64)
        at = 0
        while at < count:
            place = (start + at) % len(self)
            shard = int(np.searchsorted(self.starts, place, side="right")) - 1
            first = place - self.starts[shard]
            ids = self._tokens(shard)[first : first + count - at]
            found[at : at + len(ids)] = ids
            at += len(ids)
        return found

    def windows(self, block_size: int, seed: int) -> ShardWindows:
        return ShardWindows(self, block_size, seed)


class ShardWindows:
    """Training windows in random order, in memory that does not grow with the corpus: a pure function of seed and number.

    As with `Windows`, an epoch cuts the ring into windows from a random place on (here within the first window), so
    that no token is a target twice and less than one window is left out. Shards are shuffled, and the windows that begin in
    `MIXED` shards that come after one another are shuffled together: reading stays within a few files, and a batch
    still holds text from far apart.
    """

    def __init__(self, shards: Shards, block_size: int, seed: int) -> None:
        """`seed` >= 0. UserError if there are fewer than block_size + 1 tokens."""
        if len(shards) <= block_size:
            raise UserError(
                f"{shards.path}: {len(shards):,} tokens are too few for windows of {block_size} and the token after: "
                f"give more text or set the block size to {max(1, len(shards) - 1)} or less"
            )
        self.shards, self.block_size, self.seed = shards, block_size, seed
        self.per_epoch = len(shards) // block_size
        # two at a time: a batch may lie across the border
        self._epochs = lru_cache(maxsize=2)(self._epoch)
        self._groups = lru_cache(maxsize=2)(self._group)

    def _epoch(self, epoch: int) -> tuple[int, Ids, Ids, Ids]:
        """Where the first window begins, the first window of each shard and the end, the shards' order, and how many
        windows come up to the end of each group."""
        rng = np.random.default_rng([self.seed, epoch])
        offset = int(rng.integers(self.block_size))
        firsts = np.minimum(-((offset - self.shards.starts) // self.block_size), self.per_epoch)
        firsts[0], firsts[-1] = 0, self.per_epoch
        order = rng.permutation(len(firsts) - 1)
        ends = np.cumsum(np.add.reduceat(np.diff(firsts)[order], np.arange(0, len(order), MIXED)))
        return offset, firsts, order, ends

    def _group(self, epoch: int, group: int) -> Ids:
        _, firsts, order, _ = self._epochs(epoch)
        shards = order[group * MIXED : (group + 1) * MIXED]
        windows = np.concatenate([np.arange(firsts[shard], firsts[shard + 1]) for shard in shards])
        return np.random.default_rng([self.seed, epoch, group]).permutation(windows)

    def start(self, number: int) -> int:
        """The place in the ring where window `number` of the endless order begins."""
        epoch, at = divmod(number, self.per_epoch)
        offset, _, _, ends = self._epochs(epoch)
        group = int(np.searchsorted(ends, at, side="right"))
        windows = self._groups(epoch, group)
        return offset + int(windows[at - (int(ends[group]) - len(windows))]) * self.block_size

    def row(self, number: int) -> Ids:
        """(block_size + 1,) int64: window `number` of the endless order."""
        return self.shards.read(self.start(number), self.block_size + 1)
