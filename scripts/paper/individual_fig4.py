"""ε(δ) of private gradient descent with σ = 100 against the number of steps, by Rényi and GDP.

Figure 4 of Koskela, Tobaben & Honkela. The caption says no more than "different number of
compositions k": drawn are ε at δ = 1e-5, and the gap between the two.

    PYTHONPATH=. python scripts/paper/individual_fig4.py [--most 2000] [--sigma 100]

Compared with the text of section C.4: at the same ε GDP admits 495 steps instead of 420. Here it
is so (see ``individual_fig3.py`` for the value of that ε, .8156, which the text calls .8).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dptrain.reporting import figure_of, save
from scripts.paper.common import Stopwatch, compare, parser, positive, short, write_csv
from scripts.paper.gradient_descent import INTEGER_ORDERS, gdp_epsilon, rdp_epsilon


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--most", type=int, default=2000, help="largest number of steps")
    options.add_argument("--sigma", type=positive, default=100.0)
    options.add_argument("--delta", type=positive, default=1e-5)
    options.add_argument("--points", type=int, default=60)
    chosen, watch = options.parse_args(arguments), Stopwatch()
    sigma, delta = chosen.sigma, chosen.delta

    # Denser where ε rises steeply.
    roots = np.linspace(1.0, chosen.most**0.5, chosen.points)
    steps = np.unique((roots**2).round().astype(int)).tolist()
    rows = [
        (
            k,
            gdp_epsilon(k, sigma, delta),
            rdp_epsilon(k, sigma, delta),
            rdp_epsilon(k, sigma, delta, INTEGER_ORDERS),
        )
        for k in steps
    ]
    columns = ("steps", "epsilon_gdp", "epsilon_rdp", "epsilon_rdp_orders_2_to_32")
    write_csv(chosen.output / "individual_fig4.csv", columns, rows)

    figure, (left, right) = figure_of(2)
    k, gdp, rdp, integer = (np.array(column) for column in zip(*rows, strict=True))
    left.plot(k, rdp, "--", label="Rényi divergences, Lemma 4")
    left.plot(k, integer, ":", color="C2", label="the same, orders 2 to 32")
    left.plot(k, gdp, "-", color="C1", label="GDP (exact)")
    left.set_ylabel(f"ε at δ = {short(delta)}")
    left.set_ylim(0.0, 1.15 * rdp.max())
    left.legend()
    right.plot(k, 100 * (1 - gdp / rdp), color="C3")
    right.set_ylabel("how much smaller ε of GDP is (%)")
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.set_xlabel("steps k")
        axes.set_xlim(left=0)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"Full-batch gradient descent with σ = {sigma:g}", fontsize=10)
    save(figure, chosen.output / "individual_fig4.png")

    compare(
        [
            (
                "ε of 420 steps (Rényi) against 495 (GDP)",
                "equal",
                f"{rdp_epsilon(420, sigma, delta):.5f} and {gdp_epsilon(495, sigma, delta):.5f}",
            ),
        ]
    )
    print(f"took {watch}")


if __name__ == "__main__":
    main()
