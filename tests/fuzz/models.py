"""Subject ``models``: small ONNX files of every kind that the tests make, damaged, through the whole tool.

Half of them are fused models, whose records and launch plans are damaged too.  A damaged model is loaded, planned,
rewritten, saved, read again and put back, some are verified as well; a fused one is reported and explained.  Whatever
it is, onnxfuse refuses it with a message that says where and what to do, or: what it makes of it turns back into it,
and where ONNX Runtime runs it, computes the same bit for bit.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import body_models
import branch_models
import cli_models
import numpy as np
import onnx
import onnxruntime
import quantized_models
import rewriting_models
import schema_graphs
import sizes_models
import test_broken_models as broken
from damage import NOT_UTF8, SMALL, damage_bytes, damage_json, damage_message, value_of
from ends import FaultError, beyond
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from onnxfuse import api, pipeline, reporting
from onnxfuse.errors import OnnxfuseError
from onnxfuse.graph import LoadedModel, build_graph, load_model
from onnxfuse.measuring import make_inputs
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.objective import Hints
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import save
from onnxfuse.rules import load_rules
from onnxfuse.rules.examples import example_model
from onnxfuse.verifying import runs
from onnxfuse.verifying.bounds import Bounds

SCHEMA_GRAPHS = 48
"""Random graphs of whatever the standard has."""

SECONDS = 0.5
"""A run that takes longer has no end: every model here runs for some milliseconds."""

ELEMENTS = 10**7
"""Inputs of more are not drawn: that takes longer than a case may."""

PROFILE = find_profile("H100")
USUAL = {"database": False, "least_gain": 0.0, "target": PROFILE, "verify": False}
RULES = load_rules([rules_folder()])
pipeline.load_rules = lambda *_: RULES  # reading them takes longer than most cases
runs.FLOPS, runs.BYTES = 10**8, 10**7  # of one run in verification
Bounds.of = staticmethod(lambda *_: Bounds(5.0, 1 << 30))  # it may take minutes, and most of the machine's memory
pipeline.check_original = lambda *_: None  # it asks ONNX Runtime whose fault an internal error is: here any is one

FUNCTIONS = """
<ir_version: 8, opset_import: ["" : 17, "here" : 1]>
g (float[n, 64] x, float[64] w) => (float[n, 64] y) {
  a = here.Scaled <alpha = 0.5> (x, w)
  b = here.Twice (a)
  y = Tanh (b)
}
<domain: "here", opset_import: ["" : 17]>
Scaled <alpha> (u, v) => (r) { k = Constant <value_float: float = @alpha> ()
  s = Mul (u, v)
  t = Sigmoid (s)
  r = Mul (t, k) }
<domain: "here", opset_import: ["" : 17, "here" : 1]>
Twice (u) => (r) { s = Add (u, u)
  r = Exp (s) }
"""

WEIGHTS = """
g (float[n, 64] x) => (float[n, 64] y, string[2] names) {
  a = Add (x, bias)
  b = MatMul (a, matrix)
  c = Mul (b, scale)
  d = Add (c, sparse)
  y = Tanh (d)
  names = Identity (text)
}
"""


def weights() -> onnx.ModelProto:
    """Constants in every form that a tensor has: typed fields, raw data, sparse, strings."""
    model = cli_models.parse(WEIGHTS)
    graph = model.graph
    graph.initializer.append(helper.make_tensor("bias", TensorProto.FLOAT, [64], np.linspace(0, 1, 64)))
    graph.initializer.append(numpy_helper.from_array(np.eye(64, dtype=np.float32), "matrix"))
    graph.initializer.append(numpy_helper.from_array(np.array([2.0], np.float32), "scale"))
    graph.initializer.append(helper.make_tensor("text", TensorProto.STRING, [2], [b"one", b"two"]))
    values = helper.make_tensor("sparse", TensorProto.FLOAT, [3], [1.0, 2.0, 3.0])
    indices = helper.make_tensor("", TensorProto.INT64, [3], [1, 2, 40])
    graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [64]))
    return model


def external() -> onnx.ModelProto:
    """Weights in a file beside the model, ``make`` writes it: 64 floats from byte 64 on, then 4,096."""
    model = cli_models.parse("""
        g (float[n, 64] x) => (float[n, 64] y) { a = Add(x, bias)
          b = MatMul(a, matrix)
          c = Tanh(b)
          y = Mul(c, bias) }""")
    for name, dims, offset in (("bias", [64], 64), ("matrix", [64, 64], 320)):
        tensor = model.graph.initializer.add(name=name, data_type=TensorProto.FLOAT, dims=dims)
        tensor.data_location = TensorProto.EXTERNAL
        length = 4 * int(np.prod(dims))
        for key, value in (("location", "weights.bin"), ("offset", offset), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
    return model


LINES = """
  s = Shape (x)
  n = Gather <axis = 0> (s, zero)
  m = Mul (n, six)
  one = Unsqueeze (m, axes)
  target = Concat <axis = 0> (one, minus)
  r = Reshape (x, target)
  e = Exp (r)
  back = Reshape (e, s)
  y = Add (back, x)
