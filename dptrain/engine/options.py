"""The options of a run, grouped: how gradients are formed, noise is drawn and batches come.

Each is a frozen value that checks its fields when it is made, writes itself to plain values and
reads itself back. A checkpoint holds all three whole, and a run goes on with the same ones only,
but for what ``MAY_DIFFER`` names.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn

from dptrain.clipping import check_mode_name
from dptrain.clipping.base import FLAT, ClippingStyle
from dptrain.clipping.probe import PROBES
from dptrain.core import JsonValue, checks
from dptrain.engine.criteria import ties_rows
from dptrain.sampling import check_microbatches

DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
_UNSEEN = (
    "the guarantee assumes that the loss, a {}, is the {} over the rows of one loss for each, "
    "which could not be seen: of the arguments that could be made up it takes none, or ties the "
    "rows of some kinds only"
)
SHARDS = ("auto", "all", "noise", "off")
EVERYTHING = ("*",)  # the patterns that buffers="public" stands for

# The keywords of make_private that are groups of options, each stored under its name.
GROUPS = ("gradients", "noise", "loading")

# Of what is stored with a checkpoint, what a resumed run may have otherwise: it decides how the
# work is cut up, neither what is released nor what is proven of it.
MAY_DIFFER = frozenset(
    (
        "loading.max_physical_batch_size",
        "loading.microbatches",
        "loading.steps_per_epoch",
        "noise.folder",
        "noise.shard",
    )
)

# Where keywords of Opacus, and of make_private as it was, have gone.
MOVED = {
    "data_loader": "data=",
    "dataset": "data=",
    "collate_fn": "data=DataLoader(dataset, collate_fn=...)",
    "num_workers": "data=DataLoader(dataset, num_workers=...)",
    "pin_memory": "data=DataLoader(dataset, pin_memory=...)",
    "criterion": "gradients=Gradients(loss=...)",
    "loss_reduction": "gradients=Gradients(loss=...)",
    "grad_sample_mode": "gradients=Gradients(mode=...)",
    "clipping": "gradients=Gradients(clipping=...)",
    "views": "gradients=Gradients(views=...)",
    "probe": "gradients=Gradients(probe=...)",
    "buffers": "gradients=Gradients(buffers=...)",
    "secure": "noise=NoiseOptions(secure=...)",
    "noise_dtype": "noise=NoiseOptions(dtype=...)",
    "regenerate_noise": "noise=NoiseOptions(regenerate=...)",
    "max_physical_batch_size": "loading=Loading(max_physical_batch_size=...)",
    "microbatches": "loading=Loading(microbatches=...)",
    "steps_per_epoch": "loading=Loading(steps_per_epoch=...)",
    "accountant": "PrivacyEngine(accountant=...)",
    "ledger": "PrivacyEngine(ledger=...)",
    "distributed": "PrivacyEngine(distributed=...)",
    "lr_scheduler": "private.register_scheduler(...) of the result of make_private",
    "poisson_sampling": "scheme=, for instance Poisson(...) or Shuffled(...)",
    "sample_rate": "scheme=Poisson(probability=..., dataset_size=..., steps=...)",
    "steps": "scheme=Poisson.for_batch_size(batch_size=..., dataset_size=..., steps=...)",
    "total_steps": "scheme=Poisson.for_batch_size(batch_size=..., dataset_size=..., steps=...)",
    "batch_size": "data=DataLoader(dataset, batch_size=...)",
    "batch_first": "not needed, as the examples come first in every batch",
    "secure_mode": "noise=NoiseOptions(secure=True)",
    "noise_generator": "seed=, from which the run draws everything",
    "alphas": "not needed, as an accountant chooses its own orders",
    "wrap_model": "not needed, as private.module is your own module",
}

# What Opacus's engine has besides, and what is written here.
NOT_OF_THE_ENGINE = {
    "make_private_with_epsilon": "make_private(..., target_epsilon=..., target_delta=...)",
    "get_epsilon": "private.get_epsilon(delta) of the result of make_private",
    "get_privacy_spent": "private.get_epsilon(delta) of the result of make_private",
    "save_checkpoint": "torch.save(private.state_dict(), path) of the result of make_private",
    "load_checkpoint": "private.load_state_dict(state) of the result of make_private",
    "is_compatible": "dptrain.fix(model), which reports what make_private would refuse",
    "validate": "dptrain.fix(model), which reports what make_private would refuse",
    "get_compatible_module": "dptrain.fix(model)",
    "attach": "make_private(module=..., optimizer=..., data=...)",
    "detach": "private.detach() of the result of make_private",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients(JsonValue, family="gradients"):
    """The choices of how per-example gradients are formed, clipped and checked.

    Args:
        mode: ``"bookkeeping"``, ``"hooks"`` or ``"functorch"``. ``None`` is bookkeeping,
            which runs layers again that it has no rule for.
        clipping: how an example's gradient is brought to norm R: shortened as a whole (``Flat``),
            layers or groups of parameters by themselves (``PerLayer``, ``PerGroup``), or always
            normalized (``Automatic``). The sensitivity is R in each of them.
        loss: ``"mean"`` or ``"sum"``, as the loss reduces over the rows of the batch; or the loss
            function itself (a torch criterion, one of ``dptrain.losses``), whose ``reduction`` is
            then taken. It is called on a few made-up rows, and refused if it ties the examples
            together; where it takes other arguments the guarantee says that it went unseen. With a
            scheme's ``nominal_size`` it has to be a sum: a mean is divided by a private number.
        views: K ≥ 1, augmentation multiplicity (De et al. 2022, arXiv 2204.13650): the model is fed
            K rows an example *one after the other* (``x.flatten(0, 1)`` of a batch of shape
            (B, K, ...), labels by ``y.repeat_interleave(K)``), and the loss is reduced over all
            B·K rows. The mean of the K rows' gradients is clipped, once. With K equal views
            the release is that of ``views=1``, whatever the reduction. In another order of
            rows one example would reach several of these means, and the guarantee be false.
        probe: when it is checked, by passes over a few examples that leave no trace, that the
            module keeps the examples apart: ``"shapes"`` whenever its arguments come in shapes
            (but for the number of rows) that were not seen before, ``"first"`` on the first
            batch, ``"off"`` never. The guarantee says where less was done than ``"shapes"``.
            Steps are followed operator by operator besides, from the batch to the gradients, with
            your own lines and the loss: the first, and but for ``"first"`` one in a hundred at
            random. What depends on two examples is refused, and the guarantee says whether it
            was shown that nothing does (docs/theory/limits.md#thm-owners). Such a step takes
            two to three times as long, and compiled code runs as it was written.
        buffers: what forward passes may change in the module: its running statistics, caches,
            counters. A step that changes a buffer or an attribute is refused before anything of
            it is released, unless its name (as in ``named_buffers``; patterns as in ``fnmatch``)
            is declared public here, because no example has an influence on it. ``"public"``: all
            of them. The guarantee says so.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if a field is out of range, or the loss ties the examples together.
    """

    mode: str | None = None
    clipping: ClippingStyle = FLAT
    loss: str | Callable[..., Any] = "mean"
    views: int = 1
    probe: str = "shapes"
    buffers: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.mode is not None:
            check_mode_name(self.mode)
        example = "Flat(), PerLayer() or Automatic()"
        checks.instance("clipping", self.clipping, ClippingStyle, example=example, owner=owner)
        object.__setattr__(self, "loss", _reduction_of(self.loss))
        object.__setattr__(self, "views", checks.integer("views", self.views, owner=owner))
        checks.choice("probe", self.probe, PROBES, owner=owner)
        object.__setattr__(self, "buffers", _patterns(self.buffers))

    @property
    def reduction(self) -> str:
        """``"mean"`` or ``"sum"``, of the loss over the rows."""
        assert isinstance(self.loss, str)
        return self.loss

    @property
    def notes(self) -> tuple[str, ...]:
        """The guarantee's assumption about a loss that could not be checked; else empty."""
        unseen = getattr(self.loss, "unseen", None)
        return () if unseen is None else (_UNSEEN.format(unseen, self.loss),)

    @property
    def public(self) -> tuple[str, ...]:
        """The patterns of the names that ``buffers`` declares public."""
        assert isinstance(self.buffers, tuple)
        return self.buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseOptions(JsonValue, family="noise options"):
    """The choices of how noise is drawn and kept; the mechanism decides how much of it there is.

    Args:
        secure: draw noise from cryptographic bits on CUDA too, which are the CPU's, slower; on the
            CPU they are that anyway (``Normals``). Excludes a seed.
        dtype: of the buffers of past noise. ``torch.float32`` keeps it exactly, as whole numbers of
            32 bits, or of 64 where C^-1 has no end. ``torch.bfloat16`` takes half or a quarter, but
            then the noise is not the one that was accounted for and the guarantee is an estimate.
        regenerate: draw past noise again instead of keeping it; for a banded inverse.
        folder: keep past noise in a file there instead of in memory, each rank its own; the noise
            is the same. It has to be on a disk of the machine, owned by the user who runs this and
            closed to others (mode 0700): past noise is as secret as a seed. For noise on the CPU.
        shard: what the ranks of a run divide among them; it changes nothing of a single process.
            Each keeps and draws the noise of its slice of the parameters (``"noise"``), and has the
            optimizer step on that slice and keep state for it alone (``"all"``, which refuses an
            optimizer that does not work entry by entry). ``"auto"`` divides the optimizer too where
            that is right, and says so where not; with ``"off"`` every rank has all. Then
            ``private.state_dict()`` is to be called on all ranks.

    Raises:
        TypeError: if a switch is neither True nor False, ``dtype`` is no ``torch.dtype``, or
            ``folder`` no path.
        ValueError: if the dtype is another one, or contradicts ``regenerate``, as does ``folder``,
            or ``shard`` is unknown.
    """

    secure: bool = False
    dtype: torch.dtype = torch.float32
    regenerate: bool = False
    shard: str = "auto"
    folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        owner = type(self).__name__
        checks.choice("shard", self.shard, SHARDS, owner=owner)
        checks.flag("secure", self.secure, owner=owner)
        checks.flag("regenerate", self.regenerate, owner=owner)
        checks.instance("dtype", self.dtype, torch.dtype, owner=owner)
        if self.dtype not in DTYPES.values():
            raise ValueError(
                f"{owner}: dtype={self.dtype!r}: torch.float32, or torch.bfloat16 for buffers of "
                "half the size and a guarantee that is only an estimate"
            )
        if self.regenerate and self.dtype != torch.float32:
            raise ValueError(
                f"{owner}: dtype={self.dtype} with regenerate=True: noise that is generated again "
                "has no buffers, so leave one of the two out"
            )
        if self.folder is not None:
            checks.instance("folder", self.folder, (str, os.PathLike), owner=owner)
            folder = os.fspath(self.folder)
            checks.text("folder", folder, owner=owner)
            if self.regenerate:
                raise ValueError(
                    f"{owner}: folder={folder!r} with regenerate=True: noise that is generated "
                    "again has no buffers, so leave one of the two out"
                )
            object.__setattr__(self, "folder", folder)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as of every value, with the dtype by its name."""
        return {**super().to_dict(), "dtype": str(self.dtype)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Self:
        """Build the value, as every value, with the dtype by its name.

        Raises:
            ValueError: if the dtype, the type or a field is unknown, or out of range.
        """
        if not isinstance(value, Mapping) or "dtype" not in value:
            return super().from_dict(value)
        if not isinstance(value["dtype"], str) or value["dtype"] not in DTYPES:
            raise ValueError(
                f"NoiseOptions: dtype={value['dtype']!r}: must be one of {sorted(DTYPES)}"
            )
        return super().from_dict({**value, "dtype": DTYPES[value["dtype"]]})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading(JsonValue, family="loading"):
    """The loading of a logical batch in parts that fit into memory, and the steps of an epoch.

    What a ``DataLoader`` knows (its collate function, workers, pinning) is taken over from the one
    that ``make_private(data=...)`` is given.

    Args:
        max_physical_batch_size: most examples in memory at once; larger batches come in parts,
            whose number is random.
        microbatches: in how many parts every batch comes instead, whatever its size. Then
            ``len(loader)`` is known, which trainers that count batches need.
        steps_per_epoch: logical steps that one pass over the loader yields; ``None``: all.

    Raises:
        TypeError: if one is no integer.
        ValueError: if one is below 1, or the first two are both given.
    """

    max_physical_batch_size: int | None = None
    microbatches: int | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_physical_batch_size", "microbatches", "steps_per_epoch"):
            if (value := getattr(self, name)) is not None:
                value = checks.integer(name, value, owner=type(self).__name__)
                object.__setattr__(self, name, value)
        check_microbatches(self.max_physical_batch_size, self.microbatches)


class Reduction(str):
    """The name of a loss's reduction over the rows, read from the loss function.

    Args:
        name: ``"mean"`` or ``"sum"``.
        unseen: the type of the function, if it could not be called on made-up rows.
    """

    unseen: str | None

    def __new__(cls, name: str, *, unseen: str | None = None) -> Self:
        """A text with that attribute."""
        made = super().__new__(cls, name)
        made.unseen = unseen
        return made

    def __getnewargs_ex__(self) -> tuple[tuple[str], dict[str, str | None]]:
        """Arguments from which a copy is made."""
        return (str(self),), {"unseen": self.unseen}


def _reduction_of(loss: Any) -> str:
    """The reduction of a loss over the rows, given its name or the function itself."""
    known = ("mean", "sum")
    if isinstance(loss, str):
        return checks.choice("loss", loss, known, owner="Gradients")
    reduction = getattr(loss, "reduction", None)
    if not callable(loss) or not isinstance(reduction, str):
        start = checks.named("loss", loss, "Gradients")
        raise TypeError(
            f"{start} must be 'mean' or 'sum', as the loss reduces over the rows of the batch, or "
            "a loss function with one of them as its attribute reduction"
        )
    if reduction not in known:
        raise ValueError(
            f"Gradients: loss is a {type(loss).__name__} with reduction={reduction!r}: use a "
            f"reduction of {known}, or set loss= to the reduction that your loop applies"
        )
    ignored = getattr(loss, "ignore_index", -100)
    remedy = "use dptrain.losses.TokenCrossEntropy, or a loss with reduction='sum'"
    if ignored != -100 and reduction == "mean":  # -100 is torch's "not set"
        raise ValueError(
            f"Gradients: loss is a {type(loss).__name__} with ignore_index={ignored} and "
            "reduction='mean': it divides by the number of targets in the whole batch that are "
            f"not ignored, so each example's gradient depends on the others; {remedy}"
        )
    weighs = isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None
    if weighs and reduction == "mean":
        raise ValueError(
            f"Gradients: loss is a {type(loss).__name__} with class weights and reduction='mean': "
            "it divides by the weights of the whole batch, so each example's gradient depends on "
            f"the others; {remedy}"
        )
    ties = ties_rows(loss, reduction)
    if ties:
        raise ValueError(
            f"Gradients: loss is a {type(loss).__name__} that for a few rows together does not "
            f"give the {reduction} of its values for each row alone. Like contrastive losses and "
            "means over all tokens, it ties the examples of a batch together, so clipping does "
            "not bound the influence of one example. Reduce each example by itself first, for "
            "instance with dptrain.losses.reduce_examples"
        )
    return Reduction(reduction, unseen=type(loss).__name__ if ties is None else None)


def _patterns(public: Any) -> tuple[str, ...]:
    """The patterns that ``buffers`` stands for."""
    if public is None:
        return ()
    if public == "public":
        return EVERYTHING
    wanted = "None, 'public' for all, or names as in module.named_buffers()"
    if isinstance(public, str):
        raise ValueError(f"Gradients: buffers={public!r}: {wanted}, e.g. buffers=[{public!r}]")
    if not isinstance(public, Iterable) or isinstance(public, bytes):
        raise TypeError(f"{checks.named('buffers', public, 'Gradients')}: {wanted}")
    patterns = tuple(public)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise TypeError(f"{checks.named('buffers', public, 'Gradients')}: {wanted}")
    return patterns
