"""A fit of Lightning's is the plain loop of the same engine, bit for bit, or an error."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from dptrain import (
    BandMF,
    Gradients,
    JoinedOptimizer,
    Loading,
    MatrixMechanism,
    MinSep,
    Poisson,
    PrivacyEngine,
)
from tests.helpers.engine import flat, images, make, small_net, train

pl = pytest.importorskip("lightning.pytorch")
callbacks = pytest.importorskip("lightning.pytorch.callbacks")
plugins = pytest.importorskip("lightning.pytorch.plugins.io")

from dptrain.integrations.lightning import CHECKPOINT_KEY, PrivateCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore:.*LeafSpec")

ROOT = pathlib.Path(__file__).parents[3]
N, STEPS = 24, 12
SCHEME = Poisson(probability=0.3, dataset_size=N, steps=STEPS)


class Classifier(pl.LightningModule):
    """A user's, who knows nothing of privacy."""

    def __init__(self, *, manual=False, dropout=0.0, decay=None, interval="step"):
        super().__init__()
        self.net = small_net(dropout)
        self.automatic_optimization = not manual
        self.decay, self.interval = decay, interval
        self.estimated = None

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.decay:
                self.lr_schedulers().step()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        self.estimated = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.decay is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, self.decay)
        config = {"scheduler": scheduler, "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": config}


def loader(batch_size=4):
    return DataLoader(images(N), batch_size=batch_size, shuffle=True)


def held_out():
    """Of other people than ``loader``."""
    x, y = images(N).tensors
    return DataLoader(TensorDataset(x + 1, y), batch_size=4)


def private_callback(**options):
    if "mechanism" not in options:
        options.setdefault("scheme", SCHEME)
        options.setdefault("noise_multiplier", 1.0)
    options.setdefault("seed", 5)
    options.setdefault("max_grad_norm", 1.0)
    return PrivateCallback(**options)


def trainer(*more, **options):
    quiet = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if "max_steps" not in options:
        options.setdefault("max_epochs", 1)
    return pl.Trainer(callbacks=list(more), **{**quiet, **options})


def own_attributes(module):
    """Of all its parts, but for what Lightning puts there when it first looks at them."""
    return [set(vars(part)) - {"_hparams"} for part in module.modules()]


def plain(scheme=SCHEME, mode="bookkeeping", **options):
    """The weights that a loop of one's own comes to."""
    private = make(small_net(), images(N), mode, scheme=scheme, **options)
    train(private)
    return flat(private.module)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_fit_is_the_plain_loop_bit_for_bit(manual, parts, epochs):
    module, private = (
        Classifier(manual=manual),
        private_callback(loading=Loading(microbatches=parts)),
    )
    fit = trainer(private, max_epochs=epochs)
    fit.fit(module, loader())
    assert torch.equal(flat(module), plain(microbatches=parts))
    assert private.private.steps_executed == STEPS
    assert fit.global_step == STEPS
    assert fit.current_epoch == epochs


@pytest.mark.parametrize(
    "options", [{"strategy": BandMF(bands=3)}, {"gradients": Gradients(mode="hooks")}]
)
def test_strategies_and_modes_come_along(options):
    module = Classifier()
    scheme = MinSep.for_batch_size(batch_size=4, dataset_size=N, min_sep=4, steps=8)
    private = private_callback(scheme=scheme, **options)
    trainer(private).fit(module, loader())
    same = {"strategy": options["strategy"]} if "strategy" in options else {}
    mode = "hooks" if "gradients" in options else "bookkeeping"
    assert torch.equal(flat(module), plain(scheme, mode, **same))
    assert private.private.module is module


def test_a_mechanism_by_itself():
    mechanism = MatrixMechanism(
        scheme=SCHEME, strategy=BandMF(bands=1).bind(STEPS), noise_multiplier=1.0
    )
    module = Classifier()
    trainer(private_callback(mechanism=mechanism), max_epochs=2).fit(module, loader())
    assert torch.equal(flat(module), plain(scheme=None, mechanism=mechanism, strategy=None))


def test_without_a_scheme_it_is_poisson_for_what_the_trainer_runs():
    for options, steps in (({"max_epochs": 2}, 12), ({"max_steps": 8}, 8)):
        module, private = Classifier(), private_callback(scheme=None)
        fit = trainer(private, **options)
        fit.fit(module, loader())
        wanted = Poisson.for_batch_size(batch_size=4, dataset_size=N, steps=steps)
        assert private.private.mechanism.scheme == wanted
        assert private.private.steps_executed == fit.global_step == steps
        assert torch.equal(flat(module), plain(wanted))


