"""What bfl-bench costs beside a bare PyTorch loop and other programs, measured in turns; writes benchmark.md, a figure.

    python benchmarks/benchmark.py [SECTION ...] [--repeats 5] [--peers DIR] [--to docs] [--small] [--full]

The sections, all of them where none is named: A to D are workloads, where ours, ours with two worker processes, and the
bare loop take turns on one thread each, and a round's time is the mean over all rounds but the first and the last. E is
aggregation alone, `growth` the time against clients, steps and parameters, `startup` the commands and the memory of A,
`many` ten thousand clients, `cores` what two jobs at once lose to one another, `stacked` what training a cohort as one
network would gain. What was found is kept in benchmark.json: sections that are not named stay as they are.

With --peers Flower, pfl and BlazeFL take turns too, in virtual environments DIR/flower, DIR/pfl and DIR/blazefl that
are made where they are missing: with `pip install`, and a file outer.pth, by which they find this environment's torch,
and all else that they do not bring themselves; BlazeFL with python3.13 and a torch of its own. Nothing is sent to
Flower's and Ray's makers. What counts are ratios of one run; times alone say little.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from aggregation import FULL_SIZES, PARTS, RULES, SIZES, Cost
from jobs import PEERS, Job, call, describe_versions, make_peer, run_ours_job, run_peer_job
from peers.work import Result, Workload, make_network
from stacked import WORKS, minibatches, one_by_one, stacked
from workloads import WORKERS, WORKLOADS, compare, divide, load_data, run_bare, run_in_turns, run_ours, take_turns

from bfl_bench.engines.process_setup import set_up_process
from bfl_bench.records import write_text
from bfl_bench.report import markdown
from bfl_bench.report.style import styled

TARGETS = {
    ("A", "ours / bare"): ("<=", 0.90),
    ("B", "ours / bare"): ("<=", 0.90),
    ("C", "ours / bare"): ("<=", 0.80),
    ("D", "ours / bare"): ("<=", 0.85),
    ("A", "processes / ours"): ("<=", 0.58),
    ("C", "processes / ours"): ("<=", 0.58),
    ("A", "flower / processes"): (">=", 1.5),
    ("B", "flower / ours"): (">=", 8.0),
    ("A", "job: flower / processes"): (">=", 4.0),
    ("B", "job: flower / ours"): (">=", 4.0),
    ("A", "pfl / ours"): (">=", 1.0),
    ("B", "pfl / ours"): (">=", 1.0),
    ("C", "pfl / ours"): (">", 1.0),
    ("D", "pfl / ours"): (">=", 1.0),
    **{("E", rule): ("<=", 3.0) for rule in ("mean", "eaa")},
    **{("E", rule): ("<=", 6.0) for rule in ("wb", "aalv", "rklb", "cf")},
}
MANY = Workload(
    "mlp", num_clients=10_000, cohort=100, samples=20, epochs=2, batch_size=10, rounds=20, lr=0.05, hidden=32, side=8
)


@dataclass(frozen=True)
class Section:
    text: str
    bars: dict[str, float]  # of the figure: a label and a ratio


def shrink(work: Workload) -> Workload:
    """About a twentieth of the work."""
    cohort, samples = max(work.cohort // 5, 2), max(work.samples // 4, 20)
    return replace(work, num_clients=max(work.num_clients // 5, cohort), cohort=cohort, samples=samples, rounds=3)


def measure_workload(name: str, options: argparse.Namespace) -> Section:
    work = shrink(WORKLOADS[name]) if options.small else WORKLOADS[name]
    data = load_data(work)
    programs: dict[str, Callable[[Workload], Job]] = {
        loop: partial(run_ours_job, loop) for loop in ("ours", "processes")
    }
    for peer, python in options.pythons.items():
        programs[peer] = partial(run_peer_job, peer, python)
    for program in programs.values():
        program(shrink(work))  # so that its files have been read once
    pairs: list[tuple[Result, Result]] = []
    jobs: dict[str, list[Job]] = {loop: [] for loop in programs}
    for _ in range(options.repeats):
        pairs.append(run_in_turns(work, data))
        for loop, program in programs.items():
            jobs[loop].append(program(work))
    results = {loop: [job.result for job in found] for loop, found in jobs.items()}
    results["bare"] = [bare for _, bare in pairs]
    for loop, found in results.items():
        if wrong := [result.steps for result in found if result.steps != work.steps]:
            raise AssertionError(f"{name}, {loop}: {wrong[0]} steps, not {work.steps}")
    rounds = {loop: [result.seconds for result in found] for loop, found in results.items()}
    whole = {loop: [job.seconds for job in found] for loop, found in jobs.items()}
    ratios = {"ours / bare": [ratio for pair in pairs for ratio in divide(*(result.warm for result in pair))]}
    ratios["processes / ours"] = divide(rounds["processes"], rounds["ours"])
    for peer in options.pythons:
        for ours in ("processes", "ours") if peer == "flower" else ("ours",):
            ratios[f"{peer} / {ours}"] = divide(rounds[peer], rounds[ours])
            ratios[f"job: {peer} / {ours}"] = divide(whole[peer], whole[ours])
    rows = []
    for loop, found in results.items():
        start, accuracy = [result.start_up for result in found], [result.accuracy for result in found]
        cells = [spread(rounds[loop], 4), spread(start, 2), spread(whole[loop], 1) if loop in whole else "-"]
        rows.append([loop, *cells, str(found[0].steps), f"{statistics.median(accuracy):.3f}"])
    head = ["program", "seconds per round", "first round beyond that", "whole job", "SGD steps", "training accuracy"]
    text = f"## {name}: {describe_work(work)}\n\n{ratio_table(name, ratios)}\n{markdown(head, rows)}"
    relative = {loop: divide(rounds[loop], rounds["ours"]) for loop in programs}
    relative["bare"] = [1 / ratio for ratio in ratios["ours / bare"]]
    return Section(text, {f"{name} {loop}": statistics.median(found) for loop, found in relative.items()})


def describe_network(work: Workload) -> str:
    return f"MLP {work.side**2}-{work.hidden}-{work.hidden}-10" if work.network == "mlp" else "LeNet"


def describe_work(work: Workload) -> str:
    return (
        f"{describe_network(work)}{' with Bayesian linear layers' if work.bayesian else ''}, "
        f"{work.cohort} of {work.num_clients} clients, {work.samples} samples each, epochs: {work.epochs}, "
        f"batches of {work.batch_size}, {work.rounds} rounds"
    )


def spread(values: list[float], digits: int) -> str:
    """Median and minimum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f})"


