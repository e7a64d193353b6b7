"""GGUF files against llama.cpp itself, which must say the same tokens, and against our own reader."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType, TokenType
from helpers import random_ids, randomise
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

import export
from base_model import GPT, PRESETS, GPTConfig
from pocketgpt import checkpoint, gguf_file, hf
from pocketgpt.chat_template import PLAIN_TEMPLATE, render_prompt
from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer

SIZES: dict[str, Any] = {"vocab_size": 400, "block_size": 160, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
MODELS = {
    "gpt2": PRESETS["gpt2"] | {"n_kv_head": 4},
    "llama": PRESETS["llama"] | {"rope_theta": 300.0, "norm_eps": 1e-3, "n_inner": 72},
    "llama untied, wide heads": PRESETS["llama"] | {"tie_embeddings": False, "head_dim": 12},
    "qwen2": PRESETS["qwen2"] | {"tie_embeddings": False},
    "qwen3": PRESETS["qwen3"] | {"head_dim": 20, "n_kv_head": 1},
}
TEXT = "The keeper's boats\n\n  lit 42 lamps, 1234567 times.\t\r\n It'S  user: é🎉猫 <|im_end|> \n "


def model_and_checkpoint(name: str, tok: Tokenizer) -> tuple[GPT, checkpoint.Checkpoint]:
    model = randomise(GPT(GPTConfig(**SIZES | MODELS[name])))
    return model, checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok)


def in_llama_cpp(path: Path) -> Any:
    reason = "llama-cpp-python is not installed (pip install llama-cpp-python==0.3.36)"
    llama_cpp = pytest.importorskip("llama_cpp", reason=reason)
    return llama_cpp.Llama(str(path), n_ctx=160, n_threads=1, verbose=False)


def split_as(tok: Tokenizer, name: str, **roles: Any) -> Tokenizer:
    """The same tokens and merges behind another pre-tokenizer."""
    backend = Backend.from_str(tok.to_json())
    parts = [gguf_file.pre_tokenizer(part) for part in gguf_file.SPLITS[name]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    return Tokenizer(backend, **roles)


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_says_the_same_100_tokens(name: str, tmp_path: Path, tok: Tokenizer) -> None:
    model, ckpt = model_and_checkpoint(name, tok)
    gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    theirs = in_llama_cpp(tmp_path / "m.gguf")
    ids = [tok.eot_id, *tok.encode("The lamp")]
    expected = model.generate(torch.tensor([ids]), 100, temperature=0)[0, len(ids) :].tolist()
    said = [
        token for token, _ in zip(theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), range(100), strict=False)
    ]
    assert said == expected
    assert len(set(said)) > 5  # a model that repeats itself would prove little
    assert theirs.metadata["tokenizer.chat_template"] == tok.template
    assert (theirs.token_eos(), theirs.n_vocab()) == (tok.im_end_id, 400)
    assert theirs.tokenize(b"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", add_bos=True, special=True) == (
        render_prompt(tok, [{"role": "user", "content": "hi"}])
    )
    theirs.close()


@pytest.mark.parametrize("name", [*gguf_file.SPLITS, "ours"])
def test_llama_cpp_splits_text_the_same_way(name: str, tmp_path: Path, tok: Tokenizer) -> None:
    other = tok if name == "ours" else split_as(tok, name)
    _, ckpt = model_and_checkpoint("llama", other)
    gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    back = gguf_file.load(tmp_path / "m.gguf").tokenizer
    assert back.encode(TEXT) == other.encode(TEXT)
    assert (back.encode("e\u0301") == back.encode("\u00e9")) == (name == "qwen2")  # which normalises
    theirs = in_llama_cpp(tmp_path / "m.gguf")
    assert theirs.tokenize(TEXT.encode(), add_bos=False, special=False) == other.encode(TEXT)
    theirs.close()


@pytest.mark.parametrize("begins", [False, True])
def test_a_text_begins_in_other_programs_as_its_tokenizer_says(begins: bool, tmp_path: Path, tok: Tokenizer) -> None:
    """Llama 3's tokenizer.json puts a token before every text, which llama.cpp and transformers do, and training here does not."""
    raw = json.loads(split_as(tok, "llama-bpe").to_json())
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    post = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {bos["id"]: bos}}
    other = Tokenizer.from_json(json.dumps(raw | ({"post_processor": post} if begins else {})), bos=bos["id"])
    model, _ = model_and_checkpoint("llama", tok)
    ckpt = checkpoint.Checkpoint("m", model.config.to_dict(), model.state_dict(), other)
    gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    back = gguf_file.load(tmp_path / "m.gguf").tokenizer
    assert (other.adds_bos, back.adds_bos) == (begins, begins)
    assert other.encode("hi") == back.encode("hi") != []
    expected = [0] * begins + other.encode("hi")
    back.save(tmp_path, 64)
    assert AutoTokenizer.from_pretrained(tmp_path)("hi").input_ids == expected
    theirs = in_llama_cpp(tmp_path / "m.gguf")
    assert theirs.tokenize(b"hi", add_bos=True, special=True) == expected
    theirs.close()


