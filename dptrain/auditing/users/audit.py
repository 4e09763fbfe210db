"""A user of a shared graph as the canary: a mechanism's own draws against what is stated of it."""

from __future__ import annotations

from dptrain.auditing.counting import StatedCurve
from dptrain.auditing.mechanism_audit import MechanismAudit, audit_game
from dptrain.auditing.users.game import user_game
from dptrain.mechanism import MatrixMechanism


def audit_users(
    mechanism: MatrixMechanism,
    *,
    epsilon: float,
    delta: float,
    user: int | None = None,
    curve: StatedCurve | None = None,
    samples: int = 40_000,
    runs: int = 40_000,
    confidence: float = 0.99,
    seed: int = 0,
    progress: bool = True,
) -> MechanismAudit:
    """Try to refute what is stated of a mechanism that protects users who share examples.

    All examples of the audited user have the same unit gradient. Batches are those of the scheme's
    own streams on its own graph, noise is that of the strategy.

    Where others' batches do not depend on the user's coins (``UserCyclic``, ``UserMinSep`` with
    ``min_sep=1``, or a user who shares no example), the likelihood ratio is exact, and δ(ε) is
    measured in both directions (docs/theory/auditing.md#thm-user-game). Elsewhere the user's
    draws show in who is missing: the neighbors have gradients of their own, the reader sees their
    noisy sums, and runs are counted by the score of a reader who uses them. That is a lower bound
    for the mechanism as it is, whatever the score.

    Args:
        mechanism: with ``UserCyclic`` or ``UserMinSep``, the edges of its graph, and σ > 0.
        epsilon: the stated ε ≥ 0.
        delta: the stated δ in (0, 1).
        user: which user of the graph; ``None``: one who is likely to lose most.
        curve: all of δ(ε) as stated, against which counting is far stronger.
        samples: tilted runs, for δ by the likelihood ratio.
        runs: of each world, for counting.
        confidence: chance that a true statement passes, over the audit's own draws.
        seed: of all draws.
        progress: show a bar.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if one is out of range, or there is no game of the mechanism (``user_game``).
    """
    return audit_game(
        user_game(mechanism, user),
        epsilon=epsilon,
        delta=delta,
        curve=curve,
        samples=samples,
        runs=runs,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )
