"""What a model can do, in numbers: bits per byte, answers that pass their check, and how sure we are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pocketgpt import chat_template, tasks
from pocketgpt import device as machine
from pocketgpt.engine import Answer, Engine, Request
from pocketgpt.loss import IGNORE, linear_cross_entropy, linear_log_probs
from pocketgpt.metrics import bar
from pocketgpt.packing import encode
from pocketgpt.sampling import Settings
from pocketgpt.shapes import Chat
from pocketgpt.token_files import TokenFile
from pocketgpt.tokenizer import Tokenizer

if TYPE_CHECKING:  # the models live in top-level scripts, which this library does not import
    from base_model import GPT
    from kv_cache import CachedGPT

MAX_VAL_TOKENS = 100_000  # held-out tokens that bits per byte is measured on, from the start of the split
MAX_ANSWER = 80  # tokens
READ_TOKENS = 300  # of a text that the report shows token by token
MAX_ROWS = 128  # prompts that are answered side by side
TEST_ITEMS, DEV_ITEMS = 200, 25  # per family
GREEDY = Settings(temperature=0.0)
# The families whose check is about form more than content.
FORMATS = ("story", "line", "question", "dialogue", "system")


def bits_per_byte(
    model: GPT,
    tok: Tokenizer,
    file: TokenFile,
    dtype: torch.dtype,
    batch_size: int = 8,
    through: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Cross-entropy on held-out text, in bits per byte of raw UTF-8 text.

    Control tokens are predicted, and paid for, but are no bytes of text. through: ids (B, T) -> what the head reads, in place of
    model.hidden_states; `lambda ids: cached.extend(ids, QuantizedCache(...))` measures what a cache that rounds costs.
    """
    through = through or model.hidden_states
    device = model.embed.weight.device
    lengths = torch.from_numpy(tok.byte_lengths())
    nats, text_bytes = 0.0, 0
    for x, y in file.val_windows(model.config.block_size, batch_size=batch_size, max_tokens=MAX_VAL_TOKENS):
        targets = torch.from_numpy(y)
        with torch.no_grad():
            with machine.autocast(device, dtype):
                hidden = through(torch.from_numpy(x).to(device))
            nats += float(
                linear_cross_entropy(hidden, model.lm_head.weight, targets.to(device), dtype, model.lm_head.softcap)
            )
        text_bytes += int(lengths[targets[targets != IGNORE]].sum())
    return nats / math.log(2) / text_bytes


def answer_many(
    model: CachedGPT, tok: Tokenizer, prompts: Sequence[list[chat_template.Message]], settings: Settings, seed: int
) -> list[str]:
    """One answer to each conversation, batched through the cache."""
    generator = torch.Generator(model.embed.weight.device).manual_seed(seed)
    encoded = [chat_template.render_prompt(tok, messages) for messages in prompts]
    ids = model.generate_many(encoded, MAX_ANSWER, settings, stop_ids=tuple(tok.control_ids), generator=generator)
    return [tok.decode(answer) for answer in ids]


def complete(
    model: CachedGPT,
    tok: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    seeds: Sequence[int],
    stops: Sequence[Sequence[str]],
    *,
    new_tokens: int,
    batch_tokens: int,
    tick: Callable[[], object] = lambda: None,
) -> list[str]:
    """What the model writes after each prompt, none longer than block_size, side by side through the engine.

    An answer ends with a control id, before one of its stop texts, after new_tokens, or where the context does. Which
    prompts stand beside it, and so batch_tokens (the room for keys and values), do not change it.
    """

    def hear(answer: Answer, _: str) -> None:
        if answer.reason:
            tick()

    ends = tuple(sorted(tok.control_ids))
    needs = sorted(min(len(ids) + new_tokens, model.config.block_size) + 16 for ids in prompts)  # and a block begun
    pool_tokens = max(needs[-1], min(batch_tokens, sum(needs[-MAX_ROWS:])))
    engine = Engine(model, tok, pool_tokens=pool_tokens, max_batch=MAX_ROWS, prefill_chunk=batch_tokens)
    requests = [
        Request(ids, new_tokens, settings, seed, ends, stop, hear)
        for ids, seed, stop in zip(prompts, seeds, stops, strict=True)
    ]
    return [answer.text for answer in engine.answer_all(requests)]


@dataclass
class Score:
    """Answers to items: which passed their check, and which of those also keep the style rule."""

    items: Sequence[tasks.Item]
    answers: list[str]
    passed: list[bool]
    liked: list[bool]

    @classmethod
    def of(cls, items: Sequence[tasks.Item], answers: list[str]) -> Score:
        passed = [tasks.check(item, text) for item, text in zip(items, answers, strict=True)]
        liked = [ok and tasks.in_style(item, text) for item, text, ok in zip(items, answers, passed, strict=True)]
        return cls(items, answers, passed, liked)

    def rate(self, families: Sequence[str] | None = None) -> tuple[int, int]:
        """(passed, asked) of these families, of all by default."""
        chosen = [
            ok for item, ok in zip(self.items, self.passed, strict=True) if families is None or item.family in families
        ]
        return sum(chosen), len(chosen)

    def by_family(self) -> dict[str, tuple[int, int]]:
        return {family: self.rate([family]) for family in dict.fromkeys(item.family for item in self.items)}

    def mean_length(self) -> float:
        """Characters per answer."""
        return sum(map(len, self.answers)) / len(self.answers)


