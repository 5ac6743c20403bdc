"""An entry of the private API: probed once, and reported if it cannot be used."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from cortex.neuron.private_api.entries import PrivateEntry, Unusable
from cortex.neuron.private_api.report import ENTRIES, probe_cheap, probed, problems

from ..failed_probes import REASON, fail_probe


class OutOfMemoryError(RuntimeError):
    """Named like torch's own."""


def _broken() -> None:
    raise KeyError("missing")


def test_probe_runs_once_and_a_failure_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def probe() -> None:
        calls.append(1)
        raise Unusable("it takes other arguments")

    entry = PrivateEntry("lib._thing", "the slow way", probe)
    assert entry.problem is None, "nothing has asked"
    with caplog.at_level(logging.WARNING):
        assert not entry.is_usable
        assert not entry.is_usable
    assert len(calls) == len(caplog.records) == 1
    assert "lib._thing cannot be used: it takes other arguments; instead: the slow way" in caplog.text


def test_every_error_of_a_probe_is_a_failure_of_the_entry() -> None:
    entry = PrivateEntry("lib._thing", "the slow way", _broken)
    assert not entry.is_usable
    assert entry.problem == "'missing'"


def test_entry_that_nothing_uses_here_is_neither_usable_nor_a_problem() -> None:
    entry = PrivateEntry("lib._thing", "the slow way", _broken, applies=lambda: False)
    assert (entry.is_usable, entry.problem) == (False, None)


def test_results_are_checked_once_for_each_device() -> None:
    entry = PrivateEntry("lib._thing", "the slow way", lambda: None)
    checked: list[str] = []
    for device in ("a", "b", "a"):
        assert entry.usable_on(device, partial(checked.append, device))
    assert checked == ["a", "b"]

    def wrong() -> None:
        raise Unusable("its results differ")

    assert not entry.usable_on("c", wrong)
    assert not entry.usable_on("a", lambda: None), "what is wrong on one device is trusted on none"
    assert entry.problem == "its results differ"


def test_device_without_memory_says_nothing_about_an_entry() -> None:
    entry = PrivateEntry("lib._thing", "the slow way", lambda: None)

    def full() -> None:
        raise OutOfMemoryError("CUDA out of memory")

    with pytest.raises(OutOfMemoryError):
        entry.usable_on("a", full)
    assert entry.problem is None
    assert entry.usable_on("a", lambda: None)


def test_installed_libraries_have_everything() -> None:
    probe_cheap("cpu")
    probe_cheap("cuda")
    assert probed()
    assert problems() == {}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_failed_probe_is_reported_with_its_fallback(entry: PrivateEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_probe(monkeypatch, entry)
    monkeypatch.setattr(entry, "applies", lambda: True)
    assert not entry.is_usable
    assert problems()[entry.name] == f"{REASON}; instead: {entry.fallback}"
