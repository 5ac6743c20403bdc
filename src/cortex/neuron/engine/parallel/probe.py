"""One rank of a link test: `python -m cortex.neuron.engine.parallel.probe`. The first rank prints what it measured.

A JSON array of [bytes, seconds, transport]: how long a sum over all ranks of that many bytes takes, and how it travels.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.request import RankSpec

SIZES = (8 << 10, 64 << 10, 1 << 20, 16 << 20)
WARM_UP = 3
BUDGET_S = 0.3
"""For each size."""
MAX_ROUNDS = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--directory", required=True, help="private to the ranks of this test")
    parser.add_argument("--backend", choices=["nccl", "sockets"], required=True)
    parser.add_argument("--device", required=True, help="in torch's spelling")
    options = parser.parse_args()
    device = torch.device(options.device)
    spec = RankSpec(options.rank, options.size, options.directory, options.backend)
    group = TorchGroup.join(spec, device, lambda: None)
    measured = []
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        measured.append((num_bytes, measure(group, tensor), group.transport(tensor)))
    if options.rank == 0:
        print(json.dumps(measured))


def measure(group: TorchGroup, tensor: torch.Tensor) -> float:
    """Seconds per sum. All ranks run as many as the slowest has time for."""
    for _ in range(WARM_UP):
        first_s = _timed(group, tensor, 1)
    rounds = torch.tensor([max(1, min(MAX_ROUNDS, int(BUDGET_S / first_s)))], device=tensor.device)
    count = int(group.broadcast(rounds).item())
    return _timed(group, tensor, count) / count


def _timed(group: TorchGroup, tensor: torch.Tensor, count: int) -> float:
    started_s = time.perf_counter()
    for _ in range(count):
        group.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
