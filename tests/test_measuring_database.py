"""The database of measurements: what it keeps, finds, refuses, and how processes share it."""

from __future__ import annotations

import sqlite3
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_models import CHAIN, environment, run, write

from onnxfuse.errors import MeasurementError
from onnxfuse.measuring import database_file
from onnxfuse.measuring.database import (
    DEFAULT,
    RUNTIME,
    Environment,
    Measurement,
    Statistic,
    bucket_of,
    default_path,
    find_database,
    in_memory,
    open_database,
    shapes_text,
)
from onnxfuse.measuring.database_file import APPLICATION

HERE = Environment("NVIDIA H200", "580.65.06", "0.1.0", "1.31.1", "nvrtc-13.0.88")
SHAPES = shapes_text([(8, 128, 768), (768,), ()], [(8, 128, 768)])


def row(candidate: str, microseconds: float, shapes: str = SHAPES, **more: object) -> Measurement:
    return Measurement("k", shapes, candidate, microseconds, **more)  # type: ignore[arg-type]


def test_shapes_and_buckets() -> None:
    assert SHAPES == "8x128x768,768,->8x128x768"
    assert bucket_of(SHAPES) == "8x128x1024,1024,->8x128x1024"
    assert bucket_of("1x0x5,17>3") == "1x0x8,32>4"


def test_what_is_recorded_is_found(tmp_path: Path) -> None:
    with open_database(tmp_path / "folder" / "x.sqlite") as kept:
        written = row("a", 3.5, spread=0.1, runs=24, date="2026-11-20T12:00:00+00:00", note="n")
        kept.record(HERE, written)
        kept.record(HERE, row(DEFAULT, 4.0))
    with find_database(tmp_path / "folder" / "x.sqlite") as found:  # type: ignore[union-attr]
        rows = found.measurements(HERE, "k", SHAPES)
        assert rows["a"] == written and rows[DEFAULT].microseconds == 4.0
        assert rows[DEFAULT].date.endswith("+00:00")
        assert found.environments() == (HERE,)
        assert [(where, entry.candidate) for where, entry in found] == [(HERE, "a"), (HERE, DEFAULT)]


@pytest.mark.parametrize("other", [
    replace(HERE, gpu="NVIDIA H100"), replace(HERE, driver="570"), replace(HERE, onnxfuse="9"),
    replace(HERE, onnxruntime="1.20.0"), replace(HERE, cuda="nvrtc-12.9"),
])
def test_each_part_of_the_environment_counts(other: Environment) -> None:
    with in_memory() as kept:
        kept.record(HERE, row("a", 3.0))
        assert kept.measurements(other, "k", SHAPES) == {} and kept.best(other, "k", SHAPES) is None
        assert kept.best(HERE, "k", SHAPES) is not None


def test_a_measurement_replaces_the_older_one() -> None:
    with in_memory() as kept:
        kept.record(HERE, row("a", 3.0))
        kept.record(HERE, row("a", 2.0))
        assert kept.measurements(HERE, "k", SHAPES)["a"].microseconds == 2.0
        assert len(list(kept)) == 1


def test_the_best_is_right_and_no_runtime() -> None:
    with in_memory() as kept:
        kept.record(HERE, row(RUNTIME, 1.0))
        kept.record(HERE, row("wrong", 1.5, status="wrong"))
        kept.record(HERE, row("broken", 0.0, status="failed"))
        assert kept.best(HERE, "k", SHAPES) is None
        kept.record(HERE, row("a", 3.0))
        kept.record(HERE, row("b", 2.0))
        best = kept.best(HERE, "k", SHAPES)
        assert best is not None and best.candidate == "b"


def test_the_best_of_the_bucket_stands_in() -> None:
    near, far = shapes_text([(5, 700)], [(5, 700)]), shapes_text([(5, 300)], [(5, 300)])
    measured = shapes_text([(8, 1000)], [(8, 1000)])
    with in_memory() as kept:
        kept.record(HERE, row("a", 3.0, measured))
        kept.record(HERE, row("b", 4.0, measured))
        best = kept.best(HERE, "k", near)
        assert best is not None and (best.candidate, best.shapes) == ("a", measured)
        assert kept.best(HERE, "k", far) is None
        kept.record(HERE, row("b", 9.0, near))
        assert kept.best(HERE, "k", near).candidate == "b"  # type: ignore[union-attr]


def test_forgetting() -> None:
    with in_memory() as kept:
        for where in (HERE, replace(HERE, driver="590")):
            for subject in ("k", "l"):
                for shapes in (SHAPES, "1>1"):
                    kept.record(where, replace(row("a", 1.0, shapes), subject=subject))
        assert kept.forget(HERE, "k", SHAPES) == 1
        assert kept.forget(subject="k") == 3
        assert kept.forget(HERE) == 2
        assert kept.forget() == 2
        assert list(kept) == []


