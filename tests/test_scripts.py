"""The whole road through the real command lines, at the smallest size, and what bad input gets on the way."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import dpo
import pretrain
import sft
from base_model import GPT
from kv_cache import CachedGPT
from pocketgpt import checkpoint, config, evaluation, tasks
from pocketgpt.errors import UserError
from pocketgpt.metrics import read_jsonl
from pocketgpt.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
TINY = ["model.n_layer=2", "model.n_embd=32", "model.n_head=2", "model.n_kv_head=1", "model.block_size=128"]
SHORT = ["train.minutes=0", "train.steps=3", "train.batch_size=2", "train.micro_batch_size=1", "train.dtype=float32"]
WORDS = "the king and queen of the forest walked by a river where an old fox spoke of gold silver bread".split()


def command(cwd: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, from another folder, without network settings; check its exit code."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *arguments[1:]],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder after pretrain, sft, dpo, kv_cache and evaluate on own data, and what each of them printed."""
    folder = tmp_path_factory.mktemp("road")
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(900)]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    pairs = [{"prompt": f"Say {w}.", "chosen": w, "rejected": w.upper()} for w in dict.fromkeys(WORDS)]
    (folder / "pairs.jsonl").write_text(
        "\n".join(map(json.dumps, [*pairs, pairs[0] | {"rejected": pairs[0]["chosen"]}]))
    )
    out = f"out={folder / 'out'}"
    runs = {
        "pretrain": [
            "data=mine",
            f"data.path={folder / 'text.txt'}",
            f"cache={folder / 'cache'}",
            "vocab_size=300",
            *TINY,
            *SHORT,
        ],
        "sft": ["data.generate=40", *SHORT],
        "dpo": ["data=mine", f"data.path={folder / 'pairs.jsonl'}", *SHORT],
        "kv_cache": ["new_tokens=20", "prompt_lengths=[16,64]", "repeats=1"],
        "evaluate": ["items=2"],
    }
    return folder, {name: command(folder, f"{name}.py", out, *arguments).stdout for name, arguments in runs.items()}