def test_the_ways_to_split_differ_on_that_text(tok: Tokenizer) -> None:
    """Otherwise the test before would prove nothing. Merges of many newlines or digits are not in this vocabulary, so
    what is compared is the pieces before merging."""
    pieces = {
        name: json.dumps([split_as(tok, name)._backend.pre_tokenizer.pre_tokenize_str(TEXT)])
        for name in gguf_file.SPLITS
    }
    assert len(set(pieces.values())) == len(gguf_file.SPLITS)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_comes_back_as_it_was(name: str, tmp_path: Path, tok: Tokenizer) -> None:
    model, ckpt = model_and_checkpoint(name, tok)
    gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    back = gguf_file.load(tmp_path / "m.gguf")
    assert hf.architecture(back.config) == hf.architecture(ckpt.config)
    loaded = GPT.from_loaded(back)
    assert loaded.config.rope_theta == model.config.rope_theta
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    ids = random_ids(1, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids), model(ids))
    assert (back.tokenizer.template, back.tokenizer.eos) == (tok.template, tok.eos)
    assert back.tokenizer.encode(TEXT) == tok.encode(TEXT)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_smaller_types_round_the_matrices_only(dtype: str, tmp_path: Path, tok: Tokenizer) -> None:
    _, ckpt = model_and_checkpoint("llama", tok)
    ckpt.state_dict["blocks.0.mlp.down_proj.weight"] = torch.randn(32, 64)  # rows of whole blocks
    ckpt.state_dict |= {
        f"blocks.{i}.mlp.{part}_proj.weight": torch.randn(64, 32) for i in (0, 1) for part in ("up", "gate")
    }
    ckpt.state_dict["blocks.1.mlp.down_proj.weight"] = torch.randn(32, 64)
    ckpt.config["n_inner"] = 64
    gguf_file.save(tmp_path / "m.gguf", ckpt, dtype)
    back = gguf_file.load(tmp_path / "m.gguf").state_dict
    for key, tensor in ckpt.state_dict.items():
        close = {"float16": 1e-3, "bfloat16": 8e-3, "q8_0": 1 / 127}[dtype] * float(tensor.abs().max())
        assert (back[key] - tensor).abs().max() <= (close if tensor.dim() == 2 else 0), key
    assert not torch.equal(back["embed.weight"], ckpt.state_dict["embed.weight"])


