"""How long kernels take on a GPU, predicted from bytes and arithmetic.

One kernel takes the GPU's floor plus the longer of its traffic and its arithmetic.  Traffic runs at the bandwidth that
a good kernel reaches; a kernel whose tensors fit the second-level cache together finds them there, since the kernel
before has just written them.  The unfused side runs as ONNX Runtime would run it: groups that it fuses itself
(``provider.fusions``) are one kernel, or two where a further one adds a bias.  How often nodes run in one run of the
model weighs both sides.  Where a profile of a run is given, its times stand in place of predictions of that side, and
it tells how often nodes ran.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import fsum

from onnx import TensorProto

from onnxfuse.graph.model import Node, Value
from onnxfuse.graph.sizes import contents_of, shapes_of
from onnxfuse.lowering.launch import Situation
from onnxfuse.operators import OperatorClass, classify, is_contraction
from onnxfuse.operators.classes import is_undone, moves_innermost, pools, slides, undoes
from onnxfuse.planning.costs.broadcasts import cached_seconds
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.costs.memory import memory_saved
from onnxfuse.planning.costs.traffic import KernelTraffic, Ledger, Needs
from onnxfuse.planning.regions.caches import addresses_of
from onnxfuse.planning.regions.dequantised import product_type
from onnxfuse.provider.fusions import RuntimeFusion
from onnxfuse.provider.kernels import (
    OWN_BIAS,
    Biased,
    biased,
    divides_apart,
    extra_arithmetic,
    held_seconds,
    overwrites,
    runtime_efficiency,
)
from onnxfuse.provider.lacking import host_seconds, lacks_kernel
from onnxfuse.provider.removed import is_given, readers, source
from onnxfuse.region import Region, RegionCost, decides_sizes, united
from onnxfuse.rules import groups_of
from onnxfuse.schedules import Does, Kernel, Schedule, running
from onnxfuse.schedules.kernel import TILE_BEGINS, Pace

PRODUCT_EFFICIENCY = 0.7
"""Share of the matrix units' peak that a large product reaches where nothing was measured."""

STREAMING = running(Does(0)).efficiency
"""Share of the bandwidth that a kernel reaches which does nothing but move elements."""

TILES_COPY = 0.86
"""Share of the bandwidth that they reach."""

BESIDE_COPY = 0.5
"""The same of what is read with results of float32, such as a residual: that waits for the sums, and they for it."""

DOES = {OperatorClass.REDUCTION: Does.REDUCES, OperatorClass.SCAN: Does.SCANS, OperatorClass.HEAVY: Does.CONTRACTS}
"""What operators of a class do that makes kernels differ."""


def kernel_time(
    reads: float,
    writes: float,
    flops: float,
    profile: Profile,
    peak_tflops: float | None = None,
    efficiency: float = 1.0,
) -> float:
    """Seconds that one kernel holds the GPU.

    Args:
        reads, writes: bytes through device memory.
        flops: arithmetic; peak_tflops: its peak, the plain float32 cores' where None.
        profile: the GPU.
        efficiency: share of the bandwidth that the kernel reaches.
    """
    total = reads + writes
    peak = 1e12 * (profile.peaks.float32 if peak_tflops is None else peak_tflops)
    return profile.floor_us * 1e-6 + max(
        total / (efficiency * effective_bandwidth(total, profile)), flops / peak
    )


def uncached(working_set: float, profile: Profile) -> float:
    """Share of ``effective_bandwidth`` that is the device memory's own."""
    return profile.bandwidth / effective_bandwidth(working_set, profile)


def effective_bandwidth(working_set: float, profile: Profile) -> float:
    """Bytes a second for a kernel whose tensors hold ``working_set`` bytes together.

    Up to half of the second-level cache all of them are served from it, from its whole size on none (other tensors
    share the cache); the share falls linearly between.
    """
    share = min(1.0, max(0.0, 2.0 - 2.0 * working_set / profile.l2_bytes))
    return profile.bandwidth / (share / profile.l2_gain + (1.0 - share))


