"""The command `neuron`: the node daemon, and checks of the machine it runs on.

A command that needs the engine's packages checks first that they are installed.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cortex import __version__
from cortex.cli import tp_smoke, warmup
from cortex.cli.commands.doctor import checks, configuration_checks
from cortex.cli.commands.doctor.checks import Finding, Severity
from cortex.cli.commands.doctor.command import report
from cortex.cli.commands.doctor.device_checks import devices
from cortex.cli.failures import EXIT_CODES_HELP, CommandError, ExitCode, Group, run
from cortex.cli.output import answer, bar, console, file_here, json_option, print_json, size, table
from cortex.cli.up.preflight import require_engine
from cortex.settings import SettingsError
from cortex.telemetry.tracing import open_tracer
from cortex.wire.words import plural

if TYPE_CHECKING:
    from cortex.neuron.config import NeuronConfig

config_option = click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="A neuron.toml. [default: ./neuron.toml if there is one]"
)


def _check_environment(env: Mapping[str, str]) -> None:
    from cortex.neuron import config

    config.check_environment(env)


@click.group(cls=Group, name="neuron", epilog=EXIT_CODES_HELP, check_environment=_check_environment)
@click.version_option(__version__, prog_name="neuron")
def neuron() -> None:
    """Serve models on this machine's devices."""


@neuron.command()
@config_option
@click.option("-p", "--port", type=click.IntRange(1, 65535), help="Port to listen on, instead of the configured one.")
@click.option("--insecure", is_flag=True, help="Let other machines use this node without a key.")
def serve(config: Path | None, port: int | None, insecure: bool) -> None:
    """Run the node daemon until SIGTERM or Ctrl-C.

    Without the engine's packages it runs models through `harnesses` only.
    """
    import uvloop

    from cortex.neuron.api.server import CannotListen
    from cortex.neuron.api.server import serve as serve_node
    from cortex.telemetry import logs

    config = config or file_here("neuron.toml")
    logs.hold()
    try:
        settings = _load(config, {"NEURON_PORT": str(port)} if port else {})
        if not settings.commands:
            require_engine("or name a server under [[harnesses]] of neuron.toml")
        uvloop.run(serve_node(settings, config, insecure=insecure))
    except CannotListen as error:
        what, _, remedy = str(error).partition("; ")
        raise CommandError(what, remedy, ExitCode.NO_ROOM) from error


@neuron.command()
def key() -> None:
    """Print a new random key for `key_file`, which gateways send."""
    click.echo(f"nk-{secrets.token_urlsafe(32)}")


@neuron.command()
@config_option
@json_option
def discover(config: Path | None, as_json: bool) -> None:
    """Show the devices that a neuron would use on this machine."""
    from cortex.neuron.node.devices import inventory_of

    inventory = inventory_of(_load(config or file_here("neuron.toml"), {}))
    if as_json:
        print_json(inventory)
        return
    rows = table(">DEVICE", "NAME", "KIND", "MEMORY", ">FREE", ">TOTAL", "COMPUTE")
    for device in inventory.devices:
        reading = inventory.readings.get(device.index)
        free_bytes = reading.free_bytes if reading else 0
        rows.add_row(
            str(device.index),
            device.name,
            device.kind,
            bar(1 - free_bytes / device.total_bytes) if device.total_bytes else "",
            size(free_bytes) if reading else "",
            size(device.total_bytes),
            device.compute_capability or "",
        )
    console().print(rows)
    if inventory.driver:
        console().print(f"driver {inventory.driver}")
    if inventory.driver_problem:
        console().print(f"problem: {inventory.driver_problem}")


