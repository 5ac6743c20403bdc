"""A command of `neuron.toml` as a harness: each load starts a server, to which the model's requests are relayed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cortex.formats.quant_names import label_in
from cortex.http.ticker import Ticker
from cortex.http.upstream.pool import Pool
from cortex.neuron.config import NeuronConfig
from cortex.neuron.node.devices import ReadDevices
from cortex.neuron.node.harness.command.estimates import CommandEstimates, ServedFiles, ServerSizes, SizeOfModel
from cortex.neuron.node.harness.command.group import MemberPorts, check_reachable, interface_of
from cortex.neuron.node.harness.command.host import CommandHost, ServerCommand, ServerTimes, free_port
from cortex.neuron.node.harness.command.server_log import ServerLog, plain_lines
from cortex.neuron.node.harness.command.server_memory import ServerMemory
from cortex.neuron.node.harness.command.server_process import gpu_bytes, output_of
from cortex.neuron.node.harness.estimates import Footprint
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.memory.allocation import ChosenDevices, DeviceAllocation
from cortex.neuron.servers.entry import HarnessEntry
from cortex.neuron.text.model import TextInspection
from cortex.neuron.worker import amd
from cortex.neuron.worker.model_host import ModelHost
from cortex.system.tasks import finish_all
from cortex.wire.errors import LoadFailed, ModelUnsupported, Recovering, UnsupportedModality, shorten
from cortex.wire.node.groups import GroupMember, PreparedMember, PrepareMember
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.orders import ModelLog
from cortex.wire.node.protocol import Capabilities, Device
from cortex.wire.words import os_error_in_words

_VARIABLE = re.compile(r"\$\{([^}]*)\}")


def expanded_texts(entry: HarnessEntry, rank: int | None, *, has_context: bool = True) -> tuple[str, ...]:
    """The texts in which the variables of a server are replaced. `rank`: that of a group member."""
    ends = (text for name in ("cmd_stop", "cmd_kill", "cmd_pid") for text in entry.commands[name])
    return (*entry.argv(has_gpus=True, has_context=has_context, rank=rank), *ends, *entry.env.values())


def uses(entry: HarnessEntry, variable: str, rank: int | None) -> bool:
    """Whether the server's command or environment has `${variable}`."""
    return any(f"${{{variable}}}" in text for text in expanded_texts(entry, rank))


@dataclass(frozen=True, slots=True)
class Expansion:
    """Replaces the variables of one load. A value is never split into several arguments and not expanded again."""

    values: Mapping[str, str | None]
    """None if unknown for this model."""
    env: Mapping[str, str]
    harness: str
    """For messages."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Raises LoadFailed for a variable that does not exist, or has no value for this model."""
        return [self.text(argument) for argument in command]

    def text(self, text: str) -> str:
        """Raises LoadFailed."""
        return _VARIABLE.sub(lambda found: self._value(found[1]), text)

    def _value(self, name: str) -> str:
        if name.startswith("env."):
            variable = name.removeprefix("env.")
            if variable not in self.env:
                raise LoadFailed(
                    f"the harness {self.harness} needs the environment variable {variable}, which the node does not "
                    "have; set it where the node is started"
                )
            return self.env[variable]
        if name not in self.values:
            known = ", ".join(f"${{{each}}}" for each in (*self.values, "env.NAME"))
            raise LoadFailed(f"the harness {self.harness} uses ${{{name}}}, which does not exist; there are {known}")
        if (value := self.values[name]) is None:
            setting = "context_tokens" if name == "CONTEXT" else "nodes"
            raise LoadFailed(f"the harness {self.harness} needs ${{{name}}}; set `{setting}` of the model")
        return value


CHAT = "/v1/chat/completions"
_VERSION = re.compile(r"\bversion\b\W*\w*\d", re.IGNORECASE)
_VERSION_S = 240.0
"""Some servers import all of torch to print their version, at first from a slow disk."""


