"""The connections to nodes: a client and a poller for each node that is configured or discovered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cortex.gateway.config import Config, NeuronSection
from cortex.gateway.configuration_files import authority_stamps
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.dispatch.nodes.poller import Poller, PollListener
from cortex.http.ticker import Ticker
from cortex.settings import Stamp
from cortex.system.tasks import Supervisor

FIRST_POLL_S = 2.5
"""How long the start waits for the first polls."""


@dataclass(frozen=True, slots=True)
class PlannedNodes:
    """The nodes of a configuration that is not in force yet."""

    config: Config
    authorities: Mapping[str, Stamp]
    kept: frozenset[str]
    """Nodes whose connections are kept."""
    joining: Sequence[NodeClient]
    """New connections."""


class NodeConnections:
    """Belongs to the loop."""

    def __init__(self, ticker: Ticker, directory: Path, tasks: Supervisor) -> None:
        """Relative paths of a configuration start at `directory`. `tasks`: those that poll."""
        self.clients: dict[str, NodeClient] = {}
        self.pollers: dict[str, Poller] = {}
        self._ticker = ticker
        self._directory = directory
        self._tasks = tasks
        self._config: Config | None = None
        """The connections in force."""
        self._authorities: Mapping[str, Stamp] = {}
        """The authority files that verify connections."""

    def planned(self, config: Config) -> PlannedNodes:
        """Changes nothing. Raises SettingsError."""
        authorities = authority_stamps(config, self._directory)
        kept = frozenset(
            section.name
            for section in config.neurons
            if self._is_same(section, config) and authorities.get(section.name) == self._authorities.get(section.name)
        )
        joining = [
            NodeClient.of(section, self._ticker, config, self._directory, os.environ)
            for section in config.neurons
            if section.name not in kept
        ]
        return PlannedNodes(config, authorities, kept, joining)

    def _is_same(self, section: NeuronSection, config: Config) -> bool:
        before = self._config
        return (
            before is not None
            and section in before.neurons
            and config.key_variable(section) == before.key_variable(section)
            and config.ca_file(section, self._directory) == before.ca_file(section, self._directory)
        )

    def leave(self, planned: PlannedNodes) -> list[Poller]:
        """Close the connections that are not kept. Returns their pollers, which report nothing more and must still be
        stopped."""
        leaving = [self.pollers.pop(name) for name in list(self.pollers) if name not in planned.kept]
        for poller in leaving:
            poller.cancel()
        for name in [name for name in self.clients if name not in planned.kept]:
            self.clients.pop(name).pool.close()
        return leaving

    def join(self, planned: PlannedNodes, listener: PollListener) -> None:
        """Add the new connections, whose pollers do not run yet."""
        self._config, self._authorities = planned.config, planned.authorities
        interval_s = planned.config.gateway.poll_interval_s
        for client in planned.joining:
            self.clients[client.name] = client
            self.pollers[client.name] = Poller(client, listener, interval_s, self._tasks)

    def start_polling(self, planned: PlannedNodes) -> None:
        """Start the pollers of nodes that joined."""
        for client in planned.joining:
            self.pollers[client.name].start()

    async def begin(self) -> None:
        """Poll every node, wait for that up to `FIRST_POLL_S`, and start all pollers."""
        polls = [asyncio.create_task(poller.poll()) for poller in self.pollers.values()]
        if polls:
            await asyncio.wait(polls, timeout=FIRST_POLL_S)
        for poller in self.pollers.values():
            poller.start()

    async def stop_polling(self) -> None:
        await asyncio.gather(*(poller.stop() for poller in self.pollers.values()))

    def close(self) -> None:
        for client in self.clients.values():
            client.pool.close()
