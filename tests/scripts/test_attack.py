"""The attack finds nothing in the library as it is, and finds what is broken on purpose."""

from __future__ import annotations

import pathlib
import random
import re

import numpy as np
import pytest
import torch
from scipy.stats import norm

from dptrain import Identity, MatrixMechanism, Poisson
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.clipping.base.styles import Flat
from dptrain.clipping.bookkeeping import BookkeepingClipper
from dptrain.clipping.probe.examination import Examination
from scripts.attack import __main__ as command
from scripts.attack import canaries, harness, inputs, kills, layers, mechanisms, modules, ranks
from scripts.attack.harness import Finding, Part
from tests.oracles import enumeration
from tests.oracles.random_mechanisms import Subject
from tests.oracles.true_delta import Branch, TruePair, World, of_patterns


def run(part: Part, cases: int, seed: int = 0) -> harness.Tally:
    (tally,) = harness.attack([part], seconds=1.0, seed=seed, cases=cases, progress=False)
    assert tally.cases == cases
    return tally


@pytest.mark.slow
def test_layers_hold() -> None:
    tally = run(layers.PART, 2 * len(layers.LAYERS))
    assert tally.failures == []
    assert tally.done > 2 * len(layers.LAYERS)  # most modes train most of them


def test_a_bound_that_is_exceeded_by_a_millionth_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clip = Flat.clip

    def longer(self, norms, max_grad_norm):
        factors, left = clip(self, norms, max_grad_norm)
        return factors * (1 + 1e-5), left

    monkeypatch.setattr(Flat, "clip", longer)
    tally = run(layers.PART, 6)
    assert tally.failures
    assert all("releases" in told for _, told in tally.failures)


@pytest.mark.slow
def test_random_modules_hold() -> None:
    tally = run(modules.PART, 12, seed=40)
    assert tally.failures == []
    assert tally.done >= 4  # the others mix the examples, are refused, or cannot be called so


def test_a_sum_that_is_off_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BookkeepingClipper, "_unit", lambda self, examples: 1.0)
    given = modules.Program((modules.Step("scale and shift", "", mixes=False),), 0, 1, mean=True)
    with pytest.raises(Finding, match="another gradient than the loop's: scale and shift"):
        modules.examine(given)


@pytest.mark.parametrize("piece", modules.MIXERS)
def test_modules_that_mix_the_examples_are_refused(piece: str) -> None:
    steps = (modules.Step("linear", "", mixes=False), modules.Step(piece, "", mixes=True))
    assert not modules.examine(modules.Program(steps, 1, 1, mean=False))


def test_a_module_that_mixes_and_is_not_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Examination, "leave_out", lambda *_: None)
    steps = (
        modules.Step("linear", "residual", mixes=False),
        modules.Step("the number of rows", "", mixes=True),
    )
    with pytest.raises(Finding, match="another gradient"):
        modules.examine(modules.Program(steps, 1, 1, mean=False))
    shorter = modules.shrunk(modules.Program(steps, 1, 1, mean=False))
    assert [str(step) for step in shorter.steps] == ["the number of rows"]


@pytest.mark.slow
def test_mechanisms_hold() -> None:
    tally = run(mechanisms.PART, 2)
    assert tally.failures == []
    assert tally.done > 10


def test_an_accountant_that_states_too_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = PoissonPLD.profile
    monkeypatch.setattr(
        PoissonPLD,
        "profile",
        lambda self, m, epsilon: profile(self, m.with_noise(1.1 * m.noise_multiplier), epsilon),
    )
    mechanism = MatrixMechanism(
        scheme=Poisson(probability=0.3, dataset_size=10, steps=3),
        strategy=Identity(),
        noise_multiplier=1.0,
    )
    law = enumeration.poisson(3, 0.3)
    subject = Subject("poisson", mechanism, lambda: of_patterns(law, np.eye(3), 1.0))
    with pytest.raises(Finding, match=r"poisson-pld, .*states"):
        mechanisms.check_deep(subject, [PoissonPLD()], 0)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 3.0])
def test_the_oracle_is_right_far_down(sigma: float) -> None:
    """Against the closed form of the Gaussian mechanism, where δ is 10^-3 to 10^-9."""
    pair = TruePair((Branch(1.0, _point(1.0), _point(0.0)),), sigma)
    found = mechanisms.weighted(pair, seed=1)
    for delta in mechanisms.DEEP:
        epsilon = found.where_one(delta)
        mu = 1 / sigma
        true = norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        for side in (found.remove, found.add):
            assert true / 1.5 < side.lower(epsilon) <= true


