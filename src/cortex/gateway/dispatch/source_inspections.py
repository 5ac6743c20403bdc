"""Asks nodes about models of the catalogue before any load: those whose `source` is a path, and those whose files they
list, under whatever id.

The node then lists the model with its size under the catalogue's options, or with the reason why it cannot be loaded
there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator

from cortex.fleet.catalogue import ModelSpec
from cortex.fleet.topology import ModelOnNode, Node
from cortex.gateway.dispatch.fleet_state import FleetState
from cortex.gateway.dispatch.model_jobs import Effects
from cortex.wire.errors import CortexError, LoadFailed, SourceNotAllowed, SourceNotFound
from cortex.wire.node.load_options import is_path
from cortex.wire.node.orders import LoadRequest
from cortex.wire.node.protocol import ModelState, ModelStatus

log = logging.getLogger(__name__)


class SourceInspections:
    """Owned by the dispatcher; every method runs inside one of its events. A node that rejects the request gets it
    once."""

    def __init__(self, fleet_state: FleetState, effects: Effects, clock: Callable[[], float]) -> None:
        self._fleet_state = fleet_state
        self._effects = effects
        self._clock = clock
        self._asked: dict[str, set[str]] = {}
        """The models that each node was asked to inspect since it came up or the catalogue changed."""
        self._listed: dict[str, set[str]] = {}
        """The inspected models that it lists. A restarted node lists only those that it finds itself."""
        self._uptimes_s: dict[str, float] = {}
        """At the latest report of each node."""
        self._busy: set[str] = set()
        """The nodes with responses due."""

    def ask(self, name: str, uptime_s: float) -> None:
        """Ask a node that is up to inspect the models that it was not asked to since its start, or no longer lists."""
        if uptime_s < self._uptimes_s.get(name, 0.0):
            self.forget(name)
        self._uptimes_s[name] = uptime_s
        node = self._fleet_state.reported(name)
        if not self._fleet_state.settings.catalogue.models or name in self._busy or not node.takes_orders:
            return
        asked = self._asked.setdefault(name, set())
        known = node.residencies.keys() | {member.id for member in node.members}
        asked -= self._listed.setdefault(name, set()) - known
        requests = tuple(self._requests(node, asked))
        if requests:
            self._busy.add(name)
            asked.update(request.model_id for request in requests)
            self._effects.inspect(name, requests)

    def responded(self, target: ModelOnNode, source: str, result: ModelStatus | CortexError) -> None:
        """The node responded for one model, which was at `source` at the request."""
        catalogue = self._fleet_state.settings.catalogue
        spec = catalogue.spec(target.model)
        if not catalogue.has(target.model) or (is_path(source) and not is_path(spec.source or "")):  # no longer
            self._effects.forget(target.node, target.model)
        elif (spec.source or "") != source:
            pass  # the node will get a request for the new one
        elif isinstance(result, ModelStatus):
            self._listed.setdefault(target.node, set()).add(target.model)
            self._fleet_state.rejected_sources.pop(target, None)
            self._fleet_state.update_model(target.node, result, self._clock())
        elif isinstance(result, LoadFailed):
            log.warning("%s cannot be loaded on %s: %s", target.model, target.node, result.message)
            if not is_path(source) or not isinstance(result, SourceNotAllowed | SourceNotFound):
                return  # other reasons pass: loads are tried, and fail with theirs
            self._fleet_state.rejected_sources[target] = ModelStatus(
                id=target.model,
                state=ModelState.COLD,
                source=spec.source,
                reason=result.message,
                reason_code=SourceNotFound.code,
            )
        elif result.status >= 500:  # it shuts down, or cannot be reached
            self._asked.get(target.node, set()).discard(target.model)

    def ended(self, node: str) -> None:
        """The node responded about all models, or is no longer waited for."""
        self._busy.discard(node)

    def forget(self, node: str) -> None:
        """Ask the node again, once it has responded about all: it went down, or the catalogue has changed."""
        self._asked.pop(node, None)
        self._listed.pop(node, None)
        self._fleet_state.rejected_sources.drop_node(node)

    def _requests(self, node: Node, asked: Container[str]) -> Iterator[LoadRequest]:
        """The inspections of models that are not in `asked`. A model that the node lists is inspected when cold, also
        without options: the node may still have earlier ones."""
        catalogue = self._fleet_state.settings.catalogue
        for spec in catalogue.named_by_path:
            if spec.id not in asked and _is_possible(spec, node):
                yield spec.load_request
        files = catalogue.named_by_files
        found: dict[str, ModelSpec] = {}
        for model, held in node.residencies.items():  # not all models of the catalogue: this runs at every poll
            for spec in (*files.get(model, ()), *files.get(held.status.source or "", ())) if files else ():
                if spec.num_nodes == 1 and spec.id not in asked and spec.id not in node.residencies:
                    found[spec.id] = spec
            if model in asked or held.state not in (ModelState.COLD, ModelState.FAILED) or not catalogue.has(model):
                continue
            spec = catalogue.spec(model)
            if spec.num_nodes == 1 and not is_path(spec.source or "") and _is_possible(spec, node):
                is_of_entry = spec.source not in (None, model)  # no request loads it in another form
                yield spec.load_request if is_of_entry else spec.sized_by_node
        yield from (spec.load_request for spec in found.values() if _is_possible(spec, node))


def _is_possible(spec: ModelSpec, node: Node) -> bool:
    nodes = spec.node_names or spec.only_on
    return (spec.harness is None or spec.harness in node.harnesses) and (not nodes or node.name in nodes)
