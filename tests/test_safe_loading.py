"""Whatever is wrong with a model file, every program that reads one says which file and why, and runs nothing in it."""

import ast
import json
import os
import pickle
import shutil
import struct
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from safetensors.torch import load_file, save_file

import chat
import dpo
import evaluate
import kv_cache
import sft
from base_model import GPT, PRESETS
from pocketgpt import checkpoint, optim, sharded, trainer
from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer
from tests.test_saving import LOG, STAGE

ROOT = Path(__file__).resolve().parents[1]
NAME = "blocks.1.attn.k_proj.weight"
HF_NAME = "model.layers.1.self_attn.k_proj.weight"


class Bomb:
    """Code in a pickle: it makes a folder."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, tok: Tokenizer) -> Path:
    """ckpt_sft.pt and the folder sft, of a shape that has no weights of the width of a head."""
    out = tmp_path_factory.mktemp("clean")
    model = tiny(vocab_size=400, **PRESETS["llama"])
    checkpoint.save(out, checkpoint.Checkpoint("sft", model.config.to_dict(), model.state_dict(), tok))
    (out / "rows.jsonl").write_text('{"prompt": "hi", "completion": "ho"}\n' * 3)
    return out


@pytest.fixture
def out(clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOMB", str(tmp_path / "exploded"))
    return Path(shutil.copytree(clean, tmp_path / "out", symlinks=True))


def optimizer(model: GPT) -> optim.Optimizer:
    return optim.Optimizer(model, optim.OptimConfig("muon", 0.9, 0.95, 1e-8, 0.1, 0.02, 0.9), 0.1)


# --- what can be wrong ----------------------------------------------------------------------------------------------


def entry(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Damage to a .pt: one entry is another, the checksums are right."""

    def damage(path: Path) -> None:
        raw = torch.load(path, weights_only=True)
        change(raw)
        torch.save(raw, path)

    return damage


def legacy(path: Path) -> None:
    path.write_bytes(pickle.dumps({"format": 1, "state_dict": Bomb()}))


def flipped(path: Path) -> None:
    """One bit of one weight: the checksum is all that can tell."""
    raw = bytearray(path.read_bytes())
    raw[raw.index(struct.pack("<f", torch.load(path, weights_only=True)["state_dict"][NAME][0, 0]))] ^= 1
    path.write_bytes(raw)


def other_tokenizer(text: str) -> str:
    """As many tokens, and the last two exchanged."""
    raw = json.loads(text)
    merges, vocab = raw["model"]["merges"], raw["model"]["vocab"]
    merges[-1], merges[-2] = merges[-2], merges[-1]
    a, b = sorted(vocab, key=vocab.__getitem__)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    return json.dumps(raw)


def set_config(**changes: Any) -> Callable[[Path], object]:
    return entry(lambda raw: raw["config"].update(changes))


PT: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (entry(lambda raw: raw["metrics"].update(loss=Bomb())), "refused"),
    "code in a legacy pickle": (legacy, "not a readable checkpoint"),
    "flipped bit": (flipped, "wrong checksum"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), "not a readable checkpoint"),
    "n_head, where shapes fit": (set_config(n_head=4, n_kv_head=4), "exchanged or edited"),
    "rope_theta": (set_config(rope_theta=500.0), "exchanged or edited"),
    "huge n_layer": (set_config(n_layer=10**9), "model.n_layer is 1000000000"),
    "huge block_size": (set_config(block_size=10**12), "model.block_size is 1000000000000"),
    "huge n_embd": (set_config(n_embd=2**20), "its config says (400, 1048576)"),
    "wrong shape": (entry(lambda raw: raw["state_dict"].update({NAME: torch.zeros(2, 2)})), f"{NAME} is (2, 2)"),
    "one weight for all": (
        entry(lambda raw: raw["state_dict"].update({NAME: torch.zeros(1).expand(10**6, 10**6)})),
        f"{NAME} is (1000000, 1000000)",
    ),
    "sparse weight": (entry(lambda raw: raw["state_dict"].update({NAME: torch.zeros(32, 32).to_sparse()})), NAME),
    "weight without contents": (
        entry(lambda raw: raw["state_dict"].update({NAME: torch.zeros(32, 32, device="meta")})),
        NAME,
    ),
    "whole numbers": (entry(lambda raw: raw["state_dict"].update({NAME: torch.zeros(32, 32).int()})), NAME),
    "NaN": (entry(lambda raw: raw["state_dict"][NAME].fill_(float("nan"))), "holds NaN"),
    "other tokenizer": (
        entry(lambda raw: raw.update(tokenizer=other_tokenizer(raw["tokenizer"]))),
        "exchanged or edited",
    ),
}


