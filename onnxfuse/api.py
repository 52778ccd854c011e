"""What Python code calls: the commands as functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import onnx

from onnxfuse import locking, measuring, reporting, rewriting, verifying
from onnxfuse.comparing import VerifyResult, compare
from onnxfuse.cuda_options import switches
from onnxfuse.errors import ModelError
from onnxfuse.given import Names, Paths, Wanted, names, paths, sizes
from onnxfuse.given import hints as read_hints
from onnxfuse.graph import LoadedModel
from onnxfuse.locking import CheckResult, Lock
from onnxfuse.measurements import Place
from onnxfuse.measuring import BenchResult
from onnxfuse.measuring.sets import InputSet, read_input_sets
from onnxfuse.optimised import Tell, silent
from onnxfuse.pipeline import Options, load, optimise, profile_of
from onnxfuse.planning.costs.hardware import Profile
from onnxfuse.planning.objective import LEAST_GAIN, Hints, Strategy
from onnxfuse.reporting import Explanation, Report, as_json, is_fused, note_report, report_of, report_of_fused
from onnxfuse.result import Result, default_output
from onnxfuse.unforeseen import told
from onnxfuse.verifying.bounds import Bounds
from onnxfuse.verifying.closeness import Closeness
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.runs import Inputs

Source = str | Path | onnx.ModelProto


def optimize(
    model: Source | LoadedModel,
    *,
    rules: Paths = (),
    disable: Names = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    embed: Names = (),
    verify: bool = True,
    verify_seconds: float = Options.verify_seconds,
    compile: bool | None = None,
    inputs: Mapping[str, Any] | None = None,
    strategy: Strategy = "auto",
    hints: Hints | Mapping[str, float] | None = None,
    least_gain: float | None = None,
    provider_options: Mapping[str, str] | None = None,
    database: Place = None,
    run_profile: str | Path | None = None,
    fold_weights: bool = False,
    measure_seconds: float = 60.0,
    tell: Tell = silent,
) -> Result:
    """Fuse a model.

    Args:
        model: a file, or what ``onnx.load`` returns; it is not changed.
        rules: a rule file, or a folder of them, or several, to use beside the shipped ones.
        disable: ids of rules to leave out, one or several; or of a stage, such as "attention".
        dims: sizes of symbolic dimensions to plan for; the fused model takes all sizes that the model takes.
        target: name of the GPU to plan for, or a profile; the GPU present by default, else the H100.
        embed: an architecture, such as "sm_90", or several, whose compiled kernels go into the model, with PTX of the
            newest for later GPUs; "compute_80" names the PTX.
        verify: run every fused node against what it replaced, and take back those that fail.
        verify_seconds: that verification may take, 0 for as many as it needs; what it has no time for is left out, and
            the report says so.
        compile: compile every kernel for the target and see which spill registers; as ``verify`` where None.
        inputs: arrays by input name to verify with, beside made ones.
        strategy: what the plan is to be good at: "auto", "all-in-one", "memory" or "dynamic".
        hints: of the state of the machine that the model will run on: ``Hints``, or ``{"memory-pressure": 0.9}``.
        least_gain: predicted speed-up that a region must pass to be fused, 1.2 where None.
        provider_options: of the CUDA provider that the model will run with.
        database: of measurements (`onnxfuse tune`) to plan by: a file, the default one where it is there (None), or
            none (False).
        run_profile: file of ONNX Runtime's profile of a run of the model on CUDA, to weigh regions by.
        fold_weights: whether constants beside products and convolutions may be folded into the weights that kernels
            read, and products with nothing between into one, where that rounds weights anew.
        measure_seconds: where the GPU to plan for is here, regions with products that were not measured yet are, into
            the database; after so long none begins, and with 0 none at all.
        tell: told the stage, how much of it is done, and how much there is.

    Returns:
        The fused model, ``result.model``, which ``result.save`` writes, and ``result.report``: what was fused, what was
        not and why, and what it costs.  Where nothing can be fused the model is as it was.  Large weights of a file of
        16 MB and more are read when either is asked for: until then the file is to stay as it is.

    Raises:
        ModelError: the model cannot be read or understood, or ONNX Runtime itself refuses it.
        MeasurementError: the database or the profile cannot be used.
        RuleError: a rule file is wrong.
        TargetError: the target GPU is not known.
        ValueError: there is no such strategy or hint.
        TypeError: an argument has another type than it takes.
        KernelError: with ``embed``: a kernel cannot be compiled.
        VerificationError: the fused model as a whole is wrong; this is a fault of onnxfuse.
        InternalError: another fault of onnxfuse, as from any function here; ``__cause__`` is what happened.
    """
    options = Options(
        paths("rules", rules), names("disable", disable), sizes(dims), target, architectures=names("embed", embed),
        verify=verify, verify_seconds=verify_seconds,
        compile=compile, inputs=inputs, strategy=strategy, hints=read_hints(hints),
        least_gain=LEAST_GAIN if least_gain is None else least_gain, provider_options=provider_options or {},
        database=database, run_profile=run_profile, fold_weights=fold_weights,
    )
    _ = options.objective  # wrong arguments are the caller's
    with told(file_of(model)):
        loaded = load(model, lean=True)
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
    rules: Paths = (),
    disable: Names = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Unpack[Wanted],
) -> Report:
    """What ``optimize`` would do to a model; of a fused model, what it holds, read from the model itself, counted
    anew where ``dims`` or ``target`` ask for others than it was planned for.

    Args:
        model: a file, or what ``onnx.load`` returns.
        rules, disable, dims, target, tell, wanted: as ``optimize`` takes them.

    Returns:
        The report, which ``to_text``, ``to_json`` and ``to_html`` show; no model is written.

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
    rules: Paths = (),
    disable: Names = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    why: bool = True,
    **wanted: Unpack[Wanted],
) -> Seen:
    """``report``, and ``explain`` of the whole model where ``why`` is asked for, from one plan.

    Raises:
        ModelError, RuleError, TargetError: as ``optimize``.
    """
    rules, dims = paths("rules", rules), sizes(dims)
    options: dict[str, Any] = {"rules": rules, "disable": disable, "dims": dims, "target": target, "tell": tell}
    with told(file_of(model)):
        loaded = load(model)
        profile = None if target is None else profile_of(target, rules)
        held = report_of_fused(loaded, dims, profile) if is_fused(loaded.proto) else None
    if held is not None:
        return Seen(held, explain(model, **options, **wanted) if why else None, loaded.proto)
    result = optimize(loaded, verify=False, compile=True, measure_seconds=0, **options, **wanted)
    with told(file_of(model)):
        return Seen(result.report, reporting.explain(result.optimised) if why else None, result.model)


