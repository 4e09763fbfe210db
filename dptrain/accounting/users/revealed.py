"""User-level b-min-sep sampling on any attribution graph: reveal the user's draws."""

from __future__ import annotations

from dptrain.accounting.base.curve import DeterministicAccountant
from dptrain.accounting.users.revealed_curves import AnyBlockingCurve, Draws, OwnDrawsCurve
from dptrain.accounting.users.squared_norm_grid import SquaredNormGrid
from dptrain.core import Kind
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import UserMinSep

_MOST_EXAMPLES = 1000
_MOST_ENTRIES = 1 << 26  # 0.5 GB of float64
# Of a grid (SquaredNormGrid.of): a tenth of a second for one law, or for one batch of ε.
_OPERATIONS = {"sampling": 1e8, "participation": 4e6}


class RevealedDraws(DeterministicAccountant):
    """User-level b-min-sep sampling on any graph with all draws published, bands ≤ b.

    Sampling-based exclusion: δ(ε) ≤ max_{k' ≤ k} E_x[δ_Gauss(ε; ‖C x‖/σ)] in both directions, where
    x_t ~ Bin(k', p), zeroed if any of the user's own draws in the last b-1 steps was non-empty
    (zeroed draws included). All coins may be published, and exclusion by others only removes
    participations (docs/theory/users.md#thm-users-revealed;
    ``test_revealed_draws_are_the_worst_own_chain``). Users with fewer than k examples need the
    maximum over k': an example more also bars more, so that no k' dominates the others (p near 1:
    whoever has many examples is barred almost always). For the same reason the bound need not grow
    with p.

    Participation-based exclusion: δ(ε) ≤ max over controllers of E[δ_Gauss(ε; ‖C x‖/σ)]; see
    ``worst_blocking`` for controllers and the exact program over them. Which of the user's examples
    are excluded is a controller's choice, as the user's coins of a step are independent of it
    (docs/theory/users.md#thm-users-blocking; ``test_worst_blocking_against_all_controllers``).
    Nothing is assumed about the rule by which others exclude: Conjecture 6.2 is not used.

    Theorem 6.1 of Dong & Ganesh 2026 (arXiv 2602.09338v1), which would amplify by the hidden
    draws, is *not* used: on graphs with shared examples others' contributions show what the user
    drew (docs/theory/users.md#thm-users-attack).
    """

    name = "revealed-draws"
    display = "revealed draws"
    formerly = ("revealed-draws-any-blocking",)
    kind = Kind.UPPER_BOUND

    def refusal(self, mechanism: MatrixMechanism) -> str | None:
        """Refuse other schemes, bands beyond the separation, and too large a table."""
        scheme = mechanism.scheme
        if not isinstance(scheme, UserMinSep):
            return "it needs UserMinSep sampling"
        if mechanism.strategy.bands > scheme.min_sep:
            return (
                f"it needs bands <= min_sep, but the strategy has bands={mechanism.strategy.bands} "
                f"and the scheme min_sep={scheme.min_sep}; use fewer bands or a larger min_sep"
            )
        if scheme.graph.max_examples > _MOST_EXAMPLES:
            return (
                f"it covers at most {_MOST_EXAMPLES} examples per user, but one has "
                f"{scheme.graph.max_examples}; bound the attribution graph first"
            )
        entries = 2 * scheme.min_sep * self.draws(mechanism).grid.size
        if entries > _MOST_ENTRIES:
            return f"its table would hold {entries} numbers, more than {_MOST_ENTRIES}"
        return None

    def reserved(self, mechanism: MatrixMechanism) -> str | None:
        """Answer by name only where nobody is ever left out: another accountant is exact there."""
        if mechanism.scheme.min_sep > 1 or mechanism.strategy.bands > 1:
            return None
        return (
            f"with min_sep=1 the draws stay hidden; request it by name (accountant={self.name!r})"
        )

    def draws(self, mechanism: MatrixMechanism) -> Draws:
        """The user's draws and the norms that they lead to."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        examples = scheme.graph.max_examples
        norms = mechanism.strategy.column_norms(scheme.steps)
        most = float(
            examples
            * mechanism.strategy.sensitivity(
                steps=scheme.steps,
                max_participations=scheme.max_participations,
                min_sep=scheme.min_sep,
            )
        )
        grid = SquaredNormGrid.of(
            norms**2,
            examples=examples,
            probability=scheme.probability,
            most=most**2,
            operations=_OPERATIONS[scheme.exclusion],
        )
        return Draws(grid, examples, scheme.probability, scheme.min_sep)

    def curve(self, mechanism: MatrixMechanism) -> OwnDrawsCurve | AnyBlockingCurve:
        """The curve of the law of ‖C x‖, or that of the worst controllers."""
        scheme = mechanism.scheme
        assert isinstance(scheme, UserMinSep)
        curve = OwnDrawsCurve if scheme.exclusion == "sampling" else AnyBlockingCurve
        return curve(self.draws(mechanism))
