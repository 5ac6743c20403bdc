"""A table whose rows expire, and whose bytes have a limit: which of them a purge deletes."""

from __future__ import annotations

from cortex.gateway.database import Execute

_BATCH = 200
"""Rows that a purge deletes at once."""


class BoundedTable:
    """A table with the columns `id`, `key_id`, `expires_s` and `num_bytes`. Only reads it: other rows may have to be
    deleted with one. Every method runs inside the caller's transaction."""

    def __init__(self, name: str, *, age: str) -> None:
        """`age`: the column that is smallest in the rows to delete first."""
        self._expired = f"SELECT id FROM {name} WHERE expires_s <= ? LIMIT ?"
        self._total = f"SELECT COALESCE(SUM(num_bytes), 0) FROM {name}"
        self._largest_key = f"SELECT key_id FROM {name} GROUP BY key_id ORDER BY SUM(num_bytes) DESC, key_id LIMIT 1"
        self._oldest = f"SELECT id, num_bytes FROM {name} WHERE key_id = ? ORDER BY {age}, id LIMIT ?"

    def total_bytes(self, execute: Execute) -> int:
        return int(execute(self._total, ())[0][0])

    def rows_to_delete(self, execute: Execute, now_s: float, max_bytes: int) -> list[str]:
        """The ids of some rows that have expired, or else of some that exceed `max_bytes`: the oldest of the key with
        the most bytes."""
        ids = [str(row[0]) for row in execute(self._expired, (int(now_s), _BATCH))]
        if ids or (excess := self.total_bytes(execute) - max_bytes) <= 0:
            return ids
        (largest,) = execute(self._largest_key, ())[0]
        for id, num_bytes in execute(self._oldest, (largest, _BATCH)):
            ids.append(str(id))
            excess -= int(num_bytes)
            if excess <= 0:
                break
        return ids
