"""Which browser the tests drive."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from .. import waiting
from ..waiting import WAIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Page

WAIT_MS = WAIT_S * 1000
"""Playwright's own limit would be 30 s."""
ARGUMENTS = ["--process-per-site", *(["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else [])]
"""Pages of one site share a process. Chromium has no sandbox for root, as which containers often run."""


def executable() -> str | None:
    """The browser on this machine."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def wait_until(page: Page, expression: str, argument: object = None) -> None:
    """Waits until an expression or a function of `argument` is true. `Page.wait_for_function` would evaluate it inside
    the page at its second look, which the page's policy forbids."""
    waiting.wait_until(lambda: page.evaluate(expression, argument), f"not true: {expression}")