def test_a_target_is_met_and_stated():
    private = private_callback(noise_multiplier=None, target_epsilon=4.0, target_delta=1e-3)
    trainer(private).fit(Classifier(), loader())
    assert private.guarantee().epsilon <= 4.0
    assert private.guarantee().delta == 1e-3
    assert "all of them have run" in str(private.guarantee())


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize(("interval", "ticks"), [("step", STEPS), ("epoch", 3)])
def test_schedulers_tick_with_logical_steps(parts, interval, ticks):
    module = Classifier(decay=0.9, interval=interval)
    fit = trainer(private_callback(loading=Loading(microbatches=parts)), max_epochs=3)
    fit.fit(module, loader())
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**ticks)
    assert module.estimated == STEPS


def test_schedulers_of_manual_optimization_tick_with_logical_steps():
    module = Classifier(manual=True, decay=0.9)
    fit = trainer(private_callback(loading=Loading(microbatches=2)))
    fit.fit(module, loader())
    assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**STEPS)


def test_the_seed_of_everything_is_no_seed_of_the_noise():
    ends = []
    for _ in range(2):
        pl.seed_everything(0, verbose=False)
        module = Classifier()
        trainer(private_callback(seed=None)).fit(module, loader())
        ends.append(flat(module))
    assert not torch.equal(*ends)


def test_the_data_of_a_datamodule_that_is_set_up_late():
    class Data(pl.LightningDataModule):
        def setup(self, stage):
            self.images = images(N)

        def train_dataloader(self):
            return DataLoader(self.images, batch_size=4, shuffle=True)

        def val_dataloader(self):
            return held_out()

    module, fit = Classifier(), trainer(private_callback(), max_epochs=3)
    fit.fit(module, datamodule=Data())
    assert torch.equal(flat(module), plain())
    assert "val_loss" in fit.callback_metrics


def test_the_module_is_the_users_afterwards():
    module, private = Classifier(), private_callback()
    before = own_attributes(module)
    fit = trainer(private)
    assert fit.validate(module, loader(), verbose=False)  # with the callback, and no fit yet
    fit.fit(module, loader(), held_out())
    end = flat(module)
    assert own_attributes(module) == before
    assert type(module) is Classifier
    assert fit.accumulate_grad_batches == 1
    assert fit.validate(module, loader(), verbose=False)[0]["val_loss"] > 0
    assert len(fit.predict(module, DataLoader(images(N).tensors[0], batch_size=8))) == 3
    assert torch.equal(flat(module), end)
    # An ordinary fit, by a trainer without the callback.
    trainer(max_epochs=1).fit(module, loader())
    assert not torch.equal(flat(module), end)


def test_validation_between_microbatches_changes_nothing():
    module = Classifier()
    fit = trainer(private_callback(loading=Loading(microbatches=3)), val_check_interval=2)
    fit.fit(module, loader(), held_out())
    assert torch.equal(flat(module), plain(microbatches=3))


def test_half_precision_is_that_of_autocast():
    module = Classifier()
    trainer(private_callback(), precision="bf16-mixed").fit(module, loader())
    private = make(small_net(), images(N), "bookkeeping", scheme=SCHEME)
    for x, y in private.loader:
        private.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(private.module(x), y)
        loss.backward()
        private.optimizer.step()
    assert torch.equal(flat(module), flat(private.module))


