from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.node.power import EnergyMeter, PackagePower, attribute


def write(root: Path, name: str, energy_uj: int) -> None:
    (root / name).mkdir(exist_ok=True)
    (root / name / "energy_uj").write_text(f"{energy_uj}\n")


def test_package_power_is_the_difference_of_two_readings(tmp_path: Path) -> None:
    power = PackagePower(tmp_path)
    assert power.read(0.0) is None, "there is none"
    for name, energy in (("intel-rapl:0", 10_000_000), ("intel-rapl:1", 0), ("intel-rapl:0:0", 5)):
        write(tmp_path, name, energy)
    assert power.read(1.0) is None, "there is one reading"
    write(tmp_path, "intel-rapl:0", 30_000_000)
    write(tmp_path, "intel-rapl:1", 10_000_000)
    write(tmp_path, "intel-rapl:0:0", 99_000_000)
    assert power.read(3.0) == pytest.approx(15.0), "parts of a package do not count twice"
    write(tmp_path, "intel-rapl:0", 1)
    assert power.read(4.0) == 0.0, "a counter that begins again is not negative"


@dataclass
class Model:
    power_devices: tuple[int, ...]
    num_running: int
    watts: list[float] = field(default_factory=list)

    def draws(self, watts: float) -> None:
        self.watts.append(watts)


def test_power_of_a_device_is_divided_by_running_requests_and_idle_power_is_nobodys() -> None:
    one, two, spread, idle = Model((0,), 1), Model((0,), 3), Model((1, 2), 2), Model((3,), 0)
    attribute({0: 400.0, 1: 100.0, 2: 50.0, 3: 80.0}, (one, two, spread, idle))
    assert (one.watts, two.watts, spread.watts, idle.watts) == ([100.0], [300.0], [150.0], [0.0])


def test_request_is_charged_for_its_share_while_it_runs() -> None:
    meter = EnergyMeter()
    first = meter.advance(0.0, 0)
    meter.draws(100.0)
    second = meter.advance(2.0, 1)  # another one starts after two seconds
    assert meter.advance(4.0, 2) - second == pytest.approx(100.0)
    assert meter.advance(4.0, 2) - first == pytest.approx(300.0)
    meter.advance(10.0, 0)
    assert meter.advance(10.0, 1) - first == pytest.approx(300.0), "nobody ran"


@given(st.lists(st.tuples(st.floats(0.01, 5), st.floats(0, 700), st.integers(1, 50)), min_size=1, max_size=20))
def test_energy_of_all_requests_is_what_was_drawn(spans: list[tuple[float, float, int]]) -> None:
    meter, now_s, drawn, charged = EnergyMeter(), 0.0, 0.0, 0.0
    for seconds, watts, num_running in spans:
        meter.draws(watts)
        before = meter.advance(now_s, 0)
        now_s += seconds
        charged += (meter.advance(now_s, num_running) - before) * num_running
        drawn += watts * seconds
    assert charged == pytest.approx(drawn, rel=1e-6, abs=1e-6)
