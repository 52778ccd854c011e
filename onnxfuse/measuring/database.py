"""What was measured on GPUs, kept on disk: an SQLite file.

A measurement is one *candidate* for one *subject* at exact shapes in one environment (GPU, driver, versions).  Of a
kernel the subject is the digest of its text and the candidates are ways to schedule it; of ONNX Runtime the subject
is the digest of the nodes and the one candidate is ``RUNTIME``.  Each row also has its shapes' bucket, every size
rounded up to a power of two, under which a schedule that was tuned for other sizes is found.

Every write is a transaction of its own behind a busy timeout, so that several processes may tune into one file and
whatever was measured before an interruption is there.  The rollback journal is kept, and not the write-ahead log:
that one needs shared memory, which homes on network file systems do not have.

A file may be anybody's: ``database_file`` opens it, what its rows hold is checked, and a query ends after a time.
"""

from __future__ import annotations

import os
import sqlite3
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from math import fsum, isfinite
from pathlib import Path
from typing import Any, Literal

from onnxfuse.errors import MeasurementError
from onnxfuse.measuring.database_file import connect, damaged, explained, migrate, timed
from onnxfuse.runtime.cache import default_folder
from onnxfuse.wording import option

ROWS = 10_000
"""The latest rows of one subject that count."""

VARIABLE = "ONNXFUSE_DATABASE"
"""Environment variable with the file's path."""

DEFAULT, RUNTIME = "default", "runtime"
"""Candidates besides the schedules that are spelled out: the schedule's own choice, and ONNX Runtime's own nodes."""

Status = Literal["ok", "wrong", "failed"]
"""Whether a candidate may be used: it was timed; its result was wrong; it did not run."""

Shapes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Environment:
    """Where something was measured: the GPU's name and driver ("580.65.06"), and versions of onnxfuse, ONNX Runtime
    and the CUDA compiler ("nvrtc-13.0.88")."""

    gpu: str
    driver: str
    onnxfuse: str
    onnxruntime: str
    cuda: str


@dataclass(frozen=True)
class Measurement:
    """One candidate for one subject.

    Attributes:
        subject: a digest.
        shapes: see ``shapes_text``.
        candidate: ``DEFAULT``, ``RUNTIME`` or a schedule's text.
        status: whether it may be used; note: what is wrong with it, or which kernel a ``DEFAULT`` was.
        microseconds: median GPU time of a run; spread: distance of the quartiles, in microseconds; runs: how many.
        date: when, in UTC, as "2026-11-20T12:00:00+00:00".
    """

    subject: str
    shapes: str
    candidate: str
    microseconds: float
    spread: float = 0.0
    runs: int = 1
    status: Status = "ok"
    date: str = ""
    note: str = ""


@dataclass(frozen=True)
class Statistic:
    """What a fused node's kernel did in production.

    Attributes:
        kernel: ``runtime.cache.digest`` of the kernel's text and options, as the node carries them.
        shapes: see ``shapes_text``.
        microseconds: mean GPU time of a call; calls: how many.
        source: the process that recorded them, "" where they are of several.
    """

    kernel: str
    shapes: str
    microseconds: float
    calls: int
    environment: Environment
    last_seen: str = ""
    source: str = ""


def shapes_text(inputs: Shapes, outputs: Shapes = ()) -> str:
    """Shapes in one line: "8x128x768,768>8x128x768", a scalar's is "-"."""
    def line(shapes: Shapes) -> str:
        return ",".join("x".join(map(str, shape)) or "-" for shape in shapes)

    return f"{line(inputs)}>{line(outputs)}"


def bucket_of(shapes: str) -> str:
    """The same line with every size rounded up to a power of two."""
    number, found = "", []
    for letter in f"{shapes}\0":
        if letter.isdecimal():
            number += letter
            continue
        if number:
            size = int(number)
            found.append(str(1 << (size - 1).bit_length() if size else 0))
            number = ""
        found.append(letter)
    return "".join(found)[:-1]


