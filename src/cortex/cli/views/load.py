"""A model's state, progress and memory in words."""

from __future__ import annotations

from cortex.cli.fleet_view import without_name
from cortex.cli.output import size
from cortex.cli.views.jobs import ProgressView
from cortex.wire.node.protocol import ModelState, ModelStatus
from cortex.wire.words import duration, replicas_in_words


def fraction_done(status: ModelStatus) -> float | None:
    """Progress of the present stage, 0 to 1; None when it is unknown."""
    progress = status.progress
    if progress is None or progress.total_bytes <= 0:
        return None
    return min(1.0, progress.done_bytes / progress.total_bytes)


def describe(status: ModelStatus) -> str:
    """State and progress: `loading: read 42%, 3 s left`, or `ready: 2 replicas on devices 0, 1`."""
    text = str(status.state)
    if status.state is ModelState.READY and (replicas := replicas_in_words(status.replica_devices)):
        text += f": {replicas}"
    if status.progress is not None and status.state in (ModelState.LOADING, ModelState.DOWNLOADING):
        text += f": {status.progress.finest_stage}"
        if (fraction := fraction_done(status)) is not None:
            text += f" {fraction:.0%}"
        if status.progress.eta_s is not None:
            text += f", {duration(status.progress.eta_s)} left"
    return text


def reason_of(status: ModelStatus) -> str:
    """The node's reason for a failure, without the model's id in front of it."""
    return without_name(status.id, status.reason or "the node gave no reason")


def memory_of(status: ModelStatus) -> str:
    """`23.6 GiB`, `~23.6 GiB` for an estimate, or the host memory of a model asleep; `22.1 GiB + 40.0 GiB in RAM` where
    a part of the weights is there."""
    if status.state is ModelState.ASLEEP:
        return f"{size(status.host_bytes)} in RAM"
    if status.measured_bytes is not None:
        return size(status.measured_bytes) + (f" + {size(status.host_bytes)} in RAM" if status.host_bytes else "")
    return f"~{size(status.estimate_bytes)}" if status.estimate_bytes is not None else ""


def context_of(status: ModelStatus) -> str:
    """`131,072`, or `4,480 of 131,072` where memory limits it."""
    tokens, full_tokens = status.context_tokens, status.full_context_tokens
    if not tokens:
        return ""
    return f"{tokens:,} of {full_tokens:,}" if full_tokens is not None and tokens < full_tokens else f"{tokens:,}"


def show(view: ProgressView, status: ModelStatus) -> None:
    stage = f" ({status.progress.finest_stage})" if status.progress else ""
    view.update(status.id, describe(status), fraction_done(status), f"{status.state}{stage}")
