"""What plan.py says before a run against what a run is measured to take."""

import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import SHAPES, random_ids, tiny_config
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

import plan as script
import pretrain
from base_model import GPT, GPTConfig
from kv_cache import kv_cache_bytes
from pocketgpt import config, distributed, fused, lora, plan, trainer
from pocketgpt import device as machine
from pocketgpt.errors import UserError
from pocketgpt.loss import linear_cross_entropy
from pocketgpt.optim import OptimConfig, Optimizer

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "block_size": 128, "vocab_size": 600}


def optim_of(name: str) -> OptimConfig:
    return OptimConfig(name, 0.9, 0.95, 1e-8, 0.1, 0.02, 0.95)


def kept_bytes(model: GPT, ids: torch.Tensor, dtype: torch.dtype) -> tuple[int, torch.Tensor]:
    """What the graph of a forward pass holds beside weights and buffers, counted where autograd puts it away."""
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), machine.autocast(CPU, dtype):
        hidden = model.hidden_states(ids)
    return sum(storage.nbytes() for storage in held.values()), hidden


@pytest.fixture(params=["operators of torch", "fused"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused.build() and request.param == "fused":
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(fused, "loaded", request.param == "fused")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adapters"])
@pytest.mark.parametrize("recompute", [False, "selective", True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2"])
def test_planned_memory_is_what_a_step_takes(
    shape: str, dtype: torch.dtype, recompute: bool | str, optimizer: str
) -> None:
    size = tiny_config(**SHAPES[shape] | SMALL | ({"n_kv_head": 4} if shape == "gpt2" else {}))

    def network() -> GPT:
        model = GPT(size).train()
        model.recompute = recompute
        if optimizer == "adapters":
            lora.attach(model, model.config.to_dict(), lora.LoRAConfig(4, 8, []), seed=1)
        return model

    model, ids, settings = network(), random_ids(4, 128), optim_of("adamw" if optimizer == "adapters" else optimizer)
    planned = plan.step_memory(partial(plan.without_contents, model), 4, 128, settings, dtype=dtype)
    stepper = Optimizer(model, settings, 1e-3)
    highest = 0
    for _ in range(2):  # the second is the steady state
        live = plan.Live()
        with live:
            for tensor in [*model.parameters(), *model.buffers()]:
                live.note(tensor.untyped_storage())
            for part in stepper.parts:
                for moments in part.state.values():
                    for moment in moments.values():
                        live.note(moment.untyped_storage())
            with machine.autocast(CPU, dtype):
                hidden = model.hidden_states(ids)
            linear_cross_entropy(hidden, model.lm_head.weight, ids, dtype).backward()
            del hidden
            highest = live.peak
            gradients = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
            stepper.step(1.0)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    state = sum(
        moment.nbytes for part in stepper.parts for moments in part.state.values() for moment in moments.values()
    )
    assert planned.weights == weights
    assert planned.gradients == gradients
    assert planned.optimizer == pytest.approx(state, rel=0.001)
    assert planned.passing == pytest.approx(highest, rel=0.1)
    assert planned.stepping == pytest.approx(live.peak, rel=0.1) or live.peak == highest
    if recompute != "selective":  # which puts away beside autograd, where no hook sees it
        kept, hidden = kept_bytes(model, ids, dtype)
        assert planned.activations == pytest.approx(kept + hidden.nbytes, rel=0.025)  # the loss reads hidden itself


def test_each_kind_of_recomputing_keeps_less() -> None:
    kept = []
    for recompute in (False, "selective", True):

        def network(recompute: bool | str = recompute) -> GPT:
            model = GPT(tiny_config(**SMALL)).train()
            model.recompute = recompute
            return model

        kept.append(plan.step_memory(network, 4, 128, optim_of("adamw"), dtype=torch.float32).activations)
    assert kept[0] > 1.5 * kept[1] > 3 * kept[2]


def test_gradients_of_earlier_micro_batches_are_counted() -> None:
    def network() -> GPT:
        return GPT(tiny_config(**SMALL)).train()

    first, later = (
        plan.step_memory(network, 4, 128, optim_of("adamw"), dtype=torch.float32, accumulate=accumulate)
        for accumulate in (False, True)
    )
    assert later.passing - first.passing == pytest.approx(first.gradients, rel=0.05)


# --- work -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, "selective", True])
@pytest.mark.parametrize("shape", ["qwen3 gqa", "gpt2", "llama untied"])
def test_planned_operations_are_what_torch_counts(shape: str, recompute: bool | str) -> None:
    """The counter does not look into the processor's attention: that part is added as forward, two products of all pairs
    of positions up to the query, and backward, twice that."""
    size = tiny_config(**SHAPES[shape] | SMALL | ({"n_kv_head": 4} if shape == "gpt2" else {}))
    model, ids = GPT(size).train(), random_ids(2, 128)
    model.recompute = recompute
    with FlopCounterMode(display=False) as counter:
        logits = model(ids)
        logits.sum().backward()
    pairs = 2 * 128 * 129 / 2
    again = 4 / 3 if recompute is True else 1
    attention = 3 * again * size.n_layer * 4 * pairs * size.n_head * size.width_of_head
    planned = plan.executed_flops(model, 128, recompute) * ids.numel()
    assert planned == pytest.approx(counter.get_total_flops() + attention, rel=0.1)
    assert plan.executed_flops(model, 128, False) == model.flops_per_token(128)


# --- what fits ------------------------------------------------------------------------------------------------------


def of(total: float) -> plan.Memory:
    return plan.Memory(0, 0, 0, 0, 0, total, 0)


@pytest.mark.parametrize(("budget", "rows"), [(1000, 12), (129, 12), (127, 6), (69, 6), (67, 4), (10, 1)])
def test_the_largest_divisor_that_fits_is_taken(budget: float, rows: int) -> None:
    assert plan.largest_that_fits(12, budget, lambda rows: of(8 + 10 * rows)) == (rows, of(8 + 10 * rows))
    # a later, steeper part of the line is seen as well
    assert plan.largest_that_fits(12, 100, lambda rows: of(rows if rows < 6 else 50 * rows))[0] == 4


class Polled(plan.Live):
    """Asks all storages for their size at every operation: FSDP2 empties and fills those it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if isinstance(tensor, torch.Tensor):
                self.note(distributed.local(tensor).untyped_storage())
        self.now = sum(storage.nbytes() for held in self.held.values() if (storage := held()) is not None)
        self.peak = max(self.peak, self.now)
        return made

    def note(self, storage: torch.UntypedStorage) -> None:
        self.held[storage._cdata] = weakref.ref(storage)


@pytest.fixture
def four() -> Iterator[None]:
    """One process that takes itself for one of four: what the others would send is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()
    distributed.mesh.cache_clear()


@pytest.mark.parametrize("bfloat16", [True, False])  # in which Muon computes
@pytest.mark.parametrize(
    ("optimizer", "recompute", "accumulate", "changes"),
    [
        ("adamw", False, False, {"n_layer": 4, "n_embd": 128, "vocab_size": 2000}),
        ("adamw", True, False, {"n_layer": 8, "n_embd": 128}),
        ("muon", "selective", True, {"n_layer": 6, "n_embd": 96}),
        ("muon", True, True, {"n_layer": 1, "vocab_size": 8000}),
    ],
)
def test_planned_memory_of_a_divided_model_is_what_a_step_takes(
    four: None,
    optimizer: str,
    recompute: bool | str,
    accumulate: bool,
    changes: dict[str, Any],
    bfloat16: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda device: bfloat16)
    settings, micro_batches, float32 = optim_of(optimizer), 1 + accumulate, torch.float32
    size = tiny_config(**SMALL | changes)

    def network() -> GPT:
        model = GPT(size).train()
        model.recompute = recompute
        return model

    model, ids = network(), random_ids(2, 64)
    planned = plan.step_memory(network, 2, 64, settings, dtype=float32, accumulate=accumulate, ranks=4)
    trained = distributed.network(model, "fsdp", print)
    distributed.same_weights(model, trained)
    stepper = Optimizer(trained, settings, 1e-3)
    with Polled() as live:
        for tensor in [*trained.parameters(), *trained.buffers()]:
            live.note(distributed.local(tensor).untyped_storage())
        for _ in range(2):  # the second is the steady state
            live.peak = 0
            for number in range(micro_batches):
                trained.set_requires_gradient_sync(number == micro_batches - 1)
                loss = linear_cross_entropy(trained.hidden_states(ids), trained.lm_head.weight, ids, float32)
                loss.backward()
                del loss
            passing, live.peak = live.peak, 0
            stepper.step(1.0)
            stepping, live.peak = live.peak, 0
        with distributed.whole(model, trained):
            evaluating = live.peak
    assert planned.passing == pytest.approx(max(passing, evaluating), rel=0.1)
    assert planned.stepping == pytest.approx(stepping, rel=0.1)
    one = plan.step_memory(network, 2, 64, settings, dtype=float32, accumulate=accumulate)
    assert (planned.weights, planned.optimizer) == (one.weights / 4, one.optimizer / 4)
    assert planned.gradients == (one.gradients if accumulate else one.gradients / 4)
    assert planned.activations == one.activations and planned.logits == one.logits


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_in_main_memory_are_not_counted_on_the_gpu(optimizer: str) -> None:
    def network() -> GPT:
        return GPT(tiny_config(**SMALL)).train()

    here, there = (
        plan.step_memory(network, 4, 128, optim_of(optimizer), dtype=torch.float32, offload=offload)
        for offload in (False, True)
    )
    counts = 4 * sum(p.numel() > 0 for p in network().parameters())  # AdamW counts the steps of each parameter there
    assert there.optimizer <= counts and there.optimizer + there.host == here.optimizer and here.host == 0
    assert there.passing == here.passing - there.host
    assert here.stepping - there.host < there.stepping < here.stepping - 0.4 * there.host  # one after another
    assert (there.weights, there.gradients, there.activations) == (here.weights, here.gradients, here.activations)


# --- kinds of GPU ---------------------------------------------------------------------------------------------------


def test_gpus_are_read() -> None:
    assert plan.parse_gpus("8xH100") == (8, "H100", plan.GPUS["H100"])
    assert plan.parse_gpus("rtx4090") == (1, "RTX4090", plan.GPUS["RTX4090"])
    assert plan.parse_gpus("2xA100-40GB")[:2] == (2, "A100-40GB")
    for wrong in ("8xFoo", "", "0xH100", "8", "x", "-1xH100", "H100x8"):
        with pytest.raises(UserError, match="kinds: B200, H200") as error:
            plan.parse_gpus(wrong)
        assert "\n" not in str(error.value)


def test_the_processor_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {torch.float32: 2e11, torch.bfloat16: 7e11}
    monkeypatch.setattr(machine, "matmul_rate", lambda device, dtype: rates[dtype])
    number, kind, cpu = plan.parse_gpus("cpu")
    assert (number, kind, cpu.flops) == (1, "cpu", 7e11)
    assert cpu.memory > 1e8 and cpu.bandwidth > 1e8


def test_numbers_with_prefixes() -> None:
    assert [plan.human(n) for n in (0, 7, 999, 1234, 2.5e9)] == ["0 B", "7 B", "999 B", "1.23 kB", "2.5 GB"]
    assert plan.human(999_900) == "1 MB"


# --- the program ----------------------------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plan.py", *arguments])
    monkeypatch.setattr(script.base_model, "PLAIN_KEYS", script.base_model.PLAIN_KEYS)  # put back afterwards
    monkeypatch.setitem(script.loss.CHUNK, "cpu", script.loss.CHUNK["cpu"])
    script.main()


def test_a_plan_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, "model=3m", "gpus=2xH100", "mfu=0.5", "data.tokens=1e9", "price=3", "train.micro_batch_size=2")
    shown = capsys.readouterr().out
    shape = GPTConfig.from_dict(config.load("plan", script.Config, ["model=3m"]).model)
    with torch.device("meta"):
        model = GPT(shape)
    flops = model.flops_per_token(512)
    rate = 2 * 0.5 * 989e12 / flops
    hours = 1e9 / rate / 3600
    cache = kv_cache_bytes(shape, 1, 512, 2)
    decode = 3.35e12 / (2 * model.n_parameters() + cache)
    for wanted in (
        f"{plan.human(flops, 'FLOP')} per token, {plan.human(flops * 1e9, 'FLOP')} for 1 Gtokens",
        f"{plan.human(rate, 'tokens/s')} at 50% of 2 x 989 TFLOP/s: {hours * 3600:.2g} seconds",
        f"cost       {2 * hours * 3:,.2f}",
        f"weights {plan.human(2 * model.n_parameters())}, cache {plan.human(cache / 512)} per token",
        f"at most {decode:,.0f} tokens/s for 1 such request on one H100",
        "of each of 2 ranks (ddp), 2 sequences at once",
    ):
        assert wanted in shown
    parts = script.parameters_by_part(model)
    assert sum(parts.values()) == model.n_parameters() and parts["embedding"] == 4096 * 192


def test_recomputing_costs_a_forward_pass_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = []
    for recompute in ("false", "selective", "true"):
        cfg = config.load(
            "plan",
            script.Config,
            ["model=1m", "train.batch_size=1", f"train.recompute={recompute}", "train.micro_batch_size=1"],
        )
        monkeypatch.setattr(script.base_model, "PLAIN_KEYS", 1024)
        monkeypatch.setitem(script.loss.CHUNK, "cpu", 256)
        p = script.make_plan(cfg, 1, "H100", plan.GPUS["H100"])
        rates.append(p.tokens_per_s)
    whole, blocks = p.model.flops_per_token(512), p.model.flops_per_token(512, 0.0)
    assert rates[0] == rates[1] == pytest.approx(rates[2] * (whole + blocks / 3) / whole)


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, "model=7b", "model.n_layer=24", "gpus=1xL4", "train.batch_size=1")
    assert "DOES NOT FIT: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("parallel=tp", "choose ddp or fsdp"),
        ("parallel=fsdp optim.offload=true", "start more of them, or set optim.offload=false"),
        ("mfu=0", "mfu=0"),
        ("mfu=1.5", "mfu=1.5"),
        ("train.recompute=some", "choose false, selective or true"),
        ("gpus=3xH100", "not divisible by the 3 ranks"),
        ("gpus=Z80", "kinds: B200"),
        ("train.batch_size=0", "must be 1 or above"),
        ("data.tokens=-1", "must be 0 or above"),
    ],
)
def test_bad_values_are_one_line(argument: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(monkeypatch, *argument.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", script.SIZES)
def test_sizes_have_the_parameters_of_their_name(size: str) -> None:
    shape = GPTConfig.from_dict(config.load("plan", script.Config, [f"model={size}"]).model)
    with torch.device("meta"):
        count = GPT(shape).n_parameters()
    named = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert count == pytest.approx(named, rel=0.06)
    assert shape.width_of_mlp % 64 == shape.n_embd % 64 == shape.vocab_size % 64 == 0
    assert shape.n_head * shape.width_of_head == shape.n_embd


# --- train.micro_batch_size=0 ---------------------------------------------------------------------------------------


def train_config(**changes: Any) -> trainer.TrainConfig:
    given = config.load("pretrain", pretrain.Config, ["train.micro_batch_size=0", "train.batch_size=12"]).train
    return trainer.TrainConfig(**vars(given) | changes)


def test_the_micro_batch_is_the_most_that_fits_into_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(tiny_config(**SMALL))

    def step_memory(network: Any, rows: int, length: int, *_: Any, accumulate: bool, **__: Any) -> plan.Memory:
        assert network().training and length == 128
        return of(1e6 * rows + (5e6 if accumulate else 0))

    monkeypatch.setattr(plan, "step_memory", step_memory)
    weights = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    for needed, fits, less in ((24e6, 12, 6), (17e6, 6, 4), (13e6, 4, 3), (7e6, 1, 1)):  # pairs: two rows each
        for short, wanted in ((0, fits), (2, less)):
            free = int((needed - weights) / plan.SPARE) + 1 - short
            monkeypatch.setattr(machine, "free_memory", lambda device, free=free: free)
            chosen = train_config()
            said = plan.set_micro_batch(model, chosen, optim_of("muon"), 128, torch.float32, rows_each=2)
            assert chosen.micro_batch_size == wanted
            assert said.startswith(f"train.micro_batch_size={wanted} of 12: planned ")
    # However much is free: more rows at once bring a processor little.
    monkeypatch.setattr(machine, "free_memory", lambda device: 1e12)
    monkeypatch.setattr(plan, "ON_A_CPU", 17.5e6 - weights)
    chosen = train_config()
    plan.set_micro_batch(model, chosen, optim_of("muon"), 128, torch.float32, rows_each=2)
    assert chosen.micro_batch_size == 6
    given = train_config(micro_batch_size=5)
    assert (
        plan.set_micro_batch(model, given, optim_of("muon"), 128, torch.float32) == "" and given.micro_batch_size == 5
    )


def test_free_memory_is_some_of_the_machine() -> None:
    assert 1e7 < machine.free_memory(CPU) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_micro_batch_of_a_divided_model_is_planned_so(four: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of four processes has 3 rows of 12. Where all weights, gradients and moments would take too much, a quarter fits."""
    monkeypatch.setattr(distributed, "from_main", lambda make: make())
    model, chosen = GPT(tiny_config(**SMALL | {"n_layer": 8})), {}
    needs = plan.step_memory(lambda: GPT(model.config).train(), 3, 32, optim_of("adamw"), dtype=torch.float32, ranks=4)
    there = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    monkeypatch.setattr(machine, "free_memory", lambda device: 1 + (needs.total - there) / plan.SPARE)
    for parallel in ("ddp", "fsdp"):
        chosen[parallel] = train_config()
        said = plan.set_micro_batch(model, chosen[parallel], optim_of("adamw"), 32, torch.float32, parallel)
    assert chosen["ddp"].micro_batch_size == 1 and chosen["fsdp"].micro_batch_size == 3
    assert said.startswith(f"train.micro_batch_size=3 of 3 of each process: planned {plan.human(needs.total)}, ")
    # processes on one machine share its memory
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan.set_micro_batch(model, chosen_again := train_config(), optim_of("adamw"), 32, torch.float32, "fsdp")
    assert chosen_again.micro_batch_size == 1


def advice(device: str = "cpu", divided: bool = False, offload: bool = False, **changes: Any) -> str:
    settings = replace(optim_of("muon"), offload=offload)
    return trainer.smaller(train_config(**changes), settings, torch.device(device), divided)


def test_what_to_try_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed step by step, it ends at the smallest that training can be."""
    steps = [(12, False), (6, False), (3, False), (1, False), (1, "selective"), (1, True)]
    wanted = [
        "train.micro_batch_size=6 ",
        "train.micro_batch_size=3 ",
        "train.micro_batch_size=1 ",
        "train.recompute=selective ",
        "train.recompute=true ",
        "a smaller model.block_size",
    ]
    for (rows, recompute), said in zip(steps, wanted, strict=True):
        assert advice(micro_batch_size=rows, recompute=recompute).startswith(said)
    selective = {"micro_batch_size": 1, "recompute": "selective"}
    assert advice("cuda", **selective).startswith("optim.offload=true ")
    assert advice("cuda", offload=True, **selective).startswith("train.recompute=true ")
    monkeypatch.setattr(distributed, "world", lambda: 4)  # of 12 rows each has 3
    assert advice(micro_batch_size=12).startswith("train.micro_batch_size=1 (3 now, ")
    assert advice("cuda", **selective).startswith("parallel=fsdp ")
    assert advice("cuda", divided=True, **selective).startswith("train.recompute=true ")
    assert advice("cuda", divided=True, micro_batch_size=1, recompute=True).startswith("more processes")
