"""The host memory for blocks of all models of a device, and what it holds of each model."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cortex.neuron.engine.host_pages.disk import DiskPages
from cortex.neuron.engine.host_pages.memory import HostSlabs
from cortex.neuron.engine.host_pages.rates import CopyRate
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace, ChosenBlocks, HostPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.request import KeptPages


@dataclass(frozen=True, slots=True)
class _ModelBlocks:
    kinds: tuple[BlockKind, ...]
    num_groups: int
    page_tokens: int

    @property
    def token_bytes(self) -> float:
        return sum(kind.num_bytes for kind in self.kinds[: self.num_groups]) / self.page_tokens


@dataclass(slots=True)
class DeviceHostMemory:
    """Lives as long as the worker of the device; models come and go."""

    store: HostPages
    slabs: HostSlabs
    rate: CopyRate = field(default_factory=CopyRate)
    verifies: bool = False
    """For tests: check the contents of every block before use, which takes longer than the copy."""
    disk: DiskPages | None = None
    """Blocks that left host memory; None: they are dropped."""
    _models: dict[str, _ModelBlocks] = field(default_factory=dict)
    _model_ids: dict[bytes, str] = field(default_factory=dict)
    """Fingerprint → model id."""

    @classmethod
    def on(cls, device: torch.device) -> DeviceHostMemory:
        """Host memory for the worker of a device, initially without a budget."""
        slabs = HostSlabs(device)
        return cls(HostPages(slabs), slabs)

    def open_disk(self, folder: Path, budget_bytes: int, device: torch.device) -> None:
        """Writes blocks that leave host memory to files in `folder`, if the disk has a budget."""
        if budget_bytes and self.disk is None:
            self.disk = DiskPages(folder, budget_bytes, device)

    def save(self, *, everything: bool = False) -> None:
        """Starts to write the blocks that leave host memory next to disk, or all of them."""
        if self.disk is not None:
            self.disk.save(self.store, self.slabs, everything=everything)

    def save_these(self, model: bytes, digests: Sequence[Digest]) -> bool:
        """Starts to write these blocks of a model to disk. False: a write has not ended."""
        if self.disk is None:
            return True
        self.disk.save_these(self.store.kinds(model), digests, self.store, self.slabs)
        return not self.disk.is_writing

    def settle(self, until_s: float = float("inf")) -> bool:
        """Waits for the writer, at most until a time of the monotonic clock. False if not everything is on disk."""
        if self.disk is None:
            return False
        self.save(everything=True)
        return self.disk.settle(self.store, until_s)

    def forget(self, chosen: ChosenBlocks, until_s: float) -> None:
        """Deletes blocks of loaded and earlier models, here and on disk. Waits for blocks being written, at most until
        a time of the monotonic clock."""
        for kind, digest in self.store.blocks():
            if chosen.of_model(self._model_ids.get(kind.model, "")) and chosen.has(digest):
                self.store.forget(kind, [digest])
        if self.disk is not None:
            self.disk.settle(self.store, until_s)
            self.disk.forget(self.store, chosen)

    def yield_to_host(self) -> None:
        """Frees memory if the host runs short of it, or if writes have delayed a lowered budget. Called regularly, even
        when no model steps."""
        if self.disk is not None:
            self.disk.end_writes(self.store)
        if missing := self.slabs.num_missing_bytes():
            self.store.shrink(max(0, self.store.num_bytes - missing))

    def kinds(
        self,
        model_id: str,
        fingerprint: bytes,
        sizes: Sequence[int],
        num_groups: int,
        page_tokens: int,
        *,
        is_whole: bool = True,
    ) -> tuple[BlockKind, ...]:
        """The kinds of the blocks of a model, whose bytes are `sizes`: those of its KV groups first. Their blocks are
        reported under `model_id` from now on, unless that is empty. `is_whole`: they may also be on disk; ranks of a
        divided model would wait for each other's disks at every fetch."""
        kinds = tuple(BlockKind(fingerprint, part, num_bytes) for part, num_bytes in enumerate(sizes))
        if model_id:
            self._model_ids[fingerprint] = model_id
            self._models[model_id] = _ModelBlocks(kinds, num_groups, page_tokens)
        if self.disk is not None and is_whole:
            self.disk.open_model(fingerprint, model_id)
        return kinds

    def publish(self, kind: BlockKind, digest: Digest, place: BlockPlace) -> None:
        """Publishes a block whose copy to its reserved place is complete."""
        self.store.publish(kind, digest, place, self._checksum(kind, place) if self.verifies else None)

    def drop_damaged(self, kinds: Sequence[BlockKind], digests: Sequence[Digest]) -> None:
        """Drops the blocks of these prefixes whose contents differ from what was copied, if verification is on."""
        if not self.verifies:
            return
        for kind in kinds:
            for digest in digests:
                found = self.store.checksum(kind, digest)
                if found is not None and self._checksum(kind, found[0]) != found[1]:
                    self.store.forget(kind, [digest])

    def _checksum(self, kind: BlockKind, place: BlockPlace) -> int:
        return zlib.crc32(self.slabs.rows(*place, 1, kind.num_bytes).numpy().tobytes())

    def kept(self) -> dict[str, KeptPages]:
        """The blocks in memory and on disk of each model that was loaded, by its name; only models with any."""
        found = {}
        for model_id, model in self._models.items():
            counts = [self.store.num_blocks(kind) for kind in model.kinds]
            num_bytes = sum(count * kind.num_bytes for count, kind in zip(counts, model.kinds, strict=True))
            groups = model.kinds[: model.num_groups]
            here = max(counts[: model.num_groups], default=0) * model.page_tokens
            on_disk = 0 if self.disk is None else max(map(self.disk.num_blocks, groups), default=0) * model.page_tokens
            if num_bytes or on_disk:
                found[model_id] = KeptPages(num_bytes, max(here, on_disk), self._tokens_per_s(model, here, on_disk))
        return found

    def _tokens_per_s(self, model: _ModelBlocks, here: int, on_disk: int) -> float | None:
        """Average rate at which tokens return to the device, from host memory or else from disk."""
        rate = self.rate.bytes_per_s
        if not model.token_bytes or (rate is None and on_disk <= here):
            return None
        disk_rate = 0.0 if self.disk is None else self.disk.rate.expected
        if on_disk <= here or not disk_rate:
            return None if rate is None else rate / model.token_bytes
        nearer = here / on_disk
        return 1 / model.token_bytes / (nearer / (rate or disk_rate) + (1 - nearer) / disk_rate)
