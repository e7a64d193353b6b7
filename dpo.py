"""Stage 3: from a model that answers to one that prefers its better answers.

    python dpo.py                                        # pairs sampled from the SFT model, judged by the checkers
    python dpo.py data=mine data.path=pairs.jsonl train.minutes=10
    python dpo.py dpo.beta=0.5 dpo.label_smoothing=0.1

Direct preference optimization (Rafailov et al. 2023) on summed answer log-probabilities. The reference's log-probabilities
are computed once before training, so one model is in memory; dropout is off. Beside it always runs a control, plain
fine-tuning on the chosen answers, because on checkable tasks it is hard to beat. Writes ckpt_dpo.pt, the folder dpo/, the
same for `control`, pairs_*.jsonl, metrics_*.jsonl and plot_*.png.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from base_model import GPT
from data import shakespeare
from kv_cache import CachedGPT
from pocketgpt import chat_template, checkpoint, config, evaluation, report, shapes, sources, tasks
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.files import write_text
from pocketgpt.loss import IGNORE, dpo_loss
from pocketgpt.metrics import RunLog, console
from pocketgpt.mixture import Mixture
from pocketgpt.optim import OptimConfig
from pocketgpt.packing import Example
from pocketgpt.sampling import Settings
from pocketgpt.tokenizer import Tokenizer
from pocketgpt.trainer import Batch, Stage, TrainConfig, train

Conversation = list[chat_template.Message]
Loss = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class DPOConfig:
    """See configs/dpo.yaml for units and meaning."""

    beta: float
    label_smoothing: float
    chosen_nll: float
    families: list[str]
    samples: int
    temperature: float
    control_lr: float

    def check(self) -> None:
        """Raises UserError on values outside their ranges."""
        if not (0 < self.beta < math.inf and 0 <= self.label_smoothing < 0.5 and 0 <= self.chosen_nll < math.inf):
            raise UserError(
                "dpo.beta must be above 0, dpo.label_smoothing from 0 to below 0.5, dpo.chosen_nll 0 or above"
            )
        if not (self.samples >= 2 and 0 < self.temperature < math.inf and 0 < self.control_lr < math.inf):
            raise UserError("dpo.samples must be at least 2, dpo.temperature and dpo.control_lr above 0")


@dataclass
class Config:
    """See configs/dpo.yaml for units and meaning."""

    data: config.DataConfig
    optim: OptimConfig
    dpo: DPOConfig
    train: TrainConfig
    checkpoint: str
    out: str
    device: str
    log: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one conversation, the first preferred."""

    prompt: Conversation
    chosen: str
    rejected: str
    source: int = 0  # of a mixture


