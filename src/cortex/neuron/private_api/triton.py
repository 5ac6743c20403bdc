"""The private interfaces of Triton that the engine uses to compile kernels ahead of their launch.

Without them kernels are compiled at their first launch, while a request waits.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from cortex.neuron.private_api.entries import PrivateEntry, Unusable, require

triton: Any = None
try:
    triton = import_module("triton")
except ImportError:  # CPU installs of torch come without Triton
    pass
ALIGNED_BYTES = 16
"""Kernels are compiled for pointers at multiples of this, or for any."""


def _is_installed() -> bool:
    return triton is not None


# The key of its cache


def _probe_key() -> None:
    require(triton.runtime.cache, "triton_key")


RECORDED_KEY = PrivateEntry(
    "triton.runtime.cache.triton_key",
    "each process reads Triton's half a gigabyte before its first kernel",
    _probe_key,
    kinds=("cuda",),
    applies=_is_installed,
)


def key_of_record(record: str) -> str | None:
    """A digest of the digests that an installer has recorded of Triton's files, its compiler among them. None: it has
    not."""
    files = sorted(line for line in record.splitlines() if line.startswith("triton/") and ",sha256=" in line)
    if not any(line.startswith("triton/_C/libtriton.") for line in files):
        return None
    return hashlib.sha256("\n".join(files).encode()).hexdigest()


def use_recorded_key() -> None:
    """Triton's cache is keyed by a digest of its own files. Each process would read half a gigabyte for it before its
    first kernel, in every thread that compiles; the record of the installed wheel says the same,
    except of files that were edited in place."""
    try:
        installed = metadata.distribution("triton")
    except metadata.PackageNotFoundError:
        return
    is_imported = Path(str(installed.locate_file("triton/__init__.py"))).resolve() == Path(triton.__file__).resolve()
    key = key_of_record(installed.read_text("RECORD") or "")
    if is_imported and key is not None and RECORDED_KEY.is_usable:
        triton.runtime.cache.triton_key = lambda: f"{triton.__version__}-{key}"


# Launches that only compile


def _probe_launches() -> None:
    taken = inspect.signature(triton.JITFunction.run).parameters
    if missing := [name for name in ("grid", "warmup") if name not in taken]:
        raise Unusable(f"JITFunction.run of this version of Triton does not take {', '.join(missing)}")
    kernel = triton.JITFunction(_probed_kernel)
    require(kernel, "device_caches", "params")
    for parameter in kernel.params:
        require(parameter, "do_not_specialize", "do_not_specialize_on_alignment", "is_constexpr")


def _probed_kernel(x) -> None:  # type: ignore[no-untyped-def]
    pass


COLLECTED_LAUNCHES = PrivateEntry(
    "triton.JITFunction.run",
    "kernels are compiled when they are first launched, not while a model is loaded",
    _probe_launches,
    kinds=("cuda",),
    applies=_is_installed,
)


class Kernel(getattr(triton, "JITFunction", object)):  # type: ignore[misc]
    """A kernel that is compiled."""

    def prepare_cache(self) -> None:
        """Makes the cache of the current device, which two threads must not do at the same time."""
        self.device_caches[triton.runtime.driver.active.get_current_device()]


@contextmanager
def replaced_launches(run: Callable[..., object]) -> Iterator[None]:
    """Calls `run` with the function that launches a kernel, the kernel and its arguments, in place of every launch, in
    all threads. One at a time."""
    launch = Kernel.run
    Kernel.run = lambda kernel, *args, **options: run(launch, kernel, *args, **options)
    try:
        yield
    finally:
        Kernel.run = launch


class Pointer:
    """Stands for a tensor in a launch that only compiles."""

    def __init__(self, dtype: object, offset_bytes: int) -> None:
        self.dtype = dtype
        self._place = offset_bytes % ALIGNED_BYTES

    def data_ptr(self) -> int:
        return self._place


def specialised(parameter: Any, given: Any) -> object:
    """What of an argument decides which kernel is compiled."""
    if isinstance(given, Pointer):
        is_aligned = parameter.do_not_specialize_on_alignment or given.data_ptr() == 0
        return given.dtype, is_aligned
    if isinstance(given, bool) or given is None or parameter.is_constexpr:
        return given
    if hasattr(given, "block_shape"):  # a descriptor of lines that are copied in blocks
        return given.base.dtype, tuple(given.block_shape)
    if isinstance(given, int):
        is_wide = not -(1 << 31) <= given < 1 << 31
        return is_wide if parameter.do_not_specialize else (is_wide, given == 1, given % ALIGNED_BYTES == 0)
    return type(given)


# Launchers


LAUNCHERS = PrivateEntry(
    "triton.runtime.driver.active.launcher_cls",
    "the function that launches a kernel is built at its first launch",
    lambda: None,  # only a driver of a card has it
    kinds=("cuda",),
    applies=_is_installed,
)


def build_launcher(compiled: Any) -> None:
    """Builds the function that launches a kernel, where there is a card. Some versions of Triton write it in C for each
    signature and run the host's compiler: a quarter of a second each, on the engine's thread if nobody does it
    before."""
    driver = triton.runtime.driver.active
    make: Any = getattr(driver, "launcher_cls", None)
    if make is None and not isinstance(driver, OfflineDriver):
        LAUNCHERS.reject("the driver of this version of Triton has no launcher_cls")
    if make is not None and compiled is not None and LAUNCHERS.is_usable:
        make(compiled.src, compiled.metadata)


# Cards that are not there


def _probe_offline() -> None:
    require(type(triton.runtime.driver), "set_active", "active")  # of the class: to read `active` would look for a card
    require(import_module("triton.backends.compiler"), "GPUTarget")


OFFLINE_DRIVER = PrivateEntry(
    "triton.runtime.driver.set_active",
    "`neuron warmup` needs the card that it compiles for",
    _probe_offline,
    kinds=("cuda",),
    applies=_is_installed,
)


class OfflineDriver:
    """A driver of Triton for a card that is not there."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    @cached_property
    def _target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        major, minor = self._capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def use_offline(capability: tuple[int, int]) -> None:
    """Compiles all kernels of this process for a card that is not there; none can be launched afterwards. Only where
    OFFLINE_DRIVER is usable."""
    triton.runtime.driver.set_active(OfflineDriver(capability))


