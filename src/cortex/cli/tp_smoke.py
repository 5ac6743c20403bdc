"""`neuron tp-smoke`: measures whether several devices can share a model, and the cost per token."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.output import console, print_json, size, table

if TYPE_CHECKING:
    from cortex.wire.node.protocol import Device

TIMEOUT_S = 600.0
LAYERS = 64
SUM_BYTES = 8 << 10
"""The size that is nearest to a token's hidden state: 5,120 values of two bytes in a model of 27 B parameters."""
ENOUGH_S = 0.010
"""A model of that size in four bits takes about twice as long per token on one consumer card that can hold it."""


class Sum(NamedTuple):
    """A sum over all devices."""

    num_bytes: int
    seconds: float
    transport: str
    """`peer memory`, `nccl` or `sockets`."""


def run(indices: Sequence[int], *, as_json: bool) -> None:
    """Raises CommandError."""
    measured = measure(_devices(indices))
    token_s = (2 * LAYERS + 1) * next(each.seconds for each in measured if each.num_bytes == SUM_BYTES)
    suits = token_s <= ENOUGH_S
    if as_json:
        sums = [{"bytes": each.num_bytes, "seconds": each.seconds, "transport": each.transport} for each in measured]
        print_json({"devices": list(indices), "sums": sums, "token_s": token_s, "suits_tensor_parallel": suits})
        return
    rows = table(">MESSAGE", ">LATENCY", ">BANDWIDTH", "TRANSPORT")
    for num_bytes, seconds, transport in measured:
        rows.add_row(size(num_bytes), f"{seconds * 1e6:,.0f} µs", f"{size(num_bytes / seconds)}/s", transport)
    console().print(rows)
    cost = f"a dense model of {LAYERS} layers waits {token_s * 1e3:.1f} ms per token for sums over the devices"
    if suits:
        console().print(f"{cost}: divide models that do not fit one device (tensor_parallel = {len(indices)})")
    else:
        console().print(f"{cost}: too slow for tensor_parallel; use pipeline_parallel")


def measure(devices: Sequence[Device]) -> list[Sum]:
    """Runs one process per device. Raises CommandError."""
    from cortex.neuron.worker.protocol import DeviceAddress

    backend = "nccl" if all(device.kind == "cuda" for device in devices) else "sockets"
    with tempfile.TemporaryDirectory(prefix="neuron-link-") as directory, contextlib.ExitStack() as ended:
        ranks = []
        for rank, device in enumerate(devices):
            address = DeviceAddress.of(device)
            options = {"rank": rank, "size": len(devices), "directory": directory, "backend": backend}
            arguments = [f"--{name}={value}" for name, value in {**options, "device": address.torch_device}.items()]
            ranks.append(ended.enter_context(_process(arguments, address.environment())))
        return _result(ranks, devices)


@contextlib.contextmanager
def _process(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """One rank; killed if it still runs at the end."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "cortex.neuron.engine.parallel.probe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _result(ranks: list[subprocess.Popen[str]], devices: Sequence[Device]) -> list[Sum]:
    """What the first rank measured, once all have succeeded."""
    remedy = "check the links between the devices (nvidia-smi topo -m) and dmesg"
    outputs = []
    for process, device in zip(ranks, devices, strict=True):
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CommandError(f"device {device.index} is stuck after {TIMEOUT_S:.0f} s", remedy) from None
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
            raise CommandError(f"device {device.index} failed: {last[0]}", remedy)
        outputs.append(output)
    return [Sum(*each) for each in json.loads(outputs[0])]


def _devices(indices: Sequence[int]) -> list[Device]:
    """Raises CommandError for devices that do not exist, or fewer than two."""
    from cortex.neuron.worker.discovery import discover, divided

    if len(set(indices)) != len(indices) or len(indices) < 2:
        raise CommandError("a link needs two different devices or more", "name them: --devices 0,1", ExitCode.USAGE)
    found = {device.index: device for device in divided(discover(), max(indices) + 1).devices}
    if missing := [index for index in indices if index not in found]:
        have = ", ".join(map(str, found))
        raise CommandError(f"there is no device {missing[0]}", f"this machine has {have}", ExitCode.USAGE)
    return [found[index] for index in indices]
