"""Cards: a page per method and per dataset, made of what the code knows.

A method's card has the words of its file and of its module (with deviations from the paper), the keys of its YAML, what
travels and what is kept, counted on a small network, and what it needs. A dataset's card says where its files come
from, under which licence, and what partitions make of it, where the files are here.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bfl_bench.build import load, plan
from bfl_bench.commands.cells import compose_cells
from bfl_bench.commands.config_files import Option, list_options, read_option
from bfl_bench.commands.data import DERIVED, EMBEDDED
from bfl_bench.data.sources import SOURCES, default_data_dir
from bfl_bench.errors import BflError
from bfl_bench.method import Client, Method, Needs, Tensors
from bfl_bench.papers.spec import Cell
from bfl_bench.records import config_folder
from bfl_bench.report.output import markdown
from bfl_bench.rng import stream
from bfl_bench.suite.results import Result, read_results

TRIED = {"dataset": "digits", "num_clients": 2, "model.hidden": [8], "partition.alpha": 1}
"""The setting that messages are counted in."""

PARTITIONS = {"IID": {"partition": "iid"}} | {
    f"Dirichlet, alpha {alpha}": {"partition": "dirichlet", "partition.alpha": alpha} for alpha in (1, 0.1, 0.01)
}
NEEDED = {
    "gaussian_layers": "a network whose layers get Gaussian weights",
    "lateral": "a private network beside the shared one",
    "own_test": "test examples of the clients' own",
    "classes": "labels that are classes",
    "any_server_step": "",  # no need, but a possibility
    "sgd": "local training by SGD",
    "dropout": "a network with dropout",
}


def write_cards(to: Path, results: Sequence[Path] = ()) -> list[Path]:
    """Write methods/NAME.md, datasets/NAME.md and index.md; `results` are folders of suites, for what methods cost."""
    folders, pages = [config_folder()], dict[str, str]()
    measured = read_results(results)
    for name in list_options("method", folders):
        pages[f"methods/{name}.md"] = describe_method(read_option("method", name, folders), measured)
    for name in list_options("dataset", folders):
        pages[f"datasets/{name}.md"] = describe_dataset(read_option("dataset", name, folders))
    pages["index.md"] = _index(pages)
    for name, text in pages.items():
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_text(text)
    return [to / name for name in pages]


def _index(pages: Mapping[str, str]) -> str:
    lines = ["# Cards", "", "Made by `bfl-suite cards` of what the code knows."]
    for folder in ("methods", "datasets"):
        lines += ["", f"## {folder.capitalize()}", ""]
        named = {name: text.splitlines() for name, text in pages.items() if name.startswith(folder)}
        lines += [f"- [{text[0].removeprefix('# ')}]({name}): {text[2]}" for name, text in named.items()]
    return "\n".join(lines) + "\n"


def describe_method(option: Option, results: Sequence[Result] = ()) -> str:
    """Write the card of a method, or of a preset of one."""
    method, counted = _try(option.name)
    module = importlib.import_module(type(method).__module__)
    lines = [f"# {option.name}", "", option.title, *(["", *option.description] if option.description else [])]
    lines += ["", "## What it is", "", *(inspect.getdoc(module) or "").splitlines()]
    lines += ["", "## What travels, and what stays", ""]
    lines += ["Numbers per parameter of the network, in the first round:", ""]
    lines.append(markdown(["", "numbers", "of them"], counted))
    lines += ["", f"It predicts by {', or by '.join(method.predictives)} (the first is its own)."]
    if needs := _needs(method.needs):
        lines += ["", f"It needs {'; '.join(needs)}."]
    if costs := list(_costs(option.name, results)):
        lines += ["", "## What it cost in the Table", "", markdown(["setting", "client seconds, FedAvg's = 1"], costs)]
    return "\n".join([*lines, "", *_keys(option)]) + "\n"


def _try(name: str) -> tuple[Method, list[tuple[str, ...]]]:
    """Make the method's tensors before and after one local update, and count their numbers by the network's."""
    config = _compose(TRIED | {"method": name})
    experiment = load(plan(config))[0]
    worker = experiment.worker
    task, method = worker.task, worker.method
    state = method.init(task, stream(0, "init"))
    broadcast, memory = method.broadcast(task, state), method.init_client(task, state, 0)
    client = Client(0, worker.train, worker.client_indices[0], worker.augment)
    update = method.client_update(task, broadcast, memory, client, stream(0, "client"))
    size = len(task.model.vector)
    kinds = {"a client receives": broadcast, "it sends": update.message, "it keeps": update.memory, "the server": state}
    return method, [_count(what, tensors, size) for what, tensors in kinds.items()]


def _count(what: str, tensors: Tensors, size: int) -> tuple[str, ...]:
    total = sum(tensor.numel() for tensor in tensors.values())
    return what, f"{total / size:.2f}", ", ".join(f"`{name}`" for name in tensors)


def _needs(needs: Needs) -> list[str]:
    found = [words for name, words in NEEDED.items() if words and getattr(needs, name)]
    if needs.server_data != "none":
        found.append(f"{needs.server_data} examples on the server (`dataset.server_samples`)")
    if needs.num_initials > 1:
        found.append(f"{needs.num_initials} initial models")
    return found


def _costs(name: str, results: Sequence[Result]) -> Iterator[tuple[str, str]]:
    """Divide the client seconds of a method by FedAvg's, setting by setting: medians over seeds."""
    for setting in dict.fromkeys(result.setting for result in results):
        own, fedavg = (
            [r.measured["client_seconds"] for r in results if (r.setting, r.method, r.status) == (setting, m, "done")]
            for m in (name, "fedavg")
        )
        if own and fedavg:
            yield setting, f"{median(own) / median(fedavg):.2f}"


