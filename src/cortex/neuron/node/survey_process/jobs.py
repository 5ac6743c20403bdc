"""What the survey process does. Blocks, and may take any time and memory: the files are not trusted."""

from __future__ import annotations

from pathlib import Path

from cortex.neuron.node.loading.files import find_local
from cortex.neuron.node.loading.preflight import ModelFacts, inspect
from cortex.neuron.node.survey_process import protocol
from cortex.neuron.node.survey_process.protocol import Find, FoundAt, Job, Read, ReadText, Reply
from cortex.neuron.text.model import survey_text
from cortex.neuron.tokenizer_process.client import UNREADABLE, load_error


def run(job: Job) -> Reply:
    """Raises LoadFailed."""
    match job:
        case Find(source, cache, quant):
            path = find_local(source, Path(cache), quant)
            return FoundAt(None if path is None else str(path))
        case Read():
            return protocol.pack_facts(read_facts(job))
        case ReadText(at, name):
            try:
                return protocol.pack_text(survey_text(Path(at)))
            except UNREADABLE as error:
                raise load_error(f"{name}: its chat template cannot be read", error) from error


def read_facts(job: Read) -> ModelFacts:
    """Raises LoadFailed."""
    return inspect(Path(job.path), job.quant, name=job.name, num_ranks=job.num_ranks)
