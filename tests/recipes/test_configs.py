"""Every shipped configuration: it states every field, and it runs, on small data of its format."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest
import yaml

from dptrain.configuration.typed import members_of
from dptrain.strategies import Strategy
from recipes import arxiv, individual, vision
from recipes.config import flatten, load_config
from recipes.runfolder import INDIVIDUAL
from tests.helpers.arxiv_files import write_arxiv_files
from tests.helpers.image_files import (
    write_batches,
    write_cinic,
    write_class_folders,
    write_hub_files,
)
from tests.helpers.phenotyping_files import write_parts

CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs").glob("*.yaml"))
FREE = ("scheme.", "strategy.", "clipping.", "individual.")  # their fields depend on their type

# Smaller models and batches, and no calibration (the accountants have tests of their own).
SMALL = ["privacy.epsilon=null", "privacy.noise_multiplier=1", "plots=false", "evaluate_every=2"]
SMALL_VISION = [
    *SMALL,
    "model.channels=[4, 4]",
    "model.groups=0",
    "model.hidden=8",
    "scheme.epoch_length=null",
    "scheme.batch_size=20",
]
# Of the schemes: what has to fit a data set of a hundred examples and a few steps.
BY_SCHEME = {
    "MinSep": ["scheme.min_sep=2", "strategy.bands=2", "steps=3"],
    "CyclicPoisson": ["scheme.cycle=2", "strategy.bands=2", "steps=3"],
    "BallsInBins": ["strategy.bands=2", "steps=5"],
    "Poisson": ["steps=3"],
    "UserMinSep": ["scheme.min_sep=2", "steps=3"],
    "UserCyclic": ["scheme.cycle=4", "steps=4"],
    "UserFixed": ["scheme.min_sep=2", "scheme.max_participations=2", "steps=3"],
}


def _stated(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def _schema(path):
    if path.stem.endswith("_individual"):
        return individual.IndividualSettings
    is_text = path.name.startswith("arxiv")
    return arxiv.ArxivSettings if is_text else vision.VisionSettings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_states_every_field(path):
    def names(tree):
        leaves = flatten(tree)
        return {n for n in leaves if not n.startswith(FREE) or n.endswith(".type")}

    stated = _stated(path)
    assert names(stated) == names(dataclasses.asdict(_schema(path)()))
    fields = {f.name for f in dataclasses.fields(members_of(Strategy)[stated["strategy"]["type"]])}
    assert {"type"} <= set(stated["strategy"]) <= {"type", *fields}
    assert stated["seed"] is None  # a seed in a file is no secret


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Folders with CIFAR-10 as batches, as parquet and by class, and with CINIC-10."""
    places = {name: tmp_path_factory.mktemp(name) for name in ("batches", "parquet", "folders")}
    pixels, labels = write_batches(places["batches"], size=20)
    write_hub_files(places["parquet"], size=100)
    write_class_folders(places["folders"] / "train", pixels[:100], labels[:100])
    write_class_folders(places["folders"] / "test", pixels[100:], labels[100:])
    places["cinic"] = tmp_path_factory.mktemp("cinic")
    write_cinic(places["cinic"], per_class=10)
    return places


@pytest.mark.slow
@pytest.mark.sample(every=3)
@pytest.mark.parametrize("files", ["batches", "parquet", "folders"])
@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if p.stem.startswith("cifar10")], ids=lambda p: p.stem
)
def test_cifar10_runs(images, tmp_path, capsys, path, files):
    options = [*SMALL_VISION, f"data.root={images[files]}", *BY_SCHEME[_scheme(path)]]
    assert vision.main(["--config", str(path), "--output", str(tmp_path / "run"), *options]) == 0
    assert "differentially private for each training example" in capsys.readouterr().out


@pytest.mark.sample(every=9)
@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if p.stem.startswith("cinic10")], ids=lambda p: p.stem
)
def test_cinic10_runs(images, tmp_path, capsys, path):
    options = [*SMALL_VISION, f"data.root={images['cinic']}", *BY_SCHEME[_scheme(path)]]
    assert vision.main(["--config", str(path), "--output", str(tmp_path / "run"), *options]) == 0
    assert "differentially private for each training example" in capsys.readouterr().out


def _scheme(path):
    return _stated(path)["scheme"]["type"]


@pytest.mark.slow
def test_digits_run(tmp_path, capsys):
    path = next(p for p in CONFIGS if p.stem == "digits_vgg_minsep")
    options = [*SMALL_VISION, "data.image_size=8", *BY_SCHEME["MinSep"]]
    assert vision.main(["--config", str(path), "--output", str(tmp_path / "run"), *options]) == 0


