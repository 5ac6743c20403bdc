"""The lead of models that span nodes: connects to the peers, and makes the host of their shares and its own ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from cortex.formats.units import gib
from cortex.neuron.config import NeuronConfig, PeerEntry
from cortex.neuron.engine.parallel import ports
from cortex.neuron.engine.request import LoadSpec, RendezvousAddress, StageSpec
from cortex.neuron.node.devices import NodeDevices, backend_of
from cortex.neuron.node.loading.device_choice import ChosenDevices
from cortex.neuron.node.loading.forecast import Forecast
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.loading.preflight import ModelFacts
from cortex.neuron.node.spanning.protocol import Connection, PeerRejected, PeerUnreachable, SharePrepared
from cortex.neuron.node.spanning.remote_share import RemoteShare
from cortex.neuron.worker.device_claims import DeviceClaim
from cortex.neuron.worker.hosts.rendezvous import Rendezvous
from cortex.neuron.worker.hosts.sharded import ShardedHost
from cortex.neuron.worker.process import WorkerLost
from cortex.wire.errors import InsufficientCapacity, LoadFailed
from cortex.wire.node.orders import LoadRequest
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

ConnectPeer = Callable[[PeerEntry], Awaitable[Connection]]
"""Raises PeerUnreachable or PeerRejected."""


async def unconnected(peer: PeerEntry) -> Connection:
    """The `ConnectPeer` of a node without a front."""
    raise PeerRejected(f"this node cannot connect to {peer.name}")


WAIT_FOR_PEER_S = 60.0
"""A peer that restarts is back sooner; one attempt to load the model waits this long for it."""
_RETRY_S = 0.5


class Lead:
    """Belongs to the daemon's loop."""

    def __init__(self, config: NeuronConfig, devices: NodeDevices, forecast: Forecast, connect: ConnectPeer) -> None:
        self._peers = {peer.name: peer for peer in config.peers}
        self._address = config.peer_address
        self._devices = devices
        self._forecast = forecast
        self._connect = connect

    def reject_unsupported(self, model: KnownModel) -> None:
        """Raises LoadFailed for `nodes` that this node cannot lead."""
        if not model.nodes:
            return
        names = ", ".join(model.nodes)
        if len(model.nodes) < 2 or len(set(model.nodes)) < len(model.nodes):
            raise LoadFailed(f"{model.id} asks for the nodes {names}; name two or more, each once, this one first")
        if model.replicas > 1:
            raise LoadFailed(f"{model.id} has both `nodes` and replicas = {model.replicas}; remove one of them")
        if (size := _size(model)) % len(model.nodes):
            raise LoadFailed(
                f"{model.id} is divided among {size} devices, which {len(model.nodes)} nodes cannot share equally; "
                "choose a multiple of the number of nodes as tensor_parallel or pipeline_parallel"
            )
        if len(model.max_bytes_of_nodes) not in (0, len(model.nodes)):
            raise LoadFailed(f"{model.id} spans {names}: give max_bytes_of_nodes for each of them, or for none")
        for name in model.nodes[1:]:
            if name not in self._peers:
                known = ", ".join(self._peers) or "none"
                raise LoadFailed(
                    f"{model.id} spans {names}, but this node has no peer {name} (it has {known}); add it to [[peers]]"
                )

    async def host(
        self,
        model: KnownModel,
        facts: ModelFacts,
        chosen: ChosenDevices,
        claim: DeviceClaim,
        spec_of: Callable[[ChosenDevices], LoadSpec],
    ) -> tuple[ShardedHost, ChosenDevices]:
        """The host of the model, with ranks on the chosen devices and on the peers, and the devices with all stages,
        if the model has any. Raises LoadFailed, InsufficientCapacity, LoadRejected, or WorkerLost if a peer stays
        unreachable."""
        shares: list[RemoteShare] = []
        try:
            for name in model.nodes[1:]:
                shares.append(RemoteShare(name, await self._connected(self._peers[name])))
            order = _request(model)
            prepared = await asyncio.gather(*(share.prepare(order, facts.digest) for share in shares))
            if model.pipeline_parallel > 1:
                chosen = replace(chosen, stages=self._stages(model, facts, chosen, prepared))
            host = self._address or shares[0].local_host
            held_ports = await asyncio.to_thread(_held_ports, host)
        except BaseException:
            for share in shares:
                await share.close()
            raise
        address = _rendezvous_address(host, *held_ports)
        rendezvous = Rendezvous(_size(model), backend_of(chosen.devices), address=address, held_ports=held_ports)
        spec = spec_of(chosen)
        for number, share in enumerate(shares, start=1):
            share.spec = replace(spec, rank=rendezvous.rank(number * len(chosen.devices)))
        return self._devices.sharded_host(chosen.indices, spec, claim, rendezvous, others=shares), chosen

    def _stages(
        self, model: KnownModel, facts: ModelFacts, own: ChosenDevices, prepared: Sequence[SharePrepared]
    ) -> tuple[StageSpec, ...]:
        """The layers of every device, in the order of the ranks. Raises InsufficientCapacity."""
        free_bytes: list[int] = []
        limits: list[int | None] = []
        nodes = [(own.free_bytes, own.limits), *((each.free_bytes, each.limits) for each in prepared)]
        for (free, own_limits), max_bytes in zip(nodes, model.max_bytes_of_nodes or (None,) * len(nodes), strict=True):
            free_bytes += limited(free, max_bytes)
            limits += own_limits if max_bytes is None else limited(free, max_bytes)
        stages = self._forecast.stages(model, facts, own.devices[0], free_bytes, limits)
        if stages is None:
            have = ", ".join(gib(num_bytes) for num_bytes in free_bytes)
            raise InsufficientCapacity(
                f"the {facts.num_layers} layers of {model.id} do not fit its devices, which can "
                f"give {have}; the first of them also holds embedding and head"
            )
        return stages

    async def _connected(self, peer: PeerEntry) -> Connection:
        deadline_s = asyncio.get_running_loop().time() + WAIT_FOR_PEER_S
        while True:
            try:
                return await self._connect(peer)
            except PeerUnreachable as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    raise WorkerLost(f"node {peer.name} cannot be reached: {error}") from error
                log.info("node %s cannot be reached, trying again: %s", peer.name, error)
            await asyncio.sleep(_RETRY_S)


