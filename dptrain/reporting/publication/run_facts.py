"""The facts of a run that a statement tells beside its guarantee: the word of whoever trained."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from dptrain.accounting import ChoicePrivacy
from dptrain.core import checks

TRUSTED = (
    "the central model: whoever trains sees the raw data, is trusted with them, and with the "
    "machine that they are on, its memory and its disks"
)
RELEASED = ("the trained model", "this statement")
WITHHELD = (
    "checkpoints, seeds and states of generators, from which the noise can be taken off",
    "which examples were drawn, sizes of batches, and metrics of training batches",
    "any other model or number that was computed from the data without noise",
)

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts of a run that do not follow from its mechanism; what is left out is *not stated*.

    None of this is verified: ``dptrain verify`` says so of each.

    A plain hash of private data must not be published: whoever knows all records but one can try
    candidates for it until the hash agrees, and no noise protects against that. So the data set
    is told by name and version, and at most by a commitment under a secret key.

    Attributes:
        trusted: who is trusted with what.
        released: what may be published.
        withheld: what must not be.
        max_grad_norm: R > 0, the norm that gradients are clipped to.
        clipping: how.
        optimizer: what took the noisy gradients.
        augmentation: what was done to examples before the model.
        runs: how many runs on these data whoever chose this one looked at or, where a choice is
            stated, had planned, itself included.
        choice: what all of that promises together, from ``dptrain.accounting``.
        public_data: data that count as public, such as those that the model saw before.
        public_weights: weights that the training began with.
        commit: of the code.
        configuration: SHA-256 of the configuration, without seeds: a short seed can be guessed
            from a hash.
        data: name and version of the data set.
        model: name of the model, with its version.
        organization: whose model it is.
        data_commitment: HMAC-SHA256 (hex) of the data under a secret key of 32 random bytes, by
            which an auditor who is given data and key can tell that these were they.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if a text is empty, a number out of range, or a hash no hash.
    """

    trusted: str = TRUSTED
    released: tuple[str, ...] = RELEASED
    withheld: tuple[str, ...] = WITHHELD
    max_grad_norm: float | None = None
    clipping: str | None = None
    optimizer: str | None = None
    augmentation: str | None = None
    runs: int | None = None
    choice: ChoicePrivacy | None = None
    public_data: str | None = None
    public_weights: str | None = None
    commit: str | None = None
    configuration: str | None = None
    data: str | None = None
    data_commitment: str | None = None
    model: str | None = None
    organization: str | None = None

    def __post_init__(self) -> None:
        _check_text("trusted", self.trusted)
        for name in ("released", "withheld"):
            for each in checks.instance(name, getattr(self, name), tuple):
                _check_text(name, each)
        for name in _TEXTS:
            if getattr(self, name) is not None:
                _check_text(name, getattr(self, name))
        if self.max_grad_norm is not None:
            checks.number("max_grad_norm", self.max_grad_norm, above=0)
        if self.runs is not None:
            checks.integer("runs", self.runs)
        if self.choice is not None:
            checks.instance("choice", self.choice, ChoicePrivacy)
        for name in ("configuration", "data_commitment"):
            value = getattr(self, name)
            if value is not None and not _HEX.fullmatch(value):
                raise ValueError(
                    f"{name}={value!r}: must be a SHA-256 hash of 64 hexadecimal digits"
                )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready value, of which ``None`` is what was not stated."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        choice = None
        if self.choice is not None:
            choice = {"sentence": str(self.choice), **self.choice.to_dict()}
        return {
            **value,
            "released": list(self.released),
            "withheld": list(self.withheld),
            "choice": choice,
        }


_TEXTS = (
    *("clipping", "optimizer", "augmentation", "public_data", "public_weights"),
    *("commit", "configuration", "data", "data_commitment", "model", "organization"),
)
_NAMES = {
    "model": "model",
    "organization": "organization",
    "max_grad_norm": "clipping norm R",
    "clipping": "clipping",
    "optimizer": "optimizer",
    "augmentation": "augmentation",
    "runs": "runs that the choice looked at",
    "public_data": "public data",
    "public_weights": "public weights",
    "commit": "commit of the code",
    "configuration": "SHA-256 of the configuration",
    "data": "data set",
    "data_commitment": "commitment to the data",
}


def _check_text(name: str, value: Any) -> None:
    if not checks.text(name, value).strip():
        raise ValueError(f"{name}={value!r} is empty: leave it out if there is nothing to state")


def rows_of_facts(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts (``RunFacts.to_dict``) as rows of a table, those not stated too."""
    return [
        (shown, "not stated" if facts[name] is None else str(facts[name]))
        for name, shown in _NAMES.items()
    ]
