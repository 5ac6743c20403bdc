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
    monkeypatch.setattr(entry, "_is_probed", False)
    monkeypatch.setattr(entry, "_problem", None)
    monkeypatch.setattr(entry, "_passed", set())
