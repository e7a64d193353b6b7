"""The key/value cache: CachedGPT, the caches, and a program that proves them exact and shows their speed.

    python kv_cache.py                       # checkpoints/ckpt_sft.pt, or ckpt_base.pt
    python kv_cache.py checkpoint=checkpoints/ckpt_dpo.pt new_tokens=400

Generating a token needs the keys and values of all earlier tokens, and these never change: attention is causal, so
no later token can alter them. The naive loop computes them again for every token. A cache keeps them, and each step
runs the network on one new token only. docs/kv_cache.md tells the whole story with pictures.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from base_model import GPT, GPTConfig, KeepKV
from pocketgpt import checkpoint, config, sampling
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.files import atomic_path, write_json
from pocketgpt.metrics import bar, console


def kv_cache_bytes(config: GPTConfig, batch: int, length: int, bytes_per_element: int) -> int:
    """Bytes of the keys and values of `length` tokens: 2 x layers x batch x length x kv_heads x head_dim x bytes."""
    return 2 * config.n_layer * batch * length * config.n_kv_head * config.width_of_head * bytes_per_element


class KVCache:
    """What all caches share: how many tokens are held, where new ones stand, and what they may see.

    `starts` (B,) int64 gives the number of padding tokens at the left of each row of a ragged batch: they take no position
    and are seen by nobody. A chunk of any size may follow what is held: its queries see all held tokens and, within the
    chunk, those before them, so the mask is a triangle aligned to the lower right:

        held 3, chunk of 2:   1 1 1 1 0
                              1 1 1 1 1
    """

    def __init__(self, config: GPTConfig, batch_size: int = 1, starts: Tensor | None = None) -> None:
        self.config = config
        self.batch_size = batch_size
        self.starts = starts
        self.length = 0

    @property
    def keep(self) -> list[KeepKV]:
        """One function per layer, which is all that the network sees of a cache.

        Made anew for each call: a stored list would hold the cache that holds it, and such a cycle keeps its megabytes
        until the garbage collector happens to come by.
        """
        return [partial(self.append, layer) for layer in range(self.config.n_layer)]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new k, v (B, n_kv_head, T, head_dim) of a layer behind the held ones; return held and new."""
        raise NotImplementedError

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        raise NotImplementedError

    def select(self, rows: Tensor) -> None:
        """Keep these rows (indices into the batch, int64) in this order; a row may be taken more than once."""
        raise NotImplementedError

    def nbytes(self) -> int:
        """Bytes of memory that are allocated for keys and values."""
        raise NotImplementedError

    def advance(self, n: int) -> None:
        """Count `n` tokens as held, once every layer has stored them."""
        self.length += n

    def reset(self) -> None:
        self.crop(0)

    @property
    def room(self) -> int:
        """Tokens until the longest row reaches block_size."""
        padding = int(self.starts.min()) if self.starts is not None else 0
        return self.config.block_size - (self.length - padding)

    def positions(self, n: int, device: torch.device) -> Tensor:
        """Positions of the next n tokens: (n,), or (B, n) in a ragged batch."""
        if n > self.room:
            raise ValueError(f"{n} more tokens do not fit into block_size {self.config.block_size}: {self.room} left")
        slots = torch.arange(self.length, self.length + n, device=device)
        return slots if self.starts is None else (slots - self.starts[:, None]).clamp_min(0)

    def mask(self, n: int, device: torch.device) -> Tensor | None:
        """What the next n queries may see, (n, length + n) or (B, 1, n, length + n) bool; None where nothing is hidden
        from a single query, or plain causal attention is right."""
        if self.starts is None and (n == 1 or self.length == 0):
            return None
        total = self.length + n
        visible = torch.ones(n, total, dtype=torch.bool, device=device).tril(self.length)
        if self.starts is None:
            return visible
        real = torch.arange(total, device=device) >= self.starts[:, None, None, None]
        # A padding query sees itself, because a softmax over nothing is NaN, and NaN x 0 stays NaN in the rows that count.
        itself = torch.eye(total, dtype=torch.bool, device=device)[self.length :]
        return (visible & real) | itself


