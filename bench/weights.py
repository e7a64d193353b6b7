"""Random weights of a few shapes, written in every form that an engine of bench/decode.py reads.

Trained or random, a network costs the same, so random weights need no training and no download. They are drawn such
that every part of the network shows in the tokens: a wrong rotation or a forgotten norm changes them at once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

import torch

from base_model import GPT, PRESETS, GPTConfig
from pocketgpt import gguf_file, hf
from pocketgpt.checkpoint import Checkpoint
from pocketgpt.files import write_json
from pocketgpt.tokenizer import Tokenizer

VERSION = 2  # of what is drawn and written here; a new one makes kept files stale
BLOCK_SIZE = 2304  # 2,048 tokens of context and room for an answer
PERIOD = 128  # tokens of the passage that the copying model repeats; divides every vocabulary below


def llama(**sizes: int) -> GPTConfig:
    return GPTConfig.from_dict(PRESETS["llama"] | {"block_size": BLOCK_SIZE} | sizes)


SHAPES = {
    "tiny": llama(vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=64),  # to see the benchmark run
    "11m": llama(vocab_size=4096, n_layer=6, n_head=6, n_kv_head=6, n_embd=384),
    "124m": llama(vocab_size=50304, n_layer=12, n_head=12, n_kv_head=12, n_embd=768),  # 50,257 ids of GPT-2, padded
    "1b": llama(vocab_size=50304, n_layer=16, n_head=32, n_kv_head=8, n_embd=2048, n_inner=8192),  # for GPUs
}
GGUF_TYPES = {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0"}  # as export.py names them


@torch.no_grad()
def random_model(config: GPTConfig, seed: int) -> GPT:
    """Every matrix keeps the size of what it multiplies, so that all blocks weigh about the same in the logits.

    The embedding is smaller than what the blocks add, or its likeness to the tied head would repeat the last token
    forever; the logits come out with a deviation of about 2.
    """
    model = GPT(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.1, generator=generator)
        else:
            gain = 2.0 if name == "embed.weight" else 1.0
            parameter.normal_(0.0, gain * parameter.size(1) ** -0.5, generator=generator)
    return model


@torch.no_grad()
def copying_model(config: GPTConfig, seed: int) -> GPT:
    """A network of this shape, with a head of its own, whose greedy text is a passage of PERIOD tokens over and over.

    Random weights copy nothing. Here the embedding outweighs the blocks, and each row of the head is the embedding of
    the token before it: the network costs what any other costs, and copies perfectly.
    """
    model = random_model(GPTConfig.from_dict(config.to_dict() | {"tie_embeddings": False}), seed)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter.mul_(0.02)
    model.embed.weight.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(seed + 1))
    ids = torch.arange(config.vocab_size)
    model.lm_head.weight[ids - ids % PERIOD + (ids + 1) % PERIOD] = model.embed.weight * config.n_embd**-0.5
    return model


def write_folder(folder: Path, model: GPT, tokenizer: Tokenizer) -> None:
    config, about = model.config.to_dict(), {"stage": "base", "step": 0}
    hf.save_folder(folder, config, model.state_dict(), about, stop_id=tokenizer.im_end_id, pad_id=tokenizer.eot_id)
    tokenizer.save(folder, model.config.block_size)


def prepare(root: Path, config: GPTConfig, seed: int, kinds: Collection[str], copying: bool) -> Path:
    """Make a folder with `hf/`, `<kind>.gguf` for each of `kinds`, and `copying/` if asked for; kept files are reused."""
    shape = json.dumps([VERSION, seed, config.to_dict()], sort_keys=True)
    folder = root / hashlib.sha256(shape.encode()).hexdigest()[:12]
    files = {f"{kind}.gguf" for kind in kinds}
    files |= {"hf", "copying"} if copying else {"hf"}
    done = folder / "done.json"  # written last, so what it names is whole
    have = set(json.loads(done.read_text(encoding="utf-8"))) if done.exists() else set()
    if files <= have:
        return folder
    tokenizer = Tokenizer.train(
        ["the benchmark speaks in ids"] * 9, Tokenizer.MIN_VOCAB_SIZE + 4
    )  # llama.cpp wants merges
    model = random_model(config, seed)
    checkpoint = Checkpoint("base", config.to_dict(), model.state_dict(), tokenizer)
    if "hf" not in have:
        write_folder(folder / "hf", model, tokenizer)
    for kind in kinds:
        if f"{kind}.gguf" not in have:
            gguf_file.save(folder / f"{kind}.gguf", checkpoint, GGUF_TYPES[kind])
    if "copying" in files - have:
        write_folder(folder / "copying", copying_model(config, seed), tokenizer)
    write_json(done, sorted(files | have))
    return folder
