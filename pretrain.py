"""Stage 1: from text to a base model.

    python pretrain.py                                   # Shakespeare, a few minutes
    python pretrain.py data=mine data.path=books/ model=auto train.minutes=60
    python pretrain.py --help                            # every key with its meaning

Writes ckpt_base.pt, the folder base/, metrics_base.jsonl and plot_base.png under `out`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from base_model import GPT, GPTConfig
from data import shakespeare
from pocketgpt import checkpoint, config, distributed, hf, hub_stream, plan, report, sizing, sources, tasks
from pocketgpt import device as machine
from pocketgpt.corpus import Corpus, Documents, chain, prepare
from pocketgpt.errors import UserError, run
from pocketgpt.evaluation import bits_per_byte, reading
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.metrics import RunLog
from pocketgpt.mixture import Mixture
from pocketgpt.optim import OptimConfig
from pocketgpt.shards import open_shards
from pocketgpt.trainer import Batch, Stage, TrainConfig, compiled, resumed_from, train


@dataclass
class Config:
    """See configs/pretrain.yaml for units and meaning."""

    model: dict[str, Any]
    data: config.DataConfig
    optim: OptimConfig
    train: TrainConfig
    out: str
    cache: str
    device: str
    parallel: str
    log: str
    vocab_size: int
    prompt: str
    sample_tokens: int


def own_documents(data: config.DataConfig, part: tuple[int, int] | None = None) -> Iterator[str]:
    """The documents of data=mine or data=hub, at most data.limit of them. part: see `hub_rows`."""
    if data.kind == "mine":
        found = sources.documents(Path(data.path), data.field)
    else:
        rows = sources.hub_rows(data.name, data.split, config=data.subset or None, streaming=data.streaming, part=part)
        found = (sources.text_of(row, data.field, where) for where, row in rows)
    return itertools.islice(found, data.limit or None)


def documents(data: config.DataConfig) -> tuple[list[Documents], Documents, str]:
    """The training documents of each source, the held-out ones of all, and a string that changes when any do."""
    found = [source_documents(part.data) for part in data.parts()]
    trains, vals, sources = zip(*found, strict=True)
    return list(trains), chain(*vals), sources[0] if len(sources) == 1 else json.dumps(sources)


def source_documents(data: config.DataConfig) -> tuple[Documents, Documents, str]:
    """`documents` of a single source."""
    train_docs: Documents
    val_docs: Documents
    if data.kind == "shakespeare":
        root = shakespeare.FOLDER
        source = shakespeare.build(root)["fingerprint"]
        train_docs = partial(sources.documents, root / "train.jsonl")
        val_docs = partial(sources.documents, root / "val.jsonl")
    else:
        path = Path(data.path if data.kind == "mine" else data.name)
        source = sources.fingerprint(path) if data.kind == "mine" or path.is_dir() else data.name
        source = json.dumps([source, data.subset, data.split, data.limit, data.field, data.val_fraction])
        every = partial(own_documents, data)

        def side(which: int) -> Documents:
            return lambda: sources.split_documents(every, data.val_fraction)[which]

        train_docs, val_docs = side(0), side(1)
    if data.generate:
        drills = tasks.drill_text(data.generate, seed=0)
        train_docs = chain(train_docs, lambda: drills)
        source += sources.digest(drills)
    return train_docs, val_docs, source


def open_corpus(data: config.DataConfig, vocab_size: int, cache: Path) -> Corpus:
    """The tokenizer and token files of a configuration: those in its folder of shards, or made under `cache`."""
    if data.endless:
        return open_stream(data, vocab_size, cache)
    return open_shards(Path(data.path)) if data.kind == "shards" else prepare(*documents(data), vocab_size, cache)


def open_stream(data: config.DataConfig, vocab_size: int, cache: Path) -> Corpus:
    """A tokenizer and held-out text from the beginning of a dataset, made under `cache`; the rest is read in training."""
    if data.generate:
        raise UserError(
            "data.generate mixes a number of documents into the text, which has no end here: set data.limit"
        )
    part = (distributed.rank(), distributed.world())
    every = partial(own_documents, data)

    def own() -> Iterator[str]:
        return sources.split_documents(every, data.val_fraction, part=partial(own_documents, data, part))[0]

    train_docs, val_docs, source = source_documents(data)
    corpus = prepare(
        [],
        lambda: sources.beginning(val_docs(), hub_stream.HELD_OUT_BYTES),
        f"{source} read in training",
        vocab_size,
        cache,
        learn_from=lambda: sources.beginning(train_docs(), hub_stream.TOKENIZER_BYTES),
    )
    return replace(corpus, train=[hub_stream.Stream(own, corpus.tokenizer)])


def held_out(base: checkpoint.Checkpoint) -> Corpus:
    """The corpus that a base checkpoint was trained on, whose val split it has not seen."""
    data = config.DataConfig(**base.run_config["data"])
    return open_corpus(data, base.run_config["vocab_size"], Path(base.run_config["cache"]))


def settle(cfg: Config, corpus: Corpus, device: torch.device, dtype: torch.dtype) -> str:
    """model=auto: put what pocketgpt.sizing chooses into cfg, or what the run that is resumed has chosen. Returns why, in words.

    Raises:
        UserError: if there is no time to choose for, or no size fits into memory.
    """
    if cfg.train.resume:
        before = resumed_from(cfg.train, Path(cfg.out), "base")
        cfg.model |= {key: before["model"][key] for key in sizing.CHOSEN}
        kept = ("batch_size", "micro_batch_size") if cfg.train.branch else ("batch_size", "micro_batch_size", "steps")
        cfg.train = replace(cfg.train, **{key: before["train"][key] for key in kept})
        return f"model=auto: {cfg.model['n_layer']} x {cfg.model['n_embd']}, as the run that is resumed has chosen"
    if cfg.train.steps or not cfg.train.minutes:
        raise UserError("model=auto chooses for a time: set train.minutes, and train.steps=0; or name another model")
    own = cfg.model | {"vocab_size": corpus.tokenizer.vocab_size}
    length, world = own["block_size"], distributed.world()

    def network(sizes: dict[str, int]) -> GPT:
        model = GPT(GPTConfig.from_dict(own | sizes, "configuration of pretrain")).train()
        model.recompute = cfg.train.recompute
        return model

    def fits(size: sizing.Size, rows: int) -> bool:
        ranks = world if cfg.parallel == "fsdp" else 1
        make = partial(network, size.model)
        planned = plan.step_memory(
            make, rows, length, cfg.optim, dtype=dtype, accumulate=True, device=device, ranks=ranks
        )
        return planned.total <= plan.SPARE * machine.free_memory(device)

    # All processes measure, at the same time: Muon divides its work among them. The first one's numbers count.
    speed = distributed.gather(sizing.measure(network, cfg.optim, length, device, dtype))[0]

    def choose() -> sizing.Choice:
        text = [(len(file), part.share) for part, file in zip(cfg.data.parts(), corpus.train, strict=True)]
        sizes = sizing.ladder(network, cfg.optim, length)
        return sizing.choose(sizes, speed, cfg.train.minutes, length, text, sizing.AT_ONCE[device.type], fits, world)

    choice = distributed.from_main(choose)
    cfg.model |= choice.model
    cfg.train = replace(
        cfg.train, batch_size=choice.batch_size, micro_batch_size=choice.micro_batch_size, steps=choice.steps
    )
    return choice.why


def main() -> None:
    cfg = config.load("pretrain", Config)
    cfg.train.check()
    cfg.optim.check()
    distributed.check(cfg.parallel, cfg.optim.offload)
    cfg.data.check(("shakespeare", "mine", "hub", "shards"))
    parts = cfg.data.parts()
    out = Path(cfg.out)
    device = distributed.start(machine.pick_device(cfg.device))
    dtype, why = distributed.from_main(lambda: machine.pick_dtype(cfg.train.dtype, device))

    with distributed.main_first():
        corpus = open_corpus(cfg.data, cfg.vocab_size, Path(cfg.cache))
    chosen = settle(cfg, corpus, device, dtype) if sizing.wanted(cfg.model) else ""
    shape = GPTConfig.from_dict(cfg.model | {"vocab_size": corpus.tokenizer.vocab_size}, "configuration of pretrain")
    torch.manual_seed(cfg.train.seed)
    model = GPT(shape).to(device)
    model.recompute = cfg.train.recompute
    fits = plan.set_micro_batch(model, cfg.train, cfg.optim, shape.block_size, dtype, cfg.parallel)
    windows = [source.windows(shape.block_size, cfg.train.seed) for source in corpus.train]
    for rows in windows:
        if isinstance(rows, hub_stream.StreamRows):
            rows.mine = cfg.train.mine
    mixture = Mixture([part.share for part in parts], cfg.train.seed)

    log = RunLog(out, "base", config.plain(cfg), cfg.log, cfg.train.resume)
    log.say(f"{machine.describe(device)}; {why}")
    for said in filter(None, (chosen, fits)):
        log.say(said)
    text = f"{sum(file.meta['bytes'] for file in corpus.train) / 1e6:.2f} MB to train on, {sum(map(len, corpus.train)):,} tokens"
    if cfg.data.endless:
        text = f"text is read in training, a part of 1 / {distributed.world()} by each process"
    log.say(
        f"{text}; {corpus.val.meta['bytes'] / 1e6:.2f} MB held out; model of {model.n_parameters() / 1e6:.2f} M parameters"
    )

    if own := hf.foreign(shape.to_dict()):
        log.say(f"opens in pocketgpt alone, not in transformers or llama.cpp, because of {', '.join(own)}")
    for part, file in zip(parts, corpus.train, strict=True):
        if len(parts) > 1:
            log.say(f"{part.share:.1%} of training from {part.name}, {len(file):,} tokens")

    def batches(step: int) -> list[Batch]:
        rows = torch.from_numpy(np.stack(mixture.rows(windows, step, cfg.train.batch_size)))
        return [
            Batch((part[:, :-1], part[:, 1:]), part[:, 1:].numel(), part[:, 1:].numel())
            for part in rows.split(cfg.train.rows_at_once)
        ]

    trained = distributed.network(model, cfg.parallel, log.say)
    hidden_states = compiled(trained.hidden_states, cfg.train, device, log)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, y = batch.inputs
        with machine.autocast(device, dtype):
            hidden = hidden_states(x)
        return linear_cross_entropy(hidden, trained.lm_head.weight, y, dtype, model.lm_head.softcap), {}

    def sample() -> str:
        prompt = torch.tensor([[corpus.tokenizer.eot_id, *corpus.tokenizer.encode(cfg.prompt)]], device=device)
        generator = torch.Generator(device).manual_seed(cfg.train.seed)
        ids = model.generate(prompt, cfg.sample_tokens, temperature=0.8, top_p=0.95, generator=generator)
        return corpus.tokenizer.decode(ids[0, 1:].tolist())

    stage = Stage(
        name="base",
        batches=batches,
        loss=loss,
        evaluate=lambda: {"bits_per_byte": bits_per_byte(model, corpus.tokenizer, corpus.val, dtype)},
        sample=sample,
        flops_per_token=model.flops_per_token(shape.block_size),
        made_from=config.plain(cfg) | {"text": corpus.fingerprint, "files": sources.fingerprints(cfg.data)},
        network=trained,
    )
    if cfg.data.endless:  # other processes or micro-batches would divide the text in another way
        stage.made_from["processes"] = distributed.world()
        if distributed.world() > 1:
            stage.made_from["rows_at_once"] = cfg.train.rows_at_once
    if distributed.is_main():
        config.save(cfg, out / "config_base.yaml")
    result = train(model, stage, cfg.train, cfg.optim, out, log)
    if not distributed.is_main():
        return

    path = checkpoint.save(
        out,
        checkpoint.Checkpoint(
            "base",
            shape.to_dict(),
            model.state_dict(),
            corpus.tokenizer,
            result.step,
            result.metrics | {"tokens_per_s": result.tokens_per_s},
            config.plain(cfg),
            {"text": corpus.fingerprint},
        ),
    )
    ids = corpus.val.tokens[:200].tolist()
    log.record(readings=[reading(model, corpus.tokenizer, "held-out text", ids, [False] + [True] * (len(ids) - 1))])
    plot = log.plot([("loss", "loss (nats/token)"), ("bits_per_byte", "held out (bits/byte)")])
    log.say(
        f"{result.step} steps at {result.tokens_per_s:,.0f} tokens/s, held out {result.metrics['bits_per_byte']:.3f} bits/byte"
    )
    log.say(f"checkpoint {path}, folder {out / 'base'}, metrics {log.path}, plot {plot}, report {report.refresh(out)}")
    log.say("next: make sft (teach it to answer), or python kv_cache.py (watch the cache)")
    log.close()


if __name__ == "__main__":
    run(main)
