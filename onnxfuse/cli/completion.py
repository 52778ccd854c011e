"""What the shell completes: targets, rules, and the dimensions of the model that the command names.

Nothing is said here: a file that is no model, or a rule that is wrong, completes nothing, and the command itself tells.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

MOST_BYTES = 1 << 28
"""Bytes of the largest model that is read for its dimensions while somebody waits for a key."""


def targets(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of hardware profiles."""
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.planning.costs.hardware import known_profiles

    try:
        names = [profile.name for profile in known_profiles(ctx.params.get("rules") or ())]
    except OnnxfuseError:
        return []
    return [CompletionItem(name) for name in names if name.lower().startswith(incomplete.lower())]


def rules(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids of rules with what they do, and of stages where these can be named too."""
    from onnxfuse.errors import OnnxfuseError
    from onnxfuse.resources import rules_folder
    from onnxfuse.rules import load_rules
    from onnxfuse.rules.load import STAGES

    try:
        found = load_rules([rules_folder(), *(ctx.params.get("rules") or ctx.params.get("paths") or ())]).by_id
    except OnnxfuseError:
        return []
    ids = {name: " ".join(rule.summary.split()) for name, rule in found.items()}
    if param.name == "disable":
        ids |= dict.fromkeys(sorted(STAGES), "a stage")
    return [CompletionItem(name, help=words) for name, words in ids.items() if name.startswith(incomplete)]


def dimensions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """``NAME=`` of the symbolic dimensions of the model's inputs."""
    import onnx
    from google.protobuf.message import DecodeError

    # Before an option that has no value yet, click leaves the arguments as they stand on the line.
    given = [ctx.params.get("model") or ctx.params.get("original"), *ctx.args]
    model = next((path for path in map(Path, filter(None, given)) if path.is_file()), None)
    try:
        if model is None or model.stat().st_size > MOST_BYTES:
            return []
        graph = onnx.load(model, load_external_data=False).graph
    except (OSError, DecodeError):
        return []
    held = {tensor.name for tensor in graph.initializer}
    names = dict.fromkeys(size.dim_param for value in graph.input if value.name not in held
                          for size in value.type.tensor_type.shape.dim if size.dim_param)
    return [CompletionItem(f"{name}=") for name in names if name.startswith(incomplete)]
