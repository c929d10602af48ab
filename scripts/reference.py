"""Copy what tables and figures need of finished runs to the folder reference, where it is kept under version control.

    python scripts/reference.py NAME [--runs outputs] [--where KEY=VALUE ...]

The runs land in reference/NAME, each in a folder of its own name: config, summary, metrics, times, clients,
sweeps of weights and sizes of clients, a few kilobytes. Checkpoints, messages and pictures stay behind. In the config,
folders of the machine that ran it are replaced by the defaults.
"""

import argparse
import shutil
from pathlib import Path

import yaml

from bfl_bench import records, report
from bfl_bench.identity import RUNS, complete, folder_name, read_config
from bfl_bench.report.output import parse_where

KEPT = [records.SUMMARY, records.ENVIRONMENT, records.METRICS, records.TIMING, records.CLIENTS, records.WEIGHTS]
KEPT += [records.PARTITION_COUNTS, records.RELIABILITY]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="folder below reference")
    parser.add_argument("--runs", type=Path, nargs="+", default=[Path("outputs")], help="folders with runs below")
    parser.add_argument("--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these values")
    parser.add_argument("--to", type=Path, default=Path("reference"))
    arguments = parser.parse_args()
    runs, notes = report.find_runs(arguments.runs, parse_where(arguments.where))
    for run in runs:
        config = read_config(run.folder)
        assert config is not None  # or it would not have been found
        folder = arguments.to / arguments.name / folder_name(config)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (run.folder / name for name in KEPT):
            if file.exists():
                shutil.copyfile(file, folder / file.name)
        config |= {"out": "outputs", **{key: complete(config)[key] for key in RUNS}}
        if config["data_dir"] != records.STAND_IN:
            config["data_dir"] = None
        records.write_text(folder / records.CONFIG, yaml.safe_dump(config, sort_keys=False))
    print(f"{len(runs)} runs in {arguments.to / arguments.name}" + report.describe_notes(notes))


if __name__ == "__main__":
    main()
