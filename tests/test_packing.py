"""Packed rows: conversations that share a row read as if alone, none is lost or cut, and the order is a function of the step."""

from collections import Counter

import numpy as np
import pytest
import torch
from helpers import max_diff, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pocketgpt import chat_template, packing
from pocketgpt.errors import UserError
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.packing import Example, PackedRows, attention_mask, encode, examples, lay_out, pack, row_length
from pocketgpt.shapes import Chat
from pocketgpt.tokenizer import Tokenizer


def example(number: int, length: int) -> Example:
    """Ids by which it is recognised: the first is its number."""
    ids = np.random.default_rng(number).integers(0, 97, length)
    ids[0] = number
    return Example(ids, np.where(np.arange(length) % 3 == 1, (ids + 1) % 97, IGNORE))


def turns(*contents: str) -> list[chat_template.Message]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


LENGTHS = st.lists(st.integers(1, 32), min_size=1, max_size=60)


@given(LENGTHS, st.integers(32, 40), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_every_item_is_in_exactly_one_row_and_no_row_is_too_long(
    lengths: list[int], capacity: int, open_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "OPEN_ROWS", open_rows)
        rows = pack(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)


def test_packing_by_hand() -> None:
    # 6 opens a row, 7 another; 4 fills the first, 3 the second, 1 opens a third
    assert pack([6, 7, 4, 3, 1], 10) == [[0, 2], [1, 3], [4]]
    assert pack([10, 10, 10], 10) == [[0], [1], [2]]
    assert pack([], 10) == []
    with pytest.raises(ValueError, match="item 1 of length 11 does not fit into 10"):
        pack([3, 11], 10)


def test_packing_fills_rows() -> None:
    lengths = np.random.default_rng(0).integers(10, 200, 2000).tolist()
    rows = pack(lengths, 512)
    assert sum(lengths) / (512 * len(rows)) > 0.98


@pytest.mark.parametrize(("longest", "length"), [(1, 128), (128, 128), (129, 256), (384, 384), (400, 400)])
def test_rows_are_as_long_as_the_longest_example_needs(longest: int, length: int) -> None:
    assert row_length([example(1, 1), example(2, longest)], 400) == length


def test_targets_are_the_next_ids_where_supervised() -> None:
    made = Example.of([5, 6, 7, 8], [True, False, True, True])
    assert made.inputs.tolist() == [5, 6, 7]
    assert made.targets.tolist() == [IGNORE, 7, 8]
    assert len(made) == 3


def test_exactly_the_answers_and_their_end_tokens_are_supervised(tok: Tokenizer) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *turns("hello", "a b", "and the keeper?", "the lamp")]
    (made,), _ = examples(tok, [Chat(chat)], 512)
    supervised = [*tok.encode("a b"), tok.im_end_id, *tok.encode("the lamp"), tok.im_end_id]
    assert made.targets[made.targets != IGNORE].tolist() == supervised
    # the row that predicts the first token of an answer is the newline after "assistant"
    first = int(np.flatnonzero(made.targets != IGNORE)[0])
    assert tok.decode(made.inputs[: first + 1].tolist()).endswith("<|im_start|>assistant\n")
    assert made.inputs[: first + 1].tolist() == chat_template.render_prompt(tok, chat[:2])
    # the row of an end token predicts the newline after it, which nobody has to learn
    assert made.targets[made.inputs == tok.im_end_id].tolist() == [IGNORE] * 5
    whole, _ = chat_template.render(tok, chat)
    assert [*made.inputs.tolist(), whole[-1]] == whole


def test_conversations_that_are_too_long_are_dropped_and_counted(tok: Tokenizer) -> None:
    chats = [turns("a", "b"), turns("hi " * 60, "ho"), turns("a b c d", "e"), turns("hi", "ho " * 60)]
    short, longer = (len(chat_template.render(tok, chats[i])[0]) - 1 for i in (0, 2))  # the last id is a target only
    assert short < longer
    for block, fitting in ((longer, 2), (longer - 1, 1), (short, 1)):
        kept, too_long = examples(tok, map(Chat, chats), block)
        assert (len(kept), too_long) == (fitting, 4 - fitting)
        assert [len(made) for made in kept] == [short, longer][:fitting]
    with pytest.raises(UserError, match=f"no training conversation is left: 4 were longer than .* {short - 1} tokens"):
        examples(tok, map(Chat, chats), short - 1)


def test_data_without_anything_to_learn_is_refused(tok: Tokenizer) -> None:
    with pytest.raises(UserError, match="no supervised token"):
        examples(tok, [Chat(turns("only a question"))], 512)
    with pytest.raises(UserError, match="no training conversation is left"):
        examples(tok, [], 512)
    kept, _ = examples(
        tok, [Chat(turns("a question")), Chat(turns("hi", ""))], 512
    )  # an empty answer has its end token
    assert [int((made.targets != IGNORE).sum()) for made in kept] == [0, 1]


def test_the_layout_by_hand() -> None:
    row = [
        Example(np.array([5, 6, 7]), np.array([IGNORE, 7, 8])),
        Example(np.array([9, 10]), np.array([10, IGNORE])),
    ]
    made = lay_out([row, row[1:]], 6)
    assert made.inputs.tolist() == [[5, 6, 7, 9, 10, 0], [9, 10, 0, 0, 0, 0]]
    assert made.targets.tolist() == [[IGNORE, 7, 8, 10, IGNORE, IGNORE], [10] + [IGNORE] * 5]
    assert made.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 0, 0, 0]]
    assert made.segments.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, -1, -1, -1, -1]]
    assert {made.inputs.dtype, made.targets.dtype, made.positions.dtype, made.segments.dtype} == {torch.int64}
    assert attention_mask(made.segments).shape == (2, 1, 6, 6)
    assert attention_mask(made.segments)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize("preset", [{}, {"position": "learned", "bias": True}, {"n_head": 4, "n_kv_head": 1}])
