"""`neuron warmup`: compiles the kernels of models before they are first loaded."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click
from msgspec import inspect, structs

from cortex.cli.failures import CommandError, ExitCode
from cortex.cli.output import PlainConsole, console, print_json
from cortex.cli.views import ProgressView
from cortex.settings import schema
from cortex.settings.reference import attribute_docstrings
from cortex.system.exits import ending
from cortex.wire.node.load_options import LoadOptions, defaults_unless_given

if TYPE_CHECKING:
    from cortex.neuron.engine.request import LoadSpec

CARD_NAMES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HUB_FILES = ("*.json",)
"""Files to download of a missing model: its config, no weights."""


def load_option(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A flag for an option of a load, with the type, default and meaning that it has everywhere."""
    (field,) = (each for each in structs.fields(LoadOptions) if each.name == name)
    kind = next(schema.alternatives(inspect.type_info(field.type)))
    accepted: click.Choice[str] | click.IntRange | None = None
    if isinstance(kind, inspect.LiteralType):
        accepted = click.Choice([*map(str, kind.values)])
    elif isinstance(kind, inspect.IntType):
        accepted = click.IntRange(kind.ge)
    meaning = attribute_docstrings(LoadOptions)[name].replace("\n", " ").partition(". ")[0].removesuffix(".")
    default = defaults_unless_given().get(name, field.default)
    flag = f"--{name.replace('_', '-')}"
    return click.option(flag, type=accepted, default=default, show_default=True, help=f"{meaning}.")


class Compiled(NamedTuple):
    """Number of compiled kernels, of those known to be needed."""

    done: int
    known: int


def run(models: tuple[str, ...], card: str | None, spec: LoadSpec, num_ranks: int, *, as_json: bool) -> None:
    """`spec`: how each of the models will be loaded, whatever its path. Raises CommandError."""
    rows = []
    for model in models:
        path = local_files(model)
        start = time.monotonic()
        with ProgressView(PlainConsole(stderr=True), [model]) as view:

            def show(done: int, known: int, model: str = model, view: ProgressView = view) -> None:
                view.update(model, f"{done} of {known} kernels", done / known if known else None, "compiling kernels")

            show(0, 0)
            outcome = _compiled(replace(spec, path=str(path)), card, num_ranks, show)
        if isinstance(outcome, str):
            raise CommandError(f"{model}: {outcome}", "neuron warmup --help", ExitCode.CONFIG)
        seconds = round(time.monotonic() - start, 1)
        rows.append({"model": model, "card": outcome[0], "kernels": outcome[1], "seconds": seconds})
        if not as_json:
            what = f"{outcome[1]} kernels" if outcome[1] else "all kernels were compiled before"
            console().print(f"{model}: {what}, for {outcome[0]}, in {seconds} s")
    if as_json:
        print_json({"models": rows})


def _compiled(
    spec: LoadSpec, card: str | None, num_ranks: int, show: Callable[[int, int], None]
) -> tuple[str, int] | str:
    """The result of `warm_here`, run in a separate process, because a process compiles kernels for one card only and
    cannot launch them."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_compile, args=(theirs, spec, card, num_ranks), daemon=True)
    process.start()
    theirs.close()
    try:
        while isinstance(said := ours.recv(), Compiled):
            show(*said)
    except EOFError:
        process.join()
        return f"the process that compiles ended ({ending(process.exitcode or 0)}); is there enough memory for it?"
    process.join()
    return cast("tuple[str, int] | str", said)


def _compile(connection: Connection, spec: LoadSpec, card: str | None, num_ranks: int) -> None:
    from cortex.neuron.engine.loading.warmup import warm_here

    def report(done: int, known: int) -> None:
        connection.send(Compiled(done, known))

    connection.send(warm_here(spec, card, num_ranks, report))


def local_files(model: str) -> Path:
    """The directory or file of a model: a path, or its files from the Hub. Downloads the config if none are cached."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") != 1:
        raise _missing(model)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except HFValidationError as error:  # no name that the Hub could have
        raise _missing(model) from error
    except LocalEntryNotFoundError:
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CommandError(
            f"the config of {model} cannot be downloaded: {error}", "check the name and the network"
        ) from error


def _missing(model: str) -> CommandError:
    return CommandError(
        f"there is no {model}", "name a directory, a GGUF file, or OWNER/NAME on the Hub", ExitCode.USAGE
    )
