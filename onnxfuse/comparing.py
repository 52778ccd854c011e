"""Whether a fused file still gives the original's answers: the two as they lie, whoever made or changed them.

    original ┐                                      ┌─ same
             ├─ Pair.check ─ verifying.verify ─ ... ┼─ different: an output, a kernel, a function
    fused ───┘                                      └─ inconclusive: what was asked for could not be run
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onnxfuse.delivery import check_sessions
from onnxfuse.errors import VerificationError
from onnxfuse.provider.words import is_lacking
from onnxfuse.rewriting import has_planned_form, read_fused
from onnxfuse.runtime.words import runtime_words
from onnxfuse.verifying import KernelRunner, Verification, verify
from onnxfuse.verifying.bounds import NONE, Bounds
from onnxfuse.verifying.closeness import EXACT, Closeness, default_tolerance
from onnxfuse.verifying.kernels import Progress
from onnxfuse.verifying.locating import told
from onnxfuse.verifying.pair import Pair
from onnxfuse.verifying.results import NodeResult, OutputDifference
from onnxfuse.verifying.runs import Inputs, input_sets
from onnxfuse.verifying.verify import Allowed

Status = Literal["same", "different", "inconclusive"]

EXIT_CODES: dict[Status, int] = {"same": 0, "different": 1, "inconclusive": 3}
"""Of ``onnxfuse verify``; 2 is wrong usage."""

NO_KERNELS = "kernels not run: there is no GPU here that ONNX Runtime can use"


@dataclass(frozen=True)
class VerifyResult:
    """A fused model beside its original.

    Attributes:
        original, fused: what messages call them.
        verification: of outputs and of every fused node.
        allowed: how far outputs may be off.
        asked: labels of the user's inputs; needs_kernels: whether kernels that did not run leave the question open.
        fault: why ONNX Runtime refuses the fused model where it takes the original, or "".
    """

    original: str
    fused: str
    verification: Verification
    allowed: Allowed
    asked: tuple[str, ...] = ()
    needs_kernels: bool = False
    fault: str = ""

    def __repr__(self) -> str:
        """In one line: what was compared may be as large as the model."""
        return f"<VerifyResult {self.summary}>"

    @property
    def status(self) -> Status:
        """Whether the fused model gives the original's answers; "inconclusive" where nothing speaks against it and the
        original ran on no inputs, or not on all of the user's, or kernels that had to run did not."""
        if self.fault or not self.verification.passed or self.device_differences:
            return "different"
        return "inconclusive" if self.open_questions else "same"

    @property
    def same(self) -> bool:
        """Whether it does, in all that was asked for."""
        return self.status == "same"

    @property
    def exit_code(self) -> int:
        """Of ``onnxfuse verify``."""
        return EXIT_CODES[self.status]

    @property
    def device_differences(self) -> tuple[OutputDifference, ...]:
        """Outputs that are further off than allowed with kernels running."""
        return tuple(entry for entry in self.verification.whole.device if entry.beyond)

    @property
    def open_questions(self) -> tuple[str, ...]:
        """What was asked for and could not be run, in words."""
        found = self.verification
        if found.whole.identical is None:
            return (f"the models were not run: {found.whole.message}",)
        ran = {run.label for run in found.runs}
        left = [f"{label}: left out" for label in self.asked if label not in ran]
        if self.needs_kernels and not self.kernels_compared:
            left.append(self.kernels)
        return tuple(left)

    @property
    def kernels_compared(self) -> bool:
        """Whether no kernel was left unrun."""
        return all(node.verdict != "not run" for node in self.verification.nodes)

    @property
    def kernels(self) -> str:
        """What became of the kernels, in words."""
        found = self.verification
        if not found.nodes:
            return "no fused nodes"
        if found.whole.identical is None:
            return "kernels not run"
        if found.runner is None:
            return NO_KERNELS
        ran = [node for node in found.nodes if node.verdict != "not run"]
        left = f", {len(found.nodes) - len(ran)} not run" if len(ran) < len(found.nodes) else ""
        if found.failed:
            return f"{len(found.failed)} of {len(ran)} kernels wrong on {found.runner}{left}"
        return f"{len(ran)} of {len(ran)} kernels right on {found.runner}{left}"

    @property
    def worst(self) -> NodeResult | None:
        """The fused node whose kernel is farthest from its body, as a share of what is allowed."""
        ran = [node for node in self.verification.nodes if node.verdict != "not run"]
        return max(ran, key=lambda node: (node.verdict == "failed", node.ratio), default=None)

    @property
    def summary(self) -> str:
        """One sentence that begins with the status."""
        whole = self.verification.whole
        if self.fault:
            return f"different: ONNX Runtime refuses the fused model where it takes the original: {self.fault}"
        if not whole.checked:
            return f"different: onnx.checker refuses the fused model: {whole.message}"
        if whole.identical is False and whole.message:
            return f"different: the fused model does not run where the original does: {whole.message}"
        if whole.identical is False:
            return f"different: {_listed(whole.differences)} without kernels; {self.kernels}"
        if self.verification.failed:
            return f"different: {self.kernels}; without kernels every output is the same"
        if self.device_differences:
            return f"different: {_listed(self.device_differences)} with kernels; {self.kernels}"
        if self.open_questions:
            return f"inconclusive: {'; '.join(self.open_questions)}"
        how = "bit for bit" if all(not entry.elements for entry in whole.outputs) else str(self.allowed.plain)
        return f"same: every output {how} without kernels; {self.kernels}"

    def said_of(self, entry: OutputDifference, apart: bool) -> str:
        """What is said of an output.

        Args:
            apart: whether it is further off than it may be.
        """
        if not entry.elements and not apart:
            return f"output {entry.output!r} is the same"
        more = f", {entry.elements} elements differ" if entry.elements > 1 else ""
        why = ", within what is allowed" if not entry.beyond else ", no further than the original from itself"
        return f"output {told(entry)}{more}{'' if apart else why}, on {entry.inputs}"

    def to_json(self) -> dict[str, Any]:
        """Everything as data; infinite and undefined figures are None."""
        found = self.verification.to_json()
        kernels = None if not self.verification.whole.device else asdict(self.allowed.kernels)
        return {
            "original": self.original, "fused": self.fused, "status": self.status, "summary": self.summary,
            "allowed": {"without_kernels": asdict(self.allowed.plain), "with_kernels": kernels},
            "inputs": [str(run) for run in self.verification.runs], "runner": self.verification.runner,
            "kernels_run": self.verification.kernels_run, "outputs": found["whole"]["outputs"],
            "outputs_with_kernels": found["whole"]["device"], "first_difference": self.verification.whole.first,
            "nodes": found["nodes"], "notes": found["notes"],
        }


