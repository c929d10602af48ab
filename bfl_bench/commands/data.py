"""`bfl-data`: list, get and verify the files of the datasets."""

import argparse
import logging
import sys
from pathlib import Path

from bfl_bench.commands.printing import forgiving
from bfl_bench.data.sources import SOURCES, default_data_dir
from bfl_bench.errors import BflError, ConfigError

EMBEDDED = {
    "digits": ("handwritten digits, 1,797 grey images of 8 x 8", "CC BY 4.0 (UCI), shipped with scikit-learn"),
    "diabetes": ("disease progression of 442 patients, by 10 measures", "CC BY 4.0 (UCI), shipped with scikit-learn"),
    "breast_cancer": ("two kinds of 569 tumours, by 30 measures", "CC BY 4.0 (UCI), shipped with scikit-learn"),
    "cultivars": ("two cultivars of 130 wines, by 13 measures", "CC BY 4.0 (UCI), shipped with scikit-learn"),
    "pooled_digits": ("the digits, averaged over 8 fields", "CC BY 4.0 (UCI), shipped with scikit-learn"),
    "linear": ("250 numbers linear in 5 features, from a fixed seed", "none needed"),
    "sine": ("150 points of a sine with a gap, from a fixed seed", "none needed"),
    "synthetic": ("Gaussian classes of any size, drawn from dataset.data_seed", "none needed"),
}
DERIVED = {  # from which files, and what they are made into
    "pmnist": (("mnist",), "MNIST over clients at random, each with an own order of the pixels"),
    "mnist_writers": (("mnist", "qmnist"), "MNIST by writer"),
}
INTERRUPTED = 130  # what shells report for a command stopped by Ctrl-C


@forgiving
def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    data_dir = (arguments.data_dir or default_data_dir()).expanduser()
    try:
        if arguments.command == "list":
            print_table(data_dir)
            return 0
        known = [*SOURCES, *DERIVED, *EMBEDDED]
        for name in arguments.names:
            if name not in known:
                raise ConfigError("dataset", name, ", ".join(known))
        parts = [part for name in arguments.names for part in DERIVED.get(name, ((name,), ""))[0]]
        return max(run_command(arguments.command, name, data_dir) for name in dict.fromkeys(parts))
    except BflError as error:
        return report(error)
    except KeyboardInterrupt:
        print("bfl-data: interrupted", file=sys.stderr)
        return INTERRUPTED


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bfl-data", description="List, get and verify the datasets.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    descriptions = {
        "list": "show which datasets there are and whether their files are here (a quick look, no checksums)",
        "get": "download what is missing, replace what is altered",
        "verify": "compare every file with its published checksum, or check what is in it where it has none",
    }
    for command, description in descriptions.items():
        below = commands.add_parser(command, help=description, description=description)
        if command != "list":
            below.add_argument("names", nargs="+", metavar="NAME", help="as shown by `bfl-data list`")
        below.add_argument(
            "--data-dir", type=Path, metavar="D", help="default: $BFL_DATA_DIR, else the user's cache folder"
        )
    return parser.parse_args(argv)


def print_table(data_dir: Path) -> None:
    rows = [("name", "status", "content", "licence")]
    for source in SOURCES.values():
        rows.append((source.name, source.status(data_dir).state, source.description, source.licence))
    for name, (parts, description) in DERIVED.items():
        states = (SOURCES[part].status(data_dir).state for part in parts)
        rows.append((name, next((state for state in states if state != "present"), "present"), description, ""))
    rows += [(name, "embedded", *words) for name, words in EMBEDDED.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"data folder: {data_dir}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def run_command(command: str, name: str, data_dir: Path) -> int:
    """One dataset's exit code; a failure is reported here, so that the other datasets have their turn."""
    try:
        if name in EMBEDDED:
            print(f"{name}: embedded, there is nothing to {command}")
        elif command == "get":
            SOURCES[name].get(data_dir)
            print(f"{name}: present, {SOURCES[name].describe_verified(data_dir)}, in {_folder(name, data_dir)}")
        else:
            SOURCES[name].verify(data_dir)
            print(f"{name}: {SOURCES[name].describe_verified(data_dir)}, in {_folder(name, data_dir)}")
    except BflError as error:
        return report(error)
    return 0


def _folder(name: str, data_dir: Path) -> Path:
    return SOURCES[name].status(data_dir).where


def report(error: BflError) -> int:
    print(f"bfl-data: {error}", file=sys.stderr)
    return error.exit_code
