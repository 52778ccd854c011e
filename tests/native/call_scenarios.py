"""Scenarios of library calls: products by the stand-in fake_cublaslt.c, and what is said where there is no library."""

from __future__ import annotations

import ctypes
import os
from functools import partial
from typing import Any

import numpy as np
from native.stand_in import counter, expect, fails, message, session
from native.statistics_scenarios import counted, record_to

PRODUCTS: dict[str, tuple[bool, bool, bool, str, str, int]] = {
    "product": (False, False, False, "", "", 0), "product_float16": (False, True, False, "", "", 0),
    "product_bfloat16": (True, False, True, "", "", 0), "product_turned": (True, True, True, "", "", 0),
    "product_tf32": (False, False, True, "", "relu", 0), "product_bias": (False, False, True, "v", "", 2),
    "product_bias_relu": (False, True, False, "v", "relu", 15), "product_gelu": (False, False, False, "", "gelu", 0),
    "product_bias_gelu": (False, False, True, "v", "gelu", 0), "product_add": (False, False, True, "u", "", 0),
    "product_bias_add": (True, False, False, "vu", "relu", 0),
}
"""Whether a and b are stored transposed, and b is one for all, what is added (v is a bias), what follows, and the
algorithm's rank, by model: launch_models.PRODUCTS, which needs the package."""


def library_counter(name: str, kind: Any = ctypes.c_int) -> Any:
    """A variable of the stand-in for cuBLASLt."""
    return kind.in_dll(ctypes.CDLL(os.environ["ONNXFUSE_LIBCUBLASLT"]), name)


