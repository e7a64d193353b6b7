"""What a training run needs, before it is run: memory by part, time and money. See docs/plan.md.

Memory is not a formula here. One training step runs on tensors that have a shape and no contents (torch's FakeTensorMode), and
what would be alive is counted: the network, the loss and the optimizer are those of training, so that no switch of the
model can drift away from its plan.
"""

from __future__ import annotations

import copy
import os
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from pocketgpt import device as machine
from pocketgpt import distributed
from pocketgpt.errors import UserError
from pocketgpt.loss import LinearCrossEntropy
from pocketgpt.optim import OptimConfig, Optimizer, parameter_groups

ON_A_CPU = 1.2e9  # bytes that training may add to the weights: more rows at once bring a CPU little
SPARE = 0.9  # share of the memory to plan with: allocators round up, CUDA's own context and libraries take some


@dataclass(frozen=True)
class Gpu:
    flops: float  # dense bfloat16 FLOP/s with float32 accumulation
    memory: float  # bytes
    bandwidth: float  # of that memory, bytes/s


# From the vendors' data sheets. Where they state a rate "with sparsity", half of it is the dense one.
GPUS = {
    "B200": Gpu(2250e12, 180e9, 8.0e12),  # NVIDIA DGX B200 data sheet, an eighth of it
    "H200": Gpu(989e12, 141e9, 4.8e12),  # NVIDIA H200 data sheet, SXM
    "H100": Gpu(989e12, 80e9, 3.35e12),  # NVIDIA H100 data sheet, SXM
    "H100-PCIe": Gpu(756e12, 80e9, 2.0e12),  # NVIDIA H100 data sheet of 2022, PCIe
    "A100": Gpu(312e12, 80e9, 2.039e12),  # NVIDIA A100 data sheet, SXM 80 GB
    "A100-40GB": Gpu(312e12, 40e9, 1.555e12),  # NVIDIA A100 data sheet, 40 GB
    "L40S": Gpu(362e12, 48e9, 0.864e12),  # NVIDIA L40S data sheet
    "L4": Gpu(121e12, 24e9, 0.3e12),  # NVIDIA L4 data sheet
    "RTX5090": Gpu(209.5e12, 32e9, 1.792e12),  # NVIDIA RTX Blackwell GPU architecture paper, appendix
    "RTX4090": Gpu(165.2e12, 24e9, 1.008e12),  # NVIDIA Ada GPU architecture paper, appendix
    "RTX3090": Gpu(71e12, 24e9, 0.936e12),  # NVIDIA GA102 GPU architecture paper, appendix
    "MI300X": Gpu(1307.4e12, 192e9, 5.3e12),  # AMD Instinct MI300X data sheet
}


def this_processor() -> Gpu:
    """The machine at hand: matrix products and a sum over 256 MB are timed."""
    cpu = torch.device("cpu")
    much = torch.ones(64 << 20)
    rate = max(machine.matmul_rate(cpu, dtype) for dtype in (torch.bfloat16, torch.float32))
    return Gpu(
        rate, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), much.nbytes / machine.times(much.sum, cpu)[0]
    )


def parse_gpus(text: str) -> tuple[int, str, Gpu]:
    """`8xH100`, `H100` or `cpu` -> how many, the name, and what it can do. Raises UserError on anything else."""
    match = re.fullmatch(r"(?:(\d+)x)?(.+)", text.strip())
    number, name = (int(match[1] or 1), match[2].lower()) if match else (0, "")
    if name == "cpu" and number:
        return number, "cpu", this_processor()
    found = next((kind for kind in GPUS if kind.lower() == name), None)
    if found is None or number < 1:
        raise UserError(f"gpus={text}: write a number, x and a kind, like 8xH100; kinds: {', '.join([*GPUS, 'cpu'])}")
    return number, found, GPUS[found]


