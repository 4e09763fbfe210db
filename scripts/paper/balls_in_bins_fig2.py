"""σ over ε under balls-in-bins sampling: deterministic accountants against Monte Carlo.

Figure 2 of Schuchardt & Kalinin, Sampling-Free Privacy Accounting for Matrix Mechanisms under
Random Allocation: DP-SGD and BSR, δ = 1e-5. Every curve is ε(σ) read sideways.

    PYTHONPATH=. python scripts/paper/balls_in_bins_fig2.py [--panels ad] [--full]

"the paper's budget" is conditional composition with the failure probabilities of the paper's
appendix E, which for several epochs do not add up to a bound; it is drawn for comparison only.
Monte Carlo points are importance-sampled estimates (the CSV has two standard errors), no bounds.
"allocation PLD" is not in the paper: an almost exact accountant for DP-SGD.

Differences (the paper's text has no numbers for its curves): conditional composition needs less
noise than the Rényi accountant only below ε of about a third in panels a and d, not 1: ours takes
orders up to 512 (the paper's best are 30 to 50) and a sharper add direction. A Rényi bound may rise
with σ where orders have to be cut; the printed σ use that privacy does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.strategies import BSR, Identity
from scripts.paper.balls_in_bins_curves import Panel, options_of, run
from scripts.paper.common import Stopwatch

PANELS = {
    "a": Panel("DP-SGD, n = 100, k = 1", Identity),
    "b": Panel("DP-SGD, n = 1000, k = 1", Identity, bins=1000),
    "c": Panel("DP-SGD, n = 1000, k = 10", Identity, epochs=10),
    "d": Panel("BSR, n = 100, k = 1, p = 4", lambda: BSR(bands=4)),
    "e": Panel("BSR, n = 100, k = 1, p = 64", lambda: BSR(bands=64)),
    "f": Panel("BSR, n = 1000, k = 10, p = 4", lambda: BSR(bands=4), epochs=10),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    watch = Stopwatch()
    run("balls_in_bins_fig2", options_of(__doc__, PANELS, "ad"), PANELS, arguments)
    print(f"took {watch}")


if __name__ == "__main__":
    main()
