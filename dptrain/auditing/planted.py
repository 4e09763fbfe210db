"""Canaries among the examples of a training that is not about them.

Two kinds. A *gradient canary* has a coordinate of the model to itself: a row of an embedding that
nothing else uses. Its row of the module's output hands no gradient to the module; it hands one to
that coordinate, far longer than any clipping norm, so that what the run releases there is the game
of ``mechanism_audit``. An *input canary* is an example like any other, mislabeled for instance, and
whoever audits sees the final model alone. Of a canary that is out the gradient is zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from dptrain.auditing.canaries import CanaryRun
from dptrain.auditing.draws import key
from dptrain.auditing.laws import game_of
from dptrain.core import Array, checks
from dptrain.engine import PrivateTraining
from dptrain.sampling.loading import map_leaves

_LEVER = 2.0**24  # a gradient canary's gradient over that of the loss by its row of the output
# What a loss sees there: within the domain of most, the target of few, and no matter of the model,
# which would learn to have no gradient.
_CONSTANT = 0.5
# What an item's number says; another one is the canary's row of the embedding.
_PASSES, _OUT = 0, -1


class Marked(NamedTuple):
    """The first entry of an item, or of a batch, and the mark that says whose it is.

    Attributes:
        x: as it was.
        canary: 0: an example; -1: a canary that is out; else the row of a gradient canary.
    """

    x: Any
    canary: Any

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Both on another device, or ``x`` in another type."""
        x = self.x.to(*args, **kwargs)
        return type(self)(x, self.canary.to(x.device))


class _Lever(torch.autograd.Function):
    """The output, but for a constant in the rows of gradient canaries, whose gradient is their own.

    It is a multiple of the length of the loss's gradient by the row. So it scales as that does, has
    one sign, whatever the loss and the label, and the canary adds up over the steps.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, own: torch.Tensor, number: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(own, number)
        return torch.where(_by_row(number > 0, output), _CONSTANT, output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        own, number = ctx.saved_tensors
        lengths = gradient.reshape(len(number), -1).to(own).norm(dim=1)
        lever = torch.where(number > 0, _LEVER * lengths, 0.0).view_as(own)
        return torch.where(_by_row(number == _PASSES, gradient), gradient, 0.0), lever, None


def _by_row(which: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return which.view(-1, *[1] * (like.dim() - 1))


class PlantedModule(nn.Module):
    """The user's module, trained in place, with a coordinate for every gradient canary.

    Attributes:
        coordinates: an embedding of one column; nothing depends on its values.
    """

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        self.module = module
        like = next(module.parameters(), torch.zeros(()))
        start = torch.zeros(1 + rows, 1, device=like.device)
        self.coordinates = nn.Embedding.from_pretrained(start, freeze=False)

    def forward(self, *args: Any, canary: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Call the user's module, with gradients of their own in the rows of canaries."""
        if args and isinstance(args[0], Marked):
            args, canary = (args[0].x, *args[1:]), args[0].canary
        if canary is None and self.training and torch.is_grad_enabled():
            raise ValueError(
                "the module of plant_canaries() was called on a batch that does not say which "
                "rows are canaries: make the loader from planted.data, and pass the first entry "
                "of its batches (or the key 'canary') to the module unchanged"
            )
        output = self.module(*args, **kwargs)
        if canary is None or not torch.is_grad_enabled():
            return output
        map_leaves(output, lambda leaf, _: _check_rows(leaf, canary))
        own = self.coordinates(canary.clamp(min=0))

        def with_lever(leaf: Any, _: Any) -> Any:
            return _Lever.apply(leaf, own, canary) if _is_differentiable(leaf) else leaf

        return map_leaves(output, with_lever)


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _check_rows(leaf: Any, canary: torch.Tensor) -> None:
    if _is_differentiable(leaf) and (leaf.dim() == 0 or len(leaf) != len(canary)):
        raise ValueError(
            f"the module returns a tensor of shape {tuple(leaf.shape)} for {len(canary)} rows, so "
            "the gradients of canaries cannot be separated (a loss computed within the module has "
            "this effect). Let forward return what the loss is computed from, with one row per "
            "example, and compute the loss outside (transformers: call the model without labels). "
            "With several views of an example, use Marked(x.flatten(0, 1), "
            "canary.repeat_interleave(views))"
        )


class PlantedData(Dataset[Any]):
    """The examples of a map-style data set, then canaries; every item says whose it is.

    Args:
        template: the item that gradient canaries are copies of.
        rows: the marks of the gradient canaries' items.
        marks: the marks of the input canaries' items.
    """

    def __init__(
        self,
        data: Any,
        *,
        template: Any,
        rows: Sequence[int],
        inputs: Sequence[Any],
        marks: Sequence[int],
    ) -> None:
        self.data, self.template, self.rows = data, template, list(rows)
        self.inputs, self.marks = inputs, list(marks)
        self.real = len(data)

    def __len__(self) -> int:
        return self.real + len(self.rows) + len(self.marks)

    def __getitem__(self, index: int) -> Any:
        place = int(index) - self.real
        if not -self.real <= place < len(self) - self.real:
            raise IndexError(f"item {index} of {len(self)}")
        if place < 0:
            return _marked(self.data[int(index)], _PASSES)
        if place < len(self.rows):
            return _marked(copy.deepcopy(self.template), self.rows[place])
        place -= len(self.rows)
        return _marked(self.inputs[place], self.marks[place])


