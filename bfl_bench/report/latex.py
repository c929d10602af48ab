"""A comparison as LaTeX that a paper can take as it is: methods in rows, settings in columns, shares in percent.

Needs the package booktabs. Bold and underlined is what the caption says.
"""

from collections.abc import Sequence

from bfl_bench.evaluation import columns
from bfl_bench.report.comparison import Comparison, Row, Spread, is_below, is_share, text_of
from bfl_bench.report.output import escape_latex

MAX_COLUMNS = 8  # of numbers side by side; where there are more, each metric has a table

PARTS = ("method", "aggregator")  # whose own parameters, being many, stand in the caption


def latex_tables(comparison: Comparison, metrics: Sequence[str], spread: Spread, caption: str, label: str) -> str:
    """Make one table, or one for each metric; the caption stands below the first and is referred to by the others."""
    settings = list(dict.fromkeys(row.block for row in comparison.rows))
    together = len(settings) * len(metrics) <= MAX_COLUMNS
    parts = [list(metrics)] if together else [[metric] for metric in metrics]
    said = " ".join([caption, *_parameters(comparison, settings)])
    tables = [
        _table(
            comparison,
            settings,
            part,
            spread,
            escape_latex(said) if i == 0 else f"As Table~\\ref{{{label}}}.",
            label if i == 0 else f"{label}-{i + 1}",
        )
        for i, part in enumerate(parts)
    ]
    return "% needs \\usepackage{booktabs}\n" + "\n".join(tables)


def _table(
    comparison: Comparison, settings: Sequence[str], metrics: Sequence[str], spread: Spread, caption: str, label: str
) -> str:
    rows = _by_place(comparison)
    titles = {row.block: row.setting for row in comparison.rows}
    names = list(dict.fromkeys(row.name for row in comparison.rows))
    own = [key for key in comparison.keys.own if not is_below(key, PARTS)]
    left = ["", *own]
    several = len(settings) > 1
    num = len(settings) * len(metrics)
    lines = [
        r"\begin{table}",
        r"\centering",
        f"\\caption{{{caption}}}",
        f"\\label{{{label}}}",
        f"\\begin{{tabular}}{{{'l' * len(left)}{'r' * num}}}",
        r"\toprule",
    ]
    if several:
        groups = [f"\\multicolumn{{{len(settings)}}}{{c}}{{{_heading(metric)}}}" for metric in metrics]
        lines.append(" & ".join([*[""] * len(left), *groups]) + r" \\")
        first = len(left) + 1
        ends = [(first + i * len(settings), first + (i + 1) * len(settings) - 1) for i in range(len(metrics))]
        lines.append(" ".join(f"\\cmidrule(lr){{{low}-{high}}}" for low, high in ends))
        heads = [escape_latex(titles[block]) for _ in metrics for block in settings]
    else:
        heads = [_heading(metric) for metric in metrics]
    lines += [" & ".join([*map(escape_latex, left), *heads]) + r" \\", r"\midrule"]
    for name in names:
        there = [rows.get((block, name)) for block in settings]
        words = [escape_latex(_own_values(there, key)) for key in own]
        cells = [_cell(row, metric, spread) for metric in metrics for row in there]
        lines.append(" & ".join([escape_latex(name), *words, *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _by_place(comparison: Comparison) -> dict[tuple[str, str], Row]:
    return {(row.block, row.name): row for row in comparison.rows}


def _parameters(comparison: Comparison, settings: Sequence[str]) -> list[str]:
    """Write the sentence on what parameters of their own the methods have, where these differ."""
    keys = [key for key in comparison.keys.own if is_below(key, PARTS)]
    rows = _by_place(comparison)
    named: list[str] = []
    for name in dict.fromkeys(row.name for row in comparison.rows):
        values = {key: _own_values([rows.get((block, name)) for block in settings], key) for key in keys}
        parts = [f"{key.partition('.')[2]} {value}" for key, value in values.items() if value != "-"]
        named += [f"{name}: {', '.join(parts)}"] if parts else []
    return [f"Parameters: {'; '.join(named)}."] if named else []


def _own_values(rows: Sequence[Row | None], key: str) -> str:
    """Say the value of a key that is each row's own; where it differs between settings, all of them in their order."""
    values = ["-" if row is None or row.label[key] is None else str(row.label[key]) for row in rows]
    known = {value for value, row in zip(values, rows, strict=True) if row is not None and row.group is not None}
    return values[0] if len(set(values)) == 1 else known.pop() if len(known) == 1 else " / ".join(values)


def _heading(metric: str) -> str:
    unit = " (%)" if is_share(metric) else ""
    arrow = columns.heading(metric).removeprefix(columns.label(metric))
    return escape_latex(f"{columns.label(metric)}{unit}{arrow}")


def _cell(row: Row | None, metric: str, spread: Spread) -> str:
    if row is None or row.stats(metric) is None:
        return "--"
    text = escape_latex(text_of(row, metric, spread, percent=True))
    if metric in row.best_in:
        return f"\\textbf{{{text}}}"
    return f"\\underline{{{text}}}" if metric in row.leads_in else text
