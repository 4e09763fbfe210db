"""From the arguments of ``make_private`` to the parts of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from dptrain.accounting import Accountant, calibrate
from dptrain.core import Guarantee, checks
from dptrain.distributed import Ranks
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Poisson, PrivateLoader, Scheme
from dptrain.strategies import Strategy


def poisson_like(
    data_loader: DataLoader | None, epochs: int | None, steps_per_epoch: int | None
) -> tuple[Scheme, int | None]:
    """Poisson batches of a loader's size for so many of its epochs, and the steps of one.

    Raises:
        ValueError: if one of the two is missing, or there is no epoch.
    """
    if data_loader is None or epochs is None or data_loader.batch_size is None:
        raise ValueError(
            "scheme=None needs data_loader= (with a batch_size) and epochs=, from which Poisson "
            "sampling follows; or state scheme=, for instance dptrain.Poisson.for_batch_size(...)"
        )
    length = len(data_loader)
    epochs = checks.integer("epochs", epochs, maximum=checks.MOST_STEPS // max(1, length))
    scheme = Poisson.for_batch_size(
        batch_size=data_loader.batch_size,
        dataset_size=len(data_loader.dataset),  # type: ignore[arg-type]
        steps=epochs * length,
    )
    return scheme, steps_per_epoch or length


def mechanism_of(
    ranks: Ranks,
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    accountant: str | Accountant | None,
) -> tuple[MatrixMechanism, Guarantee | None]:
    """The mechanism with the noise that is stated, or calibrated to the target that is.

    Rank 0 finds it for all: simulations would differ, and each attempt may cost some δ.
    """
    found: tuple[MatrixMechanism, Guarantee | None] | None = None
    if ranks.rank == 0:
        target = (target_epsilon, target_delta)
        found = _mechanism(scheme, strategy, noise_multiplier, *target, accountant)
    # Not the scheme, which may hold a large graph; the ranks compare the whole later.
    told = ranks.from_first(
        lambda: found and (found[0].strategy.to_dict(), found[0].noise_multiplier, found[1])
    )
    if found is not None:
        return found
    assert told is not None
    strategy, noise_multiplier = Strategy.from_dict(told[0]), told[1]
    return _mechanism(scheme, strategy, noise_multiplier, None, None, None)[0], told[2]


def _mechanism(
    scheme: Scheme,
    strategy: Strategy,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    accountant: str | Accountant | None,
) -> tuple[MatrixMechanism, Guarantee | None]:
    if noise_multiplier is not None:
        return (
            MatrixMechanism(scheme=scheme, strategy=strategy, noise_multiplier=noise_multiplier),
            None,
        )
    assert target_epsilon is not None
    assert target_delta is not None
    calibration = calibrate(
        scheme=scheme,
        strategy=strategy,
        epsilon=target_epsilon,
        delta=target_delta,
        accountant=accountant,
    )
    return calibration.mechanism, calibration.guarantee


def loader_of(
    data_loader: DataLoader | None,
    dataset: Any,
    *,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int | None,
    pin_memory: bool,
    **options: Any,
) -> PrivateLoader:
    """A loader of the one source that is given, whose steps the engine reports."""
    if data_loader is not None:
        loader = PrivateLoader.from_data_loader(data_loader, **options)
    else:
        loader = PrivateLoader(
            dataset=dataset,
            collate_fn=collate_fn,
            num_workers=num_workers or 0,
            pin_memory=pin_memory,
            **options,
        )
    loader.driven = True
    return loader


def check_individual(
    individual: object | None, target_epsilon: float | None, *, noise_stated: bool
) -> None:
    """Refuse what is no filter, two targets at once, and a filter without a noise level.

    Raises:
        TypeError, ValueError: naming the remedy.
    """
    if individual is not None and not isinstance(individual, IndividualFilter):
        raise TypeError(
            f"individual={individual!r}: expected an individual filter, for instance "
            "GDPFilter(target_epsilon=..., target_delta=..., max_steps=...)"
        )
    if individual is None or (noise_stated and target_epsilon is None):
        return
    given = "no noise level" if target_epsilon is None else f"target_epsilon={target_epsilon}"
    raise ValueError(
        f"{given} with individual=: the filter holds the target, and the noise level decides when "
        "it begins to leave examples out; state noise_multiplier=, for instance "
        "GDPFilter.noise_multiplier(full_norm_steps=...), or mechanism="
    )
