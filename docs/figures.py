"""Draw the pictures of docs/kv_cache.md into docs/img. Run it as `python docs/figures.py`.

The masks and contexts shown are what the code computes, not drawings of it: a change there changes the pictures.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.patches import Patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, Python looks for modules in docs/ only

from base_model import GPT, GPTConfig  # noqa: E402
from kv_cache import KVCache, kv_cache_bytes  # noqa: E402
from pocketgpt.files import atomic_path  # noqa: E402
from pocketgpt.packing import attention_mask  # noqa: E402
from pocketgpt.sampling import window_start  # noqa: E402

FOLDER = ROOT / "docs" / "img"
DPI = 100
# Okabe and Ito's palette, told apart by colour-blind readers; the masks carry 1 and 0 as well.
HIDDEN, GREY, BLUE, SKY, ORANGE, GREEN, RED = (
    "#ececec",
    "#777777",
    "#0072b2",
    "#9bd0f0",
    "#e69f00",
    "#009e73",
    "#d55e00",
)
BLOCK = 8  # of the picture of the context window


# --- numbers --------------------------------------------------------------------------------------------------------


@cache
def block_weights(config: GPTConfig) -> int:
    """Entries of all matrices in the blocks."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).blocks.parameters() if p.dim() == 2)


def operations(config: GPTConfig, length: int, *, cached: bool) -> int:
    """Floating-point operations to choose the next token when `length` tokens are there.

    Two per weight matrix entry and token that runs through it, and four per head dimension, query and key it sees (two
    for q.k, two for the weighted sum of values). The head reads the last token only.
    """
    tokens, seen = (1, length) if cached else (length, length * (length + 1) // 2)
    per_pair = 4 * config.n_layer * config.n_head * config.width_of_head
    return 2 * (tokens * block_weights(config) + config.vocab_size * config.n_embd) + per_pair * seen


def bytes_written(config: GPTConfig, length: int, bytes_per_element: int, *, static: bool) -> int:
    """Bytes that a cache writes while it grows to `length`, token by token: torch.cat writes all held ones each time."""
    tokens = length if static else length * (length + 1) // 2
    return kv_cache_bytes(config, 1, tokens, bytes_per_element)


# --- pictures -------------------------------------------------------------------------------------------------------


def grid(axis: Any, codes: np.ndarray, colours: list[str], rows: list[str], columns: list[str], title: str) -> None:
    """Draw codes (rows, columns) as coloured cells, with a label per row and column."""
    axis.imshow(codes, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), rows)
    axis.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
    axis.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axis.tick_params(which="both", length=0, labelsize=11)
    axis.xaxis.tick_top()
    axis.grid(which="minor", color="white", lw=2)
    axis.spines[:].set_visible(False)
    axis.set_title(title, fontsize=12, pad=10)


def digits(axis: Any, mask: np.ndarray, codes: np.ndarray, colours: list[str]) -> None:
    """Write 1 where a query sees a key and 0 where not, in letters that stand out from their cell."""
    for (row, column), seen in np.ndenumerate(mask):
        brightness = np.dot(to_rgb(colours[codes[row, column]]), (0.3, 0.6, 0.1))
        colour = "black" if brightness > 0.55 else "white"
        axis.text(column, row, int(seen), ha="center", va="center", fontsize=11, color=colour)


def visible(kept: KVCache, n: int) -> np.ndarray:
    """What the next n queries see."""
    mask = kept.mask(n, torch.device("cpu"))
    assert mask is not None
    return mask.numpy()


def attention_chunk() -> plt.Figure:
    """The causal matrix of 5 tokens, and its last two rows aligned wrong and right."""
    held, chunk = 3, 2
    total = held + chunk
    kept = KVCache(GPTConfig())
    kept.advance(held)
    whole, right = np.tri(total, dtype=bool), visible(kept, chunk)
    wrong = np.tri(chunk, total, dtype=bool)  # what SDPA's is_causal makes of 2 queries and 5 keys
    keys = [f"k{i}" for i in range(total)]
    queries = [f"q{i}" for i in range(total)]

    figure, axes = plt.subplots(1, 3, figsize=(11.5, 4.8), layout="constrained")
    colours = [HIDDEN, BLUE, RED, SKY]
    codes = whole.astype(int)
    codes[:held] *= 3
    grid(axes[0], codes, colours, queries, keys, "one pass over 5 tokens")
    digits(axes[0], whole, codes, colours)
    axes[0].set_xlabel("dark: the rows that a chunk of 2,\ngiven after 3 cached tokens, must equal", fontsize=11)
    for axis, mask, title, label in (
        (axes[1], wrong, "WRONG: triangle at the upper left", "red: keys that the queries should have seen"),
        (axes[2], right, "RIGHT: triangle at the lower right", "the same as the last two rows on the left"),
    ):
        codes = np.where(mask, 1, 0)
        codes[mask != right] = 2
        grid(axis, codes, colours, queries[held:], keys, title)
        digits(axis, mask, codes, colours)
        axis.set_xlabel(label, fontsize=11)
    return figure


