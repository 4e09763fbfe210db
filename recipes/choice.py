"""The privacy of choosing among the runs of a sweep: what was planned, and what they came to."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from dptrain import MatrixMechanism
from dptrain.accounting import (
    ChoicePrivacy,
    TradeOff,
    TrialCount,
    account,
    compose_runs,
    one_of_runs,
    select_run,
    trade_off,
)
from dptrain.accounting.base import told_once
from dptrain.core import Guarantee, Kind
from dptrain.reporting import STATEMENT, RunFacts, privacy_report, read_profile
from dptrain.sampling import UserScheme, scheme_types
from recipes.filter_settings import FilterSettings
from recipes.runfolder import CHECKPOINT, load_checkpoint
from recipes.settings import RunSettings

CHOICE = "privacy_of_choice"  # .json and .txt, in the sweep's folder
PLAN = "plan.json"  # of all runs of a grid, from before the first of them
NOT_ACCOUNTED = "PRIVACY OF THE CHOICE: NOT ACCOUNTED"

# Profiles are read so far below δ that what is beyond them does not add up to it.
_BELOW = 1e-6
_LEAST = 1e-12
_POINTS = 801


def obstacle(settings: Sequence[RunSettings]) -> str | None:
    """The reason why no statement covers these runs together, by their settings, or ``None``."""
    for each in settings:
        if each.simulate is not None:
            return f"simulate={each.simulate:g}: a simulation is not private"
        if each.privacy.noise_multiplier == 0:
            return "privacy.noise_multiplier=0: there is no noise"
    seeds = [each.seed for each in settings if each.seed is not None]
    if len(set(seeds)) < len(seeds):
        again = next(seed for seed in seeds if seeds.count(seed) > 1)
        return (
            f"seed={again} belongs to several runs: from one seed they add the same noise, which "
            "the difference of two of them does not have; set seed to null"
        )
    return None


def mechanism_fields(settings: RunSettings) -> str:
    """Whatever a run's mechanism and its promise follow from, as text: equal where they are."""
    stated = dataclasses.asdict(settings)
    names = ("data", "scheme", "strategy", "individual", "steps", "epochs")
    privacy = {
        name: value
        for name, value in stated["privacy"].items()
        if name not in ("max_grad_norm", "certificates")
    }
    return json.dumps([{name: stated.get(name) for name in names}, privacy], default=str)


def planned(settings: Sequence[RunSettings], trials: TrialCount | None = None) -> str:
    """The first line of a sweep: what its runs will promise together, as far as it is known.

    Args:
        settings: of every run, or, of a random search, of every point that it may draw.
        trials: the law of the number of runs, ``None`` where all of them run.
    """
    if (reason := obstacle(settings)) is not None:
        return f"{NOT_ACCOUNTED} ({reason})"
    if not settings:
        return "Privacy of the choice: no run can begin"
    told = [(each.privacy.epsilon, each.privacy.delta) for each in settings]
    head, later = "Privacy of the choice", "a sharper figure follows when they are done"
    whole = "whichever of them are made, if the grid was fixed before the first result of any run"
    known = [epsilon for epsilon, _ in told if epsilon is not None]
    if len(known) < len(told):
        return f"{head}: it follows from the noise of the runs, and is told when they are done"
    deltas = [delta for _, delta in told if delta is not None]
    if trials is None:
        total = sum(known)
        delta = f"{sum(deltas):.3g}" if len(deltas) == len(told) else "the sum of theirs"
        return (
            f"{head}: all {len(told)} runs together are at most (ε = {total:.6g}, δ = {delta}), by "
            f"adding up, {whole}; {later}"
        )
    if len(deltas) == len(told):
        run = one_of_runs([_point(each) for each in settings])
        bound = select_run(run, trials, delta=min(trials.mean * max(deltas) * (1 + 1e-6), 0.5))
        return f"{head}: {bound} {later[0].upper()}{later[1:]}."
    return (
        f"{head}: the best of a secret, random number of runs ({trials.describe()}) of at most "
        f"ε = {max(known):.6g} each; the figure follows when they are done"
    )


def _point(settings: RunSettings) -> TradeOff:
    """The promise that a run is to make."""
    epsilon, delta = settings.privacy.epsilon, settings.privacy.delta
    assert epsilon is not None
    assert delta is not None
    return TradeOff(
        epsilon=(epsilon,),
        remove=(delta,),
        add=(delta,),
        floor=min(max(delta, _LEAST), 0.25),
        kind=Kind.UPPER_BOUND,
        accountant="as planned",
    )


