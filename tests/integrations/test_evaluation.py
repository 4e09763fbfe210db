"""Evaluation on training rows is noticed, own losses are looked at, checkpoints are private."""

import os

import datasets
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, IterableDataset, Subset, random_split

from dptrain.integrations.evaluation import TrainingRows
from dptrain.integrations.transformers import PrivateTrainer
from dptrain.losses import reduce_examples
from tests.integrations.tiny import Texts, bert, privacy, trainer


def arrow(rows=40, seed=1):
    """The texts as ``datasets`` has them."""
    texts = Texts(rows, seed)
    columns = {name: [texts[k][name].tolist() for k in range(rows)] for name in texts[0]}
    return datasets.Dataset.from_dict(columns)


# What is made of the training data in a user's script, and is theirs whatever it is called.
OF_ARROW = {
    "itself": lambda data: data,
    "select": lambda data: data.select([4, 2]),
    "a range": lambda data: data.select(range(3, 9)),
    "shuffle": lambda data: data.shuffle(seed=1),
    "shuffle and select": lambda data: data.shuffle(seed=1).select(range(5)),
    "train_test_split": lambda data: data.train_test_split(0.2, seed=1)["test"],
    "filter": lambda data: data.filter(lambda row: row["labels"] == 1),
    "another format": lambda data: data.select([1]).with_format("torch"),
    "other columns": lambda data: data.add_column("note", ["" for _ in data]),
    "a list of rows": lambda data: [data[3], data[5]],
    "tensors of a row": lambda data: [data.with_format("torch")[3]],
    "by name": lambda data: {"public": arrow(seed=2), "train": data.select([7])},
    "among others": lambda data: datasets.concatenate_datasets([arrow(seed=2), data.select([0])]),
    "saved": lambda data: datasets.Dataset.from_list([data[8]]),
}
OF_TORCH = {
    "itself": lambda data: data,
    "Subset": lambda data: Subset(data, [3]),
    "Subset of Subset": lambda data: Subset(Subset(data, [3, 4]), [1]),
    "random_split": lambda data: random_split(data, [0.8, 0.2])[1],
    "a list of rows": lambda data: [data[6]],
    "made again": lambda data: Texts(),
    "among others": lambda data: ConcatDataset([Texts(seed=2), Subset(data, [9])]),
}
CASES = [(arrow, OF_ARROW, name) for name in OF_ARROW] + [(Texts, OF_TORCH, n) for n in OF_TORCH]


@pytest.mark.parametrize(("data", "of", "name"), CASES)
def test_rows_of_the_training_data_are_noticed(tmp_path, data, of, name):
    train = data()
    with pytest.raises(ValueError, match=r"eval_dataset (is|has rows of) train_dataset"):
        trainer(tmp_path, data=train, more={"eval_dataset": of[name](train)})


@pytest.mark.parametrize("data", [arrow, Texts])
def test_other_rows_are_not_theirs(data):
    parts = data(80)
    if data is arrow:
        split = parts.train_test_split(0.5, seed=3)
        train, held_out = split["train"], split["test"]
    else:
        train, held_out = random_split(parts, [0.5, 0.5])
    for other in (held_out, data(seed=2), {"a": held_out, "b": data(seed=2)}, None):
        assert TrainingRows(train).hold(other) is False
    assert TrainingRows(train).hold(parts)


def test_a_few_rows_of_many_are_found_in_memory():
    """More than are compared row by row; the expected number of hits of those would be 0.02."""
    large = datasets.Dataset.from_dict({"x": range(200_000)})
    rows = TrainingRows(large)
    assert rows.hold(large.shuffle(seed=0).select([11, 17]))
    assert rows.hold(datasets.Dataset.from_dict({"x": [-1, -2]})) is False


class Streamed(IterableDataset):
    def __iter__(self):
        return iter(Texts())


def test_what_cannot_be_compared_has_to_be_declared(tmp_path):
    more = {"eval_dataset": Streamed()}
    with pytest.raises(ValueError, match=r"public_evaluation=True"):
        trainer(tmp_path, more=more)
    trainer(tmp_path, more=more, private=privacy(public_evaluation=True))


def test_declared_public_is_anything_but_the_training_data_itself(tmp_path):
    train, declared = Texts(), privacy(public_evaluation=True)
    trainer(tmp_path, data=train, more={"eval_dataset": Texts()}, private=declared)
    with pytest.raises(ValueError, match="eval_dataset is train_dataset"):
        trainer(tmp_path, data=train, more={"eval_dataset": train}, private=declared)


def test_evaluation_data_may_not_become_the_training_data(tmp_path):
    private = trainer(tmp_path, more={"eval_dataset": Texts(seed=2)})
    private.eval_dataset = [Texts()[2]]
    with pytest.raises(ValueError, match="eval_dataset has rows of train_dataset"):
        private.train()


