"""The load of the machine by other programs during a measurement."""

from __future__ import annotations

import os
import pathlib
import time

STAT = pathlib.Path("/proc/stat")


def busy_seconds() -> float | None:
    """Seconds of all cores together since boot that something ran, stolen ones included.

    ``None`` where there is no ``/proc/stat``.
    """
    try:
        fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(f) for f in fields[1:9])
    ticks: float = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor seconds of this process, all its threads, and of children that have ended."""
    return sum(os.times()[:4])


class OtherLoad:
    """Cores that others kept busy since this was made, or since the last ``read``.

    Falls back on the load average, which counts this process too, where the kernel says no more;
    ``exact`` tells.
    """

    def __init__(self) -> None:
        self.exact = busy_seconds() is not None
        self._start()

    def _start(self) -> None:
        self._busy, self._own, self._time = busy_seconds(), own_seconds(), time.perf_counter()

    def read(self) -> float:
        """Mean number of cores, and starts anew."""
        busy, own, now = busy_seconds(), own_seconds(), time.perf_counter()
        if busy is None or self._busy is None:
            found = os.getloadavg()[0]
        else:
            found = (busy - self._busy - (own - self._own)) / max(now - self._time, 1e-9)
        self._start()
        return max(found, 0.0)
