"""Random nodes that give their operand back, put into the zoo's models, change neither plan nor answers.

Each seed takes a model, and puts up to twelve such nodes on random edges, some before all readers of a value, some
before one of several.  What the fused model is predicted to take must stay what it was: ONNX Runtime takes these nodes
out, so they count nothing.  Tolerance: 1e-6, as sums of floating-point numbers in another order differ.  Answers are
compared bit for bit at small sizes, on the CPU provider with nothing of onnxfuse and the runtime's optimisations off;
those of float16 to a hundredth of the largest number, since that provider computes it in float32 and rounds where a
node of another kind stands between two, as one does that is put in.

    pytest tests/test_insertions.py --insertions 200 --seed 1000
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from insertions import drawn, insert
from plain_session import session
from zoo_models import MODELS, TARGET, ZOO, ZooModel

from onnxfuse.graph import build_graph, from_proto
from onnxfuse.operators import infer
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import Profile, find_profile
from onnxfuse.rewriting import exact_form, unfuse
from onnxfuse.rules.runtime import runtime_groups

MOST = 12
"""Values with inserted readers, of one model."""

FEW = 12

QUICK = sorted(MODELS, key=lambda name: ZOO[name]["nodes"])[:3]
"""The models that take the shortest to plan: these, unless more insertions are asked for."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A process that makes a model has all seeds of that."""
    if "seed" in metafunc.fixturenames:
        first, count = (metafunc.config.getoption(name) for name in ("--seed", "--insertions"))
        metafunc.parametrize("seed", [
            pytest.param(seed, marks=pytest.mark.xdist_group(f"insertions-{model_of(seed, metafunc.config)}"))
            for seed in range(first, first + count)])


def model_of(seed: int, config: pytest.Config) -> str:
    """The model of a seed."""
    names = MODELS if config.getoption("--insertions") > FEW else QUICK
    return names[seed % len(names)]


@cache
def target() -> Profile:
    return find_profile(TARGET)


def fused(model: onnx.ModelProto, zoo: ZooModel) -> Optimised:
    dims = zoo.dims(ZOO[zoo.name]["sizes"][0])
    return optimise(model, Options(dims=dims, target=target(), verify=False, database=False))


def seconds(made: Optimised) -> float:
    """Predicted seconds of one run of the fused model."""
    return CostModel(made.ledger, made.profile).total(made.plan.fusions)


class Original(NamedTuple):
    """A model of the zoo, its file, the types of its values, what ONNX Runtime's own fusions compute, and the predicted
    seconds of the fused model."""

    zoo: ZooModel
    model: onnx.ModelProto
    types: dict[str, int]
    grouped: set[str]
    seconds: float


@cache
def original(name: str, folder: Path) -> Original:
    """A model of the zoo, as it comes and fused."""
    zoo = ZooModel.hydrate(name, folder)
    model = onnx.load(zoo.path)
    graph = infer(build_graph(from_proto(model)))
    types = {key: value.dtype for key, value in graph.values.items() if value.dtype is not None}
    grouped = {value.name for group in runtime_groups(graph) for node in group.nodes
               for value in node.outputs if value is not None}
    return Original(zoo, model, types, grouped, seconds(fused(model, zoo)))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


def test_insertions_change_nothing(seed: int, folder: Path, request: pytest.FixtureRequest) -> None:
    rng = Random(seed)
    zoo, plain, types, grouped, wanted = original(model_of(seed, request.config), folder)
    model = onnx.ModelProto()
    model.CopyFrom(plain)
    edges = drawn(model, types, rng, rng.randint(1, MOST), grouped)
    insert(model, edges, types)
    made = fused(model, zoo)
    assert seconds(made) == pytest.approx(wanted, rel=1e-6), (zoo.name, edges)
    assert unfuse(made.model).SerializeToString(deterministic=True) == model.SerializeToString(deterministic=True)
    before, after = session(exact_form(made.loaded.proto, made.model)), session(made.model)
    assert before is not None and after is not None
    feeds = zoo.feeds()
    for first, second in zip(before.run(None, feeds), after.run(None, feeds), strict=True):
        if first.dtype == np.float16:
            np.testing.assert_allclose(second, first, rtol=0, atol=0.01 * float(np.abs(first).max()))
        else:
            assert first.tobytes() == second.tobytes(), (zoo.name, edges)
