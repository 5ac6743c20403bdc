"""The command of a llama-swap model as the command of a harness. Pure; nothing is executed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import urlsplit

_CONTAINERS = frozenset({"docker", "podman", "nerdctl"})
_MODEL_OPTIONS = ("-m", "--model")
_CONTEXT_OPTIONS = ("-c", "--ctx-size", "--max-model-len")
_PARALLEL_OPTIONS = ("-np", "--parallel")
_PORT_OPTION = re.compile(r"-p|--publish|--?[\w-]*(port|listen|bind|addr|address)")
PORT = "${PORT}"


@dataclass(frozen=True, slots=True)
class ServerArguments:
    """The parts of a command that a harness needs."""

    argv: tuple[str, ...]
    source: str | None
    """The model's file, replaced by `${MODEL_PATH}` in `argv`; None if only the server knows it."""
    context_tokens: int | None
    replaced_port: int | None
    """The fixed port of the original."""

    @property
    def has_port(self) -> bool:
        return any(PORT in argument for argument in self.argv)


def without_comments(text: str) -> str:
    """Without the lines that begin with #."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))


def split(command: str) -> list[str]:
    """The arguments, without comment lines and line continuations. Raises ValueError for an unclosed quote."""
    lines = without_comments(command).splitlines()
    return shlex.split(" ".join(line.rstrip().removesuffix("\\") for line in lines))


def port_of(proxy: str) -> int | None:
    """The fixed port of a `proxy`, if it has one."""
    try:
        return urlsplit(proxy).port
    except ValueError:  # ${PORT}
        return None


def read(command: str, proxy: str) -> ServerArguments:
    """Raises ValueError."""
    argv = split(command)
    if not argv:
        raise ValueError("its cmd is empty")
    fixed = None if any(PORT in argument for argument in argv) else port_of(proxy)
    if fixed is not None:
        argv = _with_port(argv, str(fixed))
    in_container = PurePosixPath(argv[0]).name in _CONTAINERS
    source = None
    place = None if in_container else _place(argv, _MODEL_OPTIONS)
    if place is not None and argv[place].endswith(".gguf") and "${" not in argv[place]:
        source = argv[place] if argv[place].startswith(("/", "~", ".")) else f"./{argv[place]}"
        argv[place] = "${MODEL_PATH}"
    context = None
    if _place(argv, _PARALLEL_OPTIONS) is None and (place := _place(argv, _CONTEXT_OPTIONS)) is not None:
        context = int(argv[place]) if argv[place].isdigit() and int(argv[place]) > 1 else None
    return ServerArguments(tuple(argv), source, context, fixed if any(PORT in each for each in argv) else None)


def _with_port(argv: Sequence[str], fixed: str) -> list[str]:
    """`argv` with `PORT` where `fixed` is a port: in an address, or as the value of an option that is named after one.
    Where there is no such place, the first argument that is nothing but `fixed` counts."""
    options = ("", *argv)
    in_address = re.compile(rf"(?:(?<=:)|^(?=\d+:)|(?<=port=)|(?<=listen=)|(?<=-p)){fixed}(?=[:/]|$)")
    found = [
        PORT if each == fixed and _PORT_OPTION.fullmatch(option) else in_address.sub(PORT, each, count=1)
        for option, each in zip(options, argv, strict=False)
    ]
    if found == [*argv]:
        others = (*_CONTEXT_OPTIONS, *_PARALLEL_OPTIONS)
        places = (place for place, each in enumerate(argv) if each == fixed and options[place] not in others)
        if (first := next(places, None)) is not None:
            found[first] = PORT
    return found


def _place(argv: Sequence[str], options: Sequence[str]) -> int | None:
    """Where the value of one of these options is."""
    return next((place + 1 for place, each in enumerate(argv[:-1]) if each in options), None)