def test_a_padded_vocabulary_is_padded_there_and_not_here(tmp_path: Path, tok: Tokenizer) -> None:
    model = randomise(GPT(GPTConfig(**SIZES | {"vocab_size": 405})))
    gguf_file.save(
        tmp_path / "m.gguf", checkpoint.Checkpoint("x", model.config.to_dict(), model.state_dict(), tok), "float32"
    )
    back = GPT.from_loaded(gguf_file.load(tmp_path / "m.gguf"))
    assert (back.config.vocab_size, back.n_tokens) == (405, 400)
    theirs = in_llama_cpp(tmp_path / "m.gguf")
    assert theirs.n_vocab() == 405
    theirs.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mlp": "relu2"}, "no architecture"), ({"tie_embeddings": False, "position": "learned"}, "no architecture")],
)
def test_what_llama_cpp_does_not_have_is_refused(change: dict, message: str, tmp_path: Path, tok: Tokenizer) -> None:
    model = GPT(GPTConfig(**SIZES | change))
    ckpt = checkpoint.Checkpoint("x", model.config.to_dict(), model.state_dict(), tok)
    with pytest.raises(UserError, match=message):
        gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    _, ckpt = model_and_checkpoint("llama", tok)
    with pytest.raises(UserError, match="dtype is 'int3': choose one of float32"):
        gguf_file.save(tmp_path / "m.gguf", ckpt, "int3")
    with pytest.raises(UserError, match="q8_0 packs 32 weights together"):
        gguf_file.save(tmp_path / "m.gguf", ckpt, "q8_0")
    backend = Backend.from_str(tok.to_json())
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ckpt.tokenizer = Tokenizer(backend)
    with pytest.raises(UserError, match="no pre-tokenizer that does as this one"):
        gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    assert list(tmp_path.iterdir()) == []


def test_the_program(tmp_path: Path, tok: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    model, ckpt = model_and_checkpoint("qwen3", tok)
    checkpoint.save(tmp_path, ckpt)
    monkeypatch.setattr(sys, "argv", ["export.py", f"checkpoint={tmp_path / 'latest'}", "format=gguf"])
    export.main()
    assert "sft.gguf: qwen3, stage sft, float32" in capsys.readouterr().out
    back = GPT.from_loaded(gguf_file.load(tmp_path / "sft.gguf"))
    assert torch.equal(back.embed.weight, model.embed.weight)
    monkeypatch.setattr(sys, "argv", ["export.py", f"checkpoint={tmp_path / 'latest'}", "format=onnx"])
    with pytest.raises(UserError, match="format is 'onnx'"):
        export.main()


# -- files of others


def edited(path: Path, ckpt: checkpoint.Checkpoint, **changes: Any) -> Path:
    """A file of ours with entries and tensors changed: key -> value, None to leave it out; tensors as (array, type)."""
    gguf_file.save(path, ckpt, "float32")
    reader = gguf.GGUFReader(path)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")} | {
        k: v for k, v in changes.items() if not isinstance(v, tuple)
    }
    tensors = {t.name: (t.data.copy(), t.tensor_type) for t in reader.tensors} | {
        k: v for k, v in changes.items() if isinstance(v, tuple)
    }
    out = path.with_name("edited.gguf")
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture"))
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


