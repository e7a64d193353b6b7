"""The documentation says what is there: links, commands, keys, examples and derived numbers."""

import argparse
import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import chat
import import_model
import report
from base_model import GPT, GPTConfig
from docs import figures
from kv_cache import BlockPool, CachedGPT, DynamicCache, QuantizedCache, SlidingCache, StaticCache, kv_cache_bytes
from pocketgpt import config, shapes, sources
from pocketgpt.chat_template import check_messages
from pocketgpt.errors import UserError
from pocketgpt.shapes import Chat
from pocketgpt.tasks import FAMILIES
from tests.helpers import random_ids, tiny_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/*.md")])
STAGES = ("pretrain", "sft", "dpo", "kv_cache", "evaluate", "export", "plan")
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}


def prose(text: str) -> str:
    """A page without its fenced and indented blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.sub(r"^ {4}.*$", "", text, flags=re.M)


def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", prose(path.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> Iterator[list[str]]:
    """The words of every `python ...` and `make ...` in code spans, fenced and indented blocks."""
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        for span in [line] if fenced or line.startswith("    ") else re.findall(r"`([^`]+)`", line):
            if match := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*((?:python|make) .+)", span):
                yield shlex.split(re.split(r" [|&>]", match[1])[0], comments=True)


COMMANDS = {f"{page}: {' '.join(command)}": command for page, text in TEXT.items() for command in commands(text)}


def compose(stage: str, arguments: list[str]) -> Any:
    return config.load(stage, importlib.import_module(stage).Config, arguments)


def table(text: str, first: str) -> list[list[str]]:
    """The rows of the Markdown table whose header starts with `first`, without ** and `."""
    lines = iter(text.splitlines())
    assert any(line.startswith(f"| {first} |") for line in lines)
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([re.sub(r"[*`]", "", cell).strip() for cell in line.strip("|").split("|")])
    return rows


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


# --- links and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", TEXT)
def test_local_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(TEXT[page])):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(path), f"{page}: {target}"


def test_every_picture_is_shown() -> None:
    shown = set(re.findall(r"!\[[^\]]+\]\(img/([^)]+)\)", TEXT["docs/kv_cache.md"]))
    assert shown == set(figures.PICTURES) == {path.name for path in figures.FOLDER.iterdir()}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_commands_exist(command: list[str]) -> None:
    program, *arguments = command
    if program == "make":
        targets = re.findall(r"^([a-z0-9_]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
        assert all("=" in argument or argument in targets for argument in arguments)
        for extra in (argument.removeprefix("ARGS=") for argument in arguments if argument.startswith("ARGS=")):
            stage = next(argument for argument in arguments if argument in targets)
            test_commands_exist(["python", f"{stage}.py", *shlex.split(extra)])
    elif arguments[0] == "-m":
        assert arguments[1] in ("venv", "pip", "pytest") or (ROOT / (arguments[1].replace(".", "/") + ".py")).exists()
    else:
        script, *rest = arguments
        assert (ROOT / script).exists()
        if script == "import_model.py":
            assert import_model.parse([word for word in rest if word[0] != "["][:1]).source
        elif script == "chat.py" and "--help" not in rest:
            assert isinstance(chat.parse(rest), argparse.Namespace)
        elif script == "report.py":
            assert report.parse(rest).runs
        elif Path(script).stem in STAGES:
            compose(Path(script).stem, [argument for argument in rest if argument != "--help"])


def test_the_command_check_sees_commands_and_finds_wrong_keys() -> None:
    page = "see `python sft.py log=none`\nmake sense\n    FOO=1 python dpo.py dpo.beta=1   # why\n```\n$ make demo | tail\n```"
    found = [" ".join(command) for command in commands(page)]
    assert found == ["python sft.py log=none", "python dpo.py dpo.beta=1", "make demo"]
    assert len(COMMANDS) >= 20
    with pytest.raises(UserError, match="train.rate"):
        test_commands_exist(["python", "sft.py", "train.rate=1"])


@pytest.mark.parametrize("stage", ["pretrain", "sft", "dpo", "kv_cache"])
def test_keys_named_in_a_stage_page_exist(stage: str) -> None:
    known = config.plain(compose(stage, []))
    for key in re.findall(r"`((?:train|data|model|optim|dpo)\.(?!py`)[a-z_]+)[=`]", TEXT[f"docs/{stage}.md"]):
        group, name = key.split(".")
        known_here = config.plain(compose("pretrain", [])) if group == "model" else known
        assert name in known_here[group], key
    if stage != "kv_cache":
        for row in table(TEXT[f"docs/{stage}.md"], "key"):
            for key in re.findall(r"[a-z_.]+", row[0].replace(",", " ")):
                assert "." in key or key in known, key


# --- data -----------------------------------------------------------------------------------------------------------


def test_data_examples_are_read_as_described() -> None:
    blocks = dict(re.findall(r"^```jsonl (\w+)\n(.*?)^```", TEXT["docs/data.md"], re.M | re.S))
    rows = {kind: [json.loads(line) for line in block.splitlines()] for kind, block in blocks.items()}
    assert [sources.text_of(row, "text", "")[:6] for row in rows["text"]] == ["Once t", "A seco"]


def shown_rows(header: str) -> list[tuple[str, dict[str, Any]]]:
    """(shape, row) of a table of docs/data.md whose second column is JSON."""
    found = TEXT["docs/data.md"].split(f"\n{header}\n")[1].split("\n\n")[0].splitlines()[1:]
    cells = [line.strip("| ").split(" | ") for line in found]
    return [(cell[0], json.loads(cell[1].strip("`"))) for cell in cells]


def test_the_rows_of_the_table_of_conversations_are_read_as_it_says() -> None:
    table = shown_rows("| shape | row | learned |")
    assert [shapes.recognise(row, "", shapes.CHATS).name for _, row in table] == [name for name, _ in table]
    assert list(dict.fromkeys(name for name, _ in table)) == [shape.name for shape in shapes.CHATS]  # in this order
    read = [shapes.chat(row, "") for _, row in table]
    assert read.pop() == "The sky is blue."
    assert [([m["content"] for m in item.messages], item.learn_from) for item in read if isinstance(item, Chat)] == [
        (["Be brief.", "Name a colour.", "Blue."], 0),
        (["Name a colour.", "Blue."], 0),
        (["Name a colour.", "Blue."], 1),
        (["Name a colour.", "Blue."], 1),
        (["Name a colour.\n\nIt should be warm.", "Red."], 0),
    ]


def test_the_rows_of_the_table_of_preferences_are_read_as_it_says() -> None:
    table = shown_rows("| shape | row |")
    assert [shapes.recognise(row, "", shapes.PREFERENCES).name for _, row in table] == [name for name, _ in table]
    assert list(dict.fromkeys(name for name, _ in table)) == [shape.name for shape in shapes.PREFERENCES]
    *pairs, text = [shapes.preference(row, "") for _, row in table]
    prompt = [{"role": "user", "content": "Name a colour."}]
    assert pairs == [(prompt, "Blue.", "Seven.")] * 5
    assert text == ([{"role": "user", "content": "The sky is"}], "blue.", "green.")


def test_the_quoted_error_is_the_one_shown() -> None:
    user = {"role": "user", "content": "hello"}
    with pytest.raises(UserError) as error:
        check_messages([user, user], "chats.jsonl:2")
    assert f"    error: {error.value}\n" in TEXT["docs/data.md"]
    with pytest.raises(UserError) as error:
        shapes.chat({"body": "", "id": 1}, "notes.jsonl:1")
    assert f"    error: {error.value}\n" in TEXT["docs/data.md"]


def test_every_data_preset_is_described() -> None:
    presets = {path.stem for path in (ROOT / "configs" / "data").glob("*.yaml")} - {"base"}
    assert presets == set(re.findall(r"`data=(\w+)`", TEXT["docs/data.md"]))
    for preset, stage, dataset in table(TEXT["docs/data.md"], "preset"):
        if stage != "any":
            assert dataset.startswith(compose(stage, [preset]).data.name)


def test_every_family_is_described() -> None:
    assert [row[0] for row in table(TEXT["docs/data.md"], "family")] == list(FAMILIES)


# --- kv_cache.md ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["kv_cache", "engine", "speculative"])
def test_code_in_the_page_runs(page: str) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", TEXT[f"docs/{page}.md"], re.M | re.S)
    with torch.random.fork_rng():
        exec(block, {})


def test_bytes_of_the_cache() -> None:
    rows = table(TEXT["docs/kv_cache.md"], "shape")
    assert len(rows) == 6
    for name, *cells in rows:
        layers, heads, kv_heads, head_dim, size, tokens, *stated = map(number, cells)
        for n_kv_head, bytes_stated in zip((heads, kv_heads, 1), stated, strict=True):
            shape = GPTConfig(n_layer=layers, n_head=heads, n_kv_head=n_kv_head, head_dim=head_dim)
            assert bytes_stated == kv_cache_bytes(shape, 1, tokens, size), name
        kind = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        assert name.endswith(f"({kind})")
    ours = GPTConfig()
    assert list(map(number, rows[0][1:7])) == [ours.n_layer, ours.n_head, ours.n_kv_head, ours.width_of_head, 4, 512]
    assert number(rows[3][8]) == 2_147_483_648


def test_bytes_of_each_kind_of_cache() -> None:
    shape, ids = GPTConfig(), random_ids(1, 200)
    caches = {
        "DynamicCache": DynamicCache(shape),
        "StaticCache": StaticCache(shape, capacity=200),
        "SlidingCache": SlidingCache(shape, window=64),
        "QuantizedCache": QuantizedCache(shape, capacity=200),
        "PagedCache": BlockPool(shape, 40).cache(),
    }
    model = CachedGPT(shape).eval()
    with torch.inference_mode():
        for row in table(TEXT["docs/kv_cache.md"], "kind"):
            cache = caches.pop(row[0])
            model.extend(ids, cache)
            assert number(row[3]) == cache.nbytes(), row[0]
    assert not caches
    assert 2 * shape.n_layer * 200 * shape.n_kv_head * (shape.width_of_head + 4) == 326_400


def test_operations_per_token() -> None:
    rows = table(TEXT["docs/kv_cache.md"], "tokens in the context")
    assert [number(row[0]) for row in rows] == [16, 128, 512]
    for tokens, plain, cached, ratio in rows:
        assert number(plain) == figures.operations(GPTConfig(), number(tokens), cached=False)
        assert number(cached) == figures.operations(GPTConfig(), number(tokens), cached=True)
        assert float(ratio) == pytest.approx(number(plain) / number(cached), abs=0.05)


@pytest.mark.parametrize("cached", [False, True])
def test_operations_are_what_torch_counts(cached: bool) -> None:
    """The counter sees matrix products; attention on the CPU is one kernel that it does not look into."""
    shape = tiny_config(n_head=4, n_kv_head=2, vocab_size=50)
    model, ids = CachedGPT(shape).eval(), random_ids(1, 20, high=50)
    cache = model.new_cache()
    model.extend(ids[:, :19], cache)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        if cached:
            model.lm_head(model.extend(ids[:, 19:], cache)[:, -1])
        else:
            model.last_logits(ids)
    attention = 4 * 2 * 4 * 8 * (20 if cached else 20 * 21 // 2)
    assert counter.get_total_flops() + attention == figures.operations(shape, 20, cached=cached)


def test_torch_cat_writes_what_the_page_says() -> None:
    shape = tiny_config()
    cache, written = DynamicCache(shape), 0
    for _ in range(12):
        new = torch.zeros(1, shape.n_kv_head, 1, shape.width_of_head)
        for layer in range(shape.n_layer):
            written += sum(tensor.nbytes for tensor in cache.append(layer, new, new))
    assert written == figures.bytes_written(shape, 12, 4, static=False)
    assert cache.nbytes() == figures.bytes_written(shape, 12, 4, static=True)


def test_numbers_in_the_text() -> None:
    text = " ".join(TEXT["docs/kv_cache.md"].split())
    ours, llama = GPTConfig(), GPTConfig(n_layer=32, n_head=32, n_kv_head=32, head_dim=128)
    with torch.device("meta"):
        model = GPT(ours)
    weights, bandwidth = 4 * model.n_parameters(), 20e9
    for value in (
        figures.bytes_written(ours, 512, 4, static=False),
        figures.bytes_written(ours, 512, 4, static=True),
        figures.bytes_written(llama, 4096, 2, static=False),
        kv_cache_bytes(llama, 1, 1, 2),
        kv_cache_bytes(llama, 16, 4096, 2),
        model.n_parameters(),
        weights,
        figures.block_weights(ours),
        ours.vocab_size * ours.n_embd,
    ):
        assert f"{value:,}" in text
    assert f"{1000 * weights / bandwidth:.2f} ms" in text
    assert f"at most {bandwidth / weights:.0f} tokens per second" in text
    assert f"{1000 * kv_cache_bytes(ours, 1, 512, 4) / bandwidth:.2f} ms" in text


# --- pictures -------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for path in figures.draw(tmp_path):
        pixels = matplotlib.image.imread(path)
        height, width, _ = pixels.shape
        assert 600 < width <= 1200 and height > 300, path
        assert np.allclose(pixels[0, 0, :3], 1) and pixels[..., :3].mean() > 0.6, f"{path}: not a light background"
        committed = matplotlib.image.imread(figures.FOLDER / path.name)
        same = pixels.shape == committed.shape and np.abs(pixels - committed).mean() < 1e-3
        assert same, f"{path.name} is not what the code draws: run python docs/figures.py"
