"""The file that a database of measurements is kept in: made, brought up to date, and opened whoever wrote it.

A file may be anybody's.  It is opened only where its tables are exactly those that a release of onnxfuse makes, so that
no view, trigger or expression of the file's own ever runs; texts and the time that queries take are bounded.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from onnxfuse.bounded import open_file
from onnxfuse.errors import MeasurementError
from onnxfuse.wording import option

APPLICATION = 0x6F667573
"""SQLite's application id of the file: "ofus"."""

BUSY_SECONDS = 30.0
"""How long a statement waits for another process."""

QUERY_SECONDS = 20.0
"""How long a query may compute."""

LARGEST_VALUE = 1_000_000
"""Bytes of the largest text that is read out of a row."""

LARGEST_COPY = 1 << 28
"""Bytes of the largest file of an earlier version that is copied into memory to read it."""

_SCHEMA = (
    """
    CREATE TABLE environments (
        id INTEGER PRIMARY KEY, gpu TEXT NOT NULL, driver TEXT NOT NULL, onnxfuse TEXT NOT NULL,
        onnxruntime TEXT NOT NULL, cuda TEXT NOT NULL,
        UNIQUE (gpu, driver, onnxfuse, onnxruntime, cuda)
    );
    CREATE TABLE measurements (
        subject TEXT NOT NULL, shapes TEXT NOT NULL, bucket TEXT NOT NULL,
        environment INTEGER NOT NULL REFERENCES environments(id), candidate TEXT NOT NULL,
        status TEXT NOT NULL CHECK (status IN ('ok', 'wrong', 'failed')),
        microseconds REAL NOT NULL, spread REAL NOT NULL, runs INTEGER NOT NULL,
        date TEXT NOT NULL, note TEXT NOT NULL,
        PRIMARY KEY (subject, shapes, environment, candidate)
    ) WITHOUT ROWID;
    CREATE INDEX by_bucket ON measurements (subject, bucket, environment);
    """,
    """
    CREATE TABLE statistics (
        kernel TEXT NOT NULL, shapes TEXT NOT NULL, environment INTEGER NOT NULL REFERENCES environments(id),
        microseconds REAL NOT NULL, calls INTEGER NOT NULL, last_seen TEXT NOT NULL,
        PRIMARY KEY (kernel, shapes, environment)
    ) WITHOUT ROWID;
    """,
    """
    CREATE TABLE recordings (
        kernel TEXT NOT NULL, shapes TEXT NOT NULL, environment INTEGER NOT NULL REFERENCES environments(id),
        source TEXT NOT NULL, microseconds REAL NOT NULL, calls INTEGER NOT NULL, last_seen TEXT NOT NULL,
        PRIMARY KEY (kernel, shapes, environment, source)
    ) WITHOUT ROWID;
    INSERT INTO recordings SELECT kernel, shapes, environment, '', microseconds, calls, last_seen FROM statistics;
    DROP TABLE statistics;
    """,
)
"""What each version of the file adds to the one before; ``user_version`` is the number of those that it has."""


def connect(path: Path, *, write: bool) -> sqlite3.Connection:
    """The database at a path, of this release's version, to read or to write to.

    Raises:
        MeasurementError: the file is damaged, of a later release, or no database of measurements.
        OSError: it is no ordinary file.
        sqlite3.OperationalError: it cannot be opened.
    """
    if not write or path.exists():
        open_file(path).close()
    has_journal = _has_journal(path)
    mode = "rwc" if write else "rw" if has_journal and os.access(path, os.W_OK) else "ro"
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_SECONDS,
                                 isolation_level=None)
    try:
        with explained(str(path), opening=True), timed(connection):
            _limit(connection)
            version = _check(connection, path)
        if version < len(_SCHEMA):
            if not write:
                # An older file lacks what later versions added; a copy in memory has it.
                if path.stat().st_size > LARGEST_COPY:
                    raise MeasurementError(
                        "The database of measurements is of an earlier release, and too large to be brought up to this "
                        "one's while it is read.", place=str(path),
                        remedy="`onnxfuse tune MODEL --database FILE` brings it up to date.",
                    )
                older, connection = connection, sqlite3.connect(":memory:", isolation_level=None)
                _limit(connection)
                with explained(str(path)):
                    older.backup(connection)
                older.close()
            with explained(str(path), opening=True):
                migrate(connection)
        elif write:
            connection.execute("BEGIN IMMEDIATE")  # says now whether the file can be written
            connection.execute("ROLLBACK")
    except BaseException:
        connection.close()
        raise
    return connection


