"""The next step's batches are made while the current step runs, so that training does not wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from pocketgpt import distributed

if TYPE_CHECKING:
    from pocketgpt.trainer import Batch


class Loader:
    """The batches of one step after another, each made in the background during the step before.

    They are those that `make` returns for the number of the step, a pure function of it. What it raises is raised by
    `batches` when the step is asked for, so a fault beyond the end of a run harms nobody. Threads are enough: reading and copying
    leave Python's lock to others, as do matrix products.
    """

    def __init__(self, make: Callable[[int], list[Batch]], device: torch.device) -> None:
        self.make, self.device = make, device
        self.ahead: dict[int, tuple[Future[list[Batch]], threading.Thread]] = {}
        self.waited = 0.0  # seconds that `batches` has taken since it was set to 0

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, of all processes. Those of this one can be copied to a GPU without waiting."""
        start = time.perf_counter()
        future, _ = self.ahead[step] if step in self.ahead else self._begin(step)
        found = future.result()
        self.ahead = {step + 1: self._begin(step + 1)}
        self.waited += time.perf_counter() - start
        return found

    def close(self) -> None:
        """Wait for what is being made, a second at most: the thread ends with the program, so that one which hangs keeps
        nobody."""
        for _, thread in self.ahead.values():
            thread.join(1.0)

    def _begin(self, step: int) -> tuple[Future[list[Batch]], threading.Thread]:
        future: Future[list[Batch]] = Future()

        def work() -> None:
            try:
                future.set_result(self._pinned(self.make(step)))
            except BaseException as error:  # whatever it is, it is raised where the batches are asked for
                future.set_exception(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return future, thread

    def _pinned(self, batches: list[Batch]) -> list[Batch]:
        """On a GPU: in memory that cannot be swapped out, from which copies run beside the computation."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # is one of the thread; the default would start another GPU
            for batch in batches[distributed.rank() :: distributed.world()]:
                batch.inputs = tuple(tensor.pin_memory() for tensor in batch.inputs)
        return batches
