"""What Python code calls: the commands as functions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import onnx

from onnxfuse import locking, measuring, reporting, rewriting, verifying
from onnxfuse.comparing import VerifyResult, compare
from onnxfuse.errors import ModelError
from onnxfuse.files import write_text
from onnxfuse.graph import LoadedModel
from onnxfuse.locking import CheckResult, Lock
from onnxfuse.measurements import Place
from onnxfuse.measuring import BenchResult
from onnxfuse.measuring.sets import InputSet, read_input_sets
from onnxfuse.optimised import Optimised, Tell, silent
from onnxfuse.pipeline import Options, load, optimise, profile_of
from onnxfuse.planning.hardware import Profile
from onnxfuse.planning.objective import LEAST_GAIN, Hints
from onnxfuse.reporting import Explanation, Report, as_json, is_fused, note_report, report_of, report_of_fused
from onnxfuse.reporting.drawing import picture
from onnxfuse.rewriting.saving import External, Saved
from onnxfuse.unforeseen import told
from onnxfuse.verifying.bounds import Bounds
from onnxfuse.verifying.closeness import Closeness
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.runs import Inputs

Source = str | Path | onnx.ModelProto


@dataclass(frozen=True, repr=False)
class Result:
    """A fused model and its report.

    Attributes:
        optimised: everything that led to it, stage by stage.
        report: what was fused, what was not and why, and what it costs.
    """

    optimised: Optimised
    report: Report

    def __repr__(self) -> str:
        return repr(self.report).replace("<Report", "<Result", 1)

    @property
    def model(self) -> onnx.ModelProto:
        """The fused model."""
        return self.optimised.model

    def save(self, path: str | Path | None = None, *, external: External = "keep",
             progress: Callable[[int, int], None] | None = None) -> Path:
        """``write``, of which the path is all that matters."""
        return self.write(path, external=external, progress=progress).path

    def to_svg(self) -> str:
        """The fused graph as a picture, each fused node with the nodes that its function holds.

        Raises:
            ModelError: there is more to draw than can be looked at.
        """
        with told(self.optimised.loaded.path):
            return picture(self.model, Path(self.report.model).name)

    def write(self, path: str | Path | None = None, *, external: External = "keep",
              progress: Callable[[int, int], None] | None = None) -> Saved:
        """Write the fused model; returns its path, and the files outside it that hold weights of its.

        Args:
            path: by default beside the file that was read, ``model.fused.onnx`` for ``model.onnx``.
            external: what becomes of weights outside the model's file: "keep" refers to the same files where that is
                possible, "copy" copies them to ``<path>.DIGEST.data``, "inline" puts them into the model.
            progress: told the bytes copied to the data file, and those to copy.

        Raises:
            OutputError: the file cannot be written; nothing was left behind.
            ValueError: the model was not read from a file, and there is no path.
        """
        if path is None:
            if self.optimised.loaded.path is None:
                raise ValueError("a model that was not read from a file needs a path to be saved to")
            path = default_output(self.optimised.loaded.path)
        source = self.optimised.loaded
        if external not in get_args(External):
            raise ValueError(f"external is {external!r}; it can be {', '.join(map(repr, get_args(External)))}")
        with told(source.path, path):
            return rewriting.save(self.model, path, source=source, external=external, progress=progress)

    def lock(self) -> Lock:
        """What is fused, by onnxfuse and by ONNX Runtime itself, to hold later models against (``check``)."""
        with told(self.optimised.loaded.path):
            return locking.lock_of(self.optimised, self.report)

    def save_lock(self, path: str | Path) -> Path:
        """Write the lock as a file of YAML, all of it or nothing; returns its path.

        Raises:
            OutputError: the file cannot be written; nothing was left behind.
        """
        write_text(Path(path), locking.lock_text(self.lock()))
        return Path(path)


def optimize(
    model: Source | LoadedModel,
    *,
    rules: Sequence[str | Path] = (),
    disable: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    embed: Sequence[str] = (),
    verify: bool = True,
    verify_seconds: float = Options.verify_seconds,
    compile: bool | None = None,
    inputs: Mapping[str, Any] | None = None,
    strategy: str = "auto",
    hints: Hints | None = None,
    least_gain: float | None = None,
    provider_options: Mapping[str, str] | None = None,
    database: Place = None,
    run_profile: str | Path | None = None,
    measure_seconds: float = 60.0,
    tell: Tell = silent,
) -> Result:
    """Fuse a model.

    Args:
        model: a file, or what ``onnx.load`` returns; it is not changed.
        rules: rule files, or folders of them, to use beside the shipped ones.
        disable: ids of rules to leave out.
        dims: sizes of symbolic dimensions to plan for; the fused model takes all sizes that the model takes.
        target: name of the GPU to plan for, or a profile; the GPU present by default, else the H100.
        embed: architectures, such as "sm_90", whose compiled kernels go into the model.
        verify: run every fused node against what it replaced, and take back those that fail.
        verify_seconds: that verification may take, 0 for as many as it needs; what it has no time for is left out, and
            the report says so.
        compile: compile every kernel for the target and see which spill registers; as ``verify`` where None.
        inputs: arrays by input name to verify with, beside made ones.
        strategy: what the plan is to be good at: "auto", "all-in-one", "memory" or "dynamic".
        hints: of the state of the machine that the model will run on.
        least_gain: predicted speed-up that a region must pass to be fused, 1.2 where None.
        provider_options: of the CUDA provider that the model will run with.
        database: of measurements (`onnxfuse tune`) to plan by: a file, the default one where it is there (None), or
            none (False).
        run_profile: file of ONNX Runtime's profile of a run of the model on CUDA, to weigh regions by.
        measure_seconds: where the GPU to plan for is here, regions with products that were not measured yet are, into
            the database; after so long none begins, and with 0 none at all.
        tell: told the stage, how much of it is done, and how much there is.

    Raises:
        ModelError: the model cannot be read or understood, or ONNX Runtime itself refuses it.
        MeasurementError: the database or the profile cannot be used.
        RuleError: a rule file is wrong.
        TargetError: the target GPU is not known.
        ValueError: there is no such strategy.
        KernelError: with ``embed``: a kernel cannot be compiled.
        VerificationError: the fused model as a whole is wrong; this is a fault of onnxfuse.
        InternalError: another fault of onnxfuse, as from any function here; ``__cause__`` is what happened.
    """
    options = Options(
        rules, disable, dims or {}, target, architectures=embed, verify=verify, verify_seconds=verify_seconds,
        compile=compile, inputs=inputs, strategy=strategy, hints=hints or Hints(),
        least_gain=LEAST_GAIN if least_gain is None else least_gain, provider_options=provider_options or {},
        database=database, run_profile=run_profile,
    )
    _ = options.objective  # wrong arguments are the caller's
    with told(file_of(model)):
        loaded = load(model)
        if measure_seconds > 0:
            from onnxfuse.tuning.products import measure_products

            measure_products(loaded, options, measure_seconds, tell)
        optimised = optimise(loaded, options, tell)
        found = report_of(optimised)
        note_report(optimised, found)
        return Result(optimised, found)


def report(
    model: Source,
    *,
    rules: Sequence[str | Path] = (),
    disable: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Any,
) -> Report:
    """What ``optimize`` would do to a model; of a fused model, what it holds, read from the model itself, counted
    anew where ``dims`` or ``target`` ask for others than it was planned for.

    ``wanted`` are further arguments of ``optimize``.

    Raises:
        ModelError, RuleError, TargetError: as ``optimize``.
    """
    return looked_at(model, rules=rules, disable=disable, dims=dims, target=target, tell=tell, why=False,
                     **wanted).report


class Seen(NamedTuple):
    """The report of a model, why it is as it is where that was asked for, and the fused model."""

    report: Report
    explanation: Explanation | None
    model: onnx.ModelProto


def looked_at(
    model: Source,
    *,
    rules: Sequence[str | Path] = (),
    disable: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    why: bool = True,
    **wanted: Any,
) -> Seen:
    """``report``, and ``explain`` of the whole model where ``why`` is asked for, from one plan.

    Raises:
        ModelError, RuleError, TargetError: as ``optimize``.
    """
    options: dict[str, Any] = {"rules": rules, "disable": disable, "dims": dims, "target": target, "tell": tell}
    with told(file_of(model)):
        loaded = load(model)
        profile = None if target is None else profile_of(target, rules)
        held = report_of_fused(loaded, dims or {}, profile) if is_fused(loaded.proto) else None
    if held is not None:
        return Seen(held, explain(model, **options, **wanted) if why else None, loaded.proto)
    result = optimize(loaded, verify=False, compile=True, measure_seconds=0, **options, **wanted)
    with told(file_of(model)):
        return Seen(result.report, reporting.explain(result.optimised) if why else None, result.model)


def explain(
    model: Source,
    node: str | None = None,
    *,
    rules: Sequence[str | Path] = (),
    disable: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Any,
) -> Explanation:
    """Why ``optimize`` would fuse a model as it would; of a fused model, the original in it is planned anew.

    Args:
        node: name of a node, of a value or of a fused node to explain; where None, the traffic that remains.
        wanted: further arguments of ``optimize``.

    Raises:
        ModelError: as ``optimize``; or nothing is called ``node``.
        RuleError, TargetError: as ``optimize``.
    """
    with told(file_of(model)):
        loaded = load(model)
        fused = loaded if is_fused(loaded.proto) else None
        if fused is not None:
            loaded = rewriting.original(loaded)
    result = optimize(
        loaded, rules=rules, disable=disable, dims=dims, target=target, verify=False, compile=True, measure_seconds=0,
        tell=tell, **wanted
    )
    tell("explaining", 0, 0)
    with told(file_of(model)):
        return reporting.explain(result.optimised, node, fused)


def verify(
    original: Source,
    fused: Source | None = None,
    *,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | Path | None = None,
    dims: Mapping[str, int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    require_kernels: bool = False,
    seconds: float = Options.verify_seconds,
    tell: Tell = silent,
) -> VerifyResult:
    """Compare a fused model with its original: every output on the same inputs, and the kernel of every fused node with
    the nodes that it replaced, in float32 or better.  Kernels run where there is a GPU that ONNX Runtime can use.

    Args:
        original: a file, or what ``onnx.load`` returns; a fused model where ``fused`` is None.
        fused: the same of the fused model.  Where None, ``model.fused.onnx`` beside ``model.onnx``; where ``original``
            is fused itself, it is compared with the original that its own records put back.
        inputs: arrays by input name, several such mappings, or a file or folder of them as the command takes it; made
            ones where None.
        dims: sizes of symbolic dimensions to run at.
        rtol, atol: an element may be off by ``atol + rtol * |original|``.  Where both are None, nothing may be off
            without kernels, and with them 0.001 of an output's largest magnitude in float32, 0.01 in float16 and 0.05
            in bfloat16 models.
        require_kernels: whether the result is "not settled" where a kernel was not run.
        seconds: that this may take, 0 for as many as it needs; the result says what was left out.
        tell: told the stage, how much of it is done, and how much there is.

    Returns:
        What was compared and how it came out: ``result.status`` is "same", "different" or "not settled".

    Raises:
        ModelError: a model cannot be read or understood, the two do not belong together, ``inputs`` do not fit, or
            ONNX Runtime refuses the original.
        ValueError: ``rtol`` or ``atol`` is no number of zero or more; there is no fused model.
    """
    closeness = None if rtol is None and atol is None else Closeness(_limit("rtol", rtol), _limit("atol", atol))
    if fused is None and isinstance(original, onnx.ModelProto) and not is_fused(original):
        raise ValueError("a model that was not read from a file needs its fused form beside it: fused=...")
    with told(file_of(original), None if fused is None else file_of(fused)):
        first, second = _pair(original, fused)
        pair = Pair.of(first, second, dims or {})
        return compare(
            pair, verifying.find_runner(), _input_sets(inputs, pair), closeness=closeness,
            needs_kernels=require_kernels, bounds=Bounds.of(seconds), progress=tell,
            names=(_called(first, second, "original"), _called(second, first, "fused")),
        )


def _limit(name: str, value: float | None) -> float:
    if value is not None and not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value!r}; it must be a number of zero or more")
    return value or 0.0


def _pair(original: Source, fused: Source | None) -> tuple[LoadedModel, LoadedModel]:
    """The two models to compare."""
    first = load(original)
    if fused is not None:
        if is_fused(first.proto):
            raise ModelError("The original is a fused model itself.", place=str(first.path or "") or None,
                             remedy="Give the original first; or the fused model alone, to compare it with the "
                                    "original that it holds.")
        return first, load(fused)
    if is_fused(first.proto):
        return rewriting.original(first), first
    assert first.path is not None, "a model without a file was turned away"
    path = default_output(first.path)
    if not path.exists():
        raise ModelError("There is no fused model beside this one.", place=str(path),
                         remedy=f"Make it, onnxfuse optimize {first.path.name}, or name the file.")
    return first, load(path)


def _called(loaded: LoadedModel, other: LoadedModel, role: str) -> str:
    """What messages call a model."""
    if loaded.path is None:
        return f"the {role} model"
    inner = role == "original" and loaded.path == other.path
    return f"the original in {loaded.path}" if inner else str(loaded.path)


def _input_sets(inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | str | Path | None, pair: Pair) -> Inputs:
    if isinstance(inputs, str | Path):
        return read_input_sets(inputs, [value.name for value in pair.graph.inputs])
    if inputs is None or isinstance(inputs, Mapping):
        return inputs
    return [InputSet(arrays, f"your inputs {place}") for place, arrays in enumerate(inputs, 1)]


def check(
    model: Source,
    lock: str | Path | Lock,
    *,
    rules: Sequence[str | Path] = (),
    disable: Sequence[str] = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Any,
) -> CheckResult:
    """Plan a model anew and compare what is fused with a lock: what the lock has and the model does not, by onnxfuse or
    by ONNX Runtime itself, and why; what is new; inputs and outputs that changed.

    Args:
        model: a file, or what ``onnx.load`` returns; of a fused model the original in it is planned.
        lock: what ``Result.save_lock`` or ``onnxfuse optimize --lock`` wrote, or ``Result.lock`` gave.
        disable: ids of rules to leave out beside those that the lock leaves out.
        dims: sizes that stand in place of the lock's; target: a GPU in place of the lock's.
        tell: told the stage, how much of it is done, and how much there is.
        wanted: further arguments of ``optimize``, in place of what the lock says.

    Returns:
        What was found: ``result.holds``, ``result.lost`` with a reason each, ``result.new``.

    Raises:
        LockError: the lock cannot be read, is one of a newer release, or of another model.
        ModelError, RuleError, TargetError: as ``optimize``.
    """
    file = None if isinstance(lock, Lock) else Path(lock)
    with told(file_of(model), file):
        found = lock if isinstance(lock, Lock) else locking.read_lock(Path(lock))
        settings = locking.settings_of(found, file)
        loaded = load(model)
        held = rewriting.read_fused(loaded.proto)
        if held:
            loaded = rewriting.original(loaded)
        sizes = locking.sizes_of(found, loaded)
    settings |= {"disable": (*settings["disable"], *disable), "dims": {**sizes, **(dims or {})}, **wanted}
    if target is not None:
        settings["target"] = target
    result = optimize(loaded, rules=rules, verify=False, measure_seconds=0, tell=tell, **settings)
    tell("comparing", 0, 0)
    with told(file_of(model), file):
        return locking.check(found, result.optimised, result.report, "the lock" if file is None else str(file),
                             [node.rule for node in held])


def bench(
    original: str | Path,
    fused: str | Path | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    inputs: Mapping[str, Any] | str | Path | None = None,
    threads: int = 1,
    runs: int | None = None,
    cuda_graph: bool = False,
    provider_options: Mapping[str, str] | None = None,
    tell: Tell = silent,
) -> BenchResult:
    """Measure a model, or two of them by turns in this process: percentiles of latency, throughput, GPU time, kernels,
    memory, and bytes and arithmetic a second beside what the GPU reaches.  Without a GPU they run on the CPU, which
    ``result.notes`` say.

    Args:
        original: a file; fused: another one with the same inputs and outputs.
        dims: sizes of symbolic dimensions to run at.
        inputs: arrays by input name, or an .npz file of them; those missing are made up.
        threads: that run each model at once, on one session, for its throughput.
        runs: timed runs of each model, and of each thread; as many as take a second where None.
        cuda_graph: replay a CUDA graph, of each model that has no nodes on the CPU.
        provider_options: of the CUDA provider, for both models; "device_id" chooses the GPU.
        tell: told the stage, how much of it is done, and how much there is.

    Returns:
        What was measured: ``result.original`` and ``result.fused``, and the ratios of their times with 95% intervals.

    Raises:
        ModelError: a model cannot be read or run, it cannot run at these sizes, or the inputs do not fit.
        RuntimeLibraryError, KernelError: the kernels of fused nodes, or the provider, cannot be had.
        ValueError: ``threads`` or ``runs`` is below one.
    """
    for name, number in (("threads", threads), ("runs", runs)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number!r}; it must be one or more")
    with told(original, fused):
        arrays = measuring.read_inputs(inputs) if isinstance(inputs, str | Path) else inputs
        result = measuring.bench(
            original, fused, dims, inputs=arrays, cuda_graph=cuda_graph, runs=runs, threads=threads,
            provider_options=provider_options, progress=lambda stage: tell(stage, 0, 0),
        )
        tell("counting bytes", 0, 0)
        return reporting.with_rates(result)


def unfuse(model: Source | LoadedModel, only: Collection[str] | None = None) -> onnx.ModelProto:
    """The original of a fused model: the functions' bodies in place of the fused nodes, under the original names.

    Args:
        only: names of the fused nodes to put back, all of them where None.

    Raises:
        ModelError: the model cannot be read, its records are damaged, or a name in ``only`` is no fused node's.
    """
    with told(file_of(model)):
        return rewriting.original(load(model), only).proto


def file_of(model: Source | LoadedModel) -> str | Path | None:
    """The file that a model is in, where it is in one."""
    if isinstance(model, LoadedModel):
        return model.path
    return None if isinstance(model, onnx.ModelProto) else model


def default_output(path: Path) -> Path:
    """Where the fused model goes by default: ``model.fused.onnx`` beside ``model.onnx``."""
    stem = path.name.removesuffix(".onnx")
    return path.with_name(f"{stem}.fused.onnx")


__all__ = ["BenchResult", "CheckResult", "Explanation", "Lock", "Report", "Result", "VerifyResult", "as_json", "bench",
           "check", "default_output", "explain", "optimize", "report", "unfuse", "verify"]
