"""The switches of model=fast, each alone and together: what they compute, what they cost, and where they stay."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, VOCAB, cached, max_diff, random_ids, randomise, tiny, tiny_config
from torch import Tensor

import plan as script
import pretrain
from base_model import GPT, GPTConfig
from kv_cache import CachedGPT, DynamicCache
from pocketgpt import checkpoint, config, gguf_file, hf, loss
from pocketgpt.errors import UserError
from pocketgpt.loss import IGNORE, linear_cross_entropy, linear_log_probs
from pocketgpt.optim import OptimConfig, Optimizer, parameter_groups
from pocketgpt.tokenizer import Tokenizer

ADAMW = OptimConfig("adamw", 0.9, 0.95, 1e-8, 0.1, 0.0, 0.0)
OURS = ["value residual", "x0 shortcut", "softcap", "fast"]
KEYS = {"value_residual": True, "x0_shortcut": True, "logit_softcap": 15.0}


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.no_grad()
def test_the_forward_pass_is_what_the_formulas_say() -> None:
    """All switches at once, every step written out."""
    model: Any = tiny(n_layer=3, **SHAPES["fast"] | {"logit_softcap": 1.5})
    ids = random_ids(1, 7)
    x0 = norm(model.embed.weight[ids[0]])
    x, first = x0, None
    for layer, block in enumerate(model.blocks):
        x = block.x_mix[0] * x + block.x_mix[1] * x0
        a = norm(x) * block.attn_norm.weight
        q, k, v = (part(a).view(7, 2, 16) for part in (block.attn.q_proj, block.attn.k_proj, block.attn.v_proj))
        q, k = norm(q) * block.attn.q_norm.weight, norm(k) * block.attn.k_norm.weight
        cos, sin = model.cos[:7, None], model.sin[:7, None]
        q, k = (
            torch.cat((t[..., :8] * cos - t[..., 8:] * sin, t[..., 8:] * cos + t[..., :8] * sin), -1) for t in (q, k)
        )
        first = v if layer == 0 else first
        v = v if layer == 0 else block.attn.v_mix[0] * v + block.attn.v_mix[1] * first
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        weights = scores.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -1e30).softmax(-1)
        x = x + block.attn.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(7, 32))
        up = block.mlp.up_proj(norm(x) * block.mlp_norm.weight)
        x = x + block.mlp.down_proj(up.clamp_min(0) ** 2)
    logits = (norm(x) * model.norm.weight) @ model.lm_head.weight.T
    assert logits.abs().max() > 1.5 >= model(ids).abs().max()
    assert max_diff(model(ids)[0], 1.5 * torch.tanh(logits / 1.5)) < 1e-5
    assert max_diff(model.last_logits(ids), model(ids)[:, -1]) < 1e-6


@torch.no_grad()
def test_every_switch_changes_the_logits_and_no_other_weights() -> None:
    plain = tiny()
    for key, value in KEYS.items():
        other = GPT(tiny_config(**{key: value}))
        own = other.state_dict()
        extra = own.keys() - plain.state_dict().keys()
        assert all(own[name].shape == (2,) for name in extra)
        assert len(extra) == {"value_residual": 1, "x0_shortcut": 2, "logit_softcap": 0}[key]
        other.load_state_dict(plain.state_dict(), strict=False)
        for name in extra:
            own[name].fill_(0.7)
        assert max_diff(other.eval()(random_ids(1, 9)), plain(random_ids(1, 9))) > 1e-3, key
        assert other.n_parameters() == plain.n_parameters() + 2 * len(extra)
        assert other.flops_per_token(32) == plain.flops_per_token(32)


@torch.no_grad()
def test_what_is_cached_are_the_mixed_values() -> None:
    model: Any = cached(tiny(**SHAPES["value residual"]))
    cache, seen = DynamicCache(model.config), []
    hook = model.blocks[0].attn.v_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    other = model.blocks[2].attn.v_proj.register_forward_hook(lambda _m, _i, out: seen.append(out))
    model.extend(random_ids(1, 6), cache)
    hook.remove(), other.remove()
    mix = model.blocks[2].attn.v_mix
    expected = (mix[0] * seen[1] + mix[1] * seen[0]).view(1, 6, 2, 8).transpose(1, 2)
    assert max_diff(cache.v[2], expected) < 1e-6


@pytest.mark.parametrize("chunk", [3, 256])
def test_loss_and_gradients_with_a_cap_are_those_of_autograd(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss.CHUNK, "cpu", chunk)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 16, generator=generator, dtype=torch.float32, requires_grad=True)
    weight = torch.randn(VOCAB, 16, generator=generator, requires_grad=True)
    targets = random_ids(2, 9)
    targets[0, 2:5] = IGNORE
    logits = 3.0 * torch.tanh(hidden @ weight.T / 3.0)
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    total = linear_cross_entropy(hidden, weight, targets, torch.float32, 3.0)
    assert total.item() == pytest.approx(plain.item(), rel=1e-5)
    expected = torch.autograd.grad(plain * 0.37, (hidden, weight))
    for got, wanted in zip(torch.autograd.grad(total * 0.37, (hidden, weight)), expected, strict=True):
        assert max_diff(got, wanted) < 1e-5 * max(1.0, wanted.abs().max().item())
    flat, wanted_ids = hidden.flatten(0, 1), random_ids(18)
    each = linear_log_probs(flat, weight, wanted_ids, torch.float32, 3.0)
    by_hand = (3.0 * torch.tanh(flat @ weight.T / 3.0)).log_softmax(-1).gather(-1, wanted_ids[:, None])[:, 0]
    assert max_diff(each, by_hand) < 1e-5
    a, b = (torch.autograd.grad(part.sum(), hidden, retain_graph=True)[0] for part in (each, by_hand))
    assert max_diff(a, b) < 1e-5


def test_no_caller_of_the_losses_forgets_the_cap() -> None:
    """Whoever hands over the head's weight hands over its cap."""
    found = 0
    root = config.ROOT
    for path in [*root.glob("*.py"), *root.glob("pocketgpt/*.py"), *root.glob("bench/*.py")]:
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"(?:linear_cross_entropy|linear_log_probs|LinearCrossEntropy\.apply)\(", text):
            call = text[match.end() : match.end() + 160]
            if "lm_head.weight" in call.split(")\n")[0]:
                found += 1
                assert "lm_head.softcap" in call, f"{path}: {call[:80]}"
    assert found == 10


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_gradients_reach_every_scalar_and_recomputing_gives_the_same_bits(recompute: bool | str) -> None:
    model: Any = tiny(n_layer=3, **SHAPES["fast"]).train()
    ids, grads = random_ids(2, 12), []
    for kind in (False, recompute):
        model.recompute = kind
        model.zero_grad()
        linear_cross_entropy(model.hidden_states(ids), model.lm_head.weight, ids, torch.float32, 15.0).backward()
        grads.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert sum("_mix" in name for name in grads[0]) == 5
    assert all(bool((grad != 0).any()) for grad in grads[0].values())
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_scalars_are_vectors_which_do_not_decay() -> None:
    model: Any = tiny(**SHAPES["fast"])
    scalars = {name: p for name, p in model.named_parameters() if name.endswith("_mix")}
    assert len(scalars) == 3
    vectors = {id(p) for p in parameter_groups(model)[2]}
    assert all(id(p) in vectors for p in scalars.values())
    before = [p.detach().clone() for p in scalars.values()]
    stepper = Optimizer(model, ADAMW, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepper.step(1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, scalars.values(), strict=True))


