"""What the compiler made of kernels and what becomes of a plan for it; NVRTC compiles, or a stand-in says what came."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event

import numpy as np
import onnx
import onnx.parser
import pytest
from cli_models import CHAIN, run, write
from onnx import numpy_helper
from test_horizontal import QKV

from onnxfuse import api
from onnxfuse.compiling import ReadBack, compile_all, read_back, source_of
from onnxfuse.errors import KernelError, ModelError
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise
from onnxfuse.planning import known
from onnxfuse.planning.context import Context
from onnxfuse.planning.costs.cost import CostModel
from onnxfuse.planning.costs.hardware import find_profile
from onnxfuse.planning.regions.horizontal import joined
from onnxfuse.refusal import Refusal
from onnxfuse.region import Built, Region, Times
from onnxfuse.rewriting import read_fused
from onnxfuse.runtime import Gpu, processes
from onnxfuse.runtime import compile as compile_module
from onnxfuse.runtime.cache import Cache
from onnxfuse.runtime.compile import Compiler, KernelSource
from onnxfuse.runtime.figures import KernelFigures
from onnxfuse.runtime.nodes import kernel_sources
from onnxfuse.schedules import Kernel, named
from onnxfuse.schedules.reductions.rows import IN_SHARED
from onnxfuse.schedules.source import Given

HEAD = '<ir_version: 8, opset_import: ["" : 17]>\n'

LONG = """g (float16[264, 65536] x, float16[65536] w, float16[65536] b) => (float16[264, 65536] y)
{ y = LayerNormalization <axis = -1> (x, w, b) }"""
"""More elements than 65,536 registers hold beside what else there is to hold."""

SHORT = LONG.replace("65536", "1024")


def planned(text: str, **options: object) -> Optimised:
    given = {"target": "H200", "verify": False, "database": False, **options}
    return optimise(onnx.parser.parse_model(HEAD + text), Options(**given))  # type: ignore[arg-type]


def only(optimised: Optimised) -> Region:
    (fusion,) = optimised.plan.fusions
    return fusion


@dataclass
class Said:
    """Stands in for the compiler: so many bytes are spilled by kernels in whose names there is so much."""

    spilled: Mapping[str, int]
    architecture: str = "sm_90"
    whole: bool = True
    asked: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)

    def begin(self, kernels: Sequence[Kernel]) -> None:
        names = [kernel.plan.variants[0].launches[0].kernel for kernel in kernels]
        assert set(names).isdisjoint(self.asked)
        self.begun += names

    def arriving(self, kernels: Sequence[Kernel]) -> Iterator[Kernel]:
        """Each is asked for when the one before it has been looked at."""
        for kernel in kernels:
            self.figures([kernel])
            yield kernel

    def figures(self, kernels: Sequence[Kernel]) -> list[Mapping[str, KernelFigures] | KernelError | None]:
        """One entry a kernel."""
        found: list[Mapping[str, KernelFigures] | KernelError | None] = []
        for kernel in kernels:
            names = [step.kernel for variant in kernel.plan.variants for step in variant.steps]
            self.asked.append(names[0])
            found.append({
                name: KernelFigures(64, max([0, *(size for part, size in self.spilled.items() if part in name)]), 8, 0)
                for name in names
            })
        return found


class Mute(Compiler):
    """Compiles everything, and says nothing."""

    def figures(self, kernel: KernelSource, architecture: str) -> None:
        return None


def context(optimised: Optimised, **options: object) -> Context:
    objective = Options(**options).objective  # type: ignore[arg-type]
    costs = CostModel(optimised.ledger, optimised.profile)
    return Context(optimised.canonical.graph, optimised.rules, costs, objective)


def revised(optimised: Optimised, compiled: Said | ReadBack, fusion: Region | None = None, **options: object
          ) -> Region | Refusal:
    spills = context(optimised, **options).compiling(compiled).spills
    assert spills is not None
    return spills.revision(fusion or only(optimised))


def test_rows_too_long_for_registers_run_another_way(tmp_path: Path) -> None:
    before = only(planned(LONG))
    optimised = planned(LONG, compile=True)
    after = only(optimised)
    compiler = Compiler(Cache(tmp_path, "test"))
    (own,) = ReadBack("sm_90", compiler=compiler).figures([named(before.kernel)])
    assert isinstance(own, Mapping)
    first = named(before.kernel).plan.variants[0].steps[0].kernel
    assert own[first].spilled_bytes > 100
    assert "stream" not in first
    assert after.kernel.choice is not None
    assert after.kernel.choice["items"] == IN_SHARED, "neither spilled nor read again"
    assert after.compiled is not None
    assert after.compiled == Built("sm_90", after.compiled.registers, 0, 0, after.compiled.shared_bytes)
    assert 16 <= after.compiled.registers <= 64
    (node,) = read_fused(optimised.model)
    assert node.figures["compiled"] == after.compiled.as_json()


def test_what_fits_stays_as_it_was() -> None:
    before, after = planned(SHORT), planned(SHORT, compile=True)
    assert only(after).kernel == only(before).kernel
    assert only(after).cost == only(before).cost
    assert only(before).compiled is None
    assert only(after).compiled is not None


def test_slight_spills_are_left_and_no_other_way_is_compiled() -> None:
    optimised = planned(SHORT)
    said = Said({"_32": 2})
    found = revised(optimised, said)
    assert isinstance(found, Region)
    assert found.kernel == only(optimised).kernel
    assert found.cost.seconds_after > only(optimised).cost.seconds_after
    assert found.compiled is not None
    assert found.compiled.spilled_bytes == 2
    assert len(said.asked) == 1


def test_other_ways_of_what_spills_begin_at_once() -> None:
    """Beside texts that are still compiled: one after the other would leave processors idle."""
    long, slight = planned(LONG), planned(SHORT)
    said = Said({"_w": 1000})
    spills = context(long).compiling(said).spills
    assert spills is not None
    spills.compile([only(long)])
    assert len(said.begun) == len(set(said.begun)) > 1
    said = Said({"_w": 1})
    spills = context(slight).compiling(said).spills
    assert spills is not None
    spills.compile([only(slight)])
    assert said.asked and not said.begun
    said = Said({"_w": 1000})
    both = context(long).compiling(said).spills
    assert both is not None
    asked = said.figures
    seen: list[int] = []
    said.figures = lambda kernels: (seen.append(len(said.begun)), asked(kernels))[1]  # type: ignore[method-assign]
    other = replace(only(long), made=replace(only(long).kernel, phases=only(long).kernel.phases))
    both.compile([only(long), other])
    assert seen[0] == 0 < seen[-1]


def test_of_several_ways_the_one_that_moves_the_fewest_bytes_runs() -> None:
    optimised = planned(SHORT)
    own = named(only(optimised).kernel).plan.variants[0].steps[0].kernel
    # Every way that keeps its rows spills; reading them again costs less.
    assert "_x" in own
    found = revised(optimised, Said({"_x": 1000}))
    assert isinstance(found, Region)
    assert found.kernel.choice is not None
    assert found.kernel.choice["items"] == 0
    # Where one of them does not, that one runs.
    threads = int(own.partition("_rows_")[2].partition("_")[0])
    fitting = next(choice for choice in only(optimised).kernel.choices
                   if choice["items"] and choice["threads"] >= threads and choice["width"] == 4)
    name = f"rows_{fitting['threads']}_w{fitting['width']}_x{fitting['items']}_32"
    spilling = {f"rows_{choice['threads']}_w{choice['width']}_x": 1000
                for choice in only(optimised).kernel.choices if choice["items"]}
    spilling = {part: size for part, size in spilling.items() if not name.startswith(part)}
    found = revised(optimised, Said({**spilling, own.partition("_rows_")[2]: 1000}))
    assert isinstance(found, Region)
    assert found.kernel.plan.variants[0].name.startswith(f"rows_{fitting['threads']}_w{fitting['width']}_x")


PRODUCT = """g (float16[6304, 768] a, float16[768, 3072] b, float16[3072] c) => (float16[6304, 3072] y)
{ p = MatMul(a, b) s = Add(p, c) y = Relu(s) }"""


@pytest.mark.parametrize(("bytes_each", "stays"), [(16, True), (2000, False)])
def test_a_block_that_spills_gives_way_to_another_whose_tiles_a_warp_copies(bytes_each: int, stays: bool) -> None:
    """Where what it spills takes longer than that needs more: blocks of other kinds take several times as long."""
    optimised = planned(PRODUCT)
    own = only(optimised).kernel
    first = named(own).plan.variants[0].launches[0].kernel
    after = revised(optimised, Said({first: bytes_each}))
    assert isinstance(after, Region) and own.pace is not None and after.kernel.pace is not None
    assert (after.kernel == own) == stays and after.kernel.plan.maps
    costs, fusion = optimised.costs, only(optimised)
    assert stays or costs.kernel_seconds(fusion) < costs.kernel_seconds(replace(fusion, made=after.kernel))


def test_other_ways_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have them."""
    optimised, made = planned(SHORT), []
    ask = known.asked
    monkeypatch.setattr(known, "asked", lambda *given: made.append(given) or ask(*given))
    spills = context(optimised).compiling(Said({"_x": 1000})).spills
    assert spills is not None
    first = spills.revision(only(optimised))
    count = len(made)
    assert spills.revision(only(optimised)) == first and len(made) == count > 5


