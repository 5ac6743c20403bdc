from __future__ import annotations

import asyncio

from cortex.gateway.pictures.turns import FetchTurns


async def test_one_client_does_not_occupy_all_turns() -> None:
    turns, release, running = FetchTurns(at_once=3, each=2), asyncio.Event(), list[str]()

    async def fetch(client: str) -> None:
        async with turns.of(client):
            running.append(client)
            await release.wait()

    tasks = [asyncio.create_task(fetch(client)) for client in ("greedy",) * 5 + ("modest",) * 2]
    for _ in range(5):
        await asyncio.sleep(0)
    assert running == ["greedy", "greedy", "modest"]
    release.set()
    await asyncio.gather(*tasks)
    assert sorted(running) == ["greedy"] * 5 + ["modest"] * 2


async def test_a_cancelled_fetch_leaves_nothing() -> None:
    turns = FetchTurns(at_once=1, each=1)
    async with turns.of("first"):
        waiting = asyncio.create_task(turns.of("second").__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(5), turns.of("third"):
        pass
