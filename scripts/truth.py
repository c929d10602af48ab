"""Make the true posteriors of small problems, which `eval.truth` compares with.

    python scripts/truth.py NAME... [--to FOLDER]
    python scripts/truth.py --limits                # what no method can be told from, of the stored posteriors

NAME is a problem, experiment=truth_NAME. A conjugate model has its posterior in closed form. All others are sampled by
NUTS (pip install numpyro), with two seeds of four chains each: the largest R-hat over all eight chains has to be below
1.01, the smallest effective sample size above 1,000, and the means of the two seeds have to agree. Of a network with
hidden units that is asked of its outputs, as its parameters have many equal modes.
"""

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bfl_bench.build import load, plan
from bfl_bench.commands.cells import compose_cells
from bfl_bench.engines.worker import TEST, Worker
from bfl_bench.errors import RunError
from bfl_bench.evaluation.gaussian_noise import GaussianNoise
from bfl_bench.evaluation.truth import (
    DIGESTS,
    POSTERIORS,
    Moments,
    Truth,
    compare,
    digest_data,
    list_truths,
    read_truth,
)
from bfl_bench.papers.spec import Cell

PRIOR_PRECISION = 1.0
KEPT_DRAWS, KEPT_MEMBERS = 100, 400
WARM_UP, SAMPLES, CHAINS, SEEDS = 1000, 1500, 4, (0, 1)
LARGEST_RHAT, SMALLEST_ESS, LARGEST_DIFFERENCE = 1.01, 1000, 0.1
Floats = NDArray[np.float64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--to", type=Path, default=POSTERIORS)
    parser.add_argument("--limits", action="store_true", help="of all stored posteriors, or of NAME...; makes nothing")
    arguments = parser.parse_args()
    if arguments.limits:
        print_limits(arguments.names or list_truths())
        return
    if not arguments.names:
        parser.error("NAME or --limits")
    arguments.to.mkdir(exist_ok=True)
    digests = arguments.to / DIGESTS
    for name in arguments.names:
        arrays = make(name)
        path = arguments.to / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        known = json.loads(digests.read_text()) if digests.exists() else {}
        known[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        digests.write_text(json.dumps(dict(sorted(known.items())), indent=2) + "\n")
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB, {arrays['about']}")


def print_limits(names: Sequence[str]) -> None:
    """Print the distances of the best mean-field Gaussian, of the mean alone, and of draws of the truth itself."""
    print("| problem | | KL | log ratio of spreads | TV of predictions |\n|---|---|---|---|---|")
    for name in names:
        truth, worker = read_truth(name), find_worker(name)
        moments = truth.moments
        best = Moments(moments.mean, 1 / torch.linalg.inv(moments.matrix).diagonal())
        rng = torch.Generator().manual_seed(0)
        drawn = moments.mean + best.covariance.sqrt() * torch.randn(KEPT_DRAWS, len(best.mean), generator=rng)
        rows: dict[str, tuple[Moments | None, torch.Tensor]] = {f"{KEPT_DRAWS} of its draws": (None, truth.draws)}
        if truth.identifiable:
            point = Moments(moments.mean, torch.zeros_like(moments.mean))
            rows |= {"best mean-field Gaussian": (best, drawn), "its mean alone": (point, moments.mean[None])}
        for label, (found, draws) in rows.items():
            row = distances(worker, truth, found, draws)
            print(f"| {name} | {label} | " + " | ".join("" if v is None else f"{v:.3g}" for v in row) + " |")


def distances(worker: Worker, truth: Truth, found: Moments | None, draws: torch.Tensor) -> list[float | None]:
    """Compare a posterior, given by its moments and by draws (S, P), with the truth."""
    likelihood = worker.task.likelihood
    prediction = worker.mix(draws.float(), worker.sets[TEST].split.x)
    row = compare(truth, found, prediction, likelihood.unit if isinstance(likelihood, GaussianNoise) else 1.0)
    return [row.get(column) for column in ("truth_kl", "truth_spread", "truth_tv")]


def find_worker(name: str) -> Worker:
    values = {"experiment": f"truth_{name}", "method": "fedavg", "eval.draws": 10, "eval.truth": None, "device": "cpu"}
    (composed,) = compose_cells([Cell(names={"cell": name}, values=values)])
    return load(plan(composed.config))[0].worker


def make(name: str) -> dict[str, Any]:
    worker = find_worker(name)
    train, test = worker.train, worker.sets[TEST].split
    model, likelihood = worker.task.model, worker.task.likelihood
    shapes = [list(entry.shape) for entry in model.layout.entries]
    about: dict[str, Any] = {
        "problem": name,
        "prior_precision": PRIOR_PRECISION,
        "noise": likelihood.variance if isinstance(likelihood, GaussianNoise) else None,
        "shapes": shapes,
        "identifiable": len(shapes) == 1,
        "data": digest_data(train.x, train.y, test.x, test.y),
    }
    # Where each weight lies in the flat vector.
    places = [entry.view(torch.arange(model.layout.size)).numpy() for entry in model.layout.entries]
    if len(places) == 1 and isinstance(likelihood, GaussianNoise):
        assert likelihood.variance is not None
        assert (places[0] == np.arange(places[0].size)[None]).all()  # one row
        return conjugate(worker, likelihood.variance) | {"about": json.dumps(about | {"by": "closed form"})}
    groups, how = sample(worker, places)
    return groups | {"about": json.dumps(about | how)}


def with_one(x: torch.Tensor) -> Floats:
    rows = x.flatten(1).double().numpy()
    return np.concatenate([rows, np.ones((len(rows), 1))], axis=1)


def conjugate(worker: Worker, noise: float) -> dict[str, Any]:
    """Compute the Gaussian posterior of a linear model, and its Gaussian predictive."""
    train, test = worker.train, worker.sets[TEST].split
    x, y, points = with_one(train.x), train.y.double().numpy(), with_one(test.x)
    precision = x.T @ x / noise + PRIOR_PRECISION * np.eye(x.shape[1])
    covariance = np.linalg.inv(precision).astype(np.float64)
    mean = covariance @ (x.T @ y) / noise
    draws = np.random.default_rng(0).multivariate_normal(mean, covariance, KEPT_DRAWS)
    variances = noise + np.einsum("ni,ij,nj->n", points, covariance, points)
    return describe(mean, covariance, draws) | {"means": (points @ mean)[None], "variances": variances[None]}


def describe(mean: Floats, covariance: Floats, draws: Floats) -> dict[str, Any]:
    upper = covariance[np.triu_indices(len(mean))]
    return {"mean": mean, "covariance": upper, "draws": draws.astype(np.float32)}


def sample(worker: Worker, places: list[NDArray[np.int64]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sample by NUTS, check the chains, and keep moments, some draws and what all of them predict."""
    import jax
    import jax.numpy as jnp
    import numpyro
    from numpyro.distributions import Normal
    from numpyro.infer import MCMC, NUTS

    numpyro.enable_x64()
    likelihood = worker.task.likelihood
    train, test = worker.train, worker.sets[TEST].split
    x, y = jnp.asarray(with_one(train.x)), jnp.asarray(train.y.numpy())
    points = jnp.asarray(with_one(test.x))
    size = sum(place.size for place in places)

    def outputs(vector: Any, inputs: Any) -> Any:
        *hidden, last = places
        for place in hidden:
            inputs = jnp.maximum(inputs @ vector[place].T, 0)
        return inputs @ vector[last].T

    def log_likelihood(vector: Any) -> Any:
        found = outputs(vector, x)
        if isinstance(likelihood, GaussianNoise):
            assert likelihood.variance is not None
            return Normal(found[:, 0], math.sqrt(likelihood.variance)).log_prob(y).sum()
        return jnp.take_along_axis(jax.nn.log_softmax(found), y[:, None], 1).sum()

    def model() -> None:
        vector = numpyro.sample("vector", Normal(0, PRIOR_PRECISION**-0.5).expand([size]).to_event(1))
        numpyro.factor("likelihood", log_likelihood(vector))

    found = []
    for seed in SEEDS:
        kernel = NUTS(model, dense_mass=len(places) == 1, target_accept_prob=0.9, max_tree_depth=8)
        chains = MCMC(
            kernel,
            num_warmup=WARM_UP,
            num_samples=SAMPLES,
            num_chains=CHAINS,
            chain_method="vectorized",
            progress_bar=False,
        )
        start = {"vector": 0.3 * jax.random.normal(jax.random.PRNGKey(100 + seed), (CHAINS, size))}
        chains.run(jax.random.PRNGKey(seed), init_params=start)
        found.append(np.asarray(chains.get_samples(group_by_chain=True)["vector"]))
    both = np.concatenate(found)  # (chains, draws, P)
    flat = both.reshape(-1, size)
    predicted = np.asarray(jax.lax.map(lambda vector: outputs(vector, points), jnp.asarray(flat), batch_size=100))
    judged = both if len(places) == 1 else predicted[:, :, 0].reshape(*both.shape[:2], -1)
    how = check(judged, len(found)) | {"by": "NUTS", "numpyro": numpyro.__version__, "jax": jax.__version__}
    how |= {"chains": CHAINS * len(SEEDS), "samples": SAMPLES, "seeds": list(SEEDS)}
    rng = np.random.default_rng(0)
    kept = rng.permutation(len(flat))
    arrays = describe(flat.mean(0), np.cov(flat.T), flat[kept[:KEPT_DRAWS]])
    if isinstance(likelihood, GaussianNoise):
        means = predicted[kept[:KEPT_MEMBERS], :, 0].astype(np.float32)
        return arrays | {"means": means, "variances": np.full_like(means, likelihood.variance)}, how
    logits = torch.from_numpy(predicted)
    mixed = logits.log_softmax(2).logsumexp(0) - math.log(len(logits))
    return arrays | {"log_probabilities": mixed.numpy().astype(np.float32)}, how


def check(chains: Floats, num_seeds: int) -> dict[str, Any]:
    """Compute R-hat, effective sample size and agreement of seeds over (chains, draws, values); raise where bad."""
    from numpyro.diagnostics import effective_sample_size, split_gelman_rubin

    rhat = float(np.max(split_gelman_rubin(chains)))
    ess = float(np.min(effective_sample_size(chains)))
    means = [group.reshape(-1, chains.shape[2]).mean(0) for group in np.split(chains, num_seeds)]
    deviation = chains.reshape(-1, chains.shape[2]).std(0)
    difference = float(np.max(np.abs(means[0] - means[1]) / deviation))
    how = {"rhat": round(rhat, 5), "ess": round(ess), "seeds_differ": round(difference, 4)}
    if rhat >= LARGEST_RHAT or ess <= SMALLEST_ESS or difference >= LARGEST_DIFFERENCE:
        raise RunError(f"the chains do not agree: {how}; R-hat below {LARGEST_RHAT}, ESS above {SMALLEST_ESS} expected")
    return how


if __name__ == "__main__":
    main()
