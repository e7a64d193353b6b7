"""Packed weights and the C++ kernels against plain float32 arithmetic on the weights that they stand for."""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, cached, max_diff, random_ids, tiny
from torch import Tensor, nn

from kv_cache import StaticCache, full_pass
from pocketgpt import kernels, packed
from pocketgpt.errors import UserError

EXACT = 1e-5
# The shapes that kernels.cpp runs in one call: all but those whose switches reach from block to block
LEVELS = {"x86-64-v2": "avx2", "x86-64-v3": "avx512f", "x86-64-v4": "avx512_bf16"}  # and what tells a processor above
IN_ONE_CALL = [name for name in SHAPES if name not in ("value residual", "x0 shortcut", "fast")]


@pytest.fixture(params=["kernels", "operators"])
def with_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Both roads: the C++ kernels, and torch's operators where no compiler is."""
    wanted = request.param == "kernels"
    if wanted:
        reason = kernels.build()
        if reason:
            pytest.skip(reason)
    monkeypatch.setattr(kernels, "loaded", wanted)
    yield wanted


def test_a_machine_with_a_compiler_builds_the_kernels() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    assert kernels.build() == ""
    assert kernels.loaded


@pytest.mark.parametrize("level", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_kernels_for_processors_with_smaller_vectors(level: str, tmp_path: Path) -> None:
    """Vectors of 4, 8 and 16 floats: tests of this file once more, with what is compiled for less than this machine."""
    gcc = shutil.which("g++")
    if gcc is None or LEVELS[level] not in kernels.processor().split():
        pytest.skip("no g++, or the machine is of this level itself")
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {gcc} "$@" -march={level}\n')
    wrapper.chmod(0o755)
    wanted = "(multiple or a_row_does or sums or attention_of or gqa-float32) and not smaller"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "--no-cov", __file__, "-k", wanted],
        env={**os.environ, "CXX": str(wrapper), "POCKETGPT_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert len(list((tmp_path / "cache").glob("kernels_*.so"))) == 1


def test_without_a_compiler_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert kernels.build.__wrapped__() == "no C++ compiler found (g++ or clang++)"


def test_a_source_that_does_not_compile_is_a_reason_and_no_crash(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if kernels.compiler() is None:
        pytest.skip("no compiler")
    (tmp_path / "kernels.cpp").write_text("int main() { return missing; }\n")
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "kernels.cpp")
    monkeypatch.setenv("POCKETGPT_CACHE", str(tmp_path / "cache"))
    assert "kernels.cpp does not compile" in kernels.build.__wrapped__()
    assert list((tmp_path / "cache").iterdir()) == []  # nothing half-written


def test_int8_and_int4_by_hand() -> None:
    weight, scale = packed.pack(torch.tensor([[1.27, -0.5, 0.004, 0.0]] * 2), "int8")
    assert weight.shape == (1, 4, 16)
    assert weight[0, :, :3].T.tolist() == [[127, -50, 0, 0], [127, -50, 0, 0], [0, 0, 0, 0]]  # the last is padding
    assert scale is not None
    assert scale.tolist() == pytest.approx([0.01, 0.01])
    row = torch.zeros(1, 32)
    row[0, 0], row[0, 1], row[0, 16], row[0, 31] = 0.8, -0.3, 0.1, -0.7
    weight, scale = packed.pack(row, "int4")  # the largest, 0.8, becomes -8: the scale is -0.1
    assert scale is not None
    assert scale.shape == (1, 1, 16)
    assert scale[0, 0, 0].item() == pytest.approx(-0.1)
    assert weight.shape == (1, 16, 16)
    assert weight[0, :, 0].tolist() == [0 | 11 << 4, *[0x88] * 7, 7 | 8 << 4, *[0x88] * 6, 8 | 15 << 4]  # value + 8
    assert max_diff(packed.unpack(weight, scale, 1, 32), row) < 1e-7


def test_panels_hold_sixteen_outputs_side_by_side() -> None:
    matrix = torch.arange(20.0 * 3).view(20, 3)
    panels = packed.panels(matrix)
    assert panels.shape == (2, 3, 16)
    assert panels[1, 2, :5].tolist() == [50.0, 53.0, 56.0, 59.0, 0.0]  # rows 16 to 19, then padding
    assert torch.equal(packed.rows(panels, torch.tensor([17, 3])), matrix[[17, 3]])


@pytest.mark.parametrize("format", packed.FORMATS)
def test_rounding_stays_within_half_a_step(format: str) -> None:
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    back = packed.unpack(*packed.pack(weight, format), 24, 96)
    error = (back - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    bound = {
        "float32": torch.zeros(()),
        "bfloat16": weight.abs() * 2**-8,
        "int8": largest / 254,
        "int4": weight.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1) / 8,  # the end without a mirror
    }[format]
    assert bool((error <= bound * 1.001).all())


def test_rows_of_zeros_stay_zeros() -> None:
    for format in packed.FORMATS:
        assert packed.unpack(*packed.pack(torch.zeros(3, 64), format), 3, 64).abs().sum() == 0, format


def test_unknown_formats_and_widths_that_int4_cannot_pack_are_refused() -> None:
    with pytest.raises(UserError, match="quant=int3 is not known: choose one of float32, bfloat16, int8, int4"):
        packed.pack(torch.zeros(2, 32), "int3")
    with pytest.raises(UserError, match="this model has 48 in a row: use int8"):
        packed.pack(torch.zeros(2, 48), "int4")


@pytest.mark.parametrize("format", packed.FORMATS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_equals_float32_arithmetic_on_what_it_stands_for(
    format: str, bias: bool, with_kernels: bool
) -> None:
    torch.manual_seed(0)
    for n, k in ((1, 32), (7, 64), (13, 96), (64, 384), (100, 1056)):
        layers = [nn.Linear(k, n, bias=bias), nn.Linear(k, 5, bias=bias)]
        layer = packed.PackedLinear(layers, format)
        weight = torch.cat([packed.unpack(*packed.pack(one.weight, format), *one.weight.shape) for one in layers])
        for shape in ((1, k), (2, k), (3, k), (4, k), (5, k), (2, 3, k), (49, k), (130, k)):
            x = torch.randn(shape)
            right = F.linear(
                packed.factor(x, format), weight, torch.cat([one.bias for one in layers]) if bias else None
            )
            assert max_diff(layer(x), right) < EXACT, (n, k, shape)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "int8"])
