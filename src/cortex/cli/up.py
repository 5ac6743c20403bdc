"""`cortex up`: a gateway and a neuron on this machine as one supervised command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import click
import msgspec
from rich.console import Console

from cortex.gateway.config import Config, load
from cortex.gateway.server import load_catalogue
from cortex.settings import Listen
from cortex.wire.node import Health, ModelState, ModelStatus

from . import runfiles
from .cache import run_directory
from .client import DEFAULT_URL, Gateway, Refused, Unreachable
from .demo import SMOLLM2, ensure_demo_model
from .failures import Command, CommandError, ExitCode, is_verbose
from .loadview import LoadView
from .preflight import require_engine, require_free_ports
from .runfiles import Ports
from .sources import ModelSource, parse_source
from .supervisor import ChildDied, Supervisor

DEFAULT_PORTS = Ports(gateway=31313, metrics=31314, neuron=13131)
STOP_GRACE_S = runfiles.DRAIN_S + 4.0
ANSWER_WITHIN_S = 60.0
"""Both programs bind their port before anything slow; silence for this long is a fault."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before anything is started."""

    host: str
    ports: Ports
    models: tuple[ModelSource, ...]
    config: Path
    """The gateway's file: the user's own, or the one in `folder`."""
    folder: Path
    environment: Mapping[str, str]
    """What the children see: ours, plus the overrides that tie the two programs together."""

    @property
    def url(self) -> str:
        return f"http://{runfiles.address(reachable(self.host), self.ports.gateway)}"

    @property
    def metrics_url(self) -> str:
        return f"http://{runfiles.address(reachable(self.host), self.ports.metrics)}/metrics"

    @property
    def neuron_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.neuron}"


@click.command(cls=Command)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option("--port", type=click.IntRange(1, 65535), help=f"Port of the API. [default: {DEFAULT_PORTS.gateway}]")
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
@click.option("--host", help="Address to listen on; 0.0.0.0 lets other machines in. [default: 127.0.0.1]")
@click.option(
    "--config", type=click.Path(path_type=Path), help="A cortex.toml to use; the local neuron joins its nodes."
)
def up(
    models: tuple[str, ...],
    port: int | None,
    metrics_port: int | None,
    neuron_port: int,
    host: str | None,
    config: Path | None,
) -> None:
    """Serve models from this machine until Ctrl-C.

    Starts a gateway and a neuron as one supervised command.

    \b
    MODEL is a hub id, a model directory or a GGUF file; without one, a small demo model is fetched once.
      cortex up
      cortex up Qwen/Qwen3-0.6B
      cortex up ./my-model-dir ./other.gguf --port 8000
    """
    console = Console(highlight=False)
    require_engine()
    settings = load(config, os.environ)
    load_catalogue(settings, config)
    listen = settings.gateway.listen if config else Listen(f"127.0.0.1:{DEFAULT_PORTS.gateway}")
    metrics = settings.gateway.metrics_listen
    ports = Ports(
        gateway=port or listen.port,
        metrics=metrics_port or (metrics.port if config and metrics else DEFAULT_PORTS.metrics),
        neuron=neuron_port,
    )
    host = host or listen.host
    require_free_ports(host, ports)
    sources = distinct(parse_source(text) for text in models)
    if not sources:
        sources = (ModelSource(SMOLLM2.id, str(ensure_demo_model(console))),)
    folder = run_directory(ports.gateway)
    plan = Plan(
        host=host,
        ports=ports,
        models=sources,
        config=config.absolute() if config else folder / "cortex.toml",
        folder=folder,
        environment={**os.environ, **overrides(settings, host, ports)},
    )
    runfiles.write(
        folder,
        {
            "cortex.toml": runfiles.gateway_config(host, ports),
            "models.toml": runfiles.catalogue(sources),
            "neuron.toml": runfiles.neuron_config(ports, sources),
        },
    )
    supervise(console, plan)


def distinct(sources: Iterable[ModelSource]) -> tuple[ModelSource, ...]:
    """The models, each under a name of its own."""
    found: dict[str, ModelSource] = {}
    for model in sources:
        other = found.setdefault(model.id, model)
        if other != model:
            raise CommandError(
                f"{other.source} and {model.source} would both be called {model.id}", "rename one", ExitCode.USAGE
            )
    return tuple(found.values())


def overrides(settings: Config, host: str, ports: Ports) -> dict[str, str]:
    """Settings that must win over any file and over the shell's own: the ports asked for, and the local node."""
    environment = {
        "CORTEX_GATEWAY__LISTEN": runfiles.address(host, ports.gateway),
        "CORTEX_GATEWAY__METRICS_LISTEN": runfiles.address(host, ports.metrics),
        "NEURON_LISTEN": runfiles.address("127.0.0.1", ports.neuron),
        "NEURON_PORT": str(ports.neuron),
    }
    endpoints = [urlsplit(neuron.endpoint) for neuron in settings.neurons]
    if not any(e.hostname in _LOOPBACK and e.port == ports.neuron for e in endpoints):
        taken = {neuron.name for neuron in settings.neurons}
        name = next(name for name in (runfiles.LOCAL_NODE, *map("local-{}".format, range(2, 99))) if name not in taken)
        environment[f"CORTEX_NEURONS__{len(settings.neurons)}__NAME"] = name
        environment[f"CORTEX_NEURONS__{len(settings.neurons)}__ENDPOINT"] = f"http://127.0.0.1:{ports.neuron}"
    return environment


