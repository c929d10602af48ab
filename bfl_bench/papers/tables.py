"""Our numbers beside a paper's, and the commands for what is missing.

Groups that agree in all but what tells the rows and columns of a table apart make a setting, and each setting gets a
table or figure of its own. `published/NAME.csv` holds what a paper prints. In BA-BFL's, `model` is the number of
Bayesian layers. BA-BFL does not say what follows its +-; its released code takes the population standard deviation.
"""

import argparse
import csv
import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import yaml

from bfl_bench import records
from bfl_bench.identity import PARTS, fill_in, meaning
from bfl_bench.report.output import describe_notes, markdown, write
from bfl_bench.report.runs import (
    Config,
    Group,
    ReportError,
    Run,
    best_over,
    describe_choice,
    find_runs,
    flatten,
    group_over_seeds,
    is_beyond,
    without,
)

Row = tuple[str, str, str]
"""Partition, model and aggregator as a paper's table prints them."""

HERE = Path(__file__).parent
INCIDENTAL = (  # no paper means these
    "device", "threads", "eval.every", "eval.local_every", "eval.batch_size", "partition.max_tries"
)  # fmt: skip
METRICS = {  # metric in published/*.csv: heading, column of metrics.csv, factor
    "acc_percent": ("Acc (%)", "ga", 100),
    "ece_percent": ("ECE (%)", "ece", 100),
    "nll": ("NLL", "nll", 1),
    "std_norm": ("std norm", "std_norm", 1),
}


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
    values: Mapping[str, object] = field(default_factory=dict)  # that the preset has otherwise

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


def is_released(config: Config) -> bool:
    """Whether a run follows the released code of BFL-P and BA-BFL: a clamp that stops the gradient."""
    return config.get("model.log_variance_clamp") == "hard"


def find_settings(paper: Paper, runs: Iterable[Run], best_keys: Sequence[str] = ()) -> list[Setting]:
    """Runs that are rows of the paper's tables, by setting; those nearest to the paper's values first.

    Within a setting, all groups with partition `dirichlet`, say, must have the very same one: else it is an error.
    """
    found: dict[str, list[Group]] = {}
    for group in best_over(group_over_seeds(runs), best_keys):
        rest = without(group.config, [*PARTS, *paper.labels, *best_keys])
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
            values = {k: v for k, v in without(group.config, labels).items() if k.startswith(f"{part}.")}
            first = seen.setdefault(values[f"{part}.name"], values)
            for key in sorted(first.keys() | values.keys()):
                if (a := first.get(key)) != (b := values.get(key)):
                    (one,), (other,) = _options({key: a}), _options({key: b})
                    raise ReportError(
                        f"{part} {values[f'{part}.name']}: some runs have {one}, others {other}; "
                        f"choose with --where {one}, or give other --runs"
                    )


def _options(values: Config) -> list[str]:
    """As on the command line: model.name is the option chosen in the group model."""
    texts = {key.removesuffix(".name"): json.dumps(value, separators=(",", ":")) for key, value in values.items()}
    return [shlex.quote(f"{key}={text}".replace('"', "")) for key, text in texts.items()]