def explain(
    model: Source,
    node: str | None = None,
    *,
    rules: Paths = (),
    disable: Names = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Unpack[Wanted],
) -> Explanation:
    """Why ``optimize`` would fuse a model as it would; of a fused model, the original in it is planned anew.

    Args:
        model: a file, or what ``onnx.load`` returns.
        node: name of a node, of a value or of a fused node to explain; where None, the traffic that remains.
        rules, disable, dims, target, tell, wanted: as ``optimize`` takes them.

    Returns:
        The explanation, which ``to_text`` and ``to_json`` show: of the whole model, or of the node asked for.

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
    verify_seconds: float = Options.verify_seconds,
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
        require_kernels: whether the result is "inconclusive" where a kernel was not run.
        verify_seconds: that this may take, 0 for as many as it needs; the result says what was left out.
        tell: told the stage, how much of it is done, and how much there is.

    Returns:
        What was compared and how it came out: ``result.status`` is "same", "different" or "inconclusive".

    Raises:
        ModelError: a model cannot be read or understood, the two do not belong together, ``inputs`` do not fit, or
            ONNX Runtime refuses the original.
        ValueError: ``rtol`` or ``atol`` is no number of zero or more; there is no fused model.
    """
    wanted = sizes(dims)
    closeness = None if rtol is None and atol is None else Closeness(_limit("rtol", rtol), _limit("atol", atol))
    if fused is None and isinstance(original, onnx.ModelProto) and not is_fused(original):
        raise ValueError("a model that was not read from a file needs its fused form beside it: fused=...")
    with told(file_of(original), None if fused is None else file_of(fused)):
        first, second = _pair(original, fused)
        pair = Pair.of(first, second, wanted)
        return compare(
            pair, verifying.find_runner(settings=_planned_for(second)), _input_sets(inputs, pair), closeness=closeness,
            needs_kernels=require_kernels, bounds=Bounds.of(verify_seconds), progress=tell,
            names=(_called(first, second, "original"), _called(second, first, "fused")),
        )


