"""Statistics files: reading, the records for the database, and ``onnxfuse report --profile``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from cli_models import CHAIN, PRODUCT, ROOT, parse, run, run_apart, write
from run_statistics_files import document, node_of, run_of, write_document

import onnxfuse
from onnxfuse import measurements
from onnxfuse.errors import MeasurementError
from onnxfuse.graph.dims import symbol
from onnxfuse.graph.load import from_proto
from onnxfuse.measuring.database import (
    DEFAULT,
    Environment,
    Measurement,
    Statistic,
    find_database,
    in_memory,
    open_database,
)
from onnxfuse.measuring.production import statistics_of
from onnxfuse.operators import load_graph
from onnxfuse.planning.costs.cost import kernel_time
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.recorded import solved
from onnxfuse.reporting.profile import profile_of_run
from onnxfuse.reporting.profile_text import shapes
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime import Gpu
from onnxfuse.runtime.cache import digest
from onnxfuse.runtime.run_statistics import read_statistics

ENTRY: dict[str, Any] = {
    "node": "node0", "op": "Region0", "region": "add-one", "kernel": "k" * 64, "plan": "p" * 64, "gpu": 0,
    "unrecorded": 0, "runs": [],
}

REMEDY = "help: Give the file that a run with ONNXFUSE_STATISTICS=FILE in the environment wrote."


@pytest.fixture
def fused(tmp_path: Path) -> tuple[Path, FusedNode]:
    """A fused model of one node, and the node."""
    onnxfuse.optimize(parse(CHAIN), verify=False).save(tmp_path / "model.fused.onnx")
    (node,) = read_fused(onnx.load(tmp_path / "model.fused.onnx"))
    return tmp_path / "model.fused.onnx", node


def chain_run(batch: int, calls: int, microseconds: int, **more: Any) -> dict[str, Any]:
    """Calls of the chain's node at a batch."""
    return run_of([[batch, 4096], [4096]], [[batch, 4096]], calls, microseconds, **more)


def test_a_file_is_read(tmp_path: Path) -> None:
    entry = {**ENTRY, "runs": [run_of([[2, 3], None, []], [[2, 3]], 4, 5, captured=0)]}
    found = read_statistics(write_document(tmp_path / "s.json", {**document(entry), "new": "key of a later release"}))
    (node,) = found.nodes
    (seen,) = node.runs
    assert (seen.inputs, seen.outputs) == (((2, 3), None, ()), ((2, 3),))
    assert seen.mean_seconds == pytest.approx(5e-6)
    assert found.gpu(node.gpu).name == "NVIDIA H200"


def error_of(path: Path) -> str:
    with pytest.raises(MeasurementError) as error:
        read_statistics(path)
    return str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    assert error_of(tmp_path / "s.json") == (
        f"The statistics cannot be read: No such file or directory.\n--> {tmp_path / 's.json'}\n"
        "help: Run the model with ONNXFUSE_STATISTICS=FILE in the environment; the file is there when its sessions "
        "have ended."
    )


@pytest.mark.parametrize(("text", "message"), [
    ("{", "The file is no statistics file: it is not JSON: EOF while parsing an object at line 1 column 1."),
    ("[]", "The file is no statistics file."),
    ('{"format": 1}', "The file is no statistics file."),
    ('{"traceEvents": []}', "The file is no statistics file."),
])
def test_another_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    assert error_of(path) == f"{message}\n--> {path}\n{REMEDY}"


def test_onnx_runtimes_profile(tmp_path: Path) -> None:
    path = write_document(tmp_path / "s.json", [{"cat": "Session", "ph": "X", "name": "model_run"}])
    assert error_of(path) == (
        f"The file is ONNX Runtime's own profile of a run, not the statistics of fused nodes.\n--> {path}\n{REMEDY} "
        "`onnxfuse optimize --profile` takes the runtime's."
    )


def test_a_later_format(tmp_path: Path) -> None:
    path = write_document(tmp_path / "s.json", document(format="onnxfuse statistics 2"))
    assert error_of(path) == (
        "The statistics file has the format 'onnxfuse statistics 2'; this release reads 'onnxfuse statistics 1'.\n"
        f"--> {path}\nhelp: Use the release of onnxfuse that wrote it."
    )


