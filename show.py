"""What a stage would read and learn: rows token by token, the learned ones marked, and what is dropped.

    python show.py chats.jsonl                           # the columns tell for which stage these rows are
    python show.py sft data=smoltalk data.limit=1000     # any command line of a stage, with show.py before it
    python show.py --rows 5 dpo data=mine data.path=pairs.jsonl

Nothing is trained and nothing written, but for the tokenizer and the token ids of pretraining, which it keeps as
`pretrain.py` would.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.text import Text

import dpo
import pretrain
import sft
from base_model import GPTConfig
from chat import PICTURES
from pocketgpt import checkpoint, config, shapes, sources
from pocketgpt.errors import Parser, UserError, run
from pocketgpt.metrics import console
from pocketgpt.packing import encode, longest_allowed
from pocketgpt.shapes import CHATS, PREFERENCES, Chat
from pocketgpt.shards import Shards
from pocketgpt.tokenizer import Tokenizer

# Two shades of each, in turn, so that one sees where a token ends.
LEARNED = ("black on green", "black on bright_green")
READ = ("", "dim")
CONTROL = "bold magenta"  # on green where it is learned

Ids = list[int]
PIECE = 4096  # ids of a shard that are looked at together


@dataclass
class Shown:
    """One row as the model sees it: ids, and which are learned; two of these for a preference."""

    where: str
    shape: str
    sides: dict[str, tuple[Ids, list[bool]]]
    notes: list[str] = field(default_factory=list)  # what is odd about it
    dropped: str = ""  # why it is, if so


# --- rows of the stages ---------------------------------------------------------------------------------------------


def fine_tuning(data: config.DataConfig, tok: Tokenizer, block: int) -> Iterator[Shown]:
    """The rows of one source of `sft.py`, in their order."""
    if data.kind == "instruct":
        chats, _, _ = sft.source_conversations(data)
        found = ((f"conversation {n}", "generated", chat) for n, chat in enumerate(chats, 1))
    else:
        found = (
            (where, described(row, where, CHATS), shapes.chat(row, where)) for where, row in sources.open_rows(data)
        )
    for where, shape, item in found:
        ids, learned = encode(tok, item)
        shown = Shown(where, shape, {"": (ids, learned)})
        if isinstance(item, Chat):
            turns = [m["content"] for m in item.messages[item.learn_from :] if m["role"] == "assistant"]
            shown.notes += ["nothing to learn: no turn of the assistant"] * (not turns)
            shown.notes += ["an empty answer: teaches to say nothing"] * ("" in turns)
            shown.dropped = too_long(block, ids)
        elif len(ids) - 1 > block:
            shown.notes.append(f"longer than {block} tokens: read in pieces")
        yield shown


def preferences(data: config.DataConfig, tok: Tokenizer, block: int) -> Iterator[Shown]:
    """The rows of one source of `dpo.py`, in their order."""
    if data.kind == "onpolicy":
        raise UserError("data=onpolicy: dpo.py samples these pairs, and writes them: python show.py pairs_train.jsonl")
    for where, row in sources.open_rows(data):
        pair = shapes.preference(row, where)
        sides = {}
        for side in ("chosen", "rejected"):
            sides[side] = dpo.marked(tok, pair.prompt, getattr(pair, side))
        dropped = (
            "chosen equals rejected"
            if pair.chosen == pair.rejected
            else too_long(block, *(s[0] for s in sides.values()))
        )
        yield Shown(where, described(row, where, PREFERENCES), sides, [], dropped)


def pretraining(documents: Iterable[Ids]) -> Iterator[Shown]:
    """The documents of one source of `pretrain.py`, in their order."""
    for number, ids in enumerate(documents, 1):
        yield Shown(f"document {number}", "text", {"": (ids, [True] * len(ids))})


def encoded(documents: Iterable[str], tok: Tokenizer) -> Iterator[Ids]:
    """Each with its end of text."""
    return ([*tok.encode(text), tok.eot_id] for text in documents)


def in_shards(shards: Shards, tok: Tokenizer) -> Iterator[Ids]:
    """The documents of a folder of shards, as they are stored."""
    document: Ids = []
    for start in range(0, len(shards), PIECE):
        for token in shards.read(start, min(PIECE, len(shards) - start)).tolist():
            document.append(token)
            if token == tok.eot_id:
                yield document
                document = []


def too_long(block: int, *sides: Ids) -> str:
    return f"longer than {block} tokens" if max(map(len, sides)) - 1 > block else ""


def described(row: sources.Row, where: str, table: tuple[shapes.Shape, ...]) -> str:
    """The shape, the columns it was recognised by or reads, and those that are ignored."""
    shape = shapes.recognise(row, where, table)
    used = [*shape.columns, *(name for name in shape.optional if row.get(name))]
    ignored = sorted(name for name, value in row.items() if name not in used and value is not None)
    return (shape.name if used == [shape.name] else f"{shape.name} ({', '.join(used)})") + (
        f", ignoring {', '.join(ignored)}" if ignored else ""
    )


# --- the terminal ---------------------------------------------------------------------------------------------------


def piece(tok: Tokenizer, token: int) -> str:
    """What a token says, and nothing that would move the cursor: ⏎ before a line's end, <e2> for a part of a character."""
    raw = tok.token_bytes(token)
    try:
        return raw.decode().translate(PICTURES).replace("\n", "⏎\n").replace("\t", "⇥")
    except UnicodeDecodeError:
        return "".join(f"<{byte:02x}>" for byte in raw)