class Fails(callbacks.Callback):
    """Ends a fit after so many logical steps, as a machine does that goes down."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            raise OSError("out of power")


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("parts", [None, 2])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("step", [4, 6])  # at the end of an epoch, and within one
def test_a_resumed_fit_is_the_uninterrupted_one(tmp_path, manual, parts, step):
    """With dropout, momentum, correlated noise and a schedule."""

    def fit(*more, ckpt_path=None):
        module = Classifier(manual=manual, dropout=0.3, decay=0.9)
        torch.manual_seed(3)
        private = private_callback(
            strategy=BandMF(bands=3),
            scheme=MinSep.for_batch_size(batch_size=4, dataset_size=N, min_sep=4, steps=STEPS),
            loading=Loading(microbatches=parts),
            seed=None if ckpt_path else 5,
        )
        fit = trainer(private, *more, max_epochs=3, enable_checkpointing=True)
        fit.fit(module, loader(), ckpt_path=ckpt_path)
        assert private.private.steps_executed == fit.global_step == STEPS
        assert fit.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.9**STEPS)
        return flat(module)

    def saved(name):
        return callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=step, save_top_k=-1)

    whole = fit(saved("whole"))
    with pytest.raises(OSError, match="out of power"):
        fit(saved("cut"), Fails(step))
    (path,) = (tmp_path / "cut").glob("*.ckpt")
    torch.manual_seed(99)
    assert torch.equal(fit(saved("on"), ckpt_path=str(path)), whole)


def test_a_fit_that_is_over_goes_on_with_nothing(tmp_path):
    module, fit = Classifier(), trainer(private_callback())
    fit.fit(module, loader())
    fit.save_checkpoint(tmp_path / "end.ckpt")
    again, private = Classifier(), private_callback(seed=None)
    trainer(private).fit(again, loader(), ckpt_path=tmp_path / "end.ckpt")
    assert torch.equal(flat(again), flat(module))
    assert private.private.steps_executed == STEPS


def test_weights_only_is_free_of_secrets_and_no_place_to_go_on_from(tmp_path):
    module = Classifier()
    whole = callbacks.ModelCheckpoint(tmp_path / "whole")
    weights = callbacks.ModelCheckpoint(
        tmp_path / "weights", save_weights_only=True, every_n_train_steps=STEPS
    )
    trainer(private_callback(), whole, weights, enable_checkpointing=True).fit(module, loader())
    secret = torch.load(whole.best_model_path, weights_only=True)
    assert "private" in secret[CHECKPOINT_KEY]
    public = torch.load(weights.best_model_path, weights_only=True)
    assert CHECKPOINT_KEY not in public
    assert not public.get("callbacks")
    assert torch.equal(public["state_dict"]["net.0.weight"], module.net[0].weight)
    with pytest.raises(
        ValueError, match=r"checkpoint without 'dptrain_private_run'.*leave ckpt_path"
    ):
        trainer(private_callback()).fit(Classifier(), loader(), ckpt_path=weights.best_model_path)
    # Evaluation takes either.
    assert trainer(private_callback()).validate(
        Classifier(), loader(), ckpt_path=weights.best_model_path, verbose=False
    )


def test_another_mechanism_does_not_go_on(tmp_path):
    fit = trainer(private_callback())
    fit.fit(Classifier(), loader())
    fit.save_checkpoint(tmp_path / "end.ckpt")
    with pytest.raises(ValueError, match="belongs to another mechanism"):
        trainer(private_callback(noise_multiplier=2.0)).fit(
            Classifier(), loader(), ckpt_path=tmp_path / "end.ckpt"
        )


def test_a_checkpoint_between_microbatches_is_refused(tmp_path):
    class Saves(callbacks.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "middle.ckpt")

    parts = Loading(microbatches=3)
    fit = trainer(private_callback(loading=parts), Saves())
    with pytest.raises(
        RuntimeError, match=r"between two microbatches of a step.*every_n_train_steps"
    ):
        fit.fit(Classifier(), loader())
    by_time = callbacks.ModelCheckpoint(tmp_path, train_time_interval=timedelta(seconds=1))
    fit = trainer(private_callback(loading=parts), by_time, enable_checkpointing=True)
    with pytest.raises(
        ValueError, match=r"train_time_interval=.*microbatches=3.*every_n_train_steps"
    ):
        fit.fit(Classifier(), loader())
    saves = callbacks.ModelCheckpoint(tmp_path, monitor="val_loss")
    options = {"enable_checkpointing": True, "val_check_interval": 4}
    fit = trainer(private_callback(loading=parts), saves, **options)
    with pytest.raises(ValueError, match=r"val_check_interval=4.*multiple of microbatches=3"):
        fit.fit(Classifier(), loader(), held_out())


def refused(error, told, module=None, data=None, callback=None, more=(), **options):
    """Before the first step: the weights are as they were, and the module is the user's."""
    module = Classifier() if module is None else module
    before, attributes = flat(module), own_attributes(module)
    private = private_callback() if callback is None else callback
    fit = trainer(private, *more, **options)
    with pytest.raises(error, match=told):
        fit.fit(module, loader() if data is None else data)
    assert torch.equal(flat(module), before)
    assert own_attributes(module) == attributes
    assert fit.global_step == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_epochs": 5}, r"Trainer\(max_epochs=5\): Poisson plans 12 steps.*Plan 15 steps"),
        (
            {"max_steps": 7},
            r"Trainer\(max_steps=7\) would run after 7 .*before its plan.*max_steps=12",
        ),
        ({"max_steps": 13}, r"Trainer\(max_steps=13\) .*end after its plan"),
        ({"max_epochs": -1}, r"Trainer\(max_epochs=-1\) would run without end.*max_epochs=1"),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2.*Loading\(microbatches=2\)"),
        ({"gradient_clip_val": 0.5}, r"gradient_clip_val=0.5.*max_grad_norm"),
        ({"overfit_batches": 2}, r"overfit_batches=2.*leave it out"),
        ({"limit_train_batches": 3}, r"limit_train_batches=3.*steps_per_epoch"),
        ({"fast_dev_run": True}, r"fast_dev_run=True.*without PrivateCallback"),
        ({"reload_dataloaders_every_n_epochs": 1}, r"reload_dataloaders_every_n_epochs=1"),
        ({"precision": "16-true"}, r"precision='16-true'.*'bf16-mixed'"),
        ({"precision": "64-true"}, r"precision='64-true'.*'32-true'"),
        ({"max_time": "00:01:00:00"}, r"Timer.*max_time"),
    ],
)
def test_arguments_of_the_trainer_that_make_another_fit(options, told):
    refused(ValueError, told, **options)


