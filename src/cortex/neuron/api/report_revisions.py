"""What of a node's models has changed since a caller's last report.

A node may list hundreds of models, and most of them rest. A report names its revision; a caller that sends it back gets
the models whose status is another one since. There is nothing to keep for each caller.
"""

from __future__ import annotations

import secrets

import msgspec

from cortex.wire.node.protocol import Health, ModelStatus

MAX_GONE = 1024
"""Beyond this many models that are not listed any more, callers get everything once."""


class ReportRevisions:
    """The statuses of the latest report, each with the revision that changed it. Belongs to the daemon's loop."""

    def __init__(self) -> None:
        self._begin()

    def report(self, health: Health, since: str | None) -> Health:
        """`health`, which has all models, as the change since a revision. All of it where that is not known."""
        self._update({status.id: status for status in health.models})
        known = None if since is None else self._number(since)
        revision = f"{self._epoch}.{self._latest}"
        if known is None:
            return msgspec.structs.replace(health, revision=revision)
        return msgspec.structs.replace(
            health,
            models=tuple(status for status, number in self._statuses.values() if number > known),
            revision=revision,
            since=since,
            gone=tuple(model for model, number in self._gone.items() if number > known),
        )

    def _begin(self) -> None:
        self._epoch = secrets.token_hex(8)
        """Another one in every process: revisions of an earlier one mean nothing here."""
        self._latest = 0
        self._statuses: dict[str, tuple[ModelStatus, int]] = {}
        self._gone: dict[str, int] = {}

    def _update(self, statuses: dict[str, ModelStatus]) -> None:
        gone = self._statuses.keys() - statuses.keys()
        if len(self._gone) + len(gone) > MAX_GONE:
            self._begin()
            gone = set()
        number = self._latest + 1
        changed = {
            model: (status, number)
            for model, status in statuses.items()
            if (known := self._statuses.get(model)) is None or (known[0] is not status and known[0] != status)
        }
        if not changed and not gone:
            return
        self._latest = number
        self._statuses.update(changed)
        for model in gone:
            del self._statuses[model]
            self._gone[model] = number
        for model in changed:
            self._gone.pop(model, None)

    def _number(self, revision: str) -> int | None:
        epoch, _, number = revision.partition(".")
        if epoch != self._epoch or not number.isascii() or not number.isdecimal() or len(number) > 18:
            return None
        return int(number) if int(number) <= self._latest else None
