"""The clipped sums of a microbatch are in memory once when a step is released."""

import weakref

import pytest

from tests.helpers.engine import everything_every_step, images, make, small_net, train


@pytest.mark.parametrize("parts", [1, 3])
def test_nothing_else_holds_the_sums_when_a_step_is_released(monkeypatch, parts):
    private = make(
        small_net(),
        images(),
        "bookkeeping",
        scheme=everything_every_step(24, 2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        microbatches=parts,
    )
    optimizer, given, alive = private.optimizer, [], []
    clipped_sum, release = optimizer.clipper.clipped_sum, optimizer._release

    def followed(**options):
        sums = clipped_sum(**options)
        given.extend(weakref.ref(total) for total in sums)
        return sums

    def looked_at():
        alive.append(sum(ref() is not None for ref in given))
        given.clear()
        return release()

    monkeypatch.setattr(optimizer.clipper, "clipped_sum", followed)
    monkeypatch.setattr(optimizer, "_release", looked_at)
    train(private)
    # The sums of a single microbatch are in ``p.summed_grad``; those of several are gathered there
    # in float64, and none of the microbatches' own is left.
    assert alive == [len(optimizer.params) if parts == 1 else 0] * 2
