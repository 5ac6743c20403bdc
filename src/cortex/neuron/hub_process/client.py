"""The daemon's side of a hub process."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final

from cortex.ipc.channel import ChannelError, FrameDecoder, encode_frame
from cortex.ipc.start import start_child_of_thread
from cortex.neuron.hub_process.protocol import Failed, HubReply, HubRequest
from cortex.neuron.weights.errors import Cancelled, HubError
from cortex.neuron.weights.hub.endpoint import endpoint_of

_MODULE: Final = "cortex.neuron.hub_process"
_POLL_S: Final = 0.05
_OF_THE_HUB: Final = ("HF_", "HUGGING_FACE_")


class HubProcess:
    """A context manager: the process ends with the block, at once. Belongs to one thread, which it makes wait."""

    def __init__(self, environment: Mapping[str, str], cancelled: Callable[[], bool]) -> None:
        """`environment` has the variables of the hub's tools: HF_TOKEN, HF_ENDPOINT, … Raises HubError for a token that
        no header can carry, without the package of the hub, and when no process can be started."""
        token = environment.get("HF_TOKEN", "").strip()
        if not token.isascii() or not (token.isprintable() or token == ""):
            raise HubError(
                "the token of the hub has a line break or another wrong character; set HF_TOKEN to one token"
            )
        if importlib.util.find_spec("huggingface_hub") is None:
            raise HubError(
                "downloads need the package huggingface-hub: run `pip install '.[hub]'` in a checkout of cortex, or "
                "name files on this node as the source of the model"
            )
        self.endpoint = endpoint_of(environment)
        self._cancelled = cancelled
        self._decoder: FrameDecoder[HubReply] = FrameDecoder(HubReply)
        self._process, self._control = self._start(environment)
        self._control.settimeout(_POLL_S)

    def __enter__(self) -> HubProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._control.close()

    def ask(self, request: HubRequest, meanwhile: Callable[[], None] = lambda: None) -> HubReply:
        """The reply. `meanwhile` is called while it is awaited. Raises HubError, or Cancelled soon after `cancelled`
        returns true."""
        try:
            self._send(encode_frame([request]))
            while True:
                if self._cancelled():
                    raise Cancelled("the download was cancelled")
                meanwhile()
                for [reply] in self._decoder.feed(self._received()):
                    if isinstance(reply, Failed):
                        raise reply.error
                    return reply
        except (OSError, ChannelError) as error:
            raise HubError(
                f"the process that talks to the hub has ended ({error}); see the log and try again"
            ) from error

    def _send(self, frame: bytes) -> None:
        self._control.settimeout(None)
        self._control.sendall(frame)
        self._control.settimeout(_POLL_S)

    def _received(self) -> bytes:
        try:
            data = self._control.recv(1 << 20)
        except TimeoutError:
            return b""
        if not data:
            raise ChannelError(f"exit status {self._process.wait()}")
        return data

    def _start(self, environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_HUB)}
        hub = {name: value for name, value in environment.items() if name.startswith(_OF_THE_HUB)}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        try:
            return start_child_of_thread(_MODULE, environment={**own, **hub, **settings})
        except OSError as error:
            raise HubError(f"no process for the hub can be started: {error.strerror}") from error
