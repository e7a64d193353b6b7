"""Take a model elsewhere: a checkpoint becomes one GGUF file, which llama.cpp, ollama and their kin run.

    python export.py                                             # checkpoints/latest
    python export.py checkpoint=checkpoints/ckpt_sft.pt dtype=q8_0

transformers, vLLM and lm-eval need no export: they open the folder that every stage leaves, checkpoints/<stage>/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from base_model import GPT
from pocketgpt import checkpoint, config, gguf_file, hf
from pocketgpt.errors import UserError, run


@dataclass
class Config:
    """See configs/export.yaml for units and meaning."""

    checkpoint: str
    format: str
    dtype: str
    file: str


def main() -> None:
    cfg = config.load("export", Config)
    if cfg.format != "gguf":
        raise UserError(f"format is {cfg.format!r}: it must be gguf")
    source = Path(cfg.checkpoint)
    loaded = checkpoint.load(source)
    GPT.from_loaded(loaded)  # checks names, shapes and sizes
    path = Path(cfg.file) if cfg.file else source.parent / f"{loaded.stage}.gguf"
    gguf_file.save(path, loaded, cfg.dtype)
    size = path.stat().st_size / 1e6
    print(f"{path}: {hf.architecture(loaded.config)}, stage {loaded.stage}, {cfg.dtype}, {size:,.1f} MB")


if __name__ == "__main__":
    run(main)
