"""The individual privacy filter of a run, from the ``individual`` group of its configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

from dptrain.configuration import members_of, named_type, stated_fields
from dptrain.individual import IndividualFilter

GROUP = "individual"
_RENAMED = {"epsilon": "target_epsilon", "delta": "target_delta"}  # here: there
COMMON = ("epsilon", "delta", "max_steps", "start", "report")  # stated for every type


@dataclasses.dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """Settings of the individual filter, and of the step at which it begins.

    Attributes:
        type: name of the filter's class.
        epsilon: that no example exceeds.
        delta: of it; ``None``: the run's.
        max_steps: bound of the number of steps; ``None``: the run's steps.
        start: T0, so many steps everybody can take part in with gradients of the full norm, and the
            noise follows from it; ``None``: the noise is stated.
        report: whether the run's folder gets what each example has spent.
        own: other fields of the type.
    """

    type: str
    epsilon: float
    delta: float | None
    max_steps: int | None
    start: int | None
    report: bool
    own: dict[str, Any]

    @classmethod
    def read(cls, group: Mapping[str, Any]) -> Self | None:
        """The settings of a configuration's group; ``None`` if its type is null: no filter.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        if group.get("type") is None:
            stated = {name: value for name, value in group.items() if value is not None}
            if stated:
                name, value = next(iter(stated.items()))
                raise ValueError(
                    f"{GROUP}.{name}={value!r} with {GROUP}.type=null: without a filter there is "
                    f"nothing to set; name one in {GROUP}.type, or take the field out"
                )
            return None
        member = named_type(GROUP, group, _with_a_target())
        fields = _fields(member)
        own = [name for name in fields if name not in (*_RENAMED.values(), "max_steps")]
        given = stated_fields(GROUP, group, allowed=[*COMMON, *own], required=["epsilon"])
        report, start = given.get("report", False), given.get("start")
        if not isinstance(report, bool):
            raise ValueError(f"{GROUP}.report={report!r}: true or false")
        if start is not None:
            if isinstance(start, bool) or not isinstance(start, int) or start < 1:
                raise ValueError(
                    f"{GROUP}.start={start!r}: a number of steps, at least 1, or null with "
                    "privacy.noise_multiplier stated"
                )
            if not hasattr(member, "noise_multiplier"):
                raise ValueError(
                    f"{GROUP}.start={start} with {GROUP}.type={member.__name__}: the noise follows "
                    "from start with full batches only (GDPFilter); set start to null and state "
                    "privacy.noise_multiplier"
                )
        return cls(
            type=member.__name__,
            epsilon=given["epsilon"],
            delta=given.get("delta"),
            max_steps=given.get("max_steps"),
            start=start,
            report=report,
            own={name: given[name] for name in own if name in given},
        )

    def check_noise(
        self, *, epsilon: float | None, noise_multiplier: float | None, delta: float | None
    ) -> None:
        """Refuse what contradicts the ``privacy`` group, whose fields these are.

        Raises:
            ValueError: naming the fields, the values and the remedy.
        """
        if epsilon is not None:
            raise ValueError(
                f"privacy.epsilon={epsilon} with {GROUP}.type={self.type}: the filter holds the "
                f"target, {GROUP}.epsilon={self.epsilon}; set privacy.epsilon to null"
            )
        if (self.start is None) == (noise_multiplier is None):
            raise ValueError(
                f"{GROUP}.start={self.start} and privacy.noise_multiplier={noise_multiplier}: give "
                "exactly one (the noise follows from start) and set the other to null"
            )
        if None not in (delta, self.delta) and delta != self.delta:
            raise ValueError(
                f"privacy.delta={delta} and {GROUP}.delta={self.delta}: a run has one δ; set one "
                "of them to null"
            )

    def build(self, *, delta: float, steps: int) -> IndividualFilter:
        """The filter of a run of so many steps.

        Args:
            delta: of the run; the filter's where that is null.
            steps: of the run; the filter's bound where that is null.

        Raises:
            ValueError: if a value is out of range, or filtering would begin after the last step.
        """
        if self.start is not None and self.start > steps:
            raise ValueError(
                f"{GROUP}.start={self.start}: the run has {steps} steps, so nothing would be "
                "filtered, and the noise would be more than its target needs; use at most "
                f"{steps}, or more steps"
            )
        return IndividualFilter.from_dict(
            {
                "type": self.type,
                "target_epsilon": self.epsilon,
                "target_delta": delta if self.delta is None else self.delta,
                "max_steps": steps if self.max_steps is None else self.max_steps,
                **self.own,
            }
        )

    def noise_multiplier(self, built: IndividualFilter) -> float | None:
        """σ that follows from ``start``; ``None`` where it is stated."""
        if self.start is None:
            return None
        return built.noise_multiplier(self.start)  # type: ignore[attr-defined]


def _with_a_target() -> dict[str, type]:
    """The filters to choose from: not an odometer, whose rounds nobody would open in a recipe."""
    members = members_of(IndividualFilter)
    return {name: kind for name, kind in members.items() if "target_epsilon" in _fields(kind)}


def _fields(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]
