"""The network. This file is all of it: configuration, blocks, forward pass and the naive `generate`.

One class serves every shape we support. The default is the Qwen3 shape (RoPE, RMSNorm, SwiGLU, grouped-query
attention, QK-norm); the Llama and GPT-2 shapes are settings of the same switches. Training and inference share one
attention code path: `Attention` works on the keys and values it is handed, and does not know whether a cache kept them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as computed_again

from pocketgpt import checkpoint, fused, hf, kernels, sampling
from pocketgpt.errors import UserError
from pocketgpt.loss import capped

# What makes each of the world's shapes, apart from its size: the switches by which it is recognised, and its usual epsilon.
PRESETS: dict[str, dict[str, Any]] = {
    name: switches | {"norm_eps": 1e-5 if switches["norm"] == "layernorm" else 1e-6}
    for name, switches in hf.SHAPES.items()
}
SWITCHES = {
    "position": ("rope", "learned"),
    "norm": ("rmsnorm", "layernorm"),
    "mlp": ("swiglu", "relu2", "gelu"),
}

PLAIN_KEYS = 1024  # up to here the scores of all heads may stand in memory

# What selective gradient checkpointing keeps: matrix products and attention, which take nearly all of the time.
KEPT = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)

# Takes the new keys and values of one layer, (B, n_kv_head, T, head_dim) each, and returns all that are to be attended.
KeepKV = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Raises:
        UserError: if the sizes contradict each other, or a switch has an unknown value.
    """

    vocab_size: int = 4096  # ids
    block_size: int = 512  # tokens: the longest context
    n_layer: int = 6
    n_head: int = 4  # query heads
    n_kv_head: int = 2  # key/value heads, each shared by n_head / n_kv_head query heads (GQA, Ainslie et al. 2023)
    n_embd: int = 256
    head_dim: int = 0  # per head; 0: n_embd / n_head
    n_inner: int = 0  # hidden width of the MLP; 0: 4 n_embd, or 8/3 of it for SwiGLU (equal parameters), to 64
    position: str = "rope"
    norm: str = "rmsnorm"
    mlp: str = "swiglu"
    qk_norm: bool = True  # normalise queries and keys per head (Henry et al. 2020)
    bias: bool = False
    qkv_bias: bool = False  # biases on queries, keys and values alone, as Qwen2 has them
    tie_embeddings: bool = True
    dropout: float = 0.0  # probability
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    # What no other program has (docs/pretrain.md, model=fast).
    value_residual: bool = False  # values mixed with those of the first block (Zhou et al. 2024)
    x0_shortcut: bool = False  # the normalised embedding, mixed into the input of every block (modded-nanogpt)
    logit_softcap: float = 0.0  # logits are at most this, by tanh (Gemma 2, 2024); 0: any

    def __post_init__(self) -> None:
        for key in ("vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            most = 1000 if key == "n_layer" else 1 << 20  # beyond all models there are: a damaged or hostile file
            if not 1 <= getattr(self, key) <= most:
                raise UserError(f"model.{key} is {getattr(self, key)}: it must be at least 1 and at most {most:,}")
        for key, allowed in SWITCHES.items():
            if getattr(self, key) not in allowed:
                raise UserError(f"model.{key} is {getattr(self, key)!r}: choose one of {', '.join(allowed)}")
        if not self.head_dim and self.n_embd % self.n_head:
            raise UserError(f"model.n_embd={self.n_embd} is not divisible by model.n_head={self.n_head}: change one")
        if self.n_head % self.n_kv_head:
            raise UserError(
                f"model.n_head={self.n_head} is not divisible by model.n_kv_head={self.n_kv_head}: change one"
            )
        for key in ("head_dim", "n_inner"):
            if not 0 <= getattr(self, key) <= 1 << 20:
                raise UserError(f"model.{key} is {getattr(self, key)}: it must be 0 (chosen for you) or above")
        for key in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, key) < math.inf:
                raise UserError(f"model.{key} is {getattr(self, key)}: it must be above 0")
        if not 0 <= self.logit_softcap < math.inf:
            raise UserError(f"model.logit_softcap is {self.logit_softcap}: it must be 0 (none) or above")
        if self.bias and self.qkv_bias:
            raise UserError("model.qkv_bias is for models without model.bias, which covers it: set one of them")
        if not 0 <= self.dropout < 1:
            raise UserError(f"model.dropout is {self.dropout}: it must be in [0, 1)")
        if self.position == "rope" and self.width_of_head % 2:
            raise UserError(f"model.head_dim is {self.width_of_head}: rotary positions need an even number")

    @property
    def width_of_head(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def width_of_mlp(self) -> int:
        if self.n_inner:
            return self.n_inner
        return math.ceil(self.n_embd * 8 / 3 / 64) * 64 if self.mlp == "swiglu" else 4 * self.n_embd

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> GPTConfig:
        """From plain values. Raises UserError, naming `where`, on keys or types that are not ours."""
        known = {field.name: type(field.default) for field in cls.__dataclass_fields__.values()}
        for key, value in values.items():
            if key not in known:
                raise UserError(f"{where}: unknown model key {key!r}")
            right = isinstance(value, (int, float) if known[key] is float else known[key])
            if not right or (isinstance(value, bool) and known[key] is not bool):
                raise UserError(f"{where}: model.{key} is {value!r}, it must be a {known[key].__name__}")
        try:
            return cls(**values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


class RMSNorm(nn.RMSNorm):
    """Root mean square norm (Zhang & Sennrich 2019), computed in the type of its input."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        if fused.serves(x):
            return fused.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def make_norm(config: GPTConfig, width: int) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(width, eps=config.norm_eps, bias=config.bias)
    return RMSNorm(width, eps=config.norm_eps)


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding (Su et al. 2021), pairing dimension i with i + head_dim/2 as Llama's weights do.

    x: (B, heads, T, head_dim); rope: cosines and sines, (T, head_dim/2) or (B, 1, T, head_dim/2) each.
    """
    cos, sin = rope
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float = 0.0) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v: q (B, n_head, T, head_dim), k and v (B, n_kv_head, S, head_dim) -> as q.

    mask: see Attention.forward. Without one the queries are the newest tokens and see all before them, which needs no mask
    for a single query, and is a triangle when there are no other keys; everything in between must bring its mask, because
    the triangle of SDPA's `is_causal` is aligned to the upper left.
    """
    length, keys, groups = q.size(2), k.size(2), q.size(1) // k.size(1)
    assert mask is not None or length in (1, keys), "several queries after cached keys need a mask"
    if kernels.can_attend(q, k):
        return kernels.attend(q, k, v, mask)
    k, v = k.to(q.dtype), v.to(q.dtype)  # autocast or the cache may hold them in another type
    plain = length > 1 and keys <= PLAIN_KEYS and not dropout
    if plain and fused.serves(q) and q.dtype == fused.output_type(q):
        return fused.attention(q, k, v, mask)
    if plain and q.dtype == torch.bfloat16 and q.device.type == "cpu":
        # Two plain matrix products, with the queries that share a key head in one of them: the fused kernel took twice
        # as long on the processor of docs/LOG.md. It saves the memory of the scores, which is small here.
        if mask is None:
            mask = torch.ones(length, keys, dtype=torch.bool).tril()
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -math.inf).expand(*q.shape[:2], -1, -1)
        grouped = (q.size(0) * k.size(1), groups * length)
        scores = torch.baddbmm(
            bias.reshape(*grouped, keys), q.reshape(*grouped, -1), k.flatten(0, 1).mT, alpha=q.size(-1) ** -0.5
        )
        return (scores.softmax(-1) @ v.flatten(0, 1)).view(*q.shape)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None and length > 1, enable_gqa=groups > 1
    )


class Attention(nn.Module):
    """Grouped-query causal self-attention: the only one in this repository."""

    v_mix: nn.Parameter | None  # the shares of a block's own values and of the first block's

    def __init__(self, config: GPTConfig, first: bool = True) -> None:
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.width_of_head
        self.dropout = config.dropout
        qkv_bias = config.bias or config.qkv_bias
        self.q_proj = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(self.n_head * self.head_dim, config.n_embd, bias=config.bias)
        self.q_norm = make_norm(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = make_norm(config, self.head_dim) if config.qk_norm else nn.Identity()
        self.v_mix = nn.Parameter(torch.tensor([0.5, 0.5])) if config.value_residual and not first else None

    def project(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, (B, T, heads x head_dim) each; packed weights make them in one product."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def heads(self, x: Tensor, norm: nn.Module, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Queries or keys (B, T, heads x head_dim), normalised and rotated: (B, heads, T, head_dim)."""
        x = x.view(*x.shape[:2], -1, self.head_dim)
        if rope is not None and fused.serves(x) and not isinstance(norm, nn.LayerNorm):
            weight, eps = (norm.weight, norm.eps) if isinstance(norm, RMSNorm) else (None, 0.0)
            return fused.norm_rotate(x, weight, eps, rope).transpose(1, 2)
        x = norm(x).transpose(1, 2)
        return rotate(x, rope) if rope is not None else x

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        keep: KeepKV | None = None,
        v1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x: (B, T, n_embd) -> the same, and the new values, (B, n_kv_head, T, head_dim).

        mask: True where a query (row) may see a key (column); None: plain causal. v1: the new values of the first block, for
        `v_mix`. What is kept are the mixed values, so that the next tokens need nothing but keys and values.
        """
        batch, length, _ = x.shape
        q, k, v = self.project(x)
        q, k = self.heads(q, self.q_norm, rope), self.heads(k, self.k_norm, rope)
        v = v.view(batch, length, self.n_kv_head, self.head_dim).transpose(1, 2)
        if self.v_mix is not None:
            assert v1 is not None
            v = self.v_mix[0] * v + self.v_mix[1] * v1
        new_v = v
        if keep is not None:
            k, v = keep(k, v)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1)), new_v


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020), squared ReLU (So et al. 2021) or GELU (tanh form, as in GPT-2)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        self.up_proj = nn.Linear(config.n_embd, config.width_of_mlp, bias=config.bias)
        if self.kind == "swiglu":
            self.gate_proj = nn.Linear(config.n_embd, config.width_of_mlp, bias=config.bias)
        self.down_proj = nn.Linear(config.width_of_mlp, config.n_embd, bias=config.bias)

    def gate_and_up(self, x: Tensor) -> Sequence[Tensor]:
        """Both inputs of SwiGLU's product, (B, T, width_of_mlp) each; packed weights make them in one product."""
        return self.gate_proj(x), self.up_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "swiglu":
            gate, up = self.gate_and_up(x)
            return self.down_proj(fused.swiglu(gate, up) if fused.serves(gate) else F.silu(gate) * up)
        if self.kind == "relu2":
            return self.down_proj(F.relu(self.up_proj(x)).square())
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


class Block(nn.Module):
    """Pre-norm transformer block."""

    x_mix: nn.Parameter | None  # the shares of the residual stream and of x0 in the block's input

    def __init__(self, config: GPTConfig, first: bool = True) -> None:
        super().__init__()
        self.x_mix = nn.Parameter(torch.tensor([1.0, 0.0])) if config.x0_shortcut else None
        self.attn_norm = make_norm(config, config.n_embd)
        self.attn = Attention(config, first)
        self.mlp_norm = make_norm(config, config.n_embd)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        keep: KeepKV | None = None,
        x0: Tensor | None = None,
        v1: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x and x0 (B, T, n_embd) -> the next x, and the values of the new tokens; v1: those of the first block."""
        if self.x_mix is not None:
            assert x0 is not None
            x = self.x_mix[0] * x + self.x_mix[1] * x0
        y, new_v = self.attn(self.attn_norm(x), rope, mask, keep, v1)
        x = x + self.drop(y)
        return x + self.drop(self.mlp(self.mlp_norm(x))), new_v


class Head(nn.Linear):
    """The linear layer that makes logits, softly capped where the configuration says so: (..., n_embd) -> (..., vocab_size)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config.n_embd, config.vocab_size, bias=False)
        self.softcap = config.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        return capped(super().forward(x), self.softcap)


