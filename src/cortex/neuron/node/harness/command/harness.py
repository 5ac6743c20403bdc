"""A command of `neuron.toml` as a harness: each load starts a server, which the model's requests are relayed to."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from cortex.http.request import Headers
from cortex.http.ticker import Ticker
from cortex.http.upstream.call import Sink, UpstreamCall
from cortex.neuron.config import HarnessEntry, NeuronConfig
from cortex.neuron.node.devices import ReadDevices
from cortex.neuron.node.harness.command.expansion import Expansion, expanded_texts, uses
from cortex.neuron.node.harness.command.host import CommandHost, ServerCommand, ServerMemory, free_port, server_info
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.loading.device_choice import ChosenDevices
from cortex.neuron.node.loading.library import KnownModel
from cortex.neuron.node.memory.limits import NodeLimits
from cortex.neuron.text.model import TextSurvey
from cortex.neuron.worker import amd
from cortex.neuron.worker.hosts.any_of import LockDevices
from cortex.neuron.worker.model_host import ModelHost
from cortex.tasks import finish_all
from cortex.wire.errors import LoadFailed, Recovering, shorten
from cortex.wire.node.protocol import Capabilities, Device
from cortex.wire.node.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ServedFiles:
    """What a node knows of a model that a server runs: not what is in its files."""

    path: Path
    family: str
    digest: str
    num_bytes: int
    context_tokens: int
    """0: unknown."""
    num_ranks: int
    quant: ClassVar[str | None] = None
    num_layers: ClassVar[int] = 0
    has_stages: ClassVar[bool] = False
    pooling: ClassVar[None] = None
    stored: ClassVar[None] = None

    @property
    def backend(self) -> str:
        return self.family


@dataclass(frozen=True, slots=True)
class CommandEstimates(NodeLimits):
    """By the size that was measured at the last load, before that by what the operator expects, or by the files. A
    measurement may be too small, because a server takes memory later or another model left the device during the load:
    the operator's size is the least, and one below the size of the files does not count."""

    entry: HarnessEntry
    measured: dict[str, int] = field(default_factory=dict)
    """By model id."""

    def least_bytes(self, model: KnownModel, facts: ServedFiles, device: Device) -> int:  # noqa: ARG002 - as Estimates
        return self.whole_bytes(model, facts) // facts.num_ranks

    smallest_bytes = expected_bytes = least_bytes

    def whole_bytes(self, model: KnownModel, facts: ServedFiles) -> int:
        measured = self.measured.get(model.id, 0)
        # Not `model.memory_bytes`, which may be no more than the ceiling of a gateway.
        own = (entry.memory_mb for entry in (*self.config.models, *self.config.default_models) if entry.id == model.id)
        expected_mb = next((size for size in own if size is not None), self.entry.memory_mb)
        if expected_mb is not None:
            return max(measured, expected_mb << 20)
        return measured if measured and measured >= facts.num_bytes else facts.num_bytes * 5 // 4

    def footprint(self, model: KnownModel, facts: ServedFiles, devices: Sequence[Device]) -> Footprint:  # noqa: ARG002
        whole = self.whole_bytes(model, facts)
        return Footprint(whole, whole)

    def stages(self, *_: Any) -> None:
        """Its layers are not ours to divide."""

    empty_stages = stages

    def basis(self, device: Device) -> object:  # noqa: ARG002 - as Estimates
        return tuple(self.measured.items())


@dataclass(frozen=True, slots=True)
class ServerOfModel:
    """The `Upstream` of one model."""

    model_id: str
    entry: HarnessEntry
    hosts: Mapping[str, CommandHost]

    @property
    def harness(self) -> str:
        return self.entry.name

    @property
    def fields(self) -> dict[str, Any]:
        return {"model": self.entry.upstream_model or self.model_id, **self.entry.set_params}

    @property
    def stripped_fields(self) -> tuple[str, ...]:
        return self.entry.strip_params

    def send(self, path: bytes, headers: Headers, body: bytes, sink: Sink) -> UpstreamCall:
        host = self.hosts.get(self.model_id)
        if host is None or host.pool is None:
            raise Recovering(f"the server of {self.model_id} has ended and is being started; try again")
        return host.pool.send(b"POST", path, headers, body, sink)

    def produced(self, request_id: str) -> None:
        if (host := self.hosts.get(self.model_id)) is not None:
            host.produced(request_id)

    def finished(self, request_id: str, prompt_tokens: int, completion_tokens: int) -> None:
        if (host := self.hosts.get(self.model_id)) is not None:
            host.finished(request_id, prompt_tokens, completion_tokens)


