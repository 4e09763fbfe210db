"""CIFAR-10 from pickled batches: the right images, and nothing in a file is run."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest

from recipes.data.batch_pickle import read_batch_pickle
from recipes.data.cifar import cifar10
from tests.helpers.image_files import (
    python2_batch,
    python2_dictionary,
    python2_meta,
    random_images,
    write_batches,
)

FOLDER = "cifar-10-batches-py"


@pytest.fixture
def root(tmp_path):
    write_batches(tmp_path)
    return tmp_path


def test_the_images_are_those_written_in_order(tmp_path, caplog):
    pixels, labels = write_batches(tmp_path)
    with caplog.at_level(logging.WARNING):
        split = cifar10(tmp_path)
    assert (split.channels, split.classes, split.image_size) == (3, 10, 32)
    assert np.array_equal(split.train.pixels, pixels[:100])
    assert np.array_equal(split.test.pixels, pixels[100:])
    assert split.train.labels.tolist() == labels[:100].tolist()
    assert split.test.labels.tolist() == labels[100:].tolist()
    # Fewer images than published are worth a note, no more.
    assert "100 images here, not 50000" in caplog.text
    assert "20 images here, not 10000" in caplog.text
    # The folder itself may be named as well as the one around it.
    assert cifar10(tmp_path / FOLDER).train.fingerprint == split.train.fingerprint


def test_the_generated_files_are_what_pickle_itself_reads():
    """That the generator writes the real format is worth as much as the tests that rest on it."""
    pixels, labels = random_images(12)
    content = pickle.loads(python2_batch(pixels, labels), encoding="bytes")
    assert list(content) == [b"batch_label", b"labels", b"data", b"filenames"]
    assert content[b"data"].dtype == np.uint8
    assert np.array_equal(content[b"data"], pixels.reshape(12, 3072))
    assert content[b"labels"] == labels.tolist()
    assert pickle.loads(python2_meta(), encoding="bytes")[b"label_names"][3] == b"cat"


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("key", [b"data", "data"])
def test_batches_pickled_again_are_read_too(tmp_path, protocol, order, key):
    data = np.asarray(random_images(5)[0].reshape(5, 3072), order=order)
    (tmp_path / "batch").write_bytes(pickle.dumps({key: data, "x": [1]}, protocol=protocol))
    content = read_batch_pickle(tmp_path / "batch")
    assert np.array_equal(content["data"], data)
    assert content["x"] == [1]


class _Runs:
    """What a hostile pickle holds: a call with arguments of its own choosing."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_that_a_pickle_names_is_run(root, tmp_path, protocol):
    written = tmp_path / "written"
    for call in (_Runs(open, str(written), "w"), _Runs(eval, f"open({str(written)!r}, 'w')")):
        bad = root / FOLDER / "data_batch_3"
        bad.write_bytes(pickle.dumps({b"data": call, b"labels": []}, protocol=protocol))
        with pytest.raises(ValueError, match=r"data_batch_3 .*asks for .*do not trust this file"):
            cifar10(root)
    assert not written.exists()


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.getattr", "numpy.load", "numpy.core.multiarray.fromfile"]
)
def test_no_other_name_is_found(tmp_path, name):
    module, _, attribute = name.rpartition(".")
    (tmp_path / "batch").write_bytes(f"\x80\x02c{module}\n{attribute}\n.".encode("latin1"))
    with pytest.raises(ValueError, match=f"asks for {name}"):
        read_batch_pickle(tmp_path / "batch")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3072), np.float32), "another type than uint8"),
        (np.array([None, {}], dtype=object), "another type than uint8"),
        (np.zeros((2, 3071), np.uint8), r"shape \(2, 3071\)"),
        (np.zeros((2, 3, 32, 32), np.uint8), r"shape \(2, 3, 32, 32\)"),
        ([[0] * 3072] * 2, "list"),
    ],
)
def test_wrong_arrays_are_named(root, array, message):
    content = pickle.dumps({b"data": array, b"labels": [0, 1]}, protocol=2)
    (root / FOLDER / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data_batch_2.*{message}"):
        cifar10(root)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 10], "label 10 of image 1"),
        ([-1, 0], "label -1 of image 0"),
        ([0, 1.5], "label 1.5"),
        ([True, 1], "label True"),
        ([0], "labels are 1, not a list of 2"),
        (7, "labels are int"),
    ],
)
def test_wrong_labels_are_named(root, labels, message):
    content = {b"data": np.zeros((2, 3072), np.uint8), b"labels": labels}
    (root / FOLDER / "test_batch").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=rf"test_batch: .*{message}"):
        cifar10(root)


def test_a_truncated_file_is_named_wherever_it_ends(tmp_path):
    whole = python2_batch(*random_images(2))
    path = tmp_path / "batch"
    for length in [*range(0, 200), *range(200, len(whole), 371), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"is no batch of CIFAR-10.*unpack it again"):
            read_batch_pickle(path)


def test_garbage_never_ends_in_anything_but_a_value_error(tmp_path):
    rng = np.random.default_rng(0)
    whole = np.frombuffer(python2_batch(*random_images(1)), np.uint8)
    path, refused = tmp_path / "batch", 0
    for _ in range(300):
        damaged = whole.copy()
        damaged[rng.integers(0, 250, 3)] = rng.integers(0, 256, 3)
        path.write_bytes(damaged.tobytes())
        try:
            read_batch_pickle(path)
        except ValueError:
            refused += 1
    assert refused > 100


def test_no_dictionary_and_no_batch(root):
    (root / FOLDER / "data_batch_1").write_bytes(pickle.dumps([1, 2], protocol=2))
    with pytest.raises(ValueError, match=r"data_batch_1 .*list, not a dictionary"):
        cifar10(root)
    (root / FOLDER / "data_batch_1").write_bytes(python2_dictionary([(b"labels", b"]")]))
    with pytest.raises(ValueError, match=r"data_batch_1 lacks \['data'\]"):
        cifar10(root)


def test_another_data_set_of_ten_classes_is_refused(root):
    names = tuple("abcdefghij")
    (root / FOLDER / "batches.meta").write_bytes(python2_meta(names))
    with pytest.raises(ValueError, match=r"batches\.meta names the classes .*airplane"):
        cifar10(root)
    (root / FOLDER / "batches.meta").write_bytes(python2_dictionary([]))
    with pytest.raises(ValueError, match="label_names"):
        cifar10(root)


def test_missing_batches_and_folders_are_named(root, tmp_path):
    (root / FOLDER / "data_batch_4").unlink()
    (root / FOLDER / "test_batch").unlink()
    with pytest.raises(FileNotFoundError, match="lacks data_batch_4, test_batch; unpack"):
        cifar10(root)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty holds no CIFAR-10.*cifar-10-batches-py"):
        cifar10(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        cifar10(tmp_path / "nowhere")


def test_an_array_state_cannot_lie_about_its_size(tmp_path):
    whole = python2_batch(*random_images(2))
    lying = whole.replace(b"K\x01K\x02J\x00\x0c\x00\x00\x86", b"K\x01K\x03J\x00\x0c\x00\x00\x86")
    assert lying != whole
    (tmp_path / "batch").write_bytes(lying)
    with pytest.raises(ValueError, match="cannot reshape"):
        read_batch_pickle(tmp_path / "batch")
