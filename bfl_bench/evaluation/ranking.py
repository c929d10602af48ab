"""Examples put in order, so that a score of the order does not depend on how ties happen to stand."""

import math

import torch
from torch import Tensor


def sort_with_ties(keys: Tensor, values: Tensor) -> Tensor:
    """Sort values (n,) by ascending keys (n,); examples of equal key all get the mean of their values.

    That mean is what each of their places holds on average over random orders of the tied examples, so what is linear
    in the values comes out as its expectation. A NaN among the keys makes everything NaN.
    """
    keys, order = keys.sort()
    sums = torch.cat([values.new_zeros(1), values[order].cumsum(0)])
    start, end = torch.searchsorted(keys, keys), torch.searchsorted(keys, keys, right=True)
    return ((sums[end] - sums[start]) / (end - start)).masked_fill(keys.isnan().any(), math.nan)
