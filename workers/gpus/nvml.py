"""Reads GPUs from NVIDIA's driver through ``nvidia-ml-py``. All calls are made in the thread of whoever reads.

Rules
    1. What is not there is no error: no package, no driver, no GPU, or one that does not know a quantity.
    2. What a GPU once said it does not support is not asked for again; what failed otherwise is unknown this time.
    3. A GPU that is lost is said to be lost; the others are read all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

from poolgrid.workers.gpus.reading import PART, GpuName, GpuReading, visible

T = TypeVar("T")

CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"

THROTTLE_REASONS = {
    "idle": 0x1,
    "application_clocks": 0x2,
    "power_cap": 0x4,
    "hardware_slowdown": 0x8,
    "sync_boost": 0x10,
    "thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
    "display_clocks": 0x100,
}
"""Bits of NVML's clock event reasons."""

KIBIBYTE = 1024

ALL_LINKS = 0xFFFFFFFF
"""Scope of a field that is summed over all NVLinks."""

NVLINKS_MAX = 64
"""More links than any GPU has; a driver that says more is not believed."""

VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Of NVML's union of values, by its ``valueType``."""


class GpusUnavailable(Exception):
    """There is nothing to read, and why."""


class _GpuLost(Exception):
    """The driver has lost a GPU, or says that it needs a reset."""


class _Opened(NamedTuple):
    gpu: GpuName
    handle: Any
    whole: Any
    """The GPU itself, of a part that knows less."""


