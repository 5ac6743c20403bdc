import pytest

from cortex.wire.errors import UnsupportedMediaType
from cortex.wire.opaque.multipart import parse_media_type


@pytest.mark.parametrize(
    ("text", "kind", "parameters"),
    [
        ("application/json", "application/json", {}),
        ("Application/JSON ; Charset=UTF-8", "application/json", {"charset": "UTF-8"}),
        ('multipart/form-data;boundary="a b";', "multipart/form-data", {"boundary": "a b"}),
        ("multipart/form-data; xboundary=A; boundary=B", "multipart/form-data", {"xboundary": "A", "boundary": "B"}),
    ],
)
def test_type_and_parameters(text: str, kind: str, parameters: dict[str, str]) -> None:
    assert parse_media_type(text) == (kind, parameters)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "json",
        "a/b, c/d",
        "a/b c/d",
        "a/b; x",
        "a/b; x=",
        "a/b; x=1; X=2",
        "a/b; boundary*=utf-8''B",
        "a/b; boundary*0=B",
        'a/b; x="a\\"b"',
        'a/b; x="a',
        "a/b; x = 1",
        "a/b; x=\x01",
        "ä/b",
    ],
)
def test_what_could_be_read_in_two_ways_is_rejected(text: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        parse_media_type(text)


def test_only_utf_8_is_read() -> None:
    parse_media_type("text/plain; charset=utf-8").check_charset()
    with pytest.raises(UnsupportedMediaType, match="utf-7"):
        parse_media_type("text/plain; charset=utf-7").check_charset()
