"""Compiles kernels before they are launched: several at a time, and for a card that need not be there.

A pass over tensors on the `meta` device computes nothing. Within `collected`, each launch of such a pass is a kernel to
compile: for the card that `device_properties.pretend` names, in a pool of threads, which write Triton's cache. Its
compiler holds the interpreter lock for a part of the time only, and the assembler is a process.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from cortex.neuron.private_api.triton import Pointer, build_launcher, replaced_launches, specialised

MAX_THREADS = 16
POLL_S = 0.05
_collecting = threading.Lock()
"""Held while the launches of one thread are compiled: a second such thread would launch kernels without memory."""
Report = Callable[[int, int], None]
"""Called with the kernels that are compiled, and those that are known to be needed."""


class KernelCompiler:
    """Compiles each kernel that a pass launches once."""

    def __init__(self, num_threads: int | None = None) -> None:
        count = min(MAX_THREADS, os.cpu_count() or 1) if num_threads is None else num_threads
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="compile")
        self._begun: dict[object, Future[float]] = {}

    @contextmanager
    def collected(self) -> Iterator[None]:
        """This thread's launches are compiled instead. Those of other threads run; one that also collects waits."""
        own = threading.get_ident()

        def run(launch: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != own:
                return launch(kernel, *args, grid=grid, warmup=warmup, **options)
            self._begin(partial(launch, kernel, grid=(1, 1, 1), warmup=True), kernel, args, options)
            return None

        with _collecting, replaced_launches(run):
            yield

    def _begin(self, compile_: Callable[..., object], kernel: Any, args: tuple[Any, ...], options: Any) -> None:
        given = tuple(_pointer(each) if isinstance(each, Tensor) else each for each in args)
        key = (kernel, tuple(map(specialised, kernel.params, given)), tuple(sorted(options.items())))
        if key not in self._begun:
            kernel.prepare_cache()
            self._begun[key] = self._threads.submit(timed, partial(compile_, *given, **options))

    def wait(self, report: Report = lambda *_: None) -> None:
        """Returns when everything that was collected is compiled. Raises what a compilation or `report` raises."""
        for each in self.ended(report):
            each.result()

    def ended(self, report: Report, first: int | None = None) -> list[Future[float]]:
        """The compilations of everything that was collected, or of the `first` kernels only, once they have ended, in
        success or not. `report` is called every POLL_S; what it raises ends the wait."""
        begun = list(self._begun.values())[:first]
        left = begun
        while left:
            report(len(begun) - len(left), len(begun))
            wait_for(left, POLL_S)
            left = [each for each in left if not each.done()]
        report(len(begun), len(begun))
        return begun

    @property
    def num_kernels(self) -> int:
        return len(self._begun)

    def finish(self) -> None:
        """Collects no more; the threads end when all is compiled."""
        self._threads.shutdown(wait=False)

    def close(self) -> None:
        """Forgets what has not begun yet; a compilation that runs ends on its own."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _pointer(tensor: Tensor) -> Pointer:
    return Pointer(tensor.dtype, int(tensor.storage_offset()) * tensor.element_size())


def timed(compile_: Callable[[], Any]) -> float:
    """Compiles one kernel and what launches it. Returns the seconds that it took."""
    start = time.perf_counter()
    build_launcher(compile_())
    return time.perf_counter() - start
