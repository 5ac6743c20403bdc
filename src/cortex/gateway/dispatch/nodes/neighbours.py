"""Finds nodes that have files that another node needs, which asks them before the hub."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from cortex.fleet.topology import RESERVES, Fleet
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.wire.errors import FilesDamaged, SourceNotFound
from cortex.wire.node.load_options import is_path
from cortex.wire.node.neighbours import MAX_NEIGHBOURS, Neighbour, is_of_path, repository_of
from cortex.wire.node.orders import FilesRequest, LoadRequest

log = logging.getLogger(__name__)


class _Found(NamedTuple):
    """The nodes with files of a model."""

    at_paths: list[str]
    missing: list[str]
    """They have reported that the files at their path are missing, which may be there again."""
    copies: list[str]
    """Of what was at another node's path, maybe some time ago; or of a repository of the hub."""

    def in_turn(self) -> list[str]:
        """As they are asked. None, if all have only reported missing files."""
        num_sure = len(self.at_paths) + len(self.copies)
        tried = self.missing[: max(0, MAX_NEIGHBOURS - num_sure)] if num_sure else []
        return (self.at_paths + tried + self.copies)[:MAX_NEIGHBOURS]


class Neighbours:
    """Belongs to the loop."""

    def __init__(self, nodes: Mapping[str, NodeClient], read_fleet: Callable[[], Fleet], *, is_on: bool) -> None:
        self._nodes = nodes
        self._read_fleet = read_fleet
        self.is_on = is_on

    def in_load(self, node: str, request: LoadRequest) -> LoadRequest:
        """The order, with the neighbours for `node` filled in."""
        named = self._named(node, request.model_id, request.source)
        return msgspec.structs.replace(request, source=self._source(node, request), neighbours=named)

    def in_pull(self, node: str, request: FilesRequest, also: Collection[str] = ()) -> FilesRequest:
        """`also`: nodes that have the files since their last report."""
        named = self._named(node, request.model_id, request.source, also)
        return msgspec.structs.replace(request, source=self._source(node, request), neighbours=named)

    def holders(self, node: str, model: str, source: str | None, *, asleep: bool = False) -> list[str]:
        """The other nodes that have files of the model, can be reached from `node`, and are up, or with `asleep` those
        that sleep."""
        found = self._found(node, self._repository(model, source), asleep=asleep)
        return found.at_paths + found.copies

    def _found(self, node: str, repository: str | None, also: Collection[str] = (), *, asleep: bool = False) -> _Found:
        found, target = _Found([], [], []), self._nodes.get(node)
        if repository is None or target is None:
            return found
        for other in self._read_fleet().nodes:
            client = self._nodes.get(other.name)
            if other.name == node or client is None or not other.takes_orders:
                continue
            is_there = other.sleep in RESERVES if asleep else other.healthy
            if not is_there or not reaches(target.section.endpoint, client.section.endpoint):
                continue
            named = [
                held
                for held in other.residencies.values()
                if repository_of(held.status.source or held.model_id) == repository
            ]
            reasons = {held.status.reason_code for held in named if is_path(held.status.source or "")}
            reasons.discard(FilesDamaged.code)
            has_copy = other.name in also or any(held.status.disk_bytes for held in named)
            if reasons and (has_copy or reasons != {SourceNotFound.code}):
                found.at_paths.append(other.name)
            elif reasons:
                found.missing.append(other.name)
            elif has_copy:
                found.copies.append(other.name)
        return found

    def _named(self, node: str, model: str, source: str | None, also: Collection[str] = ()) -> tuple[Neighbour, ...]:
        repository = self._repository(model, source)
        if not self.is_on or repository is None:
            return ()
        found = []
        for name in self._found(node, repository, also).in_turn():
            try:
                found.append(self._nodes[name].as_neighbour(repository))
            except OSError as error:
                log.warning("%s is left out as a source of files: %s", name, error)
        return tuple(found)

    def _repository(self, model: str, source: str | None) -> str | None:
        """The model's repository: from the order, from a node that knows it, or from its name."""
        return repository_of(source or _known_source(self._read_fleet(), model) or model)

    def _source(self, node: str, request: LoadRequest | FilesRequest) -> str | None:
        """That of the order, or the path, or copy of one, of another node's model that `node` does not know."""
        fleet = self._read_fleet()
        known = _known_source(fleet, request.model_id)
        target = fleet.node(node)
        if request.source is not None or known is None or not (is_path(known) or is_of_path(known)):
            return request.source
        return request.source if target is None or request.model_id in target.residencies else known


def _known_source(fleet: Fleet, model: str) -> str | None:
    """The source that the first node with this model reports."""
    held = (node.residencies.get(model) for node in fleet.nodes)
    return next((each.status.source for each in held if each is not None and each.status.source), None)


def reaches(endpoint: str, other: str) -> bool:
    """Whether a node at `endpoint` can use the address of another one: a loopback address is for the same host only."""
    return _is_loopback(endpoint) or not _is_loopback(other)


def _is_loopback(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
