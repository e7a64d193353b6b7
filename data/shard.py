"""Turn text of any source into a folder of shards, for corpora larger than memory.

    python data/shard.py data=mine data.path=books/ out=shards
    python data/shard.py data=fineweb_edu data.limit=0 out=shards processes=8
    python pretrain.py data=shards data.path=shards

Takes what `pretrain.py` takes as data=. Killed at any moment, it goes on when it is run again: finished shards are
verified by checksum and kept. Held-out text fills one shard at most; a smaller data.val_fraction leaves more to train on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run as a file

from pocketgpt import config, files, shards, sources
from pocketgpt.corpus import train_tokenizer
from pocketgpt.errors import UserError, run
from pocketgpt.metrics import bar, console
from pocketgpt.tokenizer import Tokenizer

TOKENIZER_BYTES = 1 << 28  # of text at most that the tokenizer learns from


@dataclass
class Config:
    """See configs/shard.yaml for units and meaning."""

    data: config.DataConfig
    out: str
    tokenizer: str
    vocab_size: int
    shard_tokens: int
    processes: int

    def check(self) -> None:
        """Raises UserError on values that make no shards."""
        if self.data.kind == "mix":
            raise UserError("data=mix has shares, which shards do not keep: make a folder of shards of one source")
        self.data.check(("shakespeare", "mine", "hub"))
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens is {self.shard_tokens}: it must be at least 1")
        if self.processes < 0:
            raise UserError(f"processes is {self.processes}: it must be at least 1, or 0 for one per processor")


def get_tokenizer(cfg: Config, docs: Iterable[str], out: Path) -> Tokenizer:
    """The one asked for, else the one in the folder already, else a new one. UserError if that in the folder is of another
    size."""
    made = out / "tokenizer_config.json"  # the last of its files
    if cfg.tokenizer:
        tok = Tokenizer.load(cfg.tokenizer)
    elif made.exists():
        tok = Tokenizer.load(out)
        if tok.vocab_size != cfg.vocab_size:
            raise UserError(
                f"{out}: its tokenizer has {tok.vocab_size} entries, vocab_size is {cfg.vocab_size}: set "
                f"vocab_size={tok.vocab_size}, choose another folder with out=, or delete it"
            )
    else:
        tok = train_tokenizer(sources.beginning(docs, TOKENIZER_BYTES), cfg.vocab_size)
    if not made.exists():
        tok.save(out, cfg.shard_tokens)  # which is no limit here
    return tok


def main() -> None:
    from pretrain import source_documents  # here, for the encoding processes import this file, too, and need no torch

    cfg = config.load("shard", Config, program="data/shard.py")
    cfg.check()
    out = Path(cfg.out)
    files.reserve(out)
    train_docs, val_docs, source = source_documents(cfg.data)
    tok = get_tokenizer(cfg, train_docs(), out)
    shards.begin(
        out,
        {
            "source": source,
            "tokenizer": tok.fingerprint,
            "vocab_size": tok.vocab_size,
            "shard_tokens": cfg.shard_tokens,
        },
    )
    with console.status("measuring the text"):  # nothing to encoding it, and the bar then knows when it ends
        total = None if cfg.data.streaming else sum(len(text.encode()) for text in train_docs())
    processes = cfg.processes or os.cpu_count() or 1
    progress, task = bar("encoding (bytes)", total)
    with progress, shards.encoders(tok, processes) as encode:
        val = shards.write_shards(out, "val", val_docs, tok, encode, cfg.shard_tokens, most=1)
        train = shards.write_shards(
            out, "train", train_docs, tok, encode, cfg.shard_tokens, progress=partial(progress.advance, task)
        )
    shards.finish(out, train, val)
    print(
        f"{sum(meta['bytes'] for meta in train) / 1e6:,.2f} MB in {sum(meta['documents'] for meta in train):,} documents, "
        f"{sum(meta['count'] for meta in train):,} tokens in {len(train):,} shards; {val[0]['count']:,} tokens held out; in {out}"
    )
    print(f"next: python pretrain.py data=shards data.path={out}")


if __name__ == "__main__":
    run(main)