def header(change: Callable[[dict], object] | None, size: int | None = None) -> Callable[[Path], object]:
    """Damage to the header of sft/model.safetensors: its entries, or the size that it claims."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        entries = json.loads(raw[8 : 8 + length])
        if change:
            change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + raw[8 + length :])

    return damage


def weights(**changes: torch.Tensor) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(load_file(path) | {HF_NAME: changes["k"]}, path)

    return damage


def text(name: str, change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(change((folder / name).read_text()))


def hf_config(**changes: Any) -> Callable[[Path], object]:
    return text("config.json", lambda old: json.dumps(json.loads(old) | changes))


def linked(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        shutil.move(folder / name, folder.parent.parent / name)
        (folder / name).symlink_to(folder.parent.parent / name)

    return damage


def pickled(folder: Path) -> None:
    torch.save({"weights": Bomb()}, folder / "model.safetensors")


FOLDER: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (pickled, "model.safetensors"),
    "oversized header": (header(None, 2**60), "model.safetensors"),
    "header beyond the end": (header(None, 10**7), "model.safetensors"),
    "overlapping tensors": (
        header(lambda e: e[HF_NAME].update(data_offsets=e["model.norm.weight"]["data_offsets"])),
        "model.safetensors",
    ),
    "shape against size": (header(lambda e: e[HF_NAME].update(shape=[10**9, 10**9])), "model.safetensors"),
    "unknown type": (header(lambda e: e[HF_NAME].update(dtype="F31")), "model.safetensors"),
    "other type": (header(lambda e: e[HF_NAME].update(dtype="I32")), "exchanged or edited"),
    "n_head, where shapes fit": (
        hf_config(num_attention_heads=4, num_key_value_heads=4, head_dim=8),
        "exchanged or edited",
    ),
    "huge layers": (hf_config(num_hidden_layers=10**9), "n_layer is 1000000000"),
    "huge context": (hf_config(max_position_embeddings=10**15), "block_size is 1000000000000000"),
    "wrong shape": (weights(k=torch.zeros(2, 2)), f"{NAME} is (2, 2)"),
    "NaN": (weights(k=torch.full((32, 32), float("nan"))), "holds NaN"),
    "other tokenizer": (text("tokenizer.json", other_tokenizer), "exchanged or edited"),
    "link out of it": (linked("model.safetensors"), "leads out of its folder"),
    "link of the configuration": (linked("config.json"), "leads out of its folder"),
}

# --- who reads ------------------------------------------------------------------------------------------------------


def program(main: Callable[[], None], *before: str) -> Callable[[Path], object]:
    """A whole program whose argument is the file, run in a place where writing would be seen."""

    def read(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            rows = path.parent / "rows.jsonl"
            patch.setattr(sys, "argv", ["script.py", *(part.format(path, rows=rows) for part in before)])
            main()

    return read


STAGE_ARGUMENTS = ("checkpoint={}", "out={}.new", "device=cpu", "train.dtype=float32", "data=mine", "data.path={rows}")
READERS: dict[str, Callable[[Path], object]] = {
    "library": GPT.from_checkpoint,
    "chat": program(chat.main, "{}", "--prompt", "hi"),
    "kv_cache": program(kv_cache.main, "checkpoint={}", "device=cpu"),
    "sft": program(sft.main, *STAGE_ARGUMENTS),
    "dpo": program(dpo.main, *STAGE_ARGUMENTS),
}


def refusal(read: Callable[[Path], object], path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What a reader says: one line with the file's name, no warning beside it, nothing run and nothing written."""
    before = sorted(path.parent.rglob("*"))
    with warnings.catch_warnings(record=True) as remarks, pytest.raises(UserError) as caught:
        warnings.simplefilter("always")
        read(path)
    line = str(caught.value)
    assert not remarks and "\n" not in line and len(line) < 500 and str(path) in line
    assert capsys.readouterr().out == ""
    assert sorted(path.parent.rglob("*")) == before
    assert not Path(os.environ["BOMB"]).exists()
    return line


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", PT)
def test_a_file(out: Path, damage: str, reader: str, capsys: pytest.CaptureFixture[str]) -> None:
    break_it, says = PT[damage]
    break_it(out / "ckpt_sft.pt")
    assert says in refusal(READERS[reader], out / "ckpt_sft.pt", capsys)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("damage", FOLDER)
def test_a_folder(out: Path, damage: str, reader: str, capsys: pytest.CaptureFixture[str]) -> None:
    break_it, says = FOLDER[damage]
    break_it(out / "sft")
    assert says in refusal(READERS[reader], out / "sft", capsys)


@pytest.mark.parametrize("damage", ["code", "flipped bit", "n_head, where shapes fit"])
def test_evaluate_names_a_bad_file_among_good_ones(out: Path, damage: str) -> None:
    shutil.copy(out / "ckpt_sft.pt", out / "ckpt_dpo.pt")
    PT[damage][0](out / "ckpt_dpo.pt")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(evaluate, "STAGES", {"dpo": "DPO"})  # the bad one is read first: this is not about patience
        program(evaluate.main, "out={}", "items=1", "device=cpu")(out)
    assert PT[damage][1] in str(caught.value) and "ckpt_dpo.pt" in str(caught.value)
    assert not (out / "results.json").exists()


