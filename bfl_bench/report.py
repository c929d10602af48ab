"""Tables and figures out of finished runs, for the scripts that redo a paper's. Reads run folders, never torch.

Runs are matched by the values of their configs, never by the names of folders. Runs that differ in the seed alone are a
group, and only within a group is anything averaged. Groups that agree in all but what tells the rows and columns of a
table apart make a setting, and each setting gets a table or figure of its own.

`published/NAME.csv` holds what a paper prints. In BA-BFL's, `model` is the number of Bayesian layers. BA-BFL does not
say what follows its +-; its released code takes the population standard deviation.
"""

import argparse
import csv
import io
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from bfl_bench import records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = dict[str, Any]
"""Flat: `local.lr` -> 0.01. Only what decides a result, as `records.identity` has it."""

Row = tuple[str, str, str]
"""Partition, model and aggregator as a paper's table prints them."""

HERE = Path(__file__).parent
PARTS = ("dataset", "partition", "method", "aggregator")
INCIDENTAL = (  # no paper means these
    "device", "threads", "eval.every", "eval.local_every", "eval.batch_size", "partition.max_tries"
)  # fmt: skip
METRICS = {  # metric in published/*.csv: heading, column of metrics.csv, factor
    "acc_percent": ("Acc (%)", "ga", 100),
    "ece_percent": ("ECE (%)", "ece", 100),
    "nll": ("NLL", "nll", 1),
    "std_norm": ("std norm", "std_norm", 1),
}


class ReportError(Exception):
    """The runs cannot be put into one table; the sentence says why, and what to do."""


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Config
    final: Mapping[str, records.Cell]

    def seconds_per_round(self) -> float:
        """Training of all clients, added up, and aggregation; mean over the rounds."""
        rows = records.read_table(self.folder / records.TIMING)
        return statistics.fmean((row["client_seconds"] or 0) + (row["server_seconds"] or 0) for row in rows)


class Stats(NamedTuple):
    """Over seeds; `std` and `standard_error` with n - 1. A single seed has no spread: NaN."""

    num: int
    mean: float
    std: float
    population_std: float
    standard_error: float


def summarise(values: Sequence[float]) -> Stats:
    num, mean = len(values), statistics.fmean(values)
    std = statistics.stdev(values) if num > 1 else math.nan
    return Stats(num, mean, std, std * math.sqrt((num - 1) / num), std / math.sqrt(num))


@dataclass(frozen=True)
class Group:
    """Runs whose configs differ in the seed alone; `config` has none."""

    config: Config
    runs: tuple[Run, ...]

    def stats(self, metric: str, factor: float = 1) -> Stats | None:
        """Of a column of metrics.csv in the last round, or `seconds_per_round`; None where a run lacks it."""
        timed = metric == "seconds_per_round"
        values = [run.seconds_per_round() if timed else run.final.get(metric) for run in self.runs]
        present = [factor * value for value in values if value is not None]
        return summarise(present) if len(present) == len(values) else None


@dataclass(frozen=True)
class Setting:
    name: str  # for files: equations, released, and with a number from the second of a kind on
    released: bool
    cells: Mapping[tuple[str, Row], Group]  # by dataset and row

    @property
    def datasets(self) -> list[str]:
        return sorted({dataset for dataset, _ in self.cells})

    @property
    def title(self) -> str:
        return "runs by the released code" if self.released else "runs by the paper's equations"


@dataclass(frozen=True)
class Paper:
    """How a paper's tables map to configs, by published/NAME.csv and conf/experiment/NAME[_released].yaml."""

    name: str
    title: str
    seeds: tuple[int, ...]
    spread: str  # the property of Stats that the paper prints
    labels: tuple[str, ...]  # config keys beside dataset, partition, method, aggregator that tell rows apart
    row_of: Callable[[Config], Row | None]
    overrides_of: Callable[[Row, bool], tuple[list[str], str]]  # of a row, by equations or released; and its aggregator
    datasets: Mapping[str, Config]  # with values that conf/dataset/*.yaml has otherwise

    def published(self, table: str) -> dict[tuple[str, Row, str], tuple[float, float]]:
        """Value and spread by dataset, row and metric."""
        with (HERE / "published" / f"{self.name}.csv").open(newline="") as file:
            return {
                (c["dataset"], (c["partition"], c["model"], c["aggregator"]), c["metric"]): (
                    float(c["value"]),
                    float(c["spread"]),
                )
                for c in csv.DictReader(file)
                if c["table"] == table
            }


