"""The training loop, shared by all stages. A stage brings its batches, its loss and its evaluation; see `Stage`."""

from __future__ import annotations

import gc
import hashlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pocketgpt import checkpoint, distributed, fused, kernels, lora, optim, sharded
from pocketgpt import device as machine
from pocketgpt.errors import UserError, is_out_of_memory
from pocketgpt.loading import Loader
from pocketgpt.metrics import RunLog

# Minutes. Compiling took 51 s and made a step 1.15 times as fast (docs/LOG.md), which is even after 7 of them.
COMPILE_PAYS_AFTER = 15
PATIENCE_WITH_NAN = 10  # steps in a row with a non-finite loss or gradient before the run gives up
Network = Callable[..., Tensor]
# Keys that a resumed run may change: where things lie (the data itself is compared by its digest), who is told, who works, and
# what it takes of memory, up to rounding.
FREE = (
    *("out", "cache", "checkpoint", "log", "data.path", "train.resume"),
    *("parallel", "train.micro_batch_size", "train.recompute", "optim.offload"),
)
# Keys that a branch may change as well: when it ends, and how.
HORIZON = tuple(f"train.{key}" for key in ("steps", "minutes", "decay", "decay_shape", "eval_every", "log_every"))


@dataclass
class TrainConfig:
    """See configs/*.yaml for units and meaning."""

    steps: int
    minutes: float
    batch_size: int
    micro_batch_size: int
    lr: float
    warmup: float
    decay: float
    decay_shape: str
    grad_clip: float
    eval_every: int
    log_every: int
    seed: int
    dtype: str
    compile: bool | str
    resume: bool | str
    recompute: bool | str = False

    def check(self) -> None:
        """Raises UserError on values that make no run."""
        if not (self.steps >= 0 and 0 <= self.minutes < math.inf):
            raise UserError(f"train.steps={self.steps} and train.minutes={self.minutes} must be 0 or above")
        if self.steps == self.minutes == 0:
            raise UserError("train.steps and train.minutes are both 0: the run needs an end, set one of them")
        if self.micro_batch_size < 0:
            raise UserError(
                f"train.micro_batch_size is {self.micro_batch_size}: it must be 0 (chosen for you) or above"
            )
        for key in ("batch_size", "eval_every", "log_every"):
            if getattr(self, key) < 1:
                raise UserError(f"train.{key} is {getattr(self, key)}: it must be at least 1")
        if not 0 < self.lr < math.inf:
            raise UserError(f"train.lr is {self.lr}: it must be above 0")
        if not 0 <= self.grad_clip < math.inf:
            raise UserError(f"train.grad_clip is {self.grad_clip}: it must be 0 (no limit) or above")
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"train.seed is {self.seed}: it must be at least 0 and below 2^32")
        share = 0.0 if 1 <= self.warmup < math.inf else self.warmup  # from 1 on it counts steps
        if not 0 <= share + self.decay <= 1 or min(share, self.decay) < 0:
            raise UserError(
                f"train.warmup={self.warmup} and train.decay={self.decay} are shares of one run: from 0, sum up to 1"
            )
        if self.decay_shape not in ("linear", "cosine"):
            raise UserError(f"train.decay_shape is {self.decay_shape!r}: choose linear or cosine")
        if self.compile not in (False, True, "auto"):
            raise UserError(f"train.compile is {self.compile!r}: choose false, true or auto")
        if self.recompute not in (False, True, "selective"):
            raise UserError(f"train.recompute is {self.recompute!r}: choose false, selective or true")
        if self.branch is not None and not self.branch.is_file():
            raise UserError(
                f"train.resume is {self.resume!r}: choose false, true, force, or a file stable_*.pt or resume_*.pt"
            )

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch: at most what gives every process of the run one."""
        return min(self.micro_batch_size, -(-self.batch_size // distributed.world()))

    def mine(self, row: int) -> bool:
        """Whether a row of pretraining, counted from the first step, is one that this process runs."""
        return row % self.batch_size // self.rows_at_once % distributed.world() == distributed.rank()

    @property
    def branch(self) -> Path | None:
        """The file to branch from, where train.resume names one."""
        return Path(self.resume) if isinstance(self.resume, str) and self.resume != "force" else None


@dataclass
class Batch:
    """One micro-batch: what the stage's loss reads, and the two numbers that the loop needs of it."""

    inputs: tuple[Tensor, ...]
    weight: int  # what the summed loss is divided by: supervised tokens, or pairs
    tokens: int  # tokens that the network reads, for tokens/s

    def to(self, device: torch.device) -> Batch:
        return Batch(tuple(t.to(device, non_blocking=True) for t in self.inputs), self.weight, self.tokens)

    def digest(self) -> str:
        """A few hex digits to recognise its contents by."""
        total = hashlib.sha256()
        for tensor in self.inputs:
            total.update(checkpoint.raw_bytes(tensor))
        return total.hexdigest()[:12]