def test_figures_of_training_rows_are_kept(tmp_path):
    """``evaluate`` may be asked for them, and tells them to nobody else."""
    private = trainer(tmp_path, eval_strategy="no")
    private.train()
    for data in ([Texts()[k] for k in range(4)], Subset(Texts(), [1]), Streamed()):
        assert private.evaluate(data)["eval_loss"] > 0
    assert not any("eval_loss" in entry for entry in private.state.log_history)
    private.evaluate(Texts(seed=2))
    assert any("eval_loss" in entry for entry in private.state.log_history)


# Losses of one's own


def _logits(model, inputs):
    labels = inputs.pop("labels")
    return model(**inputs).logits, labels


class Contrast(PrivateTrainer):
    """Compares the rows with one another."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits, _ = _logits(model, inputs)
        return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Normalized(PrivateTrainer):
    """Weighs each row by its part of the batch's loss."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits, labels = _logits(model, inputs)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return (each * each.detach() / each.detach().sum()).sum()


class Twice(PrivateTrainer):
    """Ties the rows of what the trainer itself computes."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return super().compute_loss(model, inputs) ** 2


class Focal(PrivateTrainer):
    """A loss for each row, and logs as such losses do."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits, labels = _logits(model, inputs)
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = reduce_examples((1 - (-each).exp()) ** 2 * each)
        self.log({"focal": float(loss.detach())})
        return (loss, {"logits": logits}) if return_outputs else loss


class Scaled(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return 2 * super().compute_loss(model, inputs)


class Perturbed(PrivateTrainer):
    """Draws numbers: nothing can be told."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits, labels = _logits(model, inputs)
        return nn.functional.cross_entropy(logits + torch.rand_like(logits), labels)


class Pooled(PrivateTrainer):
    """Calls a part of the model by itself."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        logits, labels = _logits(model, inputs)
        return nn.functional.cross_entropy(model.dropout(logits), labels)


def own(tmp_path, kind, **more):
    """A trainer whose rows have losses far apart."""
    model = bert()
    with torch.no_grad():
        model.classifier.weight.mul_(100)
    return trainer(tmp_path, model, of=kind, **more)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("kind", [Contrast, Normalized, Twice])
def test_a_compute_loss_that_ties_the_rows_is_refused(tmp_path, kind):
    private = own(tmp_path, kind)
    told = rf"{kind.__name__}\.compute_loss\(\) for . examples together does not give the mean"
    with pytest.raises(RuntimeError, match=told):
        private.train()
    assert private.private.steps_executed == 0


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("kind", [Focal, Scaled])
def test_a_compute_loss_of_a_row_each_trains_and_runs_the_model_once(tmp_path, kind, caplog):
    private = own(tmp_path, kind)
    calls = []
    private.model.register_forward_pre_hook(lambda *_: calls.append(1))  # of no probe
    private.train()
    assert private.private.steps_executed == 6
    assert "could not be tested" not in caplog.text
    logged = sum("focal" in entry for entry in private.training_log)
    assert logged == (len(calls) if kind is Focal else 0)


@pytest.mark.sample(every=2)
@pytest.mark.parametrize(("kind", "why"), [(Perturbed, "draws random"), (Pooled, "RuntimeError")])
def test_it_is_said_once_where_nothing_can_be_told(tmp_path, kind, why, caplog):
    own(tmp_path, kind).train()
    (said,) = [r.getMessage() for r in caplog.records if "could not be tested" in r.getMessage()]
    assert why in said


@pytest.mark.slow
def test_looking_changes_nothing(tmp_path):
    """The same weights as with the check left out, random numbers among it."""
    ends = []
    for looked in (True, False):
        private = own(tmp_path, Focal, private=privacy(noise_seed=3))
        if not looked:
            private._own_check._check._left = 0
        private.train()
        ends.append(torch.cat([p.detach().flatten() for p in private.model.parameters()]))
    assert torch.equal(*ends)


# Checkpoints


@pytest.mark.slow
def test_checkpoints_are_for_their_owner(tmp_path):
    before = os.umask(0o022)
    try:
        private = trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=6)
        stale = tmp_path / "checkpoint-3" / "rng_state.pth"
        stale.parent.mkdir()
        stale.touch(0o644)
        private.train()
        private.save_model(tmp_path / "published")
    finally:
        os.umask(before)
    kept = [path for path in tmp_path.glob("checkpoint-*/*") if path.is_file()]
    assert {"rng_state.pth", "private_state.pt"} <= {path.name for path in kept}
    assert {path.stat().st_mode & 0o777 for path in kept} == {0o600}
    published = [path for path in (tmp_path / "published").iterdir() if path.suffix == ".json"]
    assert {path.stat().st_mode & 0o777 for path in published} == {0o644}
