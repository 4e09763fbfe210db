"""Estimate, verify, release: the noise level that a simulation certifies."""

from __future__ import annotations

import math
import os
import secrets
from pathlib import Path
from typing import Any

from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.declaration import Declaration, ceiling_of, request_of
from dptrain.accounting.simulation.estimate_noise import Gather, alone, estimate_noise
from dptrain.accounting.simulation.partial_certificate import PartialCertificate
from dptrain.accounting.simulation.simulation import Simulation, default_threads
from dptrain.accounting.simulation.verification import verify_chunks
from dptrain.core import checks


def fresh_seed(seed: int | None) -> int:
    """``seed``, or 128 fresh random bits.

    Raises:
        TypeError: if the seed is no integer.
        ValueError: if it is negative.
    """
    if seed is None:
        return secrets.randbits(128)
    return checks.integer("seed", seed, minimum=0)


def certify_noise(
    simulation: Simulation,
    *,
    epsilon: float,
    delta: float,
    seed: int | None = None,
    threads: int | None = None,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
    partial: str | os.PathLike[str] | None = None,
    recheck: bool = False,
    attempts: int = 1,
) -> dict[str, Any]:
    """The least σ of a declared grid that a simulation certifies for (ε, δ), and the evidence.

    Estimate-verify-release without an empty output (Dong & Ganesh 2026, Appendix A,
    arXiv 2602.09338):

    1. *Estimate.* A rough σ from a few samples.
    2. *Declare.* A grid of powers of 1.01 around it; on top a σ that the unamplified Gaussian
       mechanism shows to be (ε, δ_v)-DP, so that it needs no verdict.
    3. *Verify.* s fresh samples a direction; a σ is accepted if the mean of (1 - e^{ε-L})_+ is at
       most δ' in both. The answer is the smallest σ such that it and all larger ones accept.

    The run with that σ is (ε, δ_v + q(1-δ_v))-DP end to end, which is at most (ε, δ)
    (docs/theory/certification.md#thm-evr; ``test_false_acceptance_stays_below_q``). q counts once:
    the directions and the σ may share their normals, and only the s samples of one σ in one
    direction are independent of each other, and of the estimate that chose the grid. A verdict may
    reject early, as terms are ≥ 0; nothing is accepted before all s samples are in.

    Every further attempt for the same purpose (another seed, a rerun until the answer pleases)
    that ``attempts`` does not count adds its q. With ``cache`` a certificate is made once and
    reused with its seeds and verdicts, whatever ``seed`` says: the natural way not to repeat an
    attempt. The same holds for what is left of an interrupted verification: seed and grid are on
    disk before its first sample, and the next call with the same request continues it, whatever
    ``seed`` says, to the certificate that would have resulted without the interruption. Deleting a
    partial certificate begins another attempt.

    Args:
        simulation: the pair of distributions.
        epsilon: ε ≥ 0.
        delta: δ in (0, 1).
        seed: of all streams; by default 128 fresh random bits. Recorded. It must not depend on the
            data or the training run.
        threads: number of threads; by default all cores. It does not change the result.
        progress: whether to show a progress bar (after two seconds).
        cache: directory of certificates, made if missing; ``None`` for no cache.
        partial: file that keeps what is done of an unfinished verification (rewritten every half a
            minute and when interrupted, deleted in the end); by default one in ``cache``.
        recheck: whether to draw the samples of a cached certificate again, see
            ``load_certificate``.
        attempts: k, how many certificates there are for one purpose, of which what they say picks
            one: (ε, δ_v + k q(1-δ_v)) holds then, which is at most (ε, δ).

    Returns:
        JSON-ready certificate; ``"noise_multiplier"`` is σ.

    Raises:
        ValueError: if ε or δ is out of range, or a file is corrupt or belongs to something else.
        KeyboardInterrupt: if interrupted while verifying; it says where the samples are kept, or
            that they are lost because neither ``cache`` nor ``partial`` names a place.
    """
    request = request_of(simulation, epsilon, delta, attempts)
    directory = None if cache is None else Path(cache)
    place = None if partial is None else Path(partial)
    if directory is not None:
        attempts = certificate_cache.attempts_stored(directory, request)
        request = request_of(simulation, epsilon, delta, attempts)
        found = load_certificate(
            directory, simulation, request, recheck=recheck, threads=threads, progress=progress
        )
        if found is not None:
            return found
        place = place or certificate_cache.partial_path(directory, request)
    threads = threads or default_threads()
    if place is not None and place.exists():
        begun = PartialCertificate.load(place)
        begun.declaration.check(simulation, request, where=f"{place}: ")
    else:
        begun = PartialCertificate(
            declaration=declare(simulation, request, fresh_seed(seed), threads, progress)
        )
    latest = begun

    def keep(new: PartialCertificate) -> None:
        nonlocal latest
        latest = begun.with_chunks(new)
        if place is not None:
            latest.store(place)

    try:
        verify_chunks(
            simulation, begun, begun.missing, threads=threads, progress=progress, keep=keep
        )
    except KeyboardInterrupt:
        where = (
            f"kept in {place}: the same call continues from there"
            if place is not None
            else "lost; name a cache directory or a partial file to keep them next time"
        )
        raise KeyboardInterrupt(f"{latest.progress()}, {where}") from None
    certificate = certificate_of(latest)
    if directory is not None:
        certificate_cache.store(directory, request, certificate)
    if place is not None:
        place.unlink(missing_ok=True)
    return certificate


