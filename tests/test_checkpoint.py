"""What a stage leaves behind: it comes back exactly, and everything else is one line that names the file."""

import json
import os
import pickle
import random
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import max_diff, random_ids, tiny
from safetensors.torch import load_file, save_file

from base_model import GPT, PRESETS
from kv_cache import CachedGPT
from pocketgpt import chat_template, checkpoint, hf
from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer


def model_of_400(**changes: Any) -> GPT:
    """As many ids as the session's tokenizer has."""
    return tiny(vocab_size=400, **changes)


def contents(model: GPT, tok: Tokenizer, **changes: Any) -> checkpoint.Checkpoint:
    return checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok, **changes)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, tok: Tokenizer) -> Path:
    """A folder with ckpt_sft.pt and sft/, to be copied before it is broken."""
    out = tmp_path_factory.mktemp("clean")
    checkpoint.save(out, contents(model_of_400(), tok))
    return out


@pytest.fixture
def out(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "out", symlinks=True))


def refusal(path: Path) -> str:
    """What from_checkpoint says about a bad file: one line, with the file's name in it, and no warning beside it."""
    with warnings.catch_warnings(record=True) as remarks, pytest.raises(UserError) as caught:
        warnings.simplefilter("always")
        GPT.from_checkpoint(path)
    assert not remarks
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 500
    assert str(path) in line
    return line


def broken(path: Path, change: Callable[[dict], object]) -> str:
    """Rewrite a .pt with `change` applied to its dict, and see what is said about it."""
    raw = torch.load(path, weights_only=True)
    change(raw)
    torch.save(raw, path)
    return refusal(path)


def test_everything_comes_back(tmp_path: Path, tok: Tokenizer) -> None:
    model = model_of_400(n_head=4, n_kv_head=2)
    given = contents(
        model,
        tok,
        step=123,
        metrics={"loss": 1.5, "by_family": {"add": [3, 4]}},
        run_config={"train": {"lr": 0.1, "resume": False}, "out": "x"},
        fingerprints={"text": "abc"},
    )
    path = checkpoint.save(tmp_path, given)
    assert path == tmp_path / "ckpt_sft.pt"
    back = checkpoint.load(path)
    for name in ("stage", "config", "step", "metrics", "run_config", "fingerprints"):
        assert getattr(back, name) == getattr(given, name)
    assert back.tokenizer.to_json() == tok.to_json()
    assert back.path == path
    assert torch.load(path, weights_only=True)["chat_template"] == chat_template.TEMPLATE
    for cls in (GPT, CachedGPT):
        loaded = cls.from_checkpoint(path)
        assert type(loaded) is cls
        assert loaded.config == model.config
        assert not loaded.training
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
    assert CachedGPT.from_checkpoint(str(path)).n_tokens == 400


def test_the_file_holds_plain_types_and_tensors(out: Path) -> None:
    raw = torch.load(out / "ckpt_sft.pt", weights_only=True)
    assert raw.keys() == checkpoint.KEYS.keys() | {"digest", "special_tokens"}
    assert all(type(tensor) is torch.Tensor for tensor in raw["state_dict"].values())
    assert not any(tensor.requires_grad for tensor in raw["state_dict"].values())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("tie", [True, False])
def test_tied_weights_stay_tied(preset: str, tie: bool, tmp_path: Path, tok: Tokenizer) -> None:
    model = model_of_400(**PRESETS[preset], tie_embeddings=tie)
    path = checkpoint.save(tmp_path, contents(model, tok))
    for source in (path, tmp_path / "sft"):
        back = GPT.from_checkpoint(source)
        assert (back.lm_head.weight is back.embed.weight) == tie
        assert back.n_parameters() == model.n_parameters()
        assert torch.equal(back(random_ids(1, 9)), model(random_ids(1, 9)))
    assert path.stat().st_size < 4 * model.n_parameters() + 60_000  # a tied weight is written once


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_wrapped_models_are_saved_and_read_under_bare_names(prefix: str, out: Path, tok: Tokenizer) -> None:
    model = model_of_400()
    wrapped = contents(model, tok)
    wrapped.state_dict = {prefix + name: tensor for name, tensor in wrapped.state_dict.items()}
    path = checkpoint.save(out, wrapped)
    raw = torch.load(path, weights_only=True)
    assert raw["state_dict"].keys() == model.state_dict().keys()
    assert not any("module" in name or "_orig_mod" in name for name in load_file(out / "sft" / "model.safetensors"))
    # and a file that somebody else wrote with the prefixes
    raw["state_dict"] = {prefix + name: tensor for name, tensor in raw["state_dict"].items()}
    torch.save(raw, path)
    assert max_diff(GPT.from_checkpoint(path)(random_ids(1, 9)), model(random_ids(1, 9))) == 0