@dataclass
class Stage:
    """What a stage script brings to the loop.

    batches: the micro-batches of a step, a pure function of the step's number, so that the data cursor is that number. It is
    called ahead, in a thread of its own: see `pocketgpt.loading`.
    loss: sum over a micro-batch's supervised tokens (or pairs), and numbers to log, summed likewise.
    evaluate: metrics on held-out data; sample: a text to look at.
    monitor: the metric, higher is better, whose best weights are kept; None keeps the last.
    made_from: all that the result follows from, in plain values: the resolved configuration and digests of the data. A
    run is resumed only where it is the same, see `FREE`.
    network: what the loss runs, if that is not the model itself, see `distributed.network`.
    """

    name: str
    batches: Callable[[int], list[Batch]]
    loss: Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
    evaluate: Callable[[], dict[str, float]]
    sample: Callable[[], str]
    flops_per_token: float
    unit: str = "nats/token"  # of the loss
    monitor: str | None = None
    made_from: dict[str, Any] = field(default_factory=dict)
    network: nn.Module | None = None


class Interrupt:
    """Takes note of the first Ctrl-C or SIGTERM, so that the step at work can finish; the second Ctrl-C is the usual one."""

    def __init__(self) -> None:
        self.signal = 0
        self.before = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(self, number: int, frame: object) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.write(2, b"\nfinishing the step, then saving; Ctrl-C stops at once\n")  # print may be what was interrupted

    def restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@dataclass
class Result:
    step: int
    metrics: dict[str, float]
    tokens_per_s: float


@dataclass
class State:
    """Where a run stands. Randomness and the place in the data are no part of it: those of a step follow from the seed and
    the step's number."""

    step: int = 0
    tokens: int = 0  # that the network has read
    elapsed: float = 0.0  # seconds of training behind us
    skipped: int = 0  # steps whose loss or gradient was not finite, which changed nothing
    bad: int = 0  # how many of them came last, in a row
    scale: float = 0.0  # what multiplied the learning rates of the last step: 1 in the stable phase
    best: float = -float("inf")
    best_weights: dict[str, Tensor] | None = None
    best_metrics: dict[str, float] | None = None
    last_metrics: dict[str, float] = field(default_factory=dict)


