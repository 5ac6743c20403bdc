"""Copies one model's blocks between device memory and host memory, in both directions.

Out: while the model is idle, the blocks that later prompts are most likely to use; while it works, on a GPU, the pages
that will be reused next; before it sleeps or is unloaded, the rest. Steps never wait for a page: one that is not copied
when it is reused is lost.

In: a waiting prompt whose prefix continues in host memory gets those pages and is admitted when they have arrived. A
block is offered only when its copy is complete. Blocks on disk are fetched in the same way if that is expected to be
faster than computing, and the front of the prompt is computed meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Protocol

import torch

from cortex.neuron.engine.host_pages.copies import BlockCopies, BlockTensors, IncomingCopies, RunningCopy
from cortex.neuron.engine.host_pages.device_memory import DeviceHostMemory
from cortex.neuron.engine.host_pages.disk import DiskPages
from cortex.neuron.engine.host_pages.disk_reads import DiskFetch, Fetch, StoredBlock
from cortex.neuron.engine.host_pages.outgoing import OutgoingBlocks
from cortex.neuron.engine.host_pages.rates import WORTH, EndOfFront, end_of_front, fetch_s, saves_time
from cortex.neuron.engine.host_pages.store import BlockKind, BlockPlace
from cortex.neuron.engine.kv.page_groups import IncomingPages, KVPages
from cortex.neuron.engine.kv.pages import Digest
from cortex.neuron.engine.kv.recurrent_checkpoints import RecurrentCheckpoints
from cortex.neuron.engine.request import EngineRequest
from cortex.neuron.engine.scheduling.admission import HasPage, HasState
from cortex.neuron.engine.scheduling.step_plan import NamedBlocks, StepPlan

FETCHED_PAGES = {"cuda": 8, "cpu": 1}
"""Fewer pages than this are computed rather than copied from host memory."""
COPY_BYTES = 256 << 20
"""Most bytes of one copy to host memory: about 5 ms."""
DISK_SHARE = 0.9
"""Share of the disk that the blocks of an ending process fill at most: the headers of files take room, too, and the
latest used blocks are written first, so that files in excess would take their place."""
READ_DELAY_S = 0.002
"""Delay before the first block of a fetch from disk."""
TURN_S = 0.005
"""How long the engine waits for a disk before it looks for other work."""
STEPS_BETWEEN_SCANS = 16


class OtherRanks(Protocol):
    """The other ranks of a divided model, each with its own host memory: see `parallel/ranks.py`."""

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
        compute_s: Callable[[int, int], float] = lambda start, end: 0.0,  # noqa: ARG005 - nothing is faster
        from_disk: IncomingCopies | None = None,
        end_of_front: EndOfFront = end_of_front,
        steps_between_scans: int = STEPS_BETWEEN_SCANS,
    ) -> None:
        """`blocks`: the pages of each KV group, then the slots of states. `new_kinds` names them on first use.
        `copies_ahead`: pages are copied even before the model sleeps. `min_pages`: fewer are computed instead of
        fetched. `others`: for a divided model. `compute_s`: time to compute a prompt from one position to another.
        `from_disk`: copies from the disk's buffers; None without a disk. `end_of_front`: divides a prefix into pages to
        compute and pages to read from disk meanwhile. `steps_between_scans`: pause after a scan of the oldest pages
        found nothing to copy."""
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
        self._compute_s = compute_s
        self._disk = None if from_disk is None else host.disk
        self._from_disk = from_disk
        self._end_of_front = end_of_front
        self._steps_between_scans = steps_between_scans
        self._looks_on_disk = False
        """Whether blocks on disk count as available."""
        self._agreed: set[tuple[int, Digest]] | None = None
        """The blocks that all ranks have of the prefix requested last; None without such a request."""
        self._outgoing: OutgoingBlocks | None = None
        self._fetches: dict[str, Fetch] = {}
        """By the id of the waiting request."""
        self._fetched: set[str] = set()
        """Requests whose prefix was fetched or not worth fetching, until they end."""
        self._searched: dict[str, tuple[int, int]] = {}
        """Files found and the front when further pages of a request were last looked for."""
        self._remaining: list[tuple[int, list[tuple[int, Digest]]]] | None = None
        """Blocks left to copy while the model is idle; None if not known yet."""
        self._steps_to_scan = 0
        self.num_fetched_tokens = 0

    @cached_property
    def _kinds(self) -> tuple[BlockKind, ...]:
        return self._new_kinds()

    def ensure_named(self) -> None:
        """Names the blocks, finds those on disk and allocates read buffers ahead of the first request."""
        largest = max(kind.num_bytes for kind in self._kinds)
        if self._has_disk and self._disk is not None:
            self._disk.reader.allocate(largest)

    # -- to the device ---------------------------------------------------------------------------------------------

    def _has_page(self, group: int, digest: Digest) -> bool:
        """Whether host memory has this page. Pages of layers that keep no KV are everywhere."""
        if self._agreed is not None and (group, digest) not in self._agreed:
            return False
        if not self._blocks[group].num_bytes or self._store.has(self._kinds[group], digest):
            return True
        return self._looks_on_disk and self._disk is not None and self._disk.has(self._kinds[group], digest)

    def _has_state(self, digest: Digest) -> bool:
        return self._checkpoints is not None and self._has_page(len(self._blocks) - 1, digest)

    def _verify(self, digests: Sequence[Digest]) -> None:
        """Call before these prefixes are looked up: see `DeviceHostMemory.verifies`."""
        if self._host.verifies:
            self._host.drop_damaged(self._kinds, digests)

    def _agree(self, digests: Sequence[Digest], cached: int, count: int) -> bool:
        """Asks the other ranks of a divided model which blocks of the first `count` pages they have. Until `fetch`,
        only blocks of all ranks count. False if there is nothing to ask."""
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
        return (
            (bool(len(self._store)) or self._has_disk)
            and num_pages >= self._min_pages
            and request_id not in self._fetched
        )

    @property
    def _has_disk(self) -> bool:
        """Whether anything of the model is on disk."""
        return self._disk is not None and any(self._disk.num_blocks(kind) for kind in self._kinds)

    def num_pages(self, digests: Sequence[Digest]) -> int:
        """The number of leading pages on the device, in host memory and on disk after which a prompt could continue."""
        self._looks_on_disk = True
        counts, checkpoints = self._pages.match(digests, self._has_page), self._checkpoints
        if checkpoints is not None:
            named = ((count, digests[count - 1]) for count in reversed(counts) if count)
            counts = [next((count for count, end in named if checkpoints.knows(end) or self._has_state(end)), 0)]
        self._looks_on_disk = False
        return counts[-1]

    @property
    def computes_fronts(self) -> bool:
        """Whether a request computes pages while those after them are fetched. Windows and states need few blocks at
        the front, and ranks of a divided model do not read from disk."""
        return self._disk is not None and self._checkpoints is None and not self._pages.has_windows

    def is_fetching(self, request_id: str) -> bool:
        return request_id in self._fetches

    def is_receiving(self, request: EngineRequest) -> bool:
        return request.id in self._fetches or (self._disk is not None and request.transfer in self._disk.transfers)

    @property
    def incoming_states(self) -> list[int]:
        """Slots of states that are being fetched."""
        return [fetch.state[0] for fetch in self._fetches.values() if fetch.state is not None]

    @property
    def incoming(self) -> list[IncomingPages]:
        """Pages that are being fetched."""
        return [each for fetch in self._fetches.values() for each in fetch.pages]

    def ended(self, request_id: str) -> None:
        self._fetched.discard(request_id)
        self._searched.pop(request_id, None)
        if (fetch := self._fetches.get(request_id)) is not None and fetch.from_disk is not None:
            fetch.from_disk.cancel()

    def fetch(
        self,
        request_id: str,
        digests: Sequence[Digest],
        cached: int,
        last: int,
        usable: Callable[[HasPage, HasState], int],
    ) -> int | None:
        self._verify(digests)
        count = usable(self._has_page, self._has_state)
        if self._agree(digests, cached, count):
            count = usable(self._has_page, self._has_state)
        front, further = self._worth_reading(digests, cached, count, usable)
        count = max(count, further)
        if not self._fetch(request_id, digests, cached, front, count, min(count * self._pages.page_tokens, last)):
            return None
        return max(cached, front) if request_id in self._fetches else cached

    def _worth_reading(
        self, digests: Sequence[Digest], cached: int, count: int, usable: Callable[[HasPage, HasState], int]
    ) -> tuple[int, int]:
        """The page up to which a request computes its prefix meanwhile, 0 if it only waits, and the number of pages
        after which it can continue with those on disk. Both are 0 if computing the pages after `cached` and `count`,
        which are nearer, is expected to be faster."""
        disk = self._disk
        if disk is None or not self._has_disk:
            return 0, 0
        self._looks_on_disk = True
        further = usable(self._has_page, self._has_state)
        self._looks_on_disk = False
        nearer = max(cached, count)
        if further <= nearer:
            return 0, 0
        # Copies from host memory are short.
        divides = count <= cached and self.computes_fronts
        front = self._front(disk, digests[:further], nearer, divides=divides)
        if front is None:
            return 0, 0
        return front if front > nearer else 0, further

    def _front(
        self, disk: DiskPages, digests: Sequence[Digest], first: int, num_computed: int = 0, *, divides: bool = True
    ) -> int | None:
        """The page, `first` or a later one, up to which to compute while the pages after it are read from disk; None if
        computing everything is expected to be faster. `num_computed`: the number of pages after which the prompt is
        computed; 0: `first`. `divides`: the page may be after `first`."""
        end, page_tokens = len(digests), self._pages.page_tokens
        read = [
            (kind, digest)
            for part, kind in enumerate(self._kinds)
            for digest in (digests[first:] if part < len(self._pages.groups) else digests[-1:])
            if self._blocks[part].num_bytes and not self._store.has(kind, digest) and disk.has(kind, digest)
            if self._id_of(part, digest) is None
        ]
        parts = disk.parts(read)

        def compute_s(page: int) -> float:
            return disk.worth / WORTH * self._compute_s((num_computed or first) * page_tokens, page * page_tokens)

        front = self._end_of_front(first, end, fetch_s(parts, READ_DELAY_S), compute_s) if divides else first
        rest_s = self._compute_s(first * page_tokens, end * page_tokens)
        if front == first and not saves_time(parts, READ_DELAY_S, rest_s, worth=disk.worth):
            disk.rate.was_too_slow()
            return None
        return front if disk.reader.allocate(max(kind.num_bytes for kind in self._kinds)) else None

    def shortened_front(self, request_id: str, digests: Sequence[Digest], num_computed: int, front: int) -> int:
        disk = self._disk
        if disk is None or not self.computes_fronts or request_id in self._fetches:
            return front
        if self._searched.get(request_id) == (disk.num_found, front):
            return front
        self._searched[request_id] = disk.num_found, front
        first, end = self._last_run(digests, num_computed, front or len(digests))
        if front and end < front:
            return front  # the pages right before it have not arrived
        earlier = self._front(disk, digests[:end], first, num_computed) if first < end else None
        if earlier is None:
            return front
        self._fetch(request_id, digests, num_computed, earlier, end, end * self._pages.page_tokens)
        return earlier if request_id in self._fetches else front

    def _last_run(self, digests: Sequence[Digest], first: int, end: int) -> tuple[int, int]:
        """The last of the pages from `first` to `end` that need not be computed, with those before them that follow
        each other. Both are equal if there are none."""
        self._looks_on_disk = True

        def is_there(page: int) -> bool:
            return all(
                self._id_of(part, digests[page]) is not None or self._has_page(part, digests[page])
                for part in range(len(self._pages.groups))
            )

        while end > first and not is_there(end - 1):
            end -= 1
        start = end
        while start > first and is_there(start - 1):
            start -= 1
        self._looks_on_disk = False
        return start, end

    def _fetch(
        self, request_id: str, digests: Sequence[Digest], cached: int, front: int, count: int, start: int
    ) -> bool:
        """Starts to copy those of the pages from `front` to `count` that the device lacks (`cached` are usable there),
        and the state after them. Returns False, with nothing changed, if that is not worthwhile or not possible now.
        Returns True if the request waits: until they have arrived or, if a rank's device has no memory for the copy,
        until the next step."""
        self._fetched.add(request_id)
        self._agreed = None
        first = max(cached, front)
        if count - first < self._min_pages:
            return False
        num_new = sum(self._id_of(0, digest) is None for digest in digests[first:count])
        checkpoints = self._checkpoints
        lacks_state = checkpoints is not None and not checkpoints.knows(digests[count - 1])
        if lacks_state and checkpoints is not None and not checkpoints.can_lend:
            return False
        incoming = self._pages.expect(digests, count, start, front)
        if incoming is None:
            return False
        slot = checkpoints.lend() if lacks_state and checkpoints is not None else None
        wanted = [(each.group, each.new_pages, each.new_digests) for each in incoming]
        if slot is not None:
            wanted.append((len(self._blocks) - 1, [slot], [digests[count - 1]]))
        copies: list[RunningCopy] = []
        places: list[BlockPlace] = []
        on_disk: list[StoredBlock] = []
        num_bytes, started_s = 0, self._host.rate.clock()
        for part, ids, names in wanted:
            if ids and self._blocks[part].num_bytes:
                kind, here = self._kinds[part], list(zip(ids, names, strict=True))
                if self._disk is not None:
                    here = [(id, name) for id, name in here if self._store.has(kind, name)]
                    held = {name for _, name in here}
                    for id, name in zip(ids, names, strict=True):
                        if name not in held:
                            on_disk.append(StoredBlock(*self._disk.find(kind, name), self._blocks[part], id))
                if not here:
                    continue
                found = self._store.borrow(kind, [name for _, name in here])
                places += found
                try:
                    copies.append(self._copies.to_device(self._blocks[part], [id for id, _ in here], found))
                except torch.OutOfMemoryError:
                    self._give_up(copies, places, incoming, slot)
                    return True
                num_bytes += len(here) * self._blocks[part].num_bytes
        named = [NamedBlocks(part, tuple(ids), tuple(names)) for part, ids, names in wanted if ids]
        if self._others is not None and not self._others.fetch(named):
            self._give_up(copies, places, incoming, slot)
            return True
        state = None if slot is None else (slot, digests[count - 1])
        num_tokens = num_new * self._pages.page_tokens
        from_disk = None
        if on_disk and self._disk is not None and self._from_disk is not None:
            from_disk = DiskFetch(self._disk.reader, self._from_disk, on_disk, self._disk.num_cached_bytes)
        fetch = Fetch(tuple(copies), incoming, state, tuple(places), num_tokens, num_bytes, started_s, from_disk)
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
        """Ends a fetch that failed for lack of device memory or blocks; the prompt is computed."""
        for copy in copies:
            copy.wait()  # its pages are free for others next
        self._store.end(places)
        self._pages.gave_up(incoming)
        if slot is not None and self._checkpoints is not None:
            self._checkpoints.take_back(slot, None)

    def collect(self, *, wait: bool = False, wait_s: float = 0.0) -> None:
        """Offers the blocks whose copies are complete. `wait`: wait for all copies. `wait_s`: wait for some from
        disk."""
        for request_id, fetch in list(self._fetches.items()):
            if wait or wait_s:
                fetch.wait(None if wait else wait_s)
            if not fetch.is_complete:
                continue
            del self._fetches[request_id]
            if fetch.from_disk is not None and self._disk is not None:
                for file in fetch.from_disk.unreadable:
                    self._disk.drop(file)
                if fetch.from_disk.has_failed:
                    slot = None if fetch.state is None else fetch.state[0]
                    self._give_up(fetch.copies, fetch.places, fetch.pages, slot)
                    self._fetched.discard(request_id)  # it may use what is left
                    continue
                self._disk.measure(fetch.from_disk, fetch.started_s)
            elif self._copies.are_concurrent:
                self._host.rate.measured(fetch.num_bytes, fetch.started_s)
            self._store.end(fetch.places)
            self._pages.arrived(fetch.pages)
            if fetch.state is not None and self._checkpoints is not None:
                self._checkpoints.take_back(*fetch.state)
            self.num_fetched_tokens += fetch.num_tokens
        self._end_outgoing(wait=wait)
        self._host.save()

    def _end_outgoing(self, *, wait: bool) -> None:
        if self._outgoing is None:
            return
        if wait:
            self._outgoing.copy.wait()
        if self._outgoing.copy.is_complete:
            self._outgoing.publish(self._host)
            self._outgoing = None

    def await_fetches(self) -> None:
        """Waits for copies when nothing else is left to do. Waits for a disk, which may take seconds, in intervals, so
        that requests are received in between."""
        if self._fetches:
            reads = any(fetch.from_disk is not None for fetch in self._fetches.values())
            self.collect(wait=not reads, wait_s=TURN_S)

    # -- to the host -----------------------------------------------------------------------------------------------

    def before_launch(self, plan: StepPlan) -> None:
        """Makes the step begin after copies to host memory of blocks that it may overwrite."""
        self._remaining = None
        if self._outgoing is not None:
            self._outgoing.precede(plan)

    def after_launch(self) -> None:
        """Copies the pages to be reused next, if few are blank."""
        if not self._copies_ahead or self._outgoing is not None or not self._store.budget_bytes:
            return
        self._steps_to_scan -= 1
        if self._steps_to_scan > 0:
            return
        self._steps_to_scan = self._steps_between_scans
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
        """Copies some of the blocks that later prompts are most likely to use; false if none is left."""
        return self._copies_ahead and self._copy_some()

    def copy_these(self, digests: Sequence[Digest], until_s: float) -> bool:
        """Copies blocks to host memory, even while the model has work. False if the deadline on the monotonic clock
        passed before all that fit were copied."""
        self._end_outgoing(wait=True)
        self._host.slabs.may_wait = True
        for part, blocks in enumerate(self._blocks):
            if not blocks.num_bytes:
                continue
            kind, count = self._kinds[part], self._num_at_once(part)
            lacking = [
                (id, digest)
                for digest in digests
                if (id := self._id_of(part, digest)) is not None and not self._store.has(kind, digest)
            ]
            while lacking and (num_sent := self._send(part, lacking[:count])):
                self._end_outgoing(wait=True)
                del lacking[:num_sent]
                if time.monotonic() >= until_s:
                    return False
        return True

    def _id_of(self, part: int, digest: Digest) -> int | None:
        """The block on the device."""
        if part < len(self._pages.groups):
            return self._pages.groups[part].pool.page_of(digest)
        return None if self._checkpoints is None else self._checkpoints.slot_of(digest)

    def save(self, *, to_disk: bool = False) -> bool:
        """Copies the most recently used blocks, as many as the budget permits, and waits: the device memory is freed
        next. `to_disk`: only blocks that are not on disk yet, and that fit there. Returns whether any was copied and is
        being written to disk."""
        self.collect(wait=True)
        self._remaining = self._latest_of_parts(to_disk=to_disk)
        has_copied = False
        while self._copy_some():
            has_copied = True
        self.collect(wait=True)
        self._host.save(everything=True)
        if self._others is not None:
            self._others.settle()
        return has_copied and self._disk is not None

    def _copy_some(self) -> bool:
        self.collect(wait=True)
        self._host.slabs.may_wait = True
        if not self._store.budget_bytes:
            return False
        if self._remaining is None:
            self._remaining = self._latest_of_parts()
        while self._remaining:
            part, blocks = self._remaining[-1]
            count = self._num_at_once(part)
            if not (num_sent := self._send(part, blocks[:count])):
                self._remaining.pop()
                continue
            del blocks[:num_sent]
            self.collect(wait=True)
            return True
        return False

    def _latest_of_parts(self, *, to_disk: bool = False) -> list[tuple[int, list[tuple[int, Digest]]]]:
        return [(part, self._latest(part, to_disk=to_disk)) for part in range(len(self._blocks)) if self._is_used(part)]

    def _latest(self, part: int, *, to_disk: bool) -> list[tuple[int, Digest]]:
        """The most recently used blocks that fit in the part's share of the budget and are not in host memory, least
        recently used first. `to_disk`: see `save`."""
        kind, latest = self._kinds[part], list(self._known(part))
        share = len(self._blocks) * max(1, self._blocks[part].num_bytes)
        most = self._store.budget_bytes // share
        if to_disk and self._disk is not None:
            fit = int(self._disk.budget_bytes * DISK_SHARE) // share
            latest = latest[-fit:] if fit else []
            latest = [each for each in latest if not self._disk.has(kind, each[1])]
        return [each for each in latest[-most:] if not self._store.has(kind, each[1])] if most else []

    def _is_used(self, part: int) -> bool:
        """Whether this rank, or possibly another, has layers with blocks of this part."""
        return self._blocks[part].num_bytes > 0 or self._others is not None

    def _send(self, part: int, blocks: Sequence[tuple[int, Digest]]) -> int:
        """Starts to copy blocks to host memory. Returns their number: the first ones, as many as it has room for."""
        if not blocks:
            return 0
        if not self._blocks[part].num_bytes:
            self._keep_elsewhere(part, blocks)
            return len(blocks)
        group, kind = part if part < len(self._pages.groups) else None, self._kinds[part]
        outgoing = OutgoingBlocks.start(self._copies, self._blocks[part], kind, group, blocks, self._store)
        if outgoing is None:
            return 0
        self._outgoing = outgoing
        self._keep_elsewhere(part, blocks[: len(outgoing.places)])
        return len(outgoing.places)

    def _keep_elsewhere(self, part: int, blocks: Sequence[tuple[int, Digest]]) -> None:
        if self._others is not None:
            named = NamedBlocks(part, tuple(id for id, _ in blocks), tuple(digest for _, digest in blocks))
            self._others.keep(named, may_wait=self._host.slabs.may_wait)

    def forget(self, digests: Iterable[Digest]) -> None:
        """The contents of these blocks cannot be trusted."""
        digests = list(digests)
        if self._others is not None:
            self._others.forget(digests)  # they may have the blocks that were dropped here
        if self._disk is not None:
            for kind in self._kinds:
                self._disk.distrust(kind, digests)
        if not len(self._store) and self._outgoing is None:
            return
        self.collect(wait=True)
        for kind in self._kinds:
            self._store.forget(kind, digests)

    def _known(self, part: int) -> Iterator[tuple[int, Digest]]:
        """The unused known blocks on the device, least recently used first."""
        if part < len(self._pages.groups):
            return self._pages.groups[part].pool.idle()
        return iter(()) if self._checkpoints is None else self._checkpoints.known()

    def _fill_of(self, part: int) -> tuple[int, int]:
        """The number of blank blocks, and of all."""
        if part < len(self._pages.groups):
            pool = self._pages.groups[part].pool
            return pool.num_free - pool.num_idle, pool.num_pages
        assert self._checkpoints is not None
        return self._checkpoints.num_blank, self._checkpoints.num_slots

    def _num_at_once(self, part: int) -> int:
        return max(1, COPY_BYTES // max(1, self._blocks[part].num_bytes))
