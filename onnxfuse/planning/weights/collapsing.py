"""Constants beside a product or a convolution, and products before it, folded into its weights.

    x ─ Mul s ─ Add t ─▶ MatMul W ─ Add b ─ Mul g ─▶ y        x ─▶ MatMul W1 ─ Add b1 ─▶ MatMul W2 ─▶ y
    the kernel computes  x (s W g) + (t W + b) g              the kernel computes  x (W1 W2) + b1 W2

A region that holds all of that has a kernel that reads other weights than its nodes do; the fused node's function holds
the nodes as they are, so that the file computes what it did wherever no library is registered, and the kernel is
verified against them.  The nodes' own weights are operands of the fused node in host memory, which no kernel reads.

What changes no digit of a weight (powers of two, permutations) may always be folded, all else only where that is asked
for: the new weights are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxfuse.graph.dims import dim
from onnxfuse.graph.model import Graph, Node, Value
from onnxfuse.ir.scalars import FLOAT, NARROW, TYPES
from onnxfuse.operators.classes import weights_axis
from onnxfuse.operators.operands import number_attribute
from onnxfuse.planning.weights.linear import Linear, typed
from onnxfuse.planning.weights.steps import VIEWS, Step, along, step_of, viewed
from onnxfuse.planning.weights.transposing import dequantised_weights, size_of, transposed
from onnxfuse.refusal import Refusal
from onnxfuse.wording import option

Array = NDArray[Any]

CODE = "weights"
"""The code of refusals."""

MOST_BYTES = 256 << 20
"""By how much folded weights may make a file larger."""

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv"})


@dataclass(frozen=True)
class Fold:
    """Nodes of the canonical view whose constants are in other weights.

    Attributes:
        nodes: the nodes; instead: what stands for each when a kernel is made of them.
        made: the new weights and biases; words: what was folded into what, as users read it.
        collapses: whether products that follow one another are one.
        beneath: nodes of constants that the function holds too, which a session computes once.
    """

    nodes: frozenset[Node]
    instead: Mapping[Node, tuple[Node, ...]]
    made: tuple[Value, ...]
    words: str
    collapses: bool
    beneath: frozenset[Node] = frozenset()

    def with_(self, other: Fold) -> Fold:
        """Both, of products side by side."""
        return Fold(self.nodes | other.nodes, {**self.instead, **other.instead}, (*self.made, *other.made),
                    f"{self.words}; {other.words}", self.collapses or other.collapses)


@dataclass(frozen=True)
class Chain:
    """A product with what is beside it.

    Attributes:
        product: the last one; products: those before it, and before what is before them, the nearest first.
        before: by product what is done to its operand, the nearest step first.
        behind: what is done to the result, and passed: views between that.
    """

    product: Node
    products: tuple[Node, ...]
    before: Mapping[Node, tuple[Step, ...]]
    behind: tuple[Step, ...]

    @property
    def head(self) -> Node:
        """The first product."""
        return self.products[-1] if self.products else self.product

    @property
    def every(self) -> tuple[Node, ...]:
        """All products, the last one first."""
        return (self.product, *self.products)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps."""
        return (*(step for each in self.every for step in self.before[each]), *self.behind)

    @property
    def core(self) -> frozenset[Node]:
        """What a region has to hold beside the product for a fold that its growth would not find."""
        ordering = [place for place, step in enumerate(self.behind) if step.order is not None]
        behind = self.behind[:1 + max(ordering, default=-1)]
        before = [step.node for each in self.every for step in self.before[each]]
        return frozenset((*self.products, *before, *(step.node for step in behind)))

    @property
    def gains(self) -> bool:
        """Whether a kernel has less to compute: one bias behind a product is no more than it is as its own."""
        return bool(self.products) or self.core != frozenset() or any(not step.adds for step in self.behind) or any(
            number_attribute(node, "alpha", 1.0) != 1.0 for node in self.every)

    @cached_property
    def words(self) -> str:
        """What is folded into what."""
        folded = [each.op for each in self.products] + [step.node.op for step in self.steps]
        if not folded:
            return f"alpha into {self.product.label}"
        return f"{' + '.join(dict.fromkeys(folded))} into {self.product.label}"


