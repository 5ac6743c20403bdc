"""The results of measurements: a small file for each model, valid while everything measured is unchanged."""

from __future__ import annotations

import errno
import hashlib
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec

import cortex
from cortex.neuron.models.host_division import Rates
from cortex.neuron.node.library import KnownModel
from cortex.system.cache_folder import cache_folder
from cortex.system.private_file import write
from cortex.wire.node.bench import BenchResult
from cortex.wire.node.protocol import Device
from cortex.wire.words import os_error_in_words

log = logging.getLogger(__name__)

_Hardware = tuple[str, str, int]
"""A device's kind, name and GiB; equal devices are assumed equally fast."""
_NO_MATTER = frozenset(
    (
        *("id", "source", "harness", "context_tokens", "min_context_tokens", "memory_bytes", "host_split"),
        *("devices", "max_replicas", "control_tokens_in_messages", "chat_template", "sampling"),
    )
)
"""Options that do not change a model's speed. Its files are in the digest, and devices are compared separately."""


class _KeptResult(msgspec.Struct, frozen=True):
    model_id: str
    basis: str
    devices: list[_Hardware]
    """The devices that the model was on, sorted."""
    result: BenchResult


class BenchResults:
    """Belongs to the daemon's loop, except for the reads and writes of files, which are small."""

    def __init__(self, devices: tuple[Device, ...], max_num_seqs: int, folder: Path | None = None) -> None:
        """`folder`: where they are kept; None: in the user's cache."""
        self._folder = folder or _folder()
        self._hardware = {device.index: (device.kind, device.name, device.total_bytes >> 30) for device in devices}
        self._max_num_seqs = max_num_seqs
        self._kept: dict[str, _KeptResult] = {kept.model_id: kept for kept in _read(self._folder)}

    def find(self, model: KnownModel, digest: str | None, devices: Iterable[int] | None) -> BenchResult | None:
        """The result, if files, options, version and the hardware of `devices` are those of the measurement. None for
        `devices`: the model is not in memory, and may be loaded where it was measured."""
        kept = self._kept.get(model.id)
        if kept is None or kept.basis != self._basis(model, digest):
            return None
        if devices is None:
            is_same = not Counter(kept.devices) - Counter(self._hardware.values())
        else:
            is_same = kept.devices == self._of(devices)
        return kept.result if is_same else None

    def rates(self) -> Rates | None:
        """The memory rates of such hardware, from the latest measurement of any model; None if there was none."""
        here: Counter[_Hardware] = Counter(self._hardware.values())
        known = [kept.result for kept in self._kept.values() if not Counter(kept.devices) - here]
        whole = [each for each in known if each.bytes_per_s and each.host_bytes_per_s and each.bus_bytes_per_s]
        latest = max(whole, key=lambda each: each.measured_at, default=None)
        if latest is None:
            return None
        return Rates(latest.bytes_per_s or 0.0, latest.host_bytes_per_s or 0.0, latest.bus_bytes_per_s or 0.0)

    def keep(self, model: KnownModel, digest: str | None, devices: Iterable[int], result: BenchResult) -> None:
        """`devices`: where it was measured. A result that cannot be written is kept until the node ends."""
        kept = self._kept[model.id] = _KeptResult(model.id, self._basis(model, digest), self._of(devices), result)
        try:
            if self._folder is None:
                raise FileNotFoundError(errno.ENOENT, "this user has no home folder, and CORTEX_CACHE is not set")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            name = hashlib.sha256(model.id.encode()).hexdigest()[:32]
            write(self._folder / f"{name}.json", msgspec.json.encode(kept))
        except OSError as error:
            log.warning("the measurement of %s is not kept: %s", model.id, os_error_in_words(error))

    def _of(self, devices: Iterable[int]) -> list[_Hardware]:
        return sorted(self._hardware[index] for index in devices)

    def _basis(self, model: KnownModel, digest: str | None) -> str:
        """Equal for comparable measurements."""
        options = {name: value for name, value in msgspec.to_builtins(model).items() if name not in _NO_MATTER}
        stated = msgspec.json.encode((cortex.__version__, digest, options, self._max_num_seqs), order="sorted")
        return hashlib.sha256(stated).hexdigest()


def _folder() -> Path | None:
    try:
        return cache_folder() / "bench"
    except RuntimeError:  # there is no home folder
        return None


def _read(folder: Path | None) -> list[_KeptResult]:
    """The valid results. Files of other versions and damaged ones are ignored; the next measurement replaces them."""
    found = []
    try:
        paths = [] if folder is None else sorted(folder.glob("*.json"))
    except OSError:
        return []
    for path in paths:
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=_KeptResult))
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            log.info("the measurement in %s cannot be read: %s", path, error)
    return found
