"""What a repository of the hub offers: its quantisations and their sizes, before anything is downloaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cortex.neuron.hub_process.client import HubProcess
from cortex.neuron.weights.errors import HubUnreachable, NotOnHub
from cortex.neuron.weights.hub.endpoint import is_offline
from cortex.neuron.weights.hub.listing import Listing
from cortex.neuron.weights.hub.selection import variants
from cortex.neuron.weights.hub.source import HubSource, parse_source


@dataclass(frozen=True, slots=True)
class Variant:
    """One form of the model. `quant` is None for the repository's safetensors."""

    quant: str | None
    num_bytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class Offer:
    repository: str
    commit: str
    variants: tuple[Variant, ...]
    """The smallest first."""


class OfferRequest:
    """One question to the hub. `read` blocks, so call it on a thread; `abort` ends it from another one."""

    def __init__(self, source: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises FilesMissing, NotOnHub or HubUnreachable for a source about which the hub cannot be asked."""
        parsed = parse_source(source)
        if isinstance(parsed, Path):
            raise NotOnHub(f"{source} is a path on this node; name a repository of the hub, such as owner/name")
        if is_offline(environment):
            raise HubUnreachable(
                f"what {parsed.repository} offers is not known: the node is offline (HF_HUB_OFFLINE is set)"
            )
        self._source: HubSource = parsed
        self._environment = environment
        self._aborted = threading.Event()

    def read(self) -> Offer:
        """Raises HubError, or Cancelled after `abort`."""
        with HubProcess(self._environment, self._aborted.is_set) as hub:
            listing = hub.list_files(self._source.repository, self._source.revision)
            return _offer(self._source.repository, listing)

    def abort(self) -> None:
        self._aborted.set()


def _offer(repository: str, listing: Listing) -> Offer:
    found = [
        Variant(quant, sum(listing.files[path].num_bytes for path in selection.paths), len(selection.paths))
        for quant, selection in variants(listing.files).items()
    ]
    if not found:
        raise NotOnHub(f"{repository} has neither safetensors nor GGUF weights; choose a repository that has")
    return Offer(repository, listing.commit, tuple(sorted(found, key=lambda variant: variant.num_bytes)))