def plain() -> bool:
    """Whether there is no colour to mark tokens with."""
    return console.color_system is None or console.no_color


def marked(tok: Tokenizer, ids: Ids, learned: list[bool], limit: int) -> Text:
    """At most `limit` tokens, the learned ones in green, or in «» where there is no colour."""
    line = Text()
    controls = tok.control_ids
    for number, (token, counts) in enumerate(zip(ids[:limit], learned, strict=False)):
        text = piece(tok, token)
        if plain() and counts:
            text = f"«{text}»"
        style = (LEARNED if counts else READ)[number % 2]
        line.append(
            text, f"{style.removeprefix('black').removeprefix('dim')} {CONTROL}" if token in controls else style
        )
    line.rstrip()
    if len(ids) > limit:
        line.append(f" … and {len(ids) - limit:,} more", "italic")
    return line


def legend() -> Text:
    if plain():
        return Text("«learned», the rest is read only")
    line = Text()
    for number, (text, style) in enumerate((("learned", LEARNED[0]), ("read", READ[0]), ("control", CONTROL))):
        line.append(" " * bool(number)).append(f" {text} ", style)
    return line


def show(row: Shown, tok: Tokenizer, limit: int) -> None:
    """Print one row, at most `limit` tokens of it."""
    console.print(Text(f"\n{row.where}  ", "bold").append(row.shape, "not bold cyan"))
    for side, (ids, learned) in row.sides.items():
        counts = f"{len(ids):,} tokens, {sum(learned):,} learned"
        console.print(Text(f"{side}: {counts}" if side else counts, "italic"))
        console.print(marked(tok, ids, learned, limit))
    for note in [f"dropped: {row.dropped}"] * bool(row.dropped) + row.notes:
        console.print(Text(note, "bold red"))


def title(part: config.Part, text: str) -> Text:
    share = f", {part.share:.1%} of training" if part.share < 1 else ""
    return Text(f"\n{part.name}  ", "bold").append(f"{text}{share}", "not bold")


def show_source(part: config.Part, found: Iterator[Shown], tok: Tokenizer, rows: int, limit: int) -> None:
    """Print the first rows of a source, and what there is in all of them."""
    kinds, notes, dropped = Counter[str](), Counter[str](), 0
    lengths: list[int] = []
    learned = 0
    for number, row in enumerate(found):
        if number < rows:
            show(row, tok, limit)
        kinds[row.shape] += 1
        notes.update([f"dropped: {row.dropped}"] * bool(row.dropped) + row.notes)
        if row.dropped:
            dropped += 1
        else:
            lengths += [len(ids) for ids, _ in row.sides.values()]
            learned += sum(sum(counts) for _, counts in row.sides.values())
    console.print(title(part, f"{sum(kinds.values()):,} rows, {dropped:,} dropped"))
    for shape, count in kinds.most_common():
        console.print(f"  {count:,} {shape}", markup=False)
    if lengths:
        console.print(f"  {sum(lengths):,} tokens, {learned / sum(lengths):.0%} learned")
        console.print(f"  length: median {sorted(lengths)[len(lengths) // 2]:,}, longest {max(lengths):,} tokens")
    for note, count in notes.most_common():
        console.print(Text(f"  {count:,} {note}", "red"))


