"""A real browser. Without one these tests are skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from . import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

    from .small_fleet import SmallFleet
    from .stage import DirectedNode, Stage

HOW = "apt-get install chromium, or set CHROMIUM to the path of one, and pip install -e '.[dev]'"


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """Chromium for the tests of this folder: while its driver runs, no other event loop can run on this thread."""
    playwright = pytest.importorskip("playwright.sync_api", reason=f"needs playwright: {HOW}")
    path = chromium.executable()
    if path is None:
        pytest.skip(f"needs chromium: {HOW}")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=chromium.ARGUMENTS, timeout=chromium.WAIT_MS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A stage of its own for every file."""
    from .stage import Stage

    started = Stage(tmp_path_factory.mktemp("gateway"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def opened(stage: Stage) -> SmallFleet:
    """The small fleet of every file whose tests use it."""
    from .small_fleet import SmallFleet

    return SmallFleet.opened(stage)


@pytest.fixture
def node(opened: SmallFleet) -> DirectedNode:
    """Its node, as every test finds it."""
    return opened.as_before().node


@pytest.fixture(scope="module")
def window(browser: Browser, stage: Stage) -> Iterator[BrowserContext]:
    """The profile of the tests of one file: a new one opens a window, which takes longer than most tests."""
    context = browser.new_context(
        base_url=stage.url,
        viewport={"width": 1280, "height": 800},
        reduced_motion="reduce",  # animations take CPU time while a test waits
    )
    context.set_default_timeout(chromium.WAIT_MS)
    empty = context.new_page()  # keeps the window, and the process of the site
    empty.route("**", lambda route: route.fulfill(body=""))
    empty.goto("")
    yield context
    context.close()


@pytest.fixture
def page(window: BrowserContext, stage: Stage) -> Iterator[Page]:
    """A tab of a profile that has stored nothing. Errors of scripts, and what the policy blocks, fail the test."""
    opened = window.new_page()
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on("console", lambda message: problems.extend(re.findall(".*Content Security Policy.*", message.text)))
    yield opened
    opened.close()
    window.clear_cookies()
    devtools = window.new_cdp_session(window.pages[0])
    devtools.send("Storage.clearDataForOrigin", {"origin": stage.url.rstrip("/"), "storageTypes": "all"})
    devtools.detach()
    assert not problems
