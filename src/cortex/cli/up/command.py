"""`cortex up`: a gateway and a neuron on this machine as one supervised command.

The programs are child processes, which are ended together within a time limit. Each leads its own process group, so
that Ctrl-C reaches only the supervisor. The kernel sends each SIGTERM when the supervisor dies, so that even `kill -9`
on the supervisor leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, Self

import click
import msgspec
from rich.console import Console
from rich.text import Text

from cortex.cli.client import DEFAULT_URL, GatewayClient, GatewayRejected, GatewayUnreachable, exit_code_for
from cortex.cli.failures import Command, CommandError, ExitCode, is_verbose
from cortex.cli.output import console
from cortex.cli.up import run_files
from cortex.cli.up.demo import SMOLLM2, ensure_demo_model
from cortex.cli.up.plan import UpPlan, distinct, metrics_host, overrides
from cortex.cli.up.preflight import require_engine, require_free_ports
from cortex.cli.up.run_files import Ports, run_directory
from cortex.cli.up.sources import ModelSource, NamedModel, parse_source
from cortex.cli.views import ProgressView, reason_of, show_status
from cortex.fleet.known_models import KnownModel, known_repository
from cortex.gateway.config import load
from cortex.gateway.configuration_files import load_catalogue
from cortex.http.tls import own_context
from cortex.ipc.child import die_with_parent
from cortex.system.exits import ending
from cortex.wire.dialects.ollama.models import PORT
from cortex.wire.error_encoding import BY_CODE
from cortex.wire.node.protocol import Capabilities, Health, ModelState, ModelStatus

_POLL_S = 0.05
RESPONSE_TIMEOUT_S = 300.0
"""Both programs bind their port before any slow work, so silence for this long is a fault."""


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path | None
    """The file with its output; None: the output goes where the supervisor's goes."""

    def last_lines(self, count: int = 1) -> list[str]:
        """The last non-empty lines of its log."""
        if self.log is None:
            return []
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return list(deque((line.rstrip() for line in file if line.strip()), maxlen=count))


class ChildDied(Exception):
    """A child exited while it should have been running."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.name} exited with {child.process.returncode}")
        self.child = child


class ProcessSupervisor:
    """Owns its children; use it as a context manager on the main thread.

    Inside the block, SIGINT, SIGTERM and SIGHUP only set `stopping`. Leaving the block ends every child: with SIGTERM,
    then after `grace_s` or a second signal with SIGKILL to its process group.
    """

    def __init__(self, grace_s: float) -> None:
        self.children: list[Child] = []
        self.stopping = False
        self._kill_now = False
        self._grace_s = grace_s
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_failure: object) -> None:
        self._end_all()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, name: str, command: Sequence[str], log: Path | None, environment: Mapping[str, str]) -> Child:
        """Runs `command` with its output in `log`, or where the supervisor's goes."""
        with contextlib.nullcontext() if log is None else log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                process_group=0,
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
            )
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raises `ChildDied` for the first child that has exited."""
        for child in self.children:
            if child.process.poll() is not None:
                raise ChildDied(child)

    def wait(self, seconds: float) -> bool:
        """Waits and watches the children; False as soon as a signal asks to stop. Raises `ChildDied`."""
        deadline = time.monotonic() + seconds
        while not self.stopping:
            self.check()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return True
            time.sleep(min(_POLL_S, remaining_s))
        return False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._kill_now = self.stopping
        self.stopping = True

    def _end_all(self) -> None:
        self.stopping = True
        for child in self.children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + self._grace_s
        while not self._kill_now and time.monotonic() < deadline:
            if all(child.process.poll() is not None for child in self.children):
                break
            time.sleep(_POLL_S)
        for child in self.children:
            try:
                os.killpg(child.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the whole group has exited
            child.process.wait()


def wait_until_loaded(console: Console, plan: UpPlan, supervisor: ProcessSupervisor) -> list[str]:
    """The models that are ready, in the order of the plan, once each is ready or has failed. Empty when a signal ends
    the wait.

    Raises `CommandError` when no model can be loaded or a program does not respond, `ChildDied` when a program ends.
    """
    tls = own_context(plan.tls_cert) if plan.tls_cert is not None else None
    neuron, gateway = (
        GatewayClient(plan.neuron_url, plan.node_key, 2.0),
        GatewayClient(plan.url, os.environ.get("CORTEX_API_KEY"), 2.0, tls=tls),
    )
    response_deadline = time.monotonic() + RESPONSE_TIMEOUT_S
    with ProgressView(console, [model.id for model in plan.models]) as view:
        while supervisor.wait(0.1):
            statuses = statuses_of(neuron, plan.models)
            for status in statuses:
                show_status(view, status)
            failed = [status for status in statuses if status.state is ModelState.FAILED]
            if len(failed) == len(plan.models):
                raise load_failure(failed)
            usable = loaded_models(gateway, statuses)
            if usable is not None:
                response_deadline = time.monotonic() + RESPONSE_TIMEOUT_S
                if len(usable) + len(failed) >= len(plan.models):
                    break
            if time.monotonic() > response_deadline:
                raise CommandError(
                    f"gateway or neuron did not respond within {RESPONSE_TIMEOUT_S:g} s",
                    f"see the logs in {plan.folder}",
                )
    if supervisor.stopping:
        return []
    for status in failed:
        console.print(
            Text.assemble((f"{status.id} is not available:", "yellow"), f" {reason_of(status)}"), soft_wrap=True
        )
    return [model.id for model in plan.models if model.id not in {status.id for status in failed}]


def statuses_of(neuron: GatewayClient, models: Sequence[ModelSource]) -> list[ModelStatus]:
    """The node's status of the requested models; empty until it responds."""
    try:
        health = msgspec.convert(neuron.get("/health"), Health)
    except GatewayUnreachable:
        return []
    wanted = {model.id for model in models}
    return [status for status in health.models if status.id in wanted]


