"""Resume files of runs whose weights are divided among processes (`distributed.network`), written while training goes on.

Every process writes what it has into a folder beside the file, as safetensors, through torch.distributed.checkpoint; the file
itself holds the rest and names the folder. It is written last, when all shards are on disk, and read first, so a folder
without a file that names it does not exist for anyone. Any number of processes reads what any other number has written.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_iter, tree_map, tree_map_with_path

from pocketgpt import checkpoint, distributed
from pocketgpt.errors import UserError
from pocketgpt.files import sha256_file


@cache
def channel() -> Any:
    """The processes again, for what they have to say to each other beside training."""
    return dist.new_group(backend="gloo", timeout=distributed.FOREVER)


class Writer:
    """Writes one file at a time; those without divided tensors at once, by the first process."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1)
        self.pending: Future[None] | None = None

    def save(self, path: Path, previous: Path, contents: dict[str, Any]) -> None:
        """Take a copy of plain values and tensors, and write it; an older file stays under the name `previous`. All take part.

        Raises:
            UserError: if this file, or the one before it, cannot be written.
        """
        self.finish()
        if not any(map(distributed.is_divided, tree_iter(contents))):
            if distributed.is_main():
                checkpoint.write(path, contents, previous)
                sweep(path, previous)
            return
        import torch.distributed.checkpoint as dcp  # only here: it starts slowly

        tensors: dict[str, Tensor] = {}

        def taken(where: Any, leaf: Any) -> Any:
            if distributed.is_divided(leaf):
                tensors[keystr(where)] = leaf.detach()
                return None
            return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf

        rest = tree_map_with_path(taken, contents)
        folder = distributed.from_main(lambda: path.with_name(f"{path.stem}.{secrets.token_hex(4)}"))
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
        saved = dcp.async_save(tensors, storage_writer=writer, process_group=channel())
        self.pending = self.threads.submit(declare, path, previous, folder, rest, saved)

    def finish(self) -> None:
        """Wait until what was saved last is the newest file, in every process."""
        pending, self.pending = self.pending, None
        if pending is not None:
            with distributed.together():
                pending.result()


def declare(path: Path, previous: Path, folder: Path, rest: dict[str, Any], saved: Any) -> None:
    """Write the file that makes a folder of shards valid, once all are there."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        saved.result()
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise UserError(f"cannot write {folder}: {checkpoint.first_line(reason)}; is the disk full?") from None
    digests = gathered_digests(folder)
    if distributed.is_main():
        checkpoint.write(path, rest | {"shards": folder.name, "sha256": digests}, previous)
        sweep(path, previous)
    dist.barrier(channel())


def gathered_digests(folder: Path) -> dict[str, str]:
    """The digest of every file of the folder; each process reads some of them."""
    names = sorted(file.name for file in folder.iterdir())
    mine = {name: sha256_file(folder / name) for name in names[distributed.rank() :: distributed.world()]}
    if distributed.world() == 1:
        return mine
    every: list[Any] = [None] * distributed.world()
    dist.all_gather_object(every, mine, group=channel())
    return {name: digest for part in every for name, digest in part.items()}


def sweep(path: Path, previous: Path) -> None:
    """Remove folders of shards that neither file names: those of older files, and what a run that died had begun."""
    pattern = re.compile(re.escape(path.stem) + r"\.[0-9a-f]{8}")
    folders = [folder for folder in path.parent.iterdir() if pattern.fullmatch(folder.name) and folder.is_dir()]
    named = set()
    for file in (path, previous) if folders else ():
        with contextlib.suppress(UserError):  # not there, or damaged: then it names nothing of use
            named.add(checkpoint.read(file).get("shards"))
    for folder in folders:
        if folder.name not in named:
            shutil.rmtree(folder, ignore_errors=True)


def read(path: Path, trained: torch.nn.Module) -> dict[str, Any]:
    """What `Writer.save` was given. Tensors from shards are divided as those of the network are, or whole. All take part.

    Raises:
        UserError: naming the file, if it or one of its shards is damaged.
    """
    raw = checkpoint.read(path)
    if not isinstance(raw, dict) or "shards" not in raw:
        return raw
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    divided = distributed.is_divided(trained)
    kind = next(trained.parameters()).device.type if divided else ""
    folder = path.with_name(Path(str(raw["shards"])).name)
    try:
        if gathered_digests(folder) != raw["sha256"]:
            raise ValueError("wrong checksum")
        reader = dcp.HuggingFaceStorageReader(str(folder))
        found: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        tensors = {name: distributed.blank(about.size, about.properties.dtype, kind) for name, about in found.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process reads all: that is meant
            dcp.load(tensors, storage_reader=reader, process_group=channel() if divided else None, no_dist=not divided)
    except (Exception, CheckpointException) as error:  # whatever a damaged folder makes its readers stumble over
        raise UserError(f"{folder}: not readable ({checkpoint.first_line(error)}); the file {path} needs it") from None
    return tree_map_with_path(lambda where, leaf: tensors.get(keystr(where), leaf), raw)


def like(trained: torch.nn.Module, tree: Any) -> Any:
    """The tree, its tensors divided as those of the network are."""
    if not distributed.is_divided(trained):
        return tree
    kind = next(trained.parameters()).device.type

    def placed(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and not distributed.is_divided(leaf):
            return distributed.place(leaf, kind)
        return leaf

    return tree_map(placed, tree)
