"""Which processes count as those of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from cortex.neuron.node.harness.command.process_memory import descendants


def test_thread_that_ends_meanwhile_hides_no_child_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for thread, children in (("7", ""), ("8", None), ("9", "70 71")):
        folder = tmp_path / "7" / "task" / thread
        folder.mkdir(parents=True)
        if children is not None:
            (folder / "children").write_text(children)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: iter(sorted(listed(folder))))
    assert descendants(7, tmp_path) == [70, 71]
    assert descendants(6, tmp_path) == [], "it has ended"
