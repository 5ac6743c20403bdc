"""Orders to a node and their responses: load and unload, files, the hub and devices, as JSON."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.node.groups import GroupMember
from cortex.wire.node.load_options import Count, FileOptions, PlacedOptions
from cortex.wire.node.neighbours import MAX_NEIGHBOURS, Neighbour
from cortex.wire.node.protocol import NodeValue

ModelName = Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
Neighbours = Annotated[tuple[Neighbour, ...], Meta(max_length=MAX_NEIGHBOURS)]
"""Nodes that have files of the model; they are tried before the hub."""
TenantName = Annotated[str, Meta(pattern="^[0-9a-f]{8,32}$")]
"""The first digits of a tenant's digest."""


class LoadRequest(PlacedOptions, frozen=True, kw_only=True):
    """`POST /models/load`. Options that are not given come from the node's configuration. Idempotent: a request for a
    model that is ready or loading joins it, unless it names another `quant`, which is rejected with 409."""

    model_id: ModelName
    min_context_tokens: Count | None = None
    """Minimum context, at most what empty devices hold; with less the load is rejected. Absent: the node decides as a
    gateway would. It unloads idle models for the wanted context and, if that does not help, loads with what fits."""
    max_bytes: Count | None = None
    """Limit for weights and KV cache over all devices. Absent: as configured on the node."""

    member: GroupMember | None = None
    """The model runs on several nodes, and this node starts one member of its group."""
    neighbours: Neighbours = ()
    wake_only: bool = False
    """Only wake the model if it is asleep; do not load it otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel > 1 and self.pipeline_parallel > 1:
            raise ValueError(f"`{self.model_id}` has tensor_parallel and pipeline_parallel: send only one of them")


class UnloadRequest(NodeValue, frozen=True, kw_only=True):
    """`POST /models/unload`. Waits for running requests up to `drain_s`; `force` ends them at once. Idempotent."""

    model_id: ModelName
    force: bool = False
    drain_s: float | None = None
    sleep: bool = False
    """Keep the weights in host memory if there is room; the model is then `asleep`, else `cold`."""
    group: str | None = None
    """Only if the model is a member of this group. Absent: in any case."""
    seen_context_tokens: int | None = None
    """The context that the sender saw, to have the model loaded again with more: a model that has more, or is being
    loaded, is left as it is. Absent: in any case."""
    forget: bool = False
    """Unload and delist the model. A model in the node's cache or folders only loses the options of requests, and one
    in its configuration nothing."""


class ForgetSizeRequest(NodeValue, frozen=True):
    """`POST /models/forget-size`: discard the measured size of a model."""

    model_id: ModelName


class FilesRequest(NodeValue, FileOptions, frozen=True):
    """`POST /files/pull`: download a model's files without a load; `POST /files/cancel`: stop that; `POST
    /files/delete`: delete them, never while the model is in memory. A pull is idempotent. Its harness reads the files
    after a pull."""

    model_id: ModelName
    neighbours: Neighbours = ()
    uses_hub: bool = True
    """If false, a pull takes the files as the neighbours have them, and nothing from the hub."""


class AssembleRequest(NodeValue, frozen=True, kw_only=True):
    """`POST /files/assemble`: make a repository of the cache of uploaded files (`POST /api/blobs/sha256:…`)."""

    repository: ModelName
    files: dict[str, Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]]
    """The SHA-256 of each, by its path in the repository."""


class AssembledFiles(NodeValue, frozen=True):
    repository: str
    num_bytes: int


class ForgetBlocksRequest(NodeValue, frozen=True):
    """`POST /kv/forget`: delete KV of prompts that matches every given field, on devices, in host memory and on disk.
    Running requests keep theirs."""

    model_id: ModelName | None = None
    tenants: Annotated[tuple[TenantName, ...], Meta(max_length=16)] = ()
    """Absent: of all tenants."""
    unused_s: Annotated[float, Meta(ge=0)] | None = None
    """Only files on disk that were not used for this long."""


class ForgottenBlocks(NodeValue, frozen=True):
    """What was deleted from disk."""

    num_files: int
    num_bytes: int


class DeletedFiles(NodeValue, frozen=True):
    model_id: str
    freed_bytes: int


class HubVariant(NodeValue, frozen=True):
    """One form of a model in a repository of the hub."""

    quant: str | None
    """Its quantisation, as a pull names it; None for the repository's safetensors."""
    num_bytes: int
    """Bytes that a pull downloads."""
    num_files: int


class HubRepository(NodeValue, frozen=True):
    """`GET /hub/{source}`: what a repository of the hub offers, before anything is downloaded."""

    repository: str
    commit: str
    variants: tuple[HubVariant, ...]


class Suspended(NodeValue, frozen=True):
    """`POST /suspend`: the node runs its `suspend_command` now. Rejected while it has work."""

    command: tuple[str, ...]


class Recycled(NodeValue, frozen=True):
    """`POST /devices/{index}/recycle`: whether the device's worker was replaced; not while models are on it."""

    device: int
    recycled: bool


class ModelLog(NodeValue, frozen=True):
    """The output of the server that runs a model."""

    lines: tuple[str, ...] = ()
    """Oldest first."""
    next: int = 0
    """How many lines there were in all, empty ones too: `after` for those that follow."""
