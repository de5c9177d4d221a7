"""A stand-in for ``pynvml`` where there is no driver: the calls that a worker makes, over GPUs that a test makes up.

It is no proof that a real driver answers so. ``python -m poolgrid.workers.gpus`` reads a real one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    """What every call of the library raises."""

    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class FakeGpu:
    """One GPU; ``fails`` names functions and what they raise."""

    uuid: str
    fails: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    whole: FakeGpu | None = None
    """Of a part."""


FIELDS: dict[int, tuple[int, str, int]] = {
    82: (1, "uiVal", 71),
    91: (1, "uiVal", 3),
    138: (3, "ullVal", 2),
    139: (3, "ullVal", 5),
    38: (1, "uiVal", 7),
}
"""By field: the type's number, the union's member, the value."""


class FakeNvml:
    """The module."""

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_CLOCK_MEM = 2
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_FI_DEV_MEMORY_TEMP = 82
    NVML_FI_DEV_NVLINK_LINK_COUNT = 91
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 38
    NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = 52
    NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 59

    def __init__(self, *gpus: FakeGpu, parts: tuple[FakeGpu, ...] = (), broken: int = 0) -> None:
        self.gpus = gpus
        self.parts = parts
        self.broken = broken
        self.opened = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError(self.broken)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"575.1"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeGpu:
        for part in self.parts:
            if part.uuid == uuid:
                return part
        raise NVMLError(6)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: FakeGpu) -> FakeGpu:
        assert part.whole is not None
        return part.whole

    def nvmlDeviceGetUUID(self, gpu: FakeGpu) -> str:
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: FakeGpu) -> str:
        return "NVIDIA H200"

    def _ask(self, gpu: FakeGpu, what: str) -> None:
        gpu.asked.append(what)
        if what in gpu.fails:
            raise NVMLError(gpu.fails[what])

    def nvmlDeviceGetUtilizationRates(self, gpu: FakeGpu) -> Any:
        self._ask(gpu, "utilization")
        return SimpleNamespace(gpu=87, memory=41)

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        self._ask(gpu, "memory")
        return SimpleNamespace(used=100 if gpu.whole is None else 10, total=150)

    def nvmlDeviceGetPowerUsage(self, gpu: FakeGpu) -> int:
        self._ask(gpu, "power")
        return 612_500

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: FakeGpu) -> int:
        self._ask(gpu, "power limit")
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: FakeGpu) -> int:
        self._ask(gpu, "energy")
        return 12_000

    def nvmlDeviceGetTemperature(self, gpu: FakeGpu, sensor: int) -> int:
        self._ask(gpu, "temperature")
        return 64

    def nvmlDeviceGetClockInfo(self, gpu: FakeGpu, clock: int) -> int:
        self._ask(gpu, "clock")
        return {1: 1980, 2: 3201}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: FakeGpu) -> int:
        self._ask(gpu, "reasons")
        return 0x4 | 0x40

    def nvmlDeviceGetTotalEccErrors(self, gpu: FakeGpu, kind: int, counter: int) -> int:
        self._ask(gpu, "ecc")
        return [3, 1][kind]

    def nvmlDeviceGetRemappedRows(self, gpu: FakeGpu) -> tuple[int, int, int, int]:
        self._ask(gpu, "rows")
        return 0, 2, 1, 0

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        self._ask(gpu, f"link {link}")
        return int(link != 1)

    def nvmlDeviceGetFieldValues(self, gpu: FakeGpu, asked: list[tuple[int, int]]) -> list[Any]:
        [(number, _)] = asked
        self._ask(gpu, f"field {number}")
        if number not in FIELDS:
            return [SimpleNamespace(nvmlReturn=self.NVML_ERROR_NOT_SUPPORTED)]
        kind, member, value = FIELDS[number]
        return [SimpleNamespace(nvmlReturn=0, valueType=kind, value=SimpleNamespace(**{member: value}))]