def of_run(folder: pathlib.Path, known: dict[str, TradeOff]) -> tuple[TradeOff, Guarantee]:
    """The known privacy of the run in a folder: of its planned steps, however few ran.

    Args:
        folder: of a run that has begun.
        known: of other runs, by the mechanism's hash and δ; this one's is added.

    Raises:
        ValueError: if there is no checkpoint, or the run is a simulation.
    """
    state = load_checkpoint(folder)
    if state["simulation"] is not None:
        raise ValueError(f"{folder} is a simulation, which is not private")
    mechanism = MatrixMechanism.from_dict(state["run"]["mechanism"])
    guarantee = _guarantee(folder, state, mechanism)
    key = json.dumps([mechanism.hash, guarantee.epsilon, guarantee.delta, guarantee.kind.value])
    if key not in known:
        by_itself = FilterSettings.read(state["settings"]["individual"]) is None
        if by_itself and not isinstance(mechanism.scheme, UserScheme):
            floor = min(max(_LEAST, guarantee.delta * _BELOW), 0.25)
            with told_once():
                known[key] = trade_off(mechanism, guarantee, floor=floor, points=_POINTS)
        else:  # a filter's budget, or a graph that is not here: what was stated is what is known
            known[key] = TradeOff.of(guarantee)
    return known[key], guarantee


def _guarantee(
    folder: pathlib.Path, state: Mapping[str, Any], mechanism: MatrixMechanism
) -> Guarantee:
    """As it was published, or, of a run that was stopped, as it was planned."""
    report = folder / STATEMENT
    if report.exists():
        value = json.loads(report.read_text(encoding="utf-8"))["guarantee"]
        return Guarantee.from_json(json.dumps(value))
    if kept := state["run"]["guarantees"]:
        return Guarantee.from_json(kept[0])
    privacy = state["settings"]["privacy"]
    with told_once():
        return account(mechanism, delta=privacy["delta"], accountant=privacy["accountant"])


def keep_plan(output: pathlib.Path, runs: Sequence[str], settings: str) -> None:
    """Write down which runs a grid has, and refuse another one once a run of it has begun.

    Which runs there may be has to be fixed before the first result is seen
    (docs/theory/selection.md#thm-several-runs; ``test_a_grid_that_grows_is_refused``).

    Args:
        output: folder of the sweep.
        runs: names of their folders.
        settings: what the runs' settings are recognized by.

    Raises:
        ValueError: if runs of another grid have begun here.
    """
    path, asked = output / PLAN, {"runs": list(runs), "settings": settings}
    if path.exists():
        planned = json.loads(path.read_text(encoding="utf-8"))
        if planned != asked and any(begun(output / name) for name in planned["runs"]):
            raise ValueError(
                f"{path}: runs of another grid have begun here, and what came out of them may have "
                "decided this one. Put that grid back, or run this one in another folder. What "
                "both promise together follows from no number of runs, but from a budget that "
                "dptrain odometer keeps"
            )
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asked, indent=2) + "\n", encoding="utf-8")


def reached(
    settings: Mapping[pathlib.Path, RunSettings], *, delta: float | None = None
) -> ChoicePrivacy:
    """The joint promise of all planned runs, of which some have begun.

    A run that has not begun counts all the same: that it was not made may be a result. It counts
    as a run with the same mechanism that has begun, or else as its settings promise.

    Args:
        settings: of every planned run, by its folder.
        delta: of the statement; by default the largest of the runs', or where nothing is shown
            at that, what theirs add up to.

    Raises:
        ValueError: if a run is not private, they protect different units or relations, or nothing
            is known of a run that has not begun.
    """
    made = [folder for folder in settings if begun(folder)]
    found = [(run, guarantee.delta) for run, guarantee in _found(made)]
    fields = [mechanism_fields(settings[folder]) for folder in made]
    alike = dict(zip(fields, found, strict=True))
    whose = {
        _protected(settings[folder]): run for folder, (run, _) in zip(made, found, strict=True)
    }
    for folder, each in settings.items():
        if folder in made:
            continue
        epsilon, at = each.privacy.epsilon, each.privacy.delta
        like = whose.get(_protected(each))
        if (twin := alike.get(mechanism_fields(each))) is not None:
            found.append(twin)
        elif epsilon is not None and at is not None and like is not None:
            promise = dataclasses.replace(_point(each), adjacency=like.adjacency, unit=like.unit)
            found.append((promise, at))
        else:
            raise ValueError(
                f"{folder.name} was planned and has not begun, and its settings do not say what it "
                "would promise to whom; let it begin, or state privacy.epsilon and privacy.delta"
            )
    runs, deltas = [run for run, _ in found], [at for _, at in found]
    first = compose_runs(runs, delta=delta or max(deltas))
    if math.isfinite(first.epsilon) or delta is not None:
        return first
    return compose_runs(runs, delta=min(sum(deltas) * (1 + 1e-6), 0.5))