def test_a_fresh_model_starts_as_the_plain_one_would() -> None:
    model: Any = GPT(tiny_config(**SHAPES["fast"]))
    assert model.blocks[1].x_mix.tolist() == [1.0, 0.0] and model.blocks[1].attn.v_mix.tolist() == [0.5, 0.5]
    assert model.blocks[0].attn.v_mix is None  # its own values are the first ones
    with torch.no_grad():
        hidden = model.hidden_states(random_ids(1, 5))
        assert max_diff(hidden, norm(norm(model.embed(random_ids(1, 5))))) < 1e-5


def test_parameters_by_part_know_the_scalars() -> None:
    parts = script.parameters_by_part(tiny(**SHAPES["fast"]))
    assert parts["scalars"] == 2 * 2 + 2 and sum(parts.values()) == tiny(**SHAPES["fast"]).n_parameters()
    assert parts["embedding"] == parts["head"] == VOCAB * 32


# --- the preset, and files --------------------------------------------------------------------------------------------


def test_the_preset_is_its_switches_and_each_is_a_key_of_the_command_line() -> None:
    fast = config.load("pretrain", pretrain.Config, ["model=fast"]).model
    switches = [
        "model.mlp=relu2", "model.value_residual=true", "model.x0_shortcut=true", "model.logit_softcap=15",
        "model.tie_embeddings=false",
    ]  # fmt: skip
    assert fast == config.load("pretrain", pretrain.Config, switches).model
    shape = GPTConfig.from_dict(fast).to_dict()
    assert {key: shape[key] for key in SHAPES["fast"]} == SHAPES["fast"]
    with pytest.raises(UserError, match=r"model\.logit_softcap is -1"):
        GPTConfig(logit_softcap=-1.0)


