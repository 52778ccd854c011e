"""Subject ``databases``: databases of measurements, damaged as bytes and by SQL, read and written to."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import mkdtemp

from damage import NUMBERS, TEXTS, damage_bytes
from ends import FaultError

from onnxfuse.errors import MeasurementError
from onnxfuse.measuring.database import RUNTIME, Environment, Measurement, Statistic, find_database, open_database
from onnxfuse.measuring.database_file import _SCHEMA, APPLICATION
from onnxfuse.schedules import parse_choice

HERE = Environment("NVIDIA H200", "580.65.06", "0.1.0", "1.31.1", "nvrtc-13.0.88")
SHAPES = "8x128x768,768>8x128x768"
CANDIDATES = ('{"schedule": "pointwise", "kind": "flat"}', '{"schedule": "rows"}', "[" * 100_000, "{}", "a", RUNTIME)
TABLES = ("environments", "measurements", "recordings", "statistics")
COLUMNS = ("subject", "shapes", "bucket", "environment", "candidate", "status", "microseconds", "spread", "runs",
           "date", "note", "gpu", "driver", "cuda", "id", "calls", "last_seen", "kernel", "source")
VALUES = ("NULL", "x'00ff'", "zeroblob(2000000)", "randomblob(100)", "1e999", "-1", "''", "'ok'",
          "CAST(x'fffe' AS TEXT)", "9223372036854775807", "0.0", "'1e5'", "(SELECT count(*) FROM sqlite_master)")
STATEMENTS = (
    "CREATE VIEW v AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c",
    "CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM environments; END",
    "CREATE TRIGGER t BEFORE INSERT ON environments BEGIN SELECT load_extension('x'); END",
    "ALTER TABLE measurements RENAME TO other", "CREATE TABLE more (a)", "DROP INDEX by_bucket",
    "ALTER TABLE measurements ADD COLUMN g AS (hex(zeroblob(1000000)))", "PRAGMA journal_mode = WAL",
    "CREATE INDEX i ON measurements (abs(microseconds))", "PRAGMA encoding = 'UTF-16'", "VACUUM",
    "PRAGMA page_size = 512",
    "ALTER TABLE environments RENAME TO e2; CREATE VIEW environments AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL "
    "SELECT x + 1 FROM c) SELECT x AS id, 'g' AS gpu, '' AS driver, '' AS onnxfuse, '' AS onnxruntime, '' AS cuda FROM "
    "c",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = replace(sql, 'TEXT NOT NULL', 'BLOB')",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET rootpage = 1 + rootpage % 5",
    "PRAGMA writable_schema = ON; UPDATE sqlite_master SET sql = 'CREATE TABLE x(' || hex(zeroblob(1000)) || ')'",
    "PRAGMA writable_schema = ON; INSERT INTO sqlite_master VALUES ('table', 'm', 'm', 2, 'CREATE VIRTUAL TABLE m "
    "USING fts5(a)')",
    "ANALYZE", "CREATE VIRTUAL TABLE f USING rtree(a, b, c)",
)


@cache
def base() -> Path:
    """A database with something of everything, of this release's version and of those before it."""
    folder = Path(mkdtemp(prefix="fuzz-database."))
    with open_database(folder / "3") as kept:
        for number, candidate in enumerate(("default", RUNTIME, CANDIDATES[0], CANDIDATES[1])):
            for subject in "kl":
                kept.record(HERE, Measurement(subject, SHAPES, candidate, 3.0 + number, 0.1, 24))
        kept.record_statistics([Statistic("t", SHAPES, 4.0, 100, HERE)])
    for version, script in (("1", ""), ("2", _SCHEMA[1])):
        shutil.copy(folder / "3", folder / version)
        with closing(sqlite3.connect(folder / version)) as older:
            older.executescript(f"DROP TABLE recordings; {script} PRAGMA user_version = {version}")
    with closing(sqlite3.connect(folder / "2")) as second:
        second.execute("INSERT INTO statistics VALUES ('t', ?, 1, 4.0, 100, '2026-11-20')", (SHAPES,))
        second.commit()
    return folder


def make(seed: int, folder: Path) -> list[Path]:
    """A database, sometimes with a journal beside it."""
    rng = Random(seed)
    path = folder / "x.sqlite"
    shutil.copy(base() / rng.choice("33321"), path)
    if rng.random() < 0.7:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            for _ in range(rng.choice((1, 1, 2))):
                with suppress(sqlite3.Error, ValueError):  # a NUL in a statement
                    connection.executescript(statement(rng))
    if rng.random() < 0.4:
        path.write_bytes(damage_bytes(path.read_bytes(), rng))
    if rng.random() < 0.1:
        path.write_bytes(path.read_bytes()[:rng.choice((0, 1, 16, 100, 1000, 4096))])
    files = [path]
    if rng.random() < 0.1:
        files.append(folder / f"x.sqlite-{rng.choice(('journal', 'wal', 'shm'))}")
        files[-1].write_bytes(bytes.fromhex("d9d505f920a163d7") + rng.randbytes(rng.choice((0, 20, 500, 4200))))
    return files


def statement(rng: Random) -> str:
    match rng.randrange(6):
        case 0:
            name = rng.choice(("user_version", "application_id"))
            return f"PRAGMA {name} = {rng.choice((*NUMBERS[:18], APPLICATION))}"
        case 1:
            return _SCHEMA[rng.randrange(len(_SCHEMA))]
        case 2 | 3:
            value = rng.choice((*VALUES, *("'" + text.replace("'", "''") + "'" for text in (*TEXTS, *CANDIDATES))))
            return (f"PRAGMA ignore_check_constraints = ON; UPDATE {rng.choice(TABLES)} SET {rng.choice(COLUMNS)} = "
                    f"{value}")
        case _:
            return rng.choice(STATEMENTS)


def attempt(files: Sequence[Path]) -> str:
    """Read all of it, as the planner does and as a whole, then write to it."""
    found = find_database(files[0])
    if found is None:
        raise FaultError("wrong", "a file that is named is not passed over")
    with found:
        environments = found.environments()
        for environment in environments:
            for subject in "kl":
                best = found.best(environment, subject, SHAPES)
                if best is not None:
                    parse_choice(best.candidate)
                found.measurements(environment, subject, SHAPES)
            found.statistic(environment, "t", SHAPES)
        found.recorded_in()
        found.counts()
        count = len(list(found))
    try:
        with open_database(files[0]) as kept:
            kept.record(HERE, Measurement("new", SHAPES, "a", 1.0))
            kept.record_statistics([Statistic("t", SHAPES, 4.0, 100, HERE)])
            if kept.best(HERE, "new", SHAPES) is None:
                raise FaultError("wrong", "what is recorded is not found")
    except MeasurementError:
        return f"{count} rows, and none more"
    return f"{count} rows"
