"""What Python code may give, and in whose terms it is answered."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from cli_models import CHAIN, ROOT, parse, run, write
from parsed import GROUP, nodes

import onnxfuse
from onnxfuse import errors, wording
from onnxfuse.api import optimize
from onnxfuse.cli.main import main
from onnxfuse.given import Wanted, hints, names, paths, sizes
from onnxfuse.planning.objective import STRATEGIES
from onnxfuse.reporting import explanation_json
from onnxfuse.rewriting import read_fused

RULE = ROOT / "examples" / "rules" / "softcap.yaml"
SOFTCAP = """g (float[n, 64] x) => (float[n, 64] y) {
  c = Constant <value = float {9.0}> ()
  s = Div(x, c)
  t = Tanh(s)
  y = Mul(t, c) }"""


# One where several are meant


@pytest.mark.parametrize("rules", [str(RULE), RULE, [str(RULE)], (RULE,)])
def test_a_rule_file_may_stand_alone(rules: Any) -> None:
    report = onnxfuse.report(parse(SOFTCAP), rules=rules, target="H100")
    assert [fusion.rule for fusion in report.fusions] == ["softcap"]


@pytest.mark.parametrize("call", [onnxfuse.report, onnxfuse.explain, optimize])
def test_a_name_may_stand_alone(call: Callable[..., Any]) -> None:
    """A misspelt one is named whole, and no letter of it is."""
    with pytest.raises(onnxfuse.RuleError) as caught:
        call(parse(SOFTCAP), rules=str(RULE), disable="softcab", target="H100")
    assert str(caught.value) == 'No rule is called softcab.\n--> disable=["softcab"]\nhelp: Did you mean softcap?'


def test_an_architecture_and_a_node_may_stand_alone() -> None:
    result = onnxfuse.optimize(parse(CHAIN), embed="sm_90", target="H100", verify=False)
    (node,) = read_fused(result.model)
    assert node.architectures == ("compute_90", "sm_90")
    assert not read_fused(onnxfuse.unfuse(result.model, only=node.name))


def test_a_lock_is_checked_with_one_rule_file_and_without_one_rule() -> None:
    lock = onnxfuse.optimize(parse(SOFTCAP), rules=RULE, target="H100", verify=False).lock()
    assert onnxfuse.check(parse(SOFTCAP), lock, rules=str(RULE), disable="attention").holds
    with pytest.raises(onnxfuse.RuleError, match="No rule is called softcab"):
        onnxfuse.check(parse(SOFTCAP), lock, rules=str(RULE), disable="softcab")


def test_a_planner_takes_the_same() -> None:
    planner = onnxfuse.FusionPlanner("H100", rules=RULE)
    decision = planner.decide_fusion(parse(SOFTCAP), {"memory_pressure": 0.1}, dims={"n": np.int64(4)})
    assert [fusion.rule for fusion in decision.fusions] == ["softcap"] and decision.dims["n"] == 4


@pytest.mark.parametrize(("call", "message"), [
    (lambda: paths("rules", [3]), "rules holds 3; it takes a path, or several"),
    (lambda: paths("rules", None), "rules is None; it takes one, or a list of several"),
    (lambda: names("disable", [RULE]), f"disable holds {RULE!r}; it takes a name, or several"),
    (lambda: names("embed", b"sm"), "embed is b'sm'; it takes one, or a list of several"),
    (lambda: sizes("batch=8"), "dims is 'batch=8'; it takes a mapping, such as {\"batch\": 8}"),
    (lambda: sizes({"batch": "8"}), "dims has '8' for 'batch'; it takes whole numbers"),
    (lambda: hints(0.9), 'hints is 0.9; it takes Hints or a mapping, such as {"memory-pressure": 0.9}'),
])
def test_what_is_neither_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


def test_hints_by_name() -> None:
    given = onnxfuse.optimize(parse(CHAIN), target="H100", verify=False,
                              hints={"compute-pressure": 0.95, "pressed_gain": 100.0})
    assert not given.report.fusions
    with pytest.raises(ValueError, match='there is no hint "memory-presure"; did you mean "memory-pressure"'):
        onnxfuse.report(parse(CHAIN), hints={"memory-presure": 0.9})


# What is exported, typed and documented


def test_every_error_is_exported() -> None:
    known = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert known <= set(onnxfuse.__all__)
    assert all(getattr(onnxfuse, name) is getattr(errors, name) for name in known)


def test_strategies_are_literal() -> None:
    """``tests/typed_use.py`` is what mypy makes of it."""
    assert get_args(onnxfuse.Strategy) == STRATEGIES
    assert get_type_hints(optimize)["strategy"] == get_type_hints(Wanted)["strategy"] == onnxfuse.Strategy
    with pytest.raises(ValueError, match='there is no strategy "fastest"; known: auto'):
        onnxfuse.optimize(parse(CHAIN), strategy="fastest")


def test_further_arguments_are_those_of_optimize() -> None:
    own, of_optimize = get_type_hints(Wanted), get_type_hints(optimize)
    assert {name: of_optimize.get(name) for name in own} == own


FUNCTIONS = sorted(name for name in onnxfuse.__all__ if inspect.isfunction(getattr(onnxfuse, name)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_a_function_takes_and_returns_is_told(name: str) -> None:
    function = getattr(onnxfuse, name)
    told = inspect.getdoc(function) or ""
    assert "Raises:" in told
    assert ("Returns:" in told) is (inspect.signature(function).return_annotation != "None")
    missing = [each for each in inspect.signature(function).parameters if not re.search(rf"\b{each}\b", told)]
    assert missing == []


def test_an_explanation_shows_itself(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    whole = onnxfuse.explain(path, target="H100")
    assert repr(whole) == f"<Explanation of {whole.model!r} for {whole.target}>"
    assert whole.to_json() == explanation_json(whole)
    assert max(map(len, whole.to_text(width=60).splitlines())) <= 60 and "\x1b" not in whole.to_text()
    with wording.command_line():
        assert run("explain", path, "--target", "H100").output == whole.to_text(width=4000)
        assert run("explain", path, "--target", "H100", "-v").output == whole.to_text(width=4000, verbose=True)
    node = onnxfuse.explain(path, "y", target="H100")
    assert node.node is not None and repr(node).startswith(f"<Explanation of {node.node.subject!r} in ")


# Errors in the reader's terms


MISTAKES: dict[str, tuple[dict[str, Any], list[str], str, str]] = {
    "dim": ({"dims": {"bach": 3}}, ["--dim", "bach=3"], 'dims={"bach": 3}', "--dim bach=3"),
    "disable": ({"disable": "nothing"}, ["--disable", "nothing"], 'disable=["nothing"]', "--disable nothing"),
    "embed": ({"embed": "sm_12"}, ["--embed", "sm_12"], 'embed=["sm_12"]', "--embed sm_12"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_error_is_in_the_terms_of_who_reads_it(name: str, tmp_path: Path) -> None:
    given, options, python, command = MISTAKES[name]
    path = write(tmp_path, CHAIN)
    with pytest.raises(onnxfuse.OnnxfuseError) as caught:
        onnxfuse.optimize(path, verify=False, **given)
    assert str(caught.value).splitlines()[1] == f"--> {python}"
    assert "--" not in str(caught.value).replace("-->", "")
    assert run("optimize", path, "--no-verify", *options).output.splitlines()[1] == f"--> {command}"


def test_a_report_is_in_the_terms_of_who_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    assert "batch=1: assumed; dims" in onnxfuse.report(path, target="H100").to_text()
    assert "batch=1: assumed; --dim" in run("report", path, "--target", "H100").output


def test_how_options_are_written() -> None:
    def written() -> list[str]:
        return [wording.option("dim", "batch=8", "s=4"), wording.option("dim"), wording.option("inputs", "FILE.npz"),
                wording.option("provider-option", "prefer_nhwc=1"), wording.option("target", "H100"),
                wording.option("verify-seconds", "N"), wording.as_data(), wording.verbose()]

    assert written() == ['dims={"batch": 8, "s": 4}', "dims", 'inputs={"NAME": ARRAY}',
                         'provider_options={"prefer_nhwc": "1"}', 'target="H100"', "verify_seconds=N", "to_json()",
                         "verbose=True"]
    with wording.command_line():
        assert written() == ["--dim batch=8 --dim s=4", "--dim", "--inputs FILE.npz",
                             "--provider-option prefer_nhwc=1", "--target H100", "--verify-seconds N", "--json", "-v"]
    assert wording.option("dim") == "dims"


def test_options_that_messages_name_are_there() -> None:
    keywords = inspect.signature(optimize).parameters
    offered = {name for param in main.commands["optimize"].params for name in param.opts}
    for name, (keyword, _) in wording.PYTHON.items():
        assert keyword in keywords and f"--{name}" in offered


OPTION = re.compile(rf"(?<![\w-])--(?:{'|'.join(wording.PYTHON)}|json)\b")
COMMANDS_ALONE = ("cli", "debugging", "doctor", "tuning")
OF_A_COMMAND = {"triton.py", "reporting/profile_text.py", "reporting/profile.py", "runtime/run_statistics.py"}
"""What only a command calls."""


@GROUP
def test_no_message_is_in_the_command_lines_terms_alone() -> None:
    """But for whole commands: "`onnxfuse tune MODEL --database FILE` makes one"."""
    found = []
    package = ROOT / "onnxfuse"
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] in COMMANDS_ALONE or name.as_posix() in OF_A_COMMAND:
            continue
        told = {id(node.value) for node in nodes(path) if isinstance(node, ast.Expr)}
        found += [f"{name}:{node.lineno}: {node.value}" for node in nodes(path)
                  if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told
                  and name.as_posix() != "wording.py" and OPTION.search(re.sub(r"onnxfuse \w+ [^`]*", "", node.value))]
    assert found == []
