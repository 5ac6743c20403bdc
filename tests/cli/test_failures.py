"""Errors are one line that says what happened and what to do."""

from __future__ import annotations

import errno
import os

import pytest

from cortex.cli.failures import CommandError, explanation


def _error_of_system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "/etc/cortex/cortex.toml")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (_error_of_system(errno.ENOENT), "/etc/cortex/cortex.toml: No such file or directory; check the path"),
        (
            _error_of_system(errno.EACCES),
            "/etc/cortex/cortex.toml: Permission denied; run it as a user who may do that, or change the permissions",
        ),
        (
            _error_of_system(errno.EIO),
            "/etc/cortex/cortex.toml: Input/output error; run again with --verbose to see where it happened",
        ),
        (OSError("no such device"), "no such device; run again with --verbose to see where it happened"),
        (CommandError("m failed: is it a model?", "choose another"), "m failed: is it a model? choose another"),
        (CommandError("m failed", "choose another"), "m failed; choose another"),
    ],
)
def test_error_is_a_line_with_a_remedy(error: Exception, line: str) -> None:
    assert explanation(error) == line
