"""One entry of `[[harnesses]]` in `neuron.toml`."""

from __future__ import annotations

import shlex
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cortex.settings import Section
from cortex.wire.node.load_options import ENGINE, Count, harness_name

Seconds = Annotated[float, Meta(gt=0)]
Command = str | tuple[str, ...]


class HealthCheck(Section, frozen=True):
    """How a node checks that a server is ready."""

    path: str = "/health"
    """`GET` on this path responds with a 2xx status once the server can take requests. `none`: as soon as it accepts a
    connection."""
    timeout_s: Seconds = 300.0
    """A server that is not ready within this time is ended, and its load fails with the last lines of its log."""


class StateRequest(Section, frozen=True):
    """A request that puts a server to sleep, or wakes it."""

    path: str = ""
    """The path, such as `/sleep?level=1` of vLLM. Empty: not supported by the server."""
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    """The fields of the request, which is a `POST`."""
    timeout_s: Seconds = 60.0
    """A server that has not responded within this time is ended."""


class GroupSettings(Section, frozen=True):
    """How a server runs one model on several nodes (`nodes` in `models.toml`). Every node starts one member; rank 0,
    the leader, takes the requests. Variables beyond those of `cmd`: `${RANK}`, `${NUM_NODES}`, `${LEADER_HOST}` and
    `${LEADER_PORT}` (the rendezvous of the members), `${MEMBER_HOST}` and `${MEMBER_PORT}` (this one's
    `cluster_address`, and a free port there), `${MEMBER_ADDRESSES}` (host:port of all members but the leader, separated
    by commas)."""

    cmd: Command = ()
    """The command of the leader. Absent: `cmd` of the harness."""
    args: Command = ()
    """Arguments of all members, before `args` of the harness."""
    member_cmd: Command = ()
    """The command of the members other than the leader, complete. Absent: that of the leader."""
    member_args: Command = ()
    """Arguments of these members, after `args`. Not together with `member_cmd`."""
    ready: Literal["started", "port"] = "started"
    """When the leader considers such a member ready: when its process has started, or when it accepts connections on
    `${MEMBER_PORT}`."""
    version: Command = ()
    """A command that prints the version of the server: the group starts only if it is the same on all nodes."""

    def __post_init__(self) -> None:
        if self.member_cmd and self.member_args:
            raise ValueError("`group` of a harness has member_cmd and member_args; put the arguments into member_cmd")


