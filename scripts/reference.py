"""Put finished runs into an archive of the folder reference, and write the tables that the archives give.

    python scripts/reference.py RUNS... --to reference/fola_table2 [--where KEY=VALUE ...] [--new]
    python scripts/reference.py --tables

RUNS are folders with runs below, or archives. What tables and pages read of the runs is added to NAME.tar.xz; a run
that is in it already is replaced, and with --new the archive begins empty. If NAME is a table or figure of `bfl-paper
list`, only runs of its cells are taken. --tables writes what `bfl-paper show` prints of all archives to
reference/tables: tests compare it, so that it is to be done after every change there.
"""

import argparse
import contextlib
import io
import tempfile
from pathlib import Path

from bfl_bench import report
from bfl_bench.commands.paper import collect, distinct_scales, runs_of_cells, show
from bfl_bench.papers.spec import read_tables
from bfl_bench.records import reference_folder
from bfl_bench.report.archive import SUFFIX, list_archived, pack
from bfl_bench.report.output import parse_where


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUNS", help="folders with runs below, or archives")
    parser.add_argument("--to", type=Path, help="the archive, with or without its ending")
    parser.add_argument("--where", nargs="+", default=[], metavar="KEY=VALUE", help="only runs with these values")
    parser.add_argument("--new", action="store_true", help="replace the archive")
    parser.add_argument("--tables", action="store_true", help="write reference/tables")
    arguments = parser.parse_args()
    if bool(arguments.runs) != bool(arguments.to) or not (arguments.runs or arguments.tables):
        parser.error("give RUNS and --to, or --tables")
    if arguments.runs:
        add(arguments)
    if arguments.tables:
        to = reference_folder() / "tables"
        print(f"{len(write_tables(to))} tables and figures in {to}")


def add(arguments: argparse.Namespace) -> None:
    name = arguments.to.name.removesuffix(SUFFIX)
    archive = arguments.to.with_name(name + SUFFIX)
    collected = collect(arguments.runs, parse_where(arguments.where))
    table = read_tables().get(name)
    runs = collected.runs if table is None else runs_of_cells(table, collected)
    if arguments.new:
        archive.unlink(missing_ok=True)
    before = len(list_archived(archive)) if archive.exists() else 0
    names = pack([run.folder for run in runs], archive)
    if left_out := len(collected.runs) - len(runs):
        print(f"{left_out} runs are no cell's of {name}; left out")
    print(f"{archive}: {len(names)} runs, {before} before; {archive.stat().st_size / 1e3:.0f} kB")
    print(report.describe_notes(list(collected.notes)), end="")


def write_tables(to: Path) -> list[str]:
    """Write every table and figure of which there are runs, at each scale, as Markdown; remove all others."""
    collected = collect([Path("reference")], {})
    with tempfile.TemporaryDirectory() as made:
        for table in read_tables().values():
            for scale in distinct_scales(table):
                with contextlib.suppress(report.ReportError), contextlib.redirect_stdout(io.StringIO()):
                    show(table, [scale], collected, Path(made))
        to.mkdir(exist_ok=True)
        for old in to.glob("*.md"):
            old.unlink()
        names = sorted(path.name for path in Path(made).glob("*.md"))
        for name in names:
            (to / name).write_bytes((Path(made) / name).read_bytes())
    return names


if __name__ == "__main__":
    main()
