"""The types of `models.toml`, and how the name in a request is resolved to a model.

A catalogue is optional: nodes list their own models, and those get a default spec.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Collection, Iterable
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import msgspec

from cortex.fleet.known_models import AmbiguousName, known_model
from cortex.formats.quant_names import is_same_quant, label_in
from cortex.settings import Section
from cortex.wire.errors import ModelNotFound, shorten
from cortex.wire.events import Usage
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import plain_name, split_quant
from cortex.wire.node.groups import MAX_NODES
from cortex.wire.node.load_options import ENGINE, Count, LoadOptions, is_path
from cortex.wire.node.neighbours import repository_of
from cortex.wire.node.orders import LoadRequest
from cortex.wire.preset import Preset

MEBIBYTE = 1024 * 1024

LoadPolicy = Literal["on_demand", "pinned", "manual"]
Capability = Literal["chat", "tools", "reasoning", "vision", "embeddings", "rerank", "insert"]
LoadingState = Literal["comment", "reasoning"]
Amount = Annotated[int, msgspec.Meta(ge=0)]
Price = Annotated[float, msgspec.Meta(ge=0)]


class Cost(Section, frozen=True):
    """The price of a million tokens, in any currency; shown to clients in `/v1/models`."""

    input: Price = 0.0
    cached_input: Price = 0.0
    output: Price = 0.0

    def of(self, *, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> float:
        """The cost of these tokens; `cached_tokens` are part of the prompt."""
        fresh = prompt_tokens - cached_tokens
        return (fresh * self.input + cached_tokens * self.cached_input + completion_tokens * self.output) / 1e6


class ModelSpec(Section, LoadOptions, frozen=True, kw_only=True):
    """A model of the fleet. Only `id` is required. Load options that are not set here are those of the node's
    configuration. Changes apply from the next load on."""

    id: Annotated[str, msgspec.Meta(min_length=1)]
    """The name clients use."""
    vram_mb: Count | None = None
    """Expected size over all devices; the node's own estimate when absent. Measured bytes replace it after a load."""
    min_device_vram_mb: Amount = 0
    """Devices smaller than this are not considered."""
    pinned_on: tuple[str, ...] = ()
    """Nodes that always keep it loaded. They are preferred and never evict it."""
    only_on: tuple[str, ...] = ()
    """The only nodes where it is loaded. Empty: any node."""
    nodes: Annotated[int, msgspec.Meta(ge=2, le=MAX_NODES)] | tuple[str, ...] = ()
    """For a model that outgrows a node: the number of nodes that run it together, or their names; the first one serves
    it. Its `harness` must be a server that runs on several nodes, such as `vllm`, and every node needs a
    `cluster_address`. Each takes an equal part of `tensor_parallel`, at least one device."""
    load: LoadPolicy | None = None
    """`on_demand`: loaded by the first request. `pinned`: loaded at start, and kept. `manual`: loaded only by the
    operator. When absent: `pinned` where `pinned_on` is given, else `on_demand`."""
    priority: int = 0
    """A model never evicts one of higher priority."""
    queue_priority: int | None = None
    """When models wait for memory, the one with the highest value is loaded first. When absent: `priority`."""
    evict_cost: Price = 1.0
    """The relative cost of evicting the model: the cheapest model is evicted first."""
    max_requests: Count | None = None
    """Concurrent requests for the model, running and waiting together; further ones are rejected with 429. When absent:
    no limit, they wait."""
    ttl_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """After this long without a request the model is put to sleep, and after the same time again it is unloaded. It is
    unloaded at once if its node lacks the host memory. When absent: `eviction.ttl_s`; 0: it stays until its memory is
    needed."""
    cost: Cost = Cost()
    tokens_per_request: Amount = 1000
    """Cost charged to the key's budget per request whose response reports no tokens, such as speech, images and other
    services of a server (`[[harnesses]]`). A request for `n` images is charged `n` times as much."""
    tokens_per_minute: Amount = 0
    """Additional cost per minute of work on such a request."""
    preset: Preset = Preset()
    """Fields to add to its requests, such as `{ system = "Be brief.", set_params = { temperature = 0 } }`. Those of an
    alias take precedence."""
    capabilities: tuple[Capability, ...] = ()
    """Shown to clients. Empty: as the node reports."""
    display_name: str | None = None
    """Shown to clients in `/v1/models` in addition to the id."""
    description: str | None = None
    """The same."""
    license: str | None = None
    """Shown to Ollama's clients."""
    loading_state: LoadingState | None = None
    """Takes precedence over `gateway.loading_state`."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """Any values, shown as `metadata` and as `meta.llamaswap`."""
    unlisted: bool = False
    """Leave the model and its aliases out of the lists of models; requests that name it are served. `/v1/models` has it
    with `?unlisted=true`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.only_on and (excluded := [name for name in self.pinned_on if name not in self.only_on]):
            raise ValueError(f"`{self.id}` is pinned on {', '.join(excluded)}, which `only_on` excludes")
        if self.chat_template and self.harness not in (None, ENGINE):
            raise ValueError(f"`{self.id}` has a chat_template, which {self.harness} does not use: remove it")
        if self.pipeline_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError(f"`{self.id}` has tensor_parallel and pipeline_parallel; choose one of them")
        if self.nodes:
            self._check_nodes()

    def _check_nodes(self) -> None:
        if self.harness is None or self.harness == ENGINE:
            raise ValueError(
                f"`{self.id}` has `nodes`, but the built-in engine runs on one node only: set `harness` to a server "
                "that runs on several, such as `vllm`, or use the devices of one node with `tensor_parallel`"
            )
        if self.pipeline_parallel > 1:
            raise ValueError(
                f"`{self.id}` has `nodes` and pipeline_parallel; remove one: its server divides the layers"
            )
        if self.tensor_parallel > 1 and self.tensor_parallel % self.num_nodes:
            raise ValueError(
                f"tensor_parallel = {self.tensor_parallel} of `{self.id}` cannot be shared equally by "
                f"{self.num_nodes} nodes"
            )
        if not self.node_names:
            return
        lead = self.node_names[0]
        if self.num_nodes > MAX_NODES or len(set(self.node_names)) < max(2, self.num_nodes):
            raise ValueError(f"`nodes` of `{self.id}` must name 2 to {MAX_NODES} nodes, each once")
        if self.only_on or any(name != lead for name in self.pinned_on):
            raise ValueError(
                f"`{self.id}` is served by {lead}, the first of its `nodes`: remove `only_on` and other pins"
            )

    def price_of(self, num_choices: int, minutes: float = 0) -> int:
        """The tokens charged for a request whose response reports none."""
        return self.tokens_per_request * num_choices + round(self.tokens_per_minute * minutes)

    @property
    def num_nodes(self) -> int:
        """How many nodes run it together."""
        return self.nodes if isinstance(self.nodes, int) else max(1, len(self.nodes))

    @property
    def node_names(self) -> tuple[str, ...]:
        """The nodes that the operator names."""
        return () if isinstance(self.nodes, int) else self.nodes

    @property
    def part(self) -> ModelSpec:
        """The part that one of its nodes runs."""
        count = max(1, self.tensor_parallel // self.num_nodes)
        return msgspec.structs.replace(self, nodes=(), tensor_parallel=count)

    @property
    def load_request(self) -> LoadRequest:
        """A request to a node for the model with its options; placement adds devices and limits."""
        return LoadRequest(model_id=self.id, **self.shared_with(LoadRequest))

    @property
    def sized_by_node(self) -> LoadRequest:
        """`load_request` without quantisation and context, which the gateway applies to the sizes that nodes report."""
        return msgspec.structs.replace(self.load_request, quant=None, context_tokens=None)

    @property
    def policy(self) -> LoadPolicy:
        return self.load or ("pinned" if self.pinned_on else "on_demand")

    @property
    def turn(self) -> int:
        """Waiting models are loaded in descending order of this."""
        return self.priority if self.queue_priority is None else self.queue_priority

    @property
    def vram_bytes(self) -> int | None:
        return None if self.vram_mb is None else self.vram_mb * MEBIBYTE

    def is_pinned_on(self, node: str) -> bool:
        """Whether `node` must keep the model. A model pinned without named nodes is kept wherever it is."""
        return node in self.pinned_on or (self.policy == "pinned" and not self.pinned_on)


class Alias(Section, Preset, frozen=True):
    """Another name for a model, which may add fields to requests."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    """The id it stands for."""
    background: bool = False
    """For secondary requests of an agent, besides its main model: they never evict anything."""
    display_name: str | None = None
    """Shown to clients in `/v1/models`."""
    description: str | None = None
    """The same."""
    license: str | None = None
    """Shown to Ollama's clients."""


class SwapGroup(Section, frozen=True):
    """Models that exclude each other on a node, whatever its memory."""

    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    swap: bool = True
    """Only one member is loaded on a node at a time."""
    exclusive: bool = False
    """A member is loaded only after every model outside the group has left the node, except pinned ones and those of
    persistent groups."""
    persistent: bool = False
    """Models outside the group never evict a member."""


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a requested name stands for."""

    spec: ModelSpec
    alias: str | None = None
    """The alias or pattern that matched."""
    background: bool = False
    preset: Preset | None = None
    """Fields that the name adds to a request."""

    @property
    def model_id(self) -> str:
        return self.spec.id


class Catalogue(Section, frozen=True, dict=True):
    """`models.toml`: the models on offer and their aliases."""

    models: tuple[ModelSpec, ...] = ()
    aliases: dict[str, str | Alias] = msgspec.field(default_factory=dict)
    """Exact names or patterns with `*` and `?`, such as `"claude-*haiku*" = "…"`; the most specific pattern wins.
    A table `{ model = "…", background = true }` marks a name whose requests never evict, and
    `{ model = "…", set_params = { temperature = 0 }, reasoning = "high" }` one whose requests get these fields."""

    swap_groups: dict[str, SwapGroup] = msgspec.field(default_factory=dict)
    """Groups of models that exclude each other: `[swap_groups.NAME]`. A model is in one group at most."""
    together: tuple[tuple[str, ...], ...] = ()
    """Sets of models that a node may have loaded together, such as `[["a", "b"], ["a", "c"]]`; a model in none of them
    is loaded alone. Empty: all that fit."""
    profiles: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    """Sets of models by name, which `cortex load --profile NAME` loads together."""

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for spec in self.models:
            if spec.id in seen:
                raise ValueError(f"model id `{spec.id}` is given twice; remove one of them")
            seen.add(spec.id)
        for name in self.aliases:
            if name in seen:
                raise ValueError(f"alias `{name}` is also the id of a model; rename one of them")
        grouped: dict[str, str] = {}
        for name, group in self.swap_groups.items():
            for member in group.members:
                if grouped.setdefault(member, name) != name:
                    raise ValueError(f"`{member}` is in the groups {grouped[member]} and {name}; remove it from one")

    def spec(self, model_id: str) -> ModelSpec:
        """The operator's spec, or the default for a model that only nodes list."""
        return self._by_id.get(model_id) or _unlisted(model_id)

    def has(self, model_id: str) -> bool:
        return model_id in self._by_id

    def cost(self, model_id: str, usage: Usage) -> float:
        """The cost of a model's usage; 0 without prices."""
        spec = self._by_id.get(model_id)
        if spec is None:
            return 0.0
        return spec.cost.of(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )

    @cached_property
    def _by_id(self) -> dict[str, ModelSpec]:
        return {spec.id: spec for spec in self.models}

    @cached_property
    def request_limits(self) -> dict[str, int]:
        """The `max_requests` of each model that has one."""
        return {spec.id: spec.max_requests for spec in self.models if spec.max_requests is not None}

    @cached_property
    def swap_group_of(self) -> dict[str, str]:
        """The group of each model that is in one."""
        return {member: name for name, group in self.swap_groups.items() for member in group.members}

    def is_persistent_beside(self, model_id: str, newcomer: str) -> bool:
        """Whether the model's group is persistent and the other model is not in it."""
        name = self.swap_group_of.get(model_id)
        is_outside = name is not None and self.swap_group_of.get(newcomer) != name
        return name is not None and is_outside and self.swap_groups[name].persistent

    @cached_property
    def pinned(self) -> tuple[ModelSpec, ...]:
        """The models that must be kept loaded."""
        return tuple(spec for spec in self.models if spec.policy == "pinned")

    @cached_property
    def named_by_path(self) -> tuple[ModelSpec, ...]:
        """The models whose `source` is a path on the nodes."""
        return tuple(spec for spec in self.models if is_path(spec.source or ""))

    @cached_property
    def named_by_files(self) -> dict[str, tuple[ModelSpec, ...]]:
        """The models whose files nodes list under another id: by that id, or the repository on the hub."""
        found: dict[str, tuple[ModelSpec, ...]] = {}
        for spec in self.models:
            source = spec.source or spec.id
            for name in {source, repository_of(source) or source} - {spec.id} if not is_path(source) else ():
                found[name] = (*found.get(name, ()), spec)
        return found

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        return tuple(_most_specific_first(self.aliases))

    def resolve(self, name: str, live: Collection[str] = ()) -> Resolution:
        """The model that `name` stands for; `live` are the ids that nodes list beyond the catalogue.

        Exact names take precedence over patterns, and the catalogue over nodes. Aliases are not chained. If no model
        matches, Ollama's spelling (`NAME:latest`, `hf.co/OWNER/NAME:QUANT`) and short names of known models, such as
        `gpt-oss:20b`, are tried. Raises `ModelNotFound` with near misses; a name beyond the length limit is not
        compared with any.
        """
        if len(name) > MAX_MODEL_NAME:
            raise ModelNotFound(
                f"There is no model `{shorten(name)}`: a name has at most {MAX_MODEL_NAME} characters.", param="model"
            )
        if self.has(name):
            spec = self.spec(name)
            return Resolution(spec=spec, preset=spec.preset if spec.preset.adds_fields else None)
        if (target := self.aliases.get(name)) is not None:
            return self._through(name, target)
        if name in live:
            return Resolution(spec=_unlisted(name))
        for pattern in self._patterns:
            if fnmatch.fnmatchcase(name, pattern):
                return self._through(pattern, self.aliases[pattern])
        if (plain := plain_name(name)) != name and plain:
            return self.resolve(plain, live)
        model, quant = split_quant(name)
        if quant is not None and self._has_quant(model, quant, live):
            return self.resolve(model, live)
        for known in _known_ids(name):
            if self.has(known) or known in live:
                return self.resolve(known, live)
        raise _not_found(name, self._names() | set(live))

    def _has_quant(self, model: str, quant: str, live: Collection[str]) -> bool:
        """Whether `model` is available as `quant`. For a model that only nodes list the catalogue does not know: true,
        because that is what was pulled."""
        if not self.has(model):
            return model in live and label_in(quant) is not None
        stored = self.spec(model).quant
        return stored is not None and is_same_quant(quant, None, stored)

    def _through(self, name: str, target: str | Alias) -> Resolution:
        alias = Alias(model=target) if isinstance(target, str) else target
        spec = self.spec(alias.model)
        preset = alias.over(spec.preset)
        return Resolution(
            spec=spec, alias=name, background=alias.background, preset=preset if preset.adds_fields else None
        )

    @cached_property
    def ids(self) -> frozenset[str]:
        """The ids of its models."""
        return frozenset(spec.id for spec in self.models)

    @cached_property
    def has_presets(self) -> bool:
        """Whether any name adds fields to requests."""
        aliases = (target for target in self.aliases.values() if isinstance(target, Alias))
        return any(each.adds_fields for each in (*(spec.preset for spec in self.models), *aliases))

    @property
    def alias_targets(self) -> dict[str, str]:
        """The name that each alias stands for."""
        return {name: target if isinstance(target, str) else target.model for name, target in self.aliases.items()}

    def _names(self) -> frozenset[str]:
        return self.ids | {name for name in self.aliases if not is_pattern(name)}


@lru_cache(maxsize=8192)
def _unlisted(model_id: str) -> ModelSpec:
    """The default spec of a model that only nodes list."""
    return ModelSpec(id=model_id)


def _known_ids(name: str) -> tuple[str, ...]:
    """The ids under which a known model of this name may be listed."""
    try:
        known = known_model(name)
    except AmbiguousName:
        return ()
    return (
        () if known is None else tuple(filter(None, (known.name, known.repository, known.open_repository, known.gguf)))
    )


def near_misses(name: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Known names with a similar spelling, with or without the owner part."""
    short: dict[str, str] = {}
    for candidate in sorted(known):
        short.setdefault(candidate.lower(), candidate)
        short.setdefault(candidate.lower().rpartition("/")[2], candidate)
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, short, n=limit)
    close += difflib.get_close_matches(wanted.rpartition("/")[2], short, n=limit)
    return tuple(dict.fromkeys(short[match] for match in close))[:limit]


def _not_found(name: str, known: frozenset[str]) -> ModelNotFound:
    misses = near_misses(name, known)
    if misses:
        advice = f"did you mean {' or '.join(f'`{miss}`' for miss in misses)}?"
    else:
        advice = "GET /v1/models lists what there is." if known else "no node lists any model yet."
    return ModelNotFound(f"There is no model `{name}`: {advice}", param="model", details={"near_misses": list(misses)})


def is_pattern(name: str) -> bool:
    """Whether an alias has wildcards."""
    return any(character in name for character in "*?[")


def _most_specific_first(names: Iterable[str]) -> list[str]:
    """Patterns by their number of literal characters; equal ones stay in file order."""
    return sorted(filter(is_pattern, names), key=lambda pattern: -sum(character not in "*?" for character in pattern))
