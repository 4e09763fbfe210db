"""Train an image classifier privately, from one YAML file.

``python -m recipes.vision --config configs/digits_vgg_minsep.yaml [field=value ...]
[--resume] [--output DIR] [--simulate FACTOR]``
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.nn.functional import cross_entropy

from recipes.command import run_recipe
from recipes.config import Count, one_of
from recipes.data import (
    Split,
    Views,
    cifar10,
    cinic10,
    digits,
    image_folder,
    mnist,
    saved_images,
)
from recipes.data.mirrored import SideBySide, flipped
from recipes.data.scattered import scattered
from recipes.data.scattering import STRIDE, check_scattered
from recipes.data.split import left_for_training
from recipes.models import check_vgg, vgg
from recipes.run import check_plan, seeded
from recipes.settings import FREE_ON_RESUME, PATHS, RunSettings
from recipes.task import HELD_OUT, TEST, Task

DATA_SETS = ("digits", "cifar10", "cinic10", "mnist", "folder", "datasets")
_UNNAMED = ("folder", "datasets")  # which images they hold is not known here
SIZES = {"cifar10": 32, "cinic10": 32, "mnist": 28}  # of images that have one by definition
FEATURES = ("scattering",)
Share = Annotated[float, Field(gt=0, lt=1)]


@dataclasses.dataclass
class DataSettings:
    """Settings of the images: their source, their place and their changes during training.

    Attributes:
        name: digits (1,797 images that come with scikit-learn), cifar10, cinic10, mnist, folder
            (any images in a folder for every class), or datasets (any that Hugging Face's datasets
            saved, or parquet or arrow files).
        root: folder of all but digits; nothing is downloaded.
        test_fraction: of digits, the share that is the test set, in (0, 1).
        holdout: a share of the training set, of each class, that is taken out of it and evaluated
            on in place of the test set, to choose hyperparameters without that; null is none.
        split_seed: which images the test set of digits, and ``holdout``, take; public.
        image_size: of digits, height and width in pixels that they are enlarged to.
        train_on_valid: of cinic10, train on the validation split as well.
        test_part: of folder and datasets, name of the test part; null finds it.
        image_column: of datasets, name of the column of images; null finds it by its type.
        label_column: of datasets, name of the column of labels; null finds it by its type.
        augment: random views of the training images, by ``crops`` and ``flips``; not for digits.
        crops: whether ``augment`` moves an image by up to four pixels, its border reflected. Of
            ``features`` all places are moved by one or none.
        flips: whether ``augment`` mirrors; has to be false for mnist.
        views: the augmentation multiplicity: so many random views of an example, whose gradients
            are averaged before clipping. Every second one is mirrored if ``flips``.
        mirrored: evaluate on the mean of the probabilities that the model gives an image and its
            mirror image, which is more often right (``accuracy_alone`` is without); neither
            training nor the saved model changes. Not for digits and mnist.
        features: what the model sees in place of the pixels: scattering (117 wavelet features of
            brightness and of each of two opponent colors, for every 4×4 pixels, normalized for each
            image), computed once; null is the pixels.
    """

    name: Annotated[str, one_of(DATA_SETS)] = "digits"
    root: str | None = None
    test_fraction: float = 0.2
    holdout: Share | None = None
    split_seed: int = 0
    image_size: int = 32
    train_on_valid: bool = False
    test_part: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    augment: bool = False
    crops: bool = True
    flips: bool = True
    views: Count = 1
    mirrored: bool = False
    features: Annotated[str, one_of(FEATURES)] | None = None


@dataclasses.dataclass
class ModelSettings:
    """A VGG, or what is left of it without convolutions: a linear model, say.

    Attributes:
        channels: of each block of two convolutions; every block halves height and width. [] is
            none: a linear model, or with ``hidden`` one of two dense layers.
        groups: of each GroupNorm; 0 is no normalization.
        hidden: width of the dense layer before the classifier; 0 is none.
        reduced: channels of a 1×1 convolution before the first block, which makes fewer of many
            ``features``; 0 is none.
        symmetric: an image and its mirror image have the same scores: each layer has its channels
            twice, for the two of them, with the same weights. Half as many weights are left to
            learn as without, in a net of as much work. Not for digits and mnist.
        seed: of the initial weights; public.
    """

    channels: list[int] = dataclasses.field(default_factory=lambda: [32, 64, 128])
    groups: int = 8
    hidden: int = 128
    reduced: int = 0
    symmetric: bool = False
    seed: int = 0


@dataclasses.dataclass
class VisionSettings(RunSettings):
    """A whole run of the recipe for images.

    Attributes:
        recipe: this one, for ``dptrain train``.
        data: the images.
        model: the network.
    """

    # Where the images lie; what they are is recognized by their fingerprint.
    free_on_resume: ClassVar[tuple[str, ...]] = (*FREE_ON_RESUME, "data.root")
    paths: ClassVar[tuple[str, ...]] = (*PATHS, "data.root")

    recipe: Annotated[str, one_of(("vision",))] = "vision"
    data: DataSettings = dataclasses.field(default_factory=DataSettings)
    model: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    output: str = "runs/vision"

    def validate(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        if self.data.name != "digits" and self.data.root is None:
            raise ValueError(
                f"data.root=null: name the folder of the images of data.name={self.data.name}"
            )
        if self.data.views > 1 and not self.data.augment:
            raise ValueError(
                f"data.views={self.data.views} with data.augment=false would show the same view "
                "several times; set data.augment=true or data.views=1"
            )
        if self.data.augment and self.data.name == "digits":
            raise ValueError(
                "data.augment=true: digits are not augmented (a flipped digit is another sign)"
            )
        if self.data.augment and self.data.flips and self.data.name == "mnist":
            raise ValueError(
                "data.augment=true with data.flips=true: a flipped digit is another sign; set "
                "data.flips=false, which leaves the crops"
            )
        if self.data.augment and not self.data.crops and not self.data.flips:
            raise ValueError(
                "data.augment=true with data.crops=false and data.flips=false: a view would be the "
                "image itself; set one of them to true, or data.augment to false"
            )
        self._check_mirror_images()
        self.check_model(SIZES.get(self.data.name))
        super().validate()

    def _check_mirror_images(self) -> None:
        mirrored, symmetric = self.data.mirrored, self.model.symmetric
        for field, active in (("data.mirrored", mirrored), ("model.symmetric", symmetric)):
            if active and self.data.name in ("digits", "mnist"):
                raise ValueError(
                    f"{field}=true with data.name={self.data.name}: a mirrored digit is another "
                    f"sign; set {field}=false"
                )
        shown = ("mirrored", mirrored), ("flips", self.data.augment and self.data.flips)
        for field, active in shown:
            if symmetric and active:
                raise ValueError(
                    f"model.symmetric=true with data.{field}=true: mirror images would be shown to "
                    f"a model that has the same scores for them; set data.{field}=false"
                )

    def check_model(self, image_size: int | None) -> None:
        """Refuse a network that cannot be made for images of this size; ``None``: not known yet.

        Raises:
            ValueError: naming the value and the remedy.
        """
        if self.data.name == "digits":
            image_size = self.data.image_size
        if image_size is not None and self.data.features is not None:
            check_scattered(image_size)
            image_size //= STRIDE
        try:
            check_vgg(
                image_size=image_size,
                channels=self.model.channels,
                groups=self.model.groups,
                hidden=self.model.hidden,
                reduced=self.model.reduced,
            )
        except ValueError as error:
            raise ValueError(f"model: {error}") from error

    def foreseen(self, examples: int, image_size: int) -> None:
        """Refuse what does not fit the images that have been listed and not decoded.

        Raises:
            ValueError: naming the field, the value and the remedy.
        """
        self.check_model(image_size)
        if self.data.holdout is not None:
            examples = left_for_training(examples, self.data.holdout)
        check_plan(self, examples)


def load_images(settings: VisionSettings) -> Split:
    """The data set that the settings name."""
    split, data = _read_images(settings), settings.data
    if data.holdout is not None:
        split = split.hold_out(data.holdout, seed=data.split_seed)
    if data.features is not None:
        return scattered(split, mirrored=data.mirrored)
    if data.mirrored:
        split = dataclasses.replace(split, test=SideBySide(split.test, flipped(split.test)))
    return split


def _read_images(settings: VisionSettings) -> Split:
    data = settings.data
    if data.name == "digits":
        return digits(
            image_size=data.image_size, test_fraction=data.test_fraction, seed=data.split_seed
        )
    assert data.root is not None
    views = Views(data.augment, data.views, data.crops, data.flips)
    changes: dict[str, Any] = {"views": views, "foreseen": settings.foreseen}
    if data.name == "mnist":
        return mnist(data.root, **changes)
    if data.name == "cifar10":
        return cifar10(data.root, **changes)
    if data.name == "cinic10":
        return cinic10(data.root, train_on_valid=data.train_on_valid, **changes)
    changes["test"] = data.test_part
    if data.name == "folder":
        return image_folder(data.root, **changes)
    return saved_images(data.root, image=data.image_column, label=data.label_column, **changes)


def build_task(settings: VisionSettings) -> Task:
    """Data and model of the recipe."""
    split = load_images(settings)
    model = seeded(
        settings.model.seed,
        lambda: vgg(
            in_channels=split.channels,
            classes=split.classes,
            image_size=split.image_size,
            channels=settings.model.channels,
            groups=settings.model.groups,
            hidden=settings.model.hidden,
            reduced=settings.model.reduced,
            symmetric=settings.model.symmetric,
            mirrored=split.mirrored,
        ),
    )
    task = classification_task(
        split,
        model,
        views=settings.data.views,
        evaluated_on=TEST if settings.data.holdout is None else HELD_OUT,
    )
    name = settings.data.name
    return dataclasses.replace(task, data=None if name in _UNNAMED else name)


def classification_task(
    split: Split, model: nn.Module, *, views: int = 1, evaluated_on: str = TEST
) -> Task:
    """Cross entropy and accuracy of images, of which a batch may hold several views.

    In training every view is classified by itself, in an evaluation all of an image together: by
    the mean of the probabilities. ``accuracy_alone`` is then that of each image's first view.
    """

    def forward(module: nn.Module, batch: Any) -> torch.Tensor:
        images = batch[0]
        if images.ndim == 4:
            return module(images)
        # Views come as (examples, views, channels, height, width).
        logits = module(images.flatten(0, 1))
        return logits if module.training else logits.unflatten(0, images.shape[:2])

    def metrics(logits: torch.Tensor, batch: Any) -> dict[str, torch.Tensor]:
        labels, alone = batch[1], {}
        examples = len(labels)
        if logits.ndim == 3:  # several views, classified together
            alone = {"accuracy_alone": (logits[:, 0].argmax(1) == labels).float()}
            logits = logits.log_softmax(2).logsumexp(1) - math.log(logits.shape[1])
        else:
            labels = labels.repeat_interleave(len(logits) // max(examples, 1))
        values = {
            "loss": cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(1) == labels).float(),
        }
        return {name: value.view(examples, -1).mean(1) for name, value in values.items()} | alone

    return Task(
        train=split.train,
        test=split.test,
        model=model,
        forward=forward,
        metrics=metrics,
        views=views,
        target=lambda batch: batch[1],
        examples="images",
        evaluated_on=evaluated_on,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    return run_recipe(
        "vision",
        "Train an image classifier privately.",
        VisionSettings,
        build_task,
        "python -m recipes.vision --config configs/digits_vgg_minsep.yaml privacy.epsilon=2 \\\n"
        "    --output runs/tighter",
        argv,
    )


if __name__ == "__main__":
    sys.exit(main())