def reachable(host: str) -> str:
    """The address a client on this machine uses for a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def supervise(console: Console, plan: Plan) -> None:
    """Start both programs, wait until the models answer, and stay until a signal or a death."""
    started = time.monotonic()
    with Supervisor(STOP_GRACE_S) as supervisor:
        try:
            for name, config in (("neuron", plan.folder / "neuron.toml"), ("gateway", plan.config)):
                command = [sys.executable, "-m", f"cortex.{name}", "--config", str(config)]
                log = None if is_verbose() else plan.folder / f"{name}.log"
                supervisor.start(name, command, log, plan.environment)
            if wait_until_loaded(console, plan, supervisor):
                say_ready(console, plan, time.monotonic() - started)
                while supervisor.wait(3600):
                    pass
        except ChildDied as death:
            raise fault_of(death) from death
        if supervisor.stopping:
            console.print("stopping")


def fault_of(death: ChildDied) -> CommandError:
    """A child's end as the user should read it, in the child's own last words."""
    child = death.child
    told = child.last_words()
    reason = told[0].removeprefix("cortex: ").removeprefix("neuron: ") if told else ending(child.process.returncode)
    where = f"its log is {child.log}" if child.log else "its log is above"
    return CommandError(f"the {child.name} ended by itself: {reason}", where)


def ending(code: int) -> str:
    """What a process's exit code says."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def wait_until_loaded(console: Console, plan: Plan, supervisor: Supervisor) -> bool:
    """True once every model answers or has failed (at least one answers); False when asked to stop.

    Raises `CommandError` when none can be loaded or a program stays silent, `ChildDied` when one ends.
    """
    neuron, gateway = Gateway(plan.neuron_url, None, 2.0), Gateway(plan.url, os.environ.get("CORTEX_API_KEY"), 2.0)
    silent_until = time.monotonic() + ANSWER_WITHIN_S
    with LoadView(console) as view:
        view.starting(model.id for model in plan.models)
        while supervisor.wait(0.1):
            statuses = look_at(neuron, plan.models)
            for status in statuses:
                view.update(status)
            failed = [status for status in statuses if status.state is ModelState.FAILED]
            if len(failed) == len(plan.models):
                raise load_failure(failed)
            answering = loaded_models(gateway, statuses)
            if answering is not None:
                silent_until = time.monotonic() + ANSWER_WITHIN_S
                if len(answering) + len(failed) >= len(plan.models):
                    break
            if time.monotonic() > silent_until:
                raise CommandError(
                    f"gateway or neuron did not answer within {ANSWER_WITHIN_S:g} s", f"see the logs in {plan.folder}"
                )
    if supervisor.stopping:
        return False
    for status in failed:
        console.print(f"[yellow]{status.id} is not available:[/yellow] {reason_of(status)}")
    return True


def look_at(neuron: Gateway, models: Sequence[ModelSource]) -> list[ModelStatus]:
    """What the node says of the models asked for; empty until it answers."""
    try:
        health = msgspec.convert(neuron.get("/health"), Health)
    except Unreachable:
        return []
    wanted = {model.id for model in models}
    return [status for status in health.models if status.id in wanted]


def loaded_models(gateway: Gateway, statuses: Sequence[ModelStatus]) -> set[str] | None:
    """Which of the models clients can use through the gateway now; None until it answers."""
    try:
        listed = gateway.get("/v1/models")["data"]
    except Unreachable:
        return None
    except Refused:  # it wants a key we were not given, so the node's word must do
        return {status.id for status in statuses if status.state is ModelState.READY}
    loaded = {entry["id"] for entry in listed if entry.get("loaded")}
    return loaded & {status.id for status in statuses}


def load_failure(failed: Sequence[ModelStatus]) -> CommandError:
    told = "; ".join(f"{status.id} could not be loaded: {reason_of(status)}" for status in failed)
    return CommandError(told.rstrip("."), "choose another model or fix this one, then start again")


def reason_of(status: ModelStatus) -> str:
    """The node's own words, without the name that already stands before them."""
    return (status.reason or "no reason given").removeprefix(f"{status.id}: ")


def say_ready(console: Console, plan: Plan, seconds: float) -> None:
    names = ", ".join(model.id for model in plan.models)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": plan.models[0].id, "messages": question, "max_tokens": 64}
    curl = f"curl {plan.url}/v1/chat/completions -H 'content-type: application/json' -d {shlex.quote(json.dumps(body))}"
    console.print(f"[bold green]ready[/bold green] after {seconds:.1f} s: {names} at {plan.url}", soft_wrap=True)
    console.print(f"\n  {curl}\n", soft_wrap=True, markup=False)
    console.print(
        f"  chat     {program()} chat{'' if plan.url == DEFAULT_URL else f' --url {plan.url}'}", soft_wrap=True
    )
    console.print(
        f"  metrics  http://{runfiles.address(reachable(plan.host), plan.ports.metrics)}/metrics", soft_wrap=True
    )
    console.print(f"  logs     {plan.folder}", soft_wrap=True)
    console.print("\nCtrl-C ends everything.")


def program() -> str:
    """How the user called us, so that the line we print works when it is pasted."""
    called = sys.argv[0]
    if Path(called).name != "cortex" or shutil.which("cortex") == str(Path(called).absolute()):
        return "cortex"
    return called
