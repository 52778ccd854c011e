"""A fused node's kernel against its own body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxfuse.errors import KernelError, ModelError, VerificationError
from onnxfuse.graph.order import graphs_of
from onnxfuse.rewriting import FusedNode
from onnxfuse.verifying.blocks import pieces, sample
from onnxfuse.verifying.bounds import NONE, Bounds
from onnxfuse.verifying.comparison import Comparison, Leeway, compared, near, replace_unowed
from onnxfuse.verifying.device_arrays import DeviceArray, Values, on_host
from onnxfuse.verifying.feeds import Feeds, edges, is_float
from onnxfuse.verifying.reference import Reference, formal_names, lengths
from onnxfuse.verifying.results import NodeResult
from onnxfuse.verifying.runner import KernelRunner
from onnxfuse.verifying.tolerances import TABLE
from onnxfuse.verifying.wavering import Moves, replace_moved

Array = NDArray[Any]


@dataclass
class _Tally:
    """What one node has shown so far."""

    inputs: dict[str, None] = field(default_factory=dict)
    variants: dict[str, None] = field(default_factory=dict)
    worst: Comparison | None = None
    message: str = ""
    failed: bool = False
    rounded: bool = False
    where: str = ""
    farthest: str = ""

    def note(self, comparison: Comparison, output: str) -> None:
        self.rounded |= not comparison.steady
        if self.worst is None or comparison.ratio > self.worst.ratio:
            self.worst = comparison
            self.farthest = f"{output} on {self.where}, at {list(comparison.where)}" if comparison.error else ""
            if not comparison.passed:
                self.failed, self.message = True, f"{output} on {self.where}: {_explained(comparison)}"


class NodeVerifier:
    """Verifies the fused nodes of one model: those of one kernel one after another, others from any thread.

    A kernel that several nodes share is run on edge inputs, and in every variant, for the first of them.
    """

    def __init__(self, model: onnx.ModelProto, runner: KernelRunner, bounds: Bounds = NONE) -> None:
        self._model = model
        self._runner = runner
        self._bounds = bounds
        self._weights = frozenset(tensor.name for _, graph in graphs_of(model) for tensor in graph.initializer)
        self._references: dict[tuple[Any, ...], Reference] = {}
        self._first: dict[tuple[Any, ...], NodeResult] = {}

    def standing(self, node: FusedNode, feeds: Mapping[str, Array]) -> NodeResult | None:
        """What was found of a node with this kernel at these shapes, as this one's result; None where none was."""
        found = self._first.get(_kernel_key(node, feeds))
        if found is None or found.verdict == "not run":
            return None
        return replace(found, node=node.name, rule=node.rule, shared=found.node)

    def verify(self, node: FusedNode, feeds: Mapping[str, Array], label: str, final: bool = True) -> NodeResult:
        """One node on its captured inputs and, where it is the first with its kernel, on as many edges of them as there
        is time for.

        Args:
            feeds: by formal name; label: what the run that they come from is called.
            final: whether what is found stands for other nodes with this kernel though it did not pass.
        """
        key = _kernel_key(node, feeds)
        known = self._first.get(key)
        found = self._verified(node, Feeds(label, feeds), node.name if known is None else known.node)
        if final or found.verdict == "passed":
            self._first.setdefault(key, found)
        return found

    def _verified(self, node: FusedNode, feeds: Feeds, first: str) -> NodeResult:
        """The same; ``first``: the node that is the first with this kernel."""
        tally = _Tally()
        try:
            reference = self._reference(node)
            with ExitStack() as stack:
                stack.callback(reference.forget)
                stack.callback(self._runner.forget)
                self._compare(node, reference, feeds, tally, every_variant=first == node.name)
                if first == node.name:
                    self._compare_edges(node, reference, feeds.arrays, tally)
        except (VerificationError, ModelError) as error:
            return NodeResult(node.name, node.op, node.rule, "not run", message=error.message)
        except KernelError as error:
            tally.failed, tally.message = True, f"on {tally.where}: {error}"
        worst = tally.worst or Comparison(0.0, 0.0, 0.0, 0, 0)
        return NodeResult(
            node.name, node.op, node.rule, "failed" if tally.failed else "passed", worst.error, worst.limit,
            worst.ratio, tuple(tally.inputs), tuple(tally.variants), "" if first == node.name else first, tally.rounded,
            tally.message, tally.farthest,
        )

    def _compare_edges(self, node: FusedNode, reference: Reference, feeds: Mapping[str, Array], tally: _Tally) -> None:
        """On edges of these inputs, as far as there is time and nothing has failed."""
        weights = {formal for formal, name in formal_names(node).items() if name in self._weights}
        for edge in edges(feeds, reference.maskable, weights):
            if tally.failed or self._bounds.is_over:
                return
            try:
                self._compare(node, reference, edge, tally)
            except VerificationError:
                # Some edges the original refuses too: a boolean turned round may choose an index out of range.
                if not self._runner.alive():
                    raise

    def _reference(self, node: FusedNode) -> Reference:
        key = (node.op, tuple(sorted((name, kind) for name, kind in node.types.items())))
        if key not in self._references:
            self._references[key] = Reference(node, self._model)
        return self._references[key]

    def _compare(self, node: FusedNode, reference: Reference, feeds: Feeds, tally: _Tally,
                 every_variant: bool = False) -> None:
        arrays = {name: np.asarray(array, order="C") for name, array in feeds.arrays.items()}
        case = _Case(node, reference, self._runner, arrays, feeds)
        count = len(case.first)  # what the original refuses, no kernel is given
        tally.inputs[feeds.label] = None
        tally.where = feeds.label
        try:
            holding = self._runner.variants(node.plan, arrays) if every_variant else [None]
        except ValueError as error:
            raise KernelError(f"the launch plan refuses inputs that the model gives: {error}") from error
        for variant in holding:
            if tally.failed:
                break
            if variant is not None:
                name = node.plan.variants[variant].name
                tally.variants[name] = None
                tally.where = f"{feeds.label}, variant {name}"
            got = self._runner.kernel(node, self._model, arrays, variant)
            for place in range(count):
                tally.note(case.compared(place, got[place]), f"output {place} of {count}")


