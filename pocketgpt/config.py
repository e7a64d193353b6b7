"""Configuration: hydra composes the YAML files under configs/, dataclasses check them, unknown keys are errors."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pocketgpt.errors import UserError
from pocketgpt.files import write_text

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"
T = TypeVar("T")


@dataclass
class DataConfig:
    """Where a stage's data comes from. See configs/data/base.yaml for units and meaning."""

    kind: str
    path: str
    name: str
    subset: str
    split: str
    streaming: bool
    limit: int
    field: str
    val_fraction: float
    generate: int
    mix: dict[str, float] | None = None

    def check(self, kinds: Sequence[str]) -> None:
        """Raises UserError when the kind is not one of this stage's, or the kind's own key is missing."""
        if self.kind == "mix":
            for part in self.parts():
                try:
                    part.data.check(kinds)
                except UserError as error:
                    raise UserError(f"data.mix, {part.name}: {error}") from None
            return
        if self.mix:
            raise UserError("data.mix is set: choose data=mix, too")
        if self.kind not in kinds:
            raise UserError(f"data.kind is {self.kind!r}: this stage takes {', '.join(kinds)}")
        if self.kind == "mine" and not self.path:
            raise UserError("data=mine needs data.path=FILE_OR_FOLDER")
        if self.kind == "shards" and not self.path:
            raise UserError("data=shards needs data.path=FOLDER, which python data/shard.py makes")
        if self.kind == "hub" and not self.name:
            raise UserError("data=hub needs data.name=DATASET, and data.split= where it is not train")
        for key in ("limit", "generate"):
            if not 0 <= getattr(self, key) < 1 << 60:
                raise UserError(f"data.{key} is {getattr(self, key)}: it must be 0 or above")
        if not 0 < self.val_fraction < 1:
            raise UserError(f"data.val_fraction is {self.val_fraction}: it must be above 0 and below 1")

    @property
    def endless(self) -> bool:
        """Whether the text of pretraining is read while the model trains, as there is no end to it that was asked for."""
        return self.kind == "hub" and self.streaming and not self.limit

    def parts(self) -> list[Part]:
        """The sources of data=mix with their shares of training; of every other kind this one alone, all of it.

        Raises UserError on a weight that is not above 0, and on a source that is neither a path nor a choice of data=.
        """
        if self.kind != "mix":
            return [Part(self.path or self.name or self.kind, 1.0, self)]
        mix = self.mix or {}
        if not mix:
            raise UserError("data=mix needs 'data.mix={SOURCE:WEIGHT,SOURCE:WEIGHT}', in quotes for the shell")
        if self.path or self.name or self.generate:
            raise UserError("data.path, data.name and data.generate are those of one source: data=mix has data.mix")
        for name, weight in mix.items():
            if not 0 < weight < math.inf:
                raise UserError(f"data.mix: the weight of {name} is {weight}, it must be above 0")
        return [Part(name, weight / sum(mix.values()), self._source(name)) for name, weight in mix.items()]

    def _source(self, name: str) -> DataConfig:
        presets = sorted(
            {path.stem for path in (CONFIGS / "data").glob("*.yaml")} - {"base", "mine", "hub", "shards", "mix"}
        )
        if name in presets:
            with initialize_config_dir(str(CONFIGS), version_base=None):
                raw = compose(f"data/{name}").data
            return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DataConfig), raw))  # type: ignore[return-value]
        if not Path(name).exists():
            raise UserError(f"data.mix: {name} is no file, no folder and none of {', '.join(presets)}")
        return replace(self, kind="mine", path=name, mix=None)


@dataclass(frozen=True)
class Part:
    """A source of a mixture: its name, its share of what training reads (all shares sum to 1), and where it lies."""

    name: str
    share: float
    data: DataConfig


def load(name: str, schema: type[T], arguments: list[str] | None = None, program: str = "") -> T:
    """Compose configs/<name>.yaml with the command line's overrides into an instance of the dataclass `schema`.

    Hydra's composing is used without its job launcher, which would change the working directory and write folders.
    `--help` prints the file with its comments. Messages name the `program`, which is <name>.py if nothing else is said.

    Raises:
        UserError: on an unknown key, an unknown choice, or a value of the wrong type.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    program = program or f"{name}.py"
    if any(argument in ("-h", "--help") for argument in arguments):
        print(help_text(name))
        sys.exit(0)
    flag = next((a for a in arguments if a.startswith("-")), None)
    if flag:
        raise UserError(f"{flag}: options are written key=value here; python {program} --help lists the keys")
    # Under a tracer (debugger, coverage) OmegaConf would shorten its messages and make errors their own cause.
    os.environ["OC_CAUSE"] = "0"
    try:
        with initialize_config_dir(str(CONFIGS), version_base=None):
            raw = compose(name, overrides=arguments)
            OmegaConf.resolve(raw)  # before the types are checked, which do not look through references
        merged = OmegaConf.merge(OmegaConf.structured(schema), raw)
        return OmegaConf.to_object(merged)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise UserError(
            f"configuration of {name}: {first_cause(error)}; python {program} --help lists the keys"
        ) from None


def help_text(name: str) -> str:
    """configs/<name>.yaml with its comments, and the choices of each group it uses."""
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").rstrip()
    groups = re.findall(r"^  - (\w+):", text, re.M)
    choices = {group: sorted(path.stem for path in (CONFIGS / group).glob("*.yaml")) for group in groups}
    lines = [
        f"{group}= one of: {', '.join(c for c in found if c != 'base')} (configs/{group}/)"
        for group, found in choices.items()
    ]
    return "\n".join([text, "", *lines])


def first_cause(error: BaseException) -> str:
    """The innermost message, in one line and without the advice that would not apply here."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("To append", "object_type", "reference_type", "Set the env"))
    ]
    return ", ".join(kept).split(", Config search path")[0]


def plain(config: Any) -> dict[str, Any]:
    """A dataclass configuration as nested plain values, for checkpoints and logs."""
    return OmegaConf.to_container(OmegaConf.structured(config))  # type: ignore[return-value]


def save(config: Any, path: Path) -> None:
    """Write the resolved configuration as YAML."""
    write_text(path, OmegaConf.to_yaml(OmegaConf.structured(config)))