F32 = GGMLQuantizationType.F32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported: llama, qwen2, qwen3, gpt2"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn' is not supported"),
        ({"llama.attention.sliding_window": 4096}, "llama.attention.sliding_window=4096 is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count=8 is not supported"),
        ({"llama.rope.scaling.factor": 8.0}, "llama.rope.scaling.factor=8.0 is not supported"),
        ({"llama.rope.dimension_count": 4}, "4 rotary dimensions"),
        ({"llama.attention.value_length": 4}, "other values than keys"),
        ({"llama.attention.head_count_kv": [2, 4]}, "n_kv_head differs from layer to layer"),
        ({"rope_freqs.weight": (torch.ones(4).numpy(), F32)}, "tensor rope_freqs.weight is not supported"),
        ({"blk.0.attn_sinks.weight": (torch.ones(4).numpy(), F32)}, "tensor blk.0.attn_sinks.weight is not supported"),
        ({"blk.0.attn_q.bias": (torch.ones(32).numpy(), F32)}, "has an unknown blocks.0.attn.q_proj.bias"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.merges": ["a b", "zz zz"]}, "merges and tokens do not belong together"),
        ({"tokenizer.ggml.eos_token_id": None}, "no entry 'tokenizer.ggml.eos_token_id'"),
        ({"llama.context_length": None}, "no entry 'context_length'"),
        ({"split.count": 2}, "split over several files"),
    ],
)  # fmt: skip
def test_what_we_do_not_have_is_refused_by_name(changes: dict, message: str, tmp_path: Path, tok: Tokenizer) -> None:
    _, ckpt = model_and_checkpoint("llama", tok)
    path = edited(tmp_path / "m.gguf", ckpt, **changes)
    with pytest.raises(UserError) as caught:
        GPT.from_loaded(gguf_file.load(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_an_edited_file_without_edits_loads(tmp_path: Path, tok: Tokenizer) -> None:
    model, ckpt = model_and_checkpoint("llama", tok)
    back = gguf_file.load(edited(tmp_path / "m.gguf", ckpt))
    assert torch.equal(GPT.from_loaded(back).lm_head.weight, model.lm_head.weight)
    plain = gguf_file.load(edited(tmp_path / "m.gguf", ckpt, **{"tokenizer.chat_template": None}))
    assert plain.tokenizer.template == PLAIN_TEMPLATE


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q6_K", "F16", "BF16", "Q5_0"])
def test_quantized_weights_are_read_as_what_they_stand_for(kind: str, tmp_path: Path, tok: Tokenizer) -> None:
    model = randomise(GPT(GPTConfig(**SIZES | PRESETS["qwen3"] | {"n_embd": 256, "n_layer": 1})))
    ckpt = checkpoint.Checkpoint("x", model.config.to_dict(), model.state_dict(), tok)
    right = torch.randn(256, model.config.width_of_mlp, generator=torch.Generator().manual_seed(0))[:, :256] * 0.1
    quantized = GGMLQuantizationType[kind]
    if (
        kind == "Q6_K"
    ):  # whose blocks the package reads but does not write: scale 1/64, eight sub-scales, values of 6 bits
        bits = torch.randint(256, (256, 210), generator=torch.Generator().manual_seed(1), dtype=torch.uint8).numpy()
        bits[:, 208:] = [0, 0x24]  # float16 of 1/64
        data = bits
    else:
        data = gguf.quants.quantize(right.numpy(), quantized)
    expected = torch.from_numpy(gguf.quants.dequantize(data, quantized))
    path = edited(tmp_path / "m.gguf", ckpt, **{"blk.0.attn_output.weight": (data, quantized)})
    if kind == "Q5_0":
        with pytest.raises(
            UserError, match=r"blk.0.attn_output.weight is of type Q5_0, which is not supported; supported: F32"
        ):
            gguf_file.load(path)
        return
    got = GPT.from_loaded(gguf_file.load(path)).blocks[0].attn.o_proj.weight
    assert torch.equal(got, expected)
    if kind != "Q6_K":
        assert (got - right).abs().max() < {"Q4_0": 0.06, "Q4_1": 0.04}.get(kind, 0.01)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04"])
def test_a_damaged_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(UserError, match="m.gguf: not a readable GGUF file") as caught:
        gguf_file.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_cut_short_is_one_line(tmp_path: Path, tok: Tokenizer) -> None:
    _, ckpt = model_and_checkpoint("llama", tok)
    gguf_file.save(tmp_path / "m.gguf", ckpt, "float32")
    whole = (tmp_path / "m.gguf").read_bytes()
    for length in range(100, len(whole), len(whole) // 7):
        (tmp_path / "m.gguf").write_bytes(whole[:length])
        with pytest.raises(UserError, match="m.gguf: "):
            gguf_file.load(tmp_path / "m.gguf")


def test_token_types(tmp_path: Path, tok: Tokenizer) -> None:
    """Control tokens by type and role, what is neither as text, and no text that becomes the first."""
    _, ckpt = model_and_checkpoint("llama", tok)
    types = [TokenType.NORMAL] * 400
    types[0], types[1], types[300] = TokenType.CONTROL, TokenType.CONTROL, TokenType.USER_DEFINED
    path = edited(tmp_path / "m.gguf", ckpt, **{"tokenizer.ggml.token_type": [int(t) for t in types]})
    back = gguf_file.load(path).tokenizer
    assert back.control == {
        "<|endoftext|>": 0,
        "<|im_start|>": 1,
        "<|im_end|>": 2,
    }  # the last because a turn ends with it
    assert not back.control_ids & set(back.encode("<|im_end|><|endoftext|>"))
