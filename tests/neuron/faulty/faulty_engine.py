"""An engine that fails on demand. Workers in tests run it in place of the real one.

How a load behaves is written in `faulty.json` next to the model's files; how a request behaves is its first
prompt token. Everything else is the engine's contract, kept honestly.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from cortex.neuron.engine.errors import (
    DamagedError,
    FaultyRequest,
    LoadCancelled,
    LoadError,
    RequestError,
    SleepError,
)
from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, FinishReason, LoadSpec, StepOutput
from cortex.neuron.private_api.openmp import OPENMP

Progress = Callable[[str, int, int], None]

PLAIN = 1
REFUSED = 100
OUT_OF_MEMORY = 101
BUG = 102
DEVICE_FAULT = 103
HANG = 104
SEGFAULT = 105
EXIT = 106
CONTEXT_TOKENS = 4096


class OutOfMemoryError(RuntimeError):
    """Named like torch's own, which is how the classifier knows it."""


class FaultyEngine:
    shares_device = False

    def __init__(self, behaviour: dict[str, Any], host_weight_bytes: int = 0) -> None:
        self._behaviour = behaviour
        self._scratch = bytearray(os.urandom(1024) * (behaviour.get("scratch_bytes", 0) // 1024))
        self._asleep = False
        self._step_s = behaviour.get("step_s", 0.001)
        self._ballast = bytearray(os.urandom(1024) * (behaviour.get("bytes", 0) // 1024))
        self._requests: dict[str, EngineRequest] = {}
        self._produced: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._isolating = False
        self._steps = 0
        self._completion_tokens = 0
        self.info = EngineInfo(
            family="faulty",
            dtype="float32",
            context_tokens=CONTEXT_TOKENS,
            vocab_size=1000,
            weight_bytes=len(self._ballast),
            kv_bytes=0,
            page_tokens=16,
            num_pages=behaviour.get("num_pages", 4096),
            host_weight_bytes=host_weight_bytes,
        )

    @classmethod
    def load(cls, spec: LoadSpec, device: object, progress: Progress, cancelled: Callable[[], bool]) -> Self:
        path = Path(spec.path) / "faulty.json"
        behaviour = json.loads(path.read_text()) if path.exists() else {}
        for piece in range(behaviour.get("pieces", 4)):
            if cancelled():
                raise LoadCancelled("the load was cancelled")
            progress("read", piece, 4)
            time.sleep(behaviour.get("piece_s", 0.0))
        if reason := behaviour.get("rejects_openmp"):
            import torch  # noqa: F401 - with it, workers report what their libraries lack

            OPENMP.reject(reason)
        match behaviour.get("load"):
            case "refuse":
                raise LoadError("these files are of no use")
            case "bug":
                raise KeyError("model.embed_tokens.weight")
            case "fault":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "hang":
                time.sleep(3600)
            case "exit":
                os._exit(3)
        staging = [bytes([1]) * 16384 for _ in range(behaviour.get("staging_bytes", 0) // 16384)]
        kept = staging[-1:]  # an allocator cannot return the memory below it on its own
        staging.clear()
        engine = cls(behaviour, spec.host_weight_bytes)
        del kept
        return engine

    def submit(self, request: EngineRequest) -> None:
        if self._asleep:
            raise RequestError("the model is asleep; wake it first")
        if request.prompt[0] == REFUSED:
            raise RequestError("top_k of -7 is out of range")
        self._requests[request.id] = request
        self._produced[request.id] = 0

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[StepOutput]:
        self._steps += 1
        time.sleep(self._step_s)
        outputs = [self._end(request_id, "cancelled") for request_id in sorted(self._cancelled)]
        self._cancelled.clear()
        for request in self._requests.values():
            try:
                misbehave(request.prompt[0])
            except Exception as error:
                if self._isolating:
                    raise FaultyRequest(request.id) from error
                raise
        self._isolating = False
        for request in list(self._requests.values()):
            produced = self._produced[request.id] = self._produced[request.id] + 1
            self._completion_tokens += 1
            first = 0 if produced == 1 else None
            if produced >= request.max_tokens:
                outputs.append(self._end(request.id, "length", (produced,), first))
            else:
                outputs.append(StepOutput(request.id, (produced,), cached_tokens=first))
        return outputs

    def _end(
        self, request_id: str, finish: FinishReason, tokens: tuple[int, ...] = (), cached_tokens: int | None = None
    ) -> StepOutput:
        del self._requests[request_id], self._produced[request_id]
        return StepOutput(request_id, tokens, cached_tokens=cached_tokens, finish=finish)

    def isolate(self) -> bool:
        self._isolating = True
        return True

    def keep_pages(self, host: None) -> None:
        """It has no pages."""

    def save_pages(self, *, to_disk: bool = False) -> bool:
        """It has no pages."""
        return False

    def prepare(self) -> bool:
        if self._behaviour.get("prepare") == "hang":
            misbehave(HANG)
        return False

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._requests),
            num_pages=self.info.num_pages,
            used_pages=len(self._requests),
            steps=self._steps,
            completion_tokens=self._completion_tokens,
        )

    def sleep(self) -> int:
        """Gives its scratch memory back, if it has any; `sleep`: "refuse", "fault" or "keep" all memory."""
        match self._behaviour.get("sleep"):
            case "refuse":
                raise SleepError("the host has no memory for the weights")
            case "fault":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "keep":
                self._asleep = True
            case _:
                self._asleep, self._scratch = True, bytearray()
        return len(self._ballast)

    def wake(self, progress: Progress) -> None:
        """`wake`: "no room", "no memory", "damaged", "fault", "exit" or "slow"."""
        progress("place", 0, 4)
        match self._behaviour.get("wake"):
            case "no room":
                raise LoadError("the model needs 1.00 GB to wake up; unload something")
            case "no memory":
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            case "damaged":
                raise DamagedError("the model answers differently than before it fell asleep")
            case "fault":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            case "exit":
                os._exit(3)
            case "slow":
                time.sleep(0.3)
        self._asleep = False
        self._scratch = bytearray(os.urandom(1024) * (self._behaviour.get("scratch_bytes", 0) // 1024))

    def close(self) -> None:
        self._scratch = bytearray()
        self._ballast = bytearray()


def misbehave(token: int) -> None:
    match token:
        case 101:
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        case 102:
            raise RuntimeError("The size of tensor a (8) must match the size of tensor b (7)")
        case 103:
            raise RuntimeError("CUDA error: device-side assert triggered")
        case 104:
            time.sleep(3600)
        case 105:
            ctypes.string_at(0)
        case 106:
            os.kill(os.getpid(), signal.SIGKILL)


load = FaultyEngine.load


class BrokenEngine(FaultyEngine):
    def isolate(self) -> bool:
        raise RuntimeError("page table is corrupt, self-test or not")

    def step(self) -> list[StepOutput]:
        raise RuntimeError("page table is corrupt")


def load_broken(spec: LoadSpec, device: object, progress: Progress, cancelled: Callable[[], bool]) -> FaultyEngine:
    """An engine that never manages a step, where the path says so."""
    return BrokenEngine({}) if spec.path == "broken" else FaultyEngine({})
