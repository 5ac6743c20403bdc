"""The types of `cortex.toml`.

Every field has a default that works on one machine; the reference page is generated from these types. Environment
variables override: `CORTEX_SECTION__KEY`, such as `CORTEX_GATEWAY__LISTEN`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from cortex import settings
from cortex.fleet.catalogue import MEBIBYTE, LoadingState
from cortex.fleet.devices import Ceilings
from cortex.fleet.rules import EvictionRules, PlacementRules
from cortex.fleet.sleeping import WakeRules
from cortex.fleet.topology import Abilities
from cortex.gateway.database import check_location, is_url
from cortex.gateway.ledger.groups import GroupSection, check_groups
from cortex.gateway.ledger.keys import Keyring, KeySection, PrefixSharing
from cortex.gateway.ledger.store import LedgerSection
from cortex.gateway.ledger.users import SignInSection
from cortex.settings import Listen, Section
from cortex.telemetry import logs
from cortex.telemetry.tracing import TelemetrySection
from cortex.wire.preset import ROUTED_FIELDS

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
PREFIX = "CORTEX_"
COMMAND_VARIABLES = frozenset(
    {"CORTEX_URL", "CORTEX_API_KEY", "CORTEX_CA_FILE", "CORTEX_CACHE", "CORTEX_NODE_KEY", "CORTEX_LOCAL_NODE_KEY"}
)
"""Variables that are not settings: commands read them, or they hold the keys of nodes."""


class GatewaySection(Section, frozen=True):
    """Addresses, timeouts and queues of the gateway."""

    listen: Listen = Listen("0.0.0.0:31313")
    """Address of the API."""
    metrics_listen: Listen | None = Listen("127.0.0.1:31314")
    """Address of the Prometheus metrics, which need no key and whose labels name keys and models. `0.0.0.0:31314` lets
    a Prometheus on another host read them, and everybody else who reaches the port."""
    open: bool = False
    """Admit every request without a key, even if keys were configured before. Has no effect while there are
    `[[keys]]`. On loopback addresses a gateway that never had keys is open without it; on others it does not start."""
    open_until_keys: bool = False
    """Like `open`, until keys are configured for the first time: a gateway that had keys and has none rejects every
    request. `cortex up --host` sets it."""
    open_listing: bool = False
    """Clients without a key may list the models: `/v1/models`, Ollama's `/api/version`, `/api/tags`, `/api/ps` and
    `/api/show`, llama.cpp's `/models` and `/props`. Some editors send no key when they look for models.
    Changes need a restart."""
    ollama_listen: Listen | None = None
    """A second address of the API, for clients that look for Ollama by themselves: `0.0.0.0:11434`. `--ollama` of
    `cortex up` sets it, and that of `cortex serve` where it is not configured."""
    tls_cert: Path | None = None
    """A certificate with its chain, in PEM, relative to this file: API and metrics are then HTTPS only. A renewed file
    is used at once."""
    tls_key: Path | None = None
    """The private key of `tls_cert`, in PEM, relative to this file."""
    allowed_hosts: tuple[str, ...] = ()
    """Public DNS names of this gateway, such as `llm.example.com`. Without keys, control routes reject requests to
    other public names, and on a loopback address all routes do: a web page could send them. Addresses, names without a
    dot and private suffixes are always accepted."""
    node_key_env: str | None = None
    """The environment variable that holds the key of every neuron without a `key_env` of its own."""
    node_ca_file: Path | None = None
    """The `ca_file` of every node without one of its own."""
    share_files: bool = True
    """Nodes get the files of models from other nodes that have them, and only the rest from the hub. They reach each
    other at their `endpoint`; `limits.share_mb_per_s` of a node bounds what it sends. Changes need a restart."""
    models: Path = Path("models.toml")
    """The catalogue, relative to this file. `models.toml` is optional: nodes list their own models. A file of another
    name must exist."""
    state: Path = Path(".")
    """Directory for measured model sizes and usage records, relative to this file."""
    keepalive_s: Seconds = 2.0
    """Interval of keepalives to a streaming client that waits."""
    loading_state: LoadingState = "comment"
    """How each keepalive informs a streaming client that waits for a load. `comment`: in a comment of the event stream,
    which programs skip. `reasoning`: in reasoning text, for chats that show it, in chat completions and Ollama's
    dialect."""
    idle_timeout_s: Seconds = 300.0
    """A node may be silent this long in a stream. There is no total timeout. A response that is not streamed (also
    speech, images and everything below `/upstream/`) gets an hour, or this time if longer, while its node responds to
    polls, because nothing is sent until it is complete. Foreign servers of speech and images may miss polls meanwhile.
    """
    connect_timeout_s: Seconds = 5.0
    """A node must accept a connection within this time."""
    max_body_mb: Count = 64
    """Larger request bodies are rejected with 413."""
    max_upload_mb: Count = 2048
    """The same for files that are sent to servers (`/v1/audio/transcriptions` and others). From 1 MiB on they are
    spooled to unnamed files in `TMPDIR` or `/var/tmp` while they are relayed: at most four times this size in all, and
    twice this size for one client address."""
    max_wait_s: Seconds = 600.0
    """A request that has waited this long for its model is rejected with 503."""
    max_waiting: Count = 512
    """Requests that may wait for one model; further ones are rejected with 503."""
    drain_s: Annotated[float, Meta(ge=0)] = 30.0
    """How long running responses may take to end after SIGTERM."""
    poll_interval_s: Seconds = 1.0
    """Interval at which every node is polled."""
    poll_timeout_s: Seconds = 2.0
    """A poll that takes longer has failed; foreign servers, which may be too busy to respond, get at least 5 s. The
    next poll follows at once if this is longer than the interval, so a frozen node counts as down after
    `missed_polls` times the longer of both."""
    missed_polls: Count = 3
    """Polls in a row that must fail before a node counts as down."""
    strip_billing_header: bool = True
    """Remove the line `x-anthropic-billing-header` of each request from its system prompt: it defeats prefix caching.
    Applies to every node behind this gateway, whatever its own setting."""
    cors_origins: tuple[str, ...] = ()
    """Origins such as `https://chat.example` whose scripts may use the API from a browser; `*` allows every origin.
    Changes need a restart."""
    prefix_sharing: PrefixSharing = "key"
    """Which requests share cached prefixes of prompts. `key`: those of one key, or of one user of the page. `group`:
    those of all keys and users of a group; a key without one is on its own. `all`: those of everybody; then a client
    can confirm a guess of what another sent, by its cached tokens or response time. Scopes that send the same prompt
    each compute and cache it. Clients can share less, with `cache_salt`. Without keys, all clients share."""
    node_header: bool = True
    """Name the node that served a request in the response header `x-cortex-node`, except to keys with `models`,
    which see no nodes."""
    access_log: bool = False
    """Log one line for every request."""
    log_format: logs.Format = "text"
    """`json` for collectors."""
    log_level: logs.Level = "info"
    """The lowest level that is logged."""

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together; set both or neither")
        for origin in self.cors_origins:
            parts = urlsplit(origin)
            if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}"):
                raise ValueError(f"cors_origins must be `*` or look like `https://chat.example`, got `{origin}`")


class LimitsSection(Section, frozen=True):
    """Limits on clients, for each gateway. Changes need a restart."""

    max_connections: Count = 8192
    """Client connections open at once; a further one is rejected with 503. Each stream also takes a connection to its
    node, and a quarter of the permitted open files stays in reserve. If the limit of open files is too low for this
    number, fewer connections are admitted, and a line is logged at the start. The soft limit of open files is raised to
    the hard one."""
    max_connections_per_client: Count | None = None
    """Client connections open at once from one address (IPv6: one /64 network); a further one is rejected with 429.
    Absent: a quarter of `max_connections`. Set it to `max_connections` behind a reverse proxy, whose clients all have
    its address."""
    max_buffered_mb: Count = 1024
    """Request bodies in memory, of all connections together, until their responses end. A request that would exceed it
    is rejected with 503."""
    max_head_kb: Count = 64
    """Larger request heads (request line and headers) are rejected with 431."""
    head_timeout_s: Seconds = 10.0
    """A request head must arrive within this time, or is rejected with 408."""
    body_timeout_s: Seconds = 30.0
    """A request body may pause this long, or is rejected with 408."""
    min_body_kb_per_s: Count = 16
    """A request body must arrive at this rate on average, after a first `body_timeout_s`, or is rejected with 408."""


class ResponsesSection(Section, frozen=True):
    """Stored responses and conversations of the Responses API: `store`, `previous_response_id`, `conversation`,
    `background`."""

    store: bool = True
    """Store every response of `/v1/responses`, unless its request says `"store": false`. With `false` nothing is
    stored, and requests that refer to a stored response are rejected."""
    database: str | None = None
    """A SQLite file in `gateway.state`, or `postgresql://user@host/name`. Not set: the PostgreSQL database of the
    `ledger`, or else the file `cortex-responses.db`. Changes need a restart."""
    retention_s: Seconds = 2592000.0
    """A response is deleted this long after it was made, or after the last response that continues it."""
    max_entry_mb: Count = 8
    """A larger response, with the input of its request, is not stored. Items that would make a conversation larger are
    rejected with 400."""
    max_total_mb: Count = 2048
    """Size of all stored responses and conversations together. Beyond it the oldest ones of the key that takes the most
    are deleted: responses, or conversations where these take more."""
    max_background: Count = 64
    """Background responses that run at once on this gateway; a further one is rejected with 503."""

    def __post_init__(self) -> None:
        check_location(self.database)


class BatchesSection(Section, frozen=True):
    """Files and batches: `/v1/files`, `/v1/batches`, `/v1/messages/batches`."""

    directory: Path = Path("files")
    """Directory of files, relative to `gateway.state`; gateways that share a database must share it. Changes need a
    restart."""
    hours: tuple[str, ...] = ()
    """When batches run, in local time: `["22:00-06:30"]`. Empty: always."""
    price: Annotated[float, Meta(ge=0, le=100)] = 0.5
    """Price of batch tokens, relative to the prices in `models.toml`."""
    max_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 100_000
    """Maximum number of lines per batch."""
    max_lines_per_node: Count = 64
    """Lines that run at once on an otherwise idle node."""
    max_batches_per_key: Count = 64
    """Active batches per key; further ones are rejected with 429."""
    max_files_per_key: Count = 10_000
    """Files per key; further ones are rejected with 429."""
    max_mb_per_key: Count = 20_480
    """Total size of the files of a key; uploads beyond it are rejected with 429."""
    max_window_s: Seconds = 604800.0
    """The longest `completion_window`."""
    retention_s: Seconds = 2592000.0
    """Files and ended batches are deleted after this time."""

    def __post_init__(self) -> None:
        for text in self.hours:
            hours_of(text)

    def is_open(self, minute: int) -> bool:
        """Whether batches run in a minute of the day."""
        for first, last in map(hours_of, self.hours):
            if first <= minute < last or (first >= last and (minute >= first or minute < last)):
                return True
        return not self.hours


def hours_of(text: str) -> tuple[int, int]:
    """The first minute of the day and the one after the last. Raises ValueError."""
    match = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)", text)
    if match is None:
        raise ValueError(f"hours must look like `22:00-06:30`, got `{text[:40]}`")
    first_hour, first_minute, last_hour, last_minute = map(int, match.groups())
    return first_hour * 60 + first_minute, last_hour * 60 + last_minute


class PicturesSection(Section, frozen=True):
    """Pictures that clients name by address instead of sending them."""

    urls: bool = False
    """Fetch them, from https addresses on the public internet, and send them to the node in the request. With `false`
    such a request is rejected with 400."""
    hosts: tuple[str, ...] = ()
    """The only hosts that pictures are fetched from, such as `images.example.com`, or `.example.com` for all its
    subdomains. Empty: any host."""
    max_urls: Count = 10
    """Addresses in one request; further ones are rejected with 400."""
    max_mb: Count = 20
    """A larger file is rejected with 400."""
    timeout_s: Seconds = 10.0
    """A picture that takes longer to fetch, redirects included, is rejected with 400."""


class ActivitySection(Section, frozen=True):
    """The latest requests, kept in memory for `cortex logs` and the Activity page."""

    requests: Annotated[int, Meta(ge=0, le=1_000_000)] = 1000
    """How many of the latest requests are kept; 0 keeps none."""
    capture: bool = False
    """Also keep the start of every request body and the end of every response. Prompts are private: nothing of them is
    kept without this."""
    capture_kb: Annotated[int, Meta(ge=1, le=1024)] = 16
    """The most that is kept of one request body."""
    log_retention_days: Annotated[int, Meta(ge=0, le=36500)] = 0
    """Days for which every request is also kept in the database of `ledger`, without its texts, for `cortex logs
    --since` and the page; 0 keeps none there."""
    redact: tuple[str, ...] = ()
    """Regular expressions; matching text is replaced before a capture is kept. Ends of streamed responses are then not
    kept, because their text is split over events, where an expression would not match."""

    def __post_init__(self) -> None:
        for pattern in self.redact:
            try:
                re.compile(pattern.encode())
            except re.error as problem:
                raise ValueError(f"redact has `{pattern}`, which is not a regular expression: {problem}") from problem


class NeuronDevice(Section, frozen=True):
    """A device of the node, by its index in `cortex status`."""

    index: Annotated[int, Meta(ge=0)]
    memory_mb: Count
    """Memory that models may take on this device at most, weights and KV caches together."""


class NeuronSection(Section, frozen=True):
    """A node of the fleet."""

    name: str
    """Its name in logs, metrics and decisions."""
    endpoint: str
    """Base URL, such as `http://beast.internal:13131`."""
    kind: Literal["neuron", "openai"] = "neuron"
    """`openai`: any OpenAI-compatible server; it is never asked to load or unload."""
    key_env: str | None = None
    """The environment variable that holds the node's bearer key: one of the `keys` of a neuron."""
    ca_file: Path | None = None
    """The certificates, in PEM, of the authorities that may sign the certificate of an `https://` endpoint, relative to
    this file. Absent: those that the system trusts. The host name is verified in either case."""
    cache_salt: bool = False
    """For `kind = "openai"`: the server separates cached prefixes by the field `cache_salt` of requests, as vLLM and
    SGLang do, and gets one that follows `gateway.prefix_sharing`. Without it, all clients share what it caches. Servers
    that do not know the field may reject requests with it."""
    models: tuple[str, ...] = ()
    """For `kind = "openai"`: the models to use there, including any that the server does not list. Empty: all that it
    lists."""
    set_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """For `kind = "openai"`: fields set in every request to the server, overriding those of the client."""
    strip_params: tuple[str, ...] = ()
    """For `kind = "openai"`: fields removed from every request to the server."""
    memory_mb: Count | None = None
    """Memory that models may take on all devices of the node together at most, weights and KV caches included. A
    smaller `limits.memory_mb` of the node takes precedence."""
    devices: tuple[NeuronDevice, ...] = ()
    wake: WakeRules | None = None

    @property
    def abilities(self) -> Abilities:
        """The abilities that follow from its kind; the node reports its dialects."""
        is_own = self.kind == "neuron"
        return Abilities(
            takes_orders=is_own,
            reads_headers=is_own,
            reads_salt=self.cache_salt,
            set_params=self.set_params,
            strip_params=self.strip_params,
        )

    @property
    def ceilings(self) -> Ceilings:
        return Ceilings(
            node_bytes=None if self.memory_mb is None else self.memory_mb * MEBIBYTE,
            device_bytes={device.index: device.memory_mb * MEBIBYTE for device in self.devices},
        )

    def __post_init__(self) -> None:
        indices = [device.index for device in self.devices]
        if len(set(indices)) < len(indices):
            raise ValueError(f"`{self.name}` has two entries for one device; remove one of them")
        if self.cache_salt and self.kind == "neuron":
            raise ValueError(f"`{self.name}` is a neuron and separates cached prefixes by itself; remove cache_salt")
        if self.wake is not None and self.kind != "neuron":
            raise ValueError(f"`{self.name}` is not a neuron and cannot be suspended; remove wake")
        if self.kind == "neuron" and (self.models or self.set_params or self.strip_params):
            raise ValueError(f"`{self.name}` is a neuron: its own file has its models and parameters; remove them here")
        if not ROUTED_FIELDS.isdisjoint((*self.set_params, *self.strip_params)):
            names = ", ".join(sorted(ROUTED_FIELDS))
            raise ValueError(f"set_params and strip_params of `{self.name}` cannot have {names}; remove them")
        try:
            parts = urlsplit(self.endpoint)
            parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # also of ports and of host names that cannot be encoded
            is_address = False
        if not is_address or parts.username is not None or parts.query:
            raise ValueError(f"endpoint must look like `http://beast.internal:13131`, got `{self.endpoint}`")


