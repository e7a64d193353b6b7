"""What a pretraining run needs, before it is run: parameters, operations, memory, time, money, and what serving will take.

    python plan.py                                             # every size from 1 M to 7 B, one line each
    python plan.py model=1b gpus=8xH100 data.tokens=50e9
    python plan.py model=7b gpus=8xA100 parallel=fsdp train.recompute=selective
    python plan.py model=3m gpus=cpu train.batch_size=8        # this machine, measured

Nothing is allocated and nothing is trained: see pocketgpt/plan.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import base_model
from base_model import GPT, GPTConfig
from kv_cache import kv_cache_bytes
from pocketgpt import config, distributed, loss, plan, sizing
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.optim import OptimConfig
from pocketgpt.plan import human

SIZES = ("1m", "3m", "10m", "30m", "100m", "350m", "1b", "3b", "7b")  # of configs/model/
TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022)
SERVED = 2  # bytes of a weight or a cached number in bfloat16


@dataclass
class DataPlan:
    tokens: float


@dataclass
class TrainPlan:
    batch_size: int
    micro_batch_size: int
    dtype: str
    recompute: bool | str


@dataclass
class ServePlan:
    batch_size: int


@dataclass
class Config:
    """See configs/plan.yaml for units and meaning."""

    model: dict[str, Any]
    optim: OptimConfig
    table: bool
    gpus: str
    parallel: str
    mfu: float
    price: float
    data: DataPlan
    train: TrainPlan
    serve: ServePlan

    def check(self) -> None:
        """Raises UserError on values that make no plan."""
        distributed.check(self.parallel, self.optim.offload)
        if not 0 < self.mfu <= 1:
            raise UserError(f"mfu={self.mfu}: it is a share, above 0 and at most 1")
        if self.price < 0 or self.data.tokens < 0:
            raise UserError(f"price={self.price} and data.tokens={self.data.tokens} must be 0 or above")
        if min(self.train.batch_size, self.serve.batch_size, self.train.micro_batch_size + 1) < 1:
            raise UserError(
                "train.batch_size and serve.batch_size must be 1 or above, train.micro_batch_size 0 or above"
            )
        if self.train.dtype not in ("float32", "bfloat16"):
            raise UserError(f"train.dtype={self.train.dtype}: choose float32 or bfloat16")
        if self.train.recompute not in (False, True, "selective"):
            raise UserError(f"train.recompute={self.train.recompute}: choose false, selective or true")
        if sizing.wanted(self.model):
            raise UserError("model=auto is chosen by pretrain.py, which measures: name a size, as model=3m")
        self.optim.check()


@dataclass
class Plan:
    """All that is known of one run."""

    model: GPT  # on the meta device: shapes alone
    number: int
    kind: str
    gpu: plan.Gpu
    tokens: float
    rows: int  # of a micro-batch
    memory: plan.Memory
    tokens_per_s: float
    served_bytes: int
    cache_bytes: int  # of one request

    @property
    def hours(self) -> float:
        return self.tokens / self.tokens_per_s / 3600

    @property
    def fits(self) -> bool:
        return self.memory.total <= plan.SPARE * self.gpu.memory


def make_plan(cfg: Config, number: int, kind: str, gpu: plan.Gpu) -> Plan:
    shape = GPTConfig.from_dict(cfg.model, "configuration of plan")
    length, recompute = shape.block_size, cfg.train.recompute
    if cfg.train.batch_size % number:
        raise UserError(f"train.batch_size={cfg.train.batch_size} is not divisible by the {number} ranks: change one")
    per_rank = cfg.train.batch_size // number
    dtype = machine.pick_dtype(cfg.train.dtype, torch.device("cpu"))[0]
    with torch.device("meta"):
        model = GPT(shape)
    device = "cuda" if kind != "cpu" and torch.cuda.is_available() else "cpu"
    if (
        kind != "cpu"
    ):  # what the code does otherwise on a processor: all scores of short contexts, small chunks of logits
        base_model.PLAIN_KEYS, loss.CHUNK["cpu"] = 0, loss.CHUNK["cuda"]

    def network() -> nn.Module:
        network = GPT(shape).train()
        network.recompute = recompute
        return network

    def memory(rows: int) -> plan.Memory:
        return plan.step_memory(
            network,
            rows,
            length,
            cfg.optim,
            dtype=dtype,
            accumulate=rows < per_rank,
            device=device,
            offload=cfg.optim.offload and kind != "cpu",
            ranks=number if cfg.parallel == "fsdp" else 1,
        )

    rows = cfg.train.micro_batch_size
    if rows:
        planned = memory(rows)
    else:
        rows, planned = plan.largest_that_fits(per_rank, plan.SPARE * gpu.memory, memory)
    flops = model.flops_per_token(length)
    slower = flops / plan.executed_flops(model, length, recompute)
    return Plan(
        model,
        number,
        kind,
        gpu,
        cfg.data.tokens or TOKENS_PER_PARAMETER * model.n_parameters(),
        rows,
        planned,
        tokens_per_s=number * gpu.flops * cfg.mfu * slower / flops,
        served_bytes=SERVED * model.n_parameters(),
        cache_bytes=kv_cache_bytes(shape, 1, length, SERVED),
    )


def decode_ceiling(p: Plan, requests: int) -> float:
    """Tokens/s of all requests together that the bandwidth of one GPU allows, at the end of the context: every step reads all weights
    and every request's cache once. Untied, the embedding is a row per token, and is left out."""
    c = p.model.config
    idle = 0 if c.tie_embeddings else SERVED * c.vocab_size * c.n_embd
    return requests * p.gpu.bandwidth / (p.served_bytes - idle + requests * p.cache_bytes)


