"""Reports of a node: the JSON of `/discovery`, `/health`, `/models` and `/events`.

The neuron encodes these, the gateway and the command line decode them. Sizes are bytes.
Unknown fields are ignored, so that nodes of different versions can share a fleet.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from cortex.wire.node.bench import BenchResult
from cortex.wire.node.contexts import ContextSizes
from cortex.wire.node.host_splits import HostSplits
from cortex.wire.node.load_options import Count, SamplingDefaults

DeviceKind = Literal["cuda", "rocm", "cpu"]
"""`rocm`: an AMD card, for harnesses only."""


class NodeValue(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of the values that nodes send and receive."""


class ModelState(StrEnum):
    COLD = "cold"
    """Known to the node, but not in memory."""
    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    """Its weights are in host memory, and nothing is on a device. Waking is much faster than loading from disk."""
    UNLOADING = "unloading"
    RECOVERING = "recovering"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    """Reported by a gateway only: the node is down."""
    SUSPENDED = "suspended"
    """Reported by a gateway only: the node sleeps, and is woken when the model is needed."""


class Device(NodeValue, frozen=True):
    """A device of the host, whether or not a worker runs on it."""

    index: int
    kind: DeviceKind
    name: str
    total_bytes: int
    compute_capability: str | None = None
    uuid: str | None = None


class Discovery(NodeValue, frozen=True):
    host: str
    os: str
    version: str
    devices: tuple[Device, ...]
    kernel: str | None = None
    """The release of the operating system's kernel."""
    driver: str | None = None
    cuda_version: str | None = None
    """The latest CUDA version that the driver supports."""
    driver_problem: str | None = None
    """Why no GPU is used if one may be present, such as a driver/library mismatch."""
    max_devices_per_model: Count = 1
    """The most devices that one model may span on this node."""
    can_sleep: bool = True
    """Whether it keeps the weights of unloaded models in host memory; nodes without a GPU do not by default."""
    harnesses: tuple[str, ...] = ("torch",)
    dialects: tuple[str, ...] = ()
    """Gateways of other versions may not know all of them."""
    group_harnesses: tuple[str, ...] = ()
    """Harnesses that can run a model on several nodes; empty without a `cluster_address`."""


class Fallback(NodeValue, frozen=True):
    """A missing private interface of a library, for which the node uses a fallback."""

    name: str
    reason: str
    """The reason, and the fallback."""


class DeviceHealth(NodeValue, frozen=True):
    index: int
    total_bytes: int
    free_bytes: int
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    watts: float | None = None
    """Power draw, if readable; for a CPU that of its packages."""
    worker: Literal["none", "starting", "running", "faulted"] = "none"
    kept_free_bytes: int = 0
    """Memory that every load leaves free, for the operator's reserve, activations and library buffers."""
    kept_free_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of the free memory that a load leaves free in addition."""
    kv_host_bytes: int = 0
    """Host memory of KV pages that are not on the device, whose continuations are not recomputed."""
    ceiling_bytes: int | None = None
    """The configured ceiling for models there; absent: none."""
    extra_replica_bytes: int = 0
    """The part of `free_bytes` that extra replicas hold, which give way to every load."""
    fallbacks: tuple[Fallback, ...] = ()
    """Fallbacks of its worker, which are slower; empty before the first load."""


class Progress(NodeValue, frozen=True):
    stage: str
    """`resolve`, `download`, `read`, `place` or `warm`."""
    substage: str | None = None
    """A named part of the stage: `compile` in `place`. Other strings may be added later."""
    done_bytes: int = 0
    total_bytes: int = 0
    eta_s: float | None = None
    waits_for: str | None = None
    """What a paused load waits for."""

    @property
    def finest_stage(self) -> str:
        """The stage to show to users."""
        return self.waits_for or self.substage or self.stage


class StoredForm(NodeValue, frozen=True):
    """The form of a model's files."""

    file_format: Literal["gguf", "safetensors"]
    dtype: str
    """The format of most of its weights, as the files name it: `BF16`, `Q4_K`, …"""
    num_parameters: int | None = None
    """The number of parameters. Absent for a model that is divided among devices."""


class ModelLoad(NodeValue, frozen=True):
    """Load of a resident model, as its engine reports it."""

    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0
    tokens_per_s: float = 0.0
    """Completion tokens of all requests, without the first of each, over the last few seconds in which one came."""
    fetched_tokens_per_s: float | None = None
    """Rate of KV from other nodes; absent if none arrived."""
    waiting_by_class: dict[str, int] = {}
    """Requests waiting for a slot, by class; only classes with any."""


class Capabilities(NodeValue, frozen=True):
    chat: bool = True
    tools: bool = False
    reasoning: bool = False
    vision: bool = False
    embeddings: bool = False
    insert: bool = False
    """Whether it fills in text between a prefix and a suffix."""
    rerank: bool = False
    notes: tuple[str, ...] = ()


