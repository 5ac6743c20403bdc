"""A peer in models that span nodes: the shares that this node holds for the leads that connect to it.

A share lives as long as its connection: when the lead unloads it or is gone, its memory is freed. Everything here runs
on the daemon's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from cortex.neuron.node.memory.ceilings import ModelHolding, equal_parts
from cortex.neuron.node.memory.sleep_budget import SleepingModel
from cortex.neuron.node.spanning.hosted_share import HostedShare, ShareResources, lead_of
from cortex.neuron.node.spanning.protocol import (
    Connection,
    KillShare,
    LoadShare,
    PrepareShare,
    ShareEnding,
    ShareFailed,
    ShareUnloaded,
    SleepShare,
    UnloadShare,
    WakeShare,
    decode_from_lead,
    encode,
)
from cortex.neuron.worker.faults import FaultKind
from cortex.system.tasks import run_once
from cortex.wire.node.protocol import ModelShare

log = logging.getLogger(__name__)


class HostedShares:
    def __init__(self, resources: ShareResources) -> None:
        self._resources = resources
        self._shares: dict[HostedShare, Connection] = {}
        self._is_closing = False

    def statuses(self) -> tuple[ModelShare, ...]:
        return tuple(share.status() for share in self._shares)

    def sleeping(self) -> list[SleepingModel]:
        """The parts whose weights are in host memory. Their leads decide how long."""
        return [
            SleepingModel(share.model_id, share.host_bytes, 0.0, can_be_unloaded=False)
            for share in self._shares
            if share.host_bytes
        ]

    def holdings(self) -> list[ModelHolding]:
        """What the shares hold of the devices."""
        return [
            ModelHolding(
                share.model_id,
                share.devices,
                share.device_bytes if share.state == "ready" else equal_parts(share.num_bytes, len(share.devices)),
            )
            for share in self.statuses()
            if share.devices
        ]

    async def serve(self, connection: Connection) -> None:
        """Serves one lead until its connection ends. Nothing of its share is left then, also when this is cancelled."""
        share: HostedShare | None = None
        try:
            async for message in connection:
                match decode_from_lead(message):
                    case PrepareShare() as order if share is None and not self._is_closing:
                        share = HostedShare(order, connection, self._resources, self._stale(order))
                        self._shares[share] = connection
                    case LoadShare(spec=spec) if share is not None:
                        share.load(spec)
                    case SleepShare() if share is not None and share.is_loaded:
                        share.sleep()
                    case WakeShare() if share is not None and share.is_loaded:
                        share.wake()
                    case PrepareShare() | LoadShare() | SleepShare() | WakeShare():
                        break
                    case UnloadShare():
                        if share is not None:
                            await share.unload()
                        await connection.send(encode(ShareUnloaded()))
                        break
                    case KillShare(reason=reason):
                        if share is not None:
                            share.kill(reason)
        except msgspec.MsgspecError as error:
            log.warning("the lead of a model sent an invalid message: %s", error)
            text = f"it does not understand the lead: {error}; both need the same version of cortex"
            await connection.send(encode(ShareFailed(FaultKind.REQUEST, text)))
        finally:
            if share is not None:
                ending = run_once(self._forget(share), f"free the part of {share.model_id}")
                await asyncio.shield(ending)
            await connection.close()

    def _stale(self, order: PrepareShare) -> list[HostedShare]:
        """Parts of the same model that its lead no longer has. Their memory is about to be free."""
        return [
            share for share in self._shares if share.model_id == order.request.model_id and share.lead == lead_of(order)
        ]

    async def drain(self, drain_s: float) -> None:
        """Takes no more shares, and gives the leads of those that serve `drain_s` to end their requests."""
        self._is_closing = True
        serving = {share: each for share, each in self._shares.items() if share.is_loaded and not share.host_bytes}
        for connection in serving.values():
            await connection.send(encode(ShareEnding()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(drain_s):
                await asyncio.gather(*(share.ended.wait() for share in serving))

    async def close(self) -> None:
        """Ends all shares and takes no more; their leads see that their connections end."""
        self._is_closing = True
        for share, connection in list(self._shares.items()):
            await connection.close()
            await self._forget(share)

    async def _forget(self, share: HostedShare) -> None:
        await share.end()
        self._shares.pop(share, None)
        share.ended.set()
        self._resources.sleep_budget.settle()