def test_names_lose_a_wrapper_s_prefix_only_in_front() -> None:
    names = ["module.blocks.0.module.weight", "_orig_mod.module.a", "modules.b", "c._orig_mod.d"]
    bare = ["blocks.0.module.weight", "a", "modules.b", "c._orig_mod.d"]
    assert list(checkpoint.unwrapped(dict.fromkeys(names, torch.zeros(1)))) == bare
    distributed = torch.nn.DataParallel(model_of_400())
    assert checkpoint.unwrapped(distributed.state_dict()).keys() == model_of_400().state_dict().keys()


def test_training_states_of_other_types_are_read_as_float32(out: Path) -> None:
    path = out / "ckpt_sft.pt"
    raw = torch.load(path, weights_only=True)
    raw["state_dict"] = {name: tensor.bfloat16() for name, tensor in raw["state_dict"].items()}
    del raw["digest"]
    torch.save(raw, path)
    back = GPT.from_checkpoint(path)
    assert {parameter.dtype for parameter in back.parameters()} == {torch.float32}
    assert max_diff(back(random_ids(1, 9)), model_of_400()(random_ids(1, 9))) < 0.1


def test_saving_again_replaces_and_latest_follows(tmp_path: Path, tok: Tokenizer) -> None:
    checkpoint.save(tmp_path, contents(model_of_400(seed=1), tok))
    assert os.readlink(tmp_path / "latest") == "sft"  # relative, so that the folder can be moved
    other = contents(model_of_400(seed=2), tok)
    other.stage = "dpo"
    checkpoint.save(tmp_path, other)
    assert os.readlink(tmp_path / "latest") == "dpo"
    checkpoint.save(tmp_path, contents(model_of_400(seed=3), tok))
    assert os.readlink(tmp_path / "latest") == "sft"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt_dpo.pt", "ckpt_sft.pt", "dpo", "latest", "sft"]
    ids = random_ids(1, 9)
    for path, seed in (("latest", 3), ("sft", 3), ("ckpt_sft.pt", 3), ("dpo", 2), ("ckpt_dpo.pt", 2)):
        assert torch.equal(GPT.from_checkpoint(tmp_path / path)(ids), model_of_400(seed=seed)(ids))
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    assert checkpoint.load(moved / "latest").stage == "sft"


def test_point_replaces_a_link_also_a_broken_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = tmp_path / "latest"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        checkpoint.point(link, tmp_path / name)
        assert link.resolve() == (tmp_path / name).resolve()
    with monkeypatch.context() as patch:  # a crash in between leaves the old one
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("crash")))
        with pytest.raises(UserError, match="latest cannot be pointed at"):
            checkpoint.point(link, tmp_path / "a")
    assert link.resolve() == (tmp_path / "b").resolve()
    (tmp_path / "b").rmdir()
    checkpoint.point(link, tmp_path / "a")
    assert link.resolve() == (tmp_path / "a").resolve()
    link.unlink()
    link.mkdir()
    (link / "precious").touch()
    with pytest.raises(UserError, match="latest cannot be pointed at"):
        checkpoint.point(link, tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]
    assert (link / "precious").exists()


def test_a_full_disk_is_one_line_and_leaves_the_old_files(out: Path, tok: Tokenizer) -> None:
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    new = contents(model_of_400(seed=1), tok)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot write .*ckpt_sft\.pt"):
            checkpoint.save(out, new)
        with pytest.raises(UserError, match=r"cannot write .*model\.safetensors"):
            hf.save_folder(out / "sft", new.config, new.state_dict, {"stage": "sft", "step": 1}, stop_id=2, pad_id=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()} == before


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, tok: Tokenizer) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write .*ckpt_sft.pt"):
        checkpoint.save(tmp_path / "file", contents(model_of_400(), tok))
    (tmp_path / "sft").touch()  # where the folder should be
    with pytest.raises(UserError, match="cannot write .*sft/model.safetensors"):
        checkpoint.save(tmp_path, contents(model_of_400(), tok))


# Bad files, one kind after the other


def test_nothing_there(tmp_path: Path) -> None:
    assert "no checkpoint there" in refusal(tmp_path / "ckpt_sft.pt")
    (tmp_path / "latest").symlink_to("gone")
    assert "no checkpoint there" in refusal(tmp_path / "latest")


