"""Audits: attempts to tell from what a run releases whether an example was in it."""

from dptrain.auditing.conformity import (
    Finding,
    check_noise,
    check_participations,
    power_against_scaled_noise,
)
from dptrain.auditing.counting import (
    Count,
    StatedCurve,
    count,
    count_epsilon,
    most_countable,
    power_of_counting,
)
from dptrain.auditing.draws import noises, participations
from dptrain.auditing.importance import DeltaEstimate, TiltedRuns, tilted_runs
from dptrain.auditing.intervals import least_mean, least_probability, most_probability
from dptrain.auditing.laws import Game, NoLikelihood, game_of
from dptrain.auditing.mechanism_audit import MechanismAudit, audit_mechanism
from dptrain.auditing.whitening import whitening_matrix

__all__ = [
    "Count",
    "DeltaEstimate",
    "Finding",
    "Game",
    "MechanismAudit",
    "NoLikelihood",
    "StatedCurve",
    "TiltedRuns",
    "audit_mechanism",
    "check_noise",
    "check_participations",
    "count",
    "count_epsilon",
    "game_of",
    "least_mean",
    "least_probability",
    "most_countable",
    "most_probability",
    "noises",
    "participations",
    "power_against_scaled_noise",
    "power_of_counting",
    "tilted_runs",
    "whitening_matrix",
]
