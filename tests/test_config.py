"""The configuration files: documented, complete, and strict."""

import re
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

import dpo
import evaluate
import kv_cache
import pretrain
import sft
from base_model import PRESETS, GPTConfig
from pocketgpt import config
from pocketgpt.errors import UserError

STAGES = {
    "pretrain": pretrain.Config,
    "sft": sft.Config,
    "dpo": dpo.Config,
    "kv_cache": kv_cache.Config,
    "evaluate": evaluate.Config,
}
FILES = sorted(config.CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(config.CONFIGS)))
def test_every_key_has_a_comment_with_its_type(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# "), "a file begins by saying what it is"
    for line in lines[1:]:
        key = re.match(r"\s*(\w+):\s+(?!\[)(\S.*)", line)
        if key and key[1] != "kind" and not line.lstrip().startswith(("name: ", "#")):
            assert re.search(r"  ?# .{3,}|# \w", line), line


@pytest.mark.parametrize("name", STAGES)
def test_files_and_dataclasses_have_the_same_keys(name: str) -> None:
    loaded: Any = config.load(name, STAGES[name], [])
    raw = yaml.safe_load((config.CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))
    groups = {next(iter(entry)) for entry in raw.get("defaults", []) if isinstance(entry, dict)}
    assert {field.name for field in fields(loaded)} == (raw.keys() - {"defaults"}) | groups
    for field in fields(loaded):
        part = getattr(loaded, field.name)
        if is_dataclass(part) and field.name not in groups:
            assert {inner.name for inner in fields(part)} == raw[field.name].keys()


@pytest.mark.parametrize("preset", PRESETS)
def test_model_files_are_the_presets(preset: str) -> None:
    loaded = config.load("pretrain", pretrain.Config, [f"model={preset}"])
    shape = GPTConfig.from_dict(loaded.model | {"vocab_size": 300}).to_dict()
    assert {key: shape[key] for key in PRESETS[preset]} == PRESETS[preset]
    assert shape["n_kv_head"] == (3 if preset == "gpt2" else 1)


@pytest.mark.parametrize(
    "choice", [path.stem for path in (config.CONFIGS / "data").glob("*.yaml") if path.stem != "base"]
)
def test_data_choices_compose(choice: str) -> None:
    for name in ("pretrain", "sft", "dpo"):
        assert config.load(name, STAGES[name], [f"data={choice}"]).data.split


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.lrr=1"], "lrr"),
        (["+train.lrr=1"], "lrr"),
        (["nonsense=1"], "nonsense"),
        (["train.lr=fast"], "fast"),
        (["data=nowhere"], "data/nowhere"),
        (["train.lr"], "train.lr"),
        (["--lr=3"], "key=value"),
    ],
)
def test_bad_overrides_are_one_line_that_names_them(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        config.load("pretrain", pretrain.Config, arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_bad_override_under_a_tracer_is_the_same_line() -> None:
    """A debugger or coverage sets one, and OmegaConf then makes errors their own cause."""
    before = sys.gettrace()
    sys.settrace(lambda *_: None)
    try:
        with pytest.raises(UserError, match=r"train\.lrr"):
            config.load("pretrain", pretrain.Config, ["train.lrr=1"])
    finally:
        sys.settrace(before)


def test_unknown_model_key_is_an_error() -> None:
    loaded = config.load("pretrain", pretrain.Config, ["+model.n_heads=3"])
    with pytest.raises(UserError, match="unknown model key 'n_heads'"):
        GPTConfig.from_dict(loaded.model)


@pytest.mark.parametrize(
    ("data", "kinds", "message"),
    [
        (["data=mine"], ("mine",), "data.path"),
        (["data=hub"], ("hub",), "data.name"),
        (["data=shakespeare"], ("instruct", "mine"), "'shakespeare'"),
    ],
)
def test_data_that_does_not_fit_the_stage(data: list[str], kinds: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load("sft", sft.Config, data).data.check(kinds)


def test_help_shows_the_keys_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        config.load("sft", sft.Config, ["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert "# float, peak learning rate" in shown and "data= one of: fineweb_edu, hub, instruct, mine" in shown


def test_plain_gives_back_what_was_loaded(tmp_path: Path) -> None:
    loaded = config.load("dpo", dpo.Config, ["dpo.beta=0.7"])
    values = config.plain(loaded)
    assert values["dpo"]["beta"] == 0.7 and values["data"]["kind"] == "onpolicy"
    config.save(loaded, tmp_path / "c.yaml")
    assert yaml.safe_load((tmp_path / "c.yaml").read_text(encoding="utf-8")) == values
