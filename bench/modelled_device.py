"""An engine whose device is a clock: the real scheduler and step loop, and steps that take the time of a GPU.

A launched step ends a modelled time after the one before it. The host's part of a launch is work: for a step that is
not captured, hundreds of short calls that release the interpreter lock, as launches of kernels do.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from cortex.neuron.engine.execution.graphs import CaptureCosts
from cortex.neuron.engine.execution.results import NO_RESULT, RowResult
from cortex.neuron.engine.kv.page_groups import KVPages
from cortex.neuron.engine.request import Counters, EngineRequest
from cortex.neuron.engine.scheduling.budget import SchedulerLimits
from cortex.neuron.engine.scheduling.scheduler import Scheduler
from cortex.neuron.engine.scheduling.step_plan import RowPlan, StepPlan
from cortex.neuron.engine.speculation.speculation import Speculation
from cortex.neuron.engine.speculation.width_rule import FastestWidths
from cortex.neuron.engine.step_loop import StepLoop
from scripted_engine import CONTEXT_TOKENS, FIRST_WORD, PAGE_TOKENS, VOCAB, engine_info

SLOWDOWN = "MODELLED_SLOWDOWN"
"""The environment variable with the factor by which steps take longer than on the device: this host has fewer cores."""
STEP_MS, ROW_MS, PROMPT_TOKEN_MS = 4.0, 0.045, 0.024
"""An 8B model in bfloat16 on an H200: 25 ms for 470 rows, 196 ms for 280 rows and 7,500 tokens of prompts."""
MAX_ROWS = 512
NUM_PAGES = 50_000
STEP_TOKENS, MIXED_PREFILL_TOKENS, RESERVED_TOKENS = 16_384, 2_048, 512
EAGER_LAUNCHES = 900
"""They take 25 ms on two cores at 2.5 GHz, as on the host of the GPU."""

_memset = ctypes.CDLL(None).memset  # releases the lock
_scratch = ctypes.create_string_buffer(1 << 18)


class ModelledStep:
    """A step on the device, as `Launched` is one."""

    def __init__(self, rows: Sequence[RowPlan], ends_s: float, token: int) -> None:
        self._rows = rows
        self._ends_s = ends_s
        self._result = RowResult((token,))

    def read(self) -> list[RowResult]:
        time.sleep(max(0.0, self._ends_s - time.monotonic()))
        return [self._result if row.outputs.draws else NO_RESULT for row in self._rows]


class ModelledRunner:
    """What a step loop needs of a `Runner`."""

    model = SimpleNamespace(config=SimpleNamespace(vocab=VOCAB))
    pictures = None
    graph_costs = CaptureCosts()

    def __init__(self, slowdown: float) -> None:
        self._slowdown = slowdown
        self._free_at_s = 0.0
        self._num_steps = 0

    def launch(self, plan: StepPlan, *draws_and_mask: object) -> ModelledStep:  # noqa: ARG002
        num_rows = sum([row.decodes for row in plan.rows])
        num_prompt_tokens = plan.num_tokens - num_rows
        for _ in range(EAGER_LAUNCHES if num_prompt_tokens else 0):
            _memset(_scratch, 0, len(_scratch))
            for _ in range(1000):
                pass
        took_ms = STEP_MS + ROW_MS * num_rows + PROMPT_TOKEN_MS * num_prompt_tokens
        self._free_at_s = max(self._free_at_s, time.monotonic()) + self._slowdown * took_ms / 1e3
        self._num_steps += 1
        token = FIRST_WORD + self._num_steps * 7 % (VOCAB - FIRST_WORD)
        return ModelledStep(plan.rows, self._free_at_s, token)

    def prepare(self) -> bool:
        return False


class ModelledEngine(StepLoop):
    """Keeps the contract of an engine, without sleep and without pages in host memory."""

    shares_device = False

    def __init__(self) -> None:
        limits = SchedulerLimits(MAX_ROWS, STEP_TOKENS, MIXED_PREFILL_TOKENS, CONTEXT_TOKENS, RESERVED_TOKENS)
        scheduler = Scheduler(KVPages({None: NUM_PAGES}, PAGE_TOKENS), limits)
        runner = cast("Any", ModelledRunner(float(os.environ[SLOWDOWN])))
        speculation = Speculation(FastestWidths((1,), 0.0, lambda: 0, 0.0), is_on=False)
        super().__init__(scheduler, runner, cast("Any", None), Counters(), speculation, overlaps=True)
        self.info = engine_info(NUM_PAGES, kv_bytes=1)

    def submit(self, request: EngineRequest) -> None:
        self.add(request)

    def keep_pages(self, host: object) -> None:
        """Nothing is in its pages."""

    def close(self) -> None:
        """There is nothing to free."""


def load(*_: object) -> ModelledEngine:
    """What a worker loads its engine with: no file and no device is needed."""
    return ModelledEngine()
