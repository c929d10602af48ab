"""Trackers that follow a run, as observers: TensorBoard, MLflow, Weights & Biases.

Each is an extra of this package and imported only where `observer=` asks for it. A tracker gets the rows of
metrics.csv, round by round; the files of the run stay what they are.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bfl_bench.errors import ConfigError
from bfl_bench.identity import read_config
from bfl_bench.records import Cell
from bfl_bench.run.observers import RunInfo

MAX_LENGTH = 500
"""Of a config value as MLflow keeps it: older servers take no longer ones."""


def _need(name: str, module: str) -> None:
    """Refuse a tracker whose package is not installed, before anything is trained or written."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError("", name, f"a tracker that is installed: pip install 'bfl-bench[{name}]'")


def _numbers(row: Mapping[str, Cell] | None) -> dict[str, float]:
    """Keep what was measured; names such as `ga@eaa` become `ga/eaa`, as trackers take no @."""
    found = {} if row is None else row
    return {name.replace("@", "/"): value for name, value in found.items() if name != "round" and value is not None}


def _flatten(node: Mapping[str, Any], place: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in node.items():
        if isinstance(value, dict) and value:
            flat |= _flatten(value, f"{place}{key}.")
        else:
            flat[f"{place}{key}"] = str(value)
    return flat


def _config_of(folder: Path) -> dict[str, str]:
    """Read the run's config, one text for each dotted key."""
    return _flatten(read_config(folder) or {})


@dataclass
class TensorBoard:
    """Event files in the run's folder, below `tensorboard`: `tensorboard --logdir outputs` shows all runs."""

    name: str
    _writer: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        _need("tensorboard", "tensorboard")

    def begin(self, info: RunInfo) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of rounds that a killed run had begun, and that are played again, are hidden.
        self._writer = SummaryWriter(str(info.folder / "tensorboard"), purge_step=info.finished + 1)
        if not info.finished:
            lines = "\n".join(f"    {key}: {value}" for key, value in _config_of(info.folder).items())
            self._writer.add_text("config", lines)

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, round_)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._writer.close()


@dataclass
class Mlflow:
    """A run of MLflow with the name of the run's folder; a continued run goes on in the same one."""

    name: str
    experiment: str
    uri: str | None  # of the tracking server or store; None: the database mlflow.db beside the run folders
    _client: Any = field(default=None, init=False)
    _run: str = field(default="", init=False)

    def __post_init__(self) -> None:
        _need("mlflow", "mlflow")
        if self.uri is None:
            _need("mlflow", "sqlalchemy")

    def begin(self, info: RunInfo) -> None:
        from mlflow.tracking import MlflowClient

        out = info.folder.absolute().parent
        local = self.uri is None
        self._client = MlflowClient(tracking_uri=f"sqlite:///{out / 'mlflow.db'}" if local else self.uri)
        experiment = self._client.get_experiment_by_name(self.experiment)
        place = (out / "mlruns").as_uri() if local else None
        number = experiment.experiment_id if experiment else self._client.create_experiment(self.experiment, place)
        wanted = f"tags.`bfl_bench.folder` = '{info.folder.name}'"
        earlier = self._client.search_runs([number], wanted)
        if earlier and info.finished:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        for run in earlier:  # of the same folder, which is started over
            if run.info.status == "RUNNING":
                self._client.set_terminated(run.info.run_id, "KILLED")
        tags = {"bfl_bench.folder": info.folder.name}
        self._run = self._client.create_run(number, run_name=info.folder.name, tags=tags).info.run_id
        for key, value in _config_of(info.folder).items():
            self._client.log_param(self._run, key, value[:MAX_LENGTH])

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        for name, value in _numbers(row).items():
            self._client.log_metric(self._run, name, value, step=round_)

    def end(self, summary: Mapping[str, Any]) -> None:
        status = {"done": "FINISHED", "interrupted": "KILLED"}.get(summary["status"], "FAILED")
        self._client.set_terminated(self._run, status)


@dataclass
class WeightsAndBiases:
    """A run of Weights & Biases whose id is the name of the run's folder, in that folder below `wandb`."""

    name: str
    project: str
    mode: Literal["offline", "online"]
    _run: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        _need("wandb", "wandb")

    def begin(self, info: RunInfo) -> None:
        import wandb

        self._run = wandb.init(
            project=self.project,
            name=info.folder.name,
            id=info.folder.name,
            resume="allow" if self.mode == "online" else None,
            dir=str(info.folder),
            mode=self.mode,
            config=dict(_config_of(info.folder)),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def round(self, round_: int, row: Mapping[str, Cell] | None) -> None:
        if numbers := _numbers(row):
            self._run.log(numbers, step=round_)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary["status"] = summary["status"]
        self._run.finish(exit_code=0 if summary["status"] == "done" else 1)
