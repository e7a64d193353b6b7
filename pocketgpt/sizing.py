"""model=auto: which size of model, and which batch, learn most in the given time on this machine from this text.

Three small models train for a few steps, which gives the seconds that a token and an optimizer step take by their operations. With
them every size of `LADDER` has an expected number of tokens, and the one with the least expected loss is taken. See
docs/pretrain.md. Given the measured speed the choice is deterministic.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pocketgpt import device as machine
from pocketgpt.errors import UserError
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.optim import QUINTICS, OptimConfig, Optimizer, parameter_groups

CHOSEN = ("n_layer", "n_embd", "n_head", "n_kv_head")  # keys of the model, 0 where they are to be chosen
# Blocks and width of the sizes to choose from: heads of 64, depth and width as in configs/model/1m.yaml to 350m.yaml.
LADDER = (
    (2, 64), (4, 64), (3, 128), (4, 128), (6, 128), (5, 192), (6, 192), (8, 192), (6, 256), (8, 256), (10, 256), (8, 320),
    (8, 384), (10, 384), (15, 384), (10, 512), (12, 512), (12, 640), (12, 768), (16, 768), (18, 896), (20, 1024), (24, 1024),
)  # fmt: skip
PROBES = {
    "cpu": ((2, 64), (6, 192), (6, 384)),
    "cuda": ((4, 128), (6, 384), (12, 768)),
    "mps": ((2, 64), (6, 192), (8, 384)),
}
AT_ONCE = {"cpu": 4096, "cuda": 16384, "mps": 8192}  # tokens that run at once, in the probes and in the run


@dataclass(frozen=True)
class Law:
    """Expected loss E + A / N^alpha + B / D^beta (nats per token) of N parameters after D tokens (Hoffmann et al. 2022)."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float

    def __call__(self, parameters: float, tokens: float) -> float:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta


# The fit of Besiroglu et al. 2024 ("Chinchilla scaling: a replication attempt"), from models of 44 M parameters and more on web
# text. Here it ranks sizes, and no more: its absolute values are wrong for small models and other vocabularies.
LAW = Law(e=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658)
# Repeated text is nearly as good as new text up to so many epochs, and soon worth little (Muennighoff et al. 2023).
EPOCHS = 4
# Parameters per token of the text, at most: beyond, the text is learned by heart. A guess.
PARAMETERS_PER_TOKEN = 10
# Tokens of an optimizer step for C FLOPs in the whole run: c C^p (Bi et al. 2024, "DeepSeek LLM", section 3.1).
BATCH = (0.2920, 0.3271)
FEWEST_STEPS = 200  # a batch is no larger than leaves so many


