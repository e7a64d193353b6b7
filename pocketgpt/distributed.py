"""Several processes, one run: under `torchrun` every process holds the whole model and takes its share of each step's micro-batches.

The gradients are summed over all processes once a step, after the last micro-batch, in one flat buffer. That is all that
DistributedDataParallel would do for losses that are sums, without its wrapper around the forward pass, which the losses
here do not go through. Every function is a no-op in a run of one process. docs/distributed.md tells what a step means.

What decides where the loop goes next (the clock, a signal, a failure) is agreed on, or processes would wait for each other forever.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pocketgpt.errors import UserError

T = TypeVar("T")
# While the first process evaluates, the others wait; a dead one is noticed by its connection.
FOREVER = timedelta(days=365)


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes this run has."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this is the process that prints, evaluates and writes files."""
    return rank() == 0


def start(device: torch.device) -> torch.device:
    """Join the processes that torchrun started. Returns this one's device: of several GPUs the one with its local number.

    Small numbers go over gloo, tensors of a GPU over NCCL.

    Raises:
        UserError: if this node has fewer GPUs than processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return device
    if device.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise UserError(
                f"process {local} of this node has no GPU of its own: start at most {torch.cuda.device_count()} "
                "(--nproc-per-node), or set device=cpu"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=FOREVER)
    atexit.register(dist.destroy_process_group)
    return device


@contextmanager
def together() -> Iterator[None]:
    """Around whatever waits for other processes: one that has died ends this one in one line."""
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's only common class
        if not dist.is_initialized():
            raise
        reason = next(iter(str(error).splitlines()), "")[-120:]
        raise UserError(
            f"another process of this run has ended, so this one does ({reason}); what is saved is whole: "
            "train.resume=true goes on from the last evaluation"
        ) from error


def gather(value: T) -> list[T]:
    """This small plain value of all processes, by rank."""
    if world() == 1:
        return [value]
    values: list[Any] = [None] * world()
    with together():
        dist.all_gather_object(values, value)
    return values


def from_main(make: Callable[[], T]) -> T:
    """What `make` returns in the first process, in all of them; the others do not call it."""
    if world() == 1:
        return make()
    values = [make() if is_main() else None]
    with together():
        dist.broadcast_object_list(values, src=0)
    return values[0]  # type: ignore[return-value]


@contextmanager
def main_first() -> Iterator[None]:
    """Run the block in the first process and then in the others, which find in the cache what it left there."""
    if not is_main():
        gather(None)
    yield
    if is_main():
        gather(None)


def same_weights(model: nn.Module) -> None:
    """Give the first process's parameters to all."""
    if world() > 1:
        with torch.no_grad(), together():
            for parameter in model.parameters():
                dist.broadcast(parameter, src=0)


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace every gradient by its sum over all processes, the same bits in each. One that is missing counts as zeros,
    and frozen parameters have none."""
    if world() == 1:
        return
    params = [parameter for parameter in parameters if parameter.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.flatten() for grad in grads])
    with together():
        dist.all_reduce(flat)
    for parameter, total in zip(params, flat.split([p.numel() for p in params]), strict=True):
        parameter.grad = total.view_as(parameter)


def divided(work: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
    """`work(items)` along the first dimension, every process doing its share. Items of zeros fill up the last one."""
    if world() == 1:
        return work(items)
    share = -(-len(items) // world())
    mine = items[rank() * share : (rank() + 1) * share]
    mine = torch.cat([mine, items.new_zeros(share - len(mine), *items.shape[1:])])
    done = work(mine).contiguous()
    every = done.new_empty(world() * share, *done.shape[1:])
    with together():
        dist.all_gather_single(every, done)
    return every[: len(items)]