def test_statistics_add_up() -> None:
    with in_memory() as kept:
        kept.record_statistics([Statistic("t", SHAPES, 4.0, 100, HERE, "2026-11-19T12:00:00+00:00", "one"),
                                Statistic("u", SHAPES, 1.0, 1, HERE)])
        kept.record_statistics([Statistic("t", SHAPES, 8.0, 300, HERE, "2026-11-20T12:00:00+00:00", "two")])
        found = kept.statistic(HERE, "t", SHAPES)
        assert found == Statistic("t", SHAPES, 7.0, 400, HERE, "2026-11-20T12:00:00+00:00")
        assert kept.statistic(HERE, "t", "1>1") is None
        assert kept.recorded_in() == {HERE} and kept.counts() == (0, 3)


def test_a_later_file_of_a_process_takes_the_place_of_an_earlier_one() -> None:
    """It tells everything since the process began: what it told before must not count twice."""
    with in_memory() as kept:
        for microseconds, calls in ((4.0, 100), (5.0, 300), (5.0, 300)):
            kept.record_statistics([Statistic("t", SHAPES, microseconds, calls, HERE, source="one")])
        found = kept.statistic(HERE, "t", SHAPES)
        assert found is not None and (found.microseconds, found.calls) == (5.0, 300)


@pytest.mark.parametrize(("column", "value"), [
    ("microseconds", "'soon'"), ("microseconds", "-1"), ("calls", "0"), ("calls", "'x'"), ("last_seen", "x'00ff'"),
])
def test_recordings_that_are_none_are_damage(tmp_path: Path, column: str, value: str) -> None:
    path = tmp_path / "x.sqlite"
    with open_database(path) as kept:
        kept.record_statistics([Statistic("t", SHAPES, 4.0, 100, HERE)])
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE recordings SET {column} = {value}")
    connection.close()
    with open_database(path) as kept, pytest.raises(MeasurementError, match="is damaged: a row of recordings"):
        kept.statistic(HERE, "t", SHAPES)


def test_statistics_of_an_older_version_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    with monkeypatch.context() as second:
        second.setattr(database_file, "_SCHEMA", database_file._SCHEMA[:2])
        with open_database(path) as kept:
            kept.record(HERE, row("a", 1.0))
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO statistics VALUES ('t', ?, 1, 4.0, 100, '2026-11-20')", (SHAPES,))
    connection.close()
    for opened in (find_database, open_database):
        with opened(path) as kept:  # type: ignore[union-attr]
            found = kept.statistic(HERE, "t", SHAPES)
            assert found is not None and (found.microseconds, found.calls) == (4.0, 100)


def test_where_the_default_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ONNXFUSE_DATABASE", raising=False)
    monkeypatch.setenv("ONNXFUSE_CACHE_DIR", str(tmp_path))
    assert default_path() == tmp_path / "measurements.sqlite"
    assert find_database() is None
    monkeypatch.setenv("ONNXFUSE_DATABASE", str(tmp_path / "mine"))
    assert default_path() == tmp_path / "mine"
    for variable in ("ONNXFUSE_DATABASE", "ONNXFUSE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert default_path() is None and find_database() is None
    with open_database() as kept:
        assert kept.name == "memory"


def test_a_default_that_cannot_be_written_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.sqlite"
    monkeypatch.setenv("ONNXFUSE_DATABASE", str(path))
    with pytest.warns(RuntimeWarning) as warned, open_database() as kept:
        assert kept.name == "memory"
        kept.record(HERE, row("a", 1.0))
    assert str(warned[0].message) == (
        f"the database of measurements {path} cannot be written (File exists); what is measured is not kept; set "
        "ONNXFUSE_DATABASE to a file that can be written")
    assert len(warned) == 1


def test_a_named_file_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeasurementError) as error:
        open_database(tmp_path / "file" / "x.sqlite")
    assert str(error.value) == (
        f"The database of measurements cannot be written: File exists.\n--> {tmp_path}/file/x.sqlite\n"
        "help: Name a file in a folder that you may write to: database=\"FILE\".")
    with pytest.raises(MeasurementError) as error:
        find_database(tmp_path / "none")
    assert str(error.value) == (
        f"The database of measurements cannot be read: No such file or directory.\n--> {tmp_path}/none\n"
        "help: `onnxfuse tune MODEL --database FILE` makes one.")


