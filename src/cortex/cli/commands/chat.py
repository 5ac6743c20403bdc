"""`cortex chat`: chat with a model in the terminal, or send one prompt from a script. `cortex embed`: the vectors of
texts, and how similar they are."""

from __future__ import annotations

import base64
import math
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import click
from rich.console import Console
from rich.markdown import Markdown
from rich.text import Text

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, for_terminal, json_option, print_json, rate, table
from cortex.wire.pictures.header import UnreadablePicture, read_header
from cortex.wire.pooling.response import floats
from cortex.wire.words import plural

FENCES = ("```", "~~~")


def complete_blocks(text: str) -> tuple[str, str]:
    """The leading Markdown blocks of `text` that no further text can change, and the rest.

    Blocks end at a blank line outside of a code fence. A list may continue after one: its items are then separate
    lists, which look the same.
    """
    end, position, fence = 0, 0, None
    for line in text.splitlines(keepends=True):
        position += len(line)
        stripped = line.strip()
        if fence is not None:
            if stripped.startswith(fence):
                fence = None
        elif stripped.startswith(FENCES):
            fence = stripped[:3]
        elif not stripped and line.endswith("\n"):
            end = position
    return text[:end], text[end:]


class ResponseView:
    """Shows a response on `console`. A context manager: the rest is shown at the end, also after Ctrl-C.

    On a terminal, finished blocks are rendered. Elsewhere the text is printed as it is.
    """

    def __init__(self, console: Console, notice: str) -> None:
        self._console = console
        self._status = console.status(Text(notice, style="dim")) if console.is_terminal else None
        self._pending = ""
        self._ends_open = False
        """The last thing printed was not a whole line."""

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()
        self._print_blocks(self._pending)
        if self._status is not None:
            self._status.stop()

    def show(self, text: str, *, is_reasoning: bool) -> None:
        """Add to the response."""
        if self._status is None:
            self._print(text, None)
        elif is_reasoning:
            self._status.stop()
            self._print(text, "dim")
        else:
            self._end_line()
            blocks, self._pending = complete_blocks(self._pending + text)
            self._print_blocks(blocks)
            self._status.update(Text(self._pending.strip().rpartition("\n")[2][-60:], style="dim"))
            self._status.start()

    def _print_blocks(self, text: str) -> None:
        if text.strip():
            self._console.print(Markdown(text))

    def _print(self, text: str, style: str | None) -> None:
        self._console.print(text, end="", soft_wrap=True, style=style)
        self._ends_open = not text.endswith("\n")

    def _end_line(self) -> None:
        if self._ends_open:
            self._console.print()
            self._ends_open = False


Content = str | list[dict[str, Any]]


def read_picture(path: Path) -> dict[str, Any]:
    """The part of a message with the picture at `path`. Raises CommandError for a file that is not a picture."""
    try:
        file = path.expanduser().read_bytes()
        header = read_header(file)
    except OSError as error:
        raise CommandError(
            f"cannot read {path}: {error.strerror}", "check the path of the picture", ExitCode.USAGE
        ) from error
    except UnreadablePicture as problem:
        raise CommandError(f"{path} cannot be sent as a picture: {problem}", "", ExitCode.USAGE) from None
    url = f"data:{header.media_type};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def content(text: str, pictures: Sequence[dict[str, Any]]) -> Content:
    """The content of a message: pictures first, as models are trained."""
    return [*pictures, {"type": "text", "text": text}] if pictures else text


