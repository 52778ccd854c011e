"""Kernels that rules bring, compiled and run on what their examples give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx
from numpy.typing import NDArray

from onnxfuse.checking.emulated import EmulatedRunner
from onnxfuse.compiling import compile_all, source_of
from onnxfuse.emulator import Emulator, EmulatorError
from onnxfuse.emulator.toolchain import compiler_version
from onnxfuse.errors import KernelError, VerificationError
from onnxfuse.graph import Graph, LoadedModel
from onnxfuse.graph.sizes import Sizes
from onnxfuse.rewriting import FusedNode, read_fused
from onnxfuse.runtime.allowed import check_source
from onnxfuse.runtime.compile import architectures, compiles_for, default_compiler
from onnxfuse.runtime.nvrtc import binding
from onnxfuse.verifying import RunInputs, find_runner
from onnxfuse.verifying.capture import Source, capture
from onnxfuse.verifying.evaluate import CPU
from onnxfuse.verifying.nodes import NodeVerifier
from onnxfuse.verifying.runner import CudaRunner, KernelRunner
from onnxfuse.verifying.runs import Run
from onnxfuse.verifying.sharing import sharing

NO_GPU = "its kernel was not run on a GPU: there is none that ONNX Runtime can use"


@dataclass(frozen=True)
class Tried:
    """An example's model, its graph, the sizes of its symbols, and inputs."""

    model: onnx.ModelProto
    graph: Graph
    sizes: Sizes
    inputs: Mapping[str, NDArray[Any]]


@dataclass
class KernelChecks:
    """Kernels are compiled for every architecture, and run in the emulator and on the GPU, each where it is there,
    beside the nodes that they replace: on the example's inputs and on edges of these, in every variant that holds.

    Attributes:
        unrun: why something was not done, of the examples so far; by their rule.
        passed, failed: rules of which kernels ran and were right, and of which one does not compile or was wrong.
    """

    unrun: dict[str, dict[str, None]] = field(default_factory=dict)
    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def fault(self, rule: str, example: Tried, fused: onnx.ModelProto) -> str | None:
        """What is wrong with the kernels of an example's fused model, all of one text: a sentence, or None.

        Args:
            rule: its id.
        """
        nodes = read_fused(fused)
        wrong, compiled = self._compile(rule, nodes[0])
        for runner in self._runners(rule, nodes[0], compiled) if wrong is None else ():
            wrong = wrong or self._run(rule, example, (fused, nodes), runner)
        if wrong is not None:
            self.failed.add(rule)
        return wrong

    def _leave(self, rule: str, why: str) -> None:
        self.unrun.setdefault(rule, {})[why] = None

    def _compile(self, rule: str, node: FusedNode) -> tuple[str | None, bool]:
        """What is wrong, and whether it compiled for a GPU."""
        try:
            check_source(node.source)
        except KernelError as error:
            return f"Its kernel is refused: {error.message}.", False
        try:
            binding()
        except KernelError as error:
            self._leave(rule, f"its kernel was not compiled: {error.message}")
            return None, False
        source = source_of(node.source, node.plan)
        names = [name for number in architectures() if compiles_for(name := f"sm_{number}")]
        made = {name: image for (_, name), image in compile_all(
            [(source, name) for name in names], default_compiler().image)}
        failed = {name: made[name] for name in names if isinstance(made[name], KernelError)}
        if not failed:
            return None, True
        if len(failed) == len(names):
            return f"Its kernel does not compile for {names[-1]}: {_first(str(failed[names[-1]]))}.", False
        self._leave(rule, f"its kernel does not compile for {', '.join(failed)}")
        return None, True

    def _runners(self, rule: str, node: FusedNode, compiled: bool) -> Sequence[KernelRunner]:
        """What can run a kernel here."""
        found: list[KernelRunner] = []
        try:
            compiler_version()
            Emulator(node.source)
            found.append(EmulatedRunner())
        except EmulatorError as error:
            self._leave(rule, f"its kernel was not run in the emulator: {_first(str(error))}")
        if not compiled:
            return found
        if self._gpu is None:
            self._leave(rule, NO_GPU)
            return found
        return [*found, self._gpu]

    @cached_property
    def _gpu(self) -> CudaRunner | None:
        return find_runner()

    def _run(self, rule: str, example: Tried, fused: tuple[onnx.ModelProto, Sequence[FusedNode]],
             runner: KernelRunner) -> str | None:
        model, nodes = fused
        verifier = NodeVerifier(model, runner)
        loaded = LoadedModel(None, example.model, None)
        try:
            with sharing(loaded, model) as (original, _):
                source = Source(loaded, example.graph, Run(RunInputs("the example's inputs"), dict(example.inputs)))
                results = [verifier.verify(taken.node, taken.feeds, "the example's inputs")
                           for taken in capture(nodes, source, original, example.sizes, CPU)]
        except VerificationError as error:
            self._leave(rule, f"its kernel was not run: {_first(error.message)}")
            return None
        for result in results:
            if result.verdict == "failed":
                return f"Its kernel is wrong, on {runner.name}: {result.message}"
            if result.verdict == "not run":
                self._leave(rule, f"its kernel was not run: {_first(result.message)}")
            else:
                self.passed.add(rule)
        return None


def _first(text: str) -> str:
    """The first line of a message, or what a compiler says first is wrong."""
    lines = text.splitlines()
    return next((line for line in lines if "error:" in line), lines[0] if lines else "").rstrip(".")
