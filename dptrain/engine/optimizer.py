"""The optimizer wrapper: clipped sums in, correlated noise added, one release a logical step."""

from __future__ import annotations

import hashlib
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch.utils.hooks import RemovableHandle

from dptrain.clipping import Attached, Unreached
from dptrain.clipping.bookkeeping import uncompiled
from dptrain.core import Array, on_processor
from dptrain.distributed import Ranks, is_divided, local_of
from dptrain.engine.release_ledger import StepLedger, checksum, digest_of, sums_of_words
from dptrain.engine.request import RunRequest
from dptrain.engine.scaled_adam import scales_of
from dptrain.engine.shards import DividedModule, Shards, add_part, rounded_sums, set_gradients
from dptrain.engine.sliced import SlicedOptimizer, in_pieces, joined_states
from dptrain.engine.state_watch import StateWatch
from dptrain.individual import IndividualRecord
from dptrain.mechanism import MatrixMechanism
from dptrain.noise import FlatStream, Rounding
from dptrain.sampling import MicroBatch, PrivateLoader, Scheme

logger = logging.getLogger(__name__)

_LEAST_NORM, _LARGEST_NORM = 1e-30, 1e30  # R, and N·R: far from what float32 cannot hold
_NO_COPY = (
    "the private optimizer of a run can be neither copied nor pickled, because it holds the seeds "
    "of its noise: save the run with private.state_dict(), or copy the optimizer that it wraps, "
    "its original_optimizer"
)
NORM_PAD = 1.0 + 1e-6  # on norms that are charged: far above their rounding error in float32
_ADMITTED = "what the individual filter admitted"
_BEGAN = "noise, parameters or released steps at the start"