@dataclass
class Folds:
    """What can be folded in one graph.

    Attributes:
        graph: the model's graph, not its canonical view.
        rounding: whether weights may be rounded anew.
    """

    graph: Graph
    rounding: bool = False
    _known: dict[tuple[Node, frozenset[Node]], Fold | Refusal] = field(default_factory=dict, repr=False)
    _bytes: dict[Node, int] = field(default_factory=dict, repr=False)
    _names: set[str] = field(default_factory=set, repr=False)

    def __post_init__(self) -> None:
        self._names |= {name for graph in self.graph.walk() for name in graph.values}

    def core(self, product: Node, known: Collection[Node]) -> frozenset[Node]:
        """What beside a product a region has to hold for a fold; nothing where a region finds it as it grows."""
        chain = self._chain(product, known)
        return frozenset() if chain is None else chain.core

    def of(self, members: Collection[Node]) -> tuple[Fold | None, tuple[Refusal, ...]]:
        """What can be folded in a region, and why other constants cannot."""
        found: Fold | None = None
        refusals = []
        rest = set(members)  # what is folded into one product is not into another
        for node in sorted(members, key=lambda node: -node.index):
            if (dequantises := dequantised_weights(node, members, self.graph)) is not None:
                made = self._transposed(dequantises)
                found = found if made is None else made if found is None else found.with_(made)
            chain = self._chain(node, rest) if node in rest else None
            if chain is None or not chain.gains:
                continue
            nodes = frozenset((*chain.every, *(step.node for step in chain.steps)))
            rest -= nodes
            if (node, nodes) not in self._known:
                self._known[node, nodes] = self._folded(chain, nodes)
            folded = self._known[node, nodes]
            if isinstance(folded, Refusal):
                refusals.append(folded)
            else:
                found = folded if found is None else found.with_(folded)
        return found, tuple(refusals)

    def admits(self, node: Node, size: int) -> bool:
        """Whether a file may be so many bytes larger for weights of a node's, which count from then on."""
        admitted = sum(self._bytes.values()) + size <= MOST_BYTES
        if admitted:
            self._bytes[node] = max(size, self._bytes.get(node, 0))
        return admitted

    def constant(self, node: Node, name: str, shape: tuple[int, ...], contents: Callable[[], Array]) -> Value:
        """A new constant of the type of a node's weights."""
        number, free = 0, name
        while free in self._names:
            number += 1
            free = f"{name}_{number}"
        self._names.add(free)
        return Value(free, _dtype(node), tuple(map(dim, shape)), is_constant=True, contents=contents)

    def _transposed(self, node: Node) -> Fold | None:
        """Quantised weights that lie the other way; None where the file would grow too large."""
        key = node, frozenset({node})
        if key not in self._known:
            if not self.admits(node, size_of(node)):
                return None
            made = transposed(node, self._constant)
            words = f"a transpose into {node.label}"
            self._known[key] = Fold(key[1], {node: made.instead}, (made.weights,), words, collapses=False)
        known = self._known[key]
        return known if isinstance(known, Fold) else None

    # ---- Which nodes. ----

    def _chain(self, product: Node, members: Collection[Node]) -> Chain | None:
        """A product of a region with what is beside it in that."""
        if not is_product(product):
            return None
        products: list[Node] = []
        before: dict[Node, tuple[Step, ...]] = {}
        node, columns = product, features(product)
        while True:
            steps, value = _before(node, members)
            before[node] = steps
            first = value.producer
            if first is None or first not in members or not _alone(value, (steps[-1].node if steps else node)):
                break
            if not (self.rounding and is_product(first) and _joins(first, node) and _fewer(first, columns)):
                break
            products.append(first)
            node = first
        return Chain(product, tuple(products), before, _behind(product, members))

    # ---- What becomes of them. ----

    def _folded(self, chain: Chain, nodes: frozenset[Node]) -> Fold | Refusal:
        """The fold, or why there is none."""
        why = self._why_not(chain)
        if why:
            return self._refused(chain, why)
        exact = not chain.products and all(step.may_be_exact for step in chain.steps)
        if not self.rounding and not exact:
            return self._rounds(chain)
        parts = [_linear(node) for node in chain.every]
        endless = [node for node, part in zip(chain.every, parts, strict=True) if not part.is_finite]
        if endless:
            return self._refused(chain, f"a constant of {endless[0].label} is infinite or no number")
        made, why = typed(_united(chain, parts), _dtype(chain.product))
        if not why and not self.rounding and not made.exact:
            return self._rounds(chain)
        if why:
            return self._refused(chain, why)
        self._bytes[chain.product] = max(_size(chain), self._bytes.get(chain.product, 0))
        return self._stand_ins(chain, made, nodes)

    def _why_not(self, chain: Chain) -> str:
        """Why a chain's weights cannot be others, without a look at them; "" where they can."""
        for node in chain.every:
            weights = node.inputs[1]
            assert weights is not None
            own = self.graph.values[weights.name]
            if node.body is not None:
                return f"{node.label} is in a body"
            if own.external:
                return f"'{own.name}' lies in a file of its own, which is not read"
            if len(own.consumers) != 1 or own.is_output or own.inner:
                return f"'{own.name}' is read by others too"
        wrong = next((step.wrong for step in chain.steps if step.wrong), "")
        if wrong:
            return wrong
        if sum(self._bytes.values()) - self._bytes.get(chain.product, 0) + _size(chain) > MOST_BYTES:
            return f"folded weights would make the file more than {MOST_BYTES >> 20} MiB larger"
        return ""

    def _rounds(self, chain: Chain) -> Refusal:
        # It is no advice: what that gains is little, and nobody knows before both were measured.
        return self._refused(chain, f"its weights would be rounded anew, which {option('fold-weights')} allows")

    def _refused(self, chain: Chain, why: str) -> Refusal:
        return Refusal(CODE, f"{chain.words} is not folded: {why}", chain.product.label)

    def _stand_ins(self, chain: Chain, made: Linear, nodes: frozenset[Node]) -> Fold:
        """The nodes that a kernel is made of."""
        product, head = chain.product, chain.head
        source = (chain.before[head][-1].value if chain.before[head] else head.inputs[0])
        weights = self._constant(head, f"{_name(product)}_folded", _laid_out(made, head))
        bias = None if made.bias is None else self._constant(head, f"{_name(product)}_folded_bias", made.bias)
        instead: dict[Node, tuple[Node, ...]] = dict.fromkeys(nodes, ())
        for step in chain.behind:
            instead[step.node] = (replace(step.node, op="Identity", inputs=(step.value,), attributes={}),)
        attributes = {name: content for name, content in head.attributes.items() if name != "alpha"}
        kept = head.inputs[2:] if bias is None and _keeps_bias(head) else (bias,) * (bias is not None)
        if bias is not None:
            attributes.pop("beta", None)
        stand_in = replace(product, op=head.op, attributes=attributes, inputs=(source, weights, *kept))
        if bias is None or head.op != "MatMul":
            instead[product] = (stand_in,)
        else:
            (result,) = product.outputs
            assert result is not None
            bare = Value(f"{result.name}_bare", result.dtype, result.shape)
            instead[product] = (
                replace(stand_in, inputs=(source, weights), outputs=(bare,)),
                replace(product, op="Add", attributes={}, inputs=(bare, bias)),
            )
        new = (weights,) if bias is None else (weights, bias)
        return Fold(nodes, instead, new, chain.words, bool(chain.products))

    def _constant(self, node: Node, name: str, array: Array) -> Value:
        """The same of what is known already."""
        array = np.ascontiguousarray(array)
        array.flags.writeable = False
        return self.constant(node, name, array.shape, lambda: array)


