"""The blocks of one model between its device memory and host memory: what is copied when, in either direction.

Out: while the model has no work, what later prompts are most likely to use; while it has, on a GPU, the pages that will
be used for something else next; before it sleeps or is unloaded, the rest. A page is never waited for: one that is not
copied when it is needed is lost.

In: a waiting prompt whose prefix goes on in host memory gets those pages, and is admitted when they have arrived. Until
then nothing knows of them, neither here nor there: a block is offered when its copy is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, RunningCopy
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.outgoing import OutgoingBlocks
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace
from cortex.neuron.engine.kv.page_groups import IncomingPages, KVPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.scheduling.admission import HasPage, HasState
from cortex.neuron.engine.scheduling.step_plan import NamedBlocks, StepPlan

FETCHED_PAGES = {"cuda": 8, "cpu": 1}
"""Fewer pages than this are computed rather than copied from host memory."""
COPY_BYTES = 256 << 20
"""Most bytes of one copy to host memory: about 5 ms."""
STEPS_BETWEEN_SCANS = 16
"""After a look at the oldest pages that found nothing to copy."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    copies: tuple[RunningCopy, ...]
    pages: Sequence[IncomingPages]
    state: tuple[int, Digest] | None
    places: tuple[BlockPlace, ...]
    num_tokens: int
    num_bytes: int
    started_s: float

    @property
    def is_complete(self) -> bool:
        return all(copy.is_complete for copy in self.copies)


class OtherRanks(Protocol):
    """The other ranks of a divided model, each with its own host memory: see `parallel/kept_blocks.py`."""

    def keep(self, blocks: NamedBlocks, *, may_wait: bool) -> None: ...
    def fetch(self, blocks: Sequence[NamedBlocks]) -> bool: ...
    def forget(self, digests: Sequence[Digest]) -> None: ...
    def held(self, wanted: Sequence[NamedBlocks]) -> list[list[bool]]: ...
    def settle(self) -> None: ...


