"""Compiles kernels before they are launched: several at a time, and for a card that need not be there.

A pass over tensors on the `meta` device computes nothing. Within `collected`, each launch of such a pass is a kernel to
compile: for the card that `device_facts.pretend` names, in a pool of threads, which write Triton's cache. Its compiler
holds the interpreter lock for a part of the time only, and the assembler is a process.
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

from cortex.neuron.kernels.device_facts import DeviceFacts
from cortex.neuron.kernels.jit import Kernel

ALIGNED_BYTES = 16
"""Kernels are compiled for pointers at multiples of this, or for any."""
MAX_THREADS = 16
POLL_S = 0.05
_collecting = threading.Lock()
"""Held while the launches of one thread are compiled: a second such thread would launch kernels without memory."""
Report = Callable[[int, int], None]
"""Called with the kernels that are compiled, and those that are known to be needed."""


class Pointer:
    """Stands for a tensor in a launch that only compiles."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype = tensor.dtype
        self._place = int(tensor.storage_offset()) * tensor.element_size() % ALIGNED_BYTES

    def data_ptr(self) -> int:
        return self._place


class OfflineDriver:
    """A driver of Triton for a card that is not there."""

    def __init__(self, facts: DeviceFacts) -> None:
        from triton.backends.compiler import GPUTarget

        major, minor = facts.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def use_offline(facts: DeviceFacts) -> None:
    """Compiles all kernels of this process for a card that is not there; none can be launched afterwards."""
    from triton.runtime import driver

    driver.set_active(OfflineDriver(facts))  # type: ignore[arg-type]  # as much of one as compiling needs


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

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            if threading.get_ident() != own:
                return launch(kernel, *args, grid=grid, warmup=warmup, **options)
            self._begin(partial(launch, kernel, grid=(1, 1, 1), warmup=True), kernel, args, options)
            return None

        with _collecting:
            launch = Kernel.run
            Kernel.run = run
            try:
                yield
            finally:
                Kernel.run = launch

    def _begin(self, compile_: Callable[..., object], kernel: Any, args: tuple[Any, ...], options: Any) -> None:
        given = tuple(Pointer(each) if isinstance(each, Tensor) else each for each in args)
        key = (kernel, tuple(map(_specialised, kernel.params, given)), tuple(sorted(options.items())))
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


def timed(compile_: Callable[[], Any]) -> float:
    """Compiles one kernel and what launches it. Returns the seconds that it took."""
    start = time.perf_counter()
    build_launcher(compile_())
    return time.perf_counter() - start


def build_launcher(compiled: Any) -> None:
    """Builds the function that launches a kernel, where there is a card. Some versions of Triton write it in C for each
    signature and run the host's compiler: a quarter of a second each, on the engine's thread if nobody does it
    before."""
    from triton.runtime import driver

    make: Any = getattr(driver.active, "launcher_cls", None)
    if make is not None and compiled is not None:
        make(compiled.src, compiled.metadata)


def _specialised(parameter: Any, given: Any) -> object:
    """What of an argument decides which kernel is compiled."""
    if isinstance(given, Pointer):
        is_aligned = parameter.do_not_specialize_on_alignment or given.data_ptr() == 0
        return given.dtype, is_aligned
    if isinstance(given, bool) or given is None or parameter.is_constexpr:
        return given
    if isinstance(given, int):
        is_wide = not -(1 << 31) <= given < 1 << 31
        return is_wide if parameter.do_not_specialize else (is_wide, given == 1, given % ALIGNED_BYTES == 0)
    return type(given)