@pytest.mark.parametrize("shape", OURS)
def test_both_files_come_back_and_no_other_program_is_misled(shape: str, tmp_path: Path, tok: Tokenizer) -> None:
    model = randomise(GPT(tiny_config(vocab_size=tok.vocab_size, **SHAPES[shape])))
    path = checkpoint.save(tmp_path, checkpoint.Checkpoint("base", model.config.to_dict(), model.state_dict(), tok))
    ids = random_ids(1, 9)
    with torch.no_grad():
        for source in (path, tmp_path / "base"):
            assert torch.equal(CachedGPT.from_checkpoint(source)(ids)[0], model(ids)), source
    assert json.loads((tmp_path / "base" / "config.json").read_text())["model_type"] == "pocketgpt"
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="pocketgpt"):
        transformers.AutoConfig.from_pretrained(tmp_path / "base")
    with pytest.raises(UserError) as error:
        gguf_file.save(tmp_path / "m.gguf", checkpoint.load(path), "float32")
    assert not (tmp_path / "m.gguf").exists() and "\n" not in str(error.value)
    for key, value in SHAPES[shape].items():
        if key in (*KEYS, "mlp"):
            assert f"model.{key}={str(value).lower()}" in str(error.value)


def test_what_is_foreign_is_named() -> None:
    def named(**changes: Any) -> list[str]:
        return hf.foreign(tiny_config(**changes).to_dict())

    assert named() == named(**SHAPES["gpt2"]) == named(tie_embeddings=False) == []
    assert named(mlp="relu2", logit_softcap=15.0) == ["model.mlp=relu2", "model.logit_softcap=15.0"]
    assert named(value_residual=True) == ["model.value_residual=true"]
    assert named(**SHAPES["gpt2 gqa"]) == ["the heads or the untied head of gpt2"]


def test_checkpoints_from_before_the_switches_keep_their_digest(tok: Tokenizer) -> None:
    model = tiny(vocab_size=tok.vocab_size, mlp="relu2")
    now = checkpoint.Checkpoint("base", model.config.to_dict(), model.state_dict(), tok)
    old = {key: value for key, value in now.config.items() if key not in KEYS}
    assert checkpoint.Checkpoint("base", old, model.state_dict(), tok).digest == now.digest
    capped = now.config | {"logit_softcap": 15.0}
    assert checkpoint.Checkpoint("base", capped, model.state_dict(), tok).digest != now.digest