def ratio_table(name: str, ratios: dict[str, list[float]]) -> str:
    rows = [[what, *judge(name, what, values)] for what, values in ratios.items()]
    return markdown(["ratio", "median", "minimum", "maximum", "target", "met"], rows)


def judge(name: str, what: str, values: list[float]) -> list[str]:
    """Cells: median, minimum, maximum, the target, and whether the median meets it."""
    median = statistics.median(values)
    cells = [f"{value:.2f}" for value in (median, min(values), max(values))]
    if (name, what) not in TARGETS:
        return [*cells, "", ""]
    sign, target = TARGETS[name, what]
    met = {"<=": median <= target, ">=": median >= target, ">": median > target}[sign]
    return [*cells, f"{sign} {target:.2f}", "yes" if met else "no"]


def measure_aggregation(options: argparse.Namespace) -> Section:
    sizes = FULL_SIZES if options.full else SIZES
    rows, bars, speeds = [], {}, []
    for clients, columns in sizes:
        for rule in [*RULES, *PARTS]:
            numbers = (clients, columns // 20 if options.small else columns, options.repeats)
            cost = Cost(**json.loads(call(sys.executable, "aggregation.py", rule, *map(str, numbers))))
            speeds += cost.gigabytes_per_second
            memory = [f"{cost.input_mb:.0f}", f"{cost.extra_mb:.0f}"]
            rows.append([rule, str(clients), str(cost.columns), *judge("E", rule, cost.ratios), *memory])
            if rule in RULES:
                bars[f"E {rule}, {clients}"] = statistics.median(cost.ratios)
    head = ["rule", "clients", "columns", "median", "minimum", "maximum", "target", "met", "inputs (MB)", "peak beyond"]
    text = (
        "## E: aggregation\n\nTime as a multiple of reading the inputs once, on one thread, which here gives "
        f"{spread(speeds, 1)} GB/s; the peak of memory beyond the inputs. `fvb_eaa`: the server step of `fvb`. The "
        "last three are parts of rules: torch's conversion of the inputs to float64, and with it a square root (in "
        "`wb`) or a logarithm (in `aalv`) of the variances."
    )
    text += "\n\n" if options.full else " With --full 1000 clients have a million columns too.\n\n"
    return Section(text + markdown(head, rows), bars)


def measure_growth(options: argparse.Namespace) -> Section:
    base = replace(WORKLOADS["A"], epochs=1, rounds=4)
    base = replace(shrink(base), num_clients=40, cohort=2) if options.small else base
    scales = {
        "clients per round": [replace(base, cohort=base.cohort * factor) for factor in (1, 2, 4)],
        "epochs": [replace(base, epochs=factor) for factor in (1, 2, 4)],
        "width of the hidden layers": [replace(base, hidden=width) for width in (100, 200, 400)],
    }
    text = f"## How the time grows\n\nFrom: {describe_work(base)}. Seconds per round against the first row's.\n"
    for title, works in scales.items():
        data = load_data(base)
        loops: dict[str, Callable[[], Result]] = {}
        for i, work in enumerate(works):
            loops |= {f"ours {i}": partial(run_ours, work, data), f"bare {i}": partial(run_bare, work, data)}
        seconds = {loop: [r.seconds for r in found] for loop, found in take_turns(loops, options.repeats).items()}
        rows = []
        for i, work in enumerate(works):
            parameters = sum(parameter.numel() for parameter in make_network(work).parameters())
            grown = [spread(divide(seconds[f"{loop} {i}"], seconds[f"{loop} 0"]), 2) for loop in ("ours", "bare")]
            ratio = spread(divide(seconds[f"ours {i}"], seconds[f"bare {i}"]), 2)
            rows.append([str((work.cohort, work.epochs, work.hidden)[list(scales).index(title)]), str(parameters)])
            rows[-1] += [str(work.steps // work.rounds), *grown, ratio]
        text += "\n" + markdown([title, "parameters", "steps per round", "ours", "bare", "ours / bare"], rows)
    return Section(text, {})


def measure_startup(options: argparse.Namespace) -> Section:
    command = str(Path(sys.executable).with_name("bfl-run"))

    def run_once() -> None:
        with tempfile.TemporaryDirectory() as folder:
            call(command, "rounds=1", f"out={folder}")

    commands: dict[str, Callable[[], object]] = {
        "`import torch`": partial(call, sys.executable, "-c", "import torch"),
        "`bfl-run --help`": partial(call, command, "--help"),
        "`bfl-run rounds=1`": run_once,
    }
    seconds = compare(commands, options.repeats)
    first = seconds["`import torch`"]
    rows = [[name, spread(found, 2), spread(divide(found, first), 2)] for name, found in seconds.items()]
    text = "## Start-up\n\n" + markdown(["command", "seconds", "against `import torch`"], rows)
    work = shrink(WORKLOADS["A"]) if options.small else WORKLOADS["A"]
    peaks = [[loop, f"{run_ours_job(loop, work).result.peaks[-1]:.0f}"] for loop in ("ours", "bare")]
    size = load_data(work).nbytes / 1e6
    text += f"\n## Memory of A\n\nThe peak of a process of its own, {size:.0f} MB of which are the data.\n\n"
    return Section(text + markdown(["program", "peak (MB)"], peaks), {})


def measure_many(options: argparse.Namespace) -> Section:
    rows, memory = [], []
    for method, bayesian in (("fedavg", False), ("fvb", True)):
        work = replace(MANY, bayesian=bayesian)
        work = replace(work, num_clients=1000, cohort=10, rounds=5) if options.small else work
        peaks = run_ours_job("ours", work).result.peaks
        memory.append([method, f"{peaks[1]:.1f}", f"{peaks[-1]:.1f}", str(work.rounds)])
        data = load_data(work)
        cohorts = [work.cohort // 2, work.cohort, work.cohort * 2]
        loops = {str(n): partial(run_ours, replace(work, cohort=n, rounds=4), data) for n in cohorts}
        seconds = {n: [result.seconds for result in found] for n, found in take_turns(loops, options.repeats).items()}
        first = seconds[str(cohorts[0])]
        rows += [[method, n, spread(found, 3), spread(divide(found, first), 2)] for n, found in seconds.items()]
    text = f"## Many clients\n\n{describe_work(replace(work, bayesian=False))}. Memory: the peak of the process.\n\n"
    text += markdown(["method", "after round 2 (MB)", "after the last round (MB)", "rounds"], memory) + "\n"
    head = ["method", "clients per round", "seconds per round", "against the first row"]
    return Section(text + markdown(head, rows), {})


def measure_cores(options: argparse.Namespace) -> Section:
    """Two whole jobs at once against one: what no engine with two workers can beat."""

    def seconds_of_jobs(work: Workload, num: int) -> float:
        with ThreadPoolExecutor(num) as pool:
            jobs = pool.map(lambda _: run_ours_job("ours", work), range(num))
            return max(job.result.seconds for job in jobs)

    rows = []
    for name in ("A", "C"):
        work = shrink(WORKLOADS[name]) if options.small else WORKLOADS[name]
        loops = {"one": partial(seconds_of_jobs, work, 1), "several": partial(seconds_of_jobs, work, WORKERS)}
        seconds = take_turns(loops, options.repeats)
        slower = divide(seconds["several"], seconds["one"])
        rows.append([name, spread(slower, 2), f"{statistics.median(slower) / WORKERS:.2f}"])
    text = (
        f"## What the cores give\n\n{WORKERS} jobs at once, each with a core of its own, share caches and memory: "
        "how much longer a round takes than with one job alone, and so the least that `processes / ours` can be.\n\n"
    )
    return Section(text + markdown(["workload", f"{WORKERS} jobs / one", "least ratio"], rows), {})


def measure_stacked(options: argparse.Namespace) -> Section:
    rows = []
    for work in WORKS:
        work = replace(work, samples=work.batch_size) if options.small else work
        network, batches = make_network(work), minibatches(work)
        loops: dict[str, Callable[[], object]] = {
            "stacked": partial(stacked, work, network, batches),
            "one by one": partial(one_by_one, work, network, batches),
        }
        seconds = compare(loops, options.repeats)
        parameters = sum(parameter.numel() for parameter in network.parameters())
        rows.append([describe_network(work), str(parameters), str(work.cohort), str(work.batch_size)])
        rows[-1].append(spread(divide(seconds["stacked"], seconds["one by one"]), 2))
    head = ["network", "parameters", "clients", "batch", "stacked / one by one"]
    text = "## Clients stacked by vmap\n\nNot an engine of this program: `docs/scaling.md` says why.\n\n"
    return Section(text + markdown(head, rows), {})


@styled
def draw(bars: dict[str, float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    path.parent.mkdir(parents=True, exist_ok=True)
    panels = [part for part in ({k: v for k, v in bars.items() if (k[0] == "E") == e} for e in (False, True)) if part]
    figure, rows = plt.subplots(1, len(panels), figsize=(5.5 * len(panels), 5), squeeze=False, layout="constrained")
    for axes, part in zip(rows[0], panels, strict=True):
        reading = next(iter(part))[0] == "E"
        colours = ["0.6" if label.endswith(("bare", *PEERS)) else "C0" for label in part]
        labels = [f"{label.removeprefix('E ')} clients" if reading else label for label in part]
        drawn = axes.barh(labels, [ratio - 1 for ratio in part.values()], left=1, color=colours)
        axes.bar_label(drawn, [f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}" for ratio in part.values()], padding=2)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.margins(x=0.15)
        axes.axvline(1, color="black", lw=0.8)
        axes.set_xlabel("time / reading the inputs once" if reading else "time per round / ours")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    figure.savefig(path, dpi=150)


def main() -> None:
    sections: dict[str, Callable[[argparse.Namespace], Section]] = {
        **{name: partial(measure_workload, name) for name in WORKLOADS},
        "E": measure_aggregation,
        "growth": measure_growth,
        "startup": measure_startup,
        "many": measure_many,
        "cores": measure_cores,
        "stacked": measure_stacked,
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"{', '.join(sections)}; none: all")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="folder of the peers' environments")
    parser.add_argument(
        "--to", type=Path, default=Path("docs"), help="folder for benchmark.md, benchmark.json, figures/benchmark.png"
    )
    parser.add_argument("--small", action="store_true", help="about a twentieth of the work: to try it out")
    parser.add_argument(
        "--full", action="store_true", help="E with 1000 clients of a million parameters: 8 GB and more"
    )
    options = parser.parse_args()
    if unknown := set(options.sections) - set(sections):
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    set_up_process(threads=1)
    options.pythons = {name: make_peer(options.peers, name) for name in PEERS} if options.peers else {}
    cpu = f"CPU with {os.cpu_count()} cores and {torch.backends.cpu.get_cpu_capability()}"
    note = f"Median of {options.repeats}; {describe_versions(options.pythons)}; {cpu}."
    options.to.mkdir(parents=True, exist_ok=True)
    stored = options.to / "benchmark.json"
    found: dict[str, Section] = {}
    if stored.exists():
        found = {name: Section(**fields) for name, fields in json.loads(stored.read_text()).items()}
    for name in options.sections or sections:
        section = sections[name](options)
        found[name] = replace(section, text=f"{section.text}\n{note}\n")
        print(found[name].text, flush=True)
        write_text(stored, json.dumps({name: asdict(section) for name, section in found.items()}, indent=1) + "\n")
        ordered = [found[name] for name in sections if name in found]
        write_text(options.to / "benchmark.md", "\n".join([INTRODUCTION, *(section.text for section in ordered)]))
        if bars := {label: ratio for section in ordered for label, ratio in section.bars.items()}:
            draw(bars, options.to / FIGURE)


FIGURE = Path("figures") / "benchmark.png"

INTRODUCTION = """# Benchmark

Made by `python benchmarks/benchmark.py --full --peers DIR`. The programs do the same work in turns, each in a process
of its own; a ratio is taken within a turn. For `ours / bare` both take turns round by round in one process. Cells are
medians, with the minimum in brackets. The line below a section says with what it was measured.

- `ours`: the whole round loop with records, one client after the other, one thread; one checkpoint and one evaluation,
  on one example, at the end. `processes`: the same with two worker processes.
- `bare`: a loop written by hand with `torch.optim.SGD`, batches indexed out of a tensor, and a copy of the model for
  each client.
- `flower`: Flower simulated by Ray with two workers of one CPU. `pfl`: pfl's SimulatedBackend in one process; it
  does not shuffle. `blazefl`: BlazeFL's FedAvg, client after client in one process, with Python 3.13. All of them
  average log variances where `ours` and `bare` average variances.
- A round's time is the mean over all rounds but the first, in which programs start up, and the last, in which `ours`
  evaluates and saves. A whole job goes from the start of Python to its end.

[scaling.md](scaling.md#against-other-programs) says what follows from it, and why some targets are missed.

![Times per round against ours; times of aggregation against reading the inputs](figures/benchmark.png)
"""


if __name__ == "__main__":
    main()
