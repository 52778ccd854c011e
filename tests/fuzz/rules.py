"""Subject ``rules``: the rules that ship and the example's, damaged, read and their examples run.

YAML is damaged line by line and value by value; patterns, conditions, examples' models and kernel files as the texts
that they are.  Half of the examples that match are computed as well.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

from damage import TEXTS, damage_bytes

from onnxfuse.checking.check import Computer
from onnxfuse.resources import rules_folder
from onnxfuse.rules import RuleSet, check_examples, load_rules

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rules"
SHIPPED = load_rules([rules_folder()])

SCALARS = (
    "2026-11-23", "0x10", "1_000", "1e400", "-1e400", "9" * 400, ".nan", ".inf", "yes", "~", "null", "true", "{}", "[]",
    "!!binary aGk=", "!!python/name:os.system", "&a [*a]", "*a", "<<", "? x", "| ", ">-", "'", '"', "\"\\0\"",
    '"\\e]0;t\\a"', '"\\uD800"', "\u2028", "\x85", "\ufeff", "[" * 40, "{a: " * 40, "- " * 40, "x" * 100_000, "1:2:3",
)
PARTS = (
    "square(", "cube(", "rsqrt(", "over_sqrt(", "product(", "sum(", "any_of(", "maybe(", "output(", "pointwise(",
    "times(", "Relu(", "Add(", "x?", "...", "0", "1e999", "-", "/", "//", "%", "==", "inf", "not ", "_", "x.y", "[",
    "]",
    "(", ")", ", ", "axis=", "com.microsoft.Gelu(", "a.b.c.D(", "float16", "'s'", '"', "#", "\n", "dim(", "size(",
    "ceil(", "is_absent(", "count(", "value(",
)
MODEL = (
    "float[99999999999]", "float[0]", "float[-1]", "seq(", "optional(", "map(", "{", "}", "<", ">", "(", ")", "If <",
    "then_branch = g () => (float z) {", "float16 k = {1, 2}", "1e999", "99999999999999999999", "int64 {5}", '"', "\\",
    "#", "=>", "string", "bfloat16[2]", "domain: \"a\"", "[n]", "Loop", "Constant <value = float[2] {1}> ()", "é", "\0",
)
CODE = ('"', "'", "/*", "//", "\\\n", "#include <../x>", "#define f(", "f(", "{", "}", ";", 'extern "C"', "__global__",
        "R\"(", "1'000", "??/", "\0", "\xff")


@cache
def texts() -> tuple[tuple[str, str, str], ...]:
    """Documents of rule files, with the name and the text of the kernel file beside each."""
    found = []
    for file in (*sorted(rules_folder().rglob("*.yaml")), EXAMPLE / "softcap.yaml"):
        if "hardware" in file.parts:
            continue
        kernel = file.with_suffix(".cu")
        code = kernel.read_text() if kernel.exists() else ""
        found += [(part, kernel.name, code) for part in file.read_text().split("\n---\n") if part.strip()]
    return (*found, *found[-1:] * (len(found) // 8))


def make(seed: int, folder: Path) -> list[Path]:
    """A rule file of one document or two, and its kernel file."""
    rng = Random(seed)
    text, name, code = rng.choice(texts())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        text = damaged(text, rng)
    if rng.random() < 0.1:
        text += "\n---\n" + rng.choice(texts())[0]
    path = folder / "rule.yaml"
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(damage_bytes(data, rng) if rng.random() < 0.1 else data)
    files = [path]
    if code:
        if rng.random() < 0.5:
            code = put(code, rng, CODE)
        files.append(folder / name)
        files[-1].write_text(code)
    return files


def damaged(text: str, rng: Random) -> str:
    """One line, value or word."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
    key, colon, value = lines[at].partition(":")
    match rng.randrange(12):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        case 2:
            lines[at] = lines[at].replace(indent, indent + rng.choice(("  ", " ", "\t")), 1)
        case 3 | 4 if colon:
            lines[at] = f"{key}: {rng.choice((*SCALARS, *TEXTS))}"
        case 5 if colon:
            lines[at] = f"{indent}{rng.choice((*SCALARS, *TEXTS))}:{value}"
        case 6:
            return put(text, rng, SCALARS)
        case 7:
            words = [word for word in text.split() if len(word) > 1]
            return text.replace(rng.choice(words), rng.choice(words), rng.choice((1, -1)))
        case 8 | 9:
            return put(text, rng, PARTS)
        case _:
            return put(text, rng, MODEL)
    return "\n".join(lines)


def put(text: str, rng: Random, words: Sequence[str]) -> str:
    """Odd words put in at a place, once or many times, over what stands there or beside it."""
    at = rng.randrange(len(text) + 1)
    word = rng.choice(words) * rng.choice((1, 1, 1, 1, 2, 3, 20, 2000))
    return text[:at] + word + text[at + rng.choice((0, 0, 1, 5)):]


def attempt(files: Sequence[Path]) -> str:
    """Read the file, and run the examples of its rules beside the shipped ones."""
    own = load_rules([files[0]])
    ids = {rule.id for rule in own.all}
    rules = RuleSet(*(
        (*(rule for rule in getattr(SHIPPED, kind) if rule.id not in ids), *getattr(own, kind))
        for kind in ("canonical", "fuse", "grow", "forbid", "runtime", "name")
    ))
    computed = files[0].name != "rule.yaml" or zlib.crc32(files[0].read_bytes()) % 2 == 0
    outcomes = check_examples(rules, ids, Computer(rules) if computed else None)
    faults = [outcome.fault.strip() for outcome in outcomes if outcome.fault is not None]
    assert all(faults)
    return f"{len(outcomes) - len(faults)} good" + (f"; {faults[0]}" if faults else "")
