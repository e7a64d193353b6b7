"""The fused parts of a training step against the formulas of base_model.py and loss.py, values and gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, max_diff, random_ids, tiny
from torch import Tensor

from base_model import GPT, attend, rotate
from pocketgpt import fused, kernels
from pocketgpt.loss import IGNORE, capped, linear_cross_entropy
from pocketgpt.packing import attention_mask

pytestmark = pytest.mark.skipif(kernels.compiler() is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, used as long as a test runs; the other tests see what they set up themselves."""
    assert fused.build() == ""
    monkeypatch.setattr(fused, "loaded", True)


def both(f: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The value of f, and its gradient with respect to each input under a fixed random weight."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = f(*leaves)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]


def assert_equal(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> None:
    for mine, theirs in zip(both(ours, *inputs), both(plain, *inputs), strict=True):
        assert max_diff(mine, theirs) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("width", [1, 12, 64, 200])
def test_norm(width: int) -> None:
    assert_equal(
        lambda x, w: fused.rms_norm(x, w, 1e-3),
        lambda x, w: F.rms_norm(x, (width,), w, 1e-3),
        draw(3, 70, width),
        draw(width, seed=1),
    )


@pytest.mark.parametrize("rows", [1, 3], ids=["shared positions", "positions of their own"])
@pytest.mark.parametrize("width", [12, 34, 64])
@pytest.mark.parametrize("normed", [False, True])
def test_norm_and_rotation(normed: bool, width: int, rows: int) -> None:
    angle = draw(70, width // 2) if rows == 1 else draw(rows, 1, 70, width // 2)
    rope = (angle.cos(), angle.sin())
    weight = draw(width, seed=1)

    def plain(x: Tensor) -> Tensor:
        return rotate((F.rms_norm(x, (width,), weight, 1e-3) if normed else x).transpose(1, 2), rope)

    def ours(x: Tensor) -> Tensor:
        return fused.norm_rotate(x, weight if normed else None, 1e-3, rope).transpose(1, 2)

    assert_equal(ours, plain, draw(3, 70, 5, width))


@pytest.mark.parametrize("size", [3, 16, 40_003])
def test_swiglu(size: int) -> None:
    assert_equal(fused.swiglu, lambda gate, up: F.silu(gate) * up, 5 * draw(size), draw(size, seed=1))


def masks(length: int) -> dict[str, Tensor | None]:
    spans = torch.stack([torch.arange(length) // 7, torch.arange(length) // 90])
    anything = torch.rand(length, length, generator=torch.Generator().manual_seed(0)) < 0.3
    return {
        "triangle": None,
        "conversations": attention_mask(spans),
        "of the same lengths": attention_mask(torch.arange(length)[None] // 150),
        "any": anything.fill_diagonal_(True),
    }


@pytest.mark.parametrize("kind", masks(1))
@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "width"), [(300, 4, 2, 16), (17, 3, 1, 12), (128, 2, 2, 8), (257, 6, 2, 64)]
)
def test_attention(length: int, heads: int, kv_heads: int, width: int, kind: str) -> None:
    mask = masks(length)[kind]
    assert_equal(
        lambda q, k, v: fused.attention(q, k, v, mask),
        lambda q, k, v: attend(q, k, v, mask),
        draw(2, heads, length, width),
        draw(2, kv_heads, length, width, seed=1),
        draw(2, kv_heads, length, width, seed=2),
    )


def test_a_query_that_sees_nothing_takes_part_in_nothing() -> None:
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    mask[2] = False
    q, k, v = (draw(1, 2, 4, 8, seed=seed) for seed in range(3))
    y, dq, dk, dv = both(lambda q, k, v: fused.attention(q, k, v, mask), q, k, v)
    assert y[:, :, 2].eq(0).all()
    assert dq[:, :, 2].eq(0).all()
    assert bool(torch.cat([dk, dv]).isfinite().all())


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("size", [5, 16, 97])
def test_cross_entropy(size: int, softcap: float) -> None:
    logits, targets = 4 * draw(9, size), random_ids(9, high=size)
    targets[3] = IGNORE
    leaf = logits.clone().requires_grad_()
    plain = F.cross_entropy(capped(leaf, softcap), targets, reduction="none", ignore_index=IGNORE)
    plain.sum().backward()
    untouched = logits.clone()
    assert max_diff(fused.cross_entropy_(untouched, targets, softcap, False), plain.detach()) < 1e-5
    assert torch.equal(untouched, logits)
    assert max_diff(fused.cross_entropy_(logits, targets, softcap, True), plain.detach()) < 1e-5
    assert leaf.grad is not None
    assert max_diff(logits, leaf.grad) < 1e-5


def gradients(model: GPT, plain: bool, dtype: torch.dtype, **how: bool | str) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step and all gradients, of packed rows."""
    fused.loaded = not plain
    model.train().zero_grad(set_to_none=True)
    for key, value in how.items():
        setattr(model, key, value)
    ids = random_ids(3, 33)
    segments = torch.arange(32).expand(3, -1) // torch.tensor([[40], [9], [14]])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = model.hidden_states(ids[:, :-1], torch.arange(32).expand(3, -1) % 9, attention_mask(segments))
    loss = linear_cross_entropy(hidden, model.lm_head.weight, ids[:, 1:], dtype, model.lm_head.softcap) / 96
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_is_as_near_to_float32_as_with_torchs_operators(shape: str) -> None:
    model = tiny(**SHAPES[shape])
    exact, right = gradients(model, True, torch.float32)
    off = {}
    for plain in (True, False):
        loss, found = gradients(model, plain, torch.bfloat16)
        assert loss == pytest.approx(exact, rel=0.02)
        assert found.keys() == right.keys()
        off[plain] = {
            name: float((g.float() - right[name]).norm() / right[name].norm().clamp_min(1e-3))
            for name, g in found.items()
        }
    for name, error in off[False].items():
        assert error < 1.5 * off[True][name] + 0.02, (name, error, off[True][name])


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_gradient_checkpointing_changes_nothing(recompute: bool | str) -> None:
    model = tiny()
    loss, kept = gradients(model, False, torch.bfloat16, recompute=False)
    again, computed = gradients(model, False, torch.bfloat16, recompute=recompute)
    assert loss == again
    assert all(torch.equal(kept[name], computed[name]) for name in kept)


def test_threads_do_not_change_a_bit() -> None:
    threads = torch.get_num_threads()
    try:
        found = []
        for n in (1, 2):
            torch.set_num_threads(n)
            x, w = draw(500, 24), draw(24, seed=1)
            found.append(both(lambda x, w: fused.rms_norm(x, w, 1e-6), x, w))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_in_float32_is_that_of_torchs_operators(shape: str) -> None:
    model = tiny(**SHAPES[shape])
    exact, right = gradients(model, True, torch.float32)
    loss, found = gradients(model, False, torch.float32)
    assert loss == pytest.approx(exact, rel=1e-6)
    assert found.keys() == right.keys()
    for name, g in found.items():
        assert max_diff(g, right[name]) <= 1e-5 * max(1e-2, float(right[name].abs().max())), name


def test_it_serves_float32_and_bfloat16_autocast_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(2, 3)
    assert fused.serves(x)
    assert not fused.serves(x.double())
    assert not fused.serves(x.bfloat16())  # then weights are too
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fused.serves(x)
        assert not fused.serves(x.to("meta"))
        monkeypatch.setattr(fused, "loaded", False)
        assert not fused.serves(x)
    monkeypatch.setattr(fused, "loaded", True)
    with torch.autocast("cpu", dtype=torch.float16):
        assert not fused.serves(x)


def test_the_shapes_for_planning_are_those_that_come() -> None:
    ops = torch.ops.pocketgpt_training
    q, k, v = (draw(2, heads, 150, 8).bfloat16() for heads in (4, 2, 2))
    y, p = ops.attention(q, k, v, None)
    x, weight = draw(6, 3, 8), draw(8)
    _, scale = ops.norm_rotate(x, weight, None, None, 1e-6, torch.bfloat16)
    calls: dict[str, tuple[object, ...]] = {
        "norm_rotate": (x, weight, None, None, 1e-6, torch.bfloat16),
        "norm_rotate_backward": (x, x, weight, None, None, scale),
        "swiglu": (x, x),
        "swiglu_backward": (x, x, x),
        "attention": (q, k, v, None),
        "attention_backward": (y, q, k, v, None, p),
        "cross_entropy_": (x.flatten(1), random_ids(6, high=24), 0.0, True),
    }
    assert calls.keys() == fused.SHAPES.keys()

    def about(outputs: Tensor | tuple[Tensor, ...]) -> list[object]:
        return [(t.shape, t.stride(), t.dtype) for t in ((outputs,) if isinstance(outputs, Tensor) else outputs)]

    for name, inputs in calls.items():
        assert about(getattr(ops, name)(*inputs)) == about(fused.SHAPES[name](*inputs)), name
