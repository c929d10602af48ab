"""Hydra's basic sweeper, but one bad point does not stop the others.

Hydra finds sweepers only below the name `hydra_plugins`. Its own composes all points first and gives up at the first
that does not compose; this one reports such a point, runs the rest with whatever launcher is configured, and sums up.
"""

from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus


class BflSweeper(BasicSweeper):
    def __init__(self, max_batch_size: int | None = None, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size, params)

    def sweep(self, arguments: list[str]) -> Any:
        from bfl_bench.cli import finish_sweep
        from bfl_bench.outcome import Outcome, outcome_of

        assert self.config is not None
        assert self.launcher is not None
        assert self.hydra_context is not None
        loader = self.hydra_context.config_loader
        overrides = OverridesParser.create(config_loader=loader).parse_overrides([*self._parse_config(), *arguments])
        points = [point for batch in self.split_arguments(overrides, None) for point in batch]
        outcomes: dict[int, Outcome] = {}
        for index, point in enumerate(points):
            try:
                loader.load_sweep_config(self.config, list(point))
            except Exception as error:
                outcomes[index] = outcome_of(error, point)
        runnable = [index for index in range(len(points)) if index not in outcomes]
        size = self.max_batch_size or max(1, len(runnable))
        for start in range(0, len(runnable), size):
            batch = runnable[start : start + size]
            returns = self.launcher.launch([points[index] for index in batch], initial_job_idx=start)
            outcomes |= {index: _outcome(job) for index, job in zip(batch, returns, strict=True)}
        return finish_sweep([(" ".join(points[index]), outcomes[index]) for index in range(len(points))])


def _outcome(job: JobReturn) -> Any:
    """What a job returned; a job that raised instead met something that bfl-bench did not foresee."""
    from bfl_bench.outcome import outcome_of

    return job.return_value if job.status == JobStatus.COMPLETED else outcome_of(job._return_value)
