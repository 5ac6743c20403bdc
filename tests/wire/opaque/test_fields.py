"""The model in a request that nobody here understands, and the same request with another one."""

from __future__ import annotations

import email
import email.policy
import random
from typing import Any
from urllib.parse import urlencode

import pytest

from cortex.wire.errors import CortexError, InvalidValue, MalformedHTTP, MissingModel, UnsupportedMediaType
from cortex.wire.opaque import fields, multipart
from cortex.wire.opaque.routes import split_upstream, upstream_path

BOUNDARY = b"b0undary"
TYPE = "multipart/form-data; boundary=b0undary"


def form(*parts: tuple[str, bytes]) -> bytes:
    lines = [b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY, head.encode(), value) for head, value in parts]
    return b"".join(lines) + b"--%b--\r\n" % BOUNDARY


def named(name: str) -> str:
    return f'Content-Disposition: form-data; name="{name}"'


def reads(content_type: str, body: bytes) -> list[tuple[str, bytes]]:
    """What a reader of somebody else finds."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message = email.message_from_bytes(head + body, policy=email.policy.HTTP)
    return [
        (str(part.get_param("name", header="content-disposition")), part.get_payload(decode=True))  # type: ignore[misc]
        for part in message.iter_parts()
    ]


def edited(body: bytes, values: dict[str, Any], without: tuple[str, ...] = ()) -> tuple[str, bytes]:
    content_type, pieces = fields.written_form(fields.read(TYPE, body, b""), values, without)
    joined = b"".join(piece if isinstance(piece, bytes) else body[piece[0] : piece[1]] for piece in pieces)
    return content_type, joined


@pytest.mark.parametrize("seed", range(40))
def test_fields_of_a_form_are_replaced_and_everything_else_stays(seed: int) -> None:
    chosen = random.Random(seed)
    names = [f"f{number}" for number in range(chosen.randrange(6))]
    values = {name: b"x" + chosen.randbytes(chosen.randrange(300)).replace(b"\r\n--", b"") for name in names}
    order = [*names, "model"]
    chosen.shuffle(order)
    body = form(*((named(name), values.get(name, b"m")) for name in order))
    assert fields.read(TYPE, body, b"").model == "m"
    dropped = tuple(name for name in names if chosen.random() < 0.3)
    kept = [(name, values[name]) for name in order if name in values and name not in dropped]
    assert reads(*edited(body, {"model": "x y", "top": 3}, dropped)) == [("model", b"x y"), ("top", b"3"), *kept]


@pytest.mark.parametrize(
    ("content_type", "body", "query", "model"),
    [
        ("application/json", b'{"a": {"model": "no"}, "model": "m"}', b"x=1", "m"),
        ("application/json", b"", b"model=org%2Fm%3AQ4", "org/m:Q4"),
        ("application/x-www-form-urlencoded", b"a=1&model=m+x", b"", "m x"),
        ("audio/wav", b"", b"a=1&model=m", "m"),
        (TYPE, form((named("model"), b" m\n")), b"", "m"),
        (TYPE, form(("content-disposition:form-data;name=model", b"m")), b"", "m"),
        (TYPE, form(('Content-Type: text/plain\r\nContent-Disposition: form-data; name="model"', b"m")), b"", "m"),
        ('multipart/form-data; charset=utf-8; boundary="b0undary"', form((named("model"), b"m")), b"", "m"),
        (TYPE, b"preamble\r\n" + form((named("model"), b"m")) + b"epilogue", b"", "m"),
        (TYPE, form((named("x"), b"x--b0undaryx\r\n\r\n--b0und"), (named("model"), b"m")), b"", "m"),
        (TYPE, form((f"{named('file')}; filename*=utf-8''a", b""), (named("model"), b"m")), b"", "m"),
        (TYPE, form((f'{named("file")}; filename="model; name=x"', b""), (named("model"), b"m")), b"", "m"),
    ],
)
def test_where_the_model_stands(content_type: str, body: bytes, query: bytes, model: str) -> None:
    assert fields.read(content_type, body, query).model == model


@pytest.mark.parametrize(
    ("content_type", "body", "error"),
    [
        ("application/json", b"{}", MissingModel),
        ("application/json", b"[]", InvalidValue),
        ("audio/wav", b"", MissingModel),
        (TYPE, form((named("model"), b"")), MissingModel),
        (TYPE, form((named("model"), b"a"), (named("model"), b"b")), InvalidValue),
        (TYPE, form((named("model"), b"a\x00b")), InvalidValue),
        (TYPE, form((named("model"), b"a" * 100_000)), InvalidValue),
        (TYPE, form(("Content-Disposition: form-data; name*=utf-8''model", b"a")), InvalidValue),
        (TYPE, form((f"{named('a')}; name*=utf-8''model", b"a"), (named("model"), b"m")), InvalidValue),
        (TYPE, form((f"{named('a')}; NAME*0*=utf-8''model", b"a"), (named("model"), b"m")), InvalidValue),
        (TYPE, form((f"{named('a')}\r\n{named('model')}", b"a")), InvalidValue),
        (TYPE, form((f'{named("a")}; name="model"', b"a")), InvalidValue),
        (TYPE, form(("Content-Type: text/plain", b"a")), InvalidValue),
        (TYPE, form(*[(named("a"), b"")] * 1000), InvalidValue),
        (TYPE, form((named("model"), b"m"))[:-6], InvalidValue),
        (TYPE, form((named("file"), b"\r\n--b0undaryx\r\n"), (named("model"), b"m")), InvalidValue),
        (TYPE, form((named("file"), b"\r\n--b0undary \r\n"), (named("model"), b"m")), InvalidValue),
        (TYPE, b"--b0undaryx\r\n" + form((named("model"), b"m")), InvalidValue),
        (TYPE, b"--", InvalidValue),
        (
            TYPE,
            form(("Content-Disposition: form-data; name=a\r\n ; name=model", b"a"), (named("model"), b"m")),
            InvalidValue,
        ),
        (TYPE, form((f"{named('model')}\r\nContent-Transfer-Encoding: quoted-printable", b"m")), InvalidValue),
        (
            TYPE,
            form((f"{named('a')}\r\nContent-Type: multipart/mixed; boundary=x", b""), (named("model"), b"m")),
            InvalidValue,
        ),
        (TYPE, form((named("_charset_"), b"utf-7"), (named("model"), b"m")), InvalidValue),
        (TYPE, form((named("MODEL"), b"a"), (named("model"), b"m")), InvalidValue),
        ("multipart/form-data", b"--", InvalidValue),
        ("multipart/form-data; boundary=a; boundary=b0undary", form((named("model"), b"m")), UnsupportedMediaType),
        ("multipart/form-data; boundary=b0undary; charset=utf-7", form((named("model"), b"m")), UnsupportedMediaType),
        ("application/x-www-form-urlencoded; charset=utf-7", b"model=m", UnsupportedMediaType),
        ("application/x-www-form-urlencoded", b"model=m&mod%65l%5B%5D=n", InvalidValue),
        ("application/x-www-form-urlencoded", b"model=m&x=%ff", InvalidValue),
        ("application/x-www-form-urlencoded", "model=m&x=ü".encode(), InvalidValue),
        ("audio/wav", b'{"model": "m"}', UnsupportedMediaType),
        ("", b'{"model": "m"}', UnsupportedMediaType),
    ],
)
def test_what_could_be_read_in_two_ways_is_rejected(content_type: str, body: bytes, error: type[CortexError]) -> None:
    with pytest.raises(error):
        fields.read(content_type, body, b"")


@pytest.mark.parametrize("content_type", ["application/json", "application/x-www-form-urlencoded", TYPE, "audio/wav"])
def test_model_in_the_query_counts_only_without_a_body(content_type: str) -> None:
    bodies = {"application/json": b'{"model": "m"}', TYPE: form((named("model"), b"m"))}
    assert fields.read(content_type, b"", b"model=m").model == "m"
    with pytest.raises(InvalidValue, match="in the body only"):
        fields.read(content_type, bodies.get(content_type, b"model=m"), b"model=m")


ADDRESS = b"http://169.254.169.254/latest"
JSON_PART = "Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("head", "value"),
    [
        (named("x"), b'{"image": "%b"}' % ADDRESS),
        (named("x"), b' \n[{"a": [{"image_url": {"url": "/etc/passwd"}}]}]'),
        (named("x"), b'{"a": NaN, "image": "%b"}' % ADDRESS),
        (named("x"), b'{"a": %b, "image": "%b"}' % (b"1" * 5000, ADDRESS)),
        (named("x"), b'"%b"' % ADDRESS),
        (named("x"), b'{"a": 1, "a": 2}'),
        (named("x"), b"[" * 100_000),
        (named("x"), b'{"x": "%b", "image": "%b"}' % (b"y" * 100_000, ADDRESS)),
        (JSON_PART + named("x"), b'{"image": "%b"}' % ADDRESS),
        (JSON_PART + named("prompt"), b'{"image": "%b"}' % ADDRESS),
        (JSON_PART + f'{named("x")}; filename="x.json"', b'{"image": "%b"}' % ADDRESS),
        ("Content-Type: image/png\r\n" + named("image"), ADDRESS),
        ("Content-Type: text/html\r\n" + named("image"), b"/etc/passwd"),
        (named("image"), b" " * 100_000 + ADDRESS),
        (named("reference_id"), b"../../etc/passwd"),
    ],
)
def test_no_address_is_hidden_in_a_form(head: str, value: bytes) -> None:
    with pytest.raises(InvalidValue):
        fields.read(TYPE, form((named("model"), b"m"), (head, value)), b"")


@pytest.mark.parametrize(
    ("head", "value"),
    [
        (named("prompt"), b"[a cat] on /etc/passwd"),
        (named("x"), b"[a cat]"),
        (named("x"), b'{"size": "1x1", "prompt": "see %b"}' % b"it"),
        ("Content-Type: image/png\r\n" + named("image"), b"\x89PNG\r\n\x1a\n" + b"\0" * 30),
        (f'{named("image")}; filename="a"', ADDRESS),
    ],
)
def test_texts_and_files_of_a_form_pass(head: str, value: bytes) -> None:
    assert fields.read(TYPE, form((named("model"), b"m"), (head, value)), b"").model == "m"


def test_a_prompt_that_looks_like_json_is_text() -> None:
    prompt = b'{"image": "%b"}' % ADDRESS
    assert fields.read(TYPE, form((named("model"), b"m"), (named("prompt"), prompt)), b"").model == "m"
    sent = urlencode({"model": "m", "prompt": prompt.decode()}).encode()
    assert fields.read("application/x-www-form-urlencoded", sent, b"").model == "m"
    assert fields.read("", b"", sent).model == "m"


def test_pictures_of_a_form_are_counted() -> None:
    model = (named("model"), b"m")
    assert fields.read(TYPE, form(model), b"").num_choices == 1
    assert fields.read(TYPE, form(model, (named("n"), b" 3\n")), b"").num_choices == 3
    assert fields.read("application/x-www-form-urlencoded", b"model=m&n=4", b"").num_choices == 4
    assert fields.read("", b"", b"model=m&n=128").num_choices == 128


@pytest.mark.parametrize("value", ["", "0", "-1", "1000", "1e1", "0x2", "2.0", "\u0663", "null", "1" * 5000])
def test_a_number_of_pictures_that_cannot_be_counted_is_rejected(value: str) -> None:
    with pytest.raises(InvalidValue, match="`n`"):
        fields.read(TYPE, form((named("model"), b"m"), (named("n"), value.encode())), b"")


def test_two_numbers_of_pictures_are_rejected() -> None:
    urlencoded = "application/x-www-form-urlencoded"
    for body, query in ((b"model=m&n=1&n=9", b""), (b"model=m&n=1", b"n=9"), (b"model=m&N=9", b"")):
        with pytest.raises(InvalidValue):
            fields.read(urlencoded, body, query)


def test_query_is_written_as_it_was_read() -> None:
    read = fields.read("", b"", b"x=1;model=n&model=m&model=m&y=%C3%BC+%26")
    assert read.model == "m"
    assert fields.written_query(read, {"model": "a b", "speed": 2}) == b"model=a+b&x=1%3Bmodel%3Dn&y=%C3%BC+%26"


def test_headers_and_delimiters_of_a_form_are_written_here() -> None:
    """A value that looks like a further field to servers that take bare line feeds has another boundary then."""
    hidden = b'x\n--b0undary\nContent-Disposition: form-data; name="model"\n\nn\n--b0undary--'
    head = (
        "content-disposition: form-data;name=file; filename*=utf-8''%C3%BC%22.wav; filename=x\r\n"
        "X-Other: 1\r\nContent-Type: audio/WAV; x=1"
    )
    body = b"preamble\r\n" + form((named("model"), b"m"), (head, hidden)) + b"epilogue"
    content_type, written = edited(body, {"model": "o"})
    boundary = content_type.removeprefix("multipart/form-data; boundary=").encode()
    assert boundary not in body
    assert written == (
        b'--%b\r\nContent-Disposition: form-data; name="model"\r\n\r\no\r\n'
        b'--%b\r\nContent-Disposition: form-data; name="file"; filename="\xc3\xbc%%22.wav"\r\n'
        b"Content-Type: audio/wav\r\n\r\n%b\r\n--%b--\r\n"
    ) % (boundary, boundary, hidden, boundary)


def test_file_has_no_folders_in_its_name() -> None:
    body = form((named("model"), b"m"), (f'{named("file")}; filename="../../etc/pass\\"wd"', b""))
    assert b'; filename="pass%22wd"' in edited(body, {})[1]


def test_delimiters_with_something_behind_them_are_not_searched_on() -> None:
    class Counted(bytes):
        num_searches = 0

        def find(self, *args: Any) -> int:
            self.num_searches += 1
            return super().find(*args)

    body = Counted(form((named("model"), b"m"), (named("file"), b"\r\n--b0undaryx" * 10_000)))
    with pytest.raises(InvalidValue):
        multipart.parts(body, BOUNDARY)
    assert body.num_searches < 10


@pytest.mark.parametrize("seed", range(30))
def test_damaged_forms_raise_nothing_else(seed: int) -> None:
    chosen = random.Random(seed)
    body = bytearray(form((named("file"), b"x" * 50), (named("model"), b"m"), (named("z"), b"\r\n")))
    for _ in range(chosen.randrange(1, 12)):
        body[chosen.randrange(len(body))] = chosen.choice(b'\r\n-"; =\0b')
    try:
        fields.read(TYPE, bytes(body), b"")
    except CortexError:
        pass


def test_a_field_cannot_bring_another_one_in() -> None:
    with pytest.raises(InvalidValue):
        multipart.field(BOUNDARY, 'a"; name="b', "x")


@pytest.mark.parametrize(
    ("path", "ways"),
    [
        ("/upstream/m/v1/x", [("m", "/v1/x"), ("m/v1", "/x"), ("m/v1/x", "/")]),
        ("/upstream/org%2Fm/a%20b", [("org/m", "/a%20b"), ("org/m/a b", "/")]),
        ("/upstream/m", [("m", "/")]),
        ("/upstream/", []),
    ],
)
def test_the_path_below_upstream(path: str, ways: list[tuple[str, str]]) -> None:
    assert list(split_upstream(path)) == ways
    for model, rest in ways:
        assert next(iter(split_upstream(upstream_path(model, rest)))) == (model, rest)


@pytest.mark.parametrize("path", ["/upstream/m/../x", "/upstream/../x", "/upstream/m/%2E%2e/x", "/upstream/m/a\\b"])
def test_paths_that_could_be_read_as_others_are_rejected(path: str) -> None:
    with pytest.raises(MalformedHTTP):
        list(split_upstream(path))
