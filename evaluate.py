"""The stages side by side: what each of them added, on items and text that none of them saw.

    python evaluate.py                                   # every ckpt_<stage>.pt under checkpoints/

Writes results.json, and prints a table and three sample chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from data import shakespeare
from dpo import Pair, PairRows
from kv_cache import CachedGPT
from pocketgpt import chat_template, checkpoint, config, evaluation, report, shapes, sources, tasks
from pocketgpt import device as machine
from pocketgpt.errors import UserError, run
from pocketgpt.files import sha256_file, write_json
from pocketgpt.metrics import console
from pocketgpt.sampling import Settings
from pocketgpt.tokenizer import Tokenizer
from pretrain import held_out

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


def main() -> None:
    cfg = config.load("evaluate", Config)
    if not 1 <= cfg.items <= evaluation.TEST_ITEMS:
        raise UserError(
            f"items is {cfg.items}: it must be from 1 to {evaluation.TEST_ITEMS}, what is set aside per family"
        )
    Settings(temperature=cfg.temperature)  # refused now rather than after the greedy answers
    if not 0 <= cfg.seed < 1 << 32:
        raise UserError(f"seed is {cfg.seed}: it must be at least 0 and below 2^32")
    out = Path(cfg.out)
    stages = [stage for stage in STAGES if (out / f"ckpt_{stage}.pt").exists()]
    if not stages:
        raise UserError(f"{out}: no checkpoint there; run `make pretrain` first, or name another folder with out=")
    made_from = config.plain(cfg) | {stage: sha256_file(out / f"ckpt_{stage}.pt") for stage in stages}
    path = out / "results.json"
    results = read_results(path)
    if results.get("made_from") != made_from:
        results = measure_all(out, stages, cfg) | {"made_from": made_from}
        write_json(path, results)
    show(results)
    where = f"checkpoint folder {(out / 'latest').resolve()}, plots {out}/plot_*.png, metrics {out}/metrics_*.jsonl, results {path}, report {report.refresh(out)}"
    console.print(where, markup=False)
    console.print("next: make chat (talk to it), python kv_cache.py (watch the cache)")


if __name__ == "__main__":
    run(main)
