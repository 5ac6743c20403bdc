"""Which media reach the server of a model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from cortex.foreign.body import TABLES
from cortex.wire.errors import InvalidValue
from cortex.wire.pictures.media_urls import check_form
from cortex.wire.pictures.media_urls import check_media as check_body

from ...picture_files import base64_of, data_url, picture

FILE = picture(8, 8)
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'/>"


CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
RERANK, SCORE, IMAGES, SPEECH = "/v1/rerank", "/score", "/v1/images/edits", "/v1/audio/speech"
ADDRESS = "http://169.254.169.254/latest"


def check_media(body: dict[str, Any], path: str = CHAT) -> None:
    check_body(body, TABLES[path])


def chat(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": content}]}


@pytest.mark.parametrize(
    "content",
    [
        "see http://example.com/a.png and file:///etc/passwd",
        None,
        [{"type": "text", "text": "http://example.com"}],
        [{"type": "image_url", "image_url": {"url": data_url(FILE), "detail": "low"}}],
        [{"type": "image_url", "image_url": data_url(FILE).replace("data:", "DATA:")}],
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(FILE)}}],
        [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
        [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}],
    ],
)
def test_what_is_in_the_request_passes(content: Any) -> None:
    check_media(chat(content))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://10.0.0.1/a"}},
        {"type": "image_url", "image_url": "https://10.0.0.1/a"},
        {"image_url": "HTTP://10.0.0.1/a"},
        {"type": "video_url", "video_url": {"url": "file:///etc/passwd"}},
        {"type": "audio_url", "audio_url": {"url": "/etc/passwd"}},
        {"type": "input_audio", "input_audio": {"data": " http://10.0.0.1/a", "format": "wav"}},
        {"type": "file", "file": {"file_data": "file:/etc/passwd"}},
        {"type": "image", "image": "s3://bucket/key"},
    ],
)
def test_what_would_be_fetched_is_rejected(part: Any) -> None:
    body = chat([{"type": "text", "text": "what is it?"}, part])
    with pytest.raises(InvalidValue, match=r"may not fetch .*`data:` URL"):
        check_media(body)


@pytest.mark.parametrize("file", [b"just text", SVG, b"<html></html>", FILE[:10]])
def test_what_is_no_picture_is_rejected_as_a_node_rejects_it(file: bytes) -> None:
    url, source = data_url(file), {"type": "base64", "media_type": "image/png", "data": base64_of(file)}
    block = {"type": "image", "source": source}
    bodies: dict[str, dict[str, Any]] = {
        "messages[0].content[1]": {"messages": [{"role": "user", "content": [{}, {"image_url": {"url": url}}]}]},
        "messages[0].content[0].content[0]": {
            "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [block]}]}]
        },
        "input[0].content[0]": {"input": [{"content": [{"type": "input_image", "image_url": url}]}]},
        "x.y[0]": {"x": {"y": [{"image_url": url}]}},
    }
    for param, body in bodies.items():
        with pytest.raises(InvalidValue, match="the picture cannot be read") as caught:
            check_media(body)
        assert caught.value.param == param


def test_a_picture_that_is_not_in_base64_is_rejected() -> None:
    with pytest.raises(InvalidValue, match="not in base64"):
        check_media(chat([{"type": "image_url", "image_url": {"url": "data:image/svg+xml,<svg/>"}}]))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"documents": [{"text": "x", "source_url": ADDRESS}]}),
        (CHAT, {"documents": [ADDRESS]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": [ADDRESS]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["/etc/passwd"]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["/" * 61 + "etc/passwd"]}]}),
        (CHAT, {"messages": [{"role": "user", "content": {"image_url": {"url": "etc/passwd"}}}]}),
        (CHAT, {"messages": {"0": {"content": [{"image": ADDRESS}]}}}),
        (CHAT, {"messages": [[{"content": [{"image": ADDRESS}]}]]}),
        (CHAT, {"tools": [{"type": "mcp", "server_url": ADDRESS}]}),
        (CHAT, {"mm_data": {"a": {"b": ["x", ADDRESS]}}}),
        (CHAT, {"api_base": ADDRESS}),
        *(
            (CHAT, {"api_base": f"{before}{ADDRESS}{after}"})
            for before, after in (("<", ">"), ("URL:", ""), ("'", "'"))
        ),
        *((CHAT, {"anything": f"{before}{ADDRESS}"}) for before in ("blob:", "cache:", "jar:", "@", "+", "x=")),
        (CHAT, {"multi_modal_data": ["/etc/passwd"]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_pil", "image_pil": "/etc/passwd"}]}]}),
        (EMBEDDINGS, {"input": [{"pdf": "/etc/passwd"}]}),
        (CHAT, {"audio": {"voice": {"ref_audio": "C:\\x.wav"}}}),
        (COMPLETIONS, {"prompt": {"prompt_string": "x", "multimodal_data": [ADDRESS]}}),
        (COMPLETIONS, {"prompt": [{"prompt_string": "x", "multimodal_data": ["/etc/passwd"]}]}),
        (COMPLETIONS, {"prompt": "x", "multimodal_data": {"image": ADDRESS}}),
        (COMPLETIONS, {"prompt": "x", "image_data": [{"data": "../../etc/passwd", "id": 1}]}),
        (EMBEDDINGS, {"input": [{"image": ADDRESS}]}),
        (EMBEDDINGS, {"input": {"url": "relative/path"}}),
        (EMBEDDINGS, {"input": [{"content": [{"type": "image_url", "image_url": {"url": ADDRESS}}]}]}),
        (EMBEDDINGS, {"input": [ADDRESS], "modality": "image"}),
        (EMBEDDINGS, {"input": ADDRESS, "modality": ["text", "image"]}),
        (EMBEDDINGS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": ADDRESS}]}]}),
        (RERANK, {"query": {"content": [{"type": "image_url", "image_url": {"url": ADDRESS}}]}, "documents": ["x"]}),
        (RERANK, {"query": "x", "documents": [{"text": "x", "image": ADDRESS}]}),
        (RERANK, {"query": "x", "documents": {"content": [{"type": "video_url", "video_url": {"url": ADDRESS}}]}}),
        (SCORE, {"text_1": "x", "text_2": {"content": [{"type": "image_url", "image_url": ADDRESS}]}}),
        (SCORE, {"data_1": {"content": [{"type": "image_url", "image_url": ADDRESS}]}, "text_2": "x"}),
        (IMAGES, {"prompt": "x", "image": ADDRESS}),
        (IMAGES, {"prompt": "x", "image": "/etc/passwd"}),
        (IMAGES, {"prompt": "x", "images": [{"image_url": "/etc/passwd"}]}),
        (IMAGES, {"prompt": "x", "referenceImageURL": "x.png"}),
        (SPEECH, {"input": "x", "voice": ADDRESS}),
        (SPEECH, {"input": "x", "speaker_wav": "/etc/passwd"}),
        (SPEECH, {"input": "x", "voice": "/etc/passwd"}),
        (SPEECH, {"input": "x", "voice": "voices/../../etc/passwd"}),
        (SPEECH, {"input": "x", "speakers": ["\\\\host\\share"]}),
        (IMAGES, {"prompt": "x", "lora": [{"path": "x"}, {"name": "a"}]}),
        (IMAGES, {"prompt": "x", "loras": ["~/a.safetensors"]}),
        (CHAT, {"adapter": "c:/x"}),
    ],
)
def test_no_address_and_no_path_reaches_a_server_from_any_place(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(body, path)


@pytest.mark.parametrize("voice", ["alloy", "af_bella+af_sky", "en/us/anna", "v1.2", "..."])
def test_name_of_a_voice_passes(voice: str) -> None:
    check_media({"input": "x", "voice": voice}, SPEECH)


@pytest.mark.parametrize(
    "address",
    [
        "\x00 https://10.0.0.1/a",
        "ht\ntps://10.0.0.1/a",
        "https:10.0.0.1/a",
        "https:/\\10.0.0.1/a",
        "HTTPS://10.0.0.1",
        "FiLe:etc",
        "gopher://x",
        "//10.0.0.1/a",
        "da\tta:text/plain,x",
    ],
)
def test_spelling_hides_no_address(address: str) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(chat([{"type": "image_url", "image_url": {"url": address}}]))


SCHEMA = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://x.example/y"}


@pytest.mark.parametrize("reference", [ADDRESS, "file:///etc/passwd", "other.json", "//host/x", " #/x"])
@pytest.mark.parametrize("field", ["$ref", "$dynamicRef", "$recursiveRef"])
def test_schema_refers_to_no_other_one(field: str, reference: str) -> None:
    schema = {"type": "object", "properties": {"x": {"anyOf": [{"type": "null"}, {field: reference}]}}}
    for body in (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema).replace("$", "\\u0024")},
        {"structured_outputs": {"json": schema}},
        {"structured_outputs": {"json": json.dumps(schema)}},
        {"unknown": {"schema": schema}},
    ):
        with pytest.raises(InvalidValue, match="may not fetch"):
            check_media(body, CHAT)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"guided_json": {"$ref": "#/$defs/x", "$schema": ADDRESS, "$id": ADDRESS}, "user": '{"$ref": "x'}),
        (CHAT, {"messages": [{"role": "user", "content": '{"$ref": "http://h/x"}'}], "stop": "ef"}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}),
        (CHAT, {"metadata": {"source": ADDRESS}, "user": ADDRESS, "stop": [ADDRESS], "guided_json": SCHEMA}),
        (CHAT, {"messages": [{"role": "user", "content": ADDRESS, "name": ADDRESS}]}),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ADDRESS}}]}]},
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "x", "annotations": [{"url_citation": {"url": ADDRESS}}]}]},
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": [base64_of(FILE), data_url(FILE), ""]}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]}),
        (CHAT, {"service_tier": "auto", "temperature": 0.5, "x": {"mode": "fast", "size": "1024x1024"}}),
        (COMPLETIONS, {"prompt": [ADDRESS, "file:///etc/passwd"], "suffix": ADDRESS}),
        (COMPLETIONS, {"prompt": {"prompt_string": ADDRESS, "multimodal_data": [base64_of(b"RIFF....WAVEfmt ")]}}),
        (EMBEDDINGS, {"input": [ADDRESS, "x"], "encoding_format": "float"}),
        (EMBEDDINGS, {"input": [{"text": ADDRESS}, {"image": data_url(FILE)}]}),
        (RERANK, {"query": ADDRESS, "documents": [ADDRESS, {"text": ADDRESS, "metadata": {"url": ADDRESS}}]}),
        (SCORE, {"text_1": ADDRESS, "text_2": [ADDRESS]}),
        (IMAGES, {"prompt": ADDRESS, "response_format": "url", "size": "1024x1024", "image": base64_of(FILE)}),
        (SPEECH, {"input": ADDRESS, "voice": "af_bella", "ref_audio": base64_of(bytes(range(256)) * 40)}),
        (SPEECH, {"input": "x", "audio": base64_of(b"\xff\xfb\x90\x64" + bytes(400))}),
    ],
)
def test_texts_schemas_and_files_pass(path: str, body: dict[str, Any]) -> None:
    check_media(body, path)


SLASHES = "/" * 60
PATHS = [
    "//proc/self/root/etc/passwd",
    f"//proc/self/root{SLASHES}home/me/.ssh/id_rsa",
    f"//proc/self/root{SLASHES}home/me/secret",
    "//proc/self/root" + "/" * 10_000 + "home",
    "/" * 10_000 + "etc/passwd",
    "//proc/self\n/root\n/home",
    "/+8BAgMEBQYHCAkKCwwNDg8QERI",
    "iVBORw0KGgo/x",
    "iVBORw0KGgo/../../etc/passwd",
    "/9j/../../etc/passwd",
    "/9j/4AAQ",
    "UklGRi4uLi5XQVZFZm10IA==/../x.wav",
    "a/" * 5000 + "=a",
]


@pytest.mark.parametrize("value", PATHS)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, lambda value: chat([{"type": "image_url", "image_url": {"url": value}}])),
        (IMAGES, lambda value: {"prompt": "x", "image": value}),
        (EMBEDDINGS, lambda value: {"input": [{"image": value}]}),
    ],
)
def test_no_path_is_taken_for_base64(path: str, body: Callable[[str], dict[str, Any]], value: str) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(body(value), path)


@pytest.mark.parametrize("value", [value for value in PATHS if value.startswith("/") and "9j" not in value])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (SPEECH, lambda value: {"input": "x", "voice": value}),
        (SPEECH, lambda value: {"input": "x", "voice": {"id": value}}),
        (SPEECH, lambda value: {"input": "x", "prompt_speech": value}),
        (SPEECH, lambda value: {"input": "x", "speaker_ref": value}),
        (SPEECH, lambda value: {"input": "x", "reference_id": value}),
        (SPEECH, lambda value: {"input": "x", "extra": {"anything": [value]}}),
        (IMAGES, lambda value: {"prompt": "x", "init_image": value}),
        (COMPLETIONS, lambda value: {"prompt": "x", "image_data": value}),
    ],
)
def test_no_path_is_taken_for_a_name(path: str, body: Callable[[str], dict[str, Any]], value: str) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(body(value), path)


FILES = [
    FILE,
    b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01" + bytes(200),
    b"GIF89a\x08\x00\x08\x00\x80\x00\x00" + bytes(30),
    b"RIFF\x40\x00\x00\x00WEBPVP8 " + bytes(50),
    b"RIFF\x40\x00\x00\x00WAVEfmt " + bytes(50),
    b"ID3\x04\x00\x00" + bytes(400),
    b"OggS" + bytes(60),
    b"fLaC" + bytes(60),
    b"\x00\x00\x00\x20ftypisom" + bytes(60),
    b"\xff\xfb\x90\x64" + random.Random(1).randbytes(4000),
    b"\xff\xf3\x84\xc4" + random.Random(2).randbytes(4000),
    b"\xff\xf1\x50\x80" + random.Random(3).randbytes(4000),
]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("name", ["image", "voice", "ref_audio", "image_data", "prompt_speech", "anything"])
def test_files_in_base64_pass(name: str, file: bytes) -> None:
    plain = base64_of(file)
    lines = "\r\n".join(plain[start : start + 76] for start in range(0, len(plain), 76))
    for value in (plain, plain.rstrip("="), plain.replace("+", "-").replace("/", "_"), lines, f" {plain}\n"):
        check_media({"input": "x", name: value}, SPEECH)


@pytest.mark.parametrize("blank", [" ", " " * 70, " " * 9000, "\t" * 70, "\xa0", "\u2003\u3000", "\ufeff", "\x00\x7f"])
@pytest.mark.parametrize("value", [ADDRESS, "/etc/passwd", "h" + "\n" * 70 + ADDRESS[1:], ADDRESS + "a" * 9000])
def test_neither_spaces_nor_length_hide_an_address(blank: str, value: str) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media(chat([{"type": "image_url", "image_url": {"url": blank + value}}]))
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media({"input": "x", "voice": blank + value}, SPEECH)


@pytest.mark.parametrize("value", ["sound.wav", "etc/passwd.txt", "etc/passwd", "home/me/secrets", "a b.wav!", "sound"])
def test_what_holds_base64_holds_nothing_else(value: str) -> None:
    for part in ({"input_audio": {"data": value}}, {"file": {"file_data": value}}, {"image_base64": value}):
        with pytest.raises(InvalidValue, match="may not fetch"):
            check_media(chat([part]))


@pytest.mark.parametrize(
    "kind",
    [
        {"task": "image"},
        {"input_modality": "image"},
        {"inputModality": "audio"},
        {"modality": "video"},
        {"input_type": "image_url"},
        {"input_type": "Audio"},
        {"input_modalities": ["text", "video"]},
    ],
)
def test_inputs_that_are_no_texts_hold_no_address(kind: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_media({"input": [ADDRESS], **kind}, EMBEDDINGS)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (EMBEDDINGS, {"task": "retrieval.query"}),
        (EMBEDDINGS, {"input_type": "query"}),
        (EMBEDDINGS, {"modality": "TEXT"}),
        (EMBEDDINGS, {"input_modalities": ["text"]}),
        (SPEECH, {"task": "speech", "ref_text": "/ is a slash", "style": "~/calm"}),
        (IMAGES, {"task": "image", "image_prompt": "a cat", "caption": "../x"}),
    ],
)
def test_inputs_that_are_texts_may_hold_addresses(path: str, kind: dict[str, Any]) -> None:
    check_media({"input": ADDRESS, **kind}, path)


@pytest.mark.parametrize(
    ("name", "value"), [("image", ADDRESS), ("image", "/etc/passwd"), ("url", "x"), ("x", ADDRESS)]
)
def test_forms_and_queries_hold_no_address(name: str, value: str) -> None:
    with pytest.raises(InvalidValue, match="may not fetch"):
        check_form([("prompt", ADDRESS), (name, value)], TABLES[IMAGES])
    check_form([("prompt", ADDRESS), ("size", "1x1"), ("image", data_url(FILE))], TABLES[IMAGES])


def test_json_in_a_form_is_not_read_if_it_would_take_much_memory() -> None:
    check_form([("x", f"[{'0,' * 1000}0]")], TABLES[SPEECH])
    for value in ("{},", "0,", "[[0]],"):
        with pytest.raises(InvalidValue, match="too many values"):
            check_form([("x", f"[{value * 100_000}0]")], TABLES[SPEECH])
