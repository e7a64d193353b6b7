"""Checkpoints: what a stage leaves behind, written atomically and read with suspicion.

A stage writes `ckpt_<stage>.pt` (one dict of plain types and tensors that loads with `weights_only=True`), the folder
`<stage>/` in Hugging Face form, and points `latest` at that folder. Either form loads through `load`.

Two things are checked beside what the entries say: the CRC-32 of every record of a .pt, which torch writes and does not
read, and in both forms a digest over configuration, tokenizer and weights. A foreign folder has no digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import warnings
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pocketgpt import chat_template, hf
from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path
from pocketgpt.tokenizer import Tokenizer

FORMAT = 1
STAGES = ("base", "sft", "control", "dpo")  # what our own programs train; other names are of imported models
WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # what torch.compile and DDP put before parameter names
KEYS = {
    "format": int,
    "stage": str,
    "config": dict,
    "state_dict": dict,
    "tokenizer": str,
    "chat_template": str,
    "step": int,
    "metrics": dict,
    "run_config": dict,
    "fingerprints": dict,
}


@dataclass
class Checkpoint:
    """A model with all it needs to be used: nothing outside of it is consulted."""

    stage: str
    config: dict[str, Any]  # GPTConfig as a dict
    state_dict: dict[str, Tensor]
    tokenizer: Tokenizer
    step: int = 0  # optimizer steps of this stage
    metrics: dict[str, Any] = field(default_factory=dict)
    run_config: dict[str, Any] = field(default_factory=dict)  # the resolved configuration of the run
    fingerprints: dict[str, str] = field(default_factory=dict)  # sha256 of the data it was trained on
    path: Path = Path()  # where it was read from
    recorded: str = ""  # the digest that the file brought along; a foreign folder has none

    @property
    def digest(self) -> str:
        """Hex digest of all that decides what the model says: configuration, tokenizer, and weights by name."""
        config = hf.config_from_hf(hf.config_to_hf(self.config), self.path)  # as it comes back from a folder
        config.pop("dropout", None)  # of training only
        for key in ("qkv_bias", *hf.OWN):  # switches that older checkpoints do not have
            if not config.get(key):
                config.pop(key, None)
        says: list[Any] = [config, self.tokenizer.fingerprint]
        if self.tokenizer.template != chat_template.TEMPLATE:
            says.append(self.tokenizer.roles)
        total = hashlib.sha256(json.dumps(says, sort_keys=True).encode())
        for name, tensor in sorted(self.state_dict.items()):
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(raw_bytes(tensor))
        return total.hexdigest()

    @property
    def folder(self) -> Path:
        """Where it lies in Hugging Face form: itself, or the folder that its stage wrote beside it."""
        return self.path.parent / self.stage if self.path.suffix == ".pt" else self.path


def raw_bytes(tensor: Tensor) -> memoryview:
    """What a tensor of any type and shape holds, for digests."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def unwrapped(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the names of the bare model."""
    return {WRAPPERS.sub("", str(name)): tensor for name, tensor in state_dict.items()}


def save(out: Path, ckpt: Checkpoint) -> Path:
    """Write `ckpt_<stage>.pt` and the folder `<stage>/` under `out`, and point `latest` at it. Returns the .pt path."""
    weights = {name: tensor.detach().cpu() for name, tensor in unwrapped(ckpt.state_dict).items()}
    digest = replace(ckpt, state_dict=weights).digest
    path = out / f"ckpt_{ckpt.stage}.pt"
    contents = {
        "format": FORMAT,
        "stage": ckpt.stage,
        "config": ckpt.config,
        "state_dict": weights,
        "tokenizer": ckpt.tokenizer.to_json(),
        "chat_template": ckpt.tokenizer.template,
        "special_tokens": {"bos": ckpt.tokenizer.bos, "eos": ckpt.tokenizer.eos},
        "step": ckpt.step,
        "metrics": ckpt.metrics,
        "run_config": ckpt.run_config,
        "fingerprints": ckpt.fingerprints,
        "digest": digest,
    }
    write(path, contents)
    folder = out / ckpt.stage
    stop_id, pad_id = ckpt.tokenizer.im_end_id, ckpt.tokenizer.eot_id
    about = {"stage": ckpt.stage, "step": ckpt.step}
    hf.save_folder(folder, ckpt.config, weights, about, stop_id=stop_id, pad_id=pad_id, digest=digest)
    ckpt.tokenizer.save(folder, ckpt.config["block_size"])
    point(out / "latest", folder)
    return path


def write(path: Path, contents: dict[str, Any], previous: Path | None = None) -> None:
    """Write plain types and tensors as a .pt, atomically; `previous` is the name under which an older file is kept."""
    with atomic_path(path, previous) as temporary:
        try:
            torch.save(contents, temporary)
        except RuntimeError as error:  # torch's writer has no OSError
            raise UserError(f"cannot write {path}: {first_line(error)}; is the disk full?") from error


