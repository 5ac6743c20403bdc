"""Measured sizes outlive the gateway that measured them."""

import json

import pytest
from fake_neuron import GB, until

from cortex.gateway.dispatch.measured_sizes import FILE_NAME, MeasuredSizes
from cortex.wire.node import ModelState

MEASURED = {("a", None, None): 3 * GB, ("a", "q8_0", 4096): GB, ("b", None, 1024): 5}


def test_what_is_written_is_read_back(tmp_path):
    MeasuredSizes(tmp_path / "new").write(MEASURED)
    assert MeasuredSizes(tmp_path / "new").read() == MEASURED
    assert [path.name for path in (tmp_path / "new").iterdir()] == [FILE_NAME], "nothing half-written is left"


def test_what_has_not_changed_is_not_written(tmp_path):
    sizes = MeasuredSizes(tmp_path)
    sizes.write(MEASURED)
    (tmp_path / FILE_NAME).unlink()
    sizes.write(dict(MEASURED))
    assert not (tmp_path / FILE_NAME).exists()
    sizes.write({})
    assert json.loads((tmp_path / FILE_NAME).read_text()) == []


@pytest.mark.parametrize("content", [b"", b"[{", b'{"a": 1}', b'[{"model": "a"}]', b"\xff"])
def test_a_broken_file_is_told_and_forgotten(tmp_path, content, caplog):
    (tmp_path / FILE_NAME).write_bytes(content)
    assert MeasuredSizes(tmp_path).read() == {}
    assert FILE_NAME in caplog.text


def test_a_place_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    sizes = MeasuredSizes(tmp_path / "file")
    sizes.write(MEASURED)
    sizes.write(MEASURED)
    assert caplog.text.count("not written") == 1
    assert "gateway.state" in caplog.text


async def test_a_restarted_gateway_knows_what_a_model_took(neurons, start_gateway, tmp_path):
    beast = await neurons("beast", sizes={"a": 9 * GB}, states={"a": ModelState.READY})
    first = await start_gateway(beast)
    await until(lambda: (tmp_path / FILE_NAME).exists())
    await first.gateway.close()
    beast.states["a"] = ModelState.COLD
    beast.estimates["a"] = 100 * GB
    second = await start_gateway(beast)
    assert (await second.chat("a"))[0] == 200, "by its estimate it would fit nowhere"
