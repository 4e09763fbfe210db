"""Accountants that simulate, and the certificates they leave."""

from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.certificate_cache import check_folder
from dptrain.accounting.simulation.confidence import counted_split
from dptrain.accounting.simulation.draws import Processes
from dptrain.accounting.simulation.law import PlainLaw, SimulatedLaw, TermsAtEpsilon
from dptrain.accounting.simulation.simulation import (
    DIRECTIONS,
    Direction,
    Simulation,
    chunks,
    default_threads,
    loss_chunks,
)
from dptrain.accounting.simulation.terms import WeightedTerms
from dptrain.accounting.simulation.verdicts import Rule

__all__ = [
    "DIRECTIONS",
    "Direction",
    "PlainLaw",
    "Processes",
    "Rule",
    "SimulatedAccountant",
    "SimulatedLaw",
    "Simulation",
    "TermsAtEpsilon",
    "WeightedTerms",
    "certificate_cache",
    "check_folder",
    "chunks",
    "counted_split",
    "default_threads",
    "loss_chunks",
]
