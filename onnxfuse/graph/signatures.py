"""Check that operators have the inputs, outputs and attributes that their schemas give them.

Only what ONNX Runtime refuses too: everything behind this check may take a Conv to have two inputs and integers for
its strides.  The standard's schemas are onnx's, those of com.microsoft the installed ONNX Runtime's own.  What neither
has a schema of is anyone's operator, and left alone.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import onnx

from onnxfuse.errors import ModelError
from onnxfuse.graph.order import MICROSOFT, STANDARD_DOMAINS, all_nodes, bodies_of, graphs_of, label

_KINDS = dict(onnx.AttributeProto.AttributeType.items())
_SINGLE = "Single"
"""Name of the option of an input that must be there."""



class _Signature(NamedTuple):
    """Least and most inputs and outputs of an operator, and the type of each attribute.

    ``needed`` are the places of inputs that must not be left empty, ``required`` the attributes that must be there.
    """

    inputs: tuple[int, int]
    outputs: tuple[int, int]
    needed: tuple[int, ...]
    attributes: dict[str, int]
    required: frozenset[str]


def check_signatures(proto: onnx.ModelProto) -> None:
    """Check the nodes of a model's graph, of the bodies in it, and of its functions.

    Raises:
        ModelError: a node has too few or too many inputs or outputs, or an attribute is missing or of another type; a
            function does not import an operator that it uses.
    """
    version = _version(proto)
    for node in (node for _, graph in graphs_of(proto) for node in graph.node):
        fault = _reference_fault(node) or _node_fault(node, version)
        if fault:
            raise ModelError(f"The operator {node.op_type} {fault}.", place=f"node '{label(node)}'",
                             remedy="Export the model again.")
    for function in proto.functions:
        version = _version(function)
        for node in all_nodes(function.node):
            fault = _import_fault(node, version) or _node_fault(node, version)
            if fault:
                raise ModelError(f"The operator {node.op_type} {fault}.",
                                 place=f"function '{function.name}', node '{label(node)}'",
                                 remedy="Export the model again.")


def _version(imports: onnx.ModelProto | onnx.FunctionProto) -> int | None:
    """That of the standard operators."""
    return next((entry.version for entry in imports.opset_import if entry.domain in STANDARD_DOMAINS), None)


def _import_fault(node: onnx.NodeProto, version: int | None) -> str:
    """What is wrong with the version that a function imports: ONNX Runtime ends the process over it."""
    if node.domain not in STANDARD_DOMAINS or not onnx.defs.has(node.op_type):
        return ""
    if version is None:
        return "stands in a function here that imports no version of the standard operators"
    return "" if onnx.defs.has(node.op_type, version) else f"is none of version {version}, which its function imports"


def _node_fault(node: onnx.NodeProto, version: int | None) -> str:
    """What is wrong with a node, as the rest of a sentence; "" where nothing is."""
    fault = _twice_fault(node)
    signature = None
    if node.domain == MICROSOFT:
        signature = _runtimes_own().get(node.op_type)
    elif version is not None and node.domain in STANDARD_DOMAINS:
        signature = _signature(node.op_type, version)
    return fault or ("" if signature is None else _fault(node, signature) or _body_fault(node))


@cache
def _signature(op: str, version: int) -> _Signature | None:
    try:
        schema = onnx.defs.get_schema(op, version)
    except onnx.defs.SchemaError:
        return None
    return _of_schema(schema)


@cache
def _runtimes_own() -> dict[str, _Signature]:
    """Of com.microsoft, as far as the installed ONNX Runtime tells."""
    try:
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
    except ImportError:
        return {}
    return {schema.name: _of_schema(schema) for schema in get_all_operator_schema() if schema.domain == MICROSOFT}


def _of_schema(schema: Any) -> _Signature:
    """From a schema as onnx gives it, or ONNX Runtime."""
    attributes = schema.attributes
    return _Signature(
        (schema.min_input, schema.max_input), (schema.min_output, schema.max_output),
        tuple(place for place, each in enumerate(schema.inputs) if each.option.name == _SINGLE),
        {name: _KINDS[attribute.type.name] for name, attribute in attributes.items()
         if attribute.type.name in _KINDS},
        frozenset(name for name, attribute in attributes.items() if attribute.required),
    )


def _twice_fault(node: onnx.NodeProto) -> str:
    """See ``_node_fault``; whatever the operator."""
    names: set[str] = set()
    for attribute in node.attribute:
        if attribute.name in names:
            return f"has the attribute '{attribute.name}' twice here"
        names.add(attribute.name)
    return ""


def _reference_fault(node: onnx.NodeProto) -> str:
    """See ``_node_fault``; of a node that stands in no function."""
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            return (f"takes its attribute '{attribute.name}' from '{attribute.ref_attr_name}' of a function here, and "
                    "stands in none")
    return ""


def _body_fault(node: onnx.NodeProto) -> str:
    """See ``_node_fault``; of the borders of bodies."""
    given = {attribute.name: attribute for attribute in node.attribute}
    if any(attribute.ref_attr_name for attribute in given.values()):
        return ""
    state = len(node.input) - 2
    if node.op_type == "Scan":
        scanned = given["num_scan_inputs"].i
        if not 1 <= scanned <= len(node.input):
            return f"has {len(node.input)} inputs here, and {scanned} of them to take slice by slice"
        state = len(node.input) - scanned
        lengths = {"scan_input_axes": scanned, "scan_input_directions": scanned,
                   "scan_output_axes": len(node.output) - state, "scan_output_directions": len(node.output) - state}
        for name, length in lengths.items():
            if name in given and len(given[name].ints) != length:
                return f"takes {length} numbers as its attribute '{name}', which has {len(given[name].ints)} here"
    for name, graph in bodies_of(node):
        inputs, outputs = len(graph.input), len(graph.output)
        wanted = {"If": 0, "Loop": max(len(node.input), 2)}.get(node.op_type, len(node.input))
        least = {"If": 0, "Loop": state + 1}.get(node.op_type, state)
        if inputs != wanted or outputs < least:
            return (f"has {len(node.input)} inputs and {len(node.output)} outputs here, and its {name} {inputs} and "
                    f"{outputs}")
    return ""


def _fault(node: onnx.NodeProto, signature: _Signature) -> str:
    """See ``_node_fault``; beside what the schema has."""
    for what, names, (least, most) in (("input", node.input, signature.inputs),
                                       ("output", node.output, signature.outputs)):
        if not least <= len(names) <= most:
            return f"has {len(names)} {what}{'s' * (len(names) != 1)} here, and takes " + (
                f"{least}" if least == most else f"{least} to {most}" if most < 1 << 30 else f"{least} or more")
    empty = next((place for place in signature.needed if place < len(node.input) and not node.input[place]), None)
    if empty is not None:
        return f"needs its input {empty}, which is left empty here"
    given = {attribute.name: attribute.type for attribute in node.attribute
             if attribute.type != onnx.AttributeProto.UNDEFINED}
    missing = signature.required.difference(given)
    if missing:
        return f"needs the attribute '{min(missing)}', which is missing here"
    if node.op_type == "Constant" and [each.name in signature.attributes for each in node.attribute] != [True]:
        return "has one attribute, its value, and others here"  # which ONNX Runtime takes in a graph alone
    perm = next((attribute for attribute in node.attribute if attribute.name == "perm"), None)
    if node.op_type == "Transpose" and perm is not None and not perm.ref_attr_name and (
            sorted(perm.ints) != list(range(len(perm.ints)))):
        return f"takes every axis once as its attribute 'perm', which is {list(perm.ints)} here"
    for name, kind in given.items():
        wanted = signature.attributes.get(name, kind)
        if kind != wanted:
            called = onnx.AttributeProto.AttributeType.Name
            return f"takes {called(wanted)} as its attribute '{name}', which is {called(kind)} here"
    return ""
