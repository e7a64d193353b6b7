"""evaluate.py on checkpoints of any origin: a model that knows, one that guesses, and what the program writes and refuses."""

import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import evaluate
from base_model import GPT, GPTConfig
from pocketgpt import chat_template, checkpoint, evaluation
from pocketgpt.checkpoint import Checkpoint
from pocketgpt.errors import UserError
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.tokenizer import Tokenizer
from tests.helpers import randomise

COLOURS = ["red", "green", "blue", "as grey as the sea"]
FACTS = {f"boat {letter}": COLOURS[i % 4] for i, letter in enumerate("ABCDEFGHIJKLMNOPQRST")}


def plain(name: str) -> str:
    return f"The colour of {name} is"


def asked(name: str) -> list[chat_template.Message]:
    return [{"role": "user", "content": f"What colour is {name}?"}]


@pytest.fixture(scope="module")
def world(tok: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has learned the facts by heart, as text and as chat, one that has not, and questions."""
    folder = tmp_path_factory.mktemp("world")
    texts = []
    for name, colour in FACTS.items():
        before, after = tok.encode(plain(name)), [*tok.encode(f" {colour}"), tok.eot_id]
        texts.append((before + after, [False] * len(before) + [True] * len(after)))
        texts.append(chat_template.render(tok, [*asked(name), {"role": "assistant", "content": colour}]))
    longest = max(len(ids) for ids, _ in texts)
    inputs, targets = torch.zeros(2, len(texts), longest - 1, dtype=torch.long)
    for i, (ids, said) in enumerate(texts):
        row = torch.tensor(ids)
        inputs[i, : len(ids) - 1] = row[:-1]
        targets[i, : len(ids) - 1] = row[1:].where(torch.tensor(said[1:]), IGNORE)
        targets[i, len(ids) - 1 :] = IGNORE
    torch.manual_seed(0)
    config = GPTConfig(tok.vocab_size, 64, n_layer=1, n_head=2, n_kv_head=2, n_embd=64)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = linear_cross_entropy(model.hidden_states(inputs), model.lm_head.weight, targets, torch.float32)
        (loss / (targets != IGNORE).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage, weights in (("base", model), ("sft", model), ("dpo", randomise(GPT(config)))):
        checkpoint.save(folder, Checkpoint(stage, config.to_dict(), weights.state_dict(), tok))
    questions = [
        {"query": plain(name), "choices": COLOURS, "gold": COLOURS.index(colour)} for name, colour in FACTS.items()
    ]
    write(folder / "plain.jsonl", questions)
    write(
        folder / "chat.jsonl",
        [q | {"query": asked(name)[0]["content"]} for q, name in zip(questions, FACTS, strict=True)],
    )
    write(folder / "ask.jsonl", [{"messages": asked(name), "exact": colour} for name, colour in FACTS.items()])
    write(folder / "go_on.jsonl", [{"prompt": plain(name), "contains": colour} for name, colour in FACTS.items()])
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def program(*arguments: str) -> str:
    """What `python evaluate.py ...` prints."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", "device=cpu", *arguments])
        patch.setattr(evaluate, "console", Console(file=printed, width=60, highlight=False, soft_wrap=True))
        evaluate.main()
    return printed.getvalue()


def results(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "results.json").read_text())
    return read


def refusal(*arguments: str) -> str:
    with pytest.raises(UserError) as error:
        program(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("stage", "style"), [("base", "plain"), ("sft", "chat")])
