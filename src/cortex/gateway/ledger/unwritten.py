"""Usage that a gateway could not write before it ended: kept in a file of its state directory until the next start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cortex.gateway.ledger.store import Store
from cortex.gateway.ledger.tables import Claim, Counts, Slot
from cortex.system import private_file

log = logging.getLogger(__name__)

FILE = "usage-unwritten.json"


class _Unwritten(msgspec.Struct, frozen=True):
    claim: Claim
    """The reservations as the database has them. They end when the usage is written."""
    usage: list[tuple[Slot, Counts]]


class UnwrittenUsage:
    """The file. Calls block."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE

    def save(self, usage: Mapping[Slot, Counts], claim: Claim) -> None:
        """Keep `usage`. Raises OSError."""
        private_file.write(self._path, msgspec.json.encode(_Unwritten(claim, list(usage.items()))))
        log.warning("usage that the database did not take is in %s and is written at the next start", self._path)

    def recover(self, store: Store) -> None:
        """Write what was kept, if anything. Raises `StoreError`, and then it stays kept."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=_Unwritten)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as problem:
            log.error("usage of the last run is not counted: %s cannot be read: %s", self._path, problem)
            return
        store.exchange(dict(kept.usage), {}, before=kept.claim, after=Claim(owner=kept.claim.owner))
        self._path.unlink()
        log.info("usage of the last run is written: %d rows", len(kept.usage))
