"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.balls_in_bins import (
    AllocationImportance,
    AllocationMonteCarlo,
    AllocationPLD,
    BallsInBinsImportance,
    BallsInBinsMonteCarlo,
    BallsInBinsRenyi,
    ConditionalComposition,
    RandomAllocationRenyi,
)
from dptrain.accounting.base.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.registry import (
    accountant_named,
    register_accountant,
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
from dptrain.accounting.dp_event import to_dp_event
from dptrain.accounting.min_sep import (
    AnyMatrixMonteCarlo,
    MinSepImportance,
    MinSepMonteCarlo,
    MinSepRenyi,
    TruncatedMinSepImportance,
    TruncatedMinSepMonteCarlo,
    TruncatedMinSepRenyi,
)
from dptrain.accounting.mmcc import MMCC
from dptrain.accounting.poisson import (
    CyclicPoissonPLD,
    PoissonPLD,
    TruncatedPoissonPLD,
)
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
from dptrain.accounting.restatement import (
    mechanism_of,
    profile_of,
    restate,
    stated_accountant,
)
from dptrain.accounting.selection import (
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
from dptrain.accounting.so_far import SoFar, epsilon_so_far, priced_steps
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.accounting.users import (
    ExposedSteps,
    ExposedStepsImportance,
    RevealedDraws,
    RevealedDrawsAnyBlocking,
    UserCyclicPLD,
    UserMinSepImportance,
    UserMinSepMonteCarlo,
    UserPoissonPLD,
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

# In the order in which tables show them; of those that simulate only the first to cover a mechanism
# answers by itself.
for _accountant in (
    PoissonPLD(),
    TruncatedPoissonPLD(),
    CyclicPoissonPLD(),
    AllocationPLD(),
    BallsInBinsRenyi(),
    ConditionalComposition(),
    RandomAllocationRenyi(),
    MMCC(),
    UserPoissonPLD(),
    UserCyclicPLD(),
    RevealedDraws(),
    RevealedDrawsAnyBlocking(),
    UnsampledGaussian(),
    MinSepRenyi(),
    TruncatedMinSepRenyi(),
    BallsInBinsImportance(),
    MinSepImportance(),
    MinSepMonteCarlo(),
    AnyMatrixMonteCarlo(),
    BallsInBinsMonteCarlo(),
    AllocationImportance(),
    AllocationMonteCarlo(),
    TruncatedMinSepImportance(),
    TruncatedMinSepMonteCarlo(),
    UserMinSepImportance(),
    ExposedStepsImportance(),
    UserMinSepMonteCarlo(),
    ExposedSteps(),
):
    register_accountant(_accountant)