@dataclass(frozen=True)
class _Case:
    """What a node's outputs have to be for one set of inputs.

    Attributes:
        arrays: the inputs, each in one piece; feeds: what they were made of.  Where they are ``even``, a sample of many
            elements is looked at, and all of them where it shows a fault.
    """

    node: FusedNode
    reference: Reference
    runner: KernelRunner
    arrays: Mapping[str, Array]
    feeds: Feeds

    @cached_property
    def first(self) -> Sequence[Values]:
        """What is looked at first: the reference on the kernels' device, where it is to be had, else on the CPU.

        Raises:
            VerificationError: the original does not run on these inputs, or ends the device.
        """
        return self.wanted if self._on_device is None else self._on_device

    @cached_property
    def wanted(self) -> Sequence[Array]:
        """The reference's results, by which a kernel fails.

        Raises:
            VerificationError: the original does not run on these inputs.
        """
        return self.reference.outputs(self.arrays)

    @cached_property
    def _on_device(self) -> Sequence[DeviceArray] | None:
        """The same on the kernels' device.  Not of NaN and infinity: of these providers make different things, and a
        kernel that is wrong as the device's provider is must not pass.

        Raises:
            VerificationError: they end the device; no kernel is to blame for that.
        """
        body = self.reference.device_body if self.feeds.finite else None
        try:
            return None if body is None else self.runner.exact(self.node, body, self.arrays)
        except KernelError as error:
            self._check_device(error)
        return None

    def _check_device(self, error: KernelError) -> None:
        """See whether the device can go on where the original's own nodes failed on it.

        Raises:
            VerificationError: they ended it; no kernel is to blame for that.
        """
        if not self.runner.alive():
            raise VerificationError(f"the original's own nodes end the device's work: {error.message}") from error

    @cached_property
    def own(self) -> Sequence[Array]:
        """The original nodes' own results: on the kernels' device, else on the CPU.

        Raises:
            VerificationError: they end the device; no kernel is to blame for that.
        """
        own = None
        try:
            own = self.runner.own(self.reference.body, self.arrays)
        except KernelError as error:  # what the device's provider cannot run may still run as a kernel
            self._check_device(error)
        return self._on_host if own is None else own

    @cached_property
    def _on_host(self) -> Sequence[Array]:
        return self.reference.own(self.arrays)

    def _owns(self) -> Iterator[Sequence[Array]]:
        """The same, asked for only where they decide, since they only ever widen what passes.  Of products those on the
        CPU come first: a GPU library's first run at a size takes longer than most nodes' whole verification."""
        if (inside := self.reference.inside(self.arrays)) is not None:
            yield inside
        first = self._on_host if self.reference.products else None
        if first is not None:
            yield first
        if self.own is not first:  # without a device they are the CPU's
            yield self.own

    @cached_property
    def length(self) -> int:
        """Of the longest sum of the inputs."""
        return lengths(self.arrays, self.first)

    def compared(self, place: int, got: Values) -> Comparison:
        """The comparison of one output."""
        even = self.feeds.even and got.shape == self.first[place].shape and not self._is_quick(place, got)
        chosen = sample(got.size) if even else None
        if chosen is not None:
            comparison = self._judged(place, got, chosen)
            if comparison.passed:
                where = np.unravel_index(chosen[comparison.where[0]], got.shape) if comparison.where else ()
                return replace(comparison, where=tuple(int(axis) for axis in where))
        return self._judged(place, got, None)

    def _is_quick(self, place: int, got: Values) -> bool:
        """Whether the runner looks at all elements, where a sample would do, sooner than at that."""
        return (got.size <= self.runner.most and self._on_device is not None
                and self.reference.precision[place].arithmetic is not None)

    def _judged(self, place: int, got: Values, chosen: Array | None) -> Comparison:
        """That of some elements.  What agrees with the device's reference passes; of all else the CPU's decides."""
        looked = self._looked(place, got, chosen)
        if looked is not None and looked.passed:
            return looked
        return self._compared(place, got, chosen)

    def _looked(self, place: int, got: Values, chosen: Array | None) -> Comparison | None:
        """The first look at the same elements; None where there is none.  The original's own result does not widen it:
        against a reference that were wrong itself it would be far off, and let any kernel pass."""
        if self._on_device is None or not got.ndim:
            return None
        with suppress(KernelError):  # the device does not answer any more, as the next kernel will show
            return compared(_taken(got, chosen), [_taken(self._on_device[place], chosen)], None, self._types(place),
                            self._leeway(place), self.runner.measure)
        return None

    def _types(self, place: int) -> tuple[int, int | None]:
        return self.node.plan.outputs[place].dtype, self.reference.precision[place].arithmetic

    def _leeway(self, place: int) -> Leeway:
        return Leeway(self.length if self.reference.precision[place].reduces else 1)

    def _owed(self, place: int, got: Values) -> Values:
        """A result with the reference's numbers where nothing is owed: infinity times products that are one in the
        kernel is infinite, and may be no number in the nodes, which multiply it by one after the other.  Where they
        give infinity all that they add up has one sign, as in the kernel, and NaN is NaN in both."""
        wanted = self.wanted[place]
        if not self.node.collapses or self.feeds.finite or got.shape != wanted.shape:
            return got
        other = self.reference.bounded(self.arrays)[place]
        same = np.equal(wanted, other) | (np.isnan(wanted) & np.isnan(other)) | np.isinf(wanted)
        return np.where(same, on_host(got), wanted.astype(got.dtype))

    def _compared(self, place: int, got: Values, chosen: Array | None) -> Comparison:
        """The same with references of the CPU, which are made as far as that needs them."""

        def taken(array: Array) -> Array:
            return _taken(array, chosen)

        reference, arrays = self.reference, self.arrays
        made, wanted = _taken(self._owed(place, got), chosen), taken(self.wanted[place])
        precision, sides = reference.precision[place], [wanted]
        types, leeway, measure = self._types(place), self._leeway(place), self.runner.measure
        comparison = compared(made, sides, None, types, leeway, measure)
        if comparison.passed:
            return comparison
        ours = mine = on_host(made)
        for results in self._owns():
            own = taken(results[place])
            ours = mine = self._endless(ours, own)
            comparison = compared(ours, sides, own, types, leeway, measure)
            if comparison.passed:
                return comparison
        for own in self._roundings(place, chosen):
            comparison = compared(ours, sides, own, types, leeway)
            if comparison.passed:
                return comparison
        if not comparison.passed and precision.decides:
            sides += [taken(entry[place]) for entry in reference.nudged(arrays)]
            comparison = compared(ours, sides, own, types, leeway)
        if not comparison.passed and precision.reduces:
            hidden = [taken(entry[place]) for entry in reference.hidden(arrays)]
            ours, sides = self._unhidden(place, ours, chosen, hidden), [*sides, *hidden]
            comparison = compared(ours, sides, own, types, leeway)
        if not comparison.passed and types[0] in TABLE and not np.isfinite(own).all():
            single = taken(reference.single(arrays)[place])
            leeway = replace(leeway, nearness=near(single, wanted, own))
            mine = replace_unowed(ours, single, wanted, own)
            comparison = compared(mine, sides, own, types, leeway)
        if not comparison.passed and mine.shape == wanted.shape and (types[0] in TABLE or precision.decides):
            found = self._wavered(
                place, mine, chosen, lambda got, more: compared(got, [*sides, *more], own, types, leeway))
            comparison = found if found.passed else comparison
        return comparison

    def _roundings(self, place: int, chosen: Array | None) -> Iterator[Array]:
        """The original's own results where products of float32 round their operands; then where they cut them off, too,
        whichever is farther from what is wanted."""
        rounded = self.reference.rounded(self.arrays)
        if rounded is not None:
            yield (own := _taken(rounded[place], chosen))
        cut = None if rounded is None else self.reference.cut(self.arrays)
        if cut is not None:
            yield _farther(_taken(self.wanted[place], chosen), own, _taken(cut[place], chosen))

    def _endless(self, got: Array, own: Array) -> Array:
        """A kernel's result with the original's own where neither is a number, and values inside of an operator may
        not have been: whether a share of infinity is that, or none, follows from how small shares become."""
        if self.reference.spelled is self.reference.body or not is_float(got):
            return got
        with np.errstate(invalid="ignore"):
            lost = ~np.isfinite(got.astype(np.float64)) & ~np.isfinite(own.astype(np.float64))
        return np.where(lost, own.astype(got.dtype), got)

    def _unhidden(self, place: int, got: Array, chosen: Array | None, hidden: Sequence[Array]) -> Array:
        """A kernel's result with the reference's where that is no number and the kernel's is one, as near to what
        ``hidden`` has, where nothing that a mask hides shows, as the original's own result is: of numbers that cancel
        no share of them tells how near that may be."""
        seen = self.reference.seen(self.arrays)
        if self.feeds.finite or seen is None or not hidden or not is_float(got):
            return got
        wanted = _taken(self.wanted[place], chosen)
        lost = np.isfinite(got.astype(np.float64)) & ~np.isfinite(wanted)
        own = _taken((self.reference.rounded(seen) or self.reference.own(seen))[place], chosen)
        with np.errstate(over="ignore"):
            mine = np.where(lost, got, hidden[-1].astype(got.dtype))
        found = compared(mine, hidden[::-1], own, self._types(place), self._leeway(place))
        return np.where(lost, wanted.astype(got.dtype), got) if found.passed else got

    @cached_property
    def _moves(self) -> Moves:
        """How far the results may be off because of what cancels in them."""
        return Moves(self.wanted, self.reference.wavering(self.arrays, self.length))

    def _wavered(self, place: int, got: Array, chosen: Array | None,
                 judge: Callable[[Array, Sequence[Array]], Comparison]) -> Comparison:
        """What ``judge`` says of a kernel's result, and of what it may be beside the reference, as far as it is beyond
        what a wavering body's evaluations allow: of floats how far these move, of what a computed number decides that
        it is what one of them gives, and of bytes, to which numbers are quantised, that it lies between what they give.
        """
        if not is_float(got):
            given = [_taken(each, chosen) for each in self._moves.given(place)]
            if got.dtype in (np.int8, np.uint8):
                got = np.where((np.minimum.reduce(given) <= got) & (got <= np.maximum.reduce(given)), given[0], got)
            return judge(got, given[1:])
        exact = _taken(self.wanted[place], chosen)

        def beyond(largest: Array) -> Comparison:
            return judge(replace_moved(got, exact, _taken(largest, chosen)), ())

        return beyond(self._moves.largest(place, lambda largest: beyond(largest).wrong))