def read(path: Path) -> Any:
    """What `write` wrote. Nothing that a file brings along is run: `weights_only` refuses it.

    Raises:
        UserError: naming the file, if it is damaged or holds anything but plain types and tensors.
    """
    try:
        with zipfile.ZipFile(path) as file:
            if sum(record.file_size for record in file.infolist()) > path.stat().st_size:
                raise zipfile.BadZipFile("it claims to hold more than its size")
            if (record := file.testzip()) is not None:
                raise zipfile.BadZipFile(f"wrong checksum of {record}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on pickles that are not its own
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(f"{path}: refused, it is not a checkpoint of tensors and plain values; name another") from None
    except Exception as error:  # the readers of a damaged file stumble over it in any way
        raise UserError(
            f"{path}: not a readable checkpoint ({first_line(error)}); write it again or name another"
        ) from None


def point(link: Path, target: Path) -> None:
    """Make `link` a symbolic link to its sibling `target`, replacing what it pointed to before in one step."""
    temporary = link.with_name(f".{link.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target.name, target_is_directory=True)
        os.replace(temporary, link)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{link} cannot be pointed at {target}: {error}; remove what is there") from None


def load(path: str | Path) -> Checkpoint:
    """Read a checkpoint: a `.pt` file of ours, or a folder in Hugging Face form.

    Raises:
        UserError: one line that names the file, if it is missing, damaged, not ours, or contradicts itself.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no checkpoint there; train one first (make pretrain) or name another")
    return load_folder(path) if path.is_dir() else load_file(path)


def load_file(path: Path) -> Checkpoint:
    raw = read(path)
    found = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(found, int) or found != FORMAT:
        raise UserError(f"{path}: not a pocketgpt checkpoint of format {FORMAT} (found {str(found)[:20]!r})")
    for key, kind in KEYS.items():
        if not isinstance(raw.get(key), kind):
            raise UserError(
                f"{path}: the entry {key!r} is missing or not a {kind.__name__}; the file is not ours or damaged"
            )
    try:
        tokenizer = Tokenizer.from_json(raw["tokenizer"], **roles_of(raw))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return Checkpoint(
        raw["stage"],
        raw["config"],
        unwrapped(raw["state_dict"]),
        tokenizer,
        raw["step"],
        raw["metrics"],
        raw["run_config"],
        raw["fingerprints"],
        path,
        str(raw.get("digest", "")),  # older files have none
    )


def roles_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The chat template and the control tokens that it is given; older files name none and have ours."""
    named = raw.get("special_tokens", {"eos": Tokenizer.IM_END})
    if not isinstance(named, dict):
        raise UserError("the entry 'special_tokens' is not a dict; the file is not ours or damaged")
    roles = {"bos": named.get("bos"), "eos": named.get("eos"), "template": raw["chat_template"]}
    if not isinstance(roles["eos"], str) or not isinstance(roles["bos"], str | None):
        raise UserError("the entry 'special_tokens' names no end of a turn; the file is not ours or damaged")
    return roles


def load_folder(path: Path) -> Checkpoint:
    stay_inside(path)
    config, weights, about = hf.load_folder(path)
    stage, step = str(about.get("stage", path.name)), about.get("step", 0)
    recorded = ""
    if (file := path / "model.safetensors").exists():  # what we write is never in shards
        with safe_open(file, "pt") as tensors:
            recorded = (tensors.metadata() or {}).get("digest", "")
    step = step if isinstance(step, int) else 0
    return Checkpoint(stage, config, weights, Tokenizer.load(path), step, path=path, recorded=recorded)


def stay_inside(folder: Path) -> None:
    """Raise UserError if a file of the folder is a link to somewhere else. The hub's cache keeps its files in ../../blobs."""
    root = folder.resolve()
    blobs = root.parent.parent / "blobs"
    for entry in folder.iterdir():
        target = entry.resolve()
        if not (target.is_relative_to(root) or target.is_relative_to(blobs)):
            raise UserError(f"{entry}: leads out of its folder, to {target}: refused; put the file itself there")


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:120]


def is_plain(tensor: Tensor) -> bool:
    """Whether it is an array of real numbers in memory: not sparse, nested, quantized, or without contents."""
    dense = tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type == "cpu"
    return dense and tensor.is_floating_point()


def verify_weights(ckpt: Checkpoint, expected: dict[str, tuple[int, ...]], vocab_size: int) -> None:
    """Check a checkpoint's weights against what its config makes, and its tokenizer against its vocabulary.

    Raises:
        UserError: naming the file and the first thing that does not fit.
    """
    where = ckpt.path
    missing = sorted(expected.keys() - ckpt.state_dict.keys())
    surplus = sorted(map(str, ckpt.state_dict.keys() - expected.keys()))
    if missing or surplus:
        what = f"has no {missing[0]}" if missing else f"has an unknown {surplus[0]}"
        raise UserError(f"{where}: {what}: the weights are not of the model that its config describes")
    for name, shape in expected.items():
        tensor = ckpt.state_dict[name]
        if not isinstance(tensor, Tensor) or not is_plain(tensor):
            raise UserError(f"{where}: {name} is {type(tensor).__name__}, but no plain array of real numbers")
        if tuple(tensor.shape) != shape:
            found = tuple(tensor.shape)
            raise UserError(f"{where}: {name} is {found}, its config says {shape}: the file is damaged or mixed up")
        if not torch.isfinite(tensor.float()).all():
            raise UserError(f"{where}: {name} holds NaN or infinity: the run that wrote it had diverged")
    embed, head = (ckpt.state_dict[name] for name in ("embed.weight", "lm_head.weight"))
    if ckpt.config.get("tie_embeddings", True) and bool((embed != head).any()):
        raise UserError(f"{where}: embed.weight and lm_head.weight differ, its config says that they are one")
    if ckpt.tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"{where}: the tokenizer has {ckpt.tokenizer.vocab_size} ids and the model {vocab_size}: they do not belong together"
        )
    if ckpt.recorded and ckpt.recorded != ckpt.digest:
        raise UserError(
            f"{where}: configuration, tokenizer and weights are not the ones that were saved together: "
            "something in it was exchanged or edited"
        )
