"""bfl-bench from Python, in a script or a notebook: run an experiment, use its model, compare runs.

What the commands do stands below; this is a layer over them, with the same checks, the same folders and the same
numbers. Errors that a user can act on are `BflError`s, each one sentence.
"""

import copy
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bfl_bench import records
from bfl_bench.errors import BflError, ConfigError, RunError
from bfl_bench.identity import read_config

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor, nn

    from bfl_bench.build import Plan
    from bfl_bench.likelihood import AnyPrediction
    from bfl_bench.run.loop import Experiment

METRICS = ("ga", "la", "worst10", "ece", "nll")
"""Columns that `compare` shows unless asked for others."""


@dataclass(frozen=True)
class Run:
    """A run's folder: its tables as DataFrames, its summary and its config as dictionaries."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """What summary.json says: status, final and best values, by what the best round was chosen."""
        found = records.read_json(self.folder / records.SUMMARY)
        if found is None:
            raise RunError(f"{self.folder} has no {records.SUMMARY}: it is not the folder of a finished run")
        return found

    @property
    def status(self) -> str:
        """`done`, `diverged` or `interrupted`."""
        return str(self.summary["status"])

    @property
    def config(self) -> dict[str, Any]:
        """The config as it was resolved."""
        found = read_config(self.folder)
        if found is None:
            raise RunError(f"{self.folder} is not the folder of a run, with its {records.CONFIG}")
        return copy.deepcopy(found)

    @property
    def metrics(self) -> "pd.DataFrame":
        """One row per evaluated round; docs/metrics.md defines the columns."""
        return self.table("metrics")

    def table(self, name: str) -> "pd.DataFrame":
        """Read a table of the run by its name: metrics, clients, timing, reliability, risk, shift, ..."""
        import pandas as pd

        path = self.folder / f"{Path(name).stem}.csv"
        if not path.exists():
            raise ConfigError("table", name, ", ".join(sorted(file.stem for file in self.folder.glob("*.csv"))))
        return pd.DataFrame(records.read_table(path))

    def load(self, modules: Sequence[str] = ()) -> "Model":
        """Load the final model; see `load`."""
        return load(self.folder, modules)


@dataclass(frozen=True, kw_only=True)
class WeightPosterior:
    """What a model knows of its weights: tensors by the names and in the shapes that `Model.model` has them."""

    mean: "dict[str, Tensor] | None"  # None: the members share no centre, as those of an ensemble
    deviation: "dict[str, Tensor] | None"  # standard deviations; None: it is no Gaussian. Parameters without are points
    _model: "Model"

    def draw(self, num: int = 1, seed: int = 0) -> "Iterator[nn.Module]":
        """Yield networks with parameters that are drawn from the posterior; an ensemble yields its members."""
        from bfl_bench.build import make_plain
        from bfl_bench.rng import stream

        experiment, rng = self._model._experiment, stream(seed, "posterior")
        task, method, state = experiment.worker.task, experiment.worker.method, self._model._state
        laplace = self._model._laplace
        drawn = method.draws(task, state, num, rng) if laplace is None else laplace[0].draw(laplace[1], num, rng)
        for vector in drawn:
            yield make_plain(self._model._plan, experiment, vector.clone())


@dataclass(frozen=True, kw_only=True)
class Model:
    """The final model of a finished run: what it predicts, what it knows of its weights, its network for other use."""

    run: Run
    _plan: "Plan"
    _experiment: "Experiment"
    _state: "dict[str, Tensor]"

    @property
    def test(self) -> "tuple[Tensor, Tensor]":
        """The test examples: network inputs x (n, ...) and labels y (n, ...)."""
        split = self._experiment.worker.sets["test"].split
        return split.x, split.y

    def predict(self, x: "Tensor | np.ndarray[Any, Any]") -> "Tensor":
        """Predict probabilities of the classes, (n, C, ...), of network inputs x (n, ...), as the run was evaluated.

        Where labels are numbers, their mean (n,).

        Inputs are normalised as those of `test`. A Bayesian method averages over its posterior with the draws of the
        last evaluation, so that the scores of `predict(test)` are those in the last row of metrics.csv.
        """
        from bfl_bench.likelihood import Prediction

        found = self.predictive(x)
        return found.log_probabilities.exp() if isinstance(found, Prediction) else found.means.mean(0)

    def predictive(self, x: "Tensor | np.ndarray[Any, Any]") -> "AnyPrediction":
        """Predict likewise, with what the prediction knows besides: log probabilities, expected entropy."""
        import torch

        from bfl_bench.run.predicting import Predictor

        worker, (example, _) = self._experiment.worker, self.test
        inputs = torch.as_tensor(x).to(example.device, example.dtype)
        if inputs.shape[1:] != example.shape[1:]:
            shape = ", ".join(map(str, example.shape[1:]))
            raise ConfigError("x", list(inputs.shape), f"inputs of shape (n, {shape})")
        return Predictor.of(worker, worker.method, self._state, self._experiment.rounds).predict(inputs)

    @cached_property
    def model(self) -> "nn.Module":
        """The network as a plain torch module in evaluation mode: the model itself, or the mean of its posterior.

        Its tensors are in PyTorch's own layout and belong to it alone. A method that predicts with several networks of
        equal right, such as an ensemble, has no such one; `posterior.draw` yields them.
        """
        from bfl_bench.build import make_plain

        worker = self._experiment.worker
        mean = worker.method.mean(worker.task, self._state)
        if mean.shape != worker.task.model.vector.shape:
            raise RunError(f"method {worker.method.name} has {len(mean)} networks, no single one: see posterior.draw")
        return make_plain(self._plan, self._experiment, mean)

    @cached_property
    def posterior(self) -> WeightPosterior | None:
        """The posterior over the weights; None where the method keeps a point."""
        from bfl_bench.method import Method

        worker, state = self._experiment.worker, self._state
        method, task = worker.method, worker.task
        if self._laplace is None and type(method).draws is Method.draws:
            return None
        layout = task.model.layout
        mean, deviation = method.mean(task, state), None
        if self._laplace is not None:
            deviation = self._laplace[0].deviations(self._laplace[1])
        elif (found := method.posterior(task, state)) is not None:
            start = layout.means.start if method.needs.gaussian_layers else 0
            deviation = mean.new_zeros(mean.shape)
            deviation[start : start + len(found.log_variance)] = (0.5 * found.log_variance).exp().to(mean)
        named = layout.to_state_dict
        return WeightPosterior(
            mean=self._plain(named(mean)) if mean.shape == task.model.vector.shape else None,
            deviation=None if deviation is None else self._plain(named(deviation)),
            _model=self,
        )

    def export(self, path: str | Path) -> Path:
        """Write the parameters of `model` as a safetensors file, with the run and the network's config as metadata."""
        from safetensors.torch import save

        from bfl_bench import __version__

        config = self.run.config
        about = {
            "run": self.run.folder.name,
            "bfl_bench": __version__,
            "input_shape": json.dumps(list(self._experiment.worker.task.data.input_shape)),
            **{group: json.dumps(config[group]) for group in ("model", "dataset", "method")},
        }
        tensors = {name: tensor.contiguous() for name, tensor in self.model.state_dict().items()}
        records.write_bytes(Path(path), save(tensors, about))
        return Path(path)

    @cached_property
    def _laplace(self) -> Any:
        """The Laplace approximation and the precision of its prior, where the method has one."""
        from bfl_bench.run.predicting import Predictor

        worker = self._experiment.worker
        found = worker.method.laplace(worker.task, self._state, worker.settings.laplace_layers)
        if found is None:
            return None
        predictor = Predictor.of(worker, worker.method, self._state, self._experiment.rounds, "draws")
        return found, predictor.columns["prior_precision"]

    def _plain(self, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
        """Name the tensors of a network with Gaussian layers as those of the plain one."""
        from bfl_bench.models.lateral import name_plainly

        plain = name_plainly(list(self.model.state_dict()), tensors)
        return {name: tensors[own] for name, own in plain.items()}


def run(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None, progress: bool = True) -> Run:
    """Run an experiment, or find it finished: `run(["method=fola", "rounds=5"])` is `bfl-run method=fola rounds=5`.

    The overrides are those of the command line, `config_dir` is a folder with config files of your own, and `progress`
    shows how far it is. A diverged run is a result, too: see `status`. After an interruption, which raises
    `KeyboardInterrupt`, the same call continues.
    """
    from hydra import compose, initialize_config_dir

    from bfl_bench.commands.cells import expand_table
    from bfl_bench.commands.composing import explain, with_own_folder
    from bfl_bench.commands.resolving import resolve, tell
    from bfl_bench.commands.run import execute
    from bfl_bench.commands.words import CommandLine, check_words
    from bfl_bench.identity import modernise_override

    if isinstance(overrides, str):
        raise ConfigError("overrides", overrides, "a list of texts, such as ['method=fola', 'rounds=5']")
    if options := [word for word in overrides if str(word).startswith("-")]:
        raise ConfigError("overrides", options[0], "key=value; options are for the command line")
    words = [modernise_override(str(word), tell) for word in overrides]
    line = expand_table(CommandLine({} if config_dir is None else {"--config-dir": str(config_dir)}, words))
    check_words(line)
    with initialize_config_dir(str(records.config_folder()), version_base="1.3"):
        try:
            config = resolve(compose("config", with_own_folder(line, line.overrides)))
        except BflError:
            raise
        except Exception as error:
            raise explain(error, line.as_words()) from None

    from bfl_bench import build
    from bfl_bench.run.observers import show_progress

    plan = build.plan(config)
    if plan.settings.dry_run:
        raise ConfigError("dry_run", True, "false; a dry run is for the command line")
    with _own_threads():
        return Run(execute(plan, config, [show_progress(True)] if progress else []).folder)


def load(folder: str | Path, modules: Sequence[str] = ()) -> Model:
    """Load the final model of a finished run, and the data that it was evaluated on.

    A run's folder is data that anybody may have written: nothing in it is executed, and its config can name parts of
    bfl-bench alone, or of the `modules` that you name, such as `["my_method"]`.
    """
    from bfl_bench import build
    from bfl_bench.run.checkpoint import read_state

    path = Path(folder).expanduser()
    with _own_threads():
        plan = build.plan_again(path, modules)
        experiment = build.load(plan)[0]
        state = read_state(path, experiment.worker.task.model.vector.device)
    return Model(run=Run(path), _plan=plan, _experiment=experiment, _state=state)


def compare(
    runs: "str | Path | Run | Iterable[str | Path | Run]", metrics: Sequence[str] = METRICS, by: Sequence[str] = ()
) -> "pd.DataFrame":
    """Compare finished runs as `bfl-report` does: a row for all seeds of a config, the best of each setting first.

    `runs` are folders of runs, folders with runs below them, or `Run`s. The columns are the keys in which the runs
    differ, those of `by` first; of each metric the mean over seeds and its standard deviation (`ga`, `ga_std`); the
    numbers of seeds and of diverged runs; and in `best` the metrics in which a paired test, corrected for their number,
    says that the row beats each other row of its setting.
    """
    import pandas as pd

    from bfl_bench.commands.report import check_metrics, label_stand_in
    from bfl_bench.report.comparison import compare as compare_runs
    from bfl_bench.report.runs import ReportError, find_runs

    given = [runs] if isinstance(runs, str | Path | Run) else list(runs)
    paths = [one.folder if isinstance(one, Run) else Path(one) for one in given]
    found, notes = find_runs(paths, {}, diverged=True)
    if not found:
        raise ReportError("no finished run there" + "".join(f"\n- {note}" for note in notes))
    check_metrics(metrics, found)
    lines: list[dict[str, Any]] = []
    for row in compare_runs([label_stand_in(one) for one in found], metrics, by=by).rows:
        if row.group is None:  # a combination that nobody ran
            continue
        line = dict(row.label)
        for metric in metrics:
            stats = row.stats(metric)
            line |= {metric: stats and stats.mean, f"{metric}_std": stats and stats.std}
        best = [metric for metric in metrics if metric in row.best_in]
        lines.append(line | {"seeds": row.num_seeds, "diverged": row.num_diverged, "best": ", ".join(best)})
    return pd.DataFrame(lines)


@contextmanager
def _own_threads() -> Iterator[None]:
    """Give torch its number of threads back: a run has its own."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
