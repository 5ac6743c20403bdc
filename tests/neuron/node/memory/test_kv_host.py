"""Host memory for KV pages: divided among devices, and what sleeping models leave of their budget at most."""

from dataclasses import dataclass, field

import pytest

from cortex.neuron.engine.memory.host import HostMemory
from cortex.neuron.node.memory.kv_host import KvHostMemory, device_limit_bytes

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
class Holder:
    kv_host_bytes: int = 0
    limits: list[int] = field(default_factory=list)

    def limit_kv_host(self, num_bytes: int) -> None:
        self.limits.append(num_bytes)


def test_pages_give_way_to_sleeping_models_on_every_device_and_at_later_loads() -> None:
    holders = [Holder(), Holder()]
    memory = KvHostMemory(64, holders, lambda: HostMemory(4000 * MIB, 800 * MIB))
    assert memory.limit_bytes == 32 * MIB
    memory.give_way(10 * MIB)
    assert [holder.limits for holder in holders] == [[5 * MIB], [5 * MIB]]
    assert memory.limit_bytes == 5 * MIB
