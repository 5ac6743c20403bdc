"""A model that one server runs on several nodes: its group, and what gateway and nodes exchange to start it.

Each node starts one member. Rank 0, the leader, serves; the others work only for it. The gateway lets every node
prepare its member, which fixes addresses and ports, lets the leader's node connect to all of them, and then loads all
members with the same member list. A prepared member is also a claim: until it ends or expires, no other start of the
model is admitted there.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.node.load_options import FileOptions
from cortex.wire.node.protocol import NodeValue

Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Secret = Annotated[str, Meta(min_length=32, max_length=64, pattern="^[0-9a-f]+$")]
MAX_NODES = 64


class MemberAddress(NodeValue, frozen=True):
    node: Name
    """As the gateway calls it."""
    host: Name
    port: Port
    pulse_port: Port


class PrepareMember(NodeValue, FileOptions, frozen=True, kw_only=True):
    """`POST /groups/prepare`: choose the ports of a member. They are held for a while after each such call, until its
    load takes them. Rejected with 409 while another start of the model has a member there."""

    model_id: Annotated[str, Meta(max_length=MAX_MODEL_NAME)]
    harness: Name
    group: Secret
    rank: Annotated[int, Meta(ge=0, lt=MAX_NODES)] = 0
    reaches: Annotated[tuple[MemberAddress, ...], Meta(max_length=MAX_NODES)] = ()
    """Prepared members to whose ports this node connects before it responds."""


class PreparedMember(NodeValue, frozen=True):
    host: str
    """`cluster_address` of the node."""
    port: int
    """For the server: `${MEMBER_PORT}`."""
    pulse_port: int
    """The port on which the leader's node reaches this one during the life of the group."""
    version: str = ""
    """The server's version, as its `version` command prints it; empty without such a command."""
    lacks_files: bool = False
    """Whether the member uses hub files of which some are missing here."""
    files_sample: str = ""
    """Equal for the same files on different nodes; empty if they are missing or the member uses none."""
    content_digest: str = ""
    """That of all their bytes; empty where the node has not read them."""


class GroupMember(NodeValue, frozen=True):
    """The group in a load request, the same for all members except their rank."""

    group: Secret
    """Known to its members and the gateway only."""
    rank: Annotated[int, Meta(ge=0, lt=MAX_NODES)]
    members: Annotated[tuple[MemberAddress, ...], Meta(min_length=2, max_length=MAX_NODES)]
    """In the order of their ranks."""

    def __post_init__(self) -> None:
        if self.rank >= len(self.members):
            raise ValueError(f"rank {self.rank} is not in a group of {len(self.members)} members")

    @property
    def own(self) -> MemberAddress:
        return self.members[self.rank]

    @property
    def leader(self) -> MemberAddress:
        return self.members[0]

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(member.node for member in self.members)


def of_node(node: str, problem: str) -> str:
    """A problem with the name of the node that has it, unless it names one already."""
    return problem if problem.startswith("on ") else f"on {node}: {problem}"
