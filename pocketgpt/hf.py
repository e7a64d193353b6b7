"""The Hugging Face form of a model folder: our names and theirs, in both directions.

Covers Qwen3ForCausalLM, Qwen2ForCausalLM, LlamaForCausalLM and GPT2LMHeadModel, so that a folder opens in transformers, vLLM and
llama.cpp's converter with no code of ours. A model outside these shapes is saved under its own model_type.
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

# The switches of ours that make each of theirs.
ROPE_SHAPE = {"position": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "position": "learned",
        "norm": "layernorm",
        "mlp": "gelu",
        "qk_norm": False,
        "bias": True,
        "qkv_bias": False,
    },
    "llama": ROPE_SHAPE | {"qk_norm": False, "qkv_bias": False},
    "qwen2": ROPE_SHAPE | {"qk_norm": False, "qkv_bias": True},
    "qwen3": ROPE_SHAPE | {"qk_norm": True, "qkv_bias": False},
}
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# What they can switch and we cannot: written like this, and refused when it reads otherwise.
FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
}

# The same, but not written: what a model has that is more than a switch of its kind.
ABSENT: dict[str, Any] = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "add_cross_attention": False,
    "use_mrope": False,
    "no_rope_layers": None,
}

# Switches of ours that none of them has, as they are when they are off.
OWN: dict[str, Any] = {"value_residual": False, "x0_shortcut": False, "logit_softcap": 0.0}

# Their names of our modules.
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
    if any(config.get(key, off) != off for key, off in OWN.items()):
        return "pocketgpt"
    switches = {"qkv_bias": False} | config  # checkpoints of old do not have it
    kind = next((name for name, shape in SHAPES.items() if shape.items() <= switches.items()), "pocketgpt")
    if kind == "gpt2":
        plain_heads = (
            config["n_kv_head"] == config["n_head"] and config["n_embd"] == head_dim(config) * config["n_head"]
        )
        return kind if plain_heads and config["tie_embeddings"] else "pocketgpt"
    return kind


def foreign(config: dict[str, Any]) -> list[str]:
    """What keeps a config of ours from being one of theirs, as the keys of the command line: of the nearest one, for a config
    that is none of them; nothing for the others."""
    if architecture(config) != "pocketgpt":
        return []
    config = OWN | {"qkv_bias": False} | config
    others = min(([key for key, value in shape.items() if config[key] != value] for shape in SHAPES.values()), key=len)
    keys = others + [key for key, off in OWN.items() if config[key] != off]
    return [f"model.{key}={str(config[key]).lower()}" for key in keys] or ["the heads or the untied head of gpt2"]


def head_dim(config: dict[str, Any]) -> int:
    return config["head_dim"] or config["n_embd"] // config["n_head"]


def config_to_hf(config: dict[str, Any], stop_id: int | None = None) -> dict[str, Any]:
    """Our GPTConfig as a dict -> the contents of config.json."""
    kind = architecture(config)
    common = {
        "model_type": kind,
        "vocab_size": config["vocab_size"],
        "tie_word_embeddings": config["tie_embeddings"],
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": stop_id,
    }
    if kind == "pocketgpt":
        return common | config
    common |= FIXED[kind] | {"architectures": [CLASSES[kind]]}
    if kind == "gpt2":
        return common | {
            "n_positions": config["block_size"],
            "n_embd": config["n_embd"],
            "n_layer": config["n_layer"],
            "n_head": config["n_head"],
            "n_inner": config["n_inner"] or None,
            "layer_norm_epsilon": config["norm_eps"],
            "attn_pdrop": config["dropout"],
            "embd_pdrop": config["dropout"],
            "resid_pdrop": config["dropout"],
        }
    return common | {
        "max_position_embeddings": config["block_size"],
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": config["n_head"],
        "num_key_value_heads": config["n_kv_head"],
        "head_dim": head_dim(config),
        "intermediate_size": config["n_inner"] or math.ceil(config["n_embd"] * 8 / 3 / 64) * 64,
        "rms_norm_eps": config["norm_eps"],
        "rope_theta": config["rope_theta"],
        "attention_dropout": config["dropout"],
    }


def config_from_hf(raw: dict[str, Any], where: Path) -> dict[str, Any]:
    """config.json -> our GPTConfig as a dict, types unchecked.

    Raises:
        UserError: on an architecture or a feature that we do not have, or an entry that is missing.
    """
    kind = raw.get("model_type")
    if kind == "pocketgpt":
        theirs = ("model_type", "architectures", "tie_word_embeddings", "torch_dtype", "bos_token_id", "eos_token_id")
        return {key: value for key, value in raw.items() if key not in (*theirs, "pocketgpt")}
    if not isinstance(kind, str) or kind not in SHAPES:
        raise UserError(f"{where}: model_type {kind!r} is not supported; supported: {', '.join(SHAPES)}")
    for key, only in (FIXED[kind] | ABSENT).items():
        if raw.get(key) not in (None, only):
            raise UserError(f"{where}: {key}={raw[key]!r} is not supported for {kind}, only {only!r}")
    if isinstance(layers := raw.get("layer_types"), list) and (other := [x for x in layers if x != "full_attention"]):
        raise UserError(f"{where}: layer_types has {other[0]!r}, which is not supported, only 'full_attention'")
    try:
        if kind == "gpt2":
            return SHAPES[kind] | {
                "vocab_size": raw["vocab_size"],
                "block_size": raw["n_positions"],
                "n_layer": raw["n_layer"],
                "n_head": raw["n_head"],
                "n_kv_head": raw["n_head"],
                "n_embd": raw["n_embd"],
                "head_dim": 0,
                "n_inner": raw.get("n_inner") or 0,
                "tie_embeddings": True,
                "norm_eps": raw["layer_norm_epsilon"],
                "dropout": raw.get("resid_pdrop", 0.0),
            }
        return SHAPES[kind] | {
            "vocab_size": raw["vocab_size"],
            "block_size": raw["max_position_embeddings"],
            "n_layer": raw["num_hidden_layers"],
            "n_head": raw["num_attention_heads"],
            "n_kv_head": raw.get("num_key_value_heads") or raw["num_attention_heads"],
            "n_embd": raw["hidden_size"],
            "head_dim": raw.get("head_dim", 128 if kind == "qwen3" else 0) or 0,  # what their code takes for granted
            "n_inner": raw["intermediate_size"],
            "tie_embeddings": raw.get("tie_word_embeddings", False),
            "norm_eps": raw["rms_norm_eps"],
            "rope_theta": rope_theta(raw, where),
            "dropout": raw.get("attention_dropout", 0.0),
        }
    except KeyError as error:
        raise UserError(f"{where}: no entry {error} in it; it is not a complete {kind} config") from None


def rope_theta(raw: dict[str, Any], where: Path) -> Any:
    """The base of the rotary frequencies, which transformers 5 keeps among the rope_parameters and 4 beside them. Scaling may
    be asked for in either place, also by an entry that was added by hand to what transformers wrote."""
    theta = raw.get("rope_theta", 10_000.0)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError(f"{where}: rope scaling {rope} is not supported")
        more = [k for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta") and v not in (None, 1.0)]
        if more:
            raise UserError(f"{where}: {key} {more[0]}={rope[more[0]]} is not supported")
        theta = rope.get("rope_theta", theta)
    return theta


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
            theirs[to_gpt2(name)] = (tensor.T if is_conv1d(name, tensor) else tensor).clone().contiguous()
    return theirs


def weights_from_hf(kind: str, tied: bool, theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their state_dict -> ours, in float32, with a tied head put back. Names that we do not know stay as they are."""
    ours: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        tensor = tensor.float()
        if kind == "gpt2":
            name = name.removeprefix("transformer.")
            if re.fullmatch(r"h\.\d+\.attn\.(masked_)?bias", name):
                continue  # the causal mask, which old files carry along
            tensor = tensor.T.contiguous() if is_conv1d(name, tensor) else tensor
            name = name.replace("h.", "blocks.", 1)
            if ".attn.c_attn." in name:
                for part, piece in zip("qkv", tensor.tensor_split(3), strict=True):
                    ours[name.replace("c_attn", f"{part}_proj")] = piece.contiguous()
            else:
                ours[from_names(name, GPT2_NAMES)] = tensor
        else:
            ours[name if kind == "pocketgpt" else from_llama(name)] = tensor
    if tied and "embed.weight" in ours:
        ours["lm_head.weight"] = ours["embed.weight"]
    return ours


