"""The likelihood: mixtures and their expected entropies against numpy, further outputs; nobody else knows it."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from bfl_bench.likelihood import Categorical, Prediction
from tests.federation import generator

PACKAGE = Path(__file__).parent.parent.parent / "bfl_bench"


def outputs(num: int, *shape: int) -> list[Tensor]:
    return [torch.randn(*shape, generator=generator(40 + i)) * 3 for i in range(num)]


def mix(members: list[Tensor], num_classes: int) -> Prediction:
    mixture = Categorical(num_classes).mixture()
    for member in members:
        mixture.add(member)
    return mixture.result()


def probabilities(member: Tensor) -> np.ndarray:
    exponentials = np.exp(member.double().numpy())
    return np.asarray(exponentials / exponentials.sum(1, keepdims=True))


@pytest.mark.parametrize("shape", [(9, 4), (5, 4, 3)])
def test_a_mixture_averages_probabilities_and_entropies(shape: tuple[int, ...]) -> None:
    members = outputs(3, *shape)
    each = [probabilities(member) for member in members]
    found = mix(members, 4)
    np.testing.assert_allclose(found.log_probabilities.exp().numpy(), np.mean(each, axis=0), rtol=1e-5)
    entropies = [-(p * np.log(p)).sum(1) for p in each]
    assert found.expected_entropy is not None
    np.testing.assert_allclose(found.expected_entropy.numpy(), np.mean(entropies, axis=0), rtol=1e-5)


def test_mutual_information_is_never_negative_and_zero_for_equal_members() -> None:
    members = outputs(4, 50, 6)
    found = mix(members, 6)
    assert found.expected_entropy is not None
    entropy = -(found.log_probabilities.exp() * found.log_probabilities).sum(1)
    assert (entropy - found.expected_entropy).min() > 0.01
    equal = mix([members[0]] * 3, 6)
    assert equal.expected_entropy is not None
    entropy = -(equal.log_probabilities.exp() * equal.log_probabilities).sum(1)
    torch.testing.assert_close(entropy, equal.expected_entropy, rtol=1e-5, atol=1e-6)


def test_one_member_has_no_expected_entropy_and_none_is_an_error() -> None:
    (member,) = outputs(1, 3, 2)
    found = mix([member], 2)
    assert found.expected_entropy is None
    assert torch.equal(found.log_probabilities, member.log_softmax(1))
    with pytest.raises(ValueError, match="at least one draw"):
        mix([], 2)


def test_certain_members_have_entropy_zero() -> None:
    certain = torch.tensor([[0.0, float("-inf"), float("-inf")]])
    found = mix([certain, certain.roll(1, 1)], 3)
    assert found.expected_entropy is not None
    assert found.expected_entropy.item() == 0
    assert found.log_probabilities.exp().tolist() == [[0.5, 0.5, 0.0]]


def test_further_outputs_are_left_out_of_the_prediction() -> None:
    """Given that it is none of them: the sum over members first, as a vote, then the condition."""
    members = outputs(2, 5, 4)
    total = sum(probabilities(member)[:, :3] for member in members)
    found = mix(members, 3)
    np.testing.assert_allclose(found.log_probabilities.exp().numpy(), total / total.sum(1, keepdims=True), rtol=1e-5)
    conditional = [p[:, :3] / p[:, :3].sum(1, keepdims=True) for p in map(probabilities, members)]
    assert found.expected_entropy is not None
    expected = np.mean([-(p * np.log(p)).sum(1) for p in conditional], axis=0)
    np.testing.assert_allclose(found.expected_entropy.numpy(), expected, rtol=1e-5)


def test_a_part_of_a_prediction() -> None:
    found = mix(outputs(2, 6, 3), 3)
    part = found[torch.tensor([4, 1])]
    assert torch.equal(part.log_probabilities, found.log_probabilities[[4, 1]])
    assert part.expected_entropy is not None
    assert found.expected_entropy is not None
    assert torch.equal(part.expected_entropy, found.expected_entropy[[4, 1]])


def test_losses_by_hand() -> None:
    likelihood = Categorical(2)
    logits, labels = torch.tensor([[0.0, math.log(3)], [0.0, 0.0]]), torch.tensor([0, 1])
    expected = [math.log(4), math.log(2)]
    assert likelihood.loss(logits, labels).item() == pytest.approx(sum(expected) / 2)
    assert likelihood.loss(logits, labels, "sum").item() == pytest.approx(sum(expected))
    assert likelihood.measure(logits, labels)["train_acc"] == 0
    assert likelihood.measure(logits, torch.tensor([1, 0]))["train_acc"] == 2
    assert likelihood.num_outputs == 2


def test_nobody_else_knows_the_loss_or_the_decision() -> None:
    """Networks, data and pictures of papers aside: `cross_entropy` and `argmax(1)` stand in likelihood."""
    known = {PACKAGE / "likelihood.py"}
    for path in PACKAGE.rglob("*.py"):
        if path in known or path.parent.name == "papers":
            continue
        assert not re.search(r"cross_entropy|\.argmax\(1\)", path.read_text()), path
