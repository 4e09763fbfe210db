"""Runs that are followed: what ties examples is refused, and the guarantee says what was shown."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from dptrain import Gradients, Poisson, PrivacyEngine
from dptrain.clipping.owners import RowsMeet
from dptrain.clipping.probe.examination import Examination

N, WIDTH, CLASSES = 24, 6, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 8)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.inner(x))))


class Switched(Net):
    """Mixes the rows when something that is no truth value says so."""

    def __init__(self, on) -> None:
        super().__init__()
        self.on, self.kind = on, "plain"
        self.register_buffer("level", torch.zeros(()), persistent=False)

    def forward(self, x, scale=0.0, how="plain"):
        if self.on(self, scale, how):
            x = x + x.mean(0)
        return super().forward(x)


def run(module, criterion, *, steps=1, data=None, each=lambda step, module: None, **gradients):
    torch.manual_seed(0)
    data = data or TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % CLASSES)
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=data,
        scheme=Poisson(probability=0.5, dataset_size=N, steps=steps),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        target_delta=1e-5,
        gradients=Gradients(**gradients),
        seed=3,
    )
    model, optimizer, loader = private
    for step, batch in enumerate(loader):
        each(step, module)
        optimizer.zero_grad()
        criterion(model, *batch).backward()
        optimizer.step()
    return private


def notes(private) -> str:
    return " ".join(private.guarantee().notes)


def plain(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_a_plain_run_is_shown(mode):
    private = run(Net(), plain, steps=3, mode=mode)
    assert "was shown operator by operator in the steps that were followed" in notes(private)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def mixup(model, x, y):
    other = torch.randperm(len(x))
    return F.cross_entropy(model(0.7 * x + 0.3 * x[other]), y)


def centered(model, x, y):
    return F.cross_entropy(model(x - x.mean(0)), y)


def ignoring(model, x, y):
    return F.cross_entropy(model(x), y, ignore_index=int(CLASSES - 1))


def weighted(model, x, y):
    return F.cross_entropy(model(x), y, weight=torch.arange(1.0, CLASSES + 1))


def masked(model, x, y):
    mask = y > 0
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * mask).sum() / mask.sum()


def squared(model, x, y):
    return plain(model, x, y) ** 2


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def redundant(model, x, y):
    z = model(x)
    z = (z - z.mean(0)) / (z.std(0) + 1e-3)
    return ((z.T @ z / len(z) - torch.eye(CLASSES)) ** 2).sum()


def focal_by_the_batch(model, x, y):
    each = F.cross_entropy(model(x), y, reduction="none")
    return (each * torch.softmax(each.detach(), 0)).sum()


def hooked(model, x, y):
    z = model(x)
    z.register_hook(lambda gradient: gradient / gradient.norm())
    return F.cross_entropy(z, y)


TYING = [
    mixup,
    centered,
    ignoring,
    weighted,
    masked,
    squared,
    contrastive,
    redundant,
    focal_by_the_batch,
    hooked,
]


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks"])
@pytest.mark.parametrize("loss", TYING, ids=lambda loss: loss.__name__)
def test_what_a_loop_ties_is_refused(loss, mode):
    with pytest.raises(
        RowsMeet, match=r"depends for one example on another, .*: \w+ at \w+\.py:\d+"
    ):
        run(Net(), loss, mode=mode, **({"loss": "sum"} if loss is redundant else {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_however_precise(dtype):
    """By what a tolerance of an eps or a half would pass."""
    data = TensorDataset(torch.randn(N, WIDTH, dtype=dtype), torch.arange(N) % CLASSES)
    with pytest.raises(RowsMeet):
        run(Net().to(dtype), lambda m, x, y: plain(m, x + 1e-3 * x.mean(0), y), data=data)


SWITCHES = {
    "number": (lambda m, scale, how: scale > 0, {"scale": 1.0}, None),
    "text": (lambda m, scale, how: how != "plain", {"how": "mixed"}, None),
    "attribute": (
        lambda m, scale, how: m.kind != "plain",
        {},
        lambda module: setattr(module, "kind", "mixed"),
    ),
    "buffer": (
        lambda m, scale, how: float(m.level) > 0,
        {},
        lambda module: module.level.fill_(1.0),
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_what_is_switched_on_later_is_refused(name):
    """In the first step in which it is on: the call looks otherwise."""
    on, arguments, change = SWITCHES[name]
    module, on_from, done = Switched(on), 2, []

    def each(step, module):
        if step == on_from and change is not None:
            change(module)
        done.append(step)

    def loss(model, x, y):
        return F.cross_entropy(model(x, **(arguments if done[-1] >= on_from else {})), y)

    with pytest.raises(RuntimeError, match=r"depends for one|changed when"):
        run(module, loss, steps=6, each=each)
    assert done[-1] == on_from


class Boxes(Dataset):
    """Images with a varying number of boxes, as detection models take them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, k):
        g = torch.Generator().manual_seed(k)
        return torch.randn(WIDTH, generator=g), torch.randint(0, CLASSES, (1 + k % 5,), generator=g)


