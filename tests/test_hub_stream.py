"""Text that is read in training: every document once in a pass, by one process, and a resumed run reads on where it was."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume import call
from test_scripts import TINY

import pretrain
import show
from pocketgpt import hub_stream
from pocketgpt.errors import UserError
from pocketgpt.hub_stream import StreamRows
from pocketgpt.sources import hub_rows

ROOT = Path(__file__).resolve().parents[1]


def dataset(folder: Path, kind: str, files: int, count: int) -> list[str]:
    """Write so many documents into so many files of a local dataset, and return them."""
    folder.mkdir()
    texts = [
        f"Document {number} tells of {number * 7} gulls." + " They talk." * (number % 5) for number in range(count)
    ]
    for file in range(files):
        rows = texts[file::files]
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / f"train-{file:02d}.parquet")
        else:
            (folder / f"train-{file:02d}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return texts


@pytest.mark.parametrize(("kind", "files"), [("jsonl", 1), ("jsonl", 3), ("parquet", 2), ("parquet", 5)])
def test_parts_of_a_dataset_have_every_row_once(kind: str, files: int, tmp_path: Path) -> None:
    texts = dataset(tmp_path / "d", kind, files, 23)
    for parts in (1, 2, 3):
        found = [
            [row["text"] for _, row in hub_rows(str(tmp_path / "d"), "train", streaming=True, part=(k, parts))]
            for k in range(parts)
        ]
        assert Counter(itertools.chain(*found)) == Counter(texts)
        assert min(map(len, found)) > 0


@settings(max_examples=30, deadline=None)
@given(
    docs=st.lists(st.text("ab é\n", max_size=9), min_size=1, max_size=9),
    block=st.integers(1, 20),
    size=st.integers(1, 9),
)
def test_rows_are_the_text_and_start_anywhere(tok, docs, block, size) -> None:
    passes = [id_ for text in docs for id_ in [*tok.encode(text), tok.eot_id]] * 300
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hub_stream, "BATCH", size)
        for mine in (lambda number: True, lambda number: number % 4 in (1, 2)):
            rows = StreamRows(lambda: docs, tok, block)
            rows.mine = mine
            own = [number for number in range(12) if mine(number)]
            right = {number: passes[at * block :][: block + 1] for at, number in enumerate(own)}
            found = {number: rows.row(number).tolist() for number in range(12)}
            assert found == {number: right.get(number, [0] * (block + 1)) for number in range(12)}
            assert rows.row(5).tolist() == found[5]  # back
            again = StreamRows(lambda: docs, tok, block)  # a resumed run
            again.mine = mine
            assert [again.row(number).tolist() for number in (7, 9, 10)] == [found[number] for number in (7, 9, 10)]


def test_a_part_without_a_document_is_named(tok) -> None:
    rows = StreamRows(list, tok, 4)
    with pytest.raises(UserError, match="no document for one of the processes: start fewer"):
        rows.row(0)


WORKER = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
import torch
torch.set_num_threads(1)
import pretrain
from pocketgpt import distributed, trainer
from pocketgpt.errors import run
read, to = [], trainer.Batch.to

def watched(self, device):
    read.extend(self.inputs[0])
    return to(self, device)

trainer.Batch.to = watched
out, *arguments = sys.argv[1:]
sys.argv = ["pretrain.py", *arguments]
run(pretrain.main)
torch.save(torch.stack(read), Path(out) / f"{{distributed.rank()}}.pt")
"""


def test_two_processes_train_on_every_document_once_a_pass(tmp_path: Path, capsys) -> None:
    texts = dataset(tmp_path / "d", "parquet", 3, 60)
    (tmp_path / "worker.py").write_text(WORKER)
    keys = [
        "data=hub", f"data.name={tmp_path / 'd'}", "data.streaming=true", "vocab_size=270", f"out={tmp_path / 'out'}",
        f"cache={tmp_path / 'cache'}", "device=cpu", "train.minutes=0", "train.batch_size=6", "train.micro_batch_size=2",
        "train.steps=16", "train.decay=0", "train.dtype=float32", "sample_tokens=1", *TINY,
    ]  # fmt: skip
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(tmp_path / "worker.py"), str(tmp_path), *keys]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "text is read in training, a part of 1 / 2 by each process" in done.stdout
    corpus = pretrain.open_stream(pretrain.config.load("pretrain", pretrain.Config, keys).data, 270, tmp_path / "cache")
    tok = corpus.tokenizer

    def documents(ids: list[int]) -> list[str]:
        ends = [at for at, id_ in enumerate(ids) if id_ == tok.eot_id]
        return [tok.decode(ids[start:end]) for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]

    held_out = documents(corpus.val.tokens.tolist())
    first_pass: list[str] = []
    for rank in range(2):
        read = documents(torch.load(tmp_path / f"{rank}.pt").flatten().tolist())
        length = read.index(read[0], 1)  # where this part begins anew
        assert len(set(read[:length])) == length and 10 < length < len(read)
        assert read[length:] == (read[:length] * 9)[: len(read) - length]  # in the same order
        first_pass += read[:length]
    assert sorted(first_pass + held_out) == sorted(texts)  # none twice, none lost, none both learned and held out
    assert 0 < len(held_out) < 20

    with pytest.raises(UserError, match="another run than this one: processes was 2, is 1"):
        call(pretrain.main, [*keys, "train.resume=true"])
    with pytest.raises(UserError, match="read in training and has no end: set data.limit"):
        call(show.main, ["pretrain", *keys])
    with pytest.raises(UserError, match="data.generate mixes"):
        call(pretrain.main, [*keys, "data.generate=5"])


def test_a_resumed_run_reads_on(tmp_path: Path, tok) -> None:
    """In one process: a run of four steps is one of two and two more, to the last bit."""
    dataset(tmp_path / "d", "jsonl", 2, 60)
    keys = ["data=hub", f"data.name={tmp_path / 'd'}", "data.streaming=true", "vocab_size=270", "device=cpu"]
    keys += [f"cache={tmp_path / 'cache'}", "train.minutes=0", "train.batch_size=4", "train.micro_batch_size=2"]
    keys += ["train.decay=0", "train.warmup=0", "train.dtype=float32", "sample_tokens=1", *TINY]
    call(pretrain.main, [*keys, f"out={tmp_path / 'whole'}", "train.steps=4"])
    call(pretrain.main, [*keys, f"out={tmp_path / 'half'}", "train.steps=2"])
    call(pretrain.main, [*keys, f"out={tmp_path / 'half'}", "train.steps=4", "train.resume=force"])
    weights = [torch.load(tmp_path / side / "ckpt_base.pt")["state_dict"] for side in ("whole", "half")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert np.isfinite(weights[0]["embed.weight"]).all()
