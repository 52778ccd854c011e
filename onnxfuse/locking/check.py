"""A model beside a lock of it.

    lock ─ places ─┐
                   ├─ paired ─▶ held, changed, lost ─ Because ─▶ CheckResult
    plan ─ found ──┘
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from onnxfuse.errors import LockError
from onnxfuse.locking.because import Because, unseen
from onnxfuse.locking.gather import Found, fused, lock_from, runtime_fused
from onnxfuse.locking.lock import Fusion, Lock, RuntimeFusion, RuntimeSpot
from onnxfuse.locking.names import Locked, Names
from onnxfuse.locking.pairing import Pairing, paired
from onnxfuse.locking.result import CheckResult, Lost, Otherwise, interface_changes
from onnxfuse.optimised import Optimised
from onnxfuse.reporting import Report

FIRES = ("fires", "partly")


def check(lock: Lock, optimised: Optimised, report: Report, file: str, held: Sequence[str] = ()) -> CheckResult:
    """Compare a lock with what was planned now.

    Args:
        file: what messages call the lock.
        held: rules of the fused nodes that the model's file holds, where it is fused and the original in it was
            planned.

    Raises:
        LockError: the lock is of another model.
    """
    ours, theirs = fused(optimised), runtime_fused(optimised)
    names, plain = Names.of_view(optimised), Names(optimised.graph)
    first = paired(_places(lock.fusions), ours, names)
    firing = [found for found in theirs if _fires(found)]
    second = paired([one for one in _places(lock.runtime) if _fired(one)], firing, plain, [*ours, *_free(theirs, ours)])
    now = lock_from(optimised, report, ours, theirs)
    _check_model(lock, now, (first, second), (names, plain), file)
    because = Because(optimised, lock, ours, theirs, first.new)
    lost = [Lost("fusion", one, because.ours(one)) for one in first.lost]
    lost += [Lost("runtime", one, because.runtimes(one)) for one in second.lost]
    lost += [Lost("runtime", one, unseen(one, lock.made, now.made)) for one, there in (*second.held, *second.renamed)
             if _seen(one) and _seen(there) is False]
    otherwise = [Otherwise("fusion", one, to) for one, to in first.changed]
    otherwise += [Otherwise("runtime", one, to) for one, to in second.changed]
    return CheckResult(
        report.model, file, lock, now, tuple(lost), interface_changes(lock, now), tuple(otherwise),
        len(first.renamed) + len(second.renamed), tuple(first.new), tuple(second.new),
        (*report.warnings, *report.notes, *_fused_already(held, ours), *_not_asked(second)),
    )


def _places(entries: Iterable[Fusion | RuntimeFusion]) -> list[Locked]:
    return [Locked(entry.rule, tuple(entry.structure), spot) for entry in entries for spot in entry.at]


def _fired(one: Locked) -> bool:
    """Whether a place of the runtime's fired in the fused model; the others are ours, or were lost when it was made."""
    return isinstance(one.spot, RuntimeSpot) and one.spot.after in FIRES


def _fires(found: Found) -> bool:
    return isinstance(found.spot, RuntimeSpot) and found.spot.after in FIRES


def _seen(one: Locked | Found) -> bool | None:
    """Whether a session ran a place of the runtime's as one; None where none was made."""
    return one.spot.seen if isinstance(one.spot, RuntimeSpot) else None


def _fused_already(held: Sequence[str], ours: Sequence[Found]) -> tuple[str, ...]:
    """What is to be said of a file that is fused already."""
    if not held:
        return ()
    same = sorted(held) == sorted(found.rule for found in ours)
    return ("The file is fused already: this is about the original in it, planned anew"
            + ("." if same else f"; the file holds {len(held)} fused nodes, and {len(ours)} are planned."),)


def _not_asked(pairing: Pairing) -> tuple[str, ...]:
    """What is to be said where a session was made for the lock, and none could be made here."""
    if any(_seen(one) and _seen(there) is None for one, there in (*pairing.held, *pairing.renamed)):
        return ("No session of ONNX Runtime could be made here to see what it fuses by itself: the rules alone say "
                "so.",)
    return ()


def _free(theirs: Iterable[Found], ours: Sequence[Found]) -> Iterator[Found]:
    """Fusions of the runtime's of which fused nodes take a part and what is left costs nothing more: as of that part's
    rule."""
    for found in theirs:
        taker = next((each for each in ours if not each.holds.isdisjoint(found.holds)), None)
        if taker is not None and isinstance(found.spot, RuntimeSpot) and not found.spot.costs_us:
            yield replace(found, rule=taker.rule)


def _check_model(lock: Lock, now: Lock, pairings: Sequence[Pairing], names: Sequence[Names], file: str) -> None:
    """Whether the lock can be of this model at all.

    Raises:
        LockError: nothing of it is there, by structure or by name.
    """
    if any(each.held or each.renamed or each.changed for each in pairings):
        return
    known = any(names_.knows(one) for each, names_ in zip(pairings, names, strict=True) for one in each.lost)
    shared = {*lock.model.inputs, *lock.model.outputs} & {*now.model.inputs, *now.model.outputs}
    if not known and (not shared or any(each.lost for each in pairings)):
        raise LockError(
            f"The lock is of another model: of {lock.model.file!r}, and nothing that it names is in this one.",
            place=file, remedy="Give the lock of this model; `onnxfuse optimize MODEL --lock FILE` writes one.")
