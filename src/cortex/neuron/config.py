"""The configuration of a node: the types of `neuron.toml`.

Every field has a default that works on one machine. The reference page and the example file are generated from these
types. Environment variables override the file: `NEURON_KEY`, `NEURON_SECTION__KEY`, such as `NEURON_LIMITS__MAX_QUEUE`.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from cortex import settings
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.servers.entry import HarnessEntry, check_server
from cortex.neuron.servers.ready_made import BY_NAME, completed_server
from cortex.settings import Listen, Section
from cortex.system.cache_folder import cache_folder
from cortex.telemetry import logs
from cortex.telemetry.tracing import TelemetrySection
from cortex.wire.node.load_options import ENGINE, Count, PlacedOptions, harness_name

Seconds = Annotated[float, Meta(gt=0)]
Megabytes = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
PREFIX = "NEURON_"
MIN_KEY_LENGTH = 16
"""Shorter keys could be guessed."""


class TorchHarness(Section, frozen=True):
    """The built-in engine."""

    hf_cache: Path | None = None
    """The directory of hub models. Absent: `HF_HUB_CACHE`, then `$HF_HOME/hub`, then `~/.cache/huggingface/hub`."""
    idle_clock: bool = False
    """Let an NVIDIA GPU with a loaded model drop to its idle clock between requests, like one without a model
    (`CUDA_DISABLE_PERF_BOOST`, from driver 580.105 on). An H200 then draws 79 W instead of 122 W, and its first token
    after idleness is 23 ms later; load is not affected."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The data type of models' arithmetic; `auto` is the fastest on the device."""


class HarnessSettings(Section, frozen=True):
    """Settings of the engine, under its name."""

    torch: TorchHarness = TorchHarness()

    @classmethod
    def field_of(cls, key: str) -> str:
        return harness_name(key)


