"""What names in files can do to a terminal: nothing."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from cli_models import CHAIN, environment, parse, run
from rich.table import Table
from run_statistics_files import document, node_of, run_of, write_document

from onnxfuse.cli.output import Guard, json_text
from onnxfuse.cli.terminal import GuardedConsole
from onnxfuse.errors import ModelError, Place, RuleError
from onnxfuse.measuring.database import Environment, Measurement, open_database
from onnxfuse.rewriting import read_fused
from onnxfuse.visible import visible, visible_lines

EVIL = (
    "\x1b]0;title\x07\x1b[2J\x1b]8;;http://evil.example\x1b\\link\x1b]8;;\x1b\\\x9b31m\x00\x7f\u202eright-to-left\u2066"
    "\u200b\u2028\n--> forged: line\r\t[red]mark[/] [/] :warning: \\"
)
"""A name with a title, a cleared screen, a link, C0 and C1 controls, bidirectional overrides, lines, rich's marks."""

COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def assert_harmless(text: str) -> None:
    """Nothing that steers a terminal but colours, and no line that a name began."""
    rest = COLOURS.sub("", text)
    assert [letter for letter in set(rest) - {"\n"} if not letter.isprintable()] == []
    assert not re.search(r"^\s*--> forged", rest, re.MULTILINE)


def evil_model(folder: Path, kind: str) -> Path:
    """The chain of pointwise nodes, whose every name is hostile; with an operator of its own, or with a fault."""
    model = parse(CHAIN)
    names = {"": ""}

    def renamed(name: str) -> str:
        return names.setdefault(name, f"{name}{EVIL}")

    graph = model.graph
    for node in graph.node:
        node.name, node.doc_string = renamed(f"node_{node.output[0]}"), EVIL
        node.input[:] = [renamed(name) for name in node.input]
        node.output[:] = [renamed(name) for name in node.output]
    for value in (*graph.input, *graph.output):
        value.name, value.doc_string = renamed(value.name), EVIL
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = renamed(size.dim_param)
    if kind == "own":
        own, last = renamed("own"), renamed("last")
        graph.node.extend([onnx.helper.make_node(own, [renamed("y")], [own], own, domain=own),
                           onnx.helper.make_node("Exp", [own], [last], last)])
        graph.output.append(onnx.helper.make_tensor_value_info(last, 1, None))
        model.opset_import.add(domain=own, version=1)
    if kind == "broken":
        graph.node[1].input[0] = renamed("missing")
    model.producer_name, model.doc_string, graph.name = EVIL, EVIL, renamed("graph")
    path = folder / f"{kind}\x1b]0;t\x07\u202e\n--> forged.onnx"
    onnx.save(model, path)
    return path


RULE = '''
id: evil
kind: fuse
summary: "a\\e]0;t\\a\\u202e\\n--> forged"
why: "w\\e[2J"
pattern: |
  s = x + bias
  y = Relu(s)
where:
  - {test: rank(bias) == 7, message: "m\\e]0;t\\a\\u202e\\n--> forged", remedy: "r\\e[2J\\n--> forged"}
examples:
  - name: "e\\e]0;t\\a\\u202e\\n--> forged"
    expect: matched
    model: |
      g (float[4, 8] x, float[8] bias) => (float[4, 8] y) { s = Add(x, bias) y = Relu(s) }
'''

PROFILE = '''
name: "evil\\e]0;t\\a\\u202e\\n--> forged"
aliases: ["a\\e[2J"]
architecture: sm_90
memory_gb: 80
bandwidth_gb_s: 3000
peaks: {float32: 60, float16_matrix: 900}
multiprocessors: 132
shared_kb: 228
block_shared_kb: 227
l2_mb: 50
planning_only: true
note: "n\\e[2J\\u202e"
'''


@dataclass
class Files:
    """A folder of hostile files."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        """The model of a kind, or the folder of rules."""
        return next(path for path in self.folder.iterdir() if path.name.startswith(f"{name}\x1b"))

    @property
    def statistics(self) -> Path:
        return self.folder / "statistics.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Models, their fused form, rules, a hardware profile, statistics, inputs and a database."""
    folder = tmp_path_factory.mktemp("evil")
    for kind in ("plain", "own", "broken"):
        evil_model(folder, kind)
    rules = folder / "rules\x1b[2J\n--> forged"
    (rules / "hardware").mkdir(parents=True)
    (rules / "evil\x1b[2J.yaml").write_text(RULE)
    (rules / "hardware" / "evil.yaml").write_text(PROFILE)
    (folder / "wrong\x1b[2J.yaml").write_text(RULE.replace("pattern:", '"pat\\e[2J\\n--> forged":'))
    files = Files(folder)
    fused = folder / "fused\x1b[2J\n--> forged.onnx"
    assert run("optimize", files.plain, "-o", fused, "-q").exit_code == 0
    lock = folder / "lock\x1b[2J\n--> forged.yaml"
    assert run("optimize", files.own, "--dry-run", "--no-verify", "-q", "--lock", lock).exit_code == 0
    (node,) = read_fused(onnx.load(fused))
    recorded = node_of(node, run_of([[2, 4096], [4096]], [[2, 4096]], 3, 7), op=EVIL, region=EVIL)
    write_document(files.statistics, document(recorded, gpu=EVIL, notes=[EVIL]))
    np.savez(folder / "inputs.npz", **{f"x{EVIL}".replace("\0", ""): np.ones((2, 3), np.float32)})
    with open_database(folder / "database") as kept:
        where = Environment(f"H100{EVIL}", *[EVIL] * 4)
        kept.record(where, Measurement(EVIL, EVIL, EVIL, 1.0, note=EVIL))
    return files


