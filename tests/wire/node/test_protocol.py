from __future__ import annotations

import msgspec

from cortex.wire.node.protocol import Progress


def test_progress_of_a_later_version_is_readable() -> None:
    later = msgspec.json.decode(b'{"stage": "divine", "substage": "ask", "done_bytes": 1}', type=Progress)
    assert later.finest_stage == "ask"
