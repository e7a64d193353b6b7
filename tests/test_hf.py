"""Model folders against transformers itself, in both directions, through the files that users exchange."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import SHAPES, VOCAB, max_diff, random_ids, randomise, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from base_model import GPT, PRESETS, GPTConfig
from kv_cache import CachedGPT
from pocketgpt import checkpoint, hf
from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer

VOCAB_OF_TOK = 400  # the session's tokenizer
SIZES: dict[str, Any] = {"vocab_size": 404, "block_size": 48, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
# The shapes that transformers has, and the class it must choose for them.
THEIRS = {
    "gpt2": ("GPT2LMHeadModel", PRESETS["gpt2"] | {"n_kv_head": 4}),
    "gpt2, other widths": ("GPT2LMHeadModel", PRESETS["gpt2"] | {"n_kv_head": 4, "n_inner": 72, "norm_eps": 1e-3}),
    "llama mha": ("LlamaForCausalLM", PRESETS["llama"] | {"n_kv_head": 4}),
    "llama gqa": ("LlamaForCausalLM", PRESETS["llama"] | {"rope_theta": 300.0, "norm_eps": 1e-3}),
    "llama untied, wide heads": ("LlamaForCausalLM", PRESETS["llama"] | {"tie_embeddings": False, "head_dim": 12}),
    "qwen2": ("Qwen2ForCausalLM", PRESETS["qwen2"]),
    "qwen2 untied": ("Qwen2ForCausalLM", PRESETS["qwen2"] | {"tie_embeddings": False, "n_inner": 72}),
    "qwen3 gqa": ("Qwen3ForCausalLM", PRESETS["qwen3"]),
    "qwen3 mqa, untied": ("Qwen3ForCausalLM", PRESETS["qwen3"] | {"n_kv_head": 1, "tie_embeddings": False}),
    "qwen3 wide heads": ("Qwen3ForCausalLM", PRESETS["qwen3"] | {"head_dim": 20, "rope_theta": 1e6}),
    "qwen3 given head_dim": ("Qwen3ForCausalLM", PRESETS["qwen3"] | {"head_dim": 8, "n_inner": 72}),
}


@pytest.fixture
def complaints() -> Iterator[list[str]]:
    """What transformers logs from warnings upwards: it reports missing and unexpected keys that way."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def saved(out: Path, model: GPT, tok: Tokenizer, stage: str = "sft") -> Path:
    """The folder that a stage leaves."""
    checkpoint.save(out, checkpoint.Checkpoint(stage, model.config.to_dict(), model.state_dict(), tok, step=7))
    return out / stage


def their_logits(folder: Path, ids: Tensor) -> tuple[Tensor, str]:
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    with torch.no_grad():
        return model.eval()(ids).logits, type(model).__name__


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_a_saved_folder_opens_in_transformers_and_comes_back(
    name: str, tmp_path: Path, tok: Tokenizer, complaints: list[str]
) -> None:
    their_class, changes = THEIRS[name]
    model = randomise(GPT(GPTConfig(**SIZES | changes)))
    ids = random_ids(2, 48, high=VOCAB_OF_TOK)
    expected = model(ids)

    folder = saved(tmp_path, model, tok)
    logits, opened_as = their_logits(folder, ids)
    assert opened_as == their_class
    assert max_diff(logits, expected) < 1e-4
    assert complaints == []

    for source in (folder, tmp_path / "ckpt_sft.pt", tmp_path / "latest"):
        back = GPT.from_checkpoint(source)
        assert torch.equal(back(ids), expected)
        assert not back.training
        assert back.n_tokens == VOCAB_OF_TOK
        assert (back.lm_head.weight is back.embed.weight) == model.config.tie_embeddings
        assert back.state_dict().keys() == model.state_dict().keys()
        assert (back.config.width_of_head, back.config.width_of_mlp) == (
            model.config.width_of_head,
            model.config.width_of_mlp,
        )
    assert max_diff(CachedGPT.from_checkpoint(folder)(ids)[0], expected) < 1e-5


@pytest.mark.parametrize("name", THEIRS)
@torch.no_grad()
def test_a_folder_that_transformers_wrote_opens_here(name: str, tmp_path: Path, tok: Tokenizer) -> None:
    changes = THEIRS[name][1]
    config = hf.config_to_hf(GPTConfig(**SIZES | changes).to_dict())
    made = transformers.AutoConfig.for_model(**config)
    theirs = randomise(transformers.AutoModelForCausalLM.from_config(made))
    theirs.save_pretrained(tmp_path)
    tok.save(tmp_path, SIZES["block_size"])
    ids = random_ids(2, 30, high=VOCAB_OF_TOK)
    assert max_diff(GPT.from_checkpoint(tmp_path)(ids), theirs(ids).logits) < 1e-4


def test_the_tokenizer_of_a_saved_folder_gives_the_same_ids(tmp_path: Path, tok: Tokenizer, corpus: str) -> None:
    folder = saved(tmp_path, randomise(GPT(GPTConfig(**SIZES))), tok)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    text = corpus[:600] + " a🎉猫é\t\x00  b\n\n12,345 "
    assert theirs(text)["input_ids"] == tok.encode(text)
    assert theirs.decode(tok.encode(text)) == text
    assert (theirs.eos_token_id, theirs.pad_token_id) == (tok.im_end_id, tok.eot_id)
    assert theirs.model_max_length == SIZES["block_size"]