EVIL_WORD = EVIL.replace("\0", "")

COMMANDS: dict[str, Callable[[Files], list[object]]] = {
    "optimize": lambda f: ["optimize", f.plain, "-o", f.folder / "out\x1b[2J.onnx", "--explain", "--rules", f.rules],
    "optimize for a profile": lambda f: [
        "optimize", f.own, "--dry-run", "--no-verify", "--target", f.rules / "hardware" / "evil.yaml"],
    "optimize to data": lambda f: ["optimize", f.own, "--dry-run", "--no-verify", "--json", "--rules", f.rules],
    "optimize what the runtime refuses": lambda f: ["optimize", f.own],
    "optimize what is broken": lambda f: ["optimize", f.broken],
    "optimize with a broken rule": lambda f: ["optimize", f.plain, "--rules", f.wrong],
    "optimize with a broken profile": lambda f: ["optimize", f.plain, "--target", f.wrong],
    "optimize without a rule": lambda f: ["optimize", f.plain, "--disable", EVIL_WORD],
    "optimize with a dimension": lambda f: ["optimize", f.plain, "--dim", f"{EVIL_WORD}=3"],
    "optimize to a wrong folder": lambda f: ["optimize", f.plain, "-o", f.folder / "no\x1b[2J\n--> forged" / "o.onnx"],
    "optimize with inputs": lambda f: ["optimize", f.plain, "--inputs", f.folder / "inputs.npz", "--dry-run"],
    "optimize with measurements": lambda f: [
        "optimize", f.plain, "--dry-run", "--no-verify", "--database", f.folder / "database"],
    "optimize with a lock": lambda f: [
        "optimize", f.own, "--dry-run", "--no-verify", "--lock", f.folder / "again\x1b[2J\n--> forged.yaml"],
    "check": lambda f: ["check", f.plain, "--lock", f.lock],
    "check as data": lambda f: ["check", f.plain, "--lock", f.lock, "--json"],
    "check what is broken": lambda f: ["check", f.plain, "--lock", f.wrong],
    "report": lambda f: ["report", f.plain, "--explain", "--rules", f.rules, "--html", f.folder / "page.html"],
    "report what is fused": lambda f: ["report", f.fused],
    "report a run": lambda f: ["report", f.fused, "--profile", f.statistics],
    "report a run and learn": lambda f: [
        "report", f.fused, "--profile", f.statistics, "--learn", "--database", f.folder / "learned\x1b[2J"],
    "report a run as data": lambda f: ["report", f.fused, "--profile", f.statistics, "--json"],
    "explain": lambda f: ["explain", f.own, "--rules", f.rules],
    "explain a node": lambda f: ["explain", f.own, onnx.load(f.own).graph.node[1].output[0].replace("\0", "")],
    "explain what is fused": lambda f: ["explain", f.fused, "--json"],
    "rules list": lambda f: ["rules", "list", "--rules", f.rules],
    "rules list as data": lambda f: ["rules", "list", "--rules", f.rules, "--json"],
    "rules show": lambda f: ["rules", "show", "evil", "--rules", f.rules],
    "rules check": lambda f: ["rules", "check", f.rules],
    "rules check as data": lambda f: ["rules", "check", f.rules, "--json"],
    "rules check what is broken": lambda f: ["rules", "check", f.wrong],
    "targets": lambda f: ["targets", "--rules", f.rules],
    "targets as data": lambda f: ["targets", "--rules", f.rules, "--json"],
    "unfuse": lambda f: ["unfuse", f.fused, "-o", f.folder / "un\x1b[2J\n--> forged.onnx"],
    "unfuse one": lambda f: ["unfuse", f.fused, "-o", f.folder / "one.onnx", "--only", EVIL_WORD],
    "export to Triton": lambda f: ["export-triton", f.fused, "--name", "m", "-o", f.folder / "re\x1b[2J\n--> forged",
                                   "--server-path", EVIL_WORD],
    "export to Triton under a wrong name": lambda f: ["export-triton", f.fused, "--name", EVIL_WORD, "-o", f.folder],
    "bench": lambda f: ["bench", f.plain, f.fused],
    "tune": lambda f: ["tune", f.plain],
    "bisect": lambda f: ["bisect", f.plain, f.fused],
    "bisect another model": lambda f: ["bisect", f.own, f.fused],
    "verify": lambda f: ["verify", f.plain, f.fused],
    "verify the file alone": lambda f: ["verify", f.fused],
    "verify another model": lambda f: ["verify", f.own, f.fused],
    "verify with inputs": lambda f: ["verify", f.plain, f.fused, "--inputs", f.folder],
    "wrong usage": lambda f: ["optimize", f.plain, f.plain, "--nothing\x1b[2J\n--> forged"],
    "wrong usage of all": lambda f: ["--nothing\x1b[2J\n--> forged"],
    "no command": lambda f: ["evil\x1b[2J\n--> forged"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_names_do_not_steer_the_terminal(files: Files, name: str) -> None:
    result = run(*COMMANDS[name](files), ONNXFUSE_DEBUG="1" if "broken" in name else "")
    assert "This is a fault of onnxfuse" not in result.output
    print(result.exit_code, result.output)
    assert_harmless(result.output)
    if "data" in name:
        json.loads(result.stdout)


def test_nothing_reaches_the_terminal_past_python(files: Files, tmp_path: Path) -> None:
    """What ONNX Runtime itself writes, and the line of progress: all that a terminal gets in a process of its own."""
    evil_model(tmp_path, "plain")
    model = next(tmp_path.iterdir())
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "onnxfuse", "optimize", str(model), "-o", str(tmp_path / "out\x1b[2J\udcff.onnx"),
         "--rules", str(files.rules)],
        stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, cwd=tmp_path,
        env={**environment(), "TERM": "xterm", "NO_COLOR": ""},
    )
    os.close(follower)
    seen = b""
    with contextlib.suppress(OSError):  # a closed terminal
        while part := os.read(leader, 65536):
            seen += part
    os.close(leader)
    assert process.wait() == 0
    text = seen.decode()  # UTF-8 throughout
    assert "written: " in COLOURS.sub("", text) and "\x1b[1m" in text
    assert_harmless(re.sub(r"\x1b\[\?25[lh]|\x1b\[2K|\x1b\[1A|\r", "", text))


