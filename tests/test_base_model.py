"""The network: causality, positions, sizes, configuration, and the naive generation that everything is compared with."""

import math
from typing import Any

import pytest
import torch
from helpers import BLOCK, SHAPES, VOCAB, max_diff, random_ids, tiny, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from base_model import GPT, PRESETS, GPTConfig
from pocketgpt import sampling
from pocketgpt.errors import UserError


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_the_future_changes_nothing_and_the_past_does(shape: str) -> None:
    model = tiny(**SHAPES[shape])
    ids = random_ids(2, 12)
    logits = model(ids)
    assert logits.shape == (2, 12, VOCAB)
    for changed in (1, 6, 11):
        other = ids.clone()
        other[:, changed] = (other[:, changed] + 1) % VOCAB
        again = model(other)
        assert torch.equal(again[:, :changed], logits[:, :changed])  # bit for bit
        for later in range(changed, 12):
            assert max_diff(again[:, later], logits[:, later]) > 1e-3


@torch.no_grad()
def test_attention_is_what_its_formula_says() -> None:
    """Softmax over scaled dot products, written out head by head, with a query head's own key/value head."""
    model = tiny(**PRESETS["llama"], n_head=4, n_kv_head=2, n_layer=1)
    attention: Any = model.blocks[0].attn
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    q = attention.q_proj(x)[0].view(5, 4, 8)
    k, v = attention.k_proj(x)[0].view(5, 2, 8), attention.v_proj(x)[0].view(5, 2, 8)
    seen = torch.zeros(5, 32)
    for head in range(4):
        for row in range(5):
            weight = (k[: row + 1, head // 2] @ q[row, head] / math.sqrt(8)).softmax(0)
            seen[row, head * 8 : head * 8 + 8] = weight @ v[: row + 1, head // 2]
    assert max_diff(attention(x, None, None)[0], attention.o_proj(seen)[None]) < 1e-5


@torch.no_grad()
def test_rotary_positions_are_relative_and_learned_ones_are_not() -> None:
    ids = random_ids(1, 10)
    shifted = torch.arange(10) + 7
    rope, learned = tiny(), tiny(**PRESETS["gpt2"])
    assert max_diff(rope.hidden_states(ids, shifted), rope.hidden_states(ids)) < 1e-5
    assert max_diff(learned.hidden_states(ids, shifted), learned.hidden_states(ids)) > 0.1
    per_row = torch.stack((torch.arange(10), shifted))
    both = learned.hidden_states(ids.expand(2, -1), per_row)
    assert max_diff(both[1:], learned.hidden_states(ids, shifted)) < 1e-5
    assert max_diff(rope.hidden_states(ids, torch.arange(10) * 2), rope.hidden_states(ids)) > 0.1


def test_a_sequence_of_one_block_fits_and_one_more_does_not() -> None:
    model = tiny()
    assert model(random_ids(1, BLOCK)).shape == (1, BLOCK, VOCAB)
    assert model(random_ids(1, 1)).shape == (1, 1, VOCAB)
    with pytest.raises(ValueError, match="33 tokens do not fit into block_size 32"):
        model(random_ids(1, BLOCK + 1))


@pytest.mark.parametrize("preset", PRESETS)
@torch.no_grad()
def test_a_fresh_model_is_the_identity_in_its_blocks_and_guesses_uniformly(preset: str) -> None:
    torch.manual_seed(0)
    model = GPT(tiny_config(**PRESETS[preset])).eval()
    assert 0.018 < float(model.embed.weight.std()) < 0.022
    ids = random_ids(2, 16)
    x = model.embed(ids)
    if preset == "gpt2":
        x = x + model.position(torch.arange(16))
    assert torch.equal(model.hidden_states(ids), model.norm(x))
    loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), random_ids(32, seed=1))
    assert abs(loss.item() - math.log(VOCAB)) < 0.1


def test_parameters_are_counted_once() -> None:
    # llama: embedding, per layer two norms, four square projections and three of the MLP, one norm
    assert tiny(**PRESETS["llama"]).n_parameters() == 97 * 32 + 2 * (2 * 32 + 4 * 32 * 32 + 3 * 32 * 128) + 32
    assert tiny(tie_embeddings=False).n_parameters() - tiny().n_parameters() == 97 * 32
    # gpt2 (124 M) is the sum that everybody knows
    with torch.device("meta"):
        gpt2 = GPT(GPTConfig(50257, 1024, 12, 12, 12, 768, **PRESETS["gpt2"]))
    assert gpt2.n_parameters() == 124_439_808


def test_flops_by_hand() -> None:
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 128) + 97 * 32
    assert tiny().flops_per_token(20) == 6 * matrices + 2 * 6 * 2 * 16 * 20  # layers x 6 x heads x head_dim x length
    # a head that runs on a quarter of the tokens saves three quarters of its own products
    assert tiny().flops_per_token(20) - tiny().flops_per_token(20, 0.25) == 0.75 * 6 * VOCAB * 32


