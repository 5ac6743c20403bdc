import errno

import pytest
import torch

from cortex.neuron.engine.errors import EngineError, FaultyRequest, InsufficientMemory, LoadError, RequestError
from cortex.neuron.worker.faults import FaultKind, chain, choose_victims, classify, explain


class OutOfMemoryError(RuntimeError):
    pass


class AcceleratorError(RuntimeError):
    """Named like torch's, with the number of the CUDA error since torch 2.9."""

    def __init__(self, message: str, error_code: int | None = None) -> None:
        super().__init__(message)
        if error_code is not None:
            self.error_code = error_code


ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call."
    "\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestError("too long"), FaultKind.REQUEST),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), FaultKind.OUT_OF_MEMORY),
        (MemoryError(), FaultKind.OUT_OF_MEMORY),
        (InsufficientMemory("the model needs 8.00 GB on cuda:0 but 2.00 GB can be used"), FaultKind.OUT_OF_MEMORY),
        (LoadError("this is no model"), FaultKind.BUG),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), FaultKind.OUT_OF_MEMORY),
        (AcceleratorError("CUDA error: out of memory" + ADVICE), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), FaultKind.OUT_OF_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), FaultKind.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), FaultKind.OUT_OF_MEMORY),
        (AcceleratorError("CUDA error: an illegal memory access was encountered" + ADVICE), FaultKind.DEVICE),
        (RuntimeError("CUDA error: device-side assert triggered" + ADVICE), FaultKind.DEVICE),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), FaultKind.DEVICE),
        (RuntimeError("CUDA error: unspecified launch failure"), FaultKind.DEVICE),
        (RuntimeError("CUDA error: unknown error"), FaultKind.DEVICE),
        (RuntimeError("CUDA driver error: unknown error"), FaultKind.DEVICE),
        (RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"), FaultKind.DEVICE),
        (RuntimeError("NCCL error: unhandled system error"), FaultKind.DEVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), FaultKind.DEVICE),
        (AcceleratorError("CUDA error: invalid argument" + ADVICE), FaultKind.BUG),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device" + ADVICE), FaultKind.BUG),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"), FaultKind.BUG),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), FaultKind.BUG),
        (RuntimeError("CUDA error: device kernel image is invalid" + ADVICE), FaultKind.BUG),
        (RuntimeError("CUDA driver error: invalid argument"), FaultKind.BUG),
        (KeyError("weight"), FaultKind.BUG),
        (AcceleratorError("CUDA error: any words" + ADVICE, error_code=2), FaultKind.OUT_OF_MEMORY),
        (AcceleratorError("CUDA error: any words" + ADVICE, error_code=700), FaultKind.DEVICE),
        (AcceleratorError("CUDA error: any words" + ADVICE, error_code=1), FaultKind.BUG),
        (AcceleratorError("any words", error_code=719), FaultKind.DEVICE),
        (OSError(errno.ENOENT, "no such file: cannot allocate memory.gguf"), FaultKind.BUG),
        (ValueError("the prompt says: CUDA error: an illegal memory access was encountered"), FaultKind.BUG),
        (KeyError("std::bad_alloc"), FaultKind.BUG),
        (EngineError("the stop string 'CUDA out of memory' is not allowed"), FaultKind.BUG),
    ],
)
def test_classifies_an_error_by_type_and_number_and_untyped_ones_by_message(
    error: BaseException, kind: FaultKind
) -> None:
    assert classify(error) is kind


def test_torch_allocation_failure_on_a_cpu_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46)
    assert classify(raised.value) is FaultKind.OUT_OF_MEMORY


def _raised(outer: Exception, inner: Exception, *, explicit: bool) -> Exception:
    try:
        try:
            raise inner
        except Exception as caught:
            if explicit:
                raise outer from caught
            raise outer  # noqa: B904 - the implicit context is the point
    except type(outer) as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
def test_classifies_by_the_most_severe_error_in_the_chain(explicit: bool) -> None:
    inner = RuntimeError("CUDA error: an illegal memory access was encountered")
    error = _raised(ValueError("step failed"), inner, explicit=explicit)
    assert classify(error) is FaultKind.DEVICE
    assert explain(error) == (
        "ValueError: step failed ← RuntimeError: CUDA error: an illegal memory access was encountered"
    )


def test_device_fault_is_more_severe_than_out_of_memory() -> None:
    error = _raised(
        OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: misaligned address"), explicit=True
    )
    assert classify(error) is FaultKind.DEVICE


def test_classifies_members_of_exception_groups() -> None:
    group = ExceptionGroup("two", [KeyError("x"), MemoryError()])
    assert classify(group) is FaultKind.OUT_OF_MEMORY


def test_chain_ends_at_a_cycle_of_causes() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert len(list(chain(first))) == 2


def test_ignores_suppressed_context() -> None:
    error = ValueError("clean")
    error.__context__ = RuntimeError("CUDA error: unknown error")
    error.__suppress_context__ = True
    assert classify(error) is FaultKind.BUG


@pytest.mark.parametrize(
    ("kind", "live", "blamed", "victims"),
    [
        (FaultKind.OUT_OF_MEMORY, {"old": True, "new": False, "newer": False}, None, ["newer"]),
        (FaultKind.OUT_OF_MEMORY, {"old": True, "new": False, "newer": False}, "old", ["newer"]),
        (FaultKind.OUT_OF_MEMORY, {"old": True, "new": True}, None, ["new"]),
        (FaultKind.OUT_OF_MEMORY, {}, None, []),
        (FaultKind.BUG, {"old": True, "new": False}, None, ["old", "new"]),
        (FaultKind.BUG, {"old": True, "new": False}, "old", ["old"]),
        (FaultKind.REQUEST, {"old": True, "new": False}, "new", ["new"]),
        (FaultKind.BUG, {"old": True}, "ended already", []),
    ],
)
def test_chooses_the_requests_that_a_failed_step_ends(
    kind: FaultKind, live: dict[str, bool], blamed: str | None, victims: list[str]
) -> None:
    assert choose_victims(kind, live, blamed) == victims


def test_blamed_request_is_a_bug_unless_its_cause_is_more_severe() -> None:
    for cause, kind in (
        (OverflowError("int too big to convert"), FaultKind.BUG),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), FaultKind.DEVICE),
        (MemoryError(), FaultKind.OUT_OF_MEMORY),
    ):
        error = FaultyRequest("CUDA error: an id that a client chose")
        error.__cause__ = cause
        assert classify(error) is kind
