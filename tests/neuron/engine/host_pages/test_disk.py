"""Blocks on disk outlast the program, and are never used unless they are what was written."""

from __future__ import annotations

import errno
import math
import mmap
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WAIT_S

from cortex.neuron.engine import engine as engines
from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.block_files import BlockFile, DamagedFile
from cortex.neuron.engine.host_pages.disk import DiskPages
from cortex.neuron.engine.host_pages.disk_reads import BUFFERS, DiskReader
from cortex.neuron.engine.host_pages.rates import WORTH, CopyRate, end_of_front, saves_time
from cortex.neuron.engine.host_pages.store import BlockKind, ChosenBlocks
from cortex.neuron.engine.host_pages.tier import DISK_SHARE
from cortex.neuron.engine.kv.pages import ROOT, page_digests
from cortex.neuron.engine.request import EngineRequest, SamplingParams

from ...engine_runs import run, tokens_of
from ..test_sleep import DENSE, HYBRID
from .engines import CPU, PROMPT, EngineMaker, new_host, respond
from .late_copies import LateOutward
from .test_tier import FAMILIES, ROOMY

TENANT = b"of one tenant..."


def saved(
    make_engine: EngineMaker, folder: Path, config: dict[str, Any] = DENSE, tenant: bytes = b"", **options: Any
) -> list[int]:
    """Leaves the pages of a prompt on disk; returns the response to it."""
    host = new_host(folder=folder)
    engine = make_engine(config, host, **options)
    tokens, _ = respond(engine, tenant=tenant)
    engine.save_pages()
    host.settle()
    return tokens


def restarted(
    make_engine: EngineMaker, folder: Path, config: dict[str, Any] = DENSE, **options: Any
) -> tuple[list[int], int]:
    return respond(make_engine(config, new_host(folder=folder), **options))


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("family", FAMILIES)
def test_conversation_survives_a_restart_and_continues_with_the_same_tokens(
    make_engine: EngineMaker, family: str, tmp_path: Path
) -> None:
    config = FAMILIES[family]
    plain = make_engine(config, None)
    expected = respond(plain)[0]
    in_pages = respond(plain)[1] // 32 * 32
    assert saved(make_engine, tmp_path, config) == expected
    engine = make_engine(config, new_host(folder=tmp_path))
    assert respond(engine) == (expected, in_pages)
    assert engine.stats().fetched_tokens == in_pages
    longer = (*PROMPT, *expected, 9, 8, 7)
    assert respond(engine, longer)[0] == respond(plain, longer)[0]


def test_fp8_pages_survive_a_restart_and_are_not_taken_for_others(make_engine: EngineMaker, tmp_path: Path) -> None:
    expected = saved(make_engine, tmp_path, kv_dtype="fp8")
    assert restarted(make_engine, tmp_path, kv_dtype="fp8") == (expected, 160)
    assert restarted(make_engine, tmp_path)[1] == 0
    assert restarted(make_engine, tmp_path, seed=1)[1] == 0


