"""Which meter is in force: none without keys, the ledger's with them; changed by a reload."""

from __future__ import annotations

import asyncio
from pathlib import Path

from cortex.gateway.config import Config
from cortex.gateway.ledger import KeyedMeter, Keyring, Ledger, open_store
from cortex.gateway.ledger.meter import Meter, OpenMeter


class Metering:
    """Owns the books, once there are keys. Requests under way settle with the meter that admitted them."""

    def __init__(self, directory: Path) -> None:
        self.meter: Meter = OpenMeter()
        self._directory = directory
        self._ledger: Ledger | None = None

    async def use(self, config: Config) -> None:
        """Put the keys of `config` in force. Raises `StoreError` when the books cannot be opened."""
        keyring = Keyring(config.keys)
        if self._ledger is not None:
            await self._ledger.use(keyring)
        elif config.keys:
            store = await asyncio.to_thread(open_store, config.database(self._directory))
            self._ledger = Ledger(store, keyring, flush_s=config.ledger.flush_s)
            await self._ledger.start()
        self.meter = KeyedMeter(self._ledger) if self._ledger is not None and config.keys else OpenMeter()

    async def close(self) -> None:
        """Write what is left. Raises `StoreError` when that fails."""
        if self._ledger is not None:
            await self._ledger.close()
