"""Token ids on disk: what is written comes back, what is stale or damaged is refused, and windows are exact."""

import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketgpt.errors import UserError
from pocketgpt.token_files import IGNORE, TokenFile, Windows, is_current, meta_path, write_tokens
from pocketgpt.tokenizer import Tokenizer

DOCS = ["To be, or not to be", "", "that is the question: <|endoftext|>", "née 🎉\0\t  "]


class Wide:
    """A tokenizer of 70,001 ids, one of them 70,000 for every character."""

    vocab_size, eot_id, fingerprint = 70_001, 0, "wide"

    def encode_batch(self, texts):
        return [[70_000] * len(text) for text in texts]


def in_memory(ids):
    """A token file of these ids without the disk."""
    return TokenFile(__file__, {}, np.array(ids, dtype=np.uint16))


# --- writing and opening --------------------------------------------------------------------------------------------


def test_documents_come_back_each_with_its_end(tok, tmp_path):
    path = tmp_path / "train.bin"
    meta = write_tokens(path, iter(DOCS), tok, source="four lines")
    tokens = TokenFile.open(path, tok).tokens
    ends = np.flatnonzero(tokens == tok.eot_id)
    assert [tok.decode(part[:-1].tolist()) for part in np.split(tokens, ends + 1)[:-1]] == DOCS
    assert ends[-1] == len(tokens) - 1  # and none of them is the literal text of the third document
    assert meta == json.loads(meta_path(path).read_text()) == TokenFile.open(path, tok).meta
    assert {key: meta[key] for key in ("format", "dtype", "count", "documents", "bytes", "source")} == {
        "format": 1,
        "dtype": "uint16",
        "count": sum(len(tok.encode(text)) + 1 for text in DOCS),
        "documents": 4,
        "bytes": sum(len(text.encode()) for text in DOCS),
        "source": "four lines",
    }
    assert path.stat().st_size == 2 * meta["count"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["train.bin", "train.bin.json"]


def test_large_ids_are_written_in_four_bytes(tmp_path):
    meta = write_tokens(tmp_path / "a.bin", ["ab"], Wide())
    assert meta["dtype"] == "uint32"
    assert (tmp_path / "a.bin").read_bytes() == (70_000).to_bytes(4, "little") * 2 + bytes(4)
    assert TokenFile.open(tmp_path / "a.bin", Wide()).tokens.tolist() == [70_000, 70_000, 0]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_the_border_between_two_and_four_bytes(tmp_path, vocab_size, dtype):
    tok = Wide()
    tok.vocab_size = vocab_size
    tok.encode_batch = lambda texts: [[vocab_size - 1] for _ in texts]
    assert write_tokens(tmp_path / "a.bin", ["a"], tok)["dtype"] == dtype
    assert TokenFile.open(tmp_path / "a.bin", tok).tokens.tolist() == [vocab_size - 1, 0]


def test_an_id_beyond_the_vocabulary_is_never_wrapped(tmp_path):
    tok = Wide()
    tok.vocab_size = 65_536
    with pytest.raises(OverflowError):
        write_tokens(tmp_path / "a.bin", ["a"], tok)
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, deadline=None)  # each example writes to disk
@given(docs=st.lists(st.text(alphabet="ab é\n", max_size=6), min_size=1, max_size=8), batch=st.integers(1, 12))
def test_the_size_of_a_batch_changes_nothing(tok, tmp_path_factory, docs, batch):
    folder = tmp_path_factory.mktemp("batches")
    done = []
    whole = write_tokens(folder / "whole.bin", docs, tok)
    parts = write_tokens(folder / "parts.bin", iter(docs), tok, batch=batch, progress=done.append)
    assert (folder / "whole.bin").read_bytes() == (folder / "parts.bin").read_bytes()
    assert whole == parts
    assert sum(done) == whole["bytes"]


def test_the_data_fingerprint_counts_borders(tok, tmp_path):
    digests = {
        write_tokens(tmp_path / "a.bin", docs, tok)["data"] for docs in (["ab"], ["a", "b"], ["b", "a"], ["ab", ""])
    }
    assert len(digests) == 4
    assert write_tokens(tmp_path / "b.bin", ["a", "b"], tok)["data"] in digests


def test_nothing_to_write_keeps_the_old_file(tok, tmp_path):
    path = tmp_path / "a.bin"
    write_tokens(path, ["old"], tok, source="old")
    with pytest.raises(UserError, match="no documents to encode"):
        write_tokens(path, [], tok, source="new")

    def fails():
        yield "half"
        raise UserError("a.jsonl:2: not valid JSON")

    with pytest.raises(UserError, match="not valid JSON"):
        write_tokens(path, fails(), tok, source="new", batch=1)
    assert is_current(path, tok, "old")
    assert len(list(tmp_path.iterdir())) == 2


