"""Every published figure stands beside a command that exists, and results say the command that made them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cli_models import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(text) for text in re.findall(r"`(python (?:benchmarks|tests)/[^`]*)`", PAGE)]


def test_every_file_that_the_readme_cites_has_its_command() -> None:
    cited = set(re.findall(r"benchmarks/results/([\w.-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8")))
    listed = set(re.findall(r"benchmarks/results/([\w.-]+\.md)\)", PAGE))
    assert cited - {"README.md"} <= listed and len(cited) > 10


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_have_these_options(words: list[str]) -> None:
    """As the scripts, or the options that several share, spell them: to ask each for its help takes seconds."""
    texts = [(ROOT / place).read_text(encoding="utf-8")
             for place in (words[1], "benchmarks/common.py", "benchmarks/region_times.py")]
    for option in (word for word in words[2:] if word.startswith("--")):
        assert any(f'"{option}"' in text for text in texts), option


ZOO = json.loads((ROOT / "benchmarks" / "results" / "2026-11-22-h200-zoo.json").read_text(encoding="utf-8"))


def test_the_picture_shows_the_files_figures() -> None:
    picture = (ROOT / "docs" / "pictures" / "zoo.svg").read_text(encoding="utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    rows = sorted(((row["row"], row["measured"]["gpu_ratio"]["value"]) for row in ZOO["rows"]), key=lambda row: row[1])
    assert [text for text in texts if ":" in text and " " not in text] == [name for name, _ in rows]
    assert [f"{value:.2f}" for _, value in rows] == texts[-len(rows) - 1:-1]
    assert f"geometric mean, {ZOO['geometric_mean']['gpu']:.2f}" in picture
    assert f"{ZOO['environment']['gpu']}, ONNX Runtime {ZOO['environment']['versions']['onnxruntime']}" in picture


def test_the_readme_has_the_files_figures() -> None:
    """Each figure of its table stands in one of the files that its row names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and "benchmarks/results/" in line]
    assert len(rows) > 4
    for row in rows:
        _, said, *cells, _ = row.split("|")
        names = re.findall(r"\((benchmarks/results/[^)]+)\)", said)
        known = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in names)
        figures = re.findall(r"\d+\.\d+", " ".join(cells))
        assert figures, row
        assert not [each for each in figures if not re.search(rf"(?<![\d.]){each}(?!\d)", known)], row


def test_results_say_what_made_them(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "written.py"
    code = (f"import sys; sys.argv = [{str(script)!r}, '--rows', 'a b']; sys.path.insert(0, {str(script.parent)!r})\n"
            "import common\nfrom pathlib import Path\n"
            "where = common.Environment('2026-11-23', None, None, None, {}, None)\n"
            f"print(common.write_results(Path({str(tmp_path)!r}), 'what', where, {{}}, 'text'))")
    path = Path(subprocess.run([sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, check=True
                               ).stdout.strip())
    command = "python benchmarks/written.py --rows 'a b'"
    assert f"\n`{command}`  \n" in path.read_text()
    assert json.loads(path.with_suffix(".json").read_text())["command"] == command
