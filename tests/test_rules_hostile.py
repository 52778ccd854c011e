"""Rule files that mean harm, or are far too large, each get one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_rules_errors import GOOD, told

from onnxfuse.errors import RuleError
from onnxfuse.rules import load_rules


def test_anchors_are_refused(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n"
    assert told(tmp_path, bomb) == """\
Rule files may not hold anchors and aliases.
--> mine.yaml:1:4
  |
1 | a: &a [x, x]
  |    ^
help: Write the part out where it is needed."""


def test_tags_are_refused(tmp_path: Path) -> None:
    assert told(tmp_path, 'id: !!python/object/apply:os.system ["true"]\n') == """\
Rule files may not hold tags (tag:yaml.org,2002:python/object/apply:os.system).
--> mine.yaml:1:5
  |
1 | id: !!python/object/apply:os.system ["true"]
  |     ^
help: Remove the tag."""


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    message = told(tmp_path, "a: " + "[" * 5_000 + "]" * 5_000 + "\n")
    assert message.startswith("The rule file is nested deeper than 12 levels.")


def test_large_files_are_refused(tmp_path: Path) -> None:
    assert told(tmp_path, "# " + "x" * 1_100_000) == (
        "The rule file is larger than 1000000 bytes.\n--> mine.yaml\nhelp: Split it into several files."
    )


def test_files_of_many_parts_are_refused(tmp_path: Path) -> None:
    assert told(tmp_path, "a: [" + "1," * 60_000 + "]\n").startswith("The rule file has more than 50000 parts.")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(b"id: a\nsummary: \xff\xfe\n")
    with pytest.raises(RuleError) as raised:
        load_rules([file])
    assert str(raised.value) == f"The rule file is not UTF-8 text.\n--> {file}:2\nhelp: Save it as UTF-8."


def test_control_characters_are_refused(tmp_path: Path) -> None:
    message = told(tmp_path, "id: a\x00b\n")
    assert "mine.yaml" in message


def test_deep_patterns_are_refused(tmp_path: Path) -> None:
    text = GOOD.replace("Relu(s)", "Relu(" * 100 + "s" + ")" * 100)
    assert told(tmp_path, text).startswith("The pattern nests deeper than 60 brackets.\n--> mine.yaml:7:")


def test_long_chains_of_operators_are_refused_or_read(tmp_path: Path) -> None:
    for count, message in ((200, "The pattern has more than 100 infix operators.\n--> mine.yaml:6:"),
                           (9_000, "The pattern has 36014 characters; the limit is 20000.\n--> mine.yaml:6:")):
        text = GOOD.replace("x + bias", " + ".join(["x"] * count))
        assert told(tmp_path, text).startswith(message)


def test_scalars_instead_of_a_rule(tmp_path: Path) -> None:
    assert told(tmp_path, "just a text\n").startswith("A rule is a mapping with the keys id, kind, summary, why")
    assert told(tmp_path, "- id: a\n").startswith("A rule is a mapping with the keys id, kind, summary, why")


def test_a_file_outside_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "k.cu").write_text("void f() {}")
    message = told(folder, GOOD + """\
kernel: {file: ../k.cu, entry: f, inputs: [x, bias], outputs: [y], grid: 1, block: 256}
""")
    assert message == """\
../k.cu is outside the rule's folder.
--> mine.yaml:10:16
   |
10 | kernel: {file: ../k.cu, entry: f, inputs: [x, bias], outputs: [y], grid: 1, block: 256}
   |                ^^^^^^^
help: Put the file beside the rule file."""