def test_every_stage_leaves_what_it_promises(road: tuple[Path, dict[str, str]]) -> None:
    folder, printed = road
    out = folder / "out"
    for stage, script in (("base", "pretrain"), ("sft", "sft"), ("dpo", "dpo")):
        ckpt = torch.load(out / f"ckpt_{stage}.pt", weights_only=True)
        assert (ckpt["stage"], ckpt["step"], ckpt["format"]) == (stage, 3 if stage != "dpo" else ckpt["step"], 1)
        assert ckpt["config"]["vocab_size"] == 300 == Tokenizer.from_json(ckpt["tokenizer"]).vocab_size
        assert ckpt["run_config"]["train"]["steps"] == 3
        assert all(len(digest) == 64 for digest in ckpt["fingerprints"].values())
        names = {path.name for path in (out / stage).iterdir()}
        assert names == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        rows = read_jsonl(out / f"metrics_{stage}.jsonl")
        assert {row["kind"] for row in rows} == {"train", "val"} and rows[-1]["step"] == 3
        assert (out / f"plot_{stage}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"config_{stage}.yaml").exists() and str(out / f"ckpt_{stage}.pt") in printed[script]
        assert "next: " in printed[script] and f"report {out / 'report.html'}" in printed[script]
        about = json.loads((out / f"run_{stage}.json").read_text())
        assert about["config"] == ckpt["run_config"] and about["environment"]["torch"] and about["unit"]
        assert about["readings"] and any(digest in about["data"].values() for digest in ckpt["fingerprints"].values())
    assert (out / "latest").resolve() == (out / "dpo").resolve()
    assert {path.name for path in folder.iterdir()} == {"text.txt", "pairs.jsonl", "cache", "out"}, "no stray outputs"


def test_the_report_shows_the_whole_road(road: tuple[Path, dict[str, str]]) -> None:
    out = road[0] / "out"
    (data,) = re.findall(
        r'<script id="report" type="application/json">(.*?)</script>', (out / "report.html").read_text("utf-8"), re.S
    )
    page = json.loads(data)
    sections = [
        "overview",
        "evaluation",
        "stage-base",
        "stage-sft",
        "stage-control",
        "stage-dpo",
        "tokens",
        "cache-0",
        "settings",
    ]
    assert [section["id"] for section in page["sections"]] == sections
    for stage in ("base", "sft", "control", "dpo"):
        rows = [row for row in read_jsonl(out / f"metrics_{stage}.jsonl") if row["kind"] == "train"]
        columns = page["columns"][f"0/{stage}/train"]
        for key, column in columns.items():
            values = [row[key] if key != "minutes" else row["elapsed_s"] / 60 for row in rows]
            assert column == pytest.approx(values, rel=1e-5), key
        assert {
            "loss",
            "tokens",
            "minutes",
            "lr",
            "grad_norm",
            "tokens_per_s",
            "mfu",
            "memory_bytes",
            "loader_share",
        } <= columns.keys()
    assert page["columns"]["0/base/train"]["tokens"] == [2 * 128, 3 * 2 * 128]
    assert len(data) < 300_000 and "run evaluate.py again" not in data


def test_logged_loss_starts_at_the_entropy_of_a_guess(road: tuple[Path, dict[str, str]]) -> None:
    first = read_jsonl(road[0] / "out" / "metrics_base.jsonl")[0]
    assert first["loss"] == pytest.approx(torch.log(torch.tensor(300.0)).item(), abs=0.05)
    assert first["tokens_per_s"] > 0 and 0 < first["mfu"] < 1 and first["memory_bytes"] > 1e7


def test_folder_opens_in_transformers(road: tuple[Path, dict[str, str]]) -> None:
    transformers = pytest.importorskip("transformers")
    folder = road[0] / "out" / "latest"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = GPT.from_checkpoint(folder)
    ids = torch.randint(300, (1, 50))
    with torch.no_grad():
        assert (theirs(ids).logits - ours(ids)).abs().max() < 1e-4


def test_kv_cache_proves_and_reports(road: tuple[Path, dict[str, str]]) -> None:
    folder, printed = road
    report = json.loads(printed["kv_cache"].splitlines()[-1])
    assert 0 < report["max_difference"] < 1e-4
    assert report["speed"]["new_tokens"] == 20 and report["speed"]["ratio"] > 0
    # 2 x 2 layers x 1 kv head x 16 dims x 4 bytes for each token
    memory = report["memory"]
    assert memory["formula_bytes"] == memory["static_bytes"] == 2 * 2 * 1 * 16 * 4 * memory["tokens"]
    assert memory["dynamic_formula_bytes"] == memory["dynamic_bytes"]
    assert printed["kv_cache"].count(" ok ") == 36  # six kinds of cache, six ways to feed each
    assert (folder / "out" / "plot_kv_cache.png").exists() and (folder / "out" / "kv_cache.json").exists()


def test_kv_cache_exits_1_when_the_cache_is_wrong(road: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import torch, kv_cache\nfrom pocketgpt.errors import run\n"
        "right = kv_cache.KVCache.positions\n"
        "kv_cache.KVCache.positions = lambda self, n, device: right(self, n, device) * 0\n"
        "run(kv_cache.main)\n"
    )
    done = subprocess.run([sys.executable, str(script), f"out={road[0] / 'out'}"], capture_output=True, text=True)
    assert done.returncode == 1 and "the cache is wrong" in done.stderr


def test_evaluate_measures_all_stages_and_reuses_what_is_current(road: tuple[Path, dict[str, str]]) -> None:
    folder, printed = road
    results = json.loads((folder / "out" / "results.json").read_text())
    assert list(results["stages"]) == ["base", "sft", "control", "dpo"]
    for numbers in results["stages"].values():
        assert all(asked == 2 for _, asked in numbers["families"].values()) and len(numbers["families"]) >= 6
        assert numbers["greedy"][1] == 2 * len(numbers["families"])
        assert 2 < numbers["bits_per_byte"] < 9 and numbers["preference"][1] == 1
    before = (folder / "out" / "results.json").stat().st_mtime_ns
    again = command(folder, "evaluate.py", f"out={folder / 'out'}", "items=2").stdout
    assert (folder / "out" / "results.json").stat().st_mtime_ns == before
    assert again.split() == printed["evaluate"].split()


def test_preference_data_is_split_and_equal_answers_are_counted(road: tuple[Path, dict[str, str]]) -> None:
    folder, printed = road
    n = len(set(WORDS))
    assert f"{n - 1} pairs to train on (1 equal, 0 too long), 1 held out" in printed["dpo"]
    assert len(read_jsonl(folder / "out" / "pairs_train.jsonl")) == n - 1


def test_a_finished_run_can_be_made_longer(road: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    """Six steps at once, and three that are resumed to six, with rates that do not depend on the number of steps."""
    folder = road[0]
    common = [
        "data=mine",
        f"data.path={folder / 'text.txt'}",
        f"cache={folder / 'cache'}",
        "vocab_size=300",
        *TINY,
        *SHORT,
    ]
    common += ["model.dropout=0.1", "train.warmup=0", "train.decay=0", "train.eval_every=3", "train.log_every=1"]
    command(tmp_path, "pretrain.py", "out=whole", *common, "train.steps=6")
    command(tmp_path, "pretrain.py", "out=half", *common, "train.steps=3")
    command(tmp_path, "pretrain.py", "out=half", *common, "train.steps=6", "train.resume=force")
    whole, half = (
        torch.load(tmp_path / side / "ckpt_base.pt", weights_only=True)["state_dict"] for side in ("whole", "half")
    )
    assert all(torch.equal(whole[name], half[name]) for name in whole)
    losses = [
        [(r["step"], r["loss"]) for r in read_jsonl(tmp_path / side / "metrics_base.jsonl") if r["kind"] == "train"]
        for side in ("whole", "half")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6


# --- bad input, in this process: each case is one line that names the culprit, and nothing is written ---------------


def fails(main: Any, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments])
    with pytest.raises(UserError) as error:
        main()
    return str(error.value)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (b"", "a.txt", "a.txt"),
        (b"too short", "a.txt", "vocabulary of"),
        (b"caf\xe9 " * 50, "a.txt", "byte 3"),
        (b'{"text": "fine"}\n{"text": }\n', "a.jsonl", "a.jsonl:2"),
        (b'{"content": "x"}\n', "a.jsonl", 'no field "text"'),
        (b"x", "a.docx", "not supported"),
    ],
)
def test_bad_text_stops_pretraining(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, name: str, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    text = fails(
        pretrain.main,
        monkeypatch,
        "data=mine",
        f"data.path={tmp_path / name}",
        f"out={out}",
        f"cache={tmp_path / 'cache'}",
    )
    assert message in text and not out.exists()


def test_text_shorter_than_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A few words, and then no more.\n" * 3)
    where = [f"data.path={tmp_path / 'a.txt'}", f"out={tmp_path / 'out'}", f"cache={tmp_path / 'cache'}"]
    text = fails(pretrain.main, monkeypatch, "data=mine", "vocab_size=259", *where)
    assert "too few for windows of 512" in text and not (tmp_path / "out").exists()


def test_vocabulary_larger_than_the_text_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("A few words, and then no more.\n" * 30)
    text = fails(
        pretrain.main,
        monkeypatch,
        "data=mine",
        f"data.path={tmp_path / 'a.txt'}",
        f"cache={tmp_path / 'cache'}",
        f"out={tmp_path / 'out'}",
    )
    assert "not 4096: set vocab_size=" in text and not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("main", "needs"), [(sft.main, "ckpt_base.pt"), (dpo.main, "ckpt_sft.pt")])
