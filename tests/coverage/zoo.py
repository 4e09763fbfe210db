"""All models of the matrix, in the order of its tables."""

from __future__ import annotations

from tests.coverage import adapters, image_libraries, images, own, texts
from tests.coverage.case import Case

HERE: list[Case] = [
    *texts.ENCODERS,
    *texts.DECODERS,
    *texts.BOTH,
    *texts.STATE_SPACE,
    *texts.EXPERTS,
    *images.VISION,
    *images.AUDIO,
    *images.SEVERAL,
    *adapters.ADAPTERS,
    *own.OWN,
]
WITH_TORCHVISION: list[Case] = [*image_libraries.TIMM, *image_libraries.TORCHVISION]