def _marked(item: Any, number: int) -> Any:
    if isinstance(item, Mapping):
        return {**item, "canary": number}
    first, *rest = item
    return (Marked(first, number), *rest)


class Planted:
    """The module and the data set that ``plant_canaries`` made.

    Attributes:
        module: trains the user's module; to be given to the optimizer and to ``make_private``.
        data: the examples, then the gradient canaries, then the input canaries.
        real: examples that are none.
        included: which gradient canaries are in, shape (m,).
        inputs_included: which input canaries are in, shape (k,).
    """

    def __init__(
        self,
        module: PlantedModule,
        data: PlantedData,
        *,
        places: npt.NDArray[np.int64],
        included: npt.NDArray[np.bool_],
        inputs_included: npt.NDArray[np.bool_],
    ) -> None:
        self.module, self.data, self.real = module, data, data.real
        self.included, self.inputs_included = included, inputs_included
        self._places = places
        self._sums: list[Array] = []
        self._steps = 0

    def listen(self, private: PrivateTraining) -> None:
        """Record what every step of the run releases; call it before the first step.

        Raises:
            TypeError: if it is no private run.
            ValueError: if it is no run of ``module`` on ``data``, has begun, or does not release
                what a canary's coordinate shows; with the remedy.
        """
        example = "what make_private returns"
        checks.instance("private", private, PrivateTraining, example=example)
        optimizer, weight = private.optimizer, self.module.coordinates.weight
        if (
            not any(p is weight for p in optimizer.params)
            or private.loader.dataset is not self.data
        ):
            raise ValueError(
                "private is not a run of these canaries: give make_private module=planted.module, "
                "data=planted.data (or a DataLoader over it), and an optimizer of "
                "planted.module.parameters()"
            )
        if private.steps_executed:
            raise ValueError(
                f"{private.steps_executed} steps have run before planted.listen(private), which "
                "must be called before the first one; a run resumed from a checkpoint cannot be "
                "audited"
            )
        if optimizer.shards is not None:
            raise ValueError(
                "each rank has only a slice of the release: use NoiseOptions(shard='off') for a "
                "run that is audited"
            )
        if hasattr(optimizer.original_optimizer, "scales"):
            name = type(optimizer.original_optimizer).__name__
            raise ValueError(
                f"{name} rescales gradients before they are clipped, so it does not receive the "
                "released sum: audit the run with another optimizer, such as SGD or Adam"
            )
        game_of(private.mechanism)
        self._sums, self._steps = [], private.mechanism.steps

        def hear(*_: Any) -> None:
            self._check_lengths(private)
            assert weight.grad is not None
            # Before the optimizer's own arithmetic, which learning rate and momentum are part of.
            released = weight.grad.detach().flatten().double().cpu().numpy()
            mean = optimizer.loss_reduction == "mean"
            factor = optimizer.expected_batch_size if mean else 1.0
            self._sums.append(released * (factor / optimizer.max_grad_norm))

        optimizer.register_step_pre_hook(hear)

    def _check_lengths(self, private: PrivateTraining) -> None:
        """Refuse canaries that clipping does not shorten: they would not show what is stated."""
        batch, norms = private.loader.current, private.last_norms
        if batch is None or norms is None or norms.shape != batch.weights.shape:
            return
        own = batch.indices - self.real
        inside = (own >= 0) & (own < len(self.included))
        inside[inside] = self.included[own[inside]]
        found = norms[: len(own)][torch.from_numpy(inside).to(norms.device)]
        bound = private.optimizer.max_grad_norm
        if len(found) and not bool((found > bound).all()):
            raise RuntimeError(
                f"a canary's gradient has the length {float(found.min()):.3g}, with "
                f"max_grad_norm={bound:g}: the loss has almost no gradient at its row, whose "
                f"entries are all {_CONSTANT}. Pass plant_canaries(template=...) an item whose "
                "label has one"
            )

    def heard(self) -> CanaryRun:
        """The releases of the run, for ``audit_canaries``.

        Raises:
            ValueError: if it is not over, or nothing was planted that could be heard.
        """
        if not len(self.included):
            raise ValueError("there are no gradient canaries: use plant_canaries(canaries=...)")
        if not self._steps or len(self._sums) != self._steps:
            raise ValueError(
                f"planted.listen(private) recorded {len(self._sums)} of {self._steps} steps: call "
                "it before the run, and train to the end, since the guarantee covers all steps"
            )
        found = np.stack(self._sums, axis=1)
        own, spare = self._places[: len(self.included)], self._places[len(self.included) :]
        return CanaryRun(
            included=self.included,
            released=found[own],
            spare=found[spare],
            others=self.real + len(self.inputs_included),
        )

    def input_losses(
        self,
        loss: Callable[[nn.Module, Any], Any],
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
    ) -> Array:
        """The loss of every input canary, one by one and in eval mode, by the module as it is.

        Args:
            loss: of the user's module and of a batch of one example, a single number.
            collate_fn: makes the batch.

        Returns:
            Shape (k,).

        Raises:
            ValueError: if a loss is not a finite number.
        """
        inner = self.module.module
        modes = [(m, m.training) for m in inner.modules()]
        inner.eval()
        try:
            with torch.no_grad():
                found = [float(loss(inner, collate_fn([item]))) for item in self.data.inputs]
        finally:
            for part, mode in modes:
                part.training = mode
        if wrong := [i for i, value in enumerate(found) if not np.isfinite(value)]:
            raise ValueError(
                f"the losses of input canaries {wrong[:5]} are not finite: leave these canaries out"
            )
        return np.asarray(found, dtype=np.float64)


