"""A model that torch's ``fully_shard`` has divided among the ranks of a run (FSDP2)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dptrain.distributed.ranks import Grid, Ranks

_HOW = (
    "call fully_shard(layer) and, last, fully_shard(model), with one mesh of all ranks, of one "
    "dimension or of two (replicas, shards)"
)


class FullySharded:
    """A run's view of a model of which each rank keeps a shard of every parameter.

    Every rank is a data-parallel rank: it has examples of its own, and the module is whole while
    one of its blocks computes. So norms and clip factors are those of a model that is not divided,
    and what remains is to add the clipped sums up where they belong, in the shards.

    While a block is whole, its layers hold other parameters than the optimizer does: torch
    exchanges the two. What looks at a layer from within (``dptrain.clipping``) knows the whole
    ones, whose memory comes and goes; the optimizer, the noise and checkpoints know the shards.

    On a mesh of two dimensions (HSDP) each row of ranks has the whole model between them, and the
    ranks of a column have the same shards.

    torch 2.13 has no public names for most of this: they are used here, and nowhere else.

    Args:
        module: the user's.

    Raises:
        ValueError: if it is divided in a way that a private run does not know, with the remedy.
    """

    def __init__(self, module: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule  # a second, which others need not wait

        if not isinstance(module, FSDPModule):
            inner = next(n for n, m in module.named_modules() if isinstance(m, FSDPModule))
            raise ValueError(
                f"fully_shard was called on layer {inner!r}, but not on the module itself: {_HOW}. "
                "Pass a compiled model as it was before torch.compile"
            )
        if any(m._compiled_call_impl for m in module.modules()):
            raise ValueError(
                "module was divided by fully_shard and compiled, which is untested with private "
                "runs: leave module.compile() out"
            )
        self.module = module
        self._modules = [m for m in module.modules() if isinstance(m, FSDPModule)]
        self._states = list(dict.fromkeys(m._get_fsdp_state() for m in self._modules))
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._each: list[Any] = [p for group in self._groups for p in group.fsdp_params]
        self._of: dict[torch.Tensor, Any] = {p.sharded_param: p for p in self._each}
        self._synced: list[tuple[Any, bool]] = []
        self._hooks: list[Any] = []
        for p in self._each:
            self._check(p)
        meshes = {p.sharded_param.device_mesh for p in self._each}
        if len({tuple(mesh.shape) for mesh in meshes}) > 1:
            raise ValueError(
                "layers are divided by several meshes, of the shapes "
                f"{sorted(tuple(mesh.shape) for mesh in meshes)}: {_HOW}"
            )
        self._mesh = next(iter(meshes), None)

    @staticmethod
    def there(module: Any) -> bool:
        """True if ``fully_shard`` was called on the module, or on a layer of it."""
        return isinstance(module, nn.Module) and any(
            base.__name__ == "FSDPModule" for m in module.modules() for base in type(m).__mro__
        )

    @staticmethod
    def _check(p: Any) -> None:
        name = p._module_info.param_name
        what = f"parameter {name!r} of a {type(p._module_info.module).__name__}"
        placements = tuple(str(each) for each in p.sharded_param.placements)
        if p.is_dtensor or placements not in (("S(0)",), ("R", "S(0)")):
            raise ValueError(
                f"{what} is placed as {', '.join(placements)} on a mesh of "
                f"{p.sharded_param.device_mesh.ndim} dimension(s), but a private run supports only "
                f"parameters divided by their first dimension, without tensor parallelism: {_HOW}, "
                "and without shard_placement_fn"
            )
        if p.offload_to_cpu:
            raise ValueError(
                f"{what} has a CPUOffloadPolicy, which is untested with private runs: leave "
                "offload_policy= out of fully_shard"
            )
        if hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{what} is a {type(p._sharded_local_tensor).__name__}, which defines its own "
                "gathering: use plain parameters"
            )

    def check_trained(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """Refuse parameters that are not divided among just the ranks of the run.

        Raises:
            ValueError: with the remedy.
        """
        if whole := [tuple(p.shape) for p in parameters if p not in self._of]:
            raise ValueError(
                f"trainable parameter(s) of shape {whole} are not divided, but others of the "
                f"module are: {_HOW}, without ignored_params, or freeze them with "
                "requires_grad_(False)"
            )
        wanted = list(range(ranks.world_size))
        for p in parameters:
            found = self._of[p].sharded_param.device_mesh.mesh.flatten().tolist()
            if found != wanted:
                raise ValueError(
                    f"the module is divided among the ranks {found}, but the run has "
                    f"{ranks.world_size} rank(s): give fully_shard a mesh of all ranks, in order "
                    "(or none), and leave PrivacyEngine(distributed=False) out"
                )

    @property
    def grid(self) -> Grid | None:
        """The rows and columns of ranks on a mesh of two dimensions, else ``None``."""
        if self._mesh is None or self._mesh.ndim == 1:
            return None
        return Grid(self._mesh.size(1), self._mesh.get_group(1), self._mesh.get_group(0))

    def pieces(
        self, parameters: Sequence[torch.Tensor], world_size: int
    ) -> list[list[tuple[int, int]]]:
        """For each rank, the first entry and one past the last of its shard of each parameter.

        A shard is some rows, as many for each rank of a row of the mesh, and fewer or none for the
        last ones.
        """
        shards = world_size if self.grid is None else self.grid.shards
        found = []
        for rank in range(world_size):
            own, place = [], rank % shards
            for p in parameters:
                rows, length = p.shape[0], math.prod(p.shape[1:])
                each = -(-rows // shards)
                low, high = (min(at * each, rows) * length for at in (place, place + 1))
                own.append((low, high) if low < high else (0, 0))
            found.append(own)
        return found

    def whole_of(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """Parameters that layers compute with in place of these, once ``as_whole`` was entered."""
        return [self._of[p]._unsharded_param for p in parameters]

    def rest(self) -> None:
        """Make the module hold its shards: torch leaves the outermost layers whole at times."""
        for group in self._groups:
            group._to_sharded()

    @contextlib.contextmanager
    def as_whole(self) -> Iterator[None]:
        """Context: layers hold the parameters they compute with, of no memory; for all ranks."""
        self.rest()
        for module in self._modules:  # one by one: the whole is in no one's memory
            module.unshard()
            module.reshard()
        try:
            for p in self._each:
                p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)
                p._setattr_on_modules(p._unsharded_param)
            yield
        finally:
            for p in self._each:
                p._setattr_on_modules(p.sharded_param)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Context: each rank has the whole module, to run as often as it likes; for all ranks.

        What torch has noted of the pass that is under way is as it was, afterwards.
        """
        undo = self._noted()
        before = [group for group in self._groups if group.is_sharded]
        for group in before:
            group.unshard()
            group.wait_for_unshard()
        for group in self._groups:
            group.reshard = _nothing
        try:
            yield
        finally:
            for group in self._groups:
                vars(group).pop("reshard", None)
            for group in before:
                group._to_sharded()
            undo()

    def _noted(self) -> Callable[[], None]:
        """Return a function that restores torch's progress in the passes that are under way."""
        kept: list[tuple[Any, str, Any]] = []
        for state in self._states:
            kept.append((state, "_training_state", state._training_state))
            kept.append((state, "_modules_to_run_forward", set(state._modules_to_run_forward)))
            for name in ("iter_forward_root", "post_backward_final_callback_queued"):
                kept.append((state._state_ctx, name, getattr(state._state_ctx, name)))
            order = getattr(state._comm_ctx, "post_forward_order", [])
            kept.append((state._comm_ctx, "post_forward_order", list(order)))
        for group in self._groups:
            kept.append((group, "_training_state", group._training_state))
            kept.append((group, "_post_forward_indices", list(group._post_forward_indices)))

        def undo() -> None:
            for owner, name, value in kept:
                held = getattr(owner, name)
                if isinstance(value, set | list):  # hooks know the very object
                    held.clear()
                    held.update(value) if isinstance(value, set) else held.extend(value)
                else:
                    setattr(owner, name, value)

        return undo

    @contextlib.contextmanager
    def together(self, ranks: Ranks, wanted: bool) -> Iterator[None]:
        """Context in which ranks that want to may run the module alone; all ranks must enter it.

        Args:
            ranks: of the run.
            wanted: whether this rank is one of them.

        Raises:
            RuntimeError: on every rank, if one of them raises in the context.
        """
        if not ranks.any("a look at the module", wanted):
            yield
            return
        with self.whole(), ranks.together():
            yield
            ranks.any("a look at the module", False)

    def hold_gradients(self) -> None:
        """Make torch reduce no gradients: none may leave the rank before it is clipped.

        In a private run no parameter gets one: what reaches a whole parameter is refused by what
        looks at the layers, what reaches a shard (of a penalty on the weights, say) is here.
        """
        self._synced = [(group, group.reduce_grads) for group in self._groups]
        for group in self._groups:
            group.reduce_grads = False
        for p in self._of:
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(_refuse))

    def release(self) -> None:
        """Make torch reduce gradients as before the run."""
        for group, before in self._synced:
            group.reduce_grads = before
        for hook in self._hooks:
            hook.remove()
        self._synced, self._hooks = [], []


def _groups_of(state: Any) -> list[Any]:
    """Groups that a call of ``fully_shard`` gathers at once; one, or none, before torch 2.13."""
    found = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (state._fsdp_param_group,) if g] if found is None else list(found)


def _refuse(p: torch.Tensor) -> None:
    """Refuse a gradient on a shard: none belongs there."""
    p.grad = None  # not clipped
    raise RuntimeError(
        f"a gradient reached the shards of a parameter of shape {tuple(p.shape)} outside the layer "
        "that owns it (for instance through a penalty on the weights), where its per-example "
        "gradients cannot be computed: call the layer, or use the optimizer's weight_decay"
    )


def _nothing() -> None:
    """Do nothing, in place of what gives a layer's parameters up."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a tensor that is divided, in its own memory; any other one itself."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)
    return tensor.detach() if local is None else local.detach()


def is_divided(tensor: Any) -> bool:
    """True if each rank has a part of the tensor (a DTensor)."""
    return any(base.__name__ == "DTensor" for base in type(tensor).__mro__)