def test_a_damaged_file_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    for opened in (open_database, find_database):
        with pytest.raises(MeasurementError) as error:
            opened(path)
        assert str(error.value) == (
            f"The database of measurements is damaged: file is not a database.\n--> {path}\n"
            "help: Delete it (`onnxfuse tune` measures again what it held), or name another: database=\"FILE\".")


def test_a_page_that_is_damaged_is_the_same_error(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with open_database(path) as kept:
        for number in range(500):
            kept.record(HERE, row(f"candidate {number}", 1.0))
    raw = bytearray(path.read_bytes())
    raw[4096 * 2:] = b"\xff" * (len(raw) - 4096 * 2)
    path.write_bytes(raw)
    with pytest.raises(MeasurementError, match="The database of measurements is damaged: "):
        list(open_database(path))


def test_the_command_shows_the_error_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"x" * 5000)
    result = run("optimize", write(tmp_path, CHAIN), "--dry-run", "--database", path)
    assert result.exit_code == 1
    assert result.output == (
        f"error: The database of measurements is damaged: file is not a database.\n--> {path}\n"
        "help: Delete it (`onnxfuse tune` measures again what it held), or name another: --database FILE.\n")


def test_other_databases_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE mine (a)")
    before = path.read_bytes()
    with pytest.raises(MeasurementError) as error:
        open_database(path)
    assert str(error.value) == (
        f"The file is a database, and none of onnxfuse's measurements.\n--> {path}\n"
        "help: Name another file: database=\"FILE\".")
    assert path.read_bytes() == before


def test_a_later_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute("PRAGMA user_version = 9")
    with pytest.raises(MeasurementError) as error:
        find_database(path)
    assert str(error.value) == (
        f"The database of measurements has version 9; this release reads up to 3.\n--> {path}\n"
        "help: Update onnxfuse, or name another file: database=\"FILE\".")


