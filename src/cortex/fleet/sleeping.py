"""Sleeping nodes: when to suspend one, when to wake it, and what happens if it does not come back. Pure.

A node that can be woken is suspended once it has been idle for a while, has nothing pinned, and enough others stay
awake. It still counts as capacity: a request that no awake node can serve wakes it. A node that does not come back in
time is lost and does not count until it responds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cortex.fleet.topology import Fleet, Node, Sleep
from cortex.settings import Section
from cortex.wire.words import duration

_MAC = re.compile(r"(?:[0-9A-Fa-f]{2}[:-]){5}[0-9A-Fa-f]{2}")
_FIRST_WAKE_S = 60.0
"""Expected duration of a wake before one was observed."""
_SETTLE_S = 30.0
"""A node may still respond for this long after its suspension was ordered."""
_RESEND_S = 10.0
_LEARNED = 0.3
"""Weight of the latest wake in the expected duration."""


class WakeRules(Section, frozen=True):
    """How a node is woken, and when it is suspended. Set one of `mac`, `ipmi_host` and `command`."""

    mac: str | None = None
    """The MAC address that gets a Wake-on-LAN packet, such as `0a:1b:2c:3d:4e:5f`."""
    broadcast: str = "255.255.255.255"
    """Where the packet is sent: the broadcast address of the node's network."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 9
    """The UDP port of the packet."""
    ipmi_host: str | None = None
    """The address of the node's BMC: it is switched on with `ipmitool`, over lanplus."""
    ipmi_user: str | None = None
    """The user at the BMC."""
    ipmi_password_env: str | None = None
    """The environment variable that holds the password at the BMC."""
    command: tuple[str, ...] = ()
    """A program with its arguments that wakes the node."""
    suspend_after_s: Annotated[float, Meta(ge=0)] = 1800.0
    """Suspend the node once it has been idle for this long; 0: never suspend it, only wake it."""
    timeout_s: Annotated[float, Meta(gt=0)] = 300.0
    """A woken node that does not respond within this time is reported as lost, and requests go elsewhere."""

    def __post_init__(self) -> None:
        ways = [each for each in (self.mac, self.ipmi_host, self.command) if each]
        if len(ways) != 1:
            raise ValueError("wake needs exactly one of mac, ipmi_host and command")
        if self.mac is not None and not _MAC.fullmatch(self.mac):
            raise ValueError(f"mac must look like `0a:1b:2c:3d:4e:5f`, got `{self.mac[:60]}`")


@dataclass(slots=True)
class _Node:
    rules: WakeRules
    state: Sleep = "awake"
    since: float = 0.0
    """When its state began."""
    idle_since: float | None = None
    """None while it is busy."""
    wake_s: float = _FIRST_WAKE_S
    """Expected duration of a wake, as learned."""
    sent_at: float = 0.0
    """When the last wake command was sent."""
    has_missed: bool = False
    """Whether it has stopped responding since its suspension was ordered."""
    is_suspended: bool = False
    """Whether this gateway suspended it; otherwise it is presumed asleep."""
    why_lost: str | None = None
    """Why the latest wake failed; None if there was no response in time."""


