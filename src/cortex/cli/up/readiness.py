"""From two started programs to models that answer: what `cortex up` watches and shows meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console

from cortex.cli.client import GatewayClient, GatewayRejected, GatewayUnreachable
from cortex.cli.failures import CommandError
from cortex.cli.load_view import LoadView
from cortex.cli.up.plan import UpPlan
from cortex.cli.up.sources import ModelSource
from cortex.cli.up.supervisor import ProcessSupervisor
from cortex.wire.node import Health, ModelState, ModelStatus

ANSWER_WITHIN_S = 60.0
"""Both programs bind their port before anything slow; silence for this long is a fault."""


def wait_until_loaded(console: Console, plan: UpPlan, supervisor: ProcessSupervisor) -> bool:
    """True once every model answers or has failed (at least one answers); False when asked to stop.

    Raises `CommandError` when none can be loaded or a program stays silent, `ChildDied` when one ends.
    """
    neuron, gateway = (
        GatewayClient(plan.neuron_url, None, 2.0),
        GatewayClient(plan.url, os.environ.get("CORTEX_API_KEY"), 2.0),
    )
    silent_until = time.monotonic() + ANSWER_WITHIN_S
    with LoadView(console) as view:
        view.starting(model.id for model in plan.models)
        while supervisor.wait(0.1):
            statuses = look_at(neuron, plan.models)
            for status in statuses:
                view.update(status)
            failed = [status for status in statuses if status.state is ModelState.FAILED]
            if len(failed) == len(plan.models):
                raise load_failure(failed)
            answering = loaded_models(gateway, statuses)
            if answering is not None:
                silent_until = time.monotonic() + ANSWER_WITHIN_S
                if len(answering) + len(failed) >= len(plan.models):
                    break
            if time.monotonic() > silent_until:
                raise CommandError(
                    f"gateway or neuron did not answer within {ANSWER_WITHIN_S:g} s", f"see the logs in {plan.folder}"
                )
    if supervisor.stopping:
        return False
    for status in failed:
        console.print(f"[yellow]{status.id} is not available:[/yellow] {reason_of(status)}")
    return True


def look_at(neuron: GatewayClient, models: Sequence[ModelSource]) -> list[ModelStatus]:
    """What the node says of the models asked for; empty until it answers."""
    try:
        health = msgspec.convert(neuron.get("/health"), Health)
    except GatewayUnreachable:
        return []
    wanted = {model.id for model in models}
    return [status for status in health.models if status.id in wanted]


def loaded_models(gateway: GatewayClient, statuses: Sequence[ModelStatus]) -> set[str] | None:
    """Which of the models clients can use through the gateway now; None until it answers."""
    try:
        listed = gateway.get("/v1/models")["data"]
    except GatewayUnreachable:
        return None
    except GatewayRejected:  # it wants a key we were not given, so the node's word must do
        return {status.id for status in statuses if status.state is ModelState.READY}
    loaded = {entry["id"] for entry in listed if entry.get("loaded")}
    return loaded & {status.id for status in statuses}


def load_failure(failed: Sequence[ModelStatus]) -> CommandError:
    told = "; ".join(f"{status.id} could not be loaded: {reason_of(status)}" for status in failed)
    return CommandError(told.rstrip("."), "choose another model or fix this one, then start again")


def reason_of(status: ModelStatus) -> str:
    """The node's own words, without the name that already stands before them."""
    return (status.reason or "no reason given").removeprefix(f"{status.id}: ")
