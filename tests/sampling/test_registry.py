"""Schemes known by name: ours, a stranger's, and what may not become one."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dptrain import Identity, MatrixMechanism, account
from dptrain.commands import main
from dptrain.configuration import build_scheme, check_scheme
from dptrain.core import JsonValue, checks
from dptrain.planning import Question
from dptrain.planning.candidates import first_candidates
from dptrain.reporting.support_table import representative_schemes
from dptrain.sampling import (
    ExchangeableScheme,
    Poisson,
    PrivateLoader,
    Scheme,
    SeededStream,
    registry,
    scheme_types,
)
from dptrain.sampling.registry import register_scheme
from dptrain.testing import ExchangeableSchemeContract


@pytest.fixture(autouse=True)
def forget(monkeypatch):
    """Undo what a test registers."""
    monkeypatch.setattr(registry, "_KNOWN", dict(registry.scheme_types()))
    known = dict(JsonValue._families["scheme"])
    yield
    JsonValue._families["scheme"] = known


def _every_other():
    """A stranger's scheme: each example sits out every second step, by a coin tossed once."""

    @register_scheme
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EveryOther(ExchangeableScheme):
        dataset_size: int
        steps: int
        min_sep: int = 2

        def __post_init__(self):
            checks.integer("dataset_size", self.dataset_size)
            checks.steps(self.steps)
            if checks.integer("min_sep", self.min_sep) != 2:
                raise ValueError(f"min_sep={self.min_sep}: it is 2 here")

        @classmethod
        def for_batch_size(cls, *, batch_size, dataset_size, steps):
            if not dataset_size / 3 < batch_size < dataset_size:
                raise ValueError(f"batch_size={batch_size}: it is half of the data set")
            return cls(dataset_size=dataset_size, steps=steps)

        @classmethod
        def representatives(cls, run):
            return {"": cls(dataset_size=run.dataset_size, steps=run.steps)}

        @classmethod
        def proposals(cls, run):
            return [{}] if run.separation in (1, 2) else []

        @property
        def rate(self):
            return 0.5

        def stream(self, seed):
            return EveryOtherStream(self, seed)

        def sample_participation(self, rng, size):
            odd = rng.random(size) < 0.5
            return (np.arange(self.steps) % 2 == 1) == odd[:, None]

    class EveryOtherStream(SeededStream):
        def __init__(self, scheme, seed):
            super().__init__(scheme, seed)
            self._odd = self._rng.random(scheme.dataset_size) < 0.5

        def _draw(self):
            return np.flatnonzero(self._odd == (self.step % 2 == 1)).astype(np.int64)

        def _own_state(self):
            return {"odd": self._odd.tolist()}

        def _load_own_state(self, state):
            self._odd = np.array(state["odd"], dtype=bool)

    return EveryOther


class TestContract(ExchangeableSchemeContract):
    """A stranger's scheme fulfils the contract that ours do."""

    def scheme(self):
        return _every_other()(dataset_size=20, steps=9)

    def joint_probabilities(self):
        alike = np.subtract.outer(np.arange(9), np.arange(9)) % 2 == 0
        return alike / 2


def test_ours_register_themselves_by_the_same_call():
    ours = {
        name: member
        for name, member in JsonValue._families["scheme"].items()
        if member.__module__.startswith("dptrain.")
    }
    assert {n: scheme_types()[n] for n in ours} == ours
    assert "register_scheme" in dir(__import__("dptrain"))


