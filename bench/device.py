"""Facts of the device that a result needs: name, clocks, power, energy (NVML, nvidia-smi)."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import torch

_QUERY = {
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "driver": "driver_version",
}


class Meter:
    """Reads clocks, power and the energy counter; a reading it cannot take is None."""

    def __init__(self, index: int = 0) -> None:
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            bus = torch.cuda.get_device_properties(index)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(bus))
            self._nvml = pynvml
        except Exception as reason:
            self.absent = f"NVML: {reason}"

    def sm_clock(self) -> int | None:
        """The SM clock now, MHz."""
        return self._read(lambda n, h: n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM))

    def power(self) -> float | None:
        """Power now, watts (averaged by the driver over about a second)."""
        milliwatts = self._read(lambda n, h: n.nvmlDeviceGetPowerUsage(h))
        return None if milliwatts is None else milliwatts / 1e3

    def energy(self) -> float | None:
        """The energy counter, joules since the driver was loaded."""
        millijoules = self._read(lambda n, h: n.nvmlDeviceGetTotalEnergyConsumption(h))
        return None if millijoules is None else millijoules / 1e3

    def _read(self, call: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return call(self._nvml, self._handle)
        except self._nvml.NVMLError:
            return None


def _uuid(properties: Any) -> str:
    uuid = str(properties.uuid)
    return uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"


def facts() -> dict[str, Any]:
    """Device, software and commit, for the head of a result file; RuntimeError without a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark runs kernels, and torch sees no CUDA device here")
    return {
        "device": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
    } | smi()


def smi() -> dict[str, str]:
    """What nvidia-smi says now of clocks, power, heat and driver; empty where it is missing."""
    command = [
        "nvidia-smi",
        f"--query-gpu={','.join(_QUERY.values())}",
        "--format=csv,noheader,nounits",
    ]
    try:
        text = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return dict(zip(_QUERY, values, strict=False))


def commit() -> str:
    """The commit under test: FA_CUTE_COMMIT (for a tree without history), else git's."""
    if "FA_CUTE_COMMIT" in os.environ:
        return os.environ["FA_CUTE_COMMIT"]
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
