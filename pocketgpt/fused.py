"""What a training step does beside its matrix products, on CPUs: one pass over memory each, with gradients.

The formulas are those of base_model.py and loss.py, computed in float32 whether float32 or bfloat16 is read and written
(fused.cpp). They serve float32 and bfloat16 autocast on a CPU, where they take a third of the time of torch's operators
(docs/LOG.md); on other devices, in a compiled network and without a C++ compiler torch's operators stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pocketgpt import kernels

loaded = False  # whether torch.ops.pocketgpt_training is there


@cache
def build() -> str:
    """Compile and load fused.cpp, or find it. Returns "" or why it is not there."""
    global loaded
    why = kernels.load(Path(__file__).with_name("fused.cpp"))
    if not why:
        for name, shapes in SHAPES.items():
            torch.library.register_fake(f"pocketgpt_training::{name}", shapes)
        loaded = True
    return why


QUERIES = 128  # in a block of attention, as in fused.cpp


def attention_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """With a mask as many probabilities as there can be at most."""
    batch, heads, length, width = q.shape
    keys = k.size(2)
    seen = sum(
        (min(length, start + QUERIES) - start)
        * (keys if mask is not None else min(length, start + QUERIES) + keys - length)
        for start in range(0, length, QUERIES)
    )
    return q.new_empty(batch, length, heads, width).transpose(1, 2), q.new_empty(batch * heads * seen)


# What the operators return, for planning memory without data.
SHAPES: dict[str, Callable[..., Any]] = {
    "norm_rotate": lambda x, weight, cos, sin, eps, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[:2], dtype=torch.float32),
    ),
    "norm_rotate_backward": lambda grad, x, weight, cos, sin, scale: (
        x.new_empty(x.shape),
        scale.new_empty(x.size(2)),
    ),
    "swiglu": lambda gate, up: torch.empty_like(gate),
    "swiglu_backward": lambda grad, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
    "attention": attention_shapes,
    "attention_backward": lambda grad, q, k, v, mask, p: tuple(
        x.new_empty(x.size(0), x.size(2), x.size(1), x.size(3)).transpose(1, 2) for x in (q, k, v)
    ),
    "cross_entropy_": lambda logits, targets, softcap, gradient: logits.new_empty(logits.size(0), dtype=torch.float32),
}


def output_type(x: Tensor) -> torch.dtype:
    """What a step computes from x: numbers of autocast's type, or of its own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


def serves(x: Tensor) -> bool:
    """Whether what follows is for this input, where it stands in the network."""
    if not loaded or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    autocast = torch.is_autocast_enabled("cpu") and output_type(x) == torch.bfloat16
    return autocast or output_type(x) == torch.float32


class NormRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Tensor:
        y, scale = torch.ops.pocketgpt_training.norm_rotate(x, weight, cos, sin, eps, dtype)
        ctx.save_for_backward(x, weight, cos, sin, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, cos, sin, scale = ctx.saved_tensors
        grad = grads[0].contiguous()
        dx, dw = torch.ops.pocketgpt_training.norm_rotate_backward(grad, x, weight, cos, sin, scale)
        return dx, dw if weight is not None else None, None, None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) weight over the last dimension: x (..., D) -> the same."""
    return NormRotate.apply(x.reshape(-1, 1, x.size(-1)), weight, None, None, eps, output_type(x)).view(x.shape)


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, rope: tuple[Tensor, Tensor]) -> Tensor:
    """`rms_norm` of every head, unless weight is None, and then base_model.rotate: x (B, T, heads, head_dim) -> the same.

    rope: cosines and sines, (T, head_dim/2) or (B, 1, T, head_dim/2) each.
    """
    cos, sin = (part.contiguous() for part in rope)
    return NormRotate.apply(x.flatten(0, 1), weight, cos, sin, eps, output_type(x)).view(x.shape)


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.ops.pocketgpt_training.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.pocketgpt_training.swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up, of equal shapes and types."""
    return SwiGLU.apply(gate, up)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        y, p = torch.ops.pocketgpt_training.attention(q, k, v, mask)
        ctx.save_for_backward(q, k, v, mask, p)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, p = ctx.saved_tensors
        return *torch.ops.pocketgpt_training.attention_backward(grads[0], q, k, v, mask, p), None


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As base_model.attend, for tensors of one type; mask: (T, S) or (B or 1, 1, T, S). Probabilities stay in memory for the
    gradient, those that no query of their block can see excepted."""
    return Attention.apply(q, k, v, mask if mask is None or mask.dim() == 4 else mask[None, None])


def cross_entropy_(logits: Tensor, targets: Tensor, softcap: float, gradient: bool) -> Tensor:
    """-log softmax(loss.capped(logits))[target]: logits (N, V), targets (N,) -> (N,) float32, 0 where a target is below 0.

    The logits become their gradient in place, or stay as they are where none is asked for.
    """
    return torch.ops.pocketgpt_training.cross_entropy_(logits, targets, softcap, gradient)
