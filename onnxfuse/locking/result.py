"""A model beside a lock of it: what the lock has and the model does not, and what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from onnxfuse.locking.because import Stopped
from onnxfuse.locking.gather import Found
from onnxfuse.locking.lock import Lock
from onnxfuse.locking.names import Locked

Status = Literal["holds", "lost"]

EXIT_CODES: dict[Status, int] = {"holds": 0, "lost": 1}
"""Of ``onnxfuse check``; 2 is wrong usage."""

Kind = Literal["fusion", "runtime"]
"""Of ours, or of ONNX Runtime's own."""


@dataclass(frozen=True)
class Lost:
    """A fusion of the lock that is no more.

    Attributes:
        kind: whose it was; locked: what the lock has of it; stopped: where it stopped, and why.
    """

    kind: Kind
    locked: Locked
    stopped: Stopped


@dataclass(frozen=True)
class Otherwise:
    """A fusion of the lock that is there in another way: ``to`` is what holds its nodes now."""

    kind: Kind
    locked: Locked
    to: Found


@dataclass(frozen=True)
class CheckResult:
    """A model beside a lock of it.

    Attributes:
        model, file: what messages call the model and the lock.
        lock: what was read; now: what would be written.
        lost: fusions that are no more; interface: what is called, typed or sized in another way, a sentence each.
        otherwise: fusions that are there by another rule, or in a fused node of other nodes; renamed: how many are at
            nodes of other names; new: ours that the lock has not, new_runtime: ONNX Runtime's own.
        notes: what the reader has to know of how the model was planned.
    """

    model: str
    file: str
    lock: Lock
    now: Lock
    lost: tuple[Lost, ...] = ()
    interface: tuple[str, ...] = ()
    otherwise: tuple[Otherwise, ...] = ()
    renamed: int = 0
    new: tuple[Found, ...] = ()
    new_runtime: tuple[Found, ...] = ()
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """In one line: what was lost may be as large as the model."""
        return f"<CheckResult {self.summary}>"

    @property
    def status(self) -> Status:
        """Whether all of the lock holds."""
        return "lost" if self.lost or self.interface else "holds"

    @property
    def holds(self) -> bool:
        """Whether all of the lock is there: every fusion, and the names and types of inputs and outputs."""
        return self.status == "holds"

    @property
    def exit_code(self) -> int:
        """Of ``onnxfuse check``."""
        return EXIT_CODES[self.status]

    @property
    def changes(self) -> tuple[str, ...]:
        """What differs between then and now that may be why: releases, operator sets, the GPU, sizes, settings."""
        before, now = _settings(self.lock), _settings(self.now)
        return tuple(f"{name} {before.get(name, 'none')} -> {now.get(name, 'none')}"
                     for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name))

    @property
    def summary(self) -> str:
        """One sentence that begins with the status."""
        ours = sum(entry.times for entry in self.lock.fusions)
        runtime = sum(entry.after for entry in self.lock.runtime)
        if self.holds:
            return f"holds: {_number(ours, 'fusion')}, and {runtime} of ONNX Runtime's own"
        lost = {kind: sum(each.kind == kind for each in self.lost) for kind in ("fusion", "runtime")}
        parts = [f"{lost['fusion']} of {_number(ours, 'fusion')}"] * bool(lost["fusion"])
        parts += [f"{lost['runtime']} of {runtime} of ONNX Runtime's own"] * bool(lost["runtime"])
        parts += ["the model's inputs and outputs are others"] * bool(self.interface)
        return f"lost: {', and '.join(parts)}"

    def to_json(self) -> dict[str, Any]:
        """Everything as data."""
        return {
            "model": self.model, "lock": self.file, "status": self.status, "summary": self.summary,
            "fusions": sum(entry.times for entry in self.lock.fusions),
            "runtime": sum(entry.after for entry in self.lock.runtime),
            "lost": [{**_locked(each.kind, each.locked), **_stopped(each.stopped)} for each in self.lost],
            "interface": list(self.interface),
            "otherwise": [{**_locked(each.kind, each.locked), "by": _found(each.to)} for each in self.otherwise],
            "renamed": self.renamed, "new": [_found(each) for each in self.new],
            "new_runtime": [_found(each) for each in self.new_runtime],
            "changes": list(self.changes), "notes": list(self.notes),
        }


def _settings(lock: Lock) -> Mapping[str, str]:
    """What a plan hangs on beside the model's nodes, by what messages call it."""
    found = {**{f"opset of {domain}": str(version) for domain, version in lock.model.opsets.items()},
             **lock.made.model_dump(), "target": lock.plan.target,
             **{f"size of {name}": str(size) for name, size in lock.plan.dims.items()}}
    settings = lock.plan.model_dump(exclude_defaults=True, exclude={"target", "dims"})
    return found | {name: ", ".join(value) if isinstance(value, list) else str(value).lower()
                    for name, value in settings.items()}


def _locked(kind: Kind, locked: Locked) -> dict[str, Any]:
    return {"kind": kind, "rule": locked.rule, "structure": list(locked.words), "nodes": locked.spot.nodes,
            "writes": locked.spot.writes}


def _stopped(stopped: Stopped) -> dict[str, Any]:
    return {"node": stopped.node, "edge": None if stopped.edge is None else list(stopped.edge),
            "message": stopped.words, "because": [asdict(refusal) for refusal in stopped.because]}


def _found(found: Found) -> dict[str, Any]:
    return {"rule": found.rule, "structure": list(found.words), "nodes": found.spot.nodes}


def _number(number: int, one: str) -> str:
    return f"{number:,} {one}{'s' * (number != 1)}"


def interface_changes(lock: Lock, now: Lock) -> tuple[str, ...]:
    """What is called, typed or sized in another way, a sentence each; what symbols are called is no matter."""
    found: list[str] = []
    for kind in ("input", "output"):
        before, there = getattr(lock.model, f"{kind}s"), getattr(now.model, f"{kind}s")
        gone, come = [name for name in before if name not in there], [name for name in there if name not in before]
        if len(gone) == len(come):
            found += [f"the {kind} {old!r} is called {new!r}" for old, new in zip(gone, come, strict=True)]
        else:
            found += [f"the {kind} {name!r} is gone" for name in gone]
            found += [f"the {kind} {name!r} is new" for name in come]
        found += [f"the {kind} {name!r} is {_shown(there[name])} in place of {_shown(kinds)}"
                  for name, kinds in before.items() if name in there and _plain(there[name]) != _plain(kinds)]
    return tuple(found)


def _plain(kinds: Sequence[str | int]) -> list[str | int]:
    """Type and sizes without the names of symbols."""
    return [*kinds[:1], *("..." if size == "..." else "?" if isinstance(size, str) else size for size in kinds[1:])]


def _shown(kinds: Sequence[str | int]) -> str:
    return f"{kinds[0]}[{', '.join(map(str, kinds[1:]))}]" if kinds else "?"
