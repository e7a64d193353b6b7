"""The sampler: what each filter keeps, what each setting refuses, and where its randomness comes from."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketgpt.errors import UserError
from pocketgpt.sampling import Settings, filter_logits, penalise_repetition, sample, sample_rows

P = torch.tensor([[0.05, 0.5, 0.15, 0.3]])  # not in order, so that sorting has to be undone
NOTHING_SEEN = torch.zeros(1, 0, dtype=torch.long)


def kept(probabilities: torch.Tensor = P, **keywords: float) -> set[int]:
    """Ids that may come out."""
    logits = filter_logits(probabilities.log(), Settings(**keywords))  # type: ignore[arg-type]
    assert logits.shape == probabilities.shape
    return set(logits[0].isfinite().nonzero().flatten().tolist())


def frequencies(probabilities: torch.Tensor, n: int = 4000, seed: int = 0, **keywords: float) -> list[float]:
    logits = probabilities.log().expand(n, -1)
    seen = torch.zeros(n, 0, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    ids = sample(logits, Settings(**keywords), seen, logits.size(1), generator)  # type: ignore[arg-type]
    return (torch.bincount(ids, minlength=logits.size(1)) / n).tolist()


@pytest.mark.parametrize(
    ("top_p", "ids"),
    [
        (0.6, {1, 3}),
        (0.85, {1, 3, 2}),
        (1.0, {0, 1, 2, 3}),
        (1e-8, {1}),
        (0.49, {1}),
        (0.51, {1, 3}),
        (0.96, {0, 1, 2, 3}),
    ],
)
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float, ids: set[int]) -> None:
    assert kept(top_p=top_p) == ids


def test_top_k_keeps_the_most_probable() -> None:
    assert kept(top_k=1) == {1}
    assert kept(top_k=3) == {1, 2, 3}
    assert kept(top_k=4) == {0, 1, 2, 3}
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(filter_logits(logits, Settings(top_k=200)), logits)  # more than there are: no filter
    assert torch.equal(filter_logits(logits, Settings()), logits)


def test_min_p_is_relative_to_the_most_probable() -> None:
    assert kept(min_p=0.0) == {0, 1, 2, 3}
    assert kept(min_p=0.2) == {1, 2, 3}  # 0.2 x 0.5 = 0.1
    assert kept(min_p=0.5) == {1, 3}
    assert kept(min_p=1.0) == {1}


def test_filters_apply_one_after_the_other() -> None:
    # among the two that top_k leaves, .5 and .3 have become .625 and .375, and .625 holds the mass of .6 alone
    assert kept(top_k=2, top_p=0.6) == {1}
    assert kept(top_k=3, top_p=0.6) == {1, 3}
    # a temperature of 2 flattens .5 .3 .15 .05 to .379 .294 .208 .120, so that .6 needs two and .7 needs three
    flat = P.log() / 2
    assert filter_logits(flat, Settings(top_p=0.65))[0].isfinite().sum() == 2
    assert filter_logits(flat, Settings(top_p=0.7))[0].isfinite().sum() == 3


def test_rows_are_filtered_each_on_its_own() -> None:
    logits = torch.cat((P, P.flip(1))).log()
    both = filter_logits(logits, Settings(top_p=0.6, top_k=3, min_p=0.01)).isfinite()
    assert both.tolist() == [[False, True, False, True], [True, False, True, False]]


@given(
    st.lists(st.floats(-1000, 1000), min_size=1, max_size=30),
    st.one_of(st.none(), st.integers(1, 40)),
    st.one_of(st.none(), st.floats(0, 1, exclude_min=True)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.floats(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_whatever_the_filters_the_most_probable_survives(
    values: list[float], top_k: int | None, top_p: float | None, min_p: float | None, temperature: float
) -> None:
    logits = torch.tensor([values])
    filtered = filter_logits(logits, Settings(1.0, top_k, top_p, min_p))
    assert filtered.max() == logits.max()
    surviving = filtered.isfinite()
    assert torch.equal(filtered[surviving], logits[surviving])  # and what survives is unchanged
    if 0 < temperature < 1e-44:
        return  # see below_float32
    token = int(sample(logits, Settings(temperature, top_k, top_p, min_p), NOTHING_SEEN, len(values)))
    assert 0 <= token < len(values)
    if temperature == 0:
        assert values[token] == max(values) or logits[0, token] == logits.max()


below_float32 = pytest.param(1e-300)


@pytest.mark.parametrize("temperature", [1e-6, 1e-39, 1e-44, below_float32])
def test_a_temperature_next_to_zero_is_next_to_argmax(temperature: float) -> None:
    assert sample(torch.tensor([[1.0, 3.0, -2.0]]), Settings(temperature), NOTHING_SEEN, 3).tolist() == [1]


def test_the_share_of_each_token_is_its_probability() -> None:
    tolerance = 0.03  # 4 deviations of a share of 4000 draws
    for got, wanted in zip(frequencies(P), P[0].tolist(), strict=True):
        assert abs(got - wanted) < tolerance
    two = frequencies(P, top_p=0.6)
    assert two[0] == two[2] == 0
    assert abs(two[1] - 0.5 / 0.8) < tolerance
    squared = (P**2 / (P**2).sum())[0].tolist()
    for got, wanted in zip(frequencies(P, temperature=0.5), squared, strict=True):
        assert abs(got - wanted) < tolerance


def test_temperature_zero_is_argmax_whatever_the_filters_and_the_seed() -> None:
    logits = P.log()
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        greedy = Settings(temperature=0, top_k=2, top_p=0.1, min_p=0.9)
        assert sample(logits, greedy, NOTHING_SEEN, 4, generator).tolist() == [1]
    assert sample(logits, Settings(temperature=0.01), NOTHING_SEEN, 4).tolist() == [1]
    assert sample(torch.tensor([[2.0, 2.0, 1.0]]), Settings(temperature=0), NOTHING_SEEN, 3).tolist() == [0]  # a tie


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -5}, "top_k is -5"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": -1}, "top_p is -1"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 1.1}, "min_p is 1.1"),
        ({"min_p": math.nan}, "min_p is nan"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"repetition_penalty": math.nan}, "repetition_penalty is nan"),
    ],
)
def test_settings_that_mean_nothing(keywords: dict, says: str) -> None:
    with pytest.raises(UserError) as caught:
        Settings(**keywords)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_repetition_penalty_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.0], [2.0, -2.0, 1.0, 0.0]])
    seen = torch.tensor([[0, 1, 1, 0], [3, 3, 2, 3]])  # often is no worse than once
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0, 0.0], [2.0, -2.0, 0.5, 0.0]]
    assert torch.equal(penalise_repetition(logits, seen, 1.0), logits)
    assert penalise_repetition(logits, seen, 0.5)[0].tolist() == [4.0, -1.0, 1.0, 0.0]  # below 1 it encourages
    greedy = Settings(temperature=0, repetition_penalty=4.0)
    assert sample(logits, greedy, seen, 4).tolist() == [2, 0]


def test_ids_past_the_tokenizer_never_come_out() -> None:
    logits = torch.zeros(500, 100)
    logits[:, 97:] = 50.0
    seen = torch.full((500, 2), 99)  # nor does it matter that they were seen
    for chosen in (Settings(0), Settings(), Settings(1.0, 5), Settings(1.0, 200), Settings(5.0, None, 0.1, 0.5, 1.3)):
        ids = sample(logits, chosen, seen, 97)
        assert int(ids.max()) < 97
    assert torch.equal(sample(logits, Settings(0), seen, 100), torch.full((500,), 97))


def test_randomness_is_the_generator_s_alone() -> None:
    logits = torch.zeros(50, 97)
    seen = torch.zeros(50, 0, dtype=torch.long)

    def draw(seed: int) -> list[int]:
        return sample(logits, Settings(), seen, 97, torch.Generator().manual_seed(seed)).tolist()

    before = torch.random.get_rng_state()
    assert draw(3) == draw(3) != draw(4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_half_precision_logits_are_sampled_in_float32() -> None:
    # 2049 is no half-precision number: dividing 2048 by a temperature in that type would tie what is not tied
    logits = torch.tensor([[2048.0, 2046.0]], dtype=torch.float16)
    assert sample(logits, Settings(temperature=0.01), NOTHING_SEEN, 2).tolist() == [0]
    flat = sample(torch.zeros(2000, 2, dtype=torch.bfloat16), Settings(), torch.zeros(2000, 0, dtype=torch.long), 2)
    assert 0.45 < flat.float().mean() < 0.55


MIXED = [
    Settings(),
    Settings(temperature=0),
    Settings(temperature=0.7, top_k=5),
    Settings(top_p=0.6),
    Settings(temperature=2.0, min_p=0.05),
    Settings(top_k=1),
    Settings(temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
    Settings(temperature=0, repetition_penalty=5.0),
    Settings(top_k=200, top_p=1.0, min_p=0.0),
]


def test_filters_of_several_rows_at_once_are_those_of_each() -> None:
    for scale in (3, 200):  # with 200, the most probable id has a mass that is rounded to 1
        logits = torch.randn(9, 97, generator=torch.Generator().manual_seed(0)) * scale
        together = filter_logits(logits, MIXED)
        assert torch.equal(together[[0, -1]], logits[[0, -1]])  # no filter at all
        for row, chosen in enumerate(MIXED):
            assert torch.equal(together[row : row + 1], filter_logits(logits[row : row + 1], chosen)), chosen


def test_each_row_is_sampled_with_its_own_settings_whatever_stands_beside_it() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(9, 100, generator=generator) * 2
    logits[:, 97:] = 50  # padding of the vocabulary
    seen = [torch.randint(97, (n + 1,), generator=generator).tolist() for n in range(9)]
    drawn = set()
    for _ in range(50):
        uniform = torch.rand(9, generator=generator).tolist()
        together = sample_rows(logits, MIXED, seen, 97, uniform).tolist()
        for row, chosen in enumerate(MIXED):
            one = sample_rows(logits[row : row + 1], [chosen], seen[row : row + 1], 97, uniform[row : row + 1])
            assert one.tolist() == [together[row]], chosen
            if chosen.temperature == 0 or chosen.top_k == 1:
                assert one.equal(sample(logits[row : row + 1], chosen, torch.tensor([seen[row]]), 97))
        drawn.add(tuple(together))
        assert max(together) < 97
    assert len(drawn) > 40


@pytest.mark.parametrize("chosen", [s for s in MIXED if s.temperature])
def test_evenly_spread_numbers_give_each_id_its_probability(chosen: Settings) -> None:
    """The same distribution as `sample`, but exact: of n numbers an id gets its share to one or two."""
    n, seen = 5000, [3, 4, 5]
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(2)) * 2
    uniform = [(i + 0.5) / n for i in range(n)]
    ids = sample_rows(logits.expand(n, -1), [chosen] * n, [seen] * n, 97, uniform)
    adjusted = penalise_repetition(logits, torch.tensor([seen]), chosen.repetition_penalty) / chosen.temperature
    expected = filter_logits(adjusted, chosen).softmax(-1)[0]
    shares = torch.bincount(ids, minlength=97) / n
    assert float((shares - expected).abs().max()) <= 2 / n
    assert bool((expected[ids] > 0).all())


def test_the_ends_of_the_unit_interval_choose_what_can_come_out() -> None:
    logits = torch.full((2, 6), -math.inf)
    logits[:, 2], logits[:, 4] = 0.0, 0.0
    assert sample_rows(logits, [Settings()] * 2, [[0]] * 2, 6, [0.0, 1 - 2**-24]).tolist() == [2, 4]
    assert sample_rows(logits, [Settings()] * 2, [[0]] * 2, 6, [0.5 - 2**-24, 0.5]).tolist() == [2, 4]