def attention_batch() -> plt.Figure:
    """A left-padded batch of two prompts, and a packed row of three conversations."""
    starts = torch.tensor([0, 2])
    kept = KVCache(GPTConfig(), 2, starts)
    masks, positions = visible(kept, 5), kept.positions(5, torch.device("cpu"))
    figure, axes = plt.subplots(
        1, 3, figsize=(11.5, 5.2), layout="constrained", gridspec_kw={"width_ratios": [5, 5, 9]}
    )
    colours = [HIDDEN, BLUE, ORANGE, GREEN, GREY]
    for row, axis in enumerate(axes[:2]):
        mask = masks[row, 0]
        padding = np.arange(5) < int(starts[row])
        codes = np.where(padding[:, None], mask * 4, mask * 1)
        labels = ["pad" if pad else f"pos {int(p)}" for pad, p in zip(padding, positions[row], strict=True)]
        columns = ["pad" if pad else str(int(p)) for pad, p in zip(padding, positions[row], strict=True)]
        title = f"ragged batch, row {row}:\n{5 - int(starts[row])} tokens, {int(starts[row])} padding"
        grid(axis, codes, colours, labels, columns, title)
        digits(axis, mask, codes, colours)
    axes[1].set_xlabel("grey: a padding query sees itself,\na softmax over nothing is NaN", fontsize=11)

    lengths = [4, 3, 2]
    segments = torch.tensor([0, 1, 2, -1]).repeat_interleave(torch.tensor([*lengths, 1]))[None]
    mask = attention_mask(segments)[0, 0].numpy()
    codes = mask * (np.array([1, 2, 3, 4])[segments[0].numpy()])[:, None]
    labels = [f"pos {p}" for n in lengths for p in range(n)] + ["pad"]
    columns = [label.removeprefix("pos ") for label in labels]
    title = "packed SFT row:\nconversations of 4, 3 and 2 tokens"
    grid(axes[2], codes, colours, labels, columns, title)
    digits(axes[2], mask, codes, colours)
    axes[2].set_xlabel("each colour is one conversation: nobody sees across,\npositions restart", fontsize=11)
    return figure


def window() -> plt.Figure:
    """Which tokens are in the context, and which of them run through the network, step by step."""
    lengths = range(6, 2 * BLOCK + 3)
    codes = np.zeros((len(lengths), lengths[-1]), int)
    began, held = 0, 0  # as in CachedGPT.generate
    for row, length in enumerate(lengths):
        start = window_start(length, BLOCK)
        if start != began:
            began, held = start, 0
        codes[row, :start] = 1
        codes[row, start : start + held] = 2
        codes[row, start + held : length] = 3
        held = length - start
    figure, axis = plt.subplots(figsize=(9.4, 5.4), layout="constrained")
    columns = [str(i) for i in range(lengths[-1])]
    rows = [f"{length} tokens" for length in lengths]
    grid(axis, codes, ["white", HIDDEN, SKY, BLUE], rows, columns, f"block_size {BLOCK}: the context at each step")
    key = {HIDDEN: "dropped", SKY: "in the context, cached", BLUE: "in the context, runs in this step"}
    handles = [Patch(fc=colour, label=label) for colour, label in key.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=11)
    for row, length in enumerate(lengths):
        computed = int((codes[row] == 3).sum())
        if computed > 1:
            what = "prefill of the prompt" if row == 0 else f"older half dropped: prefill of {computed}"
            axis.annotate(
                what, (length - 0.4, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=11
            )
    return figure


def cost() -> plt.Figure:
    """Operations per token, and bytes that a growing cache writes, for the default shape."""
    config = GPTConfig()
    lengths = list(range(1, config.block_size + 1))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.2), layout="constrained")
    for cached, label, colour, style in ((False, "without cache", RED, "--"), (True, "with cache", BLUE, "-")):
        values = [operations(config, n, cached=cached) / 1e6 for n in lengths]
        left.plot(lengths, values, style, label=label, color=colour, lw=2)
    left.set(xlabel="tokens in the context", ylabel="million operations")
    left.set_title("operations to choose the next token", fontsize=12)
    for static, label, colour, style in ((False, "torch.cat", RED, "--"), (True, "written in place", BLUE, "-")):
        values = [bytes_written(config, n, 4, static=static) / 1e6 for n in lengths]
        right.plot(lengths, values, style, label=label, color=colour, lw=2)
    right.set(xlabel="tokens in the cache", ylabel="MB written in all")
    right.set_title("growing the cache token by token", fontsize=12)
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=11)
    return figure


PICTURES = {
    "attention_chunk.png": attention_chunk,
    "attention_batch.png": attention_batch,
    "window.png": window,
    "cost.png": cost,
}


def draw(folder: Path = FOLDER) -> list[Path]:
    """Write all pictures into `folder`; returns their paths."""
    paths = []
    for name, make in PICTURES.items():
        figure = make()
        with atomic_path(folder / name) as temporary:
            # without metadata the same picture is the same file
            figure.savefig(temporary, dpi=DPI, format="png", bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
        paths.append(folder / name)
    return paths


if __name__ == "__main__":
    for path in draw():
        print(path.relative_to(ROOT))
