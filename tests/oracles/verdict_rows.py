"""Verdicts under any rule: the certificate's own loop without its estimate and its search for s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dptrain.accounting.simulation.confidence import Verdict
from dptrain.accounting.simulation.declaration import Declaration
from dptrain.accounting.simulation.partial_certificate import PartialCertificate
from dptrain.accounting.simulation.simulation import Simulation
from dptrain.accounting.simulation.verification import verify_chunks


def nothing_yet(
    simulation: Simulation, sigmas: Sequence[float], epsilon: float, rule: Verdict, seed: int
) -> PartialCertificate:
    """A declared verification of s and δ' as the rule has them, before its first sample."""
    request = {"epsilon": epsilon, "samples": rule.samples, "threshold": rule.threshold}
    return PartialCertificate(
        declaration=Declaration(
            request=request,
            seed=seed,
            lanes=simulation.lanes,
            slack=simulation.slack,
            estimate=sigmas[0],
            ceiling=2 * max(sigmas),
            exponents=tuple(range(len(sigmas))),
            sigmas=tuple(sigmas),
            versions={},
        )
    )


def verify_grid(
    simulation: Simulation,
    sigmas: Sequence[float],
    *,
    epsilon: float,
    verdict: Verdict,
    seed: int,
    threads: int = 1,
) -> list[dict[str, Any]]:
    """Rows of a certificate for ascending σ."""
    begun = nothing_yet(simulation, sigmas, epsilon, verdict, seed)
    new = verify_chunks(simulation, begun, begun.missing, threads=threads, progress=False)
    rows = begun.with_chunks(new).verdicts()
    assert rows is not None
    return rows