def older(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the first version with a measurement."""
    with monkeypatch.context() as first:
        first.setattr(database_file, "_SCHEMA", database_file._SCHEMA[:1])
        with open_database(path) as kept:
            kept.record(HERE, row("a", 1.0))


def test_an_older_version_is_brought_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    older(path, monkeypatch)
    with open_database(path) as kept:
        assert kept.best(HERE, "k", SHAPES) is not None
        kept.record_statistics([Statistic("t", SHAPES, 4.0, 100, HERE)])
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)


def test_reading_an_older_version_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    older(path, monkeypatch)
    before = path.read_bytes()
    with find_database(path) as found:  # type: ignore[union-attr]
        assert found.best(HERE, "k", SHAPES) is not None
        assert found.statistic(HERE, "t", SHAPES) is None
    assert path.read_bytes() == before


WRITER = """
import sys
from onnxfuse.measuring.database import Environment, Measurement, open_database
from pathlib import Path
where = Environment("g", "d", "o", "r", "c")
with open_database(Path(sys.argv[1])) as kept:
    for number in range(40):
        kept.record(where, Measurement(sys.argv[2], "1>1", str(number), 1.0))
"""


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], env=environment())
               for name in ("a", "b")]
    assert [process.wait() for process in running] == [0, 0]
    with open_database(path) as kept:
        assert len(list(kept)) == 80 and len(kept.environments()) == 1


def test_a_write_is_whole_or_nothing() -> None:
    with in_memory() as kept:
        good, bad = Statistic("t", SHAPES, 4.0, 100, HERE), Statistic("t", SHAPES, None, 1, HERE)  # type: ignore[arg-type]
        with pytest.raises(MeasurementError):
            kept.record_statistics([good, bad])
        assert kept.statistic(HERE, "t", SHAPES) is None
        kept.record_statistics([good])
        assert kept.statistic(HERE, "t", SHAPES) is not None


CREATORS = """
import multiprocessing, sys
from pathlib import Path
from onnxfuse.measuring.database import Environment, Measurement, find_database, open_database

def work(number, barrier, rounds):
    where = Environment("g", "d", "o", "r", "c")
    for turn in range(rounds):
        path = Path(sys.argv[1]) / str(turn)
        barrier.wait(60)
        with open_database(path) as kept:
            kept.record(where, Measurement(str(number), "1>1", "a", 1.0))
        with find_database(path) as found:
            assert found.best(where, str(number), "1>1") is not None

context = multiprocessing.get_context("fork")
barrier = context.Barrier(8)
workers = [context.Process(target=work, args=(number, barrier, int(sys.argv[2]))) for number in range(8)]
for worker in workers:
    worker.start()
for worker in workers:
    worker.join()
sys.exit(any(worker.exitcode for worker in workers))
"""


def test_eight_processes_make_one_database(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """What another process has just half made is no stranger's database."""
    rounds = int(pytestconfig.getoption("--creations"))
    done = subprocess.run([sys.executable, "-c", CREATORS, str(tmp_path), str(rounds)], env=environment(),
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for turn in range(rounds):
        with open_database(tmp_path / str(turn)) as kept:
            assert len(list(kept)) == 8 and len(kept.environments()) == 1


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x FROM c"


@pytest.mark.parametrize("statement", [
    f"CREATE VIEW v AS {ENDLESS}",
    "CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM environments; END",
    "CREATE TABLE more (a)",
    "DROP TABLE recordings",
    "DROP INDEX by_bucket",
    "CREATE INDEX i ON measurements (abs(microseconds))",
    "ALTER TABLE measurements ADD COLUMN g AS (hex(zeroblob(1000000)))",
    f"ALTER TABLE environments RENAME TO e; CREATE VIEW environments AS {ENDLESS}",
    "PRAGMA user_version = 1",
    "PRAGMA user_version = -1",
])
def test_tables_that_are_not_its_own_are_refused(tmp_path: Path, statement: str) -> None:
    """Nothing that a file defines runs: no view, trigger, or expression."""
    path = tmp_path / "x.sqlite"
    open_database(path).close()
    with sqlite3.connect(path) as connection:
        connection.executescript(statement)
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    for opened in (open_database, find_database):
        with pytest.raises(MeasurementError) as error:
            opened(path)
        assert str(error.value).splitlines()[:2] == [
            f"The database of measurements is damaged: its tables are not those of version {version}.", f"--> {path}"]


@pytest.mark.parametrize(("column", "value"), [
    ("microseconds", "'soon'"), ("microseconds", "-1"), ("microseconds", "1e999"), ("runs", "'x'"), ("date", "x'00ff'"),
    ("note", "zeroblob(2000000)"), ("note", "5"),
])
def test_rows_that_are_none_are_damage(tmp_path: Path, column: str, value: str) -> None:
    path = tmp_path / "x.sqlite"
    with open_database(path) as kept:
        kept.record(HERE, row("a", 1.0))
    with sqlite3.connect(path) as connection:
        connection.execute(f"UPDATE measurements SET {column} = {value}")
    connection.close()
    with open_database(path) as kept:
        if value == "5":  # SQLite makes text of it
            assert kept.best(HERE, "k", SHAPES) is not None
            return
        with pytest.raises(MeasurementError, match="The database of measurements is damaged: "):
            kept.best(HERE, "k", SHAPES)


def test_text_that_is_no_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with open_database(path) as kept:
        kept.record(HERE, row("a", 1.0))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE environments SET driver = CAST(x'fffe' AS TEXT)")
    connection.close()
    with open_database(path) as kept:
        assert kept.environments()[0].driver == "\ufffd\ufffd"


def test_a_query_ends_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_file, "QUERY_SECONDS", 0.1)
    with in_memory() as kept, pytest.raises(MeasurementError, match="cannot be used: interrupted"):
        kept._rows(f"SELECT max(x) FROM ({ENDLESS})", ())


KILLED = """
import os, signal, sys
from pathlib import Path
from onnxfuse.measuring.database import open_database
connection = open_database(Path(sys.argv[1]))._connection
connection.execute("PRAGMA cache_size = 1")
connection.execute("BEGIN IMMEDIATE")
for number in range(1000):
    connection.execute("INSERT INTO measurements VALUES (?, 1, 1, 1, 1, 'ok', 1, 0, 1, 1, 1)", (f"{number:200}",))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_began_is_taken_back_by_who_reads(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with open_database(path) as kept:
        kept.record(HERE, row("a", 1.0))
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=environment(), check=False)
    assert done.returncode == -9 and (tmp_path / "x.sqlite-journal").stat().st_size
    with find_database(path) as found:  # type: ignore[union-attr]
        assert [entry.candidate for _, entry in found] == ["a"]


def test_a_journal_that_names_other_files_is_not_followed(tmp_path: Path) -> None:
    path, victim = tmp_path / "x.sqlite", tmp_path / "victim"
    open_database(path).close()
    victim.write_text("mine")
    name = str(victim).encode()
    check = sum(name) & 0xFFFFFFFF
    page = len(path.read_bytes()) // 4096
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">IIIII", 0, 7, page, 512, 4096)
    trailer = struct.pack(">I", 1 + 0x40000000 // 4096) + name + struct.pack(">II", len(name), check)
    (tmp_path / "x.sqlite-journal").write_bytes(header.ljust(512, b"\0") + trailer + bytes.fromhex("d9d505f920a163d7"))
    for opened in (open_database, find_database):
        with pytest.raises(MeasurementError, match="the journal beside it is of other files too"):
            opened(path)
    assert victim.read_text() == "mine"