def heldout_items(
    speeches: Sequence[tasks.Speech], n_test: int = TEST_ITEMS
) -> tuple[list[tasks.Item], list[tasks.Item]]:
    """(test, dev) items from the held-out combinations, disjoint: every stage is chosen on dev and reported on test.

    n_test: test items per family, at most TEST_ITEMS.
    """
    items = tasks.make_items(TEST_ITEMS + DEV_ITEMS, heldout=True, seed=1, speeches=speeches)
    test, dev = [], []
    for i, item in enumerate(items):
        place = i % (TEST_ITEMS + DEV_ITEMS)
        if place >= TEST_ITEMS:
            dev.append(item)
        elif place < n_test:
            test.append(item)
    return test, dev


def score(
    model: CachedGPT, tok: Tokenizer, items: Sequence[tasks.Item], settings: Settings = GREEDY, seed: int = 0
) -> Score:
    """Ask every item and check the answers."""
    answers = answer_many(model, tok, [item.messages for item in items], settings, seed)
    return Score.of(items, answers)


def score_with_bar(
    name: str, model: CachedGPT, tok: Tokenizer, items: Sequence[tasks.Item], settings: Settings = GREEDY, seed: int = 0
) -> Score:
    """`score` under a progress bar, in parts of a few batches."""
    progress, task = bar(name, len(items))
    answers: list[str] = []
    with progress:
        for start in range(0, len(items), 240):
            part = items[start : start + 240]
            answers += score(model, tok, part, settings, seed + start).answers
            progress.advance(task, len(part))
    return Score.of(items, answers)


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927), which stays sensible near 0 and 1. (0, 1) without trials."""
    if not trials:
        return 0.0, 1.0
    p = successes / trials
    middle = p + z * z / (2 * trials)
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    low, high = ((middle + side) / (1 + z * z / trials) for side in (-half, half))
    return max(0.0, low), min(1.0, high)


def wins(ours: Score, theirs: Score) -> tuple[int, int]:
    """(wins, decided) item by item: ours is liked where theirs is not; items where both are or neither is are undecided."""
    decided = [(a, b) for a, b in zip(ours.liked, theirs.liked, strict=True) if a != b]
    return sum(a for a, _ in decided), len(decided)


def answer_log_probs(model: GPT, rows: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over supervised tokens of log p(token | what is before it), in nats: rows, targets (B, T) -> (B,) float32.

    Padding at the right, with targets IGNORE, changes nothing.
    """
    device = model.embed.weight.device
    with machine.autocast(device, dtype):
        hidden = model.hidden_states(rows)
    wanted = targets != IGNORE  # the head runs only where an answer stands
    chosen = linear_log_probs(hidden[wanted], model.lm_head.weight, targets[wanted], dtype, model.lm_head.softcap)
    owner = torch.arange(rows.size(0), device=device)[:, None].expand_as(rows)[wanted]
    return torch.zeros(rows.size(0), device=device).index_add(0, owner, chosen)


def reading(model: GPT, tok: Tokenizer, title: str, ids: Sequence[int], supervised: Sequence[bool]) -> dict[str, Any]:
    """A text as the model reads it, for the report: {"title", "tokens"}, each of the tokens as [text, supervised, its
    probability after what is before it, the three likeliest in its place as [text, probability]].

    The first has nothing before it, and no probability. At most READ_TOKENS are read.
    """

    def text(i: int) -> str:
        return tok.token_bytes(i).decode("utf-8", errors="backslashreplace")  # a part of a character as its bytes

    n = min(READ_TOKENS, model.config.block_size)
    row = torch.tensor([list(ids[:n])], device=model.embed.weight.device)
    with torch.no_grad():
        probabilities = model(row)[0, :-1].float().softmax(-1).cpu()
    # A vocabulary from elsewhere may be padded with ids that say nothing.
    best = probabilities[:, : tok.vocab_size].topk(3)
    given: list[float | None] = [None, *probabilities.gather(1, row[0, 1:, None].cpu())[:, 0].tolist()]
    likely = [
        [],
        *(list(zip(*pair, strict=True)) for pair in zip(best.indices.tolist(), best.values.tolist(), strict=True)),
    ]
    tokens = [
        [
            text(i),
            bool(counts),
            p and float(f"{p:.4g}"),
            [[text(j), float(f"{q:.4g}")] for j, q in others],
        ]
        for i, counts, p, others in zip(ids[:n], supervised[:n], given, likely, strict=True)
    ]
    return {"title": title if n >= len(ids) else f"{title}, the first {n} of {len(ids)} tokens", "tokens": tokens}


def read_conversations(
    model: GPT, tok: Tokenizer, conversations: Sequence[Chat | str], n: int = 4
) -> list[dict[str, Any]]:
    """`reading` of n conversations out of these, evenly from first to last."""
    places = sorted({i * len(conversations) // n for i in range(n)}) if conversations else []
    return [reading(model, tok, f"held-out conversation {i + 1}", *encode(tok, conversations[i])) for i in places]


def percent(pair: Sequence[int]) -> str:
    """(successes, trials) as a share; a dash without trials."""
    return f"{pair[0] / pair[1]:.1%}" if pair[1] else "-"
