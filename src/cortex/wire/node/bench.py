"""A measurement of a model on a node: the order of it, its progress, and the result that the node keeps and reports."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cortex.wire.fields.body import MAX_MODEL_NAME

BenchState = Literal["running", "done", "failed", "cancelled"]


class StreamRate(msgspec.Struct, frozen=True, kw_only=True):
    """The speed of this many concurrent streams."""

    streams: int
    tokens_per_s: float
    """The sum over all streams."""
    share: float | None = None
    """The rate as a share of the memory limit: the time to read the bytes of a step, divided by the measured time.
    None: not known."""


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How fast a model is on its node, valid for one version, one form of the model and one set of devices."""

    measured_at: float
    """Unix time."""
    version: str
    streams: tuple[StreamRate, ...] = ()
    prompt_tokens: int = 0
    """The length of the prompt that was measured."""
    prompt_tokens_per_s: float = 0.0
    prompt_share: float | None = None
    """The rate as a share of the compute limit: the time for the operations of the prompt, divided by the measured
    time. None: not known."""
    load_s: float | None = None
    """A load from the files, which were read before; None: not measured."""
    wake_s: float | None = None
    """From asleep to ready; None: not measured, or the model does not sleep here."""
    bytes_per_s: float | None = None
    """Measured read rate of the model's devices together."""
    flops: float | None = None
    """Floating-point operations per second of them together, measured."""
    host_bytes_per_s: float | None = None
    """Measured read rate of host memory by the CPU."""
    bus_bytes_per_s: float | None = None
    """Measured copy rate from host memory to a device. Both rates predict the speed with weights in host memory."""
    notes: tuple[str, ...] = ()
    """Notes on what was not measured or was disturbed."""

    @property
    def stream_rate(self) -> float:
        """Tokens per second of one stream; 0: not measured."""
        return next((each.tokens_per_s for each in self.streams if each.streams == 1), 0.0)

    def token_s(self, streams: int) -> float | None:
        """Seconds per token of each of `streams` concurrent ones, between those that were measured; beyond the most
        that were, all together are as fast as these. None: nothing was measured."""
        known = [(each.streams, each.tokens_per_s) for each in self.streams if each.tokens_per_s > 0]
        if not known:
            return None
        streams = max(streams, known[0][0])
        for (low, low_rate), (high, high_rate) in pairwise(known):
            if streams < high:
                return streams / (low_rate + (streams - low) / (high - low) * (high_rate - low_rate))
        return streams / known[-1][1]


class BenchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /bench`: measure a model that is ready; `POST /bench/cancel`: stop that."""

    model_id: Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
    force: bool = False
    """Measure even while it, or another model on its devices, has requests, which lower the result."""
    reload: bool = True
    """Also measure its load and its wake, for which it leaves memory for a moment. Not while it has requests."""


class BenchStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /bench/{id}`: the latest measurement of a model since the node started."""

    model_id: str
    state: BenchState
    stage: str = ""
    """The current measurement."""
    result: BenchResult | None = None
    reason: str | None = None
    """Why it failed."""
    code: str | None = None
    """The error code of the failure."""
