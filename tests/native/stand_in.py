"""Sessions over the stand-in for the CUDA driver, fake_cuda.c: its models, its counters and its messages.

Any Python with NumPy and an ONNX Runtime can import this; only ``write`` needs the package.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

LIBRARY = Path(__file__).resolve().parents[2] / "onnxfuse" / "runtime" / "libonnxfuse.so"
HEADER, SECTION = 64, 64
"""Bytes of the header of an ELF file, and of an entry of its table of sections."""


def image(*kernels: str) -> bytes:
    """An image of these kernels, as far as the stand-in and the library look at one: an ELF file for the machine 190
    with a section for each kernel's code, after those that every such file has."""
    names = [".shstrtab", *(f".text.{kernel}" for kernel in kernels)]
    texts = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    code = b"\x5a" * 16
    contents = [texts, *([code] * len(kernels))]
    table = HEADER + sum(map(len, contents))
    entries = [bytes(SECTION)]
    offset = HEADER
    for name, content in zip(names, contents, strict=True):
        kind = 3 if content is texts else 1
        place = texts.index(b"\0" + name.encode() + b"\0") + 1
        entries.append(struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, offset, len(content), 0, 0, 1, 0))
        offset += len(content)
    header = struct.pack("<4sBBBBQHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0x33, 0, 2, 190, 1, 0, 0, table, 0, HEADER, 0, 0,
                         SECTION, len(entries), 1)
    return header + b"".join(contents) + b"".join(entries)


IMAGE = image("add_one", "add_more", "add_tiles", "add_rows")


def write(folder: Path) -> None:
    """Write the models that the scenarios read."""
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
    import fused_models as make
    import launch_models as launches

    embedded = {"sm_90": IMAGE}

    def with_arguments(
        *arguments: str, fused: make.Fused | None = None, kernel: str = "add_one",
    ) -> make.Fused:
        plain = fused or make.add_one(embedded)
        steps = (make.elementwise(kernel, arguments),)
        plan = replace(plain.plan, variants=(replace(plain.plan.variants[0], steps=steps, guards=()),))
        return replace(plain, plan=plan)

    with_image = {"images": embedded}
    models = {
        "one": make.chain(make.add_one(embedded), 1),
        "chain": make.chain(make.add_one(embedded), 20),
        "aligned": make.chain(make.add_aligned(embedded), 1),
        "compiled": make.chain(make.add_one(), 3),
        "lower": make.chain(make.add_one({"sm_86": IMAGE, "sm_80": image(), "sm_89": image()}), 1),
        "torn": make.chain(make.add_one({"sm_90": IMAGE[:-2]}), 1),
        "cut": make.chain(make.add_one({"sm_90": IMAGE[:-1]}), 1),
        "empty": make.chain(make.add_one({"sm_90": b""}), 1),
        "floats": make.chain(make.add_one(embedded), 1),
        "few": make.chain(with_arguments("i0", "o0"), 1),
        "many": make.chain(with_arguments("i0", "o0", "i64:s0", "i64:s0"), 1),
        "scratch": make.chain(make.Fused(**{**vars(make.add_two()), **with_image}), 3),
        "clustered": make.chain(launches.clustered({"sm_80": IMAGE, "sm_90": IMAGE}), 3),
        "four": make.chain(launches.add_four(embedded), 2),
        "tiled": make.chain(launches.tiled(embedded), 1),
        "tiled_only": make.chain(launches.tiled({"sm_80": IMAGE}), 1),
        "tiled_few": make.chain(with_arguments("m0", "m1", fused=launches.tiled(embedded), kernel="add_one"), 1),
        "tiled_bytes": make.chain(with_arguments("i0", "o0", fused=launches.tiled(embedded), kernel="add_tiles"), 1),
        "clustered_only": make.chain(launches.clustered({"sm_80": IMAGE}, guarded=False), 1),
        "clustered_scratch": make.chain(launches.through_scratch(embedded), 2),
        "bodies": make.bodies(make.add_one(embedded)),
        "bodies_torn": make.bodies(make.add_one({"sm_90": b"\x7fELF"})),
        "quantized": make.quantized(make.add_one(embedded)),
        "quantized_bodies": make.quantized_bodies(make.add_one(embedded)),
        "quantized_scan": make.quantized_scan(make.add_one(embedded)),
        "undeclared": make.undeclared(),
        "host": make.chain(make.Fused(**{**vars(make.add_host()), **with_image}), 2, ["shape"]),
    }
    models["host32"] = make.chain(make.Fused(**{**vars(make.add_host()), **with_image}), 2, ["shape"])
    image_attribute = models["floats"].graph.node[0].attribute[-1]
    image_attribute.t.CopyFrom(make.helper.make_tensor("image", make.FLOAT, [len(IMAGE)], IMAGE * 4, raw=True))
    models["host32"].graph.input[1].type.tensor_type.elem_type = make.TensorProto.INT32
    models |= {name: product.model(product.fused()) for name, product in launches.PRODUCTS.items()}
    product = launches.PRODUCTS["product"]
    models["product_of_sum"] = product.model(product.of_sum(embedded))
    models |= hostile()
    for name in STEERING:
        checks = (make.Check("s0 4 <", EVIL),) if name == "steering_check" else ()
        fused = make.add_one({"sm_90": IMAGE[:-2] if name == "steering_torn" else IMAGE})
        models[name] = make.chain(replace(fused, plan=replace(fused.plan, region=EVIL, checks=checks)), 1)
    for name, model in models.items():
        data = model.SerializeToString()
        if name in STEERING:  # protobuf's Python takes no names that are no UTF-8
            # ONNX Runtime puts the name before the message of a run as it is, and its Python has no such text.
            evil = EVIL_NAME.replace(b"\xff", b"") if name == "steering_check" else EVIL_NAME
            model.graph.node[0].name = " " * len(evil)
            data = model.SerializeToString().replace(b" " * len(evil), evil)
        (folder / f"{name}.onnx").write_bytes(data)


