"""What a user is told about a wrong rule file: the exact texts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from onnxfuse.errors import RuleError
from onnxfuse.rules import load_rules

GOOD = """\
id: my-rule
kind: fuse
summary: A sum and a ReLU.
why: For the tests.
pattern: |
  s = x + bias
  y = Relu(s)
where:
  - rank(bias) == 1
"""


def told(folder: Path, text: str) -> str:
    """The message about a rule file of this text, with the folder's name left out."""
    file = folder / "mine.yaml"
    file.write_text(text)
    with pytest.raises(RuleError) as raised:
        load_rules([file])
    return str(raised.value).replace(str(folder) + "/", "")


def test_the_good_rule_is_good(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    rules = load_rules([file])
    assert [rule.id for rule in rules.all] == ["my-rule"]
    assert [warning.splitlines()[0] for warning in rules.warnings] == [
        "The rule my-rule has no example that matches.",
        "The rule my-rule has no example that is refused.",
    ]


def test_typo_in_a_key(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("pattern:", "patern:")) == """\
Unknown key patern.
--> mine.yaml:5:1
  |
5 | patern: |
  | ^^^^^^
help: Did you mean pattern?"""


def test_typo_in_the_kind(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("fuse", "fusion")) == """\
Unknown kind fusion.
--> mine.yaml:2:7
  |
2 | kind: fusion
  |       ^^^^^^
help: Did you mean fuse?"""


def test_missing_key(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("why: For the tests.\n", "")) == """\
The key why is missing.
--> mine.yaml:1:1
  |
1 | id: my-rule
  | ^
help: Add why: ..."""


def test_missing_kind(tmp_path: Path) -> None:
    """The key id, which looks a little like it, is meant as it stands."""
    assert told(tmp_path, GOOD.replace("kind: fuse\n", "")) == """\
The key kind is missing.
--> mine.yaml:1:1
  |
1 | id: my-rule
  | ^
help: It is one of canonical, fuse, grow, forbid, runtime, name."""


def test_typo_in_the_key_kind(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("kind:", "kinds:")) == """\
Unknown key kinds.
--> mine.yaml:2:1
  |
2 | kinds: fuse
  | ^^^^^
help: Did you mean kind?"""


def test_syntax_error_inside_the_pattern(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("y = Relu(s)", "y = Relu(s,, 2)")) == """\
Syntax error in the pattern at ,.
--> mine.yaml:7:14
  |
7 |   y = Relu(s,, 2)
  |              ^
help: Expected '(', ')', '-', '...', a name or a number."""


def test_bracket_never_closed(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("y = Relu(s)", "y = Relu(s")) == """\
'(' is never closed in the pattern.
--> mine.yaml:7:11
  |
7 |   y = Relu(s
  |           ^
help: Add ')'."""


def test_unexpected_character_in_the_pattern(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("x + bias", "x & bias")) == """\
Unexpected character '&' in the pattern.
--> mine.yaml:6:9
  |
6 |   s = x & bias
  |         ^"""


def test_unknown_operator(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("Relu(", "Rellu(")) == """\
Unknown operator Rellu.
--> mine.yaml:7:7
  |
7 |   y = Rellu(s)
  |       ^^^^^
help: Did you mean Relu?"""


def test_unknown_microsoft_operator(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("Relu(", "com.microsoft.BiasGellu(")) == """\
Unknown operator com.microsoft.BiasGellu.
--> mine.yaml:7:7
  |
7 |   y = com.microsoft.BiasGellu(s)
  |       ^^^^^^^^^^^^^^^^^^^^^^^
help: Did you mean com.microsoft.BiasGelu?"""


def test_unknown_function_in_the_pattern(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("Relu(", "mayb(")) == """\
Unknown function mayb.
--> mine.yaml:7:7
  |
7 |   y = mayb(s)
  |       ^^^^
help: Did you mean maybe?"""


def test_unknown_attribute(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("Relu(s)", "Softmax(s, axs=-1)")) == """\
Softmax has neither an attribute nor an input called axs.
--> mine.yaml:7:22
  |
7 |   y = Softmax(s, axs=-1)
  |                      ^^
help: Did you mean axis?"""


def test_unknown_condition(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("rank(bias)", "rnak(bias)")) == """\
Unknown condition rnak.
--> mine.yaml:9:5
  |
9 |   - rnak(bias) == 1
  |     ^^^^
help: Did you mean rank?"""


@pytest.mark.parametrize("function", ["read_by", "made_by"])
def test_condition_about_an_unknown_operator(tmp_path: Path, function: str) -> None:
    """One that is misspelled would be no node's, and the condition never hold."""
    assert told(tmp_path, GOOD.replace("rank(bias) == 1", f'{function}(x, ["Relu", "matmull"])')) == f"""\
Unknown operator or class matmull.
--> mine.yaml:9:25
  |
9 |   - {function}(x, ["Relu", "matmull"])
  |                         ^^^^^^^^^
help: Did you mean MatMul?"""


def test_condition_about_an_unknown_name(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("rank(bias)", "rank(bais)")) == """\
Nothing in the pattern is called bais.
--> mine.yaml:9:10
  |
9 |   - rank(bais) == 1
  |          ^^^^
help: Did you mean bias?"""


def test_condition_cut_by_a_comma(tmp_path: Path) -> None:
    text = GOOD.replace("where:\n  - rank(bias) == 1", "where: [same_shape(x, s)]")
    assert told(tmp_path, text) == """\
'(' is never closed in the condition.
--> mine.yaml:8:19
  |
8 | where: [same_shape(x, s)]
  |                   ^
help: Put quotes around a condition that holds a comma, or give it a line of its own."""


def test_wrong_number_of_arguments(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("rank(bias) ==", "dim(bias) ==")) == """\
dim(...) takes 2 arguments, not 1.
--> mine.yaml:9:5
  |
9 |   - dim(bias) == 1
  |     ^^^^^^^^^"""


def test_wrong_type(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("summary: A sum and a ReLU.", "summary: [a, b]")) == """\
summary must be a string.
--> mine.yaml:3:10
  |
3 | summary: [a, b]
  |          ^^^^^^"""


def test_id_that_is_not_kebab(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("my-rule", "My_Rule")) == """\
id must be lower-case words joined by dashes.
--> mine.yaml:1:5
  |
1 | id: My_Rule
  |     ^^^^^^^"""


def test_duplicate_id(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD + "---\n" + GOOD) == """\
There are two rules called my-rule.
--> mine.yaml:11:5
   |
11 | id: my-rule
   |     ^^^^^^^
help: Rename one; the other is in mine.yaml:1."""


def test_key_given_twice(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD + "id: other\n") == """\
The key id is given twice.
--> mine.yaml:10:1
   |
10 | id: other
   | ^^
help: Give it once."""


def test_unknown_result(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD + "results: [y, z?]\n") == """\
The result z is assigned by no line of the pattern.
--> mine.yaml:10:14
   |
10 | results: [y, z?]
   |              ^^
help: Choose among s, y."""
    assert told(tmp_path, GOOD + "results: z\n").splitlines()[1:] == [
        "--> mine.yaml:10:10", "   |", "10 | results: z", "   |          ^", "help: Choose among s, y."]


def test_growth_on_an_unknown_edge(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD + "grow: {befor: pointwise}\n") == """\
The region cannot grow on befor.
--> mine.yaml:10:8
   |
10 | grow: {befor: pointwise}
   |        ^^^^^
help: Did you mean before?"""


def test_growth_over_an_unknown_class(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD + "grow: {before: [pointwize]}\n") == """\
Unknown operator or class pointwize.
--> mine.yaml:10:17
   |
10 | grow: {before: [pointwize]}
   |                 ^^^^^^^^^
help: Did you mean pointwise?"""


def test_pattern_that_ends_in_a_hole(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("Relu(s)", "pointwise(s)")) == """\
y is no operator: a pattern ends in one.
--> mine.yaml:7:3
  |
7 |   y = pointwise(s)
  |   ^
help: Grow the region after the pattern instead (grow: {after: pointwise})."""


def test_name_assigned_after_its_use(tmp_path: Path) -> None:
    assert told(tmp_path, GOOD.replace("y = Relu(s)", "x = Relu(s)")) == """\
x is assigned after it was used.
--> mine.yaml:7:3
  |
7 |   x = Relu(s)
  |   ^
help: Choose another name, or move the line up."""


def test_becomes_an_unknown_operator(tmp_path: Path) -> None:
    text = GOOD.replace("kind: fuse", "kind: canonical") + "becomes: Geluu(x)\n"
    assert told(tmp_path, text) == """\
Unknown operator Geluu.
--> mine.yaml:10:10
   |
10 | becomes: Geluu(x)
   |          ^^^^^
help: Did you mean Gelu?"""


def test_unknown_forbidden_condition(tmp_path: Path) -> None:
    text = "id: a\nkind: forbid\nsummary: s\nwhy: w\nreason: r\ncondition: inner-value-is-outputs\n"
    assert told(tmp_path, text) == """\
Unknown condition inner-value-is-outputs.
--> mine.yaml:6:12
  |
6 | condition: inner-value-is-outputs
  |            ^^^^^^^^^^^^^^^^^^^^^^
help: Did you mean inner-value-is-output?"""


def test_forbid_without_a_subject(tmp_path: Path) -> None:
    assert told(tmp_path, "id: a\nkind: forbid\nsummary: s\nwhy: w\nreason: r\n") == """\
A forbid rule has one of pattern, edge and condition.
--> mine.yaml:1:1
  |
1 | id: a
  | ^
help: It has none."""


FORBID = "id: a\nkind: forbid\nsummary: s\nwhy: w\nreason: r\npattern: |\n  s = Relu(x)\n  y = MatMul(s, other)\n"


def test_exception_for_what_the_pattern_does_not_read(tmp_path: Path) -> None:
    assert told(tmp_path, f"{FORBID}leave: [s]\nunless_made: [others]\n") == """\
others is no input of the pattern.
--> mine.yaml:10:15
   |
10 | unless_made: [others]
   |               ^^^^^^
help: Did you mean other?"""


def test_exception_from_nothing(tmp_path: Path) -> None:
    assert told(tmp_path, f"{FORBID}unless_made: [x]\n") == """\
unless_made needs leave.
--> mine.yaml:9:1
  |
9 | unless_made: [x]
  | ^^^^^^^^^^^
help: Say what is left otherwise."""


def test_disabling_an_unknown_rule(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(GOOD)
    with pytest.raises(RuleError) as raised:
        load_rules([file], disable=["my-rul"])
    assert str(raised.value) == "No rule is called my-rul.\n--> disable=[\"my-rul\"]\nhelp: Did you mean my-rule?"
    assert load_rules([file], disable=["my-rule"]).all == ()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as raised:
        load_rules([tmp_path / "none.yaml"])
    assert str(raised.value) == (
        f"There is no such rule file or folder.\n--> {tmp_path}/none.yaml\nhelp: Check the path."
    )


def test_folder_without_rules(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as raised:
        load_rules([tmp_path])
    assert str(raised.value) == f"The folder holds no rule files.\n--> {tmp_path}\nhelp: Rule files end in .yaml."


def test_broken_yaml(tmp_path: Path) -> None:
    message = told(tmp_path, "id: a\nkind: [fuse\nsummary: b\n")
    assert message.startswith("This is not YAML: ")
    assert "--> mine.yaml:3:" in message
    assert message.endswith("help: Check indentation, colons and quotes around this place.")


def test_example_model_that_does_not_parse(tmp_path: Path) -> None:
    from onnxfuse.rules import check_examples

    file = tmp_path / "mine.yaml"
    file.write_text(GOOD + """\
examples:
  - name: broken
    expect: matched
    model: |
      g (float[4] x) => (float[4] y) { y = Relu(x }
""")
    (outcome,) = check_examples(load_rules([file]))
    assert outcome.fault is not None
    assert outcome.fault.splitlines()[0].startswith("The model of the example 'broken' is wrong: ")
    assert "mine.yaml:11:5" in outcome.fault


def test_a_rule_is_read_again_where_anything_it_is_made_of_changed(tmp_path: Path) -> None:
    examples = Path(__file__).resolve().parent.parent / "examples" / "rules"
    rule, kernel = (Path(shutil.copy(examples / name, tmp_path)) for name in ("softcap.yaml", "softcap.cu"))
    first, same = (load_rules([rule]).fuse[0] for _ in range(2))
    assert first.kernel is not None and first.kernel == same.kernel
    kernel.write_text(f"// another\n{kernel.read_text()}")
    assert load_rules([rule]).fuse[0].kernel.source == f"// another\n{first.kernel.source}"
    kernel.unlink()
    with pytest.raises(RuleError, match="There is no file"):
        load_rules([rule])
    rule.write_text(GOOD)
    assert load_rules([rule]).all[0] is load_rules([rule]).all[0]
    rule.write_text(GOOD.replace("my-rule", "other-rule"))
    assert [found.id for found in load_rules([rule]).all] == ["other-rule"]
    rule.write_text(f"{GOOD}---\n{GOOD}")
    for _ in range(2):
        with pytest.raises(RuleError, match=r"two rules called my-rule(?s:.)*the other is in .*softcap"):
            load_rules([rule])
