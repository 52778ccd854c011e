"""Softmax over rows that do not stay in registers: kept in shared memory, its maximum and sum in one pass, and in two.

    python benchmarks/softmax_passes.py [--target GPU] [--dry-run]

The variants that stream, over rows and over columns, and those that split few long rows.  Of the three reads and a
write of two passes one pass saves a read, so that 1.3 times as quick is what memory would give; a row that shared
memory keeps saves two, twice as quick.  What is read again lies in the L2 cache in part, and costs less: kernels that
only read, wait for their block and write, in the same blocks and vectors, tell what a saved read is worth at most.
``--dry-run`` names the kernels and times nothing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from unittest import mock

import click
from common import environment, measured_on, table, timing, write_results
from onnx import parser
from processes import apart
from region_times import machine_options

from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import Profile, resolve_profile
from onnxfuse.refusal import Refusal
from onnxfuse.schedules import Kernel, make_kernel
from onnxfuse.schedules.kernel import STREAM
from onnxfuse.schedules.reductions import phases
from onnxfuse.schedules.reductions.rows import IN_SHARED, SHARED
from onnxfuse.tuning.subjects import Subject, subjects_of

SLACK = 1.05
"""How many times as long as a bare kernel that reads as often a kernel may take that gains less than ``WANTED``."""

WANTED = 1.3
"""Times as quick as in two passes."""

BARE = """
extern "C" __global__ void bare(const uint4* x, uint4* y, long long blocks, long long steps, long long width,
                                int lanes, int reads, bool writes) {
  // A block has `lanes` neighbouring vectors of `steps` places that lie `width` vectors apart.
  const long long place = blockIdx.x / blocks * steps * width + blockIdx.x % blocks * lanes + threadIdx.x % lanes;
  const int first = threadIdx.x / lanes, apart = blockDim.x / lanes;
  const bool inside = blockIdx.x % blocks * lanes + threadIdx.x % lanes < width;
  unsigned seen = 0;
  for (int pass = 0; pass < reads; ++pass) {
#pragma unroll 4
    for (long long i = first; i < steps && inside; i += apart) {
      const uint4 v = x[place + i * width];
      seen ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    seen = __syncthreads_or(seen == 0x9e3779b9u);
  }
  if (!writes) {
    if (seen) y[place] = x[place];
    return;
  }
#pragma unroll 4
  for (long long i = first; i < steps && inside; i += apart) {
    uint4 v = x[place + i * width];
    v.x ^= seen;
    y[place + i * width] = v;
  }
}
"""
"""A row's reads and its write, and nothing computed."""

FEW_ROWS = 64
"""Rows up to which several blocks share one, in a launch for each pass."""

CHUNKS = 264
"""Blocks of such launches: two a multiprocessor."""

VECTOR = 16
"""Bytes that a thread reads at once."""

RUNS = 24
"""Launches that are timed."""

SHAPES = (((4096, 50_257), 1), ((2048, 100_352), 1), ((512, 131_072), 1), ((2, 8_388_608), 1), ((64, 4096, 256), 1),
          ((8, 65_536, 64), 1))
"""Shapes, and the axis that is normalised."""


@contextmanager
def two_passes() -> Iterator[None]:
    """Kernels that are made within find a row's maximum before they sum."""
    with mock.patch.object(phases, "online_sums", lambda reductions: {}):
        yield


def reading_again(subject: Subject, sizes: dict[str, int]) -> Kernel:
    """The kernel with its streaming or splitting variants alone."""
    kernel = make_kernel(subject.fusion.request(sizes, None), subject.fusion.kernel.schedule)
    assert isinstance(kernel, Kernel), kernel
    chosen = tuple(each for each in kernel.plan.variants if STREAM in each.name or each.name.startswith("split"))
    return replace(kernel, plan=replace(kernel.plan, variants=chosen))


def keeping(subject: Subject, sizes: dict[str, int]) -> Kernel | None:
    """The kernel that keeps a row in shared memory, or None where that holds none."""
    own = make_kernel(subject.fusion.request(sizes, None))
    assert isinstance(own, Kernel), own
    if SHARED in own.plan.variants[0].name:
        return own
    choice = next((each for each in own.choices if dict(each.settings).get("items") == IN_SHARED), None)
    made = None if choice is None else make_kernel(subject.fusion.request(sizes, choice))
    assert not isinstance(made, Refusal), made
    return made


def bare_microseconds(shape: tuple[int, ...], axis: int, size: int) -> tuple[float, float, float]:
    """What one, two and three reads of each row and a write take, in the blocks that a softmax has, with vectors of
    whole rows; ``size``: bytes of an element.  In a process of its own."""
    import cupy

    length, inner = shape[axis], shape[axis + 1] if axis + 1 < len(shape) else 1
    rows = math.prod(shape[:axis])
    kernel = cupy.RawKernel(BARE, "bare")
    count = rows * length * inner * size // VECTOR
    sets = max(2, math.ceil(4 * cupy.cuda.Device().attributes["L2CacheSize"] / (count * VECTOR)))
    tensors = [[cupy.random.randint(0, 2**31, 4 * count, dtype=cupy.uint32) for _ in "xy"] for _ in range(sets)]
    if inner > 1:
        width, steps, lanes = inner * size // VECTOR, length, min(16, inner * size // VECTOR)
    else:
        width, steps, lanes = 1, length * size // VECTOR, 1
    chunks = math.ceil(CHUNKS / rows) if rows <= FEW_ROWS else 1
    steps //= chunks
    blocks = -(-width // lanes)
    grid, threads = (rows * chunks * blocks,), (1024 if inner == 1 else 256,)

    def run(turn: int, reads: int) -> None:
        x, y = tensors[turn % sets]
        shared = [(0 if chunks > 1 else reads - 1, True)]
        for before, writes in [*[(1, False)] * (reads - 1 if chunks > 1 else 0), *shared]:
            kernel(grid, threads, (x, y, *map(cupy.int64, (blocks, steps, width)), *map(cupy.int32, (lanes, before)),
                                   cupy.bool_(writes)))

    def timed(reads: int) -> float:
        for turn in range(sets):
            run(turn, reads)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        for turn in range(RUNS):
            run(turn, reads)
        end.record()
        end.synchronize()
        return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / RUNS

    return timed(1), timed(2), timed(3)


@dataclass(frozen=True)
class SoftmaxResult:
    """A case: the kernel of one pass, and microseconds of the row kept, of one pass and of two; of bare kernels that
    read a row once, twice and three times."""

    case: str
    kernel: str
    kept: float | None = None
    one: float | None = None
    two: float | None = None
    bare: tuple[float, float, float] | None = None

    @property
    def gain(self) -> float | None:
        """How many times as long two passes take as the quickest of the others."""
        return self.two / min(self.kept or self.one, self.one) if self.one and self.two else None

    @property
    def over_bare(self) -> float | None:
        """The best of those over the bare kernel that reads a row as often."""
        if not self.bare or not self.one:
            return None
        return min(self.one / self.bare[1], self.kept / self.bare[0] if self.kept else math.inf)

    @property
    def passes(self) -> bool:
        """Whether a softmax gains what is wanted, or takes what its reads and its write take."""
        return not self.gain or not self.over_bare or self.gain >= WANTED or self.over_bare <= SLACK


def measure(shape: tuple[int, ...], axis: int, kind: str, profile: Profile, dry_run: bool) -> SoftmaxResult:
    """A case, timed."""
    of = f"{kind}[{','.join(map(str, shape))}]"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g ({of} x) => ({of} y) '
                               f"{{ s = Relu(x) y = Softmax <axis = {axis}> (s) }}")
    plan = optimise(model, Options(target=profile, least_gain=0.0, verify=False, database=False))
    (subject,), _ = subjects_of(plan)
    sizes, name = dict(plan.ledger.sizes), f"{kind} {' x '.join(map(str, shape))}"
    kept, one = keeping(subject, sizes), reading_again(subject, sizes)
    with two_passes():
        two = reading_again(subject, sizes)
    assert (one.phases, two.phases) == (2, 3)
    if dry_run:
        return SoftmaxResult(name, (kept or one).entry)
    with timing(subject) as time_of:
        times = time_of(kept) if kept else None, time_of(one), time_of(two)
    bare = apart(bare_microseconds, shape, axis, 2 if kind == "float16" else 4)
    return SoftmaxResult(name, (kept or one).entry, *times, bare)


def row(result: SoftmaxResult) -> list[str]:
    """Of the table."""
    times = (result.kept, result.one, result.two, *(result.bare or (None, None, None)))
    ratios = (result.gain, result.over_bare)
    return [result.case, result.kernel, *(f"{taken:.1f}" if taken else "" for taken in times),
            *(f"{ratio:.2f}" if ratio else "" for ratio in ratios), "pass" if result.passes else "FAIL"]


@click.command(help=__doc__.split("\n")[0])
@machine_options
def main(target: str | None, dry_run: bool, out: Path) -> None:
    where = apart(environment) if dry_run else measured_on("--dry-run")
    profile = resolve_profile(target or where.gpu or "H100")
    found = [measure(shape, axis, kind, profile, dry_run) for shape, axis in SHAPES for kind in ("float16", "float")]
    text = table([
        "case", "kernel", "kept (µs)", "one pass (µs)", "two passes (µs)", "bare, 1 read (µs)", "2 reads", "3 reads",
        "two over the best", "best over bare", "",
    ], [row(each) for each in found])
    click.echo(text)
    if not dry_run:
        text += f"\n\nGeometric mean: {geometric_mean(each.gain for each in found if each.gain):.2f}."
        path = write_results(out, "softmax-passes", where, {"cases": [asdict(each) for each in found]}, text)
        click.echo(f"written: {path} and .json", err=True)
    sys.exit(not all(each.passes for each in found))


if __name__ == "__main__":
    main()
