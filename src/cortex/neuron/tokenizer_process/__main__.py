"""`python -m cortex.neuron.tokenizer_process`: started by the daemon for one model, ends with it.

The daemon passes the ends of connections over the control socket. Each is served on a thread of its own, and the
library lets the others run while it encodes, so that a long prompt does not hold up a short one.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import socket
import threading
from pathlib import Path

from cortex.ipc.channel import BlockingChannel, ChannelError
from cortex.ipc.process_control import die_with_parent, name_thread
from cortex.neuron.text.errors import TextFileMalformed
from cortex.neuron.text.tokenizer.local import LocalEncoder, read_text
from cortex.neuron.tokenizer_process.protocol import (
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
from cortex.telemetry import logs

log = logging.getLogger(__name__)


def main() -> None:
    parser = argparse.ArgumentParser(prog="cortex.neuron.tokenizer_process", description=__doc__)
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the socket to the daemon")
    parser.add_argument("--parent", type=int, required=True, help="process id of the daemon")
    parser.add_argument("--model", type=Path, required=True, help="the model's directory or GGUF file")
    parser.add_argument("--fingerprint", help="of what the files said when they were read before")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="INFO")
    arguments = parser.parse_args()
    logs.configure(arguments.log_format, arguments.log_level)
    faulthandler.enable()
    die_with_parent(arguments.parent)
    name_thread("neuron-tokenize")
    # A terminal or a service manager signals the whole group: the daemon decides when its tokenizer processes end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    service = Service.of(arguments.model, arguments.fingerprint)
    try:
        service.run(socket.socket(fileno=arguments.control))
    except OSError as error:
        log.error("the channel to the daemon failed: %s", error)
    os._exit(0)  # nothing of this process outlives it, nor do its threads


class Service:
    """One model's text, or the reason why there is none."""

    def __init__(self, text: tuple[Described, LocalEncoder] | Exception) -> None:
        self._text = text

    @classmethod
    def of(cls, model: Path, fingerprint: str | None) -> Service:
        try:
            facts, encoder = read_text(model)
        except Exception as error:  # whatever keeps the files from being read, the daemon is told
            log.debug("the text of %s cannot be read", model, exc_info=True)
            return cls(error)
        described = Described(facts, fingerprint_of(facts))
        if fingerprint not in (None, described.fingerprint):
            # The daemon goes on reading answers by what it was told first.
            return cls(TextFileMalformed(f"the text files of {model} have changed under the node; restart the node"))
        return cls((described, encoder))

    def run(self, control: socket.socket) -> None:
        """Until the daemon closes its end or dies."""
        while True:
            packet, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            if not packet:
                return
            connection = socket.socket(fileno=descriptors[0])
            threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        channel: BlockingChannel[Request] = BlockingChannel(connection, Request)
        with connection:
            try:
                for requests in channel.receive():
                    channel.send([self._reply(request) for request in requests])
            except (OSError, ChannelError) as error:
                log.error("a connection to the daemon failed: %s", error)

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
            log.exception("a text cannot be encoded")
            return encode_failed(error)


if __name__ == "__main__":
    main()
