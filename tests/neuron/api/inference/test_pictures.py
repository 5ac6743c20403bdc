"""Pictures on their way through a node: from every dialect to the engine, and the errors that name them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cortex.neuron.picture_process.client import Pictures
from cortex.neuron.picture_process.limits import PictureLimits
from cortex.neuron.text.local import read_text
from cortex.neuron.text.model import TextModel

from ....picture_files import animated, base64_of, data_url, picture, png_of_size, with_scans
from ..conftest import Api, ScriptedNode, add_pictures, write_text_files
from .route_calls import message_of, text_of

RED = picture(64, 96)
PAD = "<|image_pad|>"
SHAPES = ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate"]


@pytest.fixture(scope="module")
def picture_text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder = tmp_path_factory.mktemp("pictures")
    write_text_files(folder)
    add_pictures(folder)
    return TextModel.of(*read_text(folder))


@pytest.fixture
async def node(picture_text: TextModel) -> Any:
    made = ScriptedNode(picture_text)
    yield made
    await made.pictures.close()


def asking(path: str, *files: bytes, text: str = "What?") -> dict[str, Any]:
    """A request with pictures, and then text, in the dialect of `path`."""
    common = {"model": "org/tiny"}
    if path == "/v1/responses":
        parts: list[dict[str, Any]] = [{"type": "input_image", "image_url": data_url(file)} for file in files]
        return {**common, "input": [{"role": "user", "content": [*parts, {"type": "input_text", "text": text}]}]}
    if path == "/v1/messages":
        sources = [{"type": "base64", "media_type": "image/png", "data": base64_of(file)} for file in files]
        blocks: list[dict[str, Any]] = [{"type": "image", "source": source} for source in sources]
        said = {"role": "user", "content": [*blocks, {"type": "text", "text": text}]}
        return {**common, "max_tokens": 9, "messages": [said]}
    if path.startswith("/api/"):
        images = [base64_of(file) for file in files]
        if path == "/api/generate":
            return {**common, "prompt": text, "images": images, "stream": False}
        return {**common, "messages": [{"role": "user", "content": text, "images": images}], "stream": False}
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return {**common, "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}


@pytest.mark.parametrize("path", SHAPES)
async def test_pixels_reach_the_engine_from_every_dialect(api: Api, path: str) -> None:
    status, reply, _ = await api.post(path, asking(path, RED, picture(32, 32, color=(0, 0, 9))))
    assert status == 200, reply
    assert text_of(reply).startswith("Hello")
    (submitted,) = api.node.submitted
    first, second = submitted.pictures
    pad = api.node.text_model.tokenizer.whole_id(PAD)
    assert [grid.num_tokens for grid in (first.grid, second.grid)] == [2 * 3, 1]
    assert submitted.prompt.count(pad) == 7
    for each in (first, second):
        assert set(submitted.prompt[each.at : each.end]) == {pad}
    pixels = np.frombuffer(first.pixels, np.uint8).reshape(96, 64, 3)
    assert (pixels == (200, 30, 30)).all()
    assert first.key != second.key


async def test_same_picture_has_the_same_key_and_other_detail_another(api: Api) -> None:
    large = picture(900, 900)
    body = asking("/v1/chat/completions", large, large, large)
    body["messages"][0]["content"][2]["image_url"]["detail"] = "low"
    status, reply, _ = await api.post("/v1/chat/completions", body)
    assert status == 200, reply
    first, second, quick = api.node.submitted[0].pictures
    assert first.key == second.key != quick.key
    assert quick.grid.num_tokens <= 256 < first.grid.num_tokens


async def test_tokens_are_counted_before_anything_is_decoded(api: Api) -> None:
    """Files that cannot be decoded are counted: only their headers are read."""
    body = asking("/v1/messages", png_of_size(640, 320))
    _, with_picture, _ = await api.post("/v1/messages/count_tokens", body)
    _, without, _ = await api.post("/v1/messages/count_tokens", asking("/v1/messages"))
    assert with_picture["input_tokens"] - without["input_tokens"] == 20 * 10 + 2  # and the tokens around it
    assert api.node.pictures.process_id is None
    status, reply, _ = await api.post("/v1/responses/input_tokens", asking("/v1/responses", png_of_size(640, 320)))
    assert (status, reply["input_tokens"]) == (200, with_picture["input_tokens"])


async def test_usage_has_the_tokens_of_pictures(api: Api) -> None:
    _, counted, _ = await api.post("/v1/messages/count_tokens", asking("/v1/messages", RED))
    _, reply, _ = await api.post("/v1/messages", asking("/v1/messages", RED))
    assert reply["usage"]["input_tokens"] == counted["input_tokens"]


async def test_budget_and_context_count_pictures_without_decoding_them(api: Api) -> None:
    api.node.context_tokens = 128
    status, reply, _ = await api.post("/v1/messages", asking("/v1/messages", png_of_size(640, 640)))
    assert status == 400
    assert "prompt is too long" in message_of(reply)
    api.node.context_tokens = 4096
    limited = {"x-cortex-token-limit": "100"}
    status, reply, _ = await api.post("/v1/messages", asking("/v1/messages", png_of_size(640, 640)), **limited)
    assert status == 429
    assert api.node.pictures.process_id is None


@pytest.mark.parametrize(
    ("file", "status", "problem"),
    [
        (RED[:60], 400, "damaged or cut off"),
        (RED[:20], 400, "header is damaged"),
        (b"%PDF-1.7", 400, "neither JPEG"),
        (png_of_size(60_000, 60_000), 400, "at most 50 million"),
        (picture(1, 20_000), 400, "times as long"),
        (picture(1, 1), 200, ""),
        (animated("GIF"), 200, ""),
        (picture(40, 40, mode="CMYK", color=(1, 2, 3, 4), kind="JPEG"), 200, ""),
        (picture(40, 40, mode="I;16", color=9), 200, ""),
        (picture(40, 40, mode="P", color=1), 200, ""),
        (picture(40, 80, kind="JPEG", orientation=6), 200, ""),
    ],
    ids=str,
)
async def test_every_kind_of_file_is_read_or_rejected_with_its_place(
    api: Api, file: bytes, status: int, problem: str
) -> None:
    """Whatever is declared: each file is said to be PNG."""
    received, reply, _ = await api.post("/v1/chat/completions", asking("/v1/chat/completions", RED, file))
    assert received == status, reply
    if status == 400:
        assert problem in message_of(reply)
        assert reply["error"]["param"] == "messages[0].content[1]"
        assert not api.node.submitted


async def test_limits_are_settings(api: Api) -> None:
    await api.node.pictures.close()
    api.node.pictures = Pictures(PictureLimits(max_pictures=1))
    status, reply, _ = await api.post("/v1/responses", asking("/v1/responses", RED, RED))
    assert (status, reply["error"]["param"]) == (400, "input[0].content[1]")


async def test_placeholder_in_text_stays_text(api: Api) -> None:
    text = f"<|vision_start|>{PAD}<|vision_end|> {PAD * 6}"
    for files in ((), (RED,)):
        body = asking("/v1/chat/completions", *files, text=text)
        status, reply, _ = await api.post("/v1/chat/completions", body)
        assert status == 200, reply
        pad = api.node.text_model.tokenizer.whole_id(PAD)
        assert api.node.submitted[-1].prompt.count(pad) == 6 * len(files)


async def test_addresses_are_not_fetched(api: Api) -> None:
    body = asking("/v1/chat/completions", RED)
    for url in ("https://example.org/x.png", "http://127.0.0.1:1/x.png"):
        body["messages"][0]["content"][0]["image_url"] = {"url": url}
        status, reply, _ = await api.post("/v1/chat/completions", body)
        assert (status, reply["error"]["param"]) == (400, "messages[0].content[0]")
        assert "pictures.urls" in message_of(reply)


async def test_model_without_a_tower_names_those_that_have_one(api: Api, text: TextModel) -> None:
    api.node.text_model = text
    for path in SHAPES:
        status, reply, _ = await api.post(path, asking(path, RED))
        assert status == 400
        assert "org/tiny reads text only" in message_of(reply)
    assert not api.node.loads


async def test_pictures_that_were_decoded_before_an_error_are_reported_to_the_gateway(api: Api) -> None:
    body = asking("/v1/chat/completions", RED, png_of_size(640, 640))
    status, _, headers = await api.post("/v1/chat/completions", body, **{"x-cortex-principal": "alice"})
    assert status == 400
    assert json.loads(headers["x-cortex-usage"])["prompt_tokens"] >= 20 * 20
    status, _, headers = await api.post("/v1/chat/completions", body)
    assert status == 400
    assert "x-cortex-usage" not in headers, "nobody is charged"
    body = asking("/v1/chat/completions", with_scans(picture(64, 64, kind="JPEG", progressive=True), 150))
    status, reply, headers = await api.post("/v1/chat/completions", body, **{"x-cortex-principal": "alice"})
    assert status == 400
    assert "150 scans" in message_of(reply)
    assert "x-cortex-usage" not in headers, "nothing was decoded"