def capabilities_of(plan: UpPlan, model_id: str) -> Capabilities:
    """The capabilities of a ready model, as the node reports them."""
    statuses = statuses_of(GatewayClient(plan.neuron_url, plan.node_key, 2.0), plan.models)
    return next((status.capabilities for status in statuses if status.id == model_id), Capabilities())


def loaded_models(gateway: GatewayClient, statuses: Sequence[ModelStatus]) -> set[str] | None:
    """The models that clients can use through the gateway now; None until it responds."""
    try:
        listed = gateway.get("/v1/models")["data"]
    except GatewayUnreachable:
        return None
    except GatewayRejected:  # it requires a key that we do not have: rely on the node's report
        return {status.id for status in statuses if status.state is ModelState.READY}
    loaded = {entry["id"] for entry in listed if entry.get("loaded")}
    return loaded & {status.id for status in statuses}


def load_failure(failed: Sequence[ModelStatus]) -> CommandError:
    reasons = "; ".join(f"{status.id} could not be loaded: {reason_of(status)}" for status in failed)
    codes = {status.reason_code or "" for status in failed}
    kinds = {exit_code_for(BY_CODE[code].status, code) if code in BY_CODE else ExitCode.FAILED for code in codes}
    exit_code = kinds.pop() if len(kinds) == 1 else ExitCode.FAILED
    missing = [status.id for status in failed if status.reason_code == "source_not_found"]
    meant = [name for each in missing if (name := known_repository(each.rpartition("/")[2])) not in (None, each)]
    remedy = f"did you mean {' and '.join(map(str, meant))}?" if meant else "start again once this is fixed"
    return CommandError(reasons.rstrip("."), remedy, exit_code)


_FORMATS: Final = (("Q8_0", 1.07), ("Q6_K", 0.83), ("Q5_K_M", 0.72), ("Q4_K_M", 0.61))
"""The formats of quantised weights, the best first, and bytes per weight with embeddings and scales."""
_SHARE_OF_WEIGHTS: Final = 0.8
"""The share of free memory that weights may take; the rest is for the KV cache and buffers."""


def chosen(model: KnownModel, quant: str | None, free_bytes: int) -> ModelSource:
    """The model as published if it fits, else in the best format that does, as GGUF if published so. With `quant`, in
    that format. If none fits, in the smallest, and the node reports what is missing."""
    room = free_bytes * _SHARE_OF_WEIGHTS
    if quant is None and model.weight_bytes > room:
        smaller = [(name, size) for name, size in _FORMATS if size < model.bytes_per_weight]
        fitting = (name for name, size in smaller if model.billions * 1e9 * size <= room)
        quant = next(fitting, smaller[-1][0] if smaller else None)
    source = model.gguf if quant is not None and model.gguf is not None else model.open_repository
    return ModelSource(model.name, source, quant)