def plant_canaries(
    module: nn.Module,
    data: Any,
    *,
    canaries: int,
    inputs: Sequence[Any] = (),
    spare: int = 1000,
    template: Any = None,
    seed: int = 0,
) -> Planted:
    """Put canaries into a module and its data, for a training loop that stays as it is.

    Of an item ``(x, y, …)`` the loop gets ``(Marked(x, number), y, …)`` and hands its first entry
    to the module; a mapping has a further key ``"canary"``, which is an argument of the module's.
    What the user's module computes of an example, its gradient and how that is clipped do not
    change. What changes is the number of examples, and with it, at equal sampling probability, the
    expected batch size that a mean is divided by.

    Args:
        module: the user's, trained in place.
        data: map-style data set of tuples or mappings.
        canaries: m, gradient canaries.
        inputs: input canaries, items like those of ``data``, not of people who are in it: a copy of
            somebody's example is a second one.
        spare: coordinates that are nobody's and show the noise, at least 2.
        template: the item that gradient canaries are copies of, whatever it is; by default item 0
            with zeros for its numbers.
        seed: of the coins.

    Returns:
        What to train, to listen with, and to judge.

    Raises:
        TypeError: if an argument is of another type, or an item is neither tuple nor mapping.
        ValueError: if there is nothing to plant, or nothing to plant it among.
    """
    checks.instance("module", module, nn.Module)
    if isinstance(data, DataLoader | IterableDataset) or not hasattr(data, "__getitem__"):
        raise TypeError(
            f"data is a {type(data).__name__}: must be the map-style data set; make a DataLoader "
            "from planted.data if you need one"
        )
    m = checks.integer("canaries", canaries, minimum=0)
    spare = checks.integer("spare", spare, minimum=2)
    seed = checks.integer("seed", seed, minimum=0)
    if not m + len(inputs):
        raise ValueError("canaries=0 and no inputs: there is no canary to plant")
    if not len(data):
        raise ValueError("data is empty: use run_canaries() to train on canaries alone")
    for name, item in (("data", data[0]), *(("inputs", item) for item in inputs)):
        if not isinstance(item, list | tuple | Mapping) or not len(item):
            raise TypeError(
                f"{name}: an item is a {type(item).__name__}, which cannot be marked as a canary: "
                "items must be tuples whose first entry is the module's input, or mappings"
            )
        if isinstance(item, Mapping) and "canary" in item:
            raise ValueError(f"{name}: an item already has a key 'canary': rename it")
    if isinstance(module, PlantedModule):
        raise ValueError("module has canaries already: plant all of them at once")
    rng = np.random.default_rng(key(seed, 0))
    included = rng.random(m) < 0.5
    places = 1 + rng.permutation(m + spare)
    inputs_included = rng.random(len(inputs)) < 0.5
    planted = PlantedData(
        data,
        template=_blank(data[0]) if template is None else template,
        rows=np.where(included, places[:m], _OUT).tolist(),
        inputs=inputs,
        marks=np.where(inputs_included, _PASSES, _OUT).tolist(),
    )
    return Planted(
        PlantedModule(module, m + spare),
        planted,
        places=places,
        included=included,
        inputs_included=inputs_included,
    )


def _blank(value: Any) -> Any:
    """An item of the same shape that holds zeros, and so nobody's data."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return np.zeros_like(value)[()]
    if isinstance(value, bool | int | float | complex | str | bytes):
        return type(value)()
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _blank(each) for name, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_blank(each) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_blank(each) for each in value)
    raise TypeError(
        f"item 0 contains a {type(value).__name__}, for which there is no blank value: pass "
        "template=, an item that belongs to nobody"
    )