def collated(rows):
    return torch.stack([x for x, _ in rows]), [boxes for _, boxes in rows]


class Detector(Net):
    """Returns its own loss: a mean over the batch's boxes, or over each example's."""

    def __init__(self, *, ties: bool) -> None:
        super().__init__()
        self.ties = ties

    def forward(self, x, labels):
        scores = super().forward(x).log_softmax(1)
        sums = torch.stack([-row[boxes].sum() for row, boxes in zip(scores, labels, strict=True)])
        if self.ties:
            return sums.sum() / sum(len(boxes) for boxes in labels)
        counts = sums.new_tensor([len(boxes) for boxes in labels])
        return (sums / counts).mean()


@pytest.mark.parametrize("ties", [True, False])
def test_lists_with_an_item_for_each_row(ties):
    """Sizes that Python reads are seen by no operator: what is not shown is tested."""
    data = torch.utils.data.DataLoader(Boxes(), collate_fn=collated)

    def loss(model, x, boxes):
        return model(x, labels=boxes)

    if ties:
        with pytest.raises(RuntimeError, match="changed when another example"):
            run(Detector(ties=True), loss, data=data)
    else:
        assert "was tested on a few rows only" in notes(run(Detector(ties=False), loss, data=data))


TOTALS = []


class Asserts(Net):
    """Of other rows than those of its batch nothing is known."""

    def forward(self, x):
        assert float(x.sum()) == TOTALS[-1]
        return super().forward(x)


def test_a_module_of_which_nothing_shows_is_assumed_to_keep_examples_apart():
    """It puts up with its own batch alone, and lets a number out: neither shown nor tested."""
    data = TensorDataset(torch.ones(N, WIDTH), torch.arange(N) % CLASSES)

    def loss(model, x, y):
        TOTALS.append(float(x.sum()))
        return plain(model, x, y)

    said = notes(run(Asserts(), loss, data=data))
    assert "is assumed, because passes over a few rows did not show it" in said
    assert "tested" not in said


def two_examples(data, each, collate=None):
    module = Net()
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=data if collate is None else DataLoader(data, collate_fn=collate),
        scheme=Poisson(probability=1.0, dataset_size=2, steps=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        target_delta=1e-5,
    )
    for batch in private.loader:
        each(private.module, *batch).backward()
        private.optimizer.step()
    return notes(private)


def test_two_fields_of_two_rows_are_not_a_field_for_each_row():
    """As many fields as rows: what torch's collate function makes has the rows within them."""
    data = TensorDataset(torch.randn(2, WIDTH), torch.arange(2))
    assert "was shown operator by operator in the steps that were followed" in two_examples(
        data, plain
    )


def test_as_many_things_as_rows_of_which_nothing_says_what_they_are():
    """Lists of as many tensors as these have rows may be an image each, or the rows of each."""
    x = torch.randn(2, 2, WIDTH)

    def images(model, *images):
        return model(torch.stack([image.mean(0) for image in images])).square().mean()

    said = two_examples(list(x), images, collate=list)
    assert "not every followed step could be followed to its end" in said
    assert "was shown" not in said


