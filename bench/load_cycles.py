"""Tests whether all memory is released: two models take turns on a real neuron, and memory is measured after each pair.

    PYTHONPATH=src python bench/load_cycles.py --cycles 100 MODEL_A MODEL_B

A cycle loads a model, sends one request, and unloads it. On a CPU the number is the anonymous memory of the daemon and
its child processes. On a GPU it is also the device memory in use as the driver reports it, so nothing else may run
there. The first pairs warm up caches and do not count. The exit status is 1 when a later pair exceeds them by more than
`--slack-mb`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from cortex.neuron.engine.memory.host import anonymous_bytes
from daemon import Neuron, running_neuron

MIN_WARM_UP_PAIRS = 2
WARM_UP_PART = 5
"""One in this many pairs is warm-up: allocators reach a steady level, and stay there if nothing leaks."""


def cycle(node: Neuron, model_id: str, source: str) -> None:
    node.load(model_id, source)
    node.call("/v1/completions", {"model": model_id, "prompt": "Once upon a time", "max_tokens": 8})
    node.unload(model_id)


def device_bytes(node: Neuron) -> int:
    """In use on all GPUs, as the driver reports it; 0 where the CPU is the device."""
    if node.call("/discovery")["devices"][0]["kind"] == "cpu":
        return 0
    time.sleep(1.5)  # the node samples its devices once a second
    return sum(device["total_bytes"] - device["free_bytes"] for device in node.call("/health")["devices"])


def host_bytes(process_id: int) -> int:
    return sum(anonymous_bytes(each) for each in process_tree(process_id))


def process_tree(process_id: int) -> list[int]:
    """The process and all its descendants. Those that end meanwhile may be missing."""
    try:
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [process_id, *(each for child in children for each in process_tree(int(child)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs=2, metavar="MODEL", help="a hub id, a directory or a GGUF file")
    parser.add_argument("--cycles", type=int, default=100, help="total loads and unloads")
    parser.add_argument("--slack-mb", type=int, default=32, help="growth that does not count as a leak")
    options = parser.parse_args()
    if options.cycles < 2 * (MIN_WARM_UP_PAIRS + 2):
        parser.error(f"--cycles must be at least {2 * (MIN_WARM_UP_PAIRS + 2)}")
    first, second = options.models
    readings: list[tuple[int, int]] = []
    with running_neuron() as (node, process_id):
        for pair in range(options.cycles // 2):
            cycle(node, "a", first)
            cycle(node, "b", second)
            readings.append((host_bytes(process_id), device_bytes(node)))
            host, device = (number / 2**20 for number in readings[-1])
            print(f"{2 * pair + 2:4d} cycles: host {host:8.1f} MiB, devices {device:8.1f} MiB", flush=True)
    growth = [max(later) - max(warm) for warm, later in zip(*warm_and_last(readings), strict=True)]
    print(f"growth: host {growth[0] / 2**20:.1f} MiB, devices {growth[1] / 2**20:.1f} MiB")
    return int(max(growth) > options.slack_mb << 20)


def warm_and_last(readings: list[tuple[int, int]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Host and device columns of the warm-up pairs, and of the last two pairs."""
    num_warm = max(MIN_WARM_UP_PAIRS, len(readings) // WARM_UP_PART)
    return list(zip(*readings[:num_warm], strict=True)), list(zip(*readings[-2:], strict=True))


if __name__ == "__main__":
    sys.exit(main())
