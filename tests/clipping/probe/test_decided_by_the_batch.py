"""What the whole batch decides without moving an output: it is refused, or told apart."""

import pytest
import torch
from torch import nn

from tests.clipping.probe.test_examples_apart import Net, check, ids, numbers, run_of, step


class Scaled(torch.autograd.Function):
    """x ⊙ a, whose gradient by a is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, a, scale):
        ctx.save_for_backward(x, a)
        ctx.scale = float(scale)
        return x * a

    @staticmethod
    def backward(ctx, g):
        x, a = ctx.saved_tensors
        return g * a, (g * x).sum(0) * ctx.scale, None


class Bare(nn.Module):
    """A parameter of each given value, and a function of the module and its inputs."""

    def __init__(self, run, **values):
        super().__init__()
        self.run = run
        for name, value in values.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, *inputs):
        return self.run(self, *inputs)


def straight_through(m, x):
    """The value is a's; the gradient is multiplied by the batch's."""
    scaled = m.a * float(x.detach().sum())
    return x * (scaled + (m.a - scaled).detach())


def clamped(m, x):
    """Of no effect as long as all numbers are small."""
    scaled = m.a * max(20.0, float(x.detach().abs().max()))
    return x * (scaled + (m.a - scaled).detach())


SCALE = [0.0]


def scaled_by_a_global(m, x):
    SCALE[0] = float(x.sum())
    return m.f(x)


def chosen_rows(m, x, task):
    start = int(task[0])
    return x * (1 + m.a[start : start + 1])


def unpadded(m, x, mask):
    """The layer on the positions that count, one after the other."""
    rows, places = mask.bool().nonzero(as_tuple=True)
    made = m.f(x[rows, places])
    return x.new_zeros(*x.shape[:2], 2).index_put((rows, places), made).sum(1)


ONES = torch.ones(3, dtype=torch.float64)
MASK = (torch.arange(5) < 3).long().expand(6, -1)
DECIDED = {
    "a threshold that no example passes as it is": (
        Net(lambda m, x: m.a(x) if float(x.abs().max()) > 50 else m.b(x),
            a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double(),
        [numbers(6, 3)], "depends on one example of the batch"),
    "a number that is cut off": (
        Bare(clamped, a=ONES), [numbers(6, 3)], "moved when another example"),
    "a number": (
        Bare(straight_through, a=ONES), [numbers(6, 3)], "moved when another example"),
    "a row of equal ones": (
        Bare(lambda m, x, task: x * (1 + m.a[int(task[0])]), a=torch.zeros(5, 3).double()),
        [numbers(6, 3), ids(6)], "moved when another example"),
    "equal rows": (
        Bare(chosen_rows, a=torch.zeros(5, 3).double()),
        [numbers(6, 3), ids(6)], "moved when another example"),
    "a number that a layer is called with": (
        Net(lambda m, x: m.f(x, float(x.sum())),
            f=Bare(lambda m, x, scale: Scaled.apply(x, m.a, scale), a=ONES)),
        [numbers(6, 3)], "takes something else from the whole batch"),
    "a global": (
        Net(scaled_by_a_global, f=Bare(lambda m, x: Scaled.apply(x, m.a, SCALE[0]), a=ONES)),
        [numbers(6, 3)], "takes something else from the whole batch"),
    "which layer is called": (
        Net(lambda m, x: m.a(x) if x[0, 0] == numbers(6, 3)[0, 0] else m.b(x),
            a=nn.Linear(3, 2), b=nn.Linear(3, 2)),
        [numbers(6, 3)], "takes part depends on one example"),
    "how many rows a layer has": (
        Net(unpadded, f=nn.Linear(3, 2)), [numbers(6, 5, 3), MASK.clone()],
        "as many rows as the numbers in the batch say"),
    "as many entries of a table as there are rows": (
        Net(lambda m, x: (m.f(x)[:, None] * m.f(numbers(6, 3))).sum(1), f=nn.Linear(3, 2)),
        [numbers(6, 3)], "this may be either"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_what_the_batch_decides_is_refused(name):
    module, inputs, message = DECIDED[name]
    private = run_of(module.double(), inputs, torch.zeros(6).double(), "bookkeeping")
    with pytest.raises(RuntimeError, match=message):
        step(private)


@pytest.mark.parametrize("rows", [3, 5, 6])
def test_a_layer_on_rows_and_on_a_table_of_another_length(rows):
    module = Net(lambda m, x: (m.f(x)[:, None] * m.f(numbers(4, 3))).sum(1), f=nn.Linear(3, 2))
    check(module.double(), [numbers(rows, 3)], "bookkeeping")


def test_a_layer_that_is_run_again_with_a_tensor_without_dimensions():
    layer = Bare(lambda m, x, scale: Scaled.apply(x, m.a, 1.0) * scale, a=ONES)
    module = Net(lambda m, x: m.f(x, torch.tensor(2.0).double()), f=layer)
    check(module, [numbers(6, 3)], "bookkeeping")
