"""From a checkpoint to a model in memory: first the sizes, then the memory, then the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from cortex.formats.units import gib
from cortex.neuron.engine.errors import InsufficientMemory, LoadCancelled, LoadError, UnsupportedError
from cortex.neuron.engine.loading.draft_files import DraftFiles
from cortex.neuron.engine.loading.filling import Progress, fill_from
from cortex.neuron.engine.loading.kernel_pass import KernelPass, ModelToCompile, kernel_pass
from cortex.neuron.engine.memory.device import compute_dtype, device_memory
from cortex.neuron.engine.memory.dtypes import dtype_name
from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.engine.memory.host_weights import HostBuffers
from cortex.neuron.engine.memory.plan import (
    MIN_PAGES,
    PAGE_TOKENS,
    STEP_TOKENS,
    UNLIMITED,
    MemoryPlan,
    ModelSizes,
    max_graph_tokens,
    penalty_bytes,
    plan_with_graphs,
)
from cortex.neuron.engine.memory.sequences import NoSequences, SequenceMemory
from cortex.neuron.engine.request import LoadSpec
from cortex.neuron.families.registry import family_of
from cortex.neuron.kernels.cpu.native import multiplies_codes
from cortex.neuron.kernels.device_properties import properties_of
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.moe.host_memory import processors_of_one_node
from cortex.neuron.kernels.moe.host_team import HostTeam
from cortex.neuron.kernels.quantised.recipes import RECIPES, recipe_of
from cortex.neuron.layers.parallel import SINGLE_RANK, ParallelGroup
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.architecture import Architecture
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.draft_model import DraftModel
from cortex.neuron.models.host_division import Division, LayerWeights, buffer_experts, divide_model, movable_layers
from cortex.neuron.models.packing import MatrixDevice, choose_layouts, draft_output, with_draft_output
from cortex.neuron.models.pooling.model import PooledModel
from cortex.neuron.models.proposer import Proposer
from cortex.neuron.models.registry import open_model, read_architecture
from cortex.neuron.models.sizes import WeightStorage, head_bytes, weight_bytes
from cortex.neuron.models.towers.config import PASS_PATCHES
from cortex.neuron.models.towers.kinds import build_tower
from cortex.neuron.models.transformers.architecture import TransformersArchitecture
from cortex.neuron.models.transformers.model import TransformersModel
from cortex.neuron.models.transformers.network import Network
from cortex.neuron.pictures.spec import PictureSpec, read_picture_spec
from cortex.neuron.text.files import picture_spec
from cortex.neuron.weights.adapter import ADAPTER_KEY
from cortex.neuron.weights.errors import Cancelled, CheckpointError, Unsupported
from cortex.neuron.weights.sharded import ShardedCheckpoint
from cortex.neuron.weights.stored import TensorInfo

HOSTING_CONTEXT_TOKENS = 16_384
"""Weights move to host memory until there is room for a context of this many tokens."""
DETERMINISTIC_NOTE = "deterministic: the tokens of a request are independent of the batch, at lower speed"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    body: Decoder | PooledModel
    dtype: torch.dtype
    context_tokens: int
    weight_bytes: int
    """Includes the position tables."""
    memory: SequenceMemory
    notes: tuple[str, ...]
    proposal_cost: float = 0.0
    """Cost of a draft token computed on the device, relative to a step: see `FastestWidths`."""
    draft: DraftModel | None = None
    graph_tokens: int = 0
    """Steps of prompts up to this many tokens are captured as graphs."""
    host: HostBuffers | None = None
    """The host memory of weights that do not fit the device; None without any."""
    team: HostTeam | None = None
    """The CPU threads that compute those weights."""
    kernels: KernelPass | None = None
    """The pass that compiles its kernels ahead; None if they are compiled on first use."""

    def compiled(self, progress: Progress, cancelled: Callable[[], bool]) -> None:
        """Waits for the kernels that the first response needs. Raises LoadCancelled."""

        def poll() -> None:
            if cancelled():
                raise LoadCancelled("the load was cancelled")
            progress("compile", 0, 0)

        if self.kernels is not None and not self.kernels.is_cached:
            poll()
            self.kernels.ready(poll)

    def release(self) -> None:
        """Stops compiling kernels and frees the host memory of weights, which the driver would otherwise keep."""
        if self.kernels is not None:
            self.kernels.close()
        if self.host is not None:
            self.host.release()

    @property
    def has_failed_pass(self) -> bool:
        """Whether its kernels could not be compiled ahead."""
        return self.kernels is not None and self.kernels.has_failed

    @property
    def proposer(self) -> Proposer | None:
        """The module that computes draft tokens on the device; None without one."""
        return self.draft or (self.body.prediction if isinstance(self.body, Decoder) else None)

    def storages(self) -> list[torch.UntypedStorage]:
        """The storages held while the model is loaded, each once."""
        return [*self.body.storages(), *([] if self.draft is None else self.draft.model.storages())]

    @property
    def model(self) -> Decoder:
        """The model, which generates text."""
        assert isinstance(self.body, Decoder), "the model pools texts"
        return self.body


class AgreeingGroup(ParallelGroup, Protocol):
    """A group whose ranks can agree on sizes."""

    @property
    def num_bytes(self) -> int:
        """Device memory that the communicator holds here, already allocated."""
        ...

    def smallest(self, counts: Sequence[int]) -> list[int]:
        """The smallest of every rank's counts, element by element."""
        ...


