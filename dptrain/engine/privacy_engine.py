"""The privacy engine: three lines that make a training loop private."""

from __future__ import annotations

import functools
import os
import pathlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dptrain.accounting import Accountant, find_accountants
from dptrain.accounting.base import check_delta
from dptrain.clipping import choose_mode, parameter_groups, wrap_module
from dptrain.clipping.base import FLAT, ClippingStyle, summing_dtype
from dptrain.core import Guarantee, checks, split_seed
from dptrain.distributed import Ranks, bare_module, check_not_prepared, check_whole_optimizer
from dptrain.engine import validation
from dptrain.engine.optimizer import PrivateOptimizer
from dptrain.engine.private_training import PrivateTraining, check_scheduler
from dptrain.engine.scaled_adam import ScalesGradients
from dptrain.engine.shared_run import begin_together, one_run, shared_ledger
from dptrain.engine.state_watch import StateWatch, checked_public
from dptrain.engine.wiring import check_individual, loader_of, mechanism_of, poisson_like
from dptrain.individual import IndividualFilter
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import noise_stream
from dptrain.sampling import Scheme, check_microbatches
from dptrain.sampling.loading import check_length
from dptrain.strategies import Identity, Strategy


class PrivacyEngine:
    """Turns a module, an optimiser and a data set into a private training run.

    Example:
        >>> private = PrivacyEngine().make_private(
        ...     module=model, optimizer=optimizer, dataset=train_set,
        ...     scheme=MinSep.for_batch_size(
        ...         batch_size=512, dataset_size=len(train_set), min_sep=64, steps=2000),
        ...     strategy=BandMF(bands=16),
        ...     max_grad_norm=1.0, target_epsilon=8.0, target_delta=1e-5)
        >>> model, optimizer, loader = private
        >>> for x, y in loader:
        ...     optimizer.zero_grad(); loss_fn(model(x), y).backward(); optimizer.step()
        >>> print(private.guarantee())
    """

    @one_run
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        data_loader: DataLoader | None = None,
        dataset: Any = None,
        scheme: Scheme | None = None,
        strategy: Strategy | None = None,
        mechanism: MatrixMechanism | None = None,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        max_grad_norm: float,
        clipping: ClippingStyle = FLAT,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        max_physical_batch_size: int | None = None,
        microbatches: int | None = None,
        grad_sample_mode: str | None = None,
        loss_reduction: str = "mean",
        probe: str = "shapes",
        views: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
        pin_memory: bool = False,
        lr_scheduler: Any = None,
        seed: int | None = None,
        ledger: str | pathlib.Path | None = None,
        accountant: str | Accountant | None = None,
        secure: bool = False,
        noise_dtype: torch.dtype = torch.float32,
        regenerate_noise: bool = False,
        individual: IndividualFilter | None = None,
        buffers: str | Iterable[str] | None = None,
        distributed: bool | None = None,
    ) -> PrivateTraining:
        """Wire a private run; nothing of the data is read before every argument is checked.

        Args:
            module: the model, in eager mode; its parameters stay the user's.
            optimizer: any torch optimiser over exactly the module's trainable parameters. One that
                scales gradients (``ScaledAdam``) has them scaled before
                they are clipped, in modes hooks and functorch.
            criterion: the loss, to be checked: one that ties examples together is refused.
            data_loader: an existing loader to take over (data set, collate function, workers,
                pinning); its sampler is replaced. Give this or ``dataset``.
            dataset: a map-style data set with a length.
            scheme: how batches are drawn. ``None``, with ``data_loader`` and ``epochs``, is
                Poisson with the loader's batch size as the expected one, for
                ``epochs * len(data_loader)`` steps, ``len(data_loader)`` an epoch.
            strategy: how noise is correlated; independent (``Identity``) by default.
            mechanism: scheme, strategy and σ in one, for instance from a checkpoint.
            noise_multiplier: σ; or let it be calibrated:
            target_epsilon: ε > 0 to be met at ``target_delta``.
            target_delta: δ in (0, 1), below 1/N. With ``noise_multiplier`` it is the default of
                ``private.guarantee()``.
            max_grad_norm: R, the bound on an example's gradient.
            clipping: how it is met: the whole gradient shortened to R (``Flat``), layers or
                groups of parameters by themselves (``PerLayer``, ``PerGroup``), or every
                gradient normalised (``Automatic``). The sensitivity is R in each of them.
            epochs: with ``scheme=None`` only, see there.
            steps_per_epoch: logical steps that one pass over the loader yields; ``None``: all.
            max_physical_batch_size: most examples in memory at once; larger batches come in parts.
            microbatches: in how many parts every batch comes instead, whatever its size. Then
                ``len(loader)`` is known, which trainers that count batches need.
            grad_sample_mode: ``"bookkeeping"``, ``"hooks"`` or ``"functorch"``.
                ``None`` is bookkeeping if it knows every trainable layer, and else hooks.
            loss_reduction: ``"mean"`` or ``"sum"``, as the loss reduces over the rows of the batch.
            probe: when it is checked, by passes over a few examples that leave no trace, that the
                module keeps the examples apart: ``"shapes"`` whenever its arguments come in shapes
                (but for the number of rows) that were not seen before, ``"first"`` on the first
                batch, ``"off"`` never. ``RowProbe`` says what that
                shows, and the guarantee where less was done than ``"shapes"``.
            views: K, augmentation multiplicity (De et al. 2022, arXiv 2204.13650): the model is fed
                K rows an example *one after the other* (``x.flatten(0, 1)`` of a batch of shape
                (B, K, ...), labels by ``y.repeat_interleave(K)``), and the loss is reduced over all
                B·K rows. The mean of the K rows' gradients is clipped, once. With K equal views
                the release is that of ``views=1``, whatever the reduction. In another order of
                rows one example would reach several of these means, and the guarantee be false.
            collate_fn, num_workers, pin_memory: as in ``DataLoader``.
            lr_scheduler: a scheduler on ``optimizer``, made to tick once a logical step.
            seed: non-negative integer for a reproducible run; ``None`` draws fresh entropy.
            ledger: file that records released steps, so that a resumed run cannot release a step
                in two versions; see ``StepLedger``.
            accountant: one by name or value, instead of the tightest that applies.
            secure: draw noise so that floating-point sampling gives nothing away, slower; see
                ``SecureNormals``. Excludes ``seed``.
            noise_dtype: of the buffers of past noise. ``torch.bfloat16`` halves them, but then the
                noise is not the one that was accounted for and the guarantee is an estimate.
            regenerate_noise: draw past noise again instead of keeping it; for a banded inverse.
            individual: a privacy budget for every example, which is left out once its own gradients
                have spent it (``dptrain.individual``); needs ``noise_multiplier``, or
                ``mechanism``. The filter holds ε and δ. Rows must reach the model in the loader's
                order: they say who is charged.
            buffers: what forward passes may change in the module: its running statistics, caches,
                counters. A step that changes a buffer or an attribute is refused before anything of
                it is released (``StateWatch``), unless its name (as in
                ``named_buffers``; patterns as in ``fnmatch``) is declared public here, because
                no example has an influence on it. ``"public"``: all of them. The guarantee says so.
            distributed: make one run of all ranks of torch's default process group, each of which
                calls this with the same arguments (``Ranks``); parameters
                and seeds are rank 0's. ``None``: if there are several. ``False``: each rank for
                itself, and the guarantees of such runs on the same data add up.

        Returns:
            A ``PrivateTraining``; unpacks to module, optimizer, loader.

        Raises:
            ValueError, TypeError: for contradicting or impossible arguments, with the remedy.
        """
        ranks = Ranks.of(distributed)
        ranks.log(distributed)
        validation.check_types(
            scheme=(scheme, Scheme),
            strategy=(strategy, Strategy),
            mechanism=(mechanism, MatrixMechanism),
            accountant=(accountant, (str, Accountant)),
            ledger=(ledger, (str, os.PathLike)),
        )
        checks.function("criterion", criterion)
        if lr_scheduler is not None:
            check_scheduler(lr_scheduler)
        module = bare_module(module, grad_sample_mode)
        check_whole_optimizer(optimizer)
        check_not_prepared(optimizer=optimizer, data_loader=data_loader)
        validation.check_not_private(data_loader=data_loader, dataset=dataset)
        validation.check_types(data_loader=(data_loader, DataLoader))
        noise_stated = noise_multiplier is not None or mechanism is not None
        check_individual(individual, target_epsilon, noise_stated=noise_stated)
        numbers = validation.check_choices(
            loss_reduction=loss_reduction,
            probe=probe,
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            mechanism=mechanism,
        )
        max_grad_norm, noise_multiplier, target_epsilon, target_delta = numbers
        validation.check_noise_options(
            secure=secure, noise_dtype=noise_dtype, regenerate_noise=regenerate_noise, seed=seed
        )
        validation.check_module(module)
        public = checked_public(module, buffers)
        grad_sample_mode = choose_mode(grad_sample_mode, module)
        validation.check_mode(module, grad_sample_mode)
        validation.check_optimizer(optimizer, module)
        if lr_scheduler is not None:
            validation.check_scheduled(lr_scheduler, optimizer)
        validation.check_criterion(criterion, loss_reduction)
        views = checks.integer("views", views)
        if num_workers is not None:
            num_workers = checks.integer("num_workers", num_workers, minimum=0)
        check_microbatches(max_physical_batch_size, microbatches)
        parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        groups = parameter_groups(clipping, module, parameters)
        source = validation.dataset_of(data_loader, dataset, collate_fn, num_workers)
        if scheme is None and mechanism is None:
            scheme, steps_per_epoch = poisson_like(data_loader, epochs, steps_per_epoch)
        elif epochs is not None:
            raise ValueError(
                f"epochs={epochs}: the scheme already says how many steps run; drop it"
            )
        planned = scheme if mechanism is None else mechanism.scheme
        assert planned is not None
        check_length(source, planned)
        if target_delta is not None:
            check_delta(target_delta, planned, name="target_delta", large="refuse")
        if mechanism is not None:
            validation.check_only_mechanism(
                scheme=scheme,
                strategy=strategy,
                noise_multiplier=noise_multiplier,
                target_epsilon=target_epsilon,
            )
            strategy = mechanism.strategy
        if individual is not None:
            individual.check_plan(planned, strategy or Identity())
        open_noise = functools.partial(
            noise_stream, secure=secure, dtype=noise_dtype, regenerate=regenerate_noise
        )
        strategy = (strategy or Identity()).bind(planned.steps)
        # Whatever the stream refuses is to be refused before minutes of calibration.
        open_noise(strategy, steps=planned.steps, like=[torch.empty(1)], seed=0)
        target: Guarantee | None = None
        if mechanism is None:
            mechanism, target = mechanism_of(
                ranks, planned, strategy, noise_multiplier, target_epsilon, target_delta, accountant
            )
        find_accountants(mechanism, accountant)
        spending = None
        if individual is not None:
            spending = individual.record(mechanism)
            target_delta = target_delta or individual.target_delta

        sampling_seed, noise_seed = ranks.from_first(lambda: split_seed(seed))
        loader = loader_of(
            data_loader,
            dataset,
            scheme=mechanism.scheme,
            seed=sampling_seed,
            max_physical_batch_size=max_physical_batch_size,
            microbatches=microbatches,
            steps_per_epoch=steps_per_epoch,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pin_memory,
            rank=ranks.rank,
            world_size=ranks.world_size,
            check_collate=probe != "off",
        )
        if ranks.rank == 0 and (short := mechanism.scheme.shortfall(sampling_seed)):
            warnings.warn(short, UserWarning, stacklevel=3)  # past the decorator
        released = shared_ledger(ranks, mechanism, ledger)
        noise = open_noise(
            mechanism.strategy,
            steps=mechanism.steps,
            like=[torch.empty_like(p, dtype=summing_dtype(p)) for p in parameters],
            seed=noise_seed,
        )
        # After all that may be refused, so that a refusal leaves the user's module as it was.
        wrapped, clipper = wrap_module(
            module,
            parameters,
            mode=grad_sample_mode,
            style=clipping,
            groups=groups,
            loss_reduction=loss_reduction,
            loader=loader,
            views=views,
            probe=probe,
        )
        watch = StateWatch(wrapped._module, public, own=wrapped.own_attributes)
        private_optimizer = PrivateOptimizer(
            optimizer,
            mechanism=mechanism,
            max_grad_norm=max_grad_norm,
            loss_reduction=loss_reduction,
            noise=noise,
            clipper=clipper,
            loader=loader,
            ledger=released,
            individual=spending,
            ranks=ranks,
            watch=watch,
        )
        private = PrivateTraining(
            module=wrapped,
            optimizer=private_optimizer,
            loader=loader,
            mechanism=mechanism,
            target=target,
            target_delta=target_delta,
            accountant=accountant,
            seed_given=seed is not None,
            probe=probe,
            settings={
                "max_grad_norm": float(max_grad_norm),
                "clipping": clipping.to_dict(),
                "loss_reduction": loss_reduction,
                "views": views,
                "scaled": isinstance(optimizer, ScalesGradients),
                "secure": secure,
                "noise_dtype": str(noise_dtype),
                "regenerate_noise": regenerate_noise,
                "buffers": list(public),
            },
            individual=individual,
        )
        if lr_scheduler is not None:
            private.register_scheduler(lr_scheduler)
        begin_together(ranks, private, module)
        return private
