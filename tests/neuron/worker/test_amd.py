"""AMD cards from trees as the kernel's driver writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cortex.neuron.worker import amd
from cortex.neuron.worker.discovery import DeviceReading, Inventory, with_amd_cards
from cortex.wire.node.protocol import Device

from .amd_trees import GIB, HOST, INSTINCT, NO_ROCM, RADEON, STRIX_HALO, write

CPU = Inventory((Device(index=0, kind="cpu", name="a CPU", total_bytes=GIB),), readings={0: DeviceReading(GIB, GIB)})
NVIDIA = Inventory((Device(index=0, kind="cuda", name="a card", total_bytes=GIB),))


def found(root: Path, **env: str) -> list[tuple[int, str, int, str | None]]:
    devices = with_amd_cards(CPU, env, root).devices
    return [(each.index, each.name, each.total_bytes // (1 << 20), each.uuid) for each in devices if each.kind != "cpu"]


@pytest.mark.parametrize(
    ("tree", "devices"),
    [
        (RADEON, [(0, "AMD GPU 744c", 24 << 10, "GPU-8a1f3c0de2b44107")]),
        (
            INSTINCT,
            [(0, "AMD INSTINCT MI210", 64 << 10, "GPU-aa01"), (1, "AMD INSTINCT MI210", 64 << 10, "GPU-bb02")],
        ),
        (STRIX_HALO, [(0, "AMD GPU 1586", (60 << 10) + 512, None)]),
        (NO_ROCM, [(0, "AMD GPU 73bf", 16 << 10, None)]),
        (HOST, []),
    ],
)
def test_finds_the_cards_of_a_machine(tmp_path: Path, tree: Mapping[str, str], devices: list[Any]) -> None:
    assert found(write(tmp_path, tree)) == devices


@pytest.mark.parametrize(
    ("env", "indices"),
    [
        ({"ROCR_VISIBLE_DEVICES": "1"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"ROCR_VISIBLE_DEVICES": "GPU-bb"}, [1]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_hidden_cards_are_not_used(tmp_path: Path, env: dict[str, str], indices: list[int]) -> None:
    assert [index for index, *_ in found(write(tmp_path, INSTINCT), **env)] == indices


def test_cards_of_nvidia_come_first(tmp_path: Path) -> None:
    assert with_amd_cards(NVIDIA, {}, write(tmp_path, RADEON)) is NVIDIA


def test_reads_memory_load_and_temperature(tmp_path: Path) -> None:
    inventory = with_amd_cards(CPU, {}, write(tmp_path, INSTINCT))
    assert inventory.readings[1] == DeviceReading(64 * GIB, 64 * GIB - (256 << 20), 0.07, 41.0)
    assert inventory.driver == "6.12.12"


def test_free_memory_of_integrated_graphics_is_bounded_by_that_of_the_host(tmp_path: Path) -> None:
    reading = with_amd_cards(CPU, {}, write(tmp_path, STRIX_HALO)).readings[0]
    assert reading.free_bytes == 32 * GIB + (256 << 20)  # of the host, and what the firmware has set aside


def test_a_file_that_the_driver_cannot_fill_reads_as_unknown(tmp_path: Path) -> None:
    root = write(tmp_path, NO_ROCM | {"sys/class/drm/card1/device/gpu_busy_percent": ""})
    (root / "sys/class/drm/card1/device/hwmon/hwmon3/temp1_input").unlink()
    reading = with_amd_cards(CPU, {}, root).readings[0]
    assert (reading.utilisation, reading.temperature_c) == (None, None)


NEW_KERNEL = "pos:\t0\ndrm-driver:\tamdgpu\ndrm-client-id:\t{}\ndrm-pdev:\t0000:03:00.0\ndrm-resident-vram:\t{} KiB\n"
OLD_KERNEL = "drm-driver:\tamdgpu\ndrm-client-id:\t9\ndrm-memory-vram:\t512 KiB\ndrm-memory-gtt:\t512 KiB\n"


@pytest.mark.parametrize(
    ("tree", "num_bytes"),
    [
        ({}, 0),
        ({"proc/7/fdinfo/3": NEW_KERNEL.format(5, 2048), "proc/7/fdinfo/4": "pos:\t0\nflags:\t02"}, 2 << 20),
        ({"proc/7/fdinfo/3": NEW_KERNEL.format(5, 2048), "proc/7/fdinfo/4": NEW_KERNEL.format(5, 2048)}, 2 << 20),
        ({"proc/7/fdinfo/3": NEW_KERNEL.format(5, 2048), "proc/7/fdinfo/4": NEW_KERNEL.format(6, 1024)}, 3 << 20),
        ({"proc/7/fdinfo/3": OLD_KERNEL, "proc/8/fdinfo/3": OLD_KERNEL}, 2 << 20),
        ({"proc/7/fdinfo/3": NEW_KERNEL.format(5, 64), "sys/class/kfd/kfd/proc/7/vram_4711": "3145728"}, 3 << 20),
        ({"proc/7/fdinfo/3": "drm-driver:\ti915\ndrm-resident-vram:\t64 KiB"}, 0),
    ],
)
def test_memory_of_processes_is_what_the_driver_counts(tmp_path: Path, tree: dict[str, str], num_bytes: int) -> None:
    assert amd.memory_of([7, 8], write(tmp_path, tree)) == num_bytes
