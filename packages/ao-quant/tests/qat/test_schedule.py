"""The two stages of BitNet's training."""

from itertools import pairwise

import pytest
import torch

from ao_core.ext import ConfigError
from ao_quant.qat import TwoStageLR


def _optimizer():
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1.5e-3, weight_decay=0.1)


def _run(optimizer, schedule, steps):
    found = []
    for _ in range(steps):
        (group,) = optimizer.param_groups
        found.append((round(group["lr"], 9), group["weight_decay"]))
        optimizer.step()
        schedule.step()
    return found


def test_the_stages_are_those_of_the_paper():
    optimizer = _optimizer()
    found = _run(optimizer, TwoStageLR(optimizer, 16, warmup=2), 17)
    assert found[:3] == [(0.75e-3, 0.1), (1.5e-3, 0.1), (1.5e-3, 0.1)]
    assert found[7][0] == pytest.approx(8e-4 + (1.5e-3 - 8e-4) / 6)  # one step before it ends
    assert found[8] == (5e-4, 0.0)
    assert found[12] == (2.5e-4, 0.0)
    assert found[16] == (0.0, 0.0)
    falls = [after[0] - before[0] for before, after in pairwise(found[2:])]
    assert max(falls) < 0


def test_it_goes_on_from_its_state():
    optimizer = _optimizer()
    schedule = TwoStageLR(optimizer, 10)
    expected = _run(optimizer, schedule, 10)
    first = _optimizer()
    before = TwoStageLR(first, 10)
    begun = _run(first, before, 7)
    second = _optimizer()
    after = TwoStageLR(second, 10)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    assert begun + _run(second, after, 3) == expected


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": 9, "switch": 1.5}, {"steps": 9, "warmup": 5}]
)
def test_stages_that_cannot_be(options):
    with pytest.raises(ConfigError, match=next(reversed(options))):
        TwoStageLR(_optimizer(), **options)
