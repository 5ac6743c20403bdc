"""How a gateway that stores a response describes it to the node that generates it.

The node stores nothing. It uses the id that the gateway chose, from which the ids of the items follow, and repeats the
rest in the response object. The description travels in a header, so that the client's body is relayed unchanged.
"""

from __future__ import annotations

import msgspec

from cortex.wire.requests import GenerateRequest

HEADER = "x-cortex-response"


class KeptResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response that a gateway stores."""

    id: str
    previous_response_id: str | None = None
    background: bool = False
    conversation_id: str | None = None
    store: bool = True
    """False: it is only added to its conversation."""

    @property
    def header_value(self) -> str:
        """The value of `HEADER`."""
        return msgspec.json.encode(self).decode()

    def described(self, request: GenerateRequest) -> GenerateRequest:
        """`request` whose response object says that it is stored."""
        described = {
            "store": self.store,
            "previous_response_id": self.previous_response_id,
            "background": self.background,
            "conversation": None if self.conversation_id is None else {"id": self.conversation_id},
        }
        return msgspec.structs.replace(request, metadata=request.metadata | described)


_decoder = msgspec.json.Decoder(KeptResponse)


def from_header(value: str) -> KeptResponse | None:
    """The description in a header; None when it is not one."""
    try:
        return _decoder.decode(value)
    except msgspec.DecodeError:
        return None
