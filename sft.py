"""Stage 2: from a base model to one that answers.

    python sft.py                                        # generated instructions with checkable answers
    python sft.py data=mine data.path=chats.jsonl train.minutes=20
    python show.py sft                                   # what it would learn from, supervised tokens marked

The loss counts assistant tokens and the end token after them, in every turn; conversations are packed into full rows
in which they cannot see each other. Writes ckpt_sft.pt, the folder sft/, metrics_sft.jsonl and plot_sft.png.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from base_model import GPT
from data import shakespeare
from kv_cache import CachedGPT
from pocketgpt import checkpoint, config, distributed, evaluation, lora, plan, report, shapes, sources, tasks
from pocketgpt import device as machine
from pocketgpt.errors import run
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.metrics import RunLog, console
from pocketgpt.mixture import Mixture
from pocketgpt.optim import OptimConfig
from pocketgpt.packing import Example, PackedRows, attention_mask, examples, lay_out, longest_allowed, pack, row_length
from pocketgpt.shapes import Chat
from pocketgpt.trainer import Batch, Stage, TrainConfig, compiled, train


@dataclass
class Config:
    """See configs/sft.yaml for units and meaning."""

    data: config.DataConfig
    optim: OptimConfig
    lora: lora.LoRAConfig
    train: TrainConfig
    checkpoint: str
    max_length: int
    out: str
    device: str
    parallel: str
    log: str


Chats = list[Chat | str]


def conversations(data: config.DataConfig) -> tuple[list[Chats], Chats, list[tasks.Item]]:
    """Training conversations (or texts) of each source, held-out ones of all, and held-out items with a checker (none
    for data that is not ours)."""
    found = [source_conversations(part.data) for part in data.parts()]
    trains, vals, items = zip(*found, strict=True)
    return list(trains), list(itertools.chain(*vals)), list(itertools.chain(*items))


def source_conversations(data: config.DataConfig) -> tuple[Chats, Chats, list[tasks.Item]]:
    """`conversations` of a single source."""
    if data.kind == "instruct":
        speeches = shakespeare.speeches()
        rows = tasks.conversations(data.generate, seed=0, speeches=speeches)
        _, items = evaluation.heldout_items(speeches)
        return [Chat(row["messages"]) for row in rows], [Chat(item.conversation()) for item in items], items
    chats = [shapes.chat(row, where) for where, row in sources.open_rows(data)]
    train_chats, val_chats = sources.hold_out(chats, data)
    return train_chats, val_chats, []


def heldout_loss(model: GPT, rows: list[list[Example]], length: int, dtype: torch.dtype) -> float:
    """Nats per supervised token on held-out conversations."""
    device = model.embed.weight.device
    total, count = 0.0, 0
    for start in range(0, len(rows), 8):
        batch = lay_out(rows[start : start + 8], length)
        with torch.no_grad():
            with machine.autocast(device, dtype):
                hidden = model.hidden_states(
                    batch.inputs.to(device), batch.positions.to(device), attention_mask(batch.segments.to(device))
                )
            total += float(
                linear_cross_entropy(
                    hidden, model.lm_head.weight, batch.targets.to(device), dtype, model.lm_head.softcap
                )
            )
        count += int((batch.targets != IGNORE).sum())
    return total / max(1, count)


def main() -> None:
    cfg = config.load("sft", Config)
    cfg.train.check()
    cfg.optim.check()
    distributed.check(cfg.parallel, cfg.optim.offload)
    cfg.lora.check()
    cfg.data.check(("instruct", "mine", "hub"))
    parts = cfg.data.parts()
    out = Path(cfg.out)
    loaded = checkpoint.load(cfg.checkpoint or out / "ckpt_base.pt")
    tok = loaded.tokenizer
    device = distributed.start(machine.pick_device(cfg.device))
    dtype, why = distributed.from_main(lambda: machine.pick_dtype(cfg.train.dtype, device))
    with distributed.main_first():
        train_chats, val_chats, items = conversations(cfg.data)

    model = GPT.from_loaded(loaded, device)
    start, loaded.state_dict = loaded.digest, {}  # the model has the weights: no second copy in memory
    lora.attach(model, model.config.to_dict(), cfg.lora, cfg.train.seed)
    cached = CachedGPT.sharing(model)
    block = longest_allowed(model.config.block_size, cfg.max_length)
    with console.status("encoding the conversations"):
        encoded = [examples(tok, chats, block, "training") for chats in train_chats]
        train_examples = [example for found, _ in encoded for example in found]
        val_examples, _ = examples(tok, val_chats, block, "held-out")
        length = row_length(train_examples + val_examples, block)
        packed = [PackedRows(found, length, cfg.train.seed) for found, _ in encoded]
        mixture = Mixture([part.share for part in parts], cfg.train.seed)
        n_rows, too_long = sum(rows.per_epoch for rows in packed), sum(dropped for _, dropped in encoded)
    val_rows = [[val_examples[i] for i in row] for row in pack([len(e) for e in val_examples], length)]

    model.recompute = cfg.train.recompute
    fits = plan.set_micro_batch(model, cfg.train, cfg.optim, length, dtype, cfg.parallel)
    log = RunLog(out, "sft", config.plain(cfg), cfg.log, cfg.train.resume)
    supervised = sum(int((e.targets != IGNORE).sum()) for e in train_examples)
    read = sum(len(e) for e in train_examples)
    log.say(f"{machine.describe(device)}; {why}")
    if cfg.lora.rank:
        log.say(lora.describe(model, cfg.lora))
    if fits:
        log.say(fits)
    log.say(
        f"{len(train_examples):,} conversations, {read:,} tokens, {supervised / read:.0%} of them supervised, in "
        f"{n_rows:,} rows of {length} filled to {read / n_rows / length:.1%}; {too_long} too long for {block} tokens, dropped"
    )
    for part, rows in zip(parts, packed, strict=True):
        if len(parts) > 1:
            log.say(f"{part.share:.1%} of training from {part.name}, {len(rows.items):,} in {rows.per_epoch:,} rows")

    def batches(step: int) -> list[Batch]:
        rows = lay_out(mixture.rows(packed, step, cfg.train.batch_size), length)
        parts = zip(
            *(t.split(cfg.train.rows_at_once) for t in (rows.inputs, rows.targets, rows.positions, rows.segments)),
            strict=True,
        )
        return [Batch(part, int((part[1] != IGNORE).sum()), int((part[3] >= 0).sum())) for part in parts]

    trained = distributed.network(model, cfg.parallel, log.say)
    hidden_states = compiled(trained.hidden_states, cfg.train, device, log)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, positions, segments = batch.inputs
        with machine.autocast(device, dtype):
            hidden = hidden_states(inputs, positions, attention_mask(segments))
        return linear_cross_entropy(hidden, trained.lm_head.weight, targets, dtype, model.lm_head.softcap), {}

    def evaluate() -> dict[str, float]:
        metrics = {"loss": heldout_loss(model, val_rows, length, dtype)}
        if items:
            passed, asked = evaluation.score(cached, tok, items).rate()
            metrics["accuracy"] = passed / asked
        return metrics

    answered = [c.messages for c in val_chats if isinstance(c, Chat) and c.messages[-1]["role"] == "assistant"]

    def sample() -> str:
        if not answered:
            return ""
        question = answered[len(answered) // 2][:-1]
        (answer,) = evaluation.answer_many(cached, tok, [question], evaluation.GREEDY, seed=0)
        return f"user: {question[-1]['content']}\nassistant: {answer}"

    stage = Stage("sft", batches, loss, evaluate, sample, model.flops_per_token(length, supervised / read))
    stage.network = trained
    digests = {"start": start, "conversations": sources.digest(train_chats)}
    stage.made_from = config.plain(cfg) | digests | {"files": sources.fingerprints(cfg.data)}
    if distributed.is_main():
        config.save(cfg, out / "config_sft.yaml")
    result = train(model, stage, cfg.train, cfg.optim, out, log)
    if not distributed.is_main():
        return

    path = checkpoint.save(
        out,
        checkpoint.Checkpoint(
            "sft",
            model.config.to_dict(),
            lora.merged(model),
            tok,
            result.step,
            result.metrics | {"tokens_per_s": result.tokens_per_s},
            config.plain(cfg),
            loaded.fingerprints | {"sft": digests["conversations"]},
        ),
    )
    log.record(readings=evaluation.read_conversations(model, tok, val_chats))
    plot = log.plot([("loss", "loss (nats/supervised token)")] + ([("accuracy", "held-out accuracy")] if items else []))
    log.say(
        f"{result.step} steps at {result.tokens_per_s:,.0f} tokens/s; "
        + ", ".join(f"{k} {v:.3f}" for k, v in result.metrics.items())
    )
    if cfg.lora.rank:
        folder = lora.save(out / "sft_lora", model, model.config.to_dict(), cfg.lora, loaded.folder)
        log.say(f"adapters {folder}, for {loaded.folder}; the checkpoint has them merged")
    log.say(f"checkpoint {path}, folder {out / 'sft'}, metrics {log.path}, plot {plot}, report {report.refresh(out)}")
    log.say("next: make dpo (prefer its better answers), make chat (talk to it)")
    log.close()


if __name__ == "__main__":
    run(main)
