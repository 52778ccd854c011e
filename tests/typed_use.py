"""How a user's own code calls onnxfuse, for mypy to look at: nothing runs it, and every ignore must be needed.

A wrong strategy is an error to mypy (``warn_unused_ignores`` says so where it stops being one).
"""

from __future__ import annotations

from pathlib import Path

import onnxfuse


def right(model: Path) -> None:
    """What is meant to be written."""
    onnxfuse.optimize(model, rules="my.yaml", disable="attention", embed="sm_90", strategy="memory",
                      hints={"memory-pressure": 0.9}, dims={"batch": 8})
    onnxfuse.optimize(model, rules=[model, "my.yaml"], disable=["attention"], embed=("sm_80", "sm_90"))
    report: onnxfuse.Report = onnxfuse.report(model, strategy="all-in-one")
    explanation: onnxfuse.Explanation = onnxfuse.explain(model, "node", hints=onnxfuse.Hints())
    strategy: onnxfuse.Strategy = "dynamic"
    checked: onnxfuse.CheckResult = onnxfuse.check(model, "model.lock.yaml", strategy=strategy)
    measured: onnxfuse.BenchResult = onnxfuse.bench(model, threads=2)
    print(report.to_text(), explanation.to_text(), checked.holds, measured.original.latency.p99)


def wrong(model: Path) -> None:
    """What mypy refuses."""
    onnxfuse.optimize(model, strategy="fastest")  # type: ignore[arg-type]
    onnxfuse.report(model, strategy="fastest")  # type: ignore[arg-type]
    onnxfuse.explain(model, strategy="fastest")  # type: ignore[arg-type]
    onnxfuse.check(model, "model.lock.yaml", strategy="fastest")  # type: ignore[arg-type]
    onnxfuse.report(model, stratgy="memory")  # type: ignore[call-arg]
    onnxfuse.DynamicFusionScheduler().decide_fusion("m.onnx", strategy="fastest")  # type: ignore[arg-type]
    onnxfuse.optimize(model).save(external="move")  # type: ignore[arg-type]
    onnxfuse.optimize(model, dims="batch=8")  # type: ignore[arg-type]
