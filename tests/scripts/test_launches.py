"""What a step may ask of a device, beside ordinary training: budgets, and what is counted."""

import pytest
import torch

from dptrain.core import as_on_a_device
from scripts.bench.launches import Operators, counted
from scripts.bench.step_sides import ORDINARY, open_side

# Of work, and of Python calls, in multiples of an ordinary step's. A GPU waits for the host where
# these are large.
BUDGETS = {
    "mlp": (4.0, 10.0),
    "mnist": (4.0, 11.0),
    "vgg": (4.0, 14.0),
    "bert": (2.5, 8.0),
    "gpt2": (2.5, 8.0),
}


SLOW = ("vgg", "bert", "gpt2")


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in BUDGETS]
)
def test_a_step_keeps_to_its_budget(model):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operators of other threads are not seen
    try:
        with as_on_a_device():
            ordinary, _ = counted(open_side(ORDINARY, model, "cpu"))
            private, names = counted(open_side("bookkeeping", model, "cpu"))
    finally:
        torch.set_num_threads(threads)
    work, calls = BUDGETS[model]
    assert private["work"] <= work * ordinary["work"], names.most_common(20)
    assert private["calls"] <= calls * ordinary["calls"]
    assert private["waits"] == ordinary["waits"]


def test_what_counts_as_what():
    x = torch.arange(6.0)
    with Operators() as operators:
        y = x.view(2, 3) + 1  # a view, and work
        y[y > 2]  # work, and a wait
        y.sum().item()  # likewise
        torch.empty(3)  # memory
    assert operators.kinds == {"views": 1, "work": 3, "waits": 2}
    operators.updated = True
    with operators:
        y.sum().item()
    assert operators.kinds["waits"] == 2