def load_model(
    spec: LoadSpec,
    device: torch.device,
    progress: Progress,
    cancelled: Callable[[], bool],
    group: AgreeingGroup | None = None,
) -> LoadedModel:
    """`group`: the ranks among which the model is divided; each loads its share.

    Raises LoadError or LoadCancelled; when it raises, nothing it allocated is referenced any more.
    """
    progress("resolve", 0, 0)
    try:
        checkpoint, whole = open_model(Path(spec.path))
        if spec.speculation == "mtp":
            whole = whole.with_head(checkpoint.tensors)
        if group is not None and spec.stage is None:  # a stage reads the whole tensors of its layers
            checkpoint = ShardedCheckpoint(checkpoint, whole.tensor_slices(group.shard))
    except (Unsupported, UnsupportedModel) as error:
        raise UnsupportedError(str(error)) from error
    except CheckpointError as error:
        raise LoadError(str(error)) from error

    draft: DraftFiles | None = None
    try:
        whole.check_layer_count(checkpoint.tensors)
        if spec.quant is not None and ADAPTER_KEY in checkpoint.config:
            raise LoadError("a model with an adapter cannot be quantised at load; load its repository for one task")
        if spec.speculation.startswith("draft") and (spec.rank is None or spec.rank.rank == 0):
            choose = partial(matrix_layouts, spec=replace(spec, quant=None), device=device)
            draft = DraftFiles.open(Path(spec.draft_path), Path(spec.path), choose)
        return build_model(
            checkpoint.config,
            spec,
            device,
            lambda parameters: fill_from(checkpoint, parameters, progress, cancelled),
            matrix_layouts(checkpoint.tensors, spec, device),
            group,
            checkpoint.tensors,
            None if draft is None else BuiltDraft(draft, progress, cancelled),
            pictures=picture_spec(Path(spec.path)),
        )
    except (Unsupported, UnsupportedModel) as error:
        raise UnsupportedError(str(error)) from error
    except Cancelled as error:
        raise LoadCancelled(f"loading {spec.path} was cancelled") from error
    except CheckpointError as error:
        raise LoadError(str(error)) from error
    finally:
        checkpoint.close()
        if draft is not None:
            draft.close()


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """A draft model that `build_model` builds after the model itself."""

    files: DraftFiles
    progress: Progress
    cancelled: Callable[[], bool]


def matrix_layouts(
    tensors: Mapping[str, TensorInfo], spec: LoadSpec, device: torch.device
) -> Mapping[str, MatrixLayout]:
    """The matrices that are quantised in memory, by tensor. Raises LoadError."""
    recipe = None
    if spec.quant is not None:
        recipe = recipe_of(spec.quant)
        if recipe is None:
            raise LoadError(f"quant {spec.quant!r} is not known; choose one of {', '.join(RECIPES)}")
    may_be_packed = device.type == "cpu" and spec.dtype == "auto"
    place = MatrixDevice(device.type, dtype_name(spec.dtype, device.type), may_be_packed)
    layouts = choose_layouts(place, tensors, recipe)
    if layouts and may_be_packed:  # only then: to measure takes longer than the load of a small model
        place = replace(place, multiplies_codes=multiplies_codes(compute_dtype(spec.dtype, device)))
        layouts = choose_layouts(place, tensors, recipe)
    if recipe is not None and not place.quantises(recipe):
        raise LoadError(
            f"weights cannot be quantised as {recipe.name} at load here: that takes a GPU with bfloat16, or, "
            "for the formats of GGUF files, the dtype auto on a CPU whose quantised kernels are faster than dense ones"
        )
    return with_draft_output(place, layouts) if spec.speculation == "mtp" else layouts


