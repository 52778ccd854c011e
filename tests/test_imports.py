"""Imports run one way, from a stage to those before it, and a deployment needs little."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from cli_models import ROOT, environment
from parsed import GROUP, nodes, parsed

PACKAGE = ROOT / "onnxfuse"

GROUND = {"bounded", "cuda_options", "errors", "files", "processors", "refusal", "resources", "typed", "unforeseen",
          "varint", "version", "visible", "wording"}
"""What any folder may import."""

ALLOWED: dict[str, set[str]] = {
    "graph": set(),
    "ir": {"graph"},
    "operators": {"graph", "ir"},
    "provider": {"graph", "operators"},
    "folding": {"graph", "operators", "provider"},
    "rules": {"graph", "operators", "provider"},
    "lowering": {"graph", "ir", "operators"},
    "schedules": {"graph", "ir", "lowering"},
    "region": {"graph", "lowering", "schedules"},
    "rewriting": {"graph", "operators", "provider", "folding", "lowering", "region"},
    "planning": {"graph", "ir", "operators", "provider", "rules", "lowering", "schedules", "region"},
    "runtime": set(),
    "measuring": {"operators", "graph", "runtime"},
    "verifying": {"ir", "operators", "provider", "graph", "lowering", "rewriting", "planning", "runtime", "measuring"},
    "doctor": {"measuring", "runtime"},
    "debugging": {"operators", "graph", "lowering", "planning", "rewriting", "measuring", "verifying"},
    "presence": {"planning", "runtime"},
    "measurements": {"graph", "measuring", "planning", "region", "runtime", "schedules"},
    "compiling": {"lowering", "planning", "runtime", "schedules"},
    "optimised": {"graph", "planning", "region", "rewriting", "rules", "verifying"},
    "comparing": {"delivery", "provider", "rewriting", "runtime", "verifying"},
    "forms": {"folding", "graph", "measurements", "operators", "planning", "provider", "rewriting", "rules"},
    "embedding": {"compiling", "optimised", "region", "runtime"},
    "delivery": {"graph", "optimised", "provider", "verifying"},
    "collecting": set(),
    "pipeline": {
        "graph", "folding", "forms", "provider", "rules", "planning", "schedules", "region", "rewriting", "runtime",
        "verifying", "presence", "measurements", "collecting", "compiling", "optimised", "embedding", "delivery",
    },
    "tuning": {
        "graph", "operators", "folding", "lowering", "region", "rewriting", "planning", "schedules", "runtime",
        "measuring", "verifying", "presence", "measurements", "compiling", "optimised", "pipeline",
    },
    "triton": {"graph", "operators", "rewriting", "runtime", "verifying"},
    "given": {"measurements", "planning"},
    "scheduler": {"given", "graph", "planning", "pipeline"},
    "reporting": {"operators", "graph", "provider", "rules", "planning", "lowering", "region", "rewriting",
                  "runtime", "optimised", "pipeline", "measuring", "tuning"},
    "locking": {"graph", "operators", "optimised", "planning", "provider", "reporting", "rules", "verifying"},
    "emulator": {"lowering", "runtime", "schedules"},
    "checking": {
        "operators", "provider", "graph", "rules", "planning", "lowering", "region", "rewriting", "measuring",
        "verifying", "pipeline", "runtime", "compiling", "emulator",
    },
    "result": {"locking", "optimised", "reporting", "rewriting"},
    "api": {"comparing", "given", "graph", "locking", "measuring", "planning", "rewriting", "measurements", "optimised",
            "pipeline", "reporting", "result", "tuning", "verifying"},
    "olive": {"api", "pipeline"},
    "cli": {"api", "checking", "debugging", "doctor", "reporting", "graph", "rules", "planning", "rewriting", "runtime",
            "measuring", "tuning", "triton"},
}
"""What each folder, and each module beside them, imports of the others, in the order of the data."""


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


@cache
def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, for the type checker alone or not."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            found.update(f"{node.module}.{alias.name}" for alias in node.names
                         if (PACKAGE.parent / Path(*(node.module or "").split("."))).is_dir())
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(parsed(path))
    return {name for name in found if name.split(".")[0] == "onnxfuse"}


def home(module: str) -> str:
    """The folder or lone module of the package that a dotted name belongs to."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_every_folder_has_its_place() -> None:
    places = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in modules()}
    assert places - {"__init__", "__main__"} == ALLOWED.keys() | GROUND


