import pynvml
import pytest

from cortex.neuron.engine.memory.host import read_host_memory
from cortex.neuron.worker.discovery import Inventory, discover, divided, read_devices, visible_devices
from cortex.wire.node.protocol import Device


def gpu(index: int) -> Device:
    return Device(index=index, kind="cuda", name="a card", total_bytes=1 << 30, uuid=f"GPU-{index:04d}-abcd")


GPUS = (gpu(0), gpu(1), gpu(2))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2, 0", [2, 0]),
        ("GPU-0001", [1]),
        ("GPU-000", []),
        ("0,9,1", [0]),
    ],
)
def test_cuda_visible_devices_selects_and_orders_gpus(setting: str | None, expected: list[int]) -> None:
    assert [device.index for device in visible_devices(GPUS, setting)] == expected


def fail_init(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def init() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", init)


def test_cpu_is_the_only_device_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_init(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    inventory = discover({})
    (device,) = inventory.devices
    assert device.kind == "cpu"
    assert inventory.driver_problem is None
    assert 0 < inventory.readings[0].free_bytes <= device.total_bytes


def test_reports_a_driver_library_mismatch_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_init(monkeypatch, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    inventory = discover({})
    assert [device.kind for device in inventory.devices] == ["cpu"]
    assert "reboot" in (inventory.driver_problem or "")


def test_reports_an_unknown_nvml_error_as_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_init(monkeypatch, pynvml.NVML_ERROR_UNKNOWN)
    assert "nvidia-smi" in (discover({}).driver_problem or "")


class FakeMemory:
    total, free = 24 << 30, 20 << 30


def fake_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name, value in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: "580.10",
        "nvmlSystemGetCudaDriverVersion": lambda: 13010,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: FakeMemory,
        "nvmlDeviceGetUtilizationRates": unsupported,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (8, 6),
        "nvmlDeviceGetName": lambda handle: b"NVIDIA GeForce RTX 3060",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
    }.items():
        monkeypatch.setattr(pynvml, name, value)


def test_gpu_with_missing_sensors_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_one_gpu(monkeypatch)
    inventory = discover({})
    (device,) = inventory.devices
    assert (device.kind, device.name, device.compute_capability) == ("cuda", "NVIDIA GeForce RTX 3060", "8.6")
    assert (inventory.driver, inventory.cuda_version) == ("580.10", "13.1")
    reading = inventory.readings[0]
    assert (reading.free_bytes, reading.utilisation, reading.temperature_c) == (20 << 30, None, 61.0)


def test_falls_back_to_the_cpu_and_says_why_when_all_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_one_gpu(monkeypatch)
    inventory = discover({"CUDA_VISIBLE_DEVICES": ""})
    assert inventory.devices[0].kind == "cpu"
    assert "CUDA_VISIBLE_DEVICES" in (inventory.driver_problem or "")


def test_no_readings_when_the_driver_stops_responding(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_init(monkeypatch, pynvml.NVML_ERROR_GPU_IS_LOST)
    assert read_devices((gpu(0),)) == {}


def test_skips_a_failed_gpu_with_a_reason_and_keeps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_one_gpu(monkeypatch)

    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    inventory = discover({})
    assert [device.index for device in inventory.devices] == [0, 2]
    assert "GPU 1 is not used" in (inventory.driver_problem or "")
    assert set(read_devices(GPUS)) == {0, 2}


def test_gpu_without_own_memory_reports_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_one_gpu(monkeypatch)

    def unsupported(handle: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", unsupported)
    (device,) = discover({}).devices
    assert device.kind == "cuda"
    assert device.total_bytes == read_host_memory().total_bytes


def test_divides_the_cpu_into_devices_that_share_the_hosts_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_init(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    whole = discover({})
    inventory = divided(whole, 3)
    assert [(device.index, device.kind) for device in inventory.devices] == [(0, "cpu"), (1, "cpu"), (2, "cpu")]
    assert len({device.name for device in inventory.devices}) == 3
    assert {device.total_bytes for device in inventory.devices} == {whole.devices[0].total_bytes // 3}
    assert inventory.num_host_shares == 3
    for readings in (inventory.readings, read_devices(inventory.devices)):
        assert sorted(readings) == [0, 1, 2]
        assert sum(reading.free_bytes for reading in readings.values()) <= whole.devices[0].total_bytes


def test_does_not_divide_gpus() -> None:
    inventory = Inventory(GPUS)
    assert divided(inventory, 4) is inventory
    assert inventory.num_host_shares == 1
