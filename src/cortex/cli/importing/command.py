"""`cortex import`: converts the configuration of another program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.importing.llama_swap import Imported, NotLlamaSwap, convert
from cortex.cli.output import console, json_option, print_json
from cortex.fleet.catalogue import Catalogue
from cortex.gateway.config import Config
from cortex.settings import SettingsError, loads
from cortex.wire.words import plural


@click.command("import", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path(),
    help="The directory to write to. [default: this directory]",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@json_option
def import_configuration(file: Path, out: Path, force: bool, as_json: bool) -> None:
    """Convert a llama-swap configuration.

    FILE is a llama-swap.yaml. Writes models.toml, neuron.toml and cortex.toml: each model with its command as a
    harness, macros expanded, aliases, peers as nodes, groups and the matrix. Lists what has no
    equivalent. Nothing is executed, and no file is replaced without --force.
    """
    imported = _converted(file)
    targets = {name: out / name for name in imported.files}
    if not force and (present := [str(path) for path in targets.values() if path.exists()]):
        raise CommandError(
            f"{', '.join(present)} would be replaced", "choose another --out, or give --force", ExitCode.USAGE
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, path in targets.items():
            path.write_text(imported.files[name], encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error.strerror}", "choose another --out") from error
    if as_json:
        print_json({"files": [str(path) for path in targets.values()], "notes": imported.notes})
        return
    console().print(f"{plural(imported.num_models, 'model')} in {', '.join(map(str, targets.values()))}")
    for note in imported.notes:
        console().print(f"- {note}", soft_wrap=True, markup=False, highlight=False)
    console().print(
        f"\nStart them with `neuron serve -c {targets['neuron.toml']}` and `cortex serve -c {targets['cortex.toml']}`.",
        soft_wrap=True,
    )


def _converted(file: Path) -> Imported:
    """Raises CommandError."""
    from cortex.neuron.config import NeuronConfig  # here: other commands need nothing of a node

    try:
        imported = convert(_read(file), file.name)
        for name, kind in (("models.toml", Catalogue), ("neuron.toml", NeuronConfig), ("cortex.toml", Config)):
            loads(kind, imported.files[name], file=Path(name))
    except RecursionError as error:
        raise CommandError(f"{file} is nested too deeply", "correct it there", ExitCode.CONFIG) from error
    except NotLlamaSwap as error:
        raise CommandError(str(error), f"correct {file}", ExitCode.CONFIG) from error
    except SettingsError as error:
        raise CommandError(
            f"{file} cannot be converted: {error.message}",
            "correct it there, and import it again",
            ExitCode.CONFIG,
        ) from error
    return imported


def _read(file: Path) -> Any:
    import yaml  # here: no other command needs it

    try:
        return yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(
            f"{file} cannot be read: {error.strerror}", "name a llama-swap.yaml", ExitCode.USAGE
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = f" in line {place.line + 1}" if place is not None else ""
        raise CommandError(f"{file} is not valid YAML{line}", "correct it there", ExitCode.CONFIG) from error