def read_published(paper: str, table: str) -> dict[tuple[str, str], float]:
    """What a paper prints, by row and column."""
    with (HERE / "published" / f"{paper}.csv").open(newline="") as file:
        return {(c["row"], c["column"]): float(c["value"]) for c in csv.DictReader(file) if c["table"] == table}


def need(found: object, what: str, line: str) -> None:
    """Without runs there is nothing to show but the command that makes them."""
    if not found:
        raise ReportError(f"no finished run of {what} there; give other --runs, or make it:\n\n    {line}\n")


def flatten(config: Mapping[str, Any], prefix: str = "") -> Config:
    flat: Config = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return flat


def is_released(config: Config) -> bool:
    """Whether a run follows the released code of BFL-P and BA-BFL: a clamp that stops the gradient."""
    return config.get("model.log_variance_clamp") == "hard"


def find_runs(
    paths: Sequence[Path], where: Config, keep: Callable[[Config], object] = bool
) -> tuple[list[Run], list[str]]:
    """The finished runs below the paths that hold the values and are to be kept, and a sentence on each left out."""
    runs: dict[str, Run] = {}
    notes = [f"{path}: no such folder" for path in paths if not path.exists()]
    files = {file.resolve(): file for path in paths for file in sorted(path.rglob(records.CONFIG))}
    for file in files.values():
        content = yaml.safe_load(file.read_text())
        if not isinstance(content, dict) or not {"seed", "rounds", *PARTS} <= set(content):
            continue  # not a run's
        folder, config = file.parent, flatten(records.identity(content))
        if any(config.get(key) != value for key, value in records.identity(where).items()) or not keep(config):
            continue
        summary = records.read_json(folder / records.SUMMARY)
        identity = json.dumps(config, sort_keys=True)
        if summary is None or summary["status"] != "done":
            notes.append(f"{folder}: {summary['status'] if summary else 'not finished'}; not in the means")
        elif identity in runs:
            notes.append(f"{folder}: the same config as {runs[identity].folder}; counted once")
        else:
            runs[identity] = Run(folder, config, summary["final"])
    return list(runs.values()), notes


def group_over_seeds(runs: Iterable[Run]) -> list[Group]:
    groups: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.config["seed"]):
        groups.setdefault(json.dumps(_without(run.config, ["seed"]), sort_keys=True), []).append(run)
    return [Group(_without(members[0].config, ["seed"]), tuple(members)) for members in groups.values()]


def find_settings(paper: Paper, runs: Iterable[Run]) -> list[Setting]:
    """Runs that are rows of the paper's tables, by setting; those nearest to the paper's values first.

    Within a setting, all groups with partition `dirichlet`, say, must have the very same one: else it is an error.
    """
    found: dict[str, list[Group]] = {}
    for group in group_over_seeds(runs):
        rest = _without(group.config, [*PARTS, *paper.labels])
        found.setdefault(json.dumps(rest, sort_keys=True), []).append(group)
    settings: list[Setting] = []
    for groups in sorted(found.values(), key=lambda groups: len(changes(paper, groups[:1]))):
        _check_parts(groups, paper.labels)
        released = is_released(groups[0].config)
        number = 1 + sum(other.released == released for other in settings)
        name = ("released" if released else "equations") + (f"_{number}" if number > 1 else "")
        cells = {(g.config["dataset.name"], row): g for g in groups if (row := paper.row_of(g.config))}
        if len(cells) < len(groups):
            folders = ", ".join(str(group.runs[0].folder) for group in groups)
            raise ReportError(f"two configs are one row of {paper.title}; give other --runs: {folders}")
        settings.append(Setting(name, released, cells))
    return settings


def _check_parts(groups: Sequence[Group], labels: Sequence[str]) -> None:
    for part in PARTS:
        seen: dict[str, Config] = {}
        for group in groups:
            values = {k: v for k, v in _without(group.config, labels).items() if k.startswith(f"{part}.")}
            first = seen.setdefault(values[f"{part}.name"], values)
            for key in sorted(first.keys() | values.keys()):
                if (a := first.get(key)) != (b := values.get(key)):
                    (one,), (other,) = _options({key: a}), _options({key: b})
                    raise ReportError(
                        f"{part} {values[f'{part}.name']}: some runs have {one}, others {other}; "
                        f"choose with --where {one}, or give other --runs"
                    )