def test_a_way_with_few_threads_is_none() -> None:
    """Kernels whose rows are several threads' spill; those of a thread or two a row do not."""
    optimised = planned(SHORT.replace("1024", "64").replace("264", "8192"), least_gain=0.0)
    kept = [choice for choice in only(optimised).kernel.choices if choice["items"]]
    own = named(only(optimised).kernel).plan.variants[0].steps[0].kernel
    threads = int(own.partition("_rows_")[2].partition("_")[0])
    few = {choice["threads"] for choice in kept if choice["threads"] * 2 < threads}
    assert few
    spilling = {f"rows_{choice['threads']}_w": 1000 for choice in only(optimised).kernel.choices
                if choice["threads"] not in few}
    found = revised(optimised, Said({**spilling, own.partition("_rows_")[2]: 1000, "_stream": 1000}), least_gain=0.0)
    assert isinstance(found, Region)
    chosen = found.kernel.plan.variants[0].name
    assert int(chosen.partition("rows_")[2].partition("_")[0]) * 2 >= threads


def test_a_region_that_spills_more_than_it_saves_is_left() -> None:
    optimised = planned(SHORT)
    found = revised(optimised, Said({"_32": 4000}))
    assert isinstance(found, Refusal)
    assert found.code == "spills"
    assert found.message.startswith("64 registers of a thread do not hold what its kernel needs, and 4000 bytes go "
                                    "through memory: 1 node would run")


