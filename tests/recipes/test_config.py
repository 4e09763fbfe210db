"""Configurations: overrides reach their field, and mistakes are named."""

from __future__ import annotations

import dataclasses

import pytest

from dptrain.configuration.schemes import build_scheme
from dptrain.configuration.typed import build_strategy, members_of
from dptrain.sampling import BallsInBins, MinSep, Poisson
from dptrain.strategies import BSR, BandMF, Identity, Strategy
from recipes.config import differences, load_config, to_yaml
from recipes.vision import VisionSettings


def _write(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_file_then_overrides(tmp_path):
    path = _write(tmp_path, "scheme:\n  min_sep: 4\nsteps: 10\noptimizer:\n  lr: 1e-1\n")
    settings = load_config(
        VisionSettings,
        path,
        [
            "scheme.min_sep=16",
            "model.channels=[8, 16]",
            "privacy.delta=1e-5",
            "output=a=b",
            "seed=3",
        ],
    )
    assert settings.scheme["min_sep"] == 16
    assert settings.steps == 10
    assert settings.optimizer.lr == 0.1
    assert settings.model.channels == [8, 16]
    assert settings.privacy.delta == 1e-5
    assert settings.output == "a=b"
    assert settings.seed == 3
    assert load_config(VisionSettings, path, ["steps=null"]).steps is None


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("min_sep=8", "scheme.min_sep"),
        ("privacy.epsilom=1", "privacy.epsilon"),
        ("optimiser.lr=1", "optimizer.lr"),
        ("step=1", "steps"),
        ("learning_rate.lr=1", "optimizer.lr"),
    ],
)
def test_an_unknown_field_names_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=rf"unknown field .*did you mean '{right}'"):
        load_config(VisionSettings, None, [wrong])


def test_an_unknown_field_in_the_file_names_the_file(tmp_path):
    path = _write(tmp_path, "optimizer:\n  momentun: 4\n")
    with pytest.raises(ValueError, match=r"config\.yaml: unknown field 'optimizer\.momentun'.*um'"):
        load_config(VisionSettings, path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("optimizer.lr=fast", 'optimizer.lr="fast": it should be a valid number'),
        ("optimizer.lr=true", "optimizer.lr=true: it should be a valid number"),
        ("plots=perhaps", 'plots="perhaps": it should be a valid boolean'),
        ("plots=1", "plots=1: it should be a valid boolean"),
        ("steps=3.5", "steps=3.5: it should be a valid integer"),
        ("steps='3'", 'steps="3": it should be a valid integer'),
        ("steps=true", "steps=true: it should be a valid integer"),
        ("model.channels=[a]", 'model.channels.0="a": it should be a valid integer'),
        ("model.channels=3", "model.channels=3: it should be a list"),
        ("data.name=null", "data.name=null: it should be text"),
        ("output=7", "output=7: it should be text"),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9]: List should have at least 2 items"),
        ("optimizer.betas=[0.9, 1]", "optimizer.betas.1=1: it should be less than 1"),
        (
            "data.name=cifra10",
            'data.name="cifra10": did you mean cifar10? choose one of digits',
        ),
        ("optimizer.name=adan", 'optimizer.name="adan": did you mean adam? choose one of sgd'),
        ("optimizer.name=lion", 'optimizer.name="lion": choose one of sgd'),
    ],
)
def test_a_wrong_value_names_the_field_and_what_it_should_be(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=r"should|choose") as caught:
        load_config(VisionSettings, None, [wrong])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    field, _, value = wrong.partition("=")
    *groups, name = field.split(".")
    text = "".join(f"{'  ' * depth}{group}:\n" for depth, group in enumerate(groups))
    path = _write(tmp_path, f"{text}{'  ' * len(groups)}{name}: {value}\n")
    with pytest.raises(ValueError, match=r"should|choose") as caught:
        load_config(VisionSettings, path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_settings_made_in_python_are_held_to_the_same_types():
    settings = load_config(VisionSettings, None, ["steps=9"])
    settings.validate()
    settings.simulate = 0.5
    with pytest.raises(ValueError, match=r"^simulate=0\.5: .*greater than or equal to 1"):
        settings.validate()


def test_a_group_is_not_a_field():
    with pytest.raises(ValueError, match=r"group of fields.*scheme\.min_sep"):
        load_config(VisionSettings, None, ["scheme=MinSep"])


@pytest.mark.parametrize("wrong", ["steps", "=3", "--steps"])
def test_no_override(wrong):
    with pytest.raises(ValueError, match="field=value"):
        load_config(VisionSettings, None, [wrong])


def test_unreadable_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.yaml"):
        load_config(VisionSettings, tmp_path / "nothing.yaml")
    for text, where in (("a: [1", "line 1"), ("a: 1\n\tb: 2", "line 2, column 1")):
        with pytest.raises(ValueError, match=f"not YAML: .*{where}") as caught:
            load_config(VisionSettings, _write(tmp_path, text))
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"'steps' is set twice \(line 3"):
        load_config(VisionSettings, _write(tmp_path, "steps: 1\nplots: true\nsteps: 2\n"))
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        load_config(VisionSettings, tmp_path / "config.yaml")
    with pytest.raises(ValueError, match="field: value"):
        load_config(VisionSettings, _write(tmp_path, "- 1"))
    assert load_config(VisionSettings, _write(tmp_path, "")) == VisionSettings()


