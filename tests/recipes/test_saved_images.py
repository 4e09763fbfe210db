"""Images in tables: what ``datasets`` saved, and parquet or arrow files, by type or by name."""

from __future__ import annotations

import pathlib

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from recipes.data import saved_images
from tests.helpers.image_files import png, random_digits, random_images

NAMES = [f"class {number}" for number in range(10)]
TYPES = {
    "image": datasets.Image(),
    "label": datasets.ClassLabel(names=NAMES),
}


def _table(pixels, labels, types=None, **more):
    """A table of encoded images, under the names of ``types``: images, then labels."""
    types = TYPES if types is None else types
    image, label = list(types)[:2]
    mode = "L" if pixels.shape[1] == 1 else "RGB"
    cells = [{"bytes": png(image, mode=mode), "path": None} for image in pixels]
    columns = {image: cells, label: list(labels), **more}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(types))


def _save(root, layout, train, test, *, name="test"):
    if layout == "save_to_disk":
        datasets.DatasetDict({"train": train, name: test}).save_to_disk(str(root), num_proc=None)
        return
    place = root / "data" if layout == "data/parquet" else root
    place.mkdir(exist_ok=True, parents=True)
    for part, table in (("train", train), (name, test)):
        if layout == "arrow":
            saved = root.parent / f"saved {part}"
            table.save_to_disk(str(saved))
            (found,) = saved.glob("*.arrow")
            found.rename(root / f"{part}.arrow")
        else:
            table.to_parquet(str(place / f"{part}-00000-of-00001.parquet"))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet", "data/parquet", "arrow"])
@pytest.mark.parametrize("draw", [random_images, random_digits])
@pytest.mark.parametrize("name", ["test", "validation"])
def test_the_images_are_those_written_in_order(root, layout, draw, name):
    (pixels, labels), (other, others) = draw(20), draw(10, seed=1)
    _save(root, layout, _table(pixels, labels), _table(other, others), name=name)
    before = sorted(root.rglob("*"))
    split = saved_images(root)
    assert sorted(root.rglob("*")) == before
    channels, side = pixels.shape[1:3]
    assert (split.channels, split.classes, split.image_size) == (channels, 10, side)
    assert np.array_equal(split.train.pixels, pixels)
    assert np.array_equal(split.test.pixels, other)
    assert split.train.labels.tolist() == labels.tolist()
    assert split.test.labels.tolist() == others.tolist()


def test_shards_are_put_together_and_none_may_be_missing(root):
    pixels, labels = random_digits(30)
    for shard in range(2):
        rows = slice(10 * shard, 10 * shard + 10)
        name = f"train-{shard:05}-of-00002-0123456789abcdef.parquet"
        _table(pixels[rows], labels[rows]).to_parquet(str(root / name))
    _table(pixels[20:], labels[20:]).to_parquet(str(root / "test.parquet"))
    assert np.array_equal(saved_images(root).train.pixels, pixels[:20])
    (root / "train-00000-of-00002-0123456789abcdef.parquet").unlink()
    with pytest.raises(FileNotFoundError, match=r"train-00000-of-00002\*\.parquet is missing"):
        saved_images(root)


def test_columns_are_found_by_type_or_named(root):
    types = {"shown": datasets.Image(), "kind": datasets.ClassLabel(names=NAMES)}
    types |= {"id": datasets.Value("int64"), "coarse": datasets.Value("int32")}
    pixels, labels = random_digits(20)
    halves = labels // 5
    table = _table(pixels, labels, types, id=list(range(20)), coarse=halves.tolist())
    _save(root, "parquet", table, table)
    split = saved_images(root)
    assert split.train.labels.tolist() == labels.tolist()
    named = saved_images(root, image="shown", label="coarse")
    assert (named.classes, named.train.labels.tolist()) == (2, halves.tolist())
    with pytest.raises(ValueError, match=r"has the columns shown, kind, id, coarse and lacks x"):
        saved_images(root, label="x")


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (
            {**TYPES, "fine": datasets.ClassLabel(names=NAMES)},
            r"several columns that may be the label, label, fine; name one by data.label_column",
        ),
        (
            {**TYPES, "fine": datasets.Image()},
            r"several columns that may be the image, image, fine; name one by data.image_column",
        ),
        (
            {"image": datasets.Image(), "label": datasets.Value("string")},
            r"none has classes or integers; name one by data.label_column",
        ),
    ],
)
def test_an_unclear_column_is_a_question(root, types, message):
    pixels, labels = random_digits(4)
    values = list(map(str, labels)) if len(types) == 2 else list(labels)
    cells = [{"bytes": png(image, mode="L"), "path": None} for image in pixels]
    more = {}
    if len(types) > 2:
        more = {"fine": cells if isinstance(types["fine"], datasets.Image) else values}
    table = _table(pixels, values, types, **more)
    _save(root, "parquet", table, table)
    with pytest.raises(ValueError, match=message):
        saved_images(root)