def test_five_megabytes_without_a_space(tok, tmp_path):
    text = "abcdefghij" * 500_000
    begun = time.perf_counter()
    meta = write_tokens(tmp_path / "a.bin", [text], tok)
    assert time.perf_counter() - begun < 60
    assert meta["bytes"] == 5_000_000
    assert tok.decode(TokenFile.open(tmp_path / "a.bin", tok).tokens[:-1].tolist()) == text


def test_stale_ids_are_not_reused(tok, tmp_path):
    path = tmp_path / "a.bin"
    assert not is_current(path, tok, "text 1")
    write_tokens(path, DOCS, tok, source="text 1")
    assert is_current(path, tok, "text 1")
    assert not is_current(path, tok, "text 2")
    retrained = Tokenizer.train(["another text, another text"], 262)
    assert not is_current(path, retrained, "text 1")
    with pytest.raises(UserError, match=r"a\.bin: its ids come from another tokenizer"):
        TokenFile.open(path, retrained)
    write_tokens(path, DOCS, retrained, source="text 1")
    assert is_current(path, retrained, "text 1")
    assert not is_current(path, tok, "text 1")


def test_damaged_files_are_named(tok, tmp_path):
    path = tmp_path / "a.bin"
    count = write_tokens(path, DOCS, tok)["count"]
    whole, meta = path.read_bytes(), meta_path(path).read_text()
    for damaged in (whole[:-2], whole[:-1], whole + b"\0\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(
            UserError, match=rf"a\.bin: {len(damaged)} bytes instead of {2 * count}, cut short or damaged"
        ):
            TokenFile.open(path, tok)
        assert not is_current(path, tok, "")
    path.write_bytes(whole)
    for text in ("", "{", "[]", "{}", meta.replace("uint16", "float9"), meta.replace(str(count), '"many"')):
        meta_path(path).write_text(text)
        with pytest.raises(UserError, match=r"a\.bin\.json: not a description of token ids"):
            TokenFile.open(path, tok)
    meta_path(path).write_text(meta.replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match=r"a\.bin: written in format 2, this program reads 1"):
        TokenFile.open(path, tok)
    meta_path(path).write_text(meta)
    assert len(TokenFile.open(path, tok)) == count
    meta_path(path).unlink()
    with pytest.raises(UserError, match=r"a\.bin\.json: cannot be read: No such file"):
        TokenFile.open(path, tok)
    meta_path(path).write_text(meta)
    path.unlink()
    with pytest.raises(UserError, match=r"a\.bin: cannot be read: No such file"):
        TokenFile.open(path, tok)


