"""What the program is told of tensors is a constant where no answer would have moved a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from dptrain.clipping.owners import Answers
from tests.clipping.owners.test_watch import CLASSES, WIDTH, N, Net, notes, plain, run

SHOWN = "was shown operator by operator"
TOLD = "reads from tensors (the first: _local_scalar_dense at test_answers.py"


class Asking(Net):
    """Is told a number of what it is called with, and does something with it."""

    def __init__(self, ask, then=lambda x, answer: x) -> None:
        super().__init__()
        self.ask, self.then = ask, then

    def forward(self, x):
        return super().forward(self.then(x, self.ask(x)))


class Masked(Net):
    """Pools over what a mask leaves, and does not look at a mask that leaves everything."""

    def forward(self, x, mask):
        if mask.all():
            return super().forward(x.mean(1))
        kept = mask[..., None].to(x)
        return super().forward((x * kept).sum(1) / kept.sum(1).clamp(min=1))


def hidden(share: float) -> TensorDataset:
    """Sequences of four, so many of which end early."""
    torch.manual_seed(1)
    mask = torch.ones(N, 4, dtype=torch.bool)
    mask[torch.rand(N) < share, 2:] = False
    return TensorDataset(torch.randn(N, 4, WIDTH), mask, torch.arange(N) % CLASSES)


@pytest.mark.parametrize("mode", ["bookkeeping", "hooks", "functorch"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_whether_a_mask_hides_anything_may_be_asked(mode, share):
    private = run(
        Masked(),
        lambda model, x, mask, y: F.cross_entropy(model(x, mask), y),
        data=hidden(share),
        mode=mode,
    )
    assert SHOWN in notes(private)
    assert TOLD in notes(private)
    told = private.state_dict()["private"]["apart"]["told"]
    assert told.startswith("_local_scalar_dense at test_answers.py:")


def test_a_mask_that_matters_to_others_is_refused():
    class Tied(Masked):
        def forward(self, x, mask):
            return super().forward(x if mask.all() else 2 * x, mask)

    with pytest.raises(RuntimeError, match="changed when another example"):
        run(
            Tied(),
            lambda model, x, mask, y: F.cross_entropy(model(x, mask), y),
            data=hidden(0.0),
        )


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: bool((x.detach().abs() >= 0).all() | x.isnan().any()),  # always so
        lambda x: int((x.detach() * 0).nan_to_num().sum()),  # always 0
        lambda x: bool((x.detach() > 0.5).any()),  # either, and nothing comes of it
    ],
)
def test_what_moves_nothing_is_a_constant(ask):
    assert TOLD in notes(run(Asking(ask), plain))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: float(x.detach().nan_to_num().sum()),
        lambda x: int((x.detach() > 0).sum()),
        lambda x: len(x.detach().flatten().tolist()),
    ],
)
def test_other_numbers_are_not(ask):
    said = notes(run(Asking(ask), plain))
    assert SHOWN not in said
    assert "numbers leave the tensors" in said


def test_what_a_loop_is_told_is_not_known_of_passes():
    def asking(model, x, y):
        assert bool((x.abs() >= 0).all())
        return plain(model, x, y)

    assert SHOWN not in notes(run(Net(), asking))


def test_what_is_read_before_the_step_may_decide_it():
    def loss(model, x, y):
        found = plain(model, x, y)
        found.backward = lambda: (torch.Tensor.backward(found), found.item())
        return found

    assert SHOWN not in notes(run(Net(), loss))


def test_an_answer_that_the_module_returns_is_no_constant_to_the_loop():
    class Telling(Asking):
        def forward(self, x):
            return super().forward(x), self.ask(x)

    def doubled(model, x, y):
        z, told = model(x)
        return F.cross_entropy(z, y) * (2 if told else 1)

    ask = lambda x: bool((x.detach() > 0.5).any())  # noqa: E731
    assert SHOWN not in notes(run(Telling(ask), doubled))


@pytest.mark.slow
def test_answers_are_of_calls_with_the_same_numbers():
    class Scaled(Net):
        def forward(self, x, scale):
            many = bool((x.detach().nan_to_num() * scale > 0.5).any())
            return super().forward(2 * x if many else x)

    def twice(model, x, y):
        return F.cross_entropy(model(x, 1e-9) + model(x, 1.0), y)

    assert SHOWN not in notes(run(Scaled(), twice))


def test_answers_of_passes():
    line, other = ("a.py:1", None), ("a.py:2", None)
    answers = Answers()
    answers.add({line: [True, 3, 0.5, True, 0]})
    answers.add({line: [False, 3, 0.25, True, 1], other: [True]})
    assert answers.move_nothing(line, 0, True)  # both were given
    assert answers.move_nothing(line, 1, 3)  # always the same
    assert not answers.move_nothing(line, 1, 4)  # never given
    assert not answers.move_nothing(line, 2, 0.5)  # one of several numbers
    assert answers.move_nothing(line, 3, True)
    assert not answers.move_nothing(line, 3, False)
    assert not answers.move_nothing(line, 4, 1)  # a number, which could be 2
    assert not answers.move_nothing(line, 5, True)  # no such question was asked
    assert not answers.move_nothing(("b.py:1", None), 0, True)
    answers.add({other: [float("nan")]})
    assert not answers.move_nothing(other, 0, float("nan"))
