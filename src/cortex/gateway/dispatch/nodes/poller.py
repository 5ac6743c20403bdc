"""Polls one node at an interval and reports each result to a listener."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import msgspec

from cortex.gateway.dispatch.nodes.client import ForeignModel, NodeClient
from cortex.system.tasks import SupervisedTask, Supervisor
from cortex.wire.dialects.registry import DIALECTS
from cortex.wire.errors import CortexError
from cortex.wire.node.protocol import Capabilities, Discovery, Health, ModelState, ModelStatus

FOREIGN_DIALECTS = tuple(name for name, dialect in DIALECTS.items() if dialect.spoken_by == "servers")
"""The dialects of any OpenAI-compatible server."""
REDISCOVER_EVERY = 60
"""The hardware of a node is read again after this many polls."""


class PollListener(Protocol):
    """Receives the results of polls. Called on the loop's thread; must not raise."""

    def observed(self, node: str, discovery: Discovery, health: Health) -> None:
        """A poll succeeded."""

    def missed(self, node: str, why: str) -> None:
        """A poll failed."""


def merged(last: Health | None, health: Health) -> Health | None:
    """The whole report, if `health` has the changes since `last`. None if it has those since another report."""
    if health.since is None:
        return health
    if last is None or last.revision != health.since:
        return None
    models = {status.id: status for status in last.models} | {status.id: status for status in health.models}
    for model in health.gone:
        models.pop(model, None)
    return msgspec.structs.replace(health, models=tuple(models.values()), since=None, gone=())


def pause_after(interval_s: float, took_s: float, *, responded: bool) -> float:
    """Seconds until the next poll. The time that a failed poll took counts: a frozen node is noticed soon."""
    return interval_s if responded else max(0.0, interval_s - took_s)


class Poller:
    """Polls `client` every `interval_s`, and at once after `poll_soon`, until stopped. Owns its task."""

    def __init__(self, client: NodeClient, listener: PollListener, interval_s: float, tasks: Supervisor) -> None:
        self._client = client
        self._listener = listener
        self._interval_s = interval_s
        self._tasks = tasks
        self._discovery: Discovery | None = None
        self._report: Health | None = None
        """The last one, with all models."""
        self._uptime_s = 0.0
        self._num_polls = 0
        self._wake = asyncio.Event()
        self._task: SupervisedTask | None = None

    def start(self) -> None:
        self._task = self._tasks.start(f"poll {self._client.name}", self._run)

    def cancel(self) -> None:
        """Report nothing from now on."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Report nothing from now on; returns when the task has ended."""
        self.cancel()
        if self._task is not None:
            await self._task.ended()

    def poll_soon(self) -> None:
        """Poll now instead of at the next interval."""
        self._wake.set()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            started_at = time.monotonic()
            responded = await self.poll()
            pause_s = pause_after(self._interval_s, time.monotonic() - started_at, responded=responded)
            try:
                async with asyncio.timeout(pause_s):  # unlike `wait_for`, never swallows a cancellation
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def poll(self) -> bool:
        """Poll once and report the result. Returns whether the node responded."""
        try:
            discovery, health = await (self._read() if self._client.section.kind == "neuron" else self._read_foreign())
        except CortexError as problem:
            self._discovery = None
            self._listener.missed(self._client.name, str(problem))
            return False
        except Exception as problem:
            # A bug here must not leave the node's last report in force.
            self._discovery = None
            self._listener.missed(self._client.name, f"the poll failed in the gateway: {problem!r}")
            raise
        self._listener.observed(self._client.name, discovery, health)
        return True

    async def _read(self) -> tuple[Discovery, Health]:
        last = self._report
        health = merged(last, await self._client.health(None if last is None else last.revision or None))
        if health is None:  # not the requested revision: the node is at fault, so request everything
            health = await self._client.health()
        self._report = health
        is_another = health.uptime_s < self._uptime_s or (last is not None and health.num_reloads != last.num_reloads)
        if self._discovery is None or is_another or self._num_polls % REDISCOVER_EVERY == 0:
            self._discovery = await self._client.discovery()
        self._uptime_s = health.uptime_s
        self._num_polls += 1
        return self._discovery, health

    async def _read_foreign(self) -> tuple[Discovery, Health]:
        """A foreign server counts as a node without devices whose models are always ready. It does not report
        capabilities: a model has embeddings or ranks once it has served some."""
        models = await self._client.foreign_models()
        if named := self._client.section.models:
            listed = {model.id: model for model in models}
            models = tuple(listed.get(name) or ForeignModel(name) for name in named)
        served = self._client.served_needs
        statuses = tuple(
            ModelStatus(
                id=model.id,
                state=ModelState.READY,
                context_tokens=model.context_tokens,
                capabilities=Capabilities(
                    tools=True, embeddings=(model.id, "embeddings") in served, rerank=(model.id, "rerank") in served
                ),
            )
            for model in models
        )
        discovery = Discovery(
            host=self._client.name, os="", version="", devices=(), harnesses=(), dialects=FOREIGN_DIALECTS
        )
        return discovery, Health(status="ok", uptime_s=0.0, devices=(), models=statuses)
