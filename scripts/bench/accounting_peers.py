"""ε of the same mechanisms by dptrain and by other libraries, and what a looser bound costs in σ.

Each line is one mechanism at one σ. Every library says the least ε that it proves at δ, in turns
with ours in one process, each as often as fits into a few seconds; seconds are medians. For every
answer ``sigma_ratio`` is the σ at which *ours* reaches the other's ε, over the σ of the line: 1.02
means that we need 2 % more noise for the same claim, .98 that we need 2 % less.

Nothing of the peers is among dptrain's requirements but dp_accounting. The others go into a folder
of their own, without what they would pull in (a CUDA build of jax, another NumPy):

    pip install --target peers --no-deps jax-privacy jax jaxlib ml_dtypes opt_einsum optax chex \\
        toolz pydantic pydantic-core annotated-types typing-inspection absl-py \\
        PLD-accounting opake-accounting opake-base
    PYTHONPATH=. python scripts/bench/accounting_peers.py --peers peers [--only CASE …]

A peer that is missing is named at the start, and its cells say so.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from scripts import results

OUT = pathlib.Path(__file__).parent / "results" / "accounting_peers.json"
PEERS = ("dp_accounting", "PLD_accounting", "jax_privacy", "opake")
PACKAGES = {"PLD_accounting": "PLD-accounting", "jax_privacy": "jax-privacy",
            "opake": "opake-accounting", "dp_accounting": "dp-accounting"}  # fmt: skip
COLUMNS = (
    ("mechanism", "{title}"),
    *(
        (name, f"{{{name}.epsilon:.4f}} ({{{name}.seconds:time}})", f"{{said.{name}}}")
        for name in ("dptrain", *PEERS)
    ),
    ("σ ratio", "{most:.4f}"),
)
ENOUGH = 3.0  # seconds after which a library is not asked again
JAX_SAMPLES, JAX_CHUNK = 10_000_000, 250_000  # of its simulation, and at a time

Row = dict[str, Any]
Ask = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Case:
    """One mechanism: ours, and the same by those who have it.

    ``peers`` maps a library to a function of its module that makes the question. ``remark`` says
    what is not the same.
    """

    name: str
    mechanism: Callable[[], Any]
    peers: dict[str, Callable[[Any], Ask]]
    delta: float = 1e-5
    accountant: str | None = None
    remark: str = ""


def poisson_event(p: float, steps: int, sigma: float) -> Callable[[Any], Ask]:
    """dp_accounting's Poisson sampling."""

    def make(dp: Any) -> Ask:
        event = dp.SelfComposedDpEvent(
            dp.PoissonSampledDpEvent(p, dp.GaussianDpEvent(sigma)), steps
        )
        return lambda: float(dp.pld.PLDAccountant().compose(event).get_epsilon(1e-5))

    return make


def jax_event(name: str, *, adjacency: str = "ADD_OR_REMOVE_ONE", **options: Any) -> Any:
    """An event of jax_privacy's, by the accountant that it says to use."""

    def make(jax_privacy: Any) -> Ask:
        import dp_accounting

        events = _jax_accounting()
        event = getattr(events, name)(**options)
        relation = dp_accounting.NeighboringRelation[adjacency]
        return lambda: float(
            dp_accounting.pld.PLDAccountant(relation).compose(event).get_epsilon(1e-5)
        )

    return make


def _jax_accounting() -> Any:
    """The module of jax_privacy with its events, which is experimental up to 2.0."""
    try:
        return importlib.import_module("jax_privacy.experimental.accounting")
    except ModuleNotFoundError:
        return importlib.import_module("jax_privacy.accounting")


def opake_pld(make_pld: Callable[[Any, Any], Any]) -> Callable[[Any], Ask]:
    """opake's distributions, at its own defaults."""

    def make(opake: Any) -> Ask:
        config = opake.DiscretizationConfig()
        return lambda: float(make_pld(opake, config).epsilon_at(1e-5))

    return make


def pld_allocation(sigma: float, steps: int, picks: int, epochs: int) -> Callable[[Any], Ask]:
    """PLD_accounting's random allocation; its upper bound."""

    def make(pld: Any) -> Ask:
        def ask() -> float:
            upper, _ = pld.gaussian_allocation_epsilon_range(
                delta=1e-5, sigma=sigma, num_steps=steps, num_selected=picks, num_epochs=epochs
            )
            return float(upper)

        return ask

    return make


