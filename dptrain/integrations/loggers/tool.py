"""What takes figures, and what every tool needs to know of its run."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where and for what run a tool keeps its record.

    Attributes:
        folder: of the run; the tool has a folder of its own in it.
        facts: settings to show beside the curves; public.
        steps: that had run when it was opened: what was logged of later ones will come again.
        began: seconds since 1970, the one time that all figures are stamped with where the tool
            lets itself be told: from the time between two records follows how much work the steps
            between them were, and so how many examples they drew.
    """

    folder: pathlib.Path
    facts: Mapping[str, Any]
    steps: int = 0
    began: float = dataclasses.field(default_factory=time.time)

    def own(self, name: str) -> pathlib.Path:
        """The folder of the tool of this name, made now."""
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path


class Tool(ABC):
    """Takes the figures of a run. A plain function of ``values`` and ``step`` will do as well."""

    @abstractmethod
    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take figures, ``name/part`` each, after so many steps."""

    def close(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Write what is left."""


def missing(name: str, package: str) -> ImportError:
    """What to install for a logger."""
    return ImportError(
        f"the logger {name!r} needs the package {package}, which is not installed: pip install "
        f'"dptrain[loggers]", or leave {name!r} out'
    )