@dataclass(frozen=True)
class Curve:
    """Seconds by operations: straight between measured points (operations, seconds), and on beyond them, never falling.

    Below the first point at least its rate, so that noise in two points leaves no work without time."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, operations: float) -> float:
        x, y = zip(*sorted(self.points), strict=True)
        y = tuple(itertools.accumulate(y, max))  # noise aside, more takes longer
        i = min(max(1, bisect(x, operations)), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        seconds = y[i - 1] + slope * (operations - x[i - 1])
        if operations < x[0]:  # less work takes some time all the same
            seconds = max(seconds, y[0] * operations / x[0])
        return seconds


@dataclass(frozen=True)
class Speed:
    """How fast this machine trains: seconds of forward and backward pass per token, by the FLOPs of a token, and of an optimizer
    step, by `optimizer_work`. `peak`: FLOP/s of its matrix products, which no model beats."""

    token: Curve
    step: Curve
    peak: float
    about: str = ""  # what was measured, in words

    def per_token(self, flops: float) -> float:
        return max(self.token(flops), flops / self.peak)


@dataclass(frozen=True)
class Size:
    """A rung of the ladder."""

    model: dict[str, int]  # the keys of CHOSEN
    parameters: int
    flops_per_token: float
    optimizer_work: float

    @property
    def name(self) -> str:
        return f"{self.model['n_layer']} x {self.model['n_embd']}"


@dataclass(frozen=True)
class Run:
    """What a size is expected to make of the time."""

    size: Size
    batch_size: int  # sequences per optimizer step
    tokens: float  # read until the end
    seconds: float
    epochs: float
    loss: float  # by LAW

    @property
    def ends_early(self) -> bool:
        return self.epochs >= EPOCHS


@dataclass(frozen=True)
class Choice:
    """model: keys of the model; the others: keys of train, steps only where the text is used up before the time is over."""

    model: dict[str, int]
    batch_size: int
    micro_batch_size: int
    steps: int
    why: str


def wanted(model: dict[str, Any]) -> bool:
    """Whether the sizes of this model are to be chosen. UserError if only some of them are."""
    zeros = [key for key in CHOSEN if model.get(key) == 0]
    if not zeros:
        return False
    if len(zeros) < len(CHOSEN):
        raise UserError(
            f"model=auto chooses {', '.join(f'model.{key}' for key in CHOSEN)}: set none of them, or name another model"
        )
    return True


def sizes_of(n_layer: int, n_embd: int) -> dict[str, int]:
    """Heads of 64, of which 3, 2 or 1 share a key head: as the named sizes have it."""
    heads = n_embd // 64
    groups = 3 if heads % 3 == 0 else 2 if heads % 2 == 0 else heads
    return {"n_layer": n_layer, "n_embd": n_embd, "n_head": heads, "n_kv_head": heads // groups}


def optimizer_work(model: Any, optim_config: OptimConfig) -> float:
    """What an optimizer step costs, up to a factor: FLOPs of Muon's Newton-Schulz steps, or the parameters of AdamW."""
    if optim_config.name == "adamw":
        return float(model.n_parameters())
    sides = [sorted(parameter.shape) for parameter in parameter_groups(model)[0]]
    return float(len(QUINTICS) * sum(4 * short * short * long + 2 * short**3 for short, long in sides))


def ladder(network: Callable[[dict[str, int]], Any], optim_config: OptimConfig, length: int) -> list[Size]:
    """All sizes, of a model in contexts of `length` tokens. network: makes the model of the given keys."""
    with torch.device("meta"):  # shapes alone
        models = [(sizes, network(sizes)) for sizes in (sizes_of(*rung) for rung in LADDER)]
    return [
        Size(sizes, model.n_parameters(), model.flops_per_token(length), optimizer_work(model, optim_config))
        for sizes, model in models
    ]


