"""Which parameter gets which update, how large, and when."""

import copy
import math

import pytest
import torch
from helpers import SHAPES, max_diff, random_ids, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from base_model import GPT, PRESETS
from pocketgpt import device as machine
from pocketgpt import kernels, optim
from pocketgpt.errors import UserError
from pocketgpt.optim import OptimConfig, Optimizer, lr_scale, parameter_groups

ADAMW = {"name": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
MUON = ADAMW | {"name": "muon", "muon_lr": 0.02, "muon_momentum": 0.95}


def config(**changes: object) -> OptimConfig:
    return OptimConfig(**ADAMW | {"muon_lr": 0.0, "muon_momentum": 0.0} | changes)  # type: ignore[arg-type]


def fill_gradients(model: GPT, seed: int) -> None:
    model(random_ids(2, 8, seed=seed)).square().mean().backward()


def snapshot(model: GPT) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [*SHAPES, "untied"])
def test_every_parameter_is_in_exactly_one_group(shape: str) -> None:
    model = tiny(**SHAPES.get(shape, {"tie_embeddings": False}))
    blocks, other, vectors = parameter_groups(model)
    groups = [*blocks, *other, *vectors]
    assert len({id(parameter) for parameter in groups}) == len(groups)
    assert {id(parameter) for parameter in groups} == {id(parameter) for parameter in model.parameters()}
    assert sum(parameter.numel() for parameter in groups) == model.n_parameters()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(p)].endswith("_proj.weight") and names[id(p)].startswith("blocks.") for p in blocks)
    assert all(names[id(p)].endswith(("norm.weight", ".bias", "_mix")) for p in vectors)
    expected = {"embed.weight"}
    if model.config.position == "learned":
        expected.add("position.weight")
    if not model.config.tie_embeddings:
        expected.add("lm_head.weight")
    assert {names[id(p)] for p in other} == expected


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("preset", PRESETS)
def test_the_optimizers_hold_every_parameter_once(name: str, preset: str) -> None:
    model = tiny(**PRESETS[preset])
    optimizer = Optimizer(model, config(**MUON | {"name": name}), lr=0.01)
    held = [p for part in optimizer.parts for group in part.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    for part in optimizer.parts:
        for group in part.param_groups:
            vectors = [parameter.dim() < 2 for parameter in group["params"]]
            assert all(vectors) or not any(vectors)
            assert group["weight_decay"] == (0.0 if vectors[0] else 0.1)
    before = snapshot(model)
    fill_gradients(model, 0)
    optimizer.step(1.0)
    for key, parameter in model.named_parameters():
        assert max_diff(parameter, before[key]) > 1e-6, key
        assert parameter.grad is None


def test_adamw_is_that_of_torch() -> None:
    ours, theirs = tiny(bias=True), tiny(bias=True)
    optimizer = Optimizer(ours, config(), lr=0.01)
    matrices = [p for p in theirs.parameters() if p.dim() == 2]
    vectors = [p for p in theirs.parameters() if p.dim() < 2]
    plain = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step, scale in enumerate((0.5, 1.0, 0.25)):
        fill_gradients(ours, step)
        fill_gradients(theirs, step)
        optimizer.step(scale)
        for group in plain.param_groups:
            group["lr"] = 0.01 * scale  # of the base rate, not of the last one
        plain.step()
        plain.zero_grad()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert max_diff(a, b) < 1e-6, name


def test_without_a_gradient_only_matrices_decay() -> None:
    model = tiny(bias=True)
    before = snapshot(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    Optimizer(model, config(), lr=0.01).step(0.5)
    for name, parameter in model.named_parameters():
        shrunk = before[name] * (1 - 0.5 * 0.01 * 0.1) if parameter.dim() == 2 else before[name]
        assert max_diff(parameter, shrunk) < 1e-7, name


def test_muon_is_for_the_matrices_of_blocks_and_makes_their_update_nearly_orthogonal() -> None:
    model, adamw = tiny(**PRESETS["llama"]), tiny(**PRESETS["llama"])
    before = snapshot(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for parameter, twin in zip(model.parameters(), adamw.parameters(), strict=True):
        twin.grad = parameter.grad.clone() if parameter.grad is not None else None
    Optimizer(model, config(**MUON | {"weight_decay": 0.0}), lr=0.01).step(0.5)
    Optimizer(adamw, config(weight_decay=0.0), lr=0.01).step(0.5)
    for (name, parameter), twin in zip(model.named_parameters(), adamw.parameters(), strict=True):
        if name.startswith("blocks.") and parameter.dim() == 2:
            assert parameter.grad is None
            rows, columns = parameter.shape
            update = (parameter.detach() - before[name]) / (0.5 * 0.02 * max(1.0, rows / columns) ** 0.5)
            singular = torch.linalg.svdvals(update)
            # Newton-Schulz brings them near 1; those of the gradient were not
            assert singular.quantile(0.2) > 0.6, name
            assert singular.max() < 1.3, name
        else:
            assert torch.equal(parameter, twin), name


def test_muon_is_that_of_torch_but_for_the_quintics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "QUINTICS", ((3.4445, -4.7750, 2.0315),) * 5)  # of Jordan et al., in torch's Muon
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda device: True)  # as torch's does, fast or not
    ours, theirs = tiny(), tiny()
    optimizer = Optimizer(ours, config(**MUON), lr=0.01)
    matrices = [p for name, p in theirs.named_parameters() if name.startswith("blocks.") and p.dim() == 2]
    plain = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original")
    for step, scale in enumerate((0.5, 1.0, 0.25)):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(step))
            b.grad = a.grad.clone()
        optimizer.step(scale)
        plain.param_groups[0]["lr"] = 0.02 * scale
        plain.step()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name.startswith("blocks.") and a.dim() == 2:
            assert max_diff(a, b) < 1e-6, name


