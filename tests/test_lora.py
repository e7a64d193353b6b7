"""Adapters: the same numbers as peft from the same files, nothing but them trained and kept, merged for everyone else."""

import gc
import importlib.util
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, cached, max_diff, random_ids, tiny
from test_optim import config as optim_config
from test_resume import call, interrupted, result, same
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

import dpo
import sft
from base_model import GPT
from kv_cache import CachedGPT, DynamicCache
from pocketgpt import checkpoint, lora, optim, plan
from pocketgpt.errors import UserError
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.metrics import read_jsonl
from pocketgpt.tokenizer import Tokenizer

with_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
OPEN = ["llama gqa", "llama untied", "qwen2", "qwen3 gqa", "gpt2"]  # shapes that transformers has


def adapt(model: GPT, rank: int = 4, alpha: int = 6, targets: tuple[str, ...] = (), trained: bool = True) -> GPT:
    """The model with adapters, which have learned something."""
    config = lora.LoRAConfig(rank, alpha, list(targets))
    config.check()
    lora.attach(model, model.config.to_dict(), config, seed=0)
    if trained:
        generator = torch.Generator().manual_seed(1)
        for layer in lora.adapted(model).values():
            layer.lora_B.data.normal_(0, 0.3, generator=generator)
    return model


def plain(model: GPT) -> GPT:
    """The model without adapters that ought to say the same."""
    twin = GPT(model.config).eval()
    twin.load_state_dict(lora.merged(model))
    return twin


# --- in peft's form -------------------------------------------------------------------------------------------------


@with_peft
@pytest.mark.parametrize("targets", [(), "some"])
@pytest.mark.parametrize("shape", OPEN)
def test_peft_reads_the_adapters_and_says_the_same(shape: str, targets: Any, tok: Tokenizer, tmp_path: Path) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    model = tiny(**SHAPES[shape] | {"vocab_size": 400})
    saved = checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok)
    folder = checkpoint.load(checkpoint.save(tmp_path, saved)).folder
    if targets:
        targets = ("c_attn", "c_fc") if shape == "gpt2" else ("q_proj", "down_proj")
    adapt(model, targets=targets)
    shown = lora.save(tmp_path / "lora", model, model.config.to_dict(), lora.LoRAConfig(4, 6, list(targets)), folder)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), shown)
    ids = random_ids(2, 20, high=400)
    with torch.no_grad():
        right = theirs(ids).logits
        assert max_diff(model(ids), right) < 1e-4
        assert max_diff(plain(model)(ids), right) < 1e-4
        with theirs.disable_adapter():
            assert max_diff(model(ids), theirs(ids).logits) > 0.1
    # What peft writes of it is what we wrote.
    theirs.save_pretrained(tmp_path / "again")
    ours, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("lora", "again"))
    assert same(ours, again)
    about, written = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("lora", "again"))
    assert about.keys() <= written.keys() and about["base_model_name_or_path"] == str(tmp_path / "sft")
    for entry in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "peft_type", "task_type"):
        assert about[entry] == written[entry]
    assert set(about["target_modules"]) == set(written["target_modules"])


def test_adapters_start_as_those_of_peft_do() -> None:
    """Uniform in the root of 1 / inputs, whatever the global generator does."""
    inputs = 4000
    layer = nn.Linear(inputs, 5, bias=False)
    before = torch.get_rng_state()
    ours = lora.LoRALinear(layer, 8, 2.0, torch.Generator().manual_seed(0))
    assert torch.equal(before, torch.get_rng_state())
    bound = inputs**-0.5
    assert ours.lora_A.abs().max() <= bound and ours.lora_A.abs().max() > 0.99 * bound
    assert abs(float(ours.lora_A.detach().std()) - bound / 3**0.5) < 0.01 * bound
    assert not ours.lora_B.any()


