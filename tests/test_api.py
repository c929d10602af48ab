"""bfl-bench from Python: the same runs as from the command line, their models, and what a run's folder may not do."""

import functools
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import bfl_bench as bfl
from bfl_bench import records
from bfl_bench.api import Model, Run
from bfl_bench.errors import ConfigError, RunError
from bfl_bench.methods.fedavg import FedAvg
from bfl_bench.report.runs import ReportError
from tests.composing import NEEDS, SMALL, write_run
from tests.composing import resolve as compose_config
from tests.conftest import BflRun


def run(out: Path, method: str, *overrides: str) -> Run:
    words = [*SMALL, f"method={method}", *NEEDS.get(method, []), "rounds=2", *overrides, f"out={out}"]
    return bfl.run(words, progress=False)


def final_model(out: Path, method: str, *overrides: str) -> Model:
    return run(out, method, *overrides).load()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """Runs of two rounds, each method once."""
    out = tmp_path_factory.mktemp("models")
    return functools.cache(lambda method: final_model(out, method, *(["rounds=1"] if method == "fedlpa" else [])))


def test_the_same_run_as_from_the_command_line(bfl_run: BflRun, tmp_path: Path) -> None:
    words = [*SMALL, "method=fedavg", "rounds=2"]
    assert bfl_run(*words, "out=one").code == 0
    made = bfl.run([*words, "out=two"], progress=False)
    (folder,) = (tmp_path / "one").iterdir()
    assert made.folder.name == folder.name
    assert (made.folder / records.METRICS).read_bytes() == (folder / records.METRICS).read_bytes()
    assert made.status == "done"
    assert made.config["method"]["name"] == "fedavg"
    lines = (folder / records.METRICS).read_text().splitlines()
    assert list(made.metrics.columns) == lines[0].split(",")
    assert made.metrics["ga"].tolist() == [float(line.split(",")[1]) for line in lines[1:]]
    again = bfl.run([*words, "out=two"], progress=False)
    assert again == made
    assert sorted(made.table("clients")["client"].unique()) == [0, 1, 2, 3, 4]


