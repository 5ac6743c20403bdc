"""Digests of files that take as long as a test wants."""

from __future__ import annotations

import hashlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cortex.neuron.weights.hub import file_digests

from ....waiting import WAIT_S


class SlowDigests:
    """In place of those of `FileDigests`, which wait for `may_end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_updates = 0
        monkeypatch.setattr(file_digests, "hashlib", SimpleNamespace(sha256=self._sha256))

    def _sha256(self) -> Any:
        found = hashlib.sha256()

        def update(data: bytes) -> None:
            self.num_updates += 1
            self.has_begun.set()
            self.may_end.wait(WAIT_S)
            found.update(data)

        return SimpleNamespace(update=update, hexdigest=found.hexdigest)