HELP = """\
/help            show this list
/system TEXT     set the system prompt (empty: none)
/clear           clear the conversation
/retry           generate the last response again
/model NAME      continue with another model
/image FILE      send a picture with the next prompt (alone: send none)
/stats           tokens and speed of the last response
/quit            quit (or Ctrl-D)
Ctrl-C stops a response; on an empty line it quits. End a line with \\ to continue it on the next one."""


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the model."""

    model: str
    system: str | None = None
    turns: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    """Pictures of the next prompt."""

    def ask(self, text: str) -> None:
        """Add a turn of the user, with the pictures."""
        self.turns.append({"role": "user", "content": content(text, self.pictures)})
        self.pictures = []

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
class ChatDelta:
    """The next piece of a response. Reasoning is shown but never sent back."""

    text: str
    is_reasoning: bool = False


@dataclass(slots=True)
class ChatResponse:
    """A response while it arrives."""

    text: str = ""
    completion_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Rate after the first token."""
        if self.first_token_s is None or self.total_s <= self.first_token_s:
            return 0.0
        return max(0, self.completion_tokens - 1) / (self.total_s - self.first_token_s)

    def stats(self) -> str:
        if self.first_token_s is None:
            return "no response yet"
        speed = f"{plural(self.completion_tokens, 'token')}, {rate(self.tokens_per_s) or 0} tok/s"
        return f"{speed}, first token after {self.first_token_s:.2f} s"


