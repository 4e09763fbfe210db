"""A statement's first page: plain sentences, for somebody who decides and does no mathematics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dptrain.accounting import TradeOff
from dptrain.core import Guarantee, Kind, capital

_RATE = 0.01


def plain_words(
    guarantee: Guarantee, limits: TradeOff, facts: Mapping[str, Any] | None, date: str
) -> list[tuple[str, str]]:
    """Questions and answers, in order.

    Args:
        limits: what an attack can reach.
        facts: ``RunFacts.to_dict``, or ``None`` if nothing was said.
        date: when the statement was written, YYYY-MM-DD.
    """
    found = [
        *_subject(facts or {}),
        ("When this was stated", f"On {date} (year, month and day, in UTC)."),
        ("What is promised", _promise(guarantee)),
        ("Who is protected", capital(guarantee.unit.protected(guarantee.adjacency)) + "."),
        ("How strong that is", _strength(guarantee, limits)),
        ("How sure that is", _sure(guarantee)),
    ]
    if facts is not None:
        found += [
            ("Who has to be trusted", capital(str(facts["trusted"])) + "."),
            ("What may be published", capital("; ".join(facts["released"])) + "."),
            ("What must not be published", capital("; ".join(facts["withheld"])) + "."),
            ("Whether this run was chosen among several", _choice(facts)),
            ("What else went into the model", _public(facts)),
        ]
    found.append(
        (
            "How to check this",
            "`dptrain verify` with the JSON file beside this text computes the numbers again and "
            "reports which fields follow from them. No file can show that the training was as "
            "described.",
        )
    )
    return found


def _subject(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, organization = facts.get("model"), facts.get("organization")
    if model is None and organization is None:
        return []
    name = "a model" if model is None else f"the model “{model}”"
    whose = "" if organization is None else f" of “{organization}”"
    return [("Which model it is about", f"It was stated that it is about {name}{whose}.")]


def _promise(guarantee: Guarantee) -> str:
    if not math.isfinite(guarantee.epsilon) or guarantee.delta >= 1:
        return "Nothing."
    does = "is meant to limit" if guarantee.kind is Kind.ESTIMATE else "limits"
    return (
        f"A model was trained on data, with random noise added. The noise {does} how well anyone "
        f"who studies what is published can determine what one {guarantee.unit.noun} contributed; "
        "the limit is stated below. The model may reveal what it learned from all of the data "
        "together, and conclusions about a person that follow from this do not break the promise."
    )


def _strength(guarantee: Guarantee, limits: TradeOff) -> str:
    if not math.isfinite(guarantee.epsilon) or guarantee.delta >= 1:
        return "There is no bound on what an attacker learns."
    numbers = f"The parameters are ε = {guarantee.epsilon:.6g} and δ = {guarantee.delta:.6g}."
    if len(limits.epsilon) == 1:
        numbers = f"This follows from ε and δ alone and may be far above the truth. {numbers}"
    rate = max(_RATE, limits.floor)
    most = float(limits.true_positive_rate(rate))
    sure = "at most" if guarantee.kind is not Kind.ESTIMATE else "by an unproven estimate"
    return (
        "Suppose an attacker has everything that is published and all of the data except one "
        "contribution, and tests whether that contribution was used in training. If the test "
        f"raises a false alarm for {100 * rate:.3g} % of the contributions that were not used, it "
        f"detects {sure} {_up(most)} of those that were; without the model it would detect "
        f"{100 * rate:.3g} %. {numbers}"
    )


def _up(rate: float) -> str:
    """A rate in percent, two digits after the point, rounded up."""
    return f"{min(100.0, math.ceil(rate * 1e4) / 100):.4g} %"


def _sure(guarantee: Guarantee) -> str:
    if guarantee.kind is Kind.ESTIMATE:
        return "This is an estimate without proof. It must not be published as a guarantee."
    chance = (guarantee.certificate or {}).get("failure_probability")
    known = guarantee.kind is Kind.CONFIDENCE and isinstance(chance, int | float)
    return (
        f"The numbers are {guarantee.kind.sentence}, provided that training was as described here "
        f"and the conditions below hold.{f' That probability is {chance:.2g}.' if known else ''}"
    )


def _choice(facts: Mapping[str, Any]) -> str:
    runs, choice = facts["runs"], facts["choice"]
    if choice is not None:
        return f"{choice['sentence']} The numbers above apply to this run alone."
    if runs is None:
        return (
            "It was not stated how many runs on these data were examined. If there were others, "
            "the promise above does not cover the choice among them."
        )
    if runs == 1:
        return "It was stated that no other run on these data was examined."
    return (
        f"It was stated that {runs} runs on these data were examined. The promise above covers "
        "this run and not the choice among them; `dptrain compose` states what all planned runs "
        "promise together."
    )


def _public(facts: Mapping[str, Any]) -> str:
    data, weights = facts["public_data"], facts["public_weights"]
    told = [
        "It was not stated whether data treated as public were used"
        if data is None
        else f"Data treated as public: {data}",
        "It was not stated from which weights training started"
        if weights is None
        else f"Weights from which training started: {weights}",
        "Information about people in these data and weights is not protected by this promise",
    ]
    return ". ".join(each.rstrip(".") for each in told) + "."