def test_only_their_owner_can_read_the_files(make_engine: EngineMaker, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    saved(make_engine, folder)
    for path in (folder, *folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


def test_tenants_do_not_share_what_is_on_disk(make_engine: EngineMaker, tmp_path: Path) -> None:
    saved(make_engine, tmp_path, tenant=TENANT)
    assert restarted(make_engine, tmp_path)[1] == 0
    assert respond(make_engine(DENSE, new_host(folder=tmp_path)), tenant=TENANT)[1] == 160


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def cut(path: Path, offset: int) -> None:
    path.write_bytes(path.read_bytes()[:offset])


@pytest.mark.parametrize(
    ("damage", "offset"), [(flip, 3), (flip, 40), (flip, -5), (flip, -9000), (cut, -1), (cut, 5), (cut, 0), (cut, 9)]
)
def test_altered_or_truncated_file_is_removed_and_its_pages_are_computed(
    make_engine: EngineMaker, tmp_path: Path, damage: Any, offset: int
) -> None:
    expected = saved(make_engine, tmp_path)
    (path,) = files(tmp_path)
    damage(path, offset)
    assert restarted(make_engine, tmp_path) == (expected, 0)
    assert files(tmp_path) == []
    assert saved(make_engine, tmp_path) == expected
    assert restarted(make_engine, tmp_path) == (expected, 160), "they were written again"


def test_damaged_state_of_a_hybrid_is_found(make_engine: EngineMaker, tmp_path: Path) -> None:
    expected = saved(make_engine, tmp_path, HYBRID)
    for path in files(tmp_path):
        if block_files.read_header(path).kind.part == 1:
            flip(path, -3)
    assert restarted(make_engine, tmp_path, HYBRID)[0] == expected


def test_foreign_and_half_written_files_are_removed(make_engine: EngineMaker, tmp_path: Path) -> None:
    expected = saved(make_engine, tmp_path)
    (path,) = files(tmp_path)
    others = [path.with_name(name) for name in ("0-foreign.kv", "notes.txt", "0-old.tmp", "0-new.tmp")]
    for other in others:
        other.write_bytes(path.read_bytes()[:100])
    os.utime(others[2], (0, 0))
    copied = tmp_path / ("0" * 32) / "0-copied.kv"
    copied.parent.mkdir()
    copied.write_bytes(path.read_bytes())
    with pytest.raises(DamagedFile):
        block_files.read_header(copied)
    assert restarted(make_engine, tmp_path) == (expected, 160)
    assert files(path.parent) == sorted([path, others[3]]), "one may be being written by another worker"


def test_file_that_is_removed_while_the_node_runs_is_computed(make_engine: EngineMaker, tmp_path: Path) -> None:
    expected = saved(make_engine, tmp_path)
    engine = make_engine(DENSE, new_host(folder=tmp_path))
    assert block_files.purge(tmp_path, ChosenBlocks(), 0)[0] == 1
    assert respond(engine) == (expected, 0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_disk_that_takes_nothing_costs_nothing_else(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Full, read-only or broken: responses are the same, nothing unfinished stays, and what is there is read."""
    expected = saved(make_engine, tmp_path)
    before = files(tmp_path)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    other = tuple(reversed(PROMPT))
    with monkeypatch.context() as patched:
        patched.setattr(block_files, "_write", fail)
        if code == errno.EROFS:
            patched.setattr(os, "utime", fail)
            patched.setattr(Path, "unlink", fail)
        host = new_host(folder=tmp_path)
        engine = make_engine(DENSE, host)
        assert respond(engine) == (expected, 160)
        respond(engine, other)
        engine.save_pages()
        host.settle()
        host.store.check_integrity()
        assert respond(engine) == (expected, 169), "the device has them still"
        if code != errno.EROFS:
            assert not [path for path in files(tmp_path) if path.suffix != ".kv"]
    if code == errno.EIO:
        assert files(tmp_path) == before
        assert restarted(make_engine, tmp_path) == (expected, 160)


def test_disk_that_takes_nothing_is_not_tried_again_each_time_another_node_asks(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def fail(*arguments: object) -> None:
        tried.append(arguments)
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(block_files, "_write", fail)
    host = new_host(folder=tmp_path)
    engine = make_engine(DENSE, host)
    respond(engine)
    engine.save_pages()
    host.settle()
    assert len(tried) == 1
    model, digests = bytes.fromhex(engine.info.kv_name), page_digests(ROOT, PROMPT, engine.info.page_tokens)
    for _ in range(3):
        assert host.save_these(model, digests), "what can be on disk is there"
        host.settle()
    assert len(tried) == 1


def test_least_recently_used_files_leave_first(tmp_path: Path) -> None:
    host = new_host(folder=tmp_path, disk_bytes=3 * 8192 + 100)
    assert host.disk is not None
    kind = BlockKind(bytes(16), 0, 4096)
    host.disk.open_model(kind.model, "m")
    paths = []
    for number in range(4):
        block = memoryview(bytes([number]) * 4096)
        file = host.disk._write(kind, "m", [bytes([number]) * 24], [block])  # noqa: SLF001
        assert file is not None
        os.utime(file.path, (number, number) if number else None)  # the first one is used again
        paths.append(file.path)
    assert [path.exists() for path in paths] == [True, False, True, True]


def test_blocks_that_leave_host_memory_are_on_disk(make_engine: EngineMaker, tmp_path: Path) -> None:
    host = new_host(200_000, folder=tmp_path, verifies=False)
    engine = make_engine(DENSE, host)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(170)) for seed in range(6)]
    expected = []
    for prompt in prompts:
        expected.append(respond(engine, prompt)[0])
        engine.save_pages()
        host.settle()
    again = make_engine(DENSE, new_host(0, folder=tmp_path))
    assert [respond(again, prompt) for prompt in prompts] == [(tokens, 160) for tokens in expected]


@pytest.mark.parametrize("num_on_disk", [6, 10])
def test_blocks_that_host_memory_cannot_hold_are_on_disk_when_the_process_ends(
    make_engine: EngineMaker, tmp_path: Path, num_on_disk: int
) -> None:
    host = new_host(folder=tmp_path)
    engine = make_engine(ROOMY, host)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(170)) for seed in range(10)]
    expected = [respond(engine, prompt)[0] for prompt in prompts]
    assert engine.tier is not None
    (kind,) = engine.tier._kinds  # noqa: SLF001
    host.store.limit(16 * kind.num_bytes)
    assert host.disk is not None
    host.disk.budget_bytes = int(num_on_disk * 5 * kind.num_bytes / DISK_SHARE) + 1
    end_s = time.monotonic() + WAIT_S
    while engine.save_pages(to_disk=True) and host.settle(end_s):
        pass
    again = make_engine(ROOMY, new_host(0, folder=tmp_path))
    found = [respond(again, prompt) for prompt in reversed(prompts)]
    assert [tokens for tokens, _ in found] == expected[::-1]
    assert [cached for _, cached in found[:num_on_disk]] == [160] * num_on_disk


def test_disk_that_takes_nothing_does_not_delay_the_end_of_the_process(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = new_host(folder=tmp_path)
    engine = make_engine(DENSE, host)
    respond(engine)
    tried: list[object] = []

    def fail(*arguments: object) -> None:
        tried.append(arguments)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(block_files, "_write", fail)
    assert engine.save_pages(to_disk=True)
    assert not host.settle()
    assert len(tried) <= 2


def test_purge_removes_by_model_tenant_and_age(tmp_path: Path) -> None:
    def write(model_id: str, tenant: bytes) -> BlockFile:
        kind = BlockKind(model_id.encode().ljust(16), 0, 8)
        digests = page_digests(tenant, (1, 2), 2)
        return block_files.write_file(tmp_path, kind, model_id, digests, [memoryview(bytes(8))])

    first, second, third = write("a", ROOT), write("a", TENANT), write("b", TENANT)
    assert block_files.purge(tmp_path, ChosenBlocks("c")) == (0, 0)
    assert block_files.purge(tmp_path, ChosenBlocks(), 60) == (0, 0)
    assert block_files.purge(tmp_path, ChosenBlocks("a", (TENANT,))) == (1, second.num_bytes)
    assert files(tmp_path) == sorted([first.path, third.path])
    os.utime(third.path, (0, 0))
    assert block_files.purge(tmp_path, ChosenBlocks(), 60)[0] == 1
    assert files(tmp_path) == [first.path]
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept")
    assert block_files.purge(tmp_path, ChosenBlocks())[0] == 1
    assert files(tmp_path) == [tmp_path / "notes" / "mine.txt"]


_WRITER = """
import sys
from pathlib import Path
from cortex.neuron.engine.host_pages import block_files
from cortex.neuron.engine.host_pages.store import BlockKind, ChosenBlocks
from cortex.neuron.engine.host_pages.tier import DISK_SHARE
kind = BlockKind(bytes(16), 0, 4096)
number = 0
while True:
    digests = [bytes([number % 256, each]) * 12 for each in range(64)]
    pieces = [memoryview(bytes([each + number % 7]) * 4096) for each in range(64)]
    block_files.write_file(Path(sys.argv[1]), kind, "m", digests, pieces)
    number += 1
    if number == 3:
        print("writing", flush=True)
"""


def test_files_of_a_killed_writer_are_whole_or_not_found(tmp_path: Path) -> None:
    for seed in range(3):
        with subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            time.sleep(random.Random(seed).random() / 20)
            writer.send_signal(signal.SIGKILL)
            writer.wait(WAIT_S)
        found = block_files.scan(tmp_path, bytes(16), {}).values()
        assert len(found) >= 3
        for file in found:
            assert block_files.read_blocks(file, 0, memoryview(bytearray(64 * 4096)))


@pytest.mark.parametrize(
    ("parts", "delay_s", "compute_s", "is_worth_it"),
    [
        pytest.param([(8 << 30, 3e9)], 0.002, 30.0, True, id="64k tokens of an 8B from an NVMe, on a 3090"),
        pytest.param([(8 << 30, 3e9)], 0.002, 3.0, False, id="the same on an H200"),
        pytest.param([(8 << 30, 1.25e8)], 0.01, 30.0, False, id="over 1 Gbit/s"),
        pytest.param([(8 << 30, 1.25e9)], 0.01, 30.0, True, id="over 10 Gbit/s"),
        pytest.param([(4 << 20, 3e9)], 0.01, 0.005, False, id="a page is computed before the first byte arrives"),
        pytest.param([(1000, 1e3)], 0.0, 1.1, False, id="about as fast"),
        pytest.param([(8 << 30, 1e10), (0, 1e9)], 0.002, 3.0, True, id="from the page cache of an H200's host"),
        pytest.param([(4 << 30, 1e10), (4 << 30, 1e9)], 0.002, 3.0, False, id="half of it from a slow disk"),
        pytest.param([(1000, 0.0)], 0.0, 1e9, False, id="unknown rate"),
    ],
)
def test_fetches_only_what_takes_longer_to_compute(
    parts: list[tuple[int, float]], delay_s: float, compute_s: float, is_worth_it: bool
) -> None:
    assert saves_time(parts, delay_s, compute_s) is is_worth_it


@pytest.mark.parametrize(
    ("whole_s", "page_s", "end"),
    [
        pytest.param(10.0, 0.1, 50, id="both take the same time alone"),
        pytest.param(40.0, 0.1, 80, id="a slow disk still saves a fifth of the computing"),
        pytest.param(2.5, 0.1, 20, id="a fast disk gains a fifth by the front"),
        pytest.param(0.5, 0.1, 0, id="a front that gains little is not worth its step"),
        pytest.param(200.0, 0.1, 0, id="a disk that gains little is not read"),
        pytest.param(math.inf, 0.1, 0, id="unknown rate"),
    ],
)
def test_front_is_computed_in_the_time_in_which_the_rest_is_fetched(whole_s: float, page_s: float, end: int) -> None:
    assert end_of_front(8, 108, whole_s, lambda page: (page - 8) * page_s) == 8 + end


def test_disk_that_was_slow_once_is_tried_again() -> None:
    rate = CopyRate(assumed=1000.0, bytes_per_s=10.0)
    for _ in range(100):
        rate.was_too_slow()
    assert 900 < rate.expected <= 1000
    fast = CopyRate(assumed=1000.0, bytes_per_s=2000.0)
    fast.was_too_slow()
    assert fast.expected == 2000


def test_memory_of_what_was_written_is_free_though_no_model_steps(make_engine: EngineMaker, tmp_path: Path) -> None:
    host = new_host(folder=tmp_path)
    engine = make_engine(DENSE, host)
    respond(engine)
    engine.save_pages()
    assert host.disk is not None
    assert host.disk.is_writing
    host.store.limit(0)
    assert host.store.num_bytes, "what is being written stays"
    host.disk._writes[-1].written.result(WAIT_S)  # noqa: SLF001
    host.yield_to_host()
    assert not host.store.num_bytes


def test_announced_file_is_found_without_a_look_at_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = bytes(16), b"d" * 24
    kind, pages = BlockKind(model, 0, 4096), DiskPages(tmp_path, 64 << 20, CPU)
    pages.open_model(model, "m")
    file = block_files.write_file(tmp_path, kind, "m", [name], [memoryview(bytes(4096))])
    monkeypatch.setattr(block_files, "scan", pytest.fail)
    for found in ("gone.kv", file.path.name, file.path.name):
        pages.find_file(model, found)
    pages.find_file(bytes(15) + b"1", file.path.name)
    assert (pages.has(kind, name), pages.num_blocks(kind), pages.num_found) == (True, 1, 1)
    file.path.parent.chmod(0o755)
    pages.drop(file)
    pages.find_file(model, file.path.name)
    assert not pages.has(kind, name), "others could have written it"
    pages.close()


def test_large_blocks_have_few_buffers() -> None:
    reader = DiskReader(CPU, read_bytes=1 << 10, max_buffer_bytes=1 << 16)
    allocated = list[int]()
    for block_bytes in (100, 1 << 13, 1 << 20):
        assert reader.allocate(block_bytes)
        allocated.append(len(reader.free))
    assert allocated == [BUFFERS, 8, 2]
    reader.free.pop()
    assert not reader.allocate(1 << 21), "one of them is in use"
    reader.close()


def test_pages_that_arrive_while_a_prompt_is_computed_are_not_computed(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    expected = saved(make_engine, tmp_path)
    host = new_host(folder=tmp_path)
    engine = make_engine(DENSE, host, prefill_chunk_tokens=32)
    assert host.disk is not None
    (stored,) = files(tmp_path)
    stored.rename(stored.with_suffix(".tmp"))
    host.disk.find_again(bytes.fromhex(engine.info.kv_name))
    host.disk.transfers.add("t")
    request = EngineRequest("r", PROMPT, len(expected), SamplingParams(temperature=0.0), transfer="t")
    engine.submit(request)
    outputs = engine.step()
    assert engine.tier is not None
    assert engine.tier.is_receiving(request)
    stored.with_suffix(".tmp").rename(stored)
    host.disk.find_again(bytes.fromhex(engine.info.kv_name))
    host.disk.transfers.remove("t")  # between the same two steps
    assert not engine.tier.is_receiving(request)
    while engine.has_work:
        outputs += engine.step()
    assert [token for output in outputs for token in output.tokens] == expected
    stats = engine.stats()
    assert stats.fetched_tokens == stats.cached_tokens == 4 * 32
    assert stats.prompt_tokens == 32 + len(PROMPT) % 32


def test_prompt_whose_tokens_are_scored_is_computed_once_though_its_pages_arrive(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    expected = saved(make_engine, tmp_path)
    engine = make_engine(DENSE, new_host(folder=tmp_path), prefill_chunk_tokens=32)
    greedy = SamplingParams(temperature=0.0)
    request = EngineRequest("r", PROMPT, len(expected), greedy, prompt_logprobs=0, transfer="t")
    outputs = run(engine, request)["r"]
    assert tokens_of(outputs) == expected
    assert len(outputs[0].prompt_logprobs) == len(PROMPT) - 1
    assert engine.stats().prompt_tokens == len(PROMPT)


def test_pages_from_disk_overwrite_others_only_when_these_are_in_host_memory(
    make_engine: EngineMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "BlockCopies", LateOutward)
    options: dict[str, Any] = {"context_tokens": 256}
    expected = saved(make_engine, tmp_path, **options)
    host = new_host(folder=tmp_path)
    engine, plain = make_engine(DENSE, host, **options), make_engine(DENSE, None, **options)
    prompts = [tuple((index * 5 + seed) % 83 + 3 for index in range(200)) for seed in range(8)]
    for prompt in prompts[:-1]:
        respond(engine, prompt)
    assert engine.tier is not None
    engine.tier._copies_ahead = True  # noqa: SLF001 - a CPU copies only before a sleep
    respond(engine, prompts[-1])
    assert engine.tier._outgoing is not None  # noqa: SLF001
    assert respond(engine) == (expected, 160)
    engine.save_pages()
    again = make_engine(DENSE, host, **options)
    assert [respond(again, prompt)[0] for prompt in prompts] == [respond(plain, prompt)[0] for prompt in prompts]
    assert again.stats().fetched_tokens > 0


def test_slow_disk_is_not_read(make_engine: EngineMaker, tmp_path: Path) -> None:
    expected = saved(make_engine, tmp_path)
    host = new_host(folder=tmp_path, worth=WORTH)
    assert host.disk is not None
    host.disk.rate.assumed = host.disk.cached_rate.assumed = 1.0
    assert respond(make_engine(DENSE, host)) == (expected, 0)


def test_blocks_that_are_not_in_the_page_cache_are_read_once_and_around_it(tmp_path: Path) -> None:
    kind, contents = BlockKind(bytes(16), 0, 1 << 20), os.urandom(8 << 20)
    digests = [bytes([number]) * 24 for number in range(8)]
    file = block_files.write_file(tmp_path, kind, "m", digests, [memoryview(contents)])
    assert block_files.is_cached(file)
    with file.path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if block_files.is_cached(file):
        pytest.skip("the files of this folder are in memory")
    assert not block_files.is_cached(file), "the first look has read nothing"
    with mmap.mmap(-1, len(contents)) as aligned, memoryview(aligned) as view:
        for first, count in ((0, 8), (3, 2)):
            part = view[: count * kind.num_bytes]
            assert block_files.read_blocks(file, first, part)
            assert part == contents[first * kind.num_bytes :][: len(part)]
            part.release()
    assert not block_files.is_cached(file), "nothing was read ahead"


def test_blocks_of_which_the_page_cache_has_some_are_read_from_both(tmp_path: Path) -> None:
    kind, contents = BlockKind(bytes(16), 0, 1 << 16), os.urandom(1 << 20)
    digests = [bytes([number]) * 24 for number in range(16)]
    file = block_files.write_file(tmp_path, kind, "m", digests, [memoryview(contents)])
    with file.path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), file.first_byte + 5 * kind.num_bytes, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(-1, len(contents)) as aligned, memoryview(aligned) as view:
        assert block_files.read_blocks(file, 0, view)
        assert view == contents


def test_blocks_are_read_where_files_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, contents = BlockKind(bytes(16), 0, 4096), os.urandom(4096)
    file = block_files.write_file(tmp_path, kind, "m", [bytes(24)], [memoryview(contents)])

    def unmappable(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENODEV, "no such device")

    view = memoryview(bytearray(4096))
    monkeypatch.setattr(mmap, "mmap", unmappable)
    assert block_files.read_blocks(file, 0, view)
    assert view == contents
