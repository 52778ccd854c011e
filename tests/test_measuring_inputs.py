"""Inputs made up from what a model declares."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from onnxfuse.errors import ModelError
from onnxfuse.measuring.inputs import make_inputs, read_inputs
from onnxfuse.operators import load_graph

IDS = """
<ir_version: 8, opset_import: ["" : 18]>
g (int64[batch, seq] ids, int64[batch, seq] kinds, int64[batch, seq] attention_mask, float16[batch, seq, 8] x,
   bool[batch, seq] flags, int8[batch, 3, 3] other) => (float16[batch, seq, 8] y, float16[batch, seq, 8] z) {
    a = Gather(table, ids)
    k = Cast <to = 7> (kinds)
    b = Gather(pair, k)
    y = Add(a, b)
    z = Add(x, b)
}
"""


def graph(text: str = IDS):
    model = parser.parse_model(text)
    for name, rows in (("table", 50), ("pair", 2)):
        model.graph.initializer.append(numpy_helper.from_array(np.zeros((rows, 8), np.float16), name))
    return load_graph(model)


def test_every_input_has_its_type_and_shape():
    made = make_inputs(graph(), {"batch": 4, "seq": 100})
    assert {name: (array.dtype.name, array.shape) for name, array in made.items()} == {
        "ids": ("int64", (4, 100)), "kinds": ("int64", (4, 100)), "attention_mask": ("int64", (4, 100)),
        "x": ("float16", (4, 100, 8)), "flags": ("bool", (4, 100)), "other": ("int8", (4, 3, 3)),
    }


def test_indices_stay_inside_their_table():
    made = make_inputs(graph(), {"batch": 4, "seq": 100})
    assert made["ids"].min() == 0 and made["ids"].max() == 49
    assert set(np.unique(made["kinds"])) == {0, 1}
    assert (made["attention_mask"] == 1).all()
    assert made["other"].min() >= 0
    assert set(np.unique(made["flags"])) == {False, True}
    assert abs(float(made["x"].astype(np.float64).std()) - 1) < 0.1


def test_the_same_seed_makes_the_same_inputs():
    one, same, other = (make_inputs(graph(), {"seq": 9}, seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not np.array_equal(one["x"], other["x"])


def test_given_arrays_are_used_and_decide_the_sizes():
    ids = np.full((2, 7), 3, np.int64)
    made = make_inputs(graph(), {}, {"ids": ids})
    assert made["ids"] is ids
    assert made["x"].shape == (2, 7, 8)


@pytest.mark.parametrize(("given", "message"), [
    ({"idz": np.ones((1, 1))},
     "The model has no input 'idz'.\n--> idz\nhelp: Its inputs are: ids, kinds, attention_mask, x, flags, other."),
    ({"ids": np.ones((1, 1), np.int32)},
     "Input 'ids' has type int64, and the array given is int32.\n--> ids\nhelp: Convert it: array.astype('int64')."),
    ({"x": np.ones((1, 1), np.float16)},
     "Input 'x' has 3 axes, and the array given has 2.\n--> x\nhelp: Its shape is [batch, seq, 8]."),
])
def test_arrays_that_do_not_fit(given, message):
    with pytest.raises(ModelError) as error:
        make_inputs(graph(), {}, given)
    assert str(error.value) == message


def test_text_cannot_be_made_up():
    value = [helper.make_tensor_value_info(name, TensorProto.STRING, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph)
    with pytest.raises(ModelError) as error:
        make_inputs(load_graph(model), {})
    assert str(error.value) == (
        "Input 'x' cannot be made up: it holds text.\n--> x\nhelp: Give it: inputs={\"NAME\": ARRAY}."
    )


def test_a_file_of_inputs(tmp_path):
    path = tmp_path / "inputs.npz"
    np.savez(path, a=np.arange(3), b=np.ones(2, np.float16))
    found = read_inputs(path)
    assert list(found) == ["a", "b"]
    assert found["b"].dtype == np.float16


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 torn"])
def test_a_file_that_holds_no_inputs(tmp_path, content):
    path = tmp_path / "inputs.npz"
    path.write_bytes(content)
    with pytest.raises(ModelError) as error:
        read_inputs(path)
    assert str(error.value).startswith("The inputs cannot be read: ")
    assert str(error.value).endswith(
        f"\n--> {path}\nhelp: Write them with numpy.savez(path, input_name=array, ...)."
    )


def test_a_file_of_one_array(tmp_path):
    path = tmp_path / "inputs.npy"
    np.save(path, np.arange(3))
    with pytest.raises(ModelError, match="it holds one array without a name"):
        read_inputs(path)
