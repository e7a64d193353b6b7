"""report.html: its numbers are those of the files, its text is text, and a real browser draws it."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import report as command
from pocketgpt import chat_template, evaluation, report
from pocketgpt.errors import UserError
from pocketgpt.files import sha256_file
from pocketgpt.metrics import RunLog
from pocketgpt.shapes import Chat
from pocketgpt.tokenizer import Tokenizer
from tests import browser
from tests.browser import Browser
from tests.helpers import tiny

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!-- __REPORT__ \u2028 & \" '"
STEPS = (1, 20, 40)


def stage(out: Path, name: str, losses: tuple[float, ...], held: list[dict[str, float]], **about: Any) -> None:
    """What a stage writes, with these training losses and held-out numbers."""
    log = RunLog(
        out, name, {"train": {"lr": 0.5, "seed": 1}, "out": str(out), "prompt": EVIL} | about.pop("config", {})
    )
    log.start(steps=40, minutes=0, step=0, elapsed=0)
    log.record(**{"unit": "nats/token", "environment": {"torch": "2"}, "data": {"text": "ab" * 32}} | about)
    for step, loss in zip(STEPS, losses, strict=True):
        numbers = {
            "grad_norm": 2.0 * step,
            "lr": step / 1e4,
            "tokens_per_s": 1000.0 + step,
            "mfu": 0.25,
            "memory_bytes": 3e9,
        }
        row = {"kind": "train", "step": step, "loss": loss, "tokens": 100 * step, "elapsed_s": 6.0 * step}
        log.write(row | numbers)
    for step, metrics in zip(STEPS[1:], held, strict=True):
        log.write({"kind": "val", "step": step, "tokens": 100 * step, "elapsed_s": 6.0 * step, **metrics})
    log.stop()


TOKENS = [
    ["<|im_start|>", False, None, []],
    [EVIL, False, 0.125, [["a", 0.5], ["<b>", 0.25]]],
    ["yes", True, 0.75, [["yes", 0.75]]],
]
RESULTS = {
    "machine": "a machine",
    "stages": {
        name: {
            "families": {"add": [passed, 10], "story<i>": [2 * passed, 10]},
            "greedy": [3 * passed, 20],
            "formats": [0, 0],
            "answer_characters": 12.5,
            "bits_per_byte": 2.25,
            "chats": [[{"role": "user", "content": EVIL}, {"role": "assistant", "content": "Hello."}]],
        }
        for name, passed in (("base", 0), ("sft", 4), ("dpo", 5))
    },
    "made_from": {},
}


def speeds(length: int, plain: float, cached: float) -> dict[str, float]:
    rates = {"plain_tokens_per_s": plain, "cached_tokens_per_s": cached}
    return {"prompt_tokens": float(length), "new_tokens": 12.0, "ratio": cached / plain, **rates}


CACHE = {
    "checkpoint": "ckpt_sft.pt",
    "machine": "a machine",
    "max_difference": 1.5e-6,
    "proof": [{"cache": "static", "way": "token by token", "difference": 1.5e-6, "argmax_agreement": 1.0, "ok": True}],
    "speed": speeds(40, 100, 450),
    "by_length": [speeds(16, 400, 500), speeds(500, 50, 500)],
    "memory": {"tokens": 240, "static_bytes": 737280},
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder as all stages, evaluate.py and kv_cache.py leave it, with hostile text wherever text may stand."""
    folder = tmp_path / "out"
    reading = {"title": "held-out conversation 1", "tokens": TOKENS}
    stage(
        folder,
        "base",
        (5.0, 3.0, 2.5),
        [{"bits_per_byte": 2.5}, {"bits_per_byte": 2.25}],
        data={"text": "ab" * 32, "files": {EVIL: "12", ".": "34"}},
    )
    stage(
        folder,
        "sft",
        (3.0, 2.0, 1.5),
        [{"loss": 2.0, "accuracy": 0.5}, {"loss": 1.75, "accuracy": 0.625}],
        readings=[reading],
    )
    rewards = [
        {"margin": 0.5, "reward_chosen": 0.25, "reward_rejected": -0.25},
        {"margin": 1.5, "reward_chosen": 1.0, "reward_rejected": -0.5},
    ]
    stage(folder, "dpo", (0.7, 0.6, math.nan), rewards, unit="/pair")
    (folder / "results.json").write_text(json.dumps(RESULTS))
    (folder / "kv_cache.json").write_text(json.dumps(CACHE))
    return folder