def test_a_number_that_leaves_the_tensors_is_said():
    def loss(model, x, y):
        found = plain(model, x, y)
        return found * (1.0 if found.item() < 1e9 else 2.0)

    assert "numbers leave the tensors: _local_scalar_dense at test_watch.py" in notes(
        run(Net(), loss)
    )


def test_off_follows_nothing():
    assert "operator by operator" not in notes(run(Net(), mixup, steps=2, probe="off"))


@pytest.mark.slow
def test_first_follows_the_first_step_alone():
    """Of 500 steps, of which five more would be followed: none has a chance of 0.7 %."""
    state = run(Net(), plain, steps=500, probe="first").state_dict()
    assert state["private"]["apart"]["shown"] == [0]
    assert len(run(Net(), plain, steps=500).state_dict()["private"]["apart"]["shown"]) > 1


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counting, Passing, lambda: FlopCounterMode(display=False)])
def test_modes_of_the_user_end_in_any_order(mode):
    """Around the loop, and from the batch on past the step."""
    with mode():
        run(Net(), plain)
    module = Net()
    open_modes = []

    def loss(model, x, y):
        open_modes.append(mode())
        open_modes[-1].__enter__()
        return plain(model, x, y)

    run(module, loss)
    open_modes[-1].__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_an_abandoned_step_leaves_nothing_behind():
    """A refusal within a backward pass, and a run that is dropped with a batch at hand."""
    with pytest.raises(RowsMeet):
        run(Net(), mixup)
    module = Net()
    private = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % CLASSES),
        scheme=Poisson(probability=0.5, dataset_size=N, steps=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    next(iter(private.loader))
    private.detach()
    run(Net(), plain)  # clears up
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_what_was_shown_goes_on_with_the_run():
    first = run(Net(), plain, steps=2)
    state = first.state_dict()
    assert state["private"]["apart"] == {
        "shown": [0],
        "tested": [],
        "why": None,
        "told": None,
    }
    assert not any("operator by operator" in note for note in state["notes"])


def test_coins_are_followed_at_random():
    """Of many steps some are followed; a coin that mixes in one of two is met."""
    coins = itertools.cycle([False, True])

    def loss(model, x, y):
        return mixup(model, x, y) if next(coins) else plain(model, x, y)

    with pytest.raises(RowsMeet):
        run(Net(), loss, steps=1500)


@torch.library.custom_op("dptrain_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """An operator without a rule."""
    return x * by


scaled.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


class Scaled(Net):
    """Scales its input by what it makes of it, by an operator without a rule."""

    def __init__(self, scale) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return super().forward(scaled(x, self.scale(x.detach())))


@pytest.fixture
def changed(monkeypatch):
    """Calls in which the probe changes one example after the other."""
    calls, before = [], Examination.vary

    def vary(*args, briefly=False):
        calls.extend([] if briefly else [1])
        return before(*args, briefly=briefly)

    monkeypatch.setattr(Examination, "vary", vary)
    return calls


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_what_is_shown_is_not_tested(mode, changed):
    run(Net(), plain, steps=3, mode=mode)
    assert not changed


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_what_cannot_be_followed_is_tested_before_anything_is_released(mode, changed):
    said = notes(run(Scaled(lambda x: x.mean(1, keepdim=True)), plain, steps=3, mode=mode))
    assert "was tested on a few rows only" in said
    assert "dptrain_tests::scaled at test_watch.py" in said
    assert len(changed) == 1
    module = Scaled(lambda x: torch.where(x.abs().max() > 50, 2.0, 1.0).expand(len(x), 1))
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RuntimeError, match="changed when another example"):
        run(module, plain, mode=mode)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert len(changed) == 2
    with pytest.raises(RuntimeError, match="changed when another example"):
        run(Scaled(lambda x: x.nan_to_num().mean(0)), plain, mode=mode)


class Doubling(Net):
    """Of sequences of one, whether any number is large decides for all."""

    def forward(self, x, how="plain"):
        if x.dim() == 3:
            x = x[:, 0] * torch.where(x.abs().max() > 50, 2.0, 1.0)
        return super().forward(x)


def test_what_is_followed_from_a_call_on_shows_nothing_of_another_call():
    """Tensors of the batch that are no arguments of the first call are nobody's to the trace."""
    x = torch.randn(N, WIDTH)
    data = TensorDataset(x, x[:, None] + 1, torch.arange(N) % CLASSES)
    steps = itertools.count()

    def loss(model, x, sequences, y):
        if not next(steps):
            return plain(model, x, y)
        return F.cross_entropy(model(x, how="other") + model(sequences), y)

    with pytest.raises(RuntimeError, match="changed when another example"):
        run(Doubling(), loss, steps=2, data=data)


def test_a_step_that_is_not_made_shows_nothing(changed):
    """The batch after it is probed as if it were the first."""
    torch.manual_seed(0)
    module = Net()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
        data=TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % CLASSES),
        scheme=Poisson(probability=0.5, dataset_size=N, steps=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        target_delta=1e-5,
        seed=3,
    )
    x, y = next(iter(loader))
    plain(model, x, y).backward()
    x, y = next(iter(loader))
    found = plain(model, x, y)
    found.item()  # before the backward pass: nothing is shown
    found.backward()
    assert not changed
    optimizer.step()
    assert len(changed) == 1


def test_a_refused_backward_pass_is_not_made_good_by_another():
    """A program that goes on after the error has its step refused as well."""

    def stubborn(model, x, y):
        with contextlib.suppress(RowsMeet):
            centered(model, x, y).backward()
        return centered(model, x, y)

    module = Net()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(RowsMeet):
        run(module, stubborn)
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_a_first_step_that_an_error_ended_is_not_called_shown():
    class Failing(Net):
        failed = False

        def forward(self, x):
            if len(x) > N // 3 and not Failing.failed:  # which are no few
                Failing.failed = True
                raise ValueError("once")
            return super().forward(x)

    def again(model, x, y):
        with contextlib.suppress(ValueError):
            return plain(model, x, y)
        return plain(model, x, y)

    said = notes(run(Failing(), again, steps=3, probe="shapes"))
    assert "was shown" not in said


STATE: dict[str, torch.Tensor] = {}


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_state_outside_of_the_module_that_passes_of_the_probe_leave_is_noticed(mode):
    class Remembering(Net):
        def forward(self, x):
            before = STATE.get("mean", torch.zeros(WIDTH))
            STATE["mean"] = x.detach().nan_to_num().mean(0)
            return super().forward(x - before)

    STATE.clear()
    with pytest.raises(RuntimeError):
        run(Remembering(), plain, mode=mode)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
def test_rows_counted_from_the_end_are_refused(mode):
    class FromTheEnd(Net):
        def forward(self, x):
            place = torch.arange(len(x), 0, -1)[:, None]
            return super().forward(x * place)

    with pytest.raises(RuntimeError, match="was left out of the batch"):
        run(FromTheEnd(), plain, mode=mode)


def test_a_flag_of_the_whole_batch_is_no_constant():
    data = TensorDataset(torch.randn(N, WIDTH), torch.arange(N) % CLASSES)

    def flagged(rows):
        x, y = (torch.stack(column) for column in zip(*rows, strict=True))
        return x, y, bool((x > 2).any())

    def doubled(model, x, y, large):
        return F.cross_entropy(model(x), y) * (2 if large else 1)

    said = notes(run(Net(), doubled, data=DataLoader(data, batch_size=4, collate_fn=flagged)))
    assert "was shown" not in said


@pytest.mark.parametrize("ignored", [False, True])
def test_smoothed_labels_are_shown_where_none_is_ignored(ignored):
    def smoothed(model, x, y):
        y = y.masked_fill(y == 0, -100) if ignored else y
        return F.cross_entropy(model(x), y, label_smoothing=0.1)

    if ignored:
        with pytest.raises(RowsMeet):
            run(Net(), smoothed)
    else:
        assert "was shown" in notes(run(Net(), smoothed))


def test_an_error_that_is_caught_tells():
    def loss(model, x, y):
        with contextlib.suppress(RuntimeError):
            torch.linalg.cholesky(x.T @ x - 1e4 * torch.eye(WIDTH))
        return plain(model, x, y)

    assert "was shown" not in notes(run(Net(), loss))