def test_written_settings_read_back(tmp_path):
    settings = load_config(VisionSettings, None, ["steps=7", "privacy.delta=1e-5", "threads=2"])
    path = _write(tmp_path, to_yaml(settings))
    assert load_config(VisionSettings, path) == settings


def test_differences_name_the_fields():
    old = dataclasses.asdict(load_config(VisionSettings, None, ["steps=7"]))
    new = dataclasses.asdict(load_config(VisionSettings, None, ["steps=8", "privacy.epsilon=1"]))
    assert differences(old, new) == {"steps": (7, 8), "privacy.epsilon": (8.0, 1.0)}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["steps=1", "epochs=1"], "give exactly one"),
        ([], "give exactly one"),
        (["steps=1", "privacy.noise_multiplier=1"], "privacy.epsilon"),
        (["steps=1", "privacy.epsilon=null"], "privacy.noise_multiplier"),
        (["steps=0"], "steps=0"),
        (["steps=1", "optimizer.lr=-1"], "optimizer.lr"),
        (["steps=1", "optimizer.lr=.nan"], "optimizer.lr"),
        (["steps=1", "optimizer.momentum=1"], "optimizer.momentum"),
        (["steps=1", "scheme.type=MinSeb"], "did you mean MinSep"),
        (["steps=1", "data.name=omniglot"], "digits"),
        (["steps=1", "checkpoint_every=0"], "checkpoint_every"),
        (["steps=1", "privacy.noise_dtype=float16"], 'privacy.noise_dtype="float16".*bfloat16'),
        (["steps=1", "privacy.secure=true", "seed=3"], "seed=3.*privacy.secure"),
        (
            ["steps=1", "grad_sample_mode=hoks"],
            "grad_sample_mode: .*mode='hoks': did you mean hooks",
        ),
        (["steps=1", "device=cuda:99"], "device='cuda:99' cannot be used here"),
        (["steps=1", "device=gpu"], "device='gpu' cannot .* none of torch's: take cpu or cuda"),
        (["steps=1", "device=meta"], "device='meta' cannot .* no numbers there"),
        (["steps=1", "device=privateuseone"], "device='privateuseone' cannot .* No module named"),
    ],
)
def test_impossible_settings_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(VisionSettings, None, overrides).validate()


def _strategy(*overrides, path=None):
    return load_config(VisionSettings, path, overrides).build_strategy()


def test_a_strategy_is_named_by_its_class_and_takes_its_own_fields():
    assert _strategy() == BandMF(bands=8)
    assert _strategy("strategy.bands=3", "strategy.objective=max") == BandMF(
        bands=3, objective="max"
    )
    given = ["strategy.type=BandMF", "strategy.bands=2", "strategy.coefficients=[1, 0.5]"]
    assert _strategy(*given) == BandMF(bands=2, coefficients=(1.0, 0.5))
    assert _strategy("strategy.objective=null") == BandMF(bands=8)


@pytest.mark.parametrize("order", [1, -1])
def test_another_type_drops_the_fields_of_the_old_one(tmp_path, order):
    path = _write(tmp_path, "strategy:\n  type: BandMF\n  bands: 4\n  objective: max\n")
    assert _strategy("strategy.type=Identity", path=path) == Identity()
    overrides = ["strategy.type=BSR", "strategy.bands=7"][::order]
    assert _strategy(*overrides, path=path) == BSR(bands=7)
    # The same type again keeps what the file says.
    kept = ["strategy.type=BandMF", "strategy.bands=2"][::order]
    assert _strategy(*kept, path=path) == BandMF(bands=2, objective="max")


def test_what_a_strategy_needs_is_named():
    """For every strategy there is: the classes say themselves what they cannot do without."""
    types = members_of(Strategy)
    assert {"Identity", "BSR", "BandMF"} <= set(types)
    for name, member in types.items():
        needed = [
            field.name
            for field in dataclasses.fields(member)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ]
        if needed:
            with pytest.raises(ValueError, match=rf"{name} needs strategy\.{needed[0]}"):
                build_strategy({"type": name})
        with pytest.raises(ValueError, match=rf"{name} has no field 'color'"):
            build_strategy({"type": name, "color": 3})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["strategy.type=BandMf"], "strategy.type='BandMf': did you mean BandMF.*BSR.*Identity"),
        (["strategy.type=null"], "strategy.type=None.*BSR"),
        (
            ["strategy.type=BSR", "strategy.bands=2", "strategy.objectiv=mean"],
            r"strategy\.objectiv='mean': BSR has no field 'objectiv'; its fields are bands",
        ),
        (
            ["strategy.type=Identity", "strategy.bands=2"],
            "Identity has no field 'bands'.*no fields",
        ),
        (["strategy.type=BSR"], r"needs strategy\.bands"),
        (["strategy.bands=0"], "strategy: .*bands"),
        (["strategy.bands=many"], "strategy: .*bands"),
        (["strategy.objective=median"], "strategy: .*objective='median'"),
        (["strategy.type=Toeplitz"], "strategy.type='Toeplitz'"),
    ],
)
def test_impossible_strategies_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(VisionSettings, None, ["steps=9", *overrides]).validate()


