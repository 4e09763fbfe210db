"""σ over ε under balls-in-bins sampling for BISR, BandInvMF, BLT and BandMF.

Figure 3 of Schuchardt & Kalinin, δ = 1e-5; curves as in ``balls_in_bins_fig2.py``.

    PYTHONPATH=. python scripts/paper/balls_in_bins_fig3.py [--panels adef] [--full]

The optimized strategies are ours (least mean squared error of prefix sums × sensitivity of one
participation), the paper's are jax_privacy's; it does not say how many buffers its BLT has: here 3.
As in the paper, conditional composition is better below ε of .7 to .8.
"""

from __future__ import annotations

from collections.abc import Sequence

from dptrain.strategies import BISR, BLT, BandInvMF, BandMF
from scripts.paper.balls_in_bins_curves import Panel, options_of, run
from scripts.paper.common import Stopwatch

PANELS = {
    "a": Panel("BISR, n = 100, k = 1, p = 4", lambda: BISR(inverse_bands=4)),
    "b": Panel("BISR, n = 100, k = 1, p = 64", lambda: BISR(inverse_bands=64)),
    "c": Panel("BISR, n = 1000, k = 10, p = 4", lambda: BISR(inverse_bands=4), epochs=10),
    "d": Panel("BLT, n = 100, k = 1", lambda: BLT(buffers=3)),
    "e": Panel("BandMF, n = 100, k = 1, p = 64", lambda: BandMF(bands=64)),
    "f": Panel("BandInvMF, n = 100, k = 1, p = 4", lambda: BandInvMF(inverse_bands=4)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    watch = Stopwatch()
    run("balls_in_bins_fig3", options_of(__doc__, PANELS, "adef"), PANELS, arguments)
    print(f"took {watch}")


if __name__ == "__main__":
    main()
