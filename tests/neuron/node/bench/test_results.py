"""Which model, on which devices, a kept result is of."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from cortex.neuron.models.host_division import Rates
from cortex.neuron.node.bench.results import BenchResults
from cortex.neuron.node.library import KnownModel
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import Device

LARGE = Device(index=0, kind="cuda", name="H200", total_bytes=141 << 30)
SMALL = Device(index=1, kind="cuda", name="L4", total_bytes=24 << 30)
MODEL = KnownModel(id="m", source="/models/m")
RESULT = BenchResult(measured_at=1.0, version="1")
Results = Callable[..., BenchResults]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return partial(BenchResults, folder=tmp_path)


def test_result_is_of_the_devices_that_the_model_was_on(results: Results) -> None:
    results((LARGE, SMALL), 64).keep(MODEL, "digest", (0,), RESULT)
    kept = results((LARGE, SMALL), 64)
    assert kept.find(MODEL, "digest", (0,)) == RESULT
    assert kept.find(MODEL, "digest", None) == RESULT, "it may be loaded there again"
    assert kept.find(MODEL, "digest", (1,)) is None
    assert kept.find(MODEL, "digest", (0, 1)) is None
    assert results((LARGE,), 64).find(MODEL, "digest", None) == RESULT, "the other device has no part in it"
    assert results((SMALL,), 64).find(MODEL, "digest", None) is None


def test_result_is_of_one_number_of_slots_and_of_one_version_of_the_files(results: Results) -> None:
    results((LARGE,), 64).keep(MODEL, "digest", (0,), RESULT)
    assert results((LARGE,), 8).find(MODEL, "digest", (0,)) is None
    assert results((LARGE,), 64).find(MODEL, "other", (0,)) is None


def test_rates_of_memory_are_the_latest_that_were_measured_on_such_hardware(
    results: Results,
) -> None:
    def measured(at: float, host: float | None) -> BenchResult:
        return BenchResult(
            measured_at=at, version="1", bytes_per_s=4e12, flops=1e15, host_bytes_per_s=host, bus_bytes_per_s=5e10
        )

    kept = results((LARGE,), 64)
    assert kept.rates() is None
    kept.keep(MODEL, "digest", (0,), measured(2.0, 2e11))
    kept.keep(KnownModel(id="old", source="/models/old"), "digest", (0,), measured(1.0, 1e11))
    kept.keep(KnownModel(id="new", source="/models/new"), "digest", (0,), measured(3.0, None))
    assert kept.rates() == Rates(device=4e12, host=2e11, bus=5e10)
    assert results((LARGE,), 64).rates() == kept.rates(), "it is kept with the results"
    assert results((SMALL,), 64).rates() is None