"""


def sizes() -> onnx.ModelProto:
    """Arithmetic on sizes, which is folded."""
    return sizes_models.model(
        LINES, "float[n, 6, 8] x", "float[n, 6, 8] y",
        held="<int64 zero = {0}, int64 six = {6}, int64[1] axes = {0}, int64[1] minus = {-1}>")


@cache
def plain() -> tuple[Callable[[], onnx.ModelProto], ...]:
    """Builders of the models that are damaged."""
    found: list[Callable[[], onnx.ModelProto]] = [
        *broken.MODELS.values(), *body_models.MODELS.values(), branch_models.squeezed, branch_models.in_turn,
        branch_models.by_rate, *quantized_models.MODELS.values(), rewriting_models.chain, sizes, weights, external,
        lambda: onnx.parser.parse_model(FUNCTIONS),
    ]
    found += [lambda example=example: example_model(example) for rule in RULES.all for example in rule.examples]
    found += [lambda seed=seed: schema_graphs.seeded(seed, most=8).model for seed in range(SCHEMA_GRAPHS)]
    return tuple(found)


@cache
def base(number: int) -> bytes:
    """A model to damage; none where it has none."""
    model = plain()[number]()
    return bytes(model.SerializeToString(deterministic=True))


@cache
def fused(number: int) -> bytes:
    """The same fused, with whatever it takes."""
    model = onnx.ModelProto.FromString(base(number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if model.graph.initializer and any(tensor.external_data for tensor in model.graph.initializer):
            return base(number)
        try:
            made = optimise(model, Options(**USUAL)).model
        except OnnxfuseError:  # an example of a rule that does not apply may be odd
            return base(number)
        return bytes(made.SerializeToString(deterministic=True))


def make(seed: int, folder: Path) -> list[Path]:
    """A damaged model; beside it a file of weights, where it has one."""
    rng = Random(seed)
    number = rng.randrange(len(plain()))
    model = onnx.ModelProto.FromString((fused if rng.random() < 0.45 else base)(number))
    paths = [folder / "model.onnx"]
    if any(tensor.external_data for tensor in model.graph.initializer):
        paths.append(folder / "weights.bin")
        paths[1].write_bytes(np.random.default_rng(seed).standard_normal(4176).astype(np.float32).tobytes())
        (folder / "loop").symlink_to("loop")
    words = sorted(words_of(model))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(DAMAGES)(model, rng, words)
    data = model.SerializeToString()
    if rng.random() < 0.06:
        name = rng.choice(words).encode()
        odd = rng.choice(NOT_UTF8)
        if len(name) >= len(odd):
            data = data.replace(name, (odd + name)[:len(name)], rng.choice((1, -1)))
    if rng.random() < 0.08:
        data = damage_bytes(data, rng)
    paths[0].write_bytes(data)
    return paths


def words_of(model: onnx.ModelProto) -> set[str]:
    """Names of values, nodes, operators and attributes."""
    found: set[str] = {"x"}
    for nodes in (model.graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            found |= {node.name, node.op_type, node.domain, *node.input, *node.output}
            found |= {attribute.name for attribute in node.attribute}
            for attribute in node.attribute:
                found |= {inner.output[0] for inner in attribute.g.node if inner.output}
    found |= {info.name for info in (*model.graph.input, *model.graph.output)}
    found |= {tensor.name for tensor in model.graph.initializer}
    return found - {""}


def graphs(model: onnx.ModelProto) -> list[onnx.GraphProto]:
    """The main graph and those in its nodes."""
    found = [model.graph]
    for graph in found:
        found += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return found


Words = Sequence[str]


def anywhere(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    damage_message(model, rng, words)


def in_a_node(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    nodes = [node for graph in graphs(model) for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    if nodes:
        damage_message(rng.choice(nodes), rng, words)


def in_an_attribute(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    found = [attribute for graph in graphs(model) for node in graph.node for attribute in node.attribute]
    if found:
        damage_message(rng.choice(found), rng, words)


def other_attribute(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    """An attribute that an operator's schema has, of that type and an odd value, or of another type."""
    nodes = [node for graph in graphs(model) for node in graph.node if onnx.defs.has(node.op_type, node.domain)]
    if not nodes:
        return
    node = rng.choice(nodes)
    known = onnx.defs.get_schema(node.op_type, node.domain).attributes
    if not known:
        return
    name = rng.choice(sorted(known))
    for place, attribute in enumerate(node.attribute):
        if attribute.name == name and rng.random() < 0.9:
            del node.attribute[place]
            break
    kind = known[name].type.value if rng.random() < 0.8 else rng.randrange(15)
    made = node.attribute.add(name=name, type=kind)
    for _ in range(rng.randrange(4)):
        field = {1: "f", 2: "i", 3: "s", 4: "t", 5: "g", 6: "floats", 7: "ints", 8: "strings"}.get(kind, "ints")
        descriptor = made.DESCRIPTOR.fields_by_name[field]
        if kind in (4, 5):
            getattr(made, field).SetInParent()
            damage_message(getattr(made, field), rng, words)
        elif kind in (1, 2, 3):
            setattr(made, field, _odd(descriptor, rng, words))
        else:
            getattr(made, field).append(_odd(descriptor, rng, words))