def is_measured(dtype: int | None, profile: Profile) -> bool:
    """Whether products of operands of this type are what was measured on a GPU: in float16.  The rates of other types
    are in the same proportion to the data sheet's."""
    return dtype == TensorProto.FLOAT16 and profile.measured.product_tflops is not None


def tile_rate(profile: Profile, *, rounds: bool) -> float | None:
    """TFLOP/s of products whose tiles a warp copies, of 16-bit floats, or where it ``rounds`` of float32; None where
    that was not measured on a GPU, or it has no such units."""
    rate, peaks = profile.measured.tile_tflops, profile.peaks
    if rate is None or not rounds:
        return rate
    return rate * peaks.tf32_matrix / peaks.float16_matrix if peaks.tf32_matrix and peaks.float16_matrix else None


def product_peak(dtype: int | None, profile: Profile) -> float:
    """TFLOP/s that a large matrix product of operands of this type reaches; float32 runs as TF32 where there is one."""
    peaks = profile.peaks
    units: dict[int, float] = {
        TensorProto.FLOAT16: peaks.float16_matrix, TensorProto.BFLOAT16: peaks.bfloat16_matrix,
        TensorProto.FLOAT: peaks.tf32_matrix, TensorProto.INT8: peaks.int8_matrix, TensorProto.UINT8: peaks.int8_matrix,
    }
    matrix = units.get(dtype if dtype is not None else TensorProto.FLOAT, 0.0)
    if not matrix:
        return (peaks.float64 if dtype == TensorProto.DOUBLE and peaks.float64 else peaks.float32) * PRODUCT_EFFICIENCY
    if profile.measured.product_tflops is not None and peaks.float16_matrix:
        return matrix * profile.measured.product_tflops / peaks.float16_matrix
    return matrix * PRODUCT_EFFICIENCY


@dataclass(frozen=True)
class Broken:
    """A runtime fusion of which regions take nodes and leave others: ``left``, in graph order, and ``seconds`` that
    these take in one run beyond what runs all the same."""

    fusion: RuntimeFusion
    left: tuple[Node, ...]
    seconds: float