# Where it keeps what it has compiled


CACHE_FOLDER = PrivateEntry(
    "triton.knobs.cache.dir",
    "notes about compiled kernels are in the folder of TRITON_CACHE_DIR, or in ~/.triton/cache",
    lambda: require(triton.knobs.cache, "dir"),
    kinds=("cuda",),
    applies=_is_installed,
)


def cache_folder() -> Path:
    if CACHE_FOLDER.is_usable:
        return Path(triton.knobs.cache.dir)
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


# Its lower language, an experiment of its authors (`gluon.py`)


def _probe_gluon() -> None:
    language = import_module("triton.experimental.gluon.language")
    layouts = ("NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout", "SliceLayout")
    require(language, "warp_specialize", *layouts)
    memory = language.shared_memory_descriptor
    require(memory, "reinterpret" if hasattr(memory, "reinterpret") else "_reinterpret", "index", "permute")
    hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
    require(hopper, "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait")
    require(import_module("triton.experimental.gluon.nvidia.hopper"), "TensorDescriptor")
    require(import_module("triton.experimental.gluon._runtime"), "GluonJITFunction")
    taken = list(inspect.signature(language.warp_specialize).parameters)
    if taken[:3] != ["functions_and_args", "worker_num_warps", "worker_num_regs"]:
        raise Unusable(f"warp_specialize of this version of Triton takes other arguments: {', '.join(taken)}")


GLUON = PrivateEntry(
    "triton.experimental.gluon",
    "prompts are computed by a kernel that is slower on Hopper",
    _probe_gluon,
    kinds=("cuda",),
    applies=_is_installed,
    is_lazy=True,
)

ENTRIES = (RECORDED_KEY, COLLECTED_LAUNCHES, LAUNCHERS, OFFLINE_DRIVER, CACHE_FOLDER, GLUON)
