"""Compiles the grammars of requests outside of the engine thread, because a large one takes seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cortex.neuron.engine.errors import RequestError
from cortex.neuron.worker.faults import explain
from cortex.neuron.worker.protocol import Compiled, Submit

log = logging.getLogger(__name__)

_NUM_THREADS = 2


class GrammarCompiler:
    """Owned by the engine thread. The library compiles without the interpreter's lock."""

    def __init__(self, deliver: Callable[[Compiled], None]) -> None:
        """`deliver` is called on another thread when a grammar is compiled."""
        self._deliver = deliver
        self._waiting: dict[tuple[int, str], Submit] = {}
        """Requests by model and id."""
        self._threads: ThreadPoolExecutor | None = None

    def begin(self, submit: Submit, compile: Callable[[str, bytes], None]) -> None:
        """Compile the grammar of a request; `Compiled` follows. `compile` raises RequestError."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._waiting[submit.handle, submit.request.id] = submit
        self._threads.submit(self._compile, submit, compile)

    def take(self, handle: int, request_id: str) -> Submit | None:
        """Removes and returns a waiting request; None if it did not wait."""
        return self._waiting.pop((handle, request_id), None)

    def take_all(self, handle: int) -> list[Submit]:
        """Removes and returns the waiting requests of a model."""
        return [self._waiting.pop(key) for key in list(self._waiting) if key[0] == handle]

    def _compile(self, submit: Submit, compile: Callable[[str, bytes], None]) -> None:
        handle, request_id, grammar = submit.handle, submit.request.id, submit.request.grammar
        if (handle, request_id) not in self._waiting or grammar is None:
            return  # cancelled
        problem: str | None = None
        try:
            compile(grammar, submit.request.tenant)
        except RequestError as error:
            problem = str(error)
        except Exception as error:
            log.exception("compiling a grammar failed")
            problem = explain(error)
        self._deliver(Compiled(handle, request_id, problem))
