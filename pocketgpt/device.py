"""What this machine is: device, fast number format, memory, and the speed of its matrix products."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from pocketgpt import fused, kernels
from pocketgpt.errors import UserError


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, mps or cpu, the first that is there. Raises UserError when the one asked for is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, yes in there.items() if yes))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device={name} is not a device: choose auto, cuda, mps or cpu") from None
    if not there.get(device.type, False):
        raise UserError(
            f"device={name} is not there on this machine: choose one of {[k for k, yes in there.items() if yes]}"
        )
    return device


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was given, so that a clock read afterwards means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@cache
def keep_freed_memory() -> bool:
    """Have the C library keep what is freed for the next who asks, instead of giving it back to the system. Returns whether it does.

    The activations of a step are of the same sizes as those of the step before. By default glibc maps large ones anew
    every time, and the system fills each page with zeros first: a seventh of a step of 12 M parameters (docs/LOG.md). What
    one step has freed the next one takes, but for holes: the ends that alignment cuts off keep large pieces apart until some
    eight of a size are there. Only glibc has these two settings; elsewhere this does nothing.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX and M_TRIM_THRESHOLD of malloc.h
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, 2**31 - 1))


def times(work: Callable[[], object], device: torch.device, repeats: int = 5) -> list[float]:
    """Wall-clock seconds of `work`, sorted, after one warm-up run."""
    took = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        took.append(time.perf_counter() - start)
    return sorted(took[1:])


@cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Measured FLOP/s of a matrix product of the size that a small GPT makes: the ceiling for MFU, so the best of several."""
    rows, inner, columns = (2048, 512, 2048) if device.type == "cpu" else (8192, 4096, 4096)
    a = torch.randn(rows, inner, device=device, dtype=dtype)
    b = torch.randn(columns, inner, device=device, dtype=dtype)
    with torch.no_grad():
        return 2.0 * rows * inner * columns / times(lambda: torch.nn.functional.linear(a, b), device, 10)[0]


@cache
def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for matrix products in bfloat16. Said by the processor, not measured, so that a run
    that is continued computes as before. On one without torch's take 7 to 60 times as long as in float32 (docs/LOG.md)."""
    return device.type != "cpu" or not {"avx512_bf16", "amx_bf16"}.isdisjoint(kernels.processor().split())


def pick_dtype(name: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The number format of matrix products, and the reason for it in words.

    `auto` measures both and takes bfloat16 where it is at least 1.3 times as fast as float32; many processors emulate it.

    Raises:
        UserError: on an unknown name.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name != "auto":
        if name not in known:
            raise UserError(f"dtype={name} is not known: choose auto, float32 or bfloat16")
        return known[name], f"{name} as asked"
    rates = {key: matmul_rate(device, dtype) / 1e9 for key, dtype in known.items()}
    best = "bfloat16" if rates["bfloat16"] > 1.3 * rates["float32"] else "float32"
    return known[
        best
    ], f"{best}: matrix products run at {rates['bfloat16']:.0f} GFLOP/s in bfloat16, {rates['float32']:.0f} in float32"


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Matrix products in `dtype`, weights and the rest in float32; on a CPU with the fused parts of fused.py, from the first
    time on, so that what is compared ran alike."""
    if device.type == "cpu":
        fused.build()
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use at once: of the device, or of the process when that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken: of the device, or of the machine (and of the container, on Linux) when that is the CPU."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    # Where the system does not say: half of all.
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2]
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        found = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")] or found
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
        found.append(int(limit.read_text()) - int(used.read_text()))
    return max(0, min(found))


def environment(device: torch.device) -> dict[str, str]:
    """Where a run takes place, in words: the machine, the versions, and the commit of the code where there is one."""
    facts = {"device": describe(device), "system": platform.platform(), "python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "numpy", "tokenizers")}
    here = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(here, capture_output=True, text=True, check=False)
        facts |= {"commit": done.stdout.strip()} if done.returncode == 0 else {}
    return facts | {"started": datetime.now(UTC).isoformat(timespec="seconds")}


def describe(device: torch.device) -> str:
    """The device in a few words, for logs and result files."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    count = torch.get_num_threads()
    return f"{name or device.type}, {count} thread{'s' * (count > 1)}"