def test_who_knows_the_facts_has_them_right_and_who_does_not_guesses(
    world: Path, tmp_path: Path, stage: str, style: str
) -> None:
    knows, guesses = f"{world}/ckpt_{stage}.pt", f"{world}/dpo"
    generate = world / {"plain": "go_on.jsonl", "chat": "ask.jsonl"}[style]
    program(
        f"checkpoint=[{knows},{guesses}]", f"choices={world}/{style}.jsonl", f"generate={generate}", f"prompts={style}",
        "new_tokens=8", f"out={tmp_path}",
    )  # fmt: skip
    found = results(tmp_path)["checkpoints"]
    for key in ("acc", "acc_norm"):
        assert found[knows]["choices"][key]["passed"] == found[knows]["choices"][key]["asked"] == 20
        low, high = found[guesses]["choices"][key]["interval"]
        assert low < 0.25 < high
    assert found[knows]["choices"]["chance"] == 0.25
    assert (found[knows]["generate"]["passed"], found[knows]["generate"]["asked"]) == (20, 20)
    assert found[guesses]["generate"]["share"] < 0.2
    assert found[knows]["choices"]["prompts"] == found[knows]["generate"]["prompts"] == style
    assert f'["{knows}","choices, acc","100.0%"' in (tmp_path / "report.html").read_text("utf-8")
    assert found[knows]["generate"]["examples"][0]["answer"].strip() == COLOURS[0]


def test_the_batch_changes_no_number(world: Path, tmp_path: Path) -> None:
    """One question, window and prompt at a time, against about sixteen."""
    asks = [
        f"text={Path(evaluate.__file__).parent / 'Makefile'}",
        f"choices={world}/plain.jsonl",
        f"generate={world}/go_on.jsonl",
    ]
    found = []
    for size in (1, 16 * 32):
        program(
            f"checkpoint={world}/base", *asks, f"batch_tokens={size}", "new_tokens=8", f"out={tmp_path / str(size)}"
        )
        found.append(results(tmp_path / str(size))["checkpoints"][f"{world}/base"])
    one, many = found
    assert one["text"].pop("bits_per_byte") == pytest.approx(many["text"].pop("bits_per_byte"), abs=1e-6)
    assert one["text"].pop("interval") == pytest.approx(many["text"].pop("interval"), abs=1e-6)
    assert one == many


def test_the_program_gives_the_numbers_of_plain_forward_passes(world: Path, tmp_path: Path, tok: Tokenizer) -> None:
    """Bits per byte of a text that fits, and both accuracies, computed by hand."""
    text = "The lamp is in the lighthouse."
    (tmp_path / "a.py").write_text(text)  # a file of any name
    rows = [
        {"query": f"{plain(name)} ", "choices": ["red", "a red bread", "I"], "gold": i % 3}
        for i, name in enumerate(FACTS)
    ]
    write(tmp_path / "q.jsonl", rows)
    program(
        f"checkpoint={world}/dpo",
        "prompts=plain",
        f"text={tmp_path}/a.py",
        f"choices={tmp_path}/q.jsonl",
        f"out={tmp_path}",
    )
    numbers = results(tmp_path)["checkpoints"][f"{world}/dpo"]
    model = GPT.from_checkpoint(world / "dpo")

    def nats(before: list[int], after: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *after]]))[0, len(before) - 1 : -1]
        return float(logits.double().log_softmax(-1)[range(len(after)), after].sum())

    bits = -nats([tok.eot_id], tok.encode(text)) / math.log(2) / 30
    assert numbers["text"]["bits_per_byte"] == pytest.approx(bits, abs=1e-5)
    right = {"acc": 0, "acc_norm": 0}
    for row in rows:
        scores = [nats(tok.encode(row["query"].strip()), tok.encode(f" {choice}")) for choice in row["choices"]]
        right["acc"] += scores.index(max(scores)) == row["gold"]
        per_byte = [score / size for score, size in zip(scores, (3, 11, 1), strict=True)]
        right["acc_norm"] += per_byte.index(max(per_byte)) == row["gold"]
    assert right["acc"] != right["acc_norm"], "or one could stand for the other"
    for key, passed in right.items():
        low, high = evaluation.wilson(passed, 20)
        assert numbers["choices"][key] == {"passed": passed, "asked": 20, "share": passed / 20, "interval": [low, high]}


