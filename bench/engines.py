"""The engines that bench/decode.py compares, each alone in a process of its own: `python bench/engines.py`.

The parent writes one JSON object per line to stdin: first what to load, then calls; every call is answered by one line on
stdout. What engines print goes to stderr. Torch is imported by the engines that need it, so that the memory of the others is theirs.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a file, Python looks for modules in bench/ only

Prompts = Sequence[Sequence[int]]


class MissingError(Exception):
    """A part that is not installed, or not in this version: its numbers are null."""


def peak_rss() -> int:
    """Bytes of memory at the peak of this process. Linux carries getrusage's peak over from the process that started
    this one, so there the kernel's own figure is read."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts bytes


class Engine:
    """Greedy decoding of `precision` weights from `folder`.

    Results of `decode` and `batch`: first_s, seconds until all rows have their first new token; decode_s, seconds for
    the n - 1 others; tokens, the new ids of each row.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.precision: str = spec["precision"]
        self.variant: str = spec["variant"]
        self.folder = Path(spec["folder"])
        self.threads: int = spec["threads"]
        self.device: str = spec["device"]
        self.config: dict[str, Any] = spec["config"]  # of the model, see base_model.GPTConfig
        self.longest: int = spec["longest"]  # tokens of prompt and answer in the measure of single-stream decoding
        self.base = 0

    def setup(self) -> dict[str, Any]:
        """Load and warm up: {"weight_bytes": read per token, "kv_bytes": read per token of context, "note": words}."""
        raise NotImplementedError

    def generate(self, prompts: Prompts, n: int) -> dict[str, Any]:
        raise NotImplementedError

    def decode(self, ids: Sequence[int], n: int) -> dict[str, Any]:
        return self.generate([ids], n)

    def batch(self, prompts: Prompts, n: int) -> dict[str, Any]:
        """Rows of any lengths together."""
        return self.generate(prompts, n)

    def memory(self) -> dict[str, int]:
        """base_bytes before loading, with all libraries imported, and peak_bytes until now."""
        return {"base_bytes": self.base, "peak_bytes": peak_rss()}

    def read_parameters(self) -> int:
        """Weights of the matrices that one token reads: all but an untied embedding."""
        c = self.config
        attention = c["n_embd"] * c["head_dim"] * 2 * (c["n_head"] + c["n_kv_head"])
        return c["n_layer"] * (attention + 3 * c["n_embd"] * c["n_inner"]) + c["vocab_size"] * c["n_embd"]

    def kv_elements(self) -> int:
        c = self.config
        return 2 * c["n_layer"] * c["n_kv_head"] * c["head_dim"]


class TorchEngine(Engine):
    def start(self) -> Any:
        import torch

        torch.set_num_threads(self.threads)
        if self.device == "cuda" and not torch.cuda.is_available():
            raise MissingError("no CUDA device")
        self.torch = torch
        return torch

    def synchronize(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def clock(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def memory(self) -> dict[str, int]:
        if self.device == "cuda":
            return {"base_bytes": 0, "peak_bytes": self.torch.cuda.max_memory_allocated()}
        return super().memory()


class Ours(TorchEngine):
    """base_model.GPT (variant nocache) and kv_cache.CachedGPT (packed; bf16kv with keys and values in bfloat16). All calls into them are here."""

    def setup(self) -> dict[str, Any]:
        self.start()
        from base_model import GPT
        from kv_cache import CachedGPT
        from pocketgpt import kernels

        self.base = peak_rss()
        model = (GPT if self.variant == "nocache" else CachedGPT).from_checkpoint(self.folder, self.device)
        model.n_tokens = model.config.vocab_size  # the tokenizer of the folder is a stand-in; all engines use all ids
        note = ""
        if self.variant != "nocache":
            note = kernels.build() if self.device == "cpu" else ""
            model.pack(self.precision, "bfloat16" if self.variant == "bf16kv" else "float32")
        self.model = model
        self.generate([list(range(1, 65))], 8)
        n = self.read_parameters()
        rows = (
            n / self.config["n_embd"]
        )  # about: the scales of int8 are one float per row, those of int4 per 32 weights
        weight_bytes = {"float32": 4 * n, "bfloat16": 2 * n, "int8": n + 4 * rows, "int4": n / 2 + n / 8}
        kv = (2 if self.variant == "bf16kv" else 4) * self.kv_elements()
        return {
            "weight_bytes": round(weight_bytes[self.precision]),
            "kv_bytes": kv,
            "note": note and f"eager, on torch's operators: {note}",
        }

    def generate(self, prompts: Prompts, n: int) -> dict[str, Any]:
        ids = self.torch.tensor(prompts, device=self.device)
        times: list[float] = []

        def note(*_: Any) -> None:  # the head has logits for the next token
            if not times:
                times.append(self.clock())

        hook = self.model.lm_head.register_forward_hook(note)
        start = self.clock()
        out = self.model.generate(ids, n, temperature=0.0)
        end = self.clock()
        hook.remove()
        tokens = out[:, ids.size(1) :].tolist()
        return {"first_s": times[0] - start, "decode_s": end - times[0], "seconds": end - start, "tokens": tokens}

    def batch(self, prompts: Prompts, n: int) -> dict[str, Any]:
        """All prompts through the engine. A new one each time: a used one remembers the prompts."""
        from pocketgpt.engine import Engine, Request
        from pocketgpt.sampling import Settings

        rooms = [math.ceil((len(prompt) + n) / 16) * 16 for prompt in prompts]
        server = Engine(self.model, pool_tokens=sum(rooms), max_batch=len(prompts))
        first: list[float] = []

        def note(answer: Any, _: str) -> None:
            if len(answer.ids) == 1:
                first.append(self.clock())

        start = self.clock()
        answers = [server.add(Request(list(prompt), n, Settings(temperature=0.0), on_token=note)) for prompt in prompts]
        server.run()
        end = self.clock()
        tokens = [answer.ids for answer in answers]
        return {"first_s": first[-1] - start, "decode_s": end - first[-1], "seconds": end - start, "tokens": tokens}

    def ragged(self, prompts: Prompts, n: int) -> dict[str, Any]:
        return self.batch(prompts, n)

    def sequential(self, prompts: Prompts, n: int) -> dict[str, Any]:
        """The same requests, one after another."""
        runs = [self.generate([prompt], n) for prompt in prompts]
        return {"seconds": sum(run["seconds"] for run in runs), "tokens": [run["tokens"][0] for run in runs]}

    def lookup(self, ids: Sequence[int], n: int) -> dict[str, Any]:
        """The same continuation without and with prompt lookup."""
        from pocketgpt import speculative
        from pocketgpt.sampling import Settings

        plain = self.generate([ids], n)
        start = self.clock()
        out, _ = speculative.generate(
            self.model,
            self.torch.tensor([ids], device=self.device),
            n,
            Settings(temperature=0.0),
            speculative.PromptLookup(),
        )
        seconds = self.clock() - start
        same = out[0, len(ids) :].tolist() == plain["tokens"][0]
        return {"plain_s": plain["seconds"], "lookup_s": seconds, "same": same}


class Stopwatch:
    """What transformers calls a streamer: it is handed the prompt, then each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: object) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers(TorchEngine):
    """transformers' generate: variant dynamic (its default cache), or static with its compiled step."""

    def setup(self) -> dict[str, Any]:
        torch = self.start()
        try:
            import transformers
        except ImportError:
            raise MissingError("transformers is not installed") from None

        self.base = peak_rss()
        transformers.logging.set_verbosity_error()
        dtype = getattr(torch, self.precision)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=dtype, local_files_only=True
        ).to(self.device)
        settings: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        if self.variant == "static":
            compiling = transformers.CompileConfig()
            compiling._compile_all_devices = True  # without it a CPU is left out, silently
            settings |= {"cache_implementation": "static", "compile_config": compiling, "max_cache_len": self.longest}
        self.model.generation_config = transformers.GenerationConfig(**settings)
        self.generate([list(range(1, 65))], 8)
        size = 4 if self.precision == "float32" else 2
        return {"weight_bytes": size * self.read_parameters(), "kv_bytes": size * self.kv_elements(), "note": ""}

    def generate(self, prompts: Prompts, n: int) -> dict[str, Any]:
        """Rows shorter than the longest are padded on the left."""
        torch, longest = self.torch, max(map(len, prompts))
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        real = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, mask = torch.tensor(rows, device=self.device), torch.tensor(real, device=self.device)
        watch = Stopwatch() if len(prompts) == 1 else None  # it takes no batches
        start = self.clock()
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=n, streamer=watch)
        end = self.clock()
        result = {"seconds": end - start, "tokens": out[:, longest:].tolist()}
        if watch is not None:
            first = watch.times[-n]
            result |= {"first_s": first - start, "decode_s": end - first}
        return result

    def batch(self, prompts: Prompts, n: int) -> dict[str, Any]:
        """By difference: with a batch it shows no clock between the first tokens and the others."""
        first, whole = self.generate(prompts, 1)["seconds"], self.generate(prompts, n)
        return {"first_s": first, "decode_s": whole["seconds"] - first, "tokens": whole["tokens"]}

    def ragged(self, prompts: Prompts, n: int) -> dict[str, Any]:
        return self.generate(prompts, n)