def operands(name: str, batch: int, m: int, n: int, k: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Small integers, whose products are exact in every type, as they are stored; and what is made of their product."""
    turned_a, turned_b, one, added, activation, _ = PRODUCTS[name]
    random = np.random.default_rng(m + n)
    a = random.integers(-2, 3, (batch, m, k)).astype(np.float32)
    b = random.integers(-2, 3, (k, n) if one else (batch, k, n)).astype(np.float32)
    fed = {"x": np.ascontiguousarray(a.swapaxes(1, 2) if turned_a else a),
           "w": np.ascontiguousarray(b.swapaxes(-1, -2) if turned_b else b)}
    wanted = a @ b
    for name_of, shape in (("v", (n,)), ("u", (batch, m, n))):
        if name_of in added:
            fed[name_of] = random.integers(-3, 4, shape).astype(np.float32)
            wanted = wanted + fed[name_of]
    if activation == "relu":
        wanted = np.maximum(wanted, 0)
    if activation == "gelu":
        x = wanted.astype(np.float64)
        wanted = x * (0.5 + 0.5 * np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return fed, wanted


def products() -> None:
    """Products of each type, stored either way, one or a batch of them, with a workspace and without."""
    for name in PRODUCTS:
        made = session(name)
        # More sizes in turn than are kept.
        for sizes in ((1, 5, 7, 3), (4, 16, 8, 32), (3, 1, 1, 1), (2, 3, 4, 5), (1, 2, 2, 2), (1, 5, 7, 3)):
            fed, wanted = operands(name, *sizes)
            least = 1e-6 if PRODUCTS[name][4] == "gelu" else 0.0
            expect(np.allclose(made.run(None, fed)[0], wanted, rtol=least, atol=least), name, sizes)
            expect(library_counter("fake_lt_rank").value == PRODUCTS[name][5], name, "runs another algorithm")
            rounds = library_counter("fake_lt_compute").value == 77
            expect(rounds == (name == "product_tf32"), name, "rounds" if rounds else "does not round")
        before = library_counter("fake_lt_products", ctypes.c_long).value
        for sizes in ((0, 5, 7, 3), (2, 0, 7, 3), (2, 5, 0, 3)):
            fed, wanted = operands(name, *sizes)
            expect(made.run(None, fed)[0].shape == wanted.shape, name, sizes)
        expect(library_counter("fake_lt_products", ctypes.c_long).value == before, "a product of nothing ran")
        fed, _ = operands(name, 2, 5, 7, 0)
        fails(partial(made.run, None, fed),
              "a gemm of the launch plan has the k 0; it is 1 to 2147483647")
    repeated()


def repeated() -> None:
    """A product of the same sizes asks for nothing, makes nothing and leaves nothing."""
    asked, objects = library_counter("fake_lt_asked"), library_counter("fake_lt_objects")
    fed, wanted = operands("product_turned", 1, 5, 7, 3)
    made = session("product_turned")
    made.run(None, fed)
    before, kept = asked.value, objects.value
    for _ in range(5):
        expect(np.array_equal(made.run(None, fed)[0], wanted))
    expect(asked.value <= before + 2, "a repeated product asks for an algorithm", asked.value - before)
    expect(objects.value == kept, "a repeated product leaves objects behind")
    expect(library_counter("fake_lt_workspace", ctypes.c_long).value == 1 << 20, "the workspace is not the scratch")
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


def workspaces() -> None:
    """A workspace is as large as the algorithm wants, and what wants none allocates none."""
    needed, allocated = library_counter("fake_lt_needed", ctypes.c_long), counter("fake_last_allocated", ctypes.c_long)
    for bytes_needed in (0, 100, 1 << 20):
        needed.value = bytes_needed
        made = session("product_turned")  # the one before is gone, and all that its nodes share
        for sizes in ((1, 5, 7, 3), (2, 3, 4, 5)):
            fed, wanted = operands("product_turned", *sizes)
            allocated.value = 0
            expect(np.array_equal(made.run(None, fed)[0], wanted), bytes_needed, sizes)
            expect(allocated.value == bytes_needed, "allocated", allocated.value, "of", bytes_needed)
            expect(library_counter("fake_lt_workspace", ctypes.c_long).value == bytes_needed)
        del made


def other_variants() -> None:
    """Where the library has no algorithm, the variant behind the call runs."""
    square = {"x": np.ones((2, 3, 3), np.float32), "w": np.eye(3, dtype=np.float32)}
    product = square["x"]
    made = session("product_or_sum")
    expect(np.array_equal(made.run(None, square)[0], product))
    # Another size that the library does not take, then the one that it does, and one of nothing, which guards send on.
    found, asked = library_counter("fake_lt_found"), library_counter("fake_lt_asked")
    before = asked.value
    found.value = 0
    for count in (4, 4):
        fed = {"x": np.ones((count, 3, 3), np.float32), "w": square["w"]}
        expect(np.array_equal(made.run(None, fed)[0], fed["x"] + 1), "there is no algorithm")
    expect(asked.value == before + 1, "a library that had no algorithm is asked again")
    expect(np.array_equal(made.run(None, square)[0], product), "an algorithm that was found is forgotten")
    empty = {"x": np.ones((2, 3, 0), np.float32), "w": np.ones((0, 0), np.float32)}
    expect(made.run(None, empty)[0].shape == (2, 3, 0))
    expect(counter("fake_allocated", ctypes.c_long).value == 0)


def products_of_sums() -> None:
    """A kernel writes scratch, and the library reads it; the call counts and is timed with the kernel."""
    record_to("left.json")
    made = session("product_of_sum")
    for sizes in ((2, 5, 7, 3), (1, 16, 16, 16)):
        fed, _ = operands("product", *sizes)
        expect(np.array_equal(made.run(None, fed)[0], (fed["x"] + 1) @ fed["w"]), sizes)
    counter("fake_capturing").value = 1
    made.run(None, fed)
    counter("fake_capturing").value = 0
    library_counter("fake_lt_error").value = 15
    fails(partial(made.run, None, fed), "onnxfuse: node 'node0' (Region0, product-of-sum): cuBLASLt could not run the "
          "product 16x16x16: CUBLAS_STATUS_NOT_SUPPORTED")
    library_counter("fake_lt_error").value = 0
    expect(np.array_equal(made.run(None, fed)[0], (fed["x"] + 1) @ fed["w"]), "a session works on after a failed run")
    expect(counter("fake_allocated", ctypes.c_long).value == 0)
    del made
    runs = [(run["calls"], run["timed"], run["captured"]) for node in counted()["nodes"] for run in node["runs"]]
    expect(sorted(runs) == [(1, 1, 0), (4, 2, 1)], runs)


def algorithms() -> None:
    """The library is told how its operands are aligned, and has to have an algorithm."""
    made = session("product")
    told = (ctypes.c_uint * 4).in_dll(ctypes.CDLL(os.environ["ONNXFUSE_LIBCUBLASLT"]), "fake_lt_alignments")
    fed, wanted = operands("product", 1, 4, 4, 4)
    expect(np.array_equal(made.run(None, fed)[0], wanted))
    expect(all(16 <= each <= 256 and each & (each - 1) == 0 for each in told), list(told))
    library_counter("fake_lt_found").value = 0
    fails(partial(made.run, None, operands("product", 2, 8, 4, 4)[0]),
          "cuBLASLt has no algorithm for the product 2 x 8x4x4")


def no_library() -> None:
    """The message names what is missing and the remedy; what needs no library runs."""
    os.environ["ONNXFUSE_LIBCUBLASLT"] = "/nowhere/libcublasLt.so"
    x = np.arange(3, dtype=np.float32)
    expect(np.array_equal(session("one").run(None, {"x": x})[0], x + 1))
    remedy = ("; a matrix product of this model needs it: install CUDA's libraries (pip install onnxfuse[cuda]), or "
              "put the folder that has them into LD_LIBRARY_PATH")
    fed = {"x": np.ones((2, 3, 3), np.float32), "w": np.eye(3, dtype=np.float32)}
    expect(np.array_equal(session("product_or_sum").run(None, fed)[0], fed["x"] + 1), "the variant behind does not run")
    text = message("product")
    expect(text.endswith("onnxfuse: node 'node0' (Region0, product): no cuBLASLt: /nowhere/libcublasLt.so: cannot open "
                         f"shared object file: No such file or directory{remedy}"), text)
    other = os.environ["ONNXFUSE_LIBCUBLASLT"] = os.environ["ONNXFUSE_LIBCUDA"]
    text = message("product")
    expect(text.endswith(f"(Region0, product): cuBLASLt is too old: {other} has no cublasLtCreate{remedy}"), text)
    del os.environ["ONNXFUSE_LIBCUBLASLT"]
    try:
        session("product")
    except Exception as error:  # unless it is installed, and starts
        expect("no cuBLASLt: libcublasLt.so.13: " in str(error) or "cuBLASLt could not start" in str(error), error)


SCENARIOS = (products, workspaces, other_variants, products_of_sums, algorithms, no_library)