def sample_pairs(
    model: CachedGPT, tok: Tokenizer, items: Sequence[tasks.Item], dpo: DPOConfig, seed: int, title: str
) -> tuple[list[Pair], dict[str, int]]:
    """Answer every item several times and pair answers that pass their check and keep the style rule with others.

    Items whose answers all do, or none does, have nothing to prefer: they are dropped, and counted as tied. If that is
    so for every item, as after a very short fine-tuning, the reference answers stand in as the chosen ones, and it says so.
    """
    repeated = [item for item in items for _ in range(dpo.samples)]
    scored = evaluation.score_with_bar(title, model, tok, repeated, Settings(temperature=dpo.temperature), seed)
    pairs, counts = [], defaultdict(int, sampled=len(repeated))
    for start in range(0, len(repeated), dpo.samples):
        answers = list(zip(scored.answers, scored.liked, strict=True))[start : start + dpo.samples]
        good = list(dict.fromkeys(text for text, ok in answers if ok))
        bad = list(dict.fromkeys(text for text, ok in answers if not ok))
        if not good or not bad:
            counts["tied"] += 1
        pairs += [Pair(items[start // dpo.samples].messages, a, b) for a, b in zip(good, bad, strict=False)]
    if not pairs:
        console.print(f"{title}: no item has both kinds of answers; reference answers stand in as the chosen ones")
        pairs = [
            Pair(item.messages, item.answer, text)
            for item, text, ok in zip(repeated, scored.answers, scored.liked, strict=True)
            if not ok and text != item.answer
        ][:: dpo.samples]
    return pairs, dict(counts)


def own_pairs(data: config.DataConfig) -> tuple[list[Pair], list[Pair], dict[str, int]]:
    """Training and held-out pairs from the user's preference data; equal answers are dropped and counted."""
    train_pairs: list[Pair] = []
    val_pairs: list[Pair] = []
    equal = 0
    for source, part in enumerate(data.parts()):
        found = [shapes.preference(row, where) for where, row in sources.open_rows(part.data)]
        pairs = [Pair(*each, source) for each in found if each.chosen != each.rejected]
        equal += len(found) - len(pairs)
        kept, held = sources.hold_out(pairs, part.data)
        train_pairs += kept
        val_pairs += held
    return train_pairs, val_pairs, {"equal": equal}


def marked(tok: Tokenizer, prompt: Conversation, answer: str) -> tuple[list[int], list[bool]]:
    """The ids of prompt and answer, and which are supervised: the answer and its end token, no earlier answers."""
    before = len(chat_template.render_prompt(tok, prompt))
    ids, supervised = chat_template.render(tok, [*prompt, {"role": "assistant", "content": answer}])
    end = len(ids) - supervised[::-1].index(True)
    return ids[:end], [False] * before + [True] * (end - before)


class PairRows:
    """Encoded pairs. Which ones a step sees is a pure function of seed and step; similar lengths share a batch."""

    def __init__(
        self, tok: Tokenizer, pairs: Sequence[Pair], block_size: int, seed: int, shares: Sequence[float] = (1.0,)
    ) -> None:
        """`shares` of training: one for each source of the pairs."""
        self.seed = seed
        self.chosen: list[Example] = []
        self.rejected: list[Example] = []
        self.too_long = 0
        self.mixture = Mixture(shares, seed)
        self.sources: list[list[int]] = [[] for _ in shares]  # the pairs of each
        for pair in pairs:
            sides = [self.encode(tok, pair.prompt, answer) for answer in (pair.chosen, pair.rejected)]
            if max(map(len, sides)) > block_size:
                self.too_long += 1
            else:
                self.sources[pair.source].append(len(self.chosen))
                self.chosen.append(sides[0])
                self.rejected.append(sides[1])
        if not self.chosen:
            raise UserError(
                f"no preference pair is left: {self.too_long} were longer than {block_size} tokens, the rest were equal or tied"
            )
        # The reference's log-probabilities, filled in before training: (pairs,) each.
        self.reference_chosen = self.reference_rejected = torch.zeros(len(self.chosen))

    @staticmethod
    def encode(tok: Tokenizer, prompt: Conversation, answer: str) -> Example:
        return Example.of(*marked(tok, prompt, answer))

    def __len__(self) -> int:
        return len(self.chosen)

    def rows(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The chosen rows of these pairs and then the rejected ones, padded at the right: (2n, T) inputs and targets."""
        sides = [self.chosen[i] for i in which] + [self.rejected[i] for i in which]
        shape = (len(sides), -(-max(map(len, sides)) // 32) * 32)  # few different lengths: see loss.whole
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        for row, side in enumerate(sides):
            inputs[row, : len(side)], targets[row, : len(side)] = side.inputs, side.targets
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def order(self, numbers: range) -> list[int]:
        """Which pairs stand at these places of the endless order: every epoch of a source has all of its pairs once."""
        picks = [self.mixture.pick(number) for number in numbers]
        epochs = {(source, number // len(self.sources[source])) for source, number in picks}
        shuffled = {
            (source, epoch): np.random.default_rng([self.seed, epoch]).permutation(self.sources[source])
            for source, epoch in epochs
        }
        lengths = [len(pairs) for pairs in self.sources]
        return [int(shuffled[s, n // lengths[s]][n % lengths[s]]) for s, n in picks]

    def batch(self, step: int, batch_size: int, micro: int) -> list[Batch]:
        """The pairs of a step, longest first, in micro-batches with their reference log-probabilities."""
        which = self.order(range(step * batch_size, (step + 1) * batch_size))
        which.sort(key=lambda i: -len(self.chosen[i]) - len(self.rejected[i]))
        parts = []
        for start in range(0, len(which), micro):
            part = which[start : start + micro]
            inputs, targets = self.rows(part)
            reference = (self.reference_chosen[part], self.reference_rejected[part])
            parts.append(Batch((inputs, targets, *reference), len(part), inputs.numel()))
        return parts

    def log_probs(self, model: GPT, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Summed log-probabilities of all chosen and all rejected answers, (pairs,) each, on the CPU."""
        chosen, rejected = torch.zeros(len(self)), torch.zeros(len(self))
        device = model.embed.weight.device
        order = sorted(range(len(self)), key=lambda i: len(self.chosen[i]) + len(self.rejected[i]))
        with torch.no_grad():
            for start in range(0, len(order), 32):
                part = order[start : start + 32]
                inputs, targets = self.rows(part)
                sums = evaluation.answer_log_probs(model, inputs.to(device), targets.to(device), dtype).cpu()
                chosen[part], rejected[part] = sums.chunk(2)
        return chosen, rejected


def main() -> None:
    cfg = config.load("dpo", Config)
    cfg.train.check()
    cfg.optim.check()
    cfg.dpo.check()
    if cfg.train.compile:
        raise UserError(
            "train.compile=true: pairs come in many lengths, each of which would be compiled; leave it false"
        )
    cfg.data.check(("onpolicy", "mine", "hub"))
    out = Path(cfg.out)
    loaded = checkpoint.load(cfg.checkpoint or out / "ckpt_sft.pt")
    if loaded.config.get("dropout"):
        console.print(f"dropout {loaded.config['dropout']} is set to 0: DPO compares exact log-probabilities")
        loaded.config["dropout"] = 0.0
    tok = loaded.tokenizer
    device = machine.pick_device(cfg.device)
    dtype, why = machine.pick_dtype(cfg.train.dtype, device)
    model = GPT.from_loaded(loaded, device)
    cached = CachedGPT.sharing(model)
    log = RunLog(out, "dpo", config.plain(cfg), cfg.log, cfg.train.resume)
    log.say(f"{machine.describe(device)}; {why}")

    dev: list[tasks.Item] = []  # held-out items of the paired families, each of them several times
    if cfg.data.kind == "onpolicy":
        speeches = shakespeare.speeches()
        _, every = evaluation.heldout_items(speeches)
        without = tasks.FAMILIES.keys() - {item.family for item in every}  # those that would quote a corpus
        families = [name for name in cfg.dpo.families if name not in without]
        if without & set(cfg.dpo.families):
            log.say(f"no speeches to quote: without the families {', '.join(sorted(without))}")
        prompts = tasks.make_items(cfg.data.generate, heldout=False, seed=1, speeches=speeches, families=families)
        dev = [item for item in every if item.family in families for _ in range(4)]
        train_pairs, counts = sample_pairs(cached, tok, prompts, cfg.dpo, cfg.train.seed, "sampling answers")
        val_pairs, _ = sample_pairs(cached, tok, dev[::4], cfg.dpo, cfg.train.seed + 1, "sampling held-out answers")
    else:
        train_pairs, val_pairs, counts = own_pairs(cfg.data)
    for name, kept in (("train", train_pairs), ("heldout", val_pairs)):
        lines = (
            json.dumps({"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected}, ensure_ascii=False)
            for p in kept
        )
        write_text(out / f"pairs_{name}.jsonl", "".join(line + "\n" for line in lines))
    parts = cfg.data.parts()
    shares = [part.share for part in parts]
    pairs = PairRows(tok, train_pairs, model.config.block_size, cfg.train.seed, shares)
    for part, members in zip(parts, pairs.sources, strict=True):
        if not members:
            raise UserError(f"{part.name}: none of its pairs fits into {model.config.block_size} tokens")
        if len(parts) > 1:
            log.say(f"{part.share:.1%} of training from {part.name}, {len(members):,} pairs")
    held = PairRows(tok, val_pairs, model.config.block_size, cfg.train.seed, shares)
    dropped = ", ".join(f"{count} {what}" for what, count in counts.items())
    log.say(f"{len(pairs)} pairs to train on ({dropped}, {pairs.too_long} too long), {len(held)} held out")
    for rows in (pairs, held):
        rows.reference_chosen, rows.reference_rejected = rows.log_probs(model, dtype)

    def preference(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, reference_chosen, reference_rejected = batch.inputs
        chosen, rejected = evaluation.answer_log_probs(model, inputs, targets, dtype).chunk(2)
        losses, reward_chosen, reward_rejected = dpo_loss(
            chosen,
            rejected,
            reference_chosen,
            reference_rejected,
            beta=cfg.dpo.beta,
            label_smoothing=cfg.dpo.label_smoothing,
        )
        lengths = (targets != IGNORE).sum(1)[: len(chosen)]
        total = losses.sum() - cfg.dpo.chosen_nll * (chosen / lengths).sum()
        margin = reward_chosen - reward_rejected
        numbers = {"preference_loss": losses.sum(), "margin": margin.sum(), "accuracy": (margin > 0).float().sum()}
        return total, {name: value.detach() for name, value in numbers.items()}

    def likelihood(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = batch.inputs
        chosen = evaluation.answer_log_probs(model, inputs, targets, dtype)
        return -(chosen / (targets != IGNORE).sum(1)).sum(), {}

    def evaluate() -> dict[str, float]:
        chosen, rejected = held.log_probs(model, dtype)
        losses, good, bad = dpo_loss(
            chosen,
            rejected,
            held.reference_chosen,
            held.reference_rejected,
            beta=cfg.dpo.beta,
            label_smoothing=cfg.dpo.label_smoothing,
        )
        drift = torch.cat((held.reference_chosen - chosen, held.reference_rejected - rejected))
        metrics = {
            "preference_loss": float(losses.mean()),
            "reward_chosen": float(good.mean()),
            "reward_rejected": float(bad.mean()),
            "margin": float((good - bad).mean()),
            "accuracy": float((good > bad).float().mean()),
            # An estimate of KL(reference || policy) in nats per answer, when the pairs were sampled from the reference.
            "kl": float(drift.mean()),
        }
        if dev:
            result = evaluation.score(cached, tok, dev, Settings(temperature=cfg.dpo.temperature), seed=7)
            metrics["liked"] = sum(result.liked) / len(dev)
            metrics["passed"] = result.rate()[0] / len(dev)
            metrics["answer_length"] = result.mean_length()
        return metrics

    def sample() -> str:
        question = val_pairs[0].prompt
        (answer,) = evaluation.answer_many(cached, tok, [question], evaluation.GREEDY, seed=0)
        return f"user: {question[-1]['content']}\nassistant: {answer}"

    def batches(step: int) -> list[Batch]:
        return pairs.batch(step, cfg.train.batch_size, cfg.train.micro_batch_size)

    def chosen_only(step: int) -> list[Batch]:
        halves = ((b, len(b.inputs[0]) // 2) for b in batches(step))
        return [Batch((b.inputs[0][:n], b.inputs[1][:n]), b.weight, b.tokens // 2) for b, n in halves]

    sides = pairs.chosen + pairs.rejected
    share = sum(int((side.targets != IGNORE).sum()) for side in sides) / sum(map(len, sides))
    flops = model.flops_per_token(sum(map(len, sides)) // len(sides), share)

    digests = {"start": loaded.digest, "pairs": sources.digest([vars(pair) for pair in train_pairs])}
    made_from = config.plain(cfg) | digests | {"files": sources.fingerprints(cfg.data)}

    def finish(name: str, stage_log: RunLog, batches: Callable[[int], list[Batch]], loss: Loss, lr: float) -> Path:
        """Train from the SFT weights with this loss, keep the best by held-out wins, and save."""
        monitor = "liked" if dev else "accuracy"
        stage = Stage(name, batches, loss, evaluate, sample, flops, unit="/pair", monitor=monitor, made_from=made_from)
        resume = cfg.train.resume and (out / f"resume_{name}.pt").exists()
        settings = TrainConfig(**{**vars(cfg.train), "lr": lr, "resume": resume})
        result = train(model, stage, settings, cfg.optim, out, stage_log)
        shown = [
            (f"held-out pair {i}, {side}", marked(tok, pair.prompt, getattr(pair, side)))
            for i, pair in enumerate(val_pairs[:2], 1)
            for side in ("chosen", "rejected")
        ]
        stage_log.record(readings=[evaluation.reading(model, tok, title, *text) for title, text in shown])
        stage_log.plot([("preference_loss", "DPO loss (nats/pair)"), ("margin", "reward margin"), (monitor, monitor)])
        log.say(f"{name}: {result.step} steps; best " + ", ".join(f"{k} {v:.3f}" for k, v in result.metrics.items()))
        return checkpoint.save(
            out,
            checkpoint.Checkpoint(
                name,
                model.config.to_dict(),
                model.state_dict(),
                tok,
                result.step,
                dict(result.metrics),
                config.plain(cfg),
                loaded.fingerprints | {"pairs": digests["pairs"]},
            ),
        )

    if not cfg.train.resume:  # two runs follow, and the first must not leave the second with an old one's state
        for name in ("control", "dpo"):
            for path in out.glob(f"resume_{name}*.pt"):
                path.unlink()
    config.save(cfg, out / "config_dpo.yaml")
    log.say("control: plain fine-tuning on the chosen answers")
    control_log = RunLog(out, "control", config.plain(cfg), "none", cfg.train.resume)
    finish("control", control_log, chosen_only, likelihood, cfg.dpo.control_lr)
    model.load_state_dict(loaded.state_dict)
    log.say("DPO")
    path = finish("dpo", log, batches, preference, cfg.train.lr)
    log.say(
        f"checkpoint {path}, folder {out / 'dpo'}, metrics {log.path}, plot {log.plot_path}, pairs {out / 'pairs_train.jsonl'}, "
        f"report {report.refresh(out)}"
    )
    log.say("next: python evaluate.py (all stages side by side), make chat (talk to it)")
    log.close()


if __name__ == "__main__":
    run(main)