def measure(
    network: Callable[[dict[str, int]], Any],
    optim_config: OptimConfig,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Speed:
    """Train three small models for a few steps on this machine."""
    machine.keep_freed_memory()  # as in the run
    rows = max(1, AT_ONCE[device.type] // length)
    tokens, steps, said = [], [], []
    for rung in PROBES[device.type]:
        with device:
            model = network(sizes_of(*rung))
            ids = torch.randint(model.config.vocab_size, (rows, length))
        optimizer = Optimizer(model, optim_config, lr=0.0)

        def both_passes(model: Any = model, ids: torch.Tensor = ids) -> None:
            with machine.autocast(device, dtype):
                hidden = model.hidden_states(ids)
            linear_cross_entropy(hidden, model.lm_head.weight, ids, dtype, model.lm_head.softcap).backward()

        passes = machine.times(both_passes, device, 2)[0]
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]

        def step(optimizer: Optimizer = optimizer, gradients: list[Any] = gradients) -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            optimizer.step(1.0)

        stepping = machine.times(step, device, 2)[0]
        tokens.append((model.flops_per_token(length), passes / ids.numel()))
        steps.append((optimizer_work(model, optim_config), stepping))
        name = f"{rung[0]} x {rung[1]}"
        said.append(f"{name} {ids.numel() / passes:,.0f} tokens/s and {1000 * stepping:.0f} ms per optimizer step")
    return Speed(
        Curve(tuple(tokens)),
        Curve(tuple(steps)),
        machine.matmul_rate(device, dtype),
        f"measured: {'; '.join(said)}",
    )


def expect(
    size: Size, speed: Speed, seconds: float, length: int, sources: Sequence[tuple[float, float]], world: int = 1
) -> Run:
    """What a size makes of so many seconds, on `world` processes.

    sources: of each source of text its tokens and its share of training. A token counts until its source has been read
    `EPOCHS` times; where nothing counts any more, the run ends.
    """
    per_token = speed.per_token(size.flops_per_token) / world
    stepping = speed.step(size.optimizer_work)
    factor, power = BATCH
    until = max(EPOCHS * there / share for there, share in sources)  # tokens
    at_most = min(seconds / per_token, until)  # with an optimizer that takes no time
    batch = min(factor * (size.flops_per_token * at_most) ** power, at_most / FEWEST_STEPS)
    batch = max(batch, float(length * world))
    rows = max(world, 2 ** round(math.log2(batch / length)))
    per_token += stepping / batch
    tokens = min(seconds / per_token, until)
    counted = sum(min(tokens * share, EPOCHS * there) for there, share in sources)
    epochs = tokens / max(there / share for there, share in sources)
    return Run(size, rows, tokens, tokens * per_token, epochs, LAW(size.parameters, max(1.0, counted)))


def choose(
    sizes: Sequence[Size],
    speed: Speed,
    minutes: float,
    length: int,
    sources: Sequence[tuple[float, float]],
    at_once: int,
    fits: Callable[[Size, int], bool] = lambda size, rows: True,
    world: int = 1,
) -> Choice:
    """The size of least expected loss among those that the text can teach and that fit into memory.

    at_once: tokens of a micro-batch; fits: whether a size has memory for so many sequences at once.

    Raises:
        UserError: if none fits.
    """
    there = sum(tokens for tokens, _ in sources)
    runs = [expect(size, speed, 60 * minutes, length, sources, world) for size in sizes]
    taught = [run for run in runs if run.size.parameters <= PARAMETERS_PER_TOKEN * there] or runs[:1]
    for run in sorted(taught, key=lambda run: run.loss):
        micro = min(-(-run.batch_size // world), max(1, at_once // length))
        if fits(run.size, micro):
            steps = max(1, round(run.tokens / run.batch_size / length)) if run.ends_early else 0
            why = explain(runs, run, speed, minutes, length, len(taught))
            return Choice(run.size.model, run.batch_size, micro, steps, why)
    raise UserError("model=auto: not even the smallest model fits into memory: lower model.block_size or free some")


def explain(runs: Sequence[Run], chosen: Run, speed: Speed, minutes: float, length: int, taught: int) -> str:
    """The candidates around the chosen one as a table, and the reason in words."""
    lines = [f"model=auto for {minutes:g} minutes; {speed.about}", f"{'':2}{'blocks x width':>14}{'parameters':>12}"]
    lines[1] += f"{'tokens/step':>13}{'steps':>8}{'tokens':>10}{'epochs':>8}{'per parameter':>15}{'loss':>8}"
    at = runs.index(chosen)
    for run in runs[max(0, at - 3) : at + 4]:
        step = run.batch_size * length
        lines.append(
            f"{'> ' if run is chosen else '  '}{run.size.name:>14}{run.size.parameters / 1e6:>10.2f} M{step:>13,}"
            f"{run.tokens / step:>8,.0f}{run.tokens / 1e6:>8.2f} M{run.epochs:>8.2f}"
            f"{run.tokens / run.size.parameters:>15.2f}{run.loss - chosen.loss:>+8.2f}"
        )
    reason = "the least expected loss"
    if min(run.loss for run in runs[:taught]) < chosen.loss:
        reason += " among those that fit into memory"
    elif at == taught - 1 and taught < len(runs):
        reason += f", with at most {PARAMETERS_PER_TOKEN} parameters per token of the text"
    ends = f"the end after {minutes:g} minutes"
    if chosen.ends_early:
        ends = f"the end after about {chosen.seconds / 60:.2g} minutes, as more than {EPOCHS} epochs teach little"
    lines.append(f"chosen {chosen.size.name}: {reason} (+/-: nats per token by Hoffmann et al. 2022); {ends}")
    return "\n".join(lines)