def test_what_was_measured_is_not_weighed_by_spills() -> None:
    optimised = planned(SHORT)
    fusion = replace(only(optimised), measured=Times(5.0, 9.0, "NVIDIA H200", "2026-01-01"))
    found = revised(optimised, Said({"_32": 4000}), fusion)
    assert isinstance(found, Region)
    assert found.kernel == fusion.kernel
    assert found.compiled is not None
    assert found.compiled.spilled_bytes == 4000


def test_a_plan_for_several_sizes_keeps_its_variants() -> None:
    text = SHORT.replace("264", "N")
    optimised = planned(text, dims={"N": 264}, strategy="dynamic")
    found = revised(optimised, Said({"_x": 64}), strategy="dynamic", least_gain=0.0)
    assert isinstance(found, Region)
    assert found.kernel == only(optimised).kernel


def test_a_join_that_spills_what_it_saves_comes_apart() -> None:
    text, options = QKV.replace("float[N", "float[32"), {"disable": ("horizontal-joins",)}
    model = onnx.parser.parse_model(HEAD.replace('"" : 17', '"" : 20') + text)
    apart = optimise(model, Options(verify=False, target="H200", database=False, **options))  # type: ignore[arg-type]
    together = joined(apart.plan, context(apart))
    assert len(together.fusions) < len(apart.plan.fusions)
    said = {size: joined(apart.plan, context(apart).compiling(Said({"together": size})))
            for size in (0, 30_000, 1_000_000)}
    assert len(said[0].fusions) == len(together.fusions)
    assert all(f.compiled is not None for f in said[0].fusions if f.kernel.schedule == "together")
    # The one still gains against the runtime, and nothing against its parts; the other is slower than both.
    for size in (30_000, 1_000_000):
        assert [f.view for f in said[size].fusions] == [f.view for f in apart.plan.fusions]