@pytest.mark.parametrize(
    ("loading", "options", "told"),
    [
        (
            Loading(steps_per_epoch=4),
            {"max_epochs": 2},
            r"max_epochs=2\) would run after 8 .*max_epochs=3",
        ),
        (Loading(steps_per_epoch=4), {"max_epochs": 4}, r"end after its plan.*set max_epochs=3"),
        (Loading(steps_per_epoch=5), {"max_epochs": 3}, r"max_epochs=3 and max_steps=12"),
        (Loading(max_physical_batch_size=4), {}, r"max_physical_batch_size=4.*microbatches"),
    ],
)
def test_epochs_and_plan_have_to_agree(loading, options, told):
    refused(ValueError, told, callback=private_callback(loading=loading), **options)


def test_an_epoch_may_be_cut_by_the_plan():
    module, private = Classifier(), private_callback(loading=Loading(steps_per_epoch=5))
    trainer(private, max_epochs=3, max_steps=STEPS).fit(module, loader())
    assert torch.equal(flat(module), plain())


@pytest.mark.parametrize(
    "more",
    [
        lambda: callbacks.StochasticWeightAveraging(0.1),
        lambda: callbacks.GradientAccumulationScheduler({0: 2}),
        lambda: callbacks.LearningRateFinder(),
        lambda: callbacks.BatchSizeFinder(),
    ],
)
def test_callbacks_that_step_by_themselves(more):
    private = private_callback()
    told = rf"{type(more()).__name__}\(\.\.\.\)\]\) with PrivateCallback"
    with pytest.raises(ValueError, match=told):
        private.setup(trainer(private, more()), Classifier(), "fit")


@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_processes_that_the_guarantee_would_end_with(strategy):
    private = private_callback()
    with pytest.raises(ValueError, match=r"start_method='(fork|spawn)'.*use strategy='ddp'"):
        private.setup(trainer(private, strategy=strategy, devices=2), Classifier(), "fit")


def test_several_optimizers_are_joined_or_refused():
    class Several(Classifier):
        def configure_optimizers(self):
            conv, dense = self.net[0].parameters(), self.net[5].parameters()
            norm = self.net[1].parameters()
            return [torch.optim.SGD([*conv, *norm], lr=0.1), torch.optim.Adam(dense)]

    class Joined(Several):
        def configure_optimizers(self):
            return JoinedOptimizer(*super().configure_optimizers())

    refused(ValueError, r"2 optimizers \(SGD, Adam\).*JoinedOptimizer", Several(manual=True))
    module, private = Joined(), private_callback()
    trainer(private).fit(module, loader())
    assert private.private.steps_executed == STEPS


