"""Bad input by the thousand: python tests/fuzz.py --cases 5000 --seed 0

Every case follows from the seed and its number. It runs a program in this process, on input that was damaged at random, and
must end in one of two ways: the input was fine after all (exit code 0), or there is one line that begins with `error:`, an
exit code that is not 0, and nothing left behind. A traceback, a hang or a half written file is a finding. Where training
would begin the case ends: what is asked for is accepted. Some of the refused cases run again as real programs.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import pyarrow  # noqa: E402
import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402

import chat  # noqa: E402
import dpo  # noqa: E402
import evaluate  # noqa: E402
import kv_cache  # noqa: E402
import pretrain  # noqa: E402
import sft  # noqa: E402
from base_model import GPT, GPTConfig  # noqa: E402
from pocketgpt import checkpoint, config, errors, optim  # noqa: E402
from pocketgpt.tokenizer import Tokenizer  # noqa: E402

SECONDS = 20  # a case that takes longer hangs
MAINS = {script.__name__: script for script in (pretrain, sft, dpo, kv_cache, evaluate, chat)}
TEXT = "".join(f"The {a} and the {b} of the {c}. " for a in "king fox".split() for b in "queen sea".split() for c in "wood river".split())  # fmt: skip
# What a list or a number of work to do must not be: it would be done, and that is no finding but takes for ever.
WORK = {
    "data.generate",
    "dpo.samples",
    "new_tokens",
    "samples",
    "repeats",
    "items",
    "prompt_lengths",
    "sample_tokens",
}
NUMBERS = ["0", "-1", "1", "2", "3", "0.5", "-0.0", "1e-30", "7.9", "1e400", "nan", "inf", "-inf"]
HUGE = ["1000000000000", "2147483648", "9223372036854775808", "1e30"]
WORDS = [
    "", "''", "x", "null", "true", "false", "[]", "[1,2]", "[a", "{}", "{a:1}", "???", "${out}", "${nope}", "${oc.env:NOPE}", "a=b",
    "🎉", "'<|im_end|>'", "/", "/dev/null", "..", "file:///etc/passwd", "\\x00", "%s", "-", "--", "qwen3", "mine", "hub", "force",
]  # fmt: skip


class Accepted(BaseException):
    """The work would begin here."""


class Hang(BaseException):
    pass


class World:
    """A folder with a good input of every kind, and where results go."""

    def __init__(self, root: Path) -> None:
        self.root, self.out, self.bad = root, root / "out", root / "bad"
        tok = Tokenizer.train([TEXT, "user\nassistant\n"], 280)
        model = GPT(GPTConfig(tok.vocab_size, 64, n_layer=1, n_head=2, n_kv_head=1, n_embd=16))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.2)
        for stage in ("base", "sft"):
            ckpt = checkpoint.Checkpoint(stage, model.config.to_dict(), model.state_dict(), tok)
            checkpoint.save(root / "good", ckpt)
        (root / "text.txt").write_text(TEXT * 20)
        self.rows = {
            "pretrain": [{"text": f"{i} {TEXT}"} for i in range(30)],
            "sft": [{"messages": [{"role": "user", "content": f"hi {i}"}, {"role": "assistant", "content": "ho"}]} for i in range(9)],
            "dpo": [{"prompt": f"hi {i}", "chosen": "ho", "rejected": "no"} for i in range(9)],
        }  # fmt: skip
        self.questions = {
            "text": self.rows["pretrain"][:3],
            "choices": [{"query": f"hi {i}", "choices": ["ho", "no"], "gold": i % 2} for i in range(9)],
            "generate": [{"prompt": f"hi {i}", "regex": "h[aeiou]+", "number": i, "stop": "\n"} for i in range(9)],
        }
        for name, rows in self.rows.items():
            (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.fresh()

    def fresh(self) -> None:
        for folder in (self.out, self.bad):
            shutil.rmtree(folder, ignore_errors=True)
        self.bad.mkdir()

    def arguments(self, name: str) -> list[str]:
        good, out = self.root / "good", f"out={self.out}"
        if name == "evaluate":
            return [f"out={good}", "items=1", "device=cpu"]
        if name == "kv_cache":
            return [f"checkpoint={good / 'ckpt_sft.pt'}", "device=cpu"]
        if name == "chat":
            return [str(good / "sft"), "--max-new-tokens=3"]
        path = self.root / ("text.txt" if name == "pretrain" else f"{name}.jsonl")
        common = [out, "data=mine", f"data.path={path}", "device=cpu", "train.dtype=float32"]
        if name == "pretrain":
            return [
                *common, f"cache={self.root / 'cache'}", "vocab_size=280", "model.n_layer=1", "model.n_embd=16", "model.n_head=2",
                "model.block_size=32",
            ]  # fmt: skip
        return [*common, f"checkpoint={good / 'ckpt_sft.pt'}"]


def accept(*_: Any, **__: Any) -> Any:
    raise Accepted


def accept_training(model: Any, stage: Any, settings: Any, optim_config: Any, *_: Any) -> Any:
    settings.check()
    optim.Optimizer(model, optim_config, settings.lr)
    raise Accepted


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """No work, no hang."""

    def alarm(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(SECONDS)
    with contextlib.ExitStack() as stack:
        for script in (pretrain, sft, dpo):
            stack.enter_context(mock.patch.object(script, "train", accept_training))
        stack.enter_context(mock.patch.object(kv_cache, "prove", accept))
        stack.enter_context(mock.patch.object(evaluate, "measure_all", accept))
        try:
            yield
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


# --- cases: each gives a program, its arguments and its standard input ------------------------------------------------

Case = tuple[str, list[str], bytes]


def value(rng: random.Random, key: str) -> str:
    pools = [NUMBERS, WORDS] if key in WORK else [NUMBERS, WORDS, HUGE]
    return rng.choice(rng.choice(pools))


def keys(node: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, inner in node.items():
        found += keys(inner, f"{prefix}{key}.") if isinstance(inner, dict) else [prefix + key]
    return found


def overrides(world: World, rng: random.Random) -> Case:
    """Keys with values that may be no good, now and then a key or a flag that does not exist."""
    name = rng.choice(["pretrain", "pretrain", "sft", "dpo", "kv_cache", "evaluate"])
    script = MAINS[name]
    known = keys(config.plain(config.load(name, script.Config, world.arguments(name))))
    known = [key for key in known if key not in ("out", "cache")]
    changes = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        key = rng.choice(known)
        changes.append(f"{key}={value(rng, key)}")
    if rng.random() < 0.1:
        changes.append(
            rng.choice(["train.lrr=1", "+x=1", "~train", "model=none", "data=", "=", "a b", "--flag", "-m", "x", "@=1"])
        )
    if "hub" in "".join(changes):
        return overrides(world, rng)  # nothing here may reach for the network
    return name, world.arguments(name) + changes, b""


def mutate(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed, doubled, or cut off."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(data) + 1) if data else 0
        deed = rng.randrange(5)
        if deed == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif deed == 1:
            del data[at : at + rng.randrange(1, 40)]
        elif deed == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif deed == 3:
            data[at:at] = data[at // 2 : at // 2 + rng.randrange(200)]
        elif rng.random() < 0.3:
            del data[at:]
    return bytes(data)


def strange(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    options: list[Callable[[], Any]] = [
        lambda: None, lambda: True, lambda: rng.choice([0, -1, 1e308, 10**40, float("nan"), 0.5]), lambda: "",
        lambda: rng.choice(["user", "assistant", "system", "x" * 5000, "\ud83d", "\0", "<|im_end|>", "🎉"]),
        lambda: [strange(rng, depth + 1) for _ in range(rng.randrange(4))],
        lambda: {rng.choice(["role", "content", "text", "", "x"]): strange(rng, depth + 1) for _ in range(rng.randrange(3))},
    ]  # fmt: skip
    return rng.choice(options[: 5 if depth > 3 else 7])()


def disturb(node: Any, rng: random.Random) -> Any:
    """The same plain data with one place changed."""
    if isinstance(node, dict) and node and rng.random() < 0.8:
        key = rng.choice(list(node))
        deed = rng.randrange(4)
        if deed == 0:
            return {k: v for k, v in node.items() if k != key}
        if deed == 1:
            return {rng.choice(["x", "Role", "prompt"]) if k == key else k: v for k, v in node.items()}
        return node | {key: disturb(node[key], rng)}
    if isinstance(node, list) and node and rng.random() < 0.8:
        at = rng.randrange(len(node))
        return node[:at] + rng.choice([[], [node[at], node[at]], [disturb(node[at], rng)]]) + node[at + 1 :]
    return strange(rng)


def data_file(world: World, rng: random.Random) -> Case:
    """Text, JSONL, gzip, JSON or parquet, with damage to its bytes or to its rows."""
    every = world.rows | world.questions
    name = rng.choice(list(every))
    rows = [disturb(row, rng) if rng.random() < 0.2 else row for row in every[name]]
    if rng.random() < 0.1:
        rows = rows[: rng.randrange(3)]
    form = rng.choice(["jsonl", "jsonl", "jsonl.gz", "parquet", "json", "txt", "docx"])
    path = world.bad / f"a.{form}"
    lines = "\n".join(map(json.dumps, rows)).encode()
    raw = lines
    if form == "json":
        raw = json.dumps(rng.choice([rows, strange(rng)])).encode()
    elif form == "txt":
        raw = TEXT.encode() * rng.choice([0, 1, 20])
    elif form == "jsonl.gz":
        raw = gzip.compress(lines, mtime=0)
    elif form == "parquet":
        try:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)]), path)
            raw = path.read_bytes()
        except (pyarrow.ArrowException, OverflowError, UnicodeEncodeError, TypeError, ValueError):
            pass  # rows of which no parquet can be made: the bytes of the JSON stand in
    if rng.random() < 0.6:
        raw = mutate(raw, rng)
    path.write_bytes(raw)
    if rng.random() < 0.1:
        (world.bad / "b.jsonl").write_bytes(lines)
        path = world.bad
    if name in world.questions:
        model = f"checkpoint={world.root / 'good' / 'sft'}"
        return "evaluate", [f"out={world.out}", model, "device=cpu", "new_tokens=3", f"{name}={path}"], b""
    return name, [*world.arguments(name), f"data.path={path}"], b""


def model_bytes(world: World, rng: random.Random) -> Case:
    """A checkpoint file, or a file of a model folder, with damage; read by one of the programs."""
    good = world.root / "good"
    if rng.random() < 0.5:
        path = world.bad / "ckpt_sft.pt"
        path.write_bytes(mutate((good / "ckpt_sft.pt").read_bytes(), rng))
    else:
        path = world.bad / "sft"
        shutil.copytree(good / "sft", path)
        victim = rng.choice(sorted(path.iterdir()))
        if victim.suffix == ".json" and rng.random() < 0.6:
            victim.write_text(json.dumps(disturb(json.loads(victim.read_text()), rng)))
        else:
            victim.write_bytes(mutate(victim.read_bytes(), rng))
    name = rng.choice(["chat", "chat", "kv_cache", "sft", "dpo"])
    if name == "chat":
        return name, [str(path), "--prompt=hi", "--max-new-tokens=2", "--device=cpu"], b""
    return name, [*world.arguments(name), f"checkpoint={path}"], b""


def words(rng: random.Random) -> str:
    parts = [
        "hi",
        " ",
        "<|im_end|>",
        "🎉",
        "é",
        "\t",
        "{{ 1 }}",
        "x" * 300,
        "\u202e",
        "\x1b[2J",
        "-",
        "/",
        "what?",
        "\ud800",
        "\0",
        '"',
    ]
    return "".join(rng.choices(parts, k=rng.randrange(8)))


def prompt(world: World, rng: random.Random) -> Case:
    """One answer, with options that may be no good."""
    options = [
        "--temperature",
        "--top-p",
        "--top-k",
        "--min-p",
        "--repetition-penalty",
        "--max-new-tokens",
        "--seed",
        "--device",
    ]
    arguments = [*world.arguments("chat"), "--device=cpu", f"--prompt={words(rng)}"]
    for _ in range(rng.choice([0, 1, 1, 2])):
        option = rng.choice([*options, "--system", "--nope"])
        arguments.append(f"{option}={words(rng) if option == '--system' else rng.choice([*NUMBERS, *WORDS, *HUGE])}")
    return "chat", [argument.replace("\0", "") for argument in arguments], b""  # no command line can hold NUL


def talk(world: World, rng: random.Random) -> Case:
    """Lines on standard input: commands, right and wrong, and anything else, in bytes that may be no text."""
    commands = ["/reset", "/undo", "/regenerate", "/help", "/quit", "/save", "/nope", "/", "//", "/undo now", "/save a.jsonl",
                f"/save {world.bad}/a.jsonl", f"/save {world.bad}", "/save /proc/x/y", "/save ~nobody/x", "/save \0", ""]  # fmt: skip
    lines = [rng.choice(commands) if rng.random() < 0.5 else words(rng) for _ in range(rng.randrange(6))]
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    if rng.random() < 0.2:
        raw = mutate(raw, rng)
    return "chat", [*world.arguments("chat"), "--device=cpu"], raw


KINDS = {case.__name__: case for case in (overrides, data_file, model_bytes, prompt, talk)}


# --- running them ---------------------------------------------------------------------------------------------------


def leftovers(world: World) -> list[str]:
    """Files that a refused run left: all but the lock, and the input itself."""
    places = [path for path in world.root.rglob("*") if path.name.endswith(".tmp")]
    if world.out.exists():
        places += [path for path in world.out.rglob("*") if path.is_file() and path.name != ".lock"]
    return sorted(str(path.relative_to(world.root)) for path in places)


def judge(code: object, out: str, err: str, left: list[str]) -> str:
    """What is wrong with how a case ended; empty if nothing is."""
    if "Traceback" in err or "Traceback" in out:
        return "a traceback"
    if code == 0:
        return ""
    complaints = [line for line in err.splitlines() if line.startswith("error: ")]
    if len(complaints) != 1 or err.rstrip("\n").splitlines()[-1] != complaints[0]:
        return "not one line of error"
    if type(code) is not int:
        return f"exit code {code!r}"
    return f"left {left}" if left else ""


def run_here(case: Case, cwd: Path) -> tuple[object, str, str]:
    name, arguments, stdin = case
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    patches = [
        mock.patch.object(sys, "argv", [f"{name}.py", *arguments]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")),
        contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd), limits(),
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            errors.run(MAINS[name].main)
        except SystemExit as end:
            code = end.code or 0
        except Accepted:
            pass
        except Hang:
            err.write("Traceback: it hangs\n" + traceback.format_exc())
        except Exception:
            err.write(traceback.format_exc())
    return code, out.getvalue(), err.getvalue()


def run_program(case: Case, cwd: Path) -> tuple[int, str, str]:
    name, arguments, stdin = case
    done = subprocess.run(
        [sys.executable, str(ROOT / f"{name}.py"), *arguments], input=stdin, capture_output=True, cwd=cwd, timeout=120
    )
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


def fuzz(cases: int, seed: int, programs: int = 0, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Run the cases first .. first + cases - 1. Returns how they ended, by kind, and the findings.

    programs: how many of the refused ones run again as real programs.
    """
    counts: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for number in range(first, first + cases):
            rng = random.Random(f"{seed} {number}")
            kind = list(KINDS)[number % len(KINDS)]
            world.fresh()
            case = KINDS[kind](world, rng)
            code, out, err = run_here(case, world.bad)
            wrong = judge(code, out, err, leftovers(world))
            real = "\ud800" not in "".join(case[1])  # which no command line can hold
            if code and not wrong and real and counts["as a program"] < programs and number % 7 < 2:
                counts["as a program"] += 1
                world.fresh()
                case = KINDS[kind](world, random.Random(f"{seed} {number}"))
                again, out, err = run_program(case, world.bad)
                wrong = judge(again, out, err, leftovers(world)) or ("" if again == code else f"exit code {again}")
            if wrong:
                findings.append(f"case {number} ({kind}): {wrong}: {case[0]} {case[1]} {case[2]!r}\n{err[-1500:]}")
            counts[f"{kind}: {'refused' if code else 'accepted'}"] += 1
    return counts, findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to run one again")
    parser.add_argument("--programs", type=int, default=20, help="refused cases that run again as real programs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    counts, findings = fuzz(args.cases, args.seed, args.programs, args.first)
    print("\n".join(findings))
    print("\n".join(f"{name:<24}{count:>6}" for name, count in sorted(counts.items())))
    print(f"{args.cases} cases, {len(findings)} findings")
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