def poisson(p: float, steps: int, sigma: float, cap: int | None = None) -> Callable[[], Any]:
    """Poisson sampling, possibly of cut batches."""
    from dptrain import Identity, MatrixMechanism, Poisson

    scheme = Poisson(probability=p, dataset_size=10_000, steps=steps, max_batch_size=cap)
    return lambda: MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def allocation(steps: int, picks: int, epochs: int, sigma: float) -> Callable[[], Any]:
    """Random allocation."""
    from dptrain import Identity, MatrixMechanism, RandomAllocation

    scheme = RandomAllocation(
        steps_per_epoch=steps, participations=picks, epochs=epochs, dataset_size=50_000
    )
    return lambda: MatrixMechanism(scheme=scheme, strategy=Identity(), noise_multiplier=sigma)


def banded(kind: str, sigma: float) -> Callable[[], Any]:
    """1,000 steps (b-min-sep: 64), 16 bands of BandMF (4); σ in units of its columns' norm."""
    from dptrain import BallsInBins, BandMF, CyclicPoisson, MatrixMechanism, MinSep

    steps, bands = (64, 4) if kind == "b-min-sep" else (1000, 16)
    strategy = BandMF(bands=bands)
    if kind == "cyclic":
        scheme: Any = CyclicPoisson(probability=0.16, cycle=16, dataset_size=50_000, steps=1000)
    elif kind == "b-min-sep":
        scheme = MinSep(probability=0.05, min_sep=4, dataset_size=50_000, steps=64)
    else:
        scheme = BallsInBins(bins=100, epochs=10, dataset_size=50_000)
    norm = float(strategy.bind(steps).column_norms(steps).max())
    return lambda: MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=sigma * norm)


def band_coefficients(bands: int, steps: int) -> list[float]:
    """The coefficients of that strategy."""
    from dptrain import BandMF

    return [float(each) for each in BandMF(bands=bands).bind(steps).first_column(steps)[:bands]]


def opake_min_sep(opake: Any) -> Ask:
    """opake's b-min-sep with its warm start, by simulation."""
    config, column = opake.DiscretizationConfig(), band_coefficients(4, 64)
    sigma = 2.0 * math.hypot(*column)
    return lambda: float(
        opake.bandmf_b_min_sep_warm_mc_pld(column, 64, 0.05, sigma, config).epsilon_at(1e-5)
    )