# --- memory ---------------------------------------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")  # where a plan has the moments that optim.offload keeps in main memory


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors made in its scope that are still alive, and the most that ever were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, Tensor) and tensor.device != ELSEWHERE:
                self.note(tensor.untyped_storage())
        return made

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.seen:  # views and in-place operations bring their storage again
            self.seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key, storage.nbytes())

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank in training. The parts are not all there at the same moment, so the total is not their sum."""

    weights: float  # parameters and buffers, float32
    gradients: float
    optimizer: float
    activations: float  # what the forward pass keeps for the backward pass
    logits: float  # chunks of logits, and the gradients that the loss makes with them
    passing: float  # most at once in forward and backward pass
    stepping: float  # most at once in the optimizer's step
    host: float = 0.0  # of main memory, for moments, under optim.offload

    @property
    def total(self) -> float:
        return max(self.passing, self.stepping)


def step_memory(
    network: Callable[[], nn.Module],
    rows: int,
    length: int,
    optim_config: OptimConfig,
    *,
    dtype: torch.dtype,
    accumulate: bool = False,
    device: str | torch.device = "cpu",
    offload: bool = False,
    ranks: int = 1,
) -> Memory:
    """Memory of one training step on a single rank, in steady state.

    network: makes the model (a GPT in training mode, its `recompute` set); rows x length: tokens of a micro-batch;
    accumulate: whether gradients of an earlier micro-batch are there already; device: whose kernels to count with; offload:
    whether it stands for a GPU whose moments are elsewhere; ranks: among how many parallel=fsdp divides what can be divided.
    """
    device = torch.device(device)
    with FakeTensorMode(), torch.device(device), Live() as live:
        model: Any = network()
        weights = live.now
        optimizer = Optimizer(model, replace(optim_config, muon_warmup=0), lr=1e-3)
        if offload or optimizer.host is not None:
            optimizer.host = ELSEWHERE
        add_gradients(model)
        gradients = live.now - weights
        live.peak = live.now
        optimizer.step(1.0)  # makes its state, and lets the gradients go
        stepping, state = live.peak, live.now - weights
        moments = [m for part in optimizer.parts for kept in part.state.values() for m in kept.values()]
        host = sum(moment.nbytes for moment in moments if moment.device == ELSEWHERE)
        del moments
        if accumulate:
            add_gradients(model)
        shares: list[Tensor] = []

        def divide(parameter: Tensor) -> None:
            shares.append(parameter.new_empty(-(-parameter.numel() // ranks)))
            parameter.grad = None

        if ranks > 1 and not accumulate:  # as soon as it is there, a gradient is summed, and this rank's share stays
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.register_post_accumulate_grad_hook(divide)
        live.peak, before = live.now, live.now
        ids = torch.zeros(rows, length, dtype=torch.int64)
        gathered = gathered_weights(model, ranks, 2)
        with machine.autocast(device, dtype):
            hidden = model.hidden_states(ids)
        del gathered
        activations, passing = live.now - before, live.peak
        live.peak, before = live.now, live.now
        gathered = gathered_weights(model, ranks, 0)
        loss = LinearCrossEntropy.apply(
            hidden.flatten(0, 1), model.lm_head.weight, ids.flatten(), dtype, model.lm_head.softcap
        )
        logits = live.peak - before - gathered.nbytes
        gathered = gathered_weights(model, ranks, 3)  # the third for gradients on their way
        del hidden
        loss.backward()
        passing = max(passing, live.peak)
    if ranks > 1:  # FSDP2 (Zhao et al. 2023)
        everything = weights + state
        passing -= round(everything * (1 - 1 / ranks))
        passing = max(passing, weights + everything / ranks)  # to evaluate and to save, every rank gathers all weights
        muons = parameter_groups(model)[0] if optim_config.name == "muon" else []
        sent = sum(parameter.nbytes for parameter in muons)  # gradients, to the owners of their matrices
        if not machine.multiplies_bfloat16(device):  # then updates come back in float32, and take as much
            sent *= 2
        weights, state, stepping = weights / ranks, state / ranks, (stepping + sent) / ranks
        gradients = gradients if accumulate else gradients / ranks  # which are summed after the last micro-batch
    return Memory(weights, gradients, state, activations, logits, passing, stepping, host)


def gathered_weights(model: Any, ranks: int, blocks: int) -> Tensor:
    """Room for the whole weights that a rank has gathered for a while under parallel=fsdp: those outside the blocks (embedding,
    head), and of so many blocks."""
    of_block = sum(p.nbytes for p in model.blocks[0].parameters())
    outside = sum(p.nbytes for p in model.parameters()) - len(model.blocks) * of_block
    count = outside + min(blocks, len(model.blocks)) * of_block
    return torch.empty(count if ranks > 1 else 0, dtype=torch.uint8)


def add_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)


def without_contents(model: nn.Module) -> nn.Module:
    """A copy in a FakeTensorMode: adapters, what is frozen and switches as they are, tensors with a shape and no contents."""
    own: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype), p.requires_grad) for p in model.parameters()
    }
    own |= {id(b): torch.empty(b.shape, dtype=b.dtype) for b in model.buffers()}
    return copy.deepcopy(model, own).train()


# --- work -----------------------------------------------------------------------------------------------------------


def executed_flops(model: Any, length: int, recompute: bool | str) -> float:
    """Operations that are really run per token: with recompute=true the blocks go forward twice, a third more of theirs.

    The selective kind keeps all matrix products, which are all that is counted.
    """
    whole = model.flops_per_token(length)
    blocks = model.flops_per_token(length, supervised=0.0)
    return whole + (blocks / 3 if recompute is True else 0.0)


# --- what fits ------------------------------------------------------------------------------------------------------


def largest_that_fits(batch_size: int, budget: float, memory: Callable[[int], Memory]) -> tuple[int, Memory]:
    """The largest divisor of the batch whose planned memory is within the budget (bytes); 1 when none is.

    Memory grows with the sequences, so it is found by halving. Not so the whole batch, which needs no accumulation.
    """
    if (planned := memory(batch_size)).total <= budget or batch_size == 1:
        return batch_size, planned
    rest = [rows for rows in range(1, batch_size) if batch_size % rows == 0]
    rows = rest[max(0, bisect_right(rest, budget, key=lambda rows: memory(rows).total) - 1)]
    return rows, memory(rows)


def set_micro_batch(
    model: Any,
    train: Any,
    optim_config: OptimConfig,
    length: int,
    dtype: torch.dtype,
    parallel: str = "ddp",
    rows_each: int = 1,
) -> str:
    """Where train.micro_batch_size is 0, set it to the most that fits into free memory, on a CPU into ON_A_CPU at most.
    Returns what was done, in words.

    model: as it will be trained, whole, its adapters attached; train: the TrainConfig; length: tokens of the longest row; rows_each: rows of an item of the batch (a pair has 2).
    """
    if train.micro_batch_size:
        return ""
    device = next(model.parameters()).device
    network = partial(without_contents, model)
    share = -(-train.batch_size // distributed.world())

    def memory(items: int) -> Memory:
        return step_memory(
            network,
            items * rows_each,
            length,
            optim_config,
            dtype=dtype,
            accumulate=items < share,
            device=device,
            ranks=distributed.world() if parallel == "fsdp" else 1,
        )

    # The weights have their place already.
    there = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    nearby = distributed.on_this_node() if device.type == "cpu" else 1
    free = distributed.from_main(lambda: machine.free_memory(device)) / nearby  # all processes do the same
    room = min(SPARE * free, ON_A_CPU) if device.type == "cpu" else SPARE * free
    train.micro_batch_size, planned = largest_that_fits(share, room + there, memory)
    of = f"{share} of each process" if distributed.world() > 1 else f"{share}"
    return (
        f"train.micro_batch_size={train.micro_batch_size} of {of}: planned {human(planned.total)}, "
        f"{human(there)} of them there already, with {human(free)} free and {human(room)} to be used; the result is the same"
    )


def human(number: float, unit: str = "B") -> str:
    """1,234,000,000 -> 1.23 GB"""
    prefixes = iter(("", "k", "M", "G", "T", "P", "E", "Z"))
    prefix = next(prefixes)
    while abs(number) >= 999.5 and prefix != "Z":
        number, prefix = number / 1000, next(prefixes)
    return f"{number:.3g} {prefix}{unit}"