class HostKV(NodeValue, frozen=True):
    """KV pages and states of one model that its node keeps in host memory or on disk, whether the model is loaded or
    not."""

    num_bytes: int
    """In host memory."""
    num_tokens: int = 0
    """Tokens in these pages; 0 if unknown, because it, or a rank of it, has only states."""
    tokens_per_s: float | None = None
    """Average rate at which they return to the device; absent if none did yet."""


class QuantisedSize(NodeValue, frozen=True):
    """The size of a model with dense weights if quantised at load."""

    quant: str
    estimate_bytes: int
    least_bytes: int
    contexts: ContextSizes | None = None


class ModelStatus(NodeValue, frozen=True):
    """One model on one node."""

    id: str
    state: ModelState
    devices: tuple[int, ...] = ()
    allowed_devices: tuple[int, ...] = ()
    """The devices that its entry in `neuron.toml` permits; empty: all."""
    num_devices: Count = 1
    """Number of devices that it takes on this node, as configured: divided among them, or with a replica on each."""
    replicas: Count = 1
    """Number of replicas that are or will be loaded there. Includes extra replicas, which depend on demand; `devices`
    and all sizes do not, because their memory counts as free."""
    replica_devices: tuple[tuple[int, ...], ...] = ()
    """The devices of each replica, those of extra ones last; empty before a load."""
    stage_layers: tuple[int, ...] = ()
    """Number of layers on each of `devices`, if it is divided by layers; before a load, on the empty devices."""
    device_bytes: tuple[int, ...] = ()
    """The part of `measured_bytes` on each of `devices`; empty: equal parts."""
    nodes: tuple[str, ...] = ()
    """The nodes of the group that runs it, the leader's first; empty if this node runs it alone, or not at all. All
    sizes are those of this node's member."""
    rank: int = 0
    """This node's rank in the group. Only rank 0, the leader, takes requests."""
    log_lines: tuple[str, ...] = ()
    """The end of the log of a member that is loading or has failed."""
    parallel: Literal["tensor", "pipeline"] | None = None
    """How it is divided among devices: in every layer, or by layers. None if not divided."""
    harness: str = "torch"
    family: str | None = None
    backend: str | None = None
    """Its backend: `native`, or a library. Absent if its files are unknown."""
    quant: str | None = None
    """The format of most of its weights; absent if dense or unknown."""
    stored: StoredForm | None = None
    """Absent if its files are unknown, or known only to a server."""
    digest: str | None = None
    """Of a sample of its files, equal for the same model on different nodes. Absent if its files are unknown."""
    content_digest: str = ""
    """Of every byte of its files; empty until the node has read them."""
    requested_quant: str | None = None
    """The `quant` for which the sizes hold; absent: its files as they are."""
    source: str | None = None
    estimate_bytes: int | None = None
    """Expected memory on an empty device: weights and planned KV cache. `measured_bytes` replaces it after a load."""
    least_bytes: int | None = None
    """The minimum that the node accepts, with a smaller KV cache. Absent: `estimate_bytes`."""
    contexts: ContextSizes | None = None
    """The sizes of the contexts in between. Absent if its files are unknown, or known only to a server."""
    quantised: tuple[QuantisedSize, ...] = ()
    """The same with each `quant` that this node can apply to its dense weights."""
    measured_bytes: int | None = None
    """Memory on the device; for a sleeping model, what it will take when it wakes."""
    kv_bytes: int | None = None
    """The part of `measured_bytes` that holds sequences: KV pages and recurrent states."""
    kv_tokens: int | None = None
    """Tokens that fit in the KV cache, over all replicas; for a sleeping model, when it wakes. Absent otherwise, or if
    unknown."""
    kv_host: HostKV | None = None
    """Its KV cache in host memory, which outlives a sleep and an unload; absent if empty."""
    file_bytes: int | None = None
    """Bytes of its weights in its files. Absent if unknown, or if it is divided among devices."""
    host_bytes: int = 0
    """Weights in host memory: all of them while the model is asleep, falling asleep or waking; for a loaded one those
    that do not fit its device."""
    host_splits: HostSplits | None = None
    """How its weights can be divided between device and host. Absent if impossible or not permitted
    (`host_weights`)."""
    disk_bytes: int | None = None
    """Its repository in the node's hub cache, incomplete downloads included; absent for a model outside the cache."""
    context_tokens: int | None = None
    """The context of the loaded model: `full_tokens` of `contexts`, or less if memory is the limit. Before a load: the
    context on empty devices."""
    max_input_tokens: int | None = None
    """The longest prompt: the context, or less if `limits.max_prompt_tokens` of the node is less."""
    max_prompt_tokens: int | None = None
    """`limits.max_prompt_tokens` of the node, whatever the context."""
    max_output_tokens: int | None = None
    capabilities: Capabilities = Capabilities()
    sampling: SamplingDefaults = SamplingDefaults()
    """Its sampling defaults: the operator's values, else those of its files."""
    progress: Progress | None = None
    load: ModelLoad = ModelLoad()
    reason: str | None = None
    """The node's reason why it is `failed` or `recovering`, or `cold` without a request to unload."""
    reason_code: str | None = None
    """The code of the error whose message is `reason`, if it is one."""
    state_age_s: float = 0.0
    idle_s: float = 0.0
    """Seconds since the last request ended; 0 while one runs."""
    load_s: float | None = None
    """Duration of its latest load or wake, without downloads and waits; absent without one."""
    bench: BenchResult | None = None
    """Its measured speed there; absent if not measured or outdated."""
    files_changed: bool = False
    """Whether its files on disk have changed since it was loaded."""

    @property
    def context_shortage(self) -> str | None:
        """What is wrong with its context, if memory leaves it less than wanted; None if nothing."""
        if self.contexts is None or self.context_tokens is None:
            return None
        return self.contexts.shortage(self.context_tokens)

    @property
    def full_context_tokens(self) -> int | None:
        """The context that it would have if memory did not limit it; None if unknown."""
        return None if self.contexts is None else self.contexts.full_tokens

    def forbids_prompt(self, tokens: int) -> bool:
        """Whether the operator's limit excludes a prompt of `tokens`, so that no longer context helps."""
        return self.max_prompt_tokens is not None and self.max_prompt_tokens < tokens


