"""Finds and fetches a model's files: a local path, or a hub id through the hub cache. These functions block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cortex.neuron.hub_process.resolver import FileSources, resolve
from cortex.neuron.node.loading.preflight import objection
from cortex.neuron.weights.errors import CheckpointError, Malformed
from cortex.wire.errors import FilesDamaged


def fetch(
    source: str,
    cache: Path,
    quant: str | None,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    sources: FileSources,
) -> Path:
    """The local path of `source`, downloaded if necessary. Raises the errors of `neuron.weights`."""
    return resolve(
        source,
        quant=quant,
        objection=objection,
        cache_dir=cache,
        progress=progress,
        cancelled=cancelled,
        sources=sources,
    )


def find_local(source: str, cache: Path, quant: str | None) -> Path | None:
    """The local path of `source` when the whole model is on disk; never uses the network. Raises FilesDamaged for
    one that is on disk and damaged."""
    try:
        return resolve(
            source,
            quant=quant,
            objection=objection,
            cache_dir=cache,
            offline=True,
            progress=lambda *_: None,
            cancelled=lambda: False,
        )
    except Malformed as error:
        raise FilesDamaged(
            f"{source} is damaged: {error}; delete its files (POST /files/delete) and load it again, which downloads it"
        ) from error
    except CheckpointError:
        return None
