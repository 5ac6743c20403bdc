"""How many recurrent states a model gets room for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

STATE_SHARE = 4
"""One part in so many of the memory that the weights leave goes to states, the rest to pages."""
MAX_CHECKPOINTS = {"cuda": 1024, "cpu": 32}


@dataclass(frozen=True, slots=True)
class StateSlots:
    """How many slots there are: one for each row that runs, one for padding rows, and the checkpoints."""

    rows: int
    checkpoints: int = 0
    num_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        return self.rows + 1 + self.checkpoints

    @classmethod
    def plan(cls, slot_bytes: int, max_rows: int, spare_bytes: int, device_kind: str) -> StateSlots:
        """Half of the states' share of `spare_bytes` goes to rows, as many as are wanted, the rest to checkpoints.

        A model without recurrent layers has slots of 0 bytes.
        """
        if not slot_bytes:
            return cls(max_rows)
        affordable = max(0, spare_bytes) // STATE_SHARE // slot_bytes
        rows = max(1, min(max_rows, affordable // 2))
        checkpoints = max(0, min(MAX_CHECKPOINTS[device_kind], affordable - rows - 1))
        notes = (f"{rows} of {max_rows} sequences at once: memory for recurrent states",) if rows < max_rows else ()
        return cls(rows, checkpoints, (rows + 1 + checkpoints) * slot_bytes, notes)