def build_model(
    config: Mapping[str, Any],
    spec: LoadSpec,
    device: torch.device,
    fill: Callable[[Parameters], None],
    packing: Mapping[str, MatrixLayout] | None = None,
    group: AgreeingGroup | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
    draft: BuiltDraft | None = None,
    pictures: PictureSpec | None = None,
) -> LoadedModel:
    """Sizes the model, rejects one that does not fit, allocates it, fills its weights with `fill`, and adds the pages.

    `packing`: the layouts of tensors that stay quantised. `group`: see `load_model`. `tensors`: those of the
    checkpoint, which models of a library need. `draft`: of the draft model. `pictures`: its picture input; None: as in
    its config.
    """
    dtype = compute_dtype(spec.dtype, device)
    packing = {} if packing is None else packing  # one without a length, of which no tensor is listed, is false
    whole, network = read_architecture(config), None
    if isinstance(whole, TransformersArchitecture):
        network = Network.of(whole)
        whole, packing = network.architecture, whole.packing_of(packing)
    if spec.vision == "off":
        whole = whole.without_tower()
    if spec.speculation == "mtp":
        whole = whole.with_head(tensors)
    architecture = _share_of(whole, spec, group)
    if architecture.pooling is not None and spec.deterministic:
        raise UnsupportedModel("deterministic is only for models that generate text; omit it")
    if architecture.pictures.is_whole and spec.deterministic:
        raise UnsupportedModel(
            "deterministic computes prompts in small blocks, and this model sees pictures whole; "
            'omit it, or load the model with vision = "off"'
        )
    kv_dtype = kv_cache_dtype(spec, dtype, device)
    pass_patches = PASS_PATCHES[device.type] if spec.vision == "device" else 0
    storage = WeightStorage(dtype.itemsize, packing, kv_dtype.itemsize, tensors or {}, pass_patches)
    sizes = ModelSizes.of(architecture, storage, spec.context_tokens)
    if draft is not None:
        sizes = sizes.with_draft(draft.files.sizes(dtype.itemsize, kv_dtype.itemsize))
    have_bytes = usable_bytes(spec, device)
    if architecture.has_ends:  # tokens are drawn where the head is
        have_bytes -= penalty_bytes(spec.max_num_seqs + 1, sizes.vocab, sizes.context_tokens)
    limit_bytes = spec.memory_bytes if spec.stage is None else spec.stage.memory_bytes
    own_bytes = None if limit_bytes is None else limit_bytes - (0 if group is None else group.num_bytes)
    within_layers = group if group is not None and spec.stage is None else SINGLE_RANK
    may_capture = spec.stage is None and not spec.deterministic and within_layers.max_captured_bytes > 0
    most = max_graph_tokens(properties_of(device).total_bytes) if may_capture else 0
    rows, kind, wanted = spec.max_num_seqs, device.type, spec.wanted_tokens
    plan = plan_with_graphs(sizes, have_bytes, own_bytes, most, max_rows=rows, device_kind=kind, wanted_tokens=wanted)
    allowed_bytes = have_bytes if own_bytes is None else min(have_bytes, own_bytes)
    passed_architecture, division = architecture, None
    if spec.host_weight_bytes and not (plan.fits and plan.context_tokens >= least_context(sizes, spec)):
        _check_hosting(spec, config, architecture)
        division = _divided(architecture, storage, sizes, spec, allowed_bytes)
        architecture = architecture.hosting(division.moved)
        weights = division.device_bytes + sizes.weight_bytes - weight_bytes(passed_architecture, storage)
        sizes = replace(sizes, weight_bytes=weights)
        plan = plan_with_graphs(sizes, have_bytes, own_bytes, 0, max_rows=rows, device_kind=kind, wanted_tokens=wanted)
    if not plan.fits:
        raise _no_room(sizes, limit_bytes, device, allowed_bytes - plan.slots.num_bytes)
    if group is not None:
        plan = _agreed(plan, sizes, group, is_recurrent=architecture.is_recurrent)
    sequences = (plan.slots.rows, plan.context_tokens, spec.deterministic, spec.speculation != "off")
    passed = ModelToCompile(passed_architecture, packing, dtype, kv_dtype, within_layers.shard, *sequences)
    compiling = kernel_pass(passed, device)
    with contextlib.ExitStack() as failing:
        if compiling is not None:
            failing.callback(compiling.close)
        host: HostBuffers | None = None
        team: HostTeam | None = None
        if division is not None:
            host = HostBuffers(pinned=device.type == "cuda")
            failing.callback(host.release)
            team = _team(spec, device, dtype, host, movable_layers(passed_architecture, storage))
        parameters = Parameters(device, dtype, packing, within_layers, team)
        model: Decoder | PooledModel
        if network is not None:
            model = TransformersModel(network, architecture, parameters, plan.context_tokens, tensors or {})
        else:
            num_positions = plan.context_tokens
            if architecture.pooling is not None:
                model = PooledModel(architecture, parameters, num_positions=num_positions)
            else:
                model = Decoder(architecture, parameters, num_positions, step_tokens(spec, plan.slots.rows, device))
        fill(parameters)
        if team is not None:
            team.prepare()
        num_bytes = parameters.num_bytes
        if isinstance(model, Decoder) and architecture.held_tower is not None:
            pictures = pictures or read_picture_spec(family_of(config).pictures, config, {})
            if pictures is None:
                raise UnsupportedModel("the model has a vision tower, but its config does not describe its input")
            place = device if spec.vision == "device" else torch.device("cpu")
            tower_parameters = Parameters(place, dtype if spec.vision == "device" else compute_dtype("auto", place))
            model.tower = build_tower(architecture.held_tower, tower_parameters, pictures)
            fill(tower_parameters)
            num_bytes += tower_parameters.num_bytes if place == device else 0
        drafting: DraftModel | None = None
        if draft is not None:
            arguments = (device, dtype, sizes.vocab, plan.context_tokens, draft.progress, draft.cancelled)
            drafting = draft.files.build(*arguments)
        memory: SequenceMemory = NoSequences(plan.slots)
        if isinstance(model, Decoder):
            small = None if drafting is None else drafting.model
            memory = SequenceMemory(model, plan.num_pages, PAGE_TOKENS, plan.slots, dtype, device, kv_dtype, small)
        draft_bytes = 0 if drafting is None else drafting.model.parameters.num_bytes
        table_bytes = model.ropes.num_bytes + (0 if drafting is None else drafting.model.ropes.num_bytes)
        failing.pop_all()
        return LoadedModel(
            body=model,
            dtype=dtype,
            context_tokens=plan.context_tokens,
            weight_bytes=num_bytes + draft_bytes + table_bytes,
            memory=memory,
            notes=(
                *architecture.notes,
                *_host_notes(division),
                *plan.notes,
                *((DETERMINISTIC_NOTE,) if spec.deterministic else ()),
            ),
            proposal_cost=draft_bytes / max(1, parameters.num_bytes) or _proposal_cost(architecture, storage),
            draft=drafting,
            graph_tokens=plan.graph_tokens,
            kernels=compiling,
            host=host,
            team=team,
        )