def test_one_wrong_bit_is_found_told_and_mended(tok, tmp_path, capsys):
    path = tmp_path / "a.bin"
    write_tokens(path, DOCS, tok, source="s")
    whole = path.read_bytes()
    for at in (0, len(whole) // 2, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 64
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a\.bin: its checksum is wrong, the file is damaged: delete it"):
            TokenFile.open(path, tok)
        assert not is_current(path, tok, "s")
        assert f"{path}: its checksum is wrong" in capsys.readouterr().err


def test_an_interrupted_rewrite_leaves_no_old_description(tok, tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_tokens(path, ["a"], tok, source="s")

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("pocketgpt.token_files.write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        write_tokens(path, ["b"], tok, source="s")  # of the same length
    assert not is_current(path, tok, "s")


def test_the_file_is_mapped_and_cannot_be_written_through(tok, tmp_path):
    write_tokens(tmp_path / "a.bin", DOCS, tok)
    tokens = TokenFile.open(tmp_path / "a.bin", tok).tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


# --- training windows -----------------------------------------------------------------------------------------------


def test_an_epoch_predicts_every_token_once():
    """12 ids in windows of 4: all 12 targets, each after the id before it on the ring."""
    windows = Windows(in_memory(range(12)), 4, seed=0)
    batch = windows.batch(0, 3)
    assert batch.shape == (3, 5)
    assert batch.dtype == np.int64
    assert sorted(batch[:, 1:].flatten().tolist()) == list(range(12))
    assert ((batch[:, 1:] - batch[:, :-1]) % 12 == 1).all()


@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 5), st.integers(0, 3))
def test_no_target_comes_twice_in_an_epoch(block_size, extra, seed, epoch):
    count = block_size + 1 + extra
    windows = Windows(in_memory(range(count)), block_size, seed)
    assert windows.per_epoch == count // block_size
    rows = np.concatenate([windows.batch(epoch * windows.per_epoch + n, 1) for n in range(windows.per_epoch)])
    targets = rows[:, 1:].flatten().tolist()
    assert len(set(targets)) == len(targets) == count - count % block_size
    assert ((rows[:, 1:] - rows[:, :-1]) % count == 1).all()


def test_a_batch_depends_on_seed_and_step_alone():
    file = in_memory(range(1000))
    fresh = Windows(file, 8, seed=3).batch(77, 5)
    used = Windows(file, 8, seed=3)
    for step in (0, 500, 76):
        used.batch(step, 5)
    assert (used.batch(77, 5) == fresh).all()
    assert not (Windows(file, 8, seed=4).batch(77, 5) == fresh).all()
    assert not (used.batch(78, 5) == fresh).all()


def test_the_steps_share_out_the_same_windows_whatever_the_batch_size():
    file = in_memory(range(1000))
    threes = np.concatenate([Windows(file, 8, 0).batch(step, 3) for step in range(20)])
    fives = np.concatenate([Windows(file, 8, 0).batch(step, 5) for step in range(12)])
    assert (threes == fives).all()


def test_epochs_differ_in_order_and_in_borders():
    windows = Windows(in_memory(range(100)), 10, seed=0)
    epochs = [windows.batch(epoch, 10)[:, 0] for epoch in range(5)]
    assert len({tuple(starts) for starts in epochs}) == 5
    assert len({starts[0] % 10 for starts in epochs}) > 1
    for starts in epochs:
        order = ((starts - starts[0]) % 100).tolist()
        assert sorted(order) == list(range(0, 100, 10)) != order


def test_three_batches_and_a_part_go_on_in_the_next_epoch():
    windows = Windows(in_memory(range(17 * 4)), 4, seed=1)  # 17 windows: 3.4 batches of 5
    rows = [windows.batch(step, 5) for step in range(7)]
    assert all(batch.shape == (5, 5) for batch in rows)
    first = np.concatenate(rows)[:17]
    second = np.concatenate(rows)[17:34]
    for epoch in (first, second):
        assert sorted(epoch[:, 1:].flatten().tolist()) == list(range(68))
    assert not (first == second).all()


def test_a_batch_may_be_larger_than_an_epoch():
    batch = Windows(in_memory(range(9)), 4, seed=0).batch(2, 7)
    assert batch.shape == (7, 5)
    assert ((batch[:, 1:] - batch[:, :-1]) % 9 == 1).all()


def test_exactly_one_window_works_and_one_token_less_does_not():
    batch = Windows(in_memory(range(33)), 32, seed=0).batch(5, 2)
    assert all(sorted(row) == list(range(33)) for row in batch.tolist())
    with pytest.raises(
        UserError, match=r"32 tokens are too few for windows of 32 .* give more text or .* to 31 or less"
    ):
        Windows(in_memory(range(32)), 32, seed=0)


def test_windows_of_a_real_file(tok, tmp_path):
    write_tokens(tmp_path / "a.bin", ["abc" * 50], tok)
    file = TokenFile.open(tmp_path / "a.bin", tok)
    ring = np.concatenate([file.tokens, file.tokens]).astype(np.int64)
    for row in Windows(file, 8, seed=0).batch(0, 20):
        assert any((ring[start : start + 9] == row).all() for start in range(len(file)))


# --- validation windows ---------------------------------------------------------------------------------------------


def test_validation_follows_the_file_and_pads_the_end():
    (x, y), (last_x, last_y) = in_memory(range(10, 20)).val_windows(4, batch_size=2)
    assert x.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert y.tolist() == [[11, 12, 13, 14], [15, 16, 17, 18]]
    assert last_x.tolist() == [[18, 0, 0, 0]]
    assert last_y.tolist() == [[19, IGNORE, IGNORE, IGNORE]]
    assert x.dtype == y.dtype == np.int64


@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 5), st.none() | st.integers(1, 70))
def test_validation_scores_every_token_once_in_order(count, block_size, batch_size, max_tokens):
    pairs = list(in_memory(range(count)).val_windows(block_size, batch_size=batch_size, max_tokens=max_tokens))
    x, y = (np.concatenate(side) for side in zip(*pairs, strict=True))
    assert all(part.shape[1] == block_size and part.shape[0] <= batch_size for part, _ in pairs)
    scored = y != IGNORE
    assert y[scored].tolist() == list(range(1, 1 + min(count - 1, max_tokens or count)))
    assert (x[scored] == y[scored] - 1).all()
    assert (x[~scored] == 0).all()


def test_a_limit_that_is_no_multiple_of_the_block():
    ((x, y),) = in_memory(range(100)).val_windows(4, batch_size=8, max_tokens=6)
    assert y.tolist() == [[1, 2, 3, 4], [5, 6, IGNORE, IGNORE]]
    assert x.tolist() == [[0, 1, 2, 3], [4, 5, 0, 0]]


def test_a_single_token_cannot_validate():
    with pytest.raises(UserError, match="1 tokens leave nothing to validate on"):
        list(in_memory([5]).val_windows(4))
