"""Draw a zoo result: how much less GPU time each row takes fused, with its 95% interval.

    pip install matplotlib
    python benchmarks/picture.py benchmarks/results/2026-11-22-h200-zoo.json docs/pictures/zoo.svg

The same file each time for the same result; its text stays text, so that it can be searched and compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click


def bars(content: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """Each row with its ratio of GPU times and the ends of its interval, the smallest first."""
    found = []
    for row in content["rows"]:
        ratio = row["measured"]["gpu_ratio"]
        found.append((row["row"], ratio["value"], ratio["low"], ratio["high"]))
    return sorted(found, key=lambda bar: bar[1])


def draw(content: dict[str, Any], target: Path) -> None:
    """Write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "onnxfuse", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    rows = bars(content)
    names, values = [row[0] for row in rows], [row[1] for row in rows]
    ends = [[row[1] - row[2] for row in rows], [row[3] - row[1] for row in rows]]
    figure, axes = pyplot.subplots(figsize=(7.2, 0.32 * len(rows) + 1.3), layout="constrained")
    axes.barh(names, values, xerr=ends, color="#4477aa", ecolor="#222222", height=0.7)
    for place, value in enumerate(values):
        axes.text(value + 0.05, place, f"{value:.2f}", va="center", backgroundcolor="white")
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    axes.axvline(content["geometric_mean"]["gpu"], color="#cc6677", linewidth=1.0, linestyle="--", zorder=0)
    where = content["environment"]
    axes.set_xlabel(
        "GPU time of the original over that of the fused model (1)\n"
        f"black ends: 95% interval; dashed: geometric mean, {content['geometric_mean']['gpu']:.2f}")
    axes.set_title(f"{where['gpu']}, ONNX Runtime {where['versions']['onnxruntime']}, {where['date']}")
    axes.set_xlim(0, max(values) * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, format="svg", metadata={"Date": None, "Title": "GPU time, original over fused"})


@click.command(help=__doc__.split("\n")[0])
@click.argument("result", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("target", type=click.Path(path_type=Path, dir_okay=False))
def main(result: Path, target: Path) -> None:
    draw(json.loads(result.read_text()), target)


if __name__ == "__main__":
    main()
