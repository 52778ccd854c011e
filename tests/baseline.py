"""What is planned and generated for many models, as text: two states of the code compared byte for byte.

    python tests/baseline.py record FOLDER [--random 500] [--only zoo] [--jobs 2] [--database FILE]
    python tests/baseline.py compare BEFORE AFTER [--plans]

``record`` plans the zoo's rows, the examples of every rule, models with bodies, quantised ones and random graphs, for
more than one GPU, and writes a file for each: regions with their rules, nodes, costs, launch plans and kernels' text,
refusals, what else was weighed, and a digest of the fused model.  ``compare`` says which differ and shows the first
lines that do; it exits with 1 where any does.  For a change that must change nothing: record in a worktree of the
commit before, and after.  With ``--plans`` kernels' text does not count, nor what is a digest of it: for a change of
texts that must change no decision.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")]

SHOWN = 12
"""Lines that are shown of a file that differs."""

Make = Callable[[], Any]


def zoo() -> Iterator[tuple[str, Make]]:
    """The zoo's rows, for a large GPU and for a small one."""
    for target in ("H200", "T4"):
        yield from rows(target, False)


def rows(target: str, database: Any) -> Iterator[tuple[str, Make]]:
    """The zoo's rows for one GPU."""
    from zoo_models import FOLDER, hydrating
    from zoo_rows import all_rows

    from onnxfuse.pipeline import Options, optimise

    for row in all_rows():
        yield f"{row.name.replace(':', '_')}-{target}", lambda row=row: optimise(
            hydrating.hydrate(FOLDER / f"{row.model}.onnx.xz"),
            Options(dims=row.dims, target=target, verify=False, database=database))


def measured() -> Iterator[tuple[str, Make]]:
    """The zoo's rows as the database of measurements has them planned, where there is one."""
    return rows("H200", None)


def rules() -> Iterator[tuple[str, Make]]:
    """Every rule's examples."""
    import test_rule_kernels as kernels

    for rule in kernels.RULES:
        for place in range(len(kernels.rules().by_id[rule].examples)):
            yield f"{rule}-{place}", lambda rule=rule, place=place: kernels.fused_examples(rule)[place][2]


def random_graphs(first: int, count: int) -> Iterator[tuple[str, Make]]:
    """Graphs of seeds, everything fused that can be."""
    from graph_strategies import seeded

    from onnxfuse.pipeline import Options, optimise

    for seed in range(first, first + count):
        target = ("H100", "A100", "T4")[seed % 3]
        yield f"{seed}", lambda seed=seed, target=target: optimise(
            seeded(seed).model, Options(target=target, verify=False, database=False, least_gain=0.0))


def others() -> Iterator[tuple[str, Make]]:
    """Models with integers and roundings, and long chains as ``benchmarks/planning.py`` makes them."""
    import planning
    import quantized_models

    from onnxfuse.pipeline import Options, optimise

    made = {**quantized_models.MODELS,
            **{f"{kind}-600": lambda kind=kind: planning.KINDS[kind](600) for kind in planning.KINDS}}
    for name, model in made.items():
        yield name, lambda model=model: optimise(
            model(), Options(dims={"batch": 8, "sequence": 128}, target="H200", verify=False, database=False))


KINDS = ("zoo", "measured", "rules", "others", "random")


def subjects(kind: str, count: int) -> Iterator[tuple[str, Make]]:
    """Names of one kind's models, and what plans them."""
    if kind == "random":
        return random_graphs(30_000, count)
    return {"zoo": zoo, "measured": measured, "rules": rules, "others": others}[kind]()


