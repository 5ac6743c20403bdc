"""Classifies exceptions in a worker: which of request, model and device an error affects.

Only a device fault ends the worker. The whole chain of causes counts, because libraries wrap the decisive exception in
others. Types and error numbers decide. Messages decide only where there is nothing else: torch raises a plain
RuntimeError for cuBLAS, cuDNN, NCCL and the CPU allocator, and so does Triton. No error of ours, and none that repeats
a client's text, has one of those types. Types are compared by name, so that this module needs no torch.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import StrEnum

from cortex.neuron.engine.errors import GroupBroken, InsufficientMemory, RequestError


class FaultKind(StrEnum):
    REQUEST = "request"
    """The request can never be served; it fails alone."""
    UNSUPPORTED = "unsupported"
    """The model can never be loaded here: the engine does not run it, or not with these options."""
    OUT_OF_MEMORY = "out_of_memory"
    """There was not enough memory for this step or load; one request or load fails, loaded models stay."""
    DEVICE = "device"
    """The device context is unusable; the worker must be replaced."""
    BUG = "bug"
    """Anything else. The blamed request fails, or all requests of the step; the device still works."""


class DeviceFault(Exception):
    """The device context is unusable; the worker process must end."""


_OUT_OF_MEMORY_TYPES = frozenset({"OutOfMemoryError", "MemoryError"})
_DEVICE_TYPES = frozenset({"DistBackendError"})
_UNTYPED = frozenset({"RuntimeError", "CudaError", "AcceleratorError"})
"""The types whose messages are read; AcceleratorError only where it has no error number, before torch 2.9."""

# Error numbers of the CUDA runtime, `torch.AcceleratorError.error_code`
_CUDA_OUT_OF_MEMORY = 2
_CUDA_REJECTED_CALLS = frozenset({1, 9, 98, 101, 200, 209, 222, 701})
"""The driver rejected a call before anything ran, for an invalid argument or kernel image; the context is intact."""

# Parts of messages, in lower case
_OUT_OF_MEMORY_MESSAGES = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
)
_REJECTED_CALL_MESSAGES = (  # as `_CUDA_REJECTED_CALLS`
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image is available",
    "device kernel image is invalid",
    "compiled with an unsupported toolchain",
    "too many resources requested for launch",
    "invalid device ordinal",
)
_DEVICE_MESSAGES = (
    "cuda error:",
    "cuda driver error:",
    "triton error [cuda]:",
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "no cuda gpus are available",
    "gpu is lost",
    "fallen off the bus",
    "cuda driver initialization failed",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cublas_status_not_initialized",
    "cudnn_status_execution_failed",
    "cudnn_status_internal_error",
    "nccl error",
)


def classify(error: BaseException) -> FaultKind:
    """The most severe kind in the chain of `error`; a device fault is the most severe."""
    kinds = {_classify_one(link) for link in chain(error)}
    for kind in (FaultKind.DEVICE, FaultKind.OUT_OF_MEMORY, FaultKind.REQUEST):
        if kind in kinds:
            return kind
    return FaultKind.BUG


def raise_device_fault(error: Exception, where: str) -> FaultKind:
    """Raises DeviceFault if `error` is one; otherwise returns its kind."""
    kind = classify(error)
    if kind is FaultKind.DEVICE:
        raise DeviceFault(f"device fault in {where}: {explain(error)}") from error
    return kind


def explain(error: BaseException) -> str:
    """The whole chain in one line, outermost first."""
    lines: list[str] = []
    for link in chain(error):
        message = " ".join(str(link).split())
        line = f"{type(link).__name__}: {message}" if message else type(link).__name__
        if line not in lines:
            lines.append(line)
    return " ← ".join(lines)


def chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, its causes and contexts, and the members of groups, each once."""
    pending = [error]
    seen: set[int] = set()
    while pending:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            pending.append(link.__cause__)
        elif link.__context__ is not None and not link.__suppress_context__:
            pending.append(link.__context__)
        if isinstance(link, BaseExceptionGroup):
            pending.extend(link.exceptions)


def choose_victims(kind: FaultKind, live: dict[str, bool], blamed: str | None = None) -> list[str]:
    """The live requests (id → has produced output, oldest first) that a failed step ends.

    Out of memory: the newest request still in its prompt, else the newest of all. Otherwise: the request that the
    engine blames, or all requests if it blames none.
    """
    if kind is not FaultKind.OUT_OF_MEMORY:
        return [request_id for request_id in live if blamed in (None, request_id)]
    in_prompt = [request_id for request_id, has_produced in live.items() if not has_produced]
    return (in_prompt or list(live))[-1:]


def _classify_one(error: BaseException) -> FaultKind:
    type_names = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, RequestError):
        return FaultKind.REQUEST
    if isinstance(error, InsufficientMemory) or type_names & _OUT_OF_MEMORY_TYPES:
        return FaultKind.OUT_OF_MEMORY
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return FaultKind.OUT_OF_MEMORY
    if isinstance(error, GroupBroken | DeviceFault) or type_names & _DEVICE_TYPES:
        return FaultKind.DEVICE  # the state of the other ranks is unknown: all their workers are replaced
    if isinstance(code := getattr(error, "error_code", None), int) and "AcceleratorError" in type_names:
        return _classify_cuda_error(code)
    if type(error).__name__ in _UNTYPED:
        return _classify_message(str(error).lower())
    return FaultKind.BUG


def _classify_cuda_error(code: int) -> FaultKind:
    if code == _CUDA_OUT_OF_MEMORY:
        return FaultKind.OUT_OF_MEMORY
    return FaultKind.BUG if code in _CUDA_REJECTED_CALLS else FaultKind.DEVICE


def _classify_message(message: str) -> FaultKind:
    if any(words in message for words in _OUT_OF_MEMORY_MESSAGES):
        return FaultKind.OUT_OF_MEMORY
    if not any(words in message for words in _DEVICE_MESSAGES):
        return FaultKind.BUG
    # Only the first line is the driver's error; the rest is advice that mentions all kinds of errors.
    first_line = message.split("\n", 1)[0]
    if any(words in first_line for words in _REJECTED_CALL_MESSAGES):
        return FaultKind.BUG
    return FaultKind.DEVICE
