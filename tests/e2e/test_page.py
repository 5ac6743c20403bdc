"""The page over the real programs with the real demo model: a model is unloaded, and a message loads it again."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from cortex.cli.up.demo import SMOLLM2

from ..browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from .conftest import Run

pytestmark = pytest.mark.e2e

LOAD_TIMEOUT_MS = 120_000


@pytest.fixture
def page(up: Run) -> Iterator[Page]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[dev]'")
    path = chromium.executable()
    if path is None:
        pytest.skip("needs chromium: apt-get install chromium, or set CHROMIUM to the path of one")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=chromium.ARGUMENTS)
        yield browser.new_page(base_url=up.url, viewport={"width": 1280, "height": 800})
        browser.close()


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
    numbers.wait_for(timeout=LOAD_TIMEOUT_MS)
    assert page.get_by_label(f"Response of {SMOLLM2.id}").locator(".markdown").inner_text().strip()

    page.get_by_role("link", name="Activity").click()
    request = page.locator("table.requests tbody tr").first
    request.wait_for()
    assert SMOLLM2.id in request.inner_text()