def train(
    model: nn.Module, stage: Stage, config: TrainConfig, optim_config: optim.OptimConfig, out: Path, log: RunLog
) -> Result:
    """Run the stage to its end: `config.steps` optimizer steps or `config.minutes`, whichever comes first.

    The learning rate follows the progress of whichever limit is nearer, so a run ended by the clock has finished its decay.
    Ctrl-C or SIGTERM finish the step, save `resume_<stage>.pt` and stop; `train.resume=true` continues from it, as if
    nothing had been. A second Ctrl-C stops at once. When the decay begins, `stable_<stage>.pt` keeps what was there before it:
    `train.resume=FILE` branches from that, or from another file of the stable phase, as if this run had made it.

    Under torchrun the micro-batches of a step are dealt to the processes, see `pocketgpt.distributed`; the first one evaluates
    and writes, so that only its Result has metrics.

    Raises:
        UserError: if loss or gradient stay non-finite, if memory does not suffice, or if there is nothing to resume from,
            or something else than `stage.made_from`, or to branch from something else than a stable phase.
    """
    config.check()
    device = next(model.parameters()).device
    machine.keep_freed_memory()
    if device.type == "cpu" and (missing := fused.build()):
        log.say(f"the parts of a step between its products run on torch's operators: {missing}")
    trained = model if stage.network is None else stage.network
    optimizer = optim.Optimizer(trained, optim_config, config.lr)
    if optim_config.offload and optimizer.host is None:
        log.say(f"optim.offload: moments on {device.type} are in main memory anyway, nothing is moved")
    state = State()
    resume_path, stable_path = out / f"resume_{stage.name}.pt", out / f"stable_{stage.name}.pt"
    distributed.same_weights(model, trained)
    writer = sharded.Writer()
    if config.resume:
        source = config.branch or resume_path
        made_from, state = load_resume(source, trained, optimizer, log)
        if changed := differences(made_from, stage.made_from, free=FREE + HORIZON if config.branch else FREE):
            if config.resume != "force":
                raise UserError(
                    f"{source}: another run than this one: {'; '.join(changed)}. Set them back, or "
                    "train.resume=force goes on with what is set now"
                )
            log.say(f"resuming although this has changed: {'; '.join(changed)}")
        if config.branch:
            check_branch(source, config, state)
        log.say(f"resumed at step {state.step} from {source}")
    elif distributed.is_main():
        for old in (stable_path, previous(stable_path)):
            old.unlink(missing_ok=True)
        sharded.sweep(stable_path, previous(stable_path))
    log.start(config.steps, config.minutes, state.step, state.elapsed)
    data = {key: value for key, value in stage.made_from.items() if key not in log.about["config"]}
    log.record(unit=stage.unit, data=data, environment=machine.environment(device))
    if stage.monitor is not None and state.step == 0:
        evaluate(model, trained, stage, state, log)  # the weights we start from may turn out the best

    tokens = timed = 0.0  # since the last log line
    all_tokens = all_timed = all_waited = 0.0  # since the first step, which warms up and is not counted
    loader = Loader(stage.batches, device)
    shown: dict[str, Any] = {}
    began = time.perf_counter() - state.elapsed
    step_seconds = 0.0
    trained.train()
    gc.collect()
    gc.freeze()  # what is here stays: the collector need not walk it at every step
    interrupt = Interrupt()
    try:
        while not finished(config, state, step_seconds):
            step_start = time.perf_counter()
            scale = lr_scale(config, state, step_seconds)
            if state.scale == 1 > scale:
                save_resume(writer, stable_path, trained, optimizer, stage, state)
            torch.manual_seed(config.seed * 1_000_003 + state.step + (distributed.rank() << 40))  # dropout
            batches = loader.batches(state.step)  # of all processes: so each knows what the whole step supervises
            weight = max(1, sum(batch.weight for batch in batches))
            sums: dict[str, Any] = {}
            failure: Exception | None = None
            try:
                for batch, counts in distributed.dealt(batches, trained):
                    total, numbers = stage.loss(batch.to(device))
                    (total / weight * counts).backward()
                    for key, value in {"loss": total.detach(), **numbers}.items():
                        sums[key] = sums.get(key, 0.0) + value * counts
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error) or distributed.is_divided(trained):
                    raise  # where weights are divided, the others are waiting in the middle of theirs
                failure = error
            sums = together(sums, failure)
            distributed.sum_gradients(trained)
            norm = distributed.clip_gradients(trained, config.grad_clip or float("inf"))
            supervised = any(batch.weight for batch in batches)
            if supervised and bool(torch.isfinite(norm + sums["loss"])):
                state.bad = 0
                optimizer.step(scale)
            else:  # nothing supervised, or nothing finite, changes nothing
                optimizer.zero_grad()
                if supervised:
                    skip(stage, state, batches, log)
                else:
                    log.say(f"step {state.step + 1}: nothing supervised, skipped")
            machine.synchronize(device)
            step_seconds = time.perf_counter() - step_start
            state.step += 1
            state.scale = scale
            read = sum(batch.tokens for batch in batches)
            tokens += read
            state.tokens += read
            timed += step_seconds
            state.elapsed = time.perf_counter() - began
            # the clock is that of the first process, and a signal to one is a signal to all
            clocks = distributed.gather((step_seconds, state.elapsed, interrupt.signal))
            step_seconds, state.elapsed, _ = clocks[0]
            stopped_by = max(number for _, _, number in clocks)
            shown = {key: float(value) / weight for key, value in sums.items()}
            log.advance(state.step, state.elapsed)

            last = finished(config, state, step_seconds)
            if distributed.is_main() and (state.step % config.log_every == 0 or state.step == 1 or last):
                rate = tokens / timed
                peak = distributed.world() * machine.matmul_rate(device, autocast_dtype(config, device))
                log.train(
                    state.step,
                    shown,
                    stage.unit,
                    grad_norm=float(norm),
                    lr=config.lr * scale,
                    tokens_per_s=rate,
                    mfu=rate * stage.flops_per_token / peak,
                    memory_bytes=machine.peak_memory(device),
                    loader_share=loader.waited / timed,
                    tokens=state.tokens,
                    elapsed_s=state.elapsed,
                )
                if state.step > 1:
                    all_tokens, all_timed = all_tokens + tokens, all_timed + timed
                    all_waited += loader.waited
                tokens = timed = loader.waited = 0.0
            if state.step % config.eval_every == 0 or last:
                evaluate(model, trained, stage, state, log)
                if not last:
                    save_resume(writer, resume_path, trained, optimizer, stage, state)
            if stopped_by:
                save_resume(writer, resume_path, trained, optimizer, stage, state)
                writer.finish()
                log.stop()
                log.say(f"stopped after step {state.step}, saved {resume_path}; go on with train.resume=true")
                raise SystemExit(128 + stopped_by)
    except (RuntimeError, MemoryError) as error:
        if distributed.is_of_others(error):
            raise distributed.ended(error) from error
        if not is_out_of_memory(error):
            raise
        advice = smaller(config, optim_config, device, distributed.is_divided(trained))
        raise UserError(f"{stage.name}: out of memory in step {state.step + 1}: try {advice}") from error
    finally:
        interrupt.restore()
        gc.unfreeze()
        log.stop()
        loader.close()
    distributed.fill(model, trained)
    if state.best_weights is not None and state.best_metrics is not None:
        lora.restore(model, state.best_weights)
        state.last_metrics = state.best_metrics
    model.eval()
    save_resume(writer, resume_path, trained, optimizer, stage, state)
    writer.finish()
    if all_timed:
        log.say(f"{all_waited / all_timed:.2%} of the step time went into waiting for data")
    return Result(state.step, state.last_metrics, all_tokens / all_timed if all_timed else 0.0)


