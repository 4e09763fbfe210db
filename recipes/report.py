"""The outputs of a finished run: its statement, its plots, and the lines on the screen."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import subprocess
from typing import TYPE_CHECKING, Any

import numpy as np

from dptrain.accounting import Profile, profile, profile_of
from dptrain.core import Guarantee, Kind, digest
from dptrain.individual import filter_profile
from dptrain.reporting import (
    RunFacts,
    bounding_note,
    plot_curves,
    plot_graph,
    plot_privacy,
    privacy_report,
)
from dptrain.sampling import BoundedGraph, Scheme, UserMinSep
from recipes.config import flatten
from recipes.individual_outputs import write_individual
from recipes.runfolder import GRAPH_PLOT, GRAPH_TABLE, INDIVIDUAL, MARKS, remove
from recipes.simulation import Simulation
from recipes.task import TEST, Task, evaluate

if TYPE_CHECKING:
    from recipes.run import Run


def write_graph(bounded: BoundedGraph, scheme: Scheme, path: pathlib.Path) -> None:
    """Statistics of the users of the training set, as a table and a plot; the graph is public."""
    statistics = bounded.statistics()
    design = [(scheme.probability, scheme.min_sep)] if isinstance(scheme, UserMinSep) else []
    (path / GRAPH_TABLE).write_text(statistics.table(design) + "\n", encoding="utf-8")
    plot_graph(statistics, path / GRAPH_PLOT)


def stated(current: Run) -> Guarantee:
    """The run's guarantee, with what contribution bounding left out."""
    guarantee = current.private.guarantee()
    bounded = current.task.bounded
    return guarantee if bounded is None else guarantee.with_notes(bounding_note(bounded))


def run_facts(current: Run) -> RunFacts:
    """The facts that the run's settings add to its guarantee."""
    settings, views = current.settings, current.task.views
    stated = flatten(dataclasses.asdict(settings))
    told = {
        name: value
        for name, value in settings.public_facts.items()
        if name not in settings.free_on_resume
    }
    augmented = stated.get("data.augment")
    augmentation = None if augmented is None else "random crops and flips" if augmented else "none"
    if augmented and stated.get("data.flips") is False:
        augmentation = "random crops"
    if augmented and views > 1:
        augmentation = f"{augmentation}; {views} views of an example, their gradients averaged"
    return RunFacts(
        max_grad_norm=settings.privacy.max_grad_norm,
        clipping=_words(settings.clipping),
        optimizer=_words(dataclasses.asdict(settings.optimizer)),
        augmentation=augmentation,
        public_data=_public_data(current.task),
        public_weights=current.task.public_weights,
        commit=commit_of(pathlib.Path(__file__).parents[1]),
        data=current.task.data,
        configuration=digest(told),
        model=settings.statement.model,
        organization=settings.statement.organization,
    )


def _public_data(task: Task) -> str:
    if task.evaluated_on != TEST:
        return task.public_data
    return f"{task.public_data}; the test {task.examples} were scored without noise"


def commit_of(root: pathlib.Path) -> str | None:
    """The commit of the checkout at ``root``, and whether files differ from it.

    ``None`` where it is no checkout: installed packages are told by their versions.
    """
    found = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    changed = _git(root, "diff", "--name-only", "HEAD")
    if found is None or changed is None:
        return None
    top, commit = found.splitlines()
    if pathlib.Path(top).resolve() != root.resolve():
        return None  # somebody else's, of which this is a part
    return f"{commit}, with changes that are in no commit" if changed else commit


