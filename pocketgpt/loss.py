"""The losses: summed, never averaged, so that the caller can divide by the tokens of the whole optimizer step."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -1  # target of a position that is not supervised
CHUNK = 2048  # positions whose logits exist at once


class LinearCrossEntropy(torch.autograd.Function):
    """Head and cross-entropy in one, chunk by chunk: (B x T, vocabulary) logits never exist at once.

    The gradient of a sum of cross-entropies is softmax minus one-hot, times what comes from above, so the forward pass
    computes it where the logits are at hand, and the backward pass only scales it (Wijmans et al. 2024 and Liger Kernel
    do the same). Logits are float32 for the softmax whatever the matrix products use.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        weight_low = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for start in range(0, hidden.size(0), CHUNK):
            rows = slice(start, start + CHUNK)
            h = hidden[rows].to(dtype)
            logits = F.linear(h, weight_low).float()
            wanted = targets[rows, None]
            largest = logits.amax(-1, keepdim=True)
            chosen = logits.gather(-1, wanted) - largest
            p = logits.sub_(largest).exp_()
            normalizer = p.sum(-1, keepdim=True)
            total += (normalizer.log() - chosen).sum()
            p /= normalizer
            p.scatter_add_(-1, wanted, torch.full_like(chosen, -1.0))
            p = p.to(dtype)
            grad_hidden[rows] = p @ weight_low
            grad_weight += (p.T @ h).to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grads
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * scale, grad_weight * scale, None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum over supervised positions of -log softmax(hidden @ weight.T)[target], in nats.

    hidden (B, T, n_embd), weight (vocab_size, n_embd), targets (B, T) int64 with IGNORE where nothing is supervised;
    dtype: of the matrix products. Positions that are not supervised cost nothing. With none at all the sum is 0, and so
    are the gradients.
    """
    supervised = (targets != IGNORE).flatten()
    hidden, targets = hidden.flatten(0, 1), targets.flatten()
    if not bool(supervised.all()):
        hidden, targets = hidden[supervised], targets[supervised]
    return LinearCrossEntropy.apply(hidden, weight, targets, dtype)


def token_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """log p(target) per position: logits (B, T, V), targets (B, T) with IGNORE -> (B, T) float32, 0 where ignored."""
    losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return -losses.view_as(targets)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid DPO (Rafailov et al. 2023) on summed answer log-probabilities, (N,) each, in nats.

    label_smoothing is the assumed share of flipped pairs (conservative DPO, Mitchell 2023).

    Returns:
        (losses, chosen rewards, rejected rewards), (N,) each; a reward is beta x log(policy / reference), detached.
    """
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    margin = chosen - rejected
    losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return losses, chosen.detach(), rejected.detach()
