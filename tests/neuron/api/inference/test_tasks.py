"""What a model cannot do is known once its files were read, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cortex.neuron.api.inference.tasks import check_pictures, check_task
from cortex.neuron.node.library import KnownModel
from cortex.neuron.node.status import ServedModel, describe_model, served_model
from cortex.wire.errors import UnsupportedModality
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import ModelState
from cortex.wire.requests import GenerateRequest, PicturePart

UNREAD = KnownModel(id="m", source="/models/m", context_tokens=512)
"""The context is of the configuration: it says nothing about the files."""


def test_task_of_a_model_that_was_not_read_yet_is_not_known() -> None:
    backend: Any = SimpleNamespace(models=lambda: ())
    check_task(backend, "m", served_model(UNREAD, None, None), "embed", is_of_gateway=True)
    read = ServedModel(ModelState.COLD, 512, SamplingDefaults())
    with pytest.raises(UnsupportedModality, match="m is a chat model and makes no embeddings"):
        check_task(backend, "m", read, "embed", is_of_gateway=True)


def test_model_that_was_not_read_yet_may_read_pictures() -> None:
    limits = SimpleNamespace(check=lambda _: None)
    status = describe_model(UNREAD, None, None, None, 0, None, None, None)
    backend: Any = SimpleNamespace(
        pictures=SimpleNamespace(limits=limits), model=lambda _: status, models=lambda: (), upstream=lambda _: None
    )
    check_pictures(backend, GenerateRequest(model="m", pictures=(PicturePart(data=b"x"),)), is_of_gateway=True)