def test_results_grow_and_forget_what_another_model_scored(world: Path, tmp_path: Path) -> None:
    model, out = f"checkpoint={tmp_path}/model.pt", f"out={tmp_path}"
    (tmp_path / "results.json").write_text(json.dumps({"stages": {"base": 1}, "made_from": {"x": "y"}}))
    (tmp_path / "model.pt").write_bytes((world / "ckpt_base.pt").read_bytes())
    program(model, f"choices={world}/plain.jsonl", "limit=3", out)
    program(model, f"generate={world}/go_on.jsonl", "limit=2", "new_tokens=1", out)
    found = results(tmp_path)
    assert (found["stages"], found["made_from"]) == ({"base": 1}, {"x": "y"}), "the stages' table is left alone"
    entry = found["checkpoints"][f"{tmp_path}/model.pt"]
    assert (entry["choices"]["acc"]["asked"], entry["generate"]["asked"]) == (3, 2)
    (tmp_path / "model.pt").write_bytes((world / "ckpt_dpo.pt").read_bytes())
    program(model, f"generate={world}/go_on.jsonl", "limit=2", "new_tokens=1", out)
    assert "choices" not in results(tmp_path)["checkpoints"][f"{tmp_path}/model.pt"]


def test_the_stages_keep_the_scores_of_other_checkpoints(
    monkeypatch: pytest.MonkeyPatch, world: Path, tmp_path: Path
) -> None:
    (tmp_path / "ckpt_sft.pt").write_bytes((world / "ckpt_sft.pt").read_bytes())
    program(f"checkpoint={world}/base", f"choices={world}/plain.jsonl", "limit=3", f"out={tmp_path}")
    before = results(tmp_path)["checkpoints"]
    monkeypatch.setattr(evaluate, "measure_all", lambda *_: {"stages": {"sft": {}}})
    monkeypatch.setattr(evaluate, "show", lambda *_: None)
    program(f"out={tmp_path}")
    found = results(tmp_path)
    assert found["stages"] == {"sft": {}} and found["checkpoints"] == before
    monkeypatch.setattr(evaluate, "measure_all", lambda *_: 1 / 0)
    program(f"out={tmp_path}", "batch_tokens=5", "limit=1")  # which are not about the stages: nothing is measured again


def test_the_table_fits_into_60_columns(world: Path, tmp_path: Path) -> None:
    rows = [{"query": "word " * n, "choices": COLOURS, "gold": 0} for n in (1, 100, 2)]
    write(tmp_path / "q.jsonl", rows)
    asks = [f"text={world}/plain.jsonl", "limit=3", f"choices={tmp_path}/q.jsonl", f"generate={world}/go_on.jsonl"]
    (tmp_path / "t.txt").write_text("x " * 700_000)
    asks[0] = f"text={world}/config_text.txt"
    (world / "config_text.txt").write_text("The keeper lit the lamp. " * 40)
    printed = program(
        f"checkpoint=[{world}/base,{world}/ckpt_dpo.pt]",
        *asks,
        "new_tokens=3",
        "families=true",
        "items=1",
        f"out={tmp_path}",
    )
    lines = printed.splitlines()
    table = lines[: next(i for i, line in enumerate(lines) if "parameters" in line)]
    assert max(map(len, table)) <= 60
    for label in ("text (bits per byte)", "choices: acc", "choices: acc_norm", "generate", "all families", "add"):
        assert label in map(str.strip, table)
    assert sum(line.lstrip(" …").endswith(tuple("0123456789")) for line in table) == 2 * (len(table) - 2) / 3
    assert f"{world}/base: 1 rows of choices are longer than its context: left out" in printed
    assert f"{world}/base: guessing would choose right in 25.0%" in printed
    single = program(f"checkpoint={world}/base", *asks[:2], f"out={tmp_path}")
    numbers = results(tmp_path)["checkpoints"][f"{world}/base"]["text"]
    low, high = numbers["interval"]
    assert f"text (bits per byte)  {numbers['bits_per_byte']:.4f}  {low:.4f} - {high:.4f}  1,000" in single


def test_sampled_answers_follow_from_the_seed_and_their_interval_from_the_prompts(world: Path, tmp_path: Path) -> None:
    found = []
    for seed in (3, 3, 4):
        program(
            f"checkpoint={world}/base", f"generate={world}/go_on.jsonl", "samples=4", "temperature=3", f"seed={seed}",
            "new_tokens=4", f"out={tmp_path}",
        )  # fmt: skip
        found.append(results(tmp_path)["checkpoints"][f"{world}/base"]["generate"])
    assert found[0] == found[1] != found[2] and found[0]["asked"] == 80
    assert len({example["answer"] for example in found[0]["examples"][:4]}) > 1, "the samples of a prompt differ"
    assert 0 < found[0]["share"] < 1 and tuple(found[0]["interval"]) != evaluation.wilson(found[0]["passed"], 80)