def default_path() -> Path | None:
    """``$ONNXFUSE_DATABASE``, else ``measurements.sqlite`` in the folder of the kernel cache; None with no home."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    folder = default_folder()
    return None if folder is None else folder / "measurements.sqlite"


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class Database:
    """The measurements of one file.  Not to be shared between threads; several processes may open one file.

    A database is a context manager; ``close`` ends it.
    """

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        """``open_database``, ``find_database`` and ``in_memory`` make one; ``name`` is what messages call it."""
        self._connection = connection
        self.name = name

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def record(self, environment: Environment, measurement: Measurement) -> None:
        """Keep a measurement, in place of an older one of the same candidate.

        Raises:
            MeasurementError: the file is damaged or cannot be written.
        """
        with self._writing():
            where = self._environment_id(environment)
            self._connection.execute(
                "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (measurement.subject, measurement.shapes, bucket_of(measurement.shapes), where, measurement.candidate,
                 measurement.status, measurement.microseconds, measurement.spread, measurement.runs,
                 measurement.date or now(), measurement.note),
            )

    def record_statistics(self, records: Iterable[Statistic]) -> None:
        """Keep what kernels did in production beside what other processes recorded, and in place of what the same
        process had recorded before: its file tells everything since it began.

        Raises:
            MeasurementError: the file is damaged or cannot be written.
        """
        with self._writing():
            for record in records:
                where = self._environment_id(record.environment)
                self._connection.execute(
                    "INSERT OR REPLACE INTO recordings VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (record.kernel, record.shapes, where, record.source, record.microseconds, record.calls,
                     record.last_seen or now()),
                )

    def measurements(self, environment: Environment, subject: str, shapes: str) -> dict[str, Measurement]:
        """What was measured of a subject at these shapes in this environment, by candidate.

        Raises:
            MeasurementError: the file is damaged.
        """
        rows = self._rows(
            f"SELECT {_COLUMNS} FROM measurements JOIN environments ON environment = id "
            f"WHERE subject = ? AND shapes = ? AND {_HERE} ORDER BY date DESC LIMIT {ROWS}",
            (subject, shapes, *_values(environment)))
        return {row.candidate: row for row in map(self._measurement, rows)}

    def ranking(self, environment: Environment, subject: str, shapes: str) -> tuple[str, ...]:
        """The candidates of a subject at these shapes that were right in another environment, the fastest first: in the
        latest of the same GPU, else in the latest of another one.

        Raises:
            MeasurementError: the file is damaged.
        """
        rows = self._rows(
            f"SELECT id, {_COLUMNS} FROM measurements JOIN environments ON environment = id "
            f"WHERE subject = ? AND shapes = ? AND NOT ({_HERE}) AND status = 'ok' "
            f"ORDER BY gpu = ? DESC, date DESC LIMIT {ROWS}",
            (subject, shapes, *_values(environment), environment.gpu))
        found = [self._measurement(row[1:]) for row in rows if row[0] == rows[0][0]]
        return tuple(row.candidate for row in sorted(found, key=lambda row: row.microseconds))

    def best(self, environment: Environment, subject: str, shapes: str) -> Measurement | None:
        """The fastest candidate that was right, at these shapes; else at the latest of their bucket.

        Raises:
            MeasurementError: the file is damaged.
        """
        for column, value in (("shapes", shapes), ("bucket", bucket_of(shapes))):
            rows = self._rows(
                f"SELECT {_COLUMNS} FROM measurements JOIN environments ON environment = id "
                f"WHERE subject = ? AND {column} = ? AND {_HERE} AND status = 'ok' AND candidate <> ? "
                f"ORDER BY date DESC, microseconds LIMIT {ROWS}", (subject, value, *_values(environment), RUNTIME))
            found = [self._measurement(row) for row in rows]
            if found:
                latest = [row for row in found if row.shapes == found[0].shapes]
                return min(latest, key=lambda row: row.microseconds)
        return None

    def statistic(self, environment: Environment, kernel: str, shapes: str) -> Statistic | None:
        """What a kernel did in production at these shapes in this environment: calls of all processes add up, times are
        averaged over them.

        Raises:
            MeasurementError: the file is damaged.
        """
        rows = self._rows(
            f"SELECT microseconds, calls, last_seen FROM recordings JOIN environments ON environment = id "
            f"WHERE kernel = ? AND shapes = ? AND {_HERE} ORDER BY last_seen DESC LIMIT {ROWS}",
            (kernel, shapes, *_values(environment)))
        for microseconds, calls, seen in rows:
            if not _is_time(microseconds) or type(calls) is not int or not 0 < calls < 1 << 63 or type(seen) is not str:
                raise self._damaged("a row of recordings holds what is no time")
        if not rows:
            return None
        total = sum(calls for _, calls, _ in rows)
        mean = fsum(microseconds * (calls / total) for microseconds, calls, _ in rows)
        return Statistic(kernel, shapes, mean, total, environment, rows[0][2])

    def recorded_in(self) -> frozenset[Environment]:
        """Where kernels were recorded in production.

        Raises:
            MeasurementError: the file is damaged.
        """
        return self._environments_of("recordings")

    def measured_in(self) -> frozenset[Environment]:
        """Where anything was measured.

        Raises:
            MeasurementError: the file is damaged.
        """
        return self._environments_of("measurements")

    def _environments_of(self, table: str) -> frozenset[Environment]:
        names = ", ".join(entry.name for entry in fields(Environment))
        rows = self._rows(f"SELECT {names} FROM environments WHERE id IN (SELECT environment FROM {table}) "
                          f"LIMIT {ROWS}", ())
        return frozenset(map(self._environment, rows))

    def environments(self) -> tuple[Environment, ...]:
        """Where anything was measured, the latest first.

        Raises:
            MeasurementError: the file is damaged.
        """
        rows = self._rows(
            "SELECT gpu, driver, onnxfuse, onnxruntime, cuda FROM environments LEFT JOIN measurements "
            f"ON environment = id GROUP BY id ORDER BY max(date) DESC, id DESC LIMIT {ROWS}", ())
        return tuple(map(self._environment, rows))

    def buckets(self) -> frozenset[str]:
        """The buckets of all shapes at which anything was measured or recorded, in any environment.

        Raises:
            MeasurementError: the file is damaged.
        """
        measured = self._rows("SELECT DISTINCT bucket FROM measurements", ())
        recorded = self._rows("SELECT DISTINCT shapes FROM recordings", ())
        return frozenset((*(bucket for bucket, in measured), *(bucket_of(str(shapes)) for shapes, in recorded)))

    def counts(self) -> tuple[int, int]:
        """How many measurements there are, and how many statistics.

        Raises:
            MeasurementError: the file is damaged.
        """
        (measurements,), (statistics,) = (self._rows(f"SELECT count(*) FROM {table}", ())[0]
                                          for table in ("measurements", "recordings"))
        return int(measurements), int(statistics)

    def __iter__(self) -> Iterator[tuple[Environment, Measurement]]:
        """Every measurement, the oldest first."""
        names = ", ".join(entry.name for entry in fields(Environment))
        rows = self._rows(
            f"SELECT {names}, {_COLUMNS} FROM measurements JOIN environments ON environment = id "
            "ORDER BY date, subject, shapes, candidate", ())
        count = len(fields(Environment))
        return iter([(self._environment(row[:count]), self._measurement(row[count:])) for row in rows])

    def forget(self, environment: Environment | None = None, subject: str | None = None,
               shapes: str | None = None) -> int:
        """Drop measurements that were made in an environment, of a subject, at shapes; each counts where it is given.

        Returns how many there were.

        Raises:
            MeasurementError: the file is damaged or cannot be written.
        """
        wanted = "(? IS NULL OR subject = ?) AND (? IS NULL OR shapes = ?)"
        values: list[Any] = [subject, subject, shapes, shapes]
        if environment is not None:
            wanted += f" AND environment IN (SELECT id FROM environments WHERE {_HERE})"
            values += _values(environment)
        with self._writing():
            return self._connection.execute(f"DELETE FROM measurements WHERE {wanted}", values).rowcount

    def _environment_id(self, environment: Environment) -> int:
        values = _values(environment)
        self._connection.execute(
            "INSERT OR IGNORE INTO environments (gpu, driver, onnxfuse, onnxruntime, cuda) VALUES (?, ?, ?, ?, ?)",
            values)
        row = self._connection.execute(f"SELECT id FROM environments WHERE {_HERE}", values).fetchone()
        return int(row[0])

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction, whole or not at all."""
        with explained(self.name):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _rows(self, query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with explained(self.name), timed(self._connection):
            return self._connection.execute(query, values).fetchall()

    def _measurement(self, row: Sequence[Any]) -> Measurement:
        subject, shapes, candidate, microseconds, spread, runs, status, date, note = row
        texts = (subject, shapes, candidate, status, date, note)
        if not (all(type(text) is str for text in texts) and _is_time(microseconds) and _is_time(spread)
                and type(runs) is int):
            raise self._damaged("a row of measurements holds what is no measurement")
        return Measurement(*row)

    def _environment(self, row: Sequence[Any]) -> Environment:
        if any(type(text) is not str for text in row):
            raise self._damaged("a row of environments holds what is no text")
        return Environment(*row)

    def _damaged(self, why: str) -> MeasurementError:
        return damaged(self.name, why)


def open_database(path: Path | None = None) -> Database:
    """The database at a path, made where there is none; to write to.

    Args:
        path: by default ``default_path()``; where that one cannot be written, a database in memory comes back after a
            warning, as the kernel cache does without.

    Raises:
        MeasurementError: the file is damaged, of a later release, or no database; or a path that was given cannot be
            written.
    """
    chosen = path or default_path()
    if chosen is None:
        return in_memory()
    try:
        chosen.parent.mkdir(parents=True, exist_ok=True)
        return Database(connect(chosen, write=True), str(chosen))
    except (OSError, sqlite3.OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if path is not None:
            raise MeasurementError(
                f"The database of measurements cannot be written: {reason}.", place=str(path),
                remedy=f"Name a file in a folder that you may write to: {option('database', 'FILE')}.",
            ) from error
        warnings.warn(
            f"the database of measurements {chosen} cannot be written ({reason}); what is measured is not kept; set "
            f"{VARIABLE} to a file that can be written", RuntimeWarning, stacklevel=2)
        return in_memory()


def find_database(path: Path | None = None) -> Database | None:
    """The database at a path, to read; None where there is none.

    Args:
        path: by default ``default_path()``; where that one cannot be read, None comes back after a warning.

    Raises:
        MeasurementError: the file is damaged, of a later release, or no database; or a path that was given is not
            there or cannot be read.
    """
    chosen = path or default_path()
    try:
        if chosen is None or (path is None and (not chosen.exists() or chosen.stat().st_size == 0)):
            return None
        return Database(connect(chosen, write=False), str(chosen))
    except (OSError, sqlite3.OperationalError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if path is not None:
            raise MeasurementError(
                f"The database of measurements cannot be read: {reason}.", place=str(path),
                remedy="`onnxfuse tune MODEL --database FILE` makes one.",
            ) from error
        warnings.warn(f"the database of measurements {chosen} cannot be read ({reason}); nothing that was measured is "
                      "used", RuntimeWarning, stacklevel=2)
        return None


def in_memory() -> Database:
    """A database that goes with the process."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection)
    return Database(connection, "memory")


def _is_time(found: object) -> bool:
    return isinstance(found, float | int) and isfinite(found) and 0 <= found < 1e15


_COLUMNS = ", ".join(("subject", "shapes", "candidate", "microseconds", "spread", "runs", "status", "date", "note"))
_HERE = " AND ".join(f"{entry.name} = ?" for entry in fields(Environment))


def _values(environment: Environment) -> tuple[str, ...]:
    return tuple(getattr(environment, entry.name) for entry in fields(Environment))
