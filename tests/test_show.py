"""show.py prints the rows that a stage reads, with the tokens it learns, and counts what it drops."""

import itertools
import json
import re
from pathlib import Path

import pytest
from rich.color import ColorSystem
from test_resume import call
from test_scripts import TINY

import pretrain
import show
from base_model import GPT
from pocketgpt import checkpoint
from pocketgpt.chat_template import render
from pocketgpt.errors import UserError
from pocketgpt.tokenizer import Tokenizer
from tests.helpers import tiny_config

USER, ANSWER = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "yes"}


@pytest.fixture(scope="module")
def out(tmp_path_factory, tok) -> Path:
    folder = tmp_path_factory.mktemp("out")
    config = tiny_config(vocab_size=tok.vocab_size, block_size=64)
    for stage in ("base", "sft"):
        checkpoint.save(folder, checkpoint.Checkpoint(stage, config.to_dict(), GPT(config).state_dict(), tok))
    return folder


def shown(capsys, *arguments: str) -> str:
    call(show.main, list(arguments))
    return capsys.readouterr().out


def file(folder: Path, name: str, *rows: dict) -> str:
    (folder / name).write_text("\n".join(map(json.dumps, rows)))
    return str(folder / name)


def test_conversations(tmp_path: Path, out: Path, tok: Tokenizer, capsys) -> None:
    path = file(
        tmp_path, "c.jsonl",
        {"messages": [USER, ANSWER], "id": 3, "score": None},
        {"prompt": [USER, ANSWER, USER], "completion": "no"},
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": "x" * 500}, ANSWER]},
        {"text": "lamp"},
    )  # fmt: skip
    said = shown(capsys, path, f"out={out}", "--rows", "2")
    assert said.startswith(f"as sft.py data=mine data.path={path} out={out} would see it\n")
    first, second, totals = said.split(f"\n{path}")[1:]
    ids, learned = render(tok, [USER, ANSWER])
    assert first.startswith(f":1  messages, ignoring id\n{len(ids)} tokens, {sum(learned)} learned\n")
    assert "".join(re.findall("«(.*?)»", first, re.S)) == "yes<|im_end|>"
    assert "<|im_start|>user⏎\nhi there<|im_end|>⏎\n<|im_start|>assistant⏎\n" in first.replace("«", "").replace("»", "")
    assert second.startswith(":2  prompt-completion (prompt, completion)\n")
    assert "".join(re.findall("«(.*?)»", second, re.S)) == "no<|im_end|>"  # the answer in the prompt is read only
    assert totals.startswith("  5 rows, 1 dropped\n")
    for line in ("1 messages, ignoring id", "2 messages", "1 text", "1 prompt-completion (prompt, completion)",
                 "1 an empty answer: teaches to say nothing", "1 dropped: longer than 64 tokens"):  # fmt: skip
        assert f"\n  {line}\n" in totals


def test_preferences(tmp_path: Path, out: Path, capsys) -> None:
    path = file(
        tmp_path, "p.jsonl",
        {"prompt": "hi there", "chosen": "yes", "rejected": "no"}, {"prompt": "hi", "chosen": "a", "rejected": "a"},
    )  # fmt: skip
    said = shown(capsys, "dpo", "data=mine", f"data.path={path}", f"out={out}")
    assert shown(capsys, path, f"out={out}").partition("\n")[2] == said
    assert ["".join(re.findall("«(.*?)»", side, re.S)) for side in re.split("chosen:|rejected:", said)[1:3]] == [
        "yes<|im_end|>", "no<|im_end|>",
    ]  # fmt: skip
    assert "\ndropped: chosen equals rejected\n" in said and "  2 rows, 1 dropped\n" in said
    with pytest.raises(UserError, match="dpo.py samples these pairs"):
        call(show.main, ["dpo", f"out={out}"])


def test_text_and_a_mixture_of_it(tmp_path: Path, corpus: str, capsys) -> None:
    (tmp_path / "a.txt").write_text(corpus * 3)
    path = file(tmp_path, "b.jsonl", *({"text": f"{n} {corpus}", "id": n} for n in range(30)))
    own = ["vocab_size=280", f"cache={tmp_path / 'cache'}", *TINY, "--rows", "1"]
    said = shown(capsys, str(tmp_path / "a.txt"), *own)
    assert "document 1  text\n" in said and "«<|endoftext|>»" not in said and re.search(r"… and [\d,]+ more\n", said)
    mix = f"data.mix={{{tmp_path}/a.txt:1,{path}:3}}"
    said = shown(capsys, "pretrain", "data=mix", mix, *own)
    cfg = pretrain.config.load("pretrain", pretrain.Config, ["data=mix", mix])
    held_out = len(list(pretrain.source_documents(cfg.data.parts()[1].data)[1]()))
    assert f"{path}  {30 - held_out} documents, " in said and "75.0% of training" in said and held_out


def test_before_there_is_a_checkpoint_bytes_stand_in(tmp_path: Path, capsys) -> None:
    path = file(tmp_path, "c.jsonl", {"messages": [USER, {"role": "assistant", "content": "é\x1b[31m\t"}]})
    said = shown(capsys, path, f"out={tmp_path}")
    assert f"no {tmp_path}/ckpt_base.pt yet: every byte is shown as a token" in said
    assert "«<c3>»«<a9>»«␛»«[»«3»«1»«m»«⇥»«<|im_end|>»" in said and "\x1b" not in said
    with pytest.raises(UserError, match="no checkpoint there"):
        call(show.main, [path, f"checkpoint={tmp_path}/x.pt"])


def test_in_colour_shades_alternate_and_controls_stand_out(tok: Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(show.console, "_color_system", ColorSystem.STANDARD)
    monkeypatch.setattr(show.console, "no_color", False)
    ids, learned = render(tok, [USER, ANSWER])
    text = show.marked(tok, ids, learned, 1000)
    assert "«" not in text.plain
    styles = [str(span.style) for span in text.spans]
    green = [re.findall("bright_green|green", style) for style in styles]
    assert sum(map(len, green)) == sum(learned)
    shades = [found[0] for found in green if found]
    assert all(one != other for one, other in itertools.pairwise(shades))
    controls = [text.plain[span.start : span.end] for span in text.spans if "magenta" in str(span.style)]
    assert controls == ["<|im_start|>", "<|im_end|>"] * 2
    monkeypatch.setattr(show.console, "no_color", True)  # as NO_COLOR asks
    assert "«" in show.marked(tok, ids, learned, 1000).plain


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl: no such file or folder"),
        ([], "python show.py --help lists the options"),
        (["sft", "--rows", "-1"], "--rows is -1"),
        (["sft", "train.rate=1"], "python sft.py --help lists the keys"),
    ],
)
def test_bad_arguments(arguments, complaint) -> None:
    with pytest.raises(UserError, match=complaint):
        call(show.main, arguments)


def test_unknown_columns_name_what_either_stage_expects(tmp_path: Path) -> None:
    path = file(tmp_path, "c.jsonl", {"body": "x", "id": 1})
    with pytest.raises(
        UserError, match=r"c\.jsonl:1: found the columns body, id; expected prompt and chosen.*or messages"
    ):
        call(show.main, [path])
