"""How compiled kernels are kept apart by the compiler that made them."""

from __future__ import annotations

import builtins
from importlib import metadata
from typing import Any

import pytest

from cortex.neuron.private_api.triton import key_of_record

RECORD = """\
triton/__init__.py,sha256=aaa,1
triton/_C/libtriton.so,sha256=bbb,499741024
triton/__pycache__/__init__.cpython-312.pyc,,
triton-3.6.0.dist-info/RECORD,,
"""


def test_key_follows_the_digests_of_the_installed_files() -> None:
    key = key_of_record(RECORD)
    assert key is not None
    assert key != key_of_record(RECORD.replace("bbb", "ccc"))
    assert key == key_of_record("".join(reversed(RECORD.splitlines(keepends=True))))
    assert key == key_of_record(RECORD.replace("cpython-312", "cpython-311"))


@pytest.mark.parametrize("record", ["", "triton/__init__.py,sha256=aaa,1\n", RECORD.replace("sha256=bbb", "")])
def test_compiler_without_a_recorded_digest_has_no_such_key(record: str) -> None:
    assert key_of_record(record) is None


def test_compiler_is_not_read_for_the_key_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("triton.runtime.cache")
    if key_of_record(metadata.distribution("triton").read_text("RECORD") or "") is None:
        pytest.skip("needs an installed wheel of Triton")
    opened: list[str] = []
    real_open = builtins.open

    def listed(file: Any, *args: Any, **options: Any) -> Any:
        opened.append(str(file))
        return real_open(file, *args, **options)

    monkeypatch.setattr(builtins, "open", listed)
    assert cache.triton_key()
    assert not [file for file in opened if "libtriton" in file]
