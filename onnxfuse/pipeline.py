"""The way of the data, a stage a line: load, match, plan, rewrite, verify.  Saving and reporting are the caller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import onnx

from onnxfuse.collecting import seldom
from onnxfuse.compiling import COMPILING, ReadBack, read_back
from onnxfuse.cuda_options import BIAS, LAYOUT, TF32, is_on
from onnxfuse.delivery import check_original, runner_for, verified
from onnxfuse.embedding import embed
from onnxfuse.errors import OnnxfuseError
from onnxfuse.folding import STAGE as SHAPE_ARITHMETIC
from onnxfuse.forms import Drafting, Expected, Form, Forming
from onnxfuse.graph import LoadedModel, from_proto, load_model
from onnxfuse.measurements import Place, opened
from onnxfuse.optimised import Optimised, Tell, silent
from onnxfuse.planning.costs.hardware import Profile, find_profile, known_profiles, resolve_profile
from onnxfuse.planning.evidence import Evidence
from onnxfuse.planning.known import KnownKernels
from onnxfuse.planning.objective import LEAST_GAIN, Hints, Objective
from onnxfuse.planning.plan import Plan
from onnxfuse.presence import present_profile
from onnxfuse.provider.lacking import left_to_the_cpu
from onnxfuse.provider.layouts import is_converted
from onnxfuse.refusal import Refusal
from onnxfuse.region import Region
from onnxfuse.resources import rules_folder
from onnxfuse.rewriting import fold, is_optimised, rewrite, separate
from onnxfuse.rules import RuleSet, load_rules
from onnxfuse.runtime.processes import compiler_pool
from onnxfuse.schedules import named
from onnxfuse.verifying import CudaRunner
from onnxfuse.verifying.bounds import SECONDS, Bounds
from onnxfuse.verifying.first_run import FirstRun, Written, writing
from onnxfuse.verifying.foreseen import Foreseeing, foreseeing

_AS_IT_WAS = Refusal(
    "already-optimised", "the model is as an optimisation left it", "",
    remedy="to plan it anew, as for another GPU or other sizes, put it back first: onnxfuse unfuse MODEL",
)
UNCHANGED: tuple[Plan, tuple[str, ...]] = (
    Plan((), (_AS_IT_WAS,), 0), (f"The model is as an optimisation left it; {_AS_IT_WAS.remedy}.",))
"""The plan of a model that nobody touched since, and what its user should know."""

_LIES_EITHER_WAY = (
    "Fused nodes hold the convolutions, and images lie channels-last between them: that is predicted to take less than "
    f"what the runtime makes of {LAYOUT}=1, with which the model runs all the same.")

DEFAULT_TARGET = "H100"
"""The GPU that is planned for where none is named and none is present."""


@dataclass(frozen=True)
class Options:
    """How to optimise.

    Attributes:
        rules: further rule files or folders; disable: ids of rules to leave out.
        dims: sizes of symbolic dimensions to plan for.
        target: the GPU to plan for, by name or as a file of one profile; the one present where None, else
            ``DEFAULT_TARGET``.
        architectures: kernels to embed, as "sm_90".
        least_gain: predicted speed-up that a region must pass to be fused.
        strategy: what the plan is to be good at, one of ``objective.STRATEGIES``; hints: of the machine's state.
        provider_options: of the CUDA provider, as the model will run with.
        verify: whether to run every fused node against what it replaced; verify_seconds: that this may take, 0 for as
            many as it needs.
        compile: whether to compile every kernel for the target and to look at what came of it (``planning.spills``);
            as ``verify`` where None.
        inputs: the user's own arrays by input name, to verify with.
        database: of measurements to plan by: a file, the default one where it is there (None), or none (False).
        run_profile: ONNX Runtime's profile of a run of the model on CUDA, to weigh regions by.
        fold_weights: whether constants beside products, and products before them, may be folded into weights where
            that rounds these anew.
        eager: compute values again also where that is predicted to cost a little more, to measure it.
        kernels: what is known of regions by their structure; plans with the same options, and with others that
            ``dataclasses.replace`` makes of them, know what was found for those before.
    """

    rules: Sequence[str | Path] = ()
    disable: Sequence[str] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    target: str | Profile | None = None
    architectures: Sequence[str] = ()
    least_gain: float = LEAST_GAIN
    strategy: str = "auto"
    hints: Hints = field(default_factory=Hints)
    provider_options: Mapping[str, str] = field(default_factory=dict)
    verify: bool = True
    verify_seconds: float = SECONDS
    compile: bool | None = None
    inputs: Mapping[str, Any] | None = None
    database: Place = None
    run_profile: str | Path | None = None
    fold_weights: bool = False
    eager: bool = False
    kernels: KnownKernels = field(default_factory=KnownKernels, repr=False, compare=False)

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled for the target."""
        return self.verify if self.compile is None else self.compile

    @property
    def objective(self) -> Objective:
        """What to plan for.

        Raises:
            ValueError: there is no such strategy.
        """
        given = self.provider_options
        return Objective(
            self.strategy, self.hints, self.least_gain, is_on(given, LAYOUT), is_on(given, TF32))

    @property
    def keeps_biases(self) -> bool:
        """Whether convolutions keep their biases: the provider adds them for nothing, or what stands behind a
        convolution is left alone anyway."""
        return is_on(self.provider_options, BIAS) or is_on(self.provider_options, LAYOUT)


