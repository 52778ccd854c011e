"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from onnxfuse.cli import completion

F = TypeVar("F", bound=Callable[..., Any])

PROVIDER_OPTIONS = (
    "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search", "cudnn_conv_use_max_workspace",
    "default_memory_arena_cfg", "device_id", "do_copy_in_default_stream", "enable_cuda_graph",
    "enable_skip_layer_norm_strict_mode", "fuse_conv_bias", "gpu_external_alloc", "gpu_external_empty_cache",
    "gpu_external_free", "gpu_mem_limit", "has_user_compute_stream", "prefer_nhwc", "sdpa_kernel", "tunable_op_enable",
    "tunable_op_max_tuning_duration_ms", "tunable_op_tuning_enable", "use_ep_level_unified_stream", "use_tf32",
    "user_compute_stream",
)
"""Options of ONNX Runtime's CUDA provider: one that is spelled nearly like one of them is a mistake; a newer release
may have others."""

_SWITCHES = frozenset({"prefer_nhwc", "fuse_conv_bias", "use_tf32"})
"""Those that planning looks at."""


class _File(click.Path):
    """A path; that it is there is for the stages to say, in their own words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if "\0" in str(value):
            self.fail(f"{str(value)!r} can be no file's name.", param, ctx)
        if str(value) == "-":
            self.fail("'-' stands for no stream here: give the name of a file (./- for one called so); --json prints "
                      "what a command found as data.", param, ctx)
        return super().convert(value, param, ctx)


FILE = _File(path_type=Path)


def read_sizes(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, int]:
    """``NAME=N`` several times: sizes of symbolic dimensions."""
    sizes: dict[str, int] = {}
    for value in values:
        name, sign, number = value.rpartition("=")
        if not sign or not name.strip() or not re.fullmatch(r"-?\d+", number.strip()):
            raise click.BadParameter(f"{value!r} is not of the form NAME=N, such as batch=8.", ctx, param)
        _once(sizes, name.strip(), int(number), ctx, param)
    return sizes


def _once(found: dict[str, Any], name: str, value: Any, ctx: click.Context, param: click.Parameter) -> None:
    """Take a value by name; the same name cannot have two."""
    if found.get(name, value) != value:
        raise click.BadParameter(f"{name!r} is given twice: {found[name]} and {value}.", ctx, param)
    found[name] = value


def read_settings(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` several times: options of an execution provider."""
    settings: dict[str, str] = {}
    for value in values:
        name, sign, text = value.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"{value!r} is not of the form NAME=VALUE, such as device_id=0.", ctx, param)
        name = name.strip()
        if name not in PROVIDER_OPTIONS and (near := difflib.get_close_matches(name, PROVIDER_OPTIONS, 1)):
            raise click.BadParameter(f"the CUDA provider has no option {name!r}. Did you mean {near[0]!r}?", ctx, param)
        if name in _SWITCHES and text.strip().lower() not in ("0", "1", "true", "false"):
            raise click.BadParameter(f"{name} is 0 or 1, not {text!r}.", ctx, param)
        _once(settings, name, text, ctx, param)
    return settings


