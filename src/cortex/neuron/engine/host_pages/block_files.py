"""Files of blocks: format, writing, reading and removal. Stateless; any thread.

A file holds blocks of one kind, one after another, after a header with their digests and checksums. It gets its name
when it is complete, and never changes. Nothing is synced: after a power loss the checksums decide. A file that does not
match its header is removed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import secrets
import stat
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cortex.neuron.engine.host_pages.store import SLAB_BYTES, BlockKind, ChosenBlocks
from cortex.neuron.engine.kv.pages import Digest

FORMAT = 1
"""Version of headers, digests and block contents."""
SUFFIX, UNFINISHED = ".kv", ".tmp"
STALE_S = 600.0
"""An unfinished file without a write for this long has lost its writer."""
_MAGIC = b"cortexkv"
_FIXED = struct.Struct("<8sII")
"""Magic, bytes of the rest of the header, its checksum."""
_ALIGNMENT = 4096
"""Of blocks in files and memory, for reads that bypass the page cache."""
_MAX_HEADER_BYTES = 64 << 20
_MAX_BLOCK_BYTES = 1 << 30
_WRITERS = 2
"""One core checks and writes about as fast as a link of 10 Gbit/s delivers."""
_SENT_BYTES = 32 << 20
"""Most bytes of received blocks in one file. A complete file is used while the next ones arrive."""
_MODEL = re.compile("[0-9a-f]{32}")
_libc = ctypes.CDLL(None)


class DamagedFile(Exception):
    """The contents of a file are not what was written."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockFile:
    path: Path
    kind: BlockKind
    model_id: str
    digests: tuple[Digest, ...]
    checksums: tuple[int, ...]
    first_byte: int
    """Offset of the first block."""

    @property
    def num_bytes(self) -> int:
        return self.first_byte + len(self.digests) * self.kind.num_bytes


def model_folder(root: Path, model: bytes) -> Path:
    return root / model.hex()


