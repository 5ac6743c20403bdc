"""The daemon's side of a hub process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

from cortex.ipc.helper import Function, Helper
from cortex.ipc.pool import HelperOfThread, PoolLost
from cortex.neuron.hub_process.protocol import Failed, FetchFiles
from cortex.neuron.weights.errors import Cancelled, HubError
from cortex.neuron.weights.hub.listing import Listing
from cortex.neuron.weights.hub.source import endpoint_of
from cortex.wire.node.neighbours import Neighbour

T = TypeVar("T")

_HELPER: Final = Helper(
    name="neuron-hub", purpose="the process that talks to the hub", module="cortex.neuron.hub_process.service"
)
_LIST_FILES: Function[Listing | Failed] = Function("list_files", Listing | Failed)
_LIST_SHARED: Function[Listing | Failed | None] = Function("list_shared", Listing | Failed | None)
_FETCH: Function[Failed | None] = Function("fetch", Failed | None)
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
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_HUB)}
        hub = {name: value for name, value in environment.items() if name.startswith(_OF_THE_HUB)}
        settings = {"HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        try:
            self._helper = HelperOfThread(_HELPER, {**own, **hub, **settings})
        except OSError as error:
            raise HubError(f"no process for the hub can be started: {error.strerror}") from error

    def __enter__(self) -> HubProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._helper.__exit__(kind, error, traceback)

    def list_files(self, repository: str, revision: str) -> Listing:
        """Raises HubError, or Cancelled soon after `cancelled` returns true."""
        return self._call(_LIST_FILES, self.endpoint, repository, revision)

    def list_shared(self, neighbours: Sequence[Neighbour], repository: str, revision: str) -> Listing | None:
        """The listing of the first neighbour that has one. Raises as `list_files` does."""
        return self._call(_LIST_SHARED, tuple(neighbours), repository, revision)

    def fetch(self, files: FetchFiles, meanwhile: Callable[[], None]) -> None:
        """Downloads what the cache lacks. `meanwhile` is called until then. Raises as `list_files` does."""
        self._call(_FETCH, files, meanwhile=meanwhile)

    def _call(self, function: Function[T | Failed], *arguments: Any, meanwhile: Callable[[], None] = lambda: None) -> T:
        def check() -> None:
            if self._cancelled():
                raise Cancelled("the download was cancelled")
            meanwhile()

        try:
            reply = self._helper.call(function, *arguments, meanwhile=check)
        except PoolLost as error:
            raise HubError(
                f"the process that talks to the hub has ended ({error}); see the log and try again"
            ) from error
        if isinstance(reply, Failed):
            raise reply.error
        return reply