@overload
def _taken(values: Array, chosen: Array | None) -> Array: ...
@overload
def _taken(values: Values, chosen: Array | None) -> Values: ...
def _taken(values: Values, chosen: Array | None) -> Values:
    """Those elements that a sample has, on the host; all of them, where they are, where there is none."""
    if chosen is None:
        return values
    flat = values.reshape(-1)
    if isinstance(flat, DeviceArray):
        return flat.gathered(pieces(flat.size))
    return flat[chosen]


def with_their_kernels(results: list[NodeResult]) -> list[NodeResult]:
    """Results in which every node that shares a failed node's kernel has failed too."""
    failed = {result.op: result for result in reversed(results) if result.verdict == "failed"}
    return [
        replace(result, verdict="failed", message=f"the kernel that it shares with {failed[result.op].node} failed")
        if result.op in failed and result.verdict != "failed" else result
        for result in results
    ]


def _kernel_key(node: FusedNode, feeds: Mapping[str, Array]) -> tuple[Any, ...]:
    shapes = tuple((name, array.shape, str(array.dtype)) for name, array in sorted(feeds.items()))
    return node.op, node.source, node.plan, shapes


def _explained(comparison: Comparison) -> str:
    if comparison.got.startswith("shape"):
        return f"{comparison.got} instead of {comparison.wanted}"
    where = f"at {list(comparison.where)} {comparison.got} instead of {comparison.wanted}"
    if comparison.wrong == 0:
        return f"the root mean square error is {comparison.ratio:.1f} times what is allowed; the worst element, {where}"
    return f"{comparison.wrong} of {comparison.count} elements are wrong; the worst, {where}"


def _farther(wanted: Array, one: Array, other: Array) -> Array:
    """Of two results each element that is farther from what is wanted."""
    with np.errstate(invalid="ignore", over="ignore"):
        mine, others = (np.abs(each.astype(np.float64) - wanted) for each in (one, other))
    return np.where(others > mine, other, one)