@dataclass(frozen=True, slots=True)
class ServerOfModel:
    """The `Upstream` of one model."""

    model_id: str
    entry: HarnessEntry
    hosts: Mapping[str, CommandHost]
    server_log: ServerLog

    def log(self, after: int) -> ModelLog:
        return self.server_log.since(after)

    @property
    def harness(self) -> str:
        return self.entry.name

    @property
    def fields(self) -> dict[str, Any]:
        return {"model": self.entry.upstream_model or self.model_id, **self.entry.set_params}

    @property
    def stripped_fields(self) -> tuple[str, ...]:
        return self.entry.strip_params

    def pool(self) -> Pool:
        host = self.hosts.get(self.model_id)
        if host is None or host.pool is None:
            raise self._recovering
        return host.pool

    @property
    def _recovering(self) -> Recovering:
        return Recovering(f"the server of {self.model_id} has ended and is being started; try again")

    def check_route(self, path: str) -> None:
        if (routes := self.entry.routes) and path not in routes:
            raise UnsupportedModality(
                f"{self.model_id} is run by the server of the harness {self.entry.name}, which has no {path}; it has "
                f"{', '.join(routes)}."
            )

    async def end_if_hung(self, reason: str) -> None:
        if (host := self.hosts.get(self.model_id)) is not None:
            await host.end_if_hung(reason)

    async def check_lost(self) -> None:
        if (host := self.hosts.get(self.model_id)) is None or await host.has_ended_soon():
            raise self._recovering

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
        ports: MemberPorts | None = None,
        times: ServerTimes | None = None,
    ) -> None:
        self.names = (entry.name,)
        self._sizes = ServerSizes()
        self.use(entry, config)
        self._read_devices = read_devices
        self._ports = ports or MemberPorts(None)
        self._times = times or ServerTimes()
        self._env = env
        self._choose_port = choose_port
        self._ticker = Ticker(asyncio.get_running_loop())
        self._hosts: dict[str, CommandHost] = {}
        """The latest load of each model."""
        self._logs: dict[str, ServerLog] = {}

    def use(self, entry: HarnessEntry, config: NeuronConfig) -> None:
        """Use another entry of the same name from the next load of a model on."""
        self.estimates = CommandEstimates(config, entry, self._sizes)
        self.max_num_seqs = entry.max_concurrent or config.limits.max_num_seqs
        self.restarts = entry.restart
        self._entry = entry

    def check(self, model: KnownModel) -> None:
        for name, is_given in (
            ("pipeline_parallel", model.pipeline_parallel > 1),
            ("replicas", model.replicas > 1 or model.max_replicas > 1),
        ):
            if is_given:
                raise LoadFailed(f"{model.id} has `{name}`, which the harness {self._entry.name} does not support")
        if model.id.startswith("-"):
            raise LoadFailed(f"{shorten(model.id)} could be taken for an option of a command; choose another id")
        if model.member is not None and self._entry.group is None:
            raise LoadFailed(
                f"{model.id} is to run on several nodes, for which the harness {self._entry.name} has no `group`"
            )
        expansion = self._expansion(model, Path(), (), 0)  # before anything is downloaded, or a server is to be ended
        for text in expanded_texts(self._entry, _rank(model), has_context=model.context_tokens is not None):
            expansion.text(text)

    async def prepare(self, request: PrepareMember) -> PreparedMember:
        """Chooses the ports of a member of a group that this node will load. Raises LoadFailed or GroupClaimed."""
        if self._entry.group is None:
            raise LoadFailed(f"the harness {self._entry.name} runs models on one node only: it has no `group`")
        host, port, pulse_port = self._ports.hold(request.group, request.model_id)
        version = await self._ports.version(request.group, self._version)
        await check_reachable(request.reaches)
        return PreparedMember(host=host, port=port, pulse_port=pulse_port, version=version)

    def member_needs_files(self, rank: int | None) -> bool:
        return uses(self._entry, "MODEL_PATH", rank) or uses(self._entry, "MODEL_DIRECTORY", rank)

    async def _version(self) -> str:
        command = self._entry.group_commands["version"]
        if not command:
            return ""
        try:
            output = await output_of(command, self._env, _VERSION_S, asyncio.subprocess.STDOUT)
        except OSError as error:
            late = isinstance(error, TimeoutError)
            why = (
                f"has not ended within {_VERSION_S:.0f} s" if late else f"cannot be started: {os_error_in_words(error)}"
            )
            text = f"the version of {self._entry.name} is not known: `{shlex.join(command)}` {why}"
            raise LoadFailed(text) from error
        return version_in(plain_lines(output))

    def needs_files(self, model: KnownModel) -> bool:
        return self.member_needs_files(_rank(model))

    async def read(self, model: KnownModel, path: Path) -> tuple[ServedFiles, dict[str, Footprint]]:
        num_bytes = await asyncio.to_thread(_size, path) if self.needs_files(model) else 0
        argv = self._entry.argv(has_gpus=True, has_context=True)
        described = f"{self._entry.name} {argv} {model.source} {model.quant}"
        digest = hashlib.sha256(described.encode()).hexdigest()
        context_tokens, ranks = model.context_tokens or 0, model.tensor_parallel
        quant = model.quant or (label_in(path.name) if path.suffix == ".gguf" else None)
        quant = None if quant is None else quant.lower()
        return ServedFiles(path, self._entry.name, digest, num_bytes, context_tokens, ranks, quant), {}

    async def read_text(self, model: KnownModel, path: Path) -> TextInspection:  # noqa: ARG002 - as Harness has it
        """Nothing is read: the server rejects requests that its template does not support. Raises ModelUnsupported for
        a configured template, which the server would not get."""
        if model.chat_template is not None:
            raise ModelUnsupported(f"{model.id} has a chat_template, which {self._entry.name} does not get: remove it")
        routes = self._entry.routes

        def has(path: str) -> bool:
            return not routes or path in routes

        chats, inserts = has(CHAT), has("/infill")
        embeds, ranks = has("/v1/embeddings"), has("/v1/rerank")
        capabilities = Capabilities(chat=chats, tools=chats, embeddings=embeds, rerank=ranks, insert=inserts)
        return TextInspection(capabilities, SamplingDefaults())

    async def host(
        self,
        model: KnownModel,
        metadata: ServedFiles,
        room: DeviceAllocation,
    ) -> tuple[ModelHost, ChosenDevices]:
        entry, chosen, devices = self._entry, room.chosen, room.chosen.devices
        is_on_gpus = devices[0].kind != "cpu"
        argv = entry.argv(has_gpus=is_on_gpus, has_context=model.context_tokens is not None, rank=_rank(model))
        link = None if model.member is None else self._ports.take(model.member)
        commands = entry.commands
        part = self.estimates.first_bytes(model, metadata) / metadata.num_ranks / max(1, devices[0].total_bytes)
        free_ports: dict[int, int] = {}

        def expansion(port: int, pid: int = 0) -> Expansion:
            if port not in free_ports:
                free_ports[port] = free_port()
            return self._expansion(model, metadata.path, devices, port, pid, free_ports[port], part)

        def environment(port: int) -> dict[str, str]:
            own = {name: expansion(port).text(value) for name, value in entry.env.items()}
            return {**self._env, **_of_cluster(model), **own, **_visible(devices)}

        def free_bytes() -> int:
            readings = self._read_devices(devices)
            return sum(reading.free_bytes for reading in readings.values())

        command = ServerCommand(
            argv=lambda port: expansion(port).command(argv),
            stop=lambda port, pid: expansion(port, pid).command(commands["cmd_stop"]),
            env=environment,
            kill=lambda port: expansion(port).command(commands["cmd_kill"]),
            find_pid=lambda port: expansion(port).command(commands["cmd_pid"]),
        )
        memory = ServerMemory(
            chosen.indices,
            free_bytes if is_on_gpus else None,
            self.estimates.whole_bytes(model, metadata),
            lambda processes: _used_bytes(devices, processes),
            room.took,
            lambda: room.was_alone,
        )
        host = CommandHost(
            model.id,
            entry,
            command,
            memory,
            model.context_tokens,
            self._ticker,
            self._choose_port,
            SizeOfModel(self.estimates, model, metadata),
            self._logs.setdefault(model.id, ServerLog()),
            link=link,
            times=self._times,
        )
        self._hosts[model.id] = host
        return host, chosen

    def replica(self, *_: Any) -> ModelHost:
        raise AssertionError("such models have no replicas")

    def forget_size(self, model_id: str) -> None:
        self.estimates.sizes.forget(model_id)

    def upstream(self, model: KnownModel) -> ServerOfModel:
        return ServerOfModel(model.id, self._entry, self._hosts, self._logs.setdefault(model.id, ServerLog()))

    async def leave(self, drain_s: float) -> None:
        """The node is shutting down: the leaders of its members end their requests first."""
        await asyncio.gather(*(host.leave(drain_s) for host in self._hosts.values()))

    async def close(self) -> None:
        await finish_all("unloading at the end", *(host.unload() for host in self._hosts.values()))

    def _expansion(
        self,
        model: KnownModel,
        path: Path,
        devices: Sequence[Device],
        port: int,
        pid: int = 0,
        free_port: int = 0,
        part: float = 1.0,
    ) -> Expansion:
        """`part`: the fraction of a device's memory that the model is expected to take."""
        values = {
            "PORT": str(port),
            "FREE_PORT": str(free_port),
            "MODEL_PATH": str(path),
            "MODEL_DIRECTORY": str(_directory(path)),
            "MODEL_ID": model.id,
            "CONTEXT": None if model.context_tokens is None else str(model.context_tokens),
            "DEVICES": ",".join(str(device.index) for device in devices),
            "DEVICE_COUNT": str(len(devices)),
            "GPU_IDS": _gpu_ids(devices),
            "GPU_COUNT": str(sum(device.kind != "cpu" for device in devices)),
            "MEMORY_FRACTION": f"{min(max(part, 0.01), 0.95):.2f}",
            "PID": str(pid),
            **_group_values(model.member),
        }
        return Expansion(values, self._env, self._entry.name)


