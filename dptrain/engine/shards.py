"""The division of a run among its ranks: the noise, and the optimizer where that is right."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from dptrain.clipping.base import summing_dtype
from dptrain.core import in_float64
from dptrain.distributed import FullySharded, Ranks, is_divided, local_of
from dptrain.engine.sliced import SlicedOptimizer, laid_out_like, whole_because
from dptrain.noise import FlatStream, shard_pieces

logger = logging.getLogger(__name__)

_LOT = 1 << 23  # numbers of clipped sums that wait to be sent together, 32 MiB of float32


class Shards:
    """This rank's slice of the flattened parameters, and its part in a step.

    The clipped sums are reduced so that each rank gets its slice of them, to which it adds the
    slice of the noise that it draws and keeps. Then either the optimizer steps on slices of the
    parameters, which are gathered, or the noisy sums are gathered and every rank's optimizer steps
    on all. Both are the traffic of one all-reduce. Noise is a function of seed, step and position:
    what is released is what one process releases, up to the order in which floats are added
    (docs/theory/noise.md#thm-shards; ``test_ranks_with_slices_release_what_one_process_does``).

    All ranks know the seed, and each could draw all of the noise: the slices save memory, and are
    no secret that ranks keep from one another.

    Args:
        optimizer: the user's, where it steps on slices; else ``None``.

    Attributes:
        pieces: for each rank, the first entry and one past the last of each flattened parameter.
        sliced: the optimizer of the slices, or ``None``.
        sums: this rank's pieces of the clipped sums of the step that is being released.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self._ranks = ranks
        self.pieces = self._cut(parameters)
        self.sliced: SlicedOptimizer | None = None
        if optimizer is not None:
            self.sliced = SlicedOptimizer(optimizer, parameters, self.pieces[ranks.rank])
        self.sums: list[torch.Tensor] = []

    def _cut(self, parameters: Sequence[nn.Parameter]) -> Sequence[Sequence[tuple[int, int]]]:
        like, world = shaped_like_sums(parameters), self._ranks.world_size
        return [shard_pieces(like, rank=rank, world=world) for rank in range(world)]

    @property
    def with_all(self) -> range:
        """The ranks that have all pieces between them, with this one."""
        return range(self._ranks.world_size)

    @property
    def saving(self) -> range:
        """The ranks whose pieces a checkpoint has; the others have the same ones."""
        return range(len(self.with_all))

    @property
    def copies(self) -> bool:
        """True if another rank saves the pieces that this one has."""
        return self._ranks.rank not in self.saving

    @property
    def noise_of_a_rank(self) -> dict[str, Any]:
        """The arguments that select this rank's noise in ``noise_stream``."""
        return {"shard": (self._ranks.rank, self._ranks.world_size)}

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        what: str,
    ) -> Self | None:
        """The shards that ``NoiseOptions.shard`` asks for; ``None`` where nothing is divided."""
        if ranks.world_size == 1 or what == "off":
            return None
        reason = None if what == "noise" else whole_because(optimizer)
        if reason and ranks.rank == 0:
            logger.warning(
                "the ranks divide the noise, and each holds the whole state of the optimizer: %s. "
                "NoiseOptions(shard='noise') requests this explicitly",
                reason,
            )
        return cls(ranks, parameters, None if reason or what == "noise" else optimizer)

    def add_up(self, parameters: Sequence[Any]) -> None:
        """Take ``p.summed_grad`` off the parameters; this rank's pieces of all ranks' are kept."""
        tensors = rounded_sums(parameters)
        self.sums = self._ranks.scatter_sums(tensors, parameters, self.pieces)
        for p in parameters:
            p.summed_grad = None

    def add_noise(
        self,
        parameters: Sequence[Any],
        noise: FlatStream,
        deviation: float,
        scales: Sequence[torch.Tensor | None] | None,
    ) -> None:
        """Leave the noisy sum in the gradients of the tensors that the optimizer steps on.

        Args:
            parameters: that are trained.
            noise: this rank's.
            deviation: that it is multiplied by.
            scales: that the sums are divided by, of the whole parameters.
        """
        noisy, self.sums = noise.release(self.sums, deviation), []
        if self.sliced is not None:
            for p in parameters:
                p.grad = None  # whatever was there is neither clipped nor noised
            set_gradients(self.sliced.parameters, noisy)
            return
        noisy = [total.to(summing_dtype(p)) for p, total in zip(parameters, noisy, strict=True)]
        whole = [torch.empty(p.shape, dtype=summing_dtype(p), device=p.device) for p in parameters]
        self._ranks.gather_pieces(noisy, whole, self.pieces)
        set_gradients(parameters, whole, scales)

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update the parameters, which are then the same on all ranks."""
        assert self.sliced is not None
        self.sliced.step()
        self._ranks.gather_pieces(self.sliced.parameters, parameters, self.pieces)

    def detach(self) -> None:
        """The optimizer is the user's again."""
        self.sums = []
        if self.sliced is not None:
            self.sliced.detach()


