"""Several fused nodes verified at one time: while one makes inputs, references or sessions, another's kernel runs.

What comes of it is what comes of one after the other.  Nodes of one kernel stay in their order, since the first speaks
for others; what does not pass beside others is left, to be verified again alone: it may have been short of memory, or
have met a device that another kernel had ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from onnxfuse.verifying.bounds import Bounds
from onnxfuse.verifying.capture import GROUP_BYTES, Captured
from onnxfuse.verifying.results import NodeResult
from onnxfuse.verifying.runner import KernelRunner

HELD = 32
"""How many times the bytes that a node reads its verification may hold: edges of them, results, references in float64
and what is computed on the way to these."""


def batches(captured: Iterable[Captured], runner: KernelRunner) -> Iterator[list[Captured]]:
    """Nodes in their order, as many together as may be verified at one time and be in memory with what they read."""
    batch: list[Captured] = []
    total = 0
    for taken in captured:
        batch.append(taken)
        total += nbytes(taken)
        if runner.workers == 1 or total > GROUP_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def passed(batch: Sequence[Captured], verify: Callable[[Captured], NodeResult], runner: KernelRunner, bounds: Bounds
           ) -> tuple[Mapping[str, NodeResult], NodeResult | None]:
    """Results of the nodes that pass at one time, by name, and that of one whose kernel ended the device, if one did.

    Args:
        verify: one of them, from any thread; of nodes of one kernel one after the other.
    """
    chains: dict[str, list[Captured]] = {}
    for taken in batch:
        chains.setdefault(taken.node.op, []).append(taken)
    if len(chains) == 1:
        return {}, None

    def verified(chain: Sequence[Captured]) -> tuple[list[NodeResult], NodeResult | None]:
        found: list[NodeResult] = []
        for taken in chain:
            if bounds.is_over or not _fits(taken, runner.workers, bounds):
                break
            result = verify(taken)
            if result.verdict != "passed":
                return found, result if result.verdict == "failed" and not runner.alive() else None
            found.append(result)
        return found, None

    # The longest first: one that were begun last would have the processors to itself.
    longest = sorted(chains.values(), key=lambda chain: -sum(map(nbytes, chain)))
    with ThreadPoolExecutor(runner.workers, "onnxfuse-verify") as pool:
        done = list(pool.map(verified, longest))
    ends = [ended for _, ended in done if ended is not None]
    return {result.node: result for found, _ in done for result in found}, ends[0] if ends else None


def nbytes(taken: Captured) -> int:
    """Of what a node reads."""
    return sum(array.nbytes for array in taken.feeds.values())


def _fits(taken: Captured, workers: int, bounds: Bounds) -> bool:
    """Whether so many nodes like this one may be verified at one time."""
    return bounds.memory is None or workers * HELD * nbytes(taken) <= bounds.memory
