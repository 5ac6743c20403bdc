"""Services that all requests of a gateway share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cortex.fleet.idle_caps import IdleCaps
from cortex.gateway.config import GatewaySection
from cortex.gateway.dispatch.dispatcher import Dispatcher
from cortex.gateway.dispatch.nodes.client import NodeClient
from cortex.gateway.metrics import Metrics
from cortex.gateway.pictures import PictureInlining
from cortex.gateway.proxy.accounting.activity import ActivityLog
from cortex.gateway.proxy.accounting.running import RunningRequests
from cortex.gateway.proxy.admission import AdmissionController
from cortex.http.limits import Buffered
from cortex.http.ticker import Ticker
from cortex.parsing.parser import BodyParser
from cortex.system.tasks import OwnedTasks
from cortex.telemetry.spans import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits that are not settings and equal for all gateways."""

    whole_silence_s: float = 3600.0
    """Minimum time limit of a whole response: nodes send nothing until it is complete."""
    max_held_s: float = 5.0
    """How long the end of a response is held back until the response is stored."""


@dataclass(slots=True)
class Services:
    """One per gateway. A reload replaces `config` while requests run."""

    config: GatewaySection
    admission: AdmissionController
    dispatcher: Dispatcher
    nodes: Mapping[str, NodeClient]
    metrics: Metrics
    tracer: Tracer
    ticker: Ticker
    settling: OwnedTasks
    """Each fetches from its node the usage of a response that was cut off."""
    activity: ActivityLog
    running: RunningRequests
    parser: BodyParser
    pictures: PictureInlining
    buffered: Buffered
    """Request bytes in memory, of clients and background runs."""
    idle_caps: IdleCaps
    """How many lines of batches each node may run; interactive requests report how fast they were served."""
    limits: RequestLimits
    clock: Callable[[], float]
    """Not the loop's, which counts whole milliseconds and stands still during a turn: a request takes less."""
