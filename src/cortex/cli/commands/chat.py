"""`cortex chat`: talk to a model in the terminal, or ask one question from a script."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode

HELP = """\
/help            this
/system TEXT     set the system prompt (empty: none)
/clear           forget the conversation
/retry           answer the last question again
/model NAME      go on with another model
/stats           tokens and speed of the last answer
/quit            leave (or Ctrl-D)
Ctrl-C stops an answer; on an empty line it leaves. End a line with \\ to go on in the next one."""


@dataclass(slots=True)
class Conversation:
    """What has been said, and to whom."""

    model: str
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    def request(self, temperature: float | None, max_tokens: int | None) -> dict[str, Any]:
        """The body of the next chat completion."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        options = {"temperature": temperature, "max_tokens": max_tokens}
        return {
            "model": self.model,
            "messages": [*system, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in options.items() if value is not None},
        }


@dataclass(frozen=True, slots=True)
class ChatPiece:
    """A bit of an answer. Reasoning is shown but never sent back."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class ChatReply:
    """An answer as it grows."""

    text: str = ""
    completion_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Pace after the first token."""
        if self.first_token_s is None or self.total_s <= self.first_token_s:
            return 0.0
        return max(0, self.completion_tokens - 1) / (self.total_s - self.first_token_s)

    def stats(self) -> str:
        if self.first_token_s is None:
            return "nothing was answered"
        pace = f"{self.completion_tokens} tokens, {self.tokens_per_s:.0f} tok/s"
        return f"{pace}, first after {self.first_token_s:.2f} s"


@click.command(cls=Command)
@click.argument("model", required=False)
@click.argument("prompt", required=False)
@click.option("-s", "--system", help="System prompt.")
@click.option("-t", "--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("-n", "--max-tokens", type=click.IntRange(1), help="Longest answer.")
@gateway_options
def chat(
    model: str | None,
    prompt: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    gateway: GatewayClient,
) -> None:
    """Chat with a model in the terminal.

    Without MODEL, the first that is loaded answers. A PROMPT or piped input is answered once.

    \b
      cortex chat
      cortex chat smollm2-135m-instruct "Why is the sky blue?"
      git diff | cortex chat - "Write a commit message for this:"
    """
    chosen = model if model and model != "-" else first_loaded(gateway)
    talk = Talk(gateway, Conversation(chosen, system), temperature, max_tokens)
    question = "\n\n".join(part for part in (prompt, "" if sys.stdin.isatty() else sys.stdin.read().strip()) if part)
    if question:
        talk.conversation.turns.append({"role": "user", "content": question})
        for piece in talk.answer():
            if not piece.is_reasoning:
                click.echo(piece.text, nl=False)
        click.echo()
    elif sys.stdin.isatty():
        interact(talk, Console(highlight=False))
    else:
        raise CommandError("no question was given", "pass a PROMPT or pipe one in", ExitCode.USAGE)


def first_loaded(gateway: GatewayClient) -> str:
    """A model that answers at once, else any there is."""
    listed = [entry for entry in gateway.get("/v1/models")["data"] if "alias_of" not in entry]
    if not listed:
        raise CommandError("there is no model to chat with", "start one with `cortex up MODEL`", ExitCode.NOT_FOUND)
    return str(next((entry for entry in listed if entry.get("loaded")), listed[0])["id"])


class Talk:
    """Asks the gateway to go on with a conversation and keeps what it said."""

    def __init__(
        self, gateway: GatewayClient, conversation: Conversation, temperature: float | None, max_tokens: int | None
    ) -> None:
        self.conversation = conversation
        self.last = ChatReply()
        self._gateway = gateway
        self._temperature = temperature
        self._max_tokens = max_tokens

    def answer(self) -> Iterator[ChatPiece]:
        """The next turn, piece by piece. What was said so far is kept however the iteration ends."""
        answer = self.last = ChatReply()
        started = time.monotonic()
        try:
            body = self.conversation.request(self._temperature, self._max_tokens)
            with self._gateway.stream("/v1/chat/completions", body) as events:
                for event in events:
                    answer.total_s = time.monotonic() - started
                    if usage := event.get("usage"):
                        answer.completion_tokens = usage["completion_tokens"]
                    for choice in event.get("choices", ()):
                        yield from self._pieces(choice.get("delta") or {}, answer)
        finally:
            if answer.text:
                self.conversation.turns.append({"role": "assistant", "content": answer.text})

    def _pieces(self, delta: dict[str, Any], answer: ChatReply) -> Iterator[ChatPiece]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if (reasoning or delta.get("content")) and answer.first_token_s is None:
            answer.first_token_s = answer.total_s
        if reasoning:
            yield ChatPiece(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            answer.text += text
            yield ChatPiece(text)


def interact(talk: Talk, console: Console) -> None:
    """Read, answer, repeat, until the user leaves."""
    # Importing it gives `input` line editing and history.
    import readline  # noqa: F401

    console.print(f"[bold]{talk.conversation.model}[/bold]  [dim]/help for commands, Ctrl-D to leave[/dim]")
    while (line := read_line(console)) is not None:
        if line.startswith("/"):
            if not obey(talk, console, line):
                return
        elif line:
            talk.conversation.turns.append({"role": "user", "content": line})
            show_answer(talk, console)


def read_line(console: Console) -> str | None:
    """One entry, continued over lines that end with a backslash; None when the user leaves."""
    lines: list[str] = []
    try:
        while True:
            # The control characters between \001 and \002 take no room on the line that readline edits.
            lines.append(input("\001\033[36m\002> \001\033[0m\002" if not lines else "… "))
            if not lines[-1].endswith("\\"):
                return "\n".join(line.removesuffix("\\") for line in lines).strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def show_answer(talk: Talk, console: Console) -> None:
    """Print an answer as it comes. Ctrl-C ends it; a refused question is taken back."""
    asked = len(talk.conversation.turns)
    try:
        for piece in talk.answer():
            console.print(piece.text, end="", soft_wrap=True, markup=False, style="dim" if piece.is_reasoning else None)
        console.print()
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/dim]")
    except CommandError as error:
        console.print(f"\n[red]{error.message}[/red]; {error.remedy}")
        if len(talk.conversation.turns) == asked:
            talk.conversation.turns.pop()


def obey(talk: Talk, console: Console, line: str) -> bool:
    """Do what a /command says; False to leave."""
    command, _, rest = line.partition(" ")
    conversation, rest = talk.conversation, rest.strip()
    match command:
        case "/quit" | "/exit":
            return False
        case "/help":
            console.print(HELP, markup=False)
        case "/system":
            conversation.system = rest or None
        case "/clear":
            conversation.turns.clear()
        case "/model" if rest:
            conversation.model = rest
        case "/stats":
            console.print(talk.last.stats())
        case "/retry" if any(turn["role"] == "user" for turn in conversation.turns):
            while conversation.turns[-1]["role"] != "user":
                conversation.turns.pop()
            show_answer(talk, console)
        case _:
            console.print(f"{command} cannot be done here; /help says what can")
    return True
