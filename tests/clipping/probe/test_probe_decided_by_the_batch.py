"""What the whole batch decides without moving an output: it is refused, or told apart."""

import pytest
import torch
from torch import nn

from tests.clipping.probe.test_probe import (
    Net,
    check,
    ids,
    loss_of,
    numbers,
    run_of,
    step,
)
from tests.helpers.engine import everything_every_step


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


def written_after_its_use(m, x):
    w = m.a * 1.0
    y = torch.einsum("bi,ij,kj->bk", x, w, w)
    with torch.no_grad():
        w.mul_(x.abs().max())
    return y


def written_into_a_copy(m, x):
    """The value is a's; what multiplies the gradient was written in place."""
    scaled = m.a.clone()
    scaled[:] = scaled * 1
    scaled.mul_(float(x.detach().sum()))
    return x * (scaled + (m.a - scaled).detach())


ONES = torch.ones(3, dtype=torch.float64)
MASK = (torch.arange(5) < 3).long().expand(6, -1)
DECIDED = {
    "a threshold that no example passes as it is": (
        Net(lambda m, x: m.a(x) if float(x.abs().max()) > 50 else m.b(x),
            a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double(),
        [numbers(6, 3)], "depends on the content of one example of the batch"),
    "a number that is cut off": (
        Bare(clamped, a=ONES), [numbers(6, 3)], "changed when another example"),
    "whether any is NaN": (
        Net(lambda m, x: m.f(x.nan_to_num() * (2 if x.isnan().any() else 1)), f=nn.Linear(3, 2)),
        [numbers(6, 3)], "changed when another example"),
    "a number that is written in place": (
        Bare(written_into_a_copy, a=ONES), [numbers(6, 3)], "changed when another example"),
    "what is written after its use": (
        Bare(written_after_its_use, a=torch.ones(3, 3).double()),
        [numbers(6, 3)], "modified in place afterwards"),
    "a number": (
        Bare(straight_through, a=ONES), [numbers(6, 3)], "changed when another example"),
    "a row of equal ones": (
        Bare(lambda m, x, task: x * (1 + m.a[int(task[0])]), a=torch.zeros(5, 3).double()),
        [numbers(6, 3), ids(6)], "changed when another example"),
    "equal rows": (
        Bare(chosen_rows, a=torch.zeros(5, 3).double()),
        [numbers(6, 3), ids(6)], "changed when another example"),
    "a number that a layer is called with": (
        Net(lambda m, x: m.f(x, float(x.sum())),
            f=Bare(lambda m, x, scale: Scaled.apply(x, m.a, scale), a=ONES)),
        [numbers(6, 3)], "uses something else that depends on the whole batch"),
    "a global": (
        Net(scaled_by_a_global, f=Bare(lambda m, x: Scaled.apply(x, m.a, SCALE[0]), a=ONES)),
        [numbers(6, 3)], "uses something else that depends on the whole batch"),
    "which layer is called": (
        Net(lambda m, x: m.a(x) if x[0, 0] == numbers(6, 3)[0, 0] else m.b(x),
            a=nn.Linear(3, 2), b=nn.Linear(3, 2)),
        [numbers(6, 3)], "is called depends on the content of one example"),
    "how many rows a layer has": (
        Net(unpadded, f=nn.Linear(3, 2)), [numbers(6, 5, 3), MASK.clone()],
        "depends on the content of the batch"),
    "as many entries of a table as there are rows": (
        Net(lambda m, x: (m.f(x)[:, None] * m.f(numbers(6, 3))).sum(1), f=nn.Linear(3, 2)),
        [numbers(6, 3)], "this call may be either"),
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


def tokens_that_count(m, x):
    """The layer on all tokens but those that start with 77, one after the other."""
    flat = x.flatten(0, 1)
    places = (flat[:, 0] != 77).nonzero()[:, 0]
    made = m.f(flat[places])
    back = flat.new_zeros(len(flat), made.shape[1]).index_copy(0, places, made)
    return back.view(*x.shape[:2], -1)


@pytest.mark.parametrize(
    "layer",
    [lambda: nn.Linear(3, 2), lambda: nn.LayerNorm(3), lambda: Bare(lambda m, x: x * m.a, a=ONES)],
    ids=["with a rule", "with a copy for each row", "followed"],
)
def test_as_many_tokens_as_examples_are_not_the_examples(layer):
    """A batch whose examples have 2, 1, ..., 1 and 0 tokens that count, after one where all do."""
    module = Net(tokens_that_count, f=layer()).double()
    private = run_of(
        module, [numbers(6, 4, 3)], torch.zeros(6).double(), "bookkeeping",
        scheme=everything_every_step(6, 2),
    )  # fmt: skip
    for number, (x, y) in enumerate(private.loader):
        if number == 0:
            loss_of(private.module(x), y).backward()
            private.optimizer.step()
            continue
        x[:, :, 0] = 77
        for example, token in ((0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (4, 0)):
            x[example, token, 0] = 1
        with pytest.raises(RuntimeError, match=r"number of rows|no row for each example"):
            loss_of(private.module(x), y).backward()
        break
    else:
        pytest.fail("there was no second batch")


def on_a_stack_of_copies(m, x):
    shared = m.f(m.table)
    return x + torch.stack([shared.flatten()[0]] * len(x)).view(-1, 1)


@pytest.mark.parametrize("rows", [4, 5])
def test_a_shared_table_of_as_many_rows_in_a_layer_that_is_run_again(rows):
    """Refused whatever the batch's size: all gradients of f would be clipped as one example's."""
    module = Net(on_a_stack_of_copies, f=nn.Linear(2, 2))
    module.table = nn.Parameter(numbers(5, 2))
    private = run_of(module.double(), [numbers(rows, 2)], torch.zeros(rows).double(), "bookkeeping")
    with pytest.raises(RuntimeError, match=r"'f'.*makes a row for each example from a parameter"):
        step(private)


def exchange(m):
    m.b = nn.Softmax(0)


LATER = {
    "a forward hook": lambda m: m.a.register_forward_hook(lambda _, x, y: y - y.mean(0)),
    "a hook before": lambda m: m.c.register_forward_pre_hook(lambda _, x: (x[0] - x[0].mean(0),)),
    "another layer": exchange,
    "another forward": lambda m: setattr(m.b, "forward", lambda x: x.softmax(0)),
}


@pytest.mark.parametrize("name", LATER)
def test_what_is_attached_between_steps_is_probed(name):
    module = Net(lambda m, x: m.c(m.b(m.a(x))), a=nn.Linear(3, 4), b=nn.Tanh(), c=nn.Linear(4, 2))
    private = run_of(
        module.double(), [numbers(6, 3)], torch.zeros(6).double(), "bookkeeping",
        scheme=everything_every_step(6, 2),
    )  # fmt: skip
    batches = iter(private.loader)
    x, y = next(batches)
    loss_of(module(x), y).backward()
    private.optimizer.step()
    LATER[name](module)
    x, y = next(batches)
    with pytest.raises(RuntimeError, match="'c' for one example changed when another"):
        loss_of(module(x), y).backward()


def test_a_layer_within_vmap_is_refused_by_name():
    module = Net(lambda m, x: torch.vmap(m.f)(x), f=nn.Linear(3, 2))
    private = run_of(module.double(), [numbers(6, 3)], torch.zeros(6).double(), "bookkeeping")
    with pytest.raises(RuntimeError, match=r"layer 'f', a Linear, is called within torch\.func"):
        step(private)
