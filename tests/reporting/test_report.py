"""The privacy statement: complete, readable back, and free of private numbers."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from dptrain.accounting.base.accountant import Profile
from dptrain.core.guarantee import Adjacency, Guarantee, Kind, Unit
from dptrain.noise.generators import SECURE, Normals
from dptrain.noise.generators.normals import FAST
from dptrain.reporting.report import as_shown, conditions, plot_curves, plot_privacy, privacy_report
from dptrain.sampling import Poisson
from dptrain.strategies import BandMF, Dense, DenseWorkload

PNG = b"\x89PNG\r\n\x1a\n"


def _guarantee(**changes: object) -> Guarantee:
    fields: dict[str, object] = {
        "epsilon": 8.0,
        "delta": 3.5e-4,
        "unit": Unit(),
        "adjacency": Adjacency.ZERO_OUT,
        "scheme": {"type": "MinSep", "probability": 0.5, "min_sep": 4, "dataset_size": 1437},
        "strategy": {"type": "BandMF", "coefficients": [1 / (k + 1) for k in range(12)]},
        "strategy_hash": "ab" * 32,
        "noise_multiplier": 1.25,
        "steps_planned": 100,
        "accountant": "min-sep-importance",
        "kind": Kind.VERIFIED,
        "mechanism_hash": "cd" * 32,
        "steps_executed": 100,
        "notes": ("a | note",),
        "certificate": {"samples": 1000, "verdicts": [True, False]},
    }
    return Guarantee(**{**fields, **changes})  # type: ignore[arg-type]


def _profile() -> Profile:
    epsilon = np.linspace(0, 10, 21)
    return Profile(
        epsilon=epsilon,
        remove=np.exp(-epsilon),
        add=np.where(epsilon < 9, np.exp(-1.1 * epsilon), 0.0),
        kind=Kind.ESTIMATE,
        accountant="min-sep-importance",
    )


def test_json_holds_the_guarantee_and_the_profile(tmp_path):
    as_json, _ = privacy_report(_guarantee(), tmp_path, profile=_profile())
    assert as_json == tmp_path / "privacy_report.json"
    value = json.loads(as_json.read_text(encoding="utf-8"))
    assert Guarantee.from_json(json.dumps(value["guarantee"])) == _guarantee()
    assert value["sentence"] == str(_guarantee())
    assert value["profile"]["delta_add"] == _profile().add.tolist()


def test_an_infinite_epsilon_is_written_as_json(tmp_path):
    as_json, as_text = privacy_report(_guarantee(epsilon=math.inf), tmp_path / "sub" / "statement")
    value = json.loads(as_json.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert value["guarantee"]["epsilon"] == "inf"
    assert as_text == tmp_path / "sub" / "statement.md"


def test_markdown_states_every_field_and_condition(tmp_path):
    certificate = {"samples": 1000, "grid": [0.5] * 9, "note": "a|b", "rows": [{"x": 1}, {"x": 2}]}
    guarantee = _guarantee(certificate=certificate)
    _, as_text = privacy_report(guarantee, tmp_path, profile=_profile())
    text = as_text.read_text(encoding="utf-8")
    assert str(guarantee) in text
    for needle in (
        "| ε | 8 |",
        "| steps executed | 100 |",
        "zero_out",
        guarantee.mechanism_hash,
        guarantee.strategy_hash,
        "min_sep = 4",
        "| samples | 1000 |",
        "9 in all",
        "| rows | 2 entries; see the JSON |",
        "a\\|b",
        "| 5 | 0.00673795 | 0.00408677 |",  # e^-5 and e^-5.5 at the middle of the grid
    ):
        assert needle in text, needle
    for line in conditions(guarantee):
        assert f"- {line}" in text
    # Every table row has as many cells as its head: no value broke out of its cell.
    for block in re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE):
        cells = {len(re.split(r"(?<!\\)\|", row)) for row in block.strip().splitlines()}
        assert len(cells) == 1, block


def test_a_packed_matrix_stays_out_of_the_markdown(tmp_path):
    matrix = np.tril(np.full((60, 60), 0.1), -1) + np.eye(60)
    strategies = (
        Dense(matrix=matrix),
        BandMF(bands=1, coefficients=(1.0,), workload=DenseWorkload(entries=matrix)).bind(60),
    )
    for strategy in strategies:
        value = strategy.to_dict()
        as_json, as_text = privacy_report(_guarantee(strategy=value), tmp_path)
        assert len(as_text.read_text(encoding="utf-8")) < 6000
        assert "characters in all; see the JSON" in as_text.read_text(encoding="utf-8")
        assert json.loads(as_json.read_text(encoding="utf-8"))["guarantee"]["strategy"] == value


def test_an_estimate_is_called_one():
    assert any("must not be published" in c for c in conditions(_guarantee(kind=Kind.ESTIMATE)))
    assert not any("must not be published" in c for c in conditions(_guarantee()))


def test_an_estimate_says_why_it_is_one():
    rough = _guarantee().drawn_by("Philox", caveats=("buffers are rounded.",))
    assert any(
        "about this estimate" in c and "buffers are rounded." in c for c in conditions(rough)
    )
    assert not any("about this estimate" in c for c in conditions(_guarantee()))


@pytest.mark.parametrize(
    ("generator", "words", "absent"),
    [
        (None, ["exactly Gaussian", "pseudorandom generator"], ["PCG64-DXSM", "secure"]),
        (
            FAST,
            [
                "Philox on CUDA",
                "a cryptographic generator on the CPU",
                "not a cryptographic one (secure=True uses a cryptographic one) on CUDA",
                "rounded to a public grid",
                "PCG64-DXSM",
            ],
            ["single draw"],
        ),
        (
            Normals(0).on({"cpu"}),
            ["a cryptographic generator. Its numbers", "rounded to a public grid", "PCG64-DXSM"],
            ["single draw", "Philox", "CUDA", "secure=True"],
        ),
        (
            Normals(0).on({"cuda"}),
            ["not a cryptographic one (secure=True", "Philox by chunk on CUDA", "the notes state"],
            ["single draw", "AES", "CPU"],
        ),
        (
            SECURE,
            [
                SECURE,
                "a cryptographic generator on every device",
                "rounded to a public grid",
                "PCG64-DXSM",
            ],
            ["secure=True"],
        ),
    ],
)
def test_conditions_say_what_drew_the_random_numbers(generator, words, absent):
    (line,) = (c for c in conditions(_guarantee(noise_generator=generator)) if "Gaussian" in c)
    assert all(word in line for word in words)
    assert not any(word in line for word in absent)


def test_the_batches_are_drawn_by_the_generator_that_the_conditions_name():
    scheme = Poisson(probability=0.5, dataset_size=10, steps=2)
    state = scheme.stream(0).state_dict()
    assert json.loads(state["rng"])["bit_generator"] == "PCG64DXSM"


def test_the_generator_is_in_the_table(tmp_path):
    for generator, there in ((None, False), ("Philox", True)):
        _, as_text = privacy_report(_guarantee(noise_generator=generator), tmp_path)
        assert ("| noise generator | Philox |" in as_text.read_text(encoding="utf-8")) is there


def test_the_profile_of_an_estimate_is_an_estimate(tmp_path):
    exact = dataclasses.replace(_profile(), kind=Kind.EXACT)
    assert as_shown(exact, _guarantee()).kind is Kind.EXACT
    rough = _guarantee().drawn_by("Philox", caveats=("rounded",))
    as_json, as_text = privacy_report(rough, tmp_path, profile=exact)
    assert json.loads(as_json.read_text(encoding="utf-8"))["profile"]["kind"] == "estimate"
    assert "Estimates, for orientation" in as_text.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Kind.CONFIDENCE, "Upper confidence bounds"),
        (Kind.ESTIMATE, "Estimates, for orientation"),
        (Kind.UPPER_BOUND, "Every line is a proven upper bound"),
    ],
)
def test_the_profile_says_how_it_was_shown(tmp_path, kind, words):
    profile = dataclasses.replace(_profile(), kind=kind)
    _, as_text = privacy_report(_guarantee(), tmp_path, profile=profile)
    assert words in as_text.read_text(encoding="utf-8")


def test_conditions_follow_unit_and_adjacency():
    user = _guarantee(unit=Unit(kind="user", max_examples=3), adjacency=Adjacency.REPLACE_ONE)
    assert any("a person who contributed several" in c for c in conditions(_guarantee()))
    assert not any("a person who contributed several" in c for c in conditions(user))
    assert any("same size" in c for c in conditions(user))


def test_conditions_name_what_no_run_can_see_of_its_loop():
    (line,) = (c for c in conditions(_guarantee()) if "training loop" in c)
    assert all(w in line for w in ("loss", "before the model", "state is carried", "learning rate"))


def test_plots_are_images(tmp_path):
    plot_privacy(_profile(), _guarantee(), tmp_path / "privacy.png")
    metrics = [
        {"step": s, "split": split, "loss": 2.0 / s, "accuracy": 1 - 1 / s}
        for s in range(1, 30)
        for split in ("train", "test")
    ]
    plot_curves(metrics, tmp_path / "curves.png")
    for name in ("privacy.png", "curves.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_plots_of_nothing_are_refused(tmp_path):
    empty = Profile(
        epsilon=np.ones(2), remove=np.zeros(2), add=np.zeros(2), kind=Kind.EXACT, accountant="x"
    )
    tiny = dataclasses.replace(empty, add=np.full(2, 1e-17))
    for profile in (empty, tiny):
        with pytest.raises(ValueError, match="smaller ε"):
            plot_privacy(profile, _guarantee(), tmp_path / "privacy.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_curves([], tmp_path / "curves.png")


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ModuleNotFoundError, match=r"dptrain\[recipes\]"):
        plot_privacy(_profile(), _guarantee(), tmp_path / "privacy.png")


def test_the_report_says_what_an_attack_can_reach(tmp_path):
    """At 1 % false positives the best ε of the profile counts, if that is proven."""
    guarantee = _guarantee()
    profile = dataclasses.replace(_profile(), kind=Kind.UPPER_BOUND)
    as_json, as_text = privacy_report(guarantee, tmp_path, profile=profile)
    found = json.loads(as_json.read_text(encoding="utf-8"))["attacks"]
    of_remove = profile.remove + np.exp(profile.epsilon) * 0.01
    of_add = 1 - np.exp(-profile.epsilon) * (1 - profile.add - 0.01)
    least = min(of_remove.min(), of_add.min())
    assert found["true_positive_rate_at"]["0.01"] == pytest.approx(least, rel=1e-9)
    assert found["sentence"] in as_text.read_text(encoding="utf-8")
    simulated, _ = privacy_report(guarantee, tmp_path / "simulated", profile=_profile())
    assert json.loads(simulated.read_text(encoding="utf-8"))["attacks"]["mu"] is None