def show_pretraining(cfg: pretrain.Config, rows: int) -> None:
    """Print the first documents of every source, and how much there is of each."""
    cfg.data.check(("shakespeare", "mine", "hub", "shards"))
    if cfg.data.endless:
        raise UserError("this text is read in training and has no end: set data.limit to what is to be shown")
    corpus = pretrain.open_corpus(cfg.data, cfg.vocab_size, Path(cfg.cache))
    tok = corpus.tokenizer
    if cfg.data.kind == "shards":
        found = [in_shards(file, tok) for file in corpus.train if isinstance(file, Shards)]
    else:
        found = [encoded(documents(), tok) for documents in pretrain.documents(cfg.data)[0]]
    block = GPTConfig.from_dict(cfg.model | {"vocab_size": tok.vocab_size}, "configuration of pretrain").block_size
    console.print(legend())
    for part, documents, file in zip(cfg.data.parts(), found, corpus.train, strict=True):
        for row in itertools.islice(pretraining(documents), rows):
            show(row, tok, block)
        console.print(title(part, f"{file.meta['documents']:,} documents, {file.meta['bytes']:,} bytes"))
        console.print(f"  {len(file):,} tokens, all learned, in windows of {block} cut anywhere")


# --- main -----------------------------------------------------------------------------------------------------------


def stage_of(path: Path) -> str:
    """The stage that the first row of a file or folder is for, by its columns."""
    found = sources.first_row(path)
    if found is None:
        return "pretrain"
    where, row = found
    every: tuple[shapes.Shape[Any], ...] = (*PREFERENCES, *CHATS)
    shape = shapes.recognise(row, where, every)
    return "dpo" if shape in PREFERENCES else "pretrain" if shape.name == "text" else "sft"


def reader(path: str, default: Path) -> tuple[Tokenizer, int]:
    """The tokenizer of the checkpoint that a stage starts from, and the longest row that its model takes."""
    if path or default.exists():
        loaded = checkpoint.load(path or default)
        return loaded.tokenizer, GPTConfig.from_dict(loaded.config, str(default)).block_size
    console.print(f"no {default} yet: every byte is shown as a token", markup=False)
    return Tokenizer.train([], Tokenizer.MIN_VOCAB_SIZE), sys.maxsize


# The configuration of a stage, the kinds of data it takes, how its rows are read, and what it starts from.
STAGES: dict[str, tuple[Any, tuple[str, ...], Callable[[config.DataConfig, Tokenizer, int], Iterator[Shown]], str]] = {
    "sft": (sft.Config, ("instruct", "mine", "hub"), fine_tuning, "ckpt_base.pt"),
    "dpo": (dpo.Config, ("onpolicy", "mine", "hub"), preferences, "ckpt_sft.pt"),
}


def main() -> None:
    parser = Parser(prog="show.py", description="Show what a stage would read and learn, token by token.")
    parser.add_argument("--rows", type=int, default=3, help="rows of each source to print (default 3)")
    parser.add_argument("what", help="pretrain, sft or dpo; or a file or folder, whose columns tell")
    parser.add_argument("settings", nargs="*", default=[], help="KEY=VALUE, as the stage takes them")
    options = parser.parse_intermixed_args()
    if options.rows < 0:
        raise UserError(f"--rows is {options.rows}: it must be 0 or above")
    stage, settings = options.what, options.settings
    if stage not in ("pretrain", *STAGES):
        path = stage if re.fullmatch(r"[\w./-]+", stage) else json.dumps(stage, ensure_ascii=False)
        stage, settings = stage_of(Path(stage)), ["data=mine", f"data.path={path}", *settings]
        console.print(f"as {stage}.py {' '.join(settings)} would see it", markup=False, style="dim")
    if stage == "pretrain":
        show_pretraining(config.load(stage, pretrain.Config, settings), options.rows)
        return
    schema, kinds, read, start = STAGES[stage]
    cfg = config.load(stage, schema, settings)
    cfg.data.check(kinds)
    tok, block = reader(cfg.checkpoint, Path(cfg.out) / start)
    block = longest_allowed(block, cfg.max_length)
    console.print(legend())
    for part in cfg.data.parts():
        show_source(part, read(part.data, tok, block), tok, options.rows, block)


if __name__ == "__main__":
    run(main)
