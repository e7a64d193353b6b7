"""Stage 2: from a base model to one that answers.

    python sft.py                                        # generated instructions with checkable answers
    python sft.py data=mine data.path=chats.jsonl train.minutes=20
    python sft.py show=3                                 # print three rows, supervised tokens marked, and stop

The loss counts assistant tokens and the end token after them, in every turn; conversations are packed into full rows
in which they cannot see each other. Writes ckpt_sft.pt, the folder sft/, metrics_sft.jsonl and plot_sft.png.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.text import Text
from torch import Tensor

from base_model import GPT
from data import shakespeare
from kv_cache import CachedGPT
from pocketgpt import chat_template, checkpoint, config, evaluation, sources, tasks
from pocketgpt import device as machine
from pocketgpt.errors import run
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.metrics import RunLog, console
from pocketgpt.optim import OptimConfig
from pocketgpt.packing import Example, PackedRows, attention_mask, examples, lay_out, pack, row_length
from pocketgpt.tokenizer import Tokenizer
from pocketgpt.trainer import Batch, Stage, TrainConfig, compiled, train


@dataclass
class Config:
    """See configs/sft.yaml for units and meaning."""

    data: config.DataConfig
    optim: OptimConfig
    train: TrainConfig
    checkpoint: str
    out: str
    device: str
    log: str
    show: int


def conversations(
    data: config.DataConfig,
) -> tuple[list[list[chat_template.Message]], list[list[chat_template.Message]], list[tasks.Item]]:
    """Training conversations, held-out ones, and held-out items with a checker (none for data that is not ours)."""
    if data.kind == "instruct":
        speeches = shakespeare.speeches()
        rows = tasks.conversations(data.generate, seed=0, speeches=speeches)
        _, items = evaluation.heldout_items(speeches)
        return [row["messages"] for row in rows], [item.conversation() for item in items], items
    chats = [sources.to_messages(row, where) for where, row in sources.open_rows(data)]
    train_chats, val_chats = sources.hold_out(chats, data)
    return train_chats, val_chats, []


def show_rows(tok: Tokenizer, chats: list[list[chat_template.Message]]) -> None:
    """Print conversations token by token, the supervised ones marked: in colour, or in «» where there is none."""
    for messages in chats:
        ids, supervised = chat_template.render(tok, messages)
        line = Text()
        for token, counts in zip(ids, supervised, strict=True):
            piece = tok.decode([token])
            if not console.is_terminal:
                piece = f"«{piece}»" if counts else piece
            line.append(piece, style="black on green" if counts else "dim")
        console.print(line)
        console.print(f"[dim]{sum(supervised)} of {len(ids)} tokens supervised[/dim]\n")


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
            total += float(linear_cross_entropy(hidden, model.lm_head.weight, batch.targets.to(device), dtype))
        count += int((batch.targets != IGNORE).sum())
    return total / max(1, count)


def main() -> None:
    cfg = config.load("sft", Config)
    cfg.train.check()
    cfg.optim.check()
    cfg.data.check(("instruct", "mine", "hub"))
    out = Path(cfg.out)
    loaded = checkpoint.load(cfg.checkpoint or out / "ckpt_base.pt")
    tok = loaded.tokenizer
    train_chats, val_chats, items = conversations(cfg.data)
    if cfg.show:
        show_rows(tok, train_chats[: cfg.show])
        return

    device = machine.pick_device(cfg.device)
    dtype, why = machine.pick_dtype(cfg.train.dtype, device)
    model = GPT.from_loaded(loaded, device)
    cached = CachedGPT.sharing(model)
    block = model.config.block_size
    with console.status("encoding the conversations"):
        train_examples, too_long = examples(tok, train_chats, block, "training")
        val_examples, _ = examples(tok, val_chats, block, "held-out")
        length = row_length(train_examples + val_examples, block)
        packed = PackedRows(train_examples, length, cfg.train.seed)
    val_rows = [[val_examples[i] for i in row] for row in pack([len(e) for e in val_examples], length)]

    log = RunLog(out, "sft", config.plain(cfg), cfg.log, cfg.train.resume)
    supervised = sum(int((e.targets != IGNORE).sum()) for e in train_examples)
    read = sum(len(e) for e in train_examples)
    log.say(f"{machine.describe(device)}; {why}")
    log.say(
        f"{len(train_examples):,} conversations, {read:,} tokens, {supervised / read:.0%} of them supervised, in "
        f"{packed.per_epoch:,} rows of {length} filled to {read / packed.per_epoch / length:.1%}; {too_long} too long for {block} tokens, dropped"
    )

    def batches(step: int) -> list[Batch]:
        rows = packed.batch(step, cfg.train.batch_size)
        parts = zip(
            *(t.split(cfg.train.micro_batch_size) for t in (rows.inputs, rows.targets, rows.positions, rows.segments)),
            strict=True,
        )
        return [Batch(part, int((part[1] != IGNORE).sum()), int((part[3] >= 0).sum())) for part in parts]

    model.recompute = cfg.train.recompute
    hidden_states = compiled(model.hidden_states, cfg.train, device, log)

    def loss(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, positions, segments = batch.inputs
        with machine.autocast(device, dtype):
            hidden = hidden_states(inputs, positions, attention_mask(segments))
        return linear_cross_entropy(hidden, model.lm_head.weight, targets, dtype), {}

    def evaluate() -> dict[str, float]:
        metrics = {"loss": heldout_loss(model, val_rows, length, dtype)}
        if items:
            passed, asked = evaluation.score(cached, tok, items).rate()
            metrics["accuracy"] = passed / asked
        return metrics

    answered = [chat for chat in val_chats if chat[-1]["role"] == "assistant"]

    def sample() -> str:
        if not answered:
            return ""
        question = answered[len(answered) // 2][:-1]
        (answer,) = evaluation.answer_many(cached, tok, [question], evaluation.GREEDY, seed=0)
        return f"user: {question[-1]['content']}\nassistant: {answer}"

    stage = Stage("sft", batches, loss, evaluate, sample, model.flops_per_token(length, supervised / read))
    digests = {"start": loaded.digest, "conversations": sources.digest(train_chats)}
    stage.made_from = config.plain(cfg) | digests | {"files": sources.fingerprints(cfg.data)}
    config.save(cfg, out / "config_sft.yaml")
    result = train(model, stage, cfg.train, cfg.optim, out, log)

    path = checkpoint.save(
        out,
        checkpoint.Checkpoint(
            "sft",
            model.config.to_dict(),
            model.state_dict(),
            tok,
            result.step,
            result.metrics | {"tokens_per_s": result.tokens_per_s},
            config.plain(cfg),
            loaded.fingerprints | {"sft": digests["conversations"]},
        ),
    )
    plot = log.plot([("loss", "loss (nats/supervised token)")] + ([("accuracy", "held-out accuracy")] if items else []))
    log.say(
        f"{result.step} steps at {result.tokens_per_s:,.0f} tokens/s; "
        + ", ".join(f"{k} {v:.3f}" for k, v in result.metrics.items())
    )
    log.say(f"checkpoint {path}, folder {out / 'sft'}, metrics {log.path}, plot {plot}")
    log.say("next: make dpo (prefer its better answers), make chat (talk to it)")
    log.close()


if __name__ == "__main__":
    run(main)
