"""Small models with weights that show everything, for tests that need one."""

import json
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from base_model import GPT, PRESETS, GPTConfig
from kv_cache import CachedGPT
from pocketgpt import checkpoint
from pocketgpt.tokenizer import Tokenizer

Model = TypeVar("Model", bound=GPT)

VOCAB, BLOCK = 97, 32

# Every architecture switch at least once, each with what it is most likely to disturb.
SHAPES = {
    "qwen3": {},
    "qwen3 gqa": {"n_head": 4, "n_kv_head": 2},
    "qwen3 mqa, wide heads": {"n_head": 4, "n_kv_head": 1, "head_dim": 12},
    "llama gqa": PRESETS["llama"] | {"n_head": 4, "n_kv_head": 2},
    "llama untied": PRESETS["llama"] | {"tie_embeddings": False},
    "qwen2": PRESETS["qwen2"] | {"n_head": 4, "n_kv_head": 2},
    "gpt2": PRESETS["gpt2"],
    "gpt2 gqa": PRESETS["gpt2"] | {"n_head": 4, "n_kv_head": 2},
    "gpt2 qk_norm": PRESETS["gpt2"] | {"qk_norm": True},
    "relu2": {"mlp": "relu2"},
    "rope layernorm gelu": {"norm": "layernorm", "mlp": "gelu", "rope_theta": 500.0},
    "learned rmsnorm swiglu": {"position": "learned", "n_inner": 48},
    "rope with biases": {"bias": True, "n_head": 4, "n_kv_head": 2},
    "value residual": {"value_residual": True, "n_layer": 3, "n_head": 4, "n_kv_head": 2},
    "x0 shortcut": {"x0_shortcut": True, "position": "learned", "norm": "layernorm"},
    "softcap": {"logit_softcap": 2.0},
    "fast": {
        "mlp": "relu2",
        "value_residual": True,
        "x0_shortcut": True,
        "logit_softcap": 15.0,
        "tie_embeddings": False,
    },
}


def tiny_config(**changes: object) -> GPTConfig:
    sizes = {"vocab_size": VOCAB, "block_size": BLOCK, "n_layer": 2, "n_head": 2, "n_kv_head": 2, "n_embd": 32}
    return GPTConfig.from_dict(sizes | changes)


def randomise(model: Model, seed: int = 0) -> Model:
    """Draw all parameters anew. A fresh model's blocks are the identity, so no fault of attention would show in it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, 0.2, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.eval()


def tiny(seed: int = 0, **changes: object) -> GPT:
    """Vocabulary 97, block 32, 2 layers, 2 heads, 32 dims, dropout 0, eval mode, float32."""
    return randomise(GPT(tiny_config(**changes)), seed)


def cached(model: GPT) -> CachedGPT:
    """The cached class with the weights of a plain model, loaded by name, as from a checkpoint."""
    twin = CachedGPT(model.config).to(model.embed.weight.dtype)
    twin.load_state_dict(model.state_dict())
    twin.n_tokens = model.n_tokens
    return twin.eval()


def random_ids(*shape: int, seed: int = 0, high: int = VOCAB) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def max_diff(a: Tensor, b: Tensor) -> float:
    """The largest difference. NaN anywhere is a NaN, which no bound lets through."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return (a.double() - b.double()).abs().max().item()


def work_folder(folder: Path, tok: Tokenizer) -> Path:
    """Write a checkpoint with weights that show everything, and texts, conversations and pairs of very different lengths."""
    model = randomise(GPT(tiny_config(vocab_size=tok.vocab_size, block_size=160)))
    checkpoint.save(folder, checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok))
    words = "the gulls talked about the sea and the bread".split()
    texts = [" ".join((words * 4)[: 1 + n * n % 29]) for n in range(16)]
    (folder / "pretrain.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts * 4))
    chats = [{"prompt": "Say it.", "completion": text} for text in texts]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, chats)))
    pairs = [{"prompt": "Say it.", "chosen": a, "rejected": f"{b}."} for a, b in zip(texts, texts[::-1], strict=True)]
    (folder / "dpo.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return folder