# ---- Of nodes. ----


def is_product(node: Node) -> bool:
    """Whether a node multiplies by weights of the model, in types that kernels multiply."""
    if node.op not in PRODUCTS or node.domain or node.broken or len(node.inputs) < 2:
        return False
    operand, weights, result = node.inputs[0], node.inputs[1], node.outputs[0]
    if operand is None or weights is None or result is None or not weights.is_constant or weights.producer is not None:
        return False
    if weights.constant is None and weights.contents is None:
        return False
    shapes = [value.shape for value in (operand, weights, result)]
    ranks = [0 if shape is None else len(shape) for shape in shapes]
    fits = min(ranks) > 2 if node.op == "Conv" else ranks[1] == 2 and min(ranks) > 1
    return fits and 0 not in _sizes(node) and weights.dtype in {FLOAT, *NARROW} and not node.attributes.get("transA", 0)


def _sizes(node: Node) -> tuple[int, ...]:
    """Of a product's weights, which are constant."""
    weights = node.inputs[1]
    assert weights is not None and weights.shape is not None
    return tuple(size.value or 0 for size in weights.shape)


def features(node: Node) -> int:
    """Channels of a product's result."""
    return _sizes(node)[weights_axis(node)]


def _inner(node: Node) -> tuple[int, ...]:
    """What a channel of a product's result sums over."""
    sizes = _sizes(node)
    return sizes[1:] if node.op == "Conv" else (int(np.prod(sizes)) // max(features(node), 1),)


def _groups(node: Node) -> int:
    return int(node.attributes.get("group", 1)) if node.op == "Conv" else 1


def _channel(node: Node, value: Value | None) -> int:
    """Which axis of a product's operand, or result, has the channels."""
    assert value is not None and value.shape is not None
    return len(value.shape) - 1 if node.op == "MatMul" else 1


def _pads(node: Node) -> bool:
    """Whether a convolution's windows reach past its operand."""
    automatic = node.attributes.get("auto_pad", "NOTSET")
    return automatic not in ("NOTSET", "VALID") or (automatic == "NOTSET" and any(node.attributes.get("pads") or ()))


def _is_point(node: Node) -> bool:
    """Whether a product computes each place of its result from that place of its operand alone."""
    if node.op != "Conv":
        return True
    plain = all(step == 1 for step in (*_sizes(node)[2:], *(node.attributes.get("strides") or ())))
    return plain and not _pads(node)


def _bias(node: Node) -> Array | None:
    """A product's own bias by channel, where it has a constant one that is added to all rows."""
    value, result = (node.inputs[2] if len(node.inputs) > 2 else None), node.outputs[0]
    factor = number_attribute(node, "beta", 1.0)
    if value is None or result is None or value.producer is not None or not factor:
        return None
    found = along(value, result, 1) if node.op == "Gemm" else along(value, value, 0)
    return None if found is None else found * factor


def _keeps_bias(node: Node) -> bool:
    """Whether a product has a bias that stays what it is."""
    has = len(node.inputs) > 2 and node.inputs[2] is not None and number_attribute(node, "beta", 1.0) != 0
    return has and _bias(node) is None


def _joins(first: Node, second: Node) -> bool:
    """Whether two products, one of which reads the other's result, are a product."""
    if (first.op == "Conv") != (second.op == "Conv") or _groups(first) != 1 or _groups(second) != 1:
        return False
    return _is_point(second) and not _keeps_bias(first) and not _keeps_bias(second)


def _fewer(first: Node, columns: int) -> bool:
    """Whether a product with so many channels takes fewer operations than a first one and one of its result."""
    inner, between = int(np.prod(_inner(first))), features(first)
    return inner * between + between * columns > inner * columns


def _alone(value: Value, reader: Node) -> bool:
    """Whether one node alone reads a value."""
    return value.consumers == [reader] and not value.is_output and not value.inner


def _before(product: Node, members: Collection[Node]) -> tuple[tuple[Step, ...], Value]:
    """What is done to a product's operand, the nearest step first, and to what value."""
    value, reader = product.inputs[0], product
    assert value is not None
    channel, steps = _channel(product, value), []
    whole = not _pads(product) and not _keeps_bias(product)
    for node in _above(value, members):
        given = next((each for each in node.inputs if each is not None and not each.is_constant), None)
        step = None if given is None or given.shape != value.shape else step_of(node, given, channel)
        if step is None or not _alone(value, reader) or (step.addends is not None and not whole) or (
                step.order is not None and _groups(product) != 1):
            break
        steps.append(step)
        value, reader = step.value, node
    return tuple(steps), value


def _above(value: Value, members: Collection[Node]) -> Iterator[Node]:
    """Nodes of a region that compute a value, what the first operand of that is that is no constant, and so on."""
    node = value.producer
    while node is not None and node in members:
        yield node
        given = next((each for each in node.inputs if each is not None and not each.is_constant), None)
        node = None if given is None else given.producer


def _behind(product: Node, members: Collection[Node]) -> tuple[Step, ...]:
    """What is done to a product's result, views left out."""
    value, steps = product.outputs[0], []
    channel: int | None = _channel(product, value)
    while value is not None and len(value.consumers) == 1 and not _keeps_bias(product):
        (node,) = value.consumers
        if node not in members or not _alone(value, node):
            break
        step = step_of(node, value, channel)
        if step is not None and not (step.order is not None and _groups(product) != 1):
            steps.append(step)
        elif node.op in VIEWS and not node.domain and node.inputs[0] is value:
            channel = viewed(node, value, channel)
        else:
            break
        value = node.outputs[0]
    return tuple(steps)


# ---- Of weights. ----


def _linear(node: Node) -> Linear:
    """A product's weights and bias."""
    weights = node.inputs[1]
    assert weights is not None
    read = weights.constant if weights.contents is None else weights.contents()
    assert read is not None
    array = read.astype(np.float64)
    if node.op == "Conv":
        groups, sizes = _groups(node), _sizes(node)
        shaped = array.reshape(groups, sizes[0] // groups, sizes[1], -1)
    else:
        rows = array if node.op == "Gemm" and node.attributes.get("transB", 0) else array.T
        shaped = rows[np.newaxis, :, :, np.newaxis]
    linear, alpha = Linear(shaped), number_attribute(node, "alpha", 1.0)
    if node.op == "Gemm" and alpha != 1.0:
        linear = linear.scaled(np.array(alpha))
    bias = _bias(node)
    return linear if bias is None else linear.shifted(bias)


def _united(chain: Chain, parts: Collection[Linear]) -> Linear:
    """All of a chain as one."""
    made: Linear | None = None
    for node, part in zip(chain.every, parts, strict=True):
        made = part if made is None else made.after(part)
        for step in chain.before[node]:
            made = step.before(made)
    assert made is not None
    for step in chain.behind:
        made = step.behind(made)
    return made


def _laid_out(made: Linear, head: Node) -> Array:
    """Weights as a node reads them."""
    if head.op == "Conv":
        return made.weights.reshape(made.features, *_inner(head))
    rows = made.weights[0, :, :, 0]
    return rows if head.op == "Gemm" and head.attributes.get("transB", 0) else rows.T


def _dtype(node: Node) -> int:
    """Of a node's weights."""
    weights = node.inputs[1 if node.op in PRODUCTS else 0]
    assert weights is not None and weights.dtype is not None
    return weights.dtype


def _size(chain: Chain) -> int:
    """Bytes of a chain's weights."""
    return TYPES[_dtype(chain.product)].size * features(chain.product) * int(np.prod(_inner(chain.head)))


def _name(node: Node) -> str:
    weights = node.inputs[1]
    assert weights is not None
    return weights.name