def test_each_quintic_is_the_best_for_where_those_before_left_the_values() -> None:
    """Chebyshev: an odd quintic is the nearest to 1 on an interval if its distance is the same at four points, one more than it
    has coefficients, with alternating signs: here the ends and the two places in between where it turns."""
    low, high = 0.003, 1.0
    for a, b, c in optim.QUINTICS:
        ends = low, 1.02 * high
        turns = sorted(math.sqrt((-3 * b + sign * math.sqrt(9 * b * b - 20 * a * c)) / (10 * c)) for sign in (1, -1))
        values = [a * x + b * x**3 + c * x**5 for x in (ends[0], *turns, ends[1])]
        assert ends[0] < turns[0] < turns[1] < ends[1]
        off = 1 - values[0]
        assert values == pytest.approx([1 - off, 1 + off, 1 - off, 1 + off], abs=1e-3)
        low, high = min(values), max(values)
    assert (low, high) == pytest.approx((0.7788, 1.2212), abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 48),
    more=st.integers(0, 80),
    rank=st.integers(1, 48),
    scale=st.floats(-5, 15),
    decades=st.floats(0, 1.5),
    seed=st.integers(0, 9),
)
def test_singular_values_go_near_1_and_their_vectors_stay(
    n: int, more: int, rank: int, scale: float, decades: float, seed: int
) -> None:
    """Of matrices of any rank and size, in exact arithmetic; where the rank is 1, a value is all that the norm allows. bfloat16
    mixes small values up, but makes none large."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(k, n, generator=generator).double()).Q for k in (n, n + more))
    values = 10 ** -(decades * torch.rand(n, generator=generator).double())
    values[rank:] = 0
    values /= values.norm()
    matrix = (u * values @ v.T * 10**scale)[None]
    among = u.T @ optim.orthogonalize(matrix, torch.float64)[0] @ v
    found = among.diagonal()
    assert found[:rank].min() > 0.778 and found.max() < 1.222
    assert (among - found.diag()).abs().max() < 1e-9
    assert torch.linalg.svdvals(optim.orthogonalize(matrix)[0].float()).max() < 1.4


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("flags : fpu avx avx2 fma", torch.float32),
        ("flags : fpu avx2 avx512f avx512vl avx512_vnni", torch.float32),
        ("flags : fpu avx512f avx512_bf16", torch.bfloat16),
        ("flags : fpu amx_bf16 amx_tile", torch.bfloat16),
        ("Features : fp asimd bf16", torch.float32),  # not known to be fast there
        ("", torch.float32),
    ],
)
def test_muon_computes_in_bfloat16_only_where_the_processor_does(
    flags: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated products made a step of the demo's model take four times as long."""
    monkeypatch.setattr(kernels, "processor", lambda: flags)
    machine.multiplies_bfloat16.cache_clear()
    computed: list[torch.dtype] = []
    original = torch.baddbmm
    monkeypatch.setattr(torch, "baddbmm", lambda x, *rest, **how: computed.append(x.dtype) or original(x, *rest, **how))
    try:
        model = tiny()
        optimizer = Optimizer(model, config(**MUON), lr=0.01)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(1.0)
        assert set(computed) == {dtype}
    finally:
        machine.multiplies_bfloat16.cache_clear()


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_matrices_in_pieces_have_the_bits_of_all_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.randn(5, 8, 24, generator=torch.Generator().manual_seed(0))
    whole = optim.orthogonalize(matrices)
    monkeypatch.setattr(optim, "CACHED", at_once * 8 * 24)
    assert torch.equal(optim.orthogonalize(matrices), whole)