def test_the_head_is_tied_in_memory() -> None:
    model = tiny()
    assert model.lm_head.weight is model.embed.weight
    untied = tiny(tie_embeddings=False)
    assert untied.lm_head.weight is not untied.embed.weight
    assert not any(name in ("cos", "sin") for name in model.state_dict())


def test_dropout_acts_in_training_only() -> None:
    model = tiny(dropout=0.5)
    ids = random_ids(1, 8)
    assert torch.equal(model(ids), model(ids))
    assert torch.equal(model(ids), tiny()(ids))
    model.train()
    assert max_diff(model(ids), model(ids)) > 0.1
    dropped = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(lambda _m, _i, out: dropped.append((out == 0).float().mean().item()))
    model(random_ids(4, BLOCK))
    assert len(dropped) == 1 + 2 * 2  # after the embedding, and before what attention and MLP add
    assert all(0.45 < share < 0.55 for share in dropped)
    attention: Any = model.blocks[0].attn
    x = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):  # and inside of attention, on its weights
        assert max_diff(attention.to(dtype)(x.to(dtype), None, None)[0], attention(x.to(dtype), None, None)[0]) > 0.1


@pytest.mark.parametrize("shape", ["qwen3 gqa", "qwen3 mqa, wide heads", "gpt2"])
@pytest.mark.parametrize("packed", [False, True])
def test_products_in_bfloat16_change_no_more_than_their_rounding(shape: str, packed: bool) -> None:
    """Logits and gradients under autocast against float32, also with a mask that is not the plain triangle."""
    ids = random_ids(2, 20)
    mask = torch.ones(20, 20, dtype=torch.bool).tril()
    mask[12:, :12] = False  # two conversations in a row
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(**SHAPES[shape])
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden = model.hidden_states(ids, mask=mask[None, None] if packed else None)
        hidden.float().square().sum().backward()
        gradients = [
            p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None and "embed" not in name
        ]
        results.append((hidden.detach().float(), torch.cat(gradients)))
    for exact, low in zip(*results, strict=True):
        assert (low - exact).norm() < 0.03 * exact.norm()
    if packed:  # and the second conversation sees nothing of the first
        other = ids.clone()
        other[:, :12] = (other[:, :12] + 1) % VOCAB
        with torch.autocast("cpu", torch.bfloat16):
            again = model.hidden_states(other, mask=mask[None, None])
        assert torch.equal(again[:, 12:].float(), hidden[:, 12:].detach().float())