class DynamicCache(KVCache):
    """Grows with `torch.cat`: the teaching version. Every step copies all that is held, so n tokens copy O(n^2) bytes."""

    def __init__(self, config: GPTConfig, batch_size: int = 1, starts: Tensor | None = None) -> None:
        super().__init__(config, batch_size, starts)
        self.k: list[Tensor | None] = [None] * config.n_layer
        self.v: list[Tensor | None] = [None] * config.n_layer

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held_k, held_v = self.k[layer], self.v[layer]
        if held_k is not None and held_v is not None:
            k, v = torch.cat((held_k, k), dim=2), torch.cat((held_v, v), dim=2)
        self.k[layer], self.v[layer] = k, v
        return k, v

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.k = (
            [k if k is None or not length else k[:, :, :length] for k in self.k] if length else [None] * len(self.k)
        )
        self.v = (
            [v if v is None or not length else v[:, :, :length] for v in self.v] if length else [None] * len(self.v)
        )
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.k = [k if k is None else k[rows] for k in self.k]
        self.v = [v if v is None else v[rows] for v in self.v]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in [*self.k, *self.v] if t is not None)


class StaticCache(KVCache):
    """Allocated once, written in place; attention reads the live length only. Nothing is copied as it grows."""

    def __init__(
        self,
        config: GPTConfig,
        batch_size: int = 1,
        starts: Tensor | None = None,
        *,
        capacity: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(config, batch_size, starts)
        self.capacity = capacity or config.block_size
        shape = (config.n_layer, batch_size, config.n_kv_head, self.capacity, config.width_of_head)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.length + k.size(2)
        if end > self.capacity:
            raise ValueError(f"{end} tokens do not fit into a cache with a capacity of {self.capacity}")
        self.k[layer, :, :, self.length : end] = k
        self.v[layer, :, :, self.length : end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]

    def crop(self, length: int) -> None:
        check_crop(length, self.length)
        self.length = length

    def select(self, rows: Tensor) -> None:
        self.k, self.v = self.k[:, rows], self.v[:, rows]
        self.starts = self.starts[rows] if self.starts is not None else None
        self.batch_size = len(rows)

    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes


def check_crop(length: int, held: int) -> None:
    if not 0 <= length <= held:
        raise ValueError(f"cannot crop a cache of {held} tokens to {length}")


class CachedGPT(GPT):
    """GPT with the same parameters, under the same names, that carries a cache from call to call."""

    @torch.no_grad()
    def forward(self, idx: Tensor, past_kv: KVCache | None = None) -> tuple[Tensor, KVCache]:
        """New ids (B, T) int64 behind those that past_kv holds -> (logits (B, T, vocab_size), the cache, now longer)."""
        past_kv = past_kv if past_kv is not None else DynamicCache(self.config, idx.size(0))
        return self.lm_head(self.extend(idx, past_kv)), past_kv

    @classmethod
    def sharing(cls, model: GPT) -> CachedGPT:
        """A cached view of a model: the same weights in the same memory, so that training it changes this one too."""
        view = cls(model.config).to(model.embed.weight.device).eval()
        view.load_state_dict(model.state_dict(), assign=True)
        if model.config.tie_embeddings:  # assigned name by name, one weight became two parameters
            view.lm_head.weight = view.embed.weight
        view.n_tokens = model.n_tokens
        return view

    def extend(self, idx: Tensor, cache: KVCache) -> Tensor:
        """Run new ids (B, T) on top of the cache: what the head reads of them, (B, T, n_embd)."""
        n = idx.size(1)
        hidden = self.hidden_states(idx, cache.positions(n, idx.device), cache.mask(n, idx.device), cache.keep)
        cache.advance(n)
        return hidden

    def new_cache(self, batch_size: int = 1, starts: Tensor | None = None, capacity: int | None = None) -> StaticCache:
        """An empty StaticCache of this model's shape, type and device."""
        weight = self.embed.weight
        return StaticCache(self.config, batch_size, starts, capacity=capacity, dtype=weight.dtype, device=weight.device)

    @torch.inference_mode()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] = (),
        pad_id: int | None = None,
        generator: torch.Generator | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """GPT.generate, with the same arguments and result, computing each token once.

        cache: an empty cache to use, or None for a new StaticCache.
        """
        capacity = min(self.config.block_size, idx.size(1) + max_new_tokens)
        held = cache if cache is not None else self.new_cache(idx.size(0), capacity=capacity)
        held.reset()
        began = 0

        def next_logits(ids: Tensor, start: int) -> Tensor:
            nonlocal began
            if start != began:  # the context has lost its older half: all positions have shifted
                held.reset()
                began = start
            return self.lm_head(self.extend(ids[:, start + held.length :], held)[:, -1])

        return sampling.generate(
            next_logits,
            idx,
            max_new_tokens,
            sampling.Settings(temperature, top_k, top_p, min_p, repetition_penalty),
            block_size=self.config.block_size,
            n_tokens=self.n_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            generator=generator,
        )

    @torch.inference_mode()
    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        settings: sampling.Settings,
        *,
        stop_ids: Sequence[int],
        generator: torch.Generator | None = None,
        batch_size: int = 128,
    ) -> list[list[int]]:
        """Answers to prompts of different lengths, in their order, each without its prompt and its stop id.

        Prompts of similar length share a batch, padded on the left; rows that have ended leave it. A prompt longer than
        block_size is cut as everywhere (sampling.window_start); an answer also ends where block_size does.
        """
        device, block_size = self.embed.weight.device, self.config.block_size
        prompts = [prompt[sampling.window_start(len(prompt), block_size) :] for prompt in prompts]
        stops = set(stop_ids)
        if generator is None:
            generator = sampling.own_generator(device)
        answers: list[list[int]] = [[] for _ in prompts]
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            longest = len(prompts[rows[-1]])
            starts = torch.tensor([longest - len(prompts[i]) for i in rows], device=device)
            ids = torch.tensor(
                [[prompts[i][0]] * (longest - len(prompts[i])) + list(prompts[i]) for i in rows], device=device
            )
            cache = self.new_cache(len(rows), starts if bool(starts.any()) else None, longest + max_new_tokens)
            logits = self.lm_head(self.extend(ids, cache)[:, -1])
            alive = list(range(len(rows)))  # which rows of the batch still talk
            for _ in range(max_new_tokens):
                token = sampling.sample(logits, settings, ids, self.n_tokens, generator)
                said = token.tolist()
                alive = [row for row in alive if said[row] not in stops]
                for row in alive:
                    answers[rows[row]].append(said[row])
                alive = [row for row in alive if len(prompts[rows[row]]) + len(answers[rows[row]]) <= block_size]
                if not alive:
                    break
                # Leaving copies the cache, so rows leave in groups, unless one of them has no next position.
                if cache.room == 0 or len(alive) <= 0.75 * len(rows):
                    kept = torch.tensor(alive, device=device)
                    rows, ids, token = [rows[row] for row in alive], ids[kept], token[kept]
                    alive = list(range(len(rows)))
                    cache.select(kept)
                ids = torch.cat((ids, token[:, None]), dim=1)
                logits = self.lm_head(self.extend(token[:, None], cache)[:, -1])
        return answers


