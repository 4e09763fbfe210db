"""Bad input gets a clear error before any data is touched; existing loops keep working."""

import inspect
import typing

import pytest
import torch
from opacus import GradSampleModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dptrain import BandMF, Gradients, Loading, MinSep, PrivacyEngine
from dptrain.engine.arguments import LIMITS, CommonArguments, RunArguments
from dptrain.sampling import Poisson
from tests.helpers.engine import everything_every_step, images, make, small_net, train


class Untouchable(Dataset):
    """Fails the test if an example is read."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        raise AssertionError("data was touched")


DATA = Untouchable()
ONE = everything_every_step(24, 1)


def test_help_and_editors_see_the_fields_as_keywords():
    shown = inspect.signature(PrivacyEngine.make_private).parameters
    fields = inspect.signature(RunArguments).parameters
    assert {n: str(p) for n, p in fields.items()} == {
        n: str(p) for n, p in shown.items() if n != "self"
    }
    hints = typing.get_type_hints(PrivacyEngine.make_private)
    assert hints["module"] is nn.Module
    assert set(hints) == {*fields, "return"}
    told = inspect.getdoc(PrivacyEngine.make_private)
    assert all(f"\n    {name}: " in told for name in fields)
    assert told.index("Args:") < told.index("Returns:") < told.index("Raises:")


def test_fields_are_told_of_where_they_are():
    for kind in (CommonArguments, RunArguments):
        own = vars(kind)["__annotations__"]
        assert all(f"\n    {name}: " in inspect.getdoc(kind) for name in own)
    assert set(LIMITS) < set(inspect.signature(CommonArguments).parameters)


def test_what_python_says_of_a_keyword_is_said_of_the_method():
    with pytest.raises(TypeError, match=r"^PrivacyEngine\.make_private\(\) missing 1.*'data'"):
        PrivacyEngine().make_private(module=None, optimizer=None, max_grad_norm=1.0)


def refused(match, kind=ValueError, module=None, **options):
    options.setdefault("scheme", ONE)
    with pytest.raises(kind, match=match):
        make(module or small_net(), DATA, **options)


def test_batch_norm_names_layer_and_fix():
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Sequential(nn.BatchNorm2d(8)))
    refused(r"'1\.0' is a BatchNorm2d.*GroupNorm\(2, 8\)", module=net)


def test_modules_that_cannot_be_trained():
    frozen = small_net().requires_grad_(False)
    optimizer = torch.optim.SGD(small_net().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="no trainable parameter"):
        PrivacyEngine().make_private(
            module=frozen,
            optimizer=optimizer,
            data=DATA,
            scheme=ONE,
            max_grad_norm=1.0,
            noise_multiplier=1.0,
        )
    with pytest.raises(ValueError, match="already wrapped"):
        make(GradSampleModule(small_net()), DATA, scheme=ONE)
    with pytest.raises(ValueError, match="LSTM"):
        make(nn.LSTM(3, 4), DATA, scheme=ONE)


def test_optimizer_has_to_train_exactly_the_module():
    engine = PrivacyEngine()
    net = small_net()
    common = {"data": DATA, "scheme": ONE, "max_grad_norm": 1.0, "noise_multiplier": 1.0}
    part = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'5\.weight'"):
        engine.make_private(
            module=net,
            optimizer=part,
            **common,
        )
    other = torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(ValueError, match="does not have"):
        engine.make_private(
            module=net,
            optimizer=other,
            **common,
        )


def test_frozen_layers_are_fine():
    net = small_net()
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=optimizer,
        data=images(),
        scheme=everything_every_step(24, 2),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        seed=1,
    )
    train(private)
    assert torch.equal(before, net[0].weight)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"noise_multiplier": 1.0, "target_epsilon": 2.0, "target_delta": 1e-5}, "both"),
        ({"noise_multiplier": None}, "noise_multiplier=, or target_epsilon"),
        ({"noise_multiplier": None, "target_epsilon": 2.0}, "target_delta"),
        ({"noise_multiplier": None, "target_epsilon": -1.0, "target_delta": 1e-5}, "epsilon"),
        ({"noise_multiplier": None, "target_epsilon": 1.0, "target_delta": 1.5}, "delta"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"mode": "ghosts"}, "mode='ghosts'"),
        ({"mode": "ghost"}, r"Use Gradients\(mode='bookkeeping'\)"),
        ({"loss_reduction": "none"}, "loss='none'"),
        ({"seed": -1}, "seed"),
        ({"epochs": 2}, "epochs"),
        ({"max_physical_batch_size": 0}, "max_physical_batch_size"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"scheme": None}, "scheme=None derives"),
        ({"scheme": everything_every_step(25, 1)}, "dataset_size=25"),
        ({"strategy": BandMF(bands=2)}, "bands"),
    ],
)
def test_contradicting_arguments(options, match):
    refused(match, **options)


def test_a_class_is_told_from_its_instance():
    with pytest.raises(TypeError, match=r"not the class itself: write BandMF\(\.\.\.\)$"):
        make(small_net(), images(), scheme=ONE, strategy=BandMF)


@pytest.mark.parametrize("data", [torch.zeros(24, 3), torch.zeros(24, 3).numpy()])
def test_bare_arrays_are_no_data_set(data):
    """A tensor has a length and rows, and a loader would batch them without a tuple."""
    with pytest.raises(TypeError, match=r"shape \(24, 3\).*TensorDataset"):
        make(small_net(), data, scheme=ONE)


def test_unknown_pair_of_scheme_and_strategy_lists_what_is_supported():
    scheme = Poisson(probability=0.2, dataset_size=24, steps=9, max_batch_size=9)
    refused("accountant='gaussian' covers", scheme=scheme, strategy=BandMF(bands=4))
    narrow = MinSep(probability=0.1, min_sep=3, dataset_size=24, steps=9)
    refused("min_sep", scheme=narrow, strategy=BandMF(bands=4))


def test_mechanism_excludes_what_it_fixes():
    mechanism = make(small_net(), images(), scheme=everything_every_step(24, 2)).mechanism
    refused("already fixes", mechanism=mechanism, strategy=BandMF(bands=1), scheme=None)
    refused("already fixes", mechanism=mechanism, noise_multiplier=1.0, scheme=None)


def test_delta_of_a_whole_example_is_refused():
    refused("target_delta=0.05 is not below 1/N", target_delta=0.05)
    refused(
        "target_delta=0.05 is not below 1/N",
        noise_multiplier=None,
        target_epsilon=3.0,
        target_delta=0.05,
    )


def test_datasets_without_length():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("data was touched")

    with pytest.raises(ValueError, match="without length"):
        make(small_net(), Stream(), scheme=ONE)
    with pytest.raises(ValueError, match=r"Stream, a dataset without length.*map-style"):
        make(small_net(), DataLoader(Stream(), batch_size=4), epochs=1)


@pytest.mark.parametrize(
    ("epochs", "written"),
    [
        (2.0, "write epochs=2$"),
        (0.3, r"number of steps, .*dataset_size=24, steps=\.\.\.\).* has 6 steps$"),
    ],
)
def test_epochs_that_are_no_integer(epochs, written):
    with pytest.raises(TypeError, match=f"epochs={epochs} must be an integer: .*{written}"):
        make(small_net(), DataLoader(DATA, batch_size=4), epochs=epochs)


def test_criterion_that_ties_examples_together_is_refused():
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    common = {
        "module": net, "optimizer": optimizer, "data": DATA, "scheme": ONE,
        "max_grad_norm": 1.0, "noise_multiplier": 1.0,
    }  # fmt: skip
    engine = PrivacyEngine()
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3))
    with pytest.raises(ValueError, match="class weights"):
        engine.make_private(gradients=Gradients(loss=weighted), **common)
    with pytest.raises(ValueError, match="reduction='none'"):
        engine.make_private(
            gradients=Gradients(loss=nn.CrossEntropyLoss(reduction="none")), **common
        )


@pytest.mark.parametrize("batches", [93, 99, 105, 117])
def test_taking_over_a_data_loader_loses_no_step(batches):
    """int(1 / sample_rate) would lose one for each of these numbers of batches."""
    size = batches * 2
    data = TensorDataset(torch.zeros(size, 1, 4, 4), torch.zeros(size, dtype=torch.long))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    net = small_net()
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data=loader,
        epochs=3,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
    )
    assert private.mechanism.scheme.steps == 3 * batches
    assert private.mechanism.scheme.expected_batch_size == 2
    assert len(private.loader) == batches


def test_epoch_loop_over_a_data_loader_runs_unchanged(caplog):
    loader = DataLoader(images(), batch_size=6, shuffle=True)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    private = PrivacyEngine().make_private(
        module=net,
        optimizer=optimizer,
        data=loader,
        epochs=2,
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        seed=3,
        loading=Loading(max_physical_batch_size=2),
    )
    private.register_scheduler(scheduler)
    assert "replaced by Poisson" in caplog.text
    model, optimizer, loader = private
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    assert private.steps_executed == 8
    # Ticks are counted in logical steps although every step had several microbatches.
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**8)