def is_conv1d(name: str, tensor: Tensor) -> bool:
    """Whether GPT-2 keeps this one, named either way, as (inputs, outputs): all matrices of its blocks."""
    return tensor.dim() == 2 and (".attn." in name or ".mlp." in name)


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


def module_name(kind: str, module: str) -> str:
    """Their name of a layer of our blocks; GPT-2 keeps queries, keys and values in one."""
    if kind == "pocketgpt":
        return module
    if kind != "gpt2":
        return to_llama(module)
    _, layer, rest = module.split(".", 2)
    rest = re.sub(r"attn\.[qkv]_proj", "attn.c_attn", rest)
    return f"transformer.h.{layer}.{GPT2_NAMES.get(rest, rest)}"


def from_names(name: str, names: dict[str, str]) -> str:
    """Their name -> ours, by the longest of their names that ends or fills it; itself when there is none."""
    for ours, theirs in sorted(names.items(), key=lambda pair: -len(pair[1])):
        match = re.fullmatch(rf"(|.*\.){re.escape(theirs)}(|\.weight|\.bias)", name)
        if match:
            return f"{match[1]}{ours}{match[2]}"
    return name


def save_folder(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    about: dict[str, Any],
    *,
    stop_id: int,
    pad_id: int,
    digest: str = "",
) -> None:
    """Write config.json, generation_config.json and model.safetensors (the tokenizer writes its own files).

    about: plain values on the run. The digest lies in the metadata of the weights, which other programs do not copy when they write the model anew.
    """
    path = folder / "model.safetensors"
    with atomic_path(path) as temporary:
        try:
            save_file(weights_to_hf(config, weights), temporary, metadata={"format": "pt", "digest": digest})
        except SafetensorError as error:
            raise UserError(f"cannot write {path}: {error}") from error
    write_json(folder / "config.json", config_to_hf(config, stop_id) | {"pocketgpt": about})
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": stop_id, "pad_token_id": pad_id, "do_sample": True, "temperature": 0.7, "top_p": 0.95},
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
        if (folder / "adapter_config.json").exists():
            raise UserError(f"{folder}: holds adapters alone: merge them into their model with peft first") from None
        raise UserError(f"{folder}: no config.json in it; it is not a model folder") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: not a JSON object")
    config = config_from_hf(raw, path)
    theirs: dict[str, Tensor] = {}
    for path in shards(folder):
        try:
            theirs |= load_file(path)
        except FileNotFoundError:
            if pickles := sorted(folder.glob("pytorch_model*.bin")):
                raise UserError(
                    f"{pickles[0]}: a pickle, which is not read: save the model as safetensors, as transformers does"
                ) from None
            raise UserError(f"{folder}: no {path.name} in it; the folder is incomplete") from None
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path}: not a readable safetensors file ({error})") from None
    about = raw.get("pocketgpt")
    weights = weights_from_hf(raw["model_type"], config.get("tie_embeddings", True), theirs)
    return config, weights, about if isinstance(about, dict) else {}


def shards(folder: Path) -> list[Path]:
    """The files that hold the weights: model.safetensors, or those that its index names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():
        return [folder / "model.safetensors"]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not a readable index of safetensors files ({error})") from None
    if not names or not all(isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name) for name in names):
        raise UserError(f"{index}: names files that are not safetensors beside it; refused")
    return [folder / name for name in sorted(names)]
