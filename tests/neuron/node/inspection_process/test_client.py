"""A real inspection process: what exceeds its limits fails alone."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from faulty_models import write_model

from cortex.neuron.node.inspection_process.client import InspectionProcess
from cortex.neuron.node.inspection_process.reading import Read
from cortex.wire.errors import FilesDamaged, LoadFailed

from ....processes import alive


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def inspector() -> AsyncIterator[InspectionProcess]:
    process = InspectionProcess(cpu_s=1, memory_bytes=512 << 20)
    yield process
    await process.close()


def model_with(folder: Path, template: str) -> Path:
    write_model(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


async def test_reads_facts_and_text(inspector: InspectionProcess, tmp_path: Path) -> None:
    path = model_with(tmp_path / "m", "{{ tools }}{{ messages }}</think>")
    metadata = await inspector.read(Read(str(path), "m", None, 1))
    assert (metadata.path, metadata.family) == (path, "llama")
    assert (await inspector.read_text(path, "m")).capabilities.reasoning
    assert await inspector.find_local(str(path), tmp_path, None) == path
    assert await inspector.find_local("org/absent", tmp_path, None) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [('{"model": {"vo', "is cut off after 14 bytes"), ("", "is cut off"), (None, "has no tokenizer")],
)
async def test_model_without_a_whole_tokenizer_is_damaged(
    inspector: InspectionProcess, tmp_path: Path, content: str | None, problem: str
) -> None:
    path = model_with(tmp_path / "m", "{{ messages }}")
    (path / "tokenizer.json").unlink()
    if content is not None:
        (path / "tokenizer.json").write_text(content)
    with pytest.raises(FilesDamaged, match=f"m: its text files cannot be read: .*{problem}"):
        await inspector.read_text(path, "m")


@pytest.mark.parametrize(
    "template",
    [
        "{{ (7**99999999) % 7 }}",
        '{{ "a"*2999999999 }}',
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
    ids=["computes", "grows", "loops"],
)
async def test_template_beyond_the_limits_is_damage_and_others_are_read(
    inspector: InspectionProcess, tmp_path: Path, template: str
) -> None:
    hostile, good = model_with(tmp_path / "hostile", template), model_with(tmp_path / "good", "{{ messages }}")
    damaged = asyncio.create_task(inspector.read_text(hostile, "org/hostile"))
    assert await inspector.read_text(good, "org/good")
    with pytest.raises(LoadFailed, match=r"^org/hostile is damaged: .* 1 s of computing or 512 MiB of memory"):
        await damaged
    process_id = inspector.process_id
    assert await inspector.read_text(good, "org/good")
    assert inspector.process_id == process_id, "only the worker is replaced"


async def test_file_that_never_ends_is_damage(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    inspector = InspectionProcess(cpu_s=30, memory_bytes=1 << 30, wall_s=3)
    with pytest.raises(LoadFailed, match="org/m is damaged: reading its files takes more than 3 s"):
        await inspector.read_text(tmp_path, "org/m")
    await inspector.close()


async def test_error_of_a_file_keeps_its_message(inspector: InspectionProcess, tmp_path: Path) -> None:
    write_model(tmp_path, config={"num_attention_heads": 3})
    with pytest.raises(LoadFailed, match="3 attention heads cannot share 2 key-value heads"):
        await inspector.read(Read(str(tmp_path), "m", None, 1))


async def test_killed_process_is_replaced(inspector: InspectionProcess, tmp_path: Path) -> None:
    path = model_with(tmp_path / "m", "{{ messages }}")
    await inspector.read_text(path, "m")
    assert inspector.process_id is not None
    os.kill(inspector.process_id, signal.SIGKILL)
    assert await inspector.read_text(path, "m")


async def test_closed_process_is_gone_and_its_jobs_end(tmp_path: Path) -> None:
    inspector = InspectionProcess(cpu_s=1, memory_bytes=512 << 20)
    path = model_with(tmp_path / "m", "{{ (7**99999999) % 7 }}")
    await inspector.read_text(model_with(tmp_path / "good", "{{ messages }}"), "good")
    endless = asyncio.create_task(inspector.read_text(path, "m"))
    await asyncio.sleep(0)
    process_id = inspector.process_id
    assert process_id is not None
    await inspector.close()
    with pytest.raises(LoadFailed):
        await endless
    assert not alive(process_id)
