"""One private training run: what the engine returns, its guarantee and its checkpoint."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dptrain.accounting import (
    Accountant,
    Cost,
    SoFar,
    account,
    epsilon_so_far,
    find_accountants,
    priced_steps,
)
from dptrain.clipping import Attached
from dptrain.clipping.bookkeeping import uncompiled
from dptrain.clipping.owners import Findings
from dptrain.core import (
    Guarantee,
    Kind,
    checks,
    exact_device,
    global_state,
    restore_global_state,
)
from dptrain.engine.divided import Holder, check_not_in_dcp, read_folder, write_folder
from dptrain.engine.optimizer import PrivateOptimizer
from dptrain.engine.request import RunRequest
from dptrain.engine.scaled_adam import ScalesGradients
from dptrain.engine.sealed import (
    SHARE,
    check_fields,
    check_format,
    check_guarantee,
    check_seal,
    check_settings,
    noise_of,
    on_cpu,
    seal,
    shares_of,
)
from dptrain.engine.shards import MODULE_PIECES, load_module, module_state
from dptrain.engine.sliced import joined_states, nothing_of
from dptrain.engine.unfinished import Boundary
from dptrain.engine.validation import check_scheduler
from dptrain.individual import IndividualRecord
from dptrain.mechanism import MatrixMechanism
from dptrain.sampling import PrivateLoader

logger = logging.getLogger(__name__)

FORMAT = 5
SEED_NOTE = (
    "the run's seed was set by hand; the guarantee holds only while nobody but the trainer knows "
    "it and no other run, in any variant, is made with it"
)
_APART = "the guarantee assumes that the module treats every example separately, which "
PROBE_NOTES = {
    "first": _APART + "was checked on the first batch only (probe='first')",
    "off": _APART + "was not checked (probe='off')",
}
OUTSIDE_NOTE = _APART + (
    "was not checked for those parts that were called without the module's own forward (in a "
    "training_step, say)"
)
DETACHED = (
    "private.detach() has ended this run, and no further step of it would be private: start a new "
    "run (make_private takes the same module again)"
)
RESUME_NOTE = (
    "the run was resumed after {} steps without a ledger of released steps; the guarantee assumes "
    "that no later step was released outside this run"
)
DEVICE_NOTE = (
    "gradients were computed on a device of the kind {}; the guarantee assumes that it rounds "
    "float32 numbers as IEEE 754 says, of which only the precision of products was checked"
)
PLATEAU_NOTE = (
    "the learning rate followed a metric that the training loop measured (ReduceLROnPlateau); the "
    "guarantee assumes that the metric depends only on public data or on what the run released"
)


class PrivateTraining:
    """Unpacks to ``module, optimizer, loader``.

    Ends by ``detach``, or by leaving a ``with`` statement that it was made in.

    Attributes:
        module: the very module that ``make_private`` was given; in modes hooks and functorch
            Opacus's around it, until ``detach``.
        optimizer: see ``PrivateOptimizer``.
        loader: see ``PrivateLoader``.
        mechanism: the value that loader, optimizer and accountant share.
        individual_filter: the individual filter that runs, or ``None``.
    """

    of_a_run = True  # no state of a module that holds it

    def __init__(
        self,
        request: RunRequest,
        *,
        mechanism: MatrixMechanism,
        target: Guarantee | None,
        accountant: str | Accountant | None,
        attached: Attached,
        optimizer: PrivateOptimizer,
        boundary: Boundary,
    ) -> None:
        self.module = attached.module
        self._attached = attached
        self._left: list[tuple[nn.Parameter, int]] | None = None  # with versions, when detached
        self.optimizer = optimizer
        self.loader: PrivateLoader = optimizer.loader
        self.mechanism = mechanism
        self.individual_filter = request.individual
        self._settings = stored_options(request)
        self._target_delta = request.delta
        self._accountant = accountant
        probe = request.gradients.probe
        self._probe_notes = (PROBE_NOTES[probe],) if probe in PROBE_NOTES else ()
        self._notes = (*(() if request.seed is None else (SEED_NOTE,)), *self._probe_notes)
        self._notes += request.gradients.notes
        self._schedulers: list[tuple[Any, dict[str, Any]]] = []  # with their own step, if any
        self._guarantees: dict[float, Guarantee] = {}
        if target is not None:
            self._guarantees[target.delta] = target
        self._prices: dict[int, float | None] = {}  # of so_far, by the step they are of
        self._boundary = boundary

    def __iter__(self) -> Iterator[Any]:
        return iter([self.module, self.optimizer, self.loader])

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of a copied module that holds it: there is one run, of the first one

    def __reduce__(self) -> Any:
        raise TypeError(
            "a private run cannot be pickled, because it holds the seeds of its noise: save the "
            "module's state_dict() to publish the model, or private.state_dict() to resume. A "
            "module that is to be pickled whole must not hold the run (del module.private)"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> nn.Module:
        """End the run, and leave the user's module as it was: it then trains like any other.

        Attributes, hooks and methods are its own again; its parameters and their last gradients
        stay. ``guarantee`` and ``state_dict`` go on working, of the run as it ended; what is
        trained afterwards is no part of either. An optimizer that stepped on slices in a run of
        several ranks keeps its settings and begins without state. Called again, it does nothing. It
        does not say that the run was meant to end before its plan (``end_early``).

        Returns:
            The module that ``make_private`` was given, in every mode.
        """
        if self._left is not None:
            return self.module
        with contextlib.suppress(RuntimeError):  # state_dict() will say it again
            self.optimizer.watch.check_saved()
        self.optimizer.watch.restart()
        if not self._under_way:
            self._boundary.restart()
        self.loader.close(DETACHED)
        self.optimizer.detach()
        if self._attached.owners is not None:
            self._attached.owners.drop()
        for scheduler, before in self._schedulers:
            vars(scheduler).pop("step", None)
            vars(scheduler).update(before)
        self._attached.detach()
        self.module = self._attached.own
        self._left = [(p, p._version) for p in self.module.parameters()]
        return self.module

    @property
    def _under_way(self) -> bool:
        """True if a step has begun, so that a checkpoint has to begin it again."""
        batch = self.loader.current
        return batch is not None and batch.step == self.steps_executed

    @property
    def changed_since_detach(self) -> bool:
        """True if the module's parameters were exchanged or written to since ``detach``."""
        if self._left is None:
            return False
        now = {id(p): p._version for p in self.module.parameters()}
        return [(id(p), version) for p, version in self._left] != list(now.items())

    def _check_detached(self) -> None:
        if self.changed_since_detach:
            raise RuntimeError(
                "the module was trained or changed after private.detach(), so it is no longer the "
                "result of this run: take private.state_dict() before"
            )

    @property
    def _conditions(self) -> tuple[str, ...]:
        """Notes of the guarantee, as things stand."""
        probe = self._attached.probe
        seen = probe is not None and probe.outside
        follows = any(isinstance(s, ReduceLROnPlateau) for s, _ in self._schedulers)
        devices = {p.device for p in self.optimizer.params}
        found = (
            *((OUTSIDE_NOTE,) if seen else ()),
            *((PLATEAU_NOTE,) if follows else ()),
            *sorted(DEVICE_NOTE.format(d.type) for d in devices if exact_device(d) != d),
        )
        return tuple(dict.fromkeys((*self._notes, *self.loader.notes, *found)))

    @property
    def _apart(self) -> tuple[str, ...]:
        """The note on what the followed steps showed about the examples' gradients."""
        owners, probe = self._attached.owners, self._attached.probe
        if owners is None or not self.steps_executed:
            return ()
        return (owners.findings.note(vain=probe is not None and probe.vain),)

    @property
    def steps_executed(self) -> int:
        """Noisy updates so far."""
        return self.optimizer.steps_executed

    @property
    def nonfinite_examples(self) -> int:
        """Examples (users, with ``PerUser``) whose gradient was NaN or infinite and was left out.

        This number is private data: it is for the trainer's eyes and not for release.
        """
        return self.optimizer.clipper.nonfinite_examples

    @property
    def last_norms(self) -> torch.Tensor | None:
        """‖g_i‖₂ of the last microbatch before clipping, shape (rows,); ``None`` before the first.

        Rows of padding are included, and scales of the optimizer. Where a user's examples are
        averaged (``PerUser``) there is one norm a user. These are private data: for the trainer's
        eyes and not for release.
        """
        return self.optimizer.clipper.norms

    @property
    def individual(self) -> IndividualRecord:
        """The record of what every example has spent under an individual filter; not for release.

        Raises:
            ValueError: if none does.
        """
        if self.optimizer.individual is None:
            raise ValueError(
                "this run has no individual filter: give make_private individual=, for instance "
                "GDPFilter(target_epsilon=..., target_delta=..., max_steps=...)"
            )
        return self.optimizer.individual

    @property
    def stated_individual(self) -> IndividualRecord:
        """``individual`` as the guarantee states it: all rounds of an odometer may be open.

        Raises:
            ValueError: if the run has no individual filter.
        """
        # After a return to an earlier checkpoint, rounds may have been open that it knows not.
        ahead = len(self.optimizer.ledger.digests) > self.steps_executed
        return self.individual.with_all_rounds() if ahead else self.individual

    def guarantee(self, delta: float | None = None) -> Guarantee:
        """The guarantee of the planned run, stating how many steps ran and what drew the noise.

        With an individual filter it is that of the budget, where the plan's is not smaller.
        In a run of several ranks ask one of them, where the accountant simulates: each would.
        Stopping early is post-processing of the planned run, so ε stays the planned one. Where the
        stream says that its noise is not the accounted one (bfloat16 buffers), it is an estimate.

        Args:
            delta: δ; ``None`` is the target of ``make_private``.

        Raises:
            ValueError: if there is no δ to speak of.
        """
        delta = self._target_delta if delta is None else delta
        if delta is not None:
            delta = checks.number("delta", delta, above=0, below=1)
        if delta is None:
            raise ValueError("state delta=: below 1/N, often 1/(2N) for N examples")
        if delta not in self._guarantees:
            self._guarantees[delta] = account(
                self.mechanism, delta=delta, accountant=self._accountant
            )
        return self._as_run(self._guarantees[delta])

    def _as_run(self, guarantee: Guarantee) -> Guarantee:
        """The accountant's guarantee of the mechanism, as a statement about this run."""
        noise = self.optimizer.noise
        if self.individual_filter is not None:
            guarantee = self.individual_filter.state(guarantee, self.stated_individual)
        drawn = guarantee.drawn_by(noise.generator, caveats=noise.notes)
        notes = (*self._conditions, *self._apart, *self.optimizer.watch.notes)
        if self.mechanism.noise_multiplier > 0:
            notes = (self.optimizer.rounding.note(guarantee.epsilon, guarantee.delta), *notes)
        return drawn.after(self.steps_executed).with_notes(*notes)

    def get_epsilon(self, delta: float | None = None) -> float:
        """ε of ``guarantee``."""
        return self.guarantee(delta).epsilon

    def so_far(self) -> SoFar:
        """The run's position, for progress bars and logs: steps, their ε, and the planned ε.

        Cheap enough for every logging interval: each twentieth of the plan is priced once, by an
        accountant that takes less than a second, and nothing is simulated. Steps that a ledger has
        beyond a checkpoint that was gone back to are counted. It is no guarantee of a run that
        stops here, which has the planned one (docs/theory/run.md#thm-prefix). Under an individual
        filter only the budget is told: what has been spent of it is each example's, and private.
        """
        ran = max(self.steps_executed, len(self.optimizer.ledger.digests))
        planned = self._planned_cheaply()
        found = None
        if planned is not None and self.individual_filter is None:
            place = priced_steps(ran, self.mechanism.steps)
            if place not in self._prices:
                self._prices[place] = epsilon_so_far(self.mechanism, ran, planned=planned)
            found = self._prices[place]
        return SoFar(
            steps=ran,
            steps_planned=self.mechanism.steps,
            epsilon=found,
            planned=None if planned is None else self._as_run(planned).epsilon,
        )

    def _planned_cheaply(self) -> Guarantee | None:
        """The accountant's word at the target δ, if it was given already or takes no time."""
        delta = self._target_delta
        if delta is None or delta in self._guarantees:
            return None if delta is None else self._guarantees[delta]
        found = find_accountants(self.mechanism, self._accountant)
        if any(each.cost(self.mechanism.participants) is not Cost.INSTANT for each in found):
            return None
        self.guarantee(delta)
        return self._guarantees[delta]

    def register_scheduler(self, scheduler: Any) -> Any:
        """Make ``scheduler.step()`` tick once a logical step, and keep it in the checkpoint.

        With microbatches a loop calls it once a part; the calls inside a step do nothing.

        Raises:
            TypeError: if it has no ``step``, ``state_dict`` and ``load_state_dict``.
            ValueError: if it is a scheduler of another optimizer.
        """
        check_scheduler(scheduler, self.optimizer)
        tick = scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            if self.optimizer.at_step_boundary:
                return tick(*args, **kwargs)
            return None

        before = {"step": tick} if "step" in vars(scheduler) else {}
        scheduler.step = step
        self._schedulers.append((scheduler, before))
        return scheduler

    def released_module(self) -> nn.Module:
        """The module that ``make_private`` was given, if it holds what the run released.

        Raises:
            RuntimeError: if ``optimizer.step()`` was interrupted in the middle of a release, the
                module holds what a forward pass left behind (see ``StateWatch``), or it was trained
                after ``detach``.
        """
        self.optimizer.check_whole()
        self._check_detached()
        self.optimizer.watch.check_saved()
        return uncompiled(self._attached.own)

    def state_dict(self, *, share: bool = False) -> dict[str, Any]:
        """Everything that a bit-identical continuation needs; plain values and tensors.

        In a run of several ranks any rank's answer can be loaded on all, be they as many as before
        or not. Where the ranks divide the noise (``NoiseOptions.shard``), all have to ask, as they
        all have to make a step, and each is given the whole; with ``share`` each is given what it
        holds itself, so that no rank has to hold the whole noise. ``load_state_dict`` then takes a
        list of the shares of all ranks.

        ``state["private"]`` holds seeds, generator states and the sampler's state: whoever has it
        can subtract the noise. Publish the model, never the checkpoint. It is a copy, which later
        steps leave alone; taken in the middle of a logical step, it is the state before that step.

        Args:
            share: the rank's part alone, where the ranks divide the noise.

        Raises:
            RuntimeError: on every rank, if not all of those that divide the noise ask; if
                ``optimizer.step()`` was interrupted in the middle of a release, the module holds
                what a forward pass left behind (see ``StateWatch``), or it was trained after
                ``detach``; if ``dcp.save`` asks, in place of which there is ``save``.
        """
        check_not_in_dcp()
        module = self.released_module()
        between = not self._under_way and self._left is None
        ledger = self.optimizer.ledger
        checks.flag("share", share)
        noise: Any = self.optimizer.noise.state_dict()
        optimizer = copy.deepcopy(self.optimizer.state_dict())
        ranks, shards = self.optimizer.shared.ranks, self.optimizer.shards
        if shards is not None:
            facts = {"step": self.steps_executed, "share": share, "ledger": ledger.digests}
            ranks.agree("a checkpoint", lambda: facts, secret=("ledger",))
            if shards.copies:
                noise = {**noise, "blocks": [], "buffers": []}
                optimizer = nothing_of(self.optimizer.original_optimizer, optimizer)
            if not share:
                noise = ranks.shares(on_cpu(noise))
                if shards.sliced is not None:
                    optimizer = joined_states(
                        self.optimizer.original_optimizer, ranks.shares(on_cpu(optimizer))
                    )
        owners = self._attached.owners
        state = {
            "format": FORMAT,
            "mechanism": self.mechanism.to_dict(),
            "mechanism_hash": self.mechanism.hash,
            "settings": copy.deepcopy(self._settings),
            "steps_executed": self.steps_executed,
            # As stated: whoever reads them from the file must not find more than the run proves.
            "guarantees": [self._as_run(g).to_json() for g in self._guarantees.values()],
            "notes": list(self._conditions),
            **module_state(module, shards, ranks, share=share),
            "optimizer": optimizer,
            "max_grad_norm": float(self.optimizer.max_grad_norm),
            "schedulers": [_state_of(s) for s, _ in self._schedulers],
            "ledger": list(ledger.digests[: self.steps_executed]),
            "ledger_run": ledger.run,
            "ledger_kept": ledger.path is not None,
            "private": {
                "noise": noise,
                "loader": self.loader.state_dict(),
                "rng": global_state() if between else self._boundary.rng(),
                "nonfinite_examples": self.nonfinite_examples,
                "apart": None if owners is None else dataclasses.asdict(owners.findings),
                **(
                    {}
                    if self.individual_filter is None
                    else {"individual": self.individual.state_dict()}
                ),
            },
        }
        if share and shards is not None:
            state["share"] = [ranks.rank, ranks.world_size]
            divided = MODULE_PIECES in state
            if ranks.rank:
                kept = {name: state[name] for name in SHARE}
                kept |= {name: state[name] for name in ("module", MODULE_PIECES) if divided}
                if shards.sliced is not None:
                    kept["optimizer"] = optimizer
                state = {**kept, "private": {"noise": noise}}
        return seal(state)

    def load_state_dict(
        self,
        state: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        *,
        accept_lost_ledger: bool = False,
    ) -> None:
        """Continue the run that ``state_dict`` was taken from, bit for bit.

        Args:
            state: what it returned; or a list of the shares of all ranks of that run, in any order.
                ``torch.load(path, mmap=True)`` reads of a share what this rank needs of it.
            accept_lost_ledger: go on although the file ``ledger=`` of the checkpoint's run is gone
                or was cut off; the guarantee then says what it assumes.

        Raises:
            TypeError: if the state is no mapping, or the switch neither True nor False.
            ValueError: if a share is missing, the state is damaged, of another mechanism, setting
                or format, or the ledger has not seen its releases; nothing has been changed then.
            RuntimeError: after ``detach``.
        """
        if self._left is not None:
            raise RuntimeError(f"{DETACHED}, and load the state there")
        shares = shares_of(state)
        if not isinstance(accept_lost_ledger, bool):
            raise TypeError(f"accept_lost_ledger={accept_lost_ledger!r}: True or False")
        state = shares[0]
        check_format(state, FORMAT)
        check_fields(state)
        for each in shares:
            check_seal(each)
        guarantees = self._check_of_this_run(state)
        private = state["private"]
        self.optimizer.watch.check()
        if self.individual_filter is not None:
            self.individual.check_state(private.get("individual", {}), state["steps_executed"])
        self.loader.check_state(private["loader"])  # refuses another data set
        ledger, digests, run = self.optimizer.ledger, state["ledger"], state["ledger_run"]
        finished = state["steps_executed"] == self.mechanism.steps  # no later step can be lost
        accept_lost = accept_lost_ledger or finished
        ledger.check(digests, run=run, kept=state["ledger_kept"], accept_lost=accept_lost)
        seen_all = finished or ledger.knows(digests, run=run)
        # Or leaves it as it is.
        self.optimizer.noise.load_state_dict(*(n for held in shares for n in noise_of(held)))
        ledger.resume(digests, run=run)
        self.loader.load_state_dict(private["loader"])
        if self.individual_filter is not None:
            self.individual.load_state_dict(private["individual"])
        load_module(
            uncompiled(self._attached.own),
            shares,
            self.optimizer.shards,
            self.optimizer.shared.ranks,
        )
        # torch's optimizers keep the tensors they are given: without a copy the run would write
        # into the caller's state.
        stepped = [held["optimizer"] for held in shares if "optimizer" in held]
        self.optimizer.load_states(copy.deepcopy(stepped) if len(stepped) == 1 else stepped)
        for (scheduler, _), saved_state in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved_state)
        self.optimizer.max_grad_norm = state["max_grad_norm"]
        self.optimizer.clipper.nonfinite_examples = private["nonfinite_examples"]
        if self._attached.owners is not None:
            self._attached.owners.drop()
            self._attached.owners.findings = Findings.of(private.get("apart"))
        self.optimizer.restart_at(state["steps_executed"])
        self._notes = tuple(dict.fromkeys((*state["notes"], *self._probe_notes)))
        if not seen_all:
            note = RESUME_NOTE.format(self.steps_executed)
            self._notes = tuple(dict.fromkeys((*self._notes, note)))
            hint = "" if ledger.path else " (PrivacyEngine(ledger=PATH) lets the run check it)"
            logger.warning("%s%s", note, hint)
        for guarantee in guarantees:
            # What was simulated is kept; anything else is computed again rather than believed.
            if guarantee.certificate is not None or guarantee.kind is Kind.CONFIDENCE:
                self._guarantees[guarantee.delta] = guarantee
            self._target_delta = self._target_delta or guarantee.delta
        self.optimizer.watch.restart()
        restore_global_state(private["rng"])
        self._boundary.restart()

    def _check_of_this_run(self, state: Mapping[str, Any]) -> list[Guarantee]:
        """Refuse the state of another run, by what it says of itself; returns its guarantees."""
        if state["mechanism_hash"] != self.mechanism.hash:
            saved = MatrixMechanism.from_dict(state["mechanism"])
            raise ValueError(
                f"the checkpoint belongs to another mechanism: it has {saved}, this run has "
                f"{self.mechanism}. Build the run with "
                "mechanism=MatrixMechanism.from_dict(state['mechanism'])"
            )
        check_settings(state["settings"], self._settings)
        if len(state["schedulers"]) != len(self._schedulers):
            raise ValueError(
                f"the checkpoint holds {len(state['schedulers'])} scheduler(s) and this run has "
                f"{len(self._schedulers)}: register them before load_state_dict()"
            )
        guarantees = [Guarantee.from_json(text) for text in state["guarantees"]]
        for guarantee in guarantees:
            check_guarantee(guarantee, self.mechanism)
        return guarantees

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a checkpoint into a new folder, of which each rank writes its part.

        What ``state_dict()`` has, in the format of ``torch.distributed.checkpoint``: no rank has
        more of a model that ``fully_shard`` divided than its shards, and any number of ranks reads
        back what it needs (``load``). All ranks call it after the same step.

        **The folder is secret**, as the state's ``private`` part is, and closed to others (mode
        0700, its files 0600). It gets its name when all of it is written.

        Args:
            folder: that is not there yet, on a disk that all ranks see.

        Raises:
            TypeError: if it is no path.
            ValueError: if there is such a folder, or several ranks have the whole model, which
                ``state_dict(share=True)`` is for.
            RuntimeError: as ``state_dict`` says, or on ranks that learn of another's ValueError.
        """
        checks.instance("folder", folder, (str, os.PathLike))
        holder = self._holder()
        write_folder(self.state_dict(share=True), pathlib.Path(folder), holder)

    def load(self, folder: str | os.PathLike[str], *, accept_lost_ledger: bool = False) -> None:
        """Continue the run that ``save`` was called in, bit for bit on as many ranks as there were.

        All ranks call it. What belongs to another run is refused as by ``load_state_dict``. Load
        folders of your own only: torch reads their list of contents by pickle.

        Args:
            folder: that ``save`` made, which all ranks see.
            accept_lost_ledger: as ``load_state_dict`` has it.

        Raises:
            TypeError: if it is no path, or the switch neither True nor False.
            ValueError: if it holds no checkpoint, a damaged one or one of another run; nothing has
                been changed then.
            RuntimeError: after ``detach``, or on ranks that learn of another's ValueError.
        """
        checks.instance("folder", folder, (str, os.PathLike))
        if self._left is not None:
            raise RuntimeError(f"{DETACHED}, and load the checkpoint there")

        def check(state: Mapping[str, Any]) -> None:
            check_format(state, FORMAT)
            check_fields(state)
            self._check_of_this_run(state)

        state = read_folder(pathlib.Path(folder), self._holder(), check)
        self.load_state_dict(state, accept_lost_ledger=accept_lost_ledger)

    def _holder(self) -> Holder:
        return Holder(
            ranks=self.optimizer.shared.ranks,
            module=uncompiled(self._attached.own),
            optimizer=self.optimizer.original_optimizer,
            noise=self.optimizer.noise,
            shards=self.optimizer.shards,
        )

    def end_early(self) -> None:
        """Say that the run is meant to end before its plan: nothing is then said of it at exit.

        The guarantee stays the planned one, and the run can still go on.
        """
        self._boundary.progress.meant = True


def stored_options(request: RunRequest) -> dict[str, Any]:
    """All that changes a released step besides the mechanism, as a checkpoint holds it."""
    settings: dict[str, Any] = {
        "max_grad_norm": request.max_grad_norm,
        "scaled": isinstance(request.optimizer, ScalesGradients),
        "gradients": request.gradients.to_dict(),
        "noise": request.noise.to_dict(),
        "loading": request.loading.to_dict(),
    }
    if request.individual is not None:
        settings["individual"] = request.individual.to_dict()
    return settings


def _state_of(scheduler: Any) -> dict[str, Any]:
    """The scheduler's own state without the gate of ``register_scheduler``."""
    return {k: v for k, v in scheduler.state_dict().items() if k != "step"}
