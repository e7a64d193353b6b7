"""How likely a model finds text that is there: bits per byte of documents, and the choices after a question.

Log-probabilities are natural, of float32 logits over the model's whole vocabulary, and summed in float64. The conventions
(where a text starts, how it is cut, what stands before a choice) are those of EleutherAI's lm-evaluation-harness where
it has one; docs/evaluate.md spells them out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from pocketgpt.loss import IGNORE, linear_log_probs
from pocketgpt.tokenizer import Tokenizer

if TYPE_CHECKING:  # the models live in top-level scripts, which this library does not import
    from base_model import GPT
    from kv_cache import CachedGPT

Ids = NDArray[np.int64]
Nats = NDArray[np.float64]
BLOCK = 16  # tokens, of the cache that questions and choices share
LEAST_SEGMENTS, SEGMENTS, LEAST_TOKENS = 30, 100, 32  # see `segments`


def batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Indices of things of these lengths (tokens), longest first, in groups that take at most `most` tokens when padded to
    their longest; one that is longer than that stands alone."""
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= most:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def ratio_interval(above: ArrayLike, below: ArrayLike, z: float = 1.96) -> tuple[float, float] | None:
    """95 % confidence interval of sum(above) / sum(below), each pair being one independent draw; None for fewer than two.

    The ratio estimator of Cochran (1977), section 6.4: what a bootstrap over the pairs gives, without random numbers.
    """
    a, b = np.asarray(above, np.float64), np.asarray(below, np.float64)
    n = len(a)
    if n < 2:
        return None
    ratio = a.sum() / b.sum()
    half = z * math.sqrt(n / (n - 1) * float(np.square(a - ratio * b).sum())) / float(b.sum())
    return float(ratio - half), float(ratio + half)


# --- documents ------------------------------------------------------------------------------------------------------


