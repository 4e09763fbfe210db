"""How the parameters of a model lie in flat buffers of noise."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Layout:
    """Shapes, dtypes and devices of the parameters, and their place in flat rows.

    A row holds all parameters of a device, or one parameter.

    Attributes:
        shapes: shape of each parameter.
        dtypes: dtype of each parameter; rows are float32 and cast on the way out.
        devices: the device of each flat row.
        places: for each parameter, (index of its flat row, offset in that row).
        sizes: number of entries of each flat row.
    """

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    devices: tuple[torch.device, ...]
    places: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, like: Sequence[torch.Tensor], *, per_parameter: bool = False) -> Layout:
        """The layout of noise for tensors like these.

        Args:
            like: the parameters.
            per_parameter: a row per parameter, not one per device.

        Raises:
            ValueError: if there are none, or one is not a real floating-point tensor.
        """
        like = list(like)
        if not like:
            raise ValueError("like is empty: there is no parameter to add noise to")
        devices: list[torch.device] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for index, tensor in enumerate(like):
            if not tensor.dtype.is_floating_point:
                raise ValueError(
                    f"like[{index}] has dtype {tensor.dtype}: noise is for floating-point tensors"
                )
            if per_parameter or tensor.device not in devices:
                devices.append(tensor.device)
                sizes.append(0)
            group = index if per_parameter else devices.index(tensor.device)
            places.append((group, sizes[group]))
            sizes[group] += tensor.numel()
        return cls(
            shapes=tuple(tensor.shape for tensor in like),
            dtypes=tuple(tensor.dtype for tensor in like),
            devices=tuple(devices),
            places=tuple(places),
            sizes=tuple(sizes),
        )

    def views(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A view of its flat row per parameter, shaped like it but still float32."""
        return [
            rows[group][offset : offset + shape.numel()].view(shape)
            for shape, (group, offset) in zip(self.shapes, self.places, strict=True)
        ]

    def describe(self) -> dict[str, list[object]]:
        """Everything that decides the values of a row, as plain JSON values.

        The index of a device does not: a run may go on on another one of the same kind.
        """
        return {
            "shapes": [list(shape) for shape in self.shapes],
            "dtypes": [str(dtype) for dtype in self.dtypes],
            "devices": [f"{self.devices[g].type} {g}" for g, _ in self.places],
        }