def test_a_kernel_that_does_not_compile_is_left() -> None:
    optimised = planned(SHORT)
    broken = replace(only(optimised), made=replace(only(optimised).kernel, code=Given("nonsense")))
    found = revised(optimised, ReadBack("sm_90"), broken)
    assert isinstance(found, Refusal)
    assert found.code == "does-not-compile"
    assert "kernel.cu(1): error" in found.message
    assert found.remedy == "This is a fault of onnxfuse; report it."


def test_a_text_without_its_kernel_does_not_compile() -> None:
    kernel = only(planned(SHORT)).kernel
    (found,) = ReadBack("sm_90").figures([replace(kernel, code=Given('extern "C" __global__ void other() {}'))])
    assert isinstance(found, KernelError)
    assert found.message.startswith("its text has no kernel called 'rows_")


def test_a_compiler_that_does_not_say_what_it_made_changes_nothing(tmp_path: Path) -> None:
    optimised = planned(LONG)
    assert revised(optimised, ReadBack("sm_90", compiler=Mute(Cache(tmp_path, "test")))) is only(optimised)


def test_every_kernel_is_compiled_once_and_told(tmp_path: Path) -> None:
    kernel = only(planned(SHORT)).kernel
    told: list[tuple[int, int]] = []
    reading = ReadBack("sm_90", lambda done, of: told.append((done, of)), Compiler(Cache(tmp_path, "test")))
    first, second = reading.figures([kernel, kernel])
    assert first == second == reading.figures([kernel])[0]
    assert told == [(1, 1)]


class Waiting(Compiler):
    """Compiles once it may; counts what it is asked for."""

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self.may, self.count = Event(), 0

    def figures(self, kernel: KernelSource, architecture: str) -> dict[str, KernelFigures] | None:
        self.count += 1
        assert self.may.wait(60)
        return super().figures(kernel, architecture)


def test_what_is_begun_is_compiled_once_and_waited_for_where_it_is_asked_for(tmp_path: Path) -> None:
    """A text that does not compile is told as one that was not begun."""
    kernel = named(only(planned(SHORT)).kernel)
    other = replace(kernel, code=Given('extern "C" __global__ void other() {}'))
    broken = replace(kernel, code=Given("no text"))
    wanted = ReadBack("sm_90", compiler=Compiler(Cache(tmp_path / "alone", "test"))).figures([kernel, other, broken])
    compiler = Waiting(Cache(tmp_path / "begun", "test"))
    reading = ReadBack("sm_90", compiler=compiler)
    reading.begin([kernel, broken])
    reading.begin([kernel])
    compiler.may.set()
    found = reading.figures([kernel, other, broken])
    assert list(map(str, found)) == list(map(str, wanted)) and compiler.count == 3
    assert [type(each) for each in found] == [dict, KernelError, KernelError]
    reading.begin([kernel])
    assert compiler.count == 3