def test_what_hides_is_shown() -> None:
    assert visible("plain é 模 1×2 µs") == "plain é 模 1×2 µs"
    assert visible("a\x1b[2J\n\r\t\x9b\u202e\u200b\udcff\U000e0041") == (
        "a\\x1b[2J\\n\\r\\t\\x9b\\u202e\\u200b\\udcff\\U000e0041")
    assert visible_lines("a\n\tb\x07\n") == "a\n\tb\\x07\n"
    assert visible(visible(EVIL)) == visible(EVIL)


def test_errors_show_names_and_marks_stand_under_them() -> None:
    error = RuleError("No\nyes.", place=Place("f\x1b.yaml", 3, 3, "a\x1bb\x07c", 2), remedy="h\u202e")
    assert str(error) == (
        "No\\nyes.\n--> f\\x1b.yaml:3:3\n  |\n3 | a\\x1bb\\x07c\n  |      ^^^^^\nhelp: h\\u202e")
    assert len(str(ModelError("x" * 1_000_000))) < 21_000


def test_a_guarded_stream() -> None:
    below = io.StringIO()
    guard = Guard(below)
    guard.writelines(["a\x1b\n", "\u202e"])
    assert below.getvalue() == "a\\x1b\n\\u202e"
    assert not hasattr(Guard(sys.__stdout__), "buffer")  # click writes bytes to it where the encoding is ASCII


def test_a_console_makes_no_links_and_columns_stay_in_line() -> None:
    below = io.StringIO()
    console = GuardedConsole(file=below, force_terminal=True, width=80, highlight=False, emoji=False)
    console.print("[link=http://evil.example]here[/link]")
    table = Table("a", "b", box=None)
    table.add_row("\x1b[2J", "x")
    table.add_row("seven77", "x")
    console.print(table)
    assert "http" not in below.getvalue()
    assert_harmless(below.getvalue())
    first, second = COLOURS.sub("", below.getvalue()).splitlines()[-2:]
    assert first.index("x ") and first.rindex("x") == second.rindex("x")


def test_data_is_json_for_everyone() -> None:
    text = json_text({"a\udcff": [float("inf"), float("nan"), 1.5, ("\ud800", True, None)]})
    assert json.loads(text) == {"a\\udcff": [None, None, 1.5, ["\\ud800", True, None]]}
    text.encode("ascii")


def test_an_ascii_terminal(files: Files) -> None:
    done = subprocess.run([sys.executable, "-m", "onnxfuse", "targets", "--rules", str(files.rules)], check=True,
                          capture_output=True, env={**environment(), "PYTHONIOENCODING": "ascii"})
    assert_harmless(done.stdout.decode("ascii"))
