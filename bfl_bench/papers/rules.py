"""Tables of BFL-P and BA-BFL: rules of aggregation by dataset and partition, ours beside the paper's."""

import math

from bfl_bench.papers.pages import Page
from bfl_bench.papers.tables import Row, read_published_rows
from bfl_bench.report import mark, markdown

METRICS = {  # metric in published/*.csv: heading, column of metrics.csv, factor
    "acc_percent": ("Acc (%)", "ga", 100),
    "ece_percent": ("ECE (%)", "ece", 100),
    "nll": ("NLL", "nll", 1),
    "std_norm": ("std norm", "std_norm", 1),
}


def compare(page: Page, paper: str, head: str, spread: str, how: str = "runs by the released code") -> None:
    """A section per dataset, a row per cell; `spread` is the property of Stats that the paper prints."""
    number = page.table.published
    there = read_published_rows(page.table.paper, number)
    published = {} if page.scale == "smoke" else there
    metrics = {metric: METRICS[metric] for _, _, metric in there}
    text = f"# {paper}, {f'table {number}' if number[0].isdigit() else page.table.title}: {how}\n\n"
    text += f"Last round; mean +- {spread.replace('_', ' ')} over seeds; diff.: ours - paper's, (!) where it is "
    text += "beyond both spreads together.\n"
    cells: list[dict[str, object]] = []
    groups = page.groups()
    for dataset in dict.fromkeys(page.cell(group).names["dataset"] for group in groups):
        lines: list[list[str]] = []
        for group in groups:
            cell = page.cell(group)
            if cell.names["dataset"] != dataset:
                continue
            model, rule = cell.label.split(" / ", 1)
            row: Row = (cell.names.get("partition", "Non-IID"), model, rule)
            line = [*row]
            for metric, (_, column, factor) in metrics.items():
                ours = group.stats(column, factor)
                mean, ours_spread = (ours.mean, getattr(ours, spread)) if ours else (None, None)
                value, value_spread = published.get((dataset, row, metric), (None, None))
                difference = None if mean is None or value is None else mean - value
                line += [_number(mean, ours_spread), _number(value, value_spread)]
                line.append(_number(difference, sign="+") + mark(difference, ours_spread, value_spread))
                names = dict(zip(("partition", "model", "aggregator"), row, strict=True))
                found: dict[str, object] = {"dataset": dataset, **names, "metric": metric}
                found |= {"value": mean, "spread": ours_spread, "seeds": ours.num if ours else 0}
                cells.append(found | {"paper": value, "paper_spread": value_spread, "difference": difference})
            lines.append([*line, str(len(group.runs))])
        titles = [name for title, _, _ in metrics.values() for name in (title, "paper", "diff.")]
        text += f"\n## {dataset}\n\n{markdown(['Part.', head, 'Agg.', *titles, 'seeds'], lines)}"
    if absent := page.absent("dataset"):
        text += f"\nNo run here of {', '.join(absent)}.\n"
    page.write(text + describe_coincidence(page), cells)


def describe_coincidence(page: Page) -> str:
    """Say which rules cannot differ: where clients' variances are alike, they are the same average."""
    if not any(run.config.get("model.log_variance_clamp") == "hard" for run in page.runs):
        return ""
    return (
        "\nBy construction: a hard clamp passes no gradient to log variances below its range, where they start; only "
        "weight decay moves them, by the number of steps that a client takes. While clients' variances are nearly one "
        "number, EAA, AALV, WB and GAA with normalised weights, by their equations, average the same things, and RKLB "
        "weighs means by precisions that hardly differ: that these rules coincide is no finding.\n"
    )


def _number(value: float | None, spread: float | None = None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.2f}" + (f" +- {spread:.2f}" if spread is not None and not math.isnan(spread) else "")