def test_hooks_that_would_do_nothing():
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer, *args, **kwargs):
            self.clip_gradients(optimizer, 1.0)

    refused(ValueError, r"Clips.configure_gradient_clipping.*max_grad_norm", Clips())


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([loader(), loader()], r"training data is a list"),
        (DataLoader(images(12), batch_size=4), r"12 examples.*dataset_size=24"),
        (
            DataLoader(images(N), batch_size=4, sampler=torch.utils.data.SubsetRandomSampler([1])),
            r"sampler \(SubsetRandomSampler\)",
        ),
    ],
)
def test_data_that_no_scheme_draws_from(data, told):
    refused((TypeError, ValueError), told, data=data)


def test_two_callbacks_and_two_fits():
    refused(ValueError, "2 PrivateCallbacks", more=[private_callback()])
    private, module = private_callback(), Classifier()
    trainer(private).fit(module, loader())
    with pytest.raises(RuntimeError, match=r"used in a fit already.*new callback.*add up"):
        trainer(private).fit(module, loader())
    with pytest.raises(RuntimeError, match="no private run yet"):
        private_callback().guarantee(1e-3)


@pytest.mark.parametrize(
    "more",
    [
        lambda: callbacks.EarlyStopping("train_loss"),
        lambda: callbacks.ModelCheckpoint(monitor="train_loss"),
    ],
)
def test_decisions_by_training_metrics_are_refused(more, tmp_path):
    fit = trainer(private_callback(), more(), enable_checkpointing=True, default_root_dir=tmp_path)
    with pytest.raises(ValueError, match=r"follows 'train_loss'.*without noise.*validation"):
        fit.fit(Classifier(), loader())
    assert fit.global_step <= 1


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(images(N))