class SleepingNodes:
    """Owned by the dispatcher. Decides nothing about nodes without `WakeRules`."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def reconfigure(self, rules: Mapping[str, WakeRules]) -> None:
        """Set the nodes that may sleep."""
        known = self._nodes
        self._nodes = {name: known.get(name, _Node(each)) for name, each in rules.items()}
        for name, each in rules.items():
            self._nodes[name].rules = each

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def state(self, name: str) -> Sleep:
        node = self._nodes.get(name)
        return "awake" if node is None else node.state

    @property
    def away(self) -> frozenset[str]:
        """Nodes that get no requests or orders, regardless of their last reports."""
        return frozenset(name for name, node in self._nodes.items() if node.state != "awake")

    @property
    def reserves(self) -> frozenset[str]:
        """Nodes that could serve once they are awake."""
        return frozenset(name for name, node in self._nodes.items() if node.state in ("asleep", "waking"))

    def is_expected_down(self, name: str) -> bool:
        """Whether the node is expected not to respond."""
        return self.state(name) in ("suspending", "asleep", "waking")

    def problem(self, name: str, now: float) -> str | None:
        """Why a node that is away serves nothing, as text."""
        match self.state(name):
            case "asleep":
                wait = duration(self.expected_wait_s(name, now))
                known = "asleep" if self._nodes[name].is_suspended else "does not respond, and may be asleep"
                return f"{known}: a request that needs it wakes it, which takes about {wait}"
            case "waking":
                return f"waking up, which takes about {duration(self.expected_wait_s(name, now))}"
            case "suspending":
                return "going to sleep"
            case "lost":
                node = self._nodes[name]
                if node.why_lost is not None:
                    return f"could not be woken: {node.why_lost}"
                return f"did not come back within {duration(node.rules.timeout_s)} after it was woken"
        return None

    def expected_wait_s(self, name: str, now: float) -> float:
        """Expected time until a node that may sleep responds."""
        node = self._nodes[name]
        expected_s = min(node.wake_s, node.rules.timeout_s)
        return max(1.0, expected_s - (now - node.since if node.state == "waking" else 0.0))

    # --- what happens

    def due(self, fleet: Fleet, now: float) -> list[str]:
        """The nodes to suspend now, which count as suspending from then on. Called at every tick."""
        num_awake = sum(node.healthy and not node.draining and self.state(node.name) == "awake" for node in fleet.nodes)
        found = []
        for name, node in self._nodes.items():
            held = fleet.node(name)
            if held is None or node.state != "awake" or not held.healthy or not may_sleep(held, fleet):
                node.idle_since = None
                continue
            node.idle_since = now if node.idle_since is None else node.idle_since
            after_s = node.rules.suspend_after_s
            is_due = after_s > 0 and now - _last_use(held, node.idle_since) >= after_s
            is_spare = num_awake - (not held.draining) >= fleet.placement.min_awake
            if is_due and is_spare:
                num_awake -= not held.draining
                self._enter(name, "suspending", now)
                found.append(name)
        return found

    def suspend_ended(self, name: str, now: float, *, is_accepted: bool) -> None:
        """The node accepted or rejected the order to suspend itself."""
        if self.state(name) == "suspending":
            self._enter(name, "asleep" if is_accepted else "awake", now)
            self._nodes[name].is_suspended = is_accepted

    def went_down(self, name: str, now: float) -> bool:
        """The node has stopped responding, or never did: another gateway may have suspended it, or this one before a
        restart. Returns whether it counts as asleep from now on."""
        if name not in self._nodes or self.state(name) != "awake":
            return False
        self._enter(name, "asleep", now)
        self._nodes[name].has_missed, self._nodes[name].is_suspended = True, False
        return True

    def responded(self, name: str, now: float) -> Literal["woken", "not_suspended", "waits"] | None:
        """The node responded to a poll. Returns None if expected, and `waits` if it has not gone to sleep yet and its
        report must be ignored."""
        node = self._nodes.get(name)
        if node is None or node.state == "awake":
            return None
        if node.state == "suspending" or (
            node.state == "asleep" and not node.has_missed and now - node.since < _SETTLE_S
        ):
            return "waits"
        has_slept = node.has_missed or node.state != "asleep"
        if node.state == "waking":
            node.wake_s += _LEARNED * (now - node.since - node.wake_s)
        self._enter(name, "awake", now)
        return "woken" if has_slept else "not_suspended"

    def resent(self, now: float) -> list[str]:
        """The nodes that get another Wake-on-LAN packet now, because packets may be lost."""
        found = [
            name
            for name, node in self._nodes.items()
            if node.state == "waking" and node.rules.mac is not None and now - node.sent_at >= _RESEND_S
        ]
        for name in found:
            self._nodes[name].sent_at = now
        return found

    def missed(self, name: str) -> None:
        """The node did not respond to a poll."""
        if (node := self._nodes.get(name)) is not None and node.state in ("asleep", "waking"):
            node.has_missed = True

    def wake(self, name: str, now: float, *, again: bool = False) -> bool:
        """A request needs the node. Returns whether it must be woken now; False if a wake is already under way, or has
        failed and is not to be tried `again`."""
        if self.state(name) != "asleep" and not (again and self.state(name) == "lost"):
            return False
        has_missed = self._nodes[name].has_missed or self.state(name) == "lost"
        self._enter(name, "waking", now)
        self._nodes[name].has_missed, self._nodes[name].sent_at = has_missed, now
        return True

    def wake_failed(self, name: str, now: float, why: str) -> bool:
        """The wake failed, so the node is lost. Returns False if it has responded meanwhile."""
        if self.state(name) != "waking":
            return False
        self._enter(name, "lost", now)
        self._nodes[name].why_lost = why
        return True

    def rules(self, name: str) -> WakeRules:
        return self._nodes[name].rules

    def lost(self, now: float) -> list[str]:
        """The nodes that did not come back in time, each returned once."""
        late = [
            name
            for name, node in self._nodes.items()
            if node.state == "waking" and now - node.since >= node.rules.timeout_s
        ]
        for name in late:
            self._enter(name, "lost", now)
        return late

    def _enter(self, name: str, state: Sleep, now: float) -> None:
        node = self._nodes[name]
        node.state, node.since, node.idle_since, node.has_missed, node.why_lost = state, now, None, False, None


def may_sleep(node: Node, fleet: Fleet) -> bool:
    """Whether nothing runs, loads or is pinned on the node, and it is in no group of another."""
    pinned = any(
        held.pinned or fleet.catalogue.spec(held.model_id).is_pinned_on(node.name) for held in node.active
    ) or any(node.name in spec.pinned_on for spec in fleet.catalogue.pinned)
    return node.takes_orders and node.is_idle and not node.members and not pinned


def as_if_awake(fleet: Fleet, names: Iterable[str]) -> Fleet:
    """The fleet as if these nodes were awake, in the state of their last report."""
    nodes = [node for name in names if (node := fleet.node(name)) is not None and not node.drained]
    return fleet.with_nodes(
        [msgspec.structs.replace(node, healthy=True, draining=False, missed_polls=0, problem=None) for node in nodes]
    )


def _last_use(node: Node, idle_since: float) -> float:
    """When a model of the node was last used, by its report, but not before this gateway saw it idle."""
    used = max((held.last_used for held in node.active), default=idle_since)
    return max(used, idle_since)
