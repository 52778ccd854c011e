"""Marks and profiles that all tests share."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Each processor has tests of its own: numpy's threads would only wait for one another, and burn time as they do.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Kernels compiled for the CPU stay from one run to the next, whatever folders tests have the rest kept in.
os.environ.setdefault("ONNXFUSE_EMULATOR_CACHE", f"{tempfile.gettempdir()}/onnxfuse-emulator-{os.getuid()}")

# Arrays come and go by the thousand: memory that goes back to the system with each is cleared again for the next.
if hasattr(libc := ctypes.CDLL(None), "mallopt"):
    for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc
        libc.mallopt(parameter, 256 << 20)

ROOM = 8 << 30
"""Bytes in memory that what tests write must have: four times what they do, of which one run's is kept."""


def _memory_for_files() -> str | None:
    """A folder in memory with room for what tests write, from which programs and libraries run; None where none is."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        return None
    there = os.statvfs(memory)
    return None if there.f_flag & os.ST_NOEXEC or there.f_bavail * there.f_frsize < ROOM else str(memory)


# What is tested syncs what it writes, and a transaction of a database waits three times for a disk.  No test sees it.
if "PYTEST_XDIST_WORKER" not in os.environ and (memory := _memory_for_files()) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", memory)

# The same examples every time; the search for what a failure has in common (Phase.explain) costs more than it tells.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
settings.register_profile("explore", deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
settings.register_profile("first", parent=settings.get_profile("explore"), phases=[Phase.generate])
settings.load_profile(os.environ.get("ONNXFUSE_HYPOTHESIS", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")
    parser.addoption("--graphs", type=int, default=60, help="random models of test_random_graphs.py; 60 by default")
    parser.addoption("--schema-graphs", type=int, default=300,
                     help="random models of test_schema_graphs.py; 300 by default")
    parser.addoption("--seed", type=int, default=0, help="seed of the first random model; 0 by default")
    parser.addoption("--every", type=int, default=20, help="one of so many of the standard's test cases; 20 by default")
    parser.addoption("--insertions", type=int, default=9,
                     help="models of test_insertions.py with nodes that do nothing; 9 by default")
    parser.addoption("--kills", type=int, default=20, help="writers killed at random in test_save_kills.py; 20")
    parser.addoption("--creations", type=int, default=10,
                     help="databases that eight processes make at once in test_measuring_database.py; 10 by default")
    parser.addoption("--races", type=int, default=20, help="pairs of saves to one place there; 20 by default")
    parser.addoption("--fuzz-seconds", type=float, default=4,
                     help="damaged files of each kind in test_fuzz.py; 4 s of them by default")
    parser.addoption("--orders", type=int, default=2, help="orders of nodes in test_node_order.py; 2 by default")


@pytest.fixture
def orders(pytestconfig: pytest.Config) -> int:
    """In how many ways a model is written down."""
    return int(pytestconfig.getoption("--orders"))


@pytest.fixture
def seeds(pytestconfig: pytest.Config) -> Callable[[int], range]:
    """Those of random models of a kind: as many as are asked for where that is more than by default, else a few."""
    first, count = (int(pytestconfig.getoption(name)) for name in ("--seed", "--graphs"))
    return lambda few: range(first, first + (count if count > 100 else few))


@pytest.fixture(scope="module")
def few_ways() -> Iterator[None]:
    """Tuning tries a kernel as its schedule would run it and in one other way: for tests of what follows from times."""
    from onnxfuse.tuning.subjects import Subject  # here, so that the process that only hands tests out need not

    every = Subject.candidates.func
    few = functools.cached_property(lambda subject: dict(islice(every(subject).items(), 2)))
    few.__set_name__(Subject, "candidates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Subject, "candidates", few)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Of ``--dist loadgroup``, one that forgets what is done: pytest-xdist's counts all groups that a worker ever had
    after each test, which for ten thousand tests takes a processor 15 s."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Forgetful(LoadGroupScheduling):  # type: ignore[misc]
        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            group = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][group].values()):
                del self.assigned_work[node][group]

    return Forgetful(config, log)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than ten seconds; run with --slow")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _one_thread_a_session()


def _one_thread_a_session() -> None:
    """Sessions run in the thread that calls them, where a test does not say otherwise: the threads of their pools would
    spin, waiting for the next small node, on processors that other tests need."""
    import onnxruntime  # here, so that the process that only hands tests out need not

    created = onnxruntime.InferenceSession.__init__

    @functools.wraps(created)
    def create(session: Any, model: Any, sess_options: Any = None, *rest: Any, **more: Any) -> None:
        options = sess_options or onnxruntime.SessionOptions()
        if options.intra_op_num_threads == 0:
            options.intra_op_num_threads = 1
        created(session, model, options, *rest, **more)

    onnxruntime.InferenceSession.__init__ = create


def pytest_collection_finish() -> None:
    """What all tests need is no garbage, and looking through it again and again was a twelfth of all that they take.
    What is new is looked through as seldom as while a model is planned (``onnxfuse.collecting``)."""
    from onnxfuse.collecting import MIDDLE, OLD, YOUNG

    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # for all, what measures would undo it (``onnxfuse.tuning.timer.held``)
    gc.set_threshold(YOUNG, MIDDLE, OLD)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
