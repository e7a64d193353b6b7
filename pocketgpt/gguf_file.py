"""GGUF, the file of llama.cpp: one file with configuration, tokenizer and weights, read and written through `gguf`.

Names and meanings follow the specification (github.com/ggml-org/ggml, docs/gguf.md) and llama.cpp's converter. What a file
asks for and we do not have is refused by its name. Quantized weights are read as the float32 numbers they stand for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, TokenType
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from pocketgpt import hf
from pocketgpt.chat_template import PLAIN_TEMPLATE
from pocketgpt.checkpoint import Checkpoint
from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path
from pocketgpt.tokenizer import Tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")  # types of tensors
WRITABLE = {
    "float32": GGMLQuantizationType.F32,
    "float16": GGMLQuantizationType.F16,
    "bfloat16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32, "q8_0": 7}  # their LLAMA_FTYPE

# Their names of our modules.
NAMES = {
    "embed": "token_embd",
    "position": "position_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "attn_norm": "attn_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "attn.o_proj": "attn_output",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OURS = {theirs: ours for ours, theirs in NAMES.items()}

# Keys under the name of the architecture that we follow, or that change nothing. Any other one is refused.
KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "attention.causal",
    "tensor_data_layout", "rope.scaling.original_context_length", "rope.scaling.finetuned", "use_parallel_residual",
}  # fmt: skip

# What texts are split into before merges apply, under the names that llama.cpp knows.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": ("gpt2 words",),
    "smollm": ("each digit", "gpt2 words"),
    "qwen2": (WORDS.replace("DIGITS", r"\p{N}"), "bytes"),
    "llama-bpe": (WORDS.replace("DIGITS", r"\p{N}{1,3}"), "bytes"),
}
SAME_SPLIT = {"deepseek-r1-qwen": "qwen2"}
NFC = ("qwen2",)  # whose tokenizers normalise; neither the file nor llama.cpp says so


# -- reading


def load(path: Path) -> Checkpoint:
    """Read a GGUF file: weights in float32, the tokenizer rebuilt from its tokens and merges, the chat template as it is.

    Raises:
        UserError: naming the file and what is damaged in it, or what it asks for and we do not have.
    """
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader of a damaged file stumbles over it in any way
        raise UserError(
            f"{path}: not a readable GGUF file ({str(error)[:120]}); download or convert it again"
        ) from None
    try:
        fields = {key: field.contents() for key, field in reader.fields.items()}
        tokenizer = tokenizer_from(fields)
        config = config_from(fields)
        weights = weights_from({tensor.name: tensor for tensor in reader.tensors}, config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except KeyError as error:
        raise UserError(f"{path}: no entry {error} in it; the file is incomplete") from None
    return Checkpoint(path.stem, config, weights, tokenizer, path=path)


def config_from(fields: dict[str, Any]) -> dict[str, Any]:
    """The entries of a file -> our GPTConfig as a dict, types unchecked; whether the head is tied is not among them."""
    kind = fields["general.architecture"]
    if kind not in ARCHITECTURES:
        raise UserError(f"architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    if fields.get("split.count", 1) > 1:
        raise UserError(
            "the model is split over several files, which is not supported: merge them with llama-gguf-split"
        )
    said = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    scaling = said.get("rope.scaling.type", "none")
    if scaling != "none":
        raise UserError(f"rope scaling {scaling!r} is not supported")
    if unknown := sorted(said.keys() - KNOWN_KEYS):
        raise UserError(f"{kind}.{unknown[0]}={str(said[unknown[0]])[:40]} is not supported")
    heads, width = said["attention.head_count"], said["embedding_length"]
    head_dim = said.get("attention.key_length", width // heads)
    turned = said.get("rope.dimension_count", head_dim)
    if said.get("attention.value_length", head_dim) != head_dim or (kind != "gpt2" and turned != head_dim):
        raise UserError(
            f"heads of {head_dim} with {turned} rotary dimensions, or other values than keys: not supported"
        )
    norm = "attention.layer_norm_epsilon" if kind == "gpt2" else "attention.layer_norm_rms_epsilon"
    config = hf.SHAPES[kind] | {
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "block_size": said["context_length"],
        "n_layer": said["block_count"],
        "n_head": heads,
        "n_kv_head": said.get("attention.head_count_kv", heads),
        "n_embd": width,
        "head_dim": 0 if head_dim * heads == width else head_dim,
        "n_inner": said["feed_forward_length"],
        "norm_eps": shortest(said[norm]),
    }
    if kind != "gpt2":
        config["rope_theta"] = shortest(said.get("rope.freq_base", 10_000.0))
    for key in ("n_kv_head", "n_inner", "n_head"):
        if not isinstance(config[key], int):
            raise UserError(f"{key} differs from layer to layer, which is not supported")
    return config


def shortest(value: float) -> float:
    """The decimal number that somebody wrote before it was stored as float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def weights_from(tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file -> our state_dict in float32. Sets config["tie_embeddings"]."""
    weights: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        kind = tensor.tensor_type.name
        if kind not in READABLE:
            raise UserError(f"{name} is of type {kind}, which is not supported; supported: {', '.join(READABLE)}")
        ours = from_gguf(name)
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        value = torch.from_numpy(np.array(array, dtype=np.float32))
        if ".attn.qkv." in ours:
            for part, piece in zip("qkv", value.tensor_split(3), strict=True):
                weights[ours.replace("qkv", f"{part}_proj")] = piece.contiguous()
        else:
            weights[ours] = value
    if hf.architecture(config | {"tie_embeddings": True}) == "llama":
        permute(weights, config, adjacent_to_halves)
    config["tie_embeddings"] = "lm_head.weight" not in weights or torch.equal(
        weights["lm_head.weight"], weights["embed.weight"]
    )
    if config["tie_embeddings"]:
        weights["lm_head.weight"] = weights["embed.weight"]
    return weights


def from_gguf(name: str) -> str:
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    module = "attn.qkv" if match and match[2] == "attn_qkv" else OURS.get(match[2]) if match else None
    if match is None or module is None:
        raise UserError(f"tensor {name} is not supported")
    return f"blocks.{match[1]}.{module}.{match[3]}" if match[1] else f"{module}.{match[3]}"


def permute(weights: dict[str, Tensor], config: dict[str, Any], how: Callable[[Tensor, int], Tensor]) -> None:
    """Llama files alone pair dimension 2i of a head with 2i + 1 for rotary positions, where we pair i with i + half."""
    for name, tensor in weights.items():
        if match := re.search(r"\.([qk])_proj\.", name):
            weights[name] = how(tensor, config["n_head"] if match[1] == "q" else config["n_kv_head"])


def adjacent_to_halves(weight: Tensor, heads: int) -> Tensor:
    """(heads x head_dim, ...) with pairs side by side in each head -> the first of all pairs, then the second."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def halves_to_adjacent(weight: Tensor, heads: int) -> Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def tokenizer_from(fields: dict[str, Any]) -> Tokenizer:
    """Rebuild the tokenizer. Tokens marked unused at the end only pad the vocabulary and are left out."""
    kind, split = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    split = SAME_SPLIT.get(split, split)
    if kind != "gpt2":
        raise UserError(f"tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2')")
    if split not in SPLITS:
        raise UserError(f"pre-tokenizer {split!r} is not supported; supported: {', '.join([*SPLITS, *SAME_SPLIT])}")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    eos = tokens[fields["tokenizer.ggml.eos_token_id"]]
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    bos = None if bos_id is None else tokens[bos_id]
    end = len(tokens)
    while end and types[end - 1] == TokenType.UNUSED:
        end -= 1
    vocab = {token: i for i, token in enumerate(tokens[:end])}
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    try:
        # In Llama 3's vocabulary some words are no result of merges: the whole word is looked up first.
        backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=split == "llama-bpe"))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"its merges and tokens do not belong together ({error})") from None
    parts = [pre_tokenizer(part) for part in SPLITS[split]]
    backend.pre_tokenizer = parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)
    backend.decoder = decoders.ByteLevel()
    if split in NFC:
        backend.normalizer = normalizers.NFC()
    if bos and fields.get("tokenizer.ggml.add_bos_token", split == "llama-bpe"):  # what llama.cpp takes for granted
        begin = {"id": "bos", "ids": [bos_id], "tokens": [bos]}
        backend.post_processor = processors.TemplateProcessing(["bos", "$A"], special_tokens=[begin])
    for token, role in zip(tokens[:end], types, strict=False):
        special = role in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.UNUSED) or token in (bos, eos)
        if special:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif role == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    return Tokenizer(backend, template=fields.get("tokenizer.chat_template") or PLAIN_TEMPLATE, bos=bos, eos=eos)


