"""Hydra's basic sweeper, but one bad point does not stop the others, and it says how far the sweep is.

Hydra finds sweepers only below the name `hydra_plugins`. Its own composes all points first and gives up at the first
that does not compose; this one reports such a point, runs the rest with whatever launcher is configured, and sums up.
With the default launcher points run one after the other, each announced with an estimate of the time left.
"""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus


class BflSweeper(BasicSweeper):
    def __init__(
        self,
        max_batch_size: int | None = None,
        params: dict[str, str] | None = None,
        table: str | None = None,
        scale: str = "paper",
        names: dict[str, str] | None = None,
        points: str | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(max_batch_size, params)
        self.table, self.scale, self.names = table, scale, names or {}
        self.points = points
        self.limit = limit

    def sweep(self, arguments: list[str]) -> Any:
        from bfl_bench.checks import AtLeast, check_value
        from bfl_bench.commands.cells import sweep_points
        from bfl_bench.commands.outcome import Outcome, outcome_of
        from bfl_bench.commands.printing import say
        from bfl_bench.commands.resolving import tell
        from bfl_bench.commands.run import finish_sweep, look_up
        from bfl_bench.commands.words import check_points
        from bfl_bench.errors import ConfigError
        from bfl_bench.identity import modernise_override

        assert self.config is not None
        assert self.launcher is not None
        assert self.hydra_context is not None
        check_value("hydra.sweeper.limit", self.limit, Annotated[int, AtLeast(1)] | None)
        check_value("hydra.sweeper.max_batch_size", self.max_batch_size, Annotated[int, AtLeast(1)] | None)
        if not isinstance(self.params, Mapping):
            raise ConfigError("hydra.sweeper.params", self.params, "{key: values}")
        loader = self.hydra_context.config_loader
        swept = [modernise_override(override, tell) for override in self._parse_config()]
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*swept, *arguments])
        check_points(overrides)
        points = [list(point) for batch in self.split_arguments(overrides, None) for point in batch]
        if self.table is not None:
            points = sweep_points(self.table, self.scale, self.names, points)
        if self.points is not None:
            points = [json.loads(line) for line in Path(self.points).read_text().splitlines()]
        if self.limit is not None and self.limit < len(points):
            print(f"{self.limit} of the {len(points)} points of the sweep")
            points = spread(points, self.limit)
        outcomes: dict[int, Outcome] = {}
        one_by_one = isinstance(self.launcher, BasicLauncher)
        if one_by_one:
            logging.getLogger(BasicLauncher.__module__).setLevel(logging.WARNING)  # it would announce each as the only
        size = 1 if one_by_one else self.max_batch_size or max(1, len(points))
        seconds: list[float] = []  # of the points that were run
        for start, stop in cut(points, size):
            batch: list[int] = []
            for index in range(start, stop):
                try:
                    loader.load_sweep_config(self.config, list(points[index]))
                    batch.append(index)
                except Exception as error:
                    outcomes[index] = outcome_of(error, points[index])
            if one_by_one and batch:
                left = time_left(seconds, len(points) - start)
                say(f"[{start + 1}/{len(points)}{left}] {' '.join(points[start])}")
            began = time.monotonic()
            try:
                jobs = [points[index] for index in batch]
                returns = self.launcher.launch(jobs, initial_job_idx=start) if batch else []
                ended = {index: _outcome(job) for index, job in zip(batch, returns, strict=True)}
            except Exception as error:  # of the launcher: one of its processes was killed, say
                configs = {index: loader.load_sweep_config(self.config, list(points[index])) for index in batch}
                ended = {index: look_up(config, error) for index, config in configs.items()}
            outcomes |= ended
            if any(outcome.status != "skipped" for outcome in ended.values()):
                seconds.append(time.monotonic() - began)
        return finish_sweep([(" ".join(points[index]), outcomes[index]) for index in range(len(points))])


def cut(points: Sequence[Sequence[str]], size: int) -> list[tuple[int, int]]:
    """Cut the points into batches; those that begin with another's result wait for all that come before them."""
    waiting = ("start_from=", "reference_posterior=")
    first = next((i for i, words in enumerate(points) if any(word.startswith(waiting) for word in words)), len(points))
    starts = [*range(0, first, size), *range(first, len(points), size)]
    return [(start, min([*(other for other in starts if other > start), len(points)])) for start in starts]


def spread(points: Sequence[Any], num: int) -> list[Any]:
    """So many of the points, in order: the first, and others all over the sweep, so that every axis varies."""
    golden = (5**0.5 - 1) / 2
    chosen = sorted(range(len(points)), key=lambda index: index * golden % 1)[:num]
    return [points[index] for index in sorted(chosen)]


def time_left(seconds: Sequence[float], num_points: int) -> str:
    """As if the other points took as long as those that were run; finished ones among them take none."""
    if not seconds:
        return ""
    left = round(sum(seconds) / len(seconds) * num_points)
    text = f"{left} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    return f", at most about {text} left"


def _outcome(job: JobReturn) -> Any:
    """What a job returned; a job that raised instead met something that bfl-bench did not foresee."""
    from bfl_bench.commands.outcome import outcome_of

    return job.return_value if job.status == JobStatus.COMPLETED else outcome_of(job._return_value)