class NvmlReader:
    """The GPUs of this process."""

    def __init__(self, library: Any, environment: Mapping[str, str]) -> None:
        """Open the driver; raises ``GpusUnavailable``. ``library`` is the module ``pynvml``, or ``None``."""
        if library is None:
            raise GpusUnavailable("nvidia-ml-py is not installed (pip install 'poolgrid[gpus]')")
        self._nvml = library
        self._unsupported: set[tuple[str, str]] = set()
        """Of which GPU what is not asked for any more."""
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            raise GpusUnavailable(f"NVIDIA's driver cannot be asked: {error}") from None
        try:
            self._gpus = self._open(environment.get(CUDA_VISIBLE_DEVICES))
            self.driver = _text(library.nvmlSystemGetDriverVersion())
        except library.NVMLError as error:
            self.close()
            raise GpusUnavailable(f"NVIDIA's driver does not tell its GPUs: {error}") from None
        if not self._gpus:
            self.close()
            raise GpusUnavailable(f"this process has no GPU ({CUDA_VISIBLE_DEVICES}, or the machine)")

    def close(self) -> None:
        """Let the driver go."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError:
            pass  # it is gone already

    def read(self) -> list[GpuReading]:
        return [self._read(each) for each in self._gpus]

    def _open(self, named: str | None) -> list[_Opened]:
        nvml = self._nvml
        handles = {}
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            handles[_text(nvml.nvmlDeviceGetUUID(handle))] = (index, handle)
        opened = []
        for uuid in visible(named, list(handles)):
            if uuid.startswith(PART):
                part = nvml.nvmlDeviceGetHandleByUUID(uuid)
                whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
                index, _ = handles[_text(nvml.nvmlDeviceGetUUID(whole))]
            else:
                index, part = handles[uuid]
                whole = part
            opened.append(_Opened(GpuName(str(index), uuid, _text(nvml.nvmlDeviceGetName(whole))), part, whole))
        return opened

    def _read(self, opened: _Opened) -> GpuReading:
        try:
            return self._told(opened)
        except _GpuLost:
            return GpuReading(opened.gpu, is_lost=True)

    def _ask(self, opened: _Opened, what: str, ask: Callable[[], T]) -> T | None:
        """Return an answer, or ``None``; raises ``_GpuLost``."""
        key = (opened.gpu.uuid, what)
        if key in self._unsupported:
            return None
        nvml = self._nvml
        try:
            return ask()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise _GpuLost from None
            if error.value in (
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_INVALID_ARGUMENT,
            ):
                self._unsupported.add(key)
            return None

    def _told(self, opened: _Opened) -> GpuReading:
        nvml, whole = self._nvml, opened.whole

        def ask(function: str, *arguments: Any, of: Any = whole) -> Any:
            call = getattr(nvml, function, None)  # an older package has not all of them
            return None if call is None else self._ask(opened, f"{function}{arguments}", lambda: call(of, *arguments))

        use = ask("nvmlDeviceGetUtilizationRates")
        memory = ask("nvmlDeviceGetMemoryInfo", of=opened.handle)
        power, limit = ask("nvmlDeviceGetPowerUsage"), ask("nvmlDeviceGetEnforcedPowerLimit")
        energy = ask("nvmlDeviceGetTotalEnergyConsumption")
        reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
        remapped = ask("nvmlDeviceGetRemappedRows")
        return GpuReading(
            opened.gpu,
            utilization_ratio=None if use is None else use.gpu / 100,
            memory_utilization_ratio=None if use is None else use.memory / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=_thousandth(power),
            power_limit_watts=_thousandth(limit),
            energy_joules=_thousandth(energy),
            temperatures_celsius=_known(
                core=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                memory=self._field(opened, nvml.NVML_FI_DEV_MEMORY_TEMP),
            ),
            clocks_hertz=_known(
                sm=_megahertz(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)),
                memory=_megahertz(ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)),
            ),
            throttled=_bits(reasons),
            ecc_errors=_known(
                corrected=ask(
                    "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_VOLATILE_ECC
                ),
                uncorrected=ask(
                    "nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                ),
            ),
            row_remap={} if remapped is None else {"pending": remapped[2], "failure": remapped[3]},
            nvlinks=self._nvlinks(opened),
            nvlink_bytes=_known(
                transmit=_kibibytes(self._field(opened, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, ALL_LINKS)),
                receive=_kibibytes(self._field(opened, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, ALL_LINKS)),
            ),
            nvlink_errors=_known(
                crc=self._field(opened, nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
                replay=self._field(opened, nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
                recovery=self._field(opened, nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
            ),
        )

    def _field(self, opened: _Opened, field_id: int, scope: int = 0) -> Any:
        """Return one of NVML's further values, which it gives as a union."""
        nvml = self._nvml

        def ask() -> Any:
            [found] = nvml.nvmlDeviceGetFieldValues(opened.whole, [(field_id, scope)])
            if found.nvmlReturn != nvml.NVML_SUCCESS:
                raise nvml.NVMLError(found.nvmlReturn)
            return getattr(found.value, VALUE_MEMBERS[found.valueType])

        return self._ask(opened, f"field {field_id}", ask)

    def _nvlinks(self, opened: _Opened) -> dict[str, int]:
        nvml = self._nvml
        count = self._field(opened, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT)
        states = [
            self._ask(opened, f"link {link}", partial(nvml.nvmlDeviceGetNvLinkState, opened.whole, link))
            for link in range(min(count or 0, NVLINKS_MAX))
        ]
        known = [bool(state) for state in states if state is not None]
        return {"active": sum(known), "inactive": len(known) - sum(known)} if known else {}


def library_installed() -> Any:
    """Return the module ``pynvml``; ``None`` where it is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def _known(**values: T | None) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def _bits(reasons: int | None) -> dict[str, bool]:
    return {} if reasons is None else {name: bool(reasons & bit) for name, bit in THROTTLE_REASONS.items()}


def _thousandth(value: int | None) -> float | None:
    """Watts of milliwatts, joules of millijoules."""
    return None if value is None else value / 1000


def _megahertz(value: int | None) -> float | None:
    return None if value is None else value * 1e6


def _kibibytes(value: int | None) -> int | None:
    return None if value is None else value * KIBIBYTE


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
