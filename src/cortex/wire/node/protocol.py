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
    """Known to the node; nothing of it is in memory."""
    DOWNLOADING = "downloading"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    """Its weights are in host memory and nothing is on a device. Waking is much faster than loading from disk."""
    UNLOADING = "unloading"
    RECOVERING = "recovering"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    """Reported by a gateway only: the node is down."""


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
    """Why no GPU is used although one may be there, such as a driver/library mismatch."""
    max_devices_per_model: Count = 1
    """The most devices that one model may span on this node."""
    can_sleep: bool = True
    """Whether it keeps the weights of unloaded models in host memory; nodes without a GPU do not by default."""
    harnesses: tuple[str, ...] = ("torch",)
    dialects: tuple[str, ...] = ()
    """Gateways of other versions may not know all of them."""
    group_harnesses: tuple[str, ...] = ()
    """Those that can run a model on several nodes. Empty also for a node without a `cluster_address`."""


class Fallback(NodeValue, frozen=True):
    """Something that a library of the engine does not promise, and that the node does without."""

    name: str
    reason: str
    """Why it cannot be used, and what happens instead."""


class DeviceHealth(NodeValue, frozen=True):
    index: int
    total_bytes: int
    free_bytes: int
    utilisation: float | None = None
    """0 to 1."""
    temperature_c: float | None = None
    watts: float | None = None
    """What it draws, where that can be read; a CPU: its packages."""
    worker: Literal["none", "starting", "running", "faulted"] = "none"
    kept_free_bytes: int = 0
    """Memory that every load leaves free: the operator's reserve, activations, buffers of libraries."""
    kept_free_share: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Share of the free memory that a load leaves free in addition."""
    kv_host_bytes: int = 0
    """Host memory of KV pages that are not on the device: prompts that continue them are not computed again."""
    ceiling_bytes: int | None = None
    """The most that models may hold there, as configured; absent: no ceiling."""
    extra_replica_bytes: int = 0
    """The part of `free_bytes` that extra replicas hold. They give way to every load."""
    fallbacks: tuple[Fallback, ...] = ()
    """What its worker does without, at lower speed; empty also before the first load."""


class Progress(NodeValue, frozen=True):
    stage: str
    """`resolve`, `download`, `read`, `place` or `warm`."""
    substage: str | None = None
    """The part of the stage that has a name of its own: `compile` in `place`. Any string may follow later."""
    done_bytes: int = 0
    total_bytes: int = 0
    eta_s: float | None = None
    waits_for: str | None = None
    """What a load that does not advance waits for."""

    @property
    def finest_stage(self) -> str:
        """What users are shown."""
        return self.waits_for or self.substage or self.stage


class StoredForm(NodeValue, frozen=True):
    """The form of a model's files."""

    file_format: Literal["gguf", "safetensors"]
    dtype: str
    """The format of most of its weights, as the files name it: `BF16`, `Q4_K`, …"""
    num_parameters: int | None = None
    """The values that its weights stand for. Absent for a model that is divided among devices."""


class ModelLoad(NodeValue, frozen=True):
    """Load of a resident model, as its engine reports it."""

    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0
    tokens_per_s: float = 0.0
    """Completion tokens of all requests, without the first of each, over the last few seconds in which one came."""
    fetched_tokens_per_s: float | None = None
    """How fast KV of prompts came from other nodes; absent: none did."""
    waiting_by_class: dict[str, int] = {}
    """How many of those that wait for a slot are of each class; only classes with any."""


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
    """Tokens whose pages these are; 0: not known, as it has, or a rank of it has, states only."""
    tokens_per_s: float | None = None
    """How fast they come to the device on average; absent: none did yet."""


class QuantisedSize(NodeValue, frozen=True):
    """What a model with dense weights would take if they were quantised at load."""

    quant: str
    estimate_bytes: int
    least_bytes: int
    contexts: ContextSizes | None = None


