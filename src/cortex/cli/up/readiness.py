"""Waiting for the models of `cortex up` to be ready, with their progress on the terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.client import GatewayClient, GatewayRejected, GatewayUnreachable, exit_code_for
from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.up.plan import UpPlan
from cortex.cli.up.sources import ModelSource
from cortex.cli.up.supervisor import ProcessSupervisor
from cortex.cli.views.load import reason_of, show
from cortex.cli.views.progress import ProgressView
from cortex.fleet.known_models import known_repository
from cortex.tls import own_context
from cortex.wire.error_codes import BY_CODE
from cortex.wire.node.protocol import Capabilities, Health, ModelState, ModelStatus

RESPONSE_TIMEOUT_S = 300.0
"""Both programs bind their port before any slow work, so no response for this long is a fault."""


def wait_until_loaded(console: Console, plan: UpPlan, supervisor: ProcessSupervisor) -> list[str]:
    """The models that are ready, in the order of the plan, once each is ready or has failed. Empty when a signal ends
    the wait.

    Raises `CommandError` when no model can be loaded or a program does not respond, `ChildDied` when a program ends.
    """
    tls = own_context(plan.tls_cert) if plan.tls_cert is not None else None
    neuron, gateway = (
        GatewayClient(plan.neuron_url, plan.node_key, 2.0),
        GatewayClient(plan.url, os.environ.get("CORTEX_API_KEY"), 2.0, tls=tls),
    )
    response_deadline = time.monotonic() + RESPONSE_TIMEOUT_S
    with ProgressView(console, [model.id for model in plan.models]) as view:
        while supervisor.wait(0.1):
            statuses = statuses_of(neuron, plan.models)
            for status in statuses:
                show(view, status)
            failed = [status for status in statuses if status.state is ModelState.FAILED]
            if len(failed) == len(plan.models):
                raise load_failure(failed)
            usable = loaded_models(gateway, statuses)
            if usable is not None:
                response_deadline = time.monotonic() + RESPONSE_TIMEOUT_S
                if len(usable) + len(failed) >= len(plan.models):
                    break
            if time.monotonic() > response_deadline:
                raise CommandError(
                    f"gateway or neuron did not respond within {RESPONSE_TIMEOUT_S:g} s",
                    f"see the logs in {plan.folder}",
                )
    if supervisor.stopping:
        return []
    for status in failed:
        console.print(
            Text.assemble((f"{status.id} is not available:", "yellow"), f" {reason_of(status)}"), soft_wrap=True
        )
    return [model.id for model in plan.models if model.id not in {status.id for status in failed}]


def statuses_of(neuron: GatewayClient, models: Sequence[ModelSource]) -> list[ModelStatus]:
    """The node's status of the requested models; empty until it responds."""
    try:
        health = msgspec.convert(neuron.get("/health"), Health)
    except GatewayUnreachable:
        return []
    wanted = {model.id for model in models}
    return [status for status in health.models if status.id in wanted]


def capabilities_of(plan: UpPlan, model_id: str) -> Capabilities:
    """What a model that is ready can do, as the node reports it."""
    statuses = statuses_of(GatewayClient(plan.neuron_url, plan.node_key, 2.0), plan.models)
    return next((status.capabilities for status in statuses if status.id == model_id), Capabilities())


def loaded_models(gateway: GatewayClient, statuses: Sequence[ModelStatus]) -> set[str] | None:
    """The models that clients can use through the gateway now; None until it responds."""
    try:
        listed = gateway.get("/v1/models")["data"]
    except GatewayUnreachable:
        return None
    except GatewayRejected:  # it requires a key that we do not have: rely on the node's report
        return {status.id for status in statuses if status.state is ModelState.READY}
    loaded = {entry["id"] for entry in listed if entry.get("loaded")}
    return loaded & {status.id for status in statuses}


def load_failure(failed: Sequence[ModelStatus]) -> CommandError:
    reasons = "; ".join(f"{status.id} could not be loaded: {reason_of(status)}" for status in failed)
    codes = {status.reason_code or "" for status in failed}
    kinds = {exit_code_for(BY_CODE[code].status, code) if code in BY_CODE else ExitCode.FAILED for code in codes}
    exit_code = kinds.pop() if len(kinds) == 1 else ExitCode.FAILED
    missing = [status.id for status in failed if status.reason_code == "source_not_found"]
    meant = [name for each in missing if (name := known_repository(each.rpartition("/")[2])) not in (None, each)]
    remedy = f"did you mean {' and '.join(map(str, meant))}?" if meant else "start again once this is fixed"
    return CommandError(reasons.rstrip("."), remedy, exit_code)