# --- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_untrained_adapters_change_nothing_and_trained_ones_merge(shape: str) -> None:
    model, ids = tiny(**SHAPES[shape]), random_ids(2, 20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    right = model(ids)
    adapt(model, trained=False)
    assert torch.equal(model(ids), right)
    assert same(lora.merged(model), before)
    adapted = tiny(**SHAPES[shape])
    adapt(adapted)
    got = adapted(ids)
    assert max_diff(got, right) > 0.1
    twin = plain(adapted)
    assert max_diff(twin(ids), got) < 2e-5
    changed = {name for name, tensor in twin.state_dict().items() if not torch.equal(tensor, before[name])}
    linear = {f"{name}.weight" for name, m in twin.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"}
    assert changed == linear


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_the_sum(recompute: bool) -> None:
    """Against a plain model whose weights are W + alpha / rank B A, by autograd."""
    model = adapt(tiny(**SHAPES["llama gqa"]), rank=3, alpha=6).train()
    model.recompute = recompute
    twin, ids, targets = tiny(**SHAPES["llama gqa"]), random_ids(2, 12), random_ids(2, 12, seed=1)
    linear_cross_entropy(model.hidden_states(ids), model.lm_head.weight, targets, torch.float32).backward()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters() if p.requires_grad}
    weights = dict(twin.named_parameters()) | {
        f"{name}.weight": twin.get_submodule(name).weight + 2 * leaves[f"{name}.lora_B"] @ leaves[f"{name}.lora_A"]  # type: ignore[operator]
        for name in lora.adapted(model)
    }
    F.cross_entropy(functional_call(twin, weights, ids).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    assert len(leaves) == 2 * 2 * 7
    for name, leaf in leaves.items():
        assert max_diff(model.get_parameter(name).grad, leaf.grad) < 1e-3 * float(leaf.grad.abs().max()), name  # type: ignore[arg-type,union-attr]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert len(frozen) == len(list(twin.parameters())) and all(p.grad is None for p in frozen)


def test_a_cached_view_has_the_adapters_and_follows_them() -> None:
    for tied in (True, False):
        model, ids = adapt(tiny(tie_embeddings=tied), trained=False), random_ids(1, 12)
        view = CachedGPT.sharing(model)
        assert max_diff(view(ids)[0], model(ids)) < 1e-5
        adapt_again = lora.adapted(model)["blocks.1.mlp.up_proj"]
        with torch.no_grad():
            adapt_again.lora_B.add_(0.5)
        cache = DynamicCache(model.config)
        got = torch.cat([view(ids[:, :7], cache)[0], view(ids[:, 7:], cache)[0]], 1)
        assert max_diff(got, model(ids)) < 1e-5
        assert max_diff(got, cached(plain(model))(ids)[0]) < 2e-5
        held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
        assert held == {id(tensor) for tensor in (*view.parameters(), *view.buffers())}
        assert (view.lm_head.weight is view.embed.weight) == tied
        model.train()
        assert not view.training and not any(module.training for module in view.modules())
        assert view.blocks[0] is not model.blocks[0]


@pytest.mark.parametrize(
    ("shape", "targets", "adapted"),
    [
        ("qwen3", ("q_proj", "v_proj"), {"attn.q_proj", "attn.v_proj"}),
        ("gpt2", ("c_attn",), {"attn.q_proj", "attn.k_proj", "attn.v_proj"}),
        ("gpt2", ("c_proj",), {"attn.o_proj", "mlp.down_proj"}),
        ("relu2", ("up_proj",), {"mlp.up_proj"}),
    ],
)
def test_targets_are_named_as_transformers_does(shape: str, targets: tuple[str, ...], adapted: set[str]) -> None:
    model = adapt(tiny(**SHAPES[shape]), targets=targets)
    assert set(lora.adapted(model)) == {f"blocks.{layer}.{name}" for layer in (0, 1) for name in adapted}


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((-1, 16, []), "lora.rank is -1: it must be at least 0"),
        ((5000, 16, []), "lora.rank is 5000: it must be at least 0 (no adapters) and at most 4096"),
        ((8, 0, []), "lora.alpha is 0: it must be at least 1"),
        ((0, 16, ["q_proj"]), "lora.targets is set and lora.rank is 0"),
        ((8, 16, ["qproj"]), "lora.targets has 'qproj': the linear layers of this model are q_proj, k_proj, v_proj"),
        ((8, 16, ["lm_head"]), "lora.targets has 'lm_head'"),
    ],
)
def test_wrong_settings_are_named(settings: tuple[int, int, list[str]], line: str) -> None:
    model, config = tiny(), lora.LoRAConfig(*settings)
    with pytest.raises(UserError) as refusal:
        config.check()
        lora.attach(model, model.config.to_dict(), config, 0)
    assert str(refusal.value).startswith(line)
    assert not lora.adapted(model) and all(p.requires_grad for p in model.parameters())


# --- what frozen weights cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizer_holds_adapters_alone_and_they_are_adamws(name: str) -> None:
    model = adapt(tiny())
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    optimizer = optim.Optimizer(model, optim_config(name=name), 0.01)
    model(random_ids(1, 8)).square().sum().backward()
    optimizer.step(1.0)
    (part,) = optimizer.parts
    assert isinstance(part, torch.optim.AdamW)
    held = {key for key, p in model.named_parameters() if p in part.state}
    assert held == {key for key in before if key.endswith(("lora_A", "lora_B"))} == lora.trained(model).keys()
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, before[key])}
    assert changed == held


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, targets = torch.randn(1, 9, 32, requires_grad=True), random_ids(1, 9)
    weight = torch.randn(97, 32)
    loss = linear_cross_entropy(hidden, weight, targets, torch.float32)
    assert [None if t is None else tuple(t.shape) for t in loss.grad_fn.saved_tensors] == [(9, 32), None]  # type: ignore[union-attr]
    (got,) = torch.autograd.grad(loss, hidden)
    right = F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), reduction="sum")
    assert max_diff(got, *torch.autograd.grad(right, hidden)) < 1e-4


