"""A method of your own in one file: FedAvg whose clients send noisy models, beside FedAvg itself.

    python examples/own_method.py

A method is a frozen dataclass. Its numbers are keys of the config, checked against the annotations. Here the config is
made from that of FedAvg by two overrides; a YAML file of its own (docs/how-to/own-method.md) gives it a name for the
command line. The module's name counts as the method's origin, so that runs of it are told from all others.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch

import bfl_bench as bfl
from bfl_bench.checks import AtLeast
from bfl_bench.method import Client, Task, Tensors, Update
from bfl_bench.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Noisy(FedAvg):
    """FedAvg with Gaussian noise on what the clients send."""

    deviation: Annotated[float, AtLeast(0)]

    def client_update(
        self, task: Task, broadcast: Tensors, memory: Tensors, client: Client, rng: torch.Generator
    ) -> Update:
        update = super().client_update(task, broadcast, memory, client, rng)
        params = update.message["params"]
        noise = torch.randn(len(params), generator=rng).to(params)
        return replace(update, message={"params": params + self.deviation * noise})


def main() -> None:
    common = ["rounds=5", "local.epochs=2"]
    own = ["method=fedavg", "method._target_=own_method.Noisy", "method.name=noisy"]
    runs = [bfl.run(["method=fedavg", *common])]
    runs += [bfl.run([*own, f"+method.deviation={deviation}", *common]) for deviation in (0.01, 0.1)]
    print(bfl.compare(runs, ["ga", "nll"]).to_string(index=False))
    model = bfl.load(runs[-1].folder, modules=["own_method"])  # a run's folder is data: code of your own is named
    x, y = model.test
    print(f"accuracy of the last model: {(model.predict(x).argmax(1) == y).double().mean():.4f}")


if __name__ == "__main__":
    main()