def test_widths_that_are_no_multiple_of_the_vectors(format: str, with_kernels: bool) -> None:
    torch.manual_seed(0)
    for k in (1, 12, 17, 50):
        one = nn.Linear(k, 9)
        x = torch.randn(3, k)
        right = F.linear(
            packed.factor(x, format), packed.unpack(*packed.pack(one.weight, format), *one.weight.shape), one.bias
        )
        assert max_diff(packed.PackedLinear([one], format)(x), right) < EXACT


@pytest.mark.parametrize("format", packed.FORMATS)
def test_a_row_does_not_depend_on_the_others_to_the_last_bit(format: str) -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    torch.manual_seed(0)
    layer = packed.PackedLinear([nn.Linear(96, 37)], format)
    x = torch.randn(100, 96)  # from 48 rows on, weights are widened first
    together = layer(x)
    for rows in (slice(0, 1), slice(3, 5), slice(7, 12), slice(20, 33), slice(2, 50)):
        assert torch.equal(layer(x[rows]), together[rows])


def test_long_sums_round_less_than_one_running_sum() -> None:
    """Which moved SmolLM2's logits by eight times as much as float32 does without a cache (docs/LOG.md)."""
    if kernels.build():
        pytest.skip(kernels.build())
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.rand(3, 4096, generator=generator), torch.rand(32, 4096, generator=generator)
    layer = nn.Linear(4096, 32, bias=False)
    layer.weight = nn.Parameter(weight)
    right = x.double() @ weight.double().T
    running = torch.zeros(3, 32)
    for k in range(4096):
        running += x[:, k, None] * weight[None, :, k]
    with torch.inference_mode():
        off = (packed.PackedLinear([layer], "float32")(x) - right).abs().mean()
    assert off < 0.25 * (running - right).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 12), (4, 2, 16), (6, 1, 64), (3, 3, 80)])
