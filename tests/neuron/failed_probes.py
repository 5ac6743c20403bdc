"""Entries of the private API whose probe is made to fail."""

from __future__ import annotations

import pytest

from cortex.neuron.private_api.entries import PrivateEntry, Unusable

REASON = "the next version has no such thing"


def fail_probe(monkeypatch: pytest.MonkeyPatch, entry: PrivateEntry) -> None:
    """The entry is as in a new process, with a library that lacks what it needs."""

    def probe() -> None:
        raise Unusable(REASON)

    monkeypatch.setattr(entry, "_probe", probe)
    for name, value in {"_is_probed": False, "_problem": None, "_passed": set()}.items():
        monkeypatch.setattr(entry, name, value)
