"""The page over the real programs with the real demo model: a model is unloaded, and a message loads it again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cortex.cli.up.demo import SMOLLM2
from cortex.gateway.ledger.keys import as_toml, generate
from cortex.wire.node.protocol import ModelState

from ..browser import chromium
from ..browser.stage import DirectedNode, Stage
from ..gateway.fake_neuron import GB

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from .conftest import Run, StartSecondGateway

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    path = chromium.executable()
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium, or set CHROMIUM to the path of one")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=chromium.ARGUMENTS, timeout=chromium.WAIT_MS)
        yield opened
        opened.close()


@pytest.fixture
def page(up: Run, browser: Browser) -> Iterator[Page]:
    opened = open_page(browser, up.url)
    yield opened
    opened.close()


def test_model_is_unloaded_loaded_by_a_message_and_responds(page: Page) -> None:
    page.goto("/#/fleet")
    row = page.locator("li.model").filter(has_text=SMOLLM2.id)
    row.get_by_text("ready", exact=True).wait_for()
    bar = page.locator(".bar").first.get_attribute("aria-label")
    assert bar is not None
    assert f"{SMOLLM2.id} weights" in bar
    assert f"{SMOLLM2.id} KV cache" in bar

    row.get_by_label(f"Actions for {SMOLLM2.id}").click()
    row.get_by_role("menuitem", name="Unload…").click()
    page.get_by_role("dialog").get_by_role("button", name="Unload").click()
    row.wait_for(state="detached")

    page.get_by_role("link", name="Playground").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("12")
    page.get_by_label("Message", exact=True).fill("Say hello.")
    page.keyboard.press("Enter")
    numbers = page.get_by_text(re.compile(r"first token .* tok/s · \d+ in · 0 cached · \d+ out"))
    numbers.wait_for()
    assert page.get_by_label(f"Response of {SMOLLM2.id}").locator(".markdown").inner_text().strip()

    page.get_by_role("link", name="Activity").click()
    request = page.locator("table.requests tbody tr").first
    request.wait_for()
    assert SMOLLM2.id in request.inner_text()


CONFIGURATION = """
[activity]
capture = true
redact = ["sk-[A-Za-z0-9]+"]
[[neurons]]
name = "second"
endpoint = "{endpoint}"
"""


@pytest.fixture
def second(tmp_path: Path) -> Iterator[DirectedNode]:
    """Another node, with a model that must leave before a larger one can be loaded."""
    stage = Stage(tmp_path)
    started = stage.add(DirectedNode("second", sizes={"here": 4 * GB, "larger": 22 * GB}))
    started.states["here"] = ModelState.READY
    yield started
    stage.close()


def test_both_kinds_of_keys_over_a_real_and_a_second_node(
    start_second_gateway: StartSecondGateway, browser: Browser, second: DirectedNode
) -> None:
    operator, user = generate("anna", operator=True), generate("ben", models=("smollm*",))
    keys = (as_toml(operator.section), as_toml(user.section))
    gateway = start_second_gateway(CONFIGURATION.format(endpoint=second.endpoint), *keys, key=operator.text)
    page = signed_in(browser, gateway.url, operator.text)

    real, other = (page.get_by_label(f"Node {name}", exact=True) for name in ("local", "second"))
    real.get_by_label(f"Actions for {SMOLLM2.id}").click()
    real.get_by_role("menuitem", name="Unload…").wait_for()
    assert real.get_by_role("menuitem", name="Sleep…").count() == 0, "a CPU keeps no sleeping models"
    other.get_by_text("not loaded").click()
    other.get_by_role("button", name="Load…").click()
    page.get_by_text("This evicts here").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Load", exact=True).click()
    other.locator("li.model").filter(has_text="larger").get_by_text("ready", exact=True).wait_for()

    page.get_by_role("link", name="Playground").click()
    page.get_by_label("Model", exact=True).select_option(SMOLLM2.id)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").and_(page.get_by_placeholder(f"Model's own: {SMOLLM2.temperature}")).wait_for()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_label("Message", exact=True).fill("My key is sk-123456. Say hello.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Regenerate").wait_for()
    page.get_by_role("link", name="Activity").click()
    page.locator("table.requests tbody tr").first.click()
    page.get_by_text("My key is [redacted]. Say hello.").wait_for()
    page.get_by_role("button", name="Forget this request").click()
    page.get_by_text("No requests yet").wait_for()
    page.get_by_role("button", name="Decisions").click()
    page.get_by_text("to make room for larger").wait_for()

    page = signed_in(browser, gateway.url, user.text)
    assert page.get_by_role("navigation").get_by_role("link").all_inner_texts() == [
        "Models", "Playground", "Activity", "Usage",
    ]  # fmt: skip
    page.get_by_role("link", name="Models").click()
    page.get_by_role("button", name=SMOLLM2.id).wait_for()
    assert page.get_by_text("larger").count() == 0


def open_page(browser: Browser, url: str) -> Page:
    """A window without animations, which take CPU time while a test waits."""
    page = browser.new_page(base_url=url, viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    page.set_default_timeout(chromium.WAIT_MS)
    return page


def signed_in(browser: Browser, url: str, key: str) -> Page:
    page = open_page(browser, url)
    page.goto("/")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_role("navigation").wait_for()
    return page
