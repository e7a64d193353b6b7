"""The contenders of bench/train.py that are not ours: transformers' Trainer and trl, each in a process of its own.

    python bench/peers.py '{"kind": "trainer", ...}'

The last line on stdout is one JSON object: the numbers, or {"missing": what is not installed}. What was trained is loaded into our
GPT and measured by our code.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, Python looks for modules in bench/ only

import torch

import dpo
import pretrain
import sft
from base_model import GPT, GPTConfig
from pocketgpt import checkpoint, config, evaluation, hf, optim
from pocketgpt import device as machine
from pocketgpt.corpus import prepare
from pocketgpt.packing import encode, examples, pack, row_length

Spec = dict[str, Any]


class Watch:
    """Where each optimizer step ended, and the training loss where it was logged. Stops the run after `seconds`."""

    def __init__(self, seconds: float = float("inf")) -> None:
        self.seconds, self.ends = seconds, [time.perf_counter()]
        self.losses: list[tuple[int, float]] = []  # (step, nats per token)

    def share(self) -> float:
        """Of the time, that is over in the middle of the coming step."""
        last = self.ends[-1] - self.ends[-2] if len(self.ends) > 1 else 0.0
        return min(1.0, max(1e-3, (self.ends[-1] - self.ends[0] + last / 2) / self.seconds))

    def callback(self) -> Any:
        from transformers import TrainerCallback

        watch = self

        class Callback(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                watch.ends = [time.perf_counter()]

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                watch.ends.append(time.perf_counter())
                passed, last = watch.ends[-1] - watch.ends[0], watch.ends[-1] - watch.ends[-2]
                control.should_training_stop |= passed + last > watch.seconds

            def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if "loss" in more["logs"]:
                    watch.losses.append((state.global_step, float(more["logs"]["loss"])))

        return Callback()

    def per_second(self, items: float) -> float | None:
        """Rate at `items` a step, from the first step on, which warms up and is not counted."""
        steps = len(self.ends) - 2
        return steps * items / (self.ends[-1] - self.ends[1]) if steps > 0 else None


def common(spec: Spec, steps: int, lr: float, rows: int) -> dict[str, Any]:
    """What all three trainers are told."""
    return {
        "output_dir": f"{spec['work']}/output",
        "max_steps": steps,
        "per_device_train_batch_size": rows,
        "learning_rate": lr,
        "max_grad_norm": 1.0,
        "bf16": spec["bf16"],
        "use_cpu": spec["device"] == "cpu",
        "gradient_checkpointing": False,  # trl's default is for models that do not fit
        "seed": spec["seed"],
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def trainer(spec: Spec) -> dict[str, Any]:
    """transformers' Trainer on windows of the corpus: AdamW, cosine by the clock, as the recipe of nanoGPT."""
    from transformers import AutoConfig as Shape
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    cfg = config.load("pretrain", pretrain.Config, [*spec["data"], *spec["model"]])
    corpus = prepare(*pretrain.documents(cfg.data), cfg.vocab_size, Path(cfg.cache))
    shape = GPTConfig.from_dict(cfg.model | {"vocab_size": corpus.tokenizer.vocab_size})
    device = machine.pick_device(spec["device"])
    ours = GPT(shape)
    flops, parameters = ours.flops_per_token(shape.block_size), ours.n_parameters()
    ceiling = machine.matmul_rate(device, torch.bfloat16)

    torch.manual_seed(spec["seed"])
    raw = hf.config_to_hf(shape.to_dict())
    model = AutoModelForCausalLM.from_config(Shape.for_model(raw.pop("model_type"), **raw), dtype=torch.float32)
    windows = corpus.train[0].windows(shape.block_size, spec["seed"])

    class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 1 << 30

        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            row = torch.from_numpy(windows.row(number))  # one token more than the block: it shifts the labels itself
            return {"input_ids": row, "labels": row}

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return None  # the windows are in random order already

    watch = Watch(spec["seconds"])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda _: optim.lr_scale(watch.share(), warmup=0.02, decay=0.98, shape="cosine")
    )
    rows = spec["step_tokens"] // shape.block_size
    told = TrainingArguments(**common(spec, 1 << 24, 1e-3, rows), logging_steps=20)
    InOrder(
        model=model, args=told, train_dataset=Rows(), optimizers=(optimizer, schedule), callbacks=[watch.callback()]
    ).train()

    folder = Path(spec["work"]) / "folder"
    model.save_pretrained(folder)
    corpus.tokenizer.save(folder, shape.block_size)
    evaluation.MAX_VAL_TOKENS = spec["heldout"]
    trained = GPT.from_checkpoint(folder, device)
    rate = watch.per_second(spec["step_tokens"])
    seconds = watch.ends[-1] - watch.ends[0]
    steps = len(watch.ends) - 1
    tokens = spec["step_tokens"]
    return {
        "bits_per_byte": evaluation.bits_per_byte(trained, corpus.tokenizer, corpus.val, torch.bfloat16),
        "seconds": seconds,
        "steps": steps,
        "tokens": steps * tokens,
        "tokens_per_s": rate,
        "mfu": rate and rate * flops / ceiling,
        "parameters": parameters,
        "first_step_s": watch.ends[1] - watch.ends[0],
        "peak_bytes": machine.peak_memory(device),
        "curve": [(watch.ends[step] - watch.ends[0], step * tokens, loss) for step, loss in watch.losses],
    }


