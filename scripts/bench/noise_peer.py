"""A step of correlated noise added to a gradient: ours and jax_privacy's, in turn.

Both add noise of the same strategy to one float32 gradient; medians over the rounds, and the
median of the ratios within a round. jax_privacy's update is compiled and may reuse the memory of
its state.

Run: PYTHONPATH=. python scripts/bench/noise_peer.py [--params 10000000] [--json FILE]
The peer: pip install -c constraints.txt -e ".[peer]"
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

from dptrain.noise import noise_stream
from dptrain.strategies import BLT, BSR, Strategy
from scripts import results

COLUMNS = (
    ("noise", "{name}"),
    ("dptrain", "{ours_ms:,.0f} ms"),
    ("jax_privacy", "{peer_ms:,.0f} ms"),
    ("ratio", "{ratio:.1f}"),
)
THETA, OMEGA = (0.9998, 0.98, 0.6), (0.02, 0.08, 0.3)


def peers() -> dict[str, tuple[Strategy, Any]]:
    """Our strategy and the peer's C^-1 for it, by name."""
    blt = buffered_toeplitz.BufferedToeplitz.build(THETA, OMEGA)
    pairs: dict[str, tuple[Strategy, Any]] = {}
    for bands in (16, 64):
        strategy = BSR(bands=bands)
        c = jnp.asarray(strategy.first_column(4096), dtype=jnp.float32)
        pairs[f"{bands} bands"] = (strategy, toeplitz.inverse_as_streaming_matrix(c))
    pairs["BLT, 3 buffers"] = (
        BLT(buffers=3, theta=THETA, omega=OMEGA),
        blt.inverse_as_streaming_matrix(),
    )
    return pairs


def our_step(strategy: Strategy, params: int) -> Callable[[], None]:
    """Adds the next row to a gradient, on its grid."""
    gradient = torch.zeros(params)
    stream = noise_stream(strategy, steps=4096, like=[gradient], seed=1)

    def step() -> None:
        stream.release([gradient], 0.1)

    return step


def their_step(noising: Any, params: int) -> Callable[[], None]:
    """The same with a compiled update."""
    privatizer = noise_addition.matrix_factorization_privatizer(
        noising, stddev=0.1, prng_key=0, dtype=jnp.float32
    )
    gradient = jnp.zeros(params, dtype=jnp.float32)
    update = jax.jit(privatizer.update, donate_argnums=1)
    kept = [privatizer.init(gradient)]

    def step() -> None:
        noisy, kept[0] = update(gradient, kept[0])
        jax.block_until_ready((noisy, kept[0]))

    return step


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    machine = results.machine("torch", "jax", "jax_privacy", load=True)
    machine["threads"] = torch.get_num_threads()
    rows = []
    for name, (strategy, noising) in peers().items():
        ours, theirs = our_step(strategy, options.params), their_step(noising, options.params)
        times: list[tuple[float, float]] = []
        # The first rounds fill the ring (and compile).
        for turn in range(options.rounds + 66):
            if turn >= 66 or turn < 2:
                pair = []
                for step in (ours, theirs):
                    start = time.perf_counter()
                    step()
                    pair.append(time.perf_counter() - start)
                if turn >= 66:
                    times.append((pair[0], pair[1]))
            else:
                ours()
        rows.append(
            {
                "name": name,
                "ours_ms": 1e3 * statistics.median(a for a, _ in times),
                "peer_ms": 1e3 * statistics.median(b for _, b in times),
                "ratio": statistics.median(b / a for a, b in times),
            }
        )
    results.publish(
        options.json,
        {"noise_peer": results.Table(COLUMNS, rows)},
        script=__file__,
        machine=machine,
        params=options.params,
    )


if __name__ == "__main__":
    main()
