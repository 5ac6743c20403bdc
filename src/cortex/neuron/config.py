"""The configuration of a node: the types of `neuron.toml`.

Every field has a default that works on one machine. The reference page and the example file are generated from these
types. Environment variables override the file: `NEURON_KEY`, `NEURON_SECTION__KEY`, such as `NEURON_LIMITS__MAX_QUEUE`.
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


Harness = Literal["torch", "candle"]
HARNESSES: tuple[Harness, ...] = ("torch", "candle")
"""The names of the built-in engine, which is the only one; `candle` is its old name."""


class HarnessEntry(Section, frozen=True):
    """Has no effect: every node runs models with the built-in engine."""

    name: Harness = "torch"
    """`torch` or its old name `candle`."""


class TorchHarness(Section, frozen=True):
    """The built-in engine."""

    hf_cache: Path | None = None
    """The directory of hub models. Absent: `HF_HUB_CACHE`, then `$HF_HOME/hub`, then `~/.cache/huggingface/hub`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type that models compute with; `auto` is the fastest one of the device."""


class HarnessSettings(Section, frozen=True):
    """Settings of the engine, under its name."""

    torch: TorchHarness = TorchHarness()


class Limits(Section, frozen=True):
    """How much of the machine requests may use."""

    renamed: ClassVar = {"parked_mb": "sleep_mb"}

    prefill_chunk_tokens: Count | None = None
    """Maximum prompt tokens in one step; a smaller value keeps running streams smoother. Absent: by device."""
    max_prompt_tokens: Count | None = None
    """Longer prompts are rejected like those over the context, even if the model accepts them."""
    min_free_vram_mb: Megabytes = 256
    """Device memory that is always kept free."""
    sleep_mb: Megabytes | None = None
    """Host memory for the weights of sleeping models; over it, the least recently used one is unloaded. 0: no sleep.
    Absent: half of the host's free memory on a node with GPUs, 0 on a node without, where sleep frees nothing."""
    max_num_seqs: Count = 256
    """Maximum requests that one model runs at once."""
    max_queue: Annotated[int, Meta(ge=0)] = 512
    """Maximum requests that wait for one model; the next one is rejected with 503 and an estimated `Retry-After`."""
    step_timeout_s: Seconds = 120.0
    """A device that has work and completes no step for this long is treated as faulted."""
    load_timeout_s: Seconds = 300.0
    """A load without progress for this long fails, and its worker is replaced."""


class ModelEntry(Section, frozen=True):
    """A model that this node serves; models in the hub cache need no entry."""

    id: str
    """The model's name in requests."""
    source: str | None = None
    """Hub id, directory or GGUF file; the id itself when absent."""
    harness: Harness = "torch"
    """`torch`, the built-in engine, or its old name `candle`."""
    quant: str | None = None
    """Which of a repository's GGUF files to take, in any spelling (`Q4_K_M`, `q6k`, `q8`). A repository without any is
    quantised at load on a GPU: `q4_k`, `q5_k`, `q6_k` or `q8_0`."""
    context_tokens: Count | None = None
    """Maximum sequence length; the model's own limit when absent."""
    memory_mb: Count | None = None
    """Maximum memory of weights and KV cache. Absent: the weights and a cache for a few full contexts."""
    devices: tuple[int, ...] = ()
    """Indices of the devices it may use; the node chooses when absent."""


class DefaultModel(Section, frozen=True):
    """A model that is loaded at start, in the background, in the order of the file."""

    model_id: str
    source: str | None = None
    """Hub id, directory or GGUF file; the id itself when absent."""
    harness: Harness = "torch"
    """`torch`, the built-in engine, or its old name `candle`."""
    quant: str | None = None
    """Which of a repository's GGUF files to take, in any spelling (`Q4_K_M`, `q6k`, `q8`). A repository without any is
    quantised at load on a GPU: `q4_k`, `q5_k`, `q6_k` or `q8_0`."""
    tensor_parallel: Count = 1
    """Number of devices that the model is spread over."""
    devices: tuple[int, ...] = ()
    """Indices of the devices it may use; the node chooses when absent."""
    context_tokens: Count | None = None
    """Maximum sequence length; the model's own limit when absent."""
    memory_mb: Count | None = None
    """Maximum memory of weights and KV cache. Absent: the weights and a cache for a few full contexts."""


class NeuronConfig(Section, frozen=True):
    """`neuron.toml`."""

    listen: Listen = Listen("0.0.0.0:13131")
    """Address of the node's API."""
    port: Port | None = None
    """Overrides the port of `listen`."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long running responses may take to end after SIGTERM, and by default before an unload."""
    keepalive_s: Seconds = 2.0
    """Interval of keepalives to a waiting streaming client, during queueing, load and prefill."""
    max_body_mb: Count = 64
    """Larger request bodies are rejected with 413."""
    strip_billing_header: bool = True
    """Remove the per-request `x-anthropic-billing-header` system block, which defeats prefix caching.
    Applies to clients that connect to this node directly; a gateway decides for its own clients."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""
    log_format: Literal["text", "json"] = "text"
    """`json` for log collectors."""
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
                raise ValueError(f"`{twice[0]}` is listed twice in [[{name}]]; remove one entry")

    @property
    def address(self) -> Listen:
        """`listen` with `port` applied."""
        if self.port is None:
            return self.listen
        host = f"[{self.listen.host}]" if ":" in self.listen.host else self.listen.host
        return Listen(f"{host}:{self.port}")


def load(path: Path | None, env: Mapping[str, str] = os.environ) -> NeuronConfig:
    """Reads `path`, or the defaults without one, and applies the environment. Raises SettingsError."""
    return settings.load(NeuronConfig, path, env_prefix="NEURON_", env=env)