def test_parquet_without_the_types_of_datasets(root):
    """As other programs write it: a struct of bytes, and integers."""
    pixels, labels = random_digits(20)
    cells = [{"bytes": png(image, mode="L"), "path": None} for image in pixels]
    for part in ("train", "test"):
        plain = pyarrow.table({"image": cells, "label": labels % 3})
        parquet.write_table(plain, root / f"{part}.parquet")
    split = saved_images(root)
    assert np.array_equal(split.train.pixels, pixels)
    assert (split.classes, split.train.labels.tolist()) == (3, (labels % 3).tolist())


def test_labels_of_text_are_numbered_alphabetically(root):
    types = {"image": datasets.Image(), "label": datasets.Value("string")}
    pixels, _ = random_digits(4)
    train = _table(pixels, ["cat", "ant", "cat", "bee"], types)
    _save(root, "parquet", train, _table(pixels[:1], ["bee"], types))
    split = saved_images(root, label="label")
    assert (split.classes, split.train.labels.tolist()) == (3, [2, 0, 2, 1])
    assert split.test.labels.tolist() == [1]
    _save(root, "parquet", train, _table(pixels[:2], ["bee", "eel"], types))
    with pytest.raises(ValueError, match=r"test-.*label 'eel' of image 1 is no class"):
        saved_images(root, label="label")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], r"no training image has label 2, and others have up to 3"),
        ([0, 1, 10**12], r"no training image has label 2"),
        ([0, 1, -1], r"label -1 of image 2 is no class from 0 to 1"),
        ([0, 1, None], r"label None of image 2"),
        ([0, 0, 0], r"1 class; there is nothing to tell apart"),
    ],
)
def test_labels_that_are_no_classes_are_named(root, labels, message):
    types = {"image": datasets.Image(), "label": datasets.Value("int64")}
    table = _table(random_digits(3)[0], labels, types)
    _save(root, "parquet", table, table)
    with pytest.raises(ValueError, match=message):
        saved_images(root)


def test_parts_with_other_classes_are_refused(root):
    pixels, labels = random_digits(10)
    other = {**TYPES, "label": datasets.ClassLabel(names=NAMES[::-1])}
    _save(root, "parquet", _table(pixels, labels), _table(pixels, labels, other))
    with pytest.raises(ValueError, match=r"test-.* names other classes than .*train-"):
        saved_images(root)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (b"", "row 1: "),
        (png(random_digits(1)[0][0], mode="L")[:-100], "row 1: "),
        (png(np.zeros((1, 27, 28), np.uint8), mode="L"), "row 1: is 28×27 pixels, not 28×28"),
        (png(np.zeros((3, 28, 28), np.uint8), mode="P"), "row 1: has mode P"),
        (None, "row 1 has no image bytes in 'image'"),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_an_image_that_cannot_be_used_is_named_by_table_and_row(root, part, cell, message):
    good = png(random_digits(1)[0][0], mode="L")
    for name in ("train", "test"):
        cells = [{"bytes": b, "path": "x.png"} for b in [good, cell if name == part else good]]
        table = pyarrow.table({"image": cells, "label": [0, 1]})
        parquet.write_table(table, root / f"{name}.parquet")
    with pytest.raises(ValueError, match=rf"{part}\.parquet: {message}"):
        saved_images(root)


def test_parts_are_told_apart(root):
    table = _table(*random_digits(10))
    saved = datasets.DatasetDict({"train": table, "test": table, "validation": table})
    saved.save_to_disk(str(root))
    with pytest.raises(ValueError, match=r"holds test and validation: which of them"):
        saved_images(root)
    assert len(saved_images(root, test="validation").test) == 10
    with pytest.raises(FileNotFoundError, match="has the parts train, test, validation and no x"):
        saved_images(root, test="x")


def test_a_data_set_without_a_test_part_says_how_to_make_one(root):
    _table(*random_digits(10)).save_to_disk(str(root))
    with pytest.raises(FileNotFoundError, match=r"no test part; .*train_test_split\("):
        saved_images(root)


def test_missing_and_damaged_files_are_named(root):
    with pytest.raises(FileNotFoundError, match=r"neither a data set .* nor train-\*\.parquet"):
        saved_images(root)
    table = _table(*random_digits(10))
    table.to_parquet(str(root / "train.parquet"))
    with pytest.raises(FileNotFoundError, match="lacks a test part"):
        saved_images(root)
    (root / "test.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"test\.parquet cannot be read as parquet"):
        saved_images(root)


def test_a_damaged_saved_data_set_is_named(root):
    table = _table(*random_digits(10))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(root))
    (found,) = pathlib.Path(root / "train").glob("*.arrow")
    found.write_bytes(found.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cannot be read as a saved data set"):
        saved_images(root)
