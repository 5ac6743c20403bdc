"""An engine that computes nothing and has a token for every sequence at each step, for `bench/node_http.py`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from cortex.neuron.engine.request import EngineInfo, EngineRequest, EngineStats, FinishReason, StepOutput

VOCAB = 4096
CONTEXT_TOKENS = 40_960
PAGE_TOKENS = 16
FIRST_WORD = 300
"""Tokens below are single bytes, which a text of random ones would not show one by one."""
STEP_MS = "SCRIPTED_STEP_MS"
"""The environment variable with the time of a step."""
LOG = "SCRIPTED_LOG"
"""The environment variable with a file that gets a line for each request: its seed, when it came, and when the engine
had each of its tokens, in seconds of the monotonic clock. Empty: none."""


def engine_info(num_pages: int, kv_bytes: int = 0) -> EngineInfo:
    """What an engine without weights says about itself. `kv_bytes`: 0 if its pages are not modelled."""
    return EngineInfo(
        family="llama",
        dtype="bfloat16",
        context_tokens=CONTEXT_TOKENS,
        vocab_size=VOCAB,
        weight_bytes=0,
        kv_bytes=kv_bytes,
        page_tokens=PAGE_TOKENS,
        num_pages=num_pages,
    )


class ScriptedEngine:
    """Keeps the contract of an engine, without pages and without sleep."""

    shares_device = False

    def __init__(self) -> None:
        self._step_s = float(os.environ[STEP_MS]) / 1000
        self._requests: dict[str, EngineRequest] = {}
        self._num_tokens: dict[str, int] = {}
        self._cancelled: set[str] = set()
        self._num_steps = 0
        self._log = os.environ.get(LOG)
        self._times: dict[str, list[float]] = {}
        self.info = engine_info(1 << 20)

    def submit(self, request: EngineRequest) -> None:
        self._requests[request.id] = request
        self._num_tokens[request.id] = 0
        self._times[request.id] = [time.monotonic()]

    def cancel(self, request_id: str) -> None:
        if request_id in self._requests:
            self._cancelled.add(request_id)

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[StepOutput]:
        time.sleep(self._step_s)
        self._num_steps += 1
        outputs = []
        for id, request in list(self._requests.items()):
            num_tokens = self._num_tokens[id] = self._num_tokens[id] + 1
            if id in self._cancelled:
                outputs.append(StepOutput(id, finish="cancelled"))
            else:
                token = FIRST_WORD + (self._num_steps * 7 + len(outputs)) % (VOCAB - FIRST_WORD)
                finish: FinishReason | None = "length" if num_tokens == request.max_tokens else None
                outputs.append(StepOutput(id, (token,), cached_tokens=0 if num_tokens == 1 else None, finish=finish))
            self._times[id].append(time.monotonic())
            if outputs[-1].finish is not None:
                times = self._times.pop(id)
                if self._log:
                    with Path(self._log).open("a") as log:
                        log.write(json.dumps([request.sampling.seed, *times]) + "\n")
                del self._requests[id], self._num_tokens[id]
        self._cancelled.clear()
        return outputs

    def isolate(self) -> bool:
        return False

    def keep_pages(self, host: None) -> None:
        """It has no pages."""

    def save_pages(self) -> None:
        """It has no pages."""

    def prepare(self) -> bool:
        return False

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._requests), num_pages=self.info.num_pages, steps=self._num_steps)

    def close(self) -> None:
        self._requests.clear()


def load(*_: object) -> ScriptedEngine:
    """What a worker loads its engine with: no file and no device is needed."""
    return ScriptedEngine()