def test_wrong_calls_are_one_sentence(models: Callable[[str], Model], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^overrides: got 'method=fola', allowed: a list"):
        bfl.run("method=fola")
    with pytest.raises(ConfigError, match=r"^overrides: got '-m', allowed: key=value"):
        bfl.run(["-m", "seed=0,1"])
    with pytest.raises(ConfigError, match=r"^seed: got '0,1', allowed: one value"):
        bfl.run(["seed=0,1"])
    with pytest.raises(ConfigError, match=r"^local.lrr: got '1', allowed: .*did you mean lr"):
        bfl.run(["local.lrr=1"])
    with pytest.raises(ConfigError, match=r"^dry_run: got true"):
        bfl.run(["dry_run=true"])
    with pytest.raises(RunError, match="is not the folder of a run"):
        bfl.load(tmp_path)
    made = models("fedavg").run
    with pytest.raises(ConfigError, match=r"^table: got 'nothing', allowed: clients, metrics,"):
        made.table("nothing")
    with pytest.raises(ConfigError, match=r"^x: got \[3, 5\], allowed: inputs of shape \(n, 1, 4, 4\)"):
        models("fedavg").predict(torch.zeros(3, 5))


def test_parts_of_a_folder_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    node = {"_target_": f"{__name__}.NoOp", "name": "noop", "weights": "size"}
    (tmp_path / "method" / "noop.yaml").write_text(yaml.safe_dump(node))
    words = [*SMALL, "method=noop", "rounds=1", f"out={tmp_path / 'out'}"]
    made = bfl.run(words, config_dir=tmp_path, progress=False)
    assert made.config["method"]["name"] == "noop"
    with pytest.raises(RunError, match="which is no part of bfl-bench"):
        bfl.load(made.folder)
    assert bfl.load(made.folder, modules=[__name__]).model is not None


class NoOp(FedAvg):
    """FedAvg under another name."""


def test_a_folder_of_an_earlier_version_loads(models: Callable[[str], Model], tmp_path: Path) -> None:
    """Its config lacks keys that were added since."""
    made = Run(Path(shutil.copytree(models("fedavg").run.folder, tmp_path / "copy")))
    config = made.config
    del config["checkpoint"]["keep"], config["eval"]["posterior"]
    (made.folder / records.CONFIG).write_text(yaml.safe_dump(config))
    assert made.load().model is not None


def test_naming_a_module_does_not_open_what_it_imports(models: Callable[[str], Model], tmp_path: Path) -> None:
    made = Run(Path(shutil.copytree(models("fedavg").run.folder, tmp_path / "copy")))
    for target in (f"{__name__}.subprocess.run", "os.system", f"{__name__}x.NoOp"):
        config = made.config
        config["method"]["_target_"] = target
        (made.folder / records.CONFIG).write_text(yaml.safe_dump(config))
        with pytest.raises(RunError, match="which is no part of bfl-bench"):
            bfl.load(made.folder, modules=[__name__])


@pytest.mark.parametrize("method", ["fola", "fvb"])
def test_predictions_are_those_of_the_last_evaluation(method: str, models: Callable[[str], Model]) -> None:
    model = models(method)
    x, y = model.test
    probabilities = model.predict(x.numpy())
    last = model.run.metrics.iloc[-1]
    assert (probabilities.argmax(1) == y).double().mean().item() == pytest.approx(last["ga"], abs=1e-12)
    loss = -probabilities[torch.arange(len(y)), y].double().log().mean().item()
    assert loss == pytest.approx(last["nll"], rel=1e-5)  # probabilities are float32
    assert model.predictive(x).log_probabilities.exp().equal(probabilities)


@pytest.mark.parametrize(
    ("method", "network"),
    [("fvb", "mlp"), ("fedavg", "lenet"), pytest.param("virtual", "mlp", marks=pytest.mark.slow)],
)
def test_the_model_is_a_plain_network_with_the_mean(method: str, network: str, tmp_path: Path) -> None:
    shape = ["dataset.shape=[1,16,16]"] if network == "lenet" else []
    words = [word for word in SMALL if not shape or not word.startswith(("model.hidden", "dataset.shape"))]
    words += [f"method={method}", *NEEDS.get(method, []), "rounds=1", f"model={network}", *shape, f"out={tmp_path}"]
    model = bfl.run(words, progress=False).load()
    x = model.test[0]
    worker = model._experiment.worker
    worker.task.model.load(model._state["params"])
    worker.task.model.module.eval()
    with torch.no_grad():
        expected = worker.task.model(x)
        torch.testing.assert_close(model.model(x), expected)  # convolutions add up in another order
        assert not [m for m in model.model.modules() if type(m).__name__.startswith(("Gaussian", "Lateral"))]
        if method == "fedavg":
            torch.testing.assert_close(model.predict(x), expected.softmax(1))
    for tensor in model.model.state_dict().values():
        assert tensor.is_contiguous()
    with torch.no_grad():  # its tensors are its own
        next(model.model.parameters()).zero_()
    assert not worker.task.model.vector.eq(0).all()


def test_gaussian_lstms_are_plain_lstms(tmp_path: Path) -> None:
    from bfl_bench.models.gaussian import GaussianSettings, make_gaussian
    from bfl_bench.models.lateral import load_plain
    from bfl_bench.models.networks import lstm

    settings = GaussianSettings(
        **{key: compose_config("method=fvb")["model"][key] for key in GaussianSettings.__dataclass_fields__}
    )
    gaussian = make_gaussian(lstm((5,), 7, 4, 6, 2), None, settings).eval()
    plain = lstm((5,), 7, 4, 6, 2)
    load_plain(plain, gaussian.state_dict())
    x = torch.randint(7, (3, 5))
    torch.testing.assert_close(plain(x), gaussian(x))


def test_export_reads_back_without_this_program(models: Callable[[str], Model], tmp_path: Path) -> None:
    model = models("fola")
    path = model.export(tmp_path / "model.safetensors")
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
    other.load_state_dict(load_file(path))
    x = model.test[0]
    torch.testing.assert_close(other(x), model.model(x))
    with safe_open(path, "pt") as file:
        assert file.metadata()["run"] == model.run.folder.name
        assert file.metadata()["input_shape"] == "[1, 4, 4]"


def test_a_point_has_no_posterior(models: Callable[[str], Model]) -> None:
    assert models("fedavg").posterior is None


@pytest.mark.parametrize(
    "method",
    ["fola", "fvb", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedivon", "swag", "fedlpa"))],
)
def test_draws_have_the_posteriors_mean_and_deviation(method: str, models: Callable[[str], Model]) -> None:
    posterior = models(method).posterior
    assert posterior is not None
    assert posterior.mean is not None
    assert posterior.deviation is not None
    draws = [dict(network.state_dict()) for network in posterior.draw(400, seed=1)]
    for name, mean in posterior.mean.items():
        stacked = torch.stack([draw[name] for draw in draws])
        deviation = posterior.deviation[name]
        # Of 400 draws the mean is within 5/sqrt(400) deviations, the deviation within 5/sqrt(800) of itself.
        assert bool(((stacked.mean(0) - mean).abs() <= 0.25 * deviation + 1e-6).all()), name
        if method != "swag":  # whose covariance has a part of low rank, drawn with another divisor
            assert bool(((stacked.std(0) - deviation).abs() <= 0.18 * deviation + 1e-6).all()), name
    first, second = (next(iter(posterior.draw(1, seed=seed))) for seed in (1, 1))
    assert next(first.parameters()).equal(next(second.parameters()))


def test_an_ensemble_has_members_and_no_single_network(tmp_path: Path) -> None:
    model = final_model(tmp_path, "ensemble")
    with pytest.raises(RunError, match="no single one"):
        _ = model.model
    posterior = model.posterior
    assert posterior is not None
    assert posterior.mean is None
    x = model.test[0]
    with torch.no_grad():
        members = [network(x).softmax(1) for network in posterior.draw(10)]
    assert len(members) == len(model._state["params"])
    torch.testing.assert_close(torch.stack(members).mean(0), model.predict(x))


def row(round_: int, ga: float) -> dict[str, records.Cell]:
    return {"round": round_, "ga": ga, "la": 0.5, "worst10": 0.5, "ece": 0.1, "nll": 1.0}


def test_compare_averages_over_seeds(tmp_path: Path) -> None:
    values = {"fedavg": [0.5, 0.6, 0.7], "fedprox": [0.8, 0.9, 1.0]}
    for method, accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            config = compose_config(*SMALL, f"method={method}", f"seed={seed}")
            write_run(tmp_path, config, row(1, 0.1), row(3, accuracy))
    table = bfl.compare(tmp_path, ["ga"])
    assert table["method.name"].tolist() == ["fedprox", "fedavg"]
    assert table["ga"].tolist() == pytest.approx([0.9, 0.6])
    assert table["ga_std"].tolist() == pytest.approx([0.1, 0.1])
    assert table["seeds"].tolist() == [3, 3]
    assert table["best"].tolist() == ["ga", ""]
    runs = [Run(path) for path in tmp_path.glob("*fedavg*")]
    assert len(bfl.compare(runs)) == 1
    with pytest.raises(ConfigError, match=r"^--metrics: got 'gaa'"):
        bfl.compare(tmp_path, ["gaa"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="no finished run there"):
        bfl.compare(tmp_path / "empty")


def test_a_run_gives_torch_its_threads_back(models: Callable[[str], Model]) -> None:
    folder = models("fedavg").run.folder
    torch.set_num_threads(2)
    try:
        bfl.load(folder)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_importing_it_loads_nothing_heavy() -> None:
    heavy = "'torch', 'pandas', 'hydra', 'numpy', 'email'"
    code = f"import sys, bfl_bench as b; assert callable(b.run); print([m for m in ({heavy}) if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_name_run_is_function_and_subpackage_in_any_order() -> None:
    import bfl_bench.run.loop as loop

    assert callable(bfl.run)
    assert loop.run is not bfl.run
    assert {"run", "load", "compare"} <= set(dir(bfl))
    with pytest.raises(AttributeError):
        bfl.nothing  # noqa: B018
    assert pickle.loads(pickle.dumps(bfl)) is bfl  # as a user's own function may send it to another process
    assert pickle.loads(pickle.dumps(bfl.run)) is bfl.run
