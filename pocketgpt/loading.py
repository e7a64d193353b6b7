"""The next step's batches are made while the current step runs, so that training does not wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from pocketgpt import distributed

if TYPE_CHECKING:
    from pocketgpt.trainer import Batch


class Loader:
    """The batches of one step after another, each made in the background during the step before.

    They are those that `make` returns for the number of the step, a pure function of it. What it raises is raised by
    `batches` when the step is asked for, so a fault beyond the end of a run harms nobody. A thread is enough: reading and copying
    leave Python's lock to others, as do matrix products.
    """

    def __init__(self, make: Callable[[int], list[Batch]], device: torch.device) -> None:
        self.make, self.device = make, device
        self.asked: SimpleQueue[tuple[int, Future[list[Batch]]] | None] = SimpleQueue()
        self.ahead: dict[int, Future[list[Batch]]] = {}
        self.waited = 0.0  # seconds that `batches` has taken since it was set to 0
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step, of all processes. Those of this one can be copied to a GPU without waiting."""
        start = time.perf_counter()
        future = self.ahead.pop(step, None) or self._ask(step)
        while not wait([future], 1.0).done:  # Ctrl-C just before a wait without end would be seen at the end of it
            pass
        found = future.result()
        self.ahead = {step + 1: self._ask(step + 1)}
        self.waited += time.perf_counter() - start
        return found

    def close(self) -> None:
        """End the thread. What it is at work on is waited for a second at most: it ends with the program anyway, so that one
        that hangs keeps nobody."""
        self.asked.put(None)
        self.thread.join(1.0)

    def _ask(self, step: int) -> Future[list[Batch]]:
        future: Future[list[Batch]] = Future()
        self.asked.put((step, future))
        return future

    def _work(self) -> None:
        if self.device.type == "cuda":  # each thread has its own, and pinning would start the first GPU otherwise
            torch.cuda.set_device(self.device)
        while (asked := self.asked.get()) is not None:
            step, future = asked
            try:
                future.set_result(self._pinned(self.make(step)))
            except BaseException as error:  # whatever it is, it is raised where the batches are asked for
                future.set_exception(error)
            del asked, future  # or they would live on until the next step

    def _pinned(self, batches: list[Batch]) -> list[Batch]:
        """On a GPU: in memory that cannot be swapped out, from which copies run beside the computation."""
        if self.device.type == "cuda":
            for batch in batches[distributed.rank() :: distributed.world()]:
                batch.inputs = tuple(tensor.pin_memory() for tensor in batch.inputs)
        return batches
