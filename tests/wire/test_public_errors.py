"""What clients that are not operators see of an error."""

from __future__ import annotations

import pytest

from cortex.wire import errors
from cortex.wire.error_encoding import public
from cortex.wire.errors import CortexError


@pytest.mark.parametrize(
    "error",
    [
        errors.LoadFailed,
        errors.HubUnavailable,
        errors.SourceNotFound,
        errors.FilesDamaged,
        errors.DiskFull,
        errors.ModelNotFound,
    ],
)
def test_reasons_of_failed_loads_are_for_operators(error: type[CortexError]) -> None:
    shown = public(error("/srv/models/secret.gguf is corrupt on beast"))
    assert "secret" not in shown.message
    assert type(shown) is error


@pytest.mark.parametrize(
    "error", [errors.OperatorOnly, errors.InvalidValue, errors.RateLimitExceeded, errors.ContextLengthExceeded]
)
def test_error_about_the_request_itself_keeps_its_words(error: type[CortexError]) -> None:
    given = error("what is wrong with the request")
    assert public(given) is given
