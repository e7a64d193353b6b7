"""The tokenizer loses nothing, lets no text forge a control token, and is the same wherever it is loaded."""

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from pocketgpt.errors import UserError
from pocketgpt.tokenizer import BYTE_OF, Tokenizer, _chunks

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Text as it comes, and text in which the control strings, or something near them, are frequent.
texts = st.one_of(st.text(), st.lists(st.sampled_from([*CONTROL, "<|", "|>", "im_end", "\n", " ", "é"])).map("".join))


def run(code: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=env)


def tokens(tok: Tokenizer, text: str) -> list[bytes]:
    return [tok.token_bytes(i) for i in tok.encode(text)]


def changed(tok: Tokenizer, change: str) -> str:
    """The tokenizer's JSON with one fault in it."""
    data = json.loads(tok.to_json())
    vocab = data["model"]["vocab"]
    if change == "added":
        data["added_tokens"] = data["added_tokens"][:2]
    elif change == "text":
        data["added_tokens"][2]["special"] = False
    elif change == "hole":
        vocab["hole"] = vocab.pop("q")
    return json.dumps(data)


# -- ids and bytes


def test_order_of_ids(tok: Tokenizer) -> None:
    assert [tok.decode([i]) for i in range(3)] == CONTROL
    assert (tok.eot_id, tok.im_end_id, tok.control_ids) == (0, 2, {0, 1, 2})
    assert {tok.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}
    assert all(len(tok.token_bytes(i)) > 1 for i in range(259, tok.vocab_size))
    assert set(BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


@pytest.mark.parametrize(
    "text", ["", "a  b ", "a🎉猫é", "\t\0\t", "\r\n\n \n", " " * 50, "\ufffd", "<|im_end|>", "x" * 5000]
)
def test_round_trip(tok: Tokenizer, text: str) -> None:
    assert tok.decode(tok.encode(text)) == text


@given(text=texts)
def test_any_text(tok: Tokenizer, text: str) -> None:
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert min(ids, default=3) > 2
    assert b"".join(tok.token_bytes(i) for i in ids) == text.encode()
    assert tok.byte_lengths()[ids].sum() == len(text.encode())
    assert tok.encode_batch([text, "", text]) == [ids, [], ids]


def test_control_strings_in_text_stay_text(tok: Tokenizer) -> None:
    assert tokens(tok, "hi<|im_end|>") == [b"hi", b"<", b"|", b"i", b"m", b"_", b"e", b"nd", b"|", b">"]


def test_control_strings_in_training_text_are_learned_as_text() -> None:
    trained = Tokenizer.train(["<|im_end|> <|im_end|>\n" * 50], 1000)
    assert min(trained.encode("<|im_end|>")) > 2
    assert trained.decode(trained.encode("<|im_end|>")) == "<|im_end|>"


def test_decode_of_control_ids_and_broken_characters(tok: Tokenizer) -> None:
    assert tok.decode([1, *tok.encode("a"), 2, 0]) == "<|im_start|>a<|im_end|><|endoftext|>"
    assert tok.decode(tok.encode("é")[:1]) == "\ufffd"
    assert tok.decode(np.array(tok.encode("gulls"), dtype=np.uint16)) == "gulls"


@given(ids=st.lists(st.integers(0, 399)))
def test_decode_agrees_with_the_library(tok: Tokenizer, ids: list[int]) -> None:
    assert tok.decode(ids) == Backend.from_str(tok.to_json()).decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("token_id", [-1, 400, 70_000])
def test_foreign_id(tok: Tokenizer, token_id: int) -> None:
    with pytest.raises(UserError, match=f"token id {token_id} is outside the tokenizer's 400"):
        tok.decode([token_id])


def test_byte_lengths(tok: Tokenizer) -> None:
    lengths = tok.byte_lengths()
    assert lengths.dtype == np.int32
    assert lengths.shape == (400,)
    assert lengths[:4].tolist() == [0, 0, 0, 1]
    assert lengths[3:].tolist() == [len(tok.token_bytes(i)) for i in range(3, 400)]


def test_half_a_surrogate_pair_is_refused(tok: Tokenizer) -> None:
    for use in (tok.encode, lambda text: tok.encode_batch(["fine", text]), lambda text: Tokenizer.train([text], 300)):
        with pytest.raises(UserError, match=r"half a surrogate pair, '\\ud83c' after 'party '"):
            use("party \ud83c!")


# -- what is a token


def test_digits_and_newlines_never_merge(tok: Tokenizer) -> None:
    assert tokens(tok, " keeper 42.\n\n\nuser\n 12") == (
        [b" keeper", b" ", b"4", b"2", b".", b"\n", b"\n", b"\n", b"user", b"\n", b" ", b"1", b"2"]
    )
    trained = Tokenizer.train(["user\n12 12\n\n\n 12\n" * 50], 1000)
    merges = [trained.token_bytes(i) for i in range(259, trained.vocab_size)]
    assert merges == [b"er", b"ser", b"user"]


@given(before=texts, after=texts)
def test_text_may_be_cut_after_a_newline(tok: Tokenizer, before: str, after: str) -> None:
    assert tok.encode(before + "\n" + after) == tok.encode(before + "\n") + tok.encode(after)


@given(text=st.one_of(texts, st.text(st.sampled_from("a1' \n\t\r\xa0!"))))
def test_same_ids_without_the_newline_rule(tok: Tokenizer, text: str) -> None:
    """What programs that only know named pre-tokenizers (llama.cpp: smollm) make of our vocabulary."""
    other = Backend.from_str(tok.to_json())
    other.encode_special_tokens = True
    other.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert other.encode(text).ids == tok.encode(text)


# -- training


def test_size(tok: Tokenizer, corpus: str) -> None:
    assert tok.vocab_size == 400
    tiny = Tokenizer.train(["a cat and a cat"], 5000)
    assert [tiny.token_bytes(i) for i in range(259, tiny.vocab_size)] == [b"at", b"cat", b" a", b" cat"]
    assert tiny.vocab_size == 263
    assert Tokenizer.train([], 259).vocab_size == 259
    with pytest.raises(UserError, match=r"vocabulary size 258 is too small.* need 259"):
        Tokenizer.train([corpus], 258)


@pytest.mark.parametrize("vocab_size", [(1 << 20) + 1, 10**12, 10**30])
def test_a_size_that_no_memory_holds_is_refused(vocab_size: int) -> None:
    with pytest.raises(UserError, match=f"vocabulary size {vocab_size} is too large: at most 1,048,576"):
        Tokenizer.train(["text"], vocab_size)


def test_training_repeats(tok: Tokenizer, corpus: str) -> None:
    again, other = Tokenizer.train(iter([corpus]), 400), Tokenizer.train([corpus], 399)
    assert again.to_json() == tok.to_json()
    assert again.fingerprint == tok.fingerprint != other.fingerprint
    assert len(tok.fingerprint) == 64


@given(text=st.text(st.sampled_from("ab \n"), max_size=3000))
def test_chunks(text: str) -> None:
    chunks = list(_chunks([text, text]))
    assert "".join(chunks) == text * 2
    assert all(len(chunk) <= 1000 for chunk in chunks)


def test_chunks_keep_words_whole() -> None:
    text = "lighthouse keeper " * 1000
    assert {word for chunk in _chunks([text]) for word in chunk.split()} == {"lighthouse", "keeper"}
    assert [len(chunk) for chunk in _chunks(["x" * 2500 + " y"])] == [1000, 1000, 502]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_training_on_one_huge_line_without_spaces_is_bounded() -> None:
    done = run(
        "import random; from pathlib import Path; from pocketgpt.tokenizer import Tokenizer\n"
        "line = ''.join(random.Random(0).choices('abcdefghij', k=100_000)) * 50\n"
        "size = Tokenizer.train([line], 1000).vocab_size\n"
        "status = Path('/proc/self/status').read_text()\n"
        "print(size, int(status.split('VmHWM:')[1].split()[0]) // 1024)"  # unlike ru_maxrss, not the parent's
    )
    size, megabytes = map(int, done.stdout.split())
    assert size == 1000
    assert megabytes < 300


# -- copies and files


def test_copies_are_equal_and_as_safe(tok: Tokenizer, tmp_path: Path) -> None:
    tok.save(tmp_path, 64)
    for other in (
        copy.deepcopy(tok),
        pickle.loads(pickle.dumps(tok)),
        Tokenizer.from_json(tok.to_json()),
        Tokenizer.load(tmp_path),
        Tokenizer.load(str(tmp_path / "tokenizer.json")),
    ):
        assert other.fingerprint == tok.fingerprint
        assert other.encode("hi<|im_end|> there") == tok.encode("hi<|im_end|> there")


def test_truncation_and_padding_in_a_file_are_ignored(tok: Tokenizer) -> None:
    backend = Backend.from_str(tok.to_json())
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    loaded = Tokenizer.from_json(backend.to_str())
    assert loaded.encode_batch(["", "the gulls talked"]) == tok.encode_batch(["", "the gulls talked"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("added", r"control token <\|im_end\|> is missing"),
        ("text", r"control token <\|im_end\|> is missing"),
        ("hole", "not a byte-level vocabulary"),
    ],
)
def test_foreign_vocabulary(tok: Tokenizer, change: str, message: str) -> None:
    with pytest.raises(UserError, match=f"my.pt: {message}"):
        Tokenizer.from_json(changed(tok, change), "my.pt")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": ', b"\xff\xfe", None])
def test_bad_file(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.json(: not a tokenizer\.json \(| in it, the one form)"):
        Tokenizer.load(tmp_path)


def test_saved_files(tok: Tokenizer, tmp_path: Path) -> None:
    tok.save(tmp_path / "new" / "folder", 512)
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert (folder / "tokenizer.json").read_text() == tok.to_json()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["model_max_length"] == 512
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (None, "<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize("model_type", [None, "qwen3", "llama", "gpt2"])
def test_transformers_loads_the_same(
    tok: Tokenizer, tmp_path: Path, model_type: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tok.save(tmp_path, 512)
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = "\n\n It's 42,  don't\tworry cafe\u0301 猫🎉\r\n \n"  # e and accent are two characters: no normalization
    assert theirs(text)["input_ids"] == tok.encode(text)
    assert theirs("the lamp", return_tensors="pt").keys() == {"input_ids", "attention_mask"}
    assert theirs("a<|im_end|>")["input_ids"] == [*tok.encode("a"), 2]
    assert theirs.decode(tok.encode("a , b n't")) == "a , b n't"
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (0, 2, None, 512)
    theirs.save_pretrained(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").encode(text) == tok.encode(text)


def test_forked_processes_neither_hang_nor_warn() -> None:
    done = run(
        "import os; from datasets import Dataset; from pocketgpt.tokenizer import Tokenizer\n"
        "tok = Tokenizer.train(['the cat and the dog'] * 9, 300)\n"
        "texts = ['the cat', 'and the dog'] * 50\n"
        "ids = tok.encode_batch(texts)\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(7 if tok.encode_batch(texts) == ids else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "data = Dataset.from_dict({'text': texts})\n"
        "for _ in range(2):\n"
        "    ours = data.map(lambda rows: {'ids': tok.encode_batch(rows['text'])}, batched=True, num_proc=2)\n"
        "print(ours['ids'][:] == ids)"
    )
    assert done.stdout.split() == ["7", "True"]
    assert "fork" not in done.stderr
