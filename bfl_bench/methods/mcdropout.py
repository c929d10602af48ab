"""MC dropout: FedAvg of networks with dropout, which stays on for predictions: every pass is a draw.

Gal, Ghahramani: "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning", ICML 2016, with
FedAvg in the place of SGD, as Linsner, Adilova, Daeubener, Kamp, Fischer: "Approaches to Uncertainty Quantification in
Federated Deep Learning", 2021, propose it as a baseline. `model.dropout` is the network's; without it this is FedAvg.
Every example has masks of its own in every pass. Other layers, such as BatchNorm, predict as they always do.

Deviations: none.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from bfl_bench.inference.point import PointMethod
from bfl_bench.likelihood import AnyPrediction
from bfl_bench.method import Needs, Task, Tensors
from bfl_bench.rng import derive_seed, seeded_globally

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class McDropout(PointMethod):
    needs: ClassVar[Needs] = Needs(any_server_step=True, dropout=True)

    @torch.inference_mode()
    def predict(
        self, task: Task, model: Tensors, x: Tensor, num: int, batch_size: int, rng: torch.Generator
    ) -> AnyPrediction:
        module = task.model.module
        layers = [layer for layer in module.modules() if isinstance(layer, DROPOUT) and layer.p > 0]
        if not layers:
            return super().predict(task, model, x, num, batch_size, rng)
        module.eval()
        for layer in layers:
            layer.train()
        task.model.load(model["params"])
        mixture = task.likelihood.mixture()
        with seeded_globally(derive_seed(rng.initial_seed(), "dropout"), x.device):
            for _ in range(num):
                mixture.add(torch.cat([task.model(part) for part in torch.split(x, batch_size)]))
        module.eval()
        return mixture.result()