class HostTier:
    """The `OffloadedPages` of one step loop; that of the leader serves all ranks of a divided model. Belongs to the
    engine thread."""

    def __init__(
        self,
        host: DeviceHostMemory,
        pages: KVPages,
        checkpoints: RecurrentCheckpoints | None,
        blocks: Sequence[BlockTensors],
        copies: BlockCopies,
        new_kinds: Callable[[], tuple[BlockKind, ...]],
        *,
        copies_ahead: bool,
        min_pages: int,
        others: OtherRanks | None = None,
    ) -> None:
        """`blocks`: the pages of each KV group, then the slots of states. `new_kinds`: names them, when that is first
        needed. `copies_ahead`: pages are copied before the model sleeps, too. `min_pages`: fewer are computed rather
        than fetched. `others`: for a divided model."""
        self._host = host
        self._store = host.store
        self._pages = pages
        self._checkpoints = checkpoints
        self._blocks = blocks
        self._copies = copies
        self._new_kinds = new_kinds
        self._copies_ahead = copies_ahead
        self._min_pages = min_pages
        self._others = others
        self._agreed: set[tuple[int, Digest]] | None = None
        """The blocks that all ranks have of the prefix that was asked for last; None: none was."""
        self._outgoing: OutgoingBlocks | None = None
        self._fetches: dict[str, _Fetch] = {}
        """By the id of the request that waits for it."""
        self._fetched: set[str] = set()
        """Requests whose prefix was fetched, or was not worth it; until they end."""
        self._remaining: list[tuple[int, list[tuple[int, Digest]]]] | None = None
        """What is left to copy while the model has no work; None: not known yet."""
        self._steps_to_scan = 0
        self.num_fetched_tokens = 0

    @cached_property
    def _kinds(self) -> tuple[BlockKind, ...]:
        return self._new_kinds()

    # -- to the device ---------------------------------------------------------------------------------------------

    def _has_page(self, group: int, digest: Digest) -> bool:
        """Whether host memory has this page. Pages of layers that keep no KV are everywhere."""
        if self._agreed is not None and (group, digest) not in self._agreed:
            return False
        return not self._blocks[group].num_bytes or self._store.has(self._kinds[group], digest)

    def _has_state(self, digest: Digest) -> bool:
        return self._checkpoints is not None and self._has_page(len(self._blocks) - 1, digest)

    def _verify(self, digests: Sequence[Digest]) -> None:
        """Before the blocks of these prefixes are looked for: see `DeviceHostMemory.verifies`."""
        if self._host.verifies:
            self._host.drop_damaged(self._kinds, digests)

    def _agree(self, digests: Sequence[Digest], cached: int, count: int) -> bool:
        """Asks the other ranks of a divided model which blocks of the first `count` pages they have: until `fetch`,
        only those count that all ranks have. False: there is nothing to ask."""
        if self._others is None or count - cached < self._min_pages:
            return False
        wanted = [
            NamedBlocks(part, (), tuple(digest for digest in digests[:count] if self._has_page(part, digest)))
            for part in range(len(self._blocks))
        ]
        votes = self._others.held(wanted)
        self._agreed = set()
        for blocks, are_held in zip(wanted, votes, strict=True):
            pairs = list(zip(blocks.digests, are_held, strict=True))
            self._agreed |= {(blocks.part, digest) for digest, is_held in pairs if is_held}
            # What another rank has dropped is of no use: it is kept again when it is computed again.
            self._store.forget(self._kinds[blocks.part], [digest for digest, is_held in pairs if not is_held])
        return True

    def may_have(self, request_id: str, num_pages: int) -> bool:
        """See `OffloadedPages`, as for the next three."""
        return bool(len(self._store)) and num_pages >= self._min_pages and request_id not in self._fetched

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self._fetches

    def ended(self, request_id: str) -> None:
        self._fetched.discard(request_id)

    def fetch(
        self,
        request_id: str,
        digests: Sequence[Digest],
        cached: int,
        last: int,
        usable: Callable[[HasPage, HasState], int],
    ) -> bool:
        self._verify(digests)
        count = usable(self._has_page, self._has_state)
        if self._agree(digests, cached, count):
            count = usable(self._has_page, self._has_state)
        return self._fetch(request_id, digests, cached, count, min(count * self._pages.page_tokens, last))

    def _fetch(self, request_id: str, digests: Sequence[Digest], cached: int, count: int, start: int) -> bool:
        """Starts to copy what the device lacks of the first `count` pages, `cached` of which are usable there, and the
        state after them. False: it is not worth it, or not possible now; nothing has changed then. True: the request
        waits until they have arrived, or, if the device of a rank has no memory for the copy, until the next step."""
        self._fetched.add(request_id)
        self._agreed = None
        if count - cached < self._min_pages:
            return False
        checkpoints = self._checkpoints
        lacks_state = checkpoints is not None and not checkpoints.knows(digests[count - 1])
        if lacks_state and checkpoints is not None and not checkpoints.can_lend:
            return False
        incoming = self._pages.expect(digests, count, start)
        if incoming is None:
            return False
        slot = checkpoints.lend() if lacks_state and checkpoints is not None else None
        wanted = [(each.group, each.new_pages, each.new_digests) for each in incoming]
        if slot is not None:
            wanted.append((len(self._blocks) - 1, [slot], [digests[count - 1]]))
        copies: list[RunningCopy] = []
        places: list[BlockPlace] = []
        num_bytes, started_s = 0, self._host.rate.clock()
        for part, ids, names in wanted:
            if ids and self._blocks[part].num_bytes:
                found = self._store.borrow(self._kinds[part], names)
                places += found
                try:
                    copies.append(self._copies.to_device(self._blocks[part], ids, found))
                except torch.OutOfMemoryError:
                    self._give_up(copies, places, incoming, slot)
                    return True
                num_bytes += len(ids) * self._blocks[part].num_bytes
        named = [NamedBlocks(part, tuple(ids), tuple(names)) for part, ids, names in wanted if ids]
        if self._others is not None and not self._others.fetch(named):
            self._give_up(copies, places, incoming, slot)
            return True
        state = None if slot is None else (slot, digests[count - 1])
        num_tokens = (count - cached) * self._pages.page_tokens
        fetch = _Fetch(tuple(copies), incoming, state, tuple(places), num_tokens, num_bytes, started_s)
        self._fetches[request_id] = fetch
        if not self._copies.are_concurrent:
            self._host.rate.measured(num_bytes, started_s)  # now: the next look at it follows a step
        return True

    def _give_up(
        self,
        copies: Sequence[RunningCopy],
        places: Sequence[BlockPlace],
        incoming: Sequence[IncomingPages],
        slot: int | None,
    ) -> None:
        """Ends a fetch for which the device has no memory: the prompt is computed."""
        for copy in copies:
            copy.wait()  # its pages are free for others next
        self._store.end(places)
        self._pages.gave_up(incoming)
        if slot is not None and self._checkpoints is not None:
            self._checkpoints.take_back(slot, None)

    def collect(self, *, wait: bool = False) -> None:
        """Offers the blocks whose copies are complete. `wait`: for all of them."""
        for request_id, fetch in list(self._fetches.items()):
            for copy in fetch.copies if wait else ():
                copy.wait()
            if fetch.is_complete:
                del self._fetches[request_id]
                self._store.end(fetch.places)
                self._pages.arrived(fetch.pages)
                if fetch.state is not None and self._checkpoints is not None:
                    self._checkpoints.take_back(*fetch.state)
                self.num_fetched_tokens += fetch.num_tokens
                if self._copies.are_concurrent:
                    self._host.rate.measured(fetch.num_bytes, fetch.started_s)
        if self._outgoing is not None:
            if wait:
                self._outgoing.copy.wait()
            if self._outgoing.copy.is_complete:
                self._outgoing.publish(self._host)
                self._outgoing = None

    @property
    def has_fetches(self) -> bool:
        return bool(self._fetches)

    # -- to the host -----------------------------------------------------------------------------------------------

    def before_launch(self, plan: StepPlan) -> None:
        """The step may write what is being copied to host memory: it begins after the copy then."""
        self._remaining = None
        if self._outgoing is not None:
            self._outgoing.precede(plan)

    def after_launch(self) -> None:
        """Copies what is the next to be used for something else, if little is blank."""
        if not self._copies_ahead or self._outgoing is not None or not self._store.budget_bytes:
            return
        self._steps_to_scan -= 1
        if self._steps_to_scan > 0:
            return
        self._steps_to_scan = STEPS_BETWEEN_SCANS
        self._host.slabs.may_wait = False
        for part, blocks in enumerate(self._blocks):
            if not blocks.num_bytes:
                continue
            count = self._num_at_once(part)
            num_blank, num_all = self._fill_of(part)
            if num_blank >= min(count, num_all // 4):
                continue
            oldest = islice(self._known(part), 2 * count)
            lacking = [each for each in oldest if not self._store.has(self._kinds[part], each[1])]
            if lacking and self._send(part, lacking[:count]):
                self._steps_to_scan = 0
                return

    def copy_while_idle(self) -> bool:
        """Copies a part of what later prompts are most likely to use; false: all of it is in host memory."""
        return self._copies_ahead and self._copy_some()

    def save(self) -> None:
        """Copies what the budget permits, the latest used in any case, and waits: the device memory is given up."""
        self._remaining = None
        while self._copy_some():
            pass
        self.collect(wait=True)
        if self._others is not None:
            self._others.settle()

    def _copy_some(self) -> bool:
        self.collect(wait=True)
        self._host.slabs.may_wait = True
        if not self._store.budget_bytes:
            return False
        if self._remaining is None:
            self._remaining = [(part, self._latest(part)) for part in range(len(self._blocks)) if self._is_used(part)]
        while self._remaining:
            part, blocks = self._remaining[-1]
            count = self._num_at_once(part)
            if not self._send(part, blocks[:count]):
                self._remaining.pop()
                continue
            del blocks[:count]
            self.collect(wait=True)
            return True
        return False

    def _latest(self, part: int) -> list[tuple[int, Digest]]:
        """What is not in host memory of the latest used blocks that fit in the part's share of the budget, the least
        recently used first."""
        most = self._store.budget_bytes // len(self._blocks) // max(1, self._blocks[part].num_bytes)
        latest = list(self._known(part))[-most:] if most else []
        return [each for each in latest if not self._store.has(self._kinds[part], each[1])]

    def _is_used(self, part: int) -> bool:
        """Whether this rank, or perhaps another one, has layers with blocks of this part."""
        return self._blocks[part].num_bytes > 0 or self._others is not None

    def _send(self, part: int, blocks: Sequence[tuple[int, Digest]]) -> bool:
        if not blocks:
            return False
        if not self._blocks[part].num_bytes:
            self._keep_elsewhere(part, blocks)
            return True
        group, kind = part if part < len(self._pages.groups) else None, self._kinds[part]
        outgoing = OutgoingBlocks.start(self._copies, self._blocks[part], kind, group, blocks, self._store)
        if outgoing is None:
            return False
        self._outgoing = outgoing
        self._keep_elsewhere(part, blocks[: len(outgoing.places)])
        return True

    def _keep_elsewhere(self, part: int, blocks: Sequence[tuple[int, Digest]]) -> None:
        if self._others is not None:
            named = NamedBlocks(part, tuple(id for id, _ in blocks), tuple(digest for _, digest in blocks))
            self._others.keep(named, may_wait=self._host.slabs.may_wait)

    def forget(self, digests: Iterable[Digest]) -> None:
        """The contents of these blocks cannot be trusted."""
        digests = list(digests)
        if self._others is not None:
            self._others.forget(digests)  # they may have what was dropped here
        if not len(self._store) and self._outgoing is None:
            return
        self.collect(wait=True)
        for kind in self._kinds:
            self._store.forget(kind, digests)

    def _known(self, part: int) -> Iterator[tuple[int, Digest]]:
        """The blocks on the device that nothing uses, the least recently used first."""
        if part < len(self._pages.groups):
            return self._pages.groups[part].pool.idle()
        return iter(()) if self._checkpoints is None else self._checkpoints.known()

    def _fill_of(self, part: int) -> tuple[int, int]:
        """How many blocks are blank, of how many."""
        if part < len(self._pages.groups):
            pool = self._pages.groups[part].pool
            return pool.num_free - pool.num_idle, pool.num_pages
        assert self._checkpoints is not None
        return self._checkpoints.num_blank, self._checkpoints.num_slots

    def _num_at_once(self, part: int) -> int:
        return max(1, COPY_BYTES // max(1, self._blocks[part].num_bytes))