def test_generation_in_transformers_ends_where_ours_does(tmp_path: Path, tok: Tokenizer) -> None:
    model = randomise(GPT(GPTConfig(**SIZES, tie_embeddings=False)))
    ids = random_ids(1, 6, high=VOCAB_OF_TOK)
    free = model.generate(ids, 12, temperature=0)
    with torch.no_grad():  # make the end token what it says sixth
        swap = [int(free[0, 11]), tok.im_end_id]
        model.lm_head.weight[swap] = model.lm_head.weight[swap[::-1]]
    expected = model.generate(ids, 12, temperature=0, stop_ids=(tok.im_end_id,))
    assert expected.size(1) <= 12
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path, model, tok))
    assert theirs.generate(ids, max_new_tokens=12, do_sample=False).tolist() == expected.tolist()


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_every_shape_comes_back_from_its_folder_also_those_that_only_we_have(
    shape: str, tmp_path: Path, tok: Tokenizer
) -> None:
    model = tiny(**SHAPES[shape] | {"vocab_size": 400, "dropout": 0.125})
    ids = random_ids(1, 32)
    folder = saved(tmp_path, model, tok)
    back = GPT.from_checkpoint(folder)
    assert torch.equal(back(ids), model(ids))
    assert back.config.dropout == 0.125
    exact = GPT.from_checkpoint(tmp_path / "ckpt_sft.pt")
    assert exact.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(exact.state_dict()[name], tensor), name


def test_a_shape_of_ours_is_called_so() -> None:
    kinds = {name: hf.architecture(tiny(**shape).config.to_dict()) for name, shape in SHAPES.items()}
    assert {name for name, kind in kinds.items() if kind == "pocketgpt"} == {
        "gpt2 gqa",
        "gpt2 qk_norm",
        "relu2",
        "rope layernorm gelu",
        "learned rmsnorm swiglu",
        "rope with biases",
        "value residual",
        "x0 shortcut",
        "softcap",
        "fast",
    }
    # a width of head that is the default anyway makes no difference
    assert hf.architecture(tiny(**PRESETS["gpt2"], head_dim=16).config.to_dict()) == "gpt2"


def test_tied_weights_are_written_once_and_untied_ones_twice(tmp_path: Path, tok: Tokenizer) -> None:
    tied = load_file(saved(tmp_path / "a", tiny(vocab_size=400), tok) / "model.safetensors")
    untied = load_file(saved(tmp_path / "b", tiny(vocab_size=400, tie_embeddings=False), tok) / "model.safetensors")
    assert untied.keys() - tied.keys() == {"lm_head.weight"}
    assert "model.embed_tokens.weight" in tied
    size = (tmp_path / "a" / "sft" / "model.safetensors").stat().st_size
    assert size < 4 * tiny(vocab_size=400).n_parameters() + 8192


def test_the_files_of_a_folder(tmp_path: Path, tok: Tokenizer) -> None:
    folder = saved(tmp_path, tiny(vocab_size=400), tok, stage="dpo")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((folder / "config.json").read_text())
    assert config["pocketgpt"] == {"stage": "dpo", "step": 7}
    assert config["eos_token_id"] == tok.im_end_id
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tok.im_end_id
    loaded = checkpoint.load(folder)
    assert (loaded.stage, loaded.step) == ("dpo", 7)
    assert loaded.tokenizer.to_json() == tok.to_json()


def test_a_folder_in_half_precision_is_read_as_float32(tmp_path: Path, tok: Tokenizer) -> None:
    model = tiny(vocab_size=400)
    folder = saved(tmp_path, model, tok)
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, folder / "model.safetensors")
    _, ours, _ = hf.load_folder(folder)
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    assert torch.equal(GPT.from_checkpoint(folder).embed.weight, model.embed.weight.bfloat16().float())


@torch.no_grad()
def test_a_folder_in_shards_opens_here(tmp_path: Path, tok: Tokenizer) -> None:
    config = hf.config_to_hf(GPTConfig(**SIZES | PRESETS["llama"]).to_dict())
    theirs = randomise(transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)))
    theirs.save_pretrained(tmp_path, max_shard_size="30KB")
    tok.save(tmp_path, SIZES["block_size"])
    parts = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(parts) > 2
    ids = random_ids(2, 30, high=VOCAB_OF_TOK)
    assert max_diff(GPT.from_checkpoint(tmp_path)(ids), theirs(ids).logits) < 1e-4
    parts[1].unlink()
    with pytest.raises(UserError, match=f"no {parts[1].name} in it; the folder is incomplete"):
        GPT.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 1}}']
)  # fmt: skip
def test_a_bad_index_of_shards_is_one_line(index: str, tmp_path: Path, tok: Tokenizer) -> None:
    folder = saved(tmp_path, tiny(vocab_size=400), tok)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match=r"model.safetensors.index.json: (not a readable|names files)"):
        checkpoint.load(folder)


