"""Models that people name without a config: what `cortex up NAME` chooses is found and downloaded from a hub."""

from __future__ import annotations

import pytest

from cortex.cli.up.command import chosen
from cortex.fleet.known_models import KNOWN_MODELS, known_model
from cortex.neuron.weights.hub.selection import select

from .hub_client import MODEL, Client, StartHub

QUANTS = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "BF16")


def gguf_files(repository: str) -> dict[str, bytes]:
    """A repository with the model in several formats, under the names that publishers give them."""
    name = repository.rpartition("/")[2].removesuffix("-GGUF")
    return {"README.md": b"", "config.json": b"{}"} | {f"{name}-{quant}.gguf": quant.encode() for quant in QUANTS}


def test_format_of_every_known_model_is_in_a_repository_of_its_kind() -> None:
    for model in KNOWN_MODELS:
        for free_bytes in (8 << 30, 24 << 30, 80 << 30, 1 << 50):
            source = chosen(model, None, free_bytes)
            if source.source != model.gguf:
                assert source.source == model.open_repository
                continue
            assert source.quant is not None
            entry = select(source.source, gguf_files(source.source), source.quant).entry
            assert entry is not None
            assert entry.endswith(f"-{source.quant}.gguf"), model.name


@pytest.mark.parametrize(
    ("typed", "free_gb", "file"),
    [
        ("gpt-oss:20b", 40, "model.safetensors"),
        ("qwen3:8b", 12, "Qwen3-8B-Q8_0.gguf"),
        ("qwen2.5-coder-7b", 8, "Qwen2.5-Coder-7B-Instruct-Q6_K.gguf"),
        ("gemma4:26b", 24, "gemma-4-26B-A4B-it-Q5_K_M.gguf"),
        ("mistral-small", 80, "model.safetensors"),
    ],
)
def test_known_model_is_downloaded_in_the_format_that_fits(
    start_hub: StartHub, client: Client, typed: str, free_gb: int, file: str
) -> None:
    model = known_model(typed)
    assert model is not None
    source = chosen(model, None, free_gb * 10**9)
    files = MODEL if source.source == model.repository else gguf_files(source.source)
    hub = start_hub(files, repository=source.source)
    path = client.resolve(hub, source.source, quant=source.quant)
    found = path / file if path.is_dir() else path
    assert found.name == file
    assert found.read_bytes() == files[file]