def optimise(
    source: str | Path | onnx.ModelProto | LoadedModel, options: Options | None = None, tell: Tell = silent
) -> Optimised:
    """Fuse a model.

    Raises:
        ModelError: the model cannot be read or understood.
        RuleError: a rule file is wrong.
        TargetError: the target GPU is not known.
        KernelError: a kernel that is to be embedded does not compile.
        MeasurementError: the database of measurements, or the profile of a run, cannot be used.
        VerificationError: the fused model as a whole is wrong.
    """
    options = options or Options()
    tell("reading", 0, 0)
    with seldom(), compiler_pool(), ThreadPoolExecutor(2, "onnxfuse-start") as starting:
        if options.verify or options.target is None:
            starting.submit(present_profile)  # a driver takes a third of a second to start, CuPy as long to import
        rules = starting.submit(load_rules, [rules_folder(), *options.rules], options.disable)
        done = _optimised(load(source, lean=True), rules, options, tell, starting)
        if done.loaded.path is None:
            _ = done.model  # what is in memory is its owner's, who may change it
        return done


def _optimised(loaded: LoadedModel, rules: Future[RuleSet], options: Options, tell: Tell, starting: Executor
               ) -> Optimised:
    """``optimise`` of a model that was read."""
    writes = options.verify and not options.inputs  # the first run is of inputs that are made up
    try:
        with writing(loaded) if writes else nullcontext() as file:
            return _Optimisation.of(loaded, rules.result(), options, tell, starting).result(file)
    except OnnxfuseError:
        raise
    except Exception:
        # A model that breaks the standard's rules may break anything here; whose fault it is, ONNX Runtime knows.
        check_original(loaded)
        raise


