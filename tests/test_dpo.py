"""Preferences: every loss by hand and by its slopes, batches of like length, and what a user may ask for."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from helpers import max_diff, random_ids, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpo import NUMBERS, REFERENCE_FREE, Config, Pair, PairRows, preference_loss
from pocketgpt import config
from pocketgpt.errors import UserError
from pocketgpt.evaluation import answer_log_probs
from pocketgpt.loss import IGNORE
from pocketgpt.tokenizer import Tokenizer

LN2 = math.log(2)
TOKENS = (4, 5)  # of the chosen and of the rejected answer


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def one_pair(loss: str, policy: tuple, reference: tuple, **numbers: float) -> tuple[float, float, float]:
    """Loss and rewards of a single pair."""
    q = None if loss in REFERENCE_FREE else doubles(*reference)
    found = preference_loss(loss, doubles(*policy), q, torch.tensor(TOKENS), **numbers)
    return tuple(value.item() for value in found)  # type: ignore[return-value]


# --- values -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "reference", "smoothing", "value"),
    [
        ((-10, -20), (-12, -18), 0.0, 0.51302),
        ((-20, -10), (-18, -12), 0.0, 0.91302),
        ((-10, -20), (-12, -18), 0.1, 0.55302),
        ((-10, -20), (-10, -20), 0.0, 0.693147),
        ((-10, -20), (-10, -20), 0.3, 0.693147),
        ((-10, -20), (-12, -18), 0.5, 0.71302),
    ],
)
def test_dpo_and_its_conservative_form_by_hand(policy: tuple, reference: tuple, smoothing: float, value: float) -> None:
    for name in ("sigmoid", "cdpo"):
        loss, chosen, rejected = one_pair(name, policy, reference, beta=0.1, label_smoothing=smoothing)
        assert abs(loss - value) < 1e-5
        assert abs(chosen - 0.1 * (policy[0] - reference[0])) < 1e-12
        assert abs(rejected - 0.1 * (policy[1] - reference[1])) < 1e-12


@pytest.mark.parametrize(
    ("loss", "policy", "numbers", "value"),
    [
        # log(p/q) of the chosen -10 + 12 = 2, of the rejected -20 + 18 = -2: they differ by h = 4
        ("ipo", (-10, -20), {"beta": 0.1}, (4 - 1 / (2 * 0.1)) ** 2),  # 5 are asked for
        ("ipo", (-10, -20), {"beta": 0.125}, 0.0),  # 4 are asked for
        ("ipo", (-20, -10), {"beta": 0.25}, (-16 - 2) ** 2),  # h = -8 - 8
        ("hinge", (-10, -20), {"beta": 0.1}, 1 - 0.1 * 4),
        ("hinge", (-10, -20), {"beta": 0.25}, 0.0),
        ("hinge", (-20, -10), {"beta": 0.25}, 1 + 0.25 * 16),
        # per token -10/4 = -2.5 and -20/5 = -4: rewards -5 and -8, a margin of 3, of which 1 is asked for
        ("simpo", (-10, -20), {"beta": 2.0, "gamma": 1.0}, math.log(1 + math.exp(-2))),
        ("simpo", (-10, -12.5), {"beta": 2.0, "gamma": 0.0}, LN2),  # both -2.5: the length is divided out
        # odds e^-2.5 / (1 - e^-2.5) = 0.0894254 and e^-4 / (1 - e^-4) = 0.0186574; log sigmoid(log x) = log(x / (1 + x))
        ("orpo", (-10, -20), {"beta": 0.1}, -0.1 * math.log(0.0894254 / 0.0186574 / (1 + 0.0894254 / 0.0186574))),
        ("orpo", (-4 * LN2, -5 * LN2), {"beta": 1.0}, LN2),  # P = 1/2 each: odds 1 and 1
        ("orpo", (-4 * LN2, -10 * LN2), {"beta": 1.0}, math.log(4 / 3)),  # odds 1 and 1/3: 3 to 1
    ],
)
def test_the_other_losses_by_hand(loss: str, policy: tuple, numbers: dict[str, float], value: float) -> None:
    found, chosen, rejected = one_pair(loss, policy, (-12, -18), **numbers)
    assert abs(found - value) < 1e-6
    if loss in REFERENCE_FREE:
        assert (chosen, rejected) == pytest.approx((numbers["beta"] * policy[0] / 4, numbers["beta"] * policy[1] / 5))
    else:
        assert (chosen, rejected) == pytest.approx(
            (numbers["beta"] * (policy[0] + 12), numbers["beta"] * (policy[1] + 18))
        )


def by_the_book(loss: str, policy: list[float], reference: list[float], tokens: list[int], **numbers: float) -> float:
    """The same losses written down in another way, from odds and probabilities."""
    beta, e = numbers["beta"], numbers.get("label_smoothing", 0.0)
    (c, r), (qc, qr), (nc, nr) = policy, reference, tokens
    ratio = math.exp(c - qc - r + qr)  # how often c is preferred to r, under the Bradley-Terry model at beta = 1
    if loss in ("sigmoid", "cdpo"):
        prefer, flip = 1 / (1 + ratio**-beta), 1 / (1 + ratio**beta)
        return -(1 - e) * math.log(prefer) - e * math.log(flip)
    if loss == "ipo":
        return math.log(ratio) ** 2 - math.log(ratio) / beta + 1 / (4 * beta**2)
    if loss == "hinge":
        return max(0.0, 1 - math.log(ratio**beta))
    a, b = math.exp(c / nc), math.exp(r / nr)  # probabilities per token
    if loss == "simpo":
        return math.log(1 + math.exp(numbers["gamma"]) * (b / a) ** beta)
    return -beta * math.log(a / (1 - a) / (a / (1 - a) + b / (1 - b)))


@given(st.sampled_from(list(NUMBERS)), st.integers(0, 10_000))
@settings(max_examples=150, deadline=None)
def test_values_and_gradients_are_those_of_the_formulas_in_float64(loss: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(1, 9, 4).tolist()
    policy, reference = (rng.uniform(-3, -0.1, 4) * tokens for _ in range(2))
    numbers = {key: value for key, value in NUMBERS[loss].items() if key != "chosen_nll"}
    numbers["beta"] = float(rng.uniform(0.05, 2))
    p = torch.tensor(policy, requires_grad=True)
    q = None if loss in REFERENCE_FREE else torch.tensor(reference)
    losses, chosen, rejected = preference_loss(loss, p, q, torch.tensor(tokens), **numbers)
    assert losses.shape == (2,) and not chosen.requires_grad and not rejected.requires_grad
    (gradient,) = torch.autograd.grad(losses.sum(), p)
    for pair in (0, 1):
        sides = [pair, pair + 2]

        def value(change: float = 0.0, at: int = 0, sides: list[int] = sides) -> float:
            moved = [policy[i] + (change if i == at else 0.0) for i in sides]
            return by_the_book(loss, moved, [reference[i] for i in sides], [tokens[i] for i in sides], **numbers)

        assert losses[pair].item() == pytest.approx(value(), rel=1e-9, abs=1e-9)
        for at in sides:
            corner = loss == "hinge" and abs(1 - (chosen - rejected)[pair].item()) < 1e-4
            slope = (value(1e-5, at) - value(-1e-5, at)) / 2e-5
            assert corner or gradient[at].item() == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_an_answer_that_is_certain_has_a_finite_loss_and_gradient() -> None:
    for loss in NUMBERS:
        numbers = {key: value for key, value in NUMBERS[loss].items() if key != "chosen_nll"}
        for policy in ((0.0, -2000.0), (-2000.0, 0.0), (0.0, 0.0)):
            p = torch.tensor(policy, requires_grad=True)
            q = None if loss in REFERENCE_FREE else torch.zeros(2)
            losses, *_ = preference_loss(loss, p, q, torch.tensor([3, 7]), **numbers)
            (gradient,) = torch.autograd.grad(losses.sum(), p)
            assert losses.isfinite().all() and gradient.isfinite().all(), (loss, policy)


@pytest.mark.parametrize("loss", NUMBERS)
def test_the_first_step_prefers_the_chosen_answer(loss: str) -> None:
    """From a policy equal to its reference: ln 2 where it should be, and a gradient in every parameter."""
    model = tiny(dropout=0.2)  # eval: dropout is off, or the two would differ by chance
    ids, targets = random_ids(4, 12), random_ids(4, 12, seed=1)
    targets[:, :5] = IGNORE
    targets[0, 5:8] = IGNORE
    lengths = (targets != IGNORE).sum(1)
    policy = answer_log_probs(model, ids, targets, torch.float32)
    reference = None if loss in REFERENCE_FREE else policy.detach()
    numbers = {key: value for key, value in NUMBERS[loss].items() if key != "chosen_nll"}
    losses, chosen, rejected = preference_loss(loss, policy, reference, lengths, **numbers)
    if reference is not None:
        start = {"sigmoid": LN2, "cdpo": LN2, "ipo": 25.0, "hinge": 1.0}[loss]
        assert max_diff(losses.detach(), torch.full((2,), start)) < 1e-5
        assert not chosen.any() and not rejected.any()
    (pull,) = torch.autograd.grad(losses.sum(), policy, retain_graph=True)
    assert (pull[:2] < 0).all() and (pull[2:] > 0).all()
    losses.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


# --- batches --------------------------------------------------------------------------------------------------------------


def make_rows(tok: Tokenizer, lengths: list[tuple[int, int]], seed: int = 0, block_size: int = 10_000) -> PairRows:
    """Pairs whose answers have these numbers of one-token words."""
    word = next(w for w in "abcdefgh" if len(tok.encode(w)) == 1)
    pairs = [Pair([{"role": "user", "content": "q"}], word * a, word * b) for a, b in lengths]
    return PairRows(tok, pairs, block_size, seed)


LENGTHS = st.lists(st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=50)


@given(LENGTHS, st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_pair_is_seen_once_an_epoch_in_batches_of_nearly_equal_size(
    tok: Tokenizer, lengths: list[tuple[int, int]], size: int, epoch: int
) -> None:
    rows = make_rows(tok, lengths)
    steps = rows.steps_per_epoch(size)
    batches = [rows.which(epoch * steps + step, size) for step in range(steps)]
    assert Counter(pair for batch in batches for pair in batch) == Counter(range(len(lengths)))
    assert max(map(len, batches)) <= size and max(map(len, batches)) - min(map(len, batches)) <= 2
    for batch in batches:
        widths = [max(lengths[pair]) for pair in batch]
        assert widths == sorted(widths, reverse=True)  # memory that does not suffice shows in the first micro-batch


def test_the_order_follows_from_seed_and_step_alone(tok: Tokenizer) -> None:
    lengths = [(i % 17 + 1, i % 13 + 1) for i in range(60)]
    rows, again, other = make_rows(tok, lengths), make_rows(tok, lengths), make_rows(tok, lengths, seed=1)
    forward = [rows.which(step, 8) for step in range(24)]
    assert forward == [again.which(step, 8) for step in reversed(range(24))][::-1]
    assert forward != [other.which(step, 8) for step in range(24)]
    assert forward[:8] != forward[8:16]  # the next epoch is another one, and not only in the order of its batches
    assert sorted(map(sorted, forward[:8])) != sorted(map(sorted, forward[8:16]))


def test_pairs_of_like_length_share_a_batch(tok: Tokenizer) -> None:
    """Counted in tokens, against the same pairs in random batches."""
    rng = np.random.default_rng(0)
    lengths = [(int(n), int(max(1, n + rng.integers(-4, 5)))) for n in rng.integers(4, 400, 512)]
    rows = make_rows(tok, lengths)
    real = sum(map(len, rows.chosen + rows.rejected))

    def padding(batches: list[list[int]]) -> float:
        return 1 - real / sum(rows.rows(batch)[0].numel() for batch in batches)

    sorted_batches = [rows.which(step, 16) for step in range(32)]
    random_batches = np.array_split(rng.permutation(512), 32)
    assert padding([batch.tolist() for batch in random_batches]) > 0.4
    assert padding(sorted_batches) == rows.padding(16, 16) < 0.15


def test_rows_are_never_wider_than_the_block(tok: Tokenizer) -> None:
    rows = make_rows(tok, [(1, 2)])
    longest = len(rows.rejected[0])
    assert longest % 32 and rows.rows([0])[0].shape == (2, -(-longest // 32) * 32)
    narrow = make_rows(tok, [(1, 2), (1, 3)], block_size=longest)
    assert narrow.too_long == 1 and narrow.rows([0])[0].shape == (2, longest)


def test_a_batch_brings_the_reference_of_its_pairs(tok: Tokenizer) -> None:
    rows = make_rows(tok, [(i + 1, 2 * i + 1) for i in range(10)])
    assert all(len(batch.inputs) == 2 for batch in rows.batch(0, 4, 2))
    rows.reference = torch.stack((torch.arange(10.0), -torch.arange(10.0)))
    for step in range(3):
        pairs = rows.which(step, 4)
        batches = rows.batch(step, 4, 3)
        assert [batch.weight for batch in batches] == [len(pairs[:3]), *([len(pairs[3:])] if pairs[3:] else [])]
        found = [reference.chunk(2) for *_, reference in (batch.inputs for batch in batches)]
        assert torch.cat([chosen for chosen, _ in found]).tolist() == pairs
        assert torch.cat([rejected for _, rejected in found]).tolist() == [-pair for pair in pairs]
        inputs, targets, _ = batches[0].inputs
        assert batches[0].tokens == inputs.numel()
        assert (targets != IGNORE).sum(1).tolist() == rows.lengths()[:, pairs[:3]].flatten().tolist()


@torch.no_grad()
def test_log_probs_of_all_pairs_are_those_of_each_alone(tok: Tokenizer) -> None:
    rows = make_rows(tok, [(i % 5 + 1, 3 * i % 7 + 1) for i in range(40)])
    model = tiny(vocab_size=tok.vocab_size, block_size=64)
    found = rows.log_probs(model, torch.float32)
    assert found.shape == (2, 40)
    for pair in (0, 7, 39):
        alone = answer_log_probs(model, *rows.rows([pair]), torch.float32)
        assert max_diff(found[:, pair], alone) < 1e-4


# --- settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dpo.loss=kto"], "dpo.loss is 'kto': choose sigmoid, cdpo, ipo, hinge, simpo, orpo"),
        (["dpo.loss=ipo", "dpo.gamma=1"], "dpo.loss=ipo has no gamma"),
        (["dpo.loss=simpo", "dpo.label_smoothing=0.1"], "dpo.loss=simpo has no label_smoothing"),
        (["dpo.loss=orpo", "dpo.beta=0"], "dpo.beta is 0.0: it must be at least 1e-09"),
        (["dpo.beta=nan"], "dpo.beta is nan"),
        (["dpo.label_smoothing=0.5"], "dpo.label_smoothing is 0.5: it must be at least 0 and below 0.5"),
        (["dpo.chosen_nll=-1"], "dpo.chosen_nll is -1.0"),
        (["dpo.samples=1"], "dpo.samples must be at least 2"),
    ],
)
def test_settings_that_make_no_loss_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        config.load("dpo", Config, arguments).dpo.check()
    assert message in str(error.value)


def test_each_loss_has_numbers_of_its_own() -> None:
    def numbers(*arguments: str) -> dict[str, Any]:
        settings = config.load("dpo", Config, list(arguments)).dpo
        settings.check()
        return settings.numbers()

    assert numbers() == {"beta": 0.3, "label_smoothing": 0.0, "chosen_nll": 0.5}
    assert numbers("dpo.loss=simpo", "dpo.beta=2.5") == {"beta": 2.5, "gamma": 1.0, "chosen_nll": 0.0}
    for loss in NUMBERS:
        assert numbers(f"dpo.loss={loss}") == NUMBERS[loss]
