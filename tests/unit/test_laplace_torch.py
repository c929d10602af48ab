"""Laplace approximations of one client against laplace-torch, which has its own curvature, algebra and evidence."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bfl_bench.inference import kronecker
from bfl_bench.inference.curvature import diagonal_fisher
from bfl_bench.inference.laplace import kronecker_laplace, laplace
from tests.federation import NUM_CLASSES, NUM_FEATURES, generator, make_clients, make_task, random_start

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports a deprecated part of torch
    from laplace import Laplace
    from laplace.curvature import CurvlinopsEF

pytestmark = pytest.mark.filterwarnings("ignore")
NUM = 50


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_linearised_predictions_and_evidence(structure: str) -> None:
    """Without biases, which laplace-torch gives Kronecker factors of their own."""
    module = nn.Sequential(nn.Linear(NUM_FEATURES, 6, bias=False), nn.Tanh(), nn.Linear(6, NUM_CLASSES, bias=False))
    task, (client,) = make_task(module, (NUM,)), make_clients((NUM,))
    start = random_start(task)
    if structure == "diag":
        ours = laplace(task, start, NUM * diagonal_fisher(task, start, client, generator(), "per_sample"), "all")
    else:
        factors = kronecker.factors(task, start, client, generator(), "kfac")
        ours = kronecker_laplace(task, start, factors, NUM, "all")
    task.model.load(start)
    theirs = Laplace(module, "classification", "all", structure, prior_precision=2.0, backend=CurvlinopsEF)
    theirs.fit(DataLoader(TensorDataset(*client.gather(torch.arange(NUM), generator())), batch_size=NUM))
    x = torch.randn(30, NUM_FEATURES, generator=generator())
    expected = theirs(x, pred_type="glm", link_approx="probit")
    found, mean = (prediction.log_probabilities.exp() for prediction in ours.linearise(x, [2.0, 1e9], 1000))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)  # float32
    assert (mean - expected).abs().max() > 0.02
    for d in (0.5, 8.0):
        known, one = (theirs.log_marginal_likelihood(torch.tensor(value)).item() for value in (d, 1.0))
        assert ours.log_evidence(d) - ours.log_evidence(1.0) == pytest.approx(known - one, rel=1e-3, abs=1e-3)