def compare(pair: Pair, runner: KernelRunner | None = None, inputs: Inputs = None, *,
            closeness: Closeness | None = None, needs_kernels: bool = False, bounds: Bounds = NONE,
            names: Sequence[str] = ("original", "fused"), progress: Progress | None = None) -> VerifyResult:
    """Run a model and its fused form on the same inputs, and every kernel beside the nodes that it replaced.

    Args:
        runner: what runs kernels; None leaves them unrun.
        inputs: the user's own, or made ones where None.
        closeness: how far outputs may be off, with kernels and without.  Where None: with kernels what is usual for
            the model's narrowest float type; without them nothing, as the functions of fused nodes hold the original's
            very nodes, or what is usual again where the file has none.
        needs_kernels: whether it is "inconclusive" where a kernel was not run.
        names: what messages call the two.

    Raises:
        ModelError: the two do not belong together, ``inputs`` do not fit, or ONNX Runtime refuses the original.
    """
    pair.check()
    nodes = read_fused(pair.fused.proto)
    usual = Closeness(share=default_tolerance(pair.graph, nodes))
    ours = bool(nodes) or has_planned_form(pair.fused.proto)
    allowed = Allowed(EXACT if ours else usual, usual) if closeness is None else Allowed(closeness, closeness)
    found = verify(pair, runner, inputs, progress, bounds, allowed)
    fault = ""
    if found.whole.identical is None:
        try:
            check_sessions(pair)
        except VerificationError as error:
            fault = "" if is_lacking(error) else runtime_words(error.__cause__ or error.message)
    asked = tuple(each.label for each in input_sets(inputs))
    return VerifyResult(names[0], names[1], found, allowed, asked, needs_kernels, fault)


def _listed(entries: Sequence[OutputDifference]) -> str:
    text = f"output {told(entries[0])}"
    return text if len(entries) == 1 else f"{text}, and {len(entries) - 1} more"
