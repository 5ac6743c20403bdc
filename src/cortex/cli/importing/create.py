"""`cortex create`: a model from a Modelfile."""

from __future__ import annotations

from pathlib import Path

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.output import console, json_option, print_json
from cortex.wire.dialects.ollama.modelfile import ModelfileProblem, as_request
from cortex.wire.node.load_options import is_path


@click.command(cls=Command)
@click.argument("name")
@click.option(
    "-f",
    "--file",
    type=click.Path(path_type=Path),
    default=Path("Modelfile"),
    help="The Modelfile. [default: Modelfile]",
)
@click.option("-q", "--quantize", help="Quantise dense weights at load, such as q4_k.")
@gateway_options
@json_option
def create(name: str, file: Path, quantize: str | None, gateway: GatewayClient, as_json: bool) -> None:
    """Create a model from a Modelfile.

    FROM names a model, a repository of the hub, or a file on the node. The gateway keeps the model as an entry of its
    catalogue, until `DELETE /api/delete`.
    """
    try:
        request = as_request(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}", "name one with -f", ExitCode.USAGE) from error
    except (ModelfileProblem, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is no Modelfile: {error}", "correct it", ExitCode.CONFIG) from error
    if is_path(request["from"]):
        request["from"] = str((file.parent / Path(request["from"]).expanduser()).resolve())
    body = request | {"model": name, "stream": False} | ({"quantize": quantize} if quantize else {})
    response = gateway.post("/api/create", body)
    if as_json:
        print_json(response)
        return
    for note in response["notes"]:
        console().print(f"- {note}", soft_wrap=True, markup=False, highlight=False)
    console().print(f"{name} is {response['using']}", soft_wrap=True, markup=False, highlight=False)
