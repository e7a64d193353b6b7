"""What a run shows and leaves: a progress bar, log lines, metrics as JSONL, and a plot."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pocketgpt import distributed
from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path, reserve, write_json, write_text

console = Console(highlight=False, soft_wrap=True)


def bar(description: str, total: float | None = None) -> tuple[Progress, Any]:
    """A progress bar with ETA for anything that takes over two seconds; use the Progress as a context manager."""
    progress = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # a log file gets the lines, and no empty ones where bars were
    )
    return progress, progress.add_task(description, total=total)


class RunLog:
    """The log of one stage: `metrics_<stage>.jsonl` and `plot_<stage>.png` under `out`, what was run in
    `run_<stage>.json`, lines and a bar on the terminal.

    `out` is reserved for this process. Of a run of several processes all but the first are silent and write nothing.
    log: where else to send the numbers, see `LISTENERS`.

    Raises:
        UserError: if log is something else, or not set up, or another process writes to `out`.
    """

    def __init__(
        self, out: Path, stage: str, run_config: dict[str, Any], log: str = "none", resume: bool | str = False
    ) -> None:
        if log not in LISTENERS:
            raise UserError(f"log is {log!r}: choose {', '.join(LISTENERS)}")
        self.silent = not distributed.is_main()
        if self.silent:
            log = "none"
        else:
            reserve(out)
        self.stage = stage
        self.path = out / f"metrics_{stage}.jsonl"
        self.plot_path = out / f"plot_{stage}.png"
        self.about_path = out / f"run_{stage}.json"
        self.about: dict[str, Any] = {"stage": stage, "config": run_config}
        self.keep = resume
        self.file: TextIO | None = None
        self.progress: Progress | None = None
        self.send, self.close = LISTENERS[log](out, stage, run_config, bool(resume))

    def start(self, steps: int, minutes: float, step: int, elapsed: float) -> None:
        """Open the metrics file (dropping what a resumed run will do again) and the progress bar."""
        if self.silent:
            return
        kept = [row for row in read_jsonl(self.path) if row.get("step", math.inf) <= step] if self.keep else []
        with atomic_path(self.path) as temporary:
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        self.file = self.path.open("a", encoding="utf-8")
        self.by_steps = steps > 0
        total = steps if self.by_steps else round(60 * minutes)
        self.progress, self.task = bar(self.stage if self.by_steps else f"{self.stage} (s)", total)
        self.advance(step, elapsed)
        self.progress.start()

    def record(self, **facts: Any) -> None:
        """Add plain values to `run_<stage>.json`: what cannot be told from the numbers."""
        self.about |= facts
        if not self.silent:
            write_json(self.about_path, self.about)

    def advance(self, step: int, elapsed: float) -> None:
        if self.progress is None:
            return
        self.progress.update(self.task, completed=step if self.by_steps else round(elapsed))

    def stop(self) -> None:
        """Take the bar away and close the file. May be called twice."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
        if self.file is not None:
            self.file.close()
            self.file = None

    def say(self, text: str) -> None:
        if not self.silent:
            console.print(text, markup=False)

    def write(self, row: dict[str, Any]) -> None:
        assert self.file is not None
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        prefix = "held_out/" if row["kind"] == "val" else ""
        self.send(row["step"], {prefix + key: value for key, value in row.items() if key not in ("kind", "step")})

    def train(self, step: int, shown: dict[str, float], unit: str, **numbers: float) -> None:
        """One line of training numbers."""
        self.write({"kind": "train", "step": step, **shown, **numbers})
        extra = "".join(f" {key} {value:.3f}" for key, value in shown.items() if key != "loss")
        self.say(
            f"step {step:>5}  loss {shown['loss']:.4f} {unit}{extra}  lr {numbers['lr']:.1e}  norm {numbers['grad_norm']:.2f}  "
            f"{numbers['tokens_per_s']:,.0f} tok/s  MFU {numbers['mfu']:.0%}  {numbers['memory_bytes'] / 1e6:,.0f} MB  {self.eta()}"
        )

    def eta(self) -> str:
        left = self.progress.tasks[self.task].time_remaining if self.progress else None
        return f"ETA {int(left) // 60}:{int(left) % 60:02d}" if left is not None else ""

    def validation(self, step: int, tokens: int, elapsed: float, metrics: dict[str, float], sample: str) -> None:
        self.write({"kind": "val", "step": step, "tokens": tokens, "elapsed_s": elapsed, **metrics})
        self.say(f"step {step:>5}  held out: " + "  ".join(f"{key} {value:.4f}" for key, value in metrics.items()))
        if sample:
            self.say("  | " + sample.strip().replace("\n", "\n  | "))

    def plot(self, curves: list[tuple[str, str]]) -> Path:
        """Save a PNG with one panel per (metric, axis label), training and held-out numbers against steps."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = read_jsonl(self.path)
        figure, axes = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False, layout="constrained")
        for axis, (metric, label) in zip(axes[0], curves, strict=True):
            for kind, style in (("train", {"lw": 1, "alpha": 0.8}), ("val", {"marker": "o", "ms": 4})):
                points = [
                    (r["step"], r[metric]) for r in rows if r["kind"] == kind and math.isfinite(r.get(metric, math.nan))
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), label={"train": "training", "val": "held out"}[kind], **style)
            axis.set(xlabel="optimizer step", ylabel=label)
            axis.grid(alpha=0.3)
            axis.legend()
        figure.suptitle(f"pocketgpt {self.stage}")
        with atomic_path(self.plot_path) as temporary:
            figure.savefig(temporary, dpi=120, format="png")
        plt.close(figure)
        return self.plot_path


Send = Callable[[int, dict[str, float]], None]  # the step, and its numbers by name
Listener = tuple[Send, Callable[[], None]]  # and what to call at the end


def no_listener(out: Path, stage: str, run_config: dict[str, Any], resume: bool) -> Listener:
    return lambda step, numbers: None, lambda: None


def wandb_listener(out: Path, stage: str, run_config: dict[str, Any], resume: bool) -> Listener:
    """Weights & Biases, online or offline as it is set up, without a question. A resumed run keeps its place there, whose
    name lies in `wandb_<stage>.txt`. UserError if there is no account."""
    import wandb  # only here: it starts slowly and nobody else needs it

    offline = wandb.setup().settings.mode in ("offline", "disabled", "dryrun")
    if not offline and not wandb.login(prompt=False, verify=False):  # wandb.init would ask, and wait for an answer
        raise UserError("log=wandb: no account is set up: run wandb login, or set WANDB_MODE=offline, or log=none")
    note = out / f"wandb_{stage}.txt"
    run_id = note.read_text("utf-8").strip() if resume and note.exists() else secrets.token_hex(4)
    write_text(note, run_id + "\n")
    try:
        run = wandb.init(project="pocketgpt", name=stage, id=run_id, resume="allow", config=run_config, dir=out)
    except wandb.errors.Error as error:
        raise UserError(f"log=wandb: {error}; or set WANDB_MODE=offline, or log=none") from None
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def tensorboard_listener(out: Path, stage: str, run_config: dict[str, Any], resume: bool) -> Listener:
    """Event files in `tensorboard/<stage>/`, for `tensorboard --logdir out/tensorboard`. A run takes the place of
    the ones before it, from its first step on. UserError if the package is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise UserError("log=tensorboard: run pip install tensorboard, or set log=none") from None

    writer: SummaryWriter | None = None

    def send(step: int, numbers: dict[str, float]) -> None:
        nonlocal writer
        if writer is None:  # only now it is known from where a resumed run goes on: what was later is no longer shown
            writer = SummaryWriter(str(out / "tensorboard" / stage), purge_step=step)
            writer.add_text("config", f"```json\n{json.dumps(run_config, indent=2)}\n```", step)
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return send, lambda: writer.close() if writer is not None else None


LISTENERS = {"none": no_listener, "wandb": wandb_listener, "tensorboard": tensorboard_listener}


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, up to a line that a killed run left half written. Nothing if there is no file."""
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError):
            break
    return rows