def test_a_draft_is_compiled_while_it_is_planned_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases apart and without, and what is joined of it too."""
    said = Said({})
    monkeypatch.setattr("onnxfuse.pipeline.read_back", lambda *_: (said, ()))
    model = onnx.parser.parse_model(
        HEAD + "g (float16[8, 64, 64, 64] x) => (float16[8, 64, 64, 64] y) { c = Conv(x, w, b) y = Relu(c) }")
    model.graph.initializer.extend(numpy_helper.from_array(np.ones(shape, np.float16), name)
                                   for name, shape in (("w", (64, 64, 1, 1)), ("b", (64,))))
    made = optimise(model, Options(target="H200", verify=False, compile=True, database=False, least_gain=0.0))
    assert [node.op for node in only(made).nodes] == ["Add", "Relu"]
    assert set(said.begun) == set(said.asked) and len(set(said.begun)) == 1
    said.asked.clear()
    said.begun.clear()
    joining = HEAD.replace('"" : 17', '"" : 20') + QKV.replace("float[N", "float[32")
    model = onnx.parser.parse_model(joining)
    made = optimise(model, Options(target="H200", verify=False, compile=True, database=False))
    assert any(region.kernel.schedule == "together" for region in made.regions)
    assert any("together" in name for name in said.begun) and any("together" not in name for name in said.begun)
    assert set(said.begun) <= set(said.asked)


@pytest.mark.parametrize("target", ["A100", "H200"])
def test_sessions_find_what_planning_compiled(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code of an architecture in all its parts, as a session on that GPU asks for it."""
    compiler = Compiler(Cache(tmp_path, "test"))
    for module in ("compiling", "embedding"):
        monkeypatch.setattr(f"onnxfuse.{module}.default_compiler", lambda: compiler)
    sm = find_profile(target).sm
    gpu = Gpu(0, target, divmod(sm, 10), 100, (13, 0))
    architecture = gpu.architecture
    monkeypatch.setattr("onnxfuse.runtime.library.gpus", lambda: [gpu])
    made = planned(SHORT, target=target, compile=True)
    asked: list[str] = []
    compiled = compile_module.compile_told
    monkeypatch.setattr(compile_module, "compile_told", lambda *given: (asked.append(given[0]), compiled(*given))[1])
    sources = kernel_sources(made.model, architecture)
    assert sources and all(image.startswith(b"\x7fELF") for image in compiler.images(sources, architecture))
    assert not asked
    assert compiler.image(sources[0], f"sm_{sm}") and not asked


def test_elsewhere_only_what_runs_at_the_planned_sizes_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as much is said of it."""
    real = compile_module.compile_told
    monkeypatch.setattr("onnxfuse.delivery.find_runner", lambda **_: None)

    def compiled(capability: tuple[int, int], verify: bool = False) -> tuple[object, int]:
        asked: list[str] = []
        compiler = Compiler(Cache(tmp_path / f"{capability}{verify}", "test"))
        monkeypatch.setattr("onnxfuse.compiling.default_compiler", lambda: compiler)
        monkeypatch.setattr("onnxfuse.runtime.library.gpus", lambda: [Gpu(0, "here", capability, 100, (13, 0))])
        monkeypatch.setattr(compile_module, "compile_told", lambda *given: (asked.append(given[0]), real(*given))[1])
        told = only(planned(SHORT, compile=True, verify=verify)).compiled
        return told, asked[-1].count("__launch_bounds__")

    (here, every), (elsewhere, one) = compiled((9, 0)), compiled((8, 0))
    assert here == elsewhere and every > 2 and one == 1
    assert compiled((9, 0), verify=True) == (here, every)


def test_the_longest_texts_are_compiled_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By both that compile several; what they give is in the order that was asked for."""
    monkeypatch.setattr(processes, "processors", lambda: 1)
    sources = [KernelSource("/*" + size * "*" + '*/ extern "C" __global__ void k() {}', (), ("k",))
               for size in (10, 30, 20)]
    asked: list[int] = []
    real = compile_module.compile_told
    monkeypatch.setattr(compile_module, "compile_told", lambda *given: (asked.append(len(given[0])), real(*given))[1])
    longest = sorted((len(source.source) for source in sources), reverse=True)
    compiler = Compiler(Cache(tmp_path / "images", "test"))
    images = compiler.images(sources, "sm_80")
    assert asked == longest and images == [compiler.image(source, "sm_80") for source in sources]
    asked.clear()
    found = dict(compile_all([(source, "sm_80") for source in sources], Compiler(Cache(tmp_path, "test")).figures))
    assert asked == longest and len(found) == 3


