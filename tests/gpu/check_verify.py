#!/usr/bin/env python3
"""`onnxfuse verify`, `rules check` and `doctor` on a GPU: what is sound passes, and a fault of one percent is named.

    python tests/gpu/check_verify.py [--rehearse]

A transformer encoder of each type is fused.  As it is, every kernel has to run and the file to be "same", its outputs
with kernels too.  Then each kernel in turn is spoiled by a hundredth: the file is "different", and the nodes of that
kernel, and no others, are named; and `optimize` takes back those whose kernel is a hundredth off, and no others, and
delivers the rest verified.  The kernel that the rule of examples/rules brings is right on the GPU too, and one a
hundredth off is not.  Before all that the doctor must find nothing to mend.  ``--rehearse`` runs kernels in the
emulator, spoils one, and asks no doctor.  Exits with 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import planted  # noqa: E402
from cli_models import encoder  # noqa: E402

import onnxfuse  # noqa: E402
from onnxfuse import delivery, verifying  # noqa: E402
from onnxfuse.checking import check_rules, kernels  # noqa: E402
from onnxfuse.doctor import examine  # noqa: E402
from onnxfuse.emulator import EmulatorError  # noqa: E402
from onnxfuse.optimised import silent  # noqa: E402
from onnxfuse.rewriting import read_fused  # noqa: E402

TYPES = ("float32", "float16")


def check_machine() -> list[str]:
    """What the doctor finds."""
    return [f"doctor: {finding.part}: {finding.message} {finding.remedy}" for finding in examine(needs_gpu=True).faults]


def check_sound(dtype: str, dims: dict[str, int], on_gpu: bool) -> list[str]:
    """What is wrong with a sound file's verification."""
    original = encoder(1, dtype=dtype)
    fused = onnxfuse.optimize(original, dims=dims, verify=False, least_gain=0.0, database=False)
    result = onnxfuse.verify(original, fused.model, dims=dims, require_kernels=True)
    print(f"{dtype}: {result.summary}")
    wrong = [] if result.same and result.verification.kernels_run else [f"{dtype}: {result.summary}"]
    if on_gpu and not result.verification.whole.device:
        wrong.append(f"{dtype}: outputs were not compared with kernels running: {result.verification.notes}")
    return wrong + check_faults(dtype, fused, dims, None if on_gpu else 1) + check_taken_back(dtype, fused, dims)


def check_faults(dtype: str, fused: onnxfuse.Result, dims: dict[str, int], most: int | None) -> list[str]:
    """Faults that are not found, or not where they are."""
    wrong = []
    original, rewritten = fused.optimised.loaded.proto, fused.optimised.rewritten
    for op in planted.kernels(rewritten)[:most]:
        result = onnxfuse.verify(original, planted.plant(rewritten, op).model, dims=dims)
        named = {node.node for node in result.verification.failed}
        nodes = {node.name for node in read_fused(rewritten.model) if node.op == op}
        print(f"{dtype}, {op} spoiled: {result.summary}")
        if result.status != "different" or named != nodes:
            wrong.append(f"{dtype}, {op} spoiled: {result.status}, named {sorted(named)} instead of {sorted(nodes)}")
    return wrong


def check_taken_back(dtype: str, fused: onnxfuse.Result, dims: dict[str, int]) -> list[str]:
    """What is wrong where a kernel is a hundredth off when `optimize` verifies it."""
    made = fused.optimised
    op = planted.kernels(made.rewritten)[0]
    expected = {placed.node for placed in made.rewritten.placed if placed.op == op}
    found = delivery.verified(planted.planted_regions(made, op), None, silent)
    gone = {refusal.node for refusal in found.taken_back if refusal.code == "failed-verification"}
    left = len(read_fused(found.model))
    print(f"{dtype}, {op} spoiled in optimize: {len(gone)} nodes taken back, {left} left; "
          f"{found.verification and found.verification.summary}")
    wrong = [] if gone == expected else [f"{dtype}: optimize took back {sorted(gone)} instead of {sorted(expected)}"]
    if left != len(made.rewritten.placed) - len(expected):
        wrong.append(f"{dtype}: {left} fused nodes are left of {len(made.rewritten.placed)}")
    again = onnxfuse.verify(made.loaded.proto, found.model, dims=dims, require_kernels=True)
    return wrong if again.same else [*wrong, f"{dtype}: what optimize delivered: {again.summary}"]


def check_rule(folder: Path) -> list[str]:
    """What is wrong with a check of the rule in examples/rules, whose kernel has to run on the GPU too."""
    shutil.copytree(ROOT / "examples" / "rules", folder, dirs_exist_ok=True)
    found = check_rules([folder])
    print(f"rules check: {dict(found.kernels)}, not run: {[reason for reason, _ in found.unrun]}")
    there = not any("on a GPU" in reason for reason, _ in found.unrun)
    wrong = [] if found.kernels == {"softcap": "right"} and there else [f"a sound kernel: {found}"]
    kernel = folder / "softcap.cu"
    kernel.write_text(kernel.read_text().replace("y[i] = limit", "y[i] = 1.01f * limit"))
    kernels.compiler_version = no_emulator  # which would find it first
    for outcome in check_rules([folder]).outcomes:
        fault = outcome.fault or ""
        print(f"rules check, the kernel a hundredth off, {outcome.example.name}: {fault or 'as it should be'}")
        if (outcome.example.refused is None) != fault.startswith("Its kernel is wrong, on "):
            wrong.append(f"a kernel a hundredth off, {outcome.example.name}: {fault}")
    return wrong


def no_emulator() -> str:
    """In place of what asks for the host's compiler."""
    raise EmulatorError("left out")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="kernels in the emulator, and small sizes")
    arguments = parser.parse_args()
    wrong, dims = [], {"batch": 8, "sequence": 128}
    if arguments.rehearse:
        from emulated import EmulatedRunner

        for module in (verifying, kernels, delivery):
            module.find_runner = lambda **_: EmulatedRunner()  # type: ignore[attr-defined]
        dims = {"batch": 1, "sequence": 4}
    else:
        wrong += check_machine()
    for dtype in TYPES[:1] if arguments.rehearse else TYPES:
        wrong += check_sound(dtype, dims, not arguments.rehearse)
    with TemporaryDirectory() as folder:
        wrong += check_rule(Path(folder))
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
