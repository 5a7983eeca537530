"""Which modules `bisect` keeps in FP32."""

import copy
import math

import pytest
import torch
from torch import nn

from halfbits import bisect
from tests.small_runs import BF16, Op, squares


def wide(x):
    """Overflows fp16 between two modules that do not."""
    return (x * 1e4 * 1e3) / 1e7


def test_bisect_keeps_the_fewest_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Op(wide), nn.Linear(8, 8)), nn.BatchNorm1d(8), nn.Dropout())
    before, batch = copy.deepcopy(model.state_dict()), torch.rand(16, 8)
    assert bisect(model, batch, squares, tolerance=0.05) == ["1.0"]
    assert all(torch.equal(model.state_dict()[name], each) for name, each in before.items())
    assert bisect(model, (batch,), squares, BF16, tolerance=0.05) == []
    assert bisect(model.bfloat16(), {"input": batch}, squares, tolerance=0.05) == ["1.0"]
    with pytest.raises(ValueError, match="in FP32 too"):
        bisect(model, batch, lambda output: output.sum() * math.nan)