def _planned_for(fused: LoadedModel) -> dict[str, str]:
    """The options of the CUDA provider that a fused model was planned for, of those that plans hang on."""
    record = rewriting.plan_record(fused.proto)
    return {} if record is None else switches(record.provider_options)


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
    rules: Paths = (),
    disable: Names = (),
    dims: Mapping[str, int] | None = None,
    target: str | Profile | None = None,
    tell: Tell = silent,
    **wanted: Unpack[Wanted],
) -> CheckResult:
    """Plan a model anew and compare what is fused with a lock: what the lock has and the model does not, by onnxfuse or
    by ONNX Runtime itself, and why; what is new; inputs and outputs that changed.

    Args:
        model: a file, or what ``onnx.load`` returns; of a fused model the original in it is planned.
        lock: what ``Result.save_lock`` or ``onnxfuse optimize --lock`` wrote, or ``Result.lock`` gave.
        rules: rule files to use beside the shipped ones, as ``optimize`` takes them.
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
    disable, dims = names("disable", disable), sizes(dims)
    file = None if isinstance(lock, Lock) else Path(lock)
    with told(file_of(model), file):
        found = lock if isinstance(lock, Lock) else locking.read_lock(Path(lock))
        settings = locking.settings_of(found, file)
        loaded = load(model)
        held = rewriting.read_fused(loaded.proto)
        if held:
            loaded = rewriting.original(loaded)
        locked = locking.sizes_of(found, loaded)
    settings |= {"disable": (*settings["disable"], *disable), "dims": {**locked, **dims}, **wanted}
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
    wanted = sizes(dims)
    with told(original, fused):
        arrays = measuring.read_inputs(inputs) if isinstance(inputs, str | Path) else inputs
        result = measuring.bench(
            original, fused, wanted, inputs=arrays, cuda_graph=cuda_graph, runs=runs, threads=threads,
            provider_options=provider_options, progress=lambda stage: tell(stage, 0, 0),
        )
        tell("counting bytes", 0, 0)
        return reporting.with_rates(result)


def unfuse(model: Source | LoadedModel, only: Names | None = None) -> onnx.ModelProto:
    """The original of a fused model: the functions' bodies in place of the fused nodes, under the original names.

    Args:
        only: name of the fused node to put back, or several; all of them where None.

    Returns:
        The model without those fused nodes; without any, the very bytes that ``optimize`` was given.

    Raises:
        ModelError: the model cannot be read, its records are damaged, or a name in ``only`` is no fused node's.
    """
    chosen = None if only is None else names("only", only)
    with told(file_of(model)):
        return rewriting.original(load(model), chosen).proto


def file_of(model: Source | LoadedModel) -> str | Path | None:
    """The file that a model is in, where it is in one."""
    if isinstance(model, LoadedModel):
        return model.path
    return None if isinstance(model, onnx.ModelProto) else model


__all__ = ["BenchResult", "CheckResult", "Explanation", "Lock", "Report", "Result", "VerifyResult", "as_json", "bench",
           "check", "default_output", "explain", "optimize", "report", "unfuse", "verify"]
