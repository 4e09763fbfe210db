"""Images in a folder for every class, the layout that torchvision calls ImageFolder."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import torch

from recipes.data.augment import PLAIN, Views
from recipes.data.decode import decode, side
from recipes.data.parts import Foreseen, Part, existing_folder, image_split, unheard
from recipes.data.split import Split

TRAIN = "train"
TESTS = ("test", "val", "valid", "validation")  # what the other folder may be called
SUFFIXES = (
    ".png",
    ".jpg",
    ".jpeg",
    ".bmp",
    ".gif",
    ".pgm",
    ".ppm",
    ".tif",
    ".tiff",
    ".webp",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """The images of one part.

    Attributes:
        folder: that holds the folders of the classes.
        classes: their names in alphabetical order, which numbers the labels.
        paths: by class, and by file name within a class.
        labels: int64, one a path.
    """

    folder: pathlib.Path
    classes: tuple[str, ...]
    paths: list[pathlib.Path]
    labels: torch.Tensor


def list_classes(folder: pathlib.Path, *, classes: Sequence[str] | None = None) -> Listing:
    """List ``folder/CLASS/*.png`` (or another format), in the same order on every machine.

    Names that begin with a dot are passed over.

    Args:
        folder: of one part.
        classes: those that have to be there; ``None`` takes what is there, at least two.

    Raises:
        FileNotFoundError: naming a class whose folder is missing or holds no image.
        ValueError: naming what lies there and is neither a class nor an image, since a file that is
            passed over may be an example that is missing.
    """
    found = {entry.name: entry for entry in _visible(folder)}
    if stray := sorted(name for name, entry in found.items() if not entry.is_dir()):
        raise ValueError(
            f"{folder} holds {_some(stray)} beside the folders of the classes; move it elsewhere"
        )
    if classes is None:
        classes = sorted(found)
        if len(classes) < 2:
            raise FileNotFoundError(
                f"{folder} holds {len(classes)} class folders; put the images of each class into "
                f"a folder of its own, {folder / 'CLASS' / 'NAME.png'}"
            )
    if missing := [name for name in classes if name not in found]:
        raise FileNotFoundError(
            f"{folder} lacks the class folder{'s'[: len(missing) > 1]} {', '.join(missing)}; "
            "unpack the data set again"
        )
    if extra := sorted(set(found) - set(classes)):
        raise ValueError(
            f"{folder} holds {', '.join(extra)}, which is no class and would shift the "
            f"numbers of the others ({_some(classes)}); move it elsewhere"
        )
    paths: list[pathlib.Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        images = _images(found[name])
        paths += images
        labels += [label] * len(images)
    return Listing(folder, tuple(classes), paths, torch.tensor(labels, dtype=torch.int64))


def list_parts(
    root: pathlib.Path, *, classes: Sequence[str] | None = None, test: str | None = None
) -> tuple[Listing, Listing]:
    """List the training and the test folder, which have the same classes.

    Args:
        root: holds ``train`` and one of ``TESTS``.
        classes: as for ``list_classes``; ``None`` takes those of the training folder.
        test: name of the test folder; ``None`` finds it.

    Raises:
        FileNotFoundError: if a folder is missing.
        ValueError: if the test folder could be one of several, and as ``list_classes``.
    """
    if not (root / TRAIN).is_dir():
        raise FileNotFoundError(
            f"{root} lacks the folder {TRAIN!r}; images lie in {root / TRAIN / 'CLASS' / '*.png'}"
        )
    name = test_name([name for name in TESTS if (root / name).is_dir()], root, wanted=test)
    if not (root / name).is_dir():
        raise FileNotFoundError(f"{root} lacks the folder {name!r}")
    train = list_classes(root / TRAIN, classes=classes)
    return train, list_classes(root / name, classes=train.classes)


def test_name(found: Sequence[str], root: pathlib.Path, *, wanted: str | None) -> str:
    """The part that is the test set: the one that is named, or the only one there is.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if there are several.
    """
    if wanted is not None:
        return wanted
    if not found:
        raise FileNotFoundError(f"{root} lacks a test part, which is called {', '.join(TESTS)}")
    if len(found) > 1:
        raise ValueError(
            f"{root} holds {' and '.join(found)}: which of them is the test set? Name it "
            "(data.test_part), or move the others elsewhere"
        )
    return found[0]


def read_listing(listing: Listing, *, image_size: int, channels: int = 3) -> Part:
    """Decode the images of one part.

    Raises:
        ValueError: naming the first that is damaged or of another size or mode.
    """
    pixels = decode(
        listing.paths,
        image_size=image_size,
        channels=channels,
        name=lambda row: str(listing.paths[row]),
        description=f"reading {listing.folder.name}",
    )
    return pixels, listing.labels


def read_parts(
    root: pathlib.Path,
    *,
    classes: Sequence[str],
    image_size: int,
    channels: int = 3,
    foreseen: Foreseen,
) -> tuple[Part, Part]:
    """Training and test part of a data set whose classes and size are known.

    Args:
        root, classes: as for ``list_parts``.
        image_size, channels: as for ``read_listing``.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError, ValueError: as ``list_parts`` and ``read_listing``.
    """
    train, test = list_parts(root, classes=classes)
    foreseen(len(train.paths), image_size)
    return (
        read_listing(train, image_size=image_size, channels=channels),
        read_listing(test, image_size=image_size, channels=channels),
    )


def image_folder(
    root: str | pathlib.Path,
    *,
    test: str | None = None,
    views: Views = PLAIN,
    foreseen: Foreseen = unheard,
) -> Split:
    """Any images in ``ROOT/train/CLASS/*.png`` and ``ROOT/test/CLASS/*.png``.

    All images have one size, with height equal to width. If all are grey they keep one channel,
    otherwise grey ones become RGB.

    Args:
        root: of both folders.
        test: name of the test folder; ``None`` finds it among ``TESTS``.
        views: of the training images.
        foreseen: is told the number of training images and their size before they are decoded.

    Raises:
        FileNotFoundError, ValueError: as ``list_parts`` and ``decode``.
    """
    train, test_listing = list_parts(existing_folder(root), test=test)
    paths = train.paths + test_listing.paths
    count, image_size = len(train.paths), side(paths[0], name=str(paths[0]))
    foreseen(count, image_size)
    pixels = decode(
        paths,
        image_size=image_size,
        name=lambda row: str(paths[row]),
        description="reading images",
    )
    return image_split(
        (pixels[:count], train.labels),
        (pixels[count:], test_listing.labels),
        classes=len(train.classes),
        views=views,
    )


def _images(folder: pathlib.Path) -> list[pathlib.Path]:
    images = _visible(folder)
    for path in images:
        if path.suffix.lower() not in SUFFIXES:
            what = "a folder" if path.is_dir() else "no image by its name"
            raise ValueError(
                f"{path} is {what}; a class folder holds image files only, so move it elsewhere"
            )
    if not images:
        raise FileNotFoundError(f"{folder} holds no image of this class; unpack the data set again")
    return images


def _visible(folder: pathlib.Path) -> list[pathlib.Path]:
    """Entries in order of their names' code points, which no locale changes."""
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    return sorted(entries, key=lambda entry: entry.name)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"