EVIL = "add\x1b[2J\none\u202e"
EVIL_NAME = b"node\x1b]0;title\x07\nonnxfuse: \xff\xc2\x9b\xe2\x80\xae"
SHOWN = r"node 'node\x1b]0;title\x07\nonnxfuse: \xff\x9b\u202e' (Region0, add\x1b[2J\none\u202e): "
"""A region and a node's name that steer a terminal, and what is shown of them."""

STEERING = ("steering", "steering_torn", "steering_check")
"""Models with such names: a good one, one with a torn image, and one whose check fails on four elements or more."""

HOSTILE = {
    "deep": ("nested too deep", b"[" * 100_000),
    "huge": ("the launch plan has 17000000 bytes; 16777216 at most", b" " * 17_000_000),
    "input": ("unknown atom 'i7.0' in an expression", {"outputs": [{"dtype": 1, "shape": ["i7.0"]}]}),
    "inputs": ("the node has 9 inputs; its launch plan wants 8 host inputs and 4000 tensors",
               {"inputs": 4000, "outputs": [{"dtype": 1, "shape": ["i3999.0"]}]}),
    "outputs": ("the node has 1 outputs; its launch plan wants 4000",
                {"outputs": [{"dtype": 1, "shape": ["9223372036854775807"] * 9}] * 4000}),
    "type": ("", {"outputs": [{"dtype": 63, "shape": ["s0"]}]}),
    "negative": ("axis 0 of output 0 would have size -5", {"outputs": [{"dtype": 1, "shape": ["-5"]}]}),
    "large": ("", {"outputs": [{"dtype": 1, "shape": ["9223372036854775807", "9223372036854775807"]}]}),
    "letters": ("not JSON: a byte that is no UTF-8", b'{"region":"\xff"}'),
    "zero": ("'region' has a zero byte", {"region": "a\0b"}),
    "scratch": ("could not allocate scratch memory", {"scratch": ["9223372036854775807"]}),
    "grid": ("the grid of a launch is 2147483648", {"grid": "2147483648"}),
    "empty": ("'version' is missing", b"{}"),
}
"""What a session says of a node, or its run; nothing is wanted where it depends on ONNX Runtime's release.  Then the
plan, or what is changed in a good one."""


def hostile() -> dict[str, Any]:
    """Models whose node, made by hand, has such a plan; its output is declared, and is not."""
    import json

    import fused_models as make

    models = {}
    for name, (_, change) in HOSTILE.items():
        plan = json.loads(make.add_two().plan.to_json())
        if isinstance(change, dict):
            steps = plan["variants"][0]["steps"]
            steps[0]["grid"][0] = change.get("grid", steps[0]["grid"][0])
            plan |= change
        text = change if isinstance(change, bytes) else json.dumps(plan).encode()
        for declared in (True, False):
            model = make.chain(make.Fused(**{**vars(make.add_two()), "images": {"sm_90": IMAGE}}), 1)
            next(each for each in model.graph.node[0].attribute if each.name == "plan").s = text
            if not declared:
                model.graph.output[0].CopyFrom(make.helper.make_tensor_value_info("y", make.FLOAT, None))
            models[f"hostile_{name}_{declared}"] = model
    return models


def driver() -> ctypes.CDLL:
    """The stand-in, to set and read its counters."""
    return ctypes.CDLL(os.environ["ONNXFUSE_LIBCUDA"])


def counter(name: str, kind: Any = ctypes.c_int) -> Any:
    """A variable of the stand-in."""
    return kind.in_dll(driver(), name)


def model(name: str) -> bytes:
    """A model that ``write`` wrote."""
    return (Path(os.environ["SCENARIO_MODELS"]) / f"{name}.onnx").read_bytes()


def options(every_name: bool = False) -> onnxruntime.SessionOptions:
    """Options with the library registered by ONNX Runtime's own call: with every name that an operator may have, as a
    program without Python's part does it, or with the first few alone, in a tenth of the time."""
    out = onnxruntime.SessionOptions()
    out.log_severity_level = 4
    library = ctypes.CDLL(str(LIBRARY))
    if not every_name:
        library.onnxfuse_expect_names(1)
    out.register_custom_ops_library(str(LIBRARY))
    _ctypes.dlclose(library._handle)  # ONNX Runtime alone holds it, and so decides when it goes.
    return out


def session(name: str, settings: onnxruntime.SessionOptions | None = None) -> onnxruntime.InferenceSession:
    """A session of a model on the CPU provider, where the stand-in's kernels run."""
    return onnxruntime.InferenceSession(
        model(name), settings or options(), providers=["CPUExecutionProvider"], enable_fallback=0
    )


def message(name: str) -> str:
    """Why a session cannot be created."""
    try:
        session(name)
    except Exception as error:
        return str(error)
    raise AssertionError(f"a session of '{name}' was created")


def expect(condition: bool, *seen: object) -> None:
    """An assertion that stays in optimised Python and shows what was seen."""
    if not condition:
        raise AssertionError(seen)


def fails(run: Any, text: str) -> None:
    """``run`` must raise an error whose message ends with ``text``."""
    try:
        run()
    except Exception as error:
        expect(str(error).endswith(text), str(error))
    else:
        raise AssertionError("no error")


def plus(x: np.ndarray, times: int) -> np.ndarray:
    """x + 1 + 1 ..., rounded each time."""
    for _ in range(times):
        x = x + np.float32(1)
    return x
