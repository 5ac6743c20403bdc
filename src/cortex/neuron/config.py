"""What an operator may set on a node: the types of `neuron.toml`.

Every field has a default that works on one machine; the reference page and the example file are made
from these types. Environment: `NEURON_KEY`, `NEURON_SECTION__KEY`, such as `NEURON_LIMITS__MAX_QUEUE`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from cortex import settings
from cortex.settings import Listen, Section
from cortex.telemetry import TelemetrySection

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Megabytes = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]


class HarnessEntry(Section, frozen=True):
    """A way to run models that this node offers."""

    name: Literal["torch"] = "torch"


class TorchHarness(Section, frozen=True):
    """The native engine."""

    hf_cache: Path | None = None
    """Where hub models are kept. Absent: `HF_HUB_CACHE`, then `$HF_HOME/hub`, then `~/.cache/huggingface/hub`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Numbers the model computes with; `auto` takes what the device is fast at."""


class HarnessSettings(Section, frozen=True):
    """Settings of each harness, under its name."""

    torch: TorchHarness = TorchHarness()


class Limits(Section, frozen=True):
    """How much of the machine requests may use."""

    renamed: ClassVar = {"parked_mb": "sleep_mb"}

    prefill_chunk_tokens: Count | None = None
    """Prompt tokens in one step; smaller keeps running streams smoother. Absent: what suits the device."""
    max_prompt_tokens: Count | None = None
    """Longer prompts are refused with 413 even where the model would take them."""
    min_free_vram_mb: Megabytes = 256
    """Device memory that stays free whatever happens."""
    sleep_mb: Megabytes | None = None
    """Host memory for the weights of sleeping models; over it, the one unused for longest is unloaded. 0: none sleeps.
    Absent: half of what the host has left on a node with GPUs, 0 on one without, where sleep gains nothing."""
    max_num_seqs: Count = 256
    """Requests that one model works on at once."""
    max_queue: Annotated[int, Meta(ge=0)] = 512
    """Requests that may wait for one model; the next one is refused with 503 and an honest `Retry-After`."""
    step_timeout_s: Seconds = 120.0
    """A device with work that makes no step for this long is treated as faulted."""
    load_timeout_s: Seconds = 300.0
    """A load that makes no progress for this long is given up, and its worker with it."""


class ModelEntry(Section, frozen=True):
    """A model this node can be asked for; models in the hub cache need no entry."""

    id: str
    """The name clients use."""
    source: str | None = None
    """Hub id, directory or GGUF file; the id itself when absent."""
    harness: Literal["torch"] = "torch"
    quant: str | None = None
    """Which of a repository's GGUF files to take, such as `Q4_K_M`; nothing is quantised at load."""
    context_tokens: Count | None = None
    """Longest sequence to offer; the model's own limit when absent."""
    memory_mb: Count | None = None
    """Ceiling for weights and cache together. Absent: the weights and a cache for a few full contexts."""
    devices: tuple[int, ...] = ()
    """Device indices it may use; the node picks when absent."""


class DefaultModel(Section, frozen=True):
    """A model loaded at start, in the background, in the order of the file."""

    model_id: str
    source: str | None = None
    """Hub id, directory or GGUF file; the id itself when absent."""
    harness: Literal["torch"] = "torch"
    quant: str | None = None
    """Which of a repository's GGUF files to take, such as `Q4_K_M`; nothing is quantised at load."""
    tensor_parallel: Count = 1
    """Devices the model is spread over."""
    devices: tuple[int, ...] = ()
    """Device indices it may use; the node picks when absent."""
    context_tokens: Count | None = None
    """Longest sequence to offer; the model's own limit when absent."""
    memory_mb: Count | None = None
    """Ceiling for weights and cache together. Absent: the weights and a cache for a few full contexts."""


class NeuronConfig(Section, frozen=True):
    """`neuron.toml`."""

    listen: Listen = Listen("0.0.0.0:13131")
    """Address of the node's API."""
    port: Port | None = None
    """Shorthand: the port of `listen`."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long running answers may take to end after SIGTERM, and by default before an unload."""
    keepalive_s: Seconds = 2.0
    """A streaming client that waits hears something at least this often, through queue, load and prompt."""
    max_body_mb: Count = 64
    """Larger request bodies are refused with 413."""
    strip_billing_header: bool = True
    """Remove the per-request `x-anthropic-billing-header` system block, which defeats prefix caching.
    For clients that come straight to this node; a gateway decides for those that go through it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json` for collectors."""
    telemetry: TelemetrySection = TelemetrySection()
    harnesses: tuple[HarnessEntry, ...] = (HarnessEntry(),)
    harness: HarnessSettings = HarnessSettings()
    limits: Limits = Limits()
    models: tuple[ModelEntry, ...] = ()
    default_models: tuple[DefaultModel, ...] = ()

    def __post_init__(self) -> None:
        for name, ids in (
            ("models", [entry.id for entry in self.models]),
            ("default_models", [entry.model_id for entry in self.default_models]),
        ):
            if twice := sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
                raise ValueError(f"`{twice[0]}` is listed twice in [[{name}]]; remove one of them")

    @property
    def address(self) -> Listen:
        """Where to listen, `port` included."""
        if self.port is None:
            return self.listen
        host = f"[{self.listen.host}]" if ":" in self.listen.host else self.listen.host
        return Listen(f"{host}:{self.port}")


def load(path: Path | None, env: Mapping[str, str] = os.environ) -> NeuronConfig:
    """`neuron.toml` at `path`, or the defaults, under the environment's overrides. Raises SettingsError."""
    return settings.load(NeuronConfig, path, env_prefix="NEURON_", env=env)
