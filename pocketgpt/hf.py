"""The Hugging Face form of a model folder: our names and theirs, in both directions.

Covers Qwen3ForCausalLM, LlamaForCausalLM and GPT2LMHeadModel, so that a folder opens in transformers, vLLM and
llama.cpp's converter with no code of ours. A model outside these three shapes is saved under its own model_type.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, write_json

LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attn": "self_attn",
}
GPT2_NAMES = {
    "embed": "wte",
    "position": "wpe",
    "norm": "ln_f",
    "attn_norm": "ln_1",
    "attn.o_proj": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def architecture(config: dict[str, Any]) -> str:
    """Which of theirs a config of ours is: qwen3, llama, gpt2, or pocketgpt when it is none of them."""
    shape = (config["position"], config["norm"], config["mlp"], config["bias"])
    if shape == ("rope", "rmsnorm", "swiglu", False):
        return "qwen3" if config["qk_norm"] else "llama"
    mha = config["n_kv_head"] == config["n_head"] and not config["head_dim"]
    if shape == ("learned", "layernorm", "gelu", True) and mha and config["tie_embeddings"] and not config["qk_norm"]:
        return "gpt2"
    return "pocketgpt"


def config_to_hf(config: dict[str, Any], stop_id: int | None = None) -> dict[str, Any]:
    """Our GPTConfig as a dict -> the contents of config.json."""
    kind = architecture(config)
    head_dim = config["head_dim"] or config["n_embd"] // config["n_head"]
    common = {
        "model_type": kind,
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": config["tie_embeddings"],
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": stop_id,
    }
    if kind == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": config["block_size"],
            "n_embd": config["n_embd"],
            "n_layer": config["n_layer"],
            "n_head": config["n_head"],
            "n_inner": config["n_inner"] or None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config["norm_eps"],
            "attn_pdrop": config["dropout"],
            "embd_pdrop": config["dropout"],
            "resid_pdrop": config["dropout"],
        }
    if kind in ("llama", "qwen3"):
        inner = config["n_inner"] or math.ceil(config["n_embd"] * 8 / 3 / 64) * 64
        return common | {
            "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[kind]],
            "max_position_embeddings": config["block_size"],
            "hidden_size": config["n_embd"],
            "num_hidden_layers": config["n_layer"],
            "num_attention_heads": config["n_head"],
            "num_key_value_heads": config["n_kv_head"],
            "head_dim": head_dim,
            "intermediate_size": inner,
            "hidden_act": "silu",
            "rms_norm_eps": config["norm_eps"],
            "rope_theta": config["rope_theta"],
            "attention_bias": False,
            "mlp_bias": False,
        }
    return common | config


def config_from_hf(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """config.json -> our GPTConfig as a dict. Raises UserError on an architecture or a feature that we do not have."""
    kind = raw.get("model_type")
    try:
        if kind == "gpt2":
            if raw.get("activation_function", "gelu_new") != "gelu_new":
                raise UserError(f"{where}: activation {raw['activation_function']!r} is not supported for gpt2")
            return {
                "vocab_size": raw["vocab_size"],
                "block_size": raw["n_positions"],
                "n_layer": raw["n_layer"],
                "n_head": raw["n_head"],
                "n_kv_head": raw["n_head"],
                "n_embd": raw["n_embd"],
                "n_inner": raw.get("n_inner") or 0,
                "position": "learned",
                "norm": "layernorm",
                "mlp": "gelu",
                "qk_norm": False,
                "bias": True,
                "tie_embeddings": True,
                "norm_eps": raw["layer_norm_epsilon"],
            }
        if kind in ("llama", "qwen3"):
            scaling = raw.get("rope_scaling") or {}
            if scaling.get("rope_type", scaling.get("type", "default")) != "default":
                raise UserError(f"{where}: rope scaling {scaling} is not supported")
            for feature in ("use_sliding_window", "attention_bias", "mlp_bias"):
                if raw.get(feature):
                    raise UserError(f"{where}: {feature} is not supported")
            theta = raw.get("rope_theta") or (raw.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
            head_dim = raw.get("head_dim") or 0
            return {
                "vocab_size": raw["vocab_size"],
                "block_size": raw["max_position_embeddings"],
                "n_layer": raw["num_hidden_layers"],
                "n_head": raw["num_attention_heads"],
                "n_kv_head": raw.get("num_key_value_heads") or raw["num_attention_heads"],
                "n_embd": raw["hidden_size"],
                "head_dim": 0 if head_dim * raw["num_attention_heads"] == raw["hidden_size"] else head_dim,
                "n_inner": raw["intermediate_size"],
                "position": "rope",
                "norm": "rmsnorm",
                "mlp": "swiglu",
                "qk_norm": kind == "qwen3",
                "bias": False,
                "tie_embeddings": raw.get("tie_word_embeddings", False),
                "norm_eps": raw["rms_norm_eps"],
                "rope_theta": float(theta),
            }
    except KeyError as error:
        raise UserError(f"{where}: no entry {error} in it; it is not a complete {kind} config") from None
    if kind == "pocketgpt":
        theirs = ("model_type", "architectures", "tie_word_embeddings", "torch_dtype", "bos_token_id", "eos_token_id")
        return {key: value for key, value in raw.items() if key not in (*theirs, "pocketgpt")}
    raise UserError(f"{where}: model_type {kind!r} is not supported; supported: qwen3, llama, gpt2")


def weights_to_hf(config: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our state_dict -> theirs, as copies that share no memory. A tied head is left out, as theirs do."""
    kind = architecture(config)
    tied = config["tie_embeddings"]
    named = {name: tensor for name, tensor in weights.items() if not (tied and name == "lm_head.weight")}
    if kind == "pocketgpt":
        return {name: tensor.clone().contiguous() for name, tensor in named.items()}
    if kind != "gpt2":
        return {to_llama(name): tensor.clone().contiguous() for name, tensor in named.items()}
    theirs = {}
    for name, tensor in named.items():
        if ".q_proj." in name:  # GPT-2 keeps the three projections in one matrix, transposed
            three = [named[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            joined = torch.cat(three, dim=0)
            new = "transformer." + name.replace("blocks.", "h.").replace("attn.q_proj", "attn.c_attn")
            theirs[new] = joined.T.contiguous() if joined.dim() == 2 else joined
        elif ".k_proj." not in name and ".v_proj." not in name:
            transpose = (tensor.dim() == 2 and ".attn." in name) or (".mlp." in name and tensor.dim() == 2)
            theirs[to_gpt2(name)] = (tensor.T if transpose else tensor).clone().contiguous()
    return theirs


def weights_from_hf(config: dict[str, Any], theirs: dict[str, Tensor], where: Path) -> dict[str, Tensor]:
    """Their state_dict -> ours, in float32, with a tied head put back."""
    kind = architecture(config)
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        tensor = tensor.float()
        if kind == "gpt2":
            name = name.removeprefix("transformer.")
            if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
                continue  # the causal mask, which old files carry along
            if ".attn.c_attn." in name:
                parts = (tensor.T if tensor.dim() == 2 else tensor).chunk(3, dim=0)
                for part, piece in zip("qkv", parts, strict=True):
                    ours[name.replace("h.", "blocks.", 1).replace("c_attn", f"{part}_proj")] = piece.contiguous()
                continue
            transpose = tensor.dim() == 2 and (".attn." in name or ".mlp." in name)
            ours[from_names(name.replace("h.", "blocks.", 1), GPT2_NAMES)] = (
                tensor.T.contiguous() if transpose else tensor
            )
        elif kind == "pocketgpt":
            ours[name] = tensor
        else:
            ours[from_llama(name)] = tensor
    if config["tie_embeddings"] and "embed.weight" in ours:
        ours["lm_head.weight"] = ours["embed.weight"]
    return ours


def to_llama(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blocks":
        return ".".join(["model", "layers", parts[1], LLAMA_NAMES.get(parts[2], parts[2]), *parts[3:]])
    return ".".join([LLAMA_NAMES[parts[0]], *parts[1:]])


def from_llama(name: str) -> str:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if match:
        layer, module, rest = match.groups()
        return f"blocks.{layer}.{from_names(module, LLAMA_NAMES)}.{rest}"
    return from_names(name, LLAMA_NAMES)


def to_gpt2(name: str) -> str:
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    if match:
        layer, module, kind = match.groups()
        return f"transformer.h.{layer}.{GPT2_NAMES[module]}.{kind}"
    module, kind = name.rsplit(".", 1)
    return f"transformer.{GPT2_NAMES[module]}.{kind}"


def from_names(name: str, names: dict[str, str]) -> str:
    """Their name -> ours, by the longest of their names that ends or fills it; itself when there is none."""
    for ours, theirs in sorted(names.items(), key=lambda pair: -len(pair[1])):
        match = re.fullmatch(rf"(|.*\.){re.escape(theirs)}(|\.weight|\.bias)", name)
        if match:
            return f"{match[1]}{ours}{match[2]}"
    return name


def save_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], *, stage: str, step: int, stop_id: int
) -> None:
    """Write config.json, generation_config.json and model.safetensors (the tokenizer writes its own files)."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "model.safetensors") as temporary:
        save_file(weights_to_hf(config, weights), temporary, metadata={"format": "pt"})
    write_json(folder / "config.json", config_to_hf(config, stop_id) | {"pocketgpt": {"stage": stage, "step": step}})
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": stop_id, "pad_token_id": 0, "do_sample": True, "temperature": 0.7, "top_p": 0.95},
    )


def load_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """Read a folder: our config, our weights, and what we noted about the run (empty for a foreign folder).

    Raises:
        UserError: naming the file that is missing, unreadable or unsupported.
    """
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no config.json in it; it is not a model folder") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    config = config_from_hf(raw, path)
    path = folder / "model.safetensors"
    try:
        theirs = load_file(path)
    except FileNotFoundError:
        raise UserError(f"{folder}: no model.safetensors in it; the folder is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    defaults = {"head_dim": 0, "n_inner": 0, "dropout": 0.0, "rope_theta": 10_000.0}
    config = defaults | config
    about = raw.get("pocketgpt")
    return config, weights_from_hf(config, theirs, path), about if isinstance(about, dict) else {}
