"""Shards: the ids of the corpus whatever their size and whenever it was killed, and every window once in an epoch."""

import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume import call

import show
from pocketgpt import shards
from pocketgpt.errors import UserError
from pocketgpt.shards import Shards, ShardWindows, encoders, open_shards, write_shards

ROOT = Path(__file__).resolve().parents[1]
DOCS = ["To be, or not to be", "", "that is the question: <|endoftext|>", "née 🎉\0\t  "] * 5


def whole(tok, docs):
    return [id_ for text in docs for id_ in [*tok.encode(text), tok.eot_id]]


def write(folder, tok, docs, size, processes=1, **options):
    with encoders(tok, processes) as encode:
        return write_shards(folder, "train", lambda: docs, tok, encode, size, **options)


def ids_of(folder, metas):
    return [int(i) for n in range(len(metas)) for i in np.fromfile(folder / f"train-{n:05d}.bin", "<u2")]


class Ring(Shards):
    """Shards of the ids 0, 1, 2, ... without the disk."""

    def __init__(self, counts):
        self.path, self.starts = Path("ring"), np.cumsum([0, *counts])
        self._tokens = lambda number: np.arange(*self.starts[number : number + 2])


# --- writing --------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)  # each example writes to disk
@given(
    docs=st.lists(st.text("ab é\n", max_size=9), min_size=1, max_size=9),
    size=st.integers(1, 40),
    lost=st.integers(0, 9),
)
def test_shards_hold_the_ids_of_the_documents_also_after_a_kill(tok, tmp_path_factory, docs, size, lost):
    folder = tmp_path_factory.mktemp("shards")
    metas = write(folder, tok, docs, size)
    expected = whole(tok, docs)
    assert ids_of(folder, metas) == expected
    assert [meta["count"] for meta in metas[:-1]] == [size] * (len(metas) - 1)
    assert sum(meta["documents"] for meta in metas) == len(docs)
    assert sum(meta["bytes"] for meta in metas) == sum(len(text.encode()) for text in docs)
    files = sorted(folder.iterdir())  # bin, json, bin, json, ...: killed after any of them
    for file in files[min(lost, len(files)) :]:
        file.unlink()
    done = []
    assert write(folder, tok, docs, size, progress=done.append) == metas
    assert ids_of(folder, metas) == expected
    assert sum(done) == sum(len(text.encode()) for text in docs)


def test_processes_change_nothing(tok, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 20)
    assert write(tmp_path / "one", tok, DOCS, 50) == write(tmp_path / "two", tok, DOCS, 50, processes=2)
    assert ids_of(tmp_path / "two", [None] * 6)[:250] == whole(tok, DOCS)[:250]


def test_finished_shards_are_not_written_again_and_damaged_ones_are(tok, tmp_path, capsys):
    metas = write(tmp_path, tok, DOCS, 50)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    write(tmp_path, tok, DOCS, 50)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before
    first, second = tmp_path / "train-00000.bin", tmp_path / "train-00001.bin"
    damaged = bytearray(second.read_bytes())
    damaged[7] ^= 1
    second.write_bytes(damaged)
    write(tmp_path, tok, DOCS, 50)
    assert "train-00001.bin: its checksum is wrong" in capsys.readouterr().out
    assert ids_of(tmp_path, metas) == whole(tok, DOCS)
    assert first.stat().st_mtime_ns == before[first]


def test_no_more_than_asked_is_read(tok, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "BATCH", 1)

    def docs():
        yield from DOCS
        raise AssertionError("read on")

    with encoders(tok, 1) as encode:
        (meta,) = write_shards(tmp_path, "val", docs, tok, encode, 30, most=1)
    assert meta["count"] == 30


# --- windows --------------------------------------------------------------------------------------------------------


@given(
    size=st.integers(1, 60), full=st.integers(0, 25), last=st.integers(1, 60), block=st.integers(1, 40),
    seed=st.integers(0, 9), epoch=st.integers(0, 3),
)  # fmt: skip
def test_no_window_twice_and_none_lost_in_an_epoch(size, full, last, block, seed, epoch):
    ring = Ring([size] * full + [min(last, size)])
    if len(ring) <= block:
        with pytest.raises(UserError, match="too few for windows"):
            ShardWindows(ring, block, seed)
        return
    windows = ShardWindows(ring, block, seed)
    numbers = range(epoch * windows.per_epoch, (epoch + 1) * windows.per_epoch)
    starts = sorted(map(windows.start, numbers))
    assert windows.per_epoch == len(ring) // block
    assert starts[0] < block
    assert np.all(np.diff(starts) == block)  # each once, none left out, no two overlapping
    again = ShardWindows(ring, block, seed)  # a resumed run, or another rank: no state
    for number in reversed(numbers):
        start = windows.start(number)
        assert again.row(number).tolist() == [(start + i) % len(ring) for i in range(block + 1)]


