"""Audits: attempts to tell from what a run releases whether an example was in it."""

from dptrain.auditing.canaries import CanaryAudit, CanaryRun, audit_canaries, run_canaries
from dptrain.auditing.conformity import Finding, check_noise, check_participations
from dptrain.auditing.counting import Count, StatedCurve, count, count_epsilon, most_countable
from dptrain.auditing.draws import noises, participations
from dptrain.auditing.final_model import FinalModelAudit, audit_final_model
from dptrain.auditing.importance import DeltaEstimate, TiltedRuns, tilted_runs
from dptrain.auditing.intervals import least_mean, least_probability, most_probability
from dptrain.auditing.laws import Game, NoLikelihood, game_of, whitening_matrix
from dptrain.auditing.mechanism_audit import MechanismAudit, audit_mechanism
from dptrain.auditing.one_run import (
    OneRun,
    audit_one_run,
    one_run_curve_p_value,
    one_run_p_value,
)
from dptrain.auditing.planted import Marked, Planted, plant_canaries
from dptrain.auditing.plots import plot_audit, plot_canaries
from dptrain.auditing.users import (
    NeighborGame,
    UserCanaryRun,
    UserGame,
    audit_users,
    run_user_canaries,
    user_game,
)

__all__ = [
    "CanaryAudit",
    "CanaryRun",
    "Count",
    "DeltaEstimate",
    "FinalModelAudit",
    "Finding",
    "Game",
    "Marked",
    "MechanismAudit",
    "NeighborGame",
    "NoLikelihood",
    "OneRun",
    "Planted",
    "StatedCurve",
    "TiltedRuns",
    "UserCanaryRun",
    "UserGame",
    "audit_canaries",
    "audit_final_model",
    "audit_mechanism",
    "audit_one_run",
    "audit_users",
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
    "one_run_curve_p_value",
    "one_run_p_value",
    "participations",
    "plant_canaries",
    "plot_audit",
    "plot_canaries",
    "run_canaries",
    "run_user_canaries",
    "tilted_runs",
    "user_game",
    "whitening_matrix",
]
