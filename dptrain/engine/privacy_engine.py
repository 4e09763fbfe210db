"""The privacy engine: three lines that make a training loop private."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import warnings
from typing import Any, Self

from dptrain.accounting import Accountant, find_accountants
from dptrain.core import checks, seed_globals, split_seed
from dptrain.distributed import Ranks
from dptrain.engine.arguments import RunArguments, takes
from dptrain.engine.options import MOVED, NOT_OF_THE_ENGINE
from dptrain.engine.private_training import PrivateTraining
from dptrain.engine.request import RunRequest
from dptrain.engine.shared_run import begin_together, one_run, refuse_unknown
from dptrain.engine.wiring import mechanism_of, wired


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
                "PrivacyEngine takes only the keywords accountant=, ledger= and distributed=: "
                "pass module, optimizer and data to its make_private"
            )
        asked = inspect.signature(cls.make_private).parameters
        for name in given:
            if name in MOVED and name not in cls.__dataclass_fields__:
                raise TypeError(
                    f"PrivacyEngine has no {name}=: for make_private it is {MOVED[name]}"
                )
            if name in asked:
                raise TypeError(f"PrivacyEngine has no {name}=: pass it to make_private")
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

    @takes(RunArguments, refuse_unknown)
    @one_run
    def make_private(self, asked: RunArguments) -> PrivateTraining:
        """Wire a private run; nothing of the data is read before every argument is checked.

        Say what is released in one of three ways: a scheme and a strategy with the noise
        (``noise_multiplier``) or with the target that it is calibrated to (``target_epsilon`` and
        ``target_delta``); the same with ``epochs`` of a data loader in place of the scheme; or a
        ``mechanism``, which is all of it.

        Returns:
            A ``PrivateTraining``; unpacks to module, optimizer, loader, and is a context that ends
            the run.

        Raises:
            TypeError: for an argument of another type, or one that there is none of.
            ValueError: for contradicting or impossible arguments, with the remedy.
        """
        ranks = Ranks.of(self.distributed)
        ranks.log(self.distributed)
        request = RunRequest.checked(asked)
        if request.divided is not None:
            request.divided.check_trained(request.parameters, ranks)
        mechanism, target = mechanism_of(ranks, request, self.accountant)
        find_accountants(mechanism, self.accountant)
        sampling, drawing, others = ranks.from_first(lambda: split_seed(request.seed))
        if ranks.rank == 0 and (short := mechanism.scheme.shortfall(sampling)):
            warnings.warn(short, UserWarning, stacklevel=4)  # past the decorators
        with contextlib.ExitStack() as undo:
            private = wired(
                request,
                mechanism,
                target,
                accountant=self.accountant,
                ranks=ranks,
                ledger=self.ledger,
                seeds=(sampling, drawing),
                undo=undo,
            )
            begin_together(ranks, private, request.module)
            # A loop often seeds torch with a number that everybody can read. Dropout and random
            # masks would then be known functions of the batch's shape, which its longest example
            # decides; with numbers that nobody knows, what others draw is independent of it.
            seed_globals(others + ranks.rank)
            undo.pop_all()
        return private
