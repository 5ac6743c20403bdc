from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cortex.fleet.memory import Holding, Need, ledger, measurements, need_of
from cortex.fleet.topology import MemoryReservation
from cortex.wire.node import ModelState

GIB = 1024**3
Make = Callable[..., Any]


def test_the_books_of_a_quiet_device(model: Make, node: Make) -> None:
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
def test_which_states_hold_memory(model: Make, node: Make, state: ModelState, held_gib: int) -> None:
    (device,) = ledger(node("n", [24], model("a", 8, state=state)))
    assert device.committed_bytes == held_gib * GIB


def test_a_load_under_way_has_its_whole_share(model: Make, node: Make) -> None:
    loading = model("a", estimate=16, state=ModelState.LOADING)
    (device,) = ledger(node("n", [24], loading))
    assert device.free_bytes == 24 * GIB
    assert device.available_bytes == 8 * GIB


def test_a_device_that_reports_less_than_the_books_is_believed(model: Make, node: Make) -> None:
    host = node("n", [24], model("a", 8))
    squeezed = msgspec.structs.replace(host.devices[0], free_bytes=3 * GIB)
    (device,) = ledger(msgspec.structs.replace(host, devices=(squeezed,)))
    assert device.available_bytes == 3 * GIB


def test_a_wide_model_is_shared_out_and_rounded_up(model: Make, node: Make) -> None:
    wide = model("a", devices=(0, 1, 2))
    status = msgspec.structs.replace(wide.status, measured_bytes=100)
    books = ledger(node("n", [24, 24, 24, 24], msgspec.structs.replace(wide, status=status)))
    assert [device.held_by("a") for device in books] == [34, 34, 34, 0]


def test_a_promise_is_counted_once_and_where_the_node_would_put_it(model: Make, node: Make) -> None:
    promise = MemoryReservation(model_id="a", devices=(), num_bytes=10 * GIB)
    loading = model("a", estimate=8, state=ModelState.LOADING)
    books = ledger(node("n", [12, 24], loading, reservations=(promise,)))
    assert [device.committed_bytes for device in books] == [0, 10 * GIB]
    assert books[1].holdings[0].basis == "reserved"


def test_promises_beyond_what_was_given_back_show_as_a_debt(model: Make, node: Make) -> None:
    promise = MemoryReservation(model_id="b", devices=(0,), num_bytes=20 * GIB)
    (device,) = ledger(node("n", [24], model("a", 20, state=ModelState.UNLOADING), reservations=(promise,)))
    assert (device.balance_bytes, device.available_bytes) == (-16 * GIB, 0)


def test_what_a_model_needs_is_measured_before_it_is_estimated(
    model: Make, node: Make, fleet: Make, spec: Make
) -> None:
    plain, sized = spec("m", None), spec("m", 7)
    cold = node("n", [24], model("m", estimate=6, state=ModelState.COLD))
    warm = node("n", [24], model("m", 9))
    empty = node("n", [24])
    elsewhere = node("o", [24], model("m", estimate=5, state=ModelState.COLD))

    def need(spec_: Any, host: Any, *others: Any, measured: float | None = None) -> float | None:
        picture = fleet(host, *others, specs=[spec_])
        if measured is not None:
            picture = msgspec.structs.replace(picture, measured={("m", None, None): int(measured * GIB)})
        found = need_of(spec_, host, picture)
        return None if found is None else found.takes_bytes / GIB

    assert need(plain, empty) is None
    assert need(plain, empty, elsewhere) == 5
    assert need(plain, cold, elsewhere) == 6
    assert need(sized, cold, elsewhere) == 7
    assert need(sized, cold, elsewhere, measured=8) == 8
    assert need(sized, warm, elsewhere, measured=8) == 9


def test_measurements_are_remembered_when_the_model_has_left(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    picture = fleet(node("n", [24], model("m", 9)), specs=[spec("m", 7, quant="q8_0")])
    remembered = measurements(picture)
    assert remembered == {("m", "q8_0", None): 9 * GIB}
    later = msgspec.structs.replace(fleet(node("n", [24]), specs=[spec("m", 7, quant="q8_0")]), measured=remembered)
    need = need_of(later.catalogue.spec("m"), later.nodes[0], later)
    assert need == Need(takes_bytes=9 * GIB, least_bytes=9 * GIB)
    assert measurements(later) == remembered


def test_a_model_needs_at_least_what_its_node_accepts_it_with(model: Make, node: Make, fleet: Make, spec: Make) -> None:
    def need(held: Any, size: float | None = None) -> tuple[float, float]:
        host, spec_ = node("n", [24], held), spec("m", size)
        found = need_of(spec_, host, fleet(host, specs=[spec_]))
        assert found is not None
        return found.takes_bytes / GIB, found.least_bytes / GIB

    assert need(model("m", estimate=20, least=8, state=ModelState.COLD)) == (20, 8)
    assert need(model("m", 15, least=8)) == (15, 8)
    assert need(model("m", 6, least=8)) == (8, 8)
    assert need(model("m", estimate=20, least=8, state=ModelState.COLD), 12) == (12, 12), "an operator's word"