class CostModel:
    """Predicted times of one graph, at given sizes, on one GPU."""

    def __init__(self, ledger: Ledger, profile: Profile, groups: Sequence[RuntimeFusion] | None = None) -> None:
        """``groups``: what the runtime fuses itself, ``groups_of`` the graph where None."""
        self.ledger = ledger
        self.profile = profile
        self.groups = groups_of(ledger.graph) if groups is None else tuple(groups)
        self._group = {node: group for group in self.groups for node in group.nodes}
        self._seconds: dict[frozenset[Node], float] = {}
        self._alone: dict[Node, float] = {}
        self._learned: set[Node] = set()

    def learn(self, node: Node, seconds: float, *, measured: bool = True) -> None:
        """What the runtime takes for one run of a product or a convolution by itself, as measured, or as kernels tell
        that were: its own bias and whatever the runtime lays out for it among it.  Before anything that holds it is
        weighed."""
        self._alone[node] = seconds
        if measured:
            self._learned.add(node)
        self._seconds = {unit: known for unit, known in self._seconds.items() if node not in unit}

    def is_learned(self, node: Node) -> bool:
        """Whether it was measured what the runtime takes for a node by itself."""
        return node in self._learned

    def seconds(
        self, traffic: KernelTraffic, dtype: int | None = None, efficiency: float = STREAMING, again: int = 0,
        rate: float = 1.0,
    ) -> float:
        """Predicted time of a counted node or region.

        Args:
            dtype: operand type of the product in it, if any.
            efficiency: share of the bandwidth that its kernel reaches.
            again: bytes that it reads once more than the count has them.
            rate: share of a large product's rate that the products in it reach.
        """
        if not traffic.kernels:
            return 0.0
        reads, writes = sum(traffic.reads.values()) + again, sum(traffic.writes.values())
        peak = rate * product_peak(dtype, self.profile) if traffic.product else None
        share = 1.0 if traffic.product else efficiency
        first = kernel_time(reads, writes, traffic.flops, self.profile, peak, share)
        more = traffic.kernels - 1
        return first + more * self.profile.floor_us * 1e-6 + traffic.scratch / self.profile.bandwidth

    def group_seconds(self, nodes: frozenset[Node]) -> float:
        """Time of nodes that ONNX Runtime runs as one kernel, or of one node: observed, else measured or predicted."""
        if nodes not in self._seconds:
            found = [self.ledger.observed[node].seconds for node in nodes if node in self.ledger.observed]
            seen = [seconds for seconds in found if seconds is not None]
            if seen:
                self._seconds[nodes] = fsum(seen)
                return self._seconds[nodes]
            node = next(iter(nodes))
            if len(nodes) == 1:
                counted = self._in_place(node) if overwrites(node) else self.ledger.node(node)
            else:
                counted = self.ledger.region(Region(tuple(nodes), *_moved(nodes)))
            extra = sum(extra_arithmetic(node, self.ledger.sizes) for node in nodes)
            # Of channels by themselves the matrix units have nothing to multiply.
            sliding = any(map(slides, nodes))
            counted = replace(counted, product=counted.product and not sliding, flops=counted.flops + extra)
            share = runtime_efficiency(nodes) * (uncached(counted.bytes, self.profile) if sliding else 1.0)
            once = self.seconds(counted, product_type(nodes, self.ledger), share)
            if len(nodes) == 1:
                once = self._summed(node, once, counted)
                if counted.kernels and lacks_kernel(node):
                    once = max(once, host_seconds(node, self.ledger.sizes))
            bias = biased(nodes)
            added = 0.0 if bias is None else self.bias_seconds(bias)
            alone = [self._alone[node] for node in nodes if node in self._alone]
            once = alone[0] if alone and len(nodes) == 1 else max([once, *alone]) + added
            self._seconds[nodes] = once * self.ledger.executions(nodes)
        return self._seconds[nodes]

    def _summed(self, node: Node, seconds: float, counted: KernelTraffic) -> float:
        """What the runtime takes for a node that sums up, where its traffic takes so many seconds."""
        if not counted.kernels:
            return seconds
        held = held_seconds(node, self.ledger.sizes, self.profile.multiprocessors)
        written = sum(counted.writes.values())
        apart = kernel_time(written, written, 0.0, self.profile) if divides_apart(node) else 0.0
        return max(seconds, self.profile.floor_us * 1e-6 + held) + apart

    def bias_seconds(self, bias: Biased, efficiency: float = OWN_BIAS) -> float:
        """Time of a kernel that adds a bias; by default the runtime's."""
        moved = self.ledger.bytes_of(bias.result) or 0
        return kernel_time(moved if bias.reads else 0, moved, 0.0, self.profile, efficiency=efficiency)

    def _in_place(self, node: Node) -> KernelTraffic:
        """What a Scatter moves that writes over what it reads: what it updates, with what stands there where it makes
        something of both."""
        counted, (data, _, updates) = self.ledger.node(node), node.inputs[:3]
        moved = 0 if updates is None else self.ledger.bytes_of(updates) or 0
        reads = {value: size for value, size in counted.reads.items() if data is None or value is not source(data)}
        if data is not None and node.attributes.get("reduction", "none") != "none":
            reads[source(data)] = moved
        return replace(counted, reads=reads, writes=dict.fromkeys(counted.writes, moved))

    def unfused(self, nodes: Iterable[Node]) -> tuple[float, int]:
        """Predicted time, and kernels, of ``nodes`` as ONNX Runtime runs them.

        Of a group that is not all among ``nodes`` counts what stands without the others (``RuntimeFusion``).
        """
        launched = self.units(nodes)
        # Exact whatever the order: sets have none.
        kernels = len(launched) + sum(biased(unit) is not None for unit in launched)
        return fsum(self.group_seconds(unit) for unit in launched), kernels

    def units(self, nodes: Iterable[Node]) -> list[frozenset[Node]]:
        """Those of ``nodes`` that launch anything, together that ONNX Runtime runs as one kernel, in no order."""
        wanted = set(nodes)
        units = {frozenset([node]) for node in wanted if node not in self._group}
        for group in {self._group[node] for node in wanted if node in self._group}:
            units.update(group.without(group.nodes - wanted))
        return [unit for unit in units if any(self.ledger.node(node).kernels for node in unit)]

    def core(self, unit: frozenset[Node]) -> frozenset[Node]:
        """Those nodes of a unit without which ONNX Runtime would not run it as one kernel; all where that is none."""
        groups = {self._group[node] for node in unit & self._group.keys()}
        return frozenset(node for group in groups for node in group.core & unit) or unit

    def region(self, region: Region) -> RegionCost:
        """A region before and after.  A runtime fusion that it breaks counts on both sides, whole and in parts, less
        what runs all the same: a product whose operand the region scales takes its time either way."""
        members = set(region.nodes)
        touched = members.union(*map(self._around, members)).difference(region.again)
        before, kernels_before = self.unfused(touched)
        left, kernels_left = self.unfused(touched - members)
        stays = [self._stays(group, members) for group in {self._group[node] for node in members & self._group.keys()}]
        same, kernels_same = fsum(seconds for seconds, _ in stays), sum(kernels for _, kernels in stays)
        executions = self.ledger.executions(region.nodes)
        counted = self.ledger.region(region)
        return RegionCost(
            bytes_before=sum(self.ledger.node(node).bytes for node in region.own),
            bytes_after=counted.bytes,
            kernels_before=kernels_before - kernels_same,
            kernels_after=kernels_left - kernels_same + counted.kernels,
            seconds_before=before - same,
            seconds_after=left - same + executions * self._own_seconds(region, counted),
            memory_saved=memory_saved(self.ledger, region),
            executions=executions,
            flops=counted.flops,
        )

    def _stays(self, group: RuntimeFusion, members: Collection[Node]) -> tuple[float, int]:
        """Time, and kernels, that a runtime fusion takes both whole and without a region's nodes."""
        left = group.nodes.difference(members)
        if not left or not group.core <= left:
            return 0.0, 0
        (whole, kernels), (rest, fewer) = self.unfused(group.nodes), self.unfused(group.without(members)[0])
        return min(whole, rest), min(kernels, fewer)

    def broken(self, regions: Sequence[Region]) -> tuple[Broken, ...]:
        """Runtime fusions that regions break, in graph order; of the seconds each region's own count is part of its
        ``seconds_after``."""
        taken = {node for region in regions for node in region.nodes}
        found = []
        for group in self.groups:
            left = group.nodes - taken
            seconds, kernels = self.unfused(left)
            if kernels and len(left) < len(group.nodes) and group.rules:
                kept = tuple(sorted(left, key=lambda node: node.index))
                found.append(Broken(group, kept, seconds - self._stays(group, taken)[0]))
        return tuple(found)

    def together(self, parts: Sequence[Region]) -> RegionCost:
        """Independent regions of one graph before, and after in one launch.  Each moves in it what it moves alone: a
        tensor that two of them read comes twice."""
        whole = united(parts)
        reads: dict[Value, int] = {}
        alone = [self.ledger.region(part) for part in parts]
        again = sum(map(self.read_again, parts))
        for counted in alone:
            for value, size in counted.reads.items():
                reads[value] = reads.get(value, 0) + size
        writes = {value: size for counted in alone for value, size in counted.writes.items()}
        moved = KernelTraffic(False, reads, writes, sum(counted.flops for counted in alone))
        cost = self.region(whole)
        more = self._fused_seconds(moved, whole.nodes, again) - self.kernel_seconds(whole)
        return replace(cost, seconds_after=cost.seconds_after + cost.executions * more, flops=moved.flops)

    def kernel_seconds(self, region: Region, flops: int = 0) -> float:
        """Predicted time of a region's own kernel, once, with so much arithmetic beyond that of its nodes."""
        counted = self.ledger.region(region)
        return self._own_seconds(region, replace(counted, flops=counted.flops + flops))

    def _own_seconds(self, region: Region, counted: KernelTraffic) -> float:
        paced = self._paced(region, counted)
        return self._fused_seconds(counted, region.nodes, self.read_again(region)) if paced is None else paced

    @property
    def knows_tiles(self) -> bool:
        """Whether kernels of products were measured on this GPU that tell of others."""
        return self.profile.measured.tile_tflops is not None

    def paced(self, region: Region) -> float | None:
        """The same of a kernel that goes through its tiles as those did that were measured on this GPU; None of
        others."""
        return self._paced(region, self.ledger.region(region))

    def _paced(self, region: Region, counted: KernelTraffic) -> float | None:
        made = region.made
        rate = None if made is None else tile_rate(self.profile, rounds=made.rounds)
        if made is None or (pace := made.pace) is None or rate is None:
            return None
        if pace.launches:
            return self._launched(pace)
        each_rate = 1e12 * rate / self.profile.multiprocessors
        # Of several kernels some may go through no tiles: what these move takes time of its own.
        beside = [each for each in pace.parts if each.launches]
        moved = counted.bytes + self.read_again(region) - sum(
            launch.bytes for each in beside for launch in each.launches)
        copies = max(moved, 0) / (TILES_COPY * self.profile.bandwidth)
        more = (region.steps - 1) * kernel_time(0, 0, 0.0, self.profile)
        more += pace.behind / (TILES_COPY * self.profile.bandwidth)
        if pace.parts:
            tiled = [each.tiled(each_rate) for each in pace.parts if not each.launches]
            return len(tiled) * TILE_BEGINS + max(sum(tiled), copies) + sum(map(self._launched, beside))
        tiles = pace.tiled(each_rate)
        if pace.results is not None:
            behind = self._behind(region, counted) / (1e12 * pace.results)
            tiles = max(tiles, behind) if pace.meanwhile else tiles + behind
            more += self._read_beside(region, made) / (BESIDE_COPY * self.profile.bandwidth)
        return TILE_BEGINS + max(tiles, copies) + more

    def _launched(self, pace: Pace) -> float:
        """Seconds of launches that multiply no tiles."""
        return pace.ends + sum(
            kernel_time(each.bytes, 0, each.flops, self.profile, efficiency=each.share) for each in pace.launches)

    def _behind(self, region: Region, counted: KernelTraffic) -> int:
        """Arithmetic of what follows a region's products."""
        return counted.flops - sum(self.ledger.node(node).flops for node in region.nodes if is_contraction(node))

    def _read_beside(self, region: Region, made: Kernel) -> int:
        """Bytes of what a kernel whose tiles a warp copies reads beside these."""
        copied = {each.base for each in made.plan.maps}
        read = (value for place, value in enumerate(region.tensors) if f"i{place}" not in copied)
        return sum(self.ledger.bytes_of(value) or 0 for value in read) if copied else 0

    def run_seconds(self, region: Region) -> float:
        """Predicted time of a region's own kernel in one run of the model, with what only its cost knows: tensors that
        parts of a launch read twice, what the compiler spilled.  Measured times are not in it: a model's total stands
        beside that of the original, which is predicted."""
        seconds = self.ledger.executions(region.nodes) * self.kernel_seconds(region)
        if region.counted is None or region.measured is not None:
            return seconds
        return seconds + (region.counted.seconds_after - self.region(region).seconds_after)

    def read_again(self, region: Region) -> int:
        """Bytes that a region's kernel reads more than once; 0 where a size is not known."""
        again, sizes = region.read_again, self.ledger.sizes
        return again.known(sizes) or 0

    def situation(self, region: Region) -> Situation | None:
        """What the plan of a region's kernel sees at these sizes; None where they are not known, or fail its checks."""
        sizes, profile = self.ledger.sizes, self.profile
        shapes = shapes_of(region.tensors, sizes)
        contents = [contents_of(value, sizes) if decides_sizes(value) else () for value in region.hosts]
        known = [each for each in contents if each is not None]
        if shapes is None or len(known) < len(contents):
            return None
        places = addresses_of(region, sizes)
        situation = Situation(shapes, known, *places, profile.sm, profile.multiprocessors)
        try:
            situation.bind(region.kernel.plan)
        except ValueError:
            return None
        return situation

    def _fused_seconds(self, counted: KernelTraffic, nodes: Collection[Node], again: int = 0) -> float:
        """``again``: bytes that are read more than once."""
        does = Does.TRANSPOSES if _transposes(nodes) else Does(0)
        for node in nodes:
            does |= DOES.get(classify(node, self.ledger.graph), Does(0))
        if any(map(slides, nodes)):
            does |= Does.SLIDES
        if any(map(pools, nodes)):
            does |= Does.POOLS
        schedule = running(does)
        if Does.POOLS in does:
            taps = sum(self.ledger.node(node).flops for node in nodes if pools(node))
            counted = replace(counted, flops=counted.flops + round(taps * (1 / schedule.arithmetic - 1)))
        elif Does.SLIDES in does:
            flops = round(counted.flops / schedule.arithmetic)
            counted = replace(counted, product=False, flops=flops)
        elif Does.CONTRACTS in does:
            rate = self._rate(schedule)
            return self.seconds(counted, product_type(nodes, self.ledger), again=again, rate=rate)
        efficiency = schedule.efficiency
        if not schedule.cached:
            efficiency *= uncached(sum(counted.reads.values()) + sum(counted.writes.values()), self.profile)
        seconds = self.seconds(counted, efficiency=efficiency, again=again) + schedule.waits_us * 1e-6
        pointwise = does in (Does(0), Does.TRANSPOSES)
        return max(seconds, cached_seconds(counted, self.profile, efficiency)) if pointwise else seconds

    def _rate(self, schedule: Schedule) -> float:
        """Share of a large product's rate that a schedule's products reach."""
        measured = self.profile.measured.attention_tflops
        return schedule.efficiency if measured is None else measured / product_peak(TensorProto.FLOAT16, self.profile)

    def _around(self, node: Node) -> frozenset[Node]:
        """What the runtime fuses with a node, the node itself among them; nothing where that is nothing."""
        return self._group[node].nodes if node in self._group else frozenset()

    def is_grouped(self, node: Node) -> bool:
        """Whether the runtime fuses the node with others itself."""
        return node in self._group

    def dispatch_seconds(self, nodes: Iterable[Node]) -> float:
        """Host time that the runtime spends on nodes that launch nothing, in one run."""
        return self.profile.view_us * 1e-6 * sum(self.ledger.executions([node]) for node in nodes)

    def around(self, nodes: Collection[Node]) -> tuple[float, float]:
        """Predicted time of what the runtime fuses with some of these nodes and is not among them: as it runs now,
        beyond the nodes alone, and when they are gone.  Both are 0 where no runtime fusion is broken."""
        members = set(nodes)
        touched = members.union(*map(self._around, members))
        if touched == members:
            return 0.0, 0.0
        whole, _ = self.unfused(touched)
        alone, _ = self.unfused(members)
        left, _ = self.unfused(touched - members)
        return whole - alone, left

    def total(self, fused: Sequence[Region] = ()) -> float:
        """Predicted GPU time of one run with these regions fused."""
        inside = Needs(fused).inside()
        nodes = (node for each in self.ledger.graph.walk() for node in each.nodes)
        rest, _ = self.unfused(node for node in nodes if node not in inside)
        return rest + sum(map(self.run_seconds, fused))


def _transposes(nodes: Collection[Node]) -> bool:
    """Whether something is written another way than it is read: not where all comes from between pairs of transposes,
    and goes there again."""
    moving = [node for node in nodes if moves_innermost(node)]
    leaving, returning = ({node for node in moving if half(node)} for half in (is_undone, undoes))
    return bool(moving) and not (leaving and returning and len(leaving | returning) == len(moving))


def _moved(nodes: Collection[Node]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """What nodes that run as one kernel read and write, as the runtime sees it that has taken out what does nothing."""
    ordered = sorted(nodes, key=lambda node: node.index)
    read = dict.fromkeys(source(value) for node in ordered for value in node.reads())
    made = [value for node in ordered for value in node.outputs if value is not None]
    written = [value for value in made if is_given(value) or any(reader not in nodes for reader in readers(value))]
    return tuple(value for value in read if value.producer not in nodes), tuple(written)