def test_the_momentum_of_muon_rises_by_hand() -> None:
    """Constant gradients of one direction would hide it: it shows in the buffer, m <- momentum m + (1 - momentum) g."""
    model = tiny()
    optimizer = Optimizer(model, config(**MUON | {"muon_warmup": 4}), lr=0.01)
    muon = optimizer.parts[1]
    buffer, by_hand = None, 0.0
    for step, momentum in enumerate((0.85, 0.875, 0.9, 0.925, 0.95, 0.95)):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step(1.0)
        by_hand = momentum * by_hand + (1 - momentum) * (step + 1)
        for group in muon.param_groups:
            buffer = muon.state[group["params"][0]]["momentum"]
            assert max_diff(buffer, torch.full_like(buffer, by_hand)) < 1e-6, step


def test_cautious_decay_by_hand() -> None:
    """AdamW's first step is the learning rate times the sign of the gradient. What it moves towards 0 decays, too."""
    layer = torch.nn.Linear(4, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0, 2.0, -2.0]]))
    layer.weight.grad = torch.tensor([[3.0, 3.0, -3.0, -3.0]])
    Optimizer(layer, config(cautious=True), lr=0.02).step(0.5)
    lr, decay = 0.01, 0.1
    expected = torch.tensor([[1 - lr - lr * decay, -1 - lr, 2 + lr, -2 + lr + lr * decay * 2]])
    assert max_diff(layer.weight.detach(), expected) < 1e-6


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_cautious_decay_is_a_part_of_the_plain_one(name: str) -> None:
    """Every entry ends where it would without decay, or where the plain decay brings it; vectors do not decay."""
    models = [tiny(bias=True) for _ in range(3)]
    for model, changes in zip(models, ({"cautious": True}, {}, {"weight_decay": 0.0}), strict=True):
        optimizer = Optimizer(model, config(**MUON | {"name": name} | changes), lr=0.02)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        optimizer.step(1.0)
    start = tiny(bias=True)
    for (key, ours), plain, without, old in zip(
        models[0].named_parameters(), *(m.parameters() for m in models[1:]), start.parameters(), strict=True
    ):
        towards = (without - old) * old <= 0
        assert max_diff(ours, torch.where(towards, plain, without)) < 1e-6, key
        if old.dim() > 1:
            assert (
                0.2 < towards.float().mean() < 0.8 and max_diff(ours, plain) > 1e-5 and max_diff(ours, without) > 1e-5
            )
        else:
            assert torch.equal(ours, without), key


def test_without_a_gradient_cautious_decay_is_the_plain_one() -> None:
    models = [tiny(), tiny()]
    for model, cautious in zip(models, (False, True), strict=True):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        Optimizer(model, config(cautious=cautious), lr=0.01).step(1.0)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert max_diff(ours, theirs) < 1e-7


def test_a_parameter_in_two_groups_or_in_none_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = optim.parameter_groups
    for wrong in (lambda b, o, v: (b, o, v[1:]), lambda b, o, v: (b, [*o, b[0]], v)):
        monkeypatch.setattr(optim, "parameter_groups", lambda model, wrong=wrong: wrong(*groups(model)))
        with pytest.raises(AssertionError, match="every parameter is in exactly one group"):
            Optimizer(tiny(), config(**MUON), lr=0.01)


def test_a_scale_of_zero_changes_nothing() -> None:
    for chosen in (config(), config(**MUON)):
        model = tiny()
        before = snapshot(model)
        optimizer = Optimizer(model, chosen, lr=0.01)
        fill_gradients(model, 0)
        optimizer.step(0.0)
        assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


CHOSEN = {
    "adamw": config(),
    "muon": config(**MUON),
    "muon warming up": config(**MUON | {"muon_warmup": 4}),
    "cautious": config(**MUON | {"cautious": True}),
}


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_a_restored_optimizer_goes_on_bit_by_bit(chosen: OptimConfig) -> None:
    model = tiny()
    optimizer = Optimizer(model, chosen, lr=0.01)
    for step in range(3):
        fill_gradients(model, step)
        optimizer.step(1.0)
    twin = tiny(seed=5)
    restored = Optimizer(twin, chosen, lr=0.01)
    twin.load_state_dict(model.state_dict())
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 5):
        for m, o in ((model, optimizer), (twin, restored)):
            fill_gradients(m, step)
            o.step(0.7)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name


def moments_of(optimizer: Optimizer) -> list[torch.Tensor]:
    states = [kept for part in optimizer.parts for kept in part.state.values()]
    return [moment for kept in states for moment in kept.values() if moment.dim()]