def _point(at: float) -> World:
    return World(np.ones(1), np.full((1, 1), at))


@pytest.mark.slow
def test_canaries_find_no_more_than_is_stated() -> None:
    assert run(canaries.PART, 2).failures == []


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("seed", [0, 1])
def test_an_engine_with_a_tenth_of_the_noise_is_found(seed: int) -> None:
    with pytest.raises(Finding, match="ε is above"):
        canaries.case(seed, sabotage=canaries.SABOTAGE)


def test_bad_inputs_are_refused() -> None:
    tally = run(inputs.PART, 4 * len(inputs.KINDS))
    assert tally.failures == []


def test_a_foreign_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def foreign(x: object) -> None:
        raise AttributeError(f"{type(x).__name__} has no attribute 'steps'")

    monkeypatch.setattr(inputs, "cases", lambda: [pytest.param(foreign, {"x": 1}, "x", None)])
    assert len(run(inputs.PART, 1).failures) == 1


def test_odd_names_of_files_leave_none_where_one_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    written = []

    def write(ledger: str) -> None:
        written.append(pathlib.Path(ledger).write_text("a line"))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "_odd", lambda rng: "an odd name")
    monkeypatch.setattr(inputs, "cases", lambda: [pytest.param(write, {}, "ledger", None)])
    inputs.bad_argument(random.Random(0))
    assert written
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_checked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.runfolder.check_seal", lambda state, what: None)
    monkeypatch.setattr(inputs, "KINDS", (inputs.bad_checkpoint,))
    tally = run(inputs.PART, 60)
    assert any("read as another" in told for _, told in tally.failures)


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
def test_killed_ranks_go_on_bit_for_bit(divided: bool) -> None:
    """Each in a life of its own: of the first rank, of the second, and a life that ends well."""
    assert ranks.killed([(1, 45_000), (0, 20_000)], divided=divided) == 2


@pytest.mark.slow
def test_twenty_kills_of_ranks_that_divide_a_model() -> None:
    """At random moments of steps, exchanges and checkpoints, four to a run."""
    rng, kills = random.Random(22), 0
    for _ in range(5):
        moments = [(rng.randrange(ranks.RANKS), rng.randint(1, 150_000)) for _ in range(4)]
        kills += ranks.killed(moments, divided=True)
    assert kills == 20


def test_a_run_that_goes_on_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = {"module": {"weight": torch.ones(2)}, "releases": ["a", "b"], "kills": 0}
    found = {**ends, "module": {"weight": torch.tensor([1.0, 1 + 2**-23])}, "kills": 1}
    monkeypatch.setattr(ranks, "outcome", lambda kills, divided: found if kills else ends)
    ranks.uninterrupted.cache_clear()
    with pytest.raises(Finding, match="after 1 kills the run has another module"):
        ranks.killed([(0, 5)])
    monkeypatch.setattr(ranks, "outcome", lambda kills, divided: {**ends, "kills": len(kills)})
    ranks.uninterrupted.cache_clear()
    assert ranks.case(3) > 0
    ranks.uninterrupted.cache_clear()


def test_a_failure_is_said_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def odd(seed: int) -> int:
        if seed == 42:
            raise Finding("it leaks")
        return 3

    monkeypatch.setitem(command.PARTS, "layers", Part("layers", "layer cases", odd))
    assert command.main(["layers", "--seed", "40", "--cases", "4", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "FAILED layers, seed 42: it leaks" in out
    assert "again: python -m scripts.attack layers --seed 42 --cases 1" in out
    assert out.splitlines()[-1] == "attack: 9 layer cases, 1 failures"
    assert command.main(["layers", "--seed", "0", "--cases", "2", "--quiet"]) == 0


def test_minutes_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["layers", "--minutes", "0.02", "--quiet"]) == 0
    assert re.fullmatch(r"attack: \d+ layer cases, 0 failures\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["--minutes", "0"], ["--minutes", "nan"], ["--seed", "-1"], ["--cases", "0"]],
)
def test_mistakes_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert (
        arguments[-1] in capsys.readouterr().err or "--seed" in arguments or "--cases" in arguments
    )


@pytest.mark.slow
def test_a_killed_run_ends_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(kills.PART, 1).failures == []
    expected = kills.uninterrupted()
    one = next(iter(expected["module"]))
    changed = {
        **expected["module"],
        one: torch.nextafter(expected["module"][one], torch.tensor(9.0)),
    }
    monkeypatch.setattr(kills, "uninterrupted", lambda: {**expected, "module": changed})
    ((_, told),) = run(kills.PART, 1).failures
    assert "has another module" in told