@dataclass(frozen=True)
class _Optimisation:
    """One that is under way: the model, its form as it stands, what makes others, what a plan is to be good at, what
    compiles kernels and what runs them, if any are, and whether nobody named the GPU to plan for, and there is none."""

    loaded: LoadedModel
    form: Form
    forming: Forming
    objective: Objective
    options: Options
    tell: Tell
    compiler: Future[tuple[ReadBack | None, tuple[str, ...]]] | None
    runner: Future[CudaRunner | None] | None
    assumed: bool

    @staticmethod
    def of(loaded: LoadedModel, rules: RuleSet, options: Options, tell: Tell, starting: Executor) -> _Optimisation:
        """Begin it; ``starting``: where compilers and drivers may start meanwhile."""
        tell("planning", 0, 0)
        folded = loaded
        if not is_optimised(loaded.proto):
            folded = loaded.lean() if SHAPE_ARITHMETIC in rules.disabled else fold(loaded.lean())
        profile, assumed = chosen_target(options.target, options.rules)
        compiler = starting.submit(read_back, profile, partial(tell, COMPILING)) if options.compiles else None
        runner = starting.submit(runner_for, options.provider_options) if options.verify else None
        forming = Forming(rules, profile, options.dims, options.run_profile, not options.keeps_biases)
        return _Optimisation(
            loaded, forming.planned(folded), forming, options.objective, options, tell, compiler, runner, assumed)

    def result(self, file: Written | None) -> Optimised:
        """The fused model, verified where that is asked for; ``file``: for its first run."""
        options = self.options
        with ExitStack() as stack:
            first = None if file is None else self._first_run(file)
            way: _Optimisation = self
            if is_optimised(self.loaded.proto):
                (plan, more), form, foreseen = UNCHANGED, self.form, None
            else:
                way, form, plan, more, foreseen = self._chosen(first, stack)
            regions = embed(list(map(written, plan.fusions)), options.architectures, self.tell)
            self.tell("rewriting", 0, 0)
            optimised = replace(way._rewritten(form, plan, regions, more), first_run=first, foreseen=foreseen)
            if options.verify:
                bounds = Bounds.of(options.verify_seconds)
                optimised = verified(optimised, options.inputs, self.tell, bounds, self.runner)
            return replace(optimised, first_run=None, foreseen=None)

    def _first_run(self, file: Written) -> FirstRun | None:
        """The runs of the original that verification begins with, made while it is planned; with biases of products as
        they will be if all find a place."""
        options = self.options
        biases, _ = self.forming.separable(self.form, self.objective.least_gain)
        apart = {name: bias for name, bias in biases.items() if not bias.stored}
        return file.run(lambda slim: separate(slim, apart), self.form.costs.ledger,
                        Bounds.of(options.verify_seconds), self.runner)

    def _chosen(self, first: FirstRun | None, stack: ExitStack
                ) -> tuple[_Optimisation, Form, Plan, tuple[str, ...], Foreseeing | None]:
        """Which of the ways to plan it is taken, the form of the model that is rewritten, its plan, what a user should
        know of it, and what was begun with the model that was expected while the compiler decided."""
        options, foreseen = self.options, None
        read, silence = (None, ()) if self.compiler is None else self.compiler.result()
        with opened(options.database, self.forming.profile) as (found, notes):
            way, drafting, expected = self._quickest(found, read)
            form, plan = expected.best.form, expected.best.uncompiled
            if read is not None and not any(region.folded for region in plan.fusions):
                foreseen = stack.enter_context(foreseeing(
                    lambda: way._rewritten(form, plan, list(map(written, plan.fusions))), first, self.runner,
                    Bounds.of(options.verify_seconds)))
            chosen, whole = drafting.chosen(way.form, read, expected)
        more = () if way is self else (_LIES_EITHER_WAY,)
        return way, chosen, whole, (*notes, *silence, *more), foreseen

    def _quickest(self, found: Evidence | None, read: ReadBack | None) -> tuple[_Optimisation, Drafting, Expected]:
        """It, or where the runtime is to lay images out the same as if it was not, by what is predicted: fused nodes
        that hold all convolutions want nothing of the runtime's."""
        lays = self.objective.channels_last and any(
            is_converted(node) for part in self.form.graph.walk() for node in part.nodes)
        ways = []
        for way in (self, self._with_layouts()) if lays else (self,):
            drafting = Drafting(way.forming, way.objective, found, self.options.eager, self.options.kernels,
                                self.options.fold_weights)
            ways.append((way, drafting, drafting.expected(way.form, None if lays else read)))
        return min(ways, key=lambda each: each[2].seconds(converts=each[0] is not self)) if lays else ways[0]

    def _with_layouts(self) -> _Optimisation:
        """The same as without ``prefer_nhwc=1``: layouts are the plan's, and what is learned of costs is of that."""
        forming = replace(self.forming, convolutions=not is_on(self.options.provider_options, BIAS))
        form = replace(forming.form(self.form.loaded), notes=self.form.notes)
        return replace(self, form=form, forming=forming, objective=replace(self.objective, channels_last=False))

    def _rewritten(self, form: Form, plan: Plan, regions: Sequence[Region], more: Sequence[str] = ()) -> Optimised:
        """The model by a plan; ``regions``: of it, as they go there."""
        options, costs = self.options, form.costs
        taken = {node for region in regions for node in region.nodes}
        left = [node for part in form.graph.walk() for node in part.nodes
                if node not in taken and costs.ledger.node(node).kernels]
        notes = (*self.loaded.notes, *form.notes, *more, *left_to_the_cpu(left))
        return Optimised(
            self.loaded, form.loaded, form.graph, form.canonical, self.forming.rules, self.forming.profile,
            costs.ledger, costs, plan, tuple(regions), rewrite(form.loaded.proto, form.graph, regions),
            notes=notes, objective=self.objective, assumed=form.sizes.assumed,
            assumed_target=self.assumed, keeps_biases=not self.forming.convolutions,
            provider_options=options.provider_options, fold_weights=options.fold_weights)


def load(source: str | Path | onnx.ModelProto | LoadedModel, lean: bool = False) -> LoadedModel:
    """A model from wherever it is; ``lean``: large weights may stay in its file."""
    if isinstance(source, LoadedModel):
        return source
    return from_proto(source) if isinstance(source, onnx.ModelProto) else load_model(source, lean)


def profile_of(target: str | Profile | None, rules: Sequence[str | Path] = ()) -> Profile:
    """The GPU to plan for: the one named or described by a file, the one present, or ``DEFAULT_TARGET``.

    ``rules`` are folders whose folders ``hardware`` may hold further profiles.

    Raises:
        TargetError: there is no profile of that name.
        RuleError: a file of profiles is wrong.
    """
    return chosen_target(target, rules)[0]


def chosen_target(target: str | Profile | None, rules: Sequence[str | Path] = ()) -> tuple[Profile, bool]:
    """``profile_of``, and whether nobody named the GPU and there is none: then it is an assumption."""
    if isinstance(target, Profile):
        return target, False
    if target is not None:
        return resolve_profile(target, rules), False
    known = known_profiles(rules)
    present = present_profile(profiles=known)
    return present or find_profile(DEFAULT_TARGET, known), present is None


def written(fusion: Region) -> Region:
    """A chosen region as it goes into the model: its kernels by the names that a profile shows."""
    return replace(fusion, made=named(fusion.kernel))