_ENDS = bytes.fromhex("d9d505f920a163d7")
"""The last bytes of a journal that names another file, which SQLite then looks into and removes."""


def _has_journal(path: Path) -> bool:
    """Whether somebody who wrote to a file left a journal: he writes now, or was killed, and then the file is to be
    put back to what it was, also by who reads.

    Raises:
        MeasurementError: it is a journal of several files, as onnxfuse writes none.
        OSError: it is no ordinary file.
    """
    try:
        with open_file(f"{path}-journal") as journal:
            journal.seek(0, os.SEEK_END)
            journal.seek(max(journal.tell() - len(_ENDS), 0))
            end = journal.read()
    except FileNotFoundError:
        return False
    if end == _ENDS:
        raise damaged(str(path), "the journal beside it is of other files too")
    return True


def _limit(connection: sqlite3.Connection) -> None:
    """Trust nothing that a file says of how it is to be used."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA cell_size_check = ON")
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.setlimit(sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """The version of a file, whose tables are that version's.

    Raises:
        MeasurementError: it is none of onnxfuse's, of a later release, or has other tables.
        sqlite3.DatabaseError: it cannot be read.
    """
    connection.execute("BEGIN")  # what follows sees one state of the file, whoever makes it meanwhile
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        tables = _tables(connection)
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    if application != APPLICATION and (application or version or tables):
        raise MeasurementError(
            "The file is a database, and none of onnxfuse's measurements.", place=str(path),
            remedy=f"Name another file: {option('database', 'FILE')}.",
        )
    if version > len(_SCHEMA):
        raise MeasurementError(
            f"The database of measurements has version {version}; this release reads up to {len(_SCHEMA)}.",
            place=str(path), remedy=f"Update onnxfuse, or name another file: {option('database', 'FILE')}.",
        )
    if version < 0 or tables != _tables_of(version):
        raise damaged(str(path), f"its tables are not those of version {version}")
    return int(version)


def _tables(connection: sqlite3.Connection) -> frozenset[tuple[str | None, ...]]:
    """What a file says of its tables and indices; of more than there can be, some."""
    rows = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_master LIMIT 100").fetchall()
    return frozenset((*row[:3], None if row[3] is None else " ".join(str(row[3]).split())) for row in rows)


@cache
def _tables_of(version: int) -> frozenset[tuple[str | None, ...]]:
    """The same of a file that a release wrote."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        for script in _SCHEMA[:version]:
            connection.executescript(script)
        return _tables(connection)
    finally:
        connection.close()


@contextmanager
def timed(connection: sqlite3.Connection) -> Iterator[None]:
    """Queries that end after a time, with "interrupted"."""
    end = time.monotonic() + QUERY_SECONDS
    connection.set_progress_handler(lambda: time.monotonic() > end, 100_000)
    try:
        yield
    finally:
        connection.set_progress_handler(None, 0)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a file to this release's version, in one transaction; another process may have done so meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        for script in _SCHEMA[version:]:
            for statement in script.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {len(_SCHEMA)}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def explained(name: str, *, opening: bool = False) -> Iterator[None]:
    """SQLite's errors in the user's words; while ``opening``, what the caller handles passes."""
    try:
        yield
    except sqlite3.OperationalError as error:
        if opening and "malformed" not in str(error):
            raise
        raise MeasurementError(
            f"The database of measurements cannot be used: {error}.", place=name,
            remedy="Try again when no other process uses it, or name another file: "
                   f"{option('database', 'FILE')}.",
        ) from error
    except sqlite3.DatabaseError as error:
        raise damaged(name, str(error)) from error
    except UnicodeDecodeError as error:  # SQLite's message holds what the file says of its tables
        raise damaged(name, "what it says of its tables is no text") from error


def damaged(name: str, why: str) -> MeasurementError:
    return MeasurementError(
        f"The database of measurements is damaged: {why}.", place=name,
        remedy="Delete it (`onnxfuse tune` measures again what it held), or name another: "
               f"{option('database', 'FILE')}.",
    )
