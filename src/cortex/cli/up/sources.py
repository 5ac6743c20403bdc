"""Models on the command line: a known name (`name:quant`), a hub id (`owner/name@revision:quant`), a model directory or
a GGUF file."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from cortex.cli.failures import CommandError, ExitCode
from cortex.fleet.known_models import AmbiguousName, KnownModel, known_model, nearest_names
from cortex.formats.quant_names import at_load, label_in
from cortex.wire.node.load_options import is_path

_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?P<revision>@[\w./-]+)?(?::(?P<quant>\w[\w.-]*))?")


@dataclass(frozen=True, slots=True)
class ModelSource:
    id: str
    """The name that clients use."""
    source: str
    """Its source for a node: a hub id, maybe with a revision, or an absolute path."""
    quant: str | None = None
    """Which GGUF file of a repository to take, or how dense weights are quantised at load."""
    temperature: float | None = None
    """The default temperature of requests; when absent, the one that its files recommend."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A known model, whose source depends on the memory of the machine."""

    model: KnownModel
    quant: str | None = None


def parse_source(text: str) -> ModelSource | NamedModel:
    """The model that `text` names. Raises `CommandError` when it is neither a readable path nor a hub id, nor the name
    of a known model."""
    path = Path(text).expanduser()
    if path.exists():
        return _local(path)
    if is_path(text) or text.endswith(".gguf"):
        raise CommandError(f"no model file or directory at {path}", "check the path", ExitCode.USAGE)
    if match := _HUB_ID.fullmatch(text):
        return ModelSource(match["id"], match["id"] + (match["revision"] or ""), match["quant"])
    name, _, tail = text.rpartition(":")
    name, quant = (name, tail) if name and (label_in(tail) or at_load(tail)) else (text, None)
    try:
        known = known_model(name)
    except AmbiguousName as several:
        raise CommandError(
            f"{text!r} may be {', '.join(several.names)}", "name one of them", ExitCode.USAGE
        ) from several
    if known is not None:
        return NamedModel(known, quant)
    near = nearest_names(text)
    meant = f", or did you mean {' or '.join(near)}?" if near else ""
    raise CommandError(
        f"{text!r} is neither a path nor a hub id, nor the name of a known model",
        f"write ./model-dir, ./model.gguf or owner/name{meant}",
        ExitCode.USAGE,
    )


def _local(path: Path) -> ModelSource:
    if not os.access(path, os.R_OK):
        raise CommandError(f"cannot read {path}", f"fix its permissions: chmod u+r {path}", ExitCode.USAGE)
    if path.is_dir():
        if not (path / "config.json").exists():
            ggufs = sorted(path.glob("*.gguf"))
            remedy = f"name one of its files: {ggufs[0]}" if ggufs else "name one with config.json and weights"
            raise CommandError(f"{path} is not a model directory (no config.json in it)", remedy, ExitCode.USAGE)
        return ModelSource(path.resolve().name, str(path.resolve()))
    if path.suffix != ".gguf":
        raise CommandError(f"{path} is not a GGUF file", "name a .gguf file or a model directory", ExitCode.USAGE)
    return ModelSource(path.stem, str(path.resolve()))