def _without(config: Config, keys: Sequence[str]) -> Config:
    return {k: v for k, v in config.items() if not any(k == key or k.startswith(f"{key}.") for key in keys)}


def _options(values: Config) -> list[str]:
    """As on the command line: model.name is the option chosen in the group model."""
    texts = {key.removesuffix(".name"): json.dumps(value, separators=(",", ":")) for key, value in values.items()}
    return [shlex.quote(f"{key}={text}".replace('"', "")) for key, text in texts.items()]


@cache
def read_conf(path: Path, prefix: str = "") -> Config:
    """The values of a file of conf/ and of those it builds on; of the options it chooses, only the model."""
    content = yaml.safe_load(path.read_text())
    values: Config = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            values |= {"model.name": entry["override /model"]} if "override /model" in entry else {}
        elif entry != "_self_":
            values |= read_conf(path.with_name(f"{entry}.yaml"), prefix)
    return values | flatten(records.identity(content), prefix)


def changes(paper: Paper, groups: Iterable[Group]) -> Config:
    """What the groups have otherwise than the paper's preset and the defaults, beside what tells rows apart."""
    found: Config = {}
    for group in groups:
        config = group.config
        files = [
            (records.config_folder() / part / f"{config[f'{part}.name']}.yaml", f"{part}.")
            for part in (*PARTS, "model")
        ]
        preset = paper.name + ("_released" if is_released(config) else "")
        files = [
            (records.config_folder() / "config.yaml", ""),
            *files,
            (records.config_folder() / "experiment" / f"{preset}.yaml", ""),
        ]
        expected: Config = {}
        for path, prefix in files:
            expected |= read_conf(path, prefix) if path.exists() else {}
        expected |= paper.datasets.get(config["dataset.name"], {})
        for key, value in _without(config, paper.labels).items():
            if value != expected.get(key) and (value or expected.get(key)):  # no value is as good as none
                found[key] = value
    return found


def sweep_lines(paper: Paper, released: bool, dataset: str, rows: Iterable[Row], changed: Config) -> list[str]:
    """The commands that make the rows; a command skips the runs that are there already."""
    start = f"bfl-run -m experiment={paper.name}{'_released' if released else ''} dataset={dataset}"
    sweeps: dict[str, list[str]] = {}
    for row in rows:
        overrides, aggregator = paper.overrides_of(row, released)
        values = paper.datasets[dataset] | (_without(changed, ["partition"]) if row[0] == "IID" else changed)
        sweeps.setdefault(" ".join([start, *overrides, *_options(values)]), []).append(aggregator)
    ends = {line: [f"aggregator={','.join(rules)}"] if any(rules) else [] for line, rules in sweeps.items()}
    return [" ".join([line, *end, f"seed={','.join(map(str, paper.seeds))}"]) for line, end in ends.items()]


def compare(paper: Paper, table: str, arguments: argparse.Namespace) -> None:
    """For each setting: our numbers beside the paper's, and the commands for what is missing, as Markdown and CSV."""
    runs, notes = find_runs(arguments.runs, arguments.where, paper.row_of)
    rows = {row for _, row, _ in paper.published(table)}
    found = [setting for setting in find_settings(paper, runs) if any(row in rows for _, row in setting.cells)]
    for setting in found or [Setting("equations", False, {}), Setting("released", True, {})]:
        text = f"# {paper.title}, table {table}: {setting.title}\n\n"
        text += (
            f"Last round; mean +- {paper.spread.replace('_', ' ')} over seeds; diff.: ours - paper's; dash: no run.\n"
        )
        cells: list[dict[str, object]] = []
        for dataset in [arguments.dataset] if arguments.dataset else setting.datasets or paper.datasets:
            section, more = _compare_dataset(paper, table, setting, dataset)
            text, cells = text + section, cells + more
        write(arguments.to, f"{paper.name}_table{table}_{setting.name}", text + describe_notes(notes), cells)


