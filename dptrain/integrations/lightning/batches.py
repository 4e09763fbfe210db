"""The private batches that Lightning's fit loop is given in place of the user's data loader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dptrain.sampling import PrivateLoader


class CountedBatches:
    """The private loader as Lightning counts: an epoch has as many batches wherever it begins.

    Lightning asks for the length once, before anything runs, and after a resume counts the batches
    that are done against it. It may also ask for an iterator long before the first batch, so that
    the private loader is asked only with that.

    Args:
        length: batches of an epoch, parts of logical ones being batches of their own.
        loader: gives the private loader; called with the first batch of an iteration.
    """

    of_a_run = True  # no state of a module that holds it

    def __init__(self, length: int, loader: Callable[[], PrivateLoader]) -> None:
        self._length, self._loader = length, loader

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader()

    # Lightning takes a loader with these two for one that goes on in the middle of an epoch, as
    # this one does: its position is a part of the private state.
    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the position is in the private run's state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing, likewise."""


class BatchSource:
    """The source of the fit loop's training data, in the place of Lightning's own record.

    Args:
        own: Lightning's, which says what the user gave: loaders, or a module with a hook for them.
        batches: gives the private ones; called when the loop first asks.
    """

    def __init__(self, own: Any, batches: Callable[[], CountedBatches]) -> None:
        self.own, self._batches = own, batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def dataloader(self) -> CountedBatches:
        """The private batches."""
        return self._batches()
