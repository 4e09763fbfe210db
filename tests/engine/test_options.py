"""The keywords of make_private, and the groups of options among them."""

import ast
import copy
import dataclasses
import inspect
import json
import pathlib
import pickle
import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler

import dptrain.engine
from dptrain import (
    Automatic,
    BandInvMF,
    Flat,
    Gradients,
    Loading,
    NoiseOptions,
    PerGroup,
    PerLayer,
    Poisson,
    PrivacyEngine,
)
from dptrain.engine.options import MAY_DIFFER, MOVED, NOT_OF_THE_ENGINE
from dptrain.individual import GDPFilter
from dptrain.losses import TokenCrossEntropy
from tests.engine.test_private_training_resume import through_disk
from tests.helpers.engine import everything_every_step, flat, images, make, small_net, train

GROUPS = {"gradients": Gradients, "noise": NoiseOptions, "loading": Loading}
HEAD = PerGroup({"head": ("5.*",), "body": ("0.*", "1.*")}, shares={"head": 2.0, "body": 1.0})
FOLDER = tempfile.TemporaryDirectory(prefix="dptrain-")  # of mode 0700; gone at exit

# Of every field, values that are not its default.
OTHERS = {
    "gradients.mode": ["hooks", "functorch"],
    "gradients.clipping": [PerLayer(), Automatic(), HEAD],
    "gradients.loss": ["sum"],
    "gradients.views": [2],
    "gradients.probe": ["first", "off"],
    "gradients.buffers": ["public", ("*.running_mean", "seen")],
    "noise.secure": [True],
    "noise.dtype": [torch.bfloat16],
    "noise.regenerate": [True],
    "noise.folder": [FOLDER.name],
    "noise.shard": ["all", "noise", "off"],
    "loading.max_physical_batch_size": [7],
    "loading.microbatches": [3],
    "loading.steps_per_epoch": [2],
}
CASES = [(name, value) for name, values in OTHERS.items() for value in values]
# The folder's name is drawn, and workers have to name their cases alike.
every_value = pytest.mark.parametrize(
    ("name", "value"), CASES, ids=lambda v: "folder" if v == FOLDER.name else str(v)[:30]
)


def group_of(name, value):
    """The name of a group of options, and it with this one in it."""
    group, field = name.split(".")
    return group, GROUPS[group](**{field: value})


def test_every_option_is_looked_at_here():
    fields = {f"{g}.{f.name}" for g, kind in GROUPS.items() for f in dataclasses.fields(kind)}
    assert fields == set(OTHERS)
    assert fields > MAY_DIFFER


def test_make_private_has_at_most_sixteen_keywords():
    keywords = inspect.signature(PrivacyEngine.make_private).parameters
    assert len(keywords) - 1 <= 16  # self is none
    assert all(k.kind is inspect.Parameter.KEYWORD_ONLY for n, k in keywords.items() if n != "self")
    assert {n: type(keywords[n].default) for n in GROUPS} == GROUPS


@pytest.mark.parametrize("old", MOVED)
def test_a_keyword_that_is_gone_says_where_it_went(old):
    with pytest.raises(TypeError) as found:
        PrivacyEngine().make_private(**{old: 1})
    assert str(found.value) == f"make_private has no {old}=: it is {MOVED[old]}"


@pytest.mark.parametrize("old", sorted(MOVED.keys() - {"accountant", "ledger", "distributed"}))
def test_a_keyword_of_opacus_engine_says_where_it_went(old):
    with pytest.raises(TypeError) as found:
        PrivacyEngine(**{old: 1})
    assert str(found.value) == f"PrivacyEngine has no {old}=: for make_private it is {MOVED[old]}"


def test_arguments_of_make_private_are_not_those_of_the_engine():
    with pytest.raises(TypeError, match="no noise_multiplier=: pass it to make_private"):
        PrivacyEngine(noise_multiplier=1.0)
    with pytest.raises(TypeError, match=r"only the keywords.*to its make_private"):
        PrivacyEngine(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"keywords only: make_private\(module="):
        PrivacyEngine().make_private(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="unexpected keyword argument 'acountant'"):
        PrivacyEngine(acountant="pld")
    engine = PrivacyEngine(ledger="steps")
    assert pickle.loads(pickle.dumps(engine)) == copy.deepcopy(engine) == engine