def _git(root: pathlib.Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _words(value: dict[str, Any]) -> str:
    return ", ".join(f"{name}={each}" for name, each in value.items())


def write_report(current: Run) -> None:
    """Model, statement and plots of a run that is complete; of a simulation, the curves only.

    What training was for comes first: the profile, which the statement is written again with, may
    take minutes. Until then the statement has the one that takes seconds, if there is one.
    """
    path = current.folder.path
    if current.simulation is None:
        export = current.task.export
        remove(path / export.name)  # of an earlier report
        export.write(
            current.outcome.model, path / export.name, None
        )  # whatever becomes of the rest
        guarantee = stated(current)
        export.write(current.outcome.model, path / export.name, guarantee)
        facts = run_facts(current)
        privacy_report(guarantee, path, profile=_budget_profile(current, guarantee), facts=facts)
    if current.settings.plots:
        plot_curves(current.folder.metrics(), path / "curves.png")
    if current.simulation is not None:
        return
    if current.settings.plots:
        curve = _profile(current, guarantee)
        plot_privacy(curve, guarantee, path / "privacy.png")
        privacy_report(guarantee, path, profile=curve, facts=facts)
    if current.history is not None:
        write_individual(
            current.history,
            path,
            steps=current.private.steps_executed,
            plots=current.settings.plots,
        )


def _profile(current: Run, guarantee: Guarantee) -> Profile:
    """δ(ε) of what gave the guarantee: the filter's budget, or the planned noise."""
    if (curve := _budget_profile(current, guarantee)) is not None:
        return curve
    if guarantee.kind in (Kind.EXACT, Kind.UPPER_BOUND):
        with contextlib.suppress(ValueError):  # where it takes minutes
            return profile_of(guarantee)
    # A single simulation or computation gives all points; beyond twice ε nobody looks.
    points = guarantee.epsilon * np.linspace(0, 2, 81)  # its own ε is one of them, to the bit
    mechanism = current.private.mechanism
    accountant = current.settings.build_accountant(mechanism)
    return profile(mechanism, points, accountant=accountant)


def _budget_profile(current: Run, guarantee: Guarantee) -> Profile | None:
    """δ(ε) of the budget of a filter, if that gave the guarantee."""
    individual = current.settings.build_filter()
    if individual is None or guarantee.accountant != individual.name:
        return None
    return filter_profile(current.private.stated_individual, guarantee)


def _final_evaluation(current: Run) -> dict[str, Any]:
    """On the whole test set after the last step; the loop has recorded it already."""
    steps = current.private.mechanism.steps
    for record in reversed(current.folder.metrics()):
        if record["split"] == current.task.evaluated_on and record["step"] == steps:
            return {name: v for name, v in record.items() if name not in MARKS}
    return evaluate(current.outcome)


def summary(current: Run, *, published: bool = False) -> str:
    """The text that the user reads at the end.

    Args:
        current: the run, complete.
        published: leave out what is not for release, and where the folder lies.
    """
    result = _final_evaluation(current)
    measured = ", ".join(f"{name} {value:.4f}" for name, value in result.items())
    count, examples = len(current.task.test), current.task.examples
    if current.task.evaluated_on == TEST:
        lines = [f"test {measured} on {count} held-out {examples}"]
    elif published:
        lines = [f"{count} {examples} of the training set were held out and not trained on"]
    else:
        lines = [
            f"held-out {measured} on {count} {examples} of the training set that were not trained "
            "on (not for release: no guarantee covers them)"
        ]
    lines += [*current.task.notes, ""]
    if current.simulation is not None:
        lines.append(Simulation(current.private.mechanism, current.simulation).describe())
        return "\n".join(lines)
    export = current.task.export
    lines += [
        str(stated(current)),
        "",
        f"everything is in {'this folder' if published else current.folder.path}: "
        f"{export.name} is the trained model "
        f"({export.how}), privacy_report.md the statement to publish with it; checkpoint.pt, "
        "ledger.jsonl and the training metrics are private",
    ]
    if current.settings.seed is not None:
        lines.append(
            "not for release: config.yaml holds the seed that you set, from which the noise can be "
            "drawn again and taken off; blank it before you publish the file"
        )
    if current.history is not None:
        lines.append(
            f"not for release: {INDIVIDUAL} holds what each example has spent, as you asked "
            "(individual.report)"
        )
    if current.private.nonfinite_examples and not published:
        lines.append(
            f"not for release: {current.private.nonfinite_examples} gradients were NaN or infinite "
            "and were left out"
        )
    return "\n".join(lines)


def document(current: Run) -> str:
    """The final text as one JSON object for programs; not for release as a whole.

    ``measured`` is of ``measured_on``, and may be released where that is the test set. Numbers that
    JSON has no way to write are texts ("inf").
    """
    simulated = current.simulation is not None
    seeded = current.settings.seed is not None
    value = {
        "folder": str(current.folder.path),
        "steps_executed": current.private.steps_executed,
        "steps_planned": current.private.mechanism.steps,
        "measured": _final_evaluation(current),
        "measured_on": current.task.evaluated_on,
        "measured_examples": len(current.task.test),
        "notes": list(current.task.notes),
        "simulation": simulated,
        "guarantee": None if simulated else json.loads(stated(current).to_json()),
        "model": None if simulated else str(current.folder.path / current.task.export.name),
        "not_for_release": {
            "nonfinite_gradients": current.private.nonfinite_examples,
            "seed_in_config": seeded,
        },
    }
    return json.dumps(_finite(value), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """The value with texts for infinite numbers and those that are none."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
