"""Names of models as users of Ollama write them: `qwen3:latest`, `hf.co/owner/name:Q4_K_M`."""

from __future__ import annotations

_HUBS = ("hf.co/", "huggingface.co/")
_DEFAULT_TAG = ":latest"


def plain_name(name: str) -> str:
    """`name` without the host of the hub and without the tag that says nothing. Other names stay as they are."""
    hub = next((hub for hub in _HUBS if name.lower().startswith(hub)), "")
    return name[len(hub) :].removesuffix(_DEFAULT_TAG)


def split_quant(name: str) -> tuple[str, str | None]:
    """`owner/name:Q4_K_M` is the model `owner/name` and the quantisation `Q4_K_M`. None for a name without one."""
    model, colon, quant = name.rpartition(":")
    return (model, quant) if colon and "/" in model and "/" not in quant and quant else (name, None)