def test_operations_of_frozen_weights() -> None:
    """By torch's own counter, attention apart."""
    model, ids, targets = adapt(tiny(n_layer=3)).train(), random_ids(1, 24), random_ids(1, 24, seed=1)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(model(ids).flatten(0, 1), targets.flatten()).backward()
    matrices = {str(op): n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op)}
    ours = 24 * (model.flops_per_token(24) - 6 * 3 * 2 * 16 * 24)
    # Nothing goes back from the first layers into the embedding: the gradients of q, k and v's inputs.
    unneeded = 24 * 2 * (3 * 32 * 32 + 3 * 4 * 32)
    assert abs(sum(matrices.values()) - (ours - unneeded)) <= 0.01 * ours


def test_only_what_is_trained_is_kept_and_nothing_else_is_taken() -> None:
    model = adapt(tiny(), trained=False)
    start = {name: tensor.clone() for name, tensor in lora.trained(model).items()}
    assert len(start) == 2 * 2 * 7 and all("lora_" in name for name in start)
    right = model(random_ids(1, 9))
    adapt_all = lora.adapted(model)
    with torch.no_grad():
        for layer in adapt_all.values():
            layer.lora_B.add_(1.0)
    assert max_diff(model(random_ids(1, 9)), right) > 0.1
    lora.restore(model, start)
    assert torch.equal(model(random_ids(1, 9)), right)
    other = tiny()
    for wrong in (other.state_dict(), {}, dict(list(start.items())[1:])):
        with pytest.raises(ValueError, match="other weights"):
            lora.restore(model, wrong)
    with pytest.raises(RuntimeError, match="size mismatch"):
        lora.restore(model, lora.trained(adapt(tiny(), rank=5)))
    assert lora.trained(other).keys() == other.state_dict().keys()