def test_a_truncated_file_at_every_place(out: Path) -> None:
    path = out / "ckpt_sft.pt"
    whole = path.read_bytes()
    ends = {
        0,
        1,
        2,
        3,
        4,
        5,
        30,
        31,
        64,
        1000,
        *range(0, len(whole), len(whole) // 40),
        *range(len(whole) - 40, len(whole)),
    }
    for end in sorted(ends):
        path.write_bytes(whole[:end])
        refusal(path)


def test_a_damaged_file_is_refused_or_read_but_never_a_traceback(out: Path) -> None:
    path = out / "ckpt_sft.pt"
    whole = path.read_bytes()
    begin = whole.index(b"data.pkl")  # what describes the tensors, where a wrong byte means most
    draw = random.Random(0)
    refused = 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[begin + draw.randrange(2500)] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            GPT.from_checkpoint(path)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 60


def test_random_bytes_and_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ckpt_sft.pt"
    draw = random.Random(0)
    samples = [draw.randbytes(draw.randrange(1, 60)) for _ in range(200)]
    samples += [b"hello\n", b'{"format": 1}', b"PK\x03\x04", b"\x80\x02.", b"\x80\x02}q\x00.", b"\x80\x02K\x01."]
    for sample in samples:
        path.write_bytes(sample)
        refusal(path)
    others: list[Any] = [[], {}, None, 1, {"model": {}}, {"format": 2}, {"format": torch.zeros(3)}, {"format": "1"}]
    for obj in others:
        torch.save(obj, path)
        assert "not a pocketgpt checkpoint of format 1" in refusal(path)
    shutil.copy(Path(__file__), path)
    refusal(path)


class Bomb:
    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


def test_code_in_a_file_is_not_run(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = out / "exploded"
    monkeypatch.setenv("BOMB", str(target))
    path = out / "ckpt_sft.pt"
    raw = torch.load(path, weights_only=True)
    torch.save(raw | {"metrics": {"loss": Bomb()}}, path)
    assert "refused" in refusal(path)
    path.write_bytes(pickle.dumps(raw | {"metrics": Bomb()}))
    refusal(path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Bomb()))  # it would have, though
    assert target.exists()


@pytest.mark.parametrize("key", [key for key in checkpoint.KEYS if key != "format"])
def test_a_missing_or_mistyped_entry(key: str, out: Path) -> None:
    whole = (out / "ckpt_sft.pt").read_bytes()
    assert f"the entry {key!r} is missing" in broken(out / "ckpt_sft.pt", lambda raw: raw.pop(key))
    (out / "ckpt_sft.pt").write_bytes(whole)
    assert f"the entry {key!r} is missing" in broken(out / "ckpt_sft.pt", lambda raw: raw.update({key: None}))


NAME = "blocks.1.attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: raw["state_dict"].pop(NAME), f"has no {NAME}"),
        (lambda raw: raw["state_dict"].pop("lm_head.weight"), "has no lm_head.weight"),
        (lambda raw: raw["state_dict"].update(extra=torch.zeros(1)), "has an unknown extra"),
        (lambda raw: raw["state_dict"].update({5: torch.zeros(1)}), "has an unknown 5"),
        (
            lambda raw: raw["state_dict"].update({NAME: torch.zeros(32, 31)}),
            f"{NAME} is (32, 31), its config says (32, 32)",
        ),
        (lambda raw: raw["state_dict"].update({NAME: torch.zeros(32 * 32)}), f"{NAME} is (1024,)"),
        (lambda raw: raw["state_dict"].update({NAME: [1.0]}), f"{NAME} is list"),
        (lambda raw: raw["state_dict"][NAME].fill_(float("nan")), f"{NAME} holds NaN"),
        (lambda raw: raw["state_dict"][NAME][3].fill_(float("inf")), f"{NAME} holds NaN or infinity"),
        (lambda raw: raw["state_dict"].update({"lm_head.weight": torch.zeros(400, 32)}), "differ"),
        (lambda raw: raw["state_dict"].clear(), "has no "),
        (lambda raw: raw["config"].update(n_layer=3), "has no blocks.2."),
        (lambda raw: raw["config"].update(n_layer=1), "has an unknown blocks.1."),
        (lambda raw: raw["config"].update(vocab_size=512), "is (400, 32), its config says (512, 32)"),
        (lambda raw: raw["config"].update(position="learned"), "has no position.weight"),
        (lambda raw: raw["config"].update(n_layers=3), "unknown model key 'n_layers'"),
        (lambda raw: raw["config"].update(n_layer="2"), "n_layer is '2'"),
        (lambda raw: raw.update(tokenizer="{}"), "not a tokenizer.json"),
        (lambda raw: raw.update(tokenizer="garbage"), "not a tokenizer.json"),
    ],
)
def test_a_checkpoint_that_contradicts_itself(change: Callable[[dict], object], says: str, out: Path) -> None:
    assert says in broken(out / "ckpt_sft.pt", change)


