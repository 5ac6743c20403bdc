"""The parts of a node that reach outside it: devices, workers, files and other processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cortex.neuron.engine.memory.host import HostMemory, read_host_memory
from cortex.neuron.hub_process.resolver import FileSources, resolve
from cortex.neuron.node.bench.workload import Workload
from cortex.neuron.node.devices import ReadDevices
from cortex.neuron.node.harness.command.host import ServerTimes
from cortex.neuron.node.harness.harness import Harness
from cortex.neuron.node.inspection_process.client import InspectionProcess
from cortex.neuron.node.inspection_process.preflight import objection
from cortex.neuron.node.library import Fetch
from cortex.neuron.node.loading.context_allocator import ContextRules
from cortex.neuron.node.memory.kv_exchange import ExchangeRules
from cortex.neuron.tokenizer_process.client import TokenizerClient
from cortex.neuron.weights.hub.file_digests import FileDigests
from cortex.neuron.worker.backoff import BackoffPolicy
from cortex.neuron.worker.discovery import Inventory, discover, read_devices
from cortex.neuron.worker.factory import WorkerFactory
from cortex.neuron.worker.process import WorkerTimeouts
from cortex.system.cache_folder import cache_folder


def fetch(
    source: str,
    cache: Path,
    quant: str | None,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    sources: FileSources,
) -> Path:
    """The local path of `source`, downloaded if necessary. Blocks. Raises the errors of `neuron.weights`."""
    return resolve(
        source,
        quant=quant,
        objection=objection,
        cache_dir=cache,
        progress=progress,
        cancelled=cancelled,
        sources=sources,
    )


def kept_digests() -> FileDigests:
    """In the user's cache."""
    try:
        return FileDigests(cache_folder() / "digests.json")
    except RuntimeError:  # there is no home folder
        return FileDigests()


@dataclass(frozen=True, slots=True)
class NodeDependencies:
    """The dependencies of a node. Tests replace single parts to inject faults."""

    make_workers: Callable[[], WorkerFactory] = WorkerFactory
    discover: Callable[[], Inventory] = discover
    read_devices: ReadDevices = read_devices
    read_host: Callable[[], HostMemory] = read_host_memory
    fetch: Fetch = fetch
    inspector: Callable[[], InspectionProcess] | None = None
    """None for a process with limits."""
    open_text: Callable[[Path, str | None], TokenizerClient] | None = None
    """None for a tokenizer process per model."""
    policy: BackoffPolicy = field(default_factory=BackoffPolicy)
    timeouts: WorkerTimeouts | None = None
    first_retry_s: float = 5.0
    scan_s: float = 30.0
    """Interval of scans of model files."""
    context_rules: ContextRules = field(default_factory=ContextRules)
    exchange_rules: ExchangeRules = field(default_factory=ExchangeRules)
    server_times: ServerTimes = field(default_factory=ServerTimes)
    workload: Workload = field(default_factory=Workload)
    """The limits of measurements."""
    bench_folder: Path | None = None
    """Folder of the results of measurements; None for the user's cache."""
    digests: Callable[[], FileDigests] = kept_digests
    harnesses: tuple[Harness, ...] = ()
    """In addition to the built-in engine."""
