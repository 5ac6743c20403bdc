"""Nodes found by DNS: every address of a name is a neuron, so that nodes join and leave without a change of a file."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection

from cortex.gateway.config import DiscoverySection, NeuronSection
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""The addresses of a name; empty where the name has none. Raises OSError when there is no response."""

MAX_MISSES = 3
"""A node leaves after this many consecutive resolutions without its address, because a response may be incomplete."""
TIMEOUT_S = 5.0
_NO_ADDRESSES = (socket.EAI_NONAME, socket.EAI_NODATA)


async def resolve_addresses(name: str) -> Collection[str]:
    """The addresses that the resolver of the system has for `name`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESSES:  # a headless service without pods
            return ()
        raise
    return {str(address[0]) for *_, address in found}


class DNSDiscovery:
    """The nodes behind the configured name. Owned by the gateway; `refresh` is called at an interval."""

    def __init__(self, resolve: Resolve = resolve_addresses) -> None:
        self._resolve = resolve
        self._section = DiscoverySection()
        self._misses: dict[str, int] = {}
        """Address → resolutions in a row without it."""
        self._is_failing = False

    async def refresh(self, section: DiscoverySection) -> None:
        """Resolve the name again. Never raises: without a response, the nodes that are known stay."""
        if section.dns != self._section.dns:
            self._misses.clear()
        self._section = section
        if section.dns is None:
            return
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await self._resolve(section.dns)
        except OSError as error:  # TimeoutError is one
            if not self._is_failing:
                reason = os_error_in_words(error) or "no response"
                log.warning("discovery: cannot resolve %s: %s; the known nodes stay", section.dns, reason)
            self._is_failing = True
            return
        if not found and not self._is_failing:
            log.warning("discovery: %s has no addresses; correct discovery.dns if it should have", section.dns)
        self._is_failing = not found
        misses = {address: count + 1 for address, count in self._misses.items() if count + 1 < MAX_MISSES}
        self._misses = misses | dict.fromkeys(found, 0)

    def joined(self, configured: tuple[NeuronSection, ...]) -> tuple[NeuronSection, ...]:
        """The configured nodes and the discovered ones. A configured node is not listed twice."""
        if self._section.dns is None:
            return configured
        return with_discovered(configured, self._misses, self._section.port)


def with_discovered(
    configured: tuple[NeuronSection, ...], addresses: Collection[str], port: int
) -> tuple[NeuronSection, ...]:
    """The configured nodes and those at `addresses`. A configured node is not listed twice."""
    names, endpoints = {node.name for node in configured}, {node.endpoint for node in configured}
    discovered = (_node(address, port) for address in sorted(addresses))
    new = (node for node in discovered if node.name not in names and node.endpoint not in endpoints)
    return (*configured, *new)


def _node(address: str, port: int) -> NeuronSection:
    host = f"[{address}]" if ":" in address else address
    return NeuronSection(name=address, endpoint=f"http://{host}:{port}")