@pytest.mark.parametrize(("entry", "message"), [
    ({**ENTRY, "runs": [run_of([[2]], [[2]], -1, 5)]},
     "nodes.0.runs.0.calls: input should be greater than or equal to 0"),
    ({**ENTRY, "runs": [run_of([[2]], [[2]], 3, 5, captured=1)]},
     "nodes.0.runs.0: more calls are timed or captured than there are"),
    ({**ENTRY, "gpu": 1}, "node 'node0' ran on GPU 1, which is not among the GPUs"),
    ({**ENTRY, "kernel": 5}, "nodes.0.kernel: input should be a valid string"),
    ({**ENTRY, "runs": [run_of([["2"]], [[2]], 3, 5)]}, "nodes.0.runs.0.inputs.0.0: input should be a valid integer"),
])
def test_a_damaged_file(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    path = write_document(tmp_path / "s.json", document(entry))
    assert error_of(path) == (
        f"The statistics file is damaged: {message}.\n--> {path}\n"
        "help: Run the model again with ONNXFUSE_STATISTICS=FILE."
    )


def test_every_key_is_documented() -> None:
    entry = {**ENTRY, "runs": [run_of([[2]], [[2]], 3, 5)]}
    words = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    content = document(entry)
    for name in (*content, *entry, *entry["runs"][0], *content["gpus"][0]):
        assert f"`{name}`" in words, name
    for name in ("predicted_us", "measured_us", "least_us", "ratio", "total_us", "share", "compared", "close",
                 "sizes", "learned"):
        assert f"`{name}`" in words, name


def test_records_for_the_database(tmp_path: Path) -> None:
    """Nodes of one kernel, and its variants, add up; calls without a time do not count."""
    shared = {**ENTRY, "node": "node1", "runs": [run_of([[8], None], [[8]], 1, 9, variant="narrow")]}
    first = {**ENTRY, "runs": [
        run_of([[8], None], [[8]], 10, 5, timed=3, total_ns=15_000), run_of([[4], None], [[]], 2, 4),
        run_of([[5], None], [[5]], 7, 0, timed=0),
    ]}
    found = statistics_of(read_statistics(write_document(tmp_path / "s.json", document(first, shared))))
    environment = Environment("NVIDIA H200", "580.65.06", "0.1.0", "1.31.1", "nvrtc-13.0.88")
    assert [(entry.kernel, entry.shapes, entry.calls, entry.environment, entry.last_seen) for entry in found] == [
        ("k" * 64, "8>8", 4, environment, "2026-09-21T14:14:20+00:00"),
        ("k" * 64, "4>-", 2, environment, "2026-09-21T14:14:20+00:00"),
    ]
    assert [entry.microseconds for entry in found] == pytest.approx([(3 * 5 + 9) / 4, 4])
    with in_memory() as database:
        database.record_statistics(found)
        assert isinstance(database.statistic(environment, "k" * 64, "8>8"), Statistic)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "learned.sqlite"


def here(node: FusedNode, *runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a process with the releases at hand recorded."""
    versions = {"onnxfuse": onnxfuse.__version__, "onnxruntime": onnxruntime.__version__}
    return document(node_of(node, *runs), **{**versions, **more})


def test_what_a_run_took_is_learned(tmp_path: Path, fused: tuple[Path, FusedNode], database: Path) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", here(
        node, chain_run(8, 100, 2), chain_run(64, 10, 40), chain_run(2, 1, 0, timed=0, captured=1)))
    for _ in range(2):  # the same file again is the same run
        result = run("report", path, "--profile", file, "--learn", "--database", database)
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[-2:] == [
            f"learned: 110 timed calls of 2 kernels, each at some shapes, in {database}",
            "help: most of the time went at these sizes: onnxfuse optimize ORIGINAL --dim batch=64"]
    with find_database(database) as kept:  # type: ignore[union-attr]
        (where,) = kept.recorded_in()
        found = kept.statistic(where, digest(node.source, node.plan.options), "64x4096,4096>64x4096")
    assert found is not None and (found.microseconds, found.calls, where.gpu) == (40.0, 10, "NVIDIA H200")
    content = json.loads(run("report", path, "--profile", file, "--learn", "--database", database, "--json").output)
    assert content["learned"] == {"database": str(database), "kernels": 2, "calls": 110}
    assert content["sizes"] == {"batch": 64}


@pytest.mark.parametrize(("microseconds", "fused_nodes"), [(5, 1), (5000, 0)])
def test_optimize_uses_what_was_learned(
    tmp_path: Path, fused: tuple[Path, FusedNode], database: Path, microseconds: int, fused_nodes: int
) -> None:
    """The times stand in the report; a kernel that took far longer in production than the runtime's nodes are predicted
    to is left out, with the reason."""
    path, node = fused
    file = write_document(tmp_path / "s.json", here(node, chain_run(64, 10, microseconds)))
    assert run("report", path, "--profile", file, "--learn", "--database", database).exit_code == 0
    model = write(tmp_path, CHAIN)
    plan = ("--dim", "batch=64", "--target", "H200", "--no-verify", "--database", database, "-o", tmp_path / "o.onnx")
    content = json.loads(run("optimize", model, *plan, "--json").output)
    assert len(content["fusions"]) == fused_nodes
    if fused_nodes:
        measured = content["fusions"][0]["measured"]
        assert (measured["microseconds"], measured["source"], measured["gpu"]) == (5.0, "statistics", "NVIDIA H200")
        return
    (refusal,) = [entry for entry in content["refusals"] if entry["code"] == "measured-slower"]
    assert refusal["message"].startswith("recorded in production on NVIDIA H200: 5000.0 µs a call, and ")
    assert refusal["message"].endswith(" µs are predicted for the 5 nodes as the runtime runs them")
    assert refusal["remedy"] == "onnxfuse tune MODEL measures both on the GPU at hand"
    for other in ({"batch=64": "batch=32"}, {"H200": "H100"}):  # other shapes, another GPU
        again = json.loads(run("optimize", model, *(other.get(str(word), word) for word in plan), "--json").output)
        assert len(again["fusions"]) == 1 and again["fusions"][0]["measured"] is None


def test_statistics_of_another_release_do_not_count(
    tmp_path: Path, fused: tuple[Path, FusedNode], database: Path
) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", here(node, chain_run(64, 10, 5000), onnxfuse="0.0.1"))
    assert run("report", path, "--profile", file, "--learn", "--database", database).exit_code == 0
    found = onnxfuse.optimize(write(tmp_path, CHAIN), dims={"batch": 64}, target="H200", verify=False,
                              database=database)
    assert len(found.report.fusions) == 1
    (note,) = [note for note in found.report.notes if note.startswith("database: ")]
    assert "is not used: it was with driver 580.65.06, onnxfuse 0.0.1, " in note


def test_what_was_tuned_with_another_driver_does_not_count_for_its_statistics(
    tmp_path: Path, fused: tuple[Path, FusedNode], database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is here, with a newer driver: times from production count, and what tune measured is told to be old."""
    path, node = fused
    model = write(tmp_path, CHAIN)
    plan: dict[str, Any] = {"dims": {"batch": 64}, "target": "H200", "verify": False, "database": database}
    file = write_document(tmp_path / "s.json", here(node, chain_run(64, 10, 5)))
    assert run("report", path, "--profile", file, "--learn", "--database", database).exit_code == 0
    with open_database(database) as kept:
        (where,) = kept.recorded_in()
        kernel = "a kernel that was tuned"
        kept.record(where, Measurement(kernel, "1>1", DEFAULT, 1.0))
    monkeypatch.setattr(measurements, "present_gpus", lambda: (Gpu(0, "NVIDIA H200", (9, 0), 132, (13, 0)),))
    monkeypatch.setattr(measurements, "driver_version", lambda: "600.1")
    found, notes = measurements.find_measurements(find_profile("H200"), database)
    assert found is not None and found.seen_in == (where,)
    assert found.environment.driver == "600.1"
    assert notes[0].startswith("database: what was measured on NVIDIA H200 is not used: it was with driver 580.65.06, ")
    found.database.close()
    (entry,) = onnxfuse.optimize(model, **plan).report.fusions
    assert entry.measured is not None and entry.measured["source"] == "statistics"


def test_calls_that_no_database_counts(tmp_path: Path, fused: tuple[Path, FusedNode], database: Path) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", here(
        node, *(chain_run(8, 1 << 62, 1, variant=f"v{place}", total_ns=1 << 62) for place in range(3))))
    result = run("report", path, "--profile", file, "--learn", "--database", database)
    assert result.exit_code == 0, result.output
    with find_database(database) as kept:  # type: ignore[union-attr]
        (where,) = kept.recorded_in()
        found = kept.statistic(where, digest(node.source, node.plan.options), "8x4096,4096>8x4096")
    assert found is not None and (found.microseconds, found.calls) == (0.001, (1 << 62) - 1)