@torch.no_grad()
def test_a_conversation_in_a_packed_row_reads_as_if_alone(preset: dict) -> None:
    model = tiny(**preset)
    rows = [[example(1, 9), example(2, 1), example(3, 14)], [example(4, 32)], [example(5, 5)]]
    made = lay_out(rows, 32)
    hidden = model.hidden_states(made.inputs, made.positions, attention_mask(made.segments))
    logits = model.lm_head(hidden)
    assert bool(logits.isfinite().all())  # padding too, or gradients become NaN
    total = 0.0
    for r, row in enumerate(rows):
        at = 0
        for item in row:
            alone = model(torch.from_numpy(item.inputs)[None])[0]
            assert max_diff(logits[r, at : at + len(item)], alone) < 1e-5
            counted = torch.from_numpy(item.targets) != IGNORE
            chosen = alone.log_softmax(-1)[counted, torch.from_numpy(item.targets)[counted]]
            total -= chosen.sum().item()
            at += len(item)
    packed = linear_cross_entropy(hidden, model.lm_head.weight, made.targets, torch.float32)
    assert abs(packed.item() - total) < 1e-5 * total


def test_gradients_through_padding_and_the_mask_are_finite() -> None:
    model = tiny()
    made = lay_out([[example(1, 3)], []], 32)  # the second row is padding alone
    hidden = model.hidden_states(made.inputs, made.positions, attention_mask(made.segments))
    linear_cross_entropy(hidden, model.lm_head.weight, made.targets, torch.float32).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all())
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.any()


def seen(made: packing.Packed) -> Counter[int]:
    """How often each example is there, by its number."""
    starts = (made.positions == 0) & (made.segments >= 0)
    return Counter(made.inputs[starts].tolist())


def make(seed: int = 0, n: int = 60) -> PackedRows:
    lengths = np.random.default_rng(1).integers(2, 25, n)
    return PackedRows([example(i, int(length)) for i, length in enumerate(lengths)], 32, seed)


def epoch(packed: PackedRows, number: int) -> Counter[int]:
    """What the rows of one epoch hold, read in batches of one row."""
    rows = range(number * packed.per_epoch, (number + 1) * packed.per_epoch)
    return sum((seen(packed.batch(step, 1)) for step in rows), Counter())


def test_the_first_epoch_shows_every_example_once() -> None:
    assert epoch(make(), 0) == Counter(range(60))


def test_every_epoch_shows_every_example_once() -> None:
    packed = make()
    for number in range(6):
        assert epoch(packed, number) == Counter(range(60)), number


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    one, two, other = make(seed=3), make(seed=3), make(seed=4)
    late = one.batch(100, 4).inputs  # asked for out of order, as after a resume
    for step in (0, 7, 3, 100, 7):
        a, b = one.batch(step, 4), two.batch(step, 4)
        for name in ("inputs", "targets", "positions", "segments"):
            assert torch.equal(getattr(a, name), getattr(b, name))
    assert torch.equal(one.batch(100, 4).inputs, late)
    assert not torch.equal(one.batch(0, 4).inputs, other.batch(0, 4).inputs)
    assert not torch.equal(one.batch(0, 4).inputs, one.batch(1, 4).inputs)
    # larger batches are the same rows, more at once
    assert torch.equal(torch.cat((one.batch(4, 2).inputs, one.batch(5, 2).inputs)), one.batch(2, 4).inputs)


def test_the_order_changes_from_epoch_to_epoch() -> None:
    packed = make()
    first, second = (packed.batch(number, packed.per_epoch) for number in (0, 1))
    assert first.inputs.shape == second.inputs.shape == (packed.per_epoch, 32)
    assert not torch.equal(first.inputs, second.inputs)


def test_one_short_example_is_enough() -> None:
    packed = PackedRows([example(7, 3)], 32, seed=0)
    made = packed.batch(5, 3)
    assert made.inputs[:, 0].tolist() == [7, 7, 7]
    assert int((made.segments >= 0).sum()) == 9


# --- what is not a conversation from its first turn on --------------------------------------------------------------


def test_answers_before_learn_from_are_read_only(tok: Tokenizer) -> None:
    messages = turns("one", "two", "three", "four")
    for start in range(5):
        ids, supervised = encode(tok, Chat(messages, start))
        assert ids == encode(tok, Chat(messages))[0]
        learned = tok.decode(id_ for id_, counts in zip(ids, supervised, strict=True) if counts)
        assert learned == "two<|im_end|>" * (start < 2) + "four<|im_end|>" * (start < 4)


def test_a_text_is_learned_from_end_to_end_and_in_pieces_where_it_is_long(tok: Tokenizer) -> None:
    text = "The gulls talked about the sea. " * 9
    ids = [tok.eot_id, *tok.encode(text), tok.eot_id]
    (whole,), _ = examples(tok, [text], len(ids))
    assert (whole.inputs.tolist(), whole.targets.tolist()) == (ids[:-1], ids[1:])
    pieces, too_long = examples(tok, [text], 20)
    assert too_long == 0 and [len(piece) for piece in pieces[:-1]] == [20] * (len(pieces) - 1)
    assert np.concatenate([piece.inputs for piece in pieces]).tolist() == ids[:-1]
    assert np.concatenate([piece.targets for piece in pieces]).tolist() == ids[1:]
