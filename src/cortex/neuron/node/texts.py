"""The text models of a node: tokenizers, templates and parsers, each with the process that tokenizes for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cortex.neuron.text.model import TextModel
from cortex.neuron.tokenizer_process.client import UNREADABLE
from cortex.wire.errors import LoadFailed

_REST_AFTER_S = 60.0
"""The tokenizer process of a model that is not in memory ends after this long without use."""


class TextSource(Protocol):
    """Reads one model's text files and runs its tokenizer process. `TokenizerClient` is the real one."""

    @property
    def idle_s(self) -> float:
        """Seconds since the last use; 0 while in use."""
        ...

    async def read(self) -> TextModel:
        """Raises an error in `UNREADABLE`, or a CortexError."""
        ...

    async def wake(self) -> None:
        """Starts the process if it does not run. Raises as `read` does."""
        ...

    async def rest(self) -> None:
        """Ends the process; the next use starts it again."""
        ...

    async def close(self) -> None:
        """Ends the process for good."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    source: TextSource
    reading: asyncio.Task[TextModel]

    @property
    def has_failed(self) -> bool:
        return self.reading.done() and self.reading.exception() is not None


class Texts:
    """Belongs to the daemon's loop."""

    def __init__(self, open_text: Callable[[Path], TextSource]) -> None:
        self._open_text = open_text
        self._entries: dict[str, _Entry] = {}

    async def get(self, model_id: str, path: Path) -> TextModel:
        """The model's text, read once and kept after an unload. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        return entry.reading.result()

    async def awake(self, model_id: str, path: Path) -> None:
        """Reads the text and starts the process of a model that is about to serve. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        try:
            await entry.source.wake()
        except OSError as error:
            raise LoadFailed(f"{model_id}: the tokenizer process cannot be started: {error}") from error

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
            entry = self._entries[model_id] = _Entry(path, source, asyncio.create_task(source.read()))
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
