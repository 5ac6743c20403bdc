"""AMD cards, as the kernel's driver reports them under /sys and /proc, without ROCm or torch.

The engine does not run on them; servers of harnesses do. Every function blocks for the time of a few small reads, and
takes the root of the files for tests.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_AMD = "0x1002"
_CARD = re.compile(r"card\d+")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ON_DEVICE = ("vram", "gtt")


@dataclass(frozen=True, slots=True)
class Card:
    """One card, or the graphics part of a processor (APU)."""

    index: int
    """Its number in ROCm, integrated graphics included; without ROCm's kernel part, its place on the bus."""
    name: str
    is_integrated: bool
    """Whether its memory is the host's: a part set aside by the firmware (VRAM), and more that the driver may take
    (GTT)."""
    unique_id: str | None
    folder: Path

    @property
    def total_bytes(self) -> int:
        shared = _number(self.folder / "mem_info_gtt_total") if self.is_integrated else 0
        return _number(self.folder / "mem_info_vram_total") + shared

    @property
    def used_bytes(self) -> int:
        shared = _number(self.folder / "mem_info_gtt_used") if self.is_integrated else 0
        return _number(self.folder / "mem_info_vram_used") + shared

    @property
    def set_aside_bytes(self) -> int:
        """The free part of the memory that no host program can use."""
        return max(0, _number(self.folder / "mem_info_vram_total") - _number(self.folder / "mem_info_vram_used"))

    @property
    def utilisation(self) -> float | None:
        """0 to 1."""
        busy = _text(self.folder / "gpu_busy_percent")
        return int(busy) / 100 if busy.isdigit() else None

    @property
    def temperature_c(self) -> float | None:
        for file in sorted(self.folder.glob("hwmon/hwmon*/temp1_input")):
            if (millidegrees := _text(file)).lstrip("-").isdigit():
                return int(millidegrees) / 1000
        return None


def cards(root: Path = Path("/")) -> tuple[Card, ...]:
    """The cards that a server can use, in the order of `index`; integrated graphics only if there is no other."""
    numbers = _rocm_numbers(root)
    found = []
    for place, folder in enumerate(_folders(root)):
        if not (folder / "mem_info_vram_total").exists():  # it has another driver
            continue
        # The driver leaves both out for APUs. Vega 10 has only the second one, newer cards may have only the first.
        is_integrated = not any((folder / file).exists() for file in ("mem_busy_percent", "pcie_bw"))
        index = place
        if numbers:
            number = next((numbers[minor] for minor in _render_minors(folder) if minor in numbers), None)
            if number is None:  # ROCm does not know it; servers with Vulkan would, but have no common number for it
                continue
            index = number
        unique_id = _text(folder / "unique_id") or None
        found.append(Card(index, _name(folder), is_integrated, unique_id, folder))
    discrete = [card for card in found if not card.is_integrated]
    return tuple(sorted(discrete or found, key=lambda card: card.index))


def driver_version(root: Path = Path("/")) -> str | None:
    """The version of a driver that was installed apart from the kernel."""
    return _text(root / "sys/module/amdgpu/version") or None


def memory_of(processes: Iterable[int], root: Path = Path("/")) -> int:
    """The memory of these processes on AMD cards. ROCm and the graphics driver count it separately, and may count the
    same buffers: the larger number holds for each process."""
    return sum(max(_compute_bytes(root, process), _graphics_bytes(root, process)) for process in processes)


def _folders(root: Path) -> list[Path]:
    """The device folder of each AMD card, in the order of their addresses on the bus."""
    drm = root / "sys/class/drm"
    entries = [card / "device" for card in drm.glob("card*") if _CARD.fullmatch(card.name)]
    devices = [folder for folder in entries if _text(folder / "vendor").lower() == _AMD]
    return sorted(devices, key=lambda folder: (_address(folder), folder.parent.name))


def _address(folder: Path) -> str:
    return _fields(folder / "uevent", "=").get("PCI_SLOT_NAME", "")


def _render_minors(folder: Path) -> Iterator[int]:
    for node in (folder / "drm").glob("renderD*"):
        if (minor := node.name.removeprefix("renderD")).isdigit():
            yield int(minor)


def _rocm_numbers(root: Path) -> dict[int, int]:
    """Render minor → the number of the card among those that ROCm's kernel part (KFD) lists."""
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*")
    minors = []
    for node in sorted((node for node in nodes if node.name.isdigit()), key=lambda node: int(node.name)):
        properties = _fields(node / "properties")
        if properties.get("simd_count", "0") != "0":  # the others are CPUs
            minors.append(int(properties.get("drm_render_minor", "0")))
    return {minor: number for number, minor in enumerate(minors)}


def _name(folder: Path) -> str:
    product = _text(folder / "product_name")  # only some cards have one in their memory
    device = _text(folder / "device").removeprefix("0x")
    return f"AMD {product.removeprefix('AMD ')}" if product else f"AMD GPU {device}"


def _compute_bytes(root: Path, process: int) -> int:
    """Memory that ROCm's kernel part counts."""
    return sum(map(_number, (root / f"sys/class/kfd/kfd/proc/{process}").glob("vram_*")))


def _graphics_bytes(root: Path, process: int) -> int:
    """Memory reported by the open files of the process. One client may have several."""
    clients: dict[tuple[str, str], int] = {}
    folder = root / f"proc/{process}/fdinfo"
    with contextlib.suppress(OSError):
        for file in folder.iterdir():
            fields = _fields(file)
            if fields.get("drm-driver") == "amdgpu":
                client = fields.get("drm-pdev", ""), fields.get("drm-client-id", file.name)
                clients[client] = sum(_drm_bytes(fields, region) for region in _ON_DEVICE)
    return sum(clients.values())


def _drm_bytes(fields: Mapping[str, str], region: str) -> int:
    """Newer kernels write `drm-resident-…`, older ones `drm-memory-…`."""
    for name in (f"drm-resident-{region}", f"drm-memory-{region}"):
        amount, _, unit = fields.get(name, "").partition(" ")
        if amount.isdigit():
            return int(amount) * _UNITS.get(unit.strip(), 1)
    return 0


def _fields(path: Path, separator: str | None = None) -> dict[str, str]:
    """A file of lines `name value`, with or without a colon, or with `separator`."""
    fields = {}
    for line in _text(path).splitlines():
        name, *value = line.split(separator, 1)
        fields[name.rstrip(":")] = value[0].strip() if value else ""
    return fields


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    """Empty for a file that is absent or currently unreadable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