def test_missing_checkpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: Any, needs: str) -> None:
    assert needs in fails(main, monkeypatch, f"out={tmp_path / 'out'}") and not (tmp_path / "out").exists()


def test_bad_rows_stop_sft_and_leave_the_old_checkpoint(
    road: tuple[Path, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shutil.copytree(road[0] / "out", out, symlinks=True)
    before = (out / "ckpt_sft.pt").read_bytes()
    path = tmp_path / "chats.jsonl"
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 900}]}
    for row, message in (
        ({"body": "no chat"}, "expected messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "robot"),
        ({"prompt": "only"}, "expected messages"),
        (good, "longer than the block of 128 tokens"),
    ):
        path.write_text("\n".join([json.dumps(row)] * 30))
        text = fails(
            sft.main, monkeypatch, "data=mine", f"data.path={path}", f"out={out}", "device=cpu", "train.dtype=float32"
        )
        assert message in text
    assert (out / "ckpt_sft.pt").read_bytes() == before


def sampling(samples: int) -> dpo.DPOConfig:
    return config.load("dpo", dpo.Config, [f"dpo.samples={samples}"]).dpo


def test_pairs_come_from_answers_that_differ_in_their_check(tok: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    items = tasks.make_items(3, heldout=False, seed=0, families=["add"])
    wrong = ["no", "never", "no"]
    said = [[items[0].answer, *wrong], [items[1].answer] * 4, [items[2].answer, "no", items[2].answer, "no"]]

    def answers(model: Any, tok: Any, prompts: list[Any], settings: Any, seed: int) -> list[str]:
        return [text for four in said for text in four]

    monkeypatch.setattr(evaluation, "answer_many", answers)
    settings = sampling(samples=4)
    model: Any = None
    pairs, counts = dpo.sample_pairs(model, tok, items, settings, 0, "sampling")
    assert [(p.chosen, p.rejected) for p in pairs] == [(items[0].answer, "no"), (items[2].answer, "no")]
    assert [p.prompt for p in pairs] == [items[0].messages, items[2].messages]
    assert counts == {"sampled": 12, "tied": 1}


def test_reference_answers_stand_in_when_nothing_passes(
    tok: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    items = tasks.make_items(2, heldout=False, seed=0, families=["add"])
    monkeypatch.setattr(evaluation, "answer_many", lambda model, tok, prompts, settings, seed: ["no"] * len(prompts))
    settings = sampling(samples=3)
    model: Any = None
    pairs, counts = dpo.sample_pairs(model, tok, items, settings, 0, "sampling")
    assert [(p.chosen, p.rejected) for p in pairs] == [(item.answer, "no") for item in items]
    assert counts == {"sampled": 6, "tied": 2} and "reference answers stand in" in capsys.readouterr().out


def test_stand_ins_leave_out_answers_that_are_right(tok: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = tasks.make_items(2, heldout=False, seed=0, families=["add"])
    said = [right.answer] * 3 + ["no"] * 3
    monkeypatch.setattr(evaluation, "answer_many", lambda model, tok, prompts, settings, seed: said)
    model: Any = None
    pairs, _ = dpo.sample_pairs(model, tok, [right, wrong], sampling(samples=3), 0, "sampling")
    assert [(p.prompt, p.chosen, p.rejected) for p in pairs] == [(wrong.messages, wrong.answer, "no")]


def test_right_answers_in_style_are_preferred_to_right_ones_that_are_not(
    tok: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (item,) = tasks.make_items(1, heldout=False, seed=0, families=["story"])
    place = item.slots["place"]
    ending = item.answer.split(". ")[-1]
    rest = f"There was a crown in the dust. A small fox came by and laughed. {ending}"
    plain = f"One day {item.slots['hero']} went to the {place}. {rest}"
    styled = f"Once upon a time {item.slots['hero']} lived in the {place}. {rest}"
    assert tasks.check(item, plain) and tasks.check(item, styled)
    monkeypatch.setattr(evaluation, "answer_many", lambda model, tok, prompts, settings, seed: [plain, styled])
    model: Any = None
    pairs, _ = dpo.sample_pairs(model, tok, [item], sampling(samples=2), 0, "sampling")
    assert [(p.chosen, p.rejected) for p in pairs] == [(styled, plain)]


def test_heldout_items_for_choosing_and_for_reporting_are_disjoint() -> None:
    test, dev = evaluation.heldout_items(())
    fewer, same = evaluation.heldout_items((), 10)
    keys = [{(item.family, tuple(sorted(item.slots.items()))) for item in side} for side in (test, dev)]
    assert not keys[0] & keys[1] and same == dev
    assert all(tasks.is_heldout(item.family, item.slots) for item in (*test, *dev))
    families = {item.family for item in test}
    assert len(test) == 200 * len(families) and len(dev) == 25 * len(families) and len(fewer) == 10 * len(families)


def test_wilson_interval() -> None:
    low, high = evaluation.wilson(8, 10)
    assert (low, high) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson 1927; the value in every table
    assert evaluation.wilson(0, 0) == (0.0, 1.0)
    for n in range(1, 50):  # no "-0.0%" in a table
        assert f"{evaluation.wilson(0, n)[0]:.1%}" == "0.0%" and evaluation.wilson(n, n)[1] <= 1


def test_batched_answers_equal_single_ones(road: tuple[Path, dict[str, str]]) -> None:
    loaded = checkpoint.load(road[0] / "out" / "ckpt_sft.pt")
    model = CachedGPT.from_loaded(loaded)
    items = tasks.make_items(4, heldout=True, seed=3, families=["add", "reverse", "sequence"])
    prompts = [item.messages for item in items]
    together = evaluation.answer_many(model, loaded.tokenizer, prompts, evaluation.GREEDY, 0)
    alone = [evaluation.answer_many(model, loaded.tokenizer, [p], evaluation.GREEDY, 0)[0] for p in prompts]
    assert together == alone
