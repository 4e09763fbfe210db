"""Individual privacy: every example has a budget of its own and is left out once it is spent."""

from dptrain.individual.gdp import GDPFilter, GDPLedger
from dptrain.individual.individual_filter import IndividualFilter
from dptrain.individual.ledger import IndividualLedger
from dptrain.individual.odometer import GDPOdometer, OdometerLedger
from dptrain.individual.pld import PLDFilter
from dptrain.individual.pld_ledger import PLDLedger
from dptrain.individual.renyi import RenyiFilter, RenyiLedger
from dptrain.individual.sampled import SampledLedger

__all__ = [
    "GDPFilter",
    "GDPLedger",
    "GDPOdometer",
    "IndividualFilter",
    "IndividualLedger",
    "OdometerLedger",
    "PLDFilter",
    "PLDLedger",
    "RenyiFilter",
    "RenyiLedger",
    "SampledLedger",
]