class DividedModule(Shards):
    """The shards of a model that ``fully_shard`` has divided: the sums go where these are.

    Nothing is gathered after a step, since the module gathers its parameters itself, and before
    it nothing is whole but the sum that is being formed: the sums of each microbatch are scattered
    as they are formed, some at a time, so that a rank never has all of them. That is the traffic of
    fully_shard's own reduction, which takes place for every microbatch too.

    On a mesh of two dimensions every row of ranks has all pieces, and a column has the same ones.
    The sums are reduced over both, and all ranks of a column add the same noise to the same bits of
    a sum: it is the noise of one release, of which there are copies
    (docs/theory/noise.md#thm-copies; ``test_copies_that_drift_apart_are_noticed``).
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        module: FullySharded,
    ) -> None:
        self.module = module
        super().__init__(ranks, parameters, optimizer)
        module.hold_gradients()

    def _cut(self, parameters: Sequence[nn.Parameter]) -> Sequence[Sequence[tuple[int, int]]]:
        return self.module.pieces(parameters, self._ranks.world_size)

    @property
    def with_all(self) -> range:
        """The ranks that have all pieces between them, with this one: its row of the mesh."""
        if (grid := self.module.grid) is None:
            return super().with_all
        first = self._ranks.rank // grid.shards * grid.shards
        return range(first, first + grid.shards)

    def begin_alike(self, module: nn.Module) -> None:
        """Ranks that have the same pieces begin with those of the first."""
        self.module.rest()
        if (grid := self.module.grid) is not None:
            state = [*module.parameters(), *module.buffers()]
            self._ranks.copy_from_first([local_of(t) for t in state if is_divided(t)], grid)

    @property
    def noise_of_a_rank(self) -> dict[str, Any]:
        """The pieces, as ``noise_stream`` takes them."""
        return {"pieces": self.pieces[self._ranks.rank]}

    def part_of(self, clipper: Any, parameters: Sequence[Any], **how: Any) -> None:
        """Add this rank's pieces of all ranks' sums of a microbatch to ``p.summed_grad``."""
        waiting: list[tuple[int, torch.Tensor | None]] = []

        def send() -> None:
            indices = [index for index, _ in waiting]
            found = self._ranks.scatter_sums(
                [total for _, total in waiting],
                [like[index] for index in indices],
                [[each[index] for index in indices] for each in self.pieces],
                self.module.grid,
            )
            waiting.clear()
            add_part(found, [parameters[index] for index in indices])

        def take(index: int, total: torch.Tensor | None) -> None:
            waiting.append((index, total))
            if not index or sum(like[i].numel() for i, _ in waiting) >= _LOT:
                send()

        like = shaped_like_sums(parameters)
        clipper.take_clipped_sums(take, **how)

    def add_up(self, parameters: Sequence[Any]) -> None:
        """Take ``p.summed_grad`` off the parameters, which is this rank's pieces already."""
        self.sums = [p.summed_grad for p in parameters]
        for p in parameters:
            p.summed_grad = None

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Update the shards."""
        assert self.sliced is not None
        self.module.rest()
        self.sliced.step()

    def detach(self) -> None:
        """The optimizer is the user's again, and so is the module's own reduction of gradients."""
        super().detach()
        self.module.rest()
        self.module.release()


MODULE_PIECES = "module_pieces"
"""Where a rank's share of a checkpoint says which entries of a tensor it has."""


