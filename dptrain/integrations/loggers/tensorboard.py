"""Figures for TensorBoard: event files in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping

from dptrain.integrations.loggers.tool import Place, Tool, missing

NAME = "tensorboard"


class TensorBoard(Tool):
    """Event files in ``tensorboard/``."""

    def __init__(self, place: Place) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing(NAME, "tensorboard") from error
        self._began = place.began
        self._writer = SummaryWriter(str(place.own(NAME)), purge_step=place.steps + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """One scalar each, all stamped with the time at which the run began."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=self._began)

    def close(self) -> None:
        """Flush and close the files."""
        self._writer.close()
