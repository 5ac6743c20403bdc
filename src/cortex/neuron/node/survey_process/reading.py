"""The functions of the survey process. They block, and may take any time and memory: the files are not trusted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from cortex.neuron.node.loading import files
from cortex.neuron.node.loading.preflight import ModelFacts, inspect
from cortex.neuron.node.survey_process.protocol import Read, pack_facts
from cortex.neuron.text.model import TextSurvey, survey_text
from cortex.neuron.tokenizer_process.client import UNREADABLE, load_error
from cortex.wire.errors import CortexError, LoadFailed

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


def functions() -> dict[str, Callable[..., Any]]:
    return {each.__name__: _reporting(each) for each in (find_local, read, read_text)}


def find_local(source: str, cache: str, quant: str | None) -> str | None:
    """Where a model is, if all of it is on disk."""
    path = files.find_local(source, Path(cache), quant)
    return None if path is None else str(path)


def read(asked: Read) -> bytes:
    """What the config and the headers of a model say, packed: the daemon decodes it on a thread."""
    return pack_facts(read_facts(asked))


def read_text(path: str, name: str) -> TextSurvey:
    """What the text files of a model say."""
    try:
        return survey_text(Path(path))
    except UNREADABLE as error:
        raise load_error(f"{name}: its chat template cannot be read", error) from error


def read_facts(asked: Read) -> ModelFacts:
    """Raises LoadFailed."""
    return inspect(Path(asked.path), asked.quant, name=asked.name, num_ranks=asked.num_ranks)


def _reporting(function: F) -> F:
    """`function`, which raises LoadFailed whatever goes wrong: the daemon must get it."""

    @wraps(function)
    def reporting(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except (CortexError, MemoryError):
            raise
        except Exception as error:
            log.warning("cannot read the files of a model", exc_info=True)
            raise LoadFailed(f"its files cannot be read: {type(error).__name__}: {str(error)[:200]}") from error

    return reporting  # type: ignore[return-value]
