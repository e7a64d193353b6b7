"""Low-rank adapters (LoRA, Hu et al. 2021): a model is tuned through small matrices beside its own, which stay as they are.

A linear layer W of the blocks becomes W + alpha / rank B A, with A (rank, inputs) and B (outputs, rank). B starts at 0, so
training starts from the model as it is; only A and B have gradients, moments and a place in the resume file. Names, start
and file format are those of the library peft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from pocketgpt import hf
from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, write_json


@dataclass
class LoRAConfig:
    """See configs/sft.yaml for units and meaning."""

    rank: int
    alpha: int
    targets: list[str]

    def check(self) -> None:
        """Raises UserError on a value outside its range, and on layers to adapt where nothing is adapted."""
        if not 0 <= self.rank <= 4096:
            raise UserError(f"lora.rank is {self.rank}: it must be at least 0 (no adapters) and at most 4096")
        if self.alpha < 1:
            raise UserError(f"lora.alpha is {self.alpha}: it must be at least 1")
        if self.targets and not self.rank:
            raise UserError("lora.targets is set and lora.rank is 0: set lora.rank, too, for instance to 8")


class LoRALinear(nn.Linear):
    """A linear layer, frozen, with an adapter beside it."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias, self.scale = layer.weight, layer.bias, scale
        a = torch.empty(rank, self.in_features)
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # as peft does
        self.lora_A = nn.Parameter(a.to(self.weight.device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=self.weight.device))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)

    def merged(self) -> Tensor:
        """The one matrix that does the same."""
        return self.weight + self.scale * (self.lora_B @ self.lora_A)


def adapted(model: nn.Module) -> dict[str, LoRALinear]:
    """The layers with an adapter, by name."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}


def attach(model: nn.Module, shape: dict[str, Any], config: LoRAConfig, seed: int) -> None:
    """Freeze the model and put an adapter beside the linear layers of its blocks; with rank 0 leave it as it is.

    shape: GPTConfig as a dict. seed: of the matrices A. The same numbers on every device.

    Raises:
        UserError: if one of config.targets is none of its layers.
    """
    if not config.rank:
        return
    kind, generator = hf.architecture(shape), torch.Generator().manual_seed(seed)
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if name.startswith("blocks.") and isinstance(layer, nn.Linear)
    }
    last = {name: hf.module_name(kind, name).rsplit(".", 1)[1] for name in layers}
    if unknown := set(config.targets) - set(last.values()):
        names = ", ".join(dict.fromkeys(last.values()))
        raise UserError(f"lora.targets has {min(unknown)!r}: the linear layers of this model are {names}")
    model.requires_grad_(False)
    for name, layer in layers.items():
        if not config.targets or last[name] in config.targets:
            new = LoRALinear(layer, config.rank, config.alpha / config.rank, generator)
            model.set_submodule(name, new.train(layer.training))


def describe(model: nn.Module, config: LoRAConfig) -> str:
    """What is trained, in words."""
    sizes = {
        trained: sum(p.numel() for p in model.parameters() if p.requires_grad is trained) for trained in (True, False)
    }
    return (
        f"LoRA: {sizes[True]:,} weights in {len(adapted(model))} adapters of rank {config.rank} and alpha {config.alpha} are "
        f"trained, by AdamW; {sizes[False]:,} of the model are frozen"
    )


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict of the plain model that does the same. Matrices with an adapter are new, the others shared."""
    weights = {name: t for name, t in model.state_dict().items() if not name.endswith((".lora_A", ".lora_B"))}
    with torch.no_grad():
        return weights | {f"{name}.weight": layer.merged() for name, layer in adapted(model).items()}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The part of the state_dict that training changes: all of it, or the adapters."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}


def restore(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Load what `trained` gave. Raises ValueError, or what torch does, if it is of another model."""
    if weights.keys() != trained(model).keys():
        raise ValueError(f"it has other weights, for instance {min(weights.keys() ^ trained(model).keys())}")
    model.load_state_dict(model.state_dict() | weights)


def save(folder: Path, model: nn.Module, shape: dict[str, Any], config: LoRAConfig, base: Path) -> Path:
    """Write the adapters as peft does: adapter_config.json and adapter_model.safetensors. Returns the folder.

    base: the folder of the model that they are for, in Hugging Face form.
    GPT-2's queries, keys and values are one layer there. Their three adapters become one of three times the rank: the
    matrices A below each other, and the matrices B on the diagonal of a larger one.
    """
    kind = hf.architecture(shape)
    parts: dict[str, list[LoRALinear]] = defaultdict(list)  # in the order queries, keys, values
    for name, layer in adapted(model).items():
        parts[hf.module_name(kind, name)].append(layer)
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for name, layers in parts.items():
        a = torch.cat([layer.lora_A.detach() for layer in layers])
        b = torch.block_diag(*[layer.lora_B.detach() for layer in layers])
        tensors |= {f"base_model.model.{name}.lora_{x}.weight": t.cpu().contiguous() for x, t in (("A", a), ("B", b))}
        ranks[name.rsplit(".", 1)[1]] = len(a)
    other = {name: rank for name, rank in ranks.items() if rank != config.rank}
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "rank_pattern": other,
        "alpha_pattern": {name: config.alpha * rank // config.rank for name, rank in other.items()},
        "target_modules": sorted(ranks),
        "fan_in_fan_out": kind == "gpt2",  # whose layers keep their weights as (inputs, outputs)
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    path = folder / "adapter_model.safetensors"
    with atomic_path(path) as temporary:
        try:
            save_file(tensors, temporary, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}") from error
    write_json(folder / "adapter_config.json", about)
    return folder
