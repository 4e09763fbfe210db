"""The scheme and strategy to train with: compared at equal privacy before any training."""

from dptrain.planning.amplified import AmplifiedChoice, amplified_band_mf
from dptrain.planning.candidates import Candidate
from dptrain.planning.comparison import compare
from dptrain.planning.configuration_text import training_yaml
from dptrain.planning.footprints import Footprint, footprint
from dptrain.planning.plan import Plan, PlanRow, Skipped
from dptrain.planning.plots import plot_plan, plot_strategies, plot_user_plan
from dptrain.planning.question import DEFAULT_BANDS, Question
from dptrain.planning.strategy_table import StrategyTable, compare_strategies
from dptrain.planning.user_plan import UserPlan, UserRow
from dptrain.planning.users import BOUNDS, plan_users

__all__ = [
    "BOUNDS",
    "DEFAULT_BANDS",
    "AmplifiedChoice",
    "Candidate",
    "Footprint",
    "Plan",
    "PlanRow",
    "Question",
    "Skipped",
    "StrategyTable",
    "UserPlan",
    "UserRow",
    "amplified_band_mf",
    "compare",
    "compare_strategies",
    "footprint",
    "plan_users",
    "plot_plan",
    "plot_strategies",
    "plot_user_plan",
    "training_yaml",
]