def _protected(settings: RunSettings) -> str:
    """A key of unit and adjacency, as far as settings tell it: equal where they are equal."""
    scheme = settings.scheme
    if issubclass(scheme_types()[scheme["type"]], UserScheme):
        return json.dumps([getattr(settings, "data", None), scheme], default=str)
    return "examples" if scheme.get("nominal_size") is None else "examples, N private"


def reached_at_random(
    settings: Sequence[RunSettings],
    folders: Sequence[pathlib.Path],
    trials: TrialCount,
    *,
    delta: float | None = None,
) -> ChoicePrivacy:
    """The promise of the best of a random number of runs; the same whichever points were drawn.

    Args:
        settings: of every point that may be drawn.
        folders: of the runs that were, at least one.
        trials: the law of their number.
        delta: of the statement; by default the largest of the runs', or where nothing is shown at
            that, theirs times the mean number.

    Raises:
        ValueError: as ``reached`` and ``check_points``.
    """
    found = _found(folders)
    if len({mechanism_fields(each) for each in settings}) == 1:
        run = found[0][0]
    else:
        check_points(settings)
        run = one_of_runs([_point(each) for each in settings])
    kinds = [run.kind, *(guarantee.kind for _, guarantee in found)]
    # Kinds come in the order of how far they can be trusted.
    run = dataclasses.replace(run, kind=max(kinds, key=list(Kind).index))
    largest = max(guarantee.delta for _, guarantee in found)
    first = select_run(run, trials, delta=delta or largest)
    if math.isfinite(first.epsilon) or delta is not None:
        return first
    return select_run(run, trials, delta=min(trials.mean * largest * (1 + 1e-6), 0.5))


def check_points(settings: Sequence[RunSettings]) -> None:
    """Refuse a search space of which the promise of a point would follow from its run only.

    The statement must not tell which points were drawn.

    Raises:
        ValueError: naming what to state.
    """
    if len({mechanism_fields(each) for each in settings}) == 1:
        return
    for each in settings:
        if each.privacy.epsilon is None or each.privacy.delta is None:
            raise ValueError(
                f"privacy.epsilon={each.privacy.epsilon} and privacy.delta={each.privacy.delta}: "
                "the points of a random search differ in what their noise follows from, so each "
                "has to state both; or vary what it does not follow from, such as optimizer.lr"
            )


def _found(folders: Sequence[pathlib.Path]) -> list[tuple[TradeOff, Guarantee]]:
    known: dict[str, TradeOff] = {}
    bar = tqdm(folders, desc="privacy of the choice", unit="run", delay=2, leave=False)
    found = [of_run(folder, known) for folder in bar]
    if len({(guarantee.unit, guarantee.adjacency) for _, guarantee in found}) > 1:
        raise ValueError(
            "the runs protect different things (examples or users, or under different relations), "
            "so there is no one statement about all of them"
        )
    return found


def who_is_not_covered(*, held_out: bool, public: bool) -> str:
    """A sentence on the choice, for those whose data the runs were scored on."""
    if public:
        return "The scores were computed on data that were stated to be public."
    if held_out:
        return (
            "Not covered: whoever was held out of the training set. The choice looked at their "
            "data without noise; the statement is about those that the runs trained on."
        )
    return (
        "Not covered: whoever is in the test set, unless it is public (--public-score says so). "
        "The choice may look at their data without noise; the statement is about those that the "
        "runs trained on."
    )


def write(folder: pathlib.Path, privacy: ChoicePrivacy, *remarks: str) -> str:
    """The statement as text and JSON in a folder; returns the text."""
    text = "\n".join([f"Privacy of the choice: {privacy}", *remarks])
    (folder / f"{CHOICE}.txt").write_text(text + "\n", encoding="utf-8")
    value = {"sentence": str(privacy), **privacy.to_dict(), "remarks": list(remarks)}
    shown = json.dumps(value, indent=2, ensure_ascii=False)
    (folder / f"{CHOICE}.json").write_text(shown + "\n", encoding="utf-8")
    return text


def tell(folders: Sequence[pathlib.Path], privacy: ChoicePrivacy) -> None:
    """Write the choice into the statements of its finished runs, where their readers look."""
    for folder in folders:
        path = folder / STATEMENT
        if not path.exists():
            continue
        value = json.loads(path.read_text(encoding="utf-8"))
        facts = RunFacts(
            **{
                **value["run"],
                "released": tuple(value["run"]["released"]),
                "withheld": tuple(value["run"]["withheld"]),
                "runs": privacy.runs,
                "choice": privacy,
            }
        )
        curve = value.get("profile")
        privacy_report(
            Guarantee.from_json(json.dumps(value["guarantee"])),
            folder,
            profile=None if curve is None else read_profile(curve),
            facts=facts,
        )


def begun(folder: pathlib.Path) -> bool:
    """True if a run has written anything that could be looked at."""
    return (folder / CHECKPOINT).exists()
