"""The commands inside of `cortex chat`."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console

from cortex.cli.client import GatewayClient
from cortex.cli.commands.chat import ChatSession, Conversation, run_command

if TYPE_CHECKING:
    from ..conftest import CannedGateway


def run(session: ChatSession, line: str) -> str:
    out = io.StringIO()
    assert run_command(session, Console(file=out, width=80), line)
    return out.getvalue().strip()


def test_commands_confirm_what_they_changed(gateway: CannedGateway) -> None:
    gateway.responses["GET", "/v1/models/org%2Fother"] = {"id": "org/other", "loaded": False}
    session = ChatSession(GatewayClient(gateway.url, None), Conversation("small"), None, None)
    assert run(session, "/system Be kind.") == "system prompt set"
    assert run(session, "/system") == "system prompt removed"
    assert run(session, "/model org/other") == "now using org/other"
    assert session.conversation.model == "org/other"
    assert session.waits_for() == "loading org/other"


def test_unknown_model_is_rejected_and_the_present_one_stays(gateway: CannedGateway) -> None:
    session = ChatSession(GatewayClient(gateway.url, None), Conversation("small"), None, None)
    assert "still using small" in run(session, "/model absent")
    assert session.conversation.model == "small"


def test_commands_that_lack_something_say_what(gateway: CannedGateway) -> None:
    session = ChatSession(GatewayClient(gateway.url, None), Conversation("small"), None, None)
    assert run(session, "/model") == "using small; /model NAME continues with another"
    assert run(session, "/retry") == "there is no response yet"
    assert "unknown command /modle" in run(session, "/modle")
