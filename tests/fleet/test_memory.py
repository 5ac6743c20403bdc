from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.devices import MemoryReservation
from cortex.fleet.memory import Holding, MemoryNeed, ledger, measurements, need_of
from cortex.fleet.placement.fitting import Fitting
from cortex.wire.node.protocol import ModelState, QuantisedSize

GIB = 1024**3
Make = Callable[..., Any]


def test_ledger_of_an_idle_device(model: Make, node: Make) -> None:
    (device,) = ledger(node("n", [24], model("a", 8), model("b", 4), foreign=2))
    assert device.holdings == (
        Holding(model_id="a", num_bytes=8 * GIB, basis="measured"),
        Holding(model_id="b", num_bytes=4 * GIB, basis="measured"),
    )
    assert (device.committed_bytes, device.available_bytes) == (12 * GIB, 10 * GIB)


@pytest.mark.parametrize(
    ("state", "held_gib"),
    [
        (ModelState.COLD, 0),
        (ModelState.ASLEEP, 0),
        (ModelState.FAILED, 0),
        (ModelState.DOWNLOADING, 8),
        (ModelState.LOADING, 8),
        (ModelState.READY, 8),
        (ModelState.UNLOADING, 8),
        (ModelState.RECOVERING, 8),
    ],
)
def test_state_decides_whether_memory_is_held(model: Make, node: Make, state: ModelState, held_gib: int) -> None:
    (device,) = ledger(node("n", [24], model("a", 8, state=state)))
    assert device.committed_bytes == held_gib * GIB


def test_load_under_way_is_counted_as_its_whole_share(model: Make, node: Make) -> None:
    loading = model("a", estimate=16, state=ModelState.LOADING)
    (device,) = ledger(node("n", [24], loading))
    assert device.free_bytes == 24 * GIB
    assert device.available_bytes == 8 * GIB


def test_reported_free_bytes_win_when_lower_than_the_ledger(model: Make, node: Make) -> None:
    host = node("n", [24], model("a", 8))
    squeezed = msgspec.structs.replace(host.devices[0], free_bytes=3 * GIB)
    (device,) = ledger(msgspec.structs.replace(host, devices=(squeezed,)))
    assert device.available_bytes == 3 * GIB


def test_model_over_several_devices_is_split_and_rounded_up(model: Make, node: Make) -> None:
    wide = model("a", devices=(0, 1, 2))
    status = msgspec.structs.replace(wide.status, measured_bytes=100)
    devices = ledger(node("n", [24, 24, 24, 24], msgspec.structs.replace(wide, status=status)))
    assert [device.held_by("a") for device in devices] == [34, 34, 34, 0]


def test_reservation_is_counted_once_on_the_emptiest_device(model: Make, node: Make) -> None:
    reservation = MemoryReservation(model_id="a", devices=(), num_bytes=10 * GIB)
    loading = model("a", estimate=8, state=ModelState.LOADING)
    devices = ledger(node("n", [12, 24], loading, reservations=(reservation,)))
    assert [device.committed_bytes for device in devices] == [0, 10 * GIB]
    assert devices[1].holdings[0].basis == "reserved"


def test_reservation_before_the_unload_ends_makes_the_balance_negative(model: Make, node: Make) -> None:
    reservation = MemoryReservation(model_id="b", devices=(0,), num_bytes=20 * GIB)
    (device,) = ledger(node("n", [24], model("a", 20, state=ModelState.UNLOADING), reservations=(reservation,)))
    assert (device.balance_bytes, device.available_bytes) == (-16 * GIB, 0)


@pytest.mark.parametrize(
    ("wanted", "stored", "requested", "is_known"),
    [
        (None, None, None, True),
        ("q4", None, None, False),
        ("q4", "q4_k", "q4", True),
        ("Q4_K_M", "q4_k", None, True),
        ("q4", "q4_k", None, True),
        ("q4_k", "q8_0", None, False),
        ("q8", "q4_k", "q4", False),
        ("q6k", "q6_k", None, True),
        ("int8", "q8_0", None, True),
        ("UD-Q4_K_XL", "q4_k", None, True),
        ("bf16", None, None, True),
        ("FP16", None, None, True),
        ("fp8", "q8_0", None, False),
        ("fp8", "fp8", None, True),
        ("8bit", "q8_0", "8bit", True),
    ],
)
def test_estimate_of_another_quantisation_is_not_taken_for_the_wanted_one(
    model: Make,
    node: Make,
    fleet: Make,
    spec: Make,
    wanted: str | None,
    stored: str | None,
    requested: str | None,
    is_known: bool,
) -> None:
    held = model("m", estimate=16, state=ModelState.COLD)
    status = msgspec.structs.replace(held.status, quant=stored, requested_quant=requested)
    host = node("n", [24], msgspec.structs.replace(held, status=status))
    other = node("other", [24])
    spec_ = msgspec.structs.replace(spec("m", None), quant=wanted)
    snapshot = fleet(host, other, specs=[spec_])
    expected = MemoryNeed(takes_bytes=16 * GIB, least_bytes=16 * GIB) if is_known else None
    assert [need_of(spec_, each, snapshot) for each in (host, other)] == [expected, expected]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, 16),
        ("q4", 5),
        ("Q4_K_M", 5),
        ("int4", 5),
        ("8bit", 9),
        ("q8_0", 9),
        ("fp8", 8),
        ("UD-Q4_K_XL", 5),
        ("q6k", None),
    ],
)
def test_dense_weights_that_will_be_quantised_are_sized_as_that(
    model: Make, node: Make, fleet: Make, spec: Make, wanted: str | None, expected: int | None
) -> None:
    held = model("m", estimate=16, least=15, state=ModelState.COLD)
    quantised = tuple(
        QuantisedSize(quant=quant, estimate_bytes=size * GIB, least_bytes=size * GIB - 1)
        for quant, size in (("q4_k", 5), ("q8_0", 9), ("fp8", 8))
    )
    status = msgspec.structs.replace(held.status, quantised=quantised)
    host, other = node("n", [24], msgspec.structs.replace(held, status=status)), node("other", [24])
    spec_ = msgspec.structs.replace(spec("m", None), quant=wanted)
    snapshot = fleet(host, other, specs=[spec_])
    needs = [need_of(spec_, each, snapshot) for each in (host, other)]
    assert [need and need.takes_bytes // GIB for need in needs] == [expected, expected]
    if wanted is not None and expected is not None:
        assert needs[0] is not None
        assert needs[0].least_bytes == expected * GIB - 1


def test_model_that_is_too_large_is_advised_the_most_bits_that_fit(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    held = model("m", estimate=32, state=ModelState.COLD)
    quantised = tuple(
        QuantisedSize(quant=quant, estimate_bytes=size * GIB, least_bytes=size * GIB)
        for quant, size in (("q4_k", 9), ("q8_0", 17))
    )
    host = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, quantised=quantised))
    for total, advice in ((24, '; with `quant = "q8_0"` in models.toml it needs 17.0 GiB'), (8, "has 8.0 GiB")):
        place = node("n", [total], host)
        snapshot = fleet(place, specs=[spec("m", None)])
        need = need_of(snapshot.catalogue.spec("m"), place, snapshot)
        fitting = Fitting(snapshot.catalogue.spec("m"), place, snapshot, 0.0, need=need, origin="operator")
        assert fitting.load().reason.endswith(advice)


