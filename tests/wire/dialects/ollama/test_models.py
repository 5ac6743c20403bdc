"""What Ollama's listings say about a model: what its files and its memory are, and nothing that is not known."""

from __future__ import annotations

import pytest

from cortex.wire.dialects.ollama.models import OllamaModel, from_status, loaded, show, tags
from cortex.wire.node.load_options import SamplingDefaults
from cortex.wire.node.protocol import ModelState, ModelStatus, StoredForm

DENSE = StoredForm(file_format="safetensors", dtype="F16", num_parameters=135_000_000)
GGUF = StoredForm(file_format="gguf", dtype="Q4_K", num_parameters=8_030_000_000)
FP8 = StoredForm(file_format="safetensors", dtype="FP8", num_parameters=None)


@pytest.mark.parametrize(
    ("name", "stored", "quant", "details"),
    [
        ("org/tiny", DENSE, None, ("safetensors", "135.00M", "F16")),
        ("org/tiny", DENSE, "q8_0", ("safetensors", "135.00M", "Q8_0")),
        ("org/m", GGUF, "q4_k", ("gguf", "8.0B", "Q4_K")),
        ("org/m-70B", FP8, "fp8", ("safetensors", "70B", "FP8")),
        ("org/m-8b", None, None, ("", "8B", "")),
        ("org/m", None, "Q4_K_M", ("", "", "Q4_K_M")),
    ],
)
def test_details_are_those_of_the_files(
    name: str, stored: StoredForm | None, quant: str | None, details: tuple[str, str, str]
) -> None:
    [entry] = tags([OllamaModel(name, 0.0, quant=quant, stored=stored)])["models"]
    told = entry["details"]
    assert (told["format"], told["parameter_size"], told["quantization_level"]) == details


def test_same_files_have_the_same_digest_under_every_name() -> None:
    first, alias = (OllamaModel(name, 0.0, files_digest="ab") for name in ("org/m", "m"))
    assert first.digest == alias.digest
    assert first.digest != OllamaModel("m", 0.0, files_digest="cd").digest
    assert first.digest != OllamaModel("m", 0.0, files_digest="ab", quant="q8_0").digest
    assert OllamaModel("m", 0.0).digest != OllamaModel("n", 0.0).digest


def test_parameters_have_ollamas_names() -> None:
    sampling = SamplingDefaults(temperature=0.6, repetition_penalty=1.05)
    status = ModelStatus(id="m", state=ModelState.READY, context_tokens=1048576, sampling=sampling)
    lines = show(from_status(status, 0.0))["parameters"].splitlines()
    assert [tuple(line.split()) for line in lines] == [
        ("num_ctx", "1048576"),
        ("temperature", "0.6"),
        ("repeat_penalty", "1.05"),
    ]


@pytest.mark.parametrize(("vram_bytes", "expected"), [(None, 7), (0, 0)])
def test_memory_of_a_cpu_is_not_vram(vram_bytes: int | None, expected: int) -> None:
    status = ModelStatus(id="m", state=ModelState.READY, measured_bytes=7, disk_bytes=5)
    model = from_status(status, 0.0, vram_bytes=vram_bytes)
    [running] = loaded([model])["models"]
    assert (running["size"], running["size_vram"]) == (7, expected)
    assert tags([model])["models"][0]["size"] == 5


@pytest.mark.parametrize(
    ("file_bytes", "disk_bytes", "expected"),
    [(3, None, 3), (3, 9, 3), (None, 9, 9), (None, None, 0)],
    ids=["outside the cache", "one of several in a repository", "divided among devices", "unknown"],
)
def test_size_is_that_of_the_files_and_never_memory(
    file_bytes: int | None, disk_bytes: int | None, expected: int
) -> None:
    status = ModelStatus(id="m", state=ModelState.READY, measured_bytes=7, file_bytes=file_bytes, disk_bytes=disk_bytes)
    assert tags([from_status(status, 0.0)])["models"][0]["size"] == expected


def test_number_of_parameters_is_shown_where_it_is_known() -> None:
    assert show(OllamaModel("m", 0.0, stored=GGUF))["model_info"]["general.parameter_count"] == 8_030_000_000
    assert "general.parameter_count" not in show(OllamaModel("m", 0.0))["model_info"]
