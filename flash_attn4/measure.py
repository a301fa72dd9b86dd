"""Paired timing: what `python -m flash_attn4` and benchmarks/ measure with.

Functions that are compared run in turn (A B A B ...) in one process, so that a machine whose speed drifts
slows both, and the figure to quote is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of each run, in the order of the runs."""

    runs: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """The first and third quartile, seconds."""
        if len(self.runs) < 2:
            return self.runs[0], self.runs[0]
        low, _, high = statistics.quantiles(self.runs, n=4, method="inclusive")
        return low, high


def ratio(base: Timing, other: Timing) -> Timing:
    """How many times faster `other` is than `base`, run by neighbouring run: median and spread of a ratio."""
    return Timing(tuple(b / o for b, o in zip(base.runs, other.runs, strict=True)))


def paired(
    functions: dict[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    min_runs: int = 5,
    max_runs: int = 1000,
    min_run_seconds: float = 2e-3,
    synchronize: Callable[[], None] | None = None,
    timer: Callable[[Callable[[], object]], float] | None = None,
) -> dict[str, Timing]:
    """Time `functions` in turn for about `seconds` in all, after one warm-up each.

    A function that takes less than `min_run_seconds` is called in a loop that does, and counts as one run of the loop's
    mean. `synchronize` waits for a device and is called at both ends of a run. `timer` calls a function once and
    returns its seconds, by a device's own clock: then a run is one call.
    """
    wait = synchronize or (lambda: None)

    def run(function: Callable[[], object], calls: int) -> float:
        if timer:
            return timer(function)
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        wait()
        return (time.perf_counter() - start) / calls

    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = 1 if timer else max(1, round(min_run_seconds / max(run(function, 1), 1e-9)))
    runs: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    for i in range(max_runs):
        if i >= min_runs and time.perf_counter() > end:
            break
        # Every other round backwards: neither is always the first after the other's cache contents.
        names = list(functions) if i % 2 == 0 else list(functions)[::-1]
        for name in names:
            runs[name].append(run(functions[name], calls[name]))
    return {name: Timing(tuple(times)) for name, times in runs.items()}
