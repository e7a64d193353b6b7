"""Optimizers and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pocketgpt import device as machine
from pocketgpt import distributed
from pocketgpt.errors import UserError


@dataclass
class OptimConfig:
    """See configs/optim/*.yaml for units and meaning."""

    name: str
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    muon_lr: float
    muon_momentum: float
    muon_warmup: int = 0
    cautious: bool = False
    offload: bool = False

    def check(self) -> None:
        """Raises UserError on a value outside its range."""
        if self.name not in ("adamw", "muon"):
            raise UserError(f"optim.name is {self.name!r}: choose adamw or muon")
        for key, below in (
            ("beta1", 1),
            ("beta2", 1),
            ("muon_momentum", 1),
            ("weight_decay", math.inf),
            ("muon_lr", math.inf),
            ("muon_warmup", 1 << 31),
        ):
            if not 0 <= getattr(self, key) < below:
                raise UserError(f"optim.{key} is {getattr(self, key)}: it must be at least 0 and below {below}")
        if not 0 < self.eps < math.inf:
            raise UserError(f"optim.eps is {self.eps}: it must be above 0")


def parameter_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Every parameter that is trained in exactly one group: block matrices, other matrices (embeddings, head, adapters),
    vectors (norms, biases)."""
    blocks, other, vectors = [], [], []
    for name, parameter in model.named_parameters():  # a tied weight comes once
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif name.startswith("blocks.") and not name.endswith((".lora_A", ".lora_B")):
            blocks.append(parameter)
        else:
            other.append(parameter)
    return blocks, other, vectors


CACHED = 1 << 20  # numbers of the matrices that a CPU orthogonalizes at once: all steps stay in its cache (docs/LOG.md)


# a x + b x^3 + c x^5: these in turn bring every singular value from 0.003 to 1 to within 0.23 of 1. Each is the best one for
# where those before left them, and 2 % more at the top, for rounding (Amsel et al. 2025, "The Polar Express").
QUINTICS = (
    (8.221763, -23.346858, 16.633755),
    (3.972757, -2.844937, 0.517015),
    (3.473474, -2.505746, 0.481018),
    (2.504367, -1.790724, 0.407061),
)


def orthogonalize(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Newton-Schulz steps that bring all singular values near 1 (Jordan et al. 2024): (N, rows, columns) of any type -> dtype.

    Best with rows <= columns, for the smaller Gram matrix. In few steps, and in bfloat16 where products in it are fast: the
    result need not be exact (docs/LOG.md).
    """
    at_once = max(1, CACHED // math.prod(matrices.shape[1:]))
    if matrices.device.type == "cpu" and len(matrices) > at_once:
        return torch.cat([orthogonalize(some, dtype) for some in matrices.split(at_once)])
    x = matrices.to(dtype)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for a, b, c in QUINTICS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024): momentum, orthogonalised, for matrices.

    The update of torch.optim.Muon but for the quintics, of which that takes five and one matrix after another; here all
    matrices of a shape, and those of the transposed shape, go through the products together.

    Of weights that are divided among processes (see `distributed.network`) each process gathers the matrices that fall to
    it, keeps their momentum, orthogonalizes, and sends back to every process its rows of the update.

    warmup: steps in which the momentum rises from `FIRST_MOMENTUM`: early gradients are soon out of date.
    """

    FIRST_MOMENTUM = 0.85  # as in modded-nanogpt (Jordan et al. 2024), there over 300 steps

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float, warmup: int = 0
    ) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for parameter in params:
            shapes.setdefault(tuple(sorted(parameter.shape)), []).append(parameter)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "warmup": warmup}
        super().__init__([{"params": same} for same in shapes.values()], defaults)
        fast = distributed.from_main(lambda: machine.multiplies_bfloat16(params[0].device))  # all send the same type
        self.dtype = torch.bfloat16 if fast else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, lr, momentum = group["params"], group["lr"], group["momentum"]
            divided = distributed.is_divided(params[0])
            mine = [p.grad for p in params]
            grads = stacked(distributed.gathered(mine) if divided else mine, params[0])
            state = self.state[params[0]]  # one buffer for the group
            if "momentum" not in state:
                zeros = torch.zeros_like(grads)
                state["momentum"] = distributed.joined(zeros, len(params)) if divided else zeros
            average = distributed.local(state["momentum"])
            if group["warmup"]:
                state["step"] = state.get("step", torch.zeros(())) + 1
                share = min(1.0, (float(state["step"]) - 1) / group["warmup"])
                momentum = share * momentum + (1 - share) * min(momentum, self.FIRST_MOMENTUM)
            average.lerp_(grads, 1 - momentum)
            ahead = grads.lerp_(average, momentum)  # Nesterov's
            if divided:
                owned = params[distributed.part(len(params), distributed.rank())]
                mine = turned(orthogonalize(ahead, self.dtype), owned)
                updates = distributed.scattered(mine, params, self.dtype)
            else:
                updates = turned(distributed.divided(partial(orthogonalize, dtype=self.dtype), ahead), params)
            weights = list(map(distributed.local, params))
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
            for parameter, weight, update in zip(params, weights, updates, strict=True):
                rows, columns = parameter.shape
                weight.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def stacked(matrices: list[Tensor], like: Tensor) -> Tensor:
    """(N, rows, columns), the longer side last; N may be 0. like: a matrix of that shape or its transpose."""
    if not matrices:
        return distributed.local(like).new_empty(0, *sorted(like.shape))
    return torch.stack([wide(matrix) for matrix in matrices])


def turned(updates: Tensor, params: list[nn.Parameter]) -> list[Tensor]:
    """The opposite: each as its parameter lies."""
    return [u if p.size(0) <= p.size(1) else u.mT for u, p in zip(updates, params, strict=True)]


def wide(matrix: Tensor) -> Tensor:
    """The matrix with its longer side second."""
    return matrix if matrix.size(0) <= matrix.size(1) else matrix.mT


@torch.no_grad()
def decay_where_updates_agree(params: list[nn.Parameter], before: list[Tensor], amount: float) -> None:
    """Take `amount` of what the parameters were `before` off those entries that the update did not move away from 0."""
    for parameter, old in zip(params, before, strict=True):
        agree = (parameter - old) * old <= 0
        parameter.sub_(old * agree, alpha=amount)


def step_in_turn(part: torch.optim.Optimizer, host: torch.device) -> None:
    """`part.step()`, to the same bits, for one parameter after another (of Muon: for one shape, whose momentum is one tensor).
    Its moments are on its device for that long and in the memory of `host` before and after.

    Copies and work queue up on the device; whoever reads the moments has to wait for it.
    """
    groups = part.param_groups
    for group in groups:
        for params in [group["params"]] if isinstance(part, Muon) else [[parameter] for parameter in group["params"]]:
            moments = part.state[params[0]]
            waiting = {name: moment for name, moment in moments.items() if moment.dim()}
            for name, moment in waiting.items():
                moments[name] = moment.to(params[0].device, non_blocking=True, copy=True)
            part.param_groups = [group | {"params": params}]
            part.step()
            for name, moment in moments.items():
                if moment.dim():
                    moments[name] = to_host(moment, host, waiting.get(name))
    part.param_groups = groups


def to_host(moment: Tensor, host: torch.device, place: Tensor | None = None) -> Tensor:
    """The moment in `place`, or in new memory there: if a GPU is to copy to it, in pages that stay where they are."""
    if place is None:
        place = torch.empty_like(moment, device=host, pin_memory=host.type == "cpu" and torch.cuda.is_available())
    return place.copy_(moment, non_blocking=True)


class Optimizer:
    """One or two torch optimizers that step together, each group with its own base learning rate.

    `adamw`: AdamW (Loshchilov & Hutter 2019) for all. `muon`: Muon (Jordan et al. 2024) for the matrices of the blocks,
    AdamW for the rest. Weights decay in matrices, which includes embeddings and head, and not in vectors. With `cautious`
    an entry decays only in steps whose update moves it towards 0, too (Chen et al. 2025, "Cautious weight decay").
    With `offload` moments of parameters on a GPU wait in main memory, see `step_in_turn`.

    Raises:
        UserError: on settings outside their ranges.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, lr: float) -> None:
        config.check()
        self.device = next(model.parameters()).device
        # Where moments wait between steps, or None: beside their parameters. Other devices share the main memory.
        self.host = torch.device("cpu") if config.offload and self.device.type == "cuda" else None
        blocks, other, vectors = parameter_groups(model)
        muon = config.name == "muon"
        decayed = other if muon else blocks + other
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.parts: list[torch.optim.Optimizer] = [adamw]
        if muon and blocks:
            settings = (config.muon_lr, config.muon_momentum, config.weight_decay, config.muon_warmup)
            self.parts.append(Muon(blocks, *settings))
        held = [id(p) for part in self.parts for group in part.param_groups for p in group["params"]]
        trained = [id(p) for p in model.parameters() if p.requires_grad]
        assert sorted(held) == sorted(trained), "every parameter is in exactly one group"
        self.base = [[group["lr"] for group in part.param_groups] for part in self.parts]
        self.cautious = [[0.0] * len(part.param_groups) for part in self.parts]  # decay that is ours and not theirs
        if config.cautious:
            self.cautious = [[group["weight_decay"] for group in part.param_groups] for part in self.parts]
            for part in self.parts:
                for group in part.param_groups:
                    group["weight_decay"] = 0.0

    def step(self, scale: float) -> None:
        """Update with every learning rate multiplied by `scale`, and clear the gradients."""
        for part, base, decays in zip(self.parts, self.base, self.cautious, strict=True):
            for group, lr in zip(part.param_groups, base, strict=True):
                group["lr"] = lr * scale
            watched = [(group, decay) for group, decay in zip(part.param_groups, decays, strict=True) if decay]
            before = [[parameter.detach().clone() for parameter in group["params"]] for group, _ in watched]
            if self.host is None:
                part.step()
            else:
                step_in_turn(part, self.host)
            for (group, decay), old in zip(watched, before, strict=True):
                decay_where_updates_agree(group["params"], old, group["lr"] * decay)
            part.zero_grad(set_to_none=True)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        machine.synchronize(self.device)  # moments may be on their way to main memory
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        """Take over the moments. The settings stay those of this run.

        Raises ValueError, or whatever else torch does, if they are of other parameters.
        """
        for part, state in zip(self.parts, states, strict=True):
            settings = [  # lr is set anew by every step
                {key: value for key, value in group.items() if key not in ("params", "lr")}
                for group in part.param_groups
            ]
            part.load_state_dict(state if self.host is None else state | {"state": {}})
            if self.host is not None:  # torch would bring all of them to the device at once
                held = [parameter for group in part.param_groups for parameter in group["params"]]
                for number, moments in state["state"].items():
                    part.state[held[number]] = {
                        name: to_host(moment, self.host) if moment.dim() else moment.to(self.device, copy=True)
                        for name, moment in moments.items()
                    }
            for group, mine in zip(part.param_groups, settings, strict=True):
                group.update(mine)
            for parameter, moments in part.state.items():
                for name, moment in moments.items():  # torch does not look at their shapes; Muon's may be transposed
                    if moment.dim() and sorted(moment.shape[-parameter.dim() :]) != sorted(parameter.shape):
                        raise ValueError(f"{name} of shape {tuple(moment.shape)} for {tuple(parameter.shape)}")


def lr_scale(progress: float, *, warmup: float, decay: float, shape: str = "linear") -> float:
    """Multiplier of the learning rate at `progress` in [0, 1): warm-up, stable phase, decay (WSD, Hu et al. 2024).

    warmup and decay are shares of the run; shape: `linear` or `cosine` decay, to 0 at the end. The first step is above 0
    because `progress` is taken in its middle.
    """
    if progress < warmup:
        return progress / warmup
    if decay and progress > 1 - decay:
        left = max(0.0, (1 - progress) / decay)
        return left if shape == "linear" else 0.5 - 0.5 * math.cos(math.pi * left)
    return 1.0
