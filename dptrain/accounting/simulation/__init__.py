"""Accountants that simulate, and the certificates they leave."""

from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.accountant import SimulatedAccountant
from dptrain.accounting.simulation.certificate import (
    certificate_of,
    declare,
    fresh_seed,
    load_certificate,
)
from dptrain.accounting.simulation.certificate_cache import check_folder
from dptrain.accounting.simulation.confidence import samples_needed
from dptrain.accounting.simulation.declaration import request_of
from dptrain.accounting.simulation.monte_carlo import MonteCarloAccountant
from dptrain.accounting.simulation.partial_certificate import (
    PartialCertificate,
    merge,
    merge_partial_files,
)
from dptrain.accounting.simulation.simulation import (
    DIRECTIONS,
    Direction,
    Simulation,
    default_threads,
    loss_chunks,
)
from dptrain.accounting.simulation.verification import verify_chunks
from dptrain.accounting.simulation.weighted.accountant import (
    Bounds,
    TermsAtEpsilon,
    WeightedAccountant,
)
from dptrain.accounting.simulation.weighted.terms import WeightedTerms

__all__ = [
    "DIRECTIONS",
    "Bounds",
    "Direction",
    "MonteCarloAccountant",
    "PartialCertificate",
    "SimulatedAccountant",
    "Simulation",
    "TermsAtEpsilon",
    "WeightedAccountant",
    "WeightedTerms",
    "certificate_cache",
    "certificate_of",
    "check_folder",
    "declare",
    "default_threads",
    "fresh_seed",
    "load_certificate",
    "loss_chunks",
    "merge",
    "merge_partial_files",
    "request_of",
    "samples_needed",
    "verify_chunks",
]
