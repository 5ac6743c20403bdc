from cortex.neuron.engine.request import EngineStats
from cortex.neuron.node.instance import Instance, ModelCallbacks, ServingLimits


async def test_takes_reports_of_the_engine_before_the_load_has_ended():
    callbacks = ModelCallbacks(lambda *_: None, lambda: None, lambda _: None, lambda: None)
    instance = Instance("m", None, ServingLimits(slots=1, max_queue=1), callbacks)
    instance.on_stats(EngineStats(steps=3))
    assert instance.stats.steps == 3
