from types import SimpleNamespace

from cortex.neuron.config import Limits
from cortex.neuron.engine.request import EngineStats
from cortex.neuron.node.instance import Instance, ModelCallbacks


async def test_takes_reports_of_the_engine_before_the_load_has_ended() -> None:
    callbacks = ModelCallbacks(lambda *_: None, lambda: None, lambda _: None, lambda: None)
    instance = Instance("m", SimpleNamespace(replica_devices=((0,),)), Limits(), callbacks)
    instance.on_stats(EngineStats(steps=3))
    assert instance.stats.steps == 3