def version_in(lines: Sequence[str]) -> str:
    """The version in a server's output: the line that names it, or the last one. llama.cpp and SGLang then print the
    compiler or the revision, which may be equal for different versions."""
    said = [line for line in lines if _VERSION.search(line)]
    return ((said or lines)[-1] if lines else "")[:200]


def _rank(model: KnownModel) -> int | None:
    return None if model.member is None else model.member.rank


def _group_values(member: GroupMember | None) -> dict[str, str | None]:
    """The variables of a group. Without a group they have no value and cannot be used."""
    if member is None:
        names = ("LEADER_HOST", "LEADER_PORT", "MEMBER_HOST", "MEMBER_PORT", "MEMBER_ADDRESSES")
        return {"RANK": "0", "NUM_NODES": "1", **dict.fromkeys(names)}
    others = (f"{_bracketed(other.host)}:{other.port}" for other in member.members[1:])
    return {
        "RANK": str(member.rank),
        "NUM_NODES": str(len(member.members)),
        "LEADER_HOST": member.leader.host,
        "LEADER_PORT": str(member.leader.port),
        "MEMBER_HOST": member.own.host,
        "MEMBER_PORT": str(member.own.port),
        "MEMBER_ADDRESSES": ",".join(others),
    }


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _of_cluster(model: KnownModel) -> dict[str, str]:
    """Variables that keep the libraries of distributed servers on the cluster's network."""
    if model.member is None or (interface := interface_of(model.member.own.host)) is None:
        return {}
    interfaces = dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), interface)
    return {**interfaces, "VLLM_HOST_IP": model.member.own.host}


def _visible(devices: Sequence[Device]) -> dict[str, str]:
    """Variables that hide other GPUs from the server. Ids do not depend on what the node itself sees."""
    match devices[0].kind:
        case "cuda":
            return {"CUDA_VISIBLE_DEVICES": _gpu_ids(devices)}
        case "rocm":  # HIP counts what ROCr leaves visible
            visible = ",".join(map(str, range(len(devices))))
            return {"ROCR_VISIBLE_DEVICES": _gpu_ids(devices), "HIP_VISIBLE_DEVICES": visible}
        case "cpu":
            return {}


def _used_bytes(devices: Sequence[Device], processes: list[int]) -> int | None:
    """The memory of these processes on the devices, if the driver reports it."""
    if devices[0].kind == "rocm":
        return amd.memory_of(processes) or None
    return gpu_bytes(devices, processes)


def _gpu_ids(devices: Sequence[Device]) -> str:
    return ",".join(device.uuid or str(device.index) for device in devices if device.kind != "cpu")


def _directory(path: Path) -> Path:
    """The directory with the files and, in the hub's cache, the targets of their links."""
    of_hub = next((parent for parent in path.parents if parent.name.startswith("models--")), None)
    return of_hub or (path.parent if path.is_file() else path)


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
