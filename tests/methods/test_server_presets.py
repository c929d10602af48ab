"""FedAvgM, FedAdagrad, FedAdam, FedYogi: FedAvg with a step of the server that the method's file brings."""

from pathlib import Path

import pytest

from bfl_bench.methods.fedavg import FedAvg
from tests.composing import SMALL, experiment, resolve, run_in

PRESETS = {"fedavgm": "sgd", "fedadagrad": "adagrad", "fedadam": "adam", "fedyogi": "yogi"}
PLAIN = ["server.rule=sgd", "server.momentum=0", "server.lr=1"]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rule"), PRESETS.items())
def test_a_preset_is_fedavg_with_its_step(method: str, rule: str, tmp_path: Path) -> None:
    """With a plain step of the server nothing but the name is left, bit for bit."""
    worker = experiment(*SMALL, f"method={method}").worker
    assert isinstance(worker.method, FedAvg)
    assert (worker.task.server.rule, worker.task.server.is_plain) == (rule, False)
    fedavg = run_in(tmp_path / "fedavg", *SMALL, "method=fedavg")
    assert run_in(tmp_path / "plain", *SMALL, f"method={method}", *PLAIN) == fedavg
    assert run_in(tmp_path / "preset", *SMALL, f"method={method}") != fedavg


def test_what_is_brought_is_a_default() -> None:
    """Another method does not get it, and the command line wins over it."""
    assert resolve("method=fedprox")["server"] == resolve("method=fedavg")["server"] == resolve()["server"]
    assert resolve("method=fedadam", "server.tau=0.5")["server"]["tau"] == 0.5
    assert resolve("method=fedadam", "server.tau=0.5")["server"]["rule"] == "adam"


def test_fedprox_with_adam_on_the_server_is_fedadam_with_a_pull(tmp_path: Path) -> None:
    step = [f"server.{key}={value}" for key, value in resolve("method=fedadam")["server"].items()]
    fedadam = run_in(tmp_path / "fedadam", *SMALL, "method=fedadam")
    assert run_in(tmp_path / "pulled", *SMALL, "method=fedprox", "method.mu=0.5", *step) != fedadam
    rows = run_in(tmp_path / "free", *SMALL, "method=fedprox", "method.mu=0", *step).splitlines()
    for row, expected in zip(rows[1:], fedadam.splitlines()[1:], strict=True):
        assert [float(cell) for cell in row.split(",")] == pytest.approx(
            [float(c) for c in expected.split(",")], rel=1e-4
        )
