"""Stage 3: from a model that answers to one that prefers its better answers.

    python dpo.py                                        # pairs sampled from the SFT model, judged by the checkers
    python dpo.py data=mine data.path=pairs.jsonl train.minutes=10
    python dpo.py dpo.loss=simpo dpo.beta=2.5            # another of the losses in `preference_loss`

Direct preference optimization (Rafailov et al. 2023) on summed answer log-probabilities, and its relatives. The reference's
log-probabilities are computed once before training, so one model is in memory; dropout is off. Beside it always runs a
control, plain fine-tuning on the chosen answers, because on checkable tasks it is hard to beat. Writes ckpt_dpo.pt, the
folder dpo/, the same for `control`, pairs_*.jsonl, metrics_*.jsonl and plot_*.png.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from base_model import GPT
from data import shakespeare
from kv_cache import CachedGPT
from pocketgpt import (
    chat_template,
    checkpoint,
    config,
    distributed,
    evaluation,
    lora,
    plan,
    report,
    shapes,
    sources,
    tasks,
)
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.files import write_text
from pocketgpt.loss import IGNORE
from pocketgpt.metrics import RunLog, console
from pocketgpt.mixture import Mixture, Shuffled
from pocketgpt.optim import OptimConfig
from pocketgpt.packing import Example, longest_allowed
from pocketgpt.sampling import Settings
from pocketgpt.tokenizer import Tokenizer
from pocketgpt.trainer import Batch, Stage, TrainConfig, train

POOL = 8  # batches within which pairs are sorted by length

Conversation = list[chat_template.Message]
Loss = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]


# The numbers of each loss and what they are unless set: docs/dpo.md says where they come from.
NUMBERS: dict[str, dict[str, float]] = {
    "sigmoid": {"beta": 0.3, "label_smoothing": 0.0, "chosen_nll": 0.5},
    "cdpo": {"beta": 0.3, "label_smoothing": 0.1, "chosen_nll": 0.5},
    "ipo": {"beta": 0.1, "chosen_nll": 0.0},
    "hinge": {"beta": 0.3, "chosen_nll": 0.0},
    "simpo": {"beta": 2.0, "gamma": 1.0, "chosen_nll": 0.0},
    "orpo": {"beta": 0.1, "chosen_nll": 1.0},
}
REFERENCE_FREE = ("simpo", "orpo")


@dataclass
class DPOConfig:
    """See configs/dpo.yaml for units and meaning."""

    loss: str
    beta: float | None
    label_smoothing: float | None
    gamma: float | None
    chosen_nll: float | None
    families: list[str]
    samples: int
    temperature: float
    control_lr: float

    def check(self) -> None:
        """Raises UserError on values outside their ranges, and on a number that the loss does not have."""
        numbers = self.numbers()
        for key, least, below in (
            ("beta", 1e-9, math.inf),
            ("label_smoothing", 0, 0.5),
            ("gamma", 0, math.inf),
            ("chosen_nll", 0, math.inf),
        ):
            if not least <= numbers.get(key, least) < below:
                raise UserError(f"dpo.{key} is {numbers[key]}: it must be at least {least} and below {below}")
        if not (self.samples >= 2 and 0 < self.temperature < math.inf and 0 < self.control_lr < math.inf):
            raise UserError("dpo.samples must be at least 2, dpo.temperature and dpo.control_lr above 0")

    def numbers(self) -> dict[str, float]:
        """The numbers of the loss: those that are set, and its own."""
        if self.loss not in NUMBERS:
            raise UserError(f"dpo.loss is {self.loss!r}: choose {', '.join(NUMBERS)}")
        own = NUMBERS[self.loss]
        asked = {key: getattr(self, key) for key in ("beta", "label_smoothing", "gamma", "chosen_nll")}
        asked = {key: value for key, value in asked.items() if value is not None}
        if surplus := asked.keys() - own.keys():
            raise UserError(f"dpo.loss={self.loss} has no {sorted(surplus)[0]}: leave it null, or choose another loss")
        return own | asked


@dataclass
class Config:
    """See configs/dpo.yaml for units and meaning."""

    data: config.DataConfig
    optim: OptimConfig
    dpo: DPOConfig
    lora: lora.LoRAConfig
    train: TrainConfig
    checkpoint: str
    max_length: int
    out: str
    device: str
    parallel: str
    log: str


@dataclass(frozen=True)
class Pair:
    """Two answers to one conversation, the first preferred."""

    prompt: Conversation
    chosen: str
    rejected: str
    source: int = 0  # of a mixture


def preference_loss(
    loss: str,
    policy: Tensor,
    reference: Tensor | None,
    lengths: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    gamma: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """What n pairs of answers, c chosen and r rejected, cost under one of the losses of this family.

    With the policy p, the reference q, and beta times the log of p(y) / q(y) as the reward of an answer y, let m be the reward of
    c less that of r. Log-probabilities are sums over the answer.

        sigmoid   - log sigmoid(m)                                   DPO, Rafailov et al. 2023
        cdpo      - (1 - e) log sigmoid(m) - e log sigmoid(-m)       conservative DPO, Mitchell 2023: a share e of the pairs is flipped
        ipo       (m / beta - 1 / (2 beta))^2                        Azar et al. 2023: a margin that is enough
        hinge     max(0, 1 - m)                                      SLiC, Zhao et al. 2023; with a reference as in Liu et al. 2023

    Without a reference the reward is beta times the mean of log p per token:

        simpo     - log sigmoid(m - gamma)                           Meng et al. 2024
        orpo      - beta log sigmoid(log odds(c) - log odds(r))      Hong et al. 2024, whose likelihood term is chosen_nll = 1;
                                                                     odds(y) = P / (1 - P), P = exp(mean of log p per token)

    Args:
        policy: log p of the chosen answers and then of the rejected ones, (2n,), in nats.
        reference: log q of the same, (2n,); None for simpo and orpo.
        lengths: tokens of the same, (2n,).

    Returns:
        (losses, rewards of the chosen, rewards of the rejected), (n,) each, the rewards detached.
    """
    rewards = beta * (policy / lengths if reference is None else policy - reference)
    chosen, rejected = rewards.chunk(2)
    margin = chosen - rejected
    if loss == "ipo":
        losses = ((margin - 0.5) / beta).square()
    elif loss == "hinge":
        losses = F.relu(1 - margin)
    elif loss == "orpo":
        mean = (policy / lengths).clamp_max(-1e-6)  # of a certain answer the odds are infinite
        log_odds = mean - torch.log(-torch.expm1(mean))
        losses = -beta * F.logsigmoid(torch.sub(*log_odds.chunk(2)))
    else:
        margin = margin - gamma
        losses = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return losses, chosen.detach(), rejected.detach()


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
    """Encoded pairs. Which ones a step sees is a pure function of seed and step; pairs of like length share a batch."""

    def __init__(
        self, tok: Tokenizer, pairs: Sequence[Pair], block_size: int, seed: int, shares: Sequence[float] = (1.0,)
    ) -> None:
        """`shares` of training: one for each source of the pairs."""
        self.block_size, self.seed = block_size, seed
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
        self.shuffled = [Shuffled(members, seed) for members in self.sources]
        self.widths = np.array([max(map(len, sides)) for sides in zip(self.chosen, self.rejected, strict=True)])
        # The reference's log-probabilities of chosen and rejected, (2, pairs), filled in before training where the loss asks.
        self.reference: Tensor | None = None
        self._epoch = lru_cache(maxsize=1)(self._batches)

    @staticmethod
    def encode(tok: Tokenizer, prompt: Conversation, answer: str) -> Example:
        return Example.of(*marked(tok, prompt, answer))

    def __len__(self) -> int:
        return len(self.chosen)

    def width(self, which: Sequence[int]) -> int:
        """Tokens per row of a batch of these pairs: in few different lengths, see loss.whole."""
        return min(self.block_size, -(-int(self.widths[which].max()) // 32) * 32)

    def rows(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The chosen rows of these pairs and then the rejected ones, padded at the right: (2n, T) inputs and targets."""
        sides = [self.chosen[i] for i in which] + [self.rejected[i] for i in which]
        shape = (len(sides), self.width(which))
        inputs, targets = np.zeros(shape, np.int64), np.full(shape, IGNORE, np.int64)
        for row, side in enumerate(sides):
            inputs[row, : len(side)], targets[row, : len(side)] = side.inputs, side.targets
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def order(self, numbers: range) -> list[int]:
        """Which pairs stand at these places of the endless order: every epoch of a source has all of its pairs once."""
        return [self.shuffled[source].row(number) for source, number in map(self.mixture.pick, numbers)]

    def _batches(self, epoch: int, batch_size: int) -> list[np.ndarray]:
        """The pairs of an epoch, all of them once where there is one source, in batches of nearly equal size and like length, longest pair first.

        Only within a pool of a few batches are pairs sorted by length, so that batches differ from epoch to epoch.
        """
        numbers = range(epoch * len(self), (epoch + 1) * len(self))
        batches = np.array_split(np.array(self.order(numbers)), self.steps_per_epoch(batch_size))
        for start in range(0, len(batches), POOL):
            pool = np.concatenate(batches[start : start + POOL])
            pool = pool[np.argsort(-self.widths[pool], kind="stable")]
            batches[start : start + POOL] = np.array_split(pool, len(batches[start : start + POOL]))
        order = np.random.default_rng([self.seed, epoch]).permutation(len(batches))
        return [batches[i] for i in order]

    def steps_per_epoch(self, batch_size: int) -> int:
        return -(-len(self) // batch_size)

    def which(self, step: int, batch_size: int) -> list[int]:
        """The pairs of a step, counted from 0."""
        epoch, number = divmod(step, self.steps_per_epoch(batch_size))
        return self._epoch(epoch, batch_size)[number].tolist()

    def batch(self, step: int, batch_size: int, micro: int) -> list[Batch]:
        """The pairs of a step, in micro-batches with their reference log-probabilities."""
        which = self.which(step, batch_size)
        parts = []
        for start in range(0, len(which), micro):
            part = which[start : start + micro]
            inputs, targets = self.rows(part)
            reference = () if self.reference is None else (self.reference[:, part].flatten(),)
            parts.append(Batch((inputs, targets, *reference), len(part), inputs.numel()))
        return parts

    def padding(self, batch_size: int, micro: int) -> float:
        """Share of the tokens of the first epoch that are padding."""
        run = real = 0
        for step in range(self.steps_per_epoch(batch_size)):
            which = self.which(step, batch_size)
            real += sum(len(self.chosen[i]) + len(self.rejected[i]) for i in which)
            run += sum(
                2 * len(part) * self.width(part) for part in (which[i : i + micro] for i in range(0, len(which), micro))
            )
        return 1 - real / run

    def log_probs(self, model: GPT, dtype: torch.dtype) -> Tensor:
        """Summed log-probabilities of all chosen and all rejected answers, (2, pairs), on the CPU."""
        sums = torch.zeros(2, len(self))
        device = model.embed.weight.device
        order = np.argsort(self.widths, kind="stable").tolist()
        with torch.no_grad():
            at_once = max(1, min(32, 8192 // (2 * self.width(order))))  # of long texts fewer, which take memory
            for start in range(0, len(order), at_once):
                part = order[start : start + at_once]
                inputs, targets = self.rows(part)
                of_part = evaluation.answer_log_probs(model, inputs.to(device), targets.to(device), dtype)
                sums[:, part] = of_part.cpu().view(2, -1)
        return sums

    def lengths(self) -> Tensor:
        """Supervised tokens of all chosen and all rejected answers, (2, pairs)."""
        sides = (self.chosen, self.rejected)
        return torch.tensor([[int((one.targets != IGNORE).sum()) for one in side] for side in sides])


def main() -> None:
    cfg = config.load("dpo", Config)
    cfg.train.check()
    cfg.optim.check()
    distributed.check(cfg.parallel, cfg.optim.offload)
    cfg.lora.check()
    cfg.dpo.check()
    if cfg.train.compile:
        raise UserError(
            "train.compile=true: pairs come in many lengths, each of which would be compiled; leave it false"
        )
    if cfg.train.branch:
        raise UserError(
            f"train.resume={cfg.train.resume}: control and DPO cannot both branch from it; choose true or false"
        )
    cfg.data.check(("onpolicy", "mine", "hub"))
    out = Path(cfg.out)
    loaded = checkpoint.load(cfg.checkpoint or out / "ckpt_sft.pt")
    if loaded.config.get("dropout"):
        console.print(f"dropout {loaded.config['dropout']} is set to 0: DPO compares exact log-probabilities")
        loaded.config["dropout"] = 0.0
    tok = loaded.tokenizer
    device = distributed.start(machine.pick_device(cfg.device))
    dtype, why = distributed.from_main(lambda: machine.pick_dtype(cfg.train.dtype, device))
    model = GPT.from_loaded(loaded, device)
    start = loaded.digest
    lora.attach(model, model.config.to_dict(), cfg.lora, cfg.train.seed)
    if cfg.lora.rank:  # a second copy of the adapters to start from again, not of the model
        loaded.state_dict = {name: tensor.clone() for name, tensor in lora.trained(model).items()}
    block = longest_allowed(model.config.block_size, cfg.max_length)
    model.recompute = cfg.train.recompute
    cached = CachedGPT.sharing(model)
    log = RunLog(out, "dpo", config.plain(cfg), cfg.log, cfg.train.resume)
    log.say(f"{machine.describe(device)}; {why}")
    if cfg.lora.rank:
        log.say(lora.describe(model, cfg.lora))

    dev: list[tasks.Item] = []  # held-out items of the paired families, each of them several times
    if cfg.data.kind == "onpolicy":
        with distributed.main_first():
            speeches = shakespeare.speeches()
        _, every = evaluation.heldout_items(speeches)
        without = tasks.FAMILIES.keys() - {item.family for item in every}  # those that would quote a corpus
        families = [name for name in cfg.dpo.families if name not in without]
        if without & set(cfg.dpo.families):
            log.say(f"no speeches to quote: without the families {', '.join(sorted(without))}")
        prompts = tasks.make_items(cfg.data.generate, heldout=False, seed=1, speeches=speeches, families=families)
        dev = [item for item in every if item.family in families for _ in range(4)]

        def sampled(items: list[tasks.Item], seed: int, title: str) -> tuple[list[Pair], dict[str, int]]:
            return distributed.from_main(lambda: sample_pairs(cached, tok, items, cfg.dpo, seed, title))

        train_pairs, counts = sampled(prompts, cfg.train.seed, "sampling answers")
        val_pairs, _ = sampled(dev[::4], cfg.train.seed + 1, "sampling held-out answers")
    else:
        with distributed.main_first():
            train_pairs, val_pairs, counts = own_pairs(cfg.data)
    for name, kept in (("train", train_pairs), ("heldout", val_pairs)) if distributed.is_main() else ():
        lines = (
            json.dumps({"prompt": p.prompt, "chosen": p.chosen, "rejected": p.rejected}, ensure_ascii=False)
            for p in kept
        )
        write_text(out / f"pairs_{name}.jsonl", "".join(line + "\n" for line in lines))
    parts = cfg.data.parts()
    shares = [part.share for part in parts]
    pairs = PairRows(tok, train_pairs, block, cfg.train.seed, shares)
    for part, members in zip(parts, pairs.sources, strict=True):
        if not members:
            raise UserError(f"{part.name}: none of its pairs fits into {block} tokens")
        if len(parts) > 1:
            log.say(f"{part.share:.1%} of training from {part.name}, {len(members):,} pairs")
    held = PairRows(tok, val_pairs, block, cfg.train.seed, shares)
    width = pairs.width(range(len(pairs)))
    if fits := plan.set_micro_batch(model, cfg.train, cfg.optim, width, dtype, cfg.parallel, rows_each=2):
        log.say(fits)
    dropped = ", ".join(f"{count} {what}" for what, count in counts.items())
    padding = pairs.padding(cfg.train.batch_size, cfg.train.rows_at_once)
    log.say(
        f"{len(pairs)} pairs to train on ({dropped}, {pairs.too_long} too long), {len(held)} held out; "
        f"{padding:.1%} of the tokens that run are padding"
    )
    numbers = cfg.dpo.numbers()
    log.say(f"loss {cfg.dpo.loss}: " + ", ".join(f"{key} {value:g}" for key, value in numbers.items()))
    chosen_nll = numbers.pop("chosen_nll")

    def objective(policy: Tensor, reference: Tensor | None, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return preference_loss(cfg.dpo.loss, policy, reference, lengths, **numbers)

    if cfg.dpo.loss not in REFERENCE_FREE:  # adapters add nothing yet, and the reference is the model that is trained
        start_reference = time.perf_counter()
        pairs.reference = distributed.from_main(partial(pairs.log_probs, model, dtype))
        log.record(reference_s=time.perf_counter() - start_reference)
        held.reference = distributed.from_main(partial(held.log_probs, model, dtype))

    trained = distributed.network(model, cfg.parallel, log.say)

    def preference(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets, *reference = batch.inputs
        policy = evaluation.answer_log_probs(trained, inputs, targets, dtype)
        lengths = (targets != IGNORE).sum(1)
        losses, reward_chosen, reward_rejected = objective(policy, reference[0] if reference else None, lengths)
        total = losses.sum() - chosen_nll * (policy / lengths)[: len(losses)].sum()
        margin = reward_chosen - reward_rejected
        numbers = {"preference_loss": losses.sum(), "margin": margin.sum(), "accuracy": (margin > 0).float().sum()}
        return total, {name: value.detach() for name, value in numbers.items()}

    def likelihood(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        inputs, targets = batch.inputs
        chosen = evaluation.answer_log_probs(trained, inputs, targets, dtype)
        return -(chosen / (targets != IGNORE).sum(1)).sum(), {}

    def evaluate() -> dict[str, float]:
        policy, reference = held.log_probs(model, dtype).flatten(), held.reference
        reference = reference.flatten() if reference is not None else None
        losses, good, bad = objective(policy, reference, held.lengths().flatten())
        metrics = {
            "preference_loss": float(losses.mean()),
            "reward_chosen": float(good.mean()),
            "reward_rejected": float(bad.mean()),
            "margin": float((good - bad).mean()),
            "accuracy": float((good > bad).float().mean()),
        }
        if reference is not None:
            # An estimate of KL(reference || policy) in nats per answer, when the pairs were sampled from the reference.
            metrics["kl"] = float((reference - policy).mean())
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
        return pairs.batch(step, cfg.train.batch_size, cfg.train.rows_at_once)

    def chosen_only(step: int) -> list[Batch]:
        halves = ((b, len(b.inputs[0]) // 2) for b in batches(step))
        return [Batch((b.inputs[0][:n], b.inputs[1][:n]), b.weight, b.tokens // 2) for b, n in halves]

    sides = pairs.chosen + pairs.rejected
    share = sum(int((side.targets != IGNORE).sum()) for side in sides) / sum(map(len, sides))
    flops = model.flops_per_token(sum(map(len, sides)) // len(sides), share)

    digests = {"start": start, "pairs": sources.digest([vars(pair) for pair in train_pairs])}
    made_from = config.plain(cfg) | digests | {"files": sources.fingerprints(cfg.data)}

    def finish(name: str, stage_log: RunLog, batches: Callable[[int], list[Batch]], loss: Loss, lr: float) -> Path:
        """Train from the SFT weights with this loss, keep the best by held-out wins, and save. Returns where."""
        monitor = "liked" if dev else "accuracy"
        stage = Stage(name, batches, loss, evaluate, sample, flops, "/pair", monitor, made_from, trained)
        resume = distributed.from_main(lambda: cfg.train.resume and (out / f"resume_{name}.pt").exists())
        settings = TrainConfig(**{**vars(cfg.train), "lr": lr, "resume": resume})
        result = train(model, stage, settings, cfg.optim, out, stage_log)
        if not distributed.is_main():
            return out
        shown = [
            (f"held-out pair {i}, {side}", marked(tok, pair.prompt, getattr(pair, side)))
            for i, pair in enumerate(val_pairs[:2], 1)
            for side in ("chosen", "rejected")
        ]
        stage_log.record(readings=[evaluation.reading(model, tok, title, *text) for title, text in shown])
        stage_log.plot(
            [("preference_loss", f"{cfg.dpo.loss} loss (/pair)"), ("margin", "reward margin"), (monitor, monitor)]
        )
        log.say(f"{name}: {result.step} steps; best " + ", ".join(f"{k} {v:.3f}" for k, v in result.metrics.items()))
        if cfg.lora.rank:
            lora.save(out / f"{name}_lora", model, model.config.to_dict(), cfg.lora, loaded.folder)
        return checkpoint.save(
            out,
            checkpoint.Checkpoint(
                name,
                model.config.to_dict(),
                lora.merged(model),
                tok,
                result.step,
                dict(result.metrics),
                config.plain(cfg),
                loaded.fingerprints | {"pairs": digests["pairs"]},
            ),
        )

    # Two runs follow, and the first must not leave the second with an old one's state.
    if distributed.is_main() and not cfg.train.resume:
        for name in ("control", "dpo"):
            for path in out.glob(f"resume_{name}*.pt"):
                path.unlink()
    if distributed.is_main():
        config.save(cfg, out / "config_dpo.yaml")
    log.say("control: plain fine-tuning on the chosen answers")
    control_log = RunLog(out, "control", config.plain(cfg), "none", cfg.train.resume)
    finish("control", control_log, chosen_only, likelihood, cfg.dpo.control_lr)
    lora.restore(model, loaded.state_dict)
    log.say("DPO")
    path = finish("dpo", log, batches, preference, cfg.train.lr)
    if not distributed.is_main():
        return
    log.say(
        f"checkpoint {path}, folder {out / 'dpo'}, metrics {log.path}, plot {log.plot_path}, pairs {out / 'pairs_train.jsonl'}, "
        f"report {report.refresh(out)}"
    )
    log.say("next: python evaluate.py (all stages side by side), make chat (talk to it)")
    log.close()


if __name__ == "__main__":
    run(main)
