"""The same numbers on a GPU as on a CPU. Everything here is skipped where there is none."""

import pytest
import torch
from helpers import SHAPES, cached, max_diff, random_ids, tiny

from base_model import GPT
from kv_cache import prove
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.optim import OptimConfig, Optimizer

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def losses(device: str, name: str, dtype: torch.dtype) -> list[float]:
    """Nats per token of ten steps from the same weights on the same ids."""
    model = tiny(seed=1).to(device).train()
    muon = (0.02, 0.95) if name == "muon" else (0.0, 0.0)
    optimizer = Optimizer(model, OptimConfig(name, 0.9, 0.95, 1e-8, 0.1, *muon), 0.003)
    ids = random_ids(8, 33, seed=2).to(device)
    found = []
    for _ in range(10):
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            hidden = model.hidden_states(ids[:, :-1])
        loss = linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:], dtype) / ids[:, 1:].numel()
        loss.backward()
        optimizer.step(1.0)
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("dtype, error", [(torch.float32, 0.01), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_is_the_same(name: str, dtype: torch.dtype, error: float) -> None:
    right = losses("cpu", name, torch.float32)
    assert right[-1] < right[0] - 0.1
    assert losses("cuda", name, dtype) == pytest.approx(right, abs=error)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_is_exact(shape: str) -> None:
    model = tiny(**SHAPES[shape])
    ids = random_ids(1, 32)
    right = model(ids).detach()
    model = model.to("cuda")
    assert max_diff(model(ids.to("cuda")).detach().cpu(), right) < 1e-3
    rows = prove(cached(model).to("cuda"), model, ids.to("cuda"), 1e-4)
    assert len(rows) == 30
    assert isinstance(model, GPT) and all(row["ok"] for row in rows), rows


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_in_main_memory_give_the_same_bits(name: str) -> None:
    ids = random_ids(8, 32, seed=2).to("cuda")
    found = []
    for offload in (False, True):
        model = tiny(seed=1).to("cuda").train()
        muon = (0.02, 0.95) if name == "muon" else (0.0, 0.0)
        config = OptimConfig(name, 0.9, 0.95, 1e-8, 0.1, *muon, offload=offload)
        optimizer = Optimizer(model, config, 0.003)
        for step in range(4):
            if step == 2:  # as if resumed
                states, optimizer = optimizer.state_dict(), Optimizer(model, config, 0.003)
                optimizer.load_state_dict(states)
            for parameter in model.parameters():  # the sums of a backward pass come in any order
                parameter.grad = torch.sin(parameter.detach() * 99 + ids.float().mean() + step)
            optimizer.step(1.0)
        states = optimizer.state_dict()
        kept = [m for part in states for moments in part["state"].values() for m in moments.values() if m.dim()]
        assert all(m.is_pinned() if offload else m.is_cuda for m in kept)
        found.append([tensor.detach().cpu() for tensor in (*model.parameters(), *kept)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