def describe_dataset(option: Option) -> str:
    """Write the card of a dataset."""
    lines = [f"# {option.name}", "", option.title, *(["", *option.description] if option.description else [])]
    name = _name_source(option)
    parts = DERIVED[name][0] if name in DERIVED else (name,) if name in SOURCES else ()
    lines += ["", "## Source and licence", ""]
    if name in EMBEDDED:
        lines.append(f"{EMBEDDED[name][0]}; licence: {EMBEDDED[name][1]}. Nothing has to be downloaded.")
    for part in parts:
        source = SOURCES[part]
        lines.append(f"- `{part}`: {source.description}. Licence: {source.licence}.")
        ways = [f"`bfl-data get {part}`, from {way.name}" for way in source.ways]
        lines += [f"  To get it: {way}." for way in (*ways, *([source.by_hand] if source.by_hand else []))]
    lines += ["", "## What partitions make of it", ""]
    if any(SOURCES[part].status(default_data_dir()).state != "present" for part in parts):
        lines.append("Its files are not here, so that it was not counted.")
    else:
        lines += _partitions(option.name)
    return "\n".join([*lines, "", *_keys(option)]) + "\n"


def _name_source(option: Option) -> str:
    """Find what `bfl-data` calls the files that a dataset reads."""
    named = option.entries.get("dataset.source")
    known = (*SOURCES, *DERIVED, *EMBEDDED)
    return next((name for name in (option.name, named.value if named else "") if name in known), "")


def _partitions(name: str) -> list[str]:
    """Count the clients' examples and classes under several partitions, seed 0."""
    natural = {"natural clients": {"partition": "natural", "num_clients": None}}
    rows, head = list[tuple[str, ...]](), list[str]()
    for label, values in (PARTITIONS | natural).items():
        try:
            _, dataset, partition = load(plan(_compose({"dataset": name, "method": "fedavg"} | values)))
        except BflError:
            if label in PARTITIONS:
                raise
            continue  # it has no natural clients
        y = np.asarray(dataset.train.y if dataset.train.y.dim() == 1 else dataset.train.y[:, 0])
        classes = [len(np.unique(y[part])) for part in partition.indices]
        sizes = partition.sizes
        head = [
            f"{len(dataset.train):,} training and {len(dataset.test):,} test examples of shape {dataset.input_shape}."
        ]
        middle = f"{min(sizes):,} / {median(sizes):,.0f} / {max(sizes):,}"
        rows.append((label, str(len(sizes)), middle, f"{min(classes)} / {median(classes):.0f} / {max(classes)}"))
    spread = "(fewest / median / most)"
    return [*head, "", markdown(["partition", "clients", f"examples {spread}", f"labels {spread}"], rows)]


def _compose(values: Mapping[str, Any]) -> dict[str, Any]:
    return compose_cells([Cell(names={"cell": ""}, values=values)])[0].config


def _keys(option: Option) -> list[str]:
    hidden = (f"{option.group}._target_", f"{option.group}.name")
    rows = [
        (f"`{key}`", f"`{entry.value}`", " ".join([*entry.above, entry.beside]).strip().replace("|", "\\|"))
        for key, entry in option.entries.items()
        if key not in hidden
    ]
    return ["## Keys", "", markdown(["key", "default", "meaning"], rows)] if rows else []
