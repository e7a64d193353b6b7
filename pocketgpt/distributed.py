"""Several processes, one run: under `torchrun` every process takes its share of each step's micro-batches.

With parallel=ddp every process holds the whole model, and the gradients are summed over all of them once a step, after the
last micro-batch, in one flat buffer. That is all that DistributedDataParallel would do for losses that are sums, without
its wrapper around the forward pass, which the losses here do not go through. With parallel=fsdp weights, gradients and
moments are divided among the processes by FSDP2 (Zhao et al. 2023; torch.distributed.fsdp.fully_shard): what is trained
is a second network, and the model of the script has weights only outside of training steps, see `network` and `whole`.
Every function is a no-op in a run of one process. docs/distributed.md tells what a step means.

What decides where the loop goes next (the clock, a signal, a failure) is agreed on, or processes would wait for each other forever.
"""

from __future__ import annotations

import atexit
import copy
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pocketgpt.errors import UserError

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)
# While the first process evaluates, the others wait; a dead one is noticed by its connection.
FOREVER = timedelta(days=365)


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes this run has."""
    return dist.get_world_size() if dist.is_initialized() else 1


def on_this_node() -> int:
    """How many of them share this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if dist.is_initialized() else 1


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


def ended(error: Exception) -> UserError:
    """What to say when another process has died, with what this one noticed of it."""
    reason = next(iter(str(error).splitlines()), "")[-120:]
    return UserError(
        f"another process of this run has ended, so this one does ({reason}); what is saved is whole: "
        "train.resume=true goes on from the last evaluation"
    )


