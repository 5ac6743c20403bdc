"""The text models of a node: tokenizers, templates and parsers, each with the process that tokenizes for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from cortex.neuron.config import TextLimits
from cortex.neuron.node.text.queue import TextQueue
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import Prepared
from cortex.neuron.text.template.prompt import NO_RULES, PromptRules
from cortex.neuron.tokenizer_process.client import UNREADABLE
from cortex.wire.errors import LoadFailed, PreparationLimitExceeded
from cortex.wire.fields.constraints import is_constrained
from cortex.wire.packed_request import PackedRequest
from cortex.wire.words import os_error_in_words

_REST_AFTER_S = 60.0
"""The tokenizer process of a model that is not in memory ends after this long without use."""


_LONG_BYTES = 1 << 20
"""A request with more text is long: it takes a tenth of a second and more, if its turns are new."""
_LONG_CONSTRAINED_BYTES = 1 << 15
"""A request with a grammar is long from here on: a large one may take seconds to compile."""


class TextSource(Protocol):
    """Reads one model's text files and runs its tokenizer process. `TokenizerClient` is the real one."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last use; 0 while in use."""

    async def read(self) -> TextModel:
        """Raises an error in `UNREADABLE`, or a CortexError."""

    async def wake(self) -> None:
        """Starts the process if it does not run. Raises as `read` does."""

    async def rest(self) -> None:
        """Ends the process; the next use starts it again."""

    async def close(self) -> None:
        """Ends the process for good."""

    # Jobs: they raise a CortexError, and a cancelled one ends.

    async def prepare(self, request: bytes, rules: PromptRules, *, is_long: bool) -> Prepared: ...
    async def count(self, request: bytes, rules: PromptRules, *, is_long: bool) -> int: ...
    async def encode(self, text: str, rules: PromptRules, *, is_long: bool) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    source: TextSource
    queue: TextQueue
    reading: asyncio.Task[TextModel]

    @property
    def has_failed(self) -> bool:
        return self.reading.done() and self.reading.exception() is not None


class Texts:
    """Belongs to the daemon's loop."""

    def __init__(self, open_text: Callable[[Path], TextSource], limits: TextLimits, max_queue: int) -> None:
        self._open_text = open_text
        self._limits = limits
        self._max_queue = max_queue
        self._entries: dict[str, _Entry] = {}

    async def get(self, model_id: str, path: Path) -> TextModel:
        """The model's text, read once and kept after an unload. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        return entry.reading.result()

    def num_jobs(self, model_id: str) -> int:
        """Requests of the model that are being prepared, or wait for that."""
        entry = self._entries.get(model_id)
        return entry.queue.num_jobs if entry is not None else 0

    async def prepare(
        self, model_id: str, path: Path, request: PackedRequest, rules: PromptRules, principal: str
    ) -> Prepared:
        """The prompts and the grammar of a request. Raises a CortexError."""
        is_long = _is_long(request)
        async with self._job(model_id, path, principal, is_long=is_long) as source:
            return await source.prepare(request.whole, self._limited(rules), is_long=is_long)

    async def count(self, model_id: str, path: Path, request: PackedRequest, rules: PromptRules, principal: str) -> int:
        """The number of tokens in the prompt of a request. Raises a CortexError."""
        is_long = len(request.whole) > _LONG_BYTES
        async with self._job(model_id, path, principal, is_long=is_long) as source:
            return await source.count(request.whole, self._limited(rules), is_long=is_long)

    async def encode(self, model_id: str, path: Path, text: str, principal: str) -> tuple[int, ...]:
        """The tokens of a text. Raises a CortexError."""
        is_long = len(text) > _LONG_BYTES
        async with self._job(model_id, path, principal, is_long=is_long) as source:
            return await source.encode(text, self._limited(NO_RULES), is_long=is_long)

    @asynccontextmanager
    async def _job(self, model_id: str, path: Path, principal: str, *, is_long: bool) -> AsyncIterator[TextSource]:
        entry = await self._read(model_id, path)
        async with entry.queue.place(principal, is_long=is_long):
            try:
                async with asyncio.timeout(self._limits.timeout_s):
                    yield entry.source
            except TimeoutError:
                raise PreparationLimitExceeded(
                    f"Preparing this request took longer than {self._limits.timeout_s:g} s (text.timeout_s in "
                    "neuron.toml). Send a shorter conversation, or a simpler schema or grammar."
                ) from None

    def _limited(self, rules: PromptRules) -> PromptRules:
        return replace(
            rules,
            max_characters=self._limits.max_prompt_mb * 1_000_000,
            max_grammar_characters=self._limits.max_grammar_kb * 1000,
            max_grammar_cpu_s=self._limits.max_grammar_cpu_s,
        )

    async def awake(self, model_id: str, path: Path) -> None:
        """Reads the text and starts the process of a model that is about to serve. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        try:
            await entry.source.wake()
        except OSError as error:
            reason = os_error_in_words(error)
            raise LoadFailed(f"{model_id}: the tokenizer process cannot be started: {reason}") from error

    async def rest(self, model_id: str) -> None:
        """Ends the process of a model that is not in memory, unless its text is being read."""
        entry = self._entries.get(model_id)
        if entry is not None and entry.reading.done():
            await entry.source.rest()

    async def rest_idle(self, is_in_memory: Callable[[str], bool]) -> None:
        """Ends the processes of models that are not in memory and were not used for a while."""
        for model_id, entry in tuple(self._entries.items()):
            if entry.source.idle_s > _REST_AFTER_S and not is_in_memory(model_id):
                await self.rest(model_id)

    async def close(self) -> None:
        entries = tuple(self._entries.values())
        await asyncio.gather(*(entry.source.close() for entry in entries))
        await asyncio.gather(*(entry.reading for entry in entries), return_exceptions=True)

    async def _read(self, model_id: str, path: Path) -> _Entry:
        """The entry of a text that has been read. A failed read is forgotten, so that the next call tries again."""
        known = self._entries.get(model_id)
        entry = known
        if entry is None or entry.path != path or entry.has_failed:
            source = self._open_text(path)
            queue = TextQueue(model_id, self._limits.num_workers, self._max_queue)
            entry = self._entries[model_id] = _Entry(path, source, queue, asyncio.create_task(source.read()))
            if known is not None:
                await known.source.close()
        try:
            await asyncio.shield(entry.reading)
        except Exception as error:
            if self._entries.get(model_id) is entry:
                del self._entries[model_id]
            await entry.source.close()
            if isinstance(error, UNREADABLE):
                raise LoadFailed(f"{model_id}: its tokenizer cannot be read: {error}") from error
            raise
        return entry


def _is_long(request: PackedRequest) -> bool:
    return len(request.whole) > (_LONG_CONSTRAINED_BYTES if is_constrained(request.head) else _LONG_BYTES)