def pick_compile(config: TrainConfig, device: torch.device) -> tuple[bool, str]:
    """Whether to compile the network for training, and why, in words.

    `auto` does so where a compiler is, for runs by the clock that are long enough to pay for it. A run of fixed steps stays as
    it is, so that the same settings give the same bits.
    """
    if not config.compile:
        return False, "not compiled, as asked"
    if device.type == "cpu" and kernels.compiler() is None:
        return False, "not compiled: no C++ compiler found (g++ or clang++)"
    if device.type != "cpu" and find_spec("triton") is None:
        return False, f"not compiled: no Triton, which makes the code for {device.type}"
    if config.compile is True:
        return True, "compiled, as asked: the first step takes up to some minutes"
    if config.steps:
        return (
            False,
            "not compiled: train.steps is set, and fixed steps give the same bits every time; train.compile=true does it",
        )
    if config.minutes < COMPILE_PAYS_AFTER:
        return False, f"not compiled: {config.minutes:g} minutes would not pay for it, {COMPILE_PAYS_AFTER} would"
    return True, f"compiled, as {config.minutes:g} minutes pay for it: the first step takes up to some minutes"


def compiled(network: Network, config: TrainConfig, device: torch.device, log: RunLog) -> Network:
    """The network as `pick_compile` decides, which is printed; and as it was, with a line, if compiling fails."""
    wanted, why = pick_compile(config, device)
    if wanted and distributed.is_divided(getattr(network, "__self__", None)):
        wanted, why = False, "not compiled: parallel=fsdp"
    log.say(why)
    if not wanted:
        return network
    from torch._dynamo.exc import TorchDynamoException  # only here: it starts slowly

    fast = torch.compile(network, dynamic=False)

    def call(*inputs: Any) -> Tensor:
        nonlocal fast
        try:
            return fast(*inputs)
        except TorchDynamoException as error:
            log.say(f"torch.compile failed ({checkpoint.first_line(error)}): not compiled from here on")
            fast = network
            return network(*inputs)

    return call