class CommandHarness:
    """Belongs to the daemon's loop."""

    def __init__(
        self,
        entry: HarnessEntry,
        config: NeuronConfig,
        read_devices: ReadDevices,
        env: Mapping[str, str] = os.environ,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        self.names = (entry.name,)
        self.estimates = CommandEstimates(config, entry)
        self.max_num_seqs = entry.max_concurrent or config.limits.max_num_seqs
        self.restarts = entry.restart
        self._entry = entry
        self._read_devices = read_devices
        self._env = env
        self._choose_port = choose_port
        self._ticker = Ticker(asyncio.get_running_loop())
        self._hosts: dict[str, CommandHost] = {}
        """The latest load of each model."""

    def check(self, model: KnownModel) -> None:
        for name, is_given in (
            ("pipeline_parallel", model.pipeline_parallel > 1),
            ("nodes", bool(model.nodes)),
            ("replicas", model.replicas > 1 or model.max_replicas > 1),
        ):
            if is_given:
                raise LoadFailed(f"{model.id} has `{name}`, which the harness {self._entry.name} does not support")
        if model.id.startswith("-"):
            raise LoadFailed(f"{shorten(model.id)} could be taken for an option of a command; choose another id")
        expansion = self._expansion(model, Path(), (), 0)  # before anything is downloaded, or a server is to be ended
        for text in expanded_texts(self._entry):
            expansion.text(text)

    def needs_files(self, model: KnownModel) -> bool:  # noqa: ARG002 - as Harness has it
        return uses(self._entry, "MODEL_PATH")

    async def read(self, model: KnownModel, path: Path) -> tuple[ServedFiles, dict[str, Footprint]]:
        num_bytes = await asyncio.to_thread(_size, path) if self.needs_files(model) else 0
        described = f"{self._entry.name} {self._entry.cmd} {model.source} {model.quant}"
        digest = hashlib.sha256(described.encode()).hexdigest()
        context_tokens, ranks = model.context_tokens or 0, model.tensor_parallel
        return ServedFiles(path, self._entry.name, digest, num_bytes, context_tokens, ranks), {}

    async def read_text(self, model: KnownModel, path: Path) -> TextSurvey:  # noqa: ARG002 - as Harness has it
        """What a server can do with a template is its own affair: it rejects what it cannot."""
        return TextSurvey(Capabilities(chat=True, tools=True), SamplingDefaults())

    async def host(
        self,
        model: KnownModel,
        facts: ServedFiles,
        chosen: ChosenDevices,
        lock_devices: LockDevices,  # noqa: ARG002 - as Harness has it
    ) -> tuple[ModelHost, ChosenDevices]:
        entry, devices = self._entry, chosen.devices

        def expansion(port: int, pid: int = 0) -> Expansion:
            return self._expansion(model, facts.path, devices, port, pid)

        def environment(port: int) -> dict[str, str]:
            own = {name: expansion(port).text(value) for name, value in entry.env.items()}
            return {**self._env, **own, **_visible(devices)}

        def free_bytes() -> int:
            readings = self._read_devices(devices)
            return sum(reading.free_bytes for reading in readings.values())

        command = ServerCommand(
            argv=lambda port: expansion(port).command(entry.cmd),
            stop=lambda port, pid: expansion(port, pid).command(entry.cmd_stop),
            env=environment,
        )
        memory = ServerMemory(
            chosen.indices,
            free_bytes if devices[0].kind != "cpu" else None,
            self.estimates.whole_bytes(model, facts),
            amd.memory_of if devices[0].kind == "rocm" else None,
        )
        host = CommandHost(
            model.id,
            entry,
            command,
            memory,
            server_info(entry.name, model.context_tokens),
            self._ticker,
            self._choose_port,
            lambda num_bytes: self.estimates.measured.update({model.id: num_bytes}),
        )
        self._hosts[model.id] = host
        return host, chosen

    def replica(self, *_: Any) -> ModelHost:
        raise AssertionError("such models have no replicas")

    def upstream(self, model: KnownModel) -> ServerOfModel:
        return ServerOfModel(model.id, self._entry, self._hosts)

    async def close(self) -> None:
        await finish_all("unloading at the end", *(host.unload() for host in self._hosts.values()))

    def _expansion(
        self, model: KnownModel, path: Path, devices: Sequence[Device], port: int, pid: int = 0
    ) -> Expansion:
        values = {
            "PORT": str(port),
            "MODEL_PATH": str(path),
            "MODEL_ID": model.id,
            "CONTEXT": None if model.context_tokens is None else str(model.context_tokens),
            "DEVICES": ",".join(str(device.index) for device in devices),
            "GPU_COUNT": str(sum(device.kind != "cpu" for device in devices)),
            "PID": str(pid),
        }
        return Expansion(values, self._env, self._entry.name)


def _visible(devices: Sequence[Device]) -> dict[str, str]:
    """The server sees no other GPUs. Their ids are the same whatever the node itself sees."""
    names = ",".join(device.uuid or str(device.index) for device in devices)
    match devices[0].kind:
        case "cuda":
            return {"CUDA_VISIBLE_DEVICES": names}
        case "rocm":  # HIP counts what ROCr leaves visible
            return {"ROCR_VISIBLE_DEVICES": names, "HIP_VISIBLE_DEVICES": ",".join(map(str, range(len(devices))))}
        case "cpu":
            return {}


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