class LlamaCpp(Engine):
    """llama.cpp through the C interface of llama-cpp-python, with its default settings but for use_extra_bufts.

    With the repacked weights of that switch, version 0.3.36 crashes on 8-bit weights where the processor has AMX.
    """

    F32, F16 = 0, 1  # ggml's numbers of the types

    def setup(self) -> dict[str, Any]:
        try:
            from llama_cpp import llama_cpp as library
        except ImportError:
            raise MissingError("llama-cpp-python is not installed") from None

        self.c = library
        self.base = peak_rss()
        library.llama_backend_init()
        params = library.llama_model_default_params()
        if self.device == "cuda" and not library.llama_supports_gpu_offload():
            raise MissingError("llama-cpp-python is built without GPU support")
        params.n_gpu_layers = -1 if self.device == "cuda" else 0
        params.use_extra_bufts = False
        params.load_mode = library.LLAMA_LOAD_MODE_NONE  # read, not mapped: no page faults in the timings
        path = self.folder / f"{self.precision}.gguf"
        self.weights = library.llama_model_load_from_file(str(path).encode(), params)
        if not self.weights:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self.vocab_size: int = self.config["vocab_size"]
        self.key: tuple[int, int, int] | None = None
        self.context: Any = None
        self.generate([list(range(1, 65))], 8)
        weight_bytes = library.llama_model_size(self.weights)
        return {"weight_bytes": weight_bytes, "kv_bytes": 2 * self.kv_elements(), "note": ""}

    def open(self, rows: int, room: int, kind: int) -> None:
        """A context for `rows` sequences of `room` tokens; the one there is kept if it fits."""
        if self.key == (rows, room, kind):
            self.c.llama_memory_clear(self.c.llama_get_memory(self.context), False)
            return
        if self.context:
            self.c.llama_free(self.context)
            self.c.llama_batch_free(self.slots)
        params = self.c.llama_context_default_params()
        params.n_ctx, params.n_seq_max = rows * room, rows
        params.n_batch = rows * room  # all prompts in one call; it is cut into n_ubatch = 512 inside
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = kind
        self.context = self.c.llama_init_from_model(self.weights, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {rows} sequences of {room} tokens")
        self.key = (rows, room, kind)
        size = rows * room
        self.slots = self.c.llama_batch_init(size, 0, 1)
        self.token = np.ctypeslib.as_array(self.slots.token, (size,))
        self.pos = np.ctypeslib.as_array(self.slots.pos, (size,))
        self.wanted = np.ctypeslib.as_array(self.slots.logits, (size,))
        np.ctypeslib.as_array(self.slots.n_seq_id, (size,))[:] = 1

    def fill(self, prompts: Prompts, starts: Sequence[int]) -> None:
        """Put these tokens into the batch, row i from position starts[i]; logits are wanted after the last of each."""
        at = 0
        for row, (ids, start) in enumerate(zip(prompts, starts, strict=True)):
            end = at + len(ids)
            self.token[at:end], self.pos[at:end] = ids, range(start, start + len(ids))
            self.wanted[at:end] = 0
            self.wanted[end - 1] = 1
            for slot in range(at, end):
                self.slots.seq_id[slot][0] = row
            at = end
        self.slots.n_tokens = at

    def step(self, rows: int) -> Any:
        """Run the batch: the greedy next token of each row."""
        code = self.c.llama_decode(self.context, self.slots)
        if code:
            raise RuntimeError(f"llama_decode failed with code {code}")
        address = ctypes.cast(self.c.llama_get_logits(self.context), ctypes.c_void_p).value
        logits = np.frombuffer((ctypes.c_float * (rows * self.vocab_size)).from_address(address), np.float32)
        return logits.reshape(rows, self.vocab_size).argmax(-1)

    def generate(self, prompts: Prompts, n: int, kind: int = F16) -> dict[str, Any]:
        rows = len(prompts)
        # One sequence has the room of the longest context, so that one context serves all measures of batch 1.
        room = self.config["block_size"] if rows == 1 else math.ceil((max(map(len, prompts)) + n) / 256) * 256
        self.open(rows, room, kind)
        self.fill(prompts, [0] * rows)
        start = time.perf_counter()
        tokens = [self.step(rows)]
        first = time.perf_counter()
        at = np.array([len(prompt) for prompt in prompts], np.int32)
        self.wanted[:rows] = 1
        for row in range(rows):
            self.slots.seq_id[row][0] = row
        self.slots.n_tokens = rows
        for _ in range(n - 1):
            self.token[:rows], self.pos[:rows] = tokens[-1], at
            at += 1
            tokens.append(self.step(rows))
        end = time.perf_counter()
        columns = np.stack(tokens, axis=1).tolist()
        return {"first_s": first - start, "decode_s": end - first, "seconds": end - start, "tokens": columns}

    def exact(self, ids: Sequence[int], n: int) -> dict[str, Any]:
        """decode with keys and values in float32; timed runs have its default, float16."""
        return self.generate([ids], n, self.F32)


class Ceiling(TorchEngine):
    """How fast this machine reads memory, at several sizes: the small ones stay in the processor's cache."""

    def setup(self) -> dict[str, Any]:
        self.start()
        return {"weight_bytes": 0, "kv_bytes": 0, "note": ""}

    def read(self, megabytes: int, repeats: int = 5) -> dict[str, float]:
        """GB/s of the best of several reads of a float32 tensor: as a sum, and as a matrix-vector product."""
        torch = self.torch
        rows = megabytes * 2**20 // 4 // 1024
        matrix = torch.randn(rows, 1024, device=self.device)
        vector = torch.randn(1, 1024, device=self.device)
        works = {
            "sum_gb_s": lambda: matrix.sum(),
            "linear_gb_s": lambda: torch.nn.functional.linear(vector, matrix),
        }
        result = {}
        with torch.inference_mode():
            for name, work in works.items():
                took = []
                for _ in range(repeats + 1):
                    start = self.clock()
                    work()
                    took.append(self.clock() - start)
                result[name] = matrix.nbytes / min(took[1:]) / 1e9
        return result


KINDS = {"ours": Ours, "transformers": Transformers, "llamacpp": LlamaCpp, "ceiling": Ceiling}


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like a reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which closes stdin
    spec = json.loads(sys.stdin.readline())
    engine = KINDS[spec["kind"]](spec)
    for line in sys.stdin:
        call = json.loads(line)
        try:
            reply = {"result": getattr(engine, call["method"])(*call["arguments"])}
        except MissingError as error:
            reply = {"missing": str(error)}
        except Exception as error:  # whatever a peer raises: the benchmark goes on without it
            traceback.print_exc()
            text = next(iter(str(error).strip().splitlines()), "")
            reply = {"error": f"{type(error).__name__}: {text}"[:300]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