# No calibration: the noise follows from the filter's start.
SMALL_INDIVIDUAL = ["individual.start=2", "epochs=4", "evaluate_every=2", "plots=false"]


def test_digits_individual_runs(tmp_path, capsys):
    path = next(p for p in CONFIGS if p.stem == "digits_individual")
    run = ["--config", str(path), "--output", str(tmp_path / "run"), *SMALL_INDIVIDUAL]
    assert individual.main(run) == 0
    assert "(ε = 2.75, δ = 1e-05)-differentially private" in capsys.readouterr().out
    assert (tmp_path / "run" / INDIVIDUAL).is_dir()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("parquet", [False, True], ids=["csv", "parquet"])
def test_mimic3_individual_runs(tmp_path, capsys, parquet):
    path = next(p for p in CONFIGS if p.stem == "mimic3_individual")
    root = tmp_path / "data"
    root.mkdir()
    write_parts(root, parquet=parquet)
    options = [*SMALL_INDIVIDUAL, f"data.root={root}", "groups.size=8", "groups.test_size=4"]
    run = ["--config", str(path), "--output", str(tmp_path / "run"), *options]
    assert individual.main(run) == 0
    assert "accountant: individual GDP filter" in capsys.readouterr().out
    assert (tmp_path / "run" / INDIVIDUAL).is_dir()


@pytest.fixture(scope="module")
def papers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("papers")
    files = write_arxiv_files(folder, papers=400, authors=2000)
    return [
        f"data.path={files.snapshot}",
        f"data.tokenizer={files.tokenizer}",
        f"data.cache_dir={folder / 'cache'}",
        f"model.source={files.model}",
    ]


@pytest.mark.sample(every=11)
@pytest.mark.parametrize(
    "path", [p for p in CONFIGS if p.stem.startswith("arxiv")], ids=lambda p: p.stem
)
def test_arxiv_runs(papers, tmp_path, capsys, path):
    stated = _stated(path)
    options = [
        *SMALL,
        *papers,
        "data.test_size=40",
        "data.max_length=16",
        "data.offline=true",
        "model.pretrained=false",
        "scheme.batch_size=8",
        *BY_SCHEME[stated["scheme"]["type"]],
    ]
    if stated["strategy"]["type"] == "BandMF":
        options.append("strategy.bands=2")
    if stated["scheme"].get("min_sep") == 1:
        options.append("scheme.min_sep=1")
    assert arxiv.main(["--config", str(path), "--output", str(tmp_path / "run"), *options]) == 0
    assert "differentially private for each user" in capsys.readouterr().out


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_setting_of_the_paper(path):
    """Dong & Ganesh 2026, 7.2 and 7.3; Koskela et al. 2023, App. E: as far as they say it."""
    settings = load_config(_schema(path), path)
    if path.stem.endswith("_individual"):
        # Digits have their own learning rate and clipping norm.
        assert (settings.epochs, settings.scheme["epoch_length"]) == (100, 1)
        assert (settings.individual["start"], settings.individual["epsilon"]) == (50, 2.75)
        assert settings.privacy.delta == 1e-5
        assert settings.optimizer.name == "adam"
        settings.data.root = "somewhere"
        assert settings.with_steps(1000).noise_multiplier() == pytest.approx(10.61, abs=0.01)
        if path.stem == "mimic3_individual":
            assert settings.privacy.max_grad_norm == 0.79
        return
    if path.stem.startswith(("digits", "mnist")) or path.stem == "cifar10_scattering":
        pytest.skip("not of the paper")
    if path.stem.startswith("arxiv"):
        assert (settings.steps, settings.scheme["batch_size"]) == (1000, 1024)
        assert settings.privacy.delta == pytest.approx(1 / 500_000)
        assert settings.data.test_size == 200_000
        assert (settings.data.max_examples, settings.data.duplicates) == (2, True)
        assert settings.optimizer.name == "scaled_adam"
        return
    assert (settings.steps, settings.scheme["epoch_length"]) == (1500, 300)
    assert settings.privacy.delta is None
    optimizer = settings.optimizer
    assert (optimizer.name, optimizer.momentum, optimizer.schedule) == ("sgd", 0.95, "late_linear")
    assert settings.model.channels == [32, 64, 128]
    assert (settings.model.groups, settings.model.hidden) == (0, 128)
