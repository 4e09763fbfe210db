"""Accountants: what a mechanism guarantees, and how much noise a guarantee takes."""

from dptrain.accounting.balls_in_bins.conditional_composition import ConditionalComposition
from dptrain.accounting.balls_in_bins.importance import BallsInBinsImportance
from dptrain.accounting.balls_in_bins.monte_carlo import BallsInBinsMonteCarlo
from dptrain.accounting.balls_in_bins.one_pick import AllocationPLD
from dptrain.accounting.balls_in_bins.random_allocation import RandomAllocationRenyi
from dptrain.accounting.balls_in_bins.renyi import BallsInBinsRenyi
from dptrain.accounting.base.accountant import Accountant, Availability, Cost, Profile
from dptrain.accounting.base.curve import Curve, DeterministicAccountant
from dptrain.accounting.base.registry import (
    accountant_named,
    register_accountant,
    registered_accountants,
)
from dptrain.accounting.dispatch import (
    Calibration,
    account,
    accountants_for,
    calibrate,
    find_accountants,
    profile,
)
from dptrain.accounting.dp_event import to_dp_event
from dptrain.accounting.min_sep.any_matrix import AnyMatrixMonteCarlo
from dptrain.accounting.min_sep.importance import MinSepImportance
from dptrain.accounting.min_sep.monte_carlo import MinSepMonteCarlo
from dptrain.accounting.min_sep.renyi import MinSepRenyi
from dptrain.accounting.min_sep.truncated import TruncatedMinSepMonteCarlo
from dptrain.accounting.mmcc.mmcc import MMCC
from dptrain.accounting.poisson.cyclic import CyclicPoissonPLD
from dptrain.accounting.poisson.groups import group_curve, last_iterate_curve
from dptrain.accounting.poisson.poisson import PoissonPLD
from dptrain.accounting.poisson.truncated import TruncatedPoissonPLD
from dptrain.accounting.unamplified import UnsampledGaussian
from dptrain.accounting.users.disjoint import UserMinSepMonteCarlo
from dptrain.accounting.users.exposed import ExposedSteps
from dptrain.accounting.users.revealed import RevealedDraws, RevealedDrawsAnyBlocking

__all__ = [
    "Accountant",
    "Availability",
    "Calibration",
    "Cost",
    "Curve",
    "DeterministicAccountant",
    "Profile",
    "UnsampledGaussian",
    "account",
    "accountant_named",
    "accountants_for",
    "calibrate",
    "find_accountants",
    "group_curve",
    "last_iterate_curve",
    "profile",
    "register_accountant",
    "registered_accountants",
    "to_dp_event",
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
    RevealedDraws(),
    RevealedDrawsAnyBlocking(),
    UnsampledGaussian(),
    MinSepRenyi(),
    BallsInBinsImportance(),
    MinSepImportance(),
    MinSepMonteCarlo(),
    AnyMatrixMonteCarlo(),
    BallsInBinsMonteCarlo(),
    TruncatedMinSepMonteCarlo(),
    UserMinSepMonteCarlo(),
    ExposedSteps(),
):
    register_accountant(_accountant)