class DiscoverySection(Section, frozen=True):
    """Nodes that are found by DNS, in addition to `[[neurons]]`."""

    dns: Annotated[str, Meta(min_length=1)] | None = None
    """A name such as `neurons.cortex.svc`: every address that it resolves to is a neuron, called like its address.
    Nodes join and leave as the name changes."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 13131
    """The port of these neurons."""
    interval_s: Seconds = 5.0
    """How often the name is resolved."""


class Config(Section, frozen=True):
    """`cortex.toml`."""

    gateway: GatewaySection = GatewaySection()
    limits: LimitsSection = LimitsSection()
    placement: PlacementRules = PlacementRules()
    eviction: EvictionRules = EvictionRules()
    neurons: tuple[NeuronSection, ...] = ()
    discovery: DiscoverySection = DiscoverySection()
    keys: tuple[KeySection, ...] = ()
    groups: tuple[GroupSection, ...] = ()
    sign_in: SignInSection = SignInSection()
    ledger: LedgerSection = LedgerSection()
    responses: ResponsesSection = ResponsesSection()
    batches: BatchesSection = BatchesSection()
    activity: ActivitySection = ActivitySection()
    pictures: PicturesSection = PicturesSection()
    telemetry: TelemetrySection = TelemetrySection()

    def __post_init__(self) -> None:
        Keyring(self.keys)
        check_groups(self.keys, self.groups)
        if self.sign_in.group is not None and self.sign_in.group not in {group.name for group in self.groups}:
            raise ValueError(f"sign_in.group is `{self.sign_in.group}`, and there is no such group")
        if self.limits.max_buffered_mb < self.gateway.max_body_mb:
            raise ValueError(
                f"limits.max_buffered_mb is {self.limits.max_buffered_mb}, less than one body of gateway.max_body_mb,"
                f" {self.gateway.max_body_mb}; raise the one or lower the other"
            )
        names = [neuron.name for neuron in self.neurons]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two neurons are called `{name}`; give each its own name")

    @property
    def other_variables(self) -> frozenset[str]:
        """Those of the commands, and those that hold the keys of nodes."""
        keys = {variable for neuron in self.neurons if (variable := neuron.key_env)}
        keys |= {self.sign_in.client_secret_env} if self.sign_in.client_secret_env else set()
        return COMMAND_VARIABLES | keys | ({self.gateway.node_key_env} if self.gateway.node_key_env else set())

    def key_variable(self, neuron: NeuronSection) -> str | None:
        """The environment variable that holds the key of a node; None: it gets none. A foreign server gets only a key
        of its own."""
        return neuron.key_env or (self.gateway.node_key_env if neuron.kind == "neuron" else None)

    def ca_file(self, neuron: NeuronSection, directory: Path) -> Path | None:
        """The authorities of a node. Relative paths start at `directory`."""
        file = neuron.ca_file or self.gateway.node_ca_file
        return None if file is None else directory / file.expanduser()

    @property
    def public_addresses(self) -> tuple[Listen, ...]:
        """The addresses of the API that other hosts can reach."""
        addresses = (self.gateway.listen, self.gateway.ollama_listen)
        return tuple(address for address in addresses if address is not None and not address.is_loopback)

    def state_directory(self, directory: Path) -> Path:
        """The directory of `gateway.state`; relative paths of the configuration start at `directory`."""
        return directory / self.gateway.state.expanduser()

    def database(self, directory: Path) -> str:
        """The usage database as an absolute path or a URL."""
        return self._located(self.ledger.database, directory)

    def responses_database(self, directory: Path) -> str:
        """The database of stored responses as an absolute path or a URL."""
        shared = self.ledger.database if is_url(self.ledger.database) else "cortex-responses.db"
        return self._located(self.responses.database or shared, directory)

    def _located(self, database: str, directory: Path) -> str:
        return database if "://" in database else str(self.state_directory(directory) / Path(database).expanduser())


def load(
    path: Path | None, env: Mapping[str, str], *, defaults: Mapping[str, Mapping[str, Any]] | None = None
) -> Config:
    """The configuration in `path` and the environment; `defaults`, by section and key, replace those of the types.

    Raises `SettingsError` with a message of one line.
    """
    config = settings.load(Config, path, env_prefix=PREFIX, env=env, defaults=defaults)
    settings.check_key_variables([config.gateway.node_key_env, *(neuron.key_env for neuron in config.neurons)], env)
    return config


def check_environment(env: Mapping[str, str]) -> None:
    """Raise `SettingsError` for a variable that no command and no configuration reads."""
    settings.check_variables(Config, PREFIX, env, COMMAND_VARIABLES)