@neuron.command()
@config_option
@click.option("--model", help="Only the files of this model.")
@click.option("--tenant", help="Only files with pages of this tenant, as `cortex keys list --json` prints it.")
@click.option("--unused-days", type=click.FloatRange(0), help="Only files that were not used for this many days.")
@click.option("--all", "everything", is_flag=True, help="All files.")
@json_option
def forget(
    config: Path | None,
    model: str | None,
    tenant: str | None,
    unused_days: float | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Delete KV pages on disk (`limits.kv_disk_mb`).

    The node may be running: it recomputes missing pages. Pages in its memory stay and may be written again; `cortex
    forget` deletes these too.
    """
    from cortex.neuron.engine.host_pages.block_files import purge
    from cortex.neuron.engine.host_pages.store import ChosenBlocks

    if not everything and model is None and tenant is None and unused_days is None:
        remedy = "name --model, --tenant or --unused-days, or use --all"
        raise CommandError("nothing is selected", remedy, ExitCode.USAGE)
    tenants = () if tenant is None else (tenant.lower().encode(),)
    if not all(re.fullmatch(b"[0-9a-f]{8,32}", each) for each in tenants):
        raise CommandError(f"{tenant!r} is not a tenant", "give its hexadecimal digits", ExitCode.USAGE)
    folder = _load(config or file_here("neuron.toml"), {}).limits.kv_disk_folder
    unused_s = None if unused_days is None else unused_days * 86400
    number, num_bytes = purge(folder, ChosenBlocks(model, tenants), unused_s)
    line = f"deleted {plural(number, 'file')}, {size(num_bytes)}, in {folder}"
    answer({"files": number, "bytes": num_bytes}, line, as_json=as_json)


@neuron.command("warmup")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option(
    "--card", type=click.Choice(warmup.CARD_NAMES), help="Card to compile for. [default: the card of this host]"
)
@warmup.load_option("quant")
@warmup.load_option("kv_dtype")
@warmup.load_option("context_tokens")
@click.option("--max-num-seqs", type=click.IntRange(1), default=256, show_default=True)
@warmup.load_option("tensor_parallel")
@json_option
def warmup_command(
    models: tuple[str, ...],
    card: str | None,
    max_num_seqs: int,
    tensor_parallel: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile the kernels of models ahead.

    The first load then takes no longer than later ones. MODEL is a directory, a GGUF file, or OWNER/NAME on the Hub, of
    which only the config is downloaded. With --card no GPU is needed, for example when you build an image. Versions of
    Triton that compile a C launcher for each kernel still do so at the first load, because that needs the driver.
    """
    require_engine()
    from cortex.neuron.engine.request import LoadSpec

    warmup.run(models, card, LoadSpec("", max_num_seqs=max_num_seqs, **options), tensor_parallel, as_json=as_json)


@neuron.command("tp-smoke")
@click.option("--devices", default="0,1", show_default=True, help="Two or more devices, as `discover` numbers them.")
@json_option
def tp_smoke_command(devices: str, as_json: bool) -> None:
    """Measure the link between devices.

    Shows whether dividing a model among them pays.
    """
    require_engine()
    try:
        indices = [int(part) for part in devices.split(",")]
    except ValueError as error:
        raise CommandError(
            f"{devices!r} is not a list of devices", "name them: --devices 0,1", ExitCode.USAGE
        ) from error
    tp_smoke.run(indices, as_json=as_json)


@neuron.command()
@config_option
@json_option
def doctor(config: Path | None, as_json: bool) -> int:
    """Check a node for common problems and suggest fixes."""
    return report(_findings(config or file_here("neuron.toml")), as_json)


def _findings(path: Path | None) -> Iterator[Finding]:
    yield from checks.versions()
    yield from checks.engine()
    yield from checks.libraries()
    from cortex.neuron.api.server import KeyNeeded, ReloadableSettings
    from cortex.neuron.config import NeuronConfig
    from cortex.neuron.node.library import cache_directory

    settings = NeuronConfig()
    yield from configuration_checks.environment(path)
    try:
        settings = _load(path, {})
        yield Finding(
            "config", Severity.FINE, str(path) if path else "no file given: defaults and NEURON_… variables apply"
        )
        open_tracer(settings.telemetry, "neuron").close()
        ReloadableSettings(settings, path, insecure=False)
    except KeyNeeded as error:  # only a note: `serve` may get --insecure
        what, _, remedy = error.message.rpartition(": ")
        yield Finding("config", Severity.NOTE, what, remedy)
    except SettingsError as error:
        yield Finding("config", Severity.PROBLEM, error.message, "fix the configuration")
    yield from checks.ports((settings.address,))
    yield from devices(settings)
    hub_cache = cache_directory(settings, os.environ)
    yield from checks.disk(hub_cache)
    yield from checks.kv_disk(settings.limits.kv_disk_folder, settings.limits.kv_disk_mb)
    yield from checks.cache(hub_cache)


def _load(path: Path | None, overrides: dict[str, str]) -> NeuronConfig:
    from cortex.neuron import config

    return config.load(path, {**os.environ, **overrides})


def main() -> None:
    run(neuron)


if __name__ == "__main__":
    main()