class OfSeveral(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


PARTS_OF_TRAINING = {
    "the same loader": lambda train: train,
    "the same rows": lambda train: DataLoader(images(N), batch_size=4),
    "some of the rows": lambda train: DataLoader(Subset(train.dataset, [3, 1]), batch_size=4),
    "a list of some": lambda train: DataLoader([images(N)[k] for k in (5, 2)], batch_size=1),
    "some among others": lambda train: DataLoader(
        ConcatDataset([held_out().dataset, Subset(images(N), [7])]), batch_size=4
    ),
    "one of two": lambda train: [held_out(), DataLoader(images(N), batch_size=4)],
    "rows without numbers": lambda train: DataLoader(Streamed(), batch_size=4),
}


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("name", PARTS_OF_TRAINING)
def test_validation_on_training_rows_is_refused(name, sanity):
    train_loader, module = loader(), OfSeveral()
    before = flat(module)
    fit = trainer(private_callback(), num_sanity_val_steps=sanity)
    with pytest.raises(ValueError, match="of the training data"):
        fit.fit(module, train_loader, PARTS_OF_TRAINING[name](train_loader))
    assert fit.global_step == 0
    assert torch.equal(flat(module), before)


def test_validation_data_may_be_declared_public():
    private = private_callback(public_evaluation=True)
    trainer(private).fit(Classifier(), loader(), DataLoader(Streamed(), batch_size=4))
    same = loader()
    with pytest.raises(ValueError, match="contain rows of the training data"):
        trainer(private_callback(public_evaluation=True)).fit(Classifier(), same, same)


class LogsLate(Classifier):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_epoch_end(self):
        self.log("train_loss", torch.tensor(0.5))


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("module", [Classifier, LogsLate])
@pytest.mark.parametrize("filename", ["{epoch}-{train_loss:.2f}", "run {train_loss}", None])
def test_no_file_is_named_by_a_training_loss(tmp_path, filename, module, weights_only):
    saves = callbacks.ModelCheckpoint(
        tmp_path, filename=filename, save_weights_only=weights_only, save_last=filename is None
    )
    if filename is None:
        saves.CHECKPOINT_NAME_LAST = "last {train_loss}"
    fit = trainer(private_callback(), saves, enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"puts 'train_loss', .* into the names of its files"):
        fit.fit(module(), loader())
    assert not list(tmp_path.iterdir())


def test_files_may_be_named_by_a_validation_metric(tmp_path):
    saves = callbacks.ModelCheckpoint(tmp_path, filename="{step}-{val_loss:.2f}")
    trainer(private_callback(), saves, enable_checkpointing=True).fit(
        Classifier(), loader(), held_out()
    )
    assert [path.name for path in tmp_path.glob("step=*-val_loss=*.ckpt")]


class Plain(plugins.TorchCheckpointIO):
    """Writes files as most plugins do, with the rights that new files have."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        pathlib.Path(path).parent.mkdir(exist_ok=True)
        torch.save(checkpoint, path)


@pytest.mark.parametrize("plugin", [None, Plain, lambda: plugins.AsyncCheckpointIO(Plain())])
def test_checkpoints_with_a_private_run_are_for_their_owner(tmp_path, plugin):
    """They hold the seeds of the noise; released weights are for everybody."""
    fit = trainer(
        private_callback(),
        callbacks.ModelCheckpoint(tmp_path / "private", every_n_train_steps=2, save_top_k=-1),
        callbacks.ModelCheckpoint(tmp_path / "weights", save_weights_only=True),
        enable_checkpointing=True,
        plugins=None if plugin is None else [plugin()],
    )
    before = os.umask(0o022)
    try:
        fit.fit(Classifier(), loader())
        if plugin is not None:
            pathlib.Path(tmp_path, "private", "by hand.ckpt").touch(0o644)
        if plugin in (None, Plain):  # asynchronous ones end with the fit
            fit.save_checkpoint(tmp_path / "private" / "by hand.ckpt")
    finally:
        os.umask(before)
    private = [p for p in (tmp_path / "private").glob("*.ckpt") if p.stat().st_size]
    assert len(private) > 1
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    if plugin is Plain:
        weights = list((tmp_path / "weights").glob("*.ckpt"))
        assert {path.stat().st_mode & 0o777 for path in weights} == {0o644}


def test_a_plateau_of_a_training_metric_is_refused_and_of_another_noted():
    class Plateau(Classifier):
        def __init__(self, monitor):
            super().__init__()
            self.monitor = monitor

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": scheduler, "monitor": self.monitor}
            return {"optimizer": optimizer, "lr_scheduler": config}

    with pytest.raises(ValueError, match="ReduceLROnPlateau follows 'train_loss'"):
        trainer(private_callback()).fit(Plateau("train_loss"), loader())
    private = private_callback()
    trainer(private, max_epochs=2).fit(Plateau("val_loss"), loader(), held_out())
    assert any("ReduceLROnPlateau" in note for note in private.guarantee(1e-3).notes)


def test_stopping_by_a_validation_metric_ends_the_plan_early(caplog):
    stops = callbacks.EarlyStopping("val_loss", min_delta=100.0, patience=1)
    private = private_callback()
    trainer(private, stops, max_epochs=6).fit(Classifier(), loader(), held_out())
    assert 0 < private.private.steps_executed < STEPS
    assert "planned steps; the guarantee still describes the whole plan" in caplog.text
    full = private_callback()
    trainer(full).fit(Classifier(), loader())
    assert private.guarantee(1e-3).epsilon == full.guarantee(1e-3).epsilon


class Centers(Classifier):
    """Its forward subtracts the mean of the batch."""

    def forward(self, x):
        return self.net(x - x.mean(0))


class Weighs(Classifier):
    """Its loss divides by a number of the whole batch."""

    def training_step(self, batch, batch_idx):
        losses = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")
        weights = batch[1] + 1
        return (losses * weights).sum() / weights.sum()


class Counts(Classifier):
    """It keeps something of every batch."""

    def __init__(self):
        super().__init__()
        self.seen = 0.0

    def training_step(self, batch, batch_idx):
        self.seen = self.seen + float(batch[0].sum())
        return super().training_step(batch, batch_idx)


class Skips(Classifier):
    """It leaves out batches."""

    def training_step(self, batch, batch_idx):
        return None


class Normalizes(Classifier):
    def __init__(self):
        super().__init__()
        self.net[1] = nn.BatchNorm2d(4)


class Accumulates(Classifier):
    """By hand, as many loops of manual optimization do."""

    def __init__(self):
        super().__init__(manual=True)

    def training_step(self, batch, batch_idx):
        self.manual_backward(nn.functional.cross_entropy(self(batch[0]), batch[1]))
        if batch_idx % 2 == 1:
            self.optimizers().step()
            self.optimizers().zero_grad()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Centers, r"mixes the examples"),
        (Counts, r"'seen' of the module itself.*changed"),
        (Skips, r"backward"),
        (Normalizes, r"net\.1.*BatchNorm"),
        (Accumulates, r"Call it once for every"),
    ],
)
def test_what_the_engine_refuses_is_refused_in_a_fit(kind, told):
    refused((RuntimeError, ValueError), told, kind())


@pytest.mark.followed
def test_a_loss_that_ties_the_examples_together_is_refused():
    private = private_callback()
    with pytest.raises(
        RuntimeError, match=r"sum at test_callback\.py.*reduce each example by itself"
    ):
        trainer(private).fit(Weighs(), loader())


def test_a_loss_past_the_modules_own_forward_is_noted():
    class Past(Classifier):
        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    for kind, noted in ((Past, True), (Classifier, False)):
        private = private_callback()
        trainer(private).fit(kind(), loader())
        notes = private.guarantee(1e-3).notes
        assert any("without the module's own forward" in note for note in notes) is noted


def test_nothing_of_lightning_is_imported_with_the_package():
    code = "import sys, dptrain.integrations; sys.exit('lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_other_package_of_lightnings_is_told_apart():
    with pytest.raises(TypeError, match=r"lightning.pytorch.Trainer.*import lightning.pytorch"):
        private_callback().setup(object(), Classifier(), "fit")


def test_each_rank_for_itself_is_refused():
    private = private_callback(engine=PrivacyEngine(distributed=False))
    with pytest.raises(ValueError, match=r"distributed=False\) with 2 processes"):
        private.setup(trainer(private, strategy="ddp", devices=2), Classifier(), "fit")


TWO = """
    import sys
    import lightning.pytorch as pl
    import torch
    from torch.utils.data import DataLoader
    from dptrain import BandMF, PrivacyEngine
    from dptrain.integrations.lightning import PrivateCallback
    from tests.helpers.engine import flat, images, make, separated, small_net, train
    from tests.integrations.lightning.test_callback import Classifier, held_out

    private = PrivateCallback(
        max_grad_norm=1.0, noise_multiplier=1.0, seed=5, target_delta=1e-3, **separated(24, 8)
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, callbacks=[private],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=sys.argv[1],
    )
    module = Classifier(manual=sys.argv[2] == "manual")
    trainer.fit(module, DataLoader(images(), batch_size=4), held_out())
    assert private.private.steps_executed == trainer.global_step == 8
    assert torch.distributed.get_world_size() == 2
    loop = make(small_net(), images(), "bookkeeping", **separated(24, 8))  # of both, too
    train(loop)
    assert torch.equal(flat(loop.module), flat(module))
    print(f"rank {trainer.global_rank} is the plain loop of two, {private.guarantee().epsilon}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("optimization", ["automatic", "manual"])
def test_two_processes_make_one_run(tmp_path, optimization):
    script = tmp_path / "two.py"
    script.write_text(textwrap.dedent(TWO))
    command = [sys.executable, str(script), str(tmp_path), optimization]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # the script lies elsewhere
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("is the plain loop of two") == 2


class _Kept(pl.loggers.logger.Logger):
    """What a logger of Lightning's is told."""

    name, version = "kept", 0

    def __init__(self):
        super().__init__()
        self.told = {}

    def log_metrics(self, metrics, step=None):
        for key, value in metrics.items():
            self.told.setdefault(key, {})[step] = value

    def log_hyperparams(self, *_, **__):
        pass


@pytest.mark.parametrize("parts", [None, 2])
def test_loggers_and_progress_bar_are_told_epsilon_so_far_and_planned(parts):
    private = private_callback(target_delta=0.01, loading=Loading(microbatches=parts))
    kept = _Kept()
    fit = trainer(private, max_epochs=1, logger=kept, log_every_n_steps=4)
    fit.fit(Classifier(), loader())
    so_far, planned = kept.told["epsilon_so_far"], kept.told["epsilon_planned"]
    assert list(so_far) == list(planned) == [3, 7, 11]  # steps from 0, as Lightning counts
    epsilon = private.guarantee().epsilon
    assert list(planned.values()) == pytest.approx([epsilon] * 3)
    assert list(so_far.values()) == sorted(so_far.values())
    assert 0 < so_far[3] < so_far[7] < epsilon
    assert so_far[11] == pytest.approx(epsilon)
    shown = fit.progress_bar_metrics
    assert shown["epsilon_so_far"] == pytest.approx(epsilon, abs=1e-3)


def test_without_a_delta_nothing_is_told_of_epsilon():
    kept = _Kept()
    trainer(private_callback(), logger=kept, log_every_n_steps=4).fit(Classifier(), loader())
    assert not any("epsilon" in name for name in kept.told)
