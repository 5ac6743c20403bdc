"""`neuron tp-smoke`: real processes that add numbers up, on the CPU."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from cortex.cli import tp_smoke
from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.neuron import neuron

from ..programs import PYTHONPATH


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


def test_measures_sums_of_every_size_between_two_devices() -> None:
    result = CliRunner().invoke(neuron, ["tp-smoke", "--devices", "0,1", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["devices"] == [0, 1]
    assert [each["bytes"] for each in report["sums"]] == sorted(each["bytes"] for each in report["sums"])
    assert all(each["seconds"] > 0 for each in report["sums"])
    assert {each["transport"] for each in report["sums"]} == {"sockets"}
    assert report["suits_tensor_parallel"] == (report["token_s"] <= tp_smoke.ENOUGH_S)


@pytest.mark.parametrize("devices", ["0", "1,1", "0,x"])
def test_rejects_what_is_not_a_link(devices: str) -> None:
    with pytest.raises(CommandError) as rejected:
        CliRunner().invoke(neuron, ["tp-smoke", "--devices", devices], catch_exceptions=False, standalone_mode=False)
    assert rejected.value.exit_code is ExitCode.USAGE