DEFAULT_PORTS = Ports(gateway=31313, metrics=31314, neuron=13131)
ONE_MACHINE = {"gateway": {"listen": f"127.0.0.1:{DEFAULT_PORTS.gateway}"}}
"""Unlike `cortex serve`, listen on the loopback interface only, unless the user sets an address."""
STOP_GRACE_S = run_files.DRAIN_S + 4.0


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--quant",
    help="Take this GGUF file of a repository, or quantise dense weights at load: q4, q5, q6, q8; on a GPU also fp8.",
)
@click.option(
    "-p", "--port", type=click.IntRange(1, 65535), help=f"Port of the API. [default: {DEFAULT_PORTS.gateway}]"
)
@click.option(
    "--metrics-port", type=click.IntRange(1, 65535), help=f"Port of the metrics. [default: {DEFAULT_PORTS.metrics}]"
)
@click.option(
    "--neuron-port",
    type=click.IntRange(1, 65535),
    default=DEFAULT_PORTS.neuron,
    show_default=True,
    help="Port of the local neuron (loopback only).",
)
@click.option(
    "--host",
    help="Address to listen on; 0.0.0.0 admits other machines, without keys until there are some. [default: 127.0.0.1]",
)
@click.option("--ollama", is_flag=True, help="Also listen on port 11434, where clients of Ollama look by default.")
@click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="A cortex.toml to use; the local neuron joins its nodes."
)
def up(
    models: tuple[str, ...],
    quant: str | None,
    port: int | None,
    metrics_port: int | None,
    neuron_port: int,
    host: str | None,
    ollama: bool,
    config: Path | None,
) -> None:
    """Serve models from this machine until Ctrl-C.

    Starts a gateway and a neuron as one supervised command.

    MODEL is the name of a common model, a hub id, a model directory or a GGUF file; without one, a small demo model is
    downloaded once. A name alone takes the format that fits the free memory of the devices.

    \b
      cortex up
      cortex up gpt-oss-20b
      cortex up gemma-4-26b qwen2.5-coder:7b
      cortex up Qwen/Qwen3-0.6B
      cortex up Qwen/Qwen3-8B-GGUF:Q4_K_M
      cortex up Qwen/Qwen3-8B --quant q4
      cortex up ./my-model-dir ./other.gguf --port 8000
    """
    if quant is not None and not models:
        raise click.UsageError("--quant needs a MODEL; the demo model is quantised already.")
    out = console()
    require_engine()
    settings = load(config, os.environ, defaults=ONE_MACHINE)
    load_catalogue(settings, config)
    listen, metrics = settings.gateway.listen, settings.gateway.metrics_listen
    ports = Ports(
        gateway=port or listen.port,
        metrics=metrics_port or (metrics.port if metrics else DEFAULT_PORTS.metrics),
        neuron=neuron_port,
        ollama=PORT if ollama else None,
    )
    is_host_named = host is not None
    host = host or listen.host
    require_free_ports(host, ports, metrics_host(settings))
    named = [parse_source(text) for text in models]
    free_bytes = device_bytes() if any(isinstance(model, NamedModel) for model in named) else 0
    sources = distinct(_source(out, model, quant, free_bytes) for model in named)
    if not sources:
        demo = ensure_demo_model(out)
        sources = (ModelSource(SMOLLM2.id, str(demo), temperature=SMOLLM2.temperature),)
    folder = run_directory(ports.gateway)
    gateway_file = config.absolute() if config else folder / "cortex.toml"
    certificate = settings.gateway.tls_cert
    plan = UpPlan(
        host=host,
        ports=ports,
        models=sources,
        config=gateway_file,
        folder=folder,
        tls_cert=gateway_file.parent / certificate.expanduser() if certificate else None,
        has_keys=bool(settings.keys),
        environment={**os.environ, **overrides(settings, host, ports, local_node_key(), is_host_named=is_host_named)},
        metrics_host=metrics_host(settings),
    )
    run_files.write(
        folder,
        {
            "cortex.toml": run_files.gateway_config(host, ports),
            "models.toml": run_files.catalogue(sources),
            "neuron.toml": run_files.neuron_config(ports, sources),
        },
    )
    supervise(out, plan)


def _source(out: Console, model: ModelSource | NamedModel, quant: str | None, free_bytes: int) -> ModelSource:
    if isinstance(model, ModelSource):
        return replace(model, quant=model.quant or quant)
    source = chosen(model.model, model.quant or quant, free_bytes)
    shown = f"{source.source}:{source.quant}" if source.quant else source.source
    out.print(f"{source.id} is {shown}", soft_wrap=True, highlight=False)
    return source


def device_bytes() -> int:
    """The free memory of the devices that a neuron will use here."""
    from cortex.neuron.worker.discovery import discover  # here, because a gateway-only installation lacks NVML

    return sum(reading.free_bytes for reading in discover().readings.values())


