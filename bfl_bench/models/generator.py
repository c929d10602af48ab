"""Images out of noise, and how well they fit a network's batch statistics: the parts of data-free distillation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ImageGenerator(nn.Module):
    """Noise (n, latent) to images (n, channels, side, side) between `low` and `high`, by two steps of upsampling."""

    def __init__(self, latent: int, width: int, low: Tensor, high: Tensor, side: int) -> None:
        super().__init__()
        self._shape = (2 * width, side // 4, side // 4)
        self.expand = nn.Linear(latent, 2 * width * (side // 4) ** 2)
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            *_upsampled(2 * width, 2 * width),
            *_upsampled(2 * width, width),
            nn.Conv2d(width, len(low), 3, padding=1),
            nn.Sigmoid(),
        )
        self._low, self._high = low, high
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, 0.0, 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, noise: Tensor) -> Tensor:
        images = self.blocks(self.expand(noise).view(len(noise), *self._shape))
        scaled: Tensor = self._low + (self._high - self._low) * images
        return scaled


def _upsampled(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [nn.Upsample(scale_factor=2), convolution, nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2)]


@contextmanager
def batch_statistics(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """While it lasts, the inputs of the network's BatchNorm2d layers in its last forward pass, by their names."""
    inputs: dict[str, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda _, arguments, name=name: inputs.update({name: arguments[0]}))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.BatchNorm2d)
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


def statistics_distance(inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    """How far a batch's means and variances are from a network's running ones, summed over its BatchNorm layers."""
    total = torch.zeros(())
    for name, values in inputs.items():
        mean = values.mean(dim=(0, 2, 3)) - tensors[f"{name}.running_mean"]
        variance = values.var(dim=(0, 2, 3), correction=0) - tensors[f"{name}.running_var"]
        total = total.to(values.device) + mean.norm() + variance.norm()
    return total