def shown(path: Path) -> dict[str, Any]:
    """The values that a page carries."""
    (data,) = re.findall(r'<script id="report" type="application/json">(.*?)</script>', path.read_text("utf-8"), re.S)
    return json.loads(data)  # type: ignore[no-any-return]


def blocks(page: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {block["id"]: block for section in page["sections"] for block in section["blocks"] if "id" in block}


def points(page: dict[str, Any], chart: str, axis: str) -> dict[str, list[tuple[float, float]]]:
    """What the page draws: by the label of the line, its points."""
    return {
        line["label"]: [
            (x, y * line["factor"])
            for x, y in zip(
                page["columns"][line["from"]][axis], page["columns"][line["from"]][line["column"]], strict=True
            )
            if y is not None
        ]
        for line in blocks(page)[chart]["series"]
    }


# --- numbers --------------------------------------------------------------------------------------------------------


def test_curves_are_those_of_the_metrics_files(out: Path) -> None:
    page = shown(report.refresh(out))
    assert page["axes"] == ["tokens", "minutes", "step"]
    assert points(page, "base/loss", "tokens") == {"training": [(100, 5.0), (2000, 3.0), (4000, 2.5)]}
    assert points(page, "base/loss", "minutes")["training"] == [(0.1, 5.0), (2.0, 3.0), (4.0, 2.5)]
    assert points(page, "sft/loss", "step") == {
        "training": [(1, 3.0), (20, 2.0), (40, 1.5)],
        "held out": [(20, 2.0), (40, 1.75)],
    }
    assert points(page, "base/bits_per_byte", "step") == {"held out": [(20, 2.5), (40, 2.25)]}
    assert points(page, "sft/accuracy", "step")["held out"] == [(20, 50.0), (40, 62.5)]
    assert points(page, "dpo/margin", "step") == {"held out": [(20, 0.5), (40, 1.5)]}
    assert points(page, "dpo/reward_chosen", "step")["reward rejected, held out"] == [(20, -0.25), (40, -0.5)]
    assert points(page, "dpo/loss", "step")["training"] == [(1, 0.7), (20, 0.6)], "NaN is no point"
    assert points(page, "base/mfu", "step")["training"][0] == (1, 25.0)
    assert points(page, "base/memory_bytes", "step")["training"][0] == (1, 3.0)
    assert points(page, "base/grad_norm", "step")["training"] == [(1, 2.0), (20, 40.0), (40, 80.0)]
    assert points(page, "base/lr", "step")["training"][2] == (40, 0.004)
    assert points(page, "0/cache/ms", "context") == {
        "with the cache": [(16, 2.0), (500, 2.0)],
        "without": [(16, 2.5), (500, 20.0)],
    }
    assert (blocks(page)["base/loss"]["unit"], blocks(page)["dpo/loss"]["unit"]) == ("nats/token", "/pair")
    assert blocks(page)["overview"]["rows"][0] == [
        "Pretraining",
        40,
        4000,
        4.0,
        1020.0,
        25.0,
        2.5,
        "bits per byte 2.25",
    ]


def test_a_metric_that_nobody_named_is_drawn_under_its_own_name(out: Path) -> None:
    stage(out, "grpo", (3.0, 2.0, 1.5), [{"reward_mean": 0.5}, {"reward_mean": 0.75}])
    page = shown(report.refresh(out))
    assert points(page, "grpo/reward_mean", "step") == {"held out": [(20, 0.5), (40, 0.75)]}
    assert blocks(page)["grpo/reward_mean"]["title"] == "reward mean"
    assert [section["id"] for section in page["sections"] if section["id"].startswith("stage-")][-1] == "stage-grpo"


def test_shares_have_the_intervals_of_wilson(out: Path) -> None:
    page = shown(report.refresh(out))
    chart = blocks(page)["families"]
    assert chart["series"] == ["base", "sft", "dpo"] and [row[0] for row in chart["rows"]] == ["add", "story<i>", "all"]
    low, high = evaluation.wilson(8, 10)
    assert chart["rows"][1][2] == [8, 10, pytest.approx(low, abs=1e-5), pytest.approx(high, abs=1e-5)]
    assert ["story<i>", "0.0% of 10", "80.0% of 10", "100.0% of 10"] in blocks(page)["evaluation"]["rows"]


def test_settings_and_readings_are_there(out: Path) -> None:
    page = shown(report.refresh(out))
    assert ["train.lr", "0.5", "0.5", "0.5"] in blocks(page)["config"]["rows"]
    assert [f"files.{EVIL}", "12", None, None] in blocks(page)["data"]["rows"]
    assert ["files", "34", None, None] in blocks(page)["data"]["rows"]
    assert ["torch", "2", "2", "2"] in blocks(page)["environment"]["rows"]
    (texts,) = (section["blocks"] for section in page["sections"] if section["id"] == "tokens")
    assert [block["tokens"] for block in texts if block["kind"] == "tokens"] == [TOKENS]


def test_an_answer_without_a_word_is_no_empty_space(out: Path) -> None:
    """A model that was hardly trained says one line end after the other."""
    results = json.loads(json.dumps(RESULTS))
    results["stages"]["base"]["chats"][0][1]["content"] = "\n" * 80
    (out / "results.json").write_text(json.dumps(results))
    page = shown(report.refresh(out))
    said = [block["chats"] for section in page["sections"] for block in section["blocks"] if block["kind"] == "chats"]
    assert [chats[0][1]["content"] for chats in said] == ["(empty)", "Hello.", "Hello."]


def test_long_curves_keep_their_extremes(tmp_path: Path) -> None:
    rows = [
        {"kind": "train", "step": i, "loss": 3.0 + i % 7 / 10, "grad_norm": 1.0, "tokens": 9 * i, "elapsed_s": i}
        for i in range(60_000)
    ]
    rows[1234]["loss"], rows[4321]["grad_norm"], rows[50_000]["loss"] = 99.0, 77.0, math.inf
    (tmp_path / "metrics_base.jsonl").write_text("\n".join(map(json.dumps, rows)))
    path = report.refresh(tmp_path)
    kept = dict(points(shown(path), "base/loss", "step")["training"])
    assert kept[1234] == 99.0 and 59_999 in kept and 0 in kept and 50_000 not in kept and len(kept) < 1100
    assert 77.0 in dict(points(shown(path), "base/grad_norm", "step")["training"]).values()
    assert path.stat().st_size < 200_000


def test_the_same_files_give_the_same_page(out: Path) -> None:
    first = report.refresh(out).read_bytes()
    assert report.refresh(out).read_bytes() == first and len(first) < 200_000


# --- text and damage ------------------------------------------------------------------------------------------------


def test_text_cannot_become_markup(out: Path) -> None:
    text = report.refresh(out).read_text("utf-8")
    template = report.PAGE.read_text("utf-8")
    assert text.count("<script") == template.count("<script") == 2 and "<img" not in text and "<!--" not in text
    assert (
        text.replace(
            json.dumps(shown(out / "report.html"), separators=(",", ":")).replace("<", "\\u003c"), "__REPORT__"
        )
        == template
    )
    assert "http" not in re.sub(r'"http://www.w3.org/2000/svg"|http-equiv', "", template), "nothing is fetched"


@pytest.mark.parametrize("left", ["metrics_sft.jsonl", "results.json", "kv_cache.json"])
def test_missing_parts_are_left_out(out: Path, left: str) -> None:
    for path in out.iterdir():
        if path.is_file() and path.name != left:
            path.unlink()
    sections = [section["id"] for section in shown(report.refresh(out))["sections"]]
    right = {
        "metrics_sft.jsonl": ["overview", "stage-sft"],
        "results.json": ["evaluation"],
        "kv_cache.json": ["cache-0"],
    }
    assert sections == right[left]


def test_caches_of_models_from_elsewhere_stand_beside_ours(tmp_path: Path) -> None:
    (tmp_path / "smollm2_kv_cache.json").write_text(json.dumps(CACHE))
    (section,) = shown(report.refresh(tmp_path))["sections"]
    assert section["id"] == "cache-0" and section["title"] == "Key/value cache, smollm2"
    (tmp_path / "kv_cache.json").write_text(json.dumps(CACHE))
    titles = [section["title"] for section in shown(report.refresh(tmp_path))["sections"]]
    assert titles == ["Key/value cache", "Key/value cache, smollm2"]


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for folder in (tmp_path, tmp_path / "none", tmp_path / "file"):
        with pytest.raises(UserError, match=re.escape(f"{folder}: no metrics_<stage>.jsonl")):
            report.write([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", ["results.json", "kv_cache.json", "run_sft.json"])
@pytest.mark.parametrize("content", ["{", "[1]", "\xff", '{"stages": 3, "by_length": [{}], "readings": [{}]}'])
def test_damaged_files_are_left_out_and_named(
    out: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (out / name).write_bytes(content.encode("latin-1"))
    page = shown(report.refresh(out))
    assert f"{out / name}: left out of the report" in capsys.readouterr().out
    assert "stage-sft" in [section["id"] for section in page["sections"]]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_json_gives_a_page(out: Path, data: st.DataObject) -> None:
    """Any value in the place of any one in the files: the page is there, and is JSON that a browser reads."""
    name = data.draw(st.sampled_from(["results.json", "kv_cache.json", "run_sft.json", "metrics_sft.jsonl"]))
    before = (out / name).read_text("utf-8")
    lines = before.splitlines() if name.endswith("l") else [before]
    place = data.draw(st.integers(0, len(lines) - 1))
    value = json.loads(lines[place])
    at: Any = value
    while True:  # walk down to somewhere
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not (isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans())):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    lines[place] = json.dumps(value)
    (out / name).write_text("\n".join(lines), "utf-8")
    try:
        page = report.contents([report.Run.read(out, "out")])
        assert len(page["sections"]) >= 4 and report.page(page)
    finally:
        (out / name).write_text(before, "utf-8")


def test_results_of_older_checkpoints_are_marked(out: Path) -> None:
    path = out / "ckpt_sft.pt"
    path.write_bytes(b"weights")
    (out / "results.json").write_text(json.dumps(RESULTS | {"made_from": {"sft": sha256_file(path)}}))
    assert "run evaluate.py again" not in report.refresh(out).read_text()
    path.write_bytes(b"other weights")
    assert f"Older than {path}: run evaluate.py again." in report.refresh(out).read_text()


def test_scores_of_single_checkpoints(out: Path) -> None:
    share = {"passed": 3, "asked": 4, "share": 0.75, "interval": [0.3, 0.95]}
    text = {"bits_per_byte": 1.25, "interval": None, "bytes": 1000}
    measured = {"a.pt": {"text": text, "choices": {"acc": share, "acc_norm": share}, "families": {"add": share}}}
    (out / "results.json").write_text(json.dumps({"checkpoints": measured}))
    rows = blocks(shown(report.refresh(out)))["scores"]["rows"]
    assert rows[0] == ["a.pt", "text", "1.2500 bits/byte", None, "1,000"]
    assert rows[1:] == [
        ["a.pt", what, "75.0%", "30.0% to 95.0%", "4"] for what in ("choices, acc", "choices, acc_norm", "add")
    ]


# --- several runs ---------------------------------------------------------------------------------------------------


def test_several_runs_share_their_charts(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = out.parent / "other"
    stage(
        other,
        "base",
        (4.0, 2.0, 1.0),
        [{"bits_per_byte": 2.0}, {"bits_per_byte": 1.0}],
        config={"train": {"lr": 0.25, "seed": 1}},
    )
    monkeypatch.chdir(out.parent)
    monkeypatch.setattr("sys.argv", ["report.py", "out", "other"])
    command.main()
    assert capsys.readouterr().out == "report compare.html\n"
    page = shown(Path("compare.html"))
    assert points(page, "base/bits_per_byte", "step") == {
        "out, held out": [(20, 2.5), (40, 2.25)],
        "other, held out": [(20, 2.0), (40, 1.0)],
    }
    assert [line["color"] for line in blocks(page)["base/loss"]["series"]] == [0, 1]
    rows = blocks(page)["differences"]["rows"]
    assert ["base", "train.lr", "0.5", "0.25"] in rows and not [row for row in rows if row[1] in ("out", "train.seed")]
    assert blocks(page)["families"]["series"] == ["out, dpo"]


def test_one_run_goes_into_its_folder_or_where_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["report.py", str(out)])
    command.main()
    monkeypatch.setattr("sys.argv", ["report.py", str(out), "--to", str(out.parent / "here.html")])
    command.main()
    assert (out / "report.html").read_bytes() == (out.parent / "here.html").read_bytes()


# --- readings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 200])
def test_a_reading_is_what_the_model_computes(tok: Tokenizer, padding: int) -> None:
    model = tiny(vocab_size=tok.vocab_size + padding, block_size=64)
    messages = [{"role": "user", "content": "hé<|im_end|>"}, {"role": "assistant", "content": "the boats"}]
    ids, supervised = chat_template.render(tok, messages)
    read = evaluation.reading(model, tok, "one", ids, supervised)
    texts, learned, given_to, likely = zip(*read["tokens"], strict=True)
    assert list(learned) == supervised and read["title"] == "one"
    assert "".join(texts).replace("\\xc3\\xa9", "é") == tok.decode(ids)
    with torch.no_grad():
        right = model(torch.tensor([ids]))[0].softmax(-1)
    assert given_to[0] is None and likely[0] == []
    assert given_to[1:] == pytest.approx([float(right[i, token]) for i, token in enumerate(ids[1:])], rel=1e-3)
    for i, best in enumerate(likely[1:]):
        able = right[i, : tok.vocab_size]  # to say something
        assert [p for _, p in best] == pytest.approx(able.topk(3).values.tolist(), rel=1e-3)
        assert best[0][0] == tok.token_bytes(int(able.argmax())).decode("utf-8", "backslashreplace")
    long = evaluation.reading(model, tok, "long", ids * 9, supervised * 9)
    assert len(long["tokens"]) == 64 and long["title"] == f"long, the first 64 of {9 * len(ids)} tokens"


def test_conversations_are_picked_from_first_to_last(tok: Tokenizer) -> None:
    chats = [Chat([{"role": "user", "content": str(i)}, {"role": "assistant", "content": "yes"}]) for i in range(8)]
    model = tiny(vocab_size=tok.vocab_size, block_size=64)
    titles = [read["title"] for read in evaluation.read_conversations(model, tok, chats)]
    assert titles == [f"held-out conversation {i}" for i in (1, 3, 5, 7)]
    assert (
        len(evaluation.read_conversations(model, tok, chats[:2])) == 2
        and evaluation.read_conversations(model, tok, []) == []
    )


# --- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = browser.find()
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(browser.NAMES)} is installed")
    page = Browser(program, tmp_path_factory.mktemp("profile"))
    yield page
    page.close()


def test_the_page_opens_without_errors_and_without_a_network(out: Path, chromium: Browser) -> None:
    path = report.refresh(out)
    chromium.requests.clear()
    chromium.open(path)
    assert chromium.errors == [] and chromium.requests == [path.resolve().as_uri()]
    assert chromium.value("window.pwned") is None and chromium.value("document.querySelectorAll('img').length") == 0
    assert chromium.value("document.title") == "pocketgpt: out"
    headings = chromium.value("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert headings == [section["title"] for section in shown(path)["sections"]]
    assert chromium.value("document.querySelector('.said').textContent") == f"user{EVIL}"
    # the hostile prompt stands in the table as it is
    cells = chromium.value("[...document.querySelectorAll('[data-table=config] td')].map((cell) => cell.textContent)")
    assert EVIL in cells and "train.lr" in cells


def test_charts_show_the_numbers_under_the_pointer(out: Path, chromium: Browser) -> None:
    chromium.open(report.refresh(out))
    tip = "document.getElementById('tip').textContent"
    chart = '[data-chart="sft/loss"] svg'
    chromium.hover(chart, 0.95)
    assert chromium.value(tip) == "training: 1.5 at 4,000 tokens read\nheld out: 1.75 at 4,000 tokens read"
    chromium.hover(chart, 0.17)
    assert chromium.value(tip).startswith("training: 3 at 100 tokens read")
    chromium.value("document.querySelector('input[value=minutes]').click()")
    chromium.hover(chart, 0.95)
    assert chromium.value(tip) == "training: 1.5 at 4 minutes\nheld out: 1.75 at 4 minutes"
    label = chromium.value(f"document.querySelector('{chart}').getAttribute('aria-label')")
    assert label == "Supervised fine-tuning, nats/token: training ends at 1.5, held out ends at 1.75"
    chromium.hover('[data-chart="sft/accuracy"] svg', 0.95)
    assert chromium.value(tip) == "held out: 62.5 at 4 minutes"
    # the path falls from 3 to 1.5, at 0.1, 2 and 4 of 4 minutes
    path = chromium.value(f"document.querySelector('{chart} path').getAttribute('d')")
    (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, part.split())) for part in re.split("[ML]", path)[1:]]
    assert (x1 - x0) / (x2 - x0) == pytest.approx(1.9 / 3.9, abs=0.01) and (y1 - y0) / (y2 - y0) == pytest.approx(
        1 / 1.5, abs=0.01
    )
    assert chromium.value("document.querySelectorAll('[data-chart=\"dpo/margin\"] circle').length") == 2
    values = chromium.value(
        "[...document.querySelectorAll('[data-share]')].map((g) => [g.dataset.share, Number(g.dataset.value)])"
    )
    assert ["story<i>/sft", 0.8] in values and ["all/dpo", 0.75] in values
    chromium.hover('[data-share="add/sft"]')
    assert chromium.value(tip) == "add, sft: 4 of 10, 40 %\n95 % interval 16.82 to 68.73 %"


def test_tokens_show_mask_and_probability(out: Path, chromium: Browser) -> None:
    chromium.open(report.refresh(out))
    spans = chromium.value("[...document.querySelectorAll('.tokens span')].map((s) => [s.textContent, s.className])")
    assert spans == [["<|im_start|>", ""], [EVIL, ""], ["yes", "learned"]]
    chromium.hover(".tokens span.learned")
    assert (
        chromium.value("document.getElementById('tip').textContent")
        == '"yes", supervised\nprobability 75 %\nlikeliest: "yes" 75 %'
    )
    chromium.value("document.querySelector('.tokens span').focus()")
    assert (
        chromium.value("document.getElementById('tip').textContent")
        == '"<|im_start|>", not supervised\nnothing stands before it'
    )


@pytest.mark.parametrize("width", [320, 390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_fits_the_window_in_light_and_dark(out: Path, chromium: Browser, width: int, dark: bool) -> None:
    chromium.open(report.refresh(out), width, 800, dark)
    assert chromium.value("document.documentElement.scrollWidth") <= width and chromium.errors == []
    red, green, blue = map(int, re.findall(r"\d+", chromium.value("getComputedStyle(document.body).backgroundColor")))
    assert (red + green + blue < 150) == dark
    drawn = chromium.value("[...document.querySelectorAll('figure svg')].map((s) => [s.clientWidth, s.clientHeight])")
    assert len(drawn) > 20 and all(w <= width and h > 100 for w, h in drawn)


@pytest.mark.parametrize("left", ["metrics_sft.jsonl", "results.json", "kv_cache.json"])
def test_pages_with_missing_parts_open_too(out: Path, chromium: Browser, left: str) -> None:
    for path in out.iterdir():
        if path.is_file() and path.name != left:
            path.unlink()
    if left.endswith("l"):  # and one number in the place of a curve, all of them equal, or none
        (out / left).write_text(
            '{"kind": "train", "step": 0, "loss": 0.0, "lr": 0}\n{"kind": "val", "step": 0, "x": null}\n'
        )
    chromium.open(report.refresh(out))
    assert chromium.errors == [] and chromium.value("document.querySelectorAll('figure svg').length") >= 1


def test_the_page_prints(out: Path, chromium: Browser) -> None:
    chromium.open(report.refresh(out), dark=True)
    chromium.call("Page.printToPDF")
    assert chromium.errors == [] and chromium.value("[...document.querySelectorAll('details')].every((d) => d.open)")
