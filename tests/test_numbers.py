"""The three losses through the whole network: gradients, what they count, and that they can be driven to nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import SHAPES, VOCAB, random_ids, tiny
from torch import Tensor

from base_model import GPT
from dpo import preference_loss
from pocketgpt import chat_template, evaluation, packing
from pocketgpt.loss import IGNORE, linear_cross_entropy
from pocketgpt.packing import Example, attention_mask, lay_out
from pocketgpt.shapes import Chat
from pocketgpt.tokenizer import Tokenizer

BETA, SMOOTHING, NLL = 0.3, 0.1, 0.5


def example(seed: int, length: int, supervised: int) -> Example:
    """Random ids of which the last ones are supervised."""
    ids = random_ids(length + 1, seed=seed).tolist()
    return Example.of(ids, [False] * (length + 1 - supervised) + [True] * supervised)


EXAMPLES = [example(1, 9, 3), example(2, 6, 5), example(3, 4, 1), example(4, 12, 7)]
IDS = random_ids(2, 13)


def pretraining(model: GPT) -> Tensor:
    """As pretrain.py computes it."""
    return linear_cross_entropy(model.hidden_states(IDS[:, :-1]), model.lm_head.weight, IDS[:, 1:], torch.float32)


def fine_tuning(model: GPT) -> Tensor:
    """As sft.py: two conversations to a row."""
    rows = lay_out([EXAMPLES[:2], EXAMPLES[2:]], 20)
    hidden = model.hidden_states(rows.inputs, rows.positions, attention_mask(rows.segments))
    return linear_cross_entropy(hidden, model.lm_head.weight, rows.targets, torch.float32)


def preferences(model: GPT) -> Tensor:
    """As dpo.py: two pairs, padded, with a share of the chosen answers' likelihood."""
    rows = lay_out([[e] for e in EXAMPLES], 16)
    log_probs = evaluation.answer_log_probs(model, rows.inputs, rows.targets, torch.float32)
    reference = torch.tensor([-14.0, -24.0, -5.0, -33.0])
    lengths = (rows.targets != IGNORE).sum(1)
    losses, *_ = preference_loss("cdpo", log_probs, reference, lengths, beta=BETA, label_smoothing=SMOOTHING)
    return losses.sum() - NLL * (log_probs / lengths)[:2].sum()


def alone(model: GPT, one: Example) -> Tensor:
    """The summed log-probability of an example's supervised tokens, by the book, without packing or padding."""
    log_probs = model(torch.from_numpy(one.inputs)[None])[0].log_softmax(-1)
    return sum(log_probs[t, target] for t, target in enumerate(one.targets.tolist()) if target != IGNORE)  # type: ignore[return-value]


def pretraining_by_the_book(model: GPT) -> Tensor:
    return F.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")


def fine_tuning_by_the_book(model: GPT) -> Tensor:
    return -sum(alone(model, one) for one in EXAMPLES)  # type: ignore[return-value]


def preferences_by_the_book(model: GPT) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for chosen, rejected, ref_chosen, ref_rejected in ((0, 2, -14.0, -5.0), (1, 3, -24.0, -33.0)):
        a, b = alone(model, EXAMPLES[chosen]), alone(model, EXAMPLES[rejected])
        margin = BETA * ((a - ref_chosen) - (b - ref_rejected))
        prefer, flip = 1 / (1 + torch.exp(-margin)), 1 / (1 + torch.exp(margin))
        total = total - (1 - SMOOTHING) * prefer.log() - SMOOTHING * flip.log()
        total = total - NLL * a / (EXAMPLES[chosen].targets != IGNORE).sum()
    return total


LOSSES = {
    "pretraining": (pretraining, pretraining_by_the_book),
    "fine-tuning": (fine_tuning, fine_tuning_by_the_book),
    "preferences": (preferences, preferences_by_the_book),
}


@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2", "llama untied"])
@pytest.mark.parametrize("stage", LOSSES)
@torch.no_grad()
def test_gradients_are_the_slopes_of_the_textbook_loss_in_float64(stage: str, shape: str) -> None:
    """Along a random direction in every parameter, by central differences of a loss that is written differently."""
    ours, book = LOSSES[stage]
    model, exact = tiny(**SHAPES[shape]), tiny(**SHAPES[shape]).double()
    with torch.enable_grad():
        total = ours(model)
        total.backward()
    assert total.item() == pytest.approx(book(exact).item(), rel=1e-5)
    step = 1e-5
    for (name, parameter), copy in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None, name
        direction = torch.randn(copy.shape, generator=torch.Generator().manual_seed(len(name)), dtype=torch.float64)
        copy.add_(direction, alpha=step)
        above = book(exact)
        copy.sub_(direction, alpha=2 * step)
        below = book(exact)
        copy.add_(direction, alpha=step)
        slope = ((above - below) / (2 * step)).item()
        size = (parameter.grad.norm() * direction.norm()).item()
        assert abs(slope - (parameter.grad * direction).sum().item()) < 1e-5 * size + 1e-6, name


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_a_changed_future_leaves_the_past_bit_equal_also_with_weights_a_hundred_times_as_large(shape: str) -> None:
    """Scores so large that the softmax is a choice would turn the smallest leak into another answer."""
    for scale in (1, 100):
        model = tiny(**SHAPES[shape])
        for parameter in model.parameters():
            parameter.mul_(scale)
        ids = random_ids(2, 20)
        before = model(ids)
        for at in (1, 7, 19):
            changed = ids.clone()
            changed[:, at:] = (changed[:, at:] + 1) % VOCAB
            after = model(changed)
            assert torch.equal(after[:, :at], before[:, :at])
            assert not torch.equal(after[:, at:], before[:, at:])


def test_the_masked_loss_counts_what_a_hand_counts(tok: Tokenizer) -> None:
    """A model that knows nothing pays ln(vocabulary) for each supervised token, and for nothing else."""
    chats = [
        [{"role": "user", "content": "aaa"}, {"role": "assistant", "content": "b"}],
        [
            {"role": "system", "content": "x"},
            {"role": "user", "content": "c"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "ee"},
        ],
    ]
    model = tiny(vocab_size=400, block_size=64)
    with torch.no_grad():
        model.embed.weight.zero_()  # which is the head, too
    found, _ = packing.examples(tok, [Chat(chat) for chat in chats], 64)
    rows = lay_out([found], 64)
    hidden = model.hidden_states(rows.inputs, rows.positions, attention_mask(rows.segments))
    total = linear_cross_entropy(hidden, model.lm_head.weight, rows.targets, torch.float32)
    by_hand = (len(tok.encode("b")) + 1) + 1 + (len(tok.encode("ee")) + 1)
    assert total.item() == pytest.approx(by_hand * torch.log(torch.tensor(400.0)).item(), rel=1e-6)
    assert sum(sum(chat_template.render(tok, chat)[1]) for chat in chats) == by_hand


@pytest.mark.parametrize(("stage", "floor"), [("pretraining", 0.5), ("fine-tuning", 0.5), ("preferences", 1.0)])
def test_one_batch_is_learned_by_heart(stage: str, floor: float) -> None:
    """In nats: 24 tokens, 16 tokens, and two pairs, which label smoothing keeps from 0: 2 x 0.325."""
    loss: Callable[[GPT], Tensor] = LOSSES[stage][0]
    model = tiny(n_layer=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = loss(model).item()
    for _ in range(150):
        total = loss(model)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert first > 4 * floor and loss(model).item() < floor
