"""Host memory for KV pages that have left their device: the limit of each worker, and its pages by model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from cortex.neuron.engine.memory.host import HostMemory, read_host_memory
from cortex.neuron.engine.request import KeptPages
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.node.protocol import HostKV

KV_HOST_SHARE = 1 / 8
"""The share of free host memory that pages may use, unless `limits.kv_host_mb` is set."""


def device_limit_bytes(
    kv_host_mb: int | None, host: HostMemory, held: Sequence[int], rest_bytes: int | None = None
) -> int:
    """The limit of one device. `held`: bytes per device. `rest_bytes`: what weights leave of the budget that they share
    with pages; None: all of it."""
    whole = kv_host_mb << 20 if kv_host_mb is not None else int((host.free_bytes + sum(held)) * KV_HOST_SHARE)
    if rest_bytes is not None:
        whole = min(whole, rest_bytes)
    return max(0, whole) // max(1, len(held))


def kept_of_model(parts: Sequence[KeptPages], num_ranks: int) -> HostKV | None:
    """The pages of a model that a node's workers hold. The ranks of a model divided into `num_ranks` hold parts of the
    same tokens: every rank must have its part, and the slowest decides. None if nothing is usable."""
    num_bytes = sum(part.num_bytes for part in parts)
    if not any(part.num_bytes or part.num_tokens for part in parts) or len(parts) < num_ranks:
        return None
    tokens, rates = [part.num_tokens for part in parts], [part.tokens_per_s for part in parts if part.tokens_per_s]
    if num_ranks > 1:
        return HostKV(num_bytes=num_bytes, num_tokens=min(tokens), tokens_per_s=min(rates, default=None))
    return HostKV(num_bytes=num_bytes, num_tokens=sum(tokens), tokens_per_s=max(rates, default=None))


class KvHostMemory:
    """One for the node, on the daemon's loop."""

    def __init__(
        self,
        kv_host_mb: int | None,
        workers: Collection[WorkerSupervisor],
        read: Callable[[], HostMemory] = read_host_memory,
    ) -> None:
        self._kv_host_mb = kv_host_mb
        self._workers = workers
        self._read = read
        self._rest_bytes: int | None = None

    @property
    def limit_bytes(self) -> int:
        """Current limit of each device's worker."""
        held = [worker.kv_host_bytes for worker in self._workers]
        return device_limit_bytes(self._kv_host_mb, self._read(), held, self._rest_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages of all models."""
        return sum(worker.kv_host_bytes for worker in self._workers)

    def kept(self, model_id: str, num_ranks: int) -> HostKV | None:
        """The kept pages of a model that is divided among `num_ranks` devices, loaded or not; None if nothing is
        usable."""
        return kept_of_model([worker.kept[model_id] for worker in self._workers if model_id in worker.kept], num_ranks)

    def give_way(self, rest_bytes: int) -> None:
        """Weights take host memory first; pages may use `rest_bytes`."""
        self._rest_bytes = rest_bytes
        limit_bytes = self.limit_bytes
        for worker in self._workers:
            worker.limit_kv_host(limit_bytes)
