"""Names of models: which are allowed, and as users of Ollama write them: `qwen3:latest`, `hf.co/owner/name:Q4_K_M`."""

from __future__ import annotations

from cortex.wire.errors import InvalidValue, shorten

_HUBS = ("hf.co/", "huggingface.co/")
_DEFAULT_TAG = ":latest"
UPLOADED = "uploaded"
"""The owner of the repositories that are made of uploaded files."""


def is_uploaded(source: str | None) -> bool:
    """Whether a source is a repository of uploaded files."""
    return source is not None and source.startswith(f"{UPLOADED}/")


def check_name(name: str, param: str) -> None:
    """For a model that is not known yet. Raises InvalidValue for a name that a log or a terminal would not show as it
    is: with control characters, marks of direction and the like."""
    if not name or not name.isprintable():
        raise InvalidValue(
            f"Invalid value for '{param}': {shorten(ascii(name))} has characters that are not printable; send a plain "
            "name.",
            param=param,
        )


def plain_name(name: str) -> str:
    """`name` without the hub's host and without the tag `latest`. Other names stay unchanged."""
    hub = next((hub for hub in _HUBS if name.lower().startswith(hub)), "")
    return name[len(hub) :].removesuffix(_DEFAULT_TAG)


def split_quant(name: str) -> tuple[str, str | None]:
    """`owner/name:Q4_K_M` is the model `owner/name` and the quantisation `Q4_K_M`. None for a name without one."""
    model, colon, quant = name.rpartition(":")
    return (model, quant) if colon and "/" in model and "/" not in quant and quant else (name, None)