def test_attention_of_the_kernels_equals_torchs(dtype: torch.dtype, heads: int, kv_heads: int, width: int) -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    torch.manual_seed(0)
    for length, keys in ((1, 1), (1, 3), (1, 200), (5, 5), (3, 40), (32, 90)):
        q = torch.randn(2, length, heads, width).transpose(1, 2)  # as Attention hands it over
        k, v = torch.randn(2, 2, kv_heads, 256, width).to(dtype)[:, :, :, :keys]  # slices of a longer cache
        causal = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
        ragged = causal & (torch.arange(keys) >= torch.tensor([0, keys // 3])[:, None])[:, None, None]
        ragged |= torch.eye(keys, dtype=torch.bool)[keys - length :]
        for mask in (None, causal, ragged):
            shown = causal if mask is None else mask
            right = F.scaled_dot_product_attention(q, k.float(), v.float(), attn_mask=shown, enable_gqa=True)
            assert max_diff(kernels.attend(q, k, v, mask), right) < 2e-6, (length, keys)


def test_attention_of_far_apart_scores_is_finite_and_right() -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    q = torch.full((1, 1, 1, 16), 100.0)
    k = torch.linspace(-30, 30, 40)[None, None, :, None].expand(1, 1, 40, 16).contiguous()
    v = torch.randn(1, 1, 40, 16)
    assert max_diff(kernels.attend(q, k, v, None), F.scaled_dot_product_attention(q, k, v)) < 1e-6


@pytest.mark.parametrize("shape", [name for name in SHAPES if "wide" not in name and "swiglu" not in name])
@pytest.mark.parametrize("format", packed.FORMATS)
@torch.no_grad()
def test_a_packed_model_is_the_model_with_rounded_weights(shape: str, format: str, with_kernels: bool) -> None:
    model = tiny(**SHAPES[shape], n_inner=64)
    ids = random_ids(2, 20)
    fast = cached(model).pack(format)
    allowed = 2e-5
    if format == "bfloat16":  # a number at the border between two steps may be rounded to either
        weights_only = packed.rounded(copy.deepcopy(model), format, factors=False)(ids)
    right = packed.rounded(model, format)(ids)
    if format == "bfloat16":
        allowed = max_diff(right, weights_only)
        assert 1e-3 < allowed < 0.2  # of logits up to 5
    for chunks in ([20], [1] * 20, [7, 1, 12]):
        cache = StaticCache(model.config, 2)
        rows = [fast(part, cache)[0] for part in ids.split(chunks, dim=1)]
        assert max_diff(torch.cat(rows, dim=1), right) < allowed, chunks


@pytest.mark.parametrize(("format", "kv"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("shape", [*IN_ONE_CALL, "eight heads to one"])
@torch.inference_mode()
def test_rows_of_a_pool_have_the_bits_of_a_text_alone(shape: str, format: str, kv: str) -> None:
    """In blocks, out of order, beside rows of any lengths, in chunks or token by token: never another bit."""
    if kernels.build():
        pytest.skip(kernels.build())
    model = tiny(**SHAPES.get(shape, {"n_head": 8, "n_kv_head": 1, "head_dim": 24}), n_layer=3)
    fast = cached(model).pack(format, kv)
    assert fast.network is not None
    texts = [random_ids(1, n, seed=n) for n in (30, 7, 1, 18, 30)]
    pool = fast.new_pool(200, block_size=5)
    spare = pool.recall([])
    pool.reserve(spare, 12)  # so that blocks do not lie in order
    rows = [pool.recall([]) for _ in texts]
    got: list[list[Tensor]] = [[] for _ in texts]
    for first, last in ((0, 5), (5, 6), (6, 7), (7, 18), (18, 19), (19, 30)):
        if first == 7:
            pool.crop(spare, 0)
        new = [(i, text[0, first:last].tolist()) for i, text in enumerate(texts) if text.size(1) > first]
        hidden = fast.extend_rows([ids for _, ids in new], pool, [rows[i] for i, _ in new])
        for (i, ids), part in zip(new, hidden, strict=True):
            assert not part[: len(part) - len(ids)].any()  # padding at the left
            got[i].append(part[len(part) - len(ids) :])
    for text, row, parts in zip(texts, rows, got, strict=True):
        assert row.length == text.size(1)
        cache = fast.new_cache(capacity=text.size(1))
        alone = torch.cat([fast.extend(part, cache) for part in text.split(1, dim=1)], 1)[0]
        assert torch.equal(torch.cat(parts), alone)
        assert max_diff(fast.lm_head(alone), model(text)[0]) < (2e-5 if format == kv else 0.1)
    with pytest.raises(ValueError, match="3 more tokens do not fit into block_size 32: 2 left"):
        fast.extend_rows([[1, 2, 3]], pool, rows[:1])


@pytest.mark.parametrize("shape", IN_ONE_CALL)
@torch.inference_mode()
def test_keys_and_values_in_bfloat16_are_those_of_the_full_pass_after_rounding(shape: str, with_kernels: bool) -> None:
    model = tiny(**SHAPES[shape])
    ids = random_ids(2, 20)
    fast = cached(model).pack("float32", "bfloat16")
    right, plain = full_pass(model, ids, "bfloat16"), model(ids)
    for chunks in ([20], [1] * 20, [7, 1, 12]):
        cache = fast.new_cache(2)
        assert {t.dtype for t in (*cache.k, *cache.v)} == {torch.bfloat16}
        got = torch.cat([fast(part, cache)[0] for part in ids.split(chunks, dim=1)], dim=1)
        # A number at the border between two steps may be rounded to either: a part of what rounding them all moves.
        assert max_diff(got, right) < max_diff(right, plain) < 0.1, chunks
    assert cache.nbytes() * 2 == cached(model).new_cache(2).nbytes()
    with pytest.raises(UserError, match="kv=int8 is not known: choose one of float32, bfloat16"):
        cached(model).pack("float32", "int8")


def test_the_cost_of_a_format_is_its_bytes() -> None:
    model = cached(tiny(n_embd=64, n_head=2, n_kv_head=2, n_inner=64))
    matrices = sum(-(-len(p) // 16) * 16 * p.size(1) for p in model.parameters() if p.dim() == 2)  # whole panels
    size = {}
    for format in packed.FORMATS:
        fast = cached(tiny(n_embd=64, n_head=2, n_kv_head=2, n_inner=64)).pack(format)
        size[format] = sum(b.nbytes for n, b in fast.named_buffers() if n.endswith("weight"))
    assert size == {"float32": 4 * matrices, "bfloat16": 2 * matrices, "int8": matrices, "int4": matrices // 2}


def test_the_compiled_step_is_exact_one_graph_for_all_lengths_and_no_other_models() -> None:
    if kernels.build():
        pytest.skip(kernels.build())
    plain = [tiny(seed=seed, n_head=4, n_kv_head=2) for seed in (0, 1)]
    fast = [cached(model).compile_decode() for model in plain]
    torch._dynamo.utils.counters.clear()
    for model, compiled in zip(plain, fast, strict=True):
        for length, new in ((3, 12), (9, 20), (20, 40)):  # the last one goes past block_size
            ids = random_ids(1, length)
            expected = model.generate(ids, new, temperature=0)
            assert torch.equal(compiled.generate(ids, new, temperature=0), expected)
        cache = compiled.new_cache(1)
        ids = random_ids(1, 12)
        rows = [compiled(part, cache)[0] for part in ids.split([4, *[1] * 8], dim=1)]
        with torch.no_grad():
            assert max_diff(torch.cat(rows, dim=1), model(ids)) < 1e-5
        with pytest.raises(ValueError, match="do not fit into a cache with a capacity of 4"):
            small = compiled.new_cache(1, capacity=4)
            compiled(ids[:, :4], small)
            compiled(ids[:, 4:5], small)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # inference and no_grad mode, two models
