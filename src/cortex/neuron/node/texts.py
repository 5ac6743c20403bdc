"""The texts of a node's models: tokenizers, templates and parsers, each with the process that encodes for it."""

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
"""A process whose model is not in memory ends when nobody has counted with it for so long."""


class TextSource(Protocol):
    """Where a model's text comes from; `neuron.tokenizer_process.client.TokenizerClient` is one."""

    @property
    def idle_s(self) -> float:
        """Seconds since the text was last used to encode; 0 while it is."""
        ...

    async def read(self) -> TextModel:
        """Raises what is in `UNREADABLE`, or a CortexError."""
        ...

    async def wake(self) -> None:
        """Gets ready to encode, which a text that is only remembered need not be. Raises as `read` does."""
        ...

    async def rest(self) -> None:
        """Gives back what encoding takes; the text stays as good as it was."""
        ...

    async def close(self) -> None:
        """Like `rest`, for good."""
        ...


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    source: TextSource
    reading: asyncio.Task[TextModel]

    @property
    def has_failed(self) -> bool:
        """And nobody was there to be told."""
        return self.reading.done() and self.reading.exception() is not None


class Texts:
    """Belongs to the daemon's loop."""

    def __init__(self, open_text: Callable[[Path], TextSource]) -> None:
        self._open_text = open_text
        self._entries: dict[str, _Entry] = {}

    async def get(self, model_id: str, path: Path) -> TextModel:
        """Read once for all who ask, and remembered, also after an unload. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        return entry.reading.result()

    async def awake(self, model_id: str, path: Path) -> None:
        """For a model that is about to serve: its text is read and its process started. Raises LoadFailed."""
        entry = await self._read(model_id, path)
        try:
            await entry.source.wake()
        except OSError as error:
            raise LoadFailed(f"{model_id}: no process can be started for its tokenizer: {error}") from error

    async def rest(self, model_id: str) -> None:
        """The model is not in memory any more: its process ends, unless it has just begun to read."""
        entry = self._entries.get(model_id)
        if entry is not None and entry.reading.done():
            await entry.source.rest()

    async def rest_idle(self, is_in_memory: Callable[[str], bool]) -> None:
        """Ends the processes of models that were only counted with, and not for a while."""
        for model_id, entry in tuple(self._entries.items()):
            if entry.source.idle_s > _REST_AFTER_S and not is_in_memory(model_id):
                await self.rest(model_id)

    async def close(self) -> None:
        entries = tuple(self._entries.values())
        await asyncio.gather(*(entry.source.close() for entry in entries))
        await asyncio.gather(*(entry.reading for entry in entries), return_exceptions=True)

    async def _read(self, model_id: str, path: Path) -> _Entry:
        """The entry of a text that has been read."""
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
                del self._entries[model_id]  # the files may be put right
            await entry.source.close()
            if isinstance(error, UNREADABLE):
                raise LoadFailed(f"{model_id}: its tokenizer cannot be read: {error}") from error
            raise
        return entry