def module_state(
    module: nn.Module, shards: Shards | None, ranks: Ranks, *, share: bool
) -> dict[str, Any]:
    """The module's part of a checkpoint: copies of whole tensors, on the CPU where it is divided.

    Args:
        ranks: of the run, all of which have to ask where the module is divided.
        share: what this rank has of it alone, with ``MODULE_PIECES``; what no rank has a part of
            is in the share of the first, and nothing in those of ranks that have what others have.
    """
    if not isinstance(shards, DividedModule):
        return {"module": copy.deepcopy(module.state_dict())}
    shards.module.rest()
    found: dict[str, Any] = dict(module.state_dict())
    parts = {name: value for name, value in found.items() if is_divided(value)}
    pieces = shards.module.pieces(list(parts.values()), ranks.world_size)
    own = [local_of(value) for value in parts.values()]
    if share and shards.copies:
        return {"module": {}, MODULE_PIECES: {}}
    if share:
        held = {} if ranks.rank else {n: copy.deepcopy(found[n]) for n in found if n not in parts}
        held |= {n: t.reshape(-1).clone() for n, t in zip(parts, own, strict=True)}
        places = zip(parts, pieces[ranks.rank], strict=True)
        return {"module": held, MODULE_PIECES: {name: list(place) for name, place in places}}
    nothing = [(0, 0)] * len(parts)  # sent by ranks that have what others have
    pieces = [each if rank in shards.saving else nothing for rank, each in enumerate(pieces)]
    whole = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in parts.items()}
    for name, mine, each in zip(whole, own, zip(*pieces, strict=True), strict=True):
        ranks.gather_pieces([mine.cpu()], [whole[name]], [[place] for place in each])
    return {"module": {n: whole[n] if n in whole else copy.deepcopy(found[n]) for n in found}}


@torch.no_grad()
def load_module(
    module: nn.Module, shares: Sequence[Mapping[str, Any]], shards: Shards | None, ranks: Ranks
) -> None:
    """Load what ``module_state`` returned, in one state or in the shares of all ranks."""
    divided = shards.module if isinstance(shards, DividedModule) else None
    if divided is None and MODULE_PIECES not in shares[0]:
        module.load_state_dict(shares[0]["module"])
        return
    if divided is not None:
        divided.rest()
    given: dict[str, Any] = dict(shares[0]["module"])
    targets = module.state_dict()
    if odd := sorted(set(targets) ^ {name for each in shares for name in each["module"]}):
        raise ValueError(f"the state belongs to another module: the two differ in {odd}")
    for name, target in targets.items():
        sources = [s for s in shares if name in s["module"]]
        if not is_divided(target) and not any(name in s.get(MODULE_PIECES, {}) for s in sources):
            continue
        low, high = 0, target.numel()
        if is_divided(target):
            assert divided is not None
            low, high = divided.pieces([target], ranks.world_size)[ranks.rank][0]
        mine = torch.empty(high - low, dtype=target.dtype)
        left = high - low
        for source in sources:
            values = source["module"][name].reshape(-1)
            start = source.get(MODULE_PIECES, {}).get(name, (0, 0))[0]
            begin, end = max(low, start), min(high, start + len(values))
            if begin < end:
                mine[begin - low : end - low] = values[begin - start : end - start]
                left -= end - begin
        if left:
            raise ValueError(
                f"the state lacks {left} entries of {name!r} of the module: give the states of all "
                "ranks of the saved run"
            )
        if is_divided(target):
            local = local_of(target)
            local.copy_(mine.view(local.shape))
            given.pop(name, None)
        else:
            given[name] = mine.view(target.shape)
    module.load_state_dict(given, strict=divided is None)


def add_part(sums: Sequence[torch.Tensor | None], parameters: Sequence[Any]) -> None:
    """Add the sums of a microbatch to ``p.summed_grad``, from the second one on in float64.

    What the microbatches without an example add then rounds off next to nothing of the difference
    that it makes (docs/theory/limits.md#thm-ideal-noise).
    """
    for p, total in zip(parameters, sums, strict=True):
        if total is not None:
            before = p.summed_grad
            if before is not None:
                wide = in_float64(before)
                total = wide.add_(total.to(wide.device))
            p.summed_grad = total


def set_gradients(
    parameters: Sequence[Any],
    released: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None] | None = None,
) -> None:
    """Leave noisy sums in ``p.grad``, divided by the scales, in layout and dtype of the parameter.

    Before that they are of one dtype however many parts there were, which depends on the data.
    """
    for p, noisy, scale in zip(
        parameters, released, scales or [None] * len(parameters), strict=True
    ):
        total = noisy.to(summing_dtype(p)).to(p.device)
        p.grad = laid_out_like(p, (total if scale is None else total.div_(scale)).to(p.dtype))


def rounded_sums(parameters: Sequence[Any]) -> list[torch.Tensor | None]:
    """``p.summed_grad`` in the dtypes of sums, which they then are, as ranks exchange them."""
    for p in parameters:
        if p.summed_grad is not None:
            narrow = p.summed_grad.to(summing_dtype(p))  # the wider one is free again
            p.summed_grad = narrow.to(p.device)
    return [p.summed_grad for p in parameters]


def shaped_like_sums(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors of the shapes and devices of parameters and the dtypes of their sums, of no size."""
    return [
        torch.empty((), dtype=summing_dtype(p), device=p.device).expand(p.shape) for p in parameters
    ]
