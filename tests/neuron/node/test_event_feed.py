import gc

from cortex.neuron.node.event_feed import EventFeed
from cortex.wire.node.protocol import ModelState, ModelStatus, NodeEvent


def event(model_id: str, state: ModelState) -> NodeEvent:
    return NodeEvent(kind="model", at_s=0.0, model=ModelStatus(id=model_id, state=state))


async def test_slow_subscriber_gets_the_latest_event_of_each_model_and_then_the_end() -> None:
    feed = EventFeed()
    events = feed.subscribe((event("first", ModelState.READY),))
    for _ in range(1000):
        feed.publish(event("a", ModelState.LOADING))
        feed.publish(event("b", ModelState.LOADING))
    feed.publish(event("a", ModelState.READY))
    feed.close()
    received = [(each.model.id, each.model.state.value) async for each in events if each.model is not None]
    assert received == [("first", "ready"), ("b", "loading"), ("a", "ready")]


async def test_forgets_a_dropped_subscription_that_was_never_read() -> None:
    feed = EventFeed()
    feed.subscribe(())
    gc.collect()
    assert feed.num_subscribers == 0