@pytest.mark.parametrize("old", NOT_OF_THE_ENGINE)
def test_a_method_of_opacus_engine_says_what_to_write(old):
    with pytest.raises(AttributeError) as found:
        getattr(PrivacyEngine(), old)
    assert str(found.value) == f"PrivacyEngine has no {old}: write {NOT_OF_THE_ENGINE[old]}"
    assert not hasattr(PrivacyEngine(), old)


def test_other_attributes_are_missed_as_usual():
    with pytest.raises(AttributeError, match="'PrivacyEngine' object has no attribute 'banana'"):
        _ = PrivacyEngine().banana


@pytest.mark.parametrize(
    ("wrong", "near"), [("max_grad_nrom", "max_grad_norm"), ("target_eps", "target_epsilon")]
)
def test_a_misspelt_keyword_is_answered_by_the_nearest(wrong, near):
    with pytest.raises(TypeError, match=f"no {wrong}=: did you mean {near}="):
        PrivacyEngine().make_private(**{wrong: 1.0})


@every_value
def test_options_read_back_what_they_wrote(name, value):
    _, options = group_of(name, value)
    written = json.dumps(options.to_dict())
    assert type(options).from_dict(json.loads(written)) == options
    assert options != type(options)()


@pytest.mark.parametrize("kind", GROUPS.values())
def test_options_cannot_be_changed_and_take_no_positions(kind):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(kind(), dataclasses.fields(kind)[0].name, None)
    with pytest.raises(TypeError):
        kind(None)
    with pytest.raises(ValueError, match="has no field"):
        kind.from_dict({"type": kind.__name__, "another": 1})


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_of_another_kind_is_refused(group):
    other = {"gradients": NoiseOptions(), "noise": Loading(), "loading": Gradients()}[group]
    net = small_net()
    with pytest.raises(TypeError, match=rf"^{group}={type(other).__name__}\(.*must be a dptrain"):
        PrivacyEngine().make_private(
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data=images(),
            scheme=everything_every_step(24, 1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **{group: other},
        )


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (TokenCrossEntropy(), "mean"),
        (nn.CrossEntropyLoss(ignore_index=3, reduction="sum"), "sum"),
    ],
)
def test_a_loss_function_says_how_it_reduces(loss, reduction):
    assert Gradients(loss=loss) == Gradients(loss=reduction)


@pytest.mark.parametrize(
    ("loss", "kind", "match"),
    [
        (nn.CrossEntropyLoss(ignore_index=3), ValueError, "ignore_index=3.*depends on the others"),
        (nn.NLLLoss(weight=torch.ones(3)), ValueError, "class weights.*depends on the others"),
        (nn.MSELoss(reduction="none"), ValueError, "reduction='none'"),
        (nn.functional.cross_entropy, TypeError, "loss=.*'mean' or 'sum'"),
        (None, TypeError, "loss=None must be 'mean' or 'sum'"),
    ],
)
def test_losses_that_are_refused(loss, kind, match):
    with pytest.raises(kind, match=match):
        Gradients(loss=loss)


@every_value
def test_a_checkpoint_holds_every_option_and_is_resumed_with_it(name, value):
    """Another one is refused by its name, unless it only says how the work is cut up."""
    if (name, value) == ("gradients.views", 2):
        pytest.skip("two views need other data; test_views has them")
    group, options = group_of(name, value)
    common = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "seed": None, "mode": "bookkeeping"}
    plan = {
        "scheme": Poisson(probability=0.5, dataset_size=24, steps=4),
        "strategy": BandInvMF(inverse_bands=2),  # whose noise can be drawn again
    }
    if name == "gradients.mode":
        common["mode"] = value
    first = make(small_net(), images(), **common, **plan, **{group: options})
    state = through_disk(first.state_dict())
    assert GROUPS[group].from_dict(state["settings"][group]) == (
        dataclasses.replace(options, mode=common["mode"]) if group == "gradients" else options
    )
    common["mode"] = "bookkeeping"
    second = make(small_net(), images(), **common, **plan)
    if name in MAY_DIFFER:
        second.load_state_dict(state)
        return
    with pytest.raises(
        ValueError, match=rf"the checkpoint was written with {name}=.*, and this run"
    ):
        second.load_state_dict(state)