def _odd(descriptor: Any, rng: Random, words: Words) -> Any:
    return rng.choice(SMALL) if descriptor.name in ("i", "ints") and rng.random() < 0.6 else value_of(
        descriptor, rng, words)


def in_a_border(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    graph = rng.choice(graphs(model))
    infos = [*graph.input, *graph.output, *graph.value_info]
    if infos:
        damage_message(rng.choice(infos).type, rng, words)


def in_a_tensor(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    found = [tensor for graph in graphs(model) for tensor in graph.initializer]
    found += [attribute.t for graph in graphs(model) for node in graph.node for attribute in node.attribute
              if attribute.HasField("t")]
    found += [sparse.values for sparse in model.graph.sparse_initializer]
    found += [sparse.indices for sparse in model.graph.sparse_initializer]
    if not found:
        return
    tensor = rng.choice(found)
    if rng.random() < 0.3:
        tensor.data_type = rng.choice(TensorProto.DataType.values())
    elif rng.random() < 0.4 and tensor.raw_data:
        tensor.raw_data = damage_bytes(tensor.raw_data, rng)
    else:
        damage_message(tensor, rng, words)


LOCATIONS = ("loop", "../weights.bin", "/etc/hostname", ".", "", "weights.bin/", "./weights.bin", "x" * 300,
             "x/" * 3000, "a\0b", "weights.bin\0", "model.onnx", "*[_ORT_MEM_ADDR_]*", "~", "é")
OFFSETS = ("-1", "0", "1", "63", "4096", "99999999999999999999", str(2**63), "1e3", "0x10", " 64", "64 ", "", "٣",
           "1_0", "nan", "-0", "+64")


def in_external_data(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    found = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    if not found:
        anywhere(model, rng, words)
        return
    entry = rng.choice(found)
    if rng.random() < 0.1:
        damage_message(entry, rng, words)
    else:
        entry.value = rng.choice(LOCATIONS if entry.key == "location" else OFFSETS)


def in_an_import(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    imports = model.opset_import
    function = rng.choice(model.functions) if model.functions and rng.random() < 0.5 else None
    if function is not None:
        imports = function.opset_import
    if not imports or rng.random() < 0.2:
        domain = rng.choice(("", "ai.onnx", "com.microsoft", "onnxfuse", "x"))
        imports.add(domain=domain, version=rng.choice((0, 1, 17)))
    elif rng.random() < 0.2:
        del imports[rng.randrange(len(imports))]
    else:
        rng.choice(imports).version = rng.choice((*SMALL, 11, 13, 18, 21, 2**31, 2**62, -(2**63)))


def in_a_function(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    if not model.functions:
        in_a_node(model, rng, words)
        return
    function = rng.choice(model.functions)
    match rng.randrange(5):
        case 0:  # it calls itself
            function.node.add(op_type=function.name, domain=function.domain, input=function.input,
                              output=[f"{name}_again" for name in function.output])
        case 1:
            rng.choice(model.functions).name = function.name
        case 2 if function.node:
            del function.node[rng.randrange(len(function.node))]
        case _:
            damage_message(function, rng, words)


def in_a_record(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    """What onnxfuse wrote into a fused model: records, launch plans, sources."""
    props = [entry for graph in graphs(model) for entry in graph.metadata_props] + [*model.metadata_props]
    texts = [attribute for graph in graphs(model) for node in graph.node if node.domain == "onnxfuse"
             for attribute in node.attribute if attribute.type == AttributeProto.STRING]
    if props and (not texts or rng.random() < 0.4):
        prop = rng.choice(props)
        prop.value = damage_json(prop.value, rng)
    elif texts:
        text = rng.choice(texts)
        text.s = damage_json(text.s.decode(errors="replace"), rng).encode()
    else:
        anywhere(model, rng, words)


def captured_cycle(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    """A body reads what is computed of its own node's result."""
    owners = [node for node in model.graph.node if any(attribute.HasField("g") for attribute in node.attribute)]
    if not owners:
        in_a_node(model, rng, words)
        return
    bodies = [attribute.g for attribute in rng.choice(owners).attribute if attribute.HasField("g") and attribute.g.node]
    if bodies:
        node = rng.choice(rng.choice(bodies).node)
        names = [name for other in model.graph.node for name in other.output]
        node.input.append(rng.choice(names))
        node.input[:] = node.input[-1:] + node.input[1:-1]


def careless(model: onnx.ModelProto, rng: Random, words: Words) -> None:
    """As a careless script would: see ``test_broken_models.py``."""
    places = [graph for graph in graphs(model) if graph.node]
    if places:
        graph = rng.choice(places)
        rng.choice(broken.DAMAGES)(graph, rng.choice(graph.node), rng)


DAMAGES: Sequence[Callable[[onnx.ModelProto, Random, Words], None]] = (
    anywhere, anywhere, in_a_node, in_a_node, in_an_attribute, in_an_attribute, other_attribute, other_attribute,
    in_a_border, in_a_border, in_a_tensor, in_a_tensor, in_external_data, in_an_import, in_a_function, in_a_record,
    in_a_record, captured_cycle, careless, careless, careless,
)

WAYS: Sequence[Mapping[str, Any]] = (
    {}, {}, {"strategy": "memory"}, {"strategy": "all-in-one"}, {"strategy": "dynamic"}, {"least_gain": 1.2},
    {"verify": True, "compile": False}, {"provider_options": {"prefer_nhwc": "1"}},
    {}, {}, {"strategy": "memory"}, {"least_gain": 1.2}, {"hints": Hints(memory_pressure=1.0)}, {}, {}, {},
)


def attempt(files: Sequence[Path]) -> str:
    """See the module; what is done beside follows from the file's contents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numbers that were made large overflow
        try:
            return _attempt(files[0])
        except OnnxfuseError as error:
            if error.remedy is None and error.place is None:
                raise FaultError("wrong", f"neither place nor remedy: {error}") from error
            raise


def _attempt(path: Path) -> str:
    way = zlib.crc32(path.read_bytes())
    loaded = load_model(path)
    refused: OnnxfuseError | None = None
    before = b""
    try:
        before = _packed(api.unfuse(loaded))
    except OnnxfuseError as error:
        refused = error
    if reporting.is_fused(loaded.proto):
        _looked_at(path, way)
    made = optimise(loaded, Options(**{**USUAL, **WAYS[way % len(WAYS)]}))
    reporting.as_json(reporting.report_of(made))
    saved = save(made.model, path.with_name("made.onnx"), source=made.loaded).path
    if refused is not None:
        raise refused
    again = load_model(saved)
    if _packed(api.unfuse(again)) != before and _session(loaded) is not None:
        raise FaultError("wrong", "it does not come back")
    if made.regions and way % 3 == 0:
        _compared(loaded, again)
    return "fused" if made.regions else ""


def _looked_at(path: Path, way: int) -> None:
    """A fused model's report, and now and then why it is as it is; they may refuse it."""
    try:
        reporting.as_json(api.report(path, target=PROFILE))
        if way % 50 == 0:
            api.explain(path, target=PROFILE, database=False)
    except OnnxfuseError as error:
        if error.remedy is None and error.place is None:
            raise


def _packed(model: onnx.ModelProto) -> bytes:
    return bytes(model.SerializeToString(deterministic=True))


def _compared(loaded: LoadedModel, made: LoadedModel) -> None:
    """The results of both, where ONNX Runtime has any of the first."""
    with beyond("ONNX Runtime on the damaged model"):
        plain_session = _session(loaded)
        if plain_session is None:
            return
        graph = build_graph(loaded)
        if sum(prod(size.value or 1 for size in value.shape or ()) for value in graph.inputs) > ELEMENTS:
            return
        try:
            feeds = make_inputs(graph, {})
            wanted = broken.run(plain_session, feeds, SECONDS)
        except Exception:  # it does not run: what the fused model would do is no matter
            return
    session = _session(made)
    if session is None:
        raise FaultError("wrong", "ONNX Runtime refuses the fused model alone")
    for output, own, found in zip(plain_session.get_outputs(), wanted, broken.run(session, feeds, 10.0), strict=True):
        if isinstance(own, np.ndarray) and (own.dtype, own.shape, _contents(own)) != (
                found.dtype, found.shape, _contents(found)):
            raise FaultError("wrong", f"'{output.name}' changed")


def _contents(array: np.ndarray) -> Any:
    return array.tolist() if array.dtype == object else array.tobytes()


def _session(model: LoadedModel) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        return onnxruntime.InferenceSession(str(model.path), options, providers=["CPUExecutionProvider"])
    except Exception:  # ONNX Runtime has an exception type per status
        return None

