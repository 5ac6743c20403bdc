"""Measured sizes survive a restart of the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.gateway.dispatch.measured_sizes import FILE_NAME, MAX_AGE_S, MeasuredSizes
from cortex.wire.node.protocol import ModelState

from ...waiting import until
from ..fake_neuron import GB

if TYPE_CHECKING:
    from ..fake_neuron import StartNeuron
    from ..started_gateway import StartGateway


MEASURED = {("a", None, None): 3 * GB, ("a", "q8_0", 4096): GB, ("b", None, 1024): 5}


def test_written_sizes_are_read_back(tmp_path: Path) -> None:
    MeasuredSizes(tmp_path / "new").write(MEASURED)
    assert MeasuredSizes(tmp_path / "new").read() == MEASURED
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME], "no temporary file is left"


def test_unchanged_sizes_are_not_written(tmp_path: Path) -> None:
    sizes = MeasuredSizes(tmp_path)
    sizes.write(MEASURED)
    (tmp_path / FILE_NAME).unlink()
    sizes.write(dict(MEASURED))
    assert not (tmp_path / FILE_NAME).exists()
    sizes.write({})
    assert json.loads((tmp_path / FILE_NAME).read_text()) == []


def test_sizes_that_were_not_measured_for_long_are_forgotten(tmp_path: Path) -> None:
    now = 1e9
    sizes = MeasuredSizes(tmp_path, lambda: now)
    sizes.write(MEASURED)
    now += MAX_AGE_S / 2
    changed = MEASURED | {("b", None, 1024): 6}
    sizes.write(changed)
    now += MAX_AGE_S / 2 + 1
    assert MeasuredSizes(tmp_path, lambda: now).read() == {("b", None, 1024): 6}


@pytest.mark.parametrize("content", [b"", b"[{", b'{"a": 1}', b'[{"model": "a"}]', b"\xff"])
def test_unreadable_file_is_logged_and_ignored(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert MeasuredSizes(tmp_path).read() == {}
    assert FILE_NAME in caplog.text


def test_unwritable_directory_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    sizes = MeasuredSizes(tmp_path / "file")
    sizes.write(MEASURED)
    sizes.write(MEASURED)
    assert caplog.text.count("not written") == 1
    assert f"not written: {tmp_path / 'file'}: File exists; set gateway.state" in caplog.text


async def test_restarted_gateway_places_by_measured_size(
    neurons: StartNeuron, start_gateway: StartGateway, tmp_path: Path
) -> None:
    beast = await neurons("beast", sizes={"a": 9 * GB}, states={"a": ModelState.READY})
    first = await start_gateway(beast)
    await until(lambda: (tmp_path / FILE_NAME).exists())
    await first.gateway.close()
    beast.states["a"] = ModelState.COLD
    beast.estimates["a"] = 100 * GB
    second = await start_gateway(beast)
    assert (await second.chat("a"))[0] == 200, "by its estimate it fits nowhere"
