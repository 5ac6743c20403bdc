"""What the kernel's AMD driver writes under /sys and /proc, for machines with different cards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

GIB = 1 << 30


def card(number: int, address: str, device: str, *, minor: int, vram: int, gtt: int, **files: str) -> dict[str, str]:
    """One card; sizes in bytes, all of them free but for 256 MiB of its own memory."""
    folder = f"sys/class/drm/card{number}/device"
    facts = {
        "vendor": "0x1002",
        "device": device,
        "uevent": f"DRIVER=amdgpu\nPCI_ID=1002:{device[2:].upper()}\nPCI_SLOT_NAME={address}",
        "mem_info_vram_total": str(vram),
        "mem_info_vram_used": str(256 << 20),
        "mem_info_vis_vram_total": str(vram),
        "mem_info_gtt_total": str(gtt),
        "mem_info_gtt_used": str(32 << 20),
        "gpu_busy_percent": "7",
        "hwmon/hwmon3/name": "amdgpu",
        "hwmon/hwmon3/temp1_input": "41000",
        f"drm/renderD{minor}/dev": f"226:{minor}",
        **files,
    }
    tree = {f"{folder}/{name}": text for name, text in facts.items()}
    tree[f"sys/class/drm/card{number}-DP-1/status"] = "disconnected"  # connectors are listed next to their card
    return tree


def kfd(*minors: int) -> dict[str, str]:
    """ROCm's topology: the CPU, then the cards with these render minors."""
    nodes = "sys/class/kfd/kfd/topology/nodes"
    tree = {f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0\ndrm_render_minor 0"}
    for number, minor in enumerate(minors, 1):
        tree[f"{nodes}/{number}/properties"] = f"cpu_cores_count 0\nsimd_count 192\ndrm_render_minor {minor}"
    return tree


HOST = {"proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n"}
DISCRETE = {"mem_busy_percent": "3", "unique_id": "8a1f3c0de2b44107"}

RADEON = {
    **HOST,
    **card(1, "0000:03:00.0", "0x744c", minor=129, vram=24 * GIB, gtt=31 * GIB, **DISCRETE),
    **card(0, "0000:10:00.0", "0x164e", minor=128, vram=GIB // 2, gtt=31 * GIB),
    **kfd(129, 128),
    "sys/class/drm/version": "drm 1.1.0 20060810",
}
"""A Radeon RX 7900 XTX, and the graphics of the processor, which is card 0 but the second one of ROCm."""

INSTINCT = {
    **HOST,
    **card(2, "0000:83:00.0", "0x740f", minor=130, vram=64 * GIB, gtt=252 * GIB, product_name="AMD INSTINCT MI210")
    | {"sys/class/drm/card2/device/pcie_bw": "0 0 0", "sys/class/drm/card2/device/unique_id": "bb02"},
    **card(1, "0000:43:00.0", "0x740f", minor=129, vram=64 * GIB, gtt=252 * GIB, product_name="AMD INSTINCT MI210")
    | {"sys/class/drm/card1/device/pcie_bw": "0 0 0", "sys/class/drm/card1/device/unique_id": "aa01"},
    "sys/class/drm/card0/device/vendor": "0x1a03",  # the server's own screen
    **kfd(129, 130),
    "sys/module/amdgpu/version": "6.12.12",
}
"""Two Instinct MI210 with the driver of ROCm."""

STRIX_HALO = {**HOST, **card(0, "0000:c1:00.0", "0x1586", minor=128, vram=GIB // 2, gtt=60 * GIB), **kfd(128)}
"""A processor whose graphics use the host's memory; nothing else."""

NO_ROCM = {**HOST, **card(1, "0000:03:00.0", "0x73bf", minor=128, vram=16 * GIB, gtt=16 * GIB, mem_busy_percent="0")}
"""A Radeon RX 6800 XT under a kernel without ROCm's part: servers use Vulkan."""


def write(root: Path, tree: Mapping[str, str]) -> Path:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root
