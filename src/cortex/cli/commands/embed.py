"""`cortex embed`: the vectors of texts, and how similar they are."""

from __future__ import annotations

import math
import sys
import time
from base64 import b64decode
from typing import Any

import click

from cortex.cli.client import GatewayClient, gateway_options
from cortex.cli.failures import Command, CommandError, ExitCode
from cortex.cli.model_name import MODEL
from cortex.cli.output import console, json_option, print_json, table
from cortex.wire.pooling.response import floats
from cortex.wire.words import plural

_SHOWN_CHARACTERS = 48
_SHOWN_ELEMENTS = 4


@click.command(cls=Command)
@click.argument("model", type=MODEL)
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@click.option("-d", "--dimensions", type=click.IntRange(1), help="Only the first elements of each vector.")
@click.option("--as", "purpose", type=click.Choice(["query", "document"]), help="Use the model's prompt for it.")
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

    Without a TEXT, every line of the input is one. Lists how similar each text is to the first; with --json, the whole
    vectors.

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
    """A foreign server may not know base64."""
    return floats(b64decode(encoded)).tolist() if isinstance(encoded, str) else encoded


def _cosine(one: list[float], other: list[float]) -> float:
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(a * b for a, b in zip(one, other, strict=True)) / lengths if lengths else 0.0
