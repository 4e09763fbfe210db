"""A search of a secret, random number of runs at points drawn from a grid."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Sequence

from dptrain.accounting import NegativeBinomialTrials, PoissonTrials, TrialCount
from dptrain.reporting import STATEMENT, STATEMENT_TEXT
from recipes.runfolder import CONFIG, MODEL, SUMMARY, WEIGHTS

DRAWN = "SECRET_trials.json"
CHOSEN = "chosen"  # what may be released
RUNS = "SECRET_runs"
README = "SECRET.txt"
LAWS = ("geometric", "logarithmic", "poisson")
_PUBLISHED = (CONFIG, SUMMARY, WEIGHTS, MODEL, STATEMENT, STATEMENT_TEXT)
_WARNING = (
    f"Nothing in this folder is for release but the folder {CHOSEN}: neither other runs and their "
    "scores, nor how many there were, nor when they ran. The statement about the choice does not "
    "hold if they are, or if the number is drawn again because it was not to your liking.\n"
)


def law(name: str, mean: float) -> TrialCount:
    """The law of the number of runs by its name and mean.

    Raises:
        ValueError: if the mean is out of range.
    """
    try:
        if name == "poisson":
            return PoissonTrials(mean)
        return NegativeBinomialTrials.with_mean(mean, shape=1.0 if name == "geometric" else 0.0)
    except ValueError as error:
        raise ValueError(f"--trials {mean:g}: {error}") from error


def drawn(
    output: pathlib.Path, points: Sequence[str], trials: TrialCount, settings: str
) -> list[tuple[str, pathlib.Path]]:
    """The points that are run, each with its folder: drawn at the first call, then read again.

    Number and points come from the operating system's entropy, and are written before the first
    run begins. Folders have random names, which tell no order.

    Args:
        output: folder of the search.
        points: names of the points of the grid.
        trials: the law of their number.
        settings: what the runs' settings are recognized by.

    Raises:
        ValueError: if others were drawn here, from another grid or law.
    """
    path = output / DRAWN
    asked = {"trials": trials.to_dict(), "points": list(points), "settings": settings}
    if not path.exists():
        chosen = [
            {"point": secrets.choice(points), "folder": secrets.token_hex(8)}
            for _ in range(trials.draw())
        ]
        temporary = path.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        with open(temporary, "w", encoding="utf-8", opener=_for_owner) as file:
            json.dump({**asked, "drawn": chosen}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        (output / README).write_text(_WARNING, encoding="utf-8")
        temporary.replace(path)
    value = json.loads(path.read_text(encoding="utf-8"))
    if {name: value[name] for name in asked} != asked:
        raise ValueError(
            f"{path} holds runs that were drawn from another grid, or by another law of their "
            "number; put that back, or search in another folder (both searches then count)"
        )
    return [(each["point"], output / RUNS / each["folder"]) for each in value["drawn"]]


def publish(run: pathlib.Path, output: pathlib.Path) -> pathlib.Path:
    """Copy what may be released of the best run into the folder ``chosen``."""
    chosen = output / CHOSEN
    if chosen.exists():
        shutil.rmtree(chosen)
    chosen.mkdir()
    for name in _PUBLISHED:
        if (run / name).is_dir():
            shutil.copytree(run / name, chosen / name, copy_function=shutil.copyfile)
        elif (run / name).exists():
            shutil.copyfile(run / name, chosen / name)
    return chosen


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
