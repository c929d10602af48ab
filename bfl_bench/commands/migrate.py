"""Give the folders of runs that an earlier version made the names of this one, and their configs today's keys.

    python -m bfl_bench.commands.migrate FOLDER ...

Every run below the folders is renamed in its place. Where a run builds on another one, by `start_from` or
`reference_posterior`, its config gets that run's new name if that run is below the folders as well: so name all of them
in one command. Doing it again changes nothing. Folders that are no runs, or were renamed by hand, keep their names.
Nothing is overwritten.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bfl_bench import records
from bfl_bench.identity import RUNS, STAND_IN_PREFIX, describe_inputs, digest_file, folder_name, read_config
from bfl_bench.report.listing import is_running


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bfl_bench.commands.migrate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="with runs below")
    problems = migrate(parser.parse_args(argv).folders)
    for problem in problems:
        print(f"migrate: {problem}", file=sys.stderr)
    return 1 if problems else 0


def migrate(folders: Sequence[Path]) -> list[str]:
    """Rewrite configs, then rename folders; return a sentence on each run that has to stay as it is.

    All configs come first: whenever this is interrupted, the old names that configs still hold are those of folders.
    """
    problems = [f"{folder}: no such folder" for folder in folders if not folder.is_dir()]
    found = {file.parent.resolve() for folder in folders for file in folder.rglob(records.CONFIG)}
    configs = {folder: config for folder in sorted(found) if (config := read_config(folder)) is not None}
    notes = update_references(configs)
    targets: dict[Path, Path] = {}
    for folder, config in configs.items():
        target = folder.with_name(choose_name(folder.name, folder_name(config)))
        if target != folder and (target.exists() or target in targets.values()):
            problems.append(f"{folder}: not renamed, because there is another {target.name}")
        elif is_running(folder):
            problems.append(f"{folder}: left alone, because a process is running in it")
        else:
            targets[folder] = target
    num_rewritten = sum(rewrite(folder, configs[folder]) for folder in targets)
    renamed = {folder: target for folder, target in targets.items() if folder != target}
    for folder in sorted(renamed, key=lambda folder: -len(folder.parts)):  # a run within a run comes first
        folder.rename(renamed[folder])
    for note in notes:
        print(note)
    print(f"{len(configs)} runs: {len(renamed)} renamed, {num_rewritten} configs rewritten, {len(problems)} problems")
    return problems


def update_references(configs: dict[Path, dict[str, Any]]) -> list[str]:
    """Add the `inputs` that configs lack, other runs by their new names; return a note on each that is not there."""
    folders = {folder.name: folder for folder in configs}
    visited: set[Path] = set()
    notes: list[str] = []

    def update(folder: Path) -> None:
        if folder in visited:
            return
        visited.add(folder)
        config = configs[folder]
        inputs = dict(config.get("inputs") or {})
        for key in RUNS:
            path = config.get(key)
            if path is None or key in inputs:
                continue
            if (other := folders.get(Path(path).name)) is None:
                notes.append(f"{folder}: {key}={path} is not below these folders, its name stays")
                continue
            update(other)  # first, because its name depends on the runs that it builds on
            inputs[key] = folder_name(configs[other])
            config[key] = str(Path(path).with_name(choose_name(other.name, inputs[key])))
        if "path" in config["partition"] and "partition.path" not in inputs:
            # A run saves the partition that it read with the same bytes; the file it came from may have changed since.
            saved = digest_file(folder / records.PARTITION) or describe_inputs(config).get("partition.path")
            inputs |= {"partition.path": saved} if saved else {}
        if inputs:
            config["inputs"] = inputs

    for folder in configs:
        update(folder)
    return notes


def choose_name(old: str, new: str) -> str:
    """Choose the new name where the old one is of our making too: the same words, and a hash."""
    words, _, digest = old.rpartition("_")
    ours = new.rpartition("_")[0]
    ours_once = ours.removeprefix(STAND_IN_PREFIX)  # names did not always say that data are stand-ins
    return new if words in (ours, ours_once) and re.fullmatch("[0-9a-f]{8}", digest) else old


def rewrite(folder: Path, config: dict[str, Any]) -> bool:
    """Write the config if it is not the one in the file; return whether it was written."""
    path = folder / records.CONFIG
    if yaml.safe_load(path.read_text()) == config:
        return False
    records.write_text(path, yaml.safe_dump(config, sort_keys=False))
    return True


if __name__ == "__main__":
    sys.exit(main())
