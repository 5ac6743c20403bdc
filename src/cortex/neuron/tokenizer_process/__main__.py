"""`python -m cortex.neuron.tokenizer_process`: started by the daemon for one model, ends with the daemon.

The daemon passes connections over the control socket. Each is served on its own thread. The tokenizers library
releases the interpreter lock while it encodes, so a long prompt does not delay a short one.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import threading
from pathlib import Path

from cortex.ipc.channel import BlockingChannel, ChannelError, Unsendable
from cortex.ipc.child import attach_to_parent, name_thread
from cortex.ipc.packets import PacketSocket
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.tokenizer.local import LocalEncoder, read_text
from cortex.neuron.tokenizer_process.protocol import (
    Connect,
    Describe,
    Described,
    Encode,
    Encoded,
    EncodeDocument,
    EncodeSegmented,
    Reply,
    Request,
    encode_failed,
    encoded_segmented,
    fingerprint_of,
    packed,
)

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.tokenizer_process", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the model's directory or GGUF file")
    parser.add_argument("--fingerprint", help="of the facts that the daemon read from these files before")
    options, control = attach_to_parent(parser)
    name_thread("neuron-tokenize")
    service = TokenizerService.open(options.model, options.fingerprint)
    try:
        service.run(PacketSocket(control, Connect))
    except (OSError, ChannelError) as error:
        log.error("control socket to the daemon failed: %s", error)
    os._exit(0)  # without waiting for the threads of open connections


class TokenizerService:
    """Serves one model's text, or the error that reading it ended in."""

    def __init__(self, text: tuple[Described, LocalEncoder] | Exception) -> None:
        self._text = text

    @classmethod
    def open(cls, model: Path, fingerprint: str | None) -> TokenizerService:
        """Reads the model's text files. Never raises: each request gets the error instead."""
        try:
            facts, encoder = read_text(model)
        except Exception as error:  # whatever it is, the daemon must get it
            log.debug("cannot read the text files of %s", model, exc_info=True)
            return cls(error)
        described = Described(facts, fingerprint_of(facts))
        if fingerprint not in (None, described.fingerprint):
            # The daemon still decodes tokens with the facts that it read first.
            return cls(TextFileMalformed(f"the text files of {model} changed while the node runs; restart the node"))
        return cls((described, encoder))

    def run(self, control: PacketSocket[Connect]) -> None:
        """Accepts connections until the daemon closes the socket. Raises OSError or ChannelError."""
        while (received := control.receive()) is not None:
            _, descriptor = received
            if descriptor is None:
                raise ChannelError("a connection was announced without a file descriptor")
            connection = socket.socket(fileno=descriptor)
            threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel: BlockingChannel[Request] = BlockingChannel(connection, Request)
        with connection:
            try:
                for requests in channel.receive():
                    channel.send([self._reply(request) for request in requests])
            except (OSError, ChannelError, Unsendable) as error:
                log.error("connection to the daemon failed: %s", error)

    def _reply(self, request: Request) -> Reply:
        if isinstance(self._text, Exception):
            return encode_failed(self._text)
        described, encoder = self._text
        try:
            match request:
                case Describe():
                    return described
                case Encode(text):
                    return Encoded(packed(encoder.encode(text)))
                case EncodeDocument(text):
                    return Encoded(packed(encoder.encode_document(text)))
                case EncodeSegmented(text):
                    return encoded_segmented(encoder.encode_segmented(text))
        except Exception as error:
            log.exception("encoding failed")
            return encode_failed(error)


if __name__ == "__main__":
    main()
