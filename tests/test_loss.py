"""The losses against the textbook: F.cross_entropy, finite differences, and numbers worked out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import VOCAB, max_diff, random_ids, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pocketgpt import loss, token_files
from pocketgpt.evaluation import answer_log_probs
from pocketgpt.loss import IGNORE, linear_cross_entropy, linear_log_probs


def case(rows: int, length: int, seed: int = 0, supervised: float = 0.6) -> tuple[Tensor, Tensor, Tensor]:
    """hidden (rows, length, 16), weight (VOCAB, 16), targets (rows, length), of which a share counts."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, 16, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, 16, generator=generator, requires_grad=True)
    targets = torch.randint(VOCAB, (rows, length), generator=generator)
    targets[torch.rand(rows, length, generator=generator) > supervised] = IGNORE
    return hidden, weight, targets


def textbook(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")


def gradients(total: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(total, inputs))


@given(st.integers(1, 4), st.integers(1, 30), st.sampled_from([0.0, 0.1, 0.6, 1.0]), st.integers(1, 40), st.integers())
@settings(max_examples=80, deadline=None)
def test_value_and_gradients_are_those_of_cross_entropy(
    rows: int, length: int, supervised: float, chunk: int, seed: int
) -> None:
    hidden, weight, targets = case(rows, length, seed % 1000, supervised)
    expected = textbook(hidden, weight, targets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss.CHUNK, "cpu", chunk)  # most often several chunks, the last one not full
        total = linear_cross_entropy(hidden, weight, targets, torch.float32)
    assert total.dtype == torch.float32
    assert total.shape == ()
    size = max(1.0, expected.item())
    assert abs(total.item() - expected.item()) < 1e-5 * size
    # 0.37: what comes from above, as the number of tokens that the sum is divided by
    for got, wanted in zip(
        gradients(total * 0.37, hidden, weight), gradients(expected * 0.37, hidden, weight), strict=True
    ):
        assert got.dtype == torch.float32
        assert max_diff(got, wanted) < 1e-5 * max(1.0, wanted.abs().max().item())


def test_positions_that_are_not_supervised_get_no_gradient() -> None:
    hidden, weight, targets = case(3, 9)
    (grad,) = gradients(linear_cross_entropy(hidden, weight, targets, torch.float32), hidden)
    counted = targets != IGNORE
    assert 0 < counted.sum() < 27
    assert not grad[~counted].any()
    assert grad[counted].any(-1).all()


def test_with_nothing_supervised_loss_and_gradients_are_zero() -> None:
    hidden, weight, targets = case(2, 7, supervised=-1.0)
    assert (targets == IGNORE).all()
    total = linear_cross_entropy(hidden, weight, targets, torch.float32)
    assert total.item() == 0.0
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.shape == hidden.shape
    assert not hidden.grad.any()
    assert not weight.grad.any()
    # and in a whole model: every gradient is there, finite and 0
    model = tiny()
    ids = random_ids(2, 7)
    linear_cross_entropy(model.hidden_states(ids), model.lm_head.weight, targets, torch.float32).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()


def test_gradients_by_finite_differences() -> None:
    hidden, weight, targets = case(2, 5)
    got = gradients(linear_cross_entropy(hidden, weight, targets, torch.float32), hidden, weight)
    doubles = [hidden.detach().double(), weight.detach().double()]
    step = 1e-6

    def value() -> float:
        return textbook(doubles[0], doubles[1], targets).item()

    for tensor, gradient in zip(doubles, got, strict=True):
        flat = tensor.view(-1)
        for index in range(0, flat.numel(), 7):
            kept = flat[index].item()
            flat[index] = kept + step
            above = value()
            flat[index] = kept - step
            below = value()
            flat[index] = kept
            assert abs((above - below) / (2 * step) - gradient.view(-1)[index].item()) < 1e-5


def test_a_known_value() -> None:
    # logits 0 and ln 3: probabilities 1/4 and 3/4
    hidden = torch.tensor([[[1.0], [1.0], [1.0]]])
    weight = torch.tensor([[0.0], [math.log(3)]])
    targets = torch.tensor([[0, 1, IGNORE]])
    assert abs(linear_cross_entropy(hidden, weight, targets, torch.float32).item() - math.log(4 * 4 / 3)) < 1e-6


def test_huge_logits_stay_finite() -> None:
    hidden = torch.tensor([[[1000.0], [-1000.0]]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    total = linear_cross_entropy(hidden, weight, torch.tensor([[0, 0]]), torch.float32)
    assert total.item() == 2000.0
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(total, hidden, weight))


def test_one_weight_that_is_head_and_embedding_gets_both_gradients() -> None:
    ids, targets = random_ids(2, 8), random_ids(2, 8, seed=1)
    ours, theirs = tiny(), tiny()
    linear_cross_entropy(ours.hidden_states(ids), ours.lm_head.weight, targets, torch.float32).backward()
    F.cross_entropy(theirs(ids).flatten(0, 1), targets.flatten(), reduction="sum").backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert max_diff(a.grad, b.grad) < 1e-5 * max(1.0, b.grad.abs().max().item())


def test_products_in_bfloat16_lose_precision_and_nothing_else() -> None:
    hidden, weight, targets = case(4, 40, supervised=1.0)
    total = linear_cross_entropy(hidden, weight, targets, torch.bfloat16)
    expected = textbook(hidden, weight, targets)
    assert total.dtype == torch.float32
    assert abs(total.item() / expected.item() - 1) < 0.01
    for got, wanted in zip(gradients(total, hidden, weight), gradients(expected, hidden, weight), strict=True):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() < 0.02 * wanted.norm()
    # the logits have been rounded, but their softmax has not
    rounded = (hidden.bfloat16() @ weight.bfloat16().T).float().flatten(0, 1)
    exact = F.cross_entropy(rounded, targets.flatten(), reduction="sum").item()
    assert abs(total.item() / exact - 1) < 1e-5
    low = hidden.detach().bfloat16().requires_grad_()  # what autocast hands over
    (gradient,) = gradients(linear_cross_entropy(low, weight, targets, torch.bfloat16), low)
    assert gradient.dtype == torch.bfloat16


@given(st.integers(1, 100), st.sampled_from([7, 64, 256]), st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_log_probs_per_token_and_their_gradients(n: int, chunk: int, seed: int) -> None:
    hidden, weight, targets = case(1, n, seed, supervised=1.0)
    expected = F.linear(hidden[0], weight).log_softmax(-1).gather(-1, targets[0][:, None])[:, 0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(loss.CHUNK, "cpu", chunk)
        got = linear_log_probs(hidden[0], weight, targets[0], torch.float32)
        assert max_diff(got, expected) < 1e-4
        above = torch.linspace(-1, 2, n)  # a different factor for every token
        for ours, theirs in zip(
            gradients((got * above).sum(), hidden, weight),
            gradients((expected * above).sum(), hidden, weight),
            strict=True,
        ):
            assert max_diff(ours, theirs) < 1e-4 * max(1.0, theirs.abs().max().item())


@pytest.mark.parametrize("shape", ["rope", "learned"])
@torch.no_grad()
def test_the_log_prob_of_an_answer_is_a_sum_that_padding_does_not_change(shape: str) -> None:
    model = tiny(position=shape)
    ids = random_ids(2, 10)
    ids[:, 8] = 0  # an id like any other
    targets = ids.roll(-1, dims=1)
    targets[:, -1] = IGNORE
    targets[0, :4] = IGNORE  # a prompt of five tokens, an answer of five
    targets[1, :7] = IGNORE  # the other's answer: two
    logs = model(ids).log_softmax(-1).gather(-1, targets.clamp_min(0)[..., None])[..., 0]
    expected = (logs * (targets != IGNORE)).sum(1)
    got = answer_log_probs(model, ids, targets, torch.float32)
    assert got.dtype == torch.float32
    assert max_diff(got, expected) < 1e-5
    step_by_step = sum(model(ids)[1, at].log_softmax(-1)[ids[1, at + 1]].item() for at in (7, 8))
    assert abs(got[1].item() - step_by_step) < 1e-5
    assert got[0] < got[1] - 5  # no mean: five unlikely tokens are less likely than two

    def padded(t: Tensor, value: int) -> Tensor:
        return torch.cat((t, torch.full((2, 9), value)), dim=1)

    for value in (0, 5):
        again = answer_log_probs(model, padded(ids, value), padded(targets, IGNORE), torch.float32)
        assert max_diff(again, got) < 1e-5
    alone = answer_log_probs(model, ids[1:], targets[1:], torch.float32)
    assert max_diff(alone, got[1:]) < 1e-5
    nothing = answer_log_probs(model, ids, torch.full_like(ids, IGNORE), torch.float32)
    assert nothing.tolist() == [0.0, 0.0]


def test_positions_without_a_target_are_marked_the_same_everywhere() -> None:
    assert IGNORE == token_files.IGNORE == -1