def jax_min_sep(jax_privacy: Any) -> Ask:
    """jax_privacy's b-min-sep: its samples, and the δ that it lets them be compared with.

    The least ε whose estimated δ its ``get_base_delta`` accepts for the target in both directions.
    One ε is chosen by the samples that verify it; its claim is for one that was fixed before.
    """
    import numpy as np
    from scipy.optimize import brentq

    folder = "jax_privacy.experimental.monte_carlo"
    generation = importlib.import_module(f"{folder}.sample_generation")
    calculation = importlib.import_module(f"{folder}.delta_calculation")
    column = np.array(band_coefficients(4, 64))
    sampling = jax_privacy.batch_selection.BMinSepSampling(0.05, iterations=64, min_sep=4)

    def losses(positive: bool) -> Any:
        rng = np.random.default_rng(0 if positive else 1)
        drawn = (
            generation.get_privacy_loss_sample(
                sampling, 2.0 * math.hypot(*column), column, rng, positive, JAX_CHUNK
            )
            for _ in range(JAX_SAMPLES // JAX_CHUNK)
        )
        return np.concatenate([loss for loss, _ in drawn])

    def ask() -> float:
        base = calculation.get_base_delta(JAX_SAMPLES, 1e-5)
        found = []
        for each in (losses(True), losses(False)):
            above = float(each.max())  # where no sample is left

            def excess(epsilon: float, each: Any = each) -> float:
                return calculation.delta_from_epsilon_and_samples(epsilon, each) - base

            found.append(brentq(excess, 0.0, above) if excess(0.0) > 0 else 0.0)
        return float(max(found))

    return ask


def opake_bins(opake: Any) -> Ask:
    """opake's balls-in-bins with a matrix, by simulation."""
    config, column = opake.DiscretizationConfig(), band_coefficients(16, 1000)
    gram = opake.toeplitz_gram_matrix(column, 1000, 100)
    sigma = 2.0 * math.hypot(*column)
    return lambda: float(opake.bnb_mc_pld(gram, 100, sigma, config).epsilon_at(1e-5))


def cases() -> list[Case]:
    """The list, from what everybody has to what few have."""

    def many(steps: int, picks: int, epochs: int, sigma: float, remark: str = "") -> Case:
        name = f"random allocation, {picks} of {steps}, {epochs} epochs, σ = {sigma:g}"
        return Case(
            name.replace(", 1 epochs", ""),
            allocation(steps, picks, epochs, sigma),
            {
                "PLD_accounting": pld_allocation(sigma, steps, picks, epochs),
                "opake": opake_pld(
                    lambda o, c: _composed(
                        o.random_allocation_gaussian_pld(sigma, steps, picks, c), epochs
                    )
                ),
            },
            remark=remark,
        )

    def drawn(p: float, steps: int, sigma: float) -> Case:
        return Case(
            f"Poisson, p = {p:g}, {steps:,} steps, σ = {sigma:g}",
            poisson(p, steps, sigma),
            {
                "dp_accounting": poisson_event(p, steps, sigma),
                "jax_privacy": jax_event(
                    "dpsgd_event", noise_multiplier=sigma, iterations=steps, sampling_prob=p
                ),
                "opake": opake_pld(
                    lambda o, c: o.poisson_pld(o.gaussian_pld(sigma, c), p).self_compose(steps)
                ),
            },
        )

    return [
        drawn(0.01, 1000, 1.0),
        drawn(0.001, 20_000, 0.7),
        Case(
            "truncated Poisson, p = .01, at most 110 of 10,000, 1,000 steps, σ = 1",
            poisson(0.01, 1000, 1.0, cap=110),
            {
                "dp_accounting": _truncated_event,
                "jax_privacy": jax_event(
                    "truncated_dpsgd_event",
                    noise_multiplier=1.0,
                    iterations=1000,
                    sampling_prob=0.01,
                    num_examples=10_000,
                    truncated_batch_size=110,
                ),
                "opake": opake_pld(
                    lambda o, c: o.truncated_poisson_gaussian_pld(
                        1.0, 0.01, 110, 10_000, c
                    ).self_compose(1000)
                ),
            },
            remark="ours under zero-out, theirs under add-or-remove",
        ),
        Case(
            "cyclic Poisson, BandMF(16), p = .16 in a part, 1,000 steps, σ = 2 ‖c‖",
            banded("cyclic", 2.0),
            {
                "dp_accounting": poisson_event(0.16, 63, 2.0),
                "jax_privacy": jax_event(
                    "amplified_bandmf_event",
                    noise_multiplier=2.0,
                    iterations=1000,
                    num_bands=16,
                    sampling_prob=0.16,
                ),
                "opake": opake_pld(
                    lambda o, c: o.poisson_pld(o.gaussian_pld(2.0, c), 0.16).self_compose(63)
                ),
            },
        ),
        many(100, 1, 1, 1.0),
        many(1000, 1, 10, 0.6),
        many(1000, 10, 1, 1.0),
        many(100, 10, 1, 1.0),
        Case(
            "balls-in-bins, BandMF(16), 100 bins, 10 epochs, σ = 2 ‖c‖",
            banded("balls-in-bins", 2.0),
            {"opake": opake_bins},
            remark="both by simulation",
        ),
        Case(
            "b-min-sep, BandMF(4), p = .05, b = 4, 64 steps, σ = 2 ‖c‖",
            banded("b-min-sep", 2.0),
            {"jax_privacy": jax_min_sep, "opake": opake_min_sep},
            remark="all by simulation",
        ),
    ]


def _composed(pld: Any, count: int) -> Any:
    return pld if count == 1 else pld.self_compose(count)


def _truncated_event(dp: Any) -> Ask:
    step = dp.dp_event.TruncatedSubsampledGaussianDpEvent(
        dataset_size=10_000, sampling_probability=0.01, truncated_batch_size=110,
        noise_multiplier=1.0,
    )  # fmt: skip
    event = dp.SelfComposedDpEvent(step, 1000)
    return lambda: float(dp.pld.PLDAccountant().compose(event).get_epsilon(1e-5))


def loaded(folder: pathlib.Path | None) -> dict[str, Any]:
    """The peers that can be imported; of the others their names are printed."""
    if folder is not None:
        sys.path.append(str(folder.resolve()))  # behind ours: their NumPy is not wanted
    found: dict[str, Any] = {}
    for name in PEERS:
        try:
            found[name] = _opake() if name == "opake" else importlib.import_module(name)
            if name == "dp_accounting":
                importlib.import_module("dp_accounting.pld")
            if name == "jax_privacy":
                _jax_accounting()
        except ImportError as error:
            print(
                f"{name}: not here ({error}), its columns stay empty; pip install --target peers "
                f"--no-deps {PACKAGES[name]} with what --help names, and give --peers peers"
            )
    return found


def _opake() -> Any:
    """opake's compiled accounting by itself: its package needs a Python later than 3.11.7."""
    for place in sys.path:
        folder = pathlib.Path(place) / "opake/api/accounting/core"
        for path in folder.glob("opake_accounting*.so"):
            spec = importlib.util.spec_from_file_location("opake_accounting", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    raise ModuleNotFoundError("No module named 'opake.api.accounting.core.opake_accounting'")


def measured(case: Case, peers: dict[str, Any]) -> Row:
    """ε and seconds of everybody, in turns, and what the others' ε would cost us in σ."""
    from dptrain import account, calibrate

    mechanism = case.mechanism()

    def ours() -> Any:
        return account(mechanism, delta=case.delta, accountant=case.accountant)

    asked: dict[str, Callable[[], Any]] = {"dptrain": ours}
    failed: dict[str, str] = {}
    absent = {name: "not asked" for name in case.peers if name not in peers}
    for name, make in case.peers.items():
        if name in peers:
            asked[name] = make(peers[name])
    seconds: dict[str, list[float]] = {name: [] for name in asked}
    answers: dict[str, Any] = {}
    for _ in range(3):
        for name, ask in asked.items():
            if name in failed or sum(seconds[name]) > ENOUGH:
                continue
            start = time.perf_counter()
            try:
                answers[name] = ask()
            except Exception as error:  # whatever a peer refuses, it is a line of the table
                failed[name] = f"{type(error).__name__}: {error}"[:300]
                continue
            seconds[name].append(time.perf_counter() - start)
    guarantee = answers.pop("dptrain")
    row: Row = {
        "case": case.name, "delta": case.delta, "sigma": mechanism.noise_multiplier,
        "title": f"{case.name} ({case.remark})" if case.remark else case.name,
        "failed": failed, "said": absent | dict.fromkeys(failed, "no answer"),
        "dptrain": {
            "epsilon": guarantee.epsilon, "seconds": statistics.median(seconds["dptrain"]),
            "kind": guarantee.kind.value, "accountant": guarantee.accountant,
        },
    }  # fmt: skip
    for name, epsilon in answers.items():
        row[name] = {"epsilon": epsilon, "seconds": statistics.median(seconds[name])}
        if guarantee.certificate is None and 0 < epsilon < math.inf:
            found = calibrate(
                scheme=mechanism.scheme, strategy=mechanism.strategy, epsilon=epsilon,
                delta=case.delta, accountant=case.accountant,
            )  # fmt: skip
            ratio = found.mechanism.noise_multiplier / mechanism.noise_multiplier
            row[name]["sigma_ratio"] = ratio
            row["most"] = max(ratio, row.get("most", ratio))
    return row


def main() -> None:
    """Run the cases, print each as it ends, and write all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=pathlib.Path, help="folder that the peers are in")
    parser.add_argument("--only", nargs="+", help="cases whose name has one of these words")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], help="not to be asked")
    parser.add_argument("--json", type=pathlib.Path, default=OUT)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    here = loaded(options.peers)
    peers = {name: module for name, module in here.items() if name not in options.without}
    versions = {"dptrain": metadata.version("dptrain")}
    for name in PEERS:
        versions[name] = metadata.version(PACKAGES[name]) if name in here else "missing"
    rows = {row["case"]: row for row in results.rows_of(options.json, "accounting_peers")}
    known = cases()
    for case in known:
        if options.only and not any(word in case.name for word in options.only):
            continue
        rows[case.name] = measured(case, peers)
        print(json.dumps(rows[case.name], ensure_ascii=False), flush=True)
        shown = [rows[each.name] for each in known if each.name in rows]
        results.publish(
            options.json, {"accounting_peers": results.Table(COLUMNS, shown)}, script=__file__,
            machine=results.machine(load=True) | versions, quiet=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
