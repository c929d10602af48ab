"""The figures of a suite: critical differences, fronts of value against cost, what the search saw."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import Ranks, Row
from bfl_bench.report.style import styled
from bfl_bench.suite.ranking import find_front

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COST_LABELS = {"bytes_up": "bytes from clients", "client_seconds": "client seconds"}


@styled
def draw_ranks(ranks: Ranks, ties: Sequence[Sequence[str]], metric: str) -> "Figure":
    """Draw mean ranks on a line, methods that cannot be told apart joined by bars (Demsar's diagram)."""
    from matplotlib.figure import Figure

    ordered = sorted(ranks.mean_ranks, key=lambda name: (ranks.mean_ranks[name], name))
    half = math.ceil(len(ordered) / 2)
    figure = Figure(figsize=(8, 0.9 + 0.22 * len(ties) + 0.24 * half), layout="constrained")
    axes = figure.subplots()
    lowest, highest = 1, len(ordered)
    axes.hlines(0, lowest, highest, color="black", linewidth=1)
    for tick in range(lowest, highest + 1):
        axes.vlines(tick, 0, 0.15, color="black", linewidth=1)
        axes.text(tick, 0.25, str(tick), ha="center", va="bottom", fontsize=9)
    for level, group in enumerate(ties):
        first, last = (ranks.mean_ranks[group[end]] for end in (0, -1))
        axes.hlines(-0.5 - level * 0.9, first - 0.05, last + 0.05, color="black", linewidth=4)
    top = -0.5 - 0.9 * len(ties)
    for place, name in enumerate(ordered):
        left = place < half
        height = top - 0.5 - (place if left else len(ordered) - 1 - place)
        edge = lowest - 0.1 if left else highest + 0.1
        where = ranks.mean_ranks[name]
        axes.plot([where, where, edge], [0, height, height], color="0.5", linewidth=0.8)
        side = "right" if left else "left"
        axes.text(edge, height, f" {name} {where:.2f} ", ha=side, va="center", fontsize=9)
    length = min(ranks.critical_difference, highest - lowest)
    axes.set_title(
        f"Mean rank by {metric} over {ranks.num_blocks} settings (1 is best); "
        f"critical difference {ranks.critical_difference:.2f}",
        fontsize=10,
    )
    axes.hlines(1.0, lowest, lowest + length, color="black", linewidth=2)
    axes.set_ylim(top - half - 0.3, 1.3)
    axes.set_xlim(lowest - 0.35 * highest, highest + 0.35 * highest)
    axes.axis("off")
    return figure


@styled
def draw_fronts(rows: Sequence[Row], metrics: Mapping[str, str], costs: Sequence[str]) -> "Figure":
    """Draw a metric, named for each setting, against each cost; the front's members are named and joined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(costs), 3.2 * len(metrics)), layout="constrained")
    panels = figure.subplots(len(metrics), len(costs), squeeze=False)
    for line, (setting, metric) in zip(panels, metrics.items(), strict=True):
        sign = 1 if columns.direction(metric) == "up" else -1
        for axes, cost in zip(line, costs, strict=True):
            points = {
                row.name: (found.mean, value.mean)
                for row in rows
                if row.block == setting and (found := row.stats(cost)) and (value := row.stats(metric))
            }
            front = find_front({name: (c, sign * v) for name, (c, v) in points.items()})
            for name, (c, v) in points.items():
                axes.plot(c, v, "o", color="C0" if name in front else "0.7", markersize=5)
                if name in front:
                    axes.annotate(name, (c, v), xytext=(4, 4), textcoords="offset points", fontsize=9)
            joined = sorted(points[name] for name in front)
            if joined:
                axes.plot(*zip(*joined, strict=True), color="C0", linewidth=1, alpha=0.6)
            axes.set(title=setting, xlabel=COST_LABELS.get(cost, cost), ylabel=columns.heading(metric), xscale="log")
            axes.grid(alpha=0.3)
    return figure


@styled
def draw_search(rows: Sequence[Mapping[str, str]], labels: Mapping[str, str], settings: Sequence[str]) -> "Figure":
    """Draw what every search saw: validation NLL over the learning rate, a panel per method, a colour per setting."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    methods = [name for name in labels if any(row["method"] == name for row in rows)]
    num_columns = min(4, len(methods))
    num_lines = math.ceil(len(methods) / num_columns)
    figure = Figure(figsize=(3 * num_columns, 2.4 * num_lines + 0.5), layout="constrained")
    panels = figure.subplots(num_lines, num_columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, method in zip(panels, methods, strict=False):
        for number, setting in enumerate(settings):
            there = [row for row in rows if row["method"] == method and row["setting"] == setting]
            points = sorted(
                (json.loads(row["values"])["local.lr"], float(row["nll"]))
                for row in there
                if row["nll"] and "local.lr" in json.loads(row["values"])
            )
            if points:
                axes.plot(*zip(*points, strict=True), "o", color=f"C{number}", markersize=4, label=setting)
        num_diverged = sum(not row["nll"] for row in rows if row["method"] == method)
        title = labels[method] + (f" ({num_diverged} diverged)" if num_diverged else "")
        axes.set(xlabel="learning rate", xscale="log", yscale="log")
        axes.set_title(title, fontsize=10)
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.label_outer()
        axes.grid(alpha=0.3)
    for axes in panels[len(methods) :]:
        axes.axis("off")
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    figure.supylabel("negative log-likelihood on validation", fontsize=10)
    return figure
