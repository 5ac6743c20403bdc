"""The `harness` field of a load request names the built-in engine."""

from pathlib import Path

import pytest
from faulty_models import running_node, write_model

from cortex.neuron.config import HARNESSES
from cortex.wire.node.protocol import LoadRequest, ModelState


@pytest.mark.parametrize("harness", HARNESSES)
async def test_loads_under_every_name_of_the_engine(tmp_path: Path, harness: str) -> None:
    source = str(write_model(tmp_path / "model"))
    async with running_node(tmp_path, {"model_roots": [str(tmp_path)]}) as node:
        assert harness in node.discovery.harnesses
        status = await node.load(LoadRequest(model_id="m", source=source, harness=harness), wait=True)
        assert status.state is ModelState.READY
