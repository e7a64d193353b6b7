"""A few hundred cases of tests/fuzz.py, which runs them by the thousand, and a look at whether it would find anything."""

import os
import random
import tracemalloc
from pathlib import Path

import fuzz
import pytest
import torch

import chat
import pretrain
from base_model import GPTConfig
from kv_cache import CachedGPT
from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings
from pocketgpt.session import Session
from pocketgpt.tokenizer import Tokenizer


def test_bad_input_is_one_line_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    counts, findings = fuzz.fuzz(200, seed=3, programs=1)
    assert not findings, "\n".join(findings)
    assert counts["as a program"] == 1
    for kind in fuzz.KINDS:
        assert counts[f"{kind}: refused"] >= 10, "damage that does no harm tests nothing"


@pytest.mark.parametrize("fault", ["traceback", "leftover", "two lines", "hang"])
def test_what_is_wrong_would_be_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty() -> None:
        if fault == "traceback":
            raise KeyError("x")
        if fault == "leftover":
            out = Path(next(a for a in fuzz.sys.argv if a.startswith("out="))[4:])
            out.mkdir(exist_ok=True)
            (out / "ckpt_base.pt").touch()
        if fault == "two lines":
            print("error: one", file=fuzz.sys.stderr)
        if fault == "hang":
            os.kill(os.getpid(), fuzz.signal.SIGALRM)
        raise UserError("two")

    monkeypatch.setattr(pretrain, "main", faulty)
    monkeypatch.setitem(fuzz.KINDS, "overrides", lambda world, rng: ("pretrain", world.arguments("pretrain"), b""))
    _, findings = fuzz.fuzz(1, seed=0)
    assert len(findings) == 1


def test_a_thousand_random_turns_on_a_short_context(tok: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    """Memory that Python holds is as large after a thousand turns as after two hundred, the messages themselves aside."""
    torch.manual_seed(0)
    model = CachedGPT(GPTConfig(400, 48, n_layer=1, n_head=2, n_kv_head=1, n_embd=16)).eval()
    session = Session(model, tok, Settings(), seed=0, max_new_tokens=5)
    talk = chat.Chat(session, interactive=False)
    rng = random.Random(0)
    deeds = [
        "hi",
        "what is the lamp?",
        "🎉",
        "x" * 9,
        "/undo",
        "/regenerate",
        "/reset",
        "/help",
        "/nope",
        "<|im_end|>",
        "\0",
    ]
    held = {}
    refused = 0
    tracemalloc.start()
    for turn in range(1, 1001):
        try:
            talk.take(rng.choice(deeds))
        except UserError:
            refused += 1
        assert session.cache.length == len(session.cached) <= 48
        if turn in (200, 1000):
            session.reset()
            capsys.readouterr()
            held[turn] = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 50 < refused < 400
    assert held[1000] < held[200] + 100_000
