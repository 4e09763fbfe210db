"""Colors as brightness and two opponents, which differ more from one another than RGB do."""

from __future__ import annotations

import torch


def opponent(images: torch.Tensor) -> torch.Tensor:
    """Red, green and blue as (R + G + B)/√3, (R - G)/√2 and (R + G - 2B)/√6.

    An orthonormal transform of each pixel (van de Sande, Gevers & Snoek 2010, doi:
    10.1109/TPAMI.2009.154). In most photographs the three colors are nearly the same picture, and
    moduli of their wavelet transforms nearly the same features; of opponents they are not.

    Args:
        images: shape (B, 3, H, W). Others, of one color for instance, are returned as they are.

    Returns:
        Shape (B, 3, H, W), brightness first.
    """
    if images.shape[1] != 3:
        return images
    red, green, blue = images.unbind(1)
    warm = red + green
    parts = (warm + blue) / 3**0.5, (red - green) / 2**0.5, (warm - 2 * blue) / 6**0.5
    return torch.stack(parts, 1)
