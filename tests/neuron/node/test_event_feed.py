import gc

from cortex.neuron.node.event_feed import Feed
from cortex.wire.node import ModelState, ModelStatus, NodeEvent


def event(model_id, state):
    return NodeEvent(kind="model", at_s=0.0, model=ModelStatus(id=model_id, state=state))


async def test_a_slow_listener_gets_the_latest_of_each_and_then_the_end():
    feed = Feed()
    events = feed.subscribe((event("first", ModelState.READY),))
    for _ in range(1000):
        feed.publish(event("a", ModelState.LOADING))
        feed.publish(event("b", ModelState.LOADING))
    feed.publish(event("a", ModelState.READY))
    feed.close()
    heard = [(each.model.id, each.model.state.value) async for each in events]
    assert heard == [("first", "ready"), ("b", "loading"), ("a", "ready")]


async def test_a_subscription_that_is_never_read_does_not_stay():
    feed = Feed()
    feed.subscribe(())
    gc.collect()
    assert len(feed._listeners) == 0