def local_node_key() -> str | None:
    """The key that the neuron will require, if NEURON_KEYS or NEURON_KEY_FILE sets one. Raises SettingsError."""
    from cortex.neuron import config  # here, because a gateway-only installation lacks its imports
    from cortex.neuron.api.access import read_keys

    keys = read_keys(config.load(None, os.environ), Path.cwd())
    return keys[0] if keys else None


def supervise(console: Console, plan: UpPlan) -> None:
    """Start both programs, wait until the models are ready, and return after a signal. Raises when a program ends."""
    started = time.monotonic()
    with ProcessSupervisor(STOP_GRACE_S) as supervisor:
        try:
            for name, config in (("neuron", plan.folder / "neuron.toml"), ("gateway", plan.config)):
                command = [sys.executable, "-P", "-m", f"cortex.{name}", "--config", str(config)]
                log = None if is_verbose() else plan.folder / f"{name}.log"
                supervisor.start(name, command, log, plan.environment)
            if ready := wait_until_loaded(console, plan, supervisor):
                took_s = time.monotonic() - started
                print_ready(console, plan, ready, took_s, capabilities_of(plan, ready[0]))
                while supervisor.wait(3600):
                    pass
        except ChildDied as death:
            raise fault_of(death) from death
        if supervisor.stopping:
            console.print("stopping")


def fault_of(death: ChildDied) -> CommandError:
    """The error for a program that ended. The last line of its log is the reason, unless a signal killed it."""
    child = death.child
    lines, code = child.last_lines(), child.process.returncode
    is_reason = bool(lines) and code >= 0
    reason = lines[0].removeprefix("cortex: ").removeprefix("neuron: ") if is_reason else ending(code)
    if code == -signal.SIGKILL:
        reason += " (by the system, if it ran out of memory: see `dmesg`)"
    where = f"its log is {child.log}" if child.log else "its log is above"
    return CommandError(f"the {child.name} ended unexpectedly: {reason}", where)


def example_request(model: str, capabilities: Capabilities) -> tuple[str, dict[str, Any]]:
    """The path and the body of a first request."""
    if capabilities.embeddings and not capabilities.chat:
        return "/v1/embeddings", {"model": model, "input": ["Tokyo is the capital of Japan."]}
    if capabilities.rerank and not capabilities.chat:
        documents = ["Tokyo is the capital of Japan.", "Bread is baked."]
        return "/v1/rerank", {"model": model, "query": "What is the capital of Japan?", "documents": documents}
    question = [{"role": "user", "content": "What is the capital of Japan?"}]
    return "/v1/chat/completions", {"model": model, "messages": question, "temperature": 0, "max_tokens": 64}


def print_ready(
    console: Console,
    plan: UpPlan,
    ready: Sequence[str],
    seconds: float,
    capabilities: Capabilities = Capabilities(),  # noqa: B008 - immutable
) -> None:
    """`capabilities`: of the first model that is ready."""
    path, body = example_request(ready[0], capabilities)
    key = ' -H "authorization: Bearer $CORTEX_API_KEY"' if plan.has_keys else ""
    route = f"{plan.url}{path}"
    curl = f"curl {route}{key} -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
    when = f" after {seconds:.1f} s: {', '.join(ready)} at {plan.url}"
    console.print(Text.assemble(("ready", "bold green"), when), soft_wrap=True)
    console.print(f"\n  {curl}\n", soft_wrap=True)
    where = "" if plan.url == DEFAULT_URL else f" --url {plan.url}"
    if plan.has_keys and not os.environ.get("CORTEX_API_KEY"):
        console.print(f"  key      export CORTEX_API_KEY=…, a key of {plan.config}", soft_wrap=True)
    if capabilities.chat:
        console.print(f"  chat     {program()} chat{where}", soft_wrap=True)
    console.print(f"  metrics  {plan.metrics_url}", soft_wrap=True)
    if plan.ports.ollama is not None:
        console.print(f"  ollama   http://{run_files.address(plan.host, plan.ports.ollama)}", soft_wrap=True)
    console.print(f"  logs     {plan.folder}", soft_wrap=True)
    console.print("\nCtrl-C stops everything.")


def program() -> str:
    """The program as the user called it, so that a printed command works when pasted."""
    path = sys.argv[0]
    if Path(path).name != "cortex" or shutil.which("cortex") == str(Path(path).absolute()):
        return "cortex"
    return path
