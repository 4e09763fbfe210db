"""What accountants that simulate have in common: their options and how they state what they saw."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar, Self

from dptrain.accounting.base.accountant import Accountant, Profile
from dptrain.accounting.base.statement import statement
from dptrain.accounting.simulation import certificate_cache
from dptrain.accounting.simulation.simulation import default_threads
from dptrain.core import Array, Guarantee, Kind, checks
from dptrain.mechanism import MatrixMechanism


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedAccountant(Accountant):
    """An accountant whose statements rest on its own draws.

    Args:
        seed: of all streams; by default 128 fresh random bits a call. It must not depend on the
            data or the training run. Recorded in the certificate.
        failure_probability: chance q over the accountant's draws that a statement of kind
            CONFIDENCE (``guarantee``, ``profile``) is false.
        max_samples: refuse jobs with more samples a direction than this.
        threads: threads; by default all cores. The results do not depend on it.
        cache: directory of certificates for ``calibrate``: one is made once and reused,
            whatever ``seed`` says, as another attempt would add its chance of failure. A file is
            checked against all that its request determines; its means and verdicts are trusted.
        recheck: whether not to trust them: the samples of a cached certificate are drawn again
            from its seed, at the cost of the first time.
        progress: whether to show progress bars (after two seconds).
        attempts: how many certificates of ``calibrate`` are made for one purpose, where what they
            say picks one: δ includes the chance that any of them is wrong. A cached certificate
            that counts more attempts than these answers as well.

    Raises:
        TypeError: if an option is of another type.
        ValueError: if an option is out of range.
    """

    seed: int | None = None
    failure_probability: float = 1e-6
    max_samples: int = 10**9
    threads: int | None = None
    cache: str | os.PathLike[str] | None = None
    recheck: bool = False
    progress: bool = True
    attempts: int = 1

    kind = Kind.CONFIDENCE
    counts: ClassVar[tuple[str, ...]] = ("max_samples", "threads")  # options of at least 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in self.counts:
            if (value := getattr(self, option)) is not None:
                checks.integer(option, value)
        checks.integer("attempts", self.attempts)
        checks.number("failure_probability", self.failure_probability, above=0, below=1)
        if self.seed is not None:
            checks.integer("seed", self.seed, minimum=0)
        if self.cache is not None:
            checks.instance("cache", self.cache, (str, os.PathLike), example="'certificates'")
        checks.flag("recheck", self.recheck)
        checks.flag("progress", self.progress)

    def among(self, attempts: int) -> Self:
        """The same with so many ``attempts``."""
        return dataclasses.replace(self, attempts=attempts)

    @property
    def cores(self) -> int:
        """Threads to use."""
        return self.threads or default_threads()

    def restate(self, mechanism: MatrixMechanism, stated: Guarantee) -> Guarantee:
        """The statement from the samples that its certificate's seed gives once more.

        At the cost of the first time. That no other seed was tried before is not shown by this.

        Raises:
            ValueError: if the mechanism is refused, there is no certificate, it lacks a field, or
                the seed gives something else than it says.
        """
        self.check_covers(mechanism)
        certificate = stated.certificate
        if certificate is None:
            raise ValueError("a statement by simulation needs its certificate, and there is none")
        try:
            if "request" in certificate:
                return self._certified_again(mechanism, certificate)
            return self._drawn_again(certificate).guarantee(mechanism, delta=stated.delta)
        except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"its certificate cannot be read ({type(error).__name__}: {error})"
            ) from error

    def _drawn_again(self, certificate: dict[str, Any]) -> Self:
        """This accountant with the options that a certificate of ``guarantee`` records."""
        return dataclasses.replace(
            self,
            seed=certificate_cache.whole_number(certificate["seed"]),
            failure_probability=certificate["failure_probability"],
            cache=None,
        )

    def _certified_again(
        self, mechanism: MatrixMechanism, certificate: dict[str, Any]
    ) -> Guarantee:
        """The statement of a certificate of ``calibrate``, once its samples were drawn again.

        Raises:
            ValueError: if it answers another request, or its seed gives something else.
        """
        raise ValueError(f"the {self.display} accountant cannot check a certificate of calibrate")

    def verified(
        self,
        mechanism: MatrixMechanism,
        certificate: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
    ) -> Guarantee:
        """The statement at the σ of a certificate: kind VERIFIED."""
        count = certificate_cache.attempts_of(certificate["request"])
        which = "this one attempt" if count == 1 else f"each of {count} attempts"
        note = (
            "The noise level was chosen and verified by simulation before training; δ includes the "
            f"chance of a wrong verdict, {certificate['failure_probability']:.2g}, for {which}, "
            "and each further attempt would add as much"
        )
        return statement(
            mechanism.with_noise(certificate["noise_multiplier"]),
            self,
            epsilon=epsilon,
            delta=delta,
            notes=(note,),
            kind=Kind.VERIFIED,
            certificate=certificate,
        )

    def together(self, epsilon: Array, remove: Array, add: Array) -> Profile:
        """The profile of upper bounds that hold at once except with ``failure_probability``."""
        return Profile(epsilon, remove, add, self.kind, self.name, self.failure_probability)

    def confident(
        self,
        mechanism: MatrixMechanism,
        certificate: dict[str, Any],
        *,
        epsilon: float,
        delta: float,
    ) -> Guarantee:
        """The statement about a fixed σ: kind CONFIDENCE."""
        note = (
            "The statement about this fixed mechanism is false with probability at most "
            f"{self.failure_probability:.2g} over the accountant's own simulation"
        )
        return statement(
            mechanism, self, epsilon=epsilon, delta=delta, notes=(note,), certificate=certificate
        )
