"""What the operators owe for NaN, infinity and integers at their limits, where the CPU provider gives something else.

docs/edge-values.md says what is owed and why: by the standard where it says, else by the CUDA provider, as measured.
Here the operators that the CPU provider computes otherwise are spelled out, so that every reference gives what a kernel
must:

    Cast to an integer       NaN and what is out of range as the GPU converts them
    ReduceMax and ReduceMin  NaN where one is in the row; so do MaxPool, GlobalMaxPool and ReduceLogSumExp
    MaxPool                  -infinity where a window holds nothing else
    ReduceLogSumExp          the extremum of a row where that is infinite; Erf: NaN of NaN; PRelu: no product where the
                             operand is positive; BitShift: 0 by the width or more (ONNX Runtime before 1.27)
    Max and Min              of integers of 8 and 16 bits, which not every release has
    LogSoftmax               NaN where Softmax is (float64)
    Sign                     0 of NaN
    Clip                     the limits of the declared type where one is absent
    QuantizeLinear           to 8 bits the zero point for NaN
    DynamicQuantizeLinear    the scale is NaN where an element is, and the zero point 0
    Pow, Div, Mod            of integers: the nearest number that there is, and -1 as a divisor ends no process
    ReduceSum of int64       exact, not in float64
    ReduceSum, ReduceProd    of int32: the nearest number that there is
    LayerNormalization       the variance of what is centred (ONNX Runtime before 1.27)
    GroupNormalization       in float64 inside too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto, helper

from onnxfuse.ir.scalars import TYPES, limits
from onnxfuse.verifying.spelling import Spelling, attribute, with_nodes

_WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
_PLAIN_INTEGERS = (TensorProto.INT32, TensorProto.INT64)
_SHORT_INTEGERS = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
_TWO_32, _TWO_63, _TWO_64 = 2**32, 2.0**63, 2.0**64


@dataclass(frozen=True)
class _Site:
    """A node that is spelled out, where it stands.

    Attributes:
        node: it; to: the nodes in its place.
        kind: the type of its first operand, which is computed in; declared: the one that the original has there.
        target: the type of its first result.
    """

    node: onnx.NodeProto
    to: Spelling
    kind: int
    declared: int
    target: int

    @property
    def result(self) -> str:
        """The name of what is computed."""
        return str(self.node.output[0])

    def again(self, operand: str, result: str = "", op: str = "") -> str:
        """The node on another first operand."""
        node = onnx.NodeProto()
        node.CopyFrom(self.node)
        node.op_type = op or node.op_type
        node.input[0] = operand
        node.output[0] = result or f"{self.to.stem}.{len(self.to.nodes)}"
        self.to.nodes.append(node)
        return str(node.output[0])

    def number(self, value: float) -> str:
        """A scalar of the type that is computed in."""
        return self.to.number(value, self.kind)


def decomposed(model: onnx.ModelProto, types: Mapping[str, int], declared: Mapping[str, int]) -> onnx.ModelProto:
    """The model with such operators spelled out.

    Args:
        types: element types of the model's values.
        declared: by a node's first output, the type that its first operand has in the original, where it is another.
    """
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 1)
    nodes: list[onnx.NodeProto] = []
    for place, node in enumerate(model.graph.node):
        domain = "" if node.domain == "ai.onnx" else node.domain
        way = _WAYS.get((domain, node.op_type))
        kind = types.get(node.input[0]) if way is not None and node.input else None
        if way is None or kind is None:
            nodes.append(node)
            continue
        name = node.output[0]
        site = _Site(node, Spelling(f"decomposed{place}", opset), kind, declared.get(name, kind), types.get(name, kind))
        nodes.extend(site.to.nodes if way(site) else [node])
    return with_nodes(model, nodes)


def _cast(site: _Site) -> bool:
    if not TYPES.get(site.kind, _NOTHING).is_floating or TYPES.get(site.target, _FLOATING).is_floating:
        return False
    if site.target == TensorProto.BOOL:
        return False
    value = site.node.input[0]
    wide = value if site.kind == TensorProto.DOUBLE else site.to.step("Cast", value, to=TensorProto.DOUBLE)
    _truncated(site.to, wide, site.target, site.result, short=site.declared != TensorProto.DOUBLE)
    return True


_NOTHING, _FLOATING = TYPES[TensorProto.BOOL], TYPES[TensorProto.FLOAT]


def _truncated(to: Spelling, value: str, target: int, result: str, short: bool = False) -> None:
    """A float64 as an integer, as the GPU converts it: the nearest limit for what is out of range of 32 or 64 bits,
    shorter ones the lowest bits of 32; NaN gives the highest bit alone, and 0 where ``short``, which floats of 32 bits
    and fewer are, to 32 bits."""
    step = to.step
    signed = limits(target)[0] < 0
    long = TYPES[target].size == 8
    width = 64 if long else 32
    nothing = 0.0 if short and not long else -(2.0 ** (width - 1)) if signed else 2.0 ** (width - 1)
    value = step("Where", step("IsNaN", value), to.number(nothing), value)
    value = step("Max", value, to.number(-(2.0 ** (width - 1)) if signed else 0.0))
    if not long:
        value = step("Min", value, to.number(2.0 ** (31 if signed else 32) - 1))
        # Two casts in a row ONNX Runtime makes one, whatever its optimisations.
        whole = step("Add", step("Cast", value, to=TensorProto.INT64), to.number(0, TensorProto.INT64))
        step("Cast", whole, result=result, to=target)
        return
    # float64 does not have the highest integers: they are put together in int64.
    lowest, highest = limits(TensorProto.INT64)
    upper = step("Not", step("Less", value, to.number(_TWO_63)))
    if signed:
        whole = step("Cast", step("Where", upper, to.number(0.0), value), to=TensorProto.INT64)
        step("Where", upper, to.number(highest, TensorProto.INT64), whole, result=result)
        return
    beyond = step("Not", step("Less", value, to.number(_TWO_64)))
    rest = step("Where", upper, step("Sub", value, to.number(_TWO_63)), value)
    whole = step("Cast", step("Where", beyond, to.number(0.0), rest), to=TensorProto.INT64)
    top = step("Where", upper, to.number(lowest, TensorProto.INT64), to.number(0, TensorProto.INT64))
    bits = step("Where", beyond, to.number(-1, TensorProto.INT64), step("Add", whole, top))
    step("Cast", bits, result=result, to=target)


def _unknown(site: _Site, value: str) -> str:
    """1 where an element is NaN, else 0."""
    return site.to.step("Where", site.to.step("IsNaN", value), site.number(1.0), site.number(0.0))


def _guarded(site: _Site, found: str, among: str) -> None:
    """The result: what was found, and NaN where the largest of ``among``, 1 or 0, is 1."""
    there = site.to.step("Less", site.number(0.5), among)
    site.to.step("Where", there, site.number(float("nan")), found, result=site.result)


def _row_known(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value = site.node.input[0]
    # ReduceLogSumExp takes axes as an input from the same version on as ReduceMax.
    _guarded(site, site.again(value), site.again(_unknown(site, value), op="ReduceMax"))
    return True


def _log_sum_exp(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value = site.node.input[0]
    largest = site.again(value, op="ReduceMax")
    found = site.to.step("Where", site.to.step("IsInf", largest), largest, site.again(value))
    _guarded(site, found, site.again(_unknown(site, value), op="ReduceMax"))
    return True


def _global_max_pool(site: _Site) -> bool:
    """As a maximum over rows: the pool takes the lowest number for a row that is -infinity everywhere."""
    if site.kind not in _WIDE:
        return False
    to, value = site.to, site.node.input[0]
    step = to.step

    def largest(of: str) -> str:
        if to.opset >= 18:
            return step("ReduceMax", of, to.integers(-1), keepdims=0)
        return step("ReduceMax", of, axes=[-1], keepdims=0)

    shape = step("Shape", value)
    inner = step("Slice", shape, to.integers(2), to.integers(1 << 30))
    rows = step("Gather", shape, to.integers(0, 1))
    flat = step("Concat", rows, step("ReduceProd", inner, keepdims=1), axis=0)
    apart, unknown = step("Reshape", value, flat), step("Reshape", _unknown(site, value), flat)
    one = to.integers(1)
    back = step("Concat", rows, step("Sub", inner, step("Sub", inner, one)), axis=0)
    _guarded(site, step("Reshape", largest(apart), back), step("Reshape", largest(unknown), back))
    return True


def _max_pool(site: _Site) -> bool:
    """The largest of the numbers, where a window has one: the pool takes the lowest for one of -infinity alone."""
    if site.kind not in _WIDE or any(site.node.output[1:]):
        return False
    step, value, none = site.to.step, site.node.input[0], site.number(float("-inf"))
    known = step("Where", step("IsNaN", value), none, value)
    above = step("Where", step("Less", none, known), site.number(1.0), site.number(0.0))
    some = step("Less", site.number(0.5), site.again(above))
    _guarded(site, step("Where", some, site.again(known), none), site.again(_unknown(site, value)))
    return True


def _log_softmax(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value = site.node.input[0]
    bad = site.to.step("IsNaN", site.again(value, op="Softmax"))
    site.to.step("Where", bad, site.number(float("nan")), site.again(value), result=site.result)
    return True


def _sign(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value = site.node.input[0]
    site.again(site.to.step("Where", site.to.step("IsNaN", value), site.number(0.0), value), site.result)
    return True


def _erf(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value = site.node.input[0]
    site.to.step("Where", site.to.step("IsNaN", value), value, site.again(value), result=site.result)
    return True


def _prelu(site: _Site) -> bool:
    if site.kind not in _WIDE:
        return False
    value, slope = site.node.input
    negative = site.to.step("Less", value, site.number(0.0))
    site.to.step("Where", negative, site.to.step("Mul", value, slope), value, result=site.result)
    return True


def _shift(site: _Site) -> bool:
    """By less than the width, and where that is not all, once more: that is nothing at all."""
    to, (value, by) = site.to, site.node.input
    way = next(attribute.s.decode() for attribute in site.node.attribute if attribute.name == "direction")
    wide = to.step("Cast", by, to=TensorProto.DOUBLE)
    most = to.number(8.0 * TYPES[site.kind].size - 1)
    first = to.step("Cast", to.step("Min", wide, most), to=site.kind)
    rest = to.step("Cast", to.step("Less", most, wide), to=site.kind)
    to.step("BitShift", to.step("BitShift", value, first, direction=way), rest, result=site.result, direction=way)
    return True


def _extremum(site: _Site) -> bool:
    if site.kind not in _SHORT_INTEGERS:
        return False
    wide = [site.to.step("Cast", name, to=TensorProto.INT32) for name in site.node.input]
    site.to.step("Cast", site.to.step(site.node.op_type, *wide), to=site.kind, result=site.result)
    return True


def _clip(site: _Site) -> bool:
    given = [*site.node.input[1:], "", ""][:2]
    if site.kind not in _WIDE or all(given) or site.to.opset < 11:
        return False
    bounds = [name or site.number(limit) for name, limit in zip(given, limits(site.declared), strict=True)]
    site.to.step("Clip", site.node.input[0], *bounds, result=site.result)
    return True


def _quantize(site: _Site) -> bool:
    if site.kind not in _WIDE or TYPES.get(site.target, _NOTHING).size != 1:
        return False  # to 16 bits there is no CUDA kernel, and the CPU provider's is the one that runs
    to, (value, scale) = site.to, site.node.input[:2]
    node = onnx.NodeProto()
    node.CopyFrom(site.node)
    known = to.step("Where", to.step("IsNaN", value), site.number(0.0), value)
    # 0 / 0 and by what is infinite or NaN give the zero point too: nothing may stay infinite itself.
    least, most = (site.number(limit) for limit in limits(TensorProto.FLOAT))
    node.input[0] = to.step("Min", to.step("Max", known, least), most)
    scale = to.step("Where", to.step("IsNaN", scale), site.number(float("inf")), scale)
    least = to.step("Equal", scale, site.number(0.0))
    node.input[1] = to.step("Where", least, site.number(2.0**-149), scale)
    to.nodes.append(node)
    return True


def _dynamic_quantize(site: _Site) -> bool:
    """As the standard has it, in float32; the scale of zeros is 1, as the CPU provider has that."""
    if site.kind == TensorProto.DOUBLE:
        return _narrowly(site)
    if site.kind != TensorProto.FLOAT:
        return False
    step, value = site.to.step, site.node.input[0]
    result, scale, point = [*site.node.output, "", ""][:3]
    zero, nothing = site.number(0.0), site.number(float("nan"))
    unknown = step("Less", zero, step("ReduceMax", _unknown(site, value), keepdims=0))
    least, most = (step("Where", unknown, nothing, step(kind, step(f"Reduce{kind}", value, keepdims=0), zero))
                   for kind in ("Min", "Max"))
    share = step("Div", step("Sub", most, least), site.number(255.0))
    scale = step("Where", step("Equal", least, most), site.number(1.0), share, result=scale)
    place = step("Div", step("Neg", least), scale)
    known = step("Where", step("IsNaN", place), zero, place)
    near = step("Round", step("Clip", known, zero, site.number(255.0)))
    point = step("Cast", near, to=TensorProto.UINT8, result=point)
    node = helper.make_node("QuantizeLinear", [value, scale, point], [result])
    return _quantize(replace(site, node=node, target=TensorProto.UINT8))


def _narrowly(site: _Site) -> bool:
    """The same of what is float64 in a reference: there is no other type for it, and what it rounds hangs on that."""
    node = onnx.NodeProto()
    node.CopyFrom(site.node)
    node.input[0] = site.to.step("Cast", site.node.input[0], to=TensorProto.FLOAT)
    scale = "".join(site.node.output[1:2])
    if scale:
        node.output[1] = f"{site.to.stem}.narrow"
    _dynamic_quantize(replace(site, node=node, kind=TensorProto.FLOAT))
    if scale:
        site.to.step("Cast", node.output[1], to=TensorProto.DOUBLE, result=scale)
    return True


def _power(site: _Site) -> bool:
    if site.kind not in _PLAIN_INTEGERS:
        return False
    to = site.to
    base, exponent = (to.step("Cast", name, to=TensorProto.DOUBLE) for name in site.node.input)
    _truncated(to, to.step("Pow", base, exponent), site.kind, site.result)
    return True


def _minus_one(site: _Site) -> tuple[str, str]:
    """Where the divisor is -1, and the divisor with 1 there: an x86 processor stops at the lowest number by -1."""
    by = site.node.input[1]
    there = site.to.step("Equal", by, site.number(-1))
    return there, site.to.step("Where", there, site.number(1), by)


def _divide(site: _Site) -> bool:
    if site.kind not in _PLAIN_INTEGERS:
        return False
    there, by = _minus_one(site)
    sign = site.to.step("Where", there, site.number(-1), site.number(1))
    site.to.step("Mul", site.to.step("Div", site.node.input[0], by), sign, result=site.result)
    return True


def _modulo(site: _Site) -> bool:
    if site.kind not in _PLAIN_INTEGERS:
        return False
    to, value, by = site.to, site.node.input[0], _minus_one(site)[1]
    if next((attribute.i for attribute in site.node.attribute if attribute.name == "fmod"), 0):
        # The CPU provider's own goes by way of float64.
        to.step("Sub", value, to.step("Mul", to.step("Div", value, by), by), result=site.result)
    else:
        to.step("Mod", value, by, result=site.result)
    return True


def _sum(site: _Site) -> bool:
    """Of int64 the upper and the lower halves apart: float64 has the sums of either exactly."""
    if site.kind != TensorProto.INT64:
        return _saturated(site)
    to, value = site.to, site.node.input[0]
    half = to.integers(_TWO_32)
    lower = to.step("Mod", value, half)
    upper = to.step("Div", to.step("Sub", value, lower), half)
    summed = to.step("Mul", site.again(upper), to.number(_TWO_32, TensorProto.INT64))
    to.step("Add", summed, site.again(lower), result=site.result)
    return True


def _saturated(site: _Site) -> bool:
    if site.kind != TensorProto.INT32:
        return False
    wide = site.to.step("Cast", site.node.input[0], to=TensorProto.DOUBLE)
    _truncated(site.to, site.again(wide), TensorProto.INT32, site.result)
    return True


def _layer_normalization(site: _Site) -> bool:
    """The squares of what is centred: before ONNX Runtime 1.27 the difference of two means, which for a row of one
    large number may be negative."""
    if site.kind != TensorProto.DOUBLE or any(site.node.output[1:]):
        return False
    step, (value, scale, *shift) = site.to.step, site.node.input
    axis = next((each.i for each in site.node.attribute if each.name == "axis"), -1)
    rows = step("Flatten", value, axis=axis)
    centred = step("Sub", rows, site.to.row_mean(rows))
    variance = step("Add", site.to.row_mean(step("Mul", centred, centred)),
                    site.number(attribute(site.node, "epsilon", 1e-5)))
    normal = step("Reshape", step("Div", centred, step("Sqrt", variance)), step("Shape", value))
    if shift and shift[0]:
        step("Add", step("Mul", normal, scale), shift[0], result=site.result)
    else:
        step("Mul", normal, scale, result=site.result)
    return True


def _group_normalization(site: _Site) -> bool:
    """A function of float32 inside, whatever it is given, unless told otherwise."""
    if site.kind != TensorProto.DOUBLE or site.to.opset < 21:
        return False
    node = onnx.NodeProto()
    node.CopyFrom(site.node)
    kept = [attribute for attribute in node.attribute if attribute.name != "stash_type"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("stash_type", int(TensorProto.DOUBLE))])
    site.to.nodes.append(node)
    return True


_WAYS: Mapping[tuple[str, str], Callable[[_Site], bool]] = {
    ("", "Cast"): _cast, ("", "CastLike"): _cast, ("", "ReduceMax"): _row_known, ("", "ReduceMin"): _row_known,
    ("", "ReduceLogSumExp"): _log_sum_exp, ("", "GlobalMaxPool"): _global_max_pool, ("", "LogSoftmax"): _log_softmax,
    ("", "MaxPool"): _max_pool,
    ("", "Sign"): _sign, ("", "Clip"): _clip, ("", "QuantizeLinear"): _quantize,
    ("", "DynamicQuantizeLinear"): _dynamic_quantize, ("", "Pow"): _power,
    ("", "Div"): _divide, ("", "Mod"): _modulo, ("", "ReduceSum"): _sum,
    ("", "ReduceProd"): _saturated, ("", "Erf"): _erf, ("", "PRelu"): _prelu, ("", "BitShift"): _shift,
    ("", "LayerNormalization"): _layer_normalization, ("", "Max"): _extremum, ("", "Min"): _extremum,
    ("", "GroupNormalization"): _group_normalization, ("com.microsoft", "QuantizeLinear"): _quantize,
}
"""By domain and operator: spells a node out and says so, or that it need not."""
