"""The playground in a real browser, over a gateway whose nodes the test directs."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from cortex.wire.node.protocol import Capabilities, ModelState, Progress

from ..picture_files import base64_of, data_url, picture
from .chromium import wait_until
from .small_fleet import EVIL, card
from .stage import REPLY, DirectedNode, Stage

if TYPE_CHECKING:
    from playwright.sync_api import FilePayload, Page, Route

pytestmark = pytest.mark.usefixtures("node")


def say(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_chat_streams_text_reasoning_code_and_speed(page: Page, stage: Stage, node: DirectedNode) -> None:
    seen = stage.gate()
    node.script = [*REPLY[:3], seen, *REPLY[3:]]
    page.goto("#/playground")
    say(page, "make me a list")
    page.get_by_text("Thinking…").wait_for()
    stage.open(seen)
    reply = page.get_by_label("Response of small")
    reply.get_by_text(re.compile(r"first token .* tok/s · 7 in · 4 cached · 3 out")).wait_for()
    assert reply.locator("strong").inner_text() == "what"
    assert reply.locator("pre code .hljs-keyword").first.inner_text() == "for"
    assert not reply.get_by_text("I should keep it short.").is_visible()
    reply.get_by_text("Thoughts").click()
    reply.get_by_text("I should keep it short.").wait_for()
    page.reload()
    page.get_by_role("button", name="make me a list", exact=True).click()
    assert page.get_by_label("Response of small").locator("strong").inner_text() == "what", "kept in this browser"


def unfinished(stage: Stage) -> tuple[list[dict[str, Any] | asyncio.Event], asyncio.Event]:
    """A response that stops after a few words, until the event is set."""
    gate = stage.gate()
    return [*({"content": f"word{index} "} for index in range(4)), gate], gate


def test_response_is_stopped_regenerated_and_edited(page: Page, stage: Stage, node: DirectedNode) -> None:
    node.script, stopped = unfinished(stage)
    page.goto("#/playground")
    say(page, "first question")
    page.get_by_text("word3").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped ·").wait_for()
    stage.open(stopped)
    node.script = [{"content": "a new one"}]
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("a new one").wait_for()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit the message").fill("second question")
    node.script = [{"content": "an edited one"}]
    page.get_by_role("button", name="Send again").click()
    page.get_by_text("an edited one").wait_for()
    assert [message["content"] for message in node.seen[-1].body["messages"]] == ["second question"]


def test_reply_that_ends_while_another_conversation_is_open_is_kept(
    page: Page, stage: Stage, node: DirectedNode
) -> None:
    def with_kept_conversations(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "conversations": True})

    def keep(route: Route) -> None:
        kept.append(json.loads(route.request.post_data or "")["turns"][0]["replies"])
        route.fulfill(json={})

    kept: list[list[dict[str, Any]]] = []
    page.route("**/session", with_kept_conversations)
    page.route("**/session/conversations", lambda route: route.fulfill(json={"conversations": []}))
    page.route("**/session/conversations/*", keep)
    node.script, gate = unfinished(stage)
    page.goto("#/playground")
    say(page, "first question")
    page.get_by_text("word3").wait_for()
    page.get_by_role("button", name="New chat").click()
    with page.expect_response(lambda _: len(kept) == 2):  # as asked, and with the reply
        stage.open(gate)
    (asked, [reply]) = kept
    assert (asked, reply["status"]) == ([], "done"), reply


def test_two_models_respond_side_by_side_with_settings_and_tool_calls(page: Page, node: DirectedNode) -> None:
    node.states["cold"] = ModelState.READY
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    node.script = [{"tool_calls": [call]}, {"tool_calls": [rest]}]
    page.goto("#/playground")
    page.get_by_label("Model", exact=True).select_option("small")
    page.get_by_role("button", name="Compare").click()
    page.get_by_label("Second model").select_option("cold")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("be brief")
    page.get_by_label("Temperature").fill("0.5")
    say(page, "weather?")
    for model in ("small", "cold"):
        reply = page.get_by_label(f"Response of {model}")
        reply.get_by_text("get_weather").wait_for()
        reply.get_by_text('"city": "Oslo"').wait_for()
    body = node.seen[-1].body
    assert body["temperature"] == 0.5
    assert "top_p" not in body
    assert body["messages"][0] == {"role": "system", "content": "be brief"}


def test_cold_model_is_loaded_by_a_message_and_the_wait_is_explained(
    page: Page, stage: Stage, node: DirectedNode
) -> None:
    node.load_gate = stage.gate()
    node.progress["cold"] = Progress(stage="warm")
    page.goto("#/playground")
    page.get_by_label("Model", exact=True).select_option("cold")
    say(page, "hello")
    page.get_by_text("Loading on beast").wait_for()
    page.get_by_text("Warming up").wait_for()
    stage.open(node.load_gate)
    page.get_by_text("3 out").wait_for()


def test_request_is_copied_for_other_programs(page: Page, stage: Stage) -> None:
    page.goto("#/playground")
    for name, expected in (
        ("Curl", f"curl {stage.url}v1/chat/completions"),
        ("Python", f'OpenAI(base_url="{stage.url}v1"'),
        ("Environment for Claude Code", f"ANTHROPIC_BASE_URL='{stage.url[:-1]}'"),
    ):
        page.get_by_text("Copy as").click()
        page.get_by_role("menuitem", name=name).click()
        assert expected in page.locator("pre.snippet").inner_text()
        page.keyboard.press("Escape")
        page.get_by_role("dialog").wait_for(state="detached")


HOSTILE = """
<script>window.hacked=1</script><img src="/leak.png" onerror="window.hacked=1"> <svg onload=window.hacked=1></svg>
![alt](http://127.0.0.1:1/leak.png) ![x](javascript:window.hacked=1) [click](javascript:window.hacked=1)
<a href="https://evil.example/">link</a> <iframe src="javascript:parent.hacked=1"></iframe>
`<b onclick=1>` [ref]: https://evil.example "onerror=1"
<style>body{display:none}</style><form action="https://evil.example"><button>go</button></form>

```html
<img src=x onerror=window.hacked=1>
```
"""


def test_nothing_of_a_response_or_a_name_is_executed_or_fetched(page: Page, node: DirectedNode) -> None:
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    node.script = [{"reasoning_content": HOSTILE}, {"content": HOSTILE}]
    page.goto("#/playground")
    say(page, HOSTILE)
    reply = page.get_by_label("Response of small")
    reply.get_by_text("3 out").wait_for()
    reply.get_by_text("Thoughts").click()
    assert reply.locator("img, a, script, iframe, svg, form, style, button:not(.ghost)").count() == 0
    assert "(javascript:window.hacked=1)" in reply.locator(".markdown").inner_text(), "shown, inert"
    page.goto("#/fleet")
    card(page, "beast").get_by_text(EVIL).first.wait_for()
    assert not page.evaluate("window.hacked")
    assert not [url for url in requested if "leak" in url or "evil" in url]


def test_response_that_is_cut_off_is_reported_and_keeps_its_text(page: Page, stage: Stage, node: DirectedNode) -> None:
    node.script, cut_off = unfinished(stage)
    page.goto("#/playground")
    page.get_by_label("Model", exact=True).select_option("small")
    say(page, "a long story")
    page.get_by_text("word3").wait_for()
    stage.stop_gateway()
    page.get_by_text("The connection to the gateway was lost before the response was complete").wait_for()
    banner = page.get_by_text("The connection to the gateway is lost")
    banner.wait_for()
    stage.start_gateway()
    stage.until_listed("small", lambda model: model["loaded"])
    stage.open(cut_off)
    banner.wait_for(state="detached")  # it moves what is below it, and a button that moves is missed
    assert "word3" in page.get_by_label("Response of small").inner_text()
    node.script = [{"content": "the whole story"}]
    page.get_by_role("button", name="Try again").click()
    page.get_by_text("the whole story").wait_for()


def drop(page: Page, how: str, file: bytes, name: str, kind: str) -> None:
    """Paste or drop a file on the conversation."""
    page.evaluate(
        """([how, data, name, kind]) => {
            const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File([bytes], name, { type: kind }));
            const target = document.querySelector(".composer textarea");
            const options = { bubbles: true, cancelable: true };
            target.dispatchEvent(how === "paste"
                ? new ClipboardEvent("paste", { ...options, clipboardData: transfer })
                : new DragEvent("drop", { ...options, dataTransfer: transfer }));
        }""",
        [how, base64_of(file), name, kind],
    )


def test_pictures_are_chosen_pasted_dropped_removed_and_sent(page: Page, stage: Stage, node: DirectedNode) -> None:
    node.capabilities["small"] = Capabilities(tools=True, vision=True)
    stage.until_listed("small", lambda model: model["capabilities"]["vision"])
    red, blue = picture(400, 300), picture(30, 40, color=(0, 0, 200))
    page.goto("#/playground")
    chosen: list[FilePayload] = [
        {"name": f"{name}.png", "mimeType": "image/png", "buffer": file} for name, file in (("red", red), ("x", blue))
    ]
    page.get_by_label("Pictures", exact=True).set_input_files(chosen)
    attached = page.get_by_label("Pictures of the next message")
    attached.get_by_alt_text("x.png").wait_for()
    page.get_by_role("button", name="Remove x.png").click()
    drop(page, "paste", blue, "pasted.png", "image/png")
    attached.get_by_alt_text("pasted.png").wait_for()
    drop(page, "drop", b"%PDF", "notes.pdf", "application/pdf")
    page.get_by_text("notes.pdf cannot be sent as a picture").wait_for()
    drop(page, "drop", red, "dropped.png", "image/png")
    attached.get_by_alt_text("dropped.png").wait_for()
    assert attached.locator("img").count() == 3
    say(page, "what is this?")
    page.get_by_text(re.compile("3 out")).wait_for()
    assert attached.count() == 0
    widths = "[...document.querySelectorAll('.question img')].map((each) => each.naturalWidth).join()"
    wait_until(page, f"{widths} === '400,30,400'")
    shown = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in (red, blue, red)]
    assert node.seen[-1].body["messages"][0]["content"] == [*shown, {"type": "text", "text": "what is this?"}]
    page.get_by_text("Copy as").click()
    page.get_by_role("menuitem", name="Curl").click()
    assert "data:image/png;base64,..." in page.locator("pre.snippet").inner_text()
    page.reload()
    page.get_by_role("button", name="what is this?", exact=True).click()
    page.locator(".question img").nth(2).wait_for()  # kept in this browser
    assert page.locator(".question img").count() == 3


def test_models_that_read_text_only_are_named_before_pictures_are_sent(
    page: Page, stage: Stage, node: DirectedNode
) -> None:
    node.capabilities |= {"small": Capabilities(tools=True), "cold": Capabilities(tools=True, vision=True)}
    stage.until_listed("cold", lambda model: model["capabilities"]["vision"])
    page.goto("#/playground")
    page.get_by_label("Model", exact=True).select_option("small")
    drop(page, "paste", picture(40, 30), "shot.png", "image/png")
    page.get_by_text("small is not known to read pictures. Choose cold, or remove the pictures.").wait_for()
    say(page, "")
    page.get_by_text("small reads text only, and the request has pictures").wait_for()
