"""Accountants that simulate, and the certificates they leave."""

from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.certificate_cache import check_folder
from dptrain.accounting.simulation.draws import Processes
from dptrain.accounting.simulation.law import PlainLaw, SimulatedLaw, TermsAtEpsilon
from dptrain.accounting.simulation.simulation import (
    DIRECTIONS,
    Direction,
    Simulation,
    default_threads,
    loss_chunks,
)
from dptrain.accounting.simulation.terms import WeightedTerms

__all__ = [
    "DIRECTIONS",
    "Direction",
    "PlainLaw",
    "Processes",
    "SimulatedAccountant",
    "SimulatedLaw",
    "Simulation",
    "TermsAtEpsilon",
    "WeightedTerms",
    "certificate_cache",
    "check_folder",
    "default_threads",
    "loss_chunks",
]
