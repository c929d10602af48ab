"""ResNets: sizes counted by hand, norms that know no batch, Gaussian layers, and every kind of method on them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bfl_bench.errors import ConfigError, UnsuitableError
from bfl_bench.models.flat import FlatModel
from bfl_bench.models.gaussian import count_layers, make_gaussian
from bfl_bench.models.resnet import Block, FrozenBatchNorm, resnet
from bfl_bench.records import config_folder
from tests.composing import experiment, resolve, run_in
from tests.conftest import BflRun
from tests.federation import CPU, make_gaussian_settings

COLOUR = (3, 32, 32)
SMALL = (
    "dataset=synthetic dataset.train_samples=48 dataset.test_samples=20 dataset.num_classes=4 dataset.shape=[3,8,8] "
    "model=resnet8 model.width=4 model.groups=2 num_clients=2 partition=iid rounds=1 local.epochs=1 local.batch_size=8"
).split()


def make(shape: tuple[int, ...] = COLOUR, num_classes: int = 10, **changes: Any) -> nn.Module:
    values: dict[str, Any] = {"blocks": [1, 1, 1], "width": 16, "norm": "group", "groups": 8, "dropout": 0.0}
    return resnet(shape, num_classes, **values | changes)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_sizes_by_hand() -> None:
    """Convolutions without biases, two numbers per channel and norm."""
    first = 3 * 16 * 9 + 2 * 16 + 2 * (16 * 16 * 9 + 2 * 16)
    second = 16 * 32 * 9 + 32 * 32 * 9 + 16 * 32 + 3 * 2 * 32
    third = 32 * 64 * 9 + 64 * 64 * 9 + 32 * 64 + 3 * 2 * 64
    assert count(make()) == first + second + third + 64 * 10 + 10
    assert count(make(blocks=[2, 2, 2, 2], width=64, groups=32)) == 11_173_962  # of ResNet-18 on CIFAR-10, anywhere


@pytest.mark.parametrize(("name", "num_layers"), [("resnet8", 8), ("resnet18", 18)])
def test_the_files_are_what_they_are_called(name: str, num_layers: int) -> None:
    """Layers with weights, but for those of shortcuts."""
    node = resolve(f"model={name}")["model"]
    assert node["name"] == name
    module = make(**{key: node[key] for key in ("blocks", "width", "norm", "groups")})
    weighty = [path for path, layer in module.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert sum("shortcut" not in path for path in weighty) == num_layers
    assert (config_folder() / "model" / f"{name}.yaml").is_file()


def test_stages_halve_the_side_and_double_the_channels() -> None:
    shapes: list[tuple[int, ...]] = []
    module = make(blocks=[2, 1, 1], groups=1)
    for block in module.modules():
        if isinstance(block, Block):
            block.register_forward_hook(lambda _, __, output: shapes.append(tuple(output.shape[1:])))
    assert module(torch.randn(2, *COLOUR)).shape == (2, 10)
    assert shapes == [(16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8)]


def test_a_block_by_hand() -> None:
    """With torch's functions on the block's own parameters."""
    block = Block(4, 8, 2, "group", 2)
    x = torch.randn(3, 4, 6, 6)
    p = dict(block.named_parameters())

    def convolve(y: Tensor, name: str, stride: int, norm: str) -> Tensor:
        weight = p[f"{name}.weight"]
        y = nn.functional.conv2d(y, weight, stride=stride, padding=weight.shape[-1] // 2)
        return nn.functional.group_norm(y, 2, p[f"{norm}.weight"], p[f"{norm}.bias"])

    for name in ("branch.1", "branch.4", "shortcut.1"):
        nn.init.normal_(p[f"{name}.weight"])
        nn.init.normal_(p[f"{name}.bias"])
    branch = convolve(convolve(x, "branch.0", 2, "branch.1").relu(), "branch.3", 1, "branch.4")
    expected = (branch + convolve(x, "shortcut.0", 2, "shortcut.1")).relu()
    assert torch.equal(block(x), expected)


@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
def test_an_example_is_normalised_without_the_others(norm: str) -> None:
    """In training too: a minibatch of one works, and other examples change nothing but rounding."""
    module = make(norm=norm).train()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    x = torch.randn(4, *COLOUR)
    with torch.no_grad():
        together, alone = module(x), torch.cat([module(x[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)  # float32 sums over up to 9216 terms
    assert together.std() > 0.01


def test_a_frozen_norm_is_batchnorm_in_evaluation_and_keeps_its_statistics() -> None:
    frozen, reference = FrozenBatchNorm(5).train(), nn.BatchNorm2d(5).eval()
    for name, tensor in (*frozen.named_parameters(), *frozen.named_buffers()):
        tensor.data.copy_(torch.rand(5) + 0.5)
        reference.state_dict()[name].copy_(tensor)
    before = frozen.running_mean.clone()
    x = torch.randn(3, 5, 4, 4)
    assert torch.equal(frozen(x), reference(x))
    assert torch.equal(frozen.running_mean, before)
    layout = FlatModel(make(norm="frozen_batch"), CPU).layout
    rest = [entry.name for entry in layout.entries if entry.start >= layout.num_trainable]
    assert len(rest) == 2 * 9  # of the first, of 2 in each of 3 blocks, of 2 shortcuts
    assert all(name.endswith(("running_mean", "running_var")) for name in rest)


def test_blocks_with_frozen_norms_start_as_their_shortcuts() -> None:
    block = Block(4, 4, 1, "frozen_batch", 1)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x.relu())
    assert not torch.equal(Block(4, 4, 1, "group", 1)(x), x.relu())


def test_norms_and_biases_are_points_and_weights_are_gaussian() -> None:
    module = make_gaussian(make(), count_layers(make()), make_gaussian_settings())
    layout = FlatModel(module, CPU).layout
    points = {entry.name for entry in layout.entries if entry.stop <= layout.points.stop}
    means = {entry.name for entry in layout.entries if layout.means.start <= entry.start < layout.means.stop}
    norms = {path for path, layer in make().named_modules() if isinstance(layer, nn.GroupNorm)}
    assert len(norms) == 9
    assert points == {f"{path}.{kind}" for path in norms for kind in ("weight", "bias")} | {"8.bias"}
    weights = {path for path, layer in make().named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)}
    assert means == {f"{path}.weight" for path in weights}


@pytest.mark.parametrize(
    ("layers", "gaussian"),
    [
        ("auto", ["8"]),
        ("1", ["8"]),
        ("2", ["5.branch.3", "8"]),
        ("4", ["5.shortcut.0", "5.branch.0", "5.branch.3", "8"]),
    ],
)
def test_bayesian_layers_count_from_the_end(layers: str, gaussian: list[str]) -> None:
    module = experiment(
        *SMALL, "method=fvb", "aggregator=eaa", f"model.bayesian_layers={layers}"
    ).worker.task.model.module
    found = [name.removesuffix(".weight_log_variance") for name, _ in module.named_parameters() if "log_var" in name]
    assert found == gaussian


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "frozen_batch"])
@pytest.mark.parametrize(
    "method",
    [
        "fedavg",
        "fvb aggregator=eaa",
        "fvb aggregator=rklb model.bayesian_layers=all",
        "fola",
        "fola method.fisher=per_sample",
        "fedivon",
        "swag method.start_round=1",
        "ensemble method.members=2",
        "mcdropout",
        "virtual",
    ],
)
def test_a_round_of_every_kind_of_method(method: str, norm: str, tmp_path: Path) -> None:
    name, *also = method.split()
    text = run_in(tmp_path, *SMALL, f"model.norm={norm}", f"method={name}", *also)
    header, row = (line.split(",") for line in text.splitlines())
    assert 0 < float(dict(zip(header, row, strict=True))["nll"]) < 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=fedlpa"], "model: got 'resnet8', allowed: a network whose parameters are all in plain Linear and"),
        (["method=fola", "method.structure=full"], "model: got 'resnet8', allowed: a network of at most 3000"),
        (["model.groups=3"], "model.groups: got 3, allowed: a divisor of model.width, 16"),
        (["model.blocks=[]"], "model.blocks: got [], allowed: a list of at least one number"),
        (["dataset=synthetic"], "model: got 'resnet8', allowed: one for inputs of shape (20,); resnet needs images"),
        (["model.bayesian_layers=11", "method=fvb"], "model.bayesian_layers: got 11, allowed: at most the 10 layers"),
        (
            ["method=mcdropout", "model=conv3"],
            "model: got 'conv3', allowed: a network with the key dropout, such as mlp, lenet, cnn and resnet8, for "
            "method mcdropout",
        ),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    overrides: list[str], sentence: str, bfl_run: BflRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BFL_DATA_DIR", "stand-in")
    result = bfl_run("dataset=cifar10", "model=resnet8", "rounds=1", *overrides)
    assert result.code == 2, result.err
    assert result.err.startswith(f"bfl-run: {sentence}"), result.err
    assert not (tmp_path / "outputs").exists()


def test_direct_calls_raise_what_is_wrong() -> None:
    with pytest.raises(UnsuitableError, match="resnet needs images"):
        make((28, 28))
    with pytest.raises(ConfigError, match="groups: got 5"):
        make(groups=5)
    assert make(groups=5, norm="frozen_batch")(torch.randn(1, *COLOUR)).shape == (1, 10)


def test_dropout_stands_before_the_last_layer() -> None:
    layers = list(make(dropout=0.4).children())
    assert isinstance(layers[-2], nn.Dropout)
    assert layers[-2].p == 0.4
    assert not any(isinstance(layer, nn.Dropout) for layer in make().children())
