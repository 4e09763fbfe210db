"""Individual privacy: every example has a budget of its own and is left out once it is spent."""

from dptrain.individual.gdp import GDPFilter, GDPLedger
from dptrain.individual.individual_filter import IndividualFilter
from dptrain.individual.ledger import IndividualLedger

__all__ = ["GDPFilter", "GDPLedger", "IndividualFilter", "IndividualLedger"]
