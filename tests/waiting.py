"""How long tests wait for what must happen."""

WAIT_S = 120.0
"""Limit of every wait for something that happens in a healthy run: only reached on failure, on a slow machine, too.
The limit of a whole test is `timeout` in pyproject.toml."""

NEVER_S = 10 * WAIT_S
"""How long something lasts that a test ends, or that must not end while a test runs."""