def pre_tokenizer(part: str) -> Any:
    if part == "each digit":
        return pre_tokenizers.Digits(individual_digits=True)
    if part in ("gpt2 words", "bytes"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=part == "gpt2 words")
    return pre_tokenizers.Split(Regex(part), "isolated")


# -- writing


def save(path: Path, ckpt: Checkpoint, dtype: str) -> None:
    """Write a GGUF file of version 3 that llama.cpp runs, atomically: matrices in `dtype` (a key of WRITABLE), all else in
    float32, with tokenizer, control tokens and chat template.

    Raises:
        UserError: for a model or tokenizer that llama.cpp does not have.
    """
    kind = hf.architecture(ckpt.config)
    if kind not in ARCHITECTURES:
        raise UserError(
            f"{ckpt.path}: llama.cpp has no architecture with {', '.join(hf.foreign(ckpt.config))}; "
            f"it has {', '.join(ARCHITECTURES)}: train one of these"
        )
    if dtype not in WRITABLE:
        raise UserError(f"dtype is {dtype!r}: choose one of {', '.join(WRITABLE)}")
    weights = dict(ckpt.state_dict)
    if kind == "llama":
        permute(weights, ckpt.config, halves_to_adjacent)
    with atomic_path(path) as temporary:
        writer = GGUFWriter(temporary, kind)
        try:
            write_config(writer, ckpt, dtype)
            write_tokenizer(writer, ckpt.tokenizer, ckpt.config["vocab_size"])
            for name, tensor in sorted(weights_to(weights, ckpt.config).items()):
                array = tensor.float().contiguous().numpy()
                wanted = (
                    WRITABLE[dtype] if tensor.dim() == 2 and name != "position_embd.weight" else WRITABLE["float32"]
                )
                if wanted == GGMLQuantizationType.Q8_0 and tensor.size(1) % 32:
                    raise UserError(
                        f"q8_0 packs 32 weights together, and {name} has {tensor.size(1)} in a row: use float16"
                    )
                writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def weights_to(weights: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Our state_dict -> their names. GPT-2 keeps queries, keys and values in one; a tied head is left out."""
    theirs = {}
    fused = hf.architecture(config) == "gpt2"
    for name, tensor in weights.items():
        module, kind = name.removeprefix("blocks.").rsplit(".", 1)
        layer, _, inner = module.partition(".")
        prefix, module = (f"blk.{layer}.", inner) if inner else ("", layer)
        if fused and module == "attn.q_proj":
            three = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            theirs[f"{prefix}attn_qkv.{kind}"] = torch.cat(three)
        elif not (fused and module in ("attn.k_proj", "attn.v_proj")) and not (
            module == "lm_head" and config["tie_embeddings"]
        ):
            theirs[f"{prefix}{NAMES[module]}.{kind}"] = tensor
    return theirs


def write_config(writer: GGUFWriter, ckpt: Checkpoint, dtype: str) -> None:
    config, width = ckpt.config, hf.head_dim(ckpt.config)
    writer.add_name(ckpt.stage)
    writer.add_file_type(FILE_TYPES[dtype])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["block_size"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(ckpt.state_dict["blocks.0.mlp.up_proj.weight"].size(0))
    writer.add_head_count(config["n_head"])
    writer.add_head_count_kv(config["n_kv_head"])
    if config["position"] == "learned":
        writer.add_layer_norm_eps(config["norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_rope_dimension_count(width)
        writer.add_key_length(width)
        writer.add_value_length(width)


def write_tokenizer(writer: GGUFWriter, tok: Tokenizer, vocab_size: int) -> None:
    """The vocabulary as tokens, types and merges, padded to `vocab_size` with tokens marked unused."""
    raw = json.loads(tok.to_json())
    added = {token["content"]: token for token in raw["added_tokens"]}
    ids = raw["model"]["vocab"] | {token["content"]: token["id"] for token in raw["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    types = [
        TokenType.NORMAL if t not in added else TokenType.CONTROL if added[t]["special"] else TokenType.USER_DEFINED
        for t in tokens
    ]
    padding = vocab_size - len(tokens)
    merges = [m if isinstance(m, str) else " ".join(m) for m in raw["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_of(raw["pre_tokenizer"]))
    writer.add_token_list(tokens + [f"[PAD{len(tokens) + i}]" for i in range(padding)])
    writer.add_token_types(types + [TokenType.UNUSED] * padding)
    writer.add_token_merges(merges)
    # Without a beginning of their own, texts begin with the end of the one before; llama.cpp would take id 11.
    writer.add_bos_token_id(tok.eot_id if tok.bos is None else tok.control[tok.bos])
    writer.add_eos_token_id(tok.im_end_id)
    writer.add_pad_token_id(tok.eot_id)
    writer.add_add_bos_token(tok.adds_bos)
    writer.add_chat_template(tok.template)


def split_of(pre: Any) -> str:
    """The name that llama.cpp has for a pre-tokenizer, given as in tokenizer.json."""
    parts = pre["pretokenizers"] if pre and pre["type"] == "Sequence" else [pre]
    said = []
    for part in parts:
        kind = part["type"] if part else None
        if kind == "Digits" and part["individual_digits"]:
            said.append("each digit")
        elif kind == "ByteLevel" and not part["add_prefix_space"]:
            said.append("gpt2 words" if part["use_regex"] else "bytes")
        elif kind == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            said.append(part["pattern"].get("Regex") or part["pattern"]["String"])
        else:
            said.append(f"another {kind}")
    if said[0] == "\n":  # ours: as no merge holds a newline, the ids are the same without this part
        del said[0]
    name = next((name for name, split in SPLITS.items() if split == tuple(said)), None)
    if name is None:
        raise UserError(f"llama.cpp has no pre-tokenizer that does as this one ({', '.join(said)[:120]})")
    return name
