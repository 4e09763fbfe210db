"""No error, warning or log line holds a number of an example: neither by its code, nor when raised.

The first half reads the code: what is put into a text in the rooms that touch data has to be of
what is public (names, types, shapes, settings, steps). The second half runs refusals on two data
sets of the same shapes, and wants the same words of both.
"""

import ast
import inspect
import logging
import pathlib
import traceback
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dptrain
from dptrain.clipping.bookkeeping import module_taps
from dptrain.clipping.bookkeeping.rules.generic import GenericRule
from dptrain.clipping.bookkeeping.rules.table import RULES
from dptrain.core import checks
from dptrain.distributed.ranks import Ranks
from dptrain.engine import NoiseOptions
from dptrain.engine.sealed import shares_of
from dptrain.integrations.transformers.head_loss import LossCheck
from dptrain.integrations.transformers.plan import graph_of
from dptrain.sampling import AttributionGraph
from dptrain.sampling.loading.dataset import fingerprint
from dptrain.sampling.loading.position import check_state
from tests.helpers.engine import everything_every_step, make
from tests.helpers.texts_of_the_code import PUBLIC, ROOT, SEEN, leaves, of_the_code, texts, unseen


def test_texts_are_made_of_what_is_public():
    """A new name: add it to PUBLIC if it never is data, or to SEEN if it is none in that file."""
    assert not sorted(found for file, tree in of_the_code() for found in unseen(file, tree))


def test_no_entry_is_left_over():
    used: dict[str, set[str]] = {
        file: {leaf for e in texts(tree) for leaf in leaves(e)} for file, tree in of_the_code()
    }
    assert not PUBLIC - set().union(*used.values())
    assert not {
        (file, leaf) for file, some in SEEN.items() for leaf in some - used.get(file, set())
    }


@pytest.mark.parametrize(
    "line",
    [
        "raise ValueError(f'from {before.value} to {after.value}')",
        "raise RuntimeError(f'shares from {float(shares.amin()):.3g}')",
        "raise UnclearRows(f'ids {ids[:3].tolist()} ...')",
        "raise RuntimeError(f'gives {float(together):.6g}')",
        "raise ValueError('row ' + str(sample))",
        "raise ValueError('row %s' % sample)",
        "raise ValueError('row {}'.format(sample))",
        "raise ValueError('row', sample)",
        "logger.warning('loss %g', loss.item())",
        "warnings.warn(f'{loss}')",
        "assert ok, sample",
        "why = f'{error}'",
    ],
)
def test_the_reading_finds_what_it_is_for(line):
    assert unseen("new.py", ast.parse(line))


class Keeps(nn.Module):
    """A net that keeps something of its first example: what, is said by ``keep``."""

    def __init__(self, keep):
        super().__init__()
        self.linear, self.last, self.by_name = nn.Linear(3, 2), 0.0, {}
        self.keep = keep

    def forward(self, x):
        with torch.no_grad():
            self.keep(self, x)
        return self.linear(x)


class Scaled(nn.Module):
    """A layer without a rule, which does what it is told to its rows."""

    def __init__(self, by):
        super().__init__()
        self.weight, self.by = nn.Parameter(torch.ones(3)), [by]

    def forward(self, x):
        return self.by[0](x) * self.weight


def _refuse_few(x):
    if len(x) < 6:
        raise ValueError(f"cannot take {x.flatten()[0].item()}")
    return x - x.mean(0)


def _refuse_the_probe(x):
    if any("probe" in pathlib.Path(frame.filename).parts for frame in inspect.stack()):
        raise ValueError(f"cannot take {x.flatten()[0].item()}")
    return x


def _one_step(module, x, mode="bookkeeping", loss=None, **options):
    data = TensorDataset(x, torch.arange(len(x)) % 2)
    private = make(module, data, mode, scheme=everything_every_step(len(x), 8), **options)
    criterion = nn.CrossEntropyLoss() if loss is None else loss
    for inputs, labels in private.loader:
        private.optimizer.zero_grad()
        criterion(private.module(inputs), labels).backward()
        private.optimizer.step()


def _features(number):
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(number))


def _keeping(keep):
    return lambda number: _one_step(Keeps(keep), _features(number))


def _by_name(module, x):
    module.by_name[f"{x[0, 0].item()}"] = torch.ones(1)


def _scaled(by, **options):
    def run(number):
        module = nn.Sequential(nn.Linear(3, 3), Scaled(by), nn.Linear(3, 2))
        with pytest.MonkeyPatch.context() as patch:  # have it run again, not followed
            patch.setattr(module_taps, "OperationsRule", GenericRule)
            _one_step(module, _features(number), **options)

    return run


def _weighted(number):
    """A cross entropy with class weights, which divides by those of the batch."""
    weights = torch.tensor([1.0, 2.0 + number])
    _one_step(nn.Linear(3, 2), _features(number), loss=nn.CrossEntropyLoss(weight=weights))