@cache
def read_conf(path: Path, prefix: str = "") -> Config:
    """The values of a file of conf/ and of those it builds on; of the options it chooses, only the model."""
    content = yaml.safe_load(path.read_text()) or {}
    values: Config = {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            values |= {"model.name": entry["override /model"]} if "override /model" in entry else {}
        elif entry != "_self_":
            values |= read_conf(path.with_name(f"{entry}.yaml"), prefix)
    return values | flatten(meaning(content), prefix)


def _expected(config: Config, experiment: str) -> Config:
    """What an experiment has, with the parts that a config names: defaults, then those of the parts, then its own."""
    folder = records.config_folder()
    sections = {key.split(".")[0] for key in config if "." in key}
    values = flatten(fill_in({section: {"_target_": config.get(f"{section}._target_")} for section in sections}))
    parts = [(folder / part / f"{config.get(f'{part}.name')}.yaml", f"{part}.") for part in (*PARTS, "model")]
    files = [(folder / "config.yaml", ""), *parts, (folder / "experiment" / f"{experiment}.yaml", "")]
    for path, prefix in files:
        values |= read_conf(path, prefix) if path.exists() else {}
    return values


def changes(paper: Paper, groups: Iterable[Group]) -> Config:
    """What the groups have otherwise than the paper's preset and the defaults, beside what tells rows apart."""
    found: Config = {}
    for group in groups:
        config = group.config
        expected = _expected(config, paper.name + ("_released" if is_released(config) else ""))
        expected |= {**paper.datasets.get(config["dataset.name"], {}), **paper.values}
        for key, value in without(config, paper.labels).items():
            if value != expected.get(key) and (value or expected.get(key)):  # no value is as good as none
                found[key] = value
    return found


def describe_scale(experiment: str, configs: Iterable[Config]) -> str:
    """What runs have otherwise than the paper's setting, of all that conf/scale/of/EXPERIMENT_cpu.yaml shortens.

    What a row of the experiment has is the paper's, too: tables show it. How many examples are evaluated at once
    changes no result.
    """
    folder = records.config_folder()
    rows = _read_rows(folder / "experiment" / f"{experiment}.yaml")
    cpu = folder / "scale" / "of" / f"{experiment}_cpu.yaml"
    shortened = dict.fromkeys(key for values in (read_conf(cpu), *_read_rows(cpu)) for key in values)
    found: dict[str, set[str]] = {}
    for config in configs:
        expected = _expected(config, experiment)
        for key in without(shortened, ["eval.batch_size"]):
            papers = [expected.get(key), *(row[key] for row in rows if key in row)]
            if key in config and config[key] not in papers:
                listed = " or ".join(dict.fromkeys(map(json.dumps, papers)))
                found.setdefault(key, set()).add(f"{key} {json.dumps(config[key])} (paper: {listed})")
    text = "; ".join(part for key in shortened for part in sorted(found.get(key, ())))
    return f"\nNot the paper's setting, so no reproduction of it: {text}.\n" if text else ""


def _read_rows(path: Path) -> list[Config]:
    """What the rows set, each, that a file of conf/, or one that it builds on, sweeps over."""
    content = yaml.safe_load(path.read_text()) or {}
    swept = content.get("hydra", {}).get("sweeper", {}).get("params", {}).get("row", "")
    if swept:
        return [read_conf(records.config_folder() / "row" / f"{row}.yaml") for row in swept.split(",")]
    built_on = [entry for entry in content.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
    return [row for entry in built_on for row in _read_rows(path.with_name(f"{entry}.yaml"))]


def sweep_lines(paper: Paper, released: bool, dataset: str, rows: Iterable[Row], changed: Config) -> list[str]:
    """The commands that make the rows; a command skips the runs that are there already."""
    start = f"bfl-run -m experiment={paper.name}{'_released' if released else ''} dataset={dataset}"
    sweeps: dict[str, list[str]] = {}
    for row in rows:
        overrides, aggregator = paper.overrides_of(row, released)
        values = {**paper.datasets[dataset], **paper.values}
        values |= without(changed, ["partition"]) if row[0] == "IID" else changed
        sweeps.setdefault(" ".join([start, *overrides, *_options(values)]), []).append(aggregator)
    ends = {line: [f"aggregator={','.join(rules)}"] if any(rules) else [] for line, rules in sweeps.items()}
    return [" ".join([line, *end, f"seed={','.join(map(str, paper.seeds))}"]) for line, end in ends.items()]


def compare(paper: Paper, table: str, arguments: argparse.Namespace) -> None:
    """For each setting: our numbers beside the paper's, and the commands for what is missing, as Markdown and CSV."""
    runs, notes = find_runs(arguments.runs, arguments.where, paper.row_of)
    rows = {row for _, row, _ in paper.published(table)}
    settings = find_settings(paper, runs, arguments.best_over)
    found = [setting for setting in settings if any(row in rows for _, row in setting.cells)]
    for setting in found or [Setting("equations", False, {}), Setting("released", True, {})]:
        text = f"# {paper.title}, table {table}: {setting.title}\n\n"
        text += (
            f"Last round; mean +- {paper.spread.replace('_', ' ')} over seeds; diff.: ours - paper's, (!) where it is "
            f"beyond both spreads together; dash: no run.\n{describe_choice(arguments.best_over)}"
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
            mark = " (!)" if ours and is_beyond(difference, spread, value_spread) else ""
            line += [_number(mean, spread), _number(value, value_spread), _number(difference, sign="+") + mark]
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
            changes(paper, here.values()) if here else without(changes(paper, setting.cells.values()), ["dataset"])
        )
        text += "\nMissing, or with fewer seeds than the paper's; to make them:\n\n"
        text += "".join(f"    {line}\n" for line in sweep_lines(paper, setting.released, dataset, missing, changed))
    return text, cells


def describe_changes(paper: Paper, groups: Iterable[Group]) -> str:
    options = " ".join(_options(without(changes(paper, groups), INCIDENTAL)))
    return f"\nNot the setting of {paper.title}, so no reproduction of it: {options}\n" if options else ""


def _number(value: float | None, spread: float | None = None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign}.2f}" + (f" +- {spread:.2f}" if spread is not None and not math.isnan(spread) else "")