def is_of_others(error: Exception) -> bool:
    """Whether a computation failed for want of another process: blocks whose weights are divided wait in their middle."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


@contextmanager
def together() -> Iterator[None]:
    """Around whatever waits for other processes: one that has died ends this one in one line."""
    try:
        yield
    except RuntimeError as error:  # gloo's and NCCL's only common class
        if not dist.is_initialized():
            raise
        raise ended(error) from error


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


def check(parallel: str, offload: bool = False) -> None:
    """Raises UserError on a name that is not known, or that does not go with optim.offload."""
    if parallel not in ("ddp", "fsdp"):
        raise UserError(f"parallel is {parallel!r}: choose ddp or fsdp")
    if parallel == "fsdp" and offload:
        raise UserError(
            "optim.offload=true with parallel=fsdp: moments are divided among the processes then: start more of them, "
            "or set optim.offload=false"
        )


def is_divided(thing: object) -> bool:
    """Whether each process holds a part of it only: a network of `network`, or one of its tensors."""
    if isinstance(thing, nn.Module):
        return any(map(is_divided, thing.parameters()))
    return hasattr(thing, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, in the same memory; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is divided, in every process: all take part. Any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@cache
def mesh(kind: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh  # only here: it starts slowly

    return init_device_mesh(kind, (world(),))


def network(model: Model, parallel: str, say: Callable[[str], None]) -> Model:
    """What is trained: the model itself, or under fsdp, in a run of several processes, its double whose weights are divided.

    Blocks gather their weights when they run; embedding, last norm and head stay gathered from the forward to the
    backward pass, since the losses read the head's weight themselves. The model keeps its modules, for evaluation and saving.
    """
    if parallel == "ddp":
        return model
    if world() == 1:
        say("parallel=fsdp: one process, nothing is divided")
        return model
    say(f"parallel=fsdp: weights, gradients and moments divided among {world()} processes")
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    double = copy.deepcopy(model, shared)
    where = mesh(next(model.parameters()).device.type)
    for block in double.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=where)
    fully_shard(double, mesh=where, reshard_after_forward=False)
    for module in double.modules():
        if isinstance(module, FSDPModule):  # the losses are divided by what all processes supervise: a plain sum
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(double, "hidden_states")
    # FSDP2 warns of results that are views, as a product's is. Nothing here changes one in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    return double


def place(tensor: Tensor, kind: str) -> Tensor:
    """Divide among the processes a tensor that all of them have: by its first dimension, as FSDP2 does."""
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(tensor.to(kind), mesh(kind), [Shard(0)], src_data_rank=None)


def blank(shape: torch.Size, dtype: torch.dtype, kind: str) -> Tensor:
    """A tensor without contents, divided among the processes and their devices of this kind; or whole, on the CPU, without one."""
    from torch.distributed.tensor import Shard, empty

    return (
        empty(shape, dtype=dtype, device_mesh=mesh(kind), placements=[Shard(0)])
        if kind
        else torch.empty(shape, dtype=dtype)
    )


@torch.no_grad()
def same_weights(model: nn.Module, trained: nn.Module) -> None:
    """Give the first process's parameters to all, and to the network that is trained. If that is another one, the model is
    empty from here on."""
    if world() > 1:
        with together():
            for parameter in model.parameters():
                dist.broadcast(parameter, src=0)
    if trained is not model:
        for parameter, divided in zip(model.parameters(), trained.parameters(), strict=True):
            local(divided).copy_(local(place(parameter, parameter.device.type)))
        empty(model)


@torch.no_grad()
def fill(model: nn.Module, trained: nn.Module) -> None:
    """Give the model the weights of the network that is trained, in every process: all take part."""
    if trained is not model:
        with together():
            for parameter, divided in zip(model.parameters(), trained.parameters(), strict=True):
                parameter.data = full(divided)


def empty(model: nn.Module) -> None:
    """Free the weights of the model; whoever shares its parameters sees that, too."""
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)


@contextmanager
def whole(model: nn.Module, trained: nn.Module) -> Iterator[None]:
    """The model has all weights within the block, in every process, and not after it if they are divided."""
    fill(model, trained)
    yield
    if trained is not model:
        empty(model)


def dealt(batches: Sequence[T], trained: nn.Module) -> Iterator[tuple[T, bool]]:
    """This process's micro-batches, and whether each counts: where weights are divided, all processes run equally many, since
    each gathers the weights of the others, and one that has fewer runs the first again for nothing.

    Gradients are sent after the last one only.
    """
    mine = [(batch, True) for batch in batches[rank() :: world()]]
    if not is_divided(trained):
        yield from mine
        return
    mine += [(batches[0], False)] * (-(-len(batches) // world()) - len(mine))
    for number, each in enumerate(mine, 1):
        trained.set_requires_gradient_sync(number == len(mine))  # type: ignore[operator]
        yield each


def sum_gradients(trained: nn.Module) -> None:
    """Replace every gradient by its sum over all processes, the same bits in each. One that is missing counts as zeros,
    and frozen parameters have none. Where weights are divided, the backward pass has done so."""
    if world() == 1 or is_divided(trained):
        return
    params = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
    flat = torch.cat([grad.flatten() for grad in grads])
    with together():
        dist.all_reduce(flat)
    for parameter, total in zip(params, flat.split([p.numel() for p in params]), strict=True):
        parameter.grad = total.view_as(parameter)


def clip_gradients(trained: nn.Module, limit: float) -> Tensor:
    """Scale the gradients so that the norm of them all is at most `limit`. Returns the norm before."""
    with together():
        return full(nn.utils.clip_grad_norm_(trained.parameters(), limit))


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


def part(length: int, of: int) -> slice:
    """Which of `length` rows or items process number `of` has: as many as any, the last ones fewer or none. FSDP2's rule."""
    share = -(-length // world())
    return slice(min(length, of * share), min(length, (of + 1) * share))


def joined(mine: Tensor, length: int) -> Tensor:
    """The tensor of `length` items of which every process has its part."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((length, *mine.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(mine, mesh(mine.device.type), [Shard(0)], run_check=False, shape=shape, stride=stride)


def exchange(sent: list[list[Tensor]], shapes: list[list[tuple[int, int]]], like: Tensor) -> list[list[Tensor]]:
    """Send a list of matrices to every process, and receive from each those of these shapes; of the type of `like`."""
    outgoing = [torch.cat([like.new_empty(0), *(each.flatten() for each in to_one)]) for to_one in sent]
    sizes = [[rows * columns for rows, columns in from_one] for from_one in shapes]
    received = like.new_empty(sum(map(sum, sizes)))
    with together():
        dist.all_to_all_single(received, torch.cat(outgoing), list(map(sum, sizes)), list(map(len, outgoing)))
    pieces = [each.split(of_one) for each, of_one in zip(received.split(list(map(sum, sizes))), sizes, strict=True)]
    return [
        [piece.view(shape) for piece, shape in zip(*both, strict=True)] for both in zip(pieces, shapes, strict=True)
    ]


def gathered(matrices: list[Tensor]) -> list[Tensor]:
    """Of matrices whose rows are divided those that fall to this process, whole."""
    mine = matrices[part(len(matrices), rank())]
    sent = [list(map(local, matrices[part(len(matrices), owner)])) for owner in range(world())]

    def rows(matrix: Tensor, sender: int) -> int:
        its = part(matrix.size(0), sender)
        return its.stop - its.start

    shapes = [[(rows(matrix, sender), matrix.size(1)) for matrix in mine] for sender in range(world())]
    received = exchange(sent, shapes, local(matrices[0]))
    return [torch.cat(pieces) for pieces in zip(*received, strict=True)]


def scattered(mine: list[Tensor], matrices: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The opposite: this process's rows of all matrices, from the whole ones of those that fall to it, of this type."""
    sent = [[matrix[part(len(matrix), to)] for matrix in mine] for to in range(world())]
    owned = [matrices[part(len(matrices), owner)] for owner in range(world())]
    shapes = [[(local(matrix).size(0), local(matrix).size(1)) for matrix in of_one] for of_one in owned]
    received = exchange(sent, shapes, local(matrices[0]).new_empty(0, dtype=dtype))
    return [piece for of_one in received for piece in of_one]
