"""The figures of a run for whoever records them: what may be released, unless asked for more."""

from __future__ import annotations

import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from dptrain.core import checks
from dptrain.engine import PrivateTraining
from dptrain.integrations.loggers.tools import (
    MLflow,
    Place,
    TensorBoard,
    Tool,
    WeightsAndBiases,
    missing,
)
from dptrain.reporting import MARK

# By name: the class, and the packages that it takes.
_KINDS: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "tensorboard": (TensorBoard, ("tensorboard",)),
    "wandb": (WeightsAndBiases, ("wandb",)),
    "mlflow": (MLflow, ("mlflow", "sqlalchemy", "alembic")),
}

TOOLS = tuple(_KINDS)
"""Loggers that there are by name."""

Function = Callable[[Mapping[str, float], int], object]


class RunLoggers:
    """Sends figures of a private run to loggers, together with where the run stands.

    ``released`` takes what may leave the trainer's hands: measurements of the model on data of
    people whom the guarantee need not protect, as a public test set. With them go the step, the
    learning rate, the planned ε and, where it is cheap to know, ε of the steps so far. ``private``
    takes whatever is computed from training examples or counts them (losses of training batches,
    norms of gradients, sizes of batches): no guarantee covers it, and it is dropped here unless
    ``private_metrics=True`` asks for it.

    Steps per second are not sent: how long a step takes follows from how many examples it drew,
    which most schemes keep secret. In a run of several ranks the first one logs.

    Args:
        run: what ``make_private`` returned.
        tools: names (``"tensorboard"``, ``"wandb"``, ``"mlflow"``), ``Tool``s, or functions of the
            figures by name and the step.
        folder: of the run, in which each tool by name has a folder of its own.
        facts: public settings to show beside the figures; by default those of the mechanism. Seeds
            are no public settings.
        private_metrics: also send what is not for release, under names that say so.
        not_covered: the run is no private one (a simulation, say), so that nothing that it
            measures may be released: ``released`` is then taken as ``private``.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: for a name that is unknown.
        ImportError: naming the package that a tool lacks.

    Example:
        >>> with RunLoggers(run, ["tensorboard", "wandb"], folder="runs/first") as loggers:
        ...     for images, labels in run.loader:
        ...         ...
        ...         if run.steps_executed % 100 == 0:
        ...             loggers.released({"accuracy": accuracy(module, test_set)}, part="test")
    """

    def __init__(
        self,
        run: PrivateTraining,
        tools: Sequence[str | Tool | Function],
        *,
        folder: str | pathlib.Path,
        facts: Mapping[str, Any] | None = None,
        private_metrics: bool = False,
        not_covered: bool = False,
    ) -> None:
        self._run = checks.instance("run", run, PrivateTraining, example="make_private(...)")
        self._sends_private = checks.flag("private_metrics", private_metrics)
        self._covered = not checks.flag("not_covered", not_covered)
        self._tools: list[Tool] = []
        if isinstance(tools, str):
            raise TypeError(f"tools={tools!r} must be a list, such as [{tools!r}]")
        for tool in tools:
            if isinstance(tool, str):
                checks.choice("tools", tool, TOOLS)
            elif not isinstance(tool, Tool) and not callable(tool):
                raise TypeError(
                    f"tools holds a {type(tool).__name__}: must be one of {', '.join(TOOLS)}, a "
                    "Tool, or a function of figures and step"
                )
        if run.optimizer.shared.ranks.rank:
            return
        told = _facts(run, covered=self._covered) if facts is None else facts
        place = Place(folder=pathlib.Path(folder), facts=told, steps=run.steps_executed)
        try:
            for tool in tools:
                self._tools.append(_opened(tool, place))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def released(self, values: Mapping[str, float], *, part: str = "test") -> None:
        """Send measurements that may be released, and where the run stands.

        Args:
            values: by name.
            part: of the data that they were measured on; never training data.
        """
        if not self._covered:
            self.private(values, part=part)
            return
        self._send({f"{name}/{part}": value for name, value in values.items()} | self._standing())

    def private(self, values: Mapping[str, float], *, part: str = "train") -> None:
        """Send figures that are not for release, if that was asked for; else do nothing.

        Args:
            values: by name.
            part: of the data that they were measured on.
        """
        if self._sends_private:
            self._send({f"{name}/{part} ({MARK})": value for name, value in values.items()})

    def close(self) -> None:
        """End the records; further calls do nothing."""
        while self._tools:
            self._tools.pop().close()

    def _standing(self) -> dict[str, float]:
        rate = float(self._run.optimizer.param_groups[0]["lr"])
        figures = self._run.so_far().figures
        return {f"run/{name}": value for name, value in {"learning_rate": rate, **figures}.items()}

    def _send(self, values: Mapping[str, float]) -> None:
        if not self._tools:
            return
        plain = {name: float(value) for name, value in values.items()}
        for tool in self._tools:
            tool.log(plain, self._run.steps_executed)


def check_installed(tools: Sequence[str]) -> None:
    """Find out before a run is made whether the loggers of these names can be opened.

    Raises:
        ImportError: naming the package that is missing.
    """
    for tool in tools:
        for package in _KINDS[tool][1]:
            if importlib.util.find_spec(package) is None:
                raise missing(tool, package)


class _Called(Tool):
    """A function as a tool."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Call it."""
        self._function(values, step)


def _opened(tool: str | Tool | Function, place: Place) -> Tool:
    if isinstance(tool, str):
        opened: Tool = _KINDS[tool][0](place)
        return opened
    return tool if isinstance(tool, Tool) else _Called(tool)


def _facts(run: PrivateTraining, *, covered: bool) -> dict[str, Any]:
    """The mechanism in short; the statement of the run has all its fields."""
    mechanism = run.mechanism
    facts: dict[str, Any] = {
        "scheme": mechanism.scheme.published()["type"],
        "strategy": mechanism.strategy.to_dict()["type"],
        "noise_multiplier": mechanism.noise_multiplier,
        "steps": mechanism.steps,
        "max_grad_norm": run.optimizer.max_grad_norm,
        "mechanism_hash": mechanism.hash,
    }
    return facts if covered else {**facts, "not_private": True}
