"""Micro-batches of unequal size give the gradient of the whole batch, in the programs themselves; and what a loss without a reference leaves out."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import work_folder
from torch import Tensor, nn

import dpo
import sft
from pocketgpt import checkpoint, evaluation, metrics, optim, trainer
from pocketgpt.tokenizer import Tokenizer
from pocketgpt.trainer import Batch


class Stop(Exception):
    """What was wanted has been seen."""


@pytest.fixture(scope="module")
def folder(tok: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return work_folder(tmp_path_factory.mktemp("work"), tok)


def call(script: ModuleType, folder: Path, out: Path, *arguments: str) -> None:
    """One step of a program, up to where it is stopped."""
    name = script.__name__
    given = [
        "data=mine", f"data.path={folder / name}.jsonl", "data.val_fraction=0.2", f"checkpoint={folder / 'ckpt_sft.pt'}",
        f"out={out}", "device=cpu", "train.dtype=float32", "train.minutes=0", "train.steps=1", "train.grad_clip=0",
        "train.batch_size=8", *arguments,
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *given])
        with pytest.raises(Stop):
            script.main()


def first_step(script: ModuleType, folder: Path, out: Path, *arguments: str) -> tuple[list[Tensor], list[Batch]]:
    """The gradient that the first optimizer step of the stage is given, and the micro-batches that it comes from."""
    seen: list[Tensor] = []
    batches: list[Batch] = []
    train = trainer.train

    def watched(model: nn.Module, stage: trainer.Stage, *rest: object) -> trainer.Result:
        if stage.name == "control":
            return trainer.Result(0, {}, 0.0)
        stage.evaluate, stage.sample = (lambda: {"loss": 0.0, "accuracy": 0.0}), (lambda: "")
        batches.extend(stage.batches(0))

        def step(self: optim.Optimizer, scale: float) -> None:
            seen.extend(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)
            raise Stop

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optim.Optimizer, "step", step)
            return train(model, stage, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "train", watched)
        patch.setattr(checkpoint, "save", lambda *_: Path())  # of the control, which did not run
        patch.setattr(metrics.RunLog, "plot", lambda *_: Path())
        call(script, folder, out, *arguments)
    return seen, batches


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (sft, []),
        *((dpo, [f"dpo.loss={loss}", "dpo.chosen_nll=0.5", f"dpo.beta={2 if loss == 'simpo' else 0.02}"]) for loss in dpo.NUMBERS),
    ],
    ids=["sft", *dpo.NUMBERS],
)  # fmt: skip
def test_micro_batches_of_unequal_token_counts_give_the_gradient_of_the_whole_batch(
    script: ModuleType, arguments: list[str], folder: Path, tmp_path: Path
) -> None:
    """beta is small, so that no loss of weights this wild is flat."""
    whole, (batch,) = first_step(script, folder, tmp_path / "8", *arguments, "train.micro_batch_size=8")
    size = torch.cat([gradient.flatten() for gradient in whole]).norm().item()
    assert size > 1e-3
    for micro in (1, 3) if script is sft else (4,):  # 4 and 2 pairs
        parts, batches = first_step(
            script, folder, tmp_path / str(micro), *arguments, f"train.micro_batch_size={micro}"
        )
        tokens = [int((part.inputs[1] >= 0).sum()) for part in batches]
        assert len(set(tokens)) > 1 and sum(tokens) == int((batch.inputs[1] >= 0).sum())
        assert sum(part.weight for part in batches) == batch.weight
        difference = torch.cat([(a - b).flatten() for a, b in zip(parts, whole, strict=True)]).norm().item()
        assert difference < 1e-6 * size


@pytest.mark.parametrize("loss", dpo.NUMBERS)
def test_only_losses_with_a_reference_compute_it(
    loss: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = 0
    count = evaluation.answer_log_probs

    def counting(*arguments: object) -> Tensor:
        nonlocal passes
        passes += 1
        return count(*arguments)  # type: ignore[arg-type]

    def stop(*_: object) -> None:
        raise Stop

    monkeypatch.setattr(evaluation, "answer_log_probs", counting)
    monkeypatch.setattr(dpo, "train", stop)
    call(dpo, folder, tmp_path, f"dpo.loss={loss}")
    assert passes == (0 if loss in dpo.REFERENCE_FREE else 2)  # once the training pairs, once the held-out ones