class HarnessEntry(Section, frozen=True):
    """A server that runs models in place of the built-in engine: llama-server, vLLM, whisper.cpp, anything that speaks
    HTTP. A model names it as its `harness`. The node starts one process for each loaded model, on a port of the
    loopback address, and ends it with the model. Requests cannot supply commands. The ready-made ones need no entry:
    `llama-server`, `vllm`, `sglang`, `vllm-ray`, `whisper-server`, `sd-server`, `tei`. An entry with such a name, or
    with `like`, overrides settings. `docker` and `podman` need the image in `args`, and `torchrun` the program."""

    name: str = ENGINE
    """Its name in `harness` of models. `torch`, or its old name `candle`, is the built-in engine, which every node has
    without an entry."""
    like: str | None = None
    """A ready-made harness that supplies the settings missing here. Absent: the one of the same name."""
    cmd: Command = ()
    """The program and its arguments: a list, or a text that is divided at spaces outside quotes. No shell is involved.
    Replaced in every argument: `${PORT}`, which must occur in a command or in `env`, `${MODEL_PATH}` (the model's
    files, which are downloaded only if this occurs), `${MODEL_DIRECTORY}` (what a container must mount to read them),
    `${MODEL_ID}`, `${CONTEXT}` (`context_tokens` of the model), `${DEVICES}` (indices, separated by commas),
    `${DEVICE_COUNT}`, `${GPU_IDS}` (as CUDA knows them), `${GPU_COUNT}`, `${MEMORY_FRACTION}` (the part of a device's
    memory that the model is expected to take, at most 0.95), `${FREE_PORT}` (another port), `${env.NAME}`."""
    args: Command = ()
    """Arguments that follow all others."""
    gpu_args: Command = ()
    """Arguments added to `cmd` if the model is on GPUs."""
    context_args: Command = ()
    """Arguments added to `cmd` if the model has `context_tokens`."""
    cmd_stop: Command = ()
    """A command that ends the server, such as `docker stop`; also with `${PID}`. Absent: SIGTERM to all its
    processes."""
    cmd_kill: Command = ()
    """A command that cleans up after the server's processes were killed, such as `docker rm --force`. It also runs
    after the node itself was killed."""
    cmd_pid: Command = ()
    """A command that prints the process id of a server started by a daemon, as with docker, so that its memory is
    measured."""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the server, in addition to those of the node; values are replaced as in `cmd`.
    `CUDA_VISIBLE_DEVICES` is set by the node."""
    health: HealthCheck = HealthCheck()
    routes: tuple[str, ...] = ()
    """The paths that the server supports, such as `/v1/audio/speech`; requests to others are rejected. Absent: all."""
    upstream_model: str | None = None
    """The name of the model in requests to the server. Absent: the model's id."""
    set_params: dict[str, Any] = msgspec.field(default_factory=dict)
    """Fields set in every request to the server, overriding those of the client."""
    strip_params: tuple[str, ...] = ()
    """Fields removed from every request to the server."""
    memory_mb: Count | None = None
    """Expected memory of a model before its first load, unless the model sets `memory_mb`; afterwards a larger measured
    size takes precedence. Absent: 1.25 times its files."""
    max_concurrent: Count | None = None
    """Requests that a server runs at once; further ones wait in the node's queue. Absent: `limits.max_num_seqs`."""
    stop_timeout_s: Seconds = 10.0
    """A server that has not ended within this time is killed."""
    silence_timeout_s: Seconds = 600.0
    """After this long without a byte of a response, the node runs the health check, unless another response progresses.
    A server that does not respond is killed and restarted. A working server may take an hour until a response begins,
    because a response that is not streamed arrives when complete; a stream that stops for this long fails."""
    restart: bool = True
    """Restart a server that ends by itself, with a back-off. `false`: the next request starts it."""
    sleep: StateRequest = StateRequest()
    """The request that moves the model out of GPU memory. Absent: the model is unloaded instead."""
    wake: StateRequest = StateRequest()
    """The request that moves it back."""
    group: GroupSettings | None = None
    """How it runs on several nodes. Absent: on one node only."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", harness_name(self.name))

    @property
    def commands(self) -> dict[str, tuple[str, ...]]:
        """All of them by name, divided. Raises ValueError for an unclosed quote."""
        names = ("cmd", "gpu_args", "context_args", "args", "cmd_stop", "cmd_kill", "cmd_pid")
        return {name: _divided(self.name, name, getattr(self, name)) for name in names}

    def argv(self, *, has_gpus: bool, has_context: bool, rank: int | None = None) -> tuple[str, ...]:
        """The program and its arguments, with variables. `rank`: that of a group member."""
        parts, group = self.commands, self.group_commands
        if rank and group["member_cmd"]:
            return group["member_cmd"]
        gpu, context = parts["gpu_args"] * has_gpus, parts["context_args"] * has_context
        if rank is None:
            return (*parts["cmd"], *gpu, *context, *parts["args"])
        members = group["args"] + group["member_args"] * bool(rank)
        return (*(group["cmd"] or parts["cmd"]), *gpu, *context, *members, *parts["args"])

    @property
    def group_commands(self) -> dict[str, tuple[str, ...]]:
        """As `commands`."""
        group = self.group or GroupSettings()
        names = ("cmd", "args", "member_cmd", "member_args", "version")
        return {name: _divided(self.name, f"group.{name}", getattr(group, name)) for name in names}


@cache
def _divided(harness: str, name: str, command: Command) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command)) if isinstance(command, str) else command
    except ValueError as error:
        raise ValueError(f"{name} of the harness `{harness}` cannot be divided: {error}") from error


def check_server(entry: HarnessEntry) -> None:
    """Raises ValueError for a server that cannot run. The entry must be complete."""
    if not entry.cmd:
        raise ValueError(f"the harness `{entry.name}` has no cmd; give the command that starts its server")
    commands = (*entry.commands.values(), *entry.group_commands.values())
    texts = [text for command in commands for text in command]
    if not any("${PORT}" in text for text in (*texts, *entry.env.values())):
        raise ValueError(
            f"the harness `{entry.name}` has ${{PORT}} neither in cmd nor in env; its server must listen on the "
            "port that the node chooses"
        )
    if bool(entry.sleep.path) != bool(entry.wake.path):
        raise ValueError(f"the harness `{entry.name}` has one of `sleep` and `wake`; give both or neither")
    for path in (*entry.routes, entry.sleep.path, entry.wake.path):
        if path and not path.startswith("/"):
            raise ValueError(f"the harness `{entry.name}` has the path {path!r}; a path begins with a slash")
