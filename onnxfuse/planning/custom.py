"""A match of a rule that brings its own CUDA kernel, as a kernel like any other."""

from __future__ import annotations

from collections.abc import Mapping

from onnxfuse.graph.dims import product
from onnxfuse.graph.model import Value
from onnxfuse.ir.scalars import TYPES
from onnxfuse.ir.tensors import Input
from onnxfuse.lowering.binding import Binding, bind
from onnxfuse.lowering.launch import LaunchPlan, Output, Step, Variant, expression
from onnxfuse.refusal import Refusal
from onnxfuse.rules import FuseRule, Match, postfix
from onnxfuse.rules.kernels import axes
from onnxfuse.rules.kinds import Kernel as RuleKernel
from onnxfuse.schedules import USER, Kernel
from onnxfuse.schedules.source import Given


def custom_kernel(match: Match) -> tuple[Kernel, tuple[Value, ...], tuple[Value, ...]] | Refusal:
    """The kernel of a rule, its inputs and its outputs, for one match.

    The launch sizes of the rule become expressions of the plan.  The text of the kernel is the user's: it is compiled
    as it stands.
    """
    spec = _spec(match)
    values = _operands(match, spec)
    if isinstance(values, Refusal):
        return values
    inputs, outputs = [values[name] for name in spec.inputs], [values[name] for name in spec.outputs]
    binding = bind([Input(value.dtype or 0, value.shape or (), place) for place, value in enumerate(inputs)])
    for value in outputs:
        if any(not size.symbols <= binding.symbols.keys() for size in value.shape or ()):
            return _refuse(match, "unbound-size", f"the sizes of '{value.name}' cannot be computed from the inputs")
    said = _missing_axis(spec, values)
    if said is not None:
        return _refuse(match, "rank", said)
    plan = LaunchPlan(
        match.rule.id,
        len(inputs),
        binding.sources,
        binding.checks,
        tuple(
            Output(value.dtype or 0, tuple(expression(size, binding.symbols) for size in value.shape or ()))
            for value in outputs
        ),
        (Variant("user", (_step(spec, values, binding),)),),
    )
    return Kernel(USER, Given(spec.source), plan), tuple(inputs), tuple(outputs)


def _spec(match: Match) -> RuleKernel:
    assert isinstance(match.rule, FuseRule)
    spec = match.rule.kernel
    assert spec is not None
    return spec


def _operands(match: Match, spec: RuleKernel) -> dict[str, Value] | Refusal:
    """What the kernel reads and writes, by the pattern's names."""
    values: dict[str, Value] = {}
    for name in (*spec.inputs, *spec.outputs):
        value = match.bindings.get(name)
        if not isinstance(value, Value):
            return _refuse(match, "kernel-operand", f"the pattern's '{name}' is absent here, and the kernel reads it")
        if value.shape is None or value.dtype not in TYPES:
            return _refuse(match, "unknown-shape", f"the shape or type of '{value.name}' is not known")
        values[name] = value
    return values


def _missing_axis(spec: RuleKernel, values: Mapping[str, Value]) -> str | None:
    """An axis that the launch asks for and an operand lacks, in words; None where there is none."""
    asked = (*spec.grid, *spec.block, spec.shared, *(tree for _, tree in spec.arguments))
    for name, axis in (pair for tree in asked for pair in axes(tree)):
        rank = len(values[name].shape or ())
        if not -rank <= axis < rank:
            return f"the kernel's launch asks for axis {axis} of '{name}', which has {rank} axes here"
    return None


def _step(spec: RuleKernel, values: Mapping[str, Value], binding: Binding) -> Step:
    """The launch of the kernel, its sizes expressions of the plan."""

    def atom(name: str, axis: int | None) -> str:
        return _atom(values[name], spec.inputs.index(name) if name in spec.inputs else None, axis, binding)

    def three(trees: tuple[object, object, object]) -> tuple[str, str, str]:
        x, y, z = (postfix(tree, atom) for tree in trees)  # type: ignore[arg-type]
        return x, y, z

    arguments = [f"i{place}" for place in range(len(spec.inputs))] + [f"o{place}" for place in range(len(spec.outputs))]
    arguments += [f"{kind}:{postfix(tree, atom)}" for kind, tree in spec.arguments]
    return Step(spec.entry, three(spec.grid), three(spec.block), tuple(arguments), postfix(spec.shared, atom))


def _atom(value: Value, place: int | None, axis: int | None, binding: Binding) -> str:
    shape = value.shape or ()
    if place is not None:
        return f"i{place}.n" if axis is None else f"i{place}.{axis % len(shape)}"
    return expression(product(shape) if axis is None else shape[axis], binding.symbols)


def _refuse(match: Match, code: str, message: str) -> Refusal:
    return Refusal(code, message, match.nodes[-1].label, match.rule.id)
