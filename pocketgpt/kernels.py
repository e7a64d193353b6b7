"""Decoding kernels for CPUs (kernels.cpp), built on first use with the machine's own C++ compiler and kept on disk.

Without a compiler everything still runs, on torch's operators; `build` says why, and its callers print it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from pocketgpt.errors import UserError
from pocketgpt.files import atomic_path

SOURCE = Path(__file__).with_name("kernels.cpp")
MAX_QUERIES = 32  # attention of more new tokens at once is left to torch
loaded = False  # whether torch.ops.pocketgpt is there


def cache_folder() -> Path:
    """Where built kernels and compiled steps are kept between processes; POCKETGPT_CACHE moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("POCKETGPT_CACHE") or Path(base) / "pocketgpt")


def compiler() -> str | None:
    """The C++ compiler: $CXX, g++ or clang++; None when there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++"))), None)


def processor() -> str:
    """What code is tuned for: two machines that share a home folder must not share a library."""
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.machine() + platform.processor()


def load(source: Path) -> str:
    """Compile a library of operators, once a machine, and load it. Returns "" or why it is not there."""
    cxx = compiler()
    if cxx is None:
        return "no C++ compiler found (g++ or clang++)"
    root = Path(torch.__file__).parent
    # -march=native is for this processor; gcc takes half of AVX-512's width unless told, and torch's vectors any name.
    flags = ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared"]
    flags += ["-mprefer-vector-width=512"] if platform.machine() in ("x86_64", "AMD64") else []
    flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    capability = torch.backends.cpu.get_cpu_capability()
    flags += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    key = hashlib.sha256(f"{source.read_text()} {cxx} {flags} {torch.__version__} {processor()}".encode()).hexdigest()
    library = cache_folder() / f"{source.stem}_{key[:16]}.so"
    try:
        if not library.exists():
            print(f"building {source.name}, once, in ten to thirty seconds ...", file=sys.stderr)
            include = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
            with atomic_path(library) as temporary:
                command = [cxx, *flags, *include, str(source), "-o", str(temporary), f"-L{root / 'lib'}"]
                subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True, capture_output=True, text=True)
        torch.ops.load_library(str(library))
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or [f"{cxx} failed"]
        return f"{source.name} does not compile: {lines[0][:160]}"
    except (UserError, OSError) as error:
        return f"{source.name} does not load: {str(error)[:160]}"
    return ""


@cache
def build() -> str:
    """Have the kernels; ten to thirty seconds, once a machine. Returns "" or why they are not there."""
    global loaded
    if why := load(SOURCE):
        return why
    torch.library.register_fake("pocketgpt::linear", lambda x, w, scale, bias, n: x.new_empty(*x.shape[:-1], n))
    torch.library.register_fake(
        "pocketgpt::rows", lambda idx, w, _, width: w.new_empty(*idx.shape, width, dtype=torch.float32)
    )
    torch.library.register_fake("pocketgpt::attend", lambda q, k, v, mask: q.new_empty(q.shape))
    loaded = True
    return ""


def linear(x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, n: int) -> Tensor:
    """x (..., K) float32 times packed weights (see packed.py) -> (..., n) float32. A row's result does not depend on the others."""
    return torch.ops.pocketgpt.linear(x, weight, scale, bias, n)


def rows(idx: Tensor, weight: Tensor, scale: Tensor | None, width: int) -> Tensor:
    """Rows idx (...) int64 of packed weights -> (..., width) float32."""
    return torch.ops.pocketgpt.rows(idx, weight, scale, width)


def can_attend(q: Tensor, k: Tensor) -> bool:
    """Whether `attend` serves these: a few new float32 queries on the CPU, without a gradient."""
    few = loaded and q.device.type == "cpu" and q.size(2) <= MAX_QUERIES
    return few and q.dtype == torch.float32 and k.dtype in (torch.float32, torch.bfloat16) and not q.requires_grad


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As base_model.attend, for k and v of float32 or bfloat16, which are widened in registers."""
    if mask is not None and mask.dim() == 2:
        mask = mask[None, None]
    return torch.ops.pocketgpt.attend(q, k, v, mask)