class ModelStatus(NodeValue, frozen=True):
    """One model on one node."""

    id: str
    state: ModelState
    devices: tuple[int, ...] = ()
    num_devices: Count = 1
    """Devices that it takes on this node, as configured there: it is divided among them, or has a replica on each."""
    replicas: Count = 1
    """How often it is loaded there, or will be. It includes extra replicas, which come and go with demand; `devices`
    and all sizes do not, because their memory counts as free."""
    replica_devices: tuple[tuple[int, ...], ...] = ()
    """The devices of each replica, those of extra ones last; empty before a load."""
    stage_layers: tuple[int, ...] = ()
    """Number of layers on each of `devices`, if it is divided by layers; before a load, on the empty devices."""
    device_bytes: tuple[int, ...] = ()
    """The part of `measured_bytes` on each of `devices`; empty: equal parts."""
    nodes: tuple[str, ...] = ()
    """The nodes of the group that runs it, the leader's first; empty: this node runs it alone, or nothing of it is
    here. All sizes here are those of this node's member."""
    rank: int = 0
    """This node's rank in the group. Only rank 0, the leader, takes requests."""
    log_lines: tuple[str, ...] = ()
    """The end of the log of a member that is loading or has failed."""
    parallel: Literal["tensor", "pipeline"] | None = None
    """How it is divided among devices: in every layer, or by layers. None: each has all of it."""
    harness: str = "torch"
    family: str | None = None
    backend: str | None = None
    """What runs it: `native`, or the library whose modules do. Absent: its files are not known."""
    quant: str | None = None
    """The format of most of its weights; absent: they are dense, or its files are not known."""
    stored: StoredForm | None = None
    """Absent: its files are not known, or only a server knows them."""
    digest: str | None = None
    """Equal for the same model on different nodes. Absent: its files are not known."""
    requested_quant: str | None = None
    """The `quant` for which the sizes hold; absent: its files as they are."""
    source: str | None = None
    estimate_bytes: int | None = None
    """Expected memory on an empty device: weights and planned KV cache. `measured_bytes` replaces it after a load."""
    least_bytes: int | None = None
    """The minimum with which the node accepts it, with a smaller KV cache. Absent: `estimate_bytes`."""
    contexts: ContextSizes | None = None
    """What the contexts between both take. Absent: its files are not known, or only a server knows."""
    quantised: tuple[QuantisedSize, ...] = ()
    """The same with each `quant` that this node can apply to its dense weights."""
    measured_bytes: int | None = None
    """Memory on the device; of a model asleep, what it will take when it wakes."""
    kv_bytes: int | None = None
    """The part of `measured_bytes` that holds sequences: KV pages and recurrent states."""
    kv_tokens: int | None = None
    """Tokens that fit in the KV cache, over all replicas; of a model asleep, when it wakes. Absent: it is neither, or
    that is not known."""
    kv_host: HostKV | None = None
    """What of its KV cache is in host memory. It outlasts a sleep and an unload; absent: nothing."""
    file_bytes: int | None = None
    """What its weights take in its files. Absent: they are not known, or it is divided among devices."""
    host_bytes: int = 0
    """Weights in host memory: all of them while the model is asleep, falling asleep or waking; of a loaded one those
    that its device has no room for."""
    host_splits: HostSplits | None = None
    """How its weights can be divided between device and host. Absent: they cannot, or may not (`host_weights`)."""
    disk_bytes: int | None = None
    """Its repository in the node's hub cache, incomplete downloads included; absent for a model outside the cache."""
    context_tokens: int | None = None
    """The context of the loaded model: `full_tokens` of `contexts`, or less if memory is the limit. Before a load: what
    it gets if the devices are empty."""
    max_input_tokens: int | None = None
    """The longest prompt: the context, or less if `limits.max_prompt_tokens` of the node is less."""
    max_output_tokens: int | None = None
    capabilities: Capabilities = Capabilities()
    sampling: SamplingDefaults = SamplingDefaults()
    """How it samples where a request says nothing: the operator's values, then those of its files."""
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
    """How long its latest load or wake took, without downloads and waits; absent: it had none."""
    bench: BenchResult | None = None
    """How fast it is there, as measured; absent: it was not, or something has changed since."""
    files_changed: bool = False
    """Whether its files on disk are other ones than those that it was loaded from."""

    @property
    def context_shortage(self) -> str | None:
        """What is wrong with its context: memory leaves it less than it is to have. None: nothing."""
        if self.contexts is None or self.context_tokens is None:
            return None
        return self.contexts.shortage(self.context_tokens)

    @property
    def full_context_tokens(self) -> int | None:
        """The context that it would have if memory did not limit it; None: that is not known."""
        return None if self.contexts is None else self.contexts.full_tokens


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
    """What the cache takes."""


class HostHealth(NodeValue, frozen=True):
    """The memory of the host, as far as models of its devices use it."""

    total_bytes: int
    free_bytes: int
    """Available to new allocations."""
    budget_bytes: int
    """The most that models may hold there: `limits.host_mb`, or all but a reserve. The parts below count."""
    weight_bytes: int = 0
    """Weights of loaded models that their devices have no room for."""
    sleeping_bytes: int = 0
    """Weights of sleeping models, which give way to those."""
    kv_bytes: int = 0
    """KV pages that are not on their device; they give way to both."""
    locked_bytes: int = 0
    """The part of the three that is page-locked."""
    locked_limit_bytes: int = 0
    """No load may raise it above this."""
    shortage: str | None = None
    """Said while the host runs short of memory, and nothing is left there that could give way."""


class Health(NodeValue, frozen=True):
    status: Literal["ok", "degraded", "draining"]
    """`degraded`: the node serves, but tasks in `failing_tasks` keep failing."""
    uptime_s: float
    devices: tuple[DeviceHealth, ...]
    models: tuple[ModelStatus, ...]
    revision: str = ""
    """What the next request may send as `since`, to get only what has changed. Empty: this node always reports all."""
    since: str | None = None
    """Models that are neither in `models` nor in `gone` are as this revision reported them. None: `models` are all."""
    gone: tuple[str, ...] = ()
    """Models that the node has not listed any more since then."""
    num_reloads: int = 0
    """Reloads of the node's configuration: with another number than before, `/discovery` may be another one, too."""
    ceiling_bytes: int | None = None
    """The most that models may hold over all devices, as configured; absent: no ceiling."""
    activation: Activation = Activation()
    failing_tasks: tuple[str, ...] = ()
    """Background tasks of the node that fail again and again; its log has the reasons."""
    pulls: tuple[PullStatus, ...] = ()
    """Downloads without a load: those in progress, and the latest that ended."""
    disk: DiskUse | None = None
    host: HostHealth | None = None
    """Absent: the node does not report it."""
    watts: float | None = None
    """What devices and processor packages draw together, as far as that can be read."""


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