def test_measured_size_wins_over_estimates(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    plain, sized = spec("m", None), spec("m", 7)
    cold = node("n", [24], model("m", estimate=6, state=ModelState.COLD))
    warm = node("n", [24], model("m", 9))
    empty = node("n", [24])
    elsewhere = node("o", [24], model("m", estimate=5, state=ModelState.COLD))

    def need(spec_: Any, host: Any, *others: Any, measured: float | None = None) -> float | None:
        snapshot = fleet(host, *others, specs=[spec_])
        if measured is not None:
            snapshot = msgspec.structs.replace(snapshot, measured={("m", None, None): int(measured * GIB)})
        found = need_of(spec_, host, snapshot)
        return None if found is None else found.takes_bytes / GIB

    assert need(plain, empty) is None
    assert need(plain, empty, elsewhere) == 5
    assert need(plain, cold, elsewhere) == 6
    assert need(sized, cold, elsewhere) == 7
    assert need(sized, cold, elsewhere, measured=8) == 8
    assert need(sized, warm, elsewhere, measured=8) == 9


@pytest.mark.parametrize(("quant", "is_kept"), [("q8_0", True), ("int8", True), ("q4", False), (None, True)])
def test_measured_size_of_another_quantisation_is_not_kept_for_the_wanted_one(
    model: Make, node: Make, fleet: Make, spec: Make, quant: str | None, is_kept: bool
) -> None:
    """The catalogue may have changed since the model was loaded."""
    held = model("m", 9)
    status = msgspec.structs.replace(held.status, quant="q8_0", requested_quant="q8_0")
    wanted = msgspec.structs.replace(spec("m", None), quant=quant)
    snapshot = fleet(node("n", [24], msgspec.structs.replace(held, status=status)), specs=[wanted])
    assert measurements(snapshot) == ({("m", quant, None): 9 * GIB} if is_kept else {})


def test_measurements_outlive_the_unload(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    held = model("m", 9)
    held = msgspec.structs.replace(held, status=msgspec.structs.replace(held.status, quant="q8_0"))
    snapshot = fleet(node("n", [24], held), specs=[spec("m", 7, quant="q8_0")])
    remembered = measurements(snapshot)
    assert remembered == {("m", "q8_0", None): 9 * GIB}
    later = msgspec.structs.replace(fleet(node("n", [24]), specs=[spec("m", 7, quant="q8_0")]), measured=remembered)
    need = need_of(later.catalogue.spec("m"), later.nodes[0], later)
    assert need == MemoryNeed(takes_bytes=9 * GIB, least_bytes=9 * GIB)
    assert measurements(later) == remembered


def test_need_is_at_least_the_minimum_of_the_node(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    def need(held: Any, size: float | None = None) -> tuple[float, float]:
        host, spec_ = node("n", [24], held), spec("m", size)
        found = need_of(spec_, host, fleet(host, specs=[spec_]))
        assert found is not None
        return found.takes_bytes / GIB, found.least_bytes / GIB

    assert need(model("m", estimate=20, least=8, state=ModelState.COLD)) == (20, 8)
    assert need(model("m", 15, least=8)) == (15, 8)
    assert need(model("m", 6, least=8)) == (8, 8)
    assert need(model("m", estimate=20, least=8, state=ModelState.COLD), 12) == (12, 12), (
        "the operator's estimate has no minimum"
    )


def test_size_of_a_path_is_that_of_the_model_that_a_node_found_there(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    found = model("folder/name", estimate=6, state=ModelState.COLD)
    found = msgspec.structs.replace(found, status=msgspec.structs.replace(found.status, source="/srv/name.gguf"))
    host = node("n", [24], found)
    wanted = spec("mine", None, source="/srv/name.gguf")
    need = need_of(wanted, host, fleet(host, specs=[wanted]))
    assert need is not None
    assert need.takes_bytes == 6 * GIB
    other = spec("mine", None, source="/srv/other.gguf")
    assert need_of(other, host, fleet(host, specs=[other])) is None
