from __future__ import annotations

import msgspec
import pytest

from cortex.wire.node.orders import UnloadRequest


def test_unload_request_accepts_the_former_name_of_sleep_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    request = msgspec.json.decode(b'{"model_id": "m", "park": true}', type=UnloadRequest)
    assert request == UnloadRequest(model_id="m", sleep=True)
    assert [record.getMessage() for record in caplog.records] == [
        "the field `park` of an unload request is now called `sleep`: rename it"
    ]


def test_unload_request_is_sent_without_the_former_name(caplog: pytest.LogCaptureFixture) -> None:
    sent = msgspec.json.decode(msgspec.json.encode(UnloadRequest(model_id="m", sleep=True)))
    assert sent["sleep"] is True
    assert "park" not in sent
    assert not caplog.records


def test_unload_request_rejects_both_names_of_sleep() -> None:
    with pytest.raises(msgspec.ValidationError, match="send only `sleep`"):
        msgspec.json.decode(b'{"model_id": "m", "park": true, "sleep": true}', type=UnloadRequest)