def test_a_private_number_of_examples_is_not_for_recipes():
    """Their splits read it, and their output tells it."""
    overrides = ["steps=9", "scheme.type=Poisson", "scheme.nominal_size=1500"]
    with pytest.raises(ValueError, match=r"scheme\.nominal_size=1500: .*PrivacyEngine"):
        load_config(VisionSettings, None, [*overrides, "strategy.type=Identity"]).validate()


@pytest.mark.parametrize("wrong", ["strategy=BandMF", "strategy=null", "strategy=[1]"])
def test_a_strategy_is_a_group_too(wrong):
    with pytest.raises(ValueError, match=r"group of fields.*strategy\.type"):
        load_config(VisionSettings, None, [wrong])


def test_epochs_are_expected_passes():
    settings = load_config(VisionSettings, None, ["epochs=2.5", "scheme.batch_size=100"])
    assert settings.with_steps(1000).steps == 25
    by_length = ["epochs=2.5", "scheme.batch_size=null", "scheme.epoch_length=10"]
    assert load_config(VisionSettings, None, by_length).with_steps(1000).steps == 25


def _scheme(*overrides, size=1000, steps=30, **options):
    settings = load_config(VisionSettings, None, [f"steps={steps}", *overrides])
    return build_scheme(settings.scheme, dataset_size=size, steps=steps, **options)


def test_a_scheme_is_named_by_its_class_and_takes_its_own_fields():
    common = {"dataset_size": 1000, "steps": 30}
    assert _scheme("scheme.batch_size=100", "scheme.min_sep=4") == MinSep.for_batch_size(
        batch_size=100, min_sep=4, **common
    )
    # The size survives a change of type, other fields do not.
    assert _scheme("scheme.type=Poisson") == Poisson(probability=0.128, **common)
    long = ["scheme.batch_size=null", "scheme.epoch_length=20", "scheme.warm_start=false"]
    assert _scheme(*long) == MinSep.for_batch_size(
        batch_size=50, min_sep=8, warm_start=False, **common
    )


def test_a_simulated_scheme_has_smaller_batches():
    scheme = _scheme("scheme.type=Poisson", divisor=4)
    assert scheme.expected_batch_size == pytest.approx(32)
    cut = ["scheme.type=Poisson", "scheme.batch_size=100", "scheme.max_batch_size=130"]
    assert _scheme(*cut, divisor=4).physical_batch_size == 33


@pytest.mark.parametrize("kind", ["BallsInBins", "RandomAllocation", "Shuffled"])
def test_a_simulation_of_epochs_needs_a_factor_that_fits(kind):
    """Epochs of 10 steps in 60: 20, 30 or 60 steps would fit as well, but not 40."""
    entries = [f"scheme.type={kind}", "scheme.batch_size=120"]
    for factor in (2, 3, 6):
        scheme = _scheme(*entries, size=1200, steps=60, divisor=factor)
        assert scheme.steps == 60
        assert scheme.expected_batch_size == pytest.approx(120 / factor)
    with pytest.raises(ValueError, match=r"simulate=4 .*epochs of 40 steps.*use one of 2, 3, 6$"):
        _scheme(*entries, size=1200, steps=60, divisor=4)
    with pytest.raises(ValueError, match=r"simulate=2 .*no whole number does"):
        _scheme(*entries, size=1200, steps=10, divisor=2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["scheme.epoch_length=10"], "scheme.batch_size=128.*give exactly one"),
        (["scheme.batch_size=null"], "give exactly one"),
        (["scheme.batch_size=-1"], "scheme.batch_size=-1"),
        (["scheme.batch_size=.inf"], "scheme.batch_size=inf"),
        (["scheme.batch_size=many"], "scheme.batch_size='many'"),
        (["scheme.batch_size=2000"], "scheme: .*largest possible"),
        (["scheme.type=Poisson", "scheme.min_sep=2"], "Poisson has no field 'min_sep'"),
        (["scheme.min_sep=0"], "scheme: .*min_sep=0"),
        (["scheme.min_sep=many"], "scheme: .*min_sep='many'"),
        (["scheme.min_sep=2.5"], "scheme: .*min_sep=2.5"),
        (["scheme.minsep=8"], "did you mean scheme.min_sep"),
        (["scheme.min_sep=null"], r"MinSep needs scheme\.min_sep"),
        (["scheme.type=UserMinSep", "scheme.min_sep=2"], "users of every example"),
    ],
)
def test_impossible_schemes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        _scheme(*overrides)


def test_balls_in_bins_runs_whole_rounds():
    made = ["scheme.type=BallsInBins", "scheme.batch_size=100"]
    assert _scheme(*made) == BallsInBins(bins=10, epochs=3, dataset_size=1000)
    with pytest.raises(ValueError, match="a multiple of 10"):
        _scheme(*made, steps=31)