class GPT(nn.Module):
    """A decoder-only transformer language model."""

    cos: Tensor
    sin: Tensor
    # Gradient checkpointing (Chen et al. 2016) in training. True: keep only the input of every block; "selective": keep the
    # results of matrix products and attention as well (Korthikanti et al. 2022 choose what to keep by its cost, too).
    recompute: bool | str = False

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        # Ids that may be sampled. Smaller than vocab_size when an imported model pads its vocabulary.
        self.n_tokens = config.vocab_size
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        if config.position == "learned":
            self.position = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, first=layer == 0) for layer in range(config.n_layer))
        self.norm = make_norm(config, config.n_embd)
        self.lm_head = Head(config)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed.weight
        if config.position == "rope":
            half = config.width_of_head // 2
            frequency = config.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
            angle = torch.outer(torch.arange(config.block_size, dtype=torch.float32), frequency)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal with deviation 0.02, and zero for the projections that write into the residual stream, so that every
        block starts as the identity (Zhang et al. 2019, "Fixup")."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.dim() == 2:
                parameter.normal_(0.0, 0.02)
            elif name.endswith("bias"):
                parameter.zero_()

    def hidden_states(
        self,
        idx: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        keep: Sequence[KeepKV] | None = None,
    ) -> Tensor:
        """What the head reads: ids (B, T) int64 -> (B, T, n_embd).

        positions: (T,) or (B, T) int64, 0..T-1 by default. mask: bool, broadcastable to (B, heads, T, keys), True where
        a query may see a key; causal by default. keep: per layer, what hands over the keys and values (see kv_cache.py).
        """
        if positions is None:
            if idx.size(1) > self.config.block_size:
                raise ValueError(f"{idx.size(1)} tokens do not fit into block_size {self.config.block_size}")
            positions = torch.arange(idx.size(1), device=idx.device)
        x = self.embed(idx)
        rope = None
        if self.config.position == "learned":
            x = x + self.position(positions)
        else:
            rope = (self.cos[positions], self.sin[positions])
            if positions.dim() == 2:
                rope = (rope[0].unsqueeze(1), rope[1].unsqueeze(1))
        x = self.drop(x)
        x0 = v1 = None
        if self.config.x0_shortcut:
            x = x0 = F.rms_norm(x, (x.size(-1),), eps=self.config.norm_eps)
        for layer, block in enumerate(self.blocks):
            inputs = (x, rope, mask, keep[layer] if keep is not None else None, x0, v1)
            if not (self.recompute and torch.is_grad_enabled()):
                x, v = block(*inputs)
            elif self.recompute == "selective":
                kept = partial(create_selective_checkpoint_contexts, keep_products)
                x, v = computed_again(block, *inputs, use_reentrant=False, context_fn=kept)
            else:
                x, v = computed_again(block, *inputs, use_reentrant=False)
            if self.config.value_residual and layer == 0:
                v1 = v
        return self.norm(x)

    def forward(self, idx: Tensor) -> Any:  # a subclass returns its cache as well
        """Token ids (B, T) int64 -> logits (B, T, vocab_size), for the token after each."""
        return self.lm_head(self.hidden_states(idx))

    @torch.inference_mode()
    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        stop_ids: Sequence[int] = (),
        pad_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row of idx (B, T) by up to max_new_tokens; returns (B, T + new).

        Deliberately naive: the whole context runs again for every token, which makes this the oracle that the cache is
        compared with. temperature 0 is argmax. A row that has produced one of stop_ids goes on with pad_id; generation
        ends when all have. Past block_size the context is cut by `sampling.window_start`. The global RNG is not used.
        """
        settings = sampling.Settings(temperature, top_k, top_p, min_p, repetition_penalty)
        return sampling.generate(
            lambda ids, start: self.last_logits(ids[:, start:]),
            idx,
            max_new_tokens,
            settings,
            block_size=self.config.block_size,
            n_tokens=self.n_tokens,
            stop_ids=stop_ids,
            pad_id=pad_id,
            generator=generator,
        )

    def last_logits(self, idx: Tensor) -> Tensor:
        """ids (B, T) -> logits after the last of them, (B, vocab_size), without a cache."""
        return self.lm_head(self.hidden_states(idx)[:, -1])

    @classmethod
    def from_checkpoint(cls, path: str | Path, device: str | torch.device = "cpu") -> Self:
        """Load `ckpt_<stage>.pt` or a Hugging Face style folder, ready for inference (eval mode, float32).

        Raises UserError, naming the file, when it is missing, damaged, or contradicts itself.
        """
        return cls.from_loaded(checkpoint.load(path), device)

    @classmethod
    def from_loaded(cls, loaded: checkpoint.Checkpoint, device: str | torch.device = "cpu") -> Self:
        """The model of a checkpoint that has been read already."""
        config = GPTConfig.from_dict(loaded.config, where=str(loaded.path))
        with torch.device("meta"):  # no memory before the sizes are known to be true
            expected = {name: tuple(tensor.shape) for name, tensor in cls(config).state_dict().items()}
        checkpoint.verify_weights(loaded, expected, config.vocab_size)
        model = cls(config)
        model.load_state_dict(loaded.state_dict)
        model.n_tokens = loaded.tokenizer.vocab_size
        return model.to(device).eval()

    def n_parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self, length: int, supervised: float = 1.0) -> float:
        """Floating-point operations to train on one token in a context of `length`, forward and backward.

        Six per matrix weight that a token meets (Kaplan et al. 2020), plus attention, which sees half of the context on
        average: two products of 2 x length/2 x n_head x head_dim, three times over for forward and backward. The head
        runs on the supervised share of the tokens only. A frozen weight has no gradient of its own, and costs four.
        """
        c = self.config
        matrices = [(p, 1.0) for p in self.blocks.parameters() if p.dim() == 2] + [(self.lm_head.weight, supervised)]
        weights = sum((6.0 if p.requires_grad else 4.0) * share * p.numel() for p, share in matrices)
        return weights + 6.0 * c.n_layer * c.n_head * c.width_of_head * length