class PrivateOptimizer(DPOptimizer):
    """Wraps a torch optimizer; ``step()`` is called once for every batch the loader yields.

    On the last microbatch of logical step t the wrapped optimizer is given
    ``(Σ_i clip(g_i, R) + σ R (C^-1 Z)_t) / B̄`` (no division for a sum-reduced loss) and steps; on
    earlier microbatches the clipped sums are only added up. Which row is whose, its weight and
    "last of this step" are read from the batch itself. If the wrapped optimizer scales gradients
    (``ScalesGradients``), clip(g_i, R) is clip(s ⊙ g_i, R) above and it is
    given the whole divided by s.

    ``scaler.step(optimizer)`` of a ``torch.amp.GradScaler`` works too. The scale of the loss is
    undone before gradients are clipped, no step is ever skipped, and the scaler is told of no
    overflow, so that its scale follows from the number of steps alone
    (docs/theory/clipping.md#thm-loss-scale).

    Args:
        watch: begun by the loader with every batch.
        at_boundary: called after every completed logical step with the number of steps so far.
        individual: what every example has spent, where an individual filter runs.

    Attributes:
        max_grad_norm: R; may be changed between steps (a public schedule), the noise follows it. A
            step under way keeps the R, and the scales, that its first microbatch was clipped with.
        at_step_boundary: whether the last call of ``step`` completed a logical step.
        rounding: what the grid of the release costs.
        unreached: warns of parameters that no call reaches, on one of the ranks.
        owners: follows some of the steps, where that is wanted.
        shared: the part of a step that the processes of the run make together: sums are added up
            over them once a logical step, and each adds the noise (``Ranks``).
        shards: of the ranks, where each has a slice of the noise, and maybe of the optimizer too;
            then the release is nowhere whole, ``p.grad`` is ``None`` after a step, and hooks on the
            wrapped optimizer see its slice.
        detached: whether the run was ended by ``private.detach()``.
        interrupted: whether the last release or update was cut short, so that noise, model and
            position may disagree; only loading a checkpoint mends that.
    """

    of_a_run = True  # no state of a module that holds it

    def __init__(
        self,
        request: RunRequest,
        *,
        mechanism: MatrixMechanism,
        noise: FlatStream,
        attached: Attached,
        loader: PrivateLoader,
        ledger: StepLedger,
        ranks: Ranks,
        watch: StateWatch,
        at_boundary: Callable[[int], None],
        shards: Shards | None,
        individual: IndividualRecord | None,
    ) -> None:
        super().__init__(
            request.optimizer,
            noise_multiplier=mechanism.noise_multiplier,
            max_grad_norm=request.max_grad_norm,
            expected_batch_size=mechanism.scheme.expected_batch_size,  # B̄ = N p0, never rounded
            loss_reduction=request.gradients.reduction,
        )
        self.noise = noise
        self.clipper = attached.clipper
        self.loader = loader
        self.ledger = ledger
        self.individual = individual
        self.watch, self.owners = watch, attached.owners
        named = uncompiled(request.module).named_parameters()
        self.unreached = Unreached({p: name for name, p in named}) if ranks.rank == 0 else None
        self.shards = shards
        self.shared = SharedStep(ranks)
        self.steps_executed = 0
        self.at_step_boundary = True
        self.interrupted = False
        self.detached = False
        self._planned = (self.noise_multiplier, self.expected_batch_size)
        self._trained = self.params  # a fresh list of what is trained at the moment
        self._bound = float(request.max_grad_norm)
        self.rounding = Rounding(
            grid_bits=noise.grid_bits,
            entries=sum(p.numel() for p in self.params),
            steps=mechanism.steps,
            noise_multiplier=mechanism.noise_multiplier,
            examples=_most_examples(mechanism.scheme),
            error=None if noise.notes else noise.rounding_error,
        )
        self._pad = self.rounding.pad
        self._scales: list[torch.Tensor | None] | None = None
        self._bound_since: MicroBatch | None = None
        self._parts_done = 0
        self._at_boundary = at_boundary
        self._largest_loss_scale: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise TypeError(_NO_COPY)

    def __reduce__(self) -> Any:
        raise TypeError(_NO_COPY)

    def __setstate__(self, state: Any) -> None:
        # torch's would have every run of the process step by what it knows of plain optimizers.
        raise TypeError(_NO_COPY)

    def restart_at(self, steps_executed: int) -> None:
        """Continue with step ``steps_executed`` (from 0), as after a checkpoint was loaded."""
        self.steps_executed = steps_executed
        self.at_step_boundary = True
        self.interrupted = False
        self.shared.restart(self.clipper.nonfinite_examples)
        self._reset_sums()
        self.clipper.discard()

    def bounds(self) -> tuple[float, torch.Tensor]:
        """The norm to clip to, and the weights of the current batch's rows, shape (rows,).

        Gradients are clipped to a little less than R, as two sums on the grid of the release may
        differ by as much more than the sums themselves (``Rounding.pad``).
        """
        batch = self.loader.current
        if batch is None:
            raise RuntimeError(
                "backward pass without a batch: take a batch from the private loader before the "
                "backward pass, and give a trainer private.loader instead of the loader it was "
                "made from"
            )
        if batch.part == 0 and batch is not self._bound_since:
            if not 0 < self.max_grad_norm < math.inf:  # NaN is neither
                raise ValueError(
                    f"optimizer.max_grad_norm={self.max_grad_norm}: must be positive and finite"
                )
            largest = _LARGEST_NORM / self.rounding.examples
            if not _LEAST_NORM <= self.max_grad_norm <= largest:
                raise ValueError(
                    f"optimizer.max_grad_norm={self.max_grad_norm}: must be between "
                    f"{_LEAST_NORM:g} and {largest:g}, so that float32 holds the sums of gradients"
                )
            self._scales = scales_of(self.original_optimizer, self.params)
            self._bound, self._bound_since = float(self.max_grad_norm), batch
        return self._bound * (1.0 - self._pad), torch.from_numpy(batch.weights)

    def _admit(self, norms: torch.Tensor) -> torch.Tensor:
        """Factors in [0, 1] on the clipped gradients of the batch at hand, shape (rows,)."""
        batch = self.loader.current
        assert batch is not None
        assert self.individual is not None
        # An example whose norm is not finite is left out by the clipper and pays nothing.
        found = norms.detach().cpu().double()
        ratios = torch.where(torch.isfinite(found), found, 0.0) * NORM_PAD / self._bound
        # What rounding to the grid may add is charged too; a norm of 0 is held to its word below.
        charged = torch.where(ratios > 0, ratios + self._pad, 0.0).clamp(max=1.0)
        used = len(batch.indices)  # the other rows are padding
        shares = torch.zeros(len(norms), dtype=torch.float64)
        admitted = self.shared.admit(self.individual, batch, charged[:used].numpy())
        shares[:used] = torch.from_numpy(admitted)
        # A share a is charged a·(r + pad), and moves the sum on the grid by a'·r + pad.
        less = (1.0 - shares) * self._pad / ratios
        return torch.where(ratios > 0, (shares - less).clamp(min=0.0), 0.0).to(norms)

    def check_whole(self) -> None:
        """Refuse to go on with, or to save, what an interrupted release left behind."""
        if self.interrupted:
            raise RuntimeError(
                f"step {self.steps_executed} was interrupted during its release, so the model, its "
                "noise and its place in the plan may disagree: resume from the last checkpoint "
                "with private.load_state_dict(state)"
            )

    def detach(self) -> None:
        """Take what was kept of a step off the parameters; no step is made any more."""
        self.detached = True
        self.clipper.discard()
        if self.shards is not None:
            self.shards.detach()
        for p in self._trained:
            vars(p).pop("summed_grad", None)

    @property
    def params(self) -> list[Any]:
        """The parameters that are trained at the moment, in the wrapped optimizer's order."""
        groups = self.original_optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def check_parameters(self) -> None:
        """Refuse to step with parameters that are not those of the run.

        What the wrapped optimizer finds in ``p.grad`` of a parameter of the run is the release,
        which replaces whatever was there. In any other it would find a plain gradient, neither
        clipped nor noised.
        """
        known = {id(p) for p in self._trained}
        now = [p for group in self.original_optimizer.param_groups for p in group["params"]]
        others = [p for p in now if id(p) not in known and (p.requires_grad or p.grad is not None)]
        if others:
            raise RuntimeError(
                f"the optimizer holds {len(others)} parameter(s) that are not part of the run, of "
                f"shape {[tuple(p.shape) for p in others]}, and that have a gradient or are "
                "trainable (unfrozen or added to the optimizer after make_private). Their "
                "gradients would be neither clipped nor noised. Call requires_grad_(False) on "
                "them and set their .grad to None, or start a new run that trains them"
            )
        now = [p for p in now if p.requires_grad]
        if len(now) != len(known) or not known.issuperset([id(p) for p in now]):
            missing = [tuple(p.shape) for p in self._trained if not any(p is q for q in now)]
            raise RuntimeError(
                f"{len(missing)} parameter(s) of the run, of shape {missing}, were frozen or "
                "removed from the optimizer after make_private, but the noise is planned for all "
                "parameters: call requires_grad_(True) on them again, or start a new run that "
                "does not train them"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; the clipped sum of a step that is under way stays."""
        self.clipper.discard()
        self.original_optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Use the current batch; on the last microbatch of a logical step, release and update."""
        try:
            return self._step(closure)
        except BaseException:
            # A GradScaler takes these away after a step that came to its end, and multiplies the
            # scale of the next by what it finds.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise

    def _step(self, closure: Callable[[], float] | None) -> float | None:
        if self.detached:
            raise RuntimeError(
                "private.detach() has ended this run, so a step of this optimizer would not be "
                "private. Start a new run, or, to train without privacy, use the optimizer that "
                "you gave make_private, its original_optimizer"
            )
        self.check_whole()
        if (self.noise_multiplier, self.expected_batch_size) != self._planned:
            raise RuntimeError(
                f"noise_multiplier={self.noise_multiplier} and "
                f"expected_batch_size={self.expected_batch_size} were changed from "
                f"{self._planned}, the values of the mechanism that the guarantee describes: set "
                "them back, or start a run with another mechanism"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.owners is not None:
            self.owners.end()
        self.check_parameters()
        batch = self.loader.current
        if batch is None:
            raise RuntimeError(
                "optimizer.step() was called without a new batch: take a batch from the private "
                "loader, run one backward pass, then call step() once"
            )
        if self.loader.unused is None:
            raise RuntimeError(
                "optimizer.step() was called a second time for one batch of the private loader, "
                "which may be released only once. Add up the losses of the batch and call "
                "backward() and step() once, or take another batch for the second step. To train "
                "another module in between, use an optimizer that holds only that module's "
                "parameters"
            )
        if batch.part == 0:
            self._reset_sums()  # also drops what an abandoned attempt at this step had summed
        if batch.step != self.steps_executed or batch.part != self._parts_done:
            raise RuntimeError(
                f"the batch of step {batch.step}, microbatch {batch.part} came when step "
                f"{self.steps_executed}, microbatch {self._parts_done} was due: iterate over the "
                "private loader that belongs to this optimizer"
            )
        if self.clipper.batch is not batch:  # left over from a batch that was abandoned
            self.clipper.discard()
        self.watch.check()
        loss_scale = self._loss_scale()
        max_grad_norm, weights = self.bounds()
        how: dict[str, Any] = {
            "max_grad_norm": max_grad_norm,
            "weights": weights,
            "scales": self._scales,
            "admit": None if self.individual is None else self._admit,
            "loss_scale": loss_scale,
        }
        if isinstance(self.shards, DividedModule):
            self._parts_done += 1
            self.shards.part_of(self.clipper, self.params, **how)
        else:
            self._take(self.clipper.clipped_sum(**how))
        self.loader.report_microbatch()
        self.watch.settle()
        self.at_step_boundary = batch.last
        if batch.last:
            missing = self._missing()
            few = missing if len(missing) < len(self.params) else []
            nowhere = self.shared.add_up(self, parts=batch.parts, bound=self._bound, missing=few)
            if self.unreached is not None and len(missing) < len(self.params):
                self.unreached.tell(nowhere)
            self.interrupted = True  # until all of the following has happened
            late = self._release()
            if self.individual is not None:
                self.individual.commit(batch.step, batch.parts)
            if self.shards is None or self._sliced is None:
                self.original_optimizer.step()
            else:
                self.shards.step(self.params)
            if late is not None:
                self.ledger.record(self.steps_executed, digest_of(late))
            self.watch.confirm()
            self.steps_executed += 1
            self._reset_sums()
            self.loader.complete_step()
            self.interrupted = False
            self._at_boundary(self.steps_executed)
        return loss

    def _take(self, sums: Sequence[torch.Tensor | None]) -> None:
        """Add the clipped sums of a microbatch to those of the step.

        A function of its own: nothing holds them while the step is released, when memory is short.
        """
        self._parts_done += 1  # before the sums, or an interrupted call could be made twice
        add_part(sums, self.params)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: a ``GradScaler`` calls ``step()`` whatever it finds, and states its scale.

        It looks for overflows in ``p.grad`` right after asking, and its ``update()`` fails if there
        is none to look at. So it is shown zeros: its scale must not depend on the batch, of which
        Opacus's modes leave the plain gradient there.
        """
        for p in self.params:
            p.grad = None
        shown = min(self.params, key=torch.Tensor.numel)
        shown.grad = torch.zeros_like(shown)
        return True

    def _loss_scale(self) -> float:
        """The factor by which a ``GradScaler`` says that it multiplied the loss; 1 without one."""
        if "found_inf" not in vars(self):
            return 1.0
        stated: Any = getattr(self, "grad_scale", None)
        if stated is None:
            raise RuntimeError(
                "scaler.unscale_(optimizer) was called before scaler.step(optimizer), when there "
                "was no gradient yet to unscale. Remove unscale_ (and clip_grad_norm_ with it): "
                "the private step divides by the scale and clips every example itself. This step "
                "released nothing"
            )
        scale = float(stated)
        if not 0 < scale < math.inf:  # NaN is neither
            raise RuntimeError(
                f"the scale of GradScaler is {scale}: must be positive and finite; set it with "
                "scaler.update(new_scale=65536.0), for instance"
            )
        if self._largest_loss_scale is not None and scale > self._largest_loss_scale:
            logger.warning(
                "the scale of GradScaler grew from %g to %g. A private run does not report "
                "overflows to it, since these depend on the data, so the scale only grows; "
                "examples that overflow are left out (private.nonfinite_examples). "
                "GradScaler(growth_interval=10**9) keeps the scale constant",
                self._largest_loss_scale,
                scale,
            )
        self._largest_loss_scale = max(scale, self._largest_loss_scale or 0.0)
        return scale

    def _missing(self) -> list[Any]:
        """Parameters that no gradient came of, as long as that was not told."""
        if self.unreached is None:
            return []
        return self.unreached.look(self.params, [p.summed_grad for p in self.params])

    def add_noise(self) -> None:
        """Leave in ``p.grad`` the noisy sum of the step that is under way, not scaled any more.

        Where the optimizer steps on slices, these get theirs, and ``p.grad`` becomes ``None``.
        """
        deviation = self.noise_multiplier * self._bound
        if self.shards is not None:
            self.shards.add_noise(self.params, self.noise, deviation, self._scales)
        else:
            released = self.noise.release([p.summed_grad for p in self.params], deviation)
            set_gradients(self.params, released, self._scales)

    def scale_grad(self) -> None:
        """Divide by the public constant B̄ where the loss is a mean."""
        if self.loss_reduction == "mean":
            torch._foreach_div_([p.grad for p in self._stepped], self.expected_batch_size)

    @property
    def _sliced(self) -> SlicedOptimizer | None:
        return None if self.shards is None else self.shards.sliced

    @property
    def _stepped(self) -> list[Any]:
        """The tensors that the wrapped optimizer updates: the parameters, or this rank's pieces."""
        return self.params if self._sliced is None else list(self._sliced.parameters)

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call ``fn(optimizer)`` before every update, when the release is in ``p.grad``."""
        if self._sliced is not None:
            raise RuntimeError(
                "attach_step_hook() needs the whole release, and each rank of this run has only a "
                "slice of it: use NoiseOptions(shard='noise'), or register_step_pre_hook(), which "
                "gets the slice"
            )
        super().attach_step_hook(fn)

    def _release(self) -> list[torch.Tensor] | None:
        """Leave the release in ``p.grad``, and enter it into the ledger.

        Returns:
            What is to be entered after the update, on a device that would be waited for before.
            This is only where the ledger goes with the process, which nothing of the release
            leaves before it is entered, and where the step was not released before.
        """
        self.add_noise()
        self.scale_grad()
        if self.step_hook is not None:
            self.step_hook(self)
        released = [p.grad for p in self._stepped]
        alone = self.shared.ranks.world_size == 1 and self.shards is None
        new = self.ledger.path is None and self.steps_executed == len(self.ledger.digests)
        if alone and new and not on_processor(released[0]):
            return sums_of_words(released)
        with_pieces = () if self.shards is None or self._sliced is None else self.shards.with_all
        digest = self.shared.digest_of(released, ranks=with_pieces)
        self.shared.record(self.ledger, self.steps_executed, digest)
        return None

    def _reset_sums(self) -> None:
        self._parts_done = 0
        for p in self.params:
            p.summed_grad = None

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state; the run's state is ``private.state_dict()``.

        Where it steps on slices, it is the state of this rank's, which says their places.
        """
        if self._sliced is not None:
            return self._sliced.state
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict is a {type(state_dict).__name__}: must be what optimizer.state_dict() "
                "returned"
            )
        self.load_states([state_dict])

    def load_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the wrapped optimizer's state, or the states of slices of it, of all ranks."""
        if self._sliced is not None:
            self._sliced.load(states)
        elif len(states) == 1 and not in_pieces(states[0]):
            self.original_optimizer.load_state_dict(dict(states[0]))
        else:
            self.original_optimizer.load_state_dict(joined_states(self.original_optimizer, states))
        # Opacus 1.5 holds these by reference and would go on showing schedulers the old ones.
        self.param_groups = self.original_optimizer.param_groups
        self.state = self.original_optimizer.state


def _of_the_wrapped(name: str) -> Callable[..., RemovableHandle]:
    def register(self: PrivateOptimizer, *hook: Any, **options: Any) -> RemovableHandle:
        """Register on the wrapped optimizer: its steps are noisy updates, one a logical step."""
        handle: RemovableHandle = getattr(self.original_optimizer, name)(*hook, **options)
        return handle

    return register


for name in (
    "register_step_pre_hook",
    "register_step_post_hook",
    "register_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
):
    setattr(PrivateOptimizer, name, _of_the_wrapped(name))


def _most_examples(scheme: Scheme) -> int:
    """A public number that no batch exceeds: of a private number eight times the nominal one."""
    return scheme.dataset_size if scheme.nominal_size is None else 8 * scheme.population


class SharedStep:
    """Individual budgets, clipped sums and the record of a step, for all ranks alike."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._nonfinite = 0  # examples found on all ranks until the last release
        self._admitted = 0  # checksum of what the individual filter let through in this step
        self._origin: str | None = None  # what the run began with, or went on from

    def restart(self, nonfinite_examples: int) -> None:
        """Go on from a checkpoint, which knows of so many examples on all ranks."""
        self._nonfinite = nonfinite_examples
        self._origin = None

    def admit(self, record: IndividualRecord, batch: MicroBatch, ratios: Array) -> Array:
        """Shares of this rank's examples; the record of every rank charges the examples of all."""
        columns = np.stack([batch.indices.astype(np.float64), ratios])  # exact up to 2^53
        (indices, everybody), own = self.ranks.gather(columns, batch.step, batch.part)
        shares = record.admit(
            step=batch.step, part=batch.part, indices=indices.astype(np.int64), ratios=everybody
        )
        self._admitted = zlib.crc32(shares.tobytes(), self._admitted if batch.part else 0)
        return shares[own]

    def add_up(
        self, optimizer: PrivateOptimizer, *, parts: int, bound: float, missing: Sequence[Any] = ()
    ) -> list[Any]:
        """Make ``p.summed_grad`` the sums of the whole logical batch, of all ranks' shares.

        Where the ranks have shards, ``optimizer.shards.sums`` get this rank's pieces of them
        instead, and ``p.summed_grad`` is ``None``.

        Args:
            parts: number of microbatches that it has added up.
            bound: R that they were clipped to.
            missing: parameters without a gradient on this rank, if they are to be reported.

        Returns:
            Those of ``missing`` that no other rank has a gradient of either.
        """
        if self.ranks.world_size == 1 and optimizer.shards is None:
            return [p for p in missing if not _any(p.summed_grad)]
        clipper = optimizer.clipper
        found = clipper.nonfinite_examples - self._nonfinite
        counts = self.ranks.agree(
            "the end of a step",
            lambda: self._facts(optimizer, parts, bound),
            found,
            len(missing),
            secret=(_ADMITTED, _BEGAN),
        )
        self._nonfinite += sum(count for count, _ in counts)
        clipper.nonfinite_examples = self._nonfinite
        parameters = optimizer.params
        if optimizer.shards is not None:
            nowhere: list[Any] = []
            if any(number for _, number in counts):
                mine = [[_any(p.summed_grad) for p in parameters]]
                columns, _ = self.ranks.gather(np.array(mine, dtype=np.float64))
                reached = np.any(columns.reshape(self.ranks.world_size, -1), axis=0)
                elsewhere = dict(zip(parameters, reached.tolist(), strict=True))
                nowhere = [p for p in missing if not elsewhere[p]]
            optimizer.shards.add_up(parameters)
            return nowhere
        if self.ranks.world_size > 1:
            sums = self.ranks.sum(rounded_sums(parameters), parameters)
            for p, total in zip(parameters, sums, strict=True):
                p.summed_grad = total
        return [p for p in missing if not _any(p.summed_grad)]

    def digest_of(self, released: Sequence[torch.Tensor], *, ranks: Sequence[int] = ()) -> str:
        """Digest of the bits of a release, the same on all ranks.

        Args:
            released: the tensors, or this rank's pieces of them.
            ranks: that have all pieces between them, this one included; the digest is then over
                the pieces of these ranks, in order.
        """
        digest = checksum(released)
        if not ranks:
            return digest
        words = [int(digest[i : i + 8] or "0", 16) for i in range(0, 32, 8)]  # exact as floats
        columns, _ = self.ranks.gather(np.array([words], dtype=np.float64))
        each = columns.reshape(self.ranks.world_size, -1)[list(ranks)]
        return hashlib.sha256(each.tobytes()).hexdigest()[:32]

    def record(self, ledger: StepLedger, step: int, digest: str) -> None:
        """Enter a release before any rank's model is updated with it.

        Copies of a shard that differed would tell the difference of two sums without noise
        (docs/theory/noise.md#thm-copies).
        """
        with self.ranks.together():
            ledger.record(step, digest)
        self.ranks.agree("the release of a step", lambda: {"the noisy sum of the step": digest})

    def _facts(self, optimizer: PrivateOptimizer, parts: int, bound: float) -> dict[str, Any]:
        if self._origin is None:
            noise, released = optimizer.noise.normals.seed, optimizer.ledger.digests
            same = [p for p in optimizer.params if not is_divided(p)]
            began = f"{noise}/{checksum(same)}/{released}"
            # Shards are other numbers on every rank of a row, and the same in every row.
            if optimizer.shards is not None and len(same) < len(optimizer.params):
                own = [local_of(p) for p in optimizer.params if is_divided(p)]
                began += self.digest_of(own, ranks=optimizer.shards.with_all)
            self._origin = hashlib.sha256(began.encode()).hexdigest()[:16]
        return {
            "step": optimizer.steps_executed,
            "microbatches": parts,
            "max_grad_norm": bound,
            "optimizer.param_groups": settings_of(optimizer.original_optimizer),
            _ADMITTED: self._admitted,
            _BEGAN: self._origin,
        }


def _any(total: torch.Tensor | None) -> bool:
    """True if a process found a gradient."""
    return total is not None and bool(total.any())


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups without their parameters, with tensors as numbers."""
    return [
        {
            name: value.tolist() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