class ModelList(NodeValue, frozen=True):
    models: tuple[ModelStatus, ...]


class Activation(NodeValue, frozen=True):
    """Progress of the default models of a starting node."""

    state: Literal["idle", "running", "done"] = "idle"
    pending: tuple[str, ...] = ()
    in_progress: str | None = None
    completed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    reasons: dict[str, str] = {}
    """Why each model in `failed` failed."""


PullState = Literal["running", "done", "failed", "cancelled"]


class PullStatus(NodeValue, frozen=True):
    """A download of a model's files, without a load."""

    model_id: str
    state: PullState
    quant: str | None = None
    progress: Progress | None = None
    reason: str | None = None
    """Why it failed."""
    code: str | None = None
    """The error code of the failure."""


class DiskUse(NodeValue, frozen=True):
    """The disk of the node's hub cache."""

    total_bytes: int
    free_bytes: int
    models_bytes: int
    """Bytes of the cache."""


class HostHealth(NodeValue, frozen=True):
    """Host memory for models of its devices."""

    total_bytes: int
    free_bytes: int
    """Available to new allocations."""
    budget_bytes: int
    """The budget of models there: `limits.host_mb`, or all but a reserve. The parts below count."""
    weight_bytes: int = 0
    """Weights of loaded models that do not fit their devices."""
    sleeping_bytes: int = 0
    """Weights of sleeping models, which give way to those."""
    kv_bytes: int = 0
    """KV pages that are not on their device; they give way to both."""
    locked_bytes: int = 0
    """The part of the three that is page-locked."""
    locked_limit_bytes: int = 0
    """No load may raise it above this."""
    shortage: str | None = None
    """The problem while the host runs short of memory and nothing is left to give way."""


class Health(NodeValue, frozen=True):
    status: Literal["ok", "degraded", "draining"]
    """`degraded`: the node serves, but tasks in `failing_tasks` keep failing."""
    uptime_s: float
    devices: tuple[DeviceHealth, ...]
    models: tuple[ModelStatus, ...]
    revision: str = ""
    """The value for `since` in the next request, to get only changes. Empty if this node always reports everything."""
    since: str | None = None
    """The base revision: models neither in `models` nor in `gone` are as it reported them. None if `models` is
    complete."""
    gone: tuple[str, ...] = ()
    """Models delisted since then."""
    num_reloads: int = 0
    """Number of reloads of the node's configuration; when it changes, `/discovery` may have changed too."""
    ceiling_bytes: int | None = None
    """The configured ceiling for models over all devices; absent: none."""
    activation: Activation = Activation()
    failing_tasks: tuple[str, ...] = ()
    """Background tasks of the node that keep failing; its log has the reasons."""
    pulls: tuple[PullStatus, ...] = ()
    """Downloads without a load: those in progress, and the latest that ended."""
    disk: DiskUse | None = None
    host: HostHealth | None = None
    """Absent if not reported."""
    watts: float | None = None
    """Total power draw of devices and processor packages that can be read."""


class Endpoint(NodeValue, frozen=True):
    """`GET /models/{id}/endpoint`: where this model is served."""

    model_id: str
    base_url: str
    dialects: tuple[str, ...]


class NodeEvent(NodeValue, frozen=True):
    """One line of `/events`: the complete new state of what changed.

    A slow reader gets the latest state of each model instead of every intermediate one.
    """

    kind: Literal["model", "activation", "shutdown"]
    at_s: float
    """Unix time."""
    model: ModelStatus | None = None
    activation: Activation | None = None
