"""Where a model's files are: a path as it is, or the hub through its cache. What is on disk is used as it is.

Both functions block and are run on threads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cortex.neuron.weights import hub
from cortex.neuron.weights.errors import CheckpointError, NotOnHub


def fetch(
    source: str,
    cache: Path,
    quant: str | None,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
) -> Path:
    """The local path of `source`, downloaded if need be. Raises the errors of `neuron.weights`."""
    try:
        return hub.resolve(source, cache_dir=cache, progress=progress, cancelled=cancelled)
    except NotOnHub:
        if quant is None or ":" in source:
            raise
        # A repository of several GGUF files: there the quantisation names the file.
        return hub.resolve(f"{source}:{quant}", cache_dir=cache, progress=progress, cancelled=cancelled)


def find_local(source: str, cache: Path, quant: str | None) -> Path | None:
    """The local path of `source` when the whole model is on disk; never uses the network."""
    candidates = (source,) if quant is None or ":" in source else (source, f"{source}:{quant}")
    for candidate in candidates:
        try:
            return hub.resolve(
                candidate, cache_dir=cache, offline=True, progress=lambda *_: None, cancelled=lambda: False
            )
        except CheckpointError:
            continue
    return None