def test_several_queries_after_cached_keys_must_bring_a_mask() -> None:
    attention: Any = tiny().blocks[0].attn
    x = torch.randn(1, 2, 32, generator=torch.Generator().manual_seed(0))

    def keep(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.cat((k, k), dim=2), torch.cat((v, v), dim=2)

    with pytest.raises(AssertionError, match="need a mask"):
        attention(x, None, None, keep)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"block_size": -1}, "block_size is -1"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"n_embd": 0}, "n_embd is 0"),
        ({"n_head": 0}, "n_head is 0"),
        ({"n_kv_head": 0}, "n_kv_head is 0"),
        ({"n_embd": 33}, "n_embd=33 is not divisible by model.n_head=2"),
        ({"n_head": 4, "n_kv_head": 3}, "n_head=4 is not divisible by model.n_kv_head=3"),
        ({"n_head": 2, "n_kv_head": 4}, "n_head=2 is not divisible by model.n_kv_head=4"),
        ({"position": "alibi"}, "position is 'alibi': choose one of rope, learned"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'"),
        ({"mlp": "RELU2"}, "mlp is 'RELU2'"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"dropout": math.nan}, "dropout is nan"),
        ({"n_heads": 2}, "unknown model key 'n_heads'"),
        ({"n_layer": 2.0}, "n_layer is 2.0, it must be a int"),
        ({"n_layer": True}, "n_layer is True"),
        ({"n_layer": "2"}, "n_layer is '2'"),
        ({"n_layer": None}, "n_layer is None"),
        ({"bias": 1}, "bias is 1"),
        ({"norm": 3}, "norm is 3"),
    ],
)
def test_configurations_that_make_no_model(change: dict, says: str) -> None:
    with pytest.raises(UserError) as caught:
        tiny_config(**change)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": -2},
        {"n_inner": -5},
        {"norm_eps": -1.0},
        {"norm_eps": math.nan},
        {"rope_theta": 0.0},
        {"rope_theta": -1.0},
    ],
)
def test_more_configurations_that_make_no_model(change: dict) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        tiny_config(**change)


def test_a_configuration_survives_as_plain_values() -> None:
    config = tiny_config(**PRESETS["gpt2"], dropout=0.25, n_inner=77)
    assert GPTConfig.from_dict(config.to_dict()) == config
    assert GPTConfig.from_dict({"rope_theta": 500}).rope_theta == 500  # whole numbers are fine where floats are asked
    assert (config.width_of_head, config.width_of_mlp) == (16, 77)
    assert GPTConfig(n_embd=256).width_of_mlp == 704  # 8/3 x 256 = 682.7, up to a multiple of 64
    assert GPTConfig(n_embd=256, mlp="gelu").width_of_mlp == 1024


@torch.no_grad()
def greedy_by_hand(model: GPT, ids: list[int], new: int) -> list[int]:
    for _ in range(new):
        start = sampling.window_start(len(ids), model.config.block_size)
        ids = [*ids, int(model(torch.tensor([ids[start:]]))[0, -1].argmax())]
    return ids


@pytest.mark.parametrize("shape", ["qwen3", "gpt2"])
@pytest.mark.parametrize("length", [1, 5, 30, 50])
def test_greedy_generation_is_the_argmax_of_the_full_forward_pass(shape: str, length: int) -> None:
    model = tiny(**SHAPES[shape], tie_embeddings=False)  # tied random weights say the same for ever
    ids = random_ids(1, length)
    out = model.generate(ids, 40, temperature=0)
    assert out[0].tolist() == greedy_by_hand(model, ids[0].tolist(), 40)
    assert len(set(out[0, length:].tolist())) > 7