def test_shards_and_windows_are_shuffled_by_seed_and_epoch():
    windows = ShardWindows(Ring([64] * 40), 4, seed=1)
    order = [windows.start(number) // 64 for number in range(2 * windows.per_epoch)]
    groups = [set(order[at : at + 100]) for at in range(0, windows.per_epoch, 128)]
    assert all(len(group) == shards.MIXED for group in groups)  # mixed within a few shards
    assert sorted(order[:5]) != order[:5]
    assert groups[0] != set(range(8))
    assert order[: windows.per_epoch] != order[windows.per_epoch :]
    assert order != [ShardWindows(Ring([64] * 40), 4, 2).start(number) // 64 for number in range(len(order))]


# --- the command, and training --------------------------------------------------------------------------------------


def shard(folder, *arguments, **options):
    command = [sys.executable, str(ROOT / "data/shard.py"), "data=mine", "data.path=text.jsonl", *arguments]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=-1, stderr=-1, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    rows = [{"text": f"number {n} of the rows, which are many and all alike " * (1 + n % 7)} for n in range(2000)]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    killed = shard(folder, "out=out", "vocab_size=270", "shard_tokens=5000", "processes=2", start_new_session=True)
    while killed.poll() is None and not (folder / "out/train-00002.bin.json").exists():
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert not json.loads((folder / "out/shards.json").read_text())["complete"]
    with pytest.raises(UserError, match="are not all made: run the same"):
        open_shards(folder / "out")
    for out, processes in (("out", 2), ("again", 1)):
        run = shard(folder, f"out={out}", "vocab_size=270", "shard_tokens=5000", f"processes={processes}")
        said, wrong = run.communicate(timeout=120)
        assert run.returncode == 0, said + wrong
    return folder


def test_a_killed_run_ends_as_if_it_had_not_been_killed(made):
    files = [sorted(p.name for p in (made / out).iterdir() if p.name != ".lock") for out in ("out", "again")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (made / "out" / name).read_bytes() == (made / "again" / name).read_bytes(), name
    corpus = open_shards(made / "out")
    assert len(corpus.train[0]) == sum(p.stat().st_size for p in (made / "out").glob("train-*.bin")) // 2
    text = json.loads((made / "text.jsonl").read_text().split("\n")[0])["text"]  # which is not one held out
    ids = corpus.tokenizer.encode(text)
    assert corpus.train[0].read(0, len(ids) + 1).tolist() == [*ids, corpus.tokenizer.eot_id]


def test_a_rerun_that_asks_for_something_else_is_refused(made):
    files = [path for path in (made / "out").iterdir() if path.name != ".lock"]
    before = [path.read_bytes() for path in files]
    for wrong, message in (
        ("shard_tokens=6000", "out: holds shards made with another shard_tokens: choose another folder"),
        ("vocab_size=280", "out: its tokenizer has 270 entries, vocab_size is 280: set vocab_size=270, choose another"),
        ("vocab=280", "'vocab' is not in struct, full_key: vocab; python data/shard.py --help lists the keys"),
    ):
        other = shard(made, "out=out", "vocab_size=270", "shard_tokens=5000", wrong)
        said = other.communicate(timeout=120)[1]
        assert other.returncode == 1 and message in " ".join(said.split()), said
    assert [path.read_bytes() for path in files] == before


def test_shards_are_shown(made, capsys):
    call(show.main, ["--rows", "3", "pretrain", "data=shards", f"data.path={made / 'out'}"])
    said = capsys.readouterr().out
    first, second, third = said.split("\ndocument ")[1:]
    corpus = open_shards(made / "out")
    rows = [json.loads(line)["text"] for line in (made / "text.jsonl").read_text().splitlines()]
    length = len(corpus.tokenizer.encode(rows[0])) + 1
    assert first.startswith(f"1  text\n{length} tokens, {length} learned\n")
    assert re.sub("[«»]", "", second).split("\n", 2)[2].startswith(rows[1].strip())
    assert f"{made / 'out'}  {corpus.train[0].meta['documents']:,} documents, " in third
    assert len(rows) > corpus.train[0].meta["documents"] > 1800  # some are held out
    assert f"  {len(corpus.train[0]):,} tokens, all learned" in third
    whole_text = list(show.in_shards(corpus.train[0], corpus.tokenizer))
    assert len(whole_text) == corpus.train[0].meta["documents"]
    assert sum(map(len, whole_text)) == len(corpus.train[0])


def test_what_is_wrong_with_a_folder_is_said(made, tmp_path):
    with pytest.raises(UserError, match=r"shards\.json: cannot be read"):
        open_shards(tmp_path)
    folder = tmp_path / "copy"
    shutil.copytree(made / "out", folder)
    path = folder / "train-00001.bin"
    ids = path.read_bytes()
    path.write_bytes(ids[:-2])
    with pytest.raises(UserError, match=r"train-00001\.bin: 9,998 bytes instead of 10,000"):
        open_shards(folder)
    path.write_bytes(bytes([ids[0] ^ 1]) + ids[1:])
    corpus = open_shards(folder)
    with pytest.raises(UserError, match=r"train-00001\.bin: its checksum is wrong"):
        corpus.train[0].read(5000, 1)


EPOCH = """
import json, re, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from torch import nn
from pocketgpt import optim
from pocketgpt.metrics import RunLog
from pocketgpt.mixture import Mixture
from pocketgpt.shards import open_shards
from pocketgpt.trainer import Batch, Stage, TrainConfig, train
torch.set_num_threads(1)
folder, out, block, rows = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
corpus = open_shards(folder)
windows = corpus.train[0].windows(block, 1)
mixture = Mixture([1.0], 1)
model = nn.Linear(1, 1)
taken = []  # (anonymous memory, mapped files) in bytes at each step

def memory(key):
    return 1024 * int(re.search(key + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def batches(step):
    ids = torch.from_numpy(np.stack(mixture.rows([windows], step, rows)))
    return [Batch((ids,), ids.numel(), ids.numel())]

def loss(batch):
    taken.append((memory("RssAnon"), memory("RssFile")))
    return (model.weight - 1).square().sum() * batch.weight, {}

stage = Stage("epoch", batches, loss, lambda: {}, lambda: "", 1.0)
steps = windows.per_epoch // rows
config = TrainConfig(steps, 0.0, rows, rows, 0.1, 0.0, 0.0, "linear", 0.0, 10**6, 10**6, 1, "float32", False, False)
adamw = optim.OptimConfig("adamw", 0.9, 0.95, 1e-8, 0.1, 0.0, 0.0)
warm = Stage("epoch", lambda step: [Batch((torch.zeros(rows, block + 1).long(),), 1, 1)], loss, dict, str, 1.0)
train(model, warm, replace(config, steps=3), adamw, out, RunLog(out, "epoch", {}))  # what torch itself takes
taken[:] = [(memory("RssAnon"), memory("RssFile"))]
resource.setrlimit(resource.RLIMIT_DATA, (memory("VmData") + (64 << 20),) * 2)
train(model, stage, config, adamw, out, RunLog(out, "epoch", {}))
print(json.dumps({"anonymous": [a for a, _ in taken], "files": [f for _, f in taken], "windows": steps * rows}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_training_on_more_text_than_memory_takes_no_more_of_it(tok, tmp_path):
    """An epoch of the training loop over 320 MB, where 64 MB are not to be had beside the program."""
    folder, shard_tokens, number = tmp_path / "shards", 8 << 20, 20
    folder.mkdir()
    tok.save(folder, 64)
    shards.begin(folder, {"tokenizer": tok.fingerprint})
    first = shards._write(folder / "train-00000.bin", np.zeros(shard_tokens, "<u2"), tok, documents=0, bytes=0)
    for shard in range(1, number):  # no blocks on the disk, but all in memory once they are read
        path = folder / f"train-{shard:05d}.bin"
        with path.open("wb") as file:
            file.truncate(2 * shard_tokens)
        shutil.copy(folder / "train-00000.bin.json", f"{path}.json")
    shards._write(folder / "val-00000.bin", np.zeros(9, "<u2"), tok, documents=0, bytes=0)
    shards.finish(folder, [first] * number, [first | {"count": 9}])
    command = [sys.executable, "-c", EPOCH, str(folder), str(tmp_path / "out"), "4096", "128"]
    run = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["windows"] == number * shard_tokens // 4096
    anonymous, files = np.array(found["anonymous"]), np.array(found["files"])
    assert anonymous.max() - anonymous[0] < 32 << 20
    # of files no more is mapped than the shards that are mixed
    assert files.max() - files.min() < (shards.MIXED + 3) * 2 * shard_tokens < number * 2 * shard_tokens * 0.6
