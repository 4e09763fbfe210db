"""Mistakes in a configuration are refused before the data are read, which may take minutes.

The images here cannot be decoded, so a refusal of anything else came before decoding.
"""

from __future__ import annotations

import pathlib
import shutil

import pytest

from recipes import individual, vision
from recipes.config import load_config
from recipes.data import image_folder, saved_images
from recipes.data.photographs import CLASSES
from recipes.run import _check_without_size
from tests.helpers.image_files import (
    png,
    random_digits,
    random_images,
    write_class_folders,
    write_mnist,
    write_parquet,
)
from tests.helpers.phenotyping_files import write_parts

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
DIGITS = tuple("0123456789")
BASE = [
    "scheme.type=MinSep",
    "scheme.min_sep=4",
    "scheme.batch_size=10",
    "scheme.epoch_length=null",
    "strategy.type=BandMF",
    "strategy.bands=4",
    "steps=20",
    "privacy.epsilon=null",
    "privacy.noise_multiplier=1",
    "plots=false",
    "model.channels=[4,4]",
    "model.groups=2",
]


# N = 100: a mistake, and what is said of it.
MISTAKES = {
    "more bands than steps": (["strategy.bands=30"], "bands=30 exceeds the 20 steps"),
    "more bands than min_sep": (["strategy.bands=5"], "no accountant covers scheme MinSep with"),
    "unknown accountant": (["privacy.accountant=foo"], "privacy.accountant='foo' is unknown"),
    "accountant of another scheme": (
        ["privacy.accountant=poisson-pld"],
        "accountant='poisson-pld' does not cover scheme MinSep",
    ),
    "batch too large for min_sep": (["scheme.batch_size=30"], "largest possible batch size is 25"),
    "batch larger than the data": (["scheme.batch_size=200"], "largest possible batch size is 25"),
    "no certificates to keep": (
        ["scheme.type=Poisson", "strategy.type=Identity", "privacy.certificates=certificates"],
        "only simulated accounting makes certificates",
    ),
    "delta that protects nobody": (["privacy.delta=0.02"], "is not below 1/N = 0.01"),
    "filter with correlated noise": (
        ["individual.type=GDPFilter", "individual.epsilon=3"],
        "proven for independent noise only",
    ),
    "steps that are no whole epochs": (
        ["scheme.type=BallsInBins", "strategy.bands=2", "steps=7"],
        "runs whole epochs of 10 steps",
    ),
    "simulation of nothing": (["simulate=11"], "leaves nothing to divide"),
}
OF_THE_NETWORK = {
    "too many blocks": (["model.channels=[4,4,4,4,4,4]"], "cannot be halved 6 times"),
    "groups that divide nothing": (["model.groups=3"], "groups=3 must divide every block"),
    "a dense layer of less than nothing": (["model.hidden=-1"], "or 0 for none"),
}


def _folders(root, classes, draw):
    """Images of which only the first has a header."""
    for part, count in (("train", 100), ("test", 10)):
        write_class_folders(root / part, *draw(count), classes)
        for path in sorted((root / part).rglob("*.png"))[1:]:
            path.write_bytes(b"no image")