@given(st.integers(1, 400), st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_the_window_holds_at_most_a_block_and_at_least_half(length: int, block: int) -> None:
    start = sampling.window_start(length, block)
    assert (start == 0) == (length <= block)
    assert max(1, block // 2) <= length - start <= block or length < block
    assert sampling.window_start(length + 1, block) >= start


def test_the_window_by_hand() -> None:
    starts = [sampling.window_start(length, 32) for length in (1, 32, 33, 48, 49, 64, 65, 130)]
    assert starts == [0, 0, 16, 16, 32, 32, 48, 112]


def test_rows_stop_each_on_its_own() -> None:
    model = tiny(tie_embeddings=False)
    ids = random_ids(3, 6)
    free = model.generate(ids, 20, temperature=0)[:, 6:]
    stop = int(free[1, 4])  # what the second row says fifth
    out = model.generate(ids, 20, temperature=0, stop_ids=(stop,), pad_id=96)[:, 6:]
    for row in range(3):
        said = free[row].tolist()
        end = said.index(stop) + 1 if stop in said else 20
        assert out[row].tolist() == (said[:end] + [96] * 20)[: out.size(1)]
    alone = model.generate(ids[1:2], 20, temperature=0, stop_ids=(stop,))[0, 6:]
    assert alone.tolist() == free[1, : free[1].tolist().index(stop) + 1].tolist()  # ends when all rows have


def test_generation_of_nothing_and_from_nothing() -> None:
    model = tiny()
    ids = random_ids(2, 4)
    assert torch.equal(model.generate(ids, 0), ids)
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate(ids[:, :0], 3)


def test_sampling_depends_on_its_generator_alone() -> None:
    model = tiny()
    ids = random_ids(2, 4)

    def seeded(seed: int) -> list[list[int]]:
        return model.generate(ids, 12, temperature=1.5, generator=torch.Generator().manual_seed(seed)).tolist()

    before = torch.random.get_rng_state()
    assert seeded(1) == seeded(1) != seeded(2)
    assert model.generate(ids, 12).tolist() != model.generate(ids, 12).tolist()  # no seed: new every time
    assert torch.equal(torch.random.get_rng_state(), before)


def test_ids_past_the_tokenizer_are_never_generated() -> None:
    model = tiny()
    with torch.no_grad():
        model.embed.weight[90:] *= 100  # tied: the head likes them best
    ids = random_ids(4, 5, high=90)
    assert int(model.generate(ids, 20, temperature=0).max()) >= 90
    model.n_tokens = 90
    assert int(model.generate(ids, 20, temperature=0).max()) < 90
    assert int(model.generate(ids, 20, temperature=2.0).max()) < 90


def test_bad_sampling_settings_are_refused_before_anything_runs() -> None:
    with pytest.raises(UserError, match="top_p is 1.5"):
        tiny().generate(random_ids(1, 4), 1, top_p=1.5)


@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2"])
@pytest.mark.parametrize("masked", [False, True])
def test_gradient_checkpointing_gives_the_same_bits_from_less_memory(shape: str, masked: bool) -> None:
    """With dropout, whose randomness must come again. Memory is what the graph holds for the backward pass."""
    ids, mask = random_ids(2, 16), torch.ones(2, 1, 16, 16, dtype=torch.bool).tril() if masked else None
    found = []
    for recompute in (False, "selective", True):
        model = tiny(**SHAPES[shape] | {"n_layer": 4, "dropout": 0.2}).train()
        model.recompute = recompute
        held: dict[int, int] = {}

        def pack(tensor: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            hidden = model.hidden_states(ids, None, mask)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        hidden.square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        found.append((hidden, gradients, sum(held.values()), weights))
    (plain, gradients, memory, weights), *others = found
    for again, same, _, _ in others:
        assert torch.equal(plain, again) and len(gradients) == len(same) > 4
        assert all(torch.equal(a, b) for a, b in zip(gradients, same, strict=True))
    less = others[-1][2]  # the selective kind puts away beside autograd: tests/test_plan.py counts it
    block_input = 2 * 16 * 32 * 4  # bytes
    assert less < 12 * block_input + weights / 10 and memory > 5 * less


def test_gradient_checkpointing_leaves_inference_alone() -> None:
    model = tiny()
    expected = model(random_ids(2, 9))
    model.recompute = True
    with torch.no_grad():
        assert torch.equal(model(random_ids(2, 9)), expected)