def test_what_just_fits_into_the_context_is_asked(world: Path, tok: Tokenizer, tmp_path: Path) -> None:
    """The last token of a choice is never read, so a question and its choice may have one more than the context."""
    words = " lamp" * 64
    assert len(tok.encode(words)) == 64
    cut = " lamp" * 63
    rows = [
        {"query": cut, "choices": ["lamp lamp", "lamp"], "gold": 0},
        {"query": words, "choices": ["lamp lamp", "lamp"], "gold": 0},
    ]
    write(tmp_path / "q.jsonl", rows)
    write(tmp_path / "g.jsonl", [{"prompt": words, "number": 1}, {"prompt": f"{words} lamp", "number": 1}])
    program(
        f"checkpoint={world}/base", f"choices={tmp_path}/q.jsonl", f"generate={tmp_path}/g.jsonl", f"out={tmp_path}"
    )
    numbers = results(tmp_path)["checkpoints"][f"{world}/base"]
    assert (numbers["choices"]["too_long"], numbers["choices"]["acc"]["asked"]) == (1, 1)
    assert (numbers["generate"]["too_long"], numbers["generate"]["asked"]) == (1, 1)


@pytest.mark.parametrize(("stage", "style"), [("base", "plain"), ("sft", "chat")])
def test_choices_are_plain_and_answers_chat_unless_the_model_knows_no_chat(
    world: Path, tmp_path: Path, stage: str, style: str
) -> None:
    asks = [f"choices={world}/plain.jsonl", f"generate={world}/go_on.jsonl", "limit=1", "new_tokens=1"]
    printed = program(f"checkpoint={world}/{stage}", *asks, f"out={tmp_path}")
    assert f"{world}/{stage}: plain prompts for choices" in printed
    assert f"{world}/{stage}: {style} prompts for generate" in printed


def test_an_answer_ends_at_its_stop_text(world: Path, tok: Tokenizer, tmp_path: Path) -> None:
    name, colour = list(FACTS.items())[3]
    write(
        tmp_path / "g.jsonl",
        [{"prompt": plain(name), "exact": "as", "stop": [" grey", "sea"]}, {"prompt": plain(name), "exact": colour}],
    )
    program(f"checkpoint={world}/base", f"generate={tmp_path}/g.jsonl", "new_tokens=9", f"out={tmp_path}")
    assert results(tmp_path)["checkpoints"][f"{world}/base"]["generate"]["passed"] == 2


