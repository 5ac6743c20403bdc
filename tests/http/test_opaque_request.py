"""An opaque request as the server of its model gets it."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from cortex.http.opaque_request import read_fields, written
from cortex.http.request import Request
from cortex.wire.errors import InvalidValue

URLENCODED = "application/x-www-form-urlencoded"
MULTIPART = "multipart/form-data; boundary=b0"
SET, STRIPPED = {"model": "theirs", "my_mode": "safe"}, ("adapter",)


def request(form: str, name: str) -> Request:
    """With the field `name` in its query, or in its body of that type."""
    pair = f"{quote(name)}=evil"
    if form == MULTIPART:
        fields = ((name, "evil"), ("model", "m"))
        parts = [f'--b0\r\nContent-Disposition: form-data; name="{each}"\r\n\r\n{value}\r\n' for each, value in fields]
        query, body = "", "".join(parts) + "--b0--\r\n"
    elif form == URLENCODED:
        query, body = "", f"{pair}&model=m"
    else:
        query, body = f"{pair}&model=m", ""
    headers = [(b"content-type", form.encode())] if form else []
    return Request(b"POST", b"/v1/audio/speech", query.encode(), headers, body.encode(), "")


@pytest.mark.parametrize("form", [URLENCODED, MULTIPART, ""])
@pytest.mark.parametrize("name", ["My_Mode", "myMode", "Adapter", "ADAPTER[]", "adapter.x"])
async def test_no_spelling_bypasses_what_an_operator_sets_or_removes(form: str, name: str) -> None:
    sent = request(form, name)
    with pytest.raises(InvalidValue, match="a server may read") as caught:
        written(sent, await read_fields(sent), SET, STRIPPED)
    assert caught.value.param == name


@pytest.mark.parametrize("form", [URLENCODED, MULTIPART, ""])
@pytest.mark.parametrize("name", ["my_mode", "adapter"])
async def test_what_an_operator_sets_or_removes_is_not_the_clients(form: str, name: str) -> None:
    sent = request(form, name)
    target, _, body = written(sent, await read_fields(sent), SET, STRIPPED)
    assert isinstance(body, bytes)
    assert b"evil" not in target + body
    assert b"theirs" in target + body
