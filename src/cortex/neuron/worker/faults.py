"""What an exception means for the others: does a request end, or a model, or the device's worker?

Only a device fault poisons the worker. The verdict looks at the whole chain of causes, because libraries
wrap the telling exception in others; it goes by names and messages, so that it needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from cortex.neuron.engine.errors import NoRoomError, RequestError


class FaultKind(StrEnum):
    REQUEST = "request"
    """The request can never be served; it fails alone."""
    OUT_OF_MEMORY = "out_of_memory"
    """There was not enough memory for this step or load; one request or load fails, what is loaded goes on."""
    DEVICE = "device"
    """The device context is unusable; the worker must be replaced."""
    BUG = "bug"
    """Something else. The request to blame fails, or all in the step where none can be; the device is well."""


_OUT_OF_MEMORY_TYPES = frozenset({"OutOfMemoryError", "MemoryError"})
_OUT_OF_MEMORY_WORDS = (
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "triton error [cuda]: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    "cannot allocate memory",
)
_HARMLESS_WORDS = (
    # The driver refused a call; nothing ran, the context is as good as before.
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image is available",
    "device kernel image is invalid",
    "compiled with an unsupported toolchain",
    "too many resources requested for launch",
    "invalid device ordinal",
)
_DEVICE_TYPES = frozenset({"DistBackendError"})
_DEVICE_WORDS = (
    "cuda error:",
    "cuda driver error:",
    "triton error [cuda]:",
    "illegal memory access",
    "illegal instruction was encountered",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "uncorrectable ecc",
    "uncorrectable nvlink",
    "hardware stack error",
    "the launch timed out",
    "driver shutting down",
    "no cuda-capable device",
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
    "nccl communicator was aborted",
    "nccl watchdog",
)


def classify(error: BaseException) -> FaultKind:
    """The gravest kind found in the chain of `error`, a device fault being the gravest."""
    kinds = {_classify_one(link) for link in chain(error)}
    for kind in (FaultKind.DEVICE, FaultKind.OUT_OF_MEMORY, FaultKind.REQUEST):
        if kind in kinds:
            return kind
    return FaultKind.BUG


def explain(error: BaseException) -> str:
    """The whole chain in one line, outermost first: the operator needs all of it."""
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
    """Which of the live requests (id → has produced, oldest first) a failed step ends.

    Out of memory: the newest of those still in their prompt, else the newest of all. Anything else: the one that the
    engine blames; without one, all of them.
    """
    if kind is not FaultKind.OUT_OF_MEMORY:
        return [request_id for request_id in live if blamed in (None, request_id)]
    in_prompt = [request_id for request_id, has_produced in live.items() if not has_produced]
    return (in_prompt or list(live))[-1:]


def _classify_one(error: BaseException) -> FaultKind:
    if isinstance(error, RequestError):
        return FaultKind.REQUEST
    if isinstance(error, NoRoomError):
        return FaultKind.OUT_OF_MEMORY
    type_names = {cls.__name__ for cls in type(error).__mro__}
    message = str(error).lower()
    if type_names & _OUT_OF_MEMORY_TYPES or any(words in message for words in _OUT_OF_MEMORY_WORDS):
        return FaultKind.OUT_OF_MEMORY
    if type_names & _DEVICE_TYPES:
        return FaultKind.DEVICE
    if any(words in message for words in _DEVICE_WORDS):
        # Only the first line is the driver's verdict; the rest is advice that mentions everything.
        verdict = message.split("\n", 1)[0]
        if any(words in verdict for words in _HARMLESS_WORDS):
            return FaultKind.BUG
        return FaultKind.DEVICE
    return FaultKind.BUG