# --- the program ----------------------------------------------------------------------------------------------------


PROOF_TOKENS = 96  # the proof covers this many positions


@dataclass
class Config:
    """See configs/kv_cache.yaml for units and meaning."""

    checkpoint: str
    out: str
    device: str
    prompt: str
    new_tokens: int
    prompt_lengths: list[int]
    repeats: int
    tolerance: float


def find_checkpoint(cfg: Config) -> Path:
    """The one that is named, or the newest stage of sft and base that is there."""
    if cfg.checkpoint:
        return Path(cfg.checkpoint)
    for stage in ("sft", "base"):
        path = Path(cfg.out) / f"ckpt_{stage}.pt"
        if path.exists():
            return path
    raise UserError(
        f"{cfg.out}: no ckpt_sft.pt and no ckpt_base.pt there; run `make pretrain` first, or name one with checkpoint=PATH"
    )


# What is fed to the cache in each row of the proof, as sizes of chunks; a negative number rewinds by so many tokens.
def ways_to_feed(length: int) -> dict[str, list[int]]:
    third = length // 3
    return {
        "token by token": [1] * length,
        "one prefill": [length],
        "uneven chunks": [third, 1, 2, length - third - 3],
        "after a rewind": [length - 2, -third, third, 2],
    }


def feed(model: CachedGPT, ids: Tensor, cache: KVCache, chunks: Sequence[int]) -> Tensor:
    """Logits of all positions of ids (B, T), computed chunk by chunk on the cache; those of a rewound part are replaced."""
    logits = torch.empty(*ids.shape, model.config.vocab_size, device=ids.device)
    for chunk in chunks:
        if chunk < 0:
            cache.crop(cache.length + chunk)
        else:
            at = slice(cache.length, cache.length + chunk)
            logits[:, at] = model(ids[:, at], cache)[0]
    assert cache.length == ids.size(1)
    return logits