def declare(
    simulation: Simulation,
    request: dict[str, Any],
    seed: int,
    threads: int,
    progress: bool,
    share: tuple[int, int] = (0, 1),
    gather: Gather = alone,
) -> Declaration:
    """Estimate σ (processes may share that), and declare the grid around it."""
    guess = estimate_noise(
        simulation,
        epsilon=request["epsilon"],
        target=request["threshold"],
        ceiling=ceiling_of(simulation, request),
        seed=seed,
        threads=threads,
        progress=progress,
        share=share,
        gather=gather,
    )
    return Declaration.of(simulation, request, seed=seed, estimate=guess)


def certificate_of(partial: PartialCertificate) -> dict[str, Any]:
    """The certificate of a complete verification, see ``certify_noise``.

    A row carries for each direction the mean over the samples it used and whether it was accepted:
    ``None`` where a larger σ or the other direction was rejected before this one was decided. Both
    directions read the same normals, so they end at the same number of samples.

    Raises:
        ValueError: if samples are missing; it says which.
    """
    declared = partial.declaration
    rows = partial.verdicts()
    if rows is None:
        raise ValueError(
            f"not a certificate yet: {partial.progress()}; missing are {partial.absent()}"
        )
    for exponent, row in zip(declared.exponents, rows, strict=True):
        row["exponent"] = exponent
    return {
        **declared.evidence(),
        "grid": rows,
        "noise_multiplier": certificate_cache.chosen_noise(rows, declared.ceiling),
    }


def load_certificate(
    directory: Path,
    simulation: Simulation,
    request: dict[str, Any],
    *,
    recheck: bool = False,
    threads: int | None = None,
    progress: bool = True,
) -> dict[str, Any] | None:
    """The stored certificate for this request, or ``None`` if there is none.

    Computed again are, given the seed and the estimate around which the grid was declared: the
    grid, the ceiling, the samples, what they prove. With ``recheck`` the seed's samples are drawn
    once more, at the cost of the first time, and have to give the same verdicts.

    Raises:
        ValueError: if the file is corrupt, answers another request, or says something else than
            what is computed here.
    """

    def redetermined(certificate: dict[str, Any]) -> str | None:
        wrong = _undeclared(certificate, simulation, request)
        if recheck and wrong is None:
            wrong = _redrawn(certificate, simulation, threads or default_threads(), progress)
        return wrong

    supported = certificate_cache.unsupported_noise
    return certificate_cache.load(directory, request, supported, redetermined)


def check_certificate(
    certificate: dict[str, Any],
    simulation: Simulation,
    request: dict[str, Any],
    *,
    threads: int,
    progress: bool,
) -> None:
    """See that a certificate says what its request determines and what its seed gives again.

    Args:
        certificate: as ``certify_noise`` returned it.
        simulation: the pair of distributions.
        request: what it should answer.
        threads: number of threads.
        progress: whether to show a progress bar (after two seconds).

    Raises:
        ValueError: if it says something else.
    """
    certificate_cache.check_request(certificate, request)
    wrong = certificate_cache.unsupported_noise(certificate)
    wrong = wrong or _undeclared(certificate, simulation, request)
    wrong = wrong or _redrawn(certificate, simulation, threads, progress)
    if wrong:
        raise ValueError(f"its certificate is wrong: {wrong}")


def _declared(
    certificate: dict[str, Any], simulation: Simulation, request: dict[str, Any]
) -> Declaration:
    seed = certificate_cache.whole_number(certificate["seed"])
    return Declaration.of(simulation, request, seed=seed, estimate=certificate["estimate"])


def _undeclared(
    certificate: dict[str, Any], simulation: Simulation, request: dict[str, Any]
) -> str | None:
    """What the file says otherwise than its request and this simulation, or ``None``."""
    if certificate["request"] != request:
        return "another request"
    declared = _declared(certificate, simulation, request)
    rows = certificate["grid"]
    if [row["exponent"] for row in rows] != list(declared.exponents):
        return f"its grid is not that around its estimate, 1.01^{list(declared.exponents)}"
    # Another machine's last digits are as good; the numbers that are no σ were found by a search
    # for a flat minimum.
    numbers = [
        (f"σ of 1.01^{exponent}", row["noise_multiplier"], sigma, 1e-12)
        for exponent, row, sigma in zip(declared.exponents, rows, declared.sigmas, strict=True)
    ]
    for name, value in declared.evidence().items():
        said = certificate[name]
        if name == "ceiling":
            top = "noise_multiplier"
            numbers.append(("ceiling", said[top], value[top], 1e-8))
            if said != {**value, top: said[top]}:
                return f"its ceiling should be shown by the {value['shown_by']}"
        elif isinstance(value, float):
            numbers.append((name, said, value, 1e-6))
        # The versions are a record of those it was made with.
        elif name != "versions" and said != value:
            return f"its {name} should be {value!r}"
    for name, said, value, tolerance in numbers:
        if not math.isclose(said, value, rel_tol=tolerance):
            return f"its {name} is {said} and should be {value}"
    return None


def _redrawn(
    certificate: dict[str, Any], simulation: Simulation, threads: int, progress: bool
) -> str | None:
    """What the seed does not give again, or ``None``."""
    declared = _declared(certificate, simulation, certificate["request"])
    if certificate["versions"] != declared.versions:
        return (
            f"made with {certificate['versions']}, its samples cannot be drawn again with "
            f"{declared.versions}"
        )
    begun = PartialCertificate(declaration=declared)
    done = verify_chunks(simulation, begun, begun.missing, threads=threads, progress=progress)
    again = certificate_of(begun.with_chunks(done))["grid"]
    return certificate_cache.differing_verdict(certificate["grid"], again, "exponent")
