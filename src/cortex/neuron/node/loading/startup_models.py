"""Loads the default models of a starting node in the background, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from cortex.wire.errors import CortexError, HubUnavailable
from cortex.wire.node import protocol as wire
from cortex.wire.words import duration

log = logging.getLogger(__name__)

_FIRST_RETRY_S, _MAX_RETRY_S = 5.0, 300.0


class StartupModels:
    """A failed load does not stop the next one. A model whose files could not be fetched, as on a boot before the
    network is up, is retried until it loads; after any other failure it waits for the next load request."""

    def __init__(
        self,
        model_ids: Sequence[str],
        load: Callable[[str], Awaitable[object]],
        on_changed: Callable[[], None],
        first_retry_s: float = _FIRST_RETRY_S,
    ) -> None:
        self._pending = list(model_ids)
        self._in_progress: str | None = None
        self._completed: list[str] = []
        self._failed: dict[str, str] = {}
        """Model → reason."""
        self._load = load
        self._on_changed = on_changed
        self._first_retry_s = first_retry_s
        self._done = not model_ids

    def status(self) -> wire.Activation:
        running = not self._done
        return wire.Activation(
            state="running" if running else "done" if self._completed or self._failed else "idle",
            pending=tuple(self._pending),
            in_progress=self._in_progress,
            completed=tuple(self._completed),
            failed=tuple(self._failed),
            reasons=dict(self._failed),
        )

    async def run(self) -> None:
        delay_s = self._first_retry_s
        while True:
            unreachable = await self._load_each(self._pending)
            if not unreachable:
                break
            log.warning("hub unavailable for %s; retrying in %s", ", ".join(unreachable), duration(delay_s))
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, _MAX_RETRY_S)
        self._done = True
        self._on_changed()

    async def _load_each(self, model_ids: list[str]) -> list[str]:
        """Loads each model once. Returns those to retry, which are pending again."""
        unreachable: list[str] = []
        for model_id in list(model_ids):
            self._pending.remove(model_id)
            self._in_progress = model_id
            self._on_changed()
            try:
                await self._load(model_id)
            except HubUnavailable:
                unreachable.append(model_id)
            except CortexError as error:
                log.error("default model %s: load failed: %s", model_id, error.message)
                self._failed[model_id] = error.message
            except Exception as error:  # a bug in one load must not keep the other models from loading
                log.exception("default model %s: load failed unexpectedly", model_id)
                self._failed[model_id] = f"unexpected {type(error).__name__}: {error}"
            else:
                self._completed.append(model_id)
            finally:
                self._in_progress = None
        self._pending = list(unreachable)
        self._on_changed()
        return unreachable