def prove(model: CachedGPT, reference: GPT, ids: Tensor, tolerance: float) -> list[dict[str, Any]]:
    """Compare cached logits with the full forward pass over all positions of ids (1, T), in every way to feed them."""
    vocab = reference.config.vocab_size
    batch = torch.cat((ids, ids.flip(1), (ids + 1) % vocab))
    # Rows of a ragged batch, padded on the left: each must equal itself alone.
    cut = ids.size(1) // 4
    starts = torch.tensor([0, cut], device=ids.device)
    ragged = torch.cat((ids, torch.cat((torch.zeros_like(ids[:, :cut]), ids[:, cut:]), dim=1)))
    results = []
    with torch.inference_mode():
        full, full_batch, full_short = reference(ids), reference(batch), reference(ids[:, cut:])
        for kind, new in (("dynamic", DynamicCache), ("static", StaticCache)):

            def cache(rows: int, starts: Tensor | None = None, new: Any = new) -> KVCache:
                more = {} if new is DynamicCache else {"device": ids.device}
                return new(model.config, rows, starts, **more)

            outputs = {
                way: (full, feed(model, ids, cache(1), chunks)) for way, chunks in ways_to_feed(ids.size(1)).items()
            }
            chunks = ways_to_feed(ids.size(1))["uneven chunks"]
            outputs["batch of 3"] = (full_batch, feed(model, batch, cache(3), chunks))
            both = feed(model, ragged, cache(2, starts), chunks)
            outputs["ragged batch"] = (torch.cat((full, full_short), 1), torch.cat((both[:1], both[1:, cut:]), 1))
            for way, (right, got) in outputs.items():
                difference = float((right - got).abs().max())
                agreement = float((right.argmax(-1) == got.argmax(-1)).float().mean())
                ok = difference <= tolerance
                results.append(
                    {"cache": kind, "way": way, "difference": difference, "argmax_agreement": agreement, "ok": ok}
                )
    return results


def decode(model: GPT, ids: Tensor, n: int, device: torch.device) -> tuple[float, float, Tensor]:
    """Generate n tokens greedily: (seconds to the first token, seconds for the others, the ids)."""
    machine.synchronize(device)
    start = time.perf_counter()
    model.generate(ids, 1, temperature=0.0)
    machine.synchronize(device)
    first = time.perf_counter() - start
    start = time.perf_counter()
    out = model.generate(ids, n, temperature=0.0)
    machine.synchronize(device)
    return first, max(1e-9, time.perf_counter() - start - first), out


