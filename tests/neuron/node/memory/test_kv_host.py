"""Host memory for KV pages: divided among devices, and what sleeping models leave of their budget at most."""

from dataclasses import dataclass, field

import pytest

from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.engine.request import KeptPages
from cortex.neuron.node.memory.host_budget import KvHostMemory, device_limit_bytes
from cortex.neuron.worker.supervisor import WorkerSupervisor
from cortex.wire.node.protocol import HostKV

MIB = 1 << 20


@pytest.mark.parametrize(
    ("kv_host_mb", "held", "rest", "limit"),
    [
        (None, [0], None, 100 * MIB),
        (None, [100 * MIB, 0], None, 900 * MIB // 8 // 2),
        (None, [0], 30 * MIB, 30 * MIB),
        (64, [0, 0], None, 32 * MIB),
        (64, [0, 0], 20 * MIB, 10 * MIB),
        (64, [0], -5, 0),
        (0, [0], None, 0),
    ],
)
def test_limit_is_the_configured_one_or_a_share_of_what_is_free(
    kv_host_mb: int | None, held: list[int], rest: int | None, limit: int
) -> None:
    assert device_limit_bytes(kv_host_mb, HostMemory(4000 * MIB, 800 * MIB), held, rest) == limit


@dataclass
class Holder(WorkerSupervisor):
    kv_host_bytes: int = 0
    kept: dict[str, KeptPages] = field(default_factory=dict)
    given: list[int] = field(default_factory=list)

    def limit_kv_host(self, num_bytes: int) -> None:
        self.given.append(num_bytes)


def test_pages_give_way_to_sleeping_models_on_every_device_and_at_later_loads() -> None:
    holders = [Holder(), Holder()]
    memory = KvHostMemory(64, holders, lambda: HostMemory(4000 * MIB, 800 * MIB))
    assert memory.limit_bytes == 32 * MIB
    memory.give_way(10 * MIB)
    assert [holder.given for holder in holders] == [[5 * MIB], [5 * MIB]]
    assert memory.limit_bytes == 5 * MIB


@pytest.mark.parametrize(
    ("parts", "num_ranks", "whole"),
    [
        ([], 1, None),
        ([KeptPages(0, 0)], 1, None),
        ([KeptPages(10, 64, 5.0)], 1, HostKV(num_bytes=10, num_tokens=64, tokens_per_s=5.0)),
        # Replicas have different conversations, and each copies its own.
        ([KeptPages(10, 64), KeptPages(4, 32, 5.0)], 1, HostKV(num_bytes=14, num_tokens=96, tokens_per_s=5.0)),
        # Ranks have parts of the same ones.
        ([KeptPages(10, 64, 7.0), KeptPages(8, 32, 5.0)], 2, HostKV(num_bytes=18, num_tokens=32, tokens_per_s=5.0)),
        ([KeptPages(10, 64, 7.0)], 2, None),  # the other one has computed nothing, or lost it
    ],
)
def test_what_is_kept_of_a_model_is_that_of_all_its_devices(
    parts: list[KeptPages], num_ranks: int, whole: HostKV | None
) -> None:
    holders = [Holder(kept={"m": part}) for part in parts]
    memory = KvHostMemory(64, [*holders, Holder(kept={"other": KeptPages(1)})])
    assert memory.kept("m", num_ranks) == whole