def test_gpt2_files_of_old_have_no_prefix_and_carry_their_masks(tmp_path: Path, tok: Tokenizer) -> None:
    model = randomise(GPT(GPTConfig(**SIZES | PRESETS["gpt2"] | {"n_kv_head": 4})))
    folder = saved(tmp_path, model, tok)
    weights = {name.removeprefix("transformer."): t for name, t in load_file(folder / "model.safetensors").items()}
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 48, 48).tril()
        weights[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, folder / "model.safetensors")
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(GPT.from_checkpoint(folder)(ids), model(ids))


# Foreign configs: what we do not have is refused, never read as something else.
QWEN: dict[str, Any] = hf.config_to_hf(tiny().config.to_dict())
QWEN2: dict[str, Any] = hf.config_to_hf(tiny(**PRESETS["qwen2"]).config.to_dict())
LLAMA: dict[str, Any] = hf.config_to_hf(tiny(**PRESETS["llama"]).config.to_dict())
GPT2: dict[str, Any] = hf.config_to_hf(tiny(**PRESETS["gpt2"]).config.to_dict())
WHERE = Path("folder/config.json")


@pytest.mark.parametrize(
    ("raw", "change"),
    [
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        (QWEN, {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        (QWEN, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "rope_scaling": {"rope_theta": 1e6}}),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}}),
        (LLAMA, {"hidden_act": "gelu"}),
        (LLAMA, {"attention_bias": True}),
        (LLAMA, {"mlp_bias": True}),
        (QWEN, {"use_sliding_window": True}),
        (QWEN, {"hidden_act": "relu"}),
        (QWEN, {"layer_types": ["full_attention", "sliding_attention"]}),
        (QWEN2, {"use_sliding_window": True}),
        (QWEN2, {"use_mrope": True}),
        (LLAMA, {"quantization_config": {"bits": 4}}),
        (LLAMA, {"partial_rotary_factor": 0.5}),
        (GPT2, {"add_cross_attention": True}),
        (GPT2, {"activation_function": "relu"}),
        (GPT2, {"tie_word_embeddings": False}),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}),
        (GPT2, {"scale_attn_weights": False}),
        (QWEN, {"model_type": "mistral"}),
        (QWEN, {"model_type": None}),
        (QWEN, {"model_type": ["qwen3"]}),
    ],
)
def test_features_that_we_do_not_have_are_refused(raw: dict, change: dict) -> None:
    with pytest.raises(UserError, match="is not supported") as caught:
        hf.config_from_hf(raw | change, WHERE)
    assert str(WHERE) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_features_that_are_off_are_fine() -> None:
    plain = hf.config_from_hf(LLAMA, WHERE)
    off = {
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    }
    assert hf.config_from_hf(LLAMA | off, WHERE) == plain
    whole = {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 1.0, "factor": None}
    assert hf.config_from_hf(LLAMA | {"rope_parameters": whole, "rope_scaling": None}, WHERE) == plain
    without = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "attention_bias", "mlp_bias")}
    assert hf.config_from_hf(without | {"rope_parameters": {"rope_theta": 10_000.0}}, WHERE) == plain
    other = hf.config_from_hf(without | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, WHERE)
    assert other["rope_theta"] == 5e5
    # what transformers takes for granted where a file is silent
    for key in ("num_key_value_heads", "head_dim", "attention_dropout"):
        old = {name: value for name, value in LLAMA.items() if name != key}
        assert hf.config_from_hf(old, WHERE) == plain | {"head_dim": 0 if key == "head_dim" else 16}
    silent = {key: value for key, value in QWEN.items() if key not in ("head_dim", "tie_word_embeddings")}
    assert hf.config_from_hf(silent, WHERE)["head_dim"] == 128
    assert hf.config_from_hf(silent, WHERE)["tie_embeddings"] is False


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "gpt2", "pocketgpt"])
@pytest.mark.parametrize("value", [None, "x", -1, 0, 2.5, [], {"a": 1}, True, 10**9], ids=repr)
def test_a_config_with_any_wrong_entry_is_one_error_line_or_a_model(
    kind: str, value: object, tmp_path: Path, tok: Tokenizer
) -> None:
    shape = PRESETS.get(kind, {"mlp": "relu2"})
    good = hf.config_to_hf(tiny(**shape).config.to_dict())
    for key in [key for key in good if key not in ("vocab_size", "n_layer", "num_hidden_layers")]:
        check_config(good | {key: value}, key, kind)
        check_config({k: v for k, v in good.items() if k != key}, key, kind)


def check_config(raw: dict, key: str, kind: str) -> None:
    try:
        GPTConfig.from_dict(hf.config_from_hf(raw, WHERE), str(WHERE))
    except UserError as error:
        assert "\n" not in str(error)
        assert str(WHERE) in str(error) or str(error).startswith("model."), (key, kind)


def test_vocabulary_of_the_shared_fixture_is_what_these_tests_assume(tok: Tokenizer) -> None:
    assert tok.vocab_size == VOCAB_OF_TOK > VOCAB
