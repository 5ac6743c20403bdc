"""Rejects a request for a task that a model cannot do, with the reason and a suitable model of the node."""

from __future__ import annotations

from typing import Literal

from cortex.neuron.node.node import Node
from cortex.neuron.node.status import ServedModel
from cortex.wire.errors import UnsupportedModality
from cortex.wire.node.protocol import Capabilities
from cortex.wire.pictures.parts import reads_text_only
from cortex.wire.requests import GenerateRequest

Task = Literal["chat", "embed", "score"]
_KINDS: dict[Task, str] = {"chat": "a chat model", "embed": "an embedding model", "score": "a rerank model"}
_OUTPUTS: dict[Task, str] = {"chat": "generates no text", "embed": "makes no embeddings", "score": "makes no scores"}
_CAPABILITIES: dict[Task, str] = {"chat": "chat", "embed": "embeddings", "score": "rerank"}


def check_task(backend: Node, model_id: str, served: ServedModel, task: Task, *, is_of_gateway: bool) -> None:
    """Raises UnsupportedModality; it names no other models to a gateway, whose client may not know them.

    A model that is not known yet passes, and is checked again once loaded."""
    actual: Task = served.pooling.task if served.pooling is not None else "chat"
    if actual == task or not served.is_read or (actual, task) == ("embed", "score"):  # whose scores are cosines
        return
    problem = f"{model_id} is {_KINDS[actual]} and {_OUTPUTS[task]}"
    if is_of_gateway:
        raise UnsupportedModality(f"{problem}; GET /v1/models lists what each model can.", param="model")
    others = [status.id for status in backend.models() if _can(status.capabilities, task)]
    advice = f"use {others[0]}" if others else f"no model of this node can: load {_KINDS[task]}"
    raise UnsupportedModality(f"{problem}; {advice}.", param="model", details={"models": others[:8]})


def check_pictures(backend: Node, request: GenerateRequest, *, is_of_gateway: bool) -> None:
    """Raises InvalidValue for a picture that exceeds a limit, and UnsupportedModality for a model that reads text
    only; it names no other models to a gateway. `request`: the head is enough."""
    if not request.pictures:
        return
    backend.pictures.limits.check(request.pictures)
    status = backend.model(request.model)
    if status.capabilities.vision or status.family is None or backend.upstream(request.model) is not None:
        return  # a model that is not known yet is checked when its prompt is written
    others = [] if is_of_gateway else [each.id for each in backend.models() if each.capabilities.vision]
    raise reads_text_only(request.model, others, request.pictures[0].param)


def _can(capabilities: Capabilities, task: Task) -> bool:
    return bool(getattr(capabilities, _CAPABILITIES[task]))