class Limits(Section, frozen=True):
    """How much of the machine requests may use."""

    max_connections: Count = 4096
    """Client connections open at once; further ones are rejected with 503. Each request of a gateway takes one. A
    quarter of the permitted open files stays in reserve. If the limit of open files is too low for this number, fewer
    connections are admitted, and a line is logged at the start. The soft limit of open files is raised to the hard one.
    """
    max_connections_per_client: Count | None = None
    """Client connections open at once from one address (IPv6: one /64 network); further ones are rejected with 429.
    This also bounds the requests of one gateway. Absent: half of `max_connections`."""
    head_timeout_s: Seconds = 10.0
    """A request head must arrive within this time, or is rejected with 408; so must a TLS handshake."""
    prefill_chunk_tokens: Count | None = None
    """Maximum prompt tokens in one step. Absent: by device."""
    step_ms: Annotated[float, Meta(gt=0)] = 50.0
    """Prompts are computed in chunks that extend a step to about this time while streams run or other prompts wait. It
    is the gap between two tokens of a stream: a smaller value keeps streams smoother, a larger one starts responses
    sooner. If streams alone take more than a third of it, steps may take three times as long as the streams."""
    max_prompt_tokens: Count | None = None
    """Longer prompts are rejected as if over the context, even if the model accepts them."""
    min_free_vram_mb: Megabytes = 256
    """Memory that loads leave free on every device, for a desktop or for programs that start later. In addition, a load
    leaves free half of the host's free memory on a CPU, and on a GPU 1/16 of its memory, at least 1 GiB."""
    memory_mb: Count | None = None
    """Memory that models may take over all devices at most, weights and KV caches together. Absent: all but what loads
    leave free (`min_free_vram_mb`)."""
    host_mb: Megabytes | None = None
    """Host memory that models may take in all: weights that do not fit devices (`host_weights`), those of sleeping
    models, and KV pages, which give way in the reverse order. A tenth of the host's memory always stays free, so that
    it does not swap, and at most three quarters are page-locked. Absent: all free memory except that tenth."""
    sleep_mb: Megabytes | None = None
    """Host memory for the weights of sleeping models; beyond it, the least recently used one is unloaded. 0: no sleep.
    Absent: half of the host's free memory on a node with GPUs, 0 on a node without, where sleep frees nothing."""
    kv_host_mb: Megabytes | None = None
    """Host memory for KV pages that have left their device: pages of models that sleep or were unloaded, and on a GPU
    pages that do not fit the KV cache. Prompts that continue them are not recomputed. Weights take their part of
    `host_mb` first. The least recently used pages are dropped, also when the host runs short of memory. 0: none.
    Absent: an eighth of the host's free memory."""
    kv_disk_mb: Megabytes = 0
    """Disk space for KV pages that leave host memory, for those that it holds when a model sleeps or is unloaded, and
    for all when the node stops, as many as are written in 30 s. Conversations then continue after a restart without
    being recomputed, if reading is expected to be faster. The least recently used files are removed. Text of prompts
    and responses can be recovered from the files. Needs `kv_host_mb`. 0: none; meant for SSDs."""
    kv_disk_dir: Path | None = None
    """The folder of these files; only the user of the node can read them. Absent: `kv` in the cache of cortex."""
    max_num_seqs: Count = 256
    """Maximum number of requests that one model runs at once."""
    max_queue: Annotated[int, Meta(ge=0)] = 512
    """Maximum number of requests that wait for one model; further ones are rejected with 503 and an estimated
    `Retry-After`."""
    add_replica_after_s: Seconds = 5.0
    """A model with `max_replicas` gets another replica when a request has waited for this long."""
    remove_replica_after_s: Seconds = 300.0
    """Such a replica is unloaded after this long without requests."""
    step_timeout_s: Seconds = 120.0
    """A device that has work and completes no step for this long is treated as faulted."""
    load_timeout_s: Seconds = 300.0
    """A load without progress for this long fails, and its worker is replaced."""
    max_loads: Count = 8
    """Loads that run at once; further ones wait. A load begins once its memory is reserved, concurrently with others on
    the same device; only loads of the engine take turns there. Lower it if several loads overload the disk."""
    share_mb_per_s: Megabytes | None = None
    """Megabytes per second, over all transfers, at which this node sends files of models to other nodes of its fleet at
    most. 0: it sends none. Absent: as fast as network and disk permit."""
    inspection_cpu_s: Count = 30
    """Computing time limit for reading a model's config, headers and chat template. A model that takes more is reported
    as damaged and not loaded."""
    inspection_memory_mb: Count = 1024
    """Memory limit for that, in a separate process."""

    @property
    def kv_disk_folder(self) -> Path:
        return (self.kv_disk_dir or cache_folder() / "kv").expanduser().absolute()


class TextLimits(Section, frozen=True):
    """Limits on the text work of requests before they reach a model: templates, tokenising and grammars. Each model in
    use has its own worker processes for it."""

    workers: Count | None = None
    """Requests of one model that are prepared at once, plus half as many long ones. Absent: one per core, at least 2
    and at most 4."""
    timeout_s: Seconds = 60.0
    """A request that takes longer to prepare, once it has a worker, is rejected with 400, and its worker is killed. A
    model whose text files take longer to read counts as damaged."""
    memory_mb: Count = 2048
    """Memory limit for preparing one request, and for reading the text files of a model."""
    max_prompt_mb: Count = 8
    """Prompts of more million characters are rejected with 400 before tokenising."""
    max_grammar_kb: Count = 1024
    """Schemas, choices and grammars that need more thousand characters as a grammar are rejected with 400."""
    max_grammar_cpu_s: Seconds = 2.0
    """Those that take longer to compile are rejected too, because the worker of the device compiles them again."""

    @property
    def num_workers(self) -> int:
        return self.workers or min(max(2, os.cpu_count() or 2), 4)


class ModelOptions(Section, PlacedOptions, frozen=True, kw_only=True):
    """Options of loading and sampling a model."""

    id: str
    """The model's name in requests."""
    memory_mb: Count | None = None
    """Maximum memory of weights and KV cache. Absent: the weights and a cache for a few full contexts."""
    replicas: Count = 1
    """How many times the model is loaded on this node, each replica on its own devices; requests go to the replica with
    the least work."""
    max_replicas: Count = 1
    """Maximum number of replicas while requests wait. Those beyond `replicas` are added on devices with room
    (`limits.add_replica_after_s`), and give way to every other load. Only for models on one device."""


