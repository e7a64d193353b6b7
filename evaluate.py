"""The stages side by side: what each of them added, on items and text that none of them saw.

    python evaluate.py                                   # every ckpt_<stage>.pt under checkpoints/

Writes results.json, and prints a table and three sample chats. And any checkpoints, on whatever you have:

    python evaluate.py checkpoint=PATH text=FILE choices=FILE generate=FILE
    python evaluate.py checkpoint=[PATH,PATH] families=true

Writes the same results.json, and prints a table with 95 % confidence intervals. docs/evaluate.md has the conventions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from data import shakespeare
from dpo import Pair, PairRows
from kv_cache import CachedGPT
from pocketgpt import chat_template, checkpoint, config, evaluation, likelihood, report, shapes, sources, tasks
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.files import sha256_file, write_json
from pocketgpt.likelihood import Encoded
from pocketgpt.metrics import bar, console
from pocketgpt.questions import Prompt, Question, to_prompt, to_question
from pocketgpt.sampling import Settings
from pocketgpt.tokenizer import Tokenizer
from pretrain import held_out

EXAMPLES = 5  # answers of generate that results.json quotes
STAGES = {"base": "base", "sft": "SFT", "control": "SFT on chosen", "dpo": "DPO"}
CHATS = (
    ["Hello!", "What is 12 + 30?"],
    ["Tell a story about Rosalind in the forest that ends with a wedding.", "Where was Rosalind?"],
    ["Give me a line spoken by ROMEO."],
)


@dataclass
class Config:
    """See configs/evaluate.yaml for units and meaning."""

    out: str
    device: str
    items: int
    temperature: float
    seed: int
    checkpoint: Any
    text: str
    choices: str
    generate: str
    families: bool
    prompts: str
    limit: int
    stride: int
    new_tokens: int
    samples: int
    batch_tokens: int

    def check(self) -> None:
        """Raises UserError when a number is out of its range."""
        if not 1 <= self.items <= evaluation.TEST_ITEMS:
            raise UserError(
                f"items is {self.items}: it must be from 1 to {evaluation.TEST_ITEMS}, what is set aside per family"
            )
        Settings(temperature=self.temperature)  # refused now rather than after the greedy answers
        if not 0 <= self.seed < 1 << 32:
            raise UserError(f"seed is {self.seed}: it must be at least 0 and below 2^32")
        if self.prompts not in ("auto", "plain", "chat"):
            raise UserError(f"prompts is {self.prompts!r}: choose auto, plain or chat")
        for key, least in (("limit", 0), ("stride", 0), ("samples", 0), ("new_tokens", 1), ("batch_tokens", 1)):
            if not least <= getattr(self, key) < 1 << 40:
                raise UserError(f"{key} is {getattr(self, key)}: it must be at least {least}")


# --- the stages -----------------------------------------------------------------------------------------------------


def held_out_pairs(out: Path) -> list[Pair]:
    """The preference pairs that dpo.py held out; none if it has not run."""
    path = out / "pairs_heldout.jsonl"
    if not path.exists():
        return []
    return [Pair(*shapes.preference(row, where)) for where, row in sources.rows(path)]


def chat(model: CachedGPT, tok: Tokenizer, turns: list[str]) -> list[chat_template.Message]:
    """Let the model answer these user turns one after another, greedily."""
    messages: list[chat_template.Message] = []
    for text in turns:
        messages.append({"role": "user", "content": text})
        (answer,) = evaluation.answer_many(model, tok, [messages], evaluation.GREEDY, seed=0)
        messages.append({"role": "assistant", "content": answer})
    return messages


def measure(
    path: Path, items: list[tasks.Item], pairs: list[Pair], cfg: Config, device: torch.device
) -> dict[str, Any]:
    """All numbers of one checkpoint, as plain values; the entry `score` holds the sampled answers behind them."""
    loaded = checkpoint.load(path)
    model = CachedGPT.from_loaded(loaded, device)
    tok, name = loaded.tokenizer, STAGES.get(loaded.stage, loaded.stage)
    sampling = Settings(temperature=cfg.temperature)
    greedy = evaluation.score_with_bar(f"{name}: greedy answers", model, tok, items)
    numbers: dict[str, Any] = {
        "families": greedy.by_family(),
        "formats": greedy.rate(evaluation.FORMATS),
        "greedy": greedy.rate(),
        "answer_characters": greedy.mean_length(),
        "chats": [chat(model, tok, turns) for turns in CHATS],
    }
    if loaded.stage != "base":  # it does not know where an answer ends, so sampling it takes long and shows nothing
        sampled = evaluation.score_with_bar(f"{name}: sampled answers", model, tok, items, sampling, cfg.seed)
        numbers["sampled"] = sampled.rate()
        numbers["liked"] = (sum(sampled.liked), len(sampled.liked))
        numbers["score"] = sampled
    if pairs:
        chosen, rejected = PairRows(tok, pairs, model.config.block_size, 0).log_probs(model, torch.float32)
        numbers["preference"] = (int((chosen > rejected).sum()), len(chosen))
    return numbers


def held_out_bits(out: Path, stages: list[str], device: torch.device) -> dict[str, float]:
    """Bits per byte of every stage on the text that pretraining held out."""
    corpus = held_out(checkpoint.load(out / "ckpt_base.pt"))
    dtype, _ = machine.pick_dtype("auto", device)
    bits = {}
    for stage in stages:
        model = CachedGPT.from_checkpoint(out / f"ckpt_{stage}.pt", device)
        bits[stage] = evaluation.bits_per_byte(model, corpus.tokenizer, corpus.val, dtype)
    return bits


def measure_all(out: Path, stages: list[str], cfg: Config) -> dict[str, Any]:
    """Everything that `show` prints."""
    device = machine.pick_device(cfg.device)
    items = evaluation.heldout_items(shakespeare.speeches(), cfg.items)[0]
    pairs = held_out_pairs(out)
    measured = {stage: measure(out / f"ckpt_{stage}.pt", items, pairs, cfg, device) for stage in stages}
    for stage, bits in held_out_bits(out, stages, device).items() if "base" in stages else ():
        measured[stage]["bits_per_byte"] = bits
    scores = {stage: numbers.pop("score", None) for stage, numbers in measured.items()}
    for stage in ("control", "dpo"):
        if stage in stages and "sft" in stages:
            won, decided = evaluation.wins(scores[stage], scores["sft"])
            measured[stage]["against_sft"] = {
                "won": won,
                "decided": decided,
                "interval": evaluation.wilson(won, decided),
            }
    return {"machine": machine.describe(device), "items_per_family": cfg.items, "stages": measured}


def read_results(path: Path) -> dict[str, Any]:
    """What an earlier run wrote; nothing when that is not there, or damaged, and then it is measured again."""
    if not path.exists():
        return {}
    try:
        results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return results
    except ValueError:
        console.print(f"{path} is damaged and will be made again", markup=False)
        return {}


def show(results: dict[str, Any]) -> None:
    """The table, the comparison of the sampled answers, and the sample chats of the last stage."""
    stages: dict[str, Any] = results["stages"]
    title = f"Held out: {results['items_per_family']} items per family, greedy answers that pass their check"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for stage in stages:
        table.add_column(STAGES[stage], justify="right")

    def row(label: str, value: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(label, *(value(numbers) for numbers in stages.values()))

    row("text (bits per byte)", lambda n: f"{n['bits_per_byte']:.3f}" if "bits_per_byte" in n else "-")
    for family in next(iter(stages.values()))["families"]:
        row(family, lambda n, family=family: evaluation.percent(n["families"][family]))  # type: ignore[misc]
    row("all families", lambda n: evaluation.percent(n["greedy"]))
    row("format families", lambda n: evaluation.percent(n["formats"]))
    row("all families, sampled", lambda n: evaluation.percent(n.get("sampled", (0, 0))))
    row("sampled, and in style", lambda n: evaluation.percent(n.get("liked", (0, 0))))
    row("preference accuracy", lambda n: evaluation.percent(n.get("preference", (0, 0))))
    row("answer length (characters)", lambda n: f"{n['answer_characters']:.0f}")
    console.print(table)
    for stage, numbers in stages.items():
        if "against_sft" in numbers:
            duel = numbers["against_sft"]
            low, high = duel["interval"]
            console.print(
                f"sampled {STAGES[stage]} answers against sampled SFT answers: {duel['won']} of {duel['decided']} decided "
                f"items won, {duel['won'] / max(1, duel['decided']):.1%} (95 % interval {low:.1%} to {high:.1%})"
            )
    last = list(stages)[-1]
    console.print(f"\nThree chats with {STAGES[last]}, greedy:\n")
    for messages in stages[last]["chats"]:
        for message in messages:
            text = message["content"].replace("\n", "\n" + " " * 13)
            console.print(f"  {message['role']:>9}  {text}", markup=False)
        console.print()


# --- any checkpoint -------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """What the checkpoints are scored on, read before the first of them is."""

    texts: list[str]
    questions: list[Question]
    prompts: list[Prompt]
    items: list[tasks.Item]

    @classmethod
    def read(cls, cfg: Config) -> Asked:
        limit = cfg.limit or None
        texts = list(islice(sources.any_text(Path(cfg.text)), limit)) if cfg.text else []
        questions = (
            [to_question(row, where) for where, row in islice(sources.rows(Path(cfg.choices)), limit)]
            if cfg.choices
            else []
        )
        prompts = (
            [to_prompt(row, where) for where, row in islice(sources.rows(Path(cfg.generate)), limit)]
            if cfg.generate
            else []
        )
        wanted = cfg.families or not (texts or questions or prompts)
        items = evaluation.heldout_items(shakespeare.speeches(), cfg.items)[0] if wanted else []
        return cls(texts, questions, prompts, items)


def share(passed: int, asked: int) -> dict[str, Any]:
    """A share with its 95 % interval, as it stands in results.json."""
    return {
        "passed": passed,
        "asked": asked,
        "share": passed / asked,
        "interval": list(evaluation.wilson(passed, asked)),
    }


def score_text(model: CachedGPT, tok: Tokenizer, texts: list[str], cfg: Config, name: str) -> dict[str, Any]:
    """Bits per byte: every document stands behind one end-of-text id, and pays for all its tokens and nothing else."""
    stride = cfg.stride or max(1, model.config.block_size // 2)
    if stride > model.config.block_size:
        raise UserError(f"stride is {stride}: {name} takes {model.config.block_size} tokens, and each must be counted")
    tokens = [np.array(ids, np.int64) for ids in tok.encode_batch(texts)]
    progress, task = bar(f"{name}: text", sum(map(len, tokens)))
    with progress:
        tick = partial(progress.advance, task)
        log_probs = likelihood.document_log_probs(
            model, tokens, tok.eot_id, stride=stride, batch_tokens=cfg.batch_tokens, tick=tick
        )
    return {"stride": stride, **likelihood.text_bits(texts, tokens, log_probs, tok.byte_lengths())}


def score_choices(
    model: CachedGPT, tok: Tokenizer, questions: list[Question], chat: bool, batch_tokens: int, name: str
) -> dict[str, Any]:
    """Accuracy of the likeliest choice, and of the one that is likeliest per byte."""

    def encode(question: Question) -> Encoded:
        if chat:
            context = chat_template.render_prompt(tok, [{"role": "user", "content": question.query}])
            return Encoded(context, tok.encode_batch(question.choices))
        pairs = [likelihood.encode_pair(tok, question.query, f" {choice}") for choice in question.choices]
        return Encoded(pairs[0][0], [continuation for _, continuation in pairs])

    encoded = [encode(question) for question in questions]
    fits = [i for i, one in enumerate(encoded) if len(one) <= model.config.block_size]
    if not fits:
        raise UserError(
            f"{name}: none of the {len(questions)} questions fits into its {model.config.block_size} tokens"
        )
    progress, task = bar(f"{name}: choices", len(fits))
    with progress:
        tick = partial(progress.advance, task)
        scored = likelihood.choice_log_probs(model, [encoded[i] for i in fits], batch_tokens=batch_tokens, tick=tick)
    plain = normed = 0
    for i, values in zip(fits, scored, strict=True):
        sizes = [len(choice.encode()) for choice in questions[i].choices]
        plain += int(np.argmax(values)) == questions[i].gold
        normed += int(np.argmax(np.array(values) / sizes)) == questions[i].gold
    return {
        "acc": share(plain, len(fits)),
        "acc_norm": share(normed, len(fits)),
        "prompts": "chat" if chat else "plain",
        "chance": sum(1 / len(questions[i].choices) for i in fits) / len(fits),
        "too_long": len(questions) - len(fits),
    }


def score_prompts(
    model: CachedGPT, tok: Tokenizer, prompts: list[Prompt], chat: bool, cfg: Config, name: str
) -> dict[str, Any]:
    """The share of answers that pass the rules of their row."""
    encoded = [
        chat_template.render_prompt(tok, prompt.messages) if chat else tok.encode(prompt.plain or "") or [tok.eot_id]
        for prompt in prompts
    ]
    fits = [i for i, ids in enumerate(encoded) if len(ids) <= model.config.block_size]
    if not fits:
        raise UserError(f"{name}: none of the {len(prompts)} prompts fits into its {model.config.block_size} tokens")
    every = [i for i in fits for _ in range(cfg.samples or 1)]
    seeds = torch.randint(2**63 - 1, (len(every),), generator=torch.Generator().manual_seed(cfg.seed)).tolist()
    progress, task = bar(f"{name}: answers", len(every))
    with progress:
        answers = evaluation.complete(
            model,
            tok,
            [encoded[i] for i in every],
            Settings(temperature=cfg.temperature) if cfg.samples else evaluation.GREEDY,
            seeds,
            [prompts[i].stop for i in every],
            new_tokens=cfg.new_tokens,
            batch_tokens=cfg.batch_tokens,
            tick=partial(progress.advance, task),
        )
    passed = [prompts[i].check(answer) for i, answer in zip(every, answers, strict=True)]
    result = share(sum(passed), len(passed))
    if cfg.samples > 1:  # the answers to one prompt are no independent draws: their prompts are
        by_prompt = [sum(passed[i : i + cfg.samples]) for i in range(0, len(passed), cfg.samples)]
        interval = likelihood.ratio_interval(by_prompt, [cfg.samples] * len(by_prompt))
        result["interval"] = [max(0.0, interval[0]), min(1.0, interval[1])] if interval else [0.0, 1.0]
    examples = [
        {"prompt": prompts[i].messages[-1]["content"], "answer": answer, "passed": ok}
        for i, answer, ok in list(zip(every, answers, passed, strict=True))[:EXAMPLES]
    ]
    return result | {
        "prompts": "chat" if chat else "plain",
        "samples": cfg.samples,
        "too_long": len(prompts) - len(fits),
        "examples": examples,
    }


def score(path: str, asked: Asked, cfg: Config, device: torch.device) -> dict[str, Any]:
    """All that is asked about one checkpoint: its entry in results.json."""
    loaded = checkpoint.load(path)
    model, tok = CachedGPT.from_loaded(loaded, device), loaded.tokenizer
    taught = loaded.stage != "base" and loaded.tokenizer.template != chat_template.PLAIN_TEMPLATE
    chat = cfg.prompts == "chat" or (cfg.prompts == "auto" and taught)
    if not chat and any(prompt.plain is None for prompt in asked.prompts):
        raise UserError(f"{cfg.generate}: a row holds messages, and prompts to {path} are plain: set prompts=chat")
    numbers: dict[str, Any] = {
        "stage": loaded.stage,
        "digest": loaded.digest,
        "parameters": model.n_parameters(),
        "context": model.config.block_size,
    }
    if asked.texts:
        numbers["text"] = {"file": cfg.text, **score_text(model, tok, asked.texts, cfg, path)}
    if asked.questions:
        scored = score_choices(model, tok, asked.questions, cfg.prompts == "chat", cfg.batch_tokens, path)
        numbers["choices"] = {"file": cfg.choices, **scored}
    if asked.prompts:
        numbers["generate"] = {"file": cfg.generate, **score_prompts(model, tok, asked.prompts, chat, cfg, path)}
    if asked.items:
        families = evaluation.score_with_bar(f"{path}: families", model, tok, asked.items)
        numbers["families"] = {name: share(*pair) for name, pair in families.by_family().items()}
        numbers["families"]["all families"] = share(*families.rate())
    return numbers


def show_scores(scores: dict[str, dict[str, Any]]) -> None:
    """One line per measure and checkpoint, in 60 columns, and what there is to know about each checkpoint."""
    table = Table(box=None, pad_edge=False, title="With 95 % confidence intervals", title_justify="left")
    table.add_column("", no_wrap=True)
    for heading in ("", "interval", "of"):
        table.add_column(heading, justify="right", no_wrap=True)

    def rows(label: str, values: list[dict[str, Any] | None]) -> None:
        if not any(values):
            return
        if len(values) > 1:
            table.add_row(label)
        for name, value in zip(scores, values, strict=True):
            first = f"  {name if len(name) <= 22 else '…' + name[-21:]}" if len(values) > 1 else label
            table.add_row(first, *(cells(value) if value else "-"))

    rows("text (bits per byte)", [numbers.get("text") for numbers in scores.values()])
    for key in ("acc", "acc_norm"):
        rows(f"choices: {key}", [numbers.get("choices", {}).get(key) for numbers in scores.values()])
    rows("generate", [numbers.get("generate") for numbers in scores.values()])
    for family in next(iter(scores.values())).get("families", {}):
        rows(family, [numbers["families"][family] for numbers in scores.values()])
    console.print(table, soft_wrap=False)
    for name, numbers in scores.items():
        size = f"{numbers['parameters'] / 1e6:.2f} M parameters, a context of {numbers['context']} tokens"
        console.print(f"{name}: {size}", markup=False)
        for what in (what for what in ("choices", "generate") if what in numbers):
            console.print(f"{name}: {numbers[what]['prompts']} prompts for {what}", markup=False)
            if left_out := numbers[what]["too_long"]:
                console.print(f"{name}: {left_out} rows of {what} are longer than its context: left out", markup=False)
        if "choices" in numbers:
            console.print(f"{name}: guessing would choose right in {numbers['choices']['chance']:.1%}", markup=False)


def cells(value: dict[str, Any]) -> tuple[str, str, str]:
    """The number, its interval, and how much it was measured on."""
    bits = "bits_per_byte" in value
    form = ".4f" if bits else ".1%"
    interval = "-" if value["interval"] is None else " - ".join(format(end, form) for end in value["interval"])
    number, of = (value["bits_per_byte"], value["bytes"]) if bits else (value["share"], value["asked"])
    return format(number, form), interval, f"{of:,}"


def score_checkpoints(cfg: Config) -> None:
    """Score the checkpoints that are named, add them to results.json, and show them."""
    named = cfg.checkpoint if isinstance(cfg.checkpoint, list) else [cfg.checkpoint]
    if not all(isinstance(path, str) and path for path in named):
        raise UserError(f"checkpoint is {cfg.checkpoint!r}: give a path, or paths in brackets: checkpoint=[A,B]")
    for path in named:
        if not Path(path).exists():
            raise UserError(f"{path}: no checkpoint there; name a ckpt_<stage>.pt or a model folder")
    device = machine.pick_device(cfg.device)
    asked = Asked.read(cfg)
    scores = {path: score(path, asked, cfg, device) for path in dict.fromkeys(named)}
    path = Path(cfg.out) / "results.json"
    results = {"stages": {}} | read_results(path)
    before = results.get("checkpoints", {})
    for name, numbers in scores.items():  # what was measured before of the same model stays
        same = before.get(name, {}).get("digest") == numbers["digest"]
        before[name] = (before[name] if same else {}) | numbers
    show_scores(scores)  # first, as a disk may be full
    write_json(path, results | {"checkpoints": before})
    console.print(f"results {path}, report {report.refresh(Path(cfg.out))}", markup=False)


def main() -> None:
    cfg = config.load("evaluate", Config)
    cfg.check()
    if cfg.checkpoint:
        score_checkpoints(cfg)
        return
    for key in ("text", "choices", "generate", "families"):
        if getattr(cfg, key):
            raise UserError(f"{key}= is about one checkpoint or several: name them with checkpoint=PATH")
    out = Path(cfg.out)
    stages = [stage for stage in STAGES if (out / f"ckpt_{stage}.pt").exists()]
    if not stages:
        raise UserError(f"{out}: no checkpoint there; run `make pretrain` first, or name another folder with out=")
    settings = {key: getattr(cfg, key) for key in ("out", "device", "items", "temperature", "seed")}
    made_from = settings | {stage: sha256_file(out / f"ckpt_{stage}.pt") for stage in stages}
    path = out / "results.json"
    results = read_results(path)
    if results.get("made_from") != made_from:
        scores = {"checkpoints": results["checkpoints"]} if "checkpoints" in results else {}
        results = measure_all(out, stages, cfg) | {"made_from": made_from} | scores
        write_json(path, results)
    show(results)
    where = f"checkpoint folder {(out / 'latest').resolve()}, plots {out}/plot_*.png, metrics {out}/metrics_*.jsonl, results {path}, report {report.refresh(out)}"
    console.print(where, markup=False)
    console.print("next: make chat (talk to it), python kv_cache.py (watch the cache)")


if __name__ == "__main__":
    run(main)