def read_hints(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[str, float]:
    """``NAME=NUMBER`` several times: hints to the planner; which there are is for ``Hints`` to say."""
    hints: dict[str, float] = {}
    for value in values:
        name, sign, number = value.partition("=")
        try:
            _once(hints, name.strip().replace("_", "-"), float(number), ctx, param)
        except ValueError:
            sign = ""
        if not sign or not name.strip():
            raise click.BadParameter(
                f"{value!r} is not of the form NAME=NUMBER, such as memory-pressure=0.9.", ctx, param)
    return hints


def read_architectures(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """``sm_80,sm_90``: GPU architectures; whether they are known is for ``embedding`` to say."""
    if value is None:
        return ()
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise click.BadParameter("no architecture is named.", ctx, param)
    return found


model_argument = click.argument("model", type=FILE)

dim_option = click.option("--dim", "dims", multiple=True, metavar="NAME=N", callback=read_sizes,
                          shell_complete=completion.dimensions,
                          help="Size of a symbolic dimension to plan and count for; may repeat.")


verbose_option = click.option("-v", "--verbose", is_flag=True,
                              help="List near misses too that nothing you can change would mend.")


STRATEGIES = ("auto", "all-in-one", "memory", "dynamic")
"""``planning.objective.STRATEGIES``, which would be slow to load for --help."""


rules_option = click.option(
    "--rules", "rules", type=FILE, multiple=True, metavar="PATH",
    help="Rule file, or folder of them, to use beside the shipped ones; may repeat.")

disable_option = click.option(
    "--disable", multiple=True, metavar="ID", shell_complete=completion.rules,
    help="Rule to leave out, or a stage: shape-arithmetic (folding of size operands), constants (of 16 bits, computed "
         "once), biases (taken into what follows), attention (as one kernel), depthwise (convolutions), products (with "
         "what is around them), dequantised (values, for each of their readers), layouts (channels-last between fused "
         "convolutions), recompute (values computed again rather than read), horizontal-joins (independent regions in "
         "one kernel); may repeat.")

fold_weights_option = click.option(
    "--fold-weights", is_flag=True,
    help="Fold constants beside products and convolutions, such as a scale of each channel or a BatchNormalization, "
         "into the weights that their kernels read, and products with nothing between into one, also where that rounds "
         "weights anew; what changes no digit is folded anyway.")


def objective_options(command: F) -> F:
    """What the plan is to be good at; the command gets it as ``wanted``: keywords of ``api.optimize``."""
    for option in reversed((
        click.option("--strategy", type=click.Choice(STRATEGIES), default="auto", show_default=True,
                     help="auto: the least predicted time.  all-in-one: the fewest kernels.  memory: the fewest bytes "
                          "of tensors.  dynamic: no loss at a quarter or four times the sizes either, and kernels "
                          "with variants for them."),
        click.option("--hint", "hints", metavar="NAME=NUMBER", multiple=True, callback=read_hints,
                     help="memory-pressure=0.9: fuse only what saves memory.  compute-pressure=0.9: fuse only what is "
                          "predicted to gain pressed-gain (1.5).  Pressures count past pressure-threshold (0.8).  "
                          "May repeat."),
        click.option("--least-gain", type=click.FloatRange(min=0), metavar="X",
                     help="Predicted speed-up that a region must pass to be fused; by default 1.2."),
        click.option("--provider-option", "provider_options", multiple=True, metavar="NAME=VALUE",
                     callback=read_settings,
                     help="Option of the CUDA provider that the model will run with; prefer_nhwc=1 leaves convolutions "
                          "alone where fusing all is not predicted to take less, fuse_conv_bias=1 their biases, "
                          "use_tf32=0 has kernels keep all digits of float32.  May repeat."),
        fold_weights_option,
    )):
        command = option(command)

    @functools.wraps(command)
    def gathered(*, strategy: str, hints: dict[str, float], least_gain: float | None,
                 provider_options: dict[str, str], fold_weights: bool, **rest: Any) -> Any:
        from onnxfuse.planning.objective import read_hints

        try:
            known = read_hints(hints)
        except ValueError as error:
            end = "" if str(error).endswith("?") else "."
            raise click.BadParameter(f"{error}{end}", param_hint="'--hint'") from error
        wanted = {"strategy": strategy, "hints": known, "least_gain": least_gain, "provider_options": provider_options,
                  "fold_weights": fold_weights}
        return command(wanted=wanted, **rest)

    return gathered  # type: ignore[return-value]


database_option = click.option(
    "--database", type=FILE, metavar="FILE",
    help="Database of measurements; by default $ONNXFUSE_DATABASE, else measurements.sqlite in the cache folder.")


def measurement_options(command: F) -> F:
    """What was measured; the command gets it in ``wanted``, as from ``objective_options``, which stands above."""
    for option in reversed((
        database_option,
        click.option("--no-database", is_flag=True, help="Plan by predictions alone."),
        click.option("--profile", "run_profile", type=FILE, metavar="FILE",
                     help="Weigh regions by time and executions in this profile: what ONNX Runtime wrote "
                          "(enable_profiling) of a run of the model on CUDA."),
    )):
        command = option(command)

    @functools.wraps(command)
    def gathered(*, wanted: dict[str, Any], database: Path | None, no_database: bool, run_profile: Path | None,
                 **rest: Any) -> Any:
        if no_database and database is not None:
            raise click.BadParameter("it contradicts --no-database.", param_hint="'--database'")
        measured = {"database": False if no_database else database, "run_profile": run_profile}
        return command(wanted={**wanted, **measured}, **rest)

    return gathered  # type: ignore[return-value]


def planning_options(command: F) -> F:
    """What decides the plan."""
    for option in reversed((
        rules_option,
        disable_option,
        dim_option,
        click.option("--target", metavar="GPU", shell_complete=completion.targets,
                     help="GPU to plan for (`onnxfuse targets` lists them), or a YAML file that describes one; the one "
                          "present, else the H100."),
    )):
        command = option(command)
    return command