def race(
    cached: GPT, plain: GPT, ids: Tensor, n: int, repeats: int, device: torch.device, tick: Callable[[], object]
) -> dict[str, float]:
    """The same greedy generation with and without the cache, alternating, medians; raises if the tokens differ."""
    seconds: dict[str, list[tuple[float, float]]] = {"cached": [], "plain": []}
    outputs = {}
    for turn in range(repeats + 1):  # the first turn warms up
        for name, model in (("cached", cached), ("plain", plain)):
            first, rest, outputs[name] = decode(model, ids, n if turn else min(n, 4), device)
            if turn:
                seconds[name].append((first, rest))
        tick()
    if not torch.equal(outputs["cached"], outputs["plain"]):
        where = int((outputs["cached"] != outputs["plain"]).nonzero()[0, 1]) - ids.size(1)
        raise UserError(
            f"greedy tokens differ with and without the cache, from new token {where} on: the cache is wrong"
        )
    result = {"prompt_tokens": float(ids.size(1)), "new_tokens": float(n)}
    for name, pairs in seconds.items():
        result[f"{name}_first_token_s"] = statistics.median(first for first, _ in pairs)
        result[f"{name}_tokens_per_s"] = (n - 1) / statistics.median(rest for _, rest in pairs)
    result["ratio"] = result["cached_tokens_per_s"] / result["plain_tokens_per_s"]
    return result


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Time per token against the length of the context, with and without the cache."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    lengths = [row["prompt_tokens"] for row in rows]
    for name, label in (("plain", "without cache"), ("cached", "with cache")):
        rates = [row[f"{name}_tokens_per_s"] for row in rows]
        left.plot(lengths, rates, marker="o", label=label)
        right.plot(lengths, [1000 / rate for rate in rates], marker="o", label=label)
    left.set(xlabel="context (tokens)", ylabel="decode (tokens/s)", ylim=(0, None))
    right.set(xlabel="context (tokens)", ylabel="time per token (ms)", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle("Generation with and without the KV cache")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
    plt.close(figure)


def main() -> None:
    cfg = config.load("kv_cache", Config)
    if cfg.new_tokens < 2 or cfg.repeats < 1 or min(cfg.prompt_lengths, default=1) < 1 or not cfg.prompt:
        raise UserError("new_tokens must be at least 2, repeats and prompt_lengths at least 1, and prompt not empty")
    path = find_checkpoint(cfg)
    device = machine.pick_device(cfg.device)
    loaded = checkpoint.load(path)
    plain, cached = GPT.from_loaded(loaded, device), CachedGPT.from_loaded(loaded, device)
    tok, shape = loaded.tokenizer, plain.config
    lengths = [n for n in cfg.prompt_lengths if n < shape.block_size]
    text = tok.encode(cfg.prompt)
    longest = max(PROOF_TOKENS, 1 + len(text), *lengths)
    ids = torch.tensor([[tok.eot_id, *(text * (longest // len(text) + 1))][:longest]], device=device)
    prompt = ids[:, : 1 + len(text)]
    console.print(
        f"{path}: {plain.n_parameters() / 1e6:.2f} M parameters, stage {loaded.stage}; float32 on {machine.describe(device)}",
        markup=False,
    )

    proof = prove(cached, plain, ids[:, : min(PROOF_TOKENS, shape.block_size)], cfg.tolerance)
    table = Table(
        "cache", "fed as", "max |full - cached|", "same argmax", "", title="Correctness, over all positions, float32"
    )
    for row in proof:
        table.add_row(
            row["cache"],
            row["way"],
            f"{row['difference']:.1e}",
            f"{row['argmax_agreement']:.1%}",
            "ok" if row["ok"] else "WRONG",
        )
    console.print(table)
    wrong = [row for row in proof if not row["ok"]]
    if wrong:
        raise UserError(
            f"{len(wrong)} of {len(proof)} ways exceed the tolerance of {cfg.tolerance}: the cache is wrong"
        )

    progress, task = bar("timing", (len(lengths) + 1) * (cfg.repeats + 1))
    with progress:
        advance = partial(progress.advance, task)
        main_race = race(cached, plain, prompt, cfg.new_tokens, cfg.repeats, device, advance)
        by_length = [race(cached, plain, ids[:, :n], 9, cfg.repeats, device, advance) for n in lengths]
    table = Table(
        "",
        "first token (ms)",
        "decode (tokens/s)",
        title=f"Speed: {prompt.size(1)} prompt + {cfg.new_tokens} new tokens, greedy, batch 1",
    )
    for name, label in (("plain", "without cache"), ("cached", "with cache")):
        table.add_row(
            label, f"{1000 * main_race[f'{name}_first_token_s']:.1f}", f"{main_race[f'{name}_tokens_per_s']:,.0f}"
        )
    table.add_row("ratio", "", f"{main_race['ratio']:.1f}x")
    console.print(table)
    table = Table(
        "context (tokens)",
        "without (ms/token)",
        "with (ms/token)",
        "ratio",
        title="Time per token: without the cache it grows with the context",
    )
    for row in by_length:
        table.add_row(
            f"{row['prompt_tokens']:.0f}",
            f"{1000 / row['plain_tokens_per_s']:.1f}",
            f"{1000 / row['cached_tokens_per_s']:.1f}",
            f"{row['ratio']:.1f}x",
        )
    console.print(table)

    held = min(shape.block_size, prompt.size(1) + cfg.new_tokens)
    static = cached.new_cache(1, capacity=held)
    dynamic = DynamicCache(shape)
    half = held // 2
    feed(cached, ids[:, :half], dynamic, [half])
    memory = {
        "tokens": held,
        "formula_bytes": kv_cache_bytes(shape, 1, held, 4),
        "static_bytes": static.nbytes(),
        "dynamic_tokens": dynamic.length,
        "dynamic_formula_bytes": kv_cache_bytes(shape, 1, dynamic.length, 4),
        "dynamic_bytes": dynamic.nbytes(),
    }
    console.print(
        f"Memory: 2 x {shape.n_layer} layers x 1 row x {held} tokens x {shape.n_kv_head} kv heads x {shape.width_of_head} x 4 bytes = "
        f"{memory['formula_bytes']:,} bytes; StaticCache allocated {memory['static_bytes']:,}\n"
        f"        after {dynamic.length} tokens the formula gives {memory['dynamic_formula_bytes']:,} bytes; DynamicCache holds {memory['dynamic_bytes']:,}",
        markup=False,
    )
    folder = path.parent
    report = {
        "checkpoint": str(path),
        "machine": machine.describe(device),
        "max_difference": max(row["difference"] for row in proof),
        "proof": proof,
        "speed": main_race,
        "by_length": by_length,
        "memory": memory,
    }
    if by_length:
        plot(by_length, folder / "plot_kv_cache.png")
        console.print(f"plot {folder / 'plot_kv_cache.png'}, numbers {folder / 'kv_cache.json'}", markup=False)
    write_json(folder / "kv_cache.json", report)
    print(json.dumps({key: report[key] for key in ("checkpoint", "machine", "max_difference", "speed", "memory")}))


if __name__ == "__main__":
    run(main)