def is_private(folder: Path) -> bool:
    """Whether only this user can access the folder; others could have put files there. Raises OSError."""
    facts = folder.lstat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def make_private(folder: Path) -> None:
    """Raises OSError, also for a folder of another user. The folders above it stay as they are."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        folder.chmod(0o700, follow_symlinks=False)
        if not is_private(folder):
            raise PermissionError(errno.EPERM, f"{folder.name} belongs to another user")


# -- writing -------------------------------------------------------------------------------------------------------


def write_file(
    root: Path,
    kind: BlockKind,
    model_id: str,
    digests: Sequence[Digest],
    pieces: Sequence[memoryview],
    checksums: Sequence[int] = (),
) -> BlockFile:
    """Writes blocks, whose bytes are `pieces`, in order. `checksums`: of the blocks, if known. Raises OSError, and
    leaves nothing behind."""
    size = kind.num_bytes
    if not checksums:
        starts = ((piece, start) for piece in pieces for start in range(0, piece.nbytes, size))
        checksums = [zlib.crc32(piece[start : start + size]) for piece, start in starts]
    header = _header(kind, model_id, digests, checksums)
    folder = model_folder(root, kind.model)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_private(folder)
    name = f"{kind.part}-{secrets.token_hex(8)}"
    path, unfinished = folder / (name + SUFFIX), folder / (name + UNFINISHED)
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for piece in (memoryview(header), *pieces):
                _write(fd, piece)
        finally:
            os.close(fd)
        unfinished.rename(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    return BlockFile(path, kind, model_id, tuple(digests), tuple(checksums), len(header))


def _write(fd: int, piece: memoryview) -> None:
    while piece.nbytes:
        piece = piece[os.write(fd, piece[: 1 << 30]) :]


def _header(kind: BlockKind, model_id: str, digests: Sequence[Digest], checksums: Sequence[int]) -> bytes:
    facts = {
        "format": FORMAT,
        "model": kind.model.hex(),
        "model_id": model_id,
        "part": kind.part,
        "num_bytes": kind.num_bytes,
        "digests": [digest.hex() for digest in digests],
        "checksums": list(checksums),
    }
    rest = json.dumps(facts).encode()
    header = _FIXED.pack(_MAGIC, len(rest), zlib.crc32(rest)) + rest
    return header + bytes(-len(header) % _ALIGNMENT)


# -- reading -------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> BlockFile:
    """Raises DamagedFile or OSError."""
    with open(path, "rb", buffering=0) as file:
        fixed = file.read(_FIXED.size)
        if len(fixed) < _FIXED.size:
            raise DamagedFile(path)
        magic, length, checksum = _FIXED.unpack(fixed)
        if magic != _MAGIC or length > _MAX_HEADER_BYTES:
            raise DamagedFile(path)
        rest = file.read(length)
        if len(rest) < length or zlib.crc32(rest) != checksum:
            raise DamagedFile(path)
        found = BlockFile(path, *_facts(rest), -(-(_FIXED.size + length) // _ALIGNMENT) * _ALIGNMENT)
        if found.kind.model.hex() != path.parent.name or os.fstat(file.fileno()).st_size != found.num_bytes:
            raise DamagedFile(path)
        return found


def _facts(rest: bytes | bytearray) -> tuple[BlockKind, str, tuple[Digest, ...], tuple[int, ...]]:
    """What the rest of a header says: kind, model id, digests and checksums. Raises DamagedFile."""
    try:
        facts = json.loads(rest)
        kind = BlockKind(bytes.fromhex(facts["model"]), int(facts["part"]), int(facts["num_bytes"]))
        digests, checksums = tuple(map(bytes.fromhex, facts["digests"])), tuple(map(int, facts["checksums"]))
        is_known = facts["format"] == FORMAT and 0 < kind.num_bytes <= _MAX_BLOCK_BYTES
        model_id = str(facts["model_id"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedFile("a header") from error
    if not is_known or len(digests) != len(checksums):
        raise DamagedFile("another format")
    return kind, model_id, digests, checksums


def scan(root: Path, model: bytes, known: Mapping[Path, BlockFile]) -> dict[Path, BlockFile]:
    """The files of a model. Removes other files from its folder, except those being written. `known`: an earlier
    result, whose files are not read again."""
    found: dict[Path, BlockFile] = {}
    folder = model_folder(root, model)
    try:
        if not is_private(folder):
            return found
    except OSError:
        return found
    for entry in _entries(folder):
        path = Path(entry.path)
        try:
            if path.suffix == SUFFIX:
                found[path] = known.get(path) or read_header(path)
            elif path.suffix != UNFINISHED or time.time() - entry.stat().st_mtime > STALE_S:
                raise DamagedFile(path)
        except DamagedFile:
            remove(path)
        except OSError:
            continue  # it cannot be read, or another worker has removed it
    return found


def read_new(root: Path, model: bytes, name: str) -> BlockFile | None:
    """A file of a model that was just written; None if it is gone or damaged, or others could have written it."""
    folder = model_folder(root, model)
    try:
        return read_header(folder / name) if is_private(folder) else None
    except (DamagedFile, OSError):
        return None


def read_blocks(file: BlockFile, first: int, view: memoryview) -> bool:
    """Reads consecutive blocks from number `first` on: from the page cache where it has them, otherwise around it.
    False: the file cannot be read or is damaged, and was removed."""
    size = file.kind.num_bytes
    try:
        if _read(file, file.first_byte + first * size, view):
            blocks = [view[start : start + size] for start in range(0, view.nbytes, size)]
            if all(zlib.crc32(block) == file.checksums[first + index] for index, block in enumerate(blocks)):
                with suppress(OSError):  # a read-only disk
                    os.utime(file.path)  # it is the latest used one
                return True
    except OSError:
        return False
    remove(file.path)
    return False


def is_cached(file: BlockFile) -> bool:
    """Guesses whether a file is in the page cache, from its middle."""
    try:
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _num_cached_bytes(fd, file.num_bytes // 2, 1) > 0
        finally:
            os.close(fd)
    except OSError:
        return False


def _read(file: BlockFile, offset: int, view: memoryview) -> bool:
    done = 0
    fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        cached = 0
        with suppress(OSError):  # a file system without mappings, or no memory for one
            cached = _num_cached_bytes(fd, offset, view.nbytes)
        while done < cached and (count := os.preadv(fd, [view[done:cached]], offset + done)):
            done += count
        done = done // _ALIGNMENT * _ALIGNMENT if done < view.nbytes else done
        if done < view.nbytes and file.kind.num_bytes % _ALIGNMENT == 0:
            with suppress(OSError):  # a file system without direct reads, or memory that is not aligned
                direct = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                try:
                    while done < view.nbytes and (count := os.preadv(direct, [view[done:]], offset + done)):
                        done += count
                finally:
                    os.close(direct)
        while done < view.nbytes and (count := os.preadv(fd, [view[done:]], offset + done)):
            done += count
    finally:
        os.close(fd)
    return done == view.nbytes


def _num_cached_bytes(fd: int, offset: int, num_bytes: int) -> int:
    """Bytes from `offset` on that are in the page cache, up to the first that is not. Raises OSError. A read with
    RWF_NOWAIT would tell, too, but starts to read ahead what it does not find."""
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    end = min(offset + num_bytes, os.fstat(fd).st_size)
    if end <= offset:
        return 0
    pages = (ctypes.c_ubyte * -(-(end - start) // mmap.PAGESIZE))()
    try:
        # Private and writable, because only writable memory has an address here.
        mapping = mmap.mmap(fd, end - start, flags=mmap.MAP_PRIVATE, offset=start)
    except ValueError:
        return 0  # it has shrunk
    with mapping:
        first = ctypes.c_char.from_buffer(mapping)
        has_failed = _libc.mincore(ctypes.byref(first), ctypes.c_size_t(end - start), pages)
        del first  # else the mapping cannot be closed
    if has_failed:
        return 0
    missing = bytes(pages).find(0)
    return end - offset if missing < 0 else max(0, start + missing * mmap.PAGESIZE - offset)


# -- between nodes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a file with blocks, or of a header."""

    data: bytes = b""
    path: Path | None = None
    first_byte: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The available blocks of a prefix as one stream: each file's header, then its blocks."""

    num_pages: int = 0
    """Number of leading pages that any group of layers has."""
    pieces: tuple[Piece, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def select(files: Iterable[BlockFile], digests: Sequence[Digest], *, last_first: bool = False) -> Selection:
    """The blocks of the prefix whose pages have these digests, those of its first pages first, or of its last with
    `last_first`."""
    wanted = {digest: page for page, digest in enumerate(digests)}
    known, pieces = set[tuple[int, Digest]](), list[Piece]()
    groups: list[tuple[int, BlockFile, list[int]]] = []
    for file in files:
        part, most = file.kind.part, max(1, _SENT_BYTES // file.kind.num_bytes)
        chosen = [number for number, each in enumerate(file.digests) if each in wanted and (part, each) not in known]
        known |= {(part, file.digests[number]) for number in chosen}
        for first in range(0, len(chosen), most):
            numbers = chosen[first : first + most]
            groups.append((min(wanted[file.digests[number]] for number in numbers), file, numbers))
    for _, file, numbers in sorted(groups, key=lambda each: each[0], reverse=last_first):
        size = file.kind.num_bytes
        names = [file.digests[number] for number in numbers], [file.checksums[number] for number in numbers]
        header = _header(file.kind, file.model_id, *names)
        pieces.append(Piece(header, num_bytes=len(header)))
        for number in numbers:
            last = pieces[-1]
            start = file.first_byte + number * size
            if last.path == file.path and last.first_byte + last.num_bytes == start:
                pieces[-1] = Piece(path=file.path, first_byte=last.first_byte, num_bytes=last.num_bytes + size)
            else:
                pieces.append(Piece(path=file.path, first_byte=start, num_bytes=size))
    of_pages = {digest for _, digest in known}
    num_pages = next((index for index, digest in enumerate(digests) if digest not in of_pages), len(digests))
    return Selection(num_pages, tuple(pieces))


def receive(
    read_into: Callable[[memoryview], int],
    root: Path,
    model: bytes,
    model_id: str,
    wanted: Collection[Digest],
    written: Callable[[Path], None] = lambda _: None,
) -> int:
    """Writes a stream of `Selection` as files; returns the bytes. `read_into`: as of a file. `wanted`: the requested
    blocks. `written`: called on a thread for each file. Raises DamagedFile for other or altered blocks, and what
    `read_into` raises; complete files stay."""
    total = 0
    with ThreadPoolExecutor(_WRITERS, "kv-file") as writers:
        writing: deque[Future[bytearray]] = deque()
        while fixed := _exactly(read_into, _FIXED.size, may_end=True):
            magic, length, checksum = _FIXED.unpack(fixed)
            if magic != _MAGIC or length > _MAX_HEADER_BYTES:
                raise DamagedFile("no blocks")
            rest = _exactly(read_into, -(-(_FIXED.size + length) // _ALIGNMENT) * _ALIGNMENT - _FIXED.size)[:length]
            if zlib.crc32(rest) != checksum:
                raise DamagedFile("a header")
            kind, _, digests, checksums = _facts(rest)
            if kind.model != model or not all(digest in wanted for digest in digests):
                raise DamagedFile("blocks that were not asked for")
            if len(digests) > max(1, SLAB_BYTES // kind.num_bytes):
                raise DamagedFile("more blocks than a file has")
            num_bytes = len(digests) * kind.num_bytes
            # Memory that was used before costs no page faults.
            buffer = writing.popleft().result() if len(writing) > _WRITERS else bytearray(num_bytes)
            if len(buffer) < num_bytes:
                buffer = bytearray(num_bytes)
            view = memoryview(buffer)[:num_bytes]
            _fill(read_into, view)
            facts = (kind, model_id, digests, checksums)
            writing.append(writers.submit(_write_checked, root, *facts, buffer, view, written))
            total += num_bytes
        for each in writing:
            each.result()
    return total


def _write_checked(
    root: Path,
    kind: BlockKind,
    model_id: str,
    digests: Sequence[Digest],
    checksums: Sequence[int],
    buffer: bytearray,
    view: memoryview,
    written: Callable[[Path], None],
) -> bytearray:
    """Writes the blocks in `view`, a part of `buffer`, which is returned. Raises DamagedFile, or OSError."""
    size = kind.num_bytes
    blocks = [view[start : start + size] for start in range(0, view.nbytes, size)]
    if any(zlib.crc32(block) != checksum for block, checksum in zip(blocks, checksums, strict=True)):
        raise DamagedFile("a block")
    written(write_file(root, kind, model_id, digests, [view], checksums).path)
    return buffer


def _exactly(read_into: Callable[[memoryview], int], num_bytes: int, *, may_end: bool = False) -> bytearray:
    found = bytearray(num_bytes)
    return found if _fill(read_into, memoryview(found), may_end=may_end) else bytearray()


def _fill(read_into: Callable[[memoryview], int], view: memoryview, *, may_end: bool = False) -> bool:
    """False: the stream has ended before."""
    done = 0
    while done < view.nbytes:
        count = read_into(view[done:])
        if not count:
            if may_end and not done:
                return False
            raise DamagedFile("the stream has ended")
        done += count
    return True


# -- removal -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredFile:
    path: Path
    num_bytes: int
    used_at_s: float


def stored(root: Path) -> list[StoredFile]:
    """All files of blocks, also unfinished ones, least recently used first. Ignores folders that are not of this
    program: `root` may hold other things."""
    found = []
    for folder in _entries(root):
        for entry in _entries(Path(folder.path)) if _MODEL.fullmatch(folder.name) else ():
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                found.append(StoredFile(Path(entry.path), facts.st_size, facts.st_mtime))
    return sorted(found, key=lambda each: each.used_at_s)


def make_room(root: Path, num_bytes: int, most_bytes: int) -> int:
    """Removes the least recently used files until `num_bytes` more fit `most_bytes`. Returns the bytes that are
    left."""
    files = stored(root)
    used_bytes = sum(file.num_bytes for file in files)
    for file in files:
        if used_bytes + num_bytes <= most_bytes:
            break
        remove(file.path)
        used_bytes -= file.num_bytes
    return used_bytes


def remove(path: Path) -> None:
    """Removes a file, unless the disk is read-only."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def purge(root: Path, chosen: ChosenBlocks, unused_for_s: float | None = None) -> tuple[int, int]:
    """Removes files that contain a chosen block and were not used for that long; returns their number and bytes. A
    running node finds them missing and computes."""
    number = num_bytes = 0
    for each in stored(root):
        if unused_for_s is not None and time.time() - each.used_at_s < unused_for_s:
            continue
        if chosen != ChosenBlocks():
            try:
                file = read_header(each.path)
                if not is_chosen(file, chosen):
                    continue
            except OSError:
                continue
            except DamagedFile:
                pass  # its owner is no longer known
        remove(each.path)
        number, num_bytes = number + 1, num_bytes + each.num_bytes
    return number, num_bytes


def is_chosen(file: BlockFile, chosen: ChosenBlocks) -> bool:
    """Whether any block of the file is chosen: a file is removed as a whole."""
    return chosen.of_model(file.model_id) and any(map(chosen.has, file.digests))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