def parameters_by_part(model: GPT) -> dict[str, int]:
    """Where the parameters are, none twice."""
    parts = dict.fromkeys(("embedding", "attention", "MLP", "norms", "head", "scalars"), 0)
    for name, parameter in model.named_parameters():
        part = next(
            part
            for part, mark in (
                ("scalars", "_mix"),
                ("norms", "norm"),
                ("attention", ".attn."),
                ("MLP", ".mlp."),
                ("head", "lm_head"),
                ("embedding", ""),
            )
            if mark in name
        )
        parts[part] += parameter.numel()
    return parts


def show(cfg: Config, p: Plan) -> None:
    c, m = p.model.config, p.memory
    length = c.block_size
    flops = p.model.flops_per_token(length)
    ranks = "one rank" if p.number == 1 else f"each of {p.number} ranks ({cfg.parallel})"
    print(
        f"model      {c.n_layer} layers x {c.n_embd}, {c.n_head} heads of {c.width_of_head} on {c.n_kv_head} for keys and values, "
        f"MLP {c.width_of_mlp}, {c.vocab_size:,} entries, context {length:,}"
    )
    parts = ", ".join(f"{name} {human(n, '')}" for name, n in parameters_by_part(p.model).items() if n)
    print(f"parameters {human(p.model.n_parameters(), '')}: {parts}")
    print(
        f"work       {human(flops, 'FLOP')} per token, {human(flops * p.tokens, 'FLOP')} for {human(p.tokens, 'tokens')}"
    )
    print(
        f"memory     of {ranks}, {p.rows} sequences at once, {cfg.train.dtype}, recompute {str(cfg.train.recompute).lower()}:"
    )
    named = ("weights", "gradients", "optimizer", "activations", "logits")
    host = f"; moments in main memory, {human(m.host)}" if m.host else ""
    print("           " + ", ".join(f"{name} {human(getattr(m, name))}" for name in named) + host)
    print(
        f"           at most {human(m.passing)} in a pass and {human(m.stepping)} in the optimizer's step; "
        f"{p.kind} has {human(p.gpu.memory)}, {plan.SPARE:.0%} of which are planned with"
    )
    if not p.fits:
        print(f"           DOES NOT FIT: {advice(cfg, p)}")
    share = f"{cfg.mfu:.0%} of {p.number} x {human(p.gpu.flops, 'FLOP/s')}"
    print(
        f"time       {human(p.tokens_per_s, 'tokens/s')} at {share}: {duration(p.hours)}, {p.number * p.hours:,.4g} GPU hours"
    )
    print(f"cost       {p.number * p.hours * cfg.price:,.2f} at {cfg.price:g} per GPU and hour")
    requests = cfg.serve.batch_size
    print(
        f"served     bfloat16: weights {human(p.served_bytes)}, cache {human(p.cache_bytes / length)} per token and "
        f"{human(p.cache_bytes)} per full context; at most {decode_ceiling(p, requests):,.0f} tokens/s for "
        f"{requests} such request{'s' * (requests > 1)} on one {p.kind}, at {human(p.gpu.bandwidth, 'B/s')}"
    )


def advice(cfg: Config, p: Plan) -> str:
    """The setting to try next."""
    if p.rows > 1:
        return "try train.micro_batch_size=0"
    if cfg.parallel == "ddp" and p.number > 1:
        return "try parallel=fsdp"
    if cfg.train.recompute is not True and p.memory.passing > p.memory.stepping:
        return f"try train.recompute={'true' if cfg.train.recompute else 'selective'}"
    if cfg.parallel == "ddp" and p.kind != "cpu" and not cfg.optim.offload:
        return "try optim.offload=true"
    return "more ranks with parallel=fsdp, a GPU with more memory, or a smaller model"


def duration(hours: float) -> str:
    for size, unit in ((24, "days"), (1, "hours"), (1 / 60, "minutes")):
        if hours >= 2 * size:
            return f"{hours / size:,.3g} {unit}"
    return f"{3600 * hours:.2g} seconds"


def table(cfg: Config, number: int, kind: str, gpu: plan.Gpu) -> None:
    """A line per size, each on the given GPUs."""
    print(
        f"{number} x {kind}, {cfg.parallel}, {cfg.train.dtype}, recompute {str(cfg.train.recompute).lower()}, optimizer {cfg.optim.name}\n"
    )
    print(
        "| model | parameters | layers x width | context | tokens | FLOP | memory at 1 sequence | sequences at once | training | cost | weights served | decode, at most |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for size in SIZES:
        overrides = [f"model={size}"]
        sized = replace(cfg, model=config.load("plan", Config, overrides).model)
        p = make_plan(sized, number, kind, gpu)
        one = (
            p
            if p.rows == 1
            else make_plan(replace(sized, train=replace(cfg.train, micro_batch_size=1)), number, kind, gpu)
        )
        c = p.model.config
        print(
            f"| `{size}` | {human(p.model.n_parameters(), '')} | {c.n_layer} x {c.n_embd} | {c.block_size:,} | {human(p.tokens, '')} | "
            f"{human(p.model.flops_per_token(c.block_size) * p.tokens, '')} | {human(one.memory.total)} | "
            f"{p.rows if p.fits else 'does not fit'} | {duration(p.hours)} | {p.number * p.hours * cfg.price:,.2f} | "
            f"{human(p.served_bytes)} | {decode_ceiling(p, cfg.serve.batch_size):,.0f} tokens/s |"
        )


def main() -> None:
    cfg = config.load("plan", Config)
    cfg.check()
    number, kind, gpu = plan.parse_gpus(cfg.gpus)
    if cfg.table or not sys.argv[1:]:
        table(cfg, number, kind, gpu)
    else:
        show(cfg, make_plan(cfg, number, kind, gpu))


if __name__ == "__main__":
    run(main)
