"""Which model, on which devices, a kept result is of."""

from pathlib import Path

import pytest

from cortex.neuron.node.bench import results
from cortex.neuron.node.bench.results import BenchResults
from cortex.neuron.node.loading.library import KnownModel
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import Device

LARGE = Device(index=0, kind="cuda", name="H200", total_bytes=141 << 30)
SMALL = Device(index=1, kind="cuda", name="L4", total_bytes=24 << 30)
MODEL = KnownModel(id="m", source="/models/m")
RESULT = BenchResult(measured_at=1.0, version="1")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "cache_folder", lambda: tmp_path)


def test_result_is_of_the_devices_that_the_model_was_on() -> None:
    BenchResults((LARGE, SMALL), 64).keep(MODEL, "digest", (0,), RESULT)
    kept = BenchResults((LARGE, SMALL), 64)
    assert kept.find(MODEL, "digest", (0,)) == RESULT
    assert kept.find(MODEL, "digest", None) == RESULT, "it may be loaded there again"
    assert kept.find(MODEL, "digest", (1,)) is None
    assert kept.find(MODEL, "digest", (0, 1)) is None
    assert BenchResults((LARGE,), 64).find(MODEL, "digest", None) == RESULT, "the other device has no part in it"
    assert BenchResults((SMALL,), 64).find(MODEL, "digest", None) is None


def test_result_is_of_one_number_of_slots_and_of_one_version_of_the_files() -> None:
    BenchResults((LARGE,), 64).keep(MODEL, "digest", (0,), RESULT)
    assert BenchResults((LARGE,), 8).find(MODEL, "digest", (0,)) is None
    assert BenchResults((LARGE,), 64).find(MODEL, "other", (0,)) is None
