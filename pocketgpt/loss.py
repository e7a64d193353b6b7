"""The losses: summed, never averaged, so that the caller can divide by the tokens of the whole optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pocketgpt import fused

IGNORE = -1  # target of a position that is not supervised
# Positions whose logits exist at once. On a CPU few, so that they stay in its cache: 256 take 0.7 of the time of 2,048
# (docs/LOG.md). A GPU wants large products.
CHUNK = {"cpu": 256, "cuda": 4096, "mps": 4096}


def whole(rows: Tensor) -> Tensor:
    """rows (n, d) with zero rows below, to a multiple of 64.

    The CPU library prepares, and keeps, code and memory for every size of product it meets; supervised tokens come in
    any number, and without this resident memory grows by a gigabyte within minutes.
    """
    return F.pad(rows, (0, 0, 0, -len(rows) % 64))


def capped(logits: Tensor, softcap: float) -> Tensor:
    """x tanh(logits / x) for a softcap x above 0, which keeps logits between -x and x (Gemma 2, 2024); 0 changes nothing."""
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def cross_entropy(logits: Tensor, ids: Tensor, softcap: float, needed: bool) -> tuple[Tensor, Tensor | None]:
    """Sum of -log softmax(capped(logits))[id], and its gradient, like the logits, where it is needed.

    logits (M, vocabulary), whose place may be taken, ids (N,): rows from N on are padding, which has no gradient.
    """
    n = len(ids)
    if fused.loaded and logits.dtype in (torch.float32, torch.bfloat16) and logits.device.type == "cpu":
        ids = F.pad(ids, (0, len(logits) - n), value=IGNORE)
        return fused.cross_entropy_(logits, ids, softcap, needed).sum(), logits if needed else None
    dtype, wanted = logits.dtype, ids[:, None]
    logits = logits[:n].float()
    slope = None
    if softcap:
        logits.div_(softcap).tanh_()
        slope = 1 - logits.square()  # of the cap, for the gradient
        logits.mul_(softcap)
    largest = logits.amax(-1, keepdim=True)
    chosen = logits.gather(-1, wanted) - largest
    p = logits.sub_(largest).exp_()
    normalizer = p.sum(-1, keepdim=True)
    loss = (normalizer.log() - chosen).sum()
    if not needed:
        return loss, None
    p /= normalizer
    p.scatter_add_(-1, wanted, torch.full_like(chosen, -1.0))
    if slope is not None:
        p *= slope
    return loss, whole(p.to(dtype))


class LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in one, chunk by chunk: (B x T, vocabulary) logits never exist at once.

    The gradient of a sum of cross-entropies is softmax minus one-hot, times what comes from above, so the forward pass
    computes it where the logits are at hand, and the backward pass only scales it (Wijmans et al. 2024 and Liger Kernel
    do the same). Logits are float32 for the softmax whatever the matrix products use. A frozen head has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, softcap: float = 0.0
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        weight_low = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        size = CHUNK[hidden.device.type]
        for start in range(0, hidden.size(0), size):
            rows = slice(start, start + size)
            h, ids = whole(hidden[rows].to(dtype)), targets[rows]
            loss, gradient = cross_entropy(F.linear(h, weight_low), ids, softcap, any(ctx.needs_input_grad))
            total += loss
            if gradient is None:
                continue
            grad_hidden[rows] = (gradient @ weight_low)[: len(ids)]
            if grad_weight is not None:
                grad_weight += (gradient.T @ h).to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * scale, grad_weight * scale if grad_weight is not None else None, None, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, softcap: float = 0.0
) -> Tensor:
    """Sum over supervised positions of -log softmax(hidden @ weight.T)[target], in nats; the logits `capped` before.

    hidden (B, T, n_embd), weight (vocab_size, n_embd), targets (B, T) int64 with IGNORE where nothing is supervised;
    dtype: of the matrix products. Positions that are not supervised cost nothing. With none at all the sum is 0, and so
    are the gradients.
    """
    supervised = (targets != IGNORE).flatten()
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if not bool(supervised.all()):
        hidden, targets = hidden[supervised], targets[supervised]
    return LinearCrossEntropy.apply(hidden, weight, targets, dtype, softcap)


def linear_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, softcap: float = 0.0
) -> Tensor:
    """log p(target) per position: hidden (N, n_embd), weight (vocab_size, n_embd), targets (N,) -> (N,) float32, in nats.

    Chunk by chunk, and once more in the backward pass, so that (N, vocab_size) logits never exist at once.
    """

    def part(h: Tensor, wanted: Tensor) -> Tensor:
        logits = F.linear(whole(h.to(dtype)), weight.to(dtype))[: len(wanted)]
        return -F.cross_entropy(capped(logits.float(), softcap), wanted, reduction="none")

    size = CHUNK[hidden.device.type]
    pairs = zip(hidden.split(size), targets.split(size), strict=True)
    return torch.cat([checkpoint(part, h, wanted, use_reentrant=False) for h, wanted in pairs])