def conversation_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a conversation: its system prompt, the temperature and the length of responses."""
    options = (
        click.option("-s", "--system", help="System prompt."),
        click.option(
            "-t",
            "--temperature",
            type=click.FloatRange(0, 2),
            help="Sampling temperature; 0 always picks the most likely token.",
        ),
        click.option("-n", "--max-tokens", type=click.IntRange(1), help="Maximum length of the response, in tokens."),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(cls=Command)
@click.argument("model", type=MODEL, required=False)
@click.argument("prompt", required=False)
@conversation_options
@click.option(
    "-i",
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Picture to send with the first prompt: JPEG, PNG, WebP or GIF; repeatable.",
)
@gateway_options
def chat(
    model: str | None,
    prompt: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    images: tuple[Path, ...],
    gateway: GatewayClient,
) -> None:
    """Chat with a model in the terminal.

    Without MODEL, uses the first loaded model. With a PROMPT or piped input, prints one response.

    \b
      cortex chat
      cortex chat smollm2-135m-instruct "Why is the sky blue?"
      git diff | cortex chat - "Write a commit message for this:"
      cortex chat --image error.png - "What is wrong here?"
    """
    pictures = [read_picture(path) for path in images]
    chosen = model if model and model != "-" else first_loaded(gateway, reads_pictures=bool(pictures))
    converse(gateway, chosen, prompt, system, temperature, max_tokens, pictures)


def converse(
    gateway: GatewayClient,
    model: str,
    prompt: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
    pictures: Sequence[dict[str, Any]] = (),
) -> None:
    """Print the response to `prompt` and piped input; without either, chat until the user quits. `pictures` are sent
    with the first prompt."""
    conversation = Conversation(model, system, pictures=list(pictures))
    session = ChatSession(gateway, conversation, temperature, max_tokens)
    question = "\n\n".join(part for part in (prompt, "" if sys.stdin.isatty() else sys.stdin.read().strip()) if part)
    if question:
        session.conversation.ask(question)
        for delta in session.respond():
            if not delta.is_reasoning:
                click.echo(for_terminal(delta.text) if sys.stdout.isatty() else delta.text, nl=False)
        click.echo()
    elif sys.stdin.isatty():
        interact(session, console())
    else:
        raise CommandError("there is no prompt", "pass a PROMPT or pipe one in", ExitCode.USAGE)


def first_loaded(gateway: GatewayClient, *, reads_pictures: bool = False) -> str:
    """The first model that is loaded, else the first of all; of those that read pictures, if any does and it must."""
    listed = [entry for entry in gateway.get("/v1/models")["data"] if "alias_of" not in entry]
    if reads_pictures:
        listed = [entry for entry in listed if (entry.get("capabilities") or {}).get("vision")] or listed
    if not listed:
        raise CommandError("there is no model to chat with", "start one with `cortex up MODEL`", ExitCode.NOT_FOUND)
    return str(next((entry for entry in listed if entry.get("loaded")), listed[0])["id"])


class ChatSession:
    """Sends a conversation to the gateway and adds the responses to it."""

    def __init__(
        self, gateway: GatewayClient, conversation: Conversation, temperature: float | None, max_tokens: int | None
    ) -> None:
        self.conversation = conversation
        self.last = ChatResponse()
        self._gateway = gateway
        self._temperature = temperature
        self._max_tokens = max_tokens

    def use_model(self, name: str) -> None:
        """Continue with another model. Raises CommandError, and keeps the present one, if there is no such model."""
        self._gateway.get(f"/v1/models/{quote(name, safe='')}")
        self.conversation.model = name

    def waits_for(self) -> str:
        """What the next response must wait for, as text."""
        model = self.conversation.model
        try:
            is_loaded = self._gateway.get(f"/v1/models/{quote(model, safe='')}").get("loaded")
        except CommandError:  # the request itself reports it
            return f"waiting for {model}"
        return f"{model} responds" if is_loaded else f"loading {model}"

    def respond(self) -> Iterator[ChatDelta]:
        """Stream the next turn. However the iteration ends, the text so far becomes a turn of the conversation."""
        response = self.last = ChatResponse()
        started = time.monotonic()
        try:
            body = self.conversation.request(self._temperature, self._max_tokens)
            with self._gateway.stream("/v1/chat/completions", body) as events:
                for event in events:
                    response.total_s = time.monotonic() - started
                    if usage := event.get("usage"):
                        response.completion_tokens = usage["completion_tokens"]
                    for choice in event.get("choices", ()):
                        yield from self._deltas(choice.get("delta") or {}, response)
        finally:
            if response.text:
                self.conversation.turns.append({"role": "assistant", "content": response.text})

    def _deltas(self, delta: dict[str, Any], response: ChatResponse) -> Iterator[ChatDelta]:
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if (reasoning or delta.get("content")) and response.first_token_s is None:
            response.first_token_s = response.total_s
        if reasoning:
            yield ChatDelta(reasoning, is_reasoning=True)
        if text := delta.get("content"):
            response.text += text
            yield ChatDelta(text)


def interact(session: ChatSession, console: Console) -> None:
    """Read prompts and show responses until the user quits."""
    # Importing it gives `input` line editing and a history.
    import readline  # noqa: F401

    console.print(Text.assemble((session.conversation.model, "bold"), ("  /help for commands, Ctrl-D to quit", "dim")))
    while (line := read_line(console)) is not None:
        if line.startswith("/"):
            if not run_command(session, console, line):
                return
        elif line:
            session.conversation.ask(line)
            show_response(session, console)


def read_line(console: Console) -> str | None:
    """One entry, continued over lines that end with a backslash; None when the user quits."""
    lines: list[str] = []
    try:
        while True:
            # readline does not count the characters between \001 and \002 as part of the line.
            lines.append(input("\001\033[36m\002> \001\033[0m\002" if not lines else "… "))
            if not lines[-1].endswith("\\"):
                return "\n".join(line.removesuffix("\\") for line in lines).strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def show_response(session: ChatSession, console: Console) -> None:
    """Print a response while it arrives. Ctrl-C stops it; a rejected prompt is removed from the conversation."""
    num_turns = len(session.conversation.turns)
    try:
        with ResponseView(console, session.waits_for()) as view:
            for delta in session.respond():
                view.show(delta.text, is_reasoning=delta.is_reasoning)
    except KeyboardInterrupt:
        console.print("\nstopped", style="dim")
    except CommandError as error:
        console.print(f"\n{error}", style="red")
        if len(session.conversation.turns) == num_turns:
            session.conversation.turns.pop()


def run_command(session: ChatSession, console: Console, line: str) -> bool:
    """Run a /command; return False to quit."""
    command, _, rest = line.partition(" ")
    conversation, rest = session.conversation, rest.strip()
    match command:
        case "/quit" | "/exit":
            return False
        case "/help":
            console.print(HELP)
        case "/system":
            conversation.system = rest or None
            console.print("system prompt set" if rest else "system prompt removed", style="dim")
        case "/clear":
            conversation.turns.clear()
            conversation.pictures.clear()
            console.print("conversation cleared", style="dim")
        case "/model" if rest:
            try:
                session.use_model(rest)
            except CommandError as error:
                console.print(Text.assemble((error.message, "red"), f"; still using {conversation.model}"))
            else:
                console.print(f"now using {rest}", style="dim")
        case "/image" if rest:
            try:
                conversation.pictures.append(read_picture(Path(rest)))
            except CommandError as error:
                console.print(Text(str(error), "red"))
            else:
                number = plural(len(conversation.pictures), "picture")
                console.print(f"{number} will be sent with the next prompt", style="dim")
        case "/image":
            conversation.pictures.clear()
            console.print("no picture will be sent with the next prompt", style="dim")
        case "/stats":
            console.print(session.last.stats())
        case "/retry" if any(turn["role"] == "user" for turn in conversation.turns):
            while conversation.turns[-1]["role"] != "user":
                conversation.turns.pop()
            show_response(session, console)
        case "/model":
            console.print(f"using {conversation.model}; /model NAME continues with another", style="dim")
        case "/retry":
            console.print("there is no response yet", style="dim")
        case _:
            console.print(f"unknown command {command}; /help lists the commands")
    return True


_SHOWN_CHARACTERS = 48
_SHOWN_ELEMENTS = 4


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("-d", "--dimensions", type=click.IntRange(1), help="Return only this many elements of each vector.")
@click.option(
    "--as",
    "purpose",
    type=click.Choice(["query", "document"]),
    help="Prepend the model's prompt for this kind of text.",
)
@gateway_options
@json_option
def embed(
    model: str,
    texts: tuple[str, ...],
    dimensions: int | None,
    purpose: str | None,
    gateway: GatewayClient,
    as_json: bool,
) -> None:
    """Show the vectors of texts.

    Without TEXT, embeds each line of standard input. Lists how similar each text is to the first; with --json, the
    whole vectors.

    \b
      cortex embed bge-m3 "a red cat" "un chat rouge" "the stock market"
    """
    lines = texts or tuple(line for line in sys.stdin.read().splitlines() if line.strip())
    if not lines:
        remedy = "write one after the model, or pipe lines into the command"
        raise CommandError("there is no text", remedy, ExitCode.USAGE)
    body: dict[str, Any] = {"model": model, "input": lines, "encoding_format": "base64"}
    body |= {"dimensions": dimensions} if dimensions is not None else {}
    body |= {"input_type": purpose} if purpose is not None else {}
    began_s = time.monotonic()
    response = gateway.post("/v1/embeddings", body)
    took_s = time.monotonic() - began_s
    vectors = [_vector(each["embedding"]) for each in response["data"]]
    if as_json:
        print_json([{"text": text, "embedding": vector} for text, vector in zip(lines, vectors, strict=True)])
        return
    rows = table("TEXT", ">SIMILARITY", ">DIMENSIONS", "VECTOR")
    for text, vector in zip(lines, vectors, strict=True):
        shown = text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
        start = " ".join(f"{element:+.4f}" for element in vector[:_SHOWN_ELEMENTS])
        rows.add_row(shown, f"{_cosine(vectors[0], vector):.4f}", str(len(vector)), f"{start} …")
    console().print(rows)
    num_tokens = response.get("usage", {}).get("prompt_tokens", 0)
    console().print(f"{plural(len(lines), 'text', 'texts')}, {num_tokens} tokens, {took_s * 1000:.0f} ms", style="dim")


def _vector(encoded: str | list[float]) -> list[float]:
    """Decodes base64 or a list: a foreign server may not support base64."""
    return floats(b64decode(encoded)).tolist() if isinstance(encoded, str) else encoded


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