def limited(free_bytes: Sequence[int], max_bytes: int | None) -> tuple[int, ...]:
    """What each device of a node can give if all of them together may give no more than `max_bytes`."""
    total_bytes = sum(free_bytes)
    if max_bytes is None or total_bytes <= max_bytes:
        return tuple(free_bytes)
    return tuple(num_bytes * max_bytes // total_bytes for num_bytes in free_bytes)


def _size(model: KnownModel) -> int:
    """The number of ranks, over all nodes."""
    return model.tensor_parallel * model.pipeline_parallel


def _request(model: KnownModel) -> LoadRequest:
    """What a peer needs to find the files of the model."""
    return LoadRequest(model_id=model.id, **model.shared_with(LoadRequest.__struct_fields__))


def _held_ports(host: str) -> tuple[socket.socket, socket.socket]:
    """Raises LoadFailed."""
    with contextlib.ExitStack() as held:
        try:
            store, steps = (held.enter_context(ports.held(host)) for _ in range(2))
        except OSError as error:
            reason = os_error_in_words(error)
            raise LoadFailed(
                f"`peer_address` {host} is no address of this host: {reason}; correct it in neuron.toml"
            ) from error
        held.pop_all()
    return store, steps


def _rendezvous_address(host: str, store: socket.socket, steps: socket.socket) -> RendezvousAddress:
    """The leader's worker listens there when it begins the load."""
    ports = store.getsockname()[1], steps.getsockname()[1]
    return RendezvousAddress(host, *ports, secret=secrets.token_hex(16), own_host=host)
