"""Finds models on the disk, without the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from cortex.neuron.weights.directory import read_json
from cortex.neuron.weights.errors import CheckpointError, HubError, HubUnreachable, Malformed
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.selection import SHARD, Objection, Selection, gguf_of, missing_parts, select
from cortex.neuron.weights.hub.source import HubSource


def in_directory(path: Path, quant: str | None) -> Path:
    """The GGUF file in a directory that is quantised as `quant`; the path itself where there is none."""
    if quant is None or not path.is_dir():
        return path
    found = gguf_of((entry.name for entry in path.iterdir()), quant)
    return path if found is None else path / found


def in_cache(cache: RepositoryCache, source: HubSource, objection: Objection, reason: HubError) -> Path:
    """The model in the cache. Raises `reason` where the cache has no complete one, and Malformed where its
    index cannot be read."""
    commit = cache.commit_of(source.revision)
    if commit is None:
        raise reason
    snapshot = cache.snapshot(commit)
    try:
        selection = select(source.repository, cache.paths_in(commit), source.quant, objection=objection)
        missing = missing_parts(selection) if selection.entry else _missing_shards(snapshot, selection)
    except Malformed:
        raise  # the model is there, and damaged
    except CheckpointError:
        raise reason from None
    if missing:
        raise HubUnreachable(f"{reason}; the cache holds only a part of the model ({missing[0]} is missing)")
    return snapshot / (selection.entry or "")


def _missing_shards(snapshot: Path, selection: Selection) -> list[str]:
    """The files of a safetensors model that its snapshot lacks."""
    needed = {"config.json"}
    if "model.safetensors.index.json" in selection.paths:
        weight_map = read_json(snapshot, "model.safetensors.index.json").get("weight_map")
        if isinstance(weight_map, Mapping):
            needed |= {str(shard) for shard in weight_map.values()}
    elif any(SHARD.fullmatch(path) for path in selection.paths):
        # Other tools store the commit before they have all its files. Sharded weights always have an index.
        needed.add("model.safetensors.index.json")
    return sorted(needed - set(selection.paths))
