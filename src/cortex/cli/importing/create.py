"""`cortex create`: a model from a Modelfile."""

from __future__ import annotations

import hashlib
from pathlib import Path

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.output import console, json_option, print_json
from cortex.formats.units import gib
from cortex.wire.dialects.ollama.modelfile import ModelfileProblem, as_request
from cortex.wire.dialects.ollama.models import BLOBS_PREFIX
from cortex.wire.node.load_options import is_path

_MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.gguf")
"""Files in a folder that belong to a model."""
_WEIGHTS, _PROJECTOR = "model.gguf", "mmproj-model.gguf"
"""Names for the files of a model, because Ollama's own are named by digest."""


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

    FROM names a model, a repository of the hub, a GGUF file or a folder. Local files are uploaded to a node; a path
    without a local file is one on the node. The gateway keeps the model in its catalogue until `cortex rm`.
    """
    try:
        request = as_request(file.read_text(encoding="utf-8"))
        here = _files_here(request["from"], request.pop("projector", None), file.parent)
        if here:
            del request["from"]
            request["files"] = {path: _uploaded(gateway, each, quiet=as_json) for path, each in here.items()}
    except OSError as error:
        raise CommandError(
            f"{error.filename} cannot be read: {error.strerror}", "check -f and FROM", ExitCode.USAGE
        ) from error
    except (ModelfileProblem, UnicodeDecodeError) as error:
        raise CommandError(f"{file} is not a valid Modelfile: {error}", "correct it", ExitCode.CONFIG) from error
    body = request | {"model": name, "stream": False} | ({"quantize": quantize} if quantize else {})
    response = gateway.post("/api/create", body)
    if as_json:
        print_json(response)
        return
    for note in response["notes"]:
        console().print(f"- {note}", soft_wrap=True, markup=False, highlight=False)
    console().print(f"{name} is {response['using']}", soft_wrap=True, markup=False, highlight=False)


def _files_here(source: str, projector: str | None, folder: Path) -> dict[str, Path]:
    """The files of a model, by their path in it; empty if its source is not local. Raises ModelfileProblem."""
    weights = _file_here(source, folder)
    if projector is not None:
        tower = _file_here(projector, folder)
        if weights is None or tower is None:
            raise ModelfileProblem("two FROM lines must name two local files: the weights and the projector")
        return {_WEIGHTS: weights, _PROJECTOR: tower}
    if weights is None:
        if source.startswith("."):
            raise ModelfileProblem(f"there is no {source}; for a file on the node, give its full path")
        return {}
    if weights.is_dir():
        return {each.name: each for pattern in _MODEL_FILES for each in sorted(weights.glob(pattern)) if each.is_file()}
    return {_WEIGHTS: weights}


def _file_here(source: str, folder: Path) -> Path | None:
    if not is_path(source) and not source.endswith(".gguf"):
        return None
    path = folder / Path(source).expanduser()
    return path.resolve() if path.exists() else None


def _uploaded(gateway: GatewayClient, file: Path, *, quiet: bool) -> str:
    """Upload a file unless a node already has it. Returns its digest."""
    with file.open("rb") as content:
        digest = f"sha256:{hashlib.file_digest(content, 'sha256').hexdigest()}"
    if not gateway.has(BLOBS_PREFIX + digest):
        if not quiet:
            console().print(f"sending {file.name}, {gib(file.stat().st_size)}", highlight=False, markup=False)
        gateway.send(BLOBS_PREFIX + digest, file)
    return digest