def described(made: Any) -> str:
    """All that is compared of an ``Optimised``."""
    regions = [
        {
            "rule": fusion.rule, "schedule": fusion.kernel.schedule,
            "nodes": [node.label for node in fusion.nodes], "again": [node.label for node in fusion.again],
            "tensors": [value.name for value in fusion.tensors], "hosts": [value.name for value in fusion.hosts],
            "inlined": [value.name for value in fusion.inlined], "outputs": [value.name for value in fusion.outputs],
            "cost": asdict(fusion.cost), "steps": fusion.steps, "scratch": fusion.scratch,
            "scattered": fusion.kernel.scattered, "phases": fusion.kernel.phases,
            "choice": str(fusion.kernel.choice), "choices": [str(choice) for choice in fusion.kernel.choices],
        }
        for fusion in made.plan.fusions
    ]
    weighed = [
        [[node.label for node in each.nodes], each.rule, each.verdict, each.reason, each.lost_to,
         each.cost and asdict(each.cost)]
        for each in made.plan.considered
    ]
    head = {
        "regions": regions, "refusals": [asdict(refusal) for refusal in made.refusals], "considered": weighed,
        "candidates": made.plan.candidates, "notes": made.notes,
        "model": hashlib.sha256(made.model.SerializeToString(deterministic=True)).hexdigest(),
    }
    texts = [f"== {region.rule}, {region.kernel.schedule}\n{region.kernel.plan.to_json()}\n{region.kernel.source}"
             for region in made.regions]
    return "\n".join([json.dumps(head, indent=1, default=str), *texts, ""])


def record_share(folder: Path, kind: str, count: int, share: int, shares: int) -> None:
    """Record every so manieth model of a kind."""
    from onnxfuse.errors import OnnxfuseError

    for place, (name, make) in enumerate(subjects(kind, count)):
        if place % shares != share:
            continue
        try:
            made = make()
        except OnnxfuseError as error:  # what is refused must go on being refused in the same words
            text = str(error)
        else:
            text = described(made)
        (folder / f"{kind}-{name}.txt").write_text(text, encoding="utf-8", errors="surrogateescape")


def record(folder: Path, kinds: list[str], count: int, jobs: int) -> None:
    """Record all models."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = [get_context("spawn").Process(target=record_shares, args=(folder, kinds, count, share, jobs))
                 for share in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)
    print(f"{len(list(folder.iterdir()))} files in {folder}")


def record_shares(folder: Path, kinds: list[str], count: int, share: int, shares: int) -> None:
    """A process's share of every kind."""
    for kind in kinds:
        record_share(folder, kind, count, share, shares)


def plans_alone(text: str) -> str:
    """A record without kernels' text and its digests, which are in kernels' names and in the model."""
    head, *regions = text.split("\n== ")
    kept = [_MODEL.sub("", head), *("\n".join(region.split("\n")[:2]) for region in regions)]
    return _DIGEST.sub("_", "\n== ".join(kept))


_MODEL, _DIGEST = re.compile(r' "model": "\w+"'), re.compile(r"_[0-9a-f]{6}_(?=\w+['\"])")


def compare(before: Path, after: Path, read: Callable[[str], str] = str) -> int:
    """How many files differ, as ``read`` has them; shows the first lines of each."""
    names = sorted({path.name for folder in (before, after) for path in folder.iterdir()})
    differ = 0
    for name in names:
        texts = [read(path.read_text(errors="replace")) if (path := folder / name).exists() else ""
                 for folder in (before, after)]
        if texts[0] != texts[1]:
            differ += 1
            lines = list(difflib.unified_diff(*(text.splitlines() for text in texts), name, name, lineterm="", n=0))
            print("\n".join(line[:200] for line in lines[:SHOWN]))
            if len(lines) > SHOWN:
                print(f"... and {len(lines) - SHOWN} lines more")
    print(f"{differ} of {len(names)} differ")
    return differ


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="plan all models and write what came of it")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--random", type=int, default=500, help="how many random graphs")
    recording.add_argument("--only", choices=KINDS, action="append", help="models of this kind; may repeat")
    recording.add_argument("--jobs", type=int, default=2, help="processes")
    comparing = commands.add_parser("compare", help="show what differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--plans", action="store_true", help="leave out kernels' text")
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return 1 if compare(arguments.before, arguments.after, plans_alone if arguments.plans else str) else 0
    record(arguments.folder, arguments.only or list(KINDS), arguments.random, arguments.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