def smaller(config: TrainConfig, optim_config: optim.OptimConfig, device: torch.device, divided: bool) -> str:
    """The setting to try next where memory does not suffice, cheapest first: all but the last give the same result, and a run
    may be resumed with them. divided: whether weights are divided among the processes."""
    rows = config.rows_at_once
    if rows > 1:
        fewer = next(fewer for fewer in range(rows // 2, 0, -1) if config.batch_size % fewer == 0)
        return f"train.micro_batch_size={fewer} ({rows} now, the result is the same)"
    if not config.recompute:
        return "train.recompute=selective (the same result, from more work)"
    if not divided and distributed.world() > 1:
        return "parallel=fsdp (the same result, weights, gradients and moments divided among the processes)"
    # Before recomputing all, which takes a third more time: moments go to and fro once a step, however large its batch.
    if device.type == "cuda" and not divided and not optim_config.offload:
        return "optim.offload=true (the same result, moments wait in main memory)"
    if config.recompute is not True:
        return "train.recompute=true (the same result, from more work)"
    if divided:
        return "more processes: each holds a smaller part"
    return "a smaller model.block_size or model, for a new model: python plan.py says what one needs"


def autocast_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    return machine.pick_dtype(config.dtype, device)[0]


def progress(config: TrainConfig, state: State, step_seconds: float) -> float:
    """Share of the run that is done in the middle of the coming step: above 0 for the first, below 1 for the last."""
    by_steps = (state.step + 0.5) / config.steps if config.steps > 0 else 0.0
    by_clock = (state.elapsed + 0.5 * step_seconds) / (60 * config.minutes) if config.minutes > 0 else 0.0
    return min(1.0, max(by_steps, by_clock, 1e-3))  # the clock stands at 0 for the first step


def lr_scale(config: TrainConfig, state: State, step_seconds: float) -> float:
    """Multiplier of the learning rates for the coming step."""
    by_steps = config.warmup >= 1  # a warm-up of so many steps, which is the same for every horizon
    share = 0.0 if by_steps else config.warmup
    now = progress(config, state, step_seconds)
    scale = optim.lr_scale(now, warmup=share, decay=config.decay, shape=config.decay_shape)
    return min(scale, (state.step + 0.5) / config.warmup) if by_steps else scale


def check_branch(source: Path, config: TrainConfig, state: State) -> None:
    """Raises UserError if the last step of the state was not one of a stable phase, or would not be one of this run's."""
    if state.scale != 1:
        raise UserError(
            f"{source}: step {state.step} was in the warm-up or the decay: branch from stable_*.pt, which is written when "
            "the decay begins, or from the resume_*.pt of a run with train.decay=0"
        )
    last = State(step=state.step - 1, elapsed=state.elapsed)
    if lr_scale(config, last, 0.0) != 1:
        raise UserError(
            f"{source}: at step {state.step}, after {state.elapsed / 60:.1f} minutes, this run would be in its warm-up or its "
            "decay already: raise train.steps or train.minutes, which count from the beginning, or change the shares"
        )


def finished(config: TrainConfig, state: State, step_seconds: float) -> bool:
    if config.steps > 0 and state.step >= config.steps:
        return True
    return config.minutes > 0 and state.step > 0 and state.elapsed + step_seconds > 60 * config.minutes


def together(sums: dict[str, Any], failure: Exception | None) -> dict[str, Any]:
    """The sums over all processes. If memory did not suffice in one of them, all raise."""
    if distributed.world() == 1:
        if failure is not None:
            raise failure
        return sums
    parts = distributed.gather(({key: float(value) for key, value in sums.items()}, failure is not None))
    if any(failed for _, failed in parts):
        raise failure or MemoryError("another process")
    keys = dict.fromkeys(key for part, _ in parts for key in part)
    return {key: sum(part.get(key, 0.0) for part, _ in parts) for key in keys}


def evaluate(model: nn.Module, trained: nn.Module, stage: Stage, state: State, log: RunLog) -> None:
    """Held-out metrics and a sample; keeps the weights if they are the best so far by the stage's monitor. The first process
    does so for all."""
    with distributed.whole(model, trained):
        if distributed.is_main():
            evaluate_whole(model, stage, state, log)


def evaluate_whole(model: nn.Module, stage: Stage, state: State, log: RunLog) -> None:
    """The part of `evaluate` that the first process does, on a model that has all its weights."""
    model.eval()
    with torch.no_grad():
        state.last_metrics = stage.evaluate()
        log.validation(state.step, state.tokens, state.elapsed, state.last_metrics, stage.sample())
    model.train()
    if stage.monitor is not None and state.last_metrics[stage.monitor] > state.best:
        state.best = state.last_metrics[stage.monitor]
        state.best_metrics = state.last_metrics
        state.best_weights = {name: tensor.detach().clone() for name, tensor in lora.trained(model).items()}


def skip(stage: Stage, state: State, batches: list[Batch], log: RunLog) -> None:
    """Count a step whose loss or gradient was not finite. UserError after `PATIENCE_WITH_NAN` of them in a row."""
    state.skipped += 1
    state.bad += 1
    what = f"step {state.step + 1}: loss or gradient not finite (batch {' '.join(batch.digest() for batch in batches)})"
    log.say(f"{what}, skipped, {state.skipped} so far")
    if state.bad >= PATIENCE_WITH_NAN:
        raise UserError(
            f"{stage.name}: {what}, the {state.bad}th in a row: lower train.lr. Nothing of them is in the "
            "weights or in a file"
        )


def previous(path: Path) -> Path:
    """Where the resume file before the newest lies: a second chance if the newest is damaged."""
    return path.with_name(f"{path.stem}.previous.pt")


def save_resume(
    writer: sharded.Writer, path: Path, trained: nn.Module, optimizer: optim.Optimizer, stage: Stage, state: State
) -> None:
    """Write where the run stands, for a run of any number of processes."""
    contents = {
        "made_from": stage.made_from,
        "model": lora.trained(trained),
        "optimizer": optimizer.state_dict(),
        "state": vars(state),
    }
    writer.save(path, previous(path), contents)


def read_resume(
    path: Path, say: Callable[[str], None], read: Callable[[Path], Any] = checkpoint.read
) -> tuple[Any, Path]:
    """What a resume file holds, or the one before it where that is damaged, and which of them it was. UserError if there is none."""
    files = [file for file in (path, previous(path)) if file.exists()]
    if not files:
        raise UserError(f"{path}: nothing to resume from; run without train.resume=true")
    try:
        return read(files[0]), path
    except UserError as error:
        if len(files) == 1:
            raise
        say(f"{error}")
        raw = read(files[1])
        say(f"going on from the one before it, {files[1]}")
        return raw, files[1]


def resumed_from(config: TrainConfig, out: Path, name: str) -> dict[str, Any]:
    """What the run was made from that train.resume goes on with: its resolved configuration, among other things.

    Raises:
        UserError: if there is nothing to resume from, or it is damaged.
    """
    path = config.branch or out / f"resume_{name}.pt"
    raw, path = read_resume(path, lambda text: None)  # `train` reads it again, and says so
    try:
        before = raw["made_from"]
        if not (isinstance(before["model"], dict) and isinstance(before["train"], dict)):
            raise TypeError("no configuration")
    except (TypeError, KeyError) as error:
        raise UserError(f"{path}: cannot resume from it ({error}); it is of another kind of run") from None
    return dict(before)


def load_resume(path: Path, model: nn.Module, optimizer: optim.Optimizer, log: RunLog) -> tuple[dict[str, Any], State]:
    """Put model and optimizer back where they were. Returns what that run was made from, and its state.

    Raises:
        UserError: if there is no file, or it and the one before it are damaged, or of another model or optimizer.
    """
    raw, path = read_resume(path, log.say, lambda file: sharded.read(file, model))
    try:
        state = State(**raw["state"])
        for name, default in vars(State()).items():
            if default is not None and type(getattr(state, name)) is not type(default):
                raise TypeError(f"{name} is {getattr(state, name)!r}")
        for weights in (state.best_weights, raw["model"]):
            if weights is not None:
                weights = sharded.like(model, weights)
                lora.restore(model, weights)
                if not all(bool(distributed.local(tensor).isfinite().all()) for tensor in weights.values()):
                    raise ValueError("NaN or infinity in the weights")
        optimizer.load_state_dict(sharded.like(model, raw["optimizer"]))
        return dict(raw["made_from"]), state
    except Exception as error:  # of any kind: what is in there may be of another model, or not ours
        raise UserError(
            f"{path}: cannot resume from it ({checkpoint.first_line(error)}); it is of another model or optimizer"
        ) from None


def differences(
    before: dict[str, Any], now: dict[str, Any], group: str = "", free: tuple[str, ...] = FREE
) -> list[str]:
    """The keys whose values differ, with both values, except those in `free`."""
    found = []
    for key in dict.fromkeys([*before, *now]):
        old, new, name = before.get(key), now.get(key), f"{group}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{name}.", free)
        elif old != new and name not in free:
            found.append(f"{name} was {str(old)[:30]}, is {str(new)[:30]}")
    return found