def _compare_dataset(paper: Paper, table: str, setting: Setting, dataset: str) -> tuple[str, list[dict[str, object]]]:
    published = paper.published(table)
    metrics = {metric: METRICS[metric] for _, _, metric in published}
    here = {row: group for (name, row), group in setting.cells.items() if name == dataset}
    cells: list[dict[str, object]] = []
    lines: list[list[str]] = []
    missing: list[Row] = []
    for row in dict.fromkeys(row for _, row, _ in published):
        group = here.get(row)
        if group is None and dataset not in paper.datasets:
            continue
        if group is None or not set(paper.seeds) <= {run.config["seed"] for run in group.runs}:
            missing.append(row)
        line = [*row]
        for metric, (_, column, factor) in metrics.items():
            ours = group.stats(column, factor) if group else None
            mean, spread = (ours.mean, getattr(ours, paper.spread)) if ours else (None, None)
            value, value_spread = published.get((dataset, row, metric), (None, None))
            difference = None if mean is None or value is None else mean - value
            line += [_number(mean, spread), _number(value, value_spread), _number(difference, sign="+")]
            cell: dict[str, object] = {
                "dataset": dataset,
                "partition": row[0],
                "model": row[1],
                "aggregator": row[2],
                "metric": metric,
            }
            cell |= {"value": mean, "spread": spread, "seeds": ours.num if ours else 0}
            cells.append(cell | {"paper": value, "paper_spread": value_spread, "difference": difference})
        lines.append([*line, str(len(group.runs)) if group else "-"])
    head = ["Part.", "Nbl" if "model.bayesian_layers" in paper.labels else "Model", "Agg."]
    head += [name for title, _, _ in metrics.values() for name in (title, "paper", "diff.")] + ["seeds"]
    text = f"\n## {dataset}\n\n{markdown(head, lines)}" + describe_changes(paper, here.values())
    if missing and dataset in paper.datasets:
        changed = (
            changes(paper, here.values()) if here else _without(changes(paper, setting.cells.values()), ["dataset"])
        )
        text += "\nMissing, or with fewer seeds than the paper's; to make them:\n\n"
        text += "".join(f"    {line}\n" for line in sweep_lines(paper, setting.released, dataset, missing, changed))
    return text, cells


def describe_changes(paper: Paper, groups: Iterable[Group]) -> str:
    options = " ".join(_options(_without(changes(paper, groups), INCIDENTAL)))
    return f"\nNot the setting of {paper.title}, so no reproduction of it: {options}\n" if options else ""


def describe_notes(notes: Sequence[str]) -> str:
    return "\nLeft out:\n\n" + "".join(f"- {note}\n" for note in notes) if notes else ""


def _number(value: float | None, spread: float | None = None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.2f}" + (f" +- {spread:.2f}" if spread is not None and not math.isnan(spread) else "")


# Output


def parse_arguments(description: str, commands: Iterable[str]) -> argparse.Namespace:
    """`where` of the result holds the asked values of config keys, the dataset among them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=list(commands))
    parser.add_argument("--runs", type=Path, nargs="+", default=[Path("outputs")], help="folders with runs below")
    parser.add_argument("--to", type=Path, default=Path("outputs/report"), help="folder for what is made")
    parser.add_argument("--dataset", help="only runs on this dataset")
    parser.add_argument(
        "--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these config values"
    )
    arguments = parser.parse_args()
    pairs = (item.partition("=") for item in arguments.where)
    arguments.where = {key: yaml.safe_load(value) for key, _, value in pairs}
    if arguments.dataset:
        arguments.where["dataset.name"] = arguments.dataset
    return arguments


def run_script(description: str, commands: Mapping[str, Callable[[argparse.Namespace], None]]) -> None:
    """The main function of a script: what the user asks for, or one sentence why it cannot be."""
    try:
        arguments = parse_arguments(description, commands)
        commands[arguments.command](arguments)
    except ReportError as error:
        sys.exit(str(error))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "".join(f"| {' | '.join(c.ljust(w) for c, w in zip(line, widths, strict=True))} |\n" for line in lines)


def write(to: Path, name: str, text: str, rows: Sequence[Mapping[str, object]]) -> None:
    """`name`.md and `name`.csv, and the Markdown on the terminal."""
    to.mkdir(parents=True, exist_ok=True)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    records.write_text(to / f"{name}.md", text)
    records.write_text(to / f"{name}.csv", table.getvalue())
    print(text)


def save_figure(figure: "Figure", to: Path, name: str) -> None:
    """`name`.pdf and `name`.png; the same figure gives the same bytes."""
    to.mkdir(parents=True, exist_ok=True)
    figure.savefig(to / f"{name}.pdf", metadata={"CreationDate": None})
    figure.savefig(to / f"{name}.png", dpi=150)
    print(f"figure: {to / name}.pdf, .png")