def _tables(root):
    for part, count in (("train", 100), ("test", 10)):
        good = png(random_digits(1)[0][0], mode="L")
        images = [good, *[b"no image"] * (count - 1)]
        write_parquet(root / f"{part}.parquet", images, [i % 10 for i in range(count)])


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Data sets that can be listed and not decoded, by ``data.name``."""
    found = {name: tmp_path_factory.mktemp(name) for name in ("cifar10", "mnist", "datasets")}
    found["folder"] = found["mnist"]
    _folders(found["cifar10"], CLASSES, random_images)
    _folders(found["mnist"], DIGITS, random_digits)
    _tables(found["datasets"])
    found["cinic10"] = tmp_path_factory.mktemp("cinic10")
    for part, count in (("train", 100), ("valid", 10), ("test", 10)):
        write_class_folders(found["cinic10"] / part, *random_images(count))
        for path in (found["cinic10"] / part).rglob("*.png"):
            path.write_bytes(b"no image")
    return found


def _options(*options, network=True, size=True):
    """Overrides of ``BASE``; another type of scheme or strategy takes its fields away."""
    base = list(BASE)
    for group in ("scheme", "strategy"):
        if any(option.startswith(f"{group}.type=") for option in options):
            kept = ("scheme.batch_size", "scheme.epoch_length")
            base = [o for o in base if not o.startswith(f"{group}.") or o.startswith(kept)]
    if not network:
        base = [option for option in base if not option.startswith("model.")]
    if not size:
        sizes = ("scheme.batch_size", "scheme.epoch_length")
        base = [option for option in base if not option.startswith(sizes)]
    return [*base, *options]


def _refusal(main, config, output, options, capsys):
    assert main(["--config", str(config), "--output", str(output), *options]) == 2
    assert not output.exists()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


@pytest.mark.sample(every=21)
@pytest.mark.parametrize("name", ["cifar10", "cinic10", "mnist", "folder", "datasets"])
@pytest.mark.parametrize("mistake", [*MISTAKES, *OF_THE_NETWORK])
def test_images_are_not_decoded_for_a_mistake(config, tmp_path, capsys, roots, name, mistake):
    options, message = {**MISTAKES, **OF_THE_NETWORK}[mistake]
    options = _options(f"data.name={name}", f"data.root={roots[name]}", *options)
    assert message in _refusal(vision.main, config, tmp_path / "run", options, capsys)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["cifar10", "cinic10", "mnist", "folder", "datasets"])
def test_without_a_mistake_they_are(config, tmp_path, capsys, roots, name):
    options = [*BASE, f"data.name={name}", f"data.root={roots[name]}"]
    error = _refusal(vision.main, config, tmp_path / "run", options, capsys)
    assert "cannot identify image file" in error


def test_what_is_held_out_is_not_counted(config, tmp_path, capsys, roots):
    """Of 100 images 90 are left, of which min_sep = 4 allows batches of 22.5."""
    base = [*BASE, "data.name=mnist", f"data.root={roots['mnist']}", "data.holdout=0.1"]
    fits, not_so = (
        _refusal(vision.main, config, tmp_path / "run", [*base, f"scheme.batch_size={b}"], capsys)
        for b in (22, 23)
    )
    assert "cannot identify" in fits
    assert "largest possible batch size is 22.5" in not_so


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("recipe", [vision, individual])
@pytest.mark.parametrize("mistake", [
    "more bands than steps",
    "more bands than min_sep",
    "unknown accountant",
    "accountant of another scheme",
    "no certificates to keep",
    "filter with correlated noise",
])  # fmt: skip
def test_what_needs_no_size_is_refused_without_the_folder(
    config, tmp_path, capsys, recipe, mistake
):
    options, message = MISTAKES[mistake]
    options = _options(*options, network=False, size=False)
    options += ["scheme.epoch_length=10", "data.name=mnist", f"data.root={tmp_path / 'nowhere'}"]
    options.append("scheme.batch_size=null")
    assert message in _refusal(recipe.main, config, tmp_path / "run", options, capsys)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_no_shipped_configuration_is_refused_without_a_size(path):
    if path.name.startswith("arxiv"):
        pytest.skip("its scheme needs the graph of the users")
    schema = (
        individual.IndividualSettings
        if path.stem.endswith("_individual")
        else vision.VisionSettings
    )
    settings = load_config(schema, path)
    settings.data.root = settings.data.root or "somewhere"
    _check_without_size(settings)


@pytest.mark.sample(every=10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_cells_of_a_table_are_not_read_for_a_mistake(config, tmp_path, capsys, mistake):
    options, message = MISTAKES[mistake]
    root = tmp_path / "data"
    root.mkdir()
    write_parts(root)
    lines = (root / "train.csv").read_text().splitlines()
    header, first, *rest = lines
    cells = first.split(",")
    cells[-1] = "no number"
    (root / "train.csv").write_text("\n".join([header, ",".join(cells), *rest[:99]]) + "\n")
    data, output = ("data.name=phenotyping", f"data.root={root}"), tmp_path / "run"
    wrong, right = (_options(*data, *more, network=False) for more in (options, ()))
    assert message in _refusal(individual.main, config, output, wrong, capsys)
    assert "is no number" in _refusal(individual.main, config, output, right, capsys)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("length", [["steps=2"], ["steps=null", "epochs=0.2"]])
def test_other_settings_of_a_resumed_run_are_refused_before_its_images_are_read(
    config, tmp_path, capsys, length
):
    """What the size of the data fills in, δ and the steps of epochs, is no other setting."""
    data, output = tmp_path / "data", tmp_path / "run"
    write_mnist(data, train=100, test=10)
    options = ["scheme.type=Poisson", "scheme.batch_size=10", "strategy.type=Identity", *length]
    options = [*_options(*options), "data.name=mnist", f"data.root={data}"]
    command = ["--config", str(config), "--output", str(output), *options]
    assert vision.main(command) == 0
    shutil.rmtree(data)
    capsys.readouterr()
    assert vision.main([*command, "--resume", "optimizer.lr=7"]) == 2
    assert "must keep its settings" in (error := capsys.readouterr().err)
    assert error.rstrip().endswith("now 7.0")
    assert vision.main([*command, "--resume"]) == 2
    assert f"no folder {data}" in capsys.readouterr().err


def test_readers_tell_the_size_before_decoding(roots):
    told = []
    for read, name in ((image_folder, "folder"), (saved_images, "datasets")):
        with pytest.raises(ValueError, match="cannot identify"):
            read(roots[name], foreseen=lambda *size: told.append(size))
    assert told == [(100, 28), (100, 28)]


def test_the_files_of_mnist_are_not_a_table_of_another_size(config, tmp_path, capsys):
    write_mnist(tmp_path / "mnist", train=100, test=10)
    data = ("data.name=mnist", f"data.root={tmp_path / 'mnist'}", "scheme.batch_size=30")
    options = _options(*data, network=False)
    error = _refusal(individual.main, config, tmp_path / "run", options, capsys)
    assert "largest possible batch size is 25" in error
