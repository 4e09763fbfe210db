"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes.

The accountants themselves are imported when somebody first asks for one.
"""

from typing import TYPE_CHECKING

from dptrain._on_demand import names_of
from dptrain.accounting.base.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.registry import (
    accountant_named,
    register_accountant,
    register_when_asked,
    registered_accountants,
)
from dptrain.accounting.base.trade_off import TradeOff
from dptrain.accounting.dispatch import (
    Calibration,
    account,
    accountants_for,
    calibrate,
    find_accountants,
    profile,
    trade_off,
)
from dptrain.accounting.restatement import (
    mechanism_of,
    profile_of,
    restate,
    stated_accountant,
)
from dptrain.accounting.so_far import SoFar, epsilon_so_far, priced_steps
from dptrain.accounting.unamplified import UnsampledGaussian

if TYPE_CHECKING:
    from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
    from dptrain.contrib.accountants import to_dp_event
    from dptrain.contrib.selection import (
        BudgetFilter,
        Charge,
        ChoicePrivacy,
        ComposedRuns,
        NegativeBinomialTrials,
        PoissonTrials,
        TrialCount,
        compose_runs,
        one_of_runs,
        select_run,
    )

__all__ = [
    "Accountant",
    "Availability",
    "BudgetFilter",
    "Calibration",
    "Charge",
    "ChoicePrivacy",
    "ComposedRuns",
    "Cost",
    "Curve",
    "DeterministicAccountant",
    "NegativeBinomialTrials",
    "PoissonTrials",
    "Profile",
    "SoFar",
    "TradeOff",
    "TrialCount",
    "UnsampledGaussian",
    "account",
    "accountant_named",
    "accountants_for",
    "calibrate",
    "compose_runs",
    "epsilon_so_far",
    "find_accountants",
    "group_curve",
    "last_iterate_curve",
    "mechanism_of",
    "one_of_runs",
    "priced_steps",
    "profile",
    "profile_of",
    "register_accountant",
    "registered_accountants",
    "restate",
    "select_run",
    "stated_accountant",
    "to_dp_event",
    "trade_off",
]

__getattr__, __dir__ = names_of(
    __name__,
    {
        "dptrain.accounting.poisson.groups": "group_curve last_iterate_curve",
        "dptrain.contrib.accountants": "to_dp_event",
        "dptrain.contrib.selection": (
            "BudgetFilter Charge ChoicePrivacy ComposedRuns NegativeBinomialTrials PoissonTrials "
            "TrialCount compose_runs one_of_runs select_run"
        ),
    },
)

# In the order in which tables show them; of those that simulate only the first to cover a mechanism
# answers by itself.
register_when_asked(
    ("dptrain.accounting.poisson", "PoissonPLD"),
    ("dptrain.accounting.balls_in_bins", "AllocationPLD"),
    ("dptrain.accounting.balls_in_bins", "BallsInBinsRenyi"),
    ("dptrain.accounting.balls_in_bins", "ConditionalComposition"),
    ("dptrain.accounting.mmcc", "MMCC"),
    ("dptrain.accounting.users", "UserPoissonPLD"),
    ("dptrain.accounting.users", "RevealedDraws"),
    ("dptrain.accounting.unamplified", "UnsampledGaussian"),
    ("dptrain.accounting.min_sep", "MinSepRenyi"),
    ("dptrain.accounting.balls_in_bins", "BallsInBinsImportance"),
    ("dptrain.accounting.min_sep", "MinSepImportance"),
    ("dptrain.contrib.accountants", "MinSepAnyMatrix"),
    ("dptrain.contrib.accountants", "AllocationImportance"),
    ("dptrain.accounting.users", "UserMinSepImportance"),
)