@pytest.mark.parametrize("chosen", CHOSEN.values(), ids=CHOSEN)
def test_moments_that_wait_elsewhere_give_the_same_bits(chosen: OptimConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the host is the same processor; what counts is that the moments at work are copies, a few at a time, and that what waits
    is brought up to date. A run goes on from the moments of the other kind, too."""
    models, host = [tiny(), tiny(), tiny()], torch.device("cpu")
    plain, moved, resumed = (Optimizer(model, chosen, lr=0.01) for model in models)
    assert moved.host is None  # on a CPU the setting changes nothing
    moved.host = resumed.host = host
    brought: list[int] = []
    for part in moved.parts:
        step = part.step

        def watched(part=part, step=step) -> None:
            at_work = [part.state[parameter] for group in part.param_groups for parameter in group["params"]]
            copies = {moment.data_ptr() for kept in at_work for moment in kept.values() if moment.dim()}
            assert not copies & places
            brought.append(len(copies))
            step()

        monkeypatch.setattr(part, "step", watched)
    places: set[int] = set()
    for number in range(4):
        for model, optimizer in zip(models[: 2 + (number == 3)], (plain, moved, resumed), strict=False):
            fill_gradients(model, number)
            optimizer.step(0.7)
        if number == 0:
            places = {moment.data_ptr() for moment in moments_of(moved)}
            brought.clear()
        assert {moment.data_ptr() for moment in moments_of(moved)} == places  # the same memory, step by step
        if number == 2:
            assert brought and set(brought) <= {1, 2}  # a mean, and of AdamW a mean of squares
            models[2].load_state_dict(models[0].state_dict())
            resumed.load_state_dict(plain.state_dict())
            assert not {m.data_ptr() for m in moments_of(resumed)} & {m.data_ptr() for m in moments_of(plain)}
    for (name, a), b, c in zip(models[0].named_parameters(), *(m.parameters() for m in models[1:]), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c), name
    for a, b, c in zip(*map(moments_of, (plain, moved, resumed)), strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert [len(g["params"]) for part in plain.parts for g in part.param_groups] == [
        len(g["params"]) for part in moved.parts for g in part.param_groups
    ]


def test_moments_of_other_shapes_are_refused_elsewhere_too() -> None:
    narrow, wide = tiny(), tiny(n_embd=64)
    fill_gradients(wide, 0)
    given, taking = Optimizer(wide, config(), lr=0.01), Optimizer(narrow, config(), lr=0.01)
    given.step(1.0)
    taking.host = torch.device("cpu")
    with pytest.raises(ValueError, match="of shape"):
        taking.load_state_dict(given.state_dict())


def test_gradients_can_be_dropped() -> None:
    model = tiny()
    optimizer = Optimizer(model, config(**MUON), lr=0.01)
    fill_gradients(model, 0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UserError, match="optim.name is 'sgd': choose adamw or muon"):
        Optimizer(tiny(), config(name="sgd"), lr=0.01)


@pytest.mark.parametrize(
    ("progress", "shape", "value"),
    [
        (0.001, "linear", 0.01),  # the first of 1,000 steps: above 0
        (0.05, "linear", 0.5),
        (0.1, "linear", 1.0),
        (0.3, "linear", 1.0),
        (0.6, "linear", 1.0),
        (0.8, "linear", 0.5),
        (0.9, "linear", 0.25),
        (1.0, "linear", 0.0),
        (0.8, "cosine", 0.5),
        (0.7, "cosine", 0.5 + 0.5 * math.cos(math.pi / 4)),
        (0.9, "cosine", 0.5 - 0.5 * math.cos(math.pi / 4)),
        (1.0, "cosine", 0.0),
    ],
)
def test_the_schedule_by_hand(progress: float, shape: str, value: float) -> None:
    assert lr_scale(progress, warmup=0.1, decay=0.4, shape=shape) == pytest.approx(value, abs=1e-12)


def test_a_schedule_without_warmup_or_decay() -> None:
    assert [lr_scale(p, warmup=0, decay=0) for p in (0.001, 0.5, 1.0)] == [1.0, 1.0, 1.0]
    assert [lr_scale(p, warmup=0, decay=1) for p in (0.25, 0.5, 1.0)] == [0.75, 0.5, 0.0]
    assert [lr_scale(p, warmup=1, decay=0) for p in (0.25, 0.5, 1.0)] == [0.25, 0.5, 1.0]
    assert lr_scale(1 + 1e-9, warmup=0, decay=0.5) == 0.0


@given(
    st.integers(1, 500),
    st.just(0.0) | st.floats(0.01, 0.5),
    st.just(0.0) | st.floats(0.01, 0.5),
    st.sampled_from(["linear", "cosine"]),
)
def test_the_schedule_rises_stays_and_falls(steps: int, warmup: float, decay: float, shape: str) -> None:
    scales = [lr_scale((step + 1) / steps, warmup=warmup, decay=decay, shape=shape) for step in range(steps)]
    assert all(0 <= scale <= 1 for scale in scales)
    assert scales[0] > 0 or steps == 1
    top = scales.index(max(scales))
    assert scales[: top + 1] == sorted(scales[: top + 1])
    assert scales[top:] == sorted(scales[top:], reverse=True)
    assert scales[-1] == (0.0 if decay else 1.0)
