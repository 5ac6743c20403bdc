"""Work of a node that is followed: what counts as its end, and how long a node that does not respond is waited for."""

from __future__ import annotations

import asyncio

import pytest

from cortex.gateway.api.live.event_streams import MAX_MISSED_POLLS, FollowedWork
from cortex.wire.errors import UpstreamUnavailable
from cortex.wire.node.protocol import PullStatus

from ...waiting import WAIT_S

RUNNING = PullStatus(model_id="a", state="running")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_node_that_does_not_respond_is_tried_once_each_poll(is_cancelled: bool) -> None:
    loop = asyncio.get_running_loop()
    tried_at: list[float] = []

    async def start() -> PullStatus:
        return RUNNING

    async def fail() -> PullStatus:
        tried_at.append(loop.time())
        raise UpstreamUnavailable("it restarts")

    work = FollowedWork(start, fail, fail, described="the download on beast", after_restart="again", poll_s=0.01)
    if is_cancelled:
        work.cancelled.set()
    async with asyncio.timeout(WAIT_S):
        assert isinstance(await work.outcome(), UpstreamUnavailable)
    assert len(tried_at) == MAX_MISSED_POLLS
    # Timers may be early by the resolution of the loop's clock.
    assert tried_at[-1] - tried_at[0] >= MAX_MISSED_POLLS * 0.005, "the node has time to come back"
