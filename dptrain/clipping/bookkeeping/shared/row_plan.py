"""Record of which tensors have rows of the batch, and which are the same for all examples."""

from __future__ import annotations

from collections.abc import Hashable

NEITHER = -1
_NONE: frozenset[int] = frozenset()
Shape = tuple[int, ...]


class RowPlan:
    """The sizes that one layer meets, as passes over few rows showed them.

    A first dimension of the batch's length may be the examples', or that of something all share
    (positions, windows, heads) which has as many entries by chance. So its size is noted for two
    numbers of rows (``watch``, ``settle``): what follows them is by examples, k rows each, and what
    stays is shared. Without such passes only the size at hand tells.

    Attributes:
        found: by place, the ways in which sizes followed the rows in the last such passes.
        tentative: whether these are the first such passes, which can only guess.
    """

    def __init__(self) -> None:
        self._before: dict[Hashable, frozenset[int]] = {}  # what earlier probes showed
        self.found: dict[Hashable, frozenset[int]] = {}
        self._shared: dict[Hashable, set[Shape]] = {}  # shapes that stayed
        # Shapes for one number of rows, where the module took no other.
        self._once: dict[Hashable, set[tuple[int, Shape]]] = {}
        self._second: dict[Hashable, bool] = {}  # where the second dimension follows, see second()
        self._second_before: dict[Hashable, bool] = {}
        self._noted: dict[Hashable, set[tuple[int, Shape]]] | None = None
        self._known: dict[Hashable, frozenset[int]] = {}  # what all probes showed
        self.tentative = False

    @property
    def watching(self) -> bool:
        """True if sizes are noted."""
        return self._noted is not None

    @property
    def settled(self) -> bool:
        """True if such passes are over that showed what follows the rows."""
        return self._noted is None and bool(self._before or self.found)

    def watch(self, *, anew: bool = True) -> None:
        """Note sizes from now on.

        Args:
            anew: whether this is for other inputs; otherwise what is found replaces what was found
                by the last such passes, which may have gone another way for want of it.
        """
        if anew:
            self._before, self.found = self._known, {}
            self._second_before = {place: self.second(place) for place in self._second}
        self.tentative = anew
        self._noted = {}

    def settle(self) -> None:
        """Tell what follows the rows from what was noted for several numbers of them."""
        noted, self._noted = self._noted or {}, None
        self.tentative = False
        for place, sizes in noted.items():
            if len({rows for rows, _ in sizes}) > 1:
                self.found[place] = _factors(sizes)
                self._second[place] = self.found[place] == {NEITHER} and _follow_second(sizes)
                self._shared.setdefault(place, set()).update(_stayed(sizes))
            else:
                self._once.setdefault(place, set()).update(sizes)
        self._known = {
            place: self._before.get(place, _NONE) | self.found.get(place, _NONE)
            for place in {*self._before, *self.found}
        }

    def factor(self, place: Hashable, shape: Shape, rows: int) -> int | None:
        """Number of entries of the first dimension that each row of the batch has.

        Args:
            place: of the tensor among those that the layer meets.
            rows: that the model is fed.

        Returns:
            0 for what all rows share; ``None`` if nothing was seen of this place; ``NEITHER`` for a
            tensor that may be either, or none that was seen.
        """
        if self._noted is not None:
            self._noted.setdefault(place, set()).add((rows, tuple(shape)))
        known = (self._known if self._noted is None else self.found).get(place)
        if not known:
            return None
        for factor in known:
            if factor > 0 and factor * rows == shape[0]:
                return NEITHER if 0 in known else factor
        return 0 if 0 in known else NEITHER

    def second(self, place: Hashable) -> bool:
        """True if the second dimension was the rows in all such passes, and never the first."""
        return self._second.get(place, False) and self._second_before.get(place, True)

    def state(self) -> tuple[dict[Hashable, frozenset[int]], dict[Hashable, bool]]:
        """The findings of the last such passes."""
        return dict(self.found), dict(self._second)

    def ambiguous(self, place: Hashable, shape: Shape, rows: int) -> bool:
        """True if a tensor of this shape may be the examples', or one that all share.

        Both were seen in this place, what they share in this very shape, or in shapes of several
        lengths, of which this may be another.
        """
        if self._noted is not None or not self._shared.get(place):
            return False
        if not any(k > 0 and k * rows == shape[0] for k in self._known.get(place, _NONE)):
            return False
        lengths = {s[0] for s in self._shared.get(place, ()) if s[1:] == tuple(shape[1:])}
        return shape[0] in lengths or len(lengths) > 1

    def stayed_once(self, place: Hashable, shape: Shape, rows: int) -> bool:
        """True if this shape was seen for another number of rows, which the module did not take."""
        once = self._once.get(place, ())
        return any(other != rows and s == tuple(shape) for other, s in once)

    def unseen(self, place: Hashable, shape: Shape, rows: int) -> bool:
        """True if rows were seen in this place, and never so many of them for each of the batch."""
        found = False
        for factor in self._known.get(place, _NONE):
            if factor > 0:
                found = True
                if factor * rows == shape[0]:
                    return False
        return found


def _follow_second(shapes: set[tuple[int, Shape]]) -> bool:
    """True if the second dimension has the rows, whatever their number is."""
    return all(len(shape) > 1 and shape[1] == rows for rows, shape in shapes)


def _stayed(shapes: set[tuple[int, Shape]]) -> set[Shape]:
    """Shapes that were there for every number of rows."""
    counts = {rows for rows, _ in shapes}
    return {s for _, s in shapes if all((rows, s) in shapes for rows in counts)}


def _factors(shapes: set[tuple[int, Shape]]) -> frozenset[int]:
    """The ways in which shapes followed the rows, as (rows, shape); one of them explains each.

    What all share has the same shape whatever the rows are.
    """
    counts = {rows for rows, _ in shapes}
    lengths = {(rows, shape[0]) for rows, shape in shapes}
    found: set[int] = set()
    for rows, shape in shapes:
        factor = shape[0] // rows
        if all((other, shape) in shapes for other in counts):
            found.add(0)
        elif factor and all((other, factor * other) in lengths for other in counts):
            found.add(factor)
        else:
            found.add(NEITHER)
    return frozenset(found)