def test_the_mode_that_was_chosen_is_the_one_that_counts():
    """A resumed run may name it or leave it open again."""
    chosen = make(small_net(), images(), None, scheme=everything_every_step(24, 2))
    named = make(small_net(), images(), "bookkeeping", scheme=everything_every_step(24, 2))
    named.load_state_dict(through_disk(chosen.state_dict()))


def test_a_checkpoint_of_an_earlier_layout_says_what_to_do():
    private = make(small_net(), images(), scheme=everything_every_step(24, 2))
    state = {**private.state_dict(), "format": 2}
    with pytest.raises(
        ValueError, match=r"format 2 is not 5: it was written by an earlier dptrain"
    ):
        private.load_state_dict(state)


def refused_before_calibration(monkeypatch, match, **options):
    def fails(**_):
        raise AssertionError("minutes of calibration before a refusal")

    monkeypatch.setattr("dptrain.engine.wiring.calibrate", fails)
    net = small_net()
    given = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data": images(),
        "scheme": everything_every_step(24, 2),
        "max_grad_norm": 1.0,
        "target_epsilon": 3.0,
        "target_delta": 1e-3,
    }
    with pytest.raises(ValueError, match=match):
        PrivacyEngine().make_private(**given | options)
    assert all("forward" not in vars(m) and not m._forward_hooks for m in net.modules())


def test_what_is_wrong_is_said_before_anything_is_built(monkeypatch):
    some = DataLoader(images(), sampler=SubsetRandomSampler(range(6)))
    other = torch.optim.SGD(small_net().parameters(), lr=0.1)
    for match, options in {
        "seed=-1": {"seed": -1},
        "secure=True with a seed": {"seed": 5, "noise": NoiseOptions(secure=True)},
        "SubsetRandomSampler": {"data": some},
        "not in the optimizer": {"optimizer": other},
        "are parameters": {"gradients": Gradients(buffers=["0.weight"])},
        "is in no group": {"gradients": Gradients(clipping=PerGroup({"all": ("9.*",)}))},
        "dataset_size=25": {"scheme": everything_every_step(25, 2)},
        "target_delta=0.5": {"target_delta": 0.5},
        "regenerate=True": {"noise": NoiseOptions(regenerate=True), "strategy": dptrain.Tree()},
    }.items():
        refused_before_calibration(monkeypatch, match, **options)


def test_no_wire_is_attached_after_construction():
    """What makes a run passes parts to constructors; it sets no attribute of any."""
    root = pathlib.Path(dptrain.engine.__file__).parents[1]
    files = [root / "engine" / f"{name}.py" for name in ("privacy_engine", "wiring", "shared_run")]
    for path in [*files, root / "clipping" / "modes.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            )
            assert not any(isinstance(t, ast.Attribute) for t in targets), ast.unparse(node)


def test_a_checkpoint_reads_the_individual_record_once(monkeypatch):
    individual = GDPFilter(target_epsilon=6.0, target_delta=1e-3, max_steps=9)
    private = make(
        small_net(),
        images(),
        scheme=everything_every_step(24, 3),
        individual=individual,
        clipping=Flat(),
    )
    train(private, steps=2)
    record, calls = private.individual, []
    spending = record._spending
    monkeypatch.setattr(record, "_spending", lambda: calls.append(1) or spending())
    private.state_dict()
    assert len(calls) == 1


def test_a_checkpoint_within_the_first_step_after_another_continues_it(mode):
    """Its generators are those that the first checkpoint brought, not those of the process."""

    def begun(state=None, batches=None):
        model = small_net(dropout=0.5)
        private = make(
            model,
            images(),
            mode,
            scheme=everything_every_step(24, 4),
            max_physical_batch_size=12,
        )
        torch.manual_seed(3 if state is None else 4)
        if state is not None:
            private.load_state_dict(state)
        train(private, batches=batches)
        return private, model

    first, _ = begun(batches=4)  # two steps of two parts
    between = through_disk(first.state_dict())
    _, expected = begun(between)
    within, _ = begun(between, batches=1)
    _, model = begun(through_disk(within.state_dict()))
    assert torch.equal(flat(model), flat(expected))