def windows(length: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """How `length` tokens are read in windows of at most `context`: (begin, first, end) of each. Tokens begin..end are
    targets of the window, and those from `first` on are counted, so that every token is counted once.

    The first window counts all it holds; each later one moves on by `stride` and counts what is new, which so has at least
    context - stride tokens before it. The last one ends with the text.
    """
    found = [(0, 0, min(length, context))]
    while found[-1][2] < length:
        first = found[-1][2]
        end = min(length, first + stride)
        found.append((end - context, first, end))
    return found


@torch.no_grad()
def document_log_probs(
    model: GPT,
    documents: Sequence[Ids],
    start_id: int,
    *,
    stride: int,
    batch_tokens: int = 8192,
    tick: Callable[[int], object] = lambda tokens: None,
) -> list[Nats]:
    """log p of each token of each document, given start_id and the tokens before it in its window.

    stride: tokens by which a window moves on, 1 to block_size. batch_tokens: that are run
    at once. tick: told the number of tokens counted after each batch.
    """
    context, device = model.config.block_size, model.embed.weight.device
    parts = [
        (i, *window) for i, ids in enumerate(documents) if len(ids) for window in windows(len(ids), context, stride)
    ]
    found = [np.zeros(len(ids)) for ids in documents]
    for group in batches([end - begin for _, begin, _, end in parts], batch_tokens):
        longest = max(parts[p][3] - parts[p][1] for p in group)
        inputs = np.zeros((len(group), longest), np.int64)  # padding at the right, which nobody before it sees
        targets = np.full((len(group), longest), IGNORE, np.int64)
        for row, p in enumerate(group):
            i, begin, first, end = parts[p]
            before = start_id if begin == 0 else documents[i][begin - 1]
            inputs[row, : end - begin] = [before, *documents[i][begin : end - 1]]
            targets[row, first - begin : end - begin] = documents[i][first:end]
        wanted = torch.from_numpy(targets).to(device)
        hidden = model.hidden_states(torch.from_numpy(inputs).to(device))
        counted = wanted != IGNORE
        log_probs = linear_log_probs(
            hidden[counted], model.lm_head.weight, wanted[counted], torch.float32, model.lm_head.softcap
        )
        at, values = 0, log_probs.double().cpu().numpy()
        for p in group:
            i, _, first, end = parts[p]
            found[i][first:end] = values[at : at + end - first]
            at += end - first
        tick(at)
    return found


def segments(log_probs: Sequence[Nats], tokens: Sequence[Ids], sizes: NDArray[Any]) -> tuple[Nats, Nats]:
    """(nats, bytes) of what counts as one independent draw for the interval of bits per byte.

    That is a document, where there are at least 30. Fewer are cut into stretches of equal length, about 100 in all and of at
    least 32 tokens each; sizes: bytes of text per token id.
    """
    total = sum(map(len, tokens))
    length = total if len(tokens) >= LEAST_SEGMENTS else max(LEAST_TOKENS, math.ceil(total / SEGMENTS))
    nats, text_bytes = [], []
    for values, ids in zip(log_probs, tokens, strict=True):
        pieces = max(1, round(len(ids) / length))
        nats += [-part.sum() for part in np.array_split(values, pieces)]
        text_bytes += [sizes[part].sum() for part in np.array_split(ids, pieces)]
    return np.array(nats), np.array(text_bytes, np.float64)


def text_bits(
    texts: Sequence[str], tokens: Sequence[Ids], log_probs: Sequence[Nats], sizes: NDArray[Any]
) -> dict[str, Any]:
    """Bits per byte of UTF-8 text from what `document_log_probs` found for its tokens.

    sizes: bytes of text per token id. Returns {bits_per_byte, interval (95 %, or None), documents, tokens, bytes}.
    """
    text_bytes = sum(len(text.encode()) for text in texts)
    nats, units = segments(log_probs, tokens, sizes)
    return {
        "bits_per_byte": -float(sum(values.sum() for values in log_probs)) / math.log(2) / text_bytes,
        "interval": ratio_interval(nats / math.log(2), units),
        "documents": len(texts),
        "tokens": sum(map(len, tokens)),
        "bytes": text_bytes,
    }


# --- choices --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoded:
    """A question as ids: what all its choices stand behind, and the choices, none of them empty."""

    context: list[int]
    choices: list[list[int]]

    def __len__(self) -> int:
        """Tokens that the model reads of it at most: the last token of a choice is predicted, and never read."""
        return len(self.context) + max(map(len, self.choices)) - 1


def encode_pair(tok: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Ids of a context and of what follows it, split as lm-eval does.

    Spaces at the end of the context belong to the continuation, because tokenizers glue a space to the word after it.
    Both are encoded together, and the continuation is what goes beyond the context's own ids; where these are not the
    beginning of the whole (a merge across the border), it is encoded alone. An empty context is the end-of-text id.
    """
    bare = context.rstrip()
    if not bare:
        return [tok.eot_id], tok.encode(context + continuation)
    before, whole = tok.encode_batch([bare, context + continuation])
    if whole[: len(before)] == before and len(whole) > len(before):
        return before, whole[len(before) :]
    return before, tok.encode(context[len(bare) :] + continuation)


@torch.no_grad()
def choice_log_probs(
    model: CachedGPT,
    questions: Sequence[Encoded],
    *,
    batch_tokens: int = 8192,
    tick: Callable[[int], object] = lambda questions: None,
) -> list[list[float]]:
    """Per question and choice: the sum of log p(token | context and choice so far), in nats.

    Each context is read once, into blocks of a paged cache; a choice is a fork of these blocks, so all choices read
    the same keys and values and store only their own. batch_tokens: that are run, or looked back on, at once. tick: told
    the number of questions done after each batch.
    """
    found: list[list[float]] = [[0.0] * len(question.choices) for question in questions]
    for part in batches([-(-len(question.context) // BLOCK) * BLOCK for question in questions], batch_tokens):
        pairs = [(i, c) for i in part for c in range(len(questions[i].choices))]
        lengths = [len(questions[i].context) + len(questions[i].choices[c]) for i, c in pairs]
        groups = [[pairs[p] for p in group] for group in batches(lengths, batch_tokens)]
        values = _score_part(model, questions, part, groups)
        for (i, c), value in values.items():
            found[i][c] = value
        tick(len(part))
    return found


def _score_part(
    model: CachedGPT, questions: Sequence[Encoded], part: list[int], groups: list[list[tuple[int, int]]]
) -> dict[tuple[int, int], float]:
    """The log-probabilities of all choices of the questions `part`, in groups of (question, choice) that run at once."""
    device = model.embed.weight.device
    blocks = sum(-(-len(questions[i].context) // BLOCK) for i in part)
    # A fork copies the block it shares half, and adds its own.
    blocks += max(sum(1 + -(-len(questions[i].choices[c]) // BLOCK) for i, c in group) for group in groups)
    pool = model.new_pool(blocks * BLOCK, BLOCK)
    rows = {i: pool.recall([]) for i in part}  # empty

    # The last token of the context is left to the choices, which need what the head says after it.
    prefixes = [questions[i].context[:-1] for i in part]
    if any(prefixes):
        model.extend_rows(prefixes, pool, [rows[i] for i in part])
    values: dict[tuple[int, int], float] = {}
    for group in groups:
        forks = [pool.fork(rows[i]) for i, _ in group]
        texts = [[questions[i].context[-1], *questions[i].choices[c]] for i, c in group]
        hidden = model.extend_rows([text[:-1] for text in texts], pool, forks)
        targets = torch.full(hidden.shape[:2], IGNORE, dtype=torch.long)
        for row, text in enumerate(texts):
            targets[row, 1 - len(text) :] = torch.tensor(text[1:])
        targets = targets.to(device)
        counted = targets != IGNORE
        log_probs = linear_log_probs(
            hidden[counted], model.lm_head.weight, targets[counted], torch.float32, model.lm_head.softcap
        )
        parts = log_probs.double().cpu().split([len(text) - 1 for text in texts])
        values |= {pair: float(one.sum()) for pair, one in zip(group, parts, strict=True)}
        for fork in forks:
            pool.crop(fork, 0)
    return values