# --- the stages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def start(tok: Tokenizer, tmp_path: Path) -> Path:
    """A folder with a model to start from, whose vocabulary is padded as Qwen's are, and data."""
    model = tiny(vocab_size=500, block_size=128, n_embd=16, dropout=0.1)
    checkpoint.save(tmp_path / "base", checkpoint.Checkpoint("other", model.config.to_dict(), model.state_dict(), tok))
    words = "storm boats gulls bread lamp baker keeper sand sea grey".split()
    chats = [{"prompt": f"The {a} and?", "completion": f"the {b}"} for a in words for b in words]
    pairs = [{"prompt": f"The {a}?", "chosen": f"the {a}", "rejected": "no"} for a in words]
    for name, rows in (("chats", chats), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def given(start: Path, out: str, data: str, *more: str) -> list[str]:
    return [
        f"checkpoint={start / 'base' / 'other'}", "data=mine", f"data.path={start / data}.jsonl", "data.val_fraction=0.2",
        f"out={start / out}", "device=cpu", "train.minutes=0", "train.steps=4", "train.batch_size=4", "train.dtype=float32",
        "train.micro_batch_size=2", "train.eval_every=2", "train.log_every=1", "train.lr=0.02", "lora.rank=2", *more,
    ]  # fmt: skip


def says_the_same(start: Path, out: str, name: str) -> None:
    """The checkpoint is the merged model, and the adapters beside it are those that it was merged from."""
    base, tuned = (GPT.from_checkpoint(path) for path in (start / "base" / "other", start / out / f"ckpt_{name}.pt"))
    ids = random_ids(1, 20, high=400)
    assert max_diff(base(ids), tuned(ids)) > 0.01
    assert max_diff(GPT.from_checkpoint(start / out / name)(ids), tuned(ids)) == 0
    assert (tuned.embed.weight == base.embed.weight).all()
    if importlib.util.find_spec("peft"):
        from peft import AutoPeftModelForCausalLM

        theirs = AutoPeftModelForCausalLM.from_pretrained(start / out / f"{name}_lora")
        with torch.no_grad():
            assert max_diff(theirs(ids).logits, tuned(ids)) < 1e-4


def test_sft_with_adapters_resumes_bit_for_bit(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(sft.main, given(start, "whole", "chats"))
    says_the_same(start, "whole", "sft")
    told = capsys.readouterr().out
    assert "adapters of rank 2 and alpha 16 are trained, by AdamW" in told and f"for {start / 'base' / 'other'}" in told
    interrupted(sft.main, given(start, "half", "chats"), 3, signal.SIGTERM)
    kept = torch.load(start / "half" / "resume_sft.pt", weights_only=True)
    assert len(kept["model"]) == 28 and all("lora_" in name for name in kept["model"])
    assert len(kept["optimizer"]) == 1 and len(kept["optimizer"][0]["state"]) == 28
    call(sft.main, given(start, "half", "chats", "train.resume=true"))
    assert all(map(same, result(start / "half", "sft"), result(start / "whole", "sft")))
    with pytest.raises(UserError, match="of another model or optimizer|lora.rank was 2, is 3"):
        call(sft.main, given(start, "half", "chats", "train.resume=true", "lora.rank=3"))
    with pytest.raises(UserError, match="it has other weights"):
        call(sft.main, given(start, "half", "chats", "train.resume=true", "lora.rank=0"))


def test_dpo_with_adapters(start: Path) -> None:
    """Its reference is where it starts: the model without adapters, not the control that ran before."""
    call(dpo.main, given(start, "whole", "pairs", "dpo.chosen_nll=0", "dpo.control_lr=0.02"))
    for name in ("control", "dpo"):
        says_the_same(start, "whole", name)
        rows = read_jsonl(start / "whole" / f"metrics_{name}.jsonl")
        first, *_, last = [row for row in rows if row["kind"] == "val"]
        assert (first["step"], first["kl"], first["margin"]) == (0, 0.0, 0.0)
        assert abs(first["preference_loss"] - 0.693147) < 1e-6
        assert last["kl"] != 0
    interrupted(dpo.main, given(start, "half", "pairs", "dpo.chosen_nll=0", "dpo.control_lr=0.02"), 6, signal.SIGINT)
    call(dpo.main, given(start, "half", "pairs", "dpo.chosen_nll=0", "dpo.control_lr=0.02", "train.resume=true"))
    for name in ("control", "dpo"):
        assert all(map(same, result(start / "half", name), result(start / "whole", name))), name


@pytest.mark.parametrize(("stage", "data"), [(sft, "chats"), (dpo, "pairs")])
def test_no_second_copy_of_the_model_is_held(
    start: Path, stage: Any, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it trains: of every frozen matrix there is one tensor alive."""
    found: list[int] = []
    train = stage.train
    shape = (500, 16)

    def alive() -> set[int]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor) and t.shape == shape]
        return {t.untyped_storage().data_ptr() for t in tensors}

    others = alive()  # of tests before this one

    def watched(model: GPT, *rest: Any) -> Any:
        found.append(len(alive() - others))
        return train(model, *rest)

    monkeypatch.setattr(stage, "train", watched)
    call(stage.main, given(start, "out", data))
    assert found and set(found) == {1}


@pytest.mark.parametrize(("stage", "data", "rows", "longest"), [(sft, "chats", 4, 128), (dpo, "pairs", 8, 64)])
def test_what_runs_at_once_is_planned_for_adapters_and_for_the_data(
    start: Path,
    stage: Any,
    data: str,
    rows: int,
    longest: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With gradients of the adapters alone; pairs with the length of the longest one, not with the model's context of 128."""
    planned: list[tuple[int, int]] = []
    step_memory = plan.step_memory

    def watched(network: Any, rows: int, length: int, *rest: Any, **more: Any) -> plan.Memory:
        found = step_memory(network, rows, length, *rest, **more)
        planned.append((rows, length))
        a_and_b = sum(layer.lora_A.nbytes + layer.lora_B.nbytes for layer in lora.adapted(network()).values())
        assert found.gradients == a_and_b > 0 and found.optimizer == pytest.approx(2 * a_and_b, abs=200)
        return found

    monkeypatch.setattr(plan, "step_memory", watched)
    call(stage.main, given(start, "out", data, "train.micro_batch_size=0", "train.steps=1"))
    assert len(planned) == 1 and planned[0][0] == rows and 16 < planned[0][1] <= longest
    assert "train.micro_batch_size=4 of 4: planned" in " ".join(capsys.readouterr().out.split())


def test_long_conversations_do_not_make_long_rows(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (start / "chats.jsonl").open("a") as file:
        for n in range(20):
            file.write("\n" + json.dumps({"prompt": "the gulls " * (20 + n), "completion": "the sea"}))
    call(sft.main, given(start, "out", "chats", "max_length=40", "train.steps=1"))
    told = " ".join(capsys.readouterr().out.split())
    assert "rows of 40 " in told
    assert 10 <= int(re.search(r"(\d+) too long for 40 tokens, dropped", told)[1]) <= 20  # type: ignore[index]
    with pytest.raises(UserError, match="max_length is -1: it must be at least 1, or 0"):
        call(sft.main, given(start, "out", "chats", "max_length=-1"))
