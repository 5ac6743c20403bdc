"""The blocks of a divided model in host memory: each rank keeps its own part, under the same digests.

The leader decides which blocks are kept and fetched, and announces it. Before a prefix is used, all ranks agree on the
blocks that every rank has; all ranks compute the others. Ranks hold the agreed blocks until the leader's next order or
step, so that none goes missing. They also agree on whether each has copied its part: if one device lacks memory, all
ranks compute.

A rank's results depend on the weights of all ranks, so blocks are named by all of them: see `name_of_all`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.outgoing import OutgoingBlocks
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.parallel.steps import StepLink
from cortex.neuron.engine.scheduling.step_plan import BlockAction, BlockOrder, NamedBlocks, StepPlan


class LeadingBlocks:
    """The leader's orders to the other ranks (the `OtherRanks` of its tier). Belongs to the engine thread; every call
    raises GroupBroken."""

    def __init__(
        self, link: StepLink, group: TorchGroup, device: torch.device, ensure_named: Callable[[], object]
    ) -> None:
        """`ensure_named`: after it the ranks have names for their blocks."""
        self._link = link
        self._group = group
        self._device = device
        self._ensure_named = ensure_named
        self._is_settled = True

    def keep(self, blocks: NamedBlocks, *, may_wait: bool) -> None:
        """Each rank copies its part of these blocks to host memory while it has room. `may_wait`: the model has no
        work, so it may take time to get more room."""
        self._ensure_named()
        self._is_settled = False
        self._announce("save" if may_wait else "keep", (blocks,))

    def fetch(self, blocks: Sequence[NamedBlocks]) -> bool:
        """Each rank copies its part of blocks that all ranks have to the device, before the next step. False if a rank
        has no memory for its copy; then no rank may use these blocks."""
        with self._link.turn():
            self._announce("fetch", blocks)
            return all(_agreed(self._group, [True], self._device))

    def forget(self, digests: Sequence[Digest]) -> None:
        self._announce("forget", [NamedBlocks(0, (), tuple(digests))])

    def held(self, wanted: Sequence[NamedBlocks]) -> list[list[bool]]:
        """Which of these blocks, which the leader has, all other ranks have too."""
        self._ensure_named()
        self._is_settled = True
        with self._link.turn():
            self._announce("ask", wanted)
            sums = _agreed(self._group, [True] * _count(wanted), self._device)
        votes = iter(sums)
        return [[next(votes) for _ in blocks.digests] for blocks in wanted]

    def settle(self) -> None:
        """Returns when all ranks have carried out their orders."""
        if not self._is_settled:
            self.held(())

    def _announce(self, action: BlockAction, blocks: Sequence[NamedBlocks]) -> None:
        self._link.announce(_plan(action, blocks))


class FollowingBlocks:
    """The blocks of a following rank, which obeys the leader's orders. Belongs to the engine thread."""

    def __init__(
        self,
        host: DeviceHostMemory | None,
        blocks: Sequence[BlockTensors],
        new_kinds: Callable[[DeviceHostMemory], tuple[BlockKind, ...]],
        num_groups: int,
        group: TorchGroup,
        device: torch.device,
    ) -> None:
        """`host`: None if this rank keeps nothing. `new_kinds`: names the blocks in it. `num_groups`: the
        number of KV groups, whose pages come first in `blocks`; then the states."""
        self._host = host
        self._blocks = blocks
        self._kinds = () if host is None else new_kinds(host)
        self._num_groups = num_groups
        self._group = group
        self._device = device
        self._copies = None if host is None else BlockCopies(host.slabs, device)
        self._outgoing: list[OutgoingBlocks] = []
        self._held: dict[tuple[int, Digest], BlockPlace] = {}
        """The blocks that the ranks agreed on last."""

    def before_step(self, plan: StepPlan) -> None:
        """Releases the agreed blocks, and makes the step wait for copies of blocks that it overwrites."""
        self.let_go()
        for outgoing in self._outgoing:
            outgoing.precede(plan)

    def obey(self, order: BlockOrder) -> None:
        """Raises GroupBroken."""
        self.collect()
        if order.action == "fetch":
            _agreed(self._group, [self._fetch(order.blocks)], self._device)
        self.let_go()
        if order.action in ("keep", "save"):
            self._keep(order.blocks, may_wait=order.action == "save")
        elif order.action == "forget" and self._host is not None:
            for kind in self._kinds:
                self._host.store.forget(kind, order.blocks[0].digests)
        elif order.action == "ask":
            _agreed(self._group, self._hold(order.blocks), self._device)

    def _keep(self, wanted: Sequence[NamedBlocks], *, may_wait: bool) -> None:
        if self._host is not None:
            self._host.slabs.may_wait = may_wait
        for part, ids, digests in wanted:
            if self._host is None or self._copies is None or not self._has_blocks(part):
                continue
            store, kind = self._host.store, self._kinds[part]
            lacking = [(id, digest) for id, digest in zip(ids, digests, strict=True) if not store.has(kind, digest)]
            group = part if part < self._num_groups else None
            outgoing = OutgoingBlocks.start(self._copies, self._blocks[part], kind, group, lacking, store)
            if outgoing is not None:
                self._outgoing.append(outgoing)

    def _hold(self, wanted: Sequence[NamedBlocks]) -> list[bool]:
        """Which of these blocks are here; they stay until the next order."""
        votes = []
        for part, _, digests in wanted:
            if self._host is None or not self._has_blocks(part):
                votes += [self._host is not None] * len(digests)
                continue
            store, kind = self._host.store, self._kinds[part]
            self._host.drop_damaged([kind], digests)
            found = [digest for digest in digests if store.has(kind, digest)]
            self._held |= {
                (part, digest): place for digest, place in zip(found, store.borrow(kind, found), strict=True)
            }
            votes += [(part, digest) in self._held for digest in digests]
        return votes

    def _fetch(self, wanted: Sequence[NamedBlocks]) -> bool:
        """Whether this rank has copied its part; false if the device has no memory for it."""
        for part, ids, digests in wanted:
            if self._copies is not None and self._has_blocks(part):
                places = [self._held[part, digest] for digest in digests]
                try:
                    self._copies.to_device(self._blocks[part], ids, places).wait()
                except torch.OutOfMemoryError:
                    return False
        return True

    def collect(self) -> None:
        """Waits for the copies to host memory and offers their blocks."""
        for outgoing in self._outgoing:
            outgoing.copy.wait()
            assert self._host is not None
            outgoing.publish(self._host)
        self._outgoing = []

    def let_go(self) -> None:
        """Releases the agreed blocks."""
        if self._host is not None:
            self._host.store.end(tuple(self._held.values()))
        self._held = {}

    def _has_blocks(self, part: int) -> bool:
        """Whether layers of this rank have blocks of this part."""
        return self._blocks[part].num_bytes > 0