def least_context(sizes: ModelSizes, spec: LoadSpec) -> int:
    """The context for which weights make room, if some of them may be in host memory."""
    return min(sizes.context_tokens, max(spec.wanted_tokens, HOSTING_CONTEXT_TOKENS))


def _check_hosting(spec: LoadSpec, config: Mapping[str, Any], architecture: Architecture) -> None:
    """Raises UnsupportedModel for options that cannot be combined with weights in host memory."""
    reason = None
    if spec.deterministic:
        reason = "deterministic = true"
    elif ADAPTER_KEY in config:
        reason = "an adapter"
    elif architecture.pooling is not None or architecture.backend != "native":
        reason = "models that pool texts or have no native family"
    if reason is not None:
        raise UnsupportedModel(f"the model does not fit, and weights in host memory cannot be combined with {reason}")


def _divided(
    architecture: Architecture, storage: WeightStorage, sizes: ModelSizes, spec: LoadSpec, allowed_bytes: int
) -> Division:
    """Raises LoadError."""
    other_bytes = sizes.weight_bytes - weight_bytes(architecture, storage) + sizes.table_bytes
    tokens = least_context(sizes, spec)
    sequence_bytes = (-(-tokens // PAGE_TOKENS) + MIN_PAGES) * sizes.page_bytes + 16 * sizes.slot_bytes
    room_bytes = allowed_bytes - other_bytes - min(sequence_bytes, allowed_bytes // 4)
    division = divide_model(architecture, storage, room_bytes, spec.own_host_weight_bytes)
    if isinstance(division, str):
        raise LoadError(f"the model does not fit the device: {division}")
    free_bytes = read_host_memory().free_bytes
    if division.host_bytes > free_bytes:
        raise InsufficientMemory(
            f"the weights take {gib(division.host_bytes)} of host memory, but {gib(free_bytes)} are free"
        )
    return division


def _team(
    spec: LoadSpec, device: torch.device, dtype: torch.dtype, host: HostBuffers, layers: Sequence[LayerWeights]
) -> HostTeam:
    """Raises UnsupportedError."""
    number, count = (0, 1) if spec.rank is None else (spec.rank.rank, spec.rank.size)
    processors = processors_of_one_node(number, count)
    try:
        team = HostTeam(device, dtype, host.allocate, buffer_experts(layers), processors)
    except NotImplementedError as error:
        raise UnsupportedError(f"the CPU computes weights in host memory, and {error}") from error
    host.on_release = team.close
    return team


def _host_notes(division: Division | None) -> tuple[str, ...]:
    if division is None:
        return ()
    counts = {"routed experts": division.num_expert_layers, "feed-forward blocks": division.num_blocks}
    parts = " and ".join(f"{what} ({count} layers)" for what, count in counts.items() if count)
    return (f"{gib(division.host_bytes)} of weights in host memory: {parts}",)


def step_tokens(spec: LoadSpec, rows: int, device: torch.device) -> int:
    """Most tokens of a step."""
    return max(spec.prefill_chunk_tokens or STEP_TOKENS[device.type], rows)


def _proposal_cost(architecture: Architecture, storage: WeightStorage) -> float:
    """The time of a small step is that of reading its weights: here those of the head and the output matrix."""
    if architecture.head is None:
        return 0.0
    config, own = architecture.config, head_bytes(architecture, storage)
    if draft_output(storage.packing, architecture.output, config.hidden) is None:
        own += storage.linear_bytes(config.hidden, {"lm_head": config.vocab})
    return own / max(1, weight_bytes(architecture, storage))


def kv_cache_dtype(spec: LoadSpec, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of keys and values. Raises LoadError if the device cannot convert them."""
    if spec.kv_dtype == "auto":
        return dtype
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise LoadError(
            f"{torch.cuda.get_device_name(device)} has no instructions for 8-bit floating-point values; "
            'remove kv_dtype = "fp8", or use an Ada, Hopper or Blackwell card'
        )
    return torch.float8_e4m3fn


def _share_of(architecture: Architecture, spec: LoadSpec, group: AgreeingGroup | None) -> Architecture:
    """This rank's share of the model. Raises UnsupportedModel."""
    if group is None:
        return architecture
    if spec.stage is None:
        return architecture.sharded(group.shard)
    num_deep = 0 if architecture.tower is None else len(architecture.tower.deep_layers)
    if 0 < spec.stage.layers.start < num_deep:
        raise UnsupportedModel(f"vectors of pictures are added to the first {num_deep} layers: keep them in one stage")
    return architecture.staged(spec.stage.layers)


def _agreed(plan: MemoryPlan, sizes: ModelSizes, group: AgreeingGroup, *, is_recurrent: bool) -> MemoryPlan:
    """The largest plan that fits every rank, because ranks use the same rows and page ids and capture the same
    graphs."""
    slots = plan.slots
    offered = UNLIMITED if is_recurrent and not sizes.slot_bytes else slots.checkpoints
    numbers = (*plan.num_pages.values(), slots.rows, offered, plan.graph_tokens)
    *counts, rows, checkpoints, graph_tokens = group.smallest(numbers)
    limited = plan.limited(sizes, dict(zip(plan.num_pages, counts, strict=True)), rows, checkpoints)
    return replace(limited, graph_tokens=graph_tokens)


def usable_bytes(spec: LoadSpec, device: torch.device) -> int:
    """The memory of the device that a model may take now."""
    memory = device_memory(device, spec.num_host_shares)
    return memory.free_bytes - spec.min_free_bytes - memory.reserve_bytes


def _no_room(sizes: ModelSizes, limit_bytes: int | None, device: torch.device, have_bytes: int) -> LoadError:
    need_bytes = sizes.weight_bytes + MIN_PAGES * sizes.page_bytes
    # Unloading other models does not help a model whose own limit is too low.
    forbidden = limit_bytes is not None and need_bytes > limit_bytes
    advice = "raise the `memory_mb` that limits it" if forbidden else "unload something"
    return (LoadError if forbidden else InsufficientMemory)(
        f"the model needs {gib(need_bytes)} on {device} (weights {gib(sizes.weight_bytes)} and "
        f"at least one page of KV) but {gib(max(have_bytes, 0))} can be used; {advice}, "
        "or choose a smaller or more strongly quantised model"
    )