class Looked(nn.Module):
    """Looks up as many ids as there are rows, which begin at a number of the data."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 2), nn.Embedding(1000, 2)

    def forward(self, x):
        first = int(x[0, 0].abs() * 1000) % 900
        return self.linear(x) + self.table(torch.arange(first, first + len(x)))


def _looked(mode):
    return lambda number: _one_step(Looked(), _features(number), mode, probe="off")


def _tied(number):
    outputs = _features(number)
    check = LossCheck(lambda out, _, **more: out.sum() * len(out), "mean")
    check.look_at(outputs, torch.zeros(6), 6)


def _users(of):
    return lambda number: AttributionGraph.from_lists(of(["alice", "robert"][number]))


class Unreadable(torch.utils.data.Dataset):
    def __init__(self, number):
        self.rows = _features(number)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        raise KeyError(float(self.rows[row, 0]))


def _mixed_up(number):
    def collate(samples):
        x, y = torch.utils.data.default_collate(samples)
        return x - x.mean(0) if number else x - x.max(0).values.sort().values, y

    data = TensorDataset(_features(number), torch.arange(6) % 2)
    loader = torch.utils.data.DataLoader(data, collate_fn=collate)
    private = make(nn.Linear(3, 2), loader, scheme=everything_every_step(6, 2))
    next(iter(private.loader))


class UsersOwn(Exception):
    """An error of the user's own code, whose text is theirs."""


def _told_to_others(number):
    ranks = Ranks(0, 2)
    with ranks.together():
        raise UsersOwn(f"row {_features(number)[0]}")


def _wrong_rule(number):
    def rule(layer, inputs, gradient):
        return {"weight": gradient * inputs[0] * (1 + inputs[0].abs())}

    kept = dict(RULES)
    try:
        dptrain.register_layer(Scaled, rule)
        _scaled(lambda x: x)(number)
    finally:
        RULES.clear()
        RULES.update(kept)


REFUSALS = {
    "a number is kept": _keeping(lambda m, x: setattr(m, "last", x[0, 0].item())),
    "a tensor is kept": _keeping(lambda m, x: setattr(m, "last", x[0].clone())),
    "a text is kept": _keeping(lambda m, x: setattr(m, "last", str(x[0, 0].item()))),
    "an entry by a private name": _keeping(_by_name),
    "a loss that divides by the batch": _weighted,
    "ids that may be shared": _looked("bookkeeping"),
    "ids that may be shared, by hooks": _looked("hooks"),
    "a loss of the trainer's that ties": _tied,
    "a layer that mixes": _scaled(lambda x: x - x.mean(0), probe="off"),
    "a layer that fails on few rows": _scaled(_refuse_few, probe="off"),
    "a module that fails within the probe": _scaled(_refuse_the_probe),
    "a wrong rule": _wrong_rule,
    "a user that is no list": _users(lambda name: [[name], name]),
    "a user that cannot be compared": _users(lambda name: [[(name, torch.ones(1))]]),
    "an unknown part of a user": _users(lambda name: [[(name, None)]]),
    "a user that is not a number": _users(lambda name: [[(name, float("nan"))]]),
    "a user that is a list": _users(lambda name: [[[name]]]),
    "a set of users": _users(lambda name: [{(name,)}]),
    "a column of other users": lambda n: graph_of([{"u": 1.5 + n}], "u"),
    "users by number": lambda n: AttributionGraph.from_csr([0, 1], [5550100 + n]),
    "a row that cannot be read": lambda n: fingerprint(Unreadable(n)),
    "a collate function that mixes": _mixed_up,
    "a rank that fails": _told_to_others,
    "a state that is none": lambda n: check_state(
        _features(n), scheme=None, dataset_size=6, known_by=str
    ),
    "shares that are none": lambda n: shares_of([_features(n)]),
    "data that are none": lambda n: make(nn.Linear(3, 2), {float(v) for v in _features(n)[0]}),
    "a secret seed": lambda n: make(
        nn.Linear(3, 2),
        TensorDataset(torch.zeros(6, 3), torch.zeros(6)),
        scheme=everything_every_step(6, 2),
        seed=1000 + n,
        noise=NoiseOptions(secure=True),
    ),
    "an array for a number": lambda n: checks.number("x", _features(n)),
    "an array for a text": lambda n: checks.text("x", [_features(n).numpy()]),
}


def _words(refusal, number, caplog):
    """All that is said when something is refused: errors in a chain of ours, warnings, logs."""
    caplog.clear()
    torch.manual_seed(0)
    with caplog.at_level(logging.DEBUG, "dptrain"), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            refusal(number)
        except Exception as error:  # whatever is refused
            raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            said = f"{type(error).__name__}: {error}" if raised_in.is_relative_to(ROOT) else None
            said = "" if isinstance(error, UsersOwn) else said
        else:
            said = None
    assert said is not None, "nothing was refused by dptrain"
    logged = [record.getMessage() for record in caplog.records]
    return [said, *(str(w.message) for w in warned), *logged]


@pytest.mark.parametrize("name", REFUSALS)
def test_two_data_sets_of_the_same_shapes_are_refused_in_the_same_words(name, caplog, monkeypatch):
    told = []
    monkeypatch.setattr(Ranks, "_meet", lambda *_: [])
    monkeypatch.setattr(Ranks, "_all", lambda self, text: told.append(text))
    _words(REFUSALS[name], 0, caplog)  # some things are said once in a process
    first, second = (_words(REFUSALS[name], number, caplog) for number in (0, 1))
    assert first == second
    assert len(set(told)) <= 1
    assert any(first)