def name_together(link: StepLink, group: TorchGroup, own: bytes, device: torch.device) -> bytes:
    """Announce `name_of_all` to the other ranks and take part in it; the leader calls this."""
    with link.turn():
        link.announce(_plan("name", ()))
        return name_of_all(group, own, device)


def name_of_all(group: TorchGroup, own: bytes, device: torch.device) -> bytes:
    """A name for the blocks of this rank that holds for the same weights on all ranks; `own` holds for its own weights,
    and differs from rank to rank. All of them call it together."""
    octets = torch.tensor(list(own), dtype=torch.float32, device=device)
    sums = [int(total) for total in group.all_reduce(octets).tolist()]
    return hashlib.blake2b(own + repr(sums).encode(), digest_size=len(own)).digest()


def _plan(action: BlockAction, blocks: Sequence[NamedBlocks]) -> StepPlan:
    return StepPlan((), 0, (), (), order=BlockOrder(action, tuple(blocks)))


def _count(wanted: Sequence[NamedBlocks]) -> int:
    return sum(len(blocks.digests) for blocks in wanted)


def _agreed(group: TorchGroup, votes: Sequence[bool], device: torch.device) -> list[bool]:
    """The blocks for which all ranks vote. All ranks call it together, with the same number of votes."""
    sums = group.all_reduce(torch.tensor([True, *votes], dtype=torch.float32, device=device)).tolist()
    return [total == group.shard.size for total in sums[1:]]