def test_nothing_to_learn(tmp_path: Path, fused: tuple[Path, FusedNode], database: Path) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", here(node, chain_run(2, 1, 0, timed=0, captured=1)))
    result = run("report", path, "--profile", file, "--learn", "--database", database)
    assert result.exit_code == 0 and result.output.splitlines()[-1] == "nothing was learned: no call has a time"


@pytest.mark.parametrize(("options", "message"), [
    (["--learn"], "Error: --learn keeps what --profile FILE shows: name the file.\n"),
    (["--profile", "s.json", "--database", "d"], "Error: --database is for --learn.\n"),
])
def test_options_that_do_not_go_with_learning(tmp_path: Path, options: list[str], message: str) -> None:
    result = run_apart("report", tmp_path / "model.onnx", *options)
    assert result.exit_code == 2 and result.stderr.endswith(message)


def test_a_database_that_cannot_be_written(
    tmp_path: Path, fused: tuple[Path, FusedNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", here(node, chain_run(8, 100, 2)))
    (tmp_path / "file").write_text("")
    arguments = ("report", path, "--profile", file, "--learn")
    result = run_apart(*arguments, ONNXFUSE_DATABASE=str(tmp_path / "file" / "m.sqlite"))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: The database of measurements cannot be written: ")
    for name in ("ONNXFUSE_CACHE_DIR", "ONNXFUSE_DATABASE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    result = run_apart(*arguments)
    assert result.exit_code == 1 and result.stderr == (
        "error: There is no folder for the database of measurements: HOME is not set.\n"
        "help: Name a file: --database FILE, or ONNXFUSE_DATABASE=FILE in the environment.\n")


def test_symbols_are_solved_from_shapes() -> None:
    graph = load_graph(from_proto(parse(CHAIN)))
    x = graph.values["x"]
    assert solved([(x, (8, 4096))]) == {"batch": 8}
    assert solved([(x, (8, 4097))]) is None
    assert solved([(x, (8, 4096)), (graph.values["a"], (9, 4096))]) is None
    assert solved([(x, None)]) == {}
    assert solved([(x, (8,))]) is None


@pytest.mark.parametrize(("sizes", "numbers", "found"), [
    ([symbol("past") + symbol("new"), symbol("new")], [12, 5], {"past": 7, "new": 5}),
    ([3 * symbol("a") + 1], [10], {"a": 3}),
    ([3 * symbol("a") + 1], [11], {}),
    ([symbol("a") - 4], [1], {"a": 5}),
    ([symbol("a") * symbol("b"), symbol("a")], [12, 3], {"a": 3, "b": 4}),
    ([symbol("a") * symbol("a")], [9], {}),
    ([symbol("a"), symbol("a") * 2], [3, 7], None),
])
def test_symbols_in_expressions(sizes: list[Any], numbers: list[int], found: dict[str, int] | None) -> None:
    graph = load_graph(from_proto(parse(CHAIN)))
    value = graph.values["x"]
    value.shape = tuple(sizes)
    assert solved([(value, numbers)]) == found


def test_the_profile_of_a_run(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    """Predictions by hand: one kernel reads x and w and writes y, float32, at the recorded batch."""
    path, node = fused
    file = write_document(tmp_path / "s.json", document(
        node_of(node, chain_run(8, 100, 3), chain_run(1024, 20, 40, timed=10, captured=5, total_ns=400_000),
                unrecorded=3),
        {**ENTRY, "node": "other"}, notes=["something to know"],
    ))
    found = profile_of_run(path, file)
    assert [run.inputs[0] for run in found.runs] == [(1024, 4096), (8, 4096)]
    assert [run.total_us for run in found.runs] == [600, 300]
    assert [run.share for run in found.runs] == pytest.approx([2 / 3, 1 / 3], abs=1e-6)
    assert (found.total_us, found.gpus, found.targets, found.idle) == (900, ("NVIDIA H200",), ("H200",), ())
    assert found.notes == (
        "something to know", "1 fused nodes in the file are of other models or kernels and are left out",
        "3 calls had shapes past the most that are kept and are left out",
    )
    h200 = find_profile("H200")
    for entry, batch in zip(found.runs, (1024, 8), strict=True):
        x = 4 * batch * 4096
        wanted = 1e6 * kernel_time(x + 4 * 4096, x, batch * 4096 * 19, h200, efficiency=0.9)
        assert entry.predicted_us == pytest.approx(wanted, rel=1e-3)
        assert entry.measured_us is not None
        assert entry.ratio == pytest.approx(entry.measured_us / wanted, rel=1e-3)


def test_a_profile_with_another_target(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", document(node_of(node, chain_run(1024, 1, 10)), gpu="GPU of tomorrow"))
    unknown = profile_of_run(path, file)
    assert (unknown.targets, unknown.runs[0].predicted_us, unknown.compared) == ((None,), None, ())
    assert unknown.notes == (
        "no hardware profile describes GPU of tomorrow, so nothing is predicted; name one with --target",)
    assert profile_of_run(path, file, target="L4").targets == ("L4",)


def test_shapes_that_are_not_the_models_are_not_predicted(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", document(node_of(node, run_of([[8, 4], [4]], [[8, 4]], 1, 10))))
    (entry,) = profile_of_run(path, file).runs
    assert (entry.predicted_us, entry.ratio, entry.measured_us) == (None, None, 10)


def test_the_command_shows_the_table(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", document(
        node_of(node, chain_run(8, 100, 2), chain_run(1024, 10, 40), chain_run(2, 1, 0, timed=0, captured=1))))
    result = run("report", path, "--profile", file)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert lines[0] == f"{path}  recorded on NVIDIA H200"
    assert lines[1] == "1 fused node, 111 calls, 600 µs of GPU time"
    rows = [re.split(r"  +", line) for line in lines[3:7]]
    assert rows[0] == ["node", "rule", "inputs", "calls", "predicted", "measured", "ratio", "total", "share"]
    assert [row[:4] for row in rows[1:]] == [
        [node.name, node.rule, f"{batch}x4096, 4096", calls] for batch, calls in ((1024, "10"), (8, "100"), (2, "1"))]
    assert [row[5] for row in rows[1:]] == ["40 µs", "2 µs", "-"]
    assert [row[7:] for row in rows[1:]] == [["400 µs", "66.7%"], ["200 µs", "33.3%"], ["-", "-"]]
    assert lines[-1] == ("predictions within 25% of what was measured: 1 of 2 rows (33% of the time); the ratio is "
                         "measured over predicted")


def test_the_command_gives_data(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", document(node_of(node, chain_run(8, 100, 2))))
    result = run("report", path, "--profile", file, "--json")
    content = json.loads(result.output)
    assert (content["model"], content["file"], content["compared"], content["close"]) == (str(path), str(file), 1, 1)
    (entry,) = content["runs"]
    assert (entry["node"], entry["rule"], entry["calls"], entry["share"]) == (node.name, node.rule, 100, 1.0)


def test_an_idle_node_is_named(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    result = run("report", path, "--profile", write_document(tmp_path / "s.json", document(node_of(node))))
    assert f"1 fused node of the model never ran: {node.name}" in result.output


def test_statistics_of_another_model(tmp_path: Path, fused: tuple[Path, FusedNode]) -> None:
    path, node = fused
    file = write_document(tmp_path / "s.json", document(node_of(node, chain_run(8, 1, 1), kernel="0" * 64)))
    result = run_apart("report", path, "--profile", file)
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: The statistics are of another model: none of their 1 fused nodes is in {path} with the same kernel.\n"
        f"--> {file}\nhelp: Give the very model that ran; a model that was fused again may have other kernels.\n"
    )


def test_a_model_that_is_not_fused(tmp_path: Path) -> None:
    path = write(tmp_path, PRODUCT)
    result = run_apart("report", path, "--profile", write_document(tmp_path / "s.json", document()))
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: The model holds no fused nodes, and statistics are of fused nodes.\n--> {path}\n"
        "help: Give the fused model that ran.\n"
    )


@pytest.mark.parametrize("option", [["--explain"], ["--html", "report.html"], ["--graph", "graph.svg"]])
def test_options_that_do_not_go_with_profile(tmp_path: Path, option: list[str]) -> None:
    result = run_apart("report", tmp_path / "model.onnx", "--profile", "s.json", *option)
    assert result.exit_code == 2
    assert result.stderr.endswith(
        "Error: --profile shows a table of its own: leave --explain, --html and --graph out.\n")


def test_shapes_in_one_line() -> None:
    assert shapes([(8, 128), (), None]) == "8x128, 1 value, -"
    assert shapes([(1000, 1000, 1000)] * 9, 30) == "1000x1000x1000, ..."
