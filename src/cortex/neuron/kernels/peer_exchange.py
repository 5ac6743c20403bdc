"""One-shot sums and gathers over peer memory: each rank writes its part where the others can read it, and reads theirs.

One kernel on each rank, without a host in between, so that it can be part of a CUDA graph. Each program owns a chunk of
the message. It copies the chunk to this rank's buffer, raises its flag in every buffer, waits until all flags are up
here, and reads the chunk of every rank. Flags count up and are never lowered. The buffer has two halves, used in turn:
a rank that writes to one has seen all others begin the turn after the one in which they last read it. A sum is made in
float32 and in the order of the ranks, so that all ranks have the same bits.

Ranks only write to the memory of others and read from their own while they wait: not all links have atomic operations.
A wait that takes longer than its limit is an error of the device: a kernel that never ends keeps its process from
ending promptly, even if the process is killed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from cortex.neuron.kernels.jit import INTERPRETED, constant, jit, tl, triton
from cortex.neuron.kernels.peer_buffer import CHUNK_BYTES, HEADER_BYTES, MAX_BYTES, MAX_RANKS, NUM_FLAGS

SUM_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
WAIT_LIMIT_S: Final = 60
"""The limit for one message. Ranks wait for each other on the host after a load, and followers wake before the leader.
What is left is a rank that compiles kernels between two messages, or whose worker loads a piece of another model."""

_FLAGS_PER_PROGRAM = constant(MAX_RANKS)
_TURNS = constant(4 * NUM_FLAGS)
_HALVES = constant(HEADER_BYTES)
_HALF_BYTES = constant(MAX_BYTES)
_CHUNK_BYTES = constant(CHUNK_BYTES)
_INTERPRETED = constant(INTERPRETED)


def peer_sum(part: Tensor, buffers: Tensor, rank: int, *, wait_limit_s: int = WAIT_LIMIT_S) -> Tensor:
    """The sum of all ranks' parts, in the memory of `part`, which is contiguous.

    buffers: [ranks] int64, the address of every rank's buffer in this process; a new buffer is all zeros.
    """
    _exchange(part, part, buffers, rank, wait_limit_s, gathers=False)
    return part


def peer_gather(part: Tensor, buffers: Tensor, rank: int, *, wait_limit_s: int = WAIT_LIMIT_S) -> Tensor:
    """All ranks' parts side by side: [rows, n] → [rows, ranks · n]"""
    gathered = part.new_empty(len(part), len(buffers) * part.shape[1])
    _exchange(part, gathered, buffers, rank, wait_limit_s, gathers=True)
    return gathered


def peer_sum_reference(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def _exchange(part: Tensor, out: Tensor, buffers: Tensor, rank: int, wait_limit_s: int, *, gathers: bool) -> None:
    block = CHUNK_BYTES // part.element_size()
    _exchange_kernel[(triton.cdiv(part.numel(), block),)](
        part,
        out,
        buffers,
        rank,
        part.numel(),
        part.shape[-1],
        wait_limit_s,
        RANKS=len(buffers),
        LANES=triton.next_power_of_2(len(buffers)),
        BLOCK=block,
        GATHERS=gathers,
        num_warps=8,
    )


@jit(do_not_specialize=["rank", "columns", "wait_limit_s"])
def _exchange_kernel(
    part,
    out,
    buffers,
    rank,
    size,
    columns,
    wait_limit_s,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    GATHERS: tl.constexpr,
):
    program = tl.program_id(0)
    own = tl.load(buffers + rank)
    turn_at = (own + _TURNS + 4 * program).to(tl.pointer_type(tl.int32))
    turn = tl.load(turn_at) + 1
    chunk = _HALVES + (turn & 1) * _HALF_BYTES + program * _CHUNK_BYTES
    index = tl.arange(0, BLOCK)
    element = program * BLOCK + index
    inside = element < size
    number = part.dtype.element_ty
    # The chunk of a buffer is always there as a whole, so only `part` and `out` need the mask.
    tl.store(_aligned(own + chunk, number) + index, tl.load(part + element, mask=inside, other=0))
    tl.debug_barrier()  # the whole chunk is written before its flag
    lane = tl.arange(0, LANES)
    sender = tl.where(lane < RANKS, lane, rank)  # spare lanes repeat what this rank sends to itself
    flags = 4 * _FLAGS_PER_PROGRAM * program
    raise_flag(tl.load(buffers + sender) + flags + 4 * rank, turn + 0 * lane)
    await_flag(own + flags + 4 * sender, turn + 0 * lane, wait_limit_s + 0 * lane)
    tl.debug_barrier()
    tl.store(turn_at, turn)
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(RANKS):
        theirs = tl.load(_aligned(tl.load(buffers + peer) + chunk, number) + index)
        if GATHERS:
            place = element // columns * (RANKS * columns) + peer * columns + element % columns
            tl.store(out + place, theirs, mask=inside)
        else:
            total += theirs.to(tl.float32)
    if not GATHERS:
        tl.store(out + element, total.to(number), mask=inside)


@jit
def _aligned(address, number):
    return tl.multiple_of(address.to(tl.pointer_type(number)), 16)


@jit
def raise_flag(address, turn):
    """Everything that this program wrote before is visible to a rank that sees the flag. One warp has all lanes."""
    if _INTERPRETED:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int32)), turn, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .u32 thread;
            .reg .pred is_first;
            mov.u32 thread, %tid.x;
            setp.lt.u32 is_first, thread, 32;
            @is_first st.release.sys.global.u32 [$1], $2;
            mov.u32 $0, $2;
            }
            """,
            "=r,l,r",
            [address, turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def _await_on_device(address, turn, limit_s):
    """The first warp waits, the others for it at the next barrier. Compares differences: the count wraps around.

    The clock is read only after many looks at the flag, first to know when the wait began.
    """
    tl.inline_asm_elementwise(
        """
        {
        .reg .u32 ahead, looks;
        .reg .u64 now, end;
        .reg .pred is_other, is_up, is_not_yet, has_no_end;
        mov.u32 ahead, %tid.x;
        setp.ge.u32 is_other, ahead, 32;
        @is_other bra done;
        mov.u64 end, 0;
        again:
        mov.u32 looks, 1024;
        look:
        ld.acquire.sys.global.u32 ahead, [$1];
        sub.u32 ahead, ahead, $2;
        setp.ge.s32 is_up, ahead, 0;
        @is_up bra done;
        sub.u32 looks, looks, 1;
        setp.ne.u32 is_not_yet, looks, 0;
        @is_not_yet bra look;
        mov.u64 now, %globaltimer;
        setp.eq.u64 has_no_end, end, 0;
        @has_no_end mad.wide.u32 end, $3, 1000000000, now;
        setp.lt.u64 is_not_yet, now, end;
        @is_not_yet bra again;
        trap;
        done:
        mov.u32 $0, ahead;
        }
        """,
        "=r,l,r,r",
        [address, turn, limit_s],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def _await_interpreted(address, turn, limit_s):
    flag = address.to(tl.pointer_type(tl.int32))
    end_s = time.monotonic() + tl.max(limit_s, 0)
    while tl.min(tl.atomic_add(flag, 0 * turn, sem="acquire", scope="sys") - turn, 0) < 0:
        if time.monotonic() > end_s:
            raise TimeoutError("another rank did not send its part in time")


await_flag = _await_interpreted if INTERPRETED else _await_on_device
