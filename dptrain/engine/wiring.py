"""From a request to the mechanism of the run, and to the run."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, default_collate

from dptrain.accounting import Accountant, calibrate
from dptrain.clipping import attach, own_attributes
from dptrain.clipping.bookkeeping import uncompiled
from dptrain.core import Guarantee
from dptrain.distributed import Ranks
from dptrain.engine.optimizer import PrivateOptimizer
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.request import RunRequest
from dptrain.engine.shards import DividedModule, Shards, shaped_like_sums
from dptrain.engine.shared_run import shared_ledger
from dptrain.engine.state_watch import StateWatch
from dptrain.engine.unfinished import Boundary
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import MicroBatch, PrivateLoader, Scheme
from dptrain.strategies import Strategy


def mechanism_of(
    ranks: Ranks, request: RunRequest, accountant: str | Accountant | None
) -> tuple[MatrixMechanism, Guarantee | None]:
    """The mechanism with the noise that is stated, or calibrated to the target that is.

    Rank 0 finds it for all: simulations would differ, and each attempt may cost some δ.
    """
    if request.mechanism is not None:
        return request.mechanism, None
    found: tuple[MatrixMechanism, Guarantee | None] | None = None
    if ranks.rank == 0:
        found = _found(request, accountant)
    # Not the scheme, which may hold a large graph; the ranks compare the whole later.
    told = ranks.from_first(
        lambda: found and (found[0].strategy.to_dict(), found[0].noise_multiplier, found[1])
    )
    if found is not None:
        return found
    assert told is not None
    strategy, noise_multiplier, target = Strategy.from_dict(told[0]), told[1], told[2]
    mechanism = MatrixMechanism(
        scheme=request.scheme, strategy=strategy, noise_multiplier=noise_multiplier
    )
    return mechanism, target


def _found(
    request: RunRequest, accountant: str | Accountant | None
) -> tuple[MatrixMechanism, Guarantee | None]:
    pair: dict[str, Any] = {"scheme": request.scheme, "strategy": request.strategy}
    if request.noise_multiplier is not None:
        return MatrixMechanism(**pair, noise_multiplier=request.noise_multiplier), None
    assert request.target_epsilon is not None
    assert request.target_delta is not None
    calibration = calibrate(
        **pair, epsilon=request.target_epsilon, delta=request.target_delta, accountant=accountant
    )
    return calibration.mechanism, calibration.guarantee


def wired(
    request: RunRequest,
    mechanism: MatrixMechanism,
    target: Guarantee | None,
    *,
    accountant: str | Accountant | None,
    ranks: Ranks,
    ledger: str | os.PathLike[str] | None,
    seeds: tuple[int, int],
    undo: contextlib.ExitStack,
) -> PrivateTraining:
    """The run, put together; the user's module is changed last, when little can still be refused.

    Args:
        target: the guarantee that the noise was calibrated to, if it was.
        ledger: file that records released steps.
        seeds: of the sampling and of the noise.
        undo: closed, it leaves the user's module as it was, if there comes to be no run.
    """
    gradients = request.gradients
    assert gradients.mode is not None
    divided = request.divided
    watch = StateWatch(
        uncompiled(request.module),  # the names are the user's
        gradients.public,
        own=own_attributes(gradients.mode),
        rest=None if divided is None else divided.rest,
    )
    record = None if request.individual is None else request.individual.record(mechanism)

    def taken(batch: MicroBatch, data: Any) -> None:
        watch.begin(last=batch.step == mechanism.steps - 1)
        if batch.part == 0:
            boundary.begin_step()
        if attached.owners is not None:
            collated = loader.collate_fn is default_collate
            attached.owners.begin(batch, data, collated=collated)

    loader = _loader(request, mechanism.scheme, seeds[0], ranks=ranks, taken=taken)
    shards: Shards | None
    if divided is None:
        shards = Shards.of(ranks, request.parameters, request.optimizer, request.noise.shard)
    else:
        shards = DividedModule(ranks, request.parameters, request.optimizer, divided)
    stream = request.open_noise(
        mechanism.strategy,
        steps=mechanism.steps,
        like=shaped_like_sums(request.parameters),
        seed=seeds[1],
        **({} if shards is None else shards.noise_of_a_rank),
    )
    released = shared_ledger(ranks, mechanism, ledger)
    boundary = Boundary(mechanism, stream, first=ranks.rank == 0)
    with contextlib.nullcontext() if divided is None else divided.as_whole():
        attached = attach(
            request.module,
            request.parameters if divided is None else divided.whole_of(request.parameters),
            mode=gradients.mode,
            style=gradients.clipping,
            groups=request.groups,
            loss_reduction=gradients.reduction,
            loader=loader,
            views=gradients.views,
            probe=gradients.probe,
            seed=seeds[0],
            together=None if divided is None else functools.partial(divided.together, ranks),
        )
    undo.callback(attached.detach)
    optimizer = PrivateOptimizer(
        request,
        mechanism=mechanism,
        noise=stream,
        attached=attached,
        loader=loader,
        ledger=released,
        ranks=ranks,
        shards=shards,
        watch=watch,
        at_boundary=boundary.passed,
        individual=record,
    )
    undo.callback(optimizer.detach)
    return PrivateTraining(
        request,
        mechanism=mechanism,
        target=target,
        accountant=accountant,
        attached=attached,
        optimizer=optimizer,
        boundary=boundary,
    )


def _loader(
    request: RunRequest,
    scheme: Scheme,
    seed: int,
    *,
    ranks: Ranks,
    taken: Callable[[MicroBatch, Any], None],
) -> PrivateLoader:
    """The run's loader, of its data set or in place of its data loader.

    ``taken`` is called with every batch before it is handed out.
    """
    options: dict[str, Any] = {
        **vars(request.loading),
        "scheme": scheme,
        "seed": seed,
        "rank": ranks.rank,
        "world_size": ranks.world_size,
        "driven": True,
        "taken": taken,
        "check_collate": request.gradients.probe != "off",
    }
    if isinstance(request.data, DataLoader):
        return PrivateLoader.from_data_loader(request.data, **options)
    return PrivateLoader(dataset=request.data, **options)
