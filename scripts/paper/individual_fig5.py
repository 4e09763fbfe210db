"""The most steps of private gradient descent with σ = 100 for a budget ε, by Rényi and by GDP.

Figure 5 of Koskela, Tobaben & Honkela (δ = 1e-5).

    PYTHONPATH=. python scripts/paper/individual_fig5.py [--sigma 100] [--delta 1e-5]

Compared with the text of section C.4. Discrepancy: at ε = .8 exactly the paper's Lemma 4 admits 405
steps and GDP 478; the stated 420 and 495 are those of ε = .8156, which the text calls .8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dptrain.reporting import figure_of, save
from scripts.paper.common import Stopwatch, compare, parser, positive, short, write_csv
from scripts.paper.gradient_descent import INTEGER_ORDERS, gdp_steps, rdp_steps


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    options = parser(__doc__)
    options.add_argument("--sigma", type=positive, default=100.0)
    options.add_argument("--delta", type=positive, default=1e-5)
    options.add_argument("--largest", type=positive, default=3.0, help="largest ε")
    options.add_argument("--points", type=int, default=60)
    chosen, watch = options.parse_args(arguments), Stopwatch()
    sigma, delta = chosen.sigma, chosen.delta

    grid = np.linspace(chosen.largest / chosen.points, chosen.largest, chosen.points)
    rows = [
        (
            epsilon,
            gdp_steps(epsilon, sigma, delta),
            rdp_steps(epsilon, sigma, delta),
            rdp_steps(epsilon, sigma, delta, INTEGER_ORDERS),
        )
        for epsilon in grid.tolist()
    ]
    columns = ("epsilon", "steps_gdp", "steps_rdp", "steps_rdp_orders_2_to_32")
    write_csv(chosen.output / "individual_fig5.csv", columns, rows)

    figure, (left, right) = figure_of(2)
    epsilon, gdp, rdp, integer = (np.array(column, float) for column in zip(*rows, strict=True))
    left.plot(epsilon, gdp, "-", color="C1", label="GDP (exact)")
    left.plot(epsilon, rdp, "--", color="C0", label="Rényi divergences, Lemma 4")
    left.plot(epsilon, integer, ":", color="C2", label="the same, orders 2 to 32")
    left.set_ylabel(f"most steps at δ = {short(delta)}")
    left.set_ylim(bottom=0)
    left.legend()
    enough = rdp > 200  # of few steps, whole numbers make the ratio jump
    right.plot(epsilon[enough], gdp[enough] / rdp[enough], color="C3")
    right.set_ylabel("steps under GDP / steps under Rényi (whole steps)")
    for axes in (left, right):
        axes.set_xlabel("budget ε")
        axes.set_xlim(0.0, chosen.largest)
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"Full-batch gradient descent with σ = {sigma:g}", fontsize=10)
    save(figure, chosen.output / "individual_fig5.png")

    rounded = 0.81563
    compare(
        [
            ("steps at ε = .8, Rényi", "420", str(rdp_steps(0.8, sigma, delta))),
            ("steps at ε = .8, Rényi of orders 2 to 32", "420",
             str(rdp_steps(0.8, sigma, delta, INTEGER_ORDERS))),
            ("steps at ε = .8, GDP", "495", str(gdp_steps(0.8, sigma, delta))),
            (f"steps at ε = {rounded}, Rényi", "420", str(rdp_steps(rounded, sigma, delta))),
            (f"steps at ε = {rounded}, GDP", "495", str(gdp_steps(rounded, sigma, delta))),
        ]
    )  # fmt: skip
    print(f"took {watch}")


if __name__ == "__main__":
    main()
