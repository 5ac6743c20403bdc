"""`neuron forget` deletes KV pages on disk, and `neuron doctor` suggests to keep them on an SSD."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cortex.cli.commands.doctor.checks import Severity, kv_disk
from cortex.cli.neuron import neuron
from cortex.gateway.ledger.keys import KeySection, tenant_name, tenant_of_key
from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.store import BlockKind
from cortex.neuron.engine.kv.pages import page_digests
from cortex.wire.tenant import narrowed

KEY = KeySection(name="ada", id="k1", sha256="0" * 64)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEURON_LIMITS__KV_DISK_DIR", str(tmp_path / "kv"))
    for tenant in (b"", narrowed(tenant_of_key(KEY, "key").hex().encode(), b"a salt")):
        kind = BlockKind(bytes(16), 0, 8)
        digests = page_digests(tenant or bytes(16), (1, 2), 2)
        block_files.write_file(tmp_path / "kv", kind, "m", digests, [memoryview(bytes(8))])
    return tmp_path / "kv"


def forget(*options: str) -> Result:
    return CliRunner().invoke(neuron, ["forget", *options])


def test_forgets_what_a_key_has_left_with_any_salt(folder: Path) -> None:
    result = forget("--tenant", tenant_name(KEY))
    assert result.exit_code == 0, result.output
    assert "1 file" in result.output
    assert len(block_files.stored(folder)) == 1


def test_forgets_a_model_and_everything(folder: Path) -> None:
    assert "0 files" in forget("--model", "other").output
    assert "0 files" in forget("--unused-days", "1").output
    assert "2 files" in forget("--model", "m").output
    assert block_files.stored(folder) == []
    assert forget("--all").exit_code == 0


@pytest.mark.parametrize("options", [(), ("--tenant", "ada")])
def test_forgets_nothing_unless_something_is_chosen(folder: Path, options: tuple[str, ...]) -> None:
    assert forget(*options).exit_code != 0
    assert len(block_files.stored(folder)) == 2


@pytest.mark.parametrize(
    ("rotational", "kv_disk_mb", "verdict"),
    [
        ("0", 0, Severity.FINE),
        ("1", 0, None),
        ("1", 100, Severity.NOTE),
        ("0", 1 << 40, Severity.NOTE),
        (None, 0, None),
    ],
)
def test_doctor_suggests_the_disk_only_where_it_is_an_ssd(
    tmp_path: Path, rotational: str | None, kv_disk_mb: int, verdict: Severity | None
) -> None:
    if rotational is not None:
        device = tmp_path.stat().st_dev
        queue = tmp_path / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}" / "queue"
        queue.mkdir(parents=True)
        (queue / "rotational").write_text(rotational)
    found = list(kv_disk(tmp_path / "kv", kv_disk_mb, root=tmp_path, low_bytes=0))
    assert [finding.verdict for finding in found] == ([] if verdict is None else [verdict])
