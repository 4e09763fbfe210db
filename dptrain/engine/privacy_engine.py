"""The privacy engine: three lines that make a training loop private."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import warnings
from typing import Any, Self

import torch
from torch import nn

from dptrain.accounting import Accountant, find_accountants
from dptrain.core import checks, seed_globals, split_seed
from dptrain.distributed import Ranks
from dptrain.engine.options import (
    MOVED,
    NOT_OF_THE_ENGINE,
    Gradients,
    Loading,
    NoiseOptions,
)
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.request import RunRequest
from dptrain.engine.shared_run import begin_together, one_run
from dptrain.engine.wiring import mechanism_of, wired
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import Scheme
from dptrain.strategies import Strategy


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyEngine:
    """Turns a module, an optimizer and a data set into a private training run.

    The engine says how a run is accounted for and who takes part in it; nothing of a run is kept in
    it, so that one engine may make several.

    Args:
        accountant: one by name or value, instead of the tightest that applies.
        ledger: file that records released steps, so that a resumed run cannot release a step in
            two versions; see ``StepLedger``. Every run has its own.
        distributed: make one run of all ranks of torch's default process group, each of which
            calls ``make_private`` with the same arguments; parameters and seeds are rank 0's.
            ``None``: if there are several. ``False``: each rank for itself, and the guarantees of
            such runs on the same data add up.

    Raises:
        TypeError: if an argument is of another type.

    Example:
        >>> private = PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, data=train_set,
        ...     scheme=MinSep.for_batch_size(
        ...         batch_size=512, dataset_size=len(train_set), min_sep=64, steps=2000),
        ...     strategy=BandMF(bands=16),
        ...     max_grad_norm=1.0, target_epsilon=8.0, target_delta=1e-5)
        >>> model, optimizer, loader = private
        >>> for x, y in loader:
        ...     optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()
        >>> print(private.guarantee())
    """

    accountant: str | Accountant | None = None
    ledger: str | os.PathLike[str] | None = None
    distributed: bool | None = None

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Say where arguments of Opacus's engine, and of ``make_private``, are given."""
        if args:
            raise TypeError(
                "PrivacyEngine takes keywords only, accountant=, ledger= and distributed=; module, "
                "optimizer and data are given to its make_private"
            )
        asked = inspect.signature(cls.make_private).parameters
        for name in given:
            if name in MOVED and name not in cls.__dataclass_fields__:
                raise TypeError(
                    f"PrivacyEngine has no {name}=: for make_private it is {MOVED[name]}"
                )
            if name in asked:
                raise TypeError(f"PrivacyEngine has no {name}=: it is an argument of make_private")
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name in NOT_OF_THE_ENGINE:
            raise AttributeError(
                f"PrivacyEngine has no {name}: write {NOT_OF_THE_ENGINE[name]}",
                name=name,
                obj=self,
            )
        raise AttributeError(
            f"'PrivacyEngine' object has no attribute {name!r}", name=name, obj=self
        )

    def __post_init__(self) -> None:
        owner = type(self).__name__
        for name, kind in (("accountant", (str, Accountant)), ("ledger", (str, os.PathLike))):
            if (value := getattr(self, name)) is not None:
                checks.instance(name, value, kind, owner=owner)
        if self.distributed is not None:
            checks.flag("distributed", self.distributed, owner=owner)

    @one_run
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        max_grad_norm: float,
        epochs: int | None = None,
        scheme: Scheme | None = None,
        strategy: Strategy | None = None,
        mechanism: MatrixMechanism | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        individual: IndividualFilter | None = None,
        seed: int | None = None,
        gradients: Gradients = Gradients(),
        noise: NoiseOptions = NoiseOptions(),
        loading: Loading = Loading(),
    ) -> PrivateTraining:
        """Wire a private run; nothing of the data is read before every argument is checked.

        Say what is released in one of three ways: a scheme and a strategy with the noise
        (``noise_multiplier``) or with the target that it is calibrated to (``target_epsilon`` and
        ``target_delta``); the same with ``epochs`` of a data loader in place of the scheme; or a
        ``mechanism``, which is all of it.

        Args:
            module: the model, also a compiled one. It is what ``private.module`` is, with its class
                and methods, and ``private.detach()`` leaves it as it was; modes hooks and functorch
                return Opacus's module around it.
            optimizer: any torch optimizer over exactly the module's trainable parameters. One that
                scales gradients (``ScaledAdam``) has them scaled before they are clipped, in modes
                hooks and functorch.
            data: a map-style data set with a length N; or a data loader over one, whose collate
                function, workers and pinning are taken over and whose sampler is replaced.
            max_grad_norm: R > 0, the bound on the L2 norm of an example's gradient.
            epochs: with a data loader and ``scheme=None``: Poisson batches with the loader's batch
                size as the expected one, for ``epochs * len(data)`` steps, ``len(data)`` of which
                are an epoch.
            scheme: how batches are drawn, and how many steps there are.
            strategy: how noise is correlated; independent (``Identity``) by default.
            mechanism: scheme, strategy and σ in one, for instance from a checkpoint.
            noise_multiplier: σ ≥ 0, in units of R; or let it be calibrated:
            target_epsilon: ε > 0 to be met at ``target_delta``.
            target_delta: δ in (0, 1), below 1/N. With ``noise_multiplier`` it is the default of
                ``private.guarantee()``.
            individual: a privacy budget for every example, which is left out once its own gradients
                have spent it (``dptrain.individual``); needs ``noise_multiplier``, or
                ``mechanism``. The filter holds ε and δ. Rows must reach the model in the loader's
                order: they say who is charged.
            seed: non-negative integer for a reproducible run; ``None`` draws fresh entropy. The
                global generators of torch, numpy and Python are seeded by it as well, for dropout.
            gradients: how per-example gradients are formed, clipped and checked.
            noise: how noise is drawn and kept.
            loading: in what parts a batch comes, and how many steps make an epoch.

        Returns:
            A ``PrivateTraining``; unpacks to module, optimizer, loader, and is a context that ends
            the run.

        Raises:
            TypeError: for an argument of another type, or one that there is none of.
            ValueError: for contradicting or impossible arguments, with the remedy.
        """
        ranks = Ranks.of(self.distributed)
        ranks.log(self.distributed)
        request = RunRequest.checked(
            module=module,
            optimizer=optimizer,
            data=data,
            max_grad_norm=max_grad_norm,
            epochs=epochs,
            scheme=scheme,
            strategy=strategy,
            mechanism=mechanism,
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            individual=individual,
            seed=seed,
            gradients=gradients,
            noise=noise,
            loading=loading,
        )
        if request.divided is not None:
            request.divided.check_trained(request.parameters, ranks)
        mechanism, target = mechanism_of(ranks, request, self.accountant)
        find_accountants(mechanism, self.accountant)
        sampling, drawing, others = ranks.from_first(lambda: split_seed(seed))
        if ranks.rank == 0 and (short := mechanism.scheme.shortfall(sampling)):
            warnings.warn(short, UserWarning, stacklevel=3)  # past the decorator
        with contextlib.ExitStack() as undo:
            parts = wired(
                request,
                mechanism,
                ranks=ranks,
                ledger=self.ledger,
                seeds=(sampling, drawing),
                undo=undo,
            )
            private = PrivateTraining(
                attached=parts.attached,
                optimizer=parts.optimizer,
                loader=parts.optimizer.loader,
                mechanism=mechanism,
                target=target,
                target_delta=request.delta,
                accountant=self.accountant,
                seed_given=seed is not None,
                request=request,
                boundary=parts.boundary,
            )
            begin_together(ranks, private, request.module)
            # A loop often seeds torch with a number that everybody can read. Dropout and random
            # masks would then be known functions of the batch's shape, which its longest example
            # decides; with numbers that nobody knows, what others draw is independent of it.
            seed_globals(others + ranks.rank)
            undo.pop_all()
        return private
