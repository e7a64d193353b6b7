"""What vLLM's loader reads of a saved folder is there, for every preset; docs/serving.md says no other numbers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import randomise
from safetensors import safe_open

import pretrain
from base_model import GPT, GPTConfig
from pocketgpt import checkpoint, config
from pocketgpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
# but for the one whose sizes are chosen by measurement, and the one that no other program opens
PRESETS = sorted({path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")} - {"auto", "fast"})
# vLLM's names of the models that it has code of its own for, among them all that our shapes are
CLASSES = {"GPT2LMHeadModel", "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}


def preset(name: str) -> dict[str, Any]:
    return config.load("pretrain", pretrain.Config, [f"model={name}"]).model


@pytest.mark.parametrize("name", PRESETS)
def test_a_folder_holds_all_that_vllm_reads(name: str, tmp_path: Path, tok: Tokenizer) -> None:
    """The preset's switches and heads, in few and narrow layers."""
    shape = preset(name)
    small = {"vocab_size": tok.vocab_size, "block_size": 64, "n_layer": 2, "n_inner": 48}
    small |= {"n_embd": 8 * shape["n_head"], "head_dim": 8}
    model = randomise(GPT(GPTConfig.from_dict(shape | small)))
    checkpoint.save(tmp_path, checkpoint.Checkpoint("dpo", model.config.to_dict(), model.state_dict(), tok))
    folder = tmp_path / "dpo"

    raw = json.loads((folder / "config.json").read_text())
    (architecture,) = raw["architectures"]
    assert architecture in CLASSES and raw["torch_dtype"] == "float32"
    read = transformers.AutoConfig.from_pretrained(folder)  # vLLM reads it by this as well, and without code of ours
    heads = (read.num_attention_heads, getattr(read, "num_key_value_heads", read.num_attention_heads))
    assert heads == (shape["n_head"], shape["n_kv_head"])
    assert (read.num_hidden_layers, read.max_position_embeddings, read.vocab_size) == (2, 64, tok.vocab_size)
    assert read.hidden_size == 8 * shape["n_head"] and getattr(read, "head_dim", 8) == 8

    # Weights: one file without an index, and in it every name that the class has, in its shape and in no other type.
    assert [path.name for path in folder.glob("*.safetensors*")] == ["model.safetensors"]
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(read)
    assert type(theirs).__name__ == architecture
    wanted = {name: tuple(parameter.shape) for name, parameter in theirs.named_parameters()}  # tied ones once
    with safe_open(folder / "model.safetensors", "pt") as file:
        found = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        assert {file.get_slice(key).get_dtype() for key in found} == {"F32"}
    assert found == wanted

    # Tokenizer, template, and where an answer ends.
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.is_fast and len(tokenizer) <= read.vocab_size
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == tok.template
    messages = [{"role": "user", "content": "hello"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    defaults = transformers.GenerationConfig.from_pretrained(folder)
    assert defaults.eos_token_id == tok.im_end_id and (defaults.temperature, defaults.top_p) == (0.7, 0.95)


def test_the_table_of_gpus() -> None:
    """vLLM gives every GPU as many heads and as much of the MLP; keys and values are divided evenly or copied evenly."""
    page = (ROOT / "docs" / "serving.md").read_text()
    rows = re.findall(r"^\| `(\d+[mb])` \| (.+) \| (.+) \| (.+) \|$", page, re.M)
    assert [name for name, *_ in rows] == ["10m", "30m", "100m", "350m", "1b", "3b", "7b"]
    for name, heads, widths, sizes in rows:
        shape = preset(name)
        query, kv, inner = shape["n_head"], shape["n_kv_head"], shape["n_inner"]
        assert (heads, widths) == (f"{query} / {kv}", f"{inner:,}")
        possible = [n for n in range(1, 17) if query % n == inner % n == 0 and (kv % n == 0 or n % kv == 0)]
        assert [int(size) for size in re.findall(r"\d+", sizes)] == possible, name