def fitted(spec: Spec, kind: Any, told: Any, data: Any) -> tuple[Any, Watch]:
    """The model of `start` after a trainer of trl has run on data, and the times of its steps."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(spec["start"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(spec["start"])
    watch = Watch()
    kind(model=model, args=told, train_dataset=data, processing_class=tokenizer, callbacks=[watch.callback()]).train()
    return model, watch


def in_ours(spec: Spec, model: Any, device: torch.device) -> GPT:
    """What a trainer of theirs made of `start`, in our network."""
    folder = Path(spec["work"]) / "folder"
    model.save_pretrained(folder)
    checkpoint.load(spec["start"]).tokenizer.save(folder, model.config.max_position_embeddings)
    return GPT.from_checkpoint(folder, device)


def supervised(spec: Spec) -> dict[str, Any]:
    """trl's SFTTrainer on the conversations that sft.py trains on, as ids with the same tokens supervised."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    cfg = config.load("sft", sft.Config, spec["keys"])
    loaded = checkpoint.load(spec["start"])
    tok, block = loaded.tokenizer, loaded.config["block_size"]
    (chats,), val_chats, _ = sft.conversations(cfg.data)
    train_examples, _ = examples(tok, chats, block)
    val_examples, _ = examples(tok, val_chats, block, "held-out")
    length = row_length(train_examples + val_examples, block)
    val_rows = [[val_examples[i] for i in row] for row in pack([len(e) for e in val_examples], length)]
    mean = sum(map(len, train_examples)) / len(train_examples)
    n_rows = len(pack([len(e) for e in train_examples], length))
    per_step = round(len(train_examples) / n_rows * cfg.train.batch_size)  # as many as stand in a step of ours

    pairs = [encode(tok, chat) for chat in chats]
    data = Dataset.from_list([{"input_ids": ids, "assistant_masks": [int(one) for one in mask]} for ids, mask in pairs])
    told = SFTConfig(
        **common(spec, spec["steps"], 1e-3, per_step),
        warmup_steps=1,
        max_length=block,
        logging_steps=1,
        lr_scheduler_type="linear",
    )
    model, watch = fitted(spec, SFTTrainer, told, data)
    device = machine.pick_device(spec["device"])
    dtype = torch.bfloat16 if spec["bf16"] else torch.float32
    return {
        "samples_per_s": watch.per_second(per_step),
        "samples": per_step * spec["steps"],
        "tokens_per_sample": mean,
        "metric": sft.heldout_loss(in_ours(spec, model, device), val_rows, length, dtype),
        "before": sft.heldout_loss(GPT.from_loaded(loaded, device), val_rows, length, dtype),
        "peak_bytes": machine.peak_memory(device),
    }


def preferences(spec: Spec) -> dict[str, Any]:
    """trl's DPOTrainer on the pairs that dpo.py trains on, with the same loss, beta, learning rate and batch."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    cfg = config.load("dpo", dpo.Config, spec["keys"])
    loaded = checkpoint.load(spec["start"])
    train_pairs, val_pairs, _ = dpo.own_pairs(cfg.data)
    data = Dataset.from_list(
        [
            {"prompt": pair.prompt}
            | {
                side: [{"role": "assistant", "content": text}]
                for side, text in (("chosen", pair.chosen), ("rejected", pair.rejected))
            }
            for pair in train_pairs
        ]
    )
    told = DPOConfig(
        **common(spec, spec["steps"], cfg.train.lr, cfg.train.batch_size),
        beta=cfg.dpo.numbers()["beta"],
        warmup_steps=1,
        max_length=loaded.config["block_size"],
        logging_steps=1,
        lr_scheduler_type="linear",
    )
    model, watch = fitted(spec, DPOTrainer, told, data)
    device = machine.pick_device(spec["device"])
    dtype = torch.bfloat16 if spec["bf16"] else torch.float32
    held = dpo.PairRows(loaded.tokenizer, val_pairs, loaded.config["block_size"], cfg.train.seed)
    reference = held.log_probs(GPT.from_loaded(loaded, device), dtype)
    rewards = cfg.dpo.numbers()["beta"] * (held.log_probs(in_ours(spec, model, device), dtype) - reference)
    return {
        "samples_per_s": watch.per_second(cfg.train.batch_size),
        "samples": spec["steps"] * cfg.train.batch_size,
        "metric": float((rewards[0] > rewards[1]).float().mean()),
        "margin": float((rewards[0] - rewards[1]).mean()),
        "peak_bytes": machine.peak_memory(device),
    }


KINDS: dict[str, Callable[[Spec], dict[str, Any]]] = {
    "trainer": trainer,
    "sft": supervised,
    "dpo": preferences,
}

NEEDS = {kind: ("transformers", "accelerate", *(() if kind == "trainer" else ("trl", "psutil"))) for kind in KINDS}


def main() -> None:
    spec = json.loads(sys.argv[1])
    missing = [name for name in NEEDS[spec["kind"]] if find_spec(name) is None]
    found = {"missing": f"{', '.join(missing)} not installed"} if missing else KINDS[spec["kind"]](spec)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
