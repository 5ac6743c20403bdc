"""The commands inside of `cortex chat`."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from click.testing import CliRunner

from cortex.cli.client import GatewayClient
from cortex.cli.commands.chat import ChatSession, Conversation, chat, run_command
from cortex.cli.failures import CommandError
from cortex.cli.output import console

from ...picture_files import data_url, picture

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


def test_pictures_are_sent_with_the_next_prompt(gateway: CannedGateway, tmp_path: Path) -> None:
    file, other = tmp_path / "my shot.png", tmp_path / "notes.txt"
    file.write_bytes(picture(8, 4))
    other.write_text("no picture")
    conversation = Conversation("small")
    session = ChatSession(GatewayClient(gateway.url, None), conversation, None, None)
    assert run(session, f"/image {file}") == "1 picture will be sent with the next prompt"
    assert "2 pictures" in run(session, f"/image {file}")
    assert "cannot be sent as a picture" in run(session, f"/image {other}")
    assert "cannot read" in run(session, f"/image {tmp_path / 'absent.png'}")
    conversation.ask("what?")
    conversation.ask("and now?")
    shown = {"type": "image_url", "image_url": {"url": data_url(picture(8, 4))}}
    assert [turn["content"] for turn in conversation.turns] == [
        [shown, shown, {"type": "text", "text": "what?"}],
        "and now?",
    ]
    run(session, f"/image {file}")
    assert run(session, "/image") == "no picture will be sent with the next prompt"
    assert not conversation.pictures


def test_option_sends_pictures_to_a_model_that_reads_them(gateway: CannedGateway, tmp_path: Path) -> None:
    file = tmp_path / "shot.png"
    file.write_bytes(picture(8, 4))
    listed = [{"id": "blind", "loaded": True}, {"id": "seer", "loaded": False, "capabilities": {"vision": True}}]
    gateway.responses["GET", "/v1/models"] = {"data": listed}
    gateway.responses["POST", "/v1/chat/completions"] = (400, {"error": {"message": "later", "code": "invalid_value"}})
    arguments = ["--url", gateway.url, "--image", str(file), "-i", str(file), "-", "what?"]
    result = CliRunner().invoke(chat, arguments, input="")
    assert "later" in str(result.exception)
    (sent,) = [body for _, path, body, _ in gateway.requests if path == "/v1/chat/completions"]
    assert sent["model"] == "seer"
    assert [part["type"] for part in sent["messages"][0]["content"]] == ["image_url", "image_url", "text"]
    absent = CliRunner().invoke(chat, ["--image", str(tmp_path / "absent.png"), "m", "x"])
    assert isinstance(absent.exception, CommandError)