def test_families_are_what_is_measured_when_nothing_else_is_asked(world: Path, tmp_path: Path) -> None:
    program(f"checkpoint={world}/dpo", "items=1", f"out={tmp_path}")
    families = results(tmp_path)["checkpoints"][f"{world}/dpo"]["families"]
    assert families["all families"] == {"passed": 0, "asked": len(families) - 1, "share": 0, "interval": list(evaluation.wilson(0, len(families) - 1))}  # fmt: skip
    assert {"add", "story", "reading"} <= families.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["text=x.txt"], "text= is about one checkpoint or several: name them with checkpoint=PATH"),
        (["families=true"], "families= is about"),
        (["checkpoint=nowhere"], "nowhere: no checkpoint there"),
        (["checkpoint={a:1}"], "give a path, or paths in brackets"),
        (["checkpoint=[{world}/base,3]"], "give a path, or paths in brackets"),
        (["checkpoint={world}/base", "prompts=maybe"], "choose auto, plain or chat"),
        (["checkpoint={world}/base", "stride=-1"], "stride is -1: it must be at least 0"),
        (["checkpoint={world}/base", "text={world}/plain.jsonl"], 'no field "text", found: query, choices, gold'),
        (["checkpoint={world}/base", "text={world}/go.txt", "stride=65"], "stride is 65: {world}/base takes 64 tokens"),
        (["checkpoint={world}/base", "text={world}/empty.md"], "empty.md: there is no text in it"),
        (["checkpoint={world}/base", "text={world}/bytes.md"], "bytes.md: byte 1 (0xff) is not UTF-8"),
        (["checkpoint={world}/base", "choices={world}/empty.jsonl"], "empty.jsonl: there are no rows in it"),
        (["checkpoint={world}/base", "choices={world}/empty.md"], "only .jsonl"),
        (["checkpoint={world}/base", "choices={world}/go_on.jsonl"], "go_on.jsonl:1: found the columns prompt, contains; expected query"),
        (["checkpoint={world}/base", "choices={world}/bad.jsonl"], 'bad.jsonl:1: field "gold" is 9: no such choice, they are 0 to 1'),
        (["checkpoint={world}/base", "generate={world}/plain.jsonl"], "plain.jsonl:1: found the columns query, choices, gold; expected one of exact"),
        (["checkpoint={world}/base", "generate={world}/ask.jsonl"], "ask.jsonl: a row holds messages, and prompts to {world}/base are plain"),
        (["checkpoint={world}/base", "choices={world}/long.jsonl"], "{world}/base: none of the 1 questions fits into its 64 tokens"),
        (["checkpoint={world}/base", "generate={world}/long.jsonl"], "{world}/base: none of the 1 prompts fits into its 64 tokens"),
    ],
)  # fmt: skip
def test_what_is_refused(world: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (world / "go.txt").write_text("go")
    (world / "empty.md").write_text(" \n")
    (world / "empty.jsonl").write_text("\n")
    (world / "bytes.md").write_bytes(b"a\xff")
    write(world / "bad.jsonl", [{"query": "q", "choices": ["a", "b"], "gold": 9}])
    write(world / "long.jsonl", [{"query": "word " * 99, "choices": ["a", "b"], "gold": 0, "exact": "a"}])
    assert message.replace("{world}", str(world)) in refusal(
        *(a.replace("{world}", str(world)) for a in arguments), f"out={tmp_path}"
    )
    assert not (tmp_path / "results.json").exists()


def test_a_foreign_folder_is_scored_as_transformers_would(tok: Tokenizer, tmp_path: Path) -> None:
    """Written by transformers, of another shape and context, without any file or entry of ours but the vocabulary."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=tok.vocab_size + 28, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=24, initializer_range=0.3, rope_theta=500.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path / "theirs"
    model.save_pretrained(folder)
    tok.save(folder, 24)
    text = "One evening the gulls were silent. The keeper lit the lamp early." * 3
    (tmp_path / "t.txt").write_text(text)
    write(tmp_path / "q.jsonl", [{"query": "The keeper lit the", "choices": ["lamp", "green boat"], "gold": 0}])
    asks = [f"text={tmp_path}/t.txt", f"choices={tmp_path}/q.jsonl", "prompts=plain", "stride=24", f"out={tmp_path}"]
    program(f"checkpoint={folder}", *asks)
    numbers = results(tmp_path)["checkpoints"][str(folder)]

    def log_probs(ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    ids = [tok.eot_id, *tok.encode(text)]
    nats = 0.0
    for first in range(0, len(ids) - 1, 24):  # with a stride of the whole context: one window after the other
        end = min(first + 24, len(ids) - 1)
        window = ids[end - 24 if first else 0 : end]
        fresh = end - first
        nats -= float(log_probs(window)[-fresh:][range(fresh), ids[first + 1 : end + 1]].sum())
    assert numbers["context"] == 24 and numbers["text"]["tokens"] == len(ids) - 1 > 48
    assert numbers["text"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(text), abs=1e-5)
    sums = []
    for choice in (" lamp", " green boat"):
        before, after = tok.encode("The keeper lit the"), tok.encode(choice)
        rows = log_probs(before + after)[len(before) - 1 : -1]
        sums.append(float(rows[range(len(after)), after].sum()))
    assert numbers["choices"]["acc"]["passed"] == (sums[0] > sums[1])
    assert numbers["choices"]["acc_norm"]["passed"] == (sums[0] / 4 > sums[1] / 10)
