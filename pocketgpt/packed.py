"""Weights in fewer bytes, for inference: a decode step reads every weight once, so fewer bytes are more tokens per second.

    float32    as trained                                                       4      bytes per weight
    bfloat16   rounded to 8 bits of mantissa, like what they are multiplied with  2
    int8       one float32 scale per output channel                             1
    int4       one float32 scale per 32 weights along the input                 0.625

Sums are float32, and in all formats but bfloat16 only weights are rounded. Processors that multiply bfloat16 take both
factors in it, which doubles their speed and more (docs/LOG.md). A packed model is the float32 model that went through
`rounded`, and kv_cache.py proves it so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pocketgpt import kernels
from pocketgpt.errors import UserError
from pocketgpt.loss import capped

Model = TypeVar("Model", bound=nn.Module)

FORMATS = ("float32", "bfloat16", "int8", "int4")
LANES = 16  # outputs in a panel; kernels.cpp relies on both
GROUP = 32  # int4 weights that share a scale
STEP = 32  # bfloat16 numbers along K that a matrix unit (AMX) takes at once


def panels(weight: Tensor) -> Tensor:
    """(N, K) -> (N/16, K, 16), padded with zeros: weights of 16 outputs side by side, in the order in which kernels.cpp reads."""
    return F.pad(weight, (0, 0, 0, -weight.size(0) % LANES)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def pack(weight: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """weight (N, K) -> (packed weight in panels of 16 outputs, float32 scales or None).

    bfloat16: (N/16, K/2, 16, 2), two numbers of an output together, K padded with zeros to a multiple of 32. int8: (N/16, K, 16) int8 and scales (N,). int4: (N/16, K/2, 16) uint8, of which each byte holds a value and the next
    one along K in its high half, each plus 8; and scales (N/16, K/32, 16).

    Raises:
        UserError: for an unknown format, or int4 with K not divisible by 32.
    """
    if format == "float32":
        return panels(weight.float()), None
    if format == "bfloat16":
        padded = F.pad(weight.bfloat16(), (0, -weight.size(1) % STEP))
        return panels(padded).unflatten(1, (-1, 2)).transpose(2, 3).contiguous(), None
    if format == "int8":
        scale = weight.abs().amax(1).clamp_min(1e-12) / 127
        return panels((weight / scale[:, None]).round().to(torch.int8)), scale.float()
    if format != "int4":
        raise UserError(f"quant={format} is not known: choose one of {', '.join(FORMATS)}")
    if weight.size(1) % GROUP:
        raise UserError(f"int4 packs {GROUP} weights together, and this model has {weight.size(1)} in a row: use int8")
    groups = weight.unflatten(1, (-1, GROUP))
    # The largest value becomes -8, the only end of the range that has no mirror image, as llama.cpp's Q4_0 does.
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / -8)
    values = ((groups / scale).round().clamp(-8, 7) + 8).to(torch.uint8).flatten(1)
    return panels(values[:, ::2] | (values[:, 1::2] << 4)), panels(scale.squeeze(-1).float())


def widen(weight: Tensor, scale: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (N, K) weights that the rows (N, ...) of packed ones stand for."""
    if scale is None:
        return weight.to(dtype)
    if weight.dtype == torch.int8:
        return weight.to(dtype) * scale[:, None].to(dtype)
    values = torch.stack((weight & 15, weight >> 4), dim=-1).flatten(1).to(dtype) - 8
    return (values.unflatten(1, (-1, GROUP)) * scale[..., None].to(dtype)).flatten(1)


def rows(panels: Tensor, idx: Tensor) -> Tensor:
    """Rows idx (n,) of the matrix that lies in panels."""
    return panels[idx // LANES, :, idx % LANES].flatten(1)


def unpack(weight: Tensor, scale: Tensor | None, n: int, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The (n, k) weights that packed ones stand for."""
    if weight.dim() == 4:  # pairs
        weight = weight.transpose(2, 3).flatten(1, 2)
    scale = scale.transpose(1, 2).flatten(0, 1)[:n] if scale is not None and scale.dim() == 3 else scale
    return widen(weight.transpose(1, 2).flatten(0, 1)[:n], scale, dtype)[:, :k]


def factor(x: Tensor, format: str) -> Tensor:
    """What weights of a format are multiplied with, instead of x."""
    return x.bfloat16().to(x.dtype) if format == "bfloat16" else x


class PackedLinear(nn.Module):
    """Linear layers over the same input as one matrix of packed weights, so that one product serves them all.

    softcap: of the head's logits, see `loss.capped`.
    """

    weight: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, layers: Sequence[nn.Linear | nn.Embedding], format: str, softcap: float = 0.0) -> None:
        super().__init__()
        self.format, self.softcap = format, softcap
        self.k = layers[0].weight.size(1)
        self.n = sum(layer.weight.size(0) for layer in layers)
        with torch.no_grad():
            weight, scale = pack(torch.cat([layer.weight for layer in layers]), format)
            biases: list[Tensor] = [
                layer.bias for layer in layers if isinstance(layer, nn.Linear) and layer.bias is not None
            ]
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", torch.cat(biases) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) float32 -> (..., N) float32."""
        if kernels.loaded and x.device.type == "cpu":
            return capped(kernels.linear(x, self.weight, self.scale, self.bias, self.n), self.softcap)
        weight = unpack(self.weight, self.scale, self.n, self.k)
        return capped(F.linear(factor(x, self.format), weight, self.bias), self.softcap)


class PackedEmbedding(nn.Module):
    """Rows of a packed matrix: of the embedding, or of the head that is tied to it, in the same memory."""

    weight: Tensor
    scale: Tensor | None

    def __init__(self, matrix: PackedLinear) -> None:
        super().__init__()
        self.k = matrix.k
        self.register_buffer("weight", matrix.weight)
        self.register_buffer("scale", matrix.scale)

    def forward(self, idx: Tensor) -> Tensor:
        """ids (...) int64 -> (..., K) float32."""
        if kernels.loaded and idx.device.type == "cpu":
            return kernels.rows(idx, self.weight, self.scale, self.k)
        flat = idx.flatten()
        scale = self.scale
        if scale is not None:
            scale = scale[flat] if scale.dim() == 1 else rows(scale, flat)
        return widen(rows(self.weight, flat), scale)[:, : self.k].unflatten(0, idx.shape)


@torch.no_grad()
def rounded(model: Model, format: str, *, factors: bool = True) -> Model:
    """The model itself, computing from now on as a packed one: every matrix replaced by what the packed one stands for, and
    with `factors` multiplied with what that takes (`factor`)."""
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and name != "position.weight"}
    for parameter in matrices.values():  # a tied one comes once
        parameter.copy_(unpack(*pack(parameter, format), *parameter.shape))
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and format == "bfloat16" and factors:
            layer.register_forward_pre_hook(lambda _, inputs: (factor(inputs[0], format),))
    return model
