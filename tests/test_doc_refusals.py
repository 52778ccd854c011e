"""The gallery of refusals: every model is refused for the reason above it, in the quoted words, or mended."""

from __future__ import annotations

import re
from typing import Any

import doc_blocks
import pytest
from cli_models import ROOT, parse

import onnxfuse
from onnxfuse.api import as_json

PAGE = ROOT / "docs" / "refusals.md"
MODELS = [block for block in doc_blocks.blocks(PAGE) if block.language == "onnx"]
QUOTES = dict(re.findall(r"^## ([\w-]+)$(?:(?!^## ).)*?^> (.*?)$", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def planned(block: doc_blocks.Block) -> dict[str, Any]:
    """The report of a model."""
    result = onnxfuse.optimize(parse(block.text), dims={"batch": 512} if "batch" in block.text else {}, verify=False,
                               compile=False, target="H200", database=False)
    return as_json(result.report)


def told(report: dict[str, Any]) -> dict[str, str]:
    """What was said, by code; several texts of one code together."""
    found: dict[str, str] = {}
    for entry in (*report["left"], *report["refusals"]):
        found[entry["code"]] = f"{found.get(entry['code'], '')}\n{entry.get('reason') or entry.get('message')}"
    return found


def test_every_reason_has_a_model_and_a_quote() -> None:
    shown = [block.section for block in MODELS if not block.mark]
    assert shown == list(QUOTES) and len(shown) == len(set(shown)) > 6
    assert {block.mark for block in MODELS} == {"", "mended"}


@pytest.mark.parametrize("block", [block for block in MODELS if not block.mark], ids=lambda block: block.section)
def test_a_model_is_refused_in_these_words(block: doc_blocks.Block) -> None:
    found = told(planned(block))
    assert block.section in found, found
    assert QUOTES[block.section] in "\n".join(found.values())


@pytest.mark.parametrize("block", [block for block in MODELS if block.mark], ids=lambda block: block.section)
def test_a_mended_model_is_fused(block: doc_blocks.Block) -> None:
    report = planned(block)
    assert block.section not in told(report)
    before = next(each for each in MODELS if each.section == block.section)
    assert len(report["fusions"]) == 1 and not planned(before)["fusions"], "whole, and not before"
