"""Default models of a starting node."""

from __future__ import annotations

from cortex.neuron.node.loading.startup_models import StartupModels
from cortex.wire.errors import LoadFailed


async def test_reports_why_a_default_model_failed_and_loads_the_others() -> None:
    async def load(model_id: str) -> None:
        if model_id == "broken":
            raise LoadFailed("the file has no header")
        if model_id == "buggy":
            raise KeyError("layers")

    startup = StartupModels(["broken", "buggy", "fine"], load, lambda: None)
    await startup.run()
    status = startup.status()
    assert (status.state, status.completed, status.failed) == ("done", ("fine",), ("broken", "buggy"))
    assert status.reasons == {"broken": "the file has no header", "buggy": "unexpected KeyError: 'layers'"}