def test_a_config_that_makes_no_model_names_the_file(out: Path) -> None:
    assert "n_embd=33" in broken(out / "ckpt_sft.pt", lambda raw: raw["config"].update(n_embd=33))


def test_a_tokenizer_larger_than_the_model(tmp_path: Path, tok: Tokenizer) -> None:
    path = checkpoint.save(tmp_path, contents(tiny(vocab_size=399), tok))
    assert "the tokenizer has 400 ids and the model 399" in refusal(path)
    assert "the tokenizer has 400 ids and the model 399" in refusal(tmp_path / "sft")
    checkpoint.save(tmp_path, contents(tiny(vocab_size=500), tok))  # padding is fine
    assert GPT.from_checkpoint(path).n_tokens == 400


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_is_not_complete(missing: str, out: Path) -> None:
    (out / "sft" / missing).unlink()
    assert missing in refusal(out / "sft")
    (out / "sft" / missing).mkdir()  # something else of that name
    assert missing in refusal(out / "sft")


@pytest.mark.parametrize(
    "garbage", ["", "{", "[]", "nonsense", "\x00", "null", "1", "[" * 100_000, '{"model_type": "llama"}']
)
def test_a_folder_with_garbage_for_a_config(garbage: str, out: Path) -> None:
    (out / "sft" / "config.json").write_text(garbage)
    refusal(out / "sft")


def test_a_folder_with_bytes_for_a_config(out: Path) -> None:
    (out / "sft" / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json" in refusal(out / "sft")


def test_a_folder_with_garbage_for_a_tokenizer(out: Path) -> None:
    for garbage in (b"", b"{}", b"\xff", b'{"version": "1.0"}'):
        (out / "sft" / "tokenizer.json").write_bytes(garbage)
        assert "tokenizer.json" in refusal(out / "sft")


def test_a_truncated_safetensors_file(out: Path) -> None:
    path = out / "sft" / "model.safetensors"
    whole = path.read_bytes()
    for end in (0, 1, 7, 8, 9, 500, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert "model.safetensors" in refusal(out / "sft")
    path.write_bytes(whole + b"x")
    assert "model.safetensors" in refusal(out / "sft")
    path.write_bytes(b"\xff" * 200)
    assert "model.safetensors" in refusal(out / "sft")


def test_a_folder_whose_weights_are_not_those_of_its_config(out: Path) -> None:
    path = out / "sft" / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.1.self_attn.k_proj.weight"
    for changed, says in (
        ({key: value for key, value in weights.items() if key != name}, "has no blocks.1.attn.k_proj.weight"),
        (weights | {"model.layers.7.mlp.bias": torch.zeros(3)}, "has an unknown blocks.7.mlp.bias"),
        (weights | {name: torch.zeros(2, 2)}, "blocks.1.attn.k_proj.weight is (2, 2)"),
        (weights | {name: weights[name] * float("nan")}, "holds NaN"),
    ):
        save_file(changed, path)
        assert says in refusal(out / "sft")


def test_a_gpt2_folder_with_joined_projections_of_a_wrong_shape(tmp_path: Path, tok: Tokenizer) -> None:
    checkpoint.save(tmp_path, contents(model_of_400(**PRESETS["gpt2"]), tok))
    path = tmp_path / "sft" / "model.safetensors"
    weights = load_file(path)
    name = "transformer.h.0.attn.c_attn.weight"
    assert weights[name].shape == (32, 96)
    for shape in ((32, 95), (32, 2), (96, 32), (5,), (1,)):
        save_file(weights | {name: torch.zeros(shape)}, path)
        assert "blocks.0.attn." in refusal(tmp_path / "sft")


def test_notes_of_a_wrong_type_in_a_folder_are_no_obstacle(out: Path) -> None:
    path = out / "sft" / "config.json"
    raw = json.loads(path.read_text())
    notes: list[Any] = [None, [], "x", {}, {"stage": 3, "step": "many"}, {"stage": None}]
    for about in notes:
        path.write_text(json.dumps(raw | {"pocketgpt": about}))
        loaded = checkpoint.load(out / "sft")
        assert isinstance(loaded.stage, str)
        assert loaded.step == 0
