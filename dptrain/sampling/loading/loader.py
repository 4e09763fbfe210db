"""The private loader: batches drawn from the scheme, and the position in the plan."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, SequentialSampler, default_collate

from dptrain.core import checks, digest, seed_globals
from dptrain.sampling.fields import check_microbatches
from dptrain.sampling.loading.collating import notes_of
from dptrain.sampling.loading.dataset import (
    check_length,
    check_sampler,
    fetching_options,
    fingerprint,
)
from dptrain.sampling.loading.fetch import FetchedBatches
from dptrain.sampling.loading.microbatch import MicroBatch
from dptrain.sampling.loading.position import BatchPlan, check_state
from dptrain.sampling.scheme import Scheme

_log = logging.getLogger(__name__)

# What torch's and Opacus's loaders have besides, and what is written here.
_NOT_OF_THE_LOADER = {
    "sample_rate": "its batches are drawn by loader.scheme; under Poisson, its probability",
    "batch_sampler": "its batches are drawn by loader.scheme; in place of Opacus's "
    "BatchMemoryManager write make_private(loading=Loading(max_physical_batch_size=...))",
    "sampler": "its batches are drawn by loader.scheme",
    "batch_size": "its batches vary in size; loader.scheme.expected_batch_size is their mean",
    "num_workers": "it belongs to the data loader that make_private was given",
}


def _as_is(batch: Any) -> Any:
    return batch  # a module-level function, so that spawned workers can import it


class PrivateLoader:
    """Yields the user's collated batches of the logical steps of a plan, in order.

    The position counts *completed* logical steps. Left alone, the loader takes a step as completed
    when the batch after it is asked for, or when the iteration ends. With ``driven`` set, as an
    engine does, ``complete_step`` says so and every batch has to be reported by
    ``report_microbatch`` before the next one. Iterating again, also after an early ``break``,
    starts at the first step that is not completed, with the same rows and the same random
    augmentations whatever the number of workers.

    Args:
        dataset: map-style dataset with a length.
        scheme: how examples take part; its ``dataset_size`` is ``len(dataset)``.
        seed: any non-negative integer; private, as it tells who was in which batch.
        collate_fn: makes a batch of a list of samples; torch's default if ``None``.
        num_workers: worker processes; 0 fetches in the main process.
        max_physical_batch_size: most rows in memory at once; larger batches come in microbatches,
            and their number is random.
        microbatches: in how many microbatches every logical batch comes instead, whatever its size.
            Their number is then known beforehand: trainers that count batches need that.
        steps_per_epoch: logical steps after which an iteration ends; ``None``: with the plan.
        pin_memory, persistent_workers, prefetch_factor, timeout, worker_init_fn,
            multiprocessing_context: as in ``torch.utils.data.DataLoader``.
        rank, world_size: this process's place in a distributed run. All ranks are given the same
            seed, draw the same logical batches, and each takes its own share of the rows. With an
            engine, several ranks seed their global generators anew for every batch, so that dropout
            differs between them and a repeated step comes out the same.
        check_collate: refuse a ``collate_fn``, or a data set's ``__getitems__``, that is seen to
            mix the examples of a batch (``CollateCheck``, ``CompanionCheck``).
        driven: whether an engine reports microbatches and completed steps.
        taken: called with every batch, and its data, just before the user gets them; ``None``:
            nothing is.

    Attributes:
        current: the ``MicroBatch`` of the batch that the user holds, ``None`` before the
            first one and after the end.
        unused: the same, until ``optimizer.step()`` has used it, and ``None`` then.
        notes: what a guarantee says of how batches are made.

    Raises:
        ValueError: for a dataset without length or of another length than the scheme's, and for
            values out of range; no example is read before.
    """

    of_a_run = True  # no state of a module that holds it

    def __init__(
        self,
        *,
        dataset: Any,
        scheme: Scheme,
        seed: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        max_physical_batch_size: int | None = None,
        microbatches: int | None = None,
        steps_per_epoch: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        rank: int = 0,
        world_size: int = 1,
        check_collate: bool = False,
        driven: bool = False,
        taken: Callable[[MicroBatch, Any], None] | None = None,
    ) -> None:
        owner = "PrivateLoader"
        checks.instance("scheme", scheme, Scheme, owner=owner)
        check_length(dataset, scheme)
        seed = checks.integer("seed", seed, minimum=0, owner=owner)
        check_microbatches(max_physical_batch_size, microbatches, scheme.group_size)
        if steps_per_epoch is not None:
            steps_per_epoch = checks.integer("steps_per_epoch", steps_per_epoch, owner=owner)
        checks.function("collate_fn", collate_fn, owner=owner)
        checks.function("worker_init_fn", worker_init_fn, owner=owner)
        num_workers = checks.integer("num_workers", num_workers, minimum=0, owner=owner)
        if prefetch_factor is not None:
            prefetch_factor = checks.integer("prefetch_factor", prefetch_factor, owner=owner)
        timeout = checks.number("timeout", timeout, minimum=0, owner=owner)
        checks.flag("pin_memory", pin_memory, owner=owner)
        checks.flag("persistent_workers", persistent_workers, owner=owner)
        world_size = checks.integer("world_size", world_size, owner=owner)
        rank = checks.integer("rank", rank, minimum=0, owner=owner)
        if rank >= world_size:
            raise ValueError(f"PrivateLoader: rank={rank} must be below world_size={world_size}")
        self.dataset = dataset
        self.scheme = scheme
        self.steps_per_epoch = steps_per_epoch
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.notes = notes_of(dataset, self.collate_fn, tested=check_collate)
        self._driven = checks.flag("driven", driven, owner=owner)
        self.current: MicroBatch | None = None
        checks.function("taken", taken, owner=owner)
        self._taken = taken
        self.unused: MicroBatch | None = None
        self._given = False
        self._iteration = 0
        self._running: range | None = None
        self._closed: str | None = None
        self._world_size = world_size
        self._plan = BatchPlan(
            scheme,
            seed,
            max_physical_batch_size,
            microbatches=microbatches,
            rank=rank,
            world_size=world_size,
        )
        # Its own generator: a DataLoader without one draws from torch's global generator.
        generator = torch.Generator().manual_seed(seed % 2**63)
        self._loader: DataLoader[Any] = DataLoader(
            FetchedBatches(dataset, self.collate_fn, check=check_collate),
            batch_size=None,
            sampler=self._plan,
            collate_fn=_as_is,
            generator=generator,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            prefetch_factor=prefetch_factor,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
        )

    @classmethod
    def from_data_loader(
        cls, data_loader: DataLoader[Any], *, scheme: Scheme, **options: Any
    ) -> Self:
        """Take over dataset, collate function, workers and pinning; the sampler is replaced.

        Args:
            data_loader: whose they are.
            scheme, options: those of ``PrivateLoader`` that are not taken over.

        Raises:
            ValueError: if the loader does not batch, or chooses rows in a way that the scheme
                would silently replace (a batch sampler, a sampler of some of the rows).
        """
        checks.instance("data_loader", data_loader, DataLoader, owner="PrivateLoader")
        checks.instance("scheme", scheme, Scheme, owner="PrivateLoader")
        check_length(data_loader.dataset, scheme)
        check_sampler(data_loader)
        stated = type(data_loader.sampler) is not SequentialSampler or data_loader.batch_size != 1
        _log.log(
            logging.WARNING if stated else logging.DEBUG,  # of torch's defaults nothing is lost
            (
                "the sampler of the data loader (%s, batch_size=%s) is replaced by %s, with "
                "batches of varying size, %g %s on average"
            ),
            type(data_loader.sampler).__name__,
            data_loader.batch_size,
            type(scheme).__name__,
            scheme.expected_batch_size,
            "examples" if scheme.group_size is None else "users",
        )
        taken_over = fetching_options(data_loader)
        return cls(dataset=data_loader.dataset, scheme=scheme, **options, **taken_over)

    def __getattr__(self, name: str) -> Any:
        if name in _NOT_OF_THE_LOADER:
            raise AttributeError(
                f"PrivateLoader has no {name}: {_NOT_OF_THE_LOADER[name]}", name=name, obj=self
            )
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
        )

    @property
    def position(self) -> int:
        """Number of completed logical steps."""
        return self._plan.position

    @property
    def between(self) -> bool:
        """True if a batch was given, and every one that was has been used or given up."""
        return self._given and self.unused is None

    @property
    def steps(self) -> int:
        """Number n of logical steps of the plan."""
        return self.scheme.steps

    def _next_steps(self) -> range:
        """Logical steps of an iteration that starts now."""
        start, stop = self.position, self.steps
        if self.steps_per_epoch is not None:
            stop = min(stop, (start // self.steps_per_epoch + 1) * self.steps_per_epoch)
        return range(start, stop)

    def __len__(self) -> int:
        """Batches of the running iteration, or of the next one if none is running.

        ``steps`` counts the logical steps of the plan, which may be fewer.

        Raises:
            TypeError: if that number is random, as with ``max_physical_batch_size``. It is private
                too: batch sizes say something of who was drawn, and schedules follow from lengths.
        """
        if self._plan.parts is None:
            raise TypeError(
                "len(loader) is unknown with max_physical_batch_size, since the number of parts "
                "depends on how many examples are drawn, which is random and private. For a "
                "trainer that counts batches, set microbatches= instead, the number of parts of "
                "every batch; or count logical steps, of which loader.steps are planned"
            )
        steps = self._next_steps() if self._running is None else self._running
        return self._plan.parts * len(steps)

    def __iter__(self) -> Iterator[Any]:
        """Batches of the first uncompleted step and on; ends an iteration that is under way.

        Raises:
            RuntimeError: if all planned steps have run, or the loader was closed.
        """
        if self._closed is not None:
            raise RuntimeError(self._closed)
        if self.position >= self.steps:
            raise RuntimeError(
                f"all {self.steps} planned steps have run, and more would exceed the guarantee: "
                "plan more steps in the scheme (and set steps_per_epoch for a loop over epochs)"
            )
        self._end_iteration()
        self._running = self._next_steps()
        self._plan.stop = self._running.stop
        return self._iterate(self._iteration, iter(self._loader))

    def _iterate(self, iteration: int, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            while True:
                self._refuse_stale(iteration)
                self._settle()
                item = next(batches, None)
                if item is None:
                    self.current = self.unused = None
                    return
                self.current, data = item
                self.unused, self._given = self.current, True
                if self._taken is not None:
                    self._taken(self.current, data)
                if self._driven and self._world_size > 1:
                    seed_globals(self._plan.compute_seed(self.current))
                yield data
        finally:
            if iteration == self._iteration:
                self._running = None

    def close(self, why: str) -> None:
        """Give no batch any more; an iteration under way ends, and a new one is refused.

        Args:
            why: what is then said.
        """
        self._closed = why
        self._end_iteration()

    def _refuse_stale(self, iteration: int) -> None:
        if self._closed is not None:
            raise RuntimeError(self._closed)
        if iteration != self._iteration:
            raise RuntimeError(
                "a newer iteration over this loader has started (or its state was loaded), and "
                "only one can run at a time"
            )

    def _settle(self) -> None:
        """The batch that the user held is done with: see that its step is accounted for."""
        if (micro := self.current) is None:
            return
        if not self._driven:
            if micro.last:
                self._plan.complete()
        elif self.unused is not None:
            raise RuntimeError(
                f"optimizer.step() was not called after the batch of step {micro.step} (part "
                f"{micro.part + 1} of {micro.parts}) was drawn. Call it once for every batch of "
                "the private loader, before taking the next one, on the optimizer that "
                "make_private returned. If a trainer fetches one batch ahead because it does not "
                "know len(loader), set microbatches= instead of max_physical_batch_size="
            )
        elif micro.last and self.position == micro.step:
            raise RuntimeError(f"step {micro.step} was reported but complete_step() was not called")

    def _end_iteration(self) -> None:
        self._iteration += 1
        self._running = None
        self.current = self.unused = None

    def report_microbatch(self) -> None:
        """Say that ``optimizer.step()`` has used the batch at hand.

        Raises:
            RuntimeError: if there is no batch, or it was reported already.
        """
        if self.current is None:
            raise RuntimeError(
                "optimizer.step() was called before taking a batch from the private loader"
            )
        if self.unused is None:
            raise RuntimeError("optimizer.step() was called twice for one batch; call it once")
        self.unused = None

    def complete_step(self) -> None:
        """Count the logical step of the batch at hand as done; its batch is not drawn again.

        Raises:
            RuntimeError: if the loader is not driven, the batch at hand is not the last of its
                step, was not reported, or the step is done already.
        """
        if not self._driven:
            raise RuntimeError("complete_step() is for an engine, whose loader has driven=True")
        micro = self.current
        if micro is None or not micro.last or self.unused is not None:
            raise RuntimeError(
                "complete_step() follows report_microbatch() on the last microbatch of a step"
            )
        if micro.step != self.position:
            raise RuntimeError(f"step {micro.step} is completed already")
        self._plan.complete()

    @functools.cached_property
    def data_fingerprint(self) -> str:
        """The fingerprint by which the data set is recognized; private data."""
        return fingerprint(self.dataset)

    def state_dict(self) -> dict[str, Any]:
        """State at the completed position, readable with ``weights_only=True``; private data."""
        return {
            "scheme": digest(self.scheme.to_dict()),
            "dataset_size": len(self.dataset),
            "fingerprint": self.data_fingerprint,
            "seed": hex(self._plan.seed),
            "stream": self._plan.stream.state_dict(),
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse a state of another scheme or another data set, by its length and fingerprint.

        Raises:
            ValueError: saying what differs.
        """
        size, known = len(self.dataset), lambda: self.data_fingerprint
        check_state(state, scheme=self.scheme, dataset_size=size, known_by=known)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the saved position with the saved seed; ends an iteration under way.

        Raises:
            ValueError: as ``check_state``.
        """
        self.check_state(state)
        self._plan.stream.load_state_dict(state["stream"])
        self._plan.seed = int(state["seed"], 16)
        self._end_iteration()
