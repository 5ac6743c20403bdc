"""The commands inside of `cortex chat`."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from cortex.cli.client import GatewayClient
from cortex.cli.commands.chat import ChatSession, Conversation, run_command
from cortex.cli.output import console

if TYPE_CHECKING:
    from ..conftest import CannedGateway


def run(session: ChatSession, line: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert run_command(session, console(), line)
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
    assert run(session, "/srv/[/x]") == "unknown command /srv/[/x]; /help lists the commands"


def test_reason_of_a_rejected_prompt_keeps_its_brackets(gateway: CannedGateway) -> None:
    message = "`b` is no peer of this node: add it under [[peers]], or is it [b]?"
    error = {"message": message, "code": "load_failed", "type": "server_error"}
    gateway.responses["POST", "/v1/chat/completions"] = (503, {"error": error})
    session = ChatSession(GatewayClient(gateway.url, None), Conversation("small"), None, None)
    session.conversation.turns.append({"role": "user", "content": "hello"})
    assert message in run(session, "/retry")
