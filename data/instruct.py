"""The generated instruction data as files to look at or reuse. Run it as `python -m data.instruct`.

`sft.py` needs no such file: it calls the same generator (pocketgpt/tasks). Written: train.jsonl and heldout.jsonl, one
{"messages", "family"} per line, and manifest.json, which describes them.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pocketgpt import files
from pocketgpt.errors import UserError, run
from pocketgpt.tasks import Speech, conversations, make_items

FOLDER = Path(__file__).parent / "instruct"
HELDOUT_PER_FAMILY = 200


def build(folder: Path, n: int, seed: int, speeches: Sequence[Speech]) -> dict[str, Any]:
    """Write `n` training conversations and 200 held-out ones per family into `folder`; returns the manifest.

    Manifest: seed, fingerprint (of both files), and for train and heldout the number of conversations per family.
    Raises UserError when the folder cannot be written, or when the speeches are too few for 200 distinct questions.
    """
    items = make_items(HELDOUT_PER_FAMILY, heldout=True, seed=seed, speeches=speeches)
    splits = {
        "train": [(row["messages"], row["family"]) for row in conversations(n, seed=seed, speeches=speeches)],
        "heldout": [(item.conversation(), item.family) for item in items],
    }
    for split, rows in splits.items():
        files.write_text(folder / f"{split}.jsonl", _jsonl(rows))
    manifest = {
        "seed": seed,
        "fingerprint": files.fingerprint(folder / f"{split}.jsonl" for split in splits),
        **{split: dict(sorted(Counter(family for _, family in rows).items())) for split, rows in splits.items()},
    }
    files.write_json(folder / "manifest.json", manifest)
    return manifest


def _jsonl(rows: Iterable[tuple[list[dict[str, str]], str]]) -> str:
    lines = (json.dumps({"messages": messages, "family": family}, ensure_ascii=False) for messages, family in rows)
    return "".join(line + "\n" for line in lines)


def main() -> None:
    """Write the files and say how many conversations of which family are in them."""
    parser = argparse.ArgumentParser(description="Write the generated instruction data as JSONL files.")
    parser.add_argument("--n", type=int, default=20_000, help="training conversations (default 20000)")
    parser.add_argument("--seed", type=int, default=0, help="the data is a function of it (default 0)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to write (default data/instruct)")
    options = parser.parse_args()
    if options.n < 1:
        raise UserError(f"--n is {options.n}: give at least one conversation to write")

    from data.shakespeare import speeches

    said = speeches()
    if not said:
        print("no plays, so no speeches: the families line, question and dialogue are left out")
    manifest = build(options.out, options.n, options.seed, said)
    for split in ("train", "heldout"):
        counts = manifest[split]
        print(f"{split}: {sum(counts.values())} conversations ({', '.join(f'{v} {k}' for k, v in counts.items())})")
    print(f"in {options.out}")


if __name__ == "__main__":
    run(main)
