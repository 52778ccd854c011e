"""Medians, their spread, and the ratio of two series with a bootstrap interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
"""Bootstrap samples of an interval."""


@dataclass(frozen=True)
class Spread:
    """A series of times in milliseconds: median, quartiles, extremes, the times that 90 and 99 of a hundred runs do not
    pass, and how many runs there were."""

    median: float
    lower_quartile: float
    upper_quartile: float
    least: float
    most: float
    p90: float
    p99: float
    runs: int


@dataclass(frozen=True)
class Ratio:
    """Original over fused: above one, the fused model is faster.  ``low`` to ``high`` is the 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def spread(times: NDArray[np.float64]) -> Spread:
    """The spread of times of any shape; at least one."""
    least, lower, median, upper, p90, p99, most = map(float, np.percentile(times, [0, 25, 50, 75, 90, 99, 100]))
    return Spread(median, lower, upper, least, most, p90, p99, times.size)


def ratio(original: NDArray[np.float64], fused: NDArray[np.float64], seed: int = 0) -> Ratio:
    """Ratio of the medians, with the 95% interval of the percentile bootstrap (Efron and Tibshirani, 1993).

    Blocks are resampled, not runs, and blocks of the two series that were measured next to each other together: runs
    of a block share the clock and the neighbours' load of their moment.

    Args:
        original, fused: times of shape [blocks, runs], a row measured right after the other's same row.
    """
    if original.shape != fused.shape or original.ndim != 2 or original.size == 0:
        raise ValueError(f"the series have shapes {original.shape} and {fused.shape}")
    blocks = len(original)
    chosen = np.random.default_rng(seed).integers(0, blocks, (RESAMPLES, blocks))
    ratios = np.median(original[chosen], axis=(1, 2)) / np.median(fused[chosen], axis=(1, 2))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Ratio(float(np.median(original) / np.median(fused)), float(low), float(high))