def test_the_order_has_no_cycle() -> None:
    done: list[str] = []
    rest = dict(ALLOWED)
    while rest:
        free = [name for name, needs in rest.items() if needs <= set(done)]
        assert free, f"a cycle among {sorted(rest)}"
        done += free
        rest = {name: needs for name, needs in rest.items() if name not in free}


@GROUP
@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ("__init__", "__main__"):
        return
    for module in imported(path):
        other = home(module)
        if other in ("", own) or other in GROUND:
            continue
        assert other in ALLOWED.get(own, set()), f"{own} imports {module}"


@GROUP
def test_no_modules_import_each_other() -> None:
    """Not by way of others either, nor for the type checker alone; that a folder imports what is in it is no matter."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
             for path in modules()}
    needs = {name: {other for other in imported(path) if other in names.values() and not name.startswith(other)}
             for path, name in names.items()}
    while free := [name for name, others in needs.items() if not others]:
        needs = {name: others.difference(free) for name, others in needs.items() if name not in free}
    assert needs == {}


@GROUP
def test_planning_makes_kernels_in_one_place() -> None:
    """Where they are known from then on (``planning.known``)."""
    makers = {f"onnxfuse.schedules.{name}" for name in ("asked", "make_kernel")}
    found = {path.name for path in (PACKAGE / "planning").rglob("*.py") if imported(path) & makers}
    assert found == {"known.py"}


@GROUP
def test_cupy_is_imported_in_one_place() -> None:
    """Threads that begin with different modules of it break it (``runtime.importing``)."""
    line = re.compile(r"^.*\b(?:import|from) cupy\b.*$", re.MULTILINE)
    found = {str(path.relative_to(PACKAGE)): line.findall(path.read_text()) for path in modules()}
    own = found.pop("runtime/importing.py")
    assert own == ["            import cupy"]
    assert {line for lines in found.values() for line in lines} == {"    import cupy"}
    assert all("if TYPE_CHECKING:\n    import cupy\n" in (PACKAGE / name).read_text() and len(lines) == 1
               for name, lines in found.items() if lines)


def loaded(script: str) -> set[str]:
    """Top-level modules, and folders of the package, that a script leaves loaded in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"{script}\nimport sys\nprint(*sys.modules)"], env=environment(), text=True,
        capture_output=True, check=True,
    )
    names = done.stdout.splitlines()[-1].split()
    return {name.split(".")[0] for name in names} | {name for name in names if name.count(".") == 1}


HEAVY = {"numpy", "onnx", "onnxruntime", "onnx_graphsurgeon", "cupy", "pydantic", "lark", "yaml", "rich", "jinja2",
         "matplotlib"}


def test_import_of_the_package_is_light() -> None:
    assert not loaded("import onnxfuse; onnxfuse.__version__") & HEAVY


def test_deployment_needs_the_runtime_alone() -> None:
    """What ``register`` and ``session`` load may not grow a compiler of rules."""
    found = loaded("import onnxfuse; onnxfuse.register, onnxfuse.session, onnxfuse.library_path")
    assert not found & HEAVY
    assert {name for name in found if name.startswith("onnxfuse.")} == {
        "onnxfuse.cuda_options", "onnxfuse.errors", "onnxfuse.files", "onnxfuse.processors", "onnxfuse.runtime",
        "onnxfuse.visible", "onnxfuse.wording"}


def test_help_is_light() -> None:
    script = "from onnxfuse.cli import main\ntry:\n    main(['optimize', '--help'])\nexcept SystemExit: pass"
    assert not loaded(script) & HEAVY


def test_a_report_in_words_draws_nothing() -> None:
    assert "matplotlib" not in loaded("import onnxfuse.cli, onnxfuse.api, onnxfuse.reporting.report_text")


SCRIPTS = sorted(path for folder in ("benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py"))


@GROUP
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_scripts_import_is_there(path: Path) -> None:
    """What needs a GPU, or takes long, no test runs: it must not go stale unseen."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "onnxfuse":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                found = hasattr(module, alias.name) or (
                    hasattr(module, "__path__") and importlib.util.find_spec(f"{node.module}.{alias.name}"))
                assert found, f"{node.module} has no {alias.name}"
