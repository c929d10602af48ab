"""What reports and scripts print and write: Markdown, CSV, figures; and how a script is called."""

import argparse
import csv
import io
import math
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from bfl_bench import records
from bfl_bench.errors import BflError, ConfigError
from bfl_bench.identity import modernise_override
from bfl_bench.report.runs import Group, ReportError, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def parse_arguments(description: str, commands: Iterable[str]) -> argparse.Namespace:
    """`where` of the result holds the asked values of config keys, the dataset among them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(commands))
    told = "folders with runs below, or archives of runs; `reference`: those that are shipped"
    parser.add_argument("--runs", type=Path, nargs="+", default=[Path("outputs")], help=told)
    parser.add_argument("--to", type=Path, default=Path("outputs/report"), help="folder for what is made")
    parser.add_argument("--dataset", help="only runs on this dataset")
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these config values"
    )
    arguments = parser.parse_args()
    arguments.where = parse_where(arguments.where)
    if arguments.dataset:
        arguments.where["dataset.name"] = arguments.dataset
    return arguments


def parse_where(items: Iterable[str]) -> dict[str, object]:
    """Read KEY=VALUE as on the command line, values as YAML."""
    found: dict[str, object] = {}
    for item in items:
        key, equals, value = modernise_override(item).partition("=")
        if not equals or not key:
            raise ConfigError("--where", item, "KEY=VALUE")
        try:
            found[key] = yaml.safe_load(value)
        except (yaml.YAMLError, ValueError):  # a date that is none, a number of thousands of digits
            allowed = "a number, a text, [a list]; brackets and quotes come in pairs"
            raise ConfigError(f"--where {key}", value, allowed) from None
    return found


def run_script(description: str, commands: Mapping[str, Callable[[argparse.Namespace], None]]) -> None:
    """Do what the user asks of a script, or say in one sentence why it cannot be done."""
    try:
        arguments = parse_arguments(description, commands)
        commands[arguments.command](arguments)
    except (BflError, OSError) as error:
        sys.exit(str(error))


def need(found: object, what: str, line: str) -> None:
    """Without runs there is nothing to show but the command that makes them."""
    if not found:
        raise ReportError(f"no finished run of {what} there; give other --runs, or make it:\n\n    {line}\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return _lay_out([head], rows, widths)


def wrapped(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The same for a terminal: a heading that is wider than all that stands below it takes several lines."""
    rows = list(rows)
    names = [name.replace(" ↑", "\N{NO-BREAK SPACE}↑").replace(" ↓", "\N{NO-BREAK SPACE}↓") for name in head]
    widths = [max(map(len, [*name.split(" "), *(row[i] for row in rows)])) for i, name in enumerate(names)]
    parts = [textwrap.wrap(name, width, break_on_hyphens=False) for name, width in zip(names, widths, strict=True)]
    height = max(map(len, parts))
    heads = list(zip(*([""] * (height - len(part)) + part for part in parts), strict=True))
    return _lay_out(heads, rows, widths).replace("\N{NO-BREAK SPACE}", " ")


def _lay_out(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> str:
    lines = [*heads, ["-" * width for width in widths], *rows]
    return "".join(f"| {' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True))} |\n" for line in lines)


def cells_as_markdown(cells: Sequence[Mapping[str, object]]) -> str:
    rows = [[f"{v:.3f}" if isinstance(v, float) else "-" if v is None else str(v) for v in c.values()] for c in cells]
    return markdown(list(cells[0]), rows)


def latex(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """A tabular of booktabs, with the caption as a comment; a row of one cell goes across all columns."""
    lines = [_latex_row(row, len(head)) for row in (head, *rows)]
    body = "\n".join([lines[0], r"\midrule", *lines[1:]])
    columns = "l" * len(head)
    return f"% {caption}\n\\begin{{tabular}}{{{columns}}}\n\\toprule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"


def _latex_row(row: Sequence[str], width: int) -> str:
    if len(row) == 1 < width:
        return rf"\multicolumn{{{width}}}{{p{{0.9\linewidth}}}}{{{_escape(row[0])}}} \\"
    return " & ".join(map(_escape, row)) + r" \\"


def _escape(cell: str) -> str:
    bold = cell.startswith("**") and cell.endswith("**")
    cell = escape_latex(cell)
    return f"\\textbf{{{cell[2:-2]}}}" if bold else cell


def escape_latex(text: str) -> str:
    """Write a text so that LaTeX prints it as it is, +- as one sign."""
    return text.translate(LATEX).replace("+-", r"$\pm$")


LATEX = {ord(character): "\\" + character for character in "_%#&{}$"}
LATEX |= {ord("↑"): r"$\uparrow$", ord("↓"): r"$\downarrow$"}
LATEX |= {
    ord("|"): r"\textbar{}",
    ord("\\"): r"\textbackslash{}",
    ord("<"): "$<$",
    ord(">"): "$>$",
    ord("^"): r"\^{}",
    ord("~"): r"\~{}",
}


def latex_of(text: str) -> str:
    """The tables of a Markdown text, each below the heading it stands under."""
    tables: list[str] = []
    heading = ""
    for block in text.split("\n\n"):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith("#"):
            heading = lines[0].lstrip("# ")
        if lines and lines[0].startswith("| "):
            head, _, *rows = ([cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines)
            tables.append(latex(head, rows, heading))
    return "\n".join(tables)


def write(to: Path, name: str, text: str, rows: Sequence[Mapping[str, object]]) -> None:
    """`name`.md, .tex and .csv, and the Markdown on the terminal."""
    to.mkdir(parents=True, exist_ok=True)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: empty_if_nan(value) for key, value in row.items()} for row in rows)
    records.write_text(to / f"{name}.md", text)
    records.write_text(to / f"{name}.tex", latex_of(text))
    records.write_text(to / f"{name}.csv", table.getvalue())
    print(text)


def empty_if_nan(value: object) -> object:
    """Leave out in CSV what does not exist, such as the spread of one seed."""
    return None if isinstance(value, float) and math.isnan(value) else value


def save_figure(figure: "Figure", to: Path, name: str) -> None:
    """`name`.pdf and `name`.png; the same figure gives the same bytes."""
    to.mkdir(parents=True, exist_ok=True)
    figure.savefig(to / f"{name}.pdf", metadata={"CreationDate": None})
    figure.savefig(to / f"{name}.png", dpi=150)
    print(f"figure: {to / name}.pdf, .png")


def describe_notes(notes: Sequence[str]) -> str:
    return "\nLeft out:\n\n" + "".join(f"- {note}\n" for note in notes) if notes else ""


def describe_missing(missing: Mapping[str, str]) -> str:
    """Of cells without a run: what they are, and the command that makes them."""
    return "\nNo run of:\n\n" + "".join(f"- {what}: `{line}`\n" for what, line in missing.items()) if missing else ""


def draw_curve(axes: "Axes", group: Group, column: str, factor: float = 100, **style: Any) -> None:
    """The mean of a column over seeds, round by round, with a band of one standard deviation."""
    curves = [run.curve(column) for run in group.runs]
    if not all(curves):
        return
    rounds = [round_ for round_, _ in curves[0]]
    found = [summarise([factor * value for _, value in points]) for points in zip(*curves, strict=True)]
    means = [stats.mean for stats in found]
    axes.plot(rounds, means, lw=1.3, marker="o" if len(rounds) == 1 else None, **style)
    if len(curves) > 1:
        low, high = ([stats.mean + sign * stats.std for stats in found] for sign in (-1, 1))
        axes.fill_between(rounds, low, high, color=style.get("color"), alpha=0.15, lw=0)
