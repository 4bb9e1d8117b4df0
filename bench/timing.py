"""Fair timing of several implementations of one call.

The candidates take turns: every round times each of them once, so that all of them meet the same
clocks and the same heat (a Hopper GPU at full load throttles within milliseconds). The figure is
the median over rounds. Device time comes from CUDA events round a batch of calls queued behind a
short sleep of the device, so that host time does not enter it; host time is measured apart, on an
idle device.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.device import Meter

FLUSH_BYTES = 256 << 20  # four times the L2 of an H200
SLEEP_CYCLES = 1_000_000  # about half a millisecond: the host queues a batch meanwhile
SLEEP_PER_CALL = 150_000  # and 75 microseconds for each call


@dataclass(frozen=True)
class Candidate:
    """One implementation: ``call()`` queues the work once, inside ``context()``."""

    name: str
    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass
class Figures:
    """What was measured of one candidate, a call; None where it could not be read."""

    rounds_ms: list[float] = field(default_factory=list)
    clocks_mhz: list[int] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)
    host_us: float | None = None
    peak_bytes: int | None = None
    joules: float | None = None
    energy_power_w: float | None = None

    @property
    def device_ms(self) -> float:
        """Median over rounds."""
        return statistics.median(self.rounds_ms)

    def row(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "device_ms": self.device_ms,
            "device_ms_min": min(self.rounds_ms),
            "device_ms_max": max(self.rounds_ms),
            "rounds": len(self.rounds_ms),
            "sm_clock_mhz": statistics.median(self.clocks_mhz) if self.clocks_mhz else None,
            "power_w": statistics.median(self.powers_w) if self.powers_w else None,
            "host_us": self.host_us,
            "peak_bytes": self.peak_bytes,
            "joules": self.joules,
            "energy_power_w": self.energy_power_w,
        }


@dataclass(frozen=True)
class Effort:
    """``rounds`` turns of ``batch_ms`` each; ``energy_s`` seconds a candidate (0: no energy).

    ``host_calls``: at most so many, for the time that a call holds the host. ``rest_s``: seconds
    that the device idles before every turn, so that power limits no turn: without rest, turns of
    one kernel were seen 14 % apart.
    """

    rounds: int = 5
    batch_ms: float = 15.0
    energy_s: float = 0.0
    cold: bool = False
    warmup: int = 3
    host_calls: int = 25
    rest_s: float = 0.0


class Stopwatch:
    """Measures candidates on the current device."""

    def __init__(self, effort: Effort, meter: Meter) -> None:
        self.effort = effort
        self.meter = meter
        self._flush: torch.Tensor | None = None

    def measure(self, candidates: list[Candidate]) -> dict[str, Figures]:
        """Figures by name. Every candidate must have run before: an error here is the caller's."""
        figures = {c.name: Figures() for c in candidates}
        counts = {c.name: self._count(c) for c in candidates}
        for c in candidates:
            figures[c.name].host_us = host_time(c, self.effort.host_calls)
            figures[c.name].peak_bytes = peak_memory(c)
        for turn in range(self.effort.rounds):
            # Turning the order round cancels what a candidate does to the one after it.
            for c in candidates if turn % 2 == 0 else candidates[::-1]:
                self._round(c, counts[c.name], figures[c.name])
        if self.effort.energy_s > 0:
            for c in candidates:
                self._energy(c, figures[c.name])
        return figures

    def _count(self, candidate: Candidate) -> int:
        with candidate.context():
            for _ in range(self.effort.warmup):
                candidate.call()
            return max(2, min(200, round(self.effort.batch_ms / _elapsed(candidate.call, 2))))

    def _round(self, candidate: Candidate, count: int, figures: Figures) -> None:
        time.sleep(self.effort.rest_s)
        with candidate.context():
            if self.effort.cold:
                milliseconds = self._cold(candidate, min(count, 20), figures)
            else:
                milliseconds = _elapsed(candidate.call, count, lambda: self._sample(figures))
        figures.rounds_ms.append(milliseconds)

    def _cold(self, candidate: Candidate, count: int, figures: Figures) -> float:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        pairs = []
        torch.cuda._sleep(SLEEP_CYCLES + SLEEP_PER_CALL * count)
        for _ in range(count):
            self._flush.zero_()
            begin, end = _event(), _event()
            begin.record()
            candidate.call()
            end.record()
            pairs.append((begin, end))
        self._sample(figures)
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in pairs)

    def _sample(self, figures: Figures) -> None:
        clock, power = self.meter.sm_clock(), self.meter.power()
        if clock is not None:
            figures.clocks_mhz.append(clock)
        if power is not None:
            figures.powers_w.append(power)

    def _energy(self, candidate: Candidate, figures: Figures) -> None:
        """Joules a call over ``energy_s`` seconds of it alone (its counter ticks in 0.1 s)."""
        batch = max(1, round(50.0 / figures.device_ms))
        calls = 0
        with candidate.context():
            torch.cuda.synchronize()
            begin, clock = self.meter.energy(), time.perf_counter()
            while time.perf_counter() - clock < self.effort.energy_s:
                for _ in range(batch):
                    candidate.call()
                torch.cuda.synchronize()
                calls += batch
            seconds, end = time.perf_counter() - clock, self.meter.energy()
        if begin is not None and end is not None:
            figures.joules = (end - begin) / calls
            figures.energy_power_w = (end - begin) / seconds


def host_time(candidate: Candidate, calls: int) -> float:
    """Median microseconds that a call holds the host, the device idle before it.

    Of ``calls`` calls, or of at least 5 where those are done after a tenth of a second.
    """
    times: list[float] = []
    with candidate.context():
        end = time.perf_counter() + 0.1
        while len(times) < calls and (len(times) < 5 or time.perf_counter() < end):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            candidate.call()
            times.append((time.perf_counter_ns() - begin) / 1e3)
        torch.cuda.synchronize()
    return statistics.median(times)


def peak_memory(candidate: Candidate) -> int:
    """Bytes that one call adds to what is allocated already, output included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with candidate.context():
        result = candidate.call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _elapsed(call: Callable[[], Any], count: int, meanwhile: Callable[[], Any] = int) -> float:
    """Milliseconds a call of ``count`` in a row; ``meanwhile`` runs once all are queued."""
    begin, end = _event(), _event()
    torch.cuda._sleep(SLEEP_CYCLES + SLEEP_PER_CALL * count)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    meanwhile()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count
