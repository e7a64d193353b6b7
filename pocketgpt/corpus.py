"""From documents to a tokenizer and token files, made once and reused while neither text nor settings change."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pocketgpt.errors import UserError
from pocketgpt.files import write_text
from pocketgpt.metrics import bar, console
from pocketgpt.token_files import TokenFile, is_current, write_tokens
from pocketgpt.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pocketgpt.hub_stream import Stream
    from pocketgpt.shards import Shards

# Chat repeats these in every turn, so they should be one token each; no corpus says "assistant" often enough.
ROLE_WORDS = ["system\nuser\nassistant\n"] * 1000
Documents = Callable[[], Iterable[str]]  # starts a new pass over the documents each time


@dataclass
class Corpus:
    tokenizer: Tokenizer
    train: Sequence[TokenFile | Shards | Stream]  # of each source
    val: TokenFile
    fingerprint: str  # sha256 of the text behind both


def prepare(
    train: Sequence[Documents],
    val: Documents,
    source: str,
    vocab_size: int,
    cache: Path,
    learn_from: Documents | None = None,
) -> Corpus:
    """Train the tokenizer on the training documents of all sources and encode both splits, unless that has been done.

    source: any string that changes when the text does. The results lie in a folder of `cache` named after it.
    learn_from: what the tokenizer learns from, if not all training documents.

    Raises:
        UserError: if the text does not hold enough distinct pieces for vocab_size.
    """
    key = hashlib.sha256(json.dumps([source, vocab_size]).encode()).hexdigest()[:16]
    folder = cache / key
    tokenizer_path = folder / "tokenizer.json"
    if tokenizer_path.exists():
        tokenizer = Tokenizer.load(tokenizer_path)
    else:
        tokenizer = train_tokenizer((learn_from or chain(*train))(), vocab_size)
        write_text(tokenizer_path, tokenizer.to_json())
    files = []
    names = [*(f"train{number or ''}" for number in range(len(train))), "val"]
    for name, documents in zip(names, [*train, val], strict=True):
        path = folder / f"{name}.bin"
        if not is_current(path, tokenizer, source):
            progress, task = bar(f"encoding {name} (bytes)")
            with progress:
                write_tokens(
                    path,
                    documents(),
                    tokenizer,
                    source=source,
                    progress=partial(progress.advance, task),
                )
        files.append(TokenFile.open(path, tokenizer))
    digest = hashlib.sha256("".join(file.meta["data"] for file in files).encode()).hexdigest()
    return Corpus(tokenizer, files[:-1], files[-1], digest)


def train_tokenizer(docs: Iterable[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly so many entries. UserError if the text does not hold enough distinct pieces."""
    with console.status(f"training a tokenizer of {vocab_size} entries"):
        tokenizer = Tokenizer.train(itertools.chain(docs, ROLE_WORDS), vocab_size)
    if tokenizer.vocab_size < vocab_size:
        raise UserError(
            f"the text yields a vocabulary of {tokenizer.vocab_size}, not {vocab_size}: "
            f"set vocab_size={tokenizer.vocab_size} or give more text"
        )
    return tokenizer


def chain(*parts: Documents) -> Documents:
    """All documents of several sources, one after another."""

    def documents() -> Iterator[str]:
        for part in parts:
            yield from part()

    return documents
