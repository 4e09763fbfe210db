"""Small random architectures with a batch, put together by hypothesis from the layer list.

A *stem* takes the inputs, *blocks* follow, each named after the layer that it is there for, and a
*head* ends it. Everything is drawn at random: shapes, strides, biases, what is frozen, how many
rows. The printed module and the shapes of the batch say what failed.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.helpers.architectures_image import IMAGE_BLOCKS, image_stem
from tests.helpers.architectures_parts import Model, Start, disturb
from tests.helpers.architectures_sequence import (
    SEQUENCE_BLOCKS,
    STEMS,
    VECTOR_BLOCKS,
    sequence_stem,
)

FREEZING = ["nothing", "weights", "biases", "half", "some"]


class Architecture:
    """A module in training mode and a batch of it.

    Attributes:
        inputs: what the module is called with, each with ``examples * views`` rows.
        targets: shape (rows,), for ``tests.helpers.clipping_oracle.row_losses``; of very different
            sizes, so that some examples are clipped and others are not.
    """

    def __init__(
        self, *, module: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, views: int
    ) -> None:
        self.module, self.inputs, self.targets, self.views = module, inputs, targets, views

    @property
    def examples(self) -> int:
        return len(self.targets) // self.views

    @property
    def dtype(self) -> torch.dtype:
        return self.targets.dtype

    def __repr__(self) -> str:
        frozen = [n for n, p in self.module.named_parameters() if not p.requires_grad]
        shapes = [tuple(x.shape) for x in self.inputs]
        ids = [x.tolist() for x in self.inputs if not x.is_floating_point()]
        return (
            f"{self.module}\ninputs {shapes} {self.dtype}, views={self.views}, ids {ids}, "
            f"frozen: {frozen}"
        )


# Block by the layer it shows -> what it works on.
BLOCKS = {
    **dict.fromkeys(VECTOR_BLOCKS, "vector"),
    **dict.fromkeys(SEQUENCE_BLOCKS, "sequence"),
    **dict.fromkeys(IMAGE_BLOCKS, "image"),
}
MAKERS = {**SEQUENCE_BLOCKS, **VECTOR_BLOCKS, **IMAGE_BLOCKS}


def _freeze(draw: Any, module: nn.Module, how: str) -> None:
    """Freeze parameters, and leave one at least to be trained."""
    named = list(module.named_parameters())
    if how == "weights":  # bias only: BiTFiT
        chosen = [p for n, p in named if n.endswith("weight")]
    elif how == "biases":
        chosen = [p for n, p in named if n.endswith("bias")]
    elif how == "half":
        chosen = [p for _, p in named[: len(named) // 2]]
    elif how == "some":
        chosen = [p for _, p in named if draw(st.booleans())]
    else:
        chosen = []
    for p in chosen:
        p.requires_grad_(False)
    if not any(p.requires_grad for p in module.parameters()):
        named[draw(st.integers(0, len(named) - 1))][1].requires_grad_(True)


@st.composite
def architectures(
    draw: Any,
    *,
    block: str | None = None,
    stem: str | None = None,
    without: frozenset[str] = frozenset(),
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32),
    views: tuple[int, ...] = (1,),
    freezing: list[str] = FREEZING,
    most_examples: int = 6,
) -> Architecture:
    """An architecture.

    Args:
        block: a name of ``BLOCKS`` that it has to have; any if ``None``.
        stem: a name of ``STEMS``; any if ``None``. With a block that works on sequences only.
        without: blocks, stems and options that it must not have (layers unknown to a mode).
        dtypes, views, freezing: to choose from.
        most_examples: B is 1 to this.
    """
    torch.manual_seed(draw(st.integers(0, 2**16)))
    several = draw(st.sampled_from(views))
    rows = draw(st.integers(1, most_examples)) * several
    kinds = ["vector", "sequence", "image"]
    if block is not None:
        kinds = [BLOCKS[block]]
    elif stem is not None:
        kinds = ["sequence"]
    kind = draw(st.sampled_from(kinds))
    start: Start
    if kind == "image":
        start = image_stem(draw, rows, without)
    else:
        allowed = [stem] if stem else [s for s in STEMS if s not in without]
        start = sequence_stem(draw, rows, kind, draw(st.sampled_from(allowed)), without)
    own = {"vector": VECTOR_BLOCKS, "sequence": SEQUENCE_BLOCKS, "image": IMAGE_BLOCKS}[kind]
    # Whatever works on the last dimension of a vector does on that of a sequence.
    choice = {**own, **(VECTOR_BLOCKS if kind == "sequence" else {})}
    names = draw(
        st.lists(st.sampled_from([n for n in choice if n not in without]), min_size=1, max_size=3)
    )
    if block is not None:
        names[draw(st.integers(0, len(names) - 1))] = block
    shape, blocks = start.shape, []
    for name in names:
        layer, shape = MAKERS[name](draw, shape, without)
        blocks.append(layer)
    module = Model(start, blocks, shape, kind, draw)
    disturb(module)
    _freeze(draw, module, draw(st.sampled_from(freezing)))
    dtype = draw(st.sampled_from(dtypes))
    sizes = 10.0 ** torch.empty(rows).uniform_(-1, 1.5)
    return Architecture(
        module=module.to(dtype),
        inputs=tuple(x.to(dtype) if x.is_floating_point() else x for x in start.inputs),
        targets=(torch.randn(rows) * sizes).to(dtype),
        views=several,
    )
