"""The memory of tensors goes back to the host, whichever allocator torch brings."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
from cortex.neuron.engine.memory.host import anonymous_bytes
from cortex.neuron.worker.memory import give_back
from cortex.neuron.worker.protocol import DeviceAddress
before = anonymous_bytes()
weights = [torch.ones(size) for size in [1_500_000] * 30 + [300_000] * 30 + [8_000_000]]
taken = anonymous_bytes() - before
del weights
give_back(DeviceAddress("cpu", 0))
print(taken, anonymous_bytes() - before)
"""


def test_unused_tensors_go_back_to_the_host() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    taken, left = map(int, run.stdout.split())
    assert taken > 200 << 20
    assert left < taken // 5