class ModelEntry(ModelOptions, frozen=True):
    """A model that this node serves; models in the hub cache need no entry."""


class DefaultModel(ModelOptions, frozen=True):
    """A model that is loaded at start, in the background, in the order of the file. Missing options are taken from its
    entry under `models`."""


class DeviceEntry(Section, frozen=True):
    """A device of this node, by its index in `neuron discover`."""

    index: Annotated[int, Meta(ge=0)]
    memory_mb: Count
    """Memory that models may take on this device at most. `limits.memory_mb` bounds all devices together."""


class NeuronConfig(Section, frozen=True):
    """`neuron.toml`."""

    listen: Listen = Listen("0.0.0.0:13131")
    """Address of the node's API."""
    port: Port | None = None
    """Overrides the port of `listen`."""
    keys: tuple[str, ...] = ()
    """Keys; callers must send one of them. Gateways send theirs with `key_env`. `neuron key` makes one. Without a key
    the node does not start, unless `listen` is a loopback address (`127.0.0.1:13131`) or it is started with
    `--insecure`. Changes of the file are used at once."""
    key_file: Path | None = None
    """A file with more keys, one on each line, relative to this file. Changes of it are used at once."""
    allowed_hosts: tuple[str, ...] = ()
    """Public DNS names of this node, such as `beast.example.com`. A node without keys rejects requests to other public
    names, because a web page could send them. Addresses, names without a dot and private suffixes are always accepted.
    """
    tls_cert: Path | None = None
    """A certificate with its chain, in PEM, relative to this file: the node then speaks HTTPS only. A renewed file is
    used at once."""
    tls_key: Path | None = None
    """The private key of `tls_cert`, in PEM, relative to this file."""
    model_roots: tuple[Path, ...] = ()
    """Directories whose models load requests may name by path, in addition to the hub cache and this file's sources."""
    model_dirs: tuple[Path, ...] = ()
    """Folders whose GGUF files and checkpoints are models of this node, new ones within a minute. The id is the path in
    the folder, without `.gguf`."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long running responses may take to end after SIGTERM, and by default before an unload."""
    keepalive_s: Seconds = 2.0
    """Interval of keepalives to a waiting streaming client, during queueing, load and prefill."""
    max_body_mb: Count = 64
    """Larger request bodies are rejected with 413."""
    max_upload_mb: Count = 2048
    """The same for files that are sent to servers (`/v1/audio/transcriptions` and others). From 1 MiB on they are
    spooled to unnamed files in `TMPDIR` or `/var/tmp` while they are relayed, at most four times this size in all."""
    strip_billing_header: bool = True
    """Remove the line `x-anthropic-billing-header` of each request from its system prompt: it defeats prefix caching.
    Applies to clients that connect to this node directly; a gateway decides for its own clients."""
    log_level: logs.Level = "info"
    """The lowest level that is logged."""
    log_format: logs.Format = "text"
    """`json` for log collectors."""
    telemetry: TelemetrySection = TelemetrySection()
    cpu_devices: Count = 1
    """On a host without GPUs: the number of CPU devices, each with its own worker and an equal share of the host's
    cores and memory. A model may be placed on any of them."""
    cluster_address: str | None = None
    """The address of this host on a private network of the nodes only. Servers that run a model on several nodes
    (`nodes` in `models.toml`) reach each other there, and accept everybody who reaches them. Absent: this node takes no
    part in such models."""
    suspend_command: tuple[str, ...] = ("systemctl", "suspend")
    """The program, with arguments, that suspends this host by order of a gateway with `wake` for this node. Empty: the
    node is never suspended."""
    devices: tuple[DeviceEntry, ...] = ()
    harnesses: tuple[HarnessEntry, ...] = (HarnessEntry(),)
    harness: HarnessSettings = HarnessSettings()
    limits: Limits = Limits()
    text: TextLimits = TextLimits()
    pictures: PictureLimits = PictureLimits()
    models: tuple[ModelEntry, ...] = ()
    default_models: tuple[DefaultModel, ...] = ()

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        if self.cluster_address is not None:
            check_cluster_address(self.cluster_address)
        for key in self.keys:
            check_key(key)
        for name, ids in (
            ("models", [entry.id for entry in self.models]),
            ("default_models", [entry.id for entry in self.default_models]),
            ("harnesses", [entry.name for entry in self.harnesses]),
        ):
            if twice := sorted({model_id for model_id in ids if ids.count(model_id) > 1}):
                raise ValueError(f"`{twice[0]}` is listed twice in [[{name}]]; remove one entry")
        for harness in self.harnesses:
            if harness.name == ENGINE and harness.cmd:
                raise ValueError(f"`{harness.name}` is the built-in engine and takes no cmd; choose another name")
        for server in self.commands:
            check_server(server)
        for entry in self.models:
            self._check_model("models", entry)
        for default in self.default_models:
            self._check_model("default_models", self.completed(default))
        indices = [device.index for device in self.devices]
        if len(set(indices)) < len(indices):
            raise ValueError("a device is listed twice in [[devices]]; remove one entry")

    def completed(self, default: DefaultModel) -> ModelOptions:
        """The default model, completed with the options of its entry under `models`."""
        entry = next((entry for entry in self.models if entry.id == default.id), None)
        return default if entry is None else default.over(entry)

    def _check_model(self, section: str, options: ModelOptions) -> None:
        model_id = options.id
        harnesses = [ENGINE, *{**BY_NAME, **{entry.name: entry for entry in self.commands}}]
        if options.harness is not None and options.harness not in harnesses:
            raise ValueError(
                f"`{model_id}` in [[{section}]]: there is no harness `{options.harness}`; choose one of "
                f"{', '.join(harnesses)}, or add it under [[harnesses]]"
            )
        if options.tensor_parallel > 1 and options.pipeline_parallel > 1:
            raise ValueError(f"`{model_id}` has tensor_parallel and pipeline_parallel; choose one of them")
        if options.max_replicas > 1 and (options.tensor_parallel > 1 or options.pipeline_parallel > 1):
            raise ValueError(
                f"`{model_id}` in [[{section}]] has `max_replicas`, which is for models on one device, but is divided; "
                "remove it, or use `replicas`"
            )

    @property
    def commands(self) -> tuple[HarnessEntry, ...]:
        """The harnesses that are servers, complete: those with an entry, and ready-made ones that models name."""
        listed = {entry.name: completed_server(entry) for entry in self.harnesses if entry.name != ENGINE}
        named = [options.harness for options in (*self.models, *self.default_models)]
        return (*listed.values(), *(BY_NAME[name] for name in BY_NAME if name in named and name not in listed))

    @property
    def address(self) -> Listen:
        """`listen` with `port` applied."""
        if self.port is None:
            return self.listen
        host = f"[{self.listen.host}]" if ":" in self.listen.host else self.listen.host
        return Listen(f"{host}:{self.port}")


def check_cluster_address(address: str) -> None:
    """Raises ValueError for an invalid address, or a public one, because servers do not authenticate."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(
            f"cluster_address must be an address of this host, such as 10.0.0.1, got `{address}`"
        ) from None
    if parsed.is_global or parsed.is_unspecified or parsed.is_multicast:
        raise ValueError(
            f"cluster_address {address} is not of a private network: servers that run a model on several nodes accept "
            "everybody who reaches them; choose an address of a network that only the nodes are on"
        )


def check_key(key: str) -> None:
    """Raises ValueError for a key that is easy to guess or cannot be sent in a header."""
    if len(key) < MIN_KEY_LENGTH or not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(
            f"a key must have at least {MIN_KEY_LENGTH} printable ASCII characters without spaces; make one with"
            " `neuron key`"
        )


def load(path: Path | None, env: Mapping[str, str] = os.environ) -> NeuronConfig:
    """Reads `path`, or the defaults without one, and applies the environment. Raises SettingsError."""
    return settings.load(NeuronConfig, path, env_prefix=PREFIX, env=env)


def check_environment(env: Mapping[str, str]) -> None:
    """Raise SettingsError for a variable that no configuration reads."""
    settings.check_variables(NeuronConfig, PREFIX, env, frozenset())