def test_one_that_fails_leaves_the_others(tmp_path: Path) -> None:
    kernel = only(planned(SHORT)).kernel
    sources = [source_of(text, kernel.plan) for text in (kernel.source, "nonsense")]
    found = dict(compile_all([(source, "sm_80") for source in sources], Compiler(Cache(tmp_path, "test")).figures))
    assert isinstance(found[sources[0], "sm_80"], dict)
    assert isinstance(found[sources[1], "sm_80"], KernelError)


@pytest.mark.parametrize(("target", "said"), [
    ("V100", "cannot compile for 'sm_70'"), ("Ascend 910", ""), ("H100", ""),
])
def test_targets_that_nothing_can_be_compiled_for(target: str, said: str) -> None:
    found, notes = read_back(find_profile(target))
    assert (found is None) is (target != "H100")
    assert [said in note for note in notes] == ([True] if said else [])
    optimised = planned(SHORT, target=target, compile=True)
    assert (only(optimised).compiled is None) is (target != "H100")
    assert len(optimised.notes) == len(notes)


def test_no_compiler_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise KernelError("no CUDA compiler: CuPy is not installed", remedy="install CuPy and NVRTC")

    monkeypatch.setattr("onnxfuse.runtime.compile.binding", nothing)
    optimised = planned(SHORT, compile=True)
    assert optimised.notes == (
        "kernels were not compiled, so that none was looked at for spilled registers: no CUDA compiler: CuPy is not "
        "installed",)
    assert only(optimised).compiled is None


def test_commands_show_what_was_read_back(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    report = json.loads(run("report", path, "--target", "H100", "--dim", "batch=64", "--json").stdout)
    (entry,) = report["fusions"]
    assert entry["compiled"]["architecture"] == "sm_90"
    assert entry["compiled"]["registers"] > 8
    assert entry["compiled"]["spilled_bytes"] == 0
    out = tmp_path / "fused.onnx"
    for flag in ("--verify", "--no-verify"):
        assert run("optimize", path, "-o", out, "--target", "H100", "--dim", "batch=64", flag, "-q").exit_code == 0
        (kept,) = json.loads(run("report", out, "--json").stdout)["fusions"]
        assert kept["compiled"] == (entry["compiled"] if flag == "--verify" else None)
    shown = run("explain", path, "a", "--target", "H100", "--dim", "batch=64").stdout
    assert f"compiled for sm_90: {entry['compiled']['registers']} registers a thread, which hold all its" in shown


def test_the_report_names_kernels_that_spill(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    result = api.optimize(path, dims={"batch": 64}, target="H100")
    (node,) = read_fused(result.model)
    edited = onnx.load_from_string(result.model.SerializeToString())
    for entry in edited.graph.node:
        for attribute in entry.attribute:
            if b'"spilled_bytes":0' in attribute.s:
                attribute.s = attribute.s.replace(b'"spilled_bytes":0', b'"spilled_bytes":24')
    onnx.save(edited, tmp_path / "edited.onnx")
    shown = " ".join(run("report", tmp_path / "edited.onnx").stdout.split())
    assert f"1 kernel with values that registers do not hold (sm_90): {node.name} 24 bytes a thread" in shown


def test_a_damaged_note_is_one_error(tmp_path: Path) -> None:
    result = api.optimize(write(tmp_path, CHAIN), dims={"batch": 64}, target="H100")
    for old, new in ((b'"spilled_bytes":0', b'"spilled_bytes":"0"'), (b'"registers":', b'"other":')):
        edited = onnx.load_from_string(result.model.SerializeToString())
        for entry in edited.graph.node:
            for attribute in entry.attribute:
                attribute.s = attribute.s.replace(old, new)
        with pytest.raises(ModelError, match=r"The record of what was compiled of the fused node '.*' is damaged"):
            api.report(edited)