def test_a_strangers_scheme_is_known_by_its_name(tmp_path):
    assert "EveryOther" not in scheme_types()
    kind = _every_other()
    scheme = kind(dataset_size=30, steps=4)
    assert scheme_types()["EveryOther"] is kind
    assert Scheme.from_dict(json.loads(json.dumps(scheme.to_dict()))) == scheme
    settings = {"type": "EveryOther", "batch_size": 15}
    check_scheme(settings)
    assert build_scheme(settings, dataset_size=30, steps=4) == scheme
    with pytest.raises(ValueError, match=r"EveryOther has no field 'cycle'"):
        check_scheme({**settings, "cycle": 2})
    with pytest.raises(ValueError, match="did you mean EveryOther"):
        check_scheme({**settings, "type": "EveryOthr"})
    loader = PrivateLoader(dataset=list(range(30)), scheme=scheme, seed=1)
    assert sum(1 for _ in loader) == 4

    mechanism = MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=3.0)
    assert MatrixMechanism.from_json(mechanism.to_json()) == mechanism
    # Two of the four steps, at most: the Gaussian mechanism of sensitivity sqrt(2).
    shown = account(mechanism, delta=1e-3, accountant="gaussian").epsilon
    command = ["account", "--scheme", "EveryOther", "batch_size=15", "--strategy", "Identity"]
    command += ["--dataset-size", "30", "--steps", "4", "--noise-multiplier", "3"]
    command += ["--delta", "1e-3", "--accountant", "gaussian", "--json", str(tmp_path / "a.json")]
    assert main(command) == 0
    assert json.loads((tmp_path / "a.json").read_text())["guarantee"]["epsilon"] == shown


def test_tables_and_plans_ask_the_class_itself():
    kind = _every_other()
    assert "EveryOther" in {type(s).__name__ for s in representative_schemes().values()}
    assert isinstance(representative_schemes()["EveryOther"], kind)
    question = Question.of_run(
        epsilon=4.0, delta=1e-4, dataset_size=100, batch_size=50, steps=10, max_bands=4, buffers=0,
        parameters=10,
    )  # fmt: skip
    found = [c for c in first_candidates(question) if c.scheme["type"] == "EveryOther"]
    bands = sorted(c.strategy.get("bands", 1) for c in found)
    assert bands == [1, 2]  # 4 was tried with others
    assert all(isinstance(c.mechanism(question).scheme, kind) for c in found)


def test_nobody_takes_it_for_a_scheme_with_amplification():
    asked = MatrixMechanism(
        scheme=_every_other()(dataset_size=30, steps=4), strategy=Identity(), noise_multiplier=3.0
    )
    with pytest.raises(ValueError, match="no accountant covers scheme EveryOther"):
        account(asked, delta=1e-3)


def _made(name="Odd", bases=(Scheme,), frozen=True, kw_only=True, **body):
    """A class of the wrong kind in one respect."""
    whole = {
        "__annotations__": {"dataset_size": int, "steps": int},
        "min_sep": 1,
        "rate": 0.5,
        "stream": lambda self, seed: None,
        "for_batch_size": classmethod(lambda cls, *, batch_size, steps: None),
        **body,
    }
    kind = type(name, bases, {k: v for k, v in whole.items() if v is not None})
    return dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(kind)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Poisson(probability=1, dataset_size=2, steps=2), TypeError, "hand over its class"),
        (lambda: "Poisson", TypeError, "must be a subclass"),
        (lambda: Scheme, TypeError, "abstract"),
        (lambda: ExchangeableScheme, TypeError, "abstract"),
        (lambda: _made(stream=None), TypeError, r"abstract, since it lacks stream"),
        (lambda: _made(frozen=False), TypeError, "frozen dataclass"),
        (lambda: _made(kw_only=False), TypeError, "'dataset_size' can be passed by position"),
        (lambda: _made(min_sep=None), TypeError, "the class lacks min_sep"),
        (lambda: _made(for_batch_size=None), TypeError, r"for_batch_size\(\*, batch_size"),
        (lambda: _made("_Odd"), ValueError, "underscore"),
        (lambda: _made("TruncatedPoisson"), ValueError, "earlier format"),
        (lambda: _made("Poisson"), TypeError, "already exists"),
    ],
)
def test_what_may_not_be_registered(make, error, says):
    with pytest.raises(error, match=says) as caught:
        register_scheme(make())
    assert "\n" not in str(caught.value)
    assert scheme_types()["Poisson"] is Poisson


def test_the_wrong_kinds_are_wrong_in_that_respect_only():
    kind = _made()
    assert register_scheme(kind) is kind
