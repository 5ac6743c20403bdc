"""What every Python program shares: the gateway's address, what the scripted model says, and how results are reported.

The programs run in environments of their own, without cortex.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

URL = sys.argv[1]
MODEL = "scripted"
KEY = "any"
GREETING = "Hello from the scripted model."
RESULT = "It is sunny in Oslo."
QUESTION = "What is the weather in Oslo?"
FOR_JSON = "Reply in JSON."


class Weather(BaseModel):
    """The weather of a city."""

    city: str
    days: int


WEATHER = Weather(city="Oslo", days=2)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def equal(found: Any, expected: Any) -> None:
    if found != expected:
        raise AssertionError(f"{found!r} is not {expected!r}")


def report(tasks: dict[str, Callable[[], Any]]) -> None:
    """Run the tasks one after the other and print what became of each as one JSON object."""
    results = {}
    for name, task in tasks.items():
        try:
            outcome = task()
            if inspect.iscoroutine(outcome):
                asyncio.run(outcome)
            results[name] = "passed"
        except BaseException:  # noqa: BLE001 - whatever a client raises is its result
            results[name] = traceback.format_exc()
    print(json.dumps(results))