RESUME: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (entry(lambda raw: raw["state"].update(last_metrics=Bomb())), "refused"),
    "code in a legacy pickle": (legacy, "not a readable checkpoint"),
    "cut short": (lambda path: os.truncate(path, path.stat().st_size // 2), "not a readable checkpoint"),
    "no dict": (entry(lambda raw: raw.clear()), "cannot resume from it ('state')"),
    "wrong shape": (entry(lambda raw: raw["model"].update({NAME: torch.zeros(2, 2)})), "cannot resume from it"),
    "missing weight": (entry(lambda raw: raw["model"].pop(NAME)), "cannot resume from it"),
    "NaN": (entry(lambda raw: raw["model"][NAME].fill_(float("nan"))), "NaN or infinity"),
    "moments of another shape": (
        entry(lambda raw: raw["optimizer"][0]["state"][0].update(exp_avg=torch.zeros(7, 3))),
        "exp_avg of shape (7, 3) for (400, 32)",
    ),
    "Muon's of another shape": (
        entry(lambda raw: raw["optimizer"][1]["state"].update({0: {"momentum": torch.zeros(7, 3, 3)}})),
        "momentum of shape (7, 3, 3)",
    ),
    "another optimizer": (entry(lambda raw: raw["optimizer"].pop()), "cannot resume from it"),
    "step of another type": (entry(lambda raw: raw["state"].update(step="3")), "step is '3'"),
    "unknown entry": (entry(lambda raw: raw["state"].update(extra=1)), "unexpected keyword argument 'extra'"),
    "best weights of another shape": (
        entry(lambda raw: raw["state"].update(best_weights={NAME: torch.zeros(2, 2)})),
        "cannot resume from it",
    ),
}


@pytest.mark.parametrize("damage", RESUME)
def test_a_resume_file(out: Path, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny(vocab_size=400, **PRESETS["llama"])
    both = optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    both.step(1.0)  # so that there are moments
    path = out / "resume_sft.pt"
    trainer.save_resume(sharded.Writer(), path, model, both, STAGE, trainer.State(step=3))
    RESUME[damage][0](path)
    assert RESUME[damage][1] in refusal(lambda file: trainer.load_resume(file, model, both, LOG), path, capsys)


def test_what_is_right_is_read(out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also without a digest, with links within the folder, and as the hub's cache lays folders out."""
    for name in ("ckpt_sft.pt", "sft", "latest"):
        READERS["chat"](out / name)
    capsys.readouterr()
    entry(lambda raw: raw.pop("digest"))(out / "ckpt_sft.pt")
    GPT.from_checkpoint(out / "ckpt_sft.pt")
    (out / "sft" / "real").mkdir()
    shutil.move(out / "sft" / "config.json", out / "sft" / "real")
    (out / "sft" / "config.json").symlink_to("real/config.json")
    GPT.from_checkpoint(out / "sft")
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    for number, name in enumerate(("config.json", "model.safetensors", "tokenizer.json")):
        shutil.copy(out / "sft" / name, blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    GPT.from_checkpoint(snapshot)


# --- the sources ----------------------------------------------------------------------------------------------------


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def unsafe(path: Path) -> list[str]:
    """Every call in a source file that could run what a file brings along."""
    found = []
    for name, node in calls(path):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        last = name.split(".")[-1]
        bad = [
            name in ("eval", "exec", "compile", "__import__", "np.load", "os.system", "os.popen"),
            name.startswith(("pickle.", "dill.", "joblib.", "marshal.", "shelve.", "yaml.load")),
            name == "torch.load" and keywords.get("weights_only") != "True",
            last in ("Environment", "Template", "NativeEnvironment"),  # Jinja runs what it reads; its sandbox does not
            any(keywords.get(key, "False") != "False" for key in ("trust_remote_code", "allow_pickle", "shell")),
        ]
        if any(bad):
            found.append(ast.unparse(node))
    return found


SOURCES = [path for part in (".", "pocketgpt", "data", "docs") for path in sorted((ROOT / part).glob("**/*.py" if part != "." else "*.py"))]  # fmt: skip


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_source_runs_what_it_reads(path: Path) -> None:
    assert unsafe(path) == []


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    bad = [
        "torch.load(path)", "torch.load(path, weights_only=False)", "pickle.load(file)", "eval(text)", "exec(text)",
        "jinja2.Template(text)", "Environment()", "load(x, trust_remote_code=True)", "np.load(path)", "os.system(text)",
        "subprocess.run(text, shell=True)",
    ]  # fmt: skip
    path = tmp_path / "bad.py"
    path.write_text("\n".join([*bad, "torch.load(p, weights_only=True)", "model.eval()", "re.compile(text)"]))
    assert unsafe(path) == bad
    assert len(SOURCES) > 35
