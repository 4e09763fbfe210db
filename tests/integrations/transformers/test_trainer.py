"""The private trainer does what a loop by hand does, and what its users expect of a trainer."""

from __future__ import annotations

import json
import logging
import pathlib
import warnings

import pytest
import torch
import transformers
import yaml
from torch import nn

from dptrain import BallsInBins, BandMF, Loading, MinSep, PrivacyEngine
from dptrain.core import Guarantee
from dptrain.integrations.transformers import PrivacyArguments
from tests.integrations.tiny import Texts, arguments, bert, flat, privacy, trainer

pytest.importorskip("accelerate")


def by_hand(scheme, strategy, *, part=4, dropout=0.0, learning_rate=0.1, linear=True):
    """The loop that the tutorial shows, with the trainer's schedule of the learning rate."""
    model, data = bert(dropout), Texts()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    private = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data=data,
        scheme=scheme,
        strategy=strategy,
        noise_multiplier=1.0,
        max_grad_norm=0.5,
        seed=5,
        loading=Loading(max_physical_batch_size=part),
    )
    model.train()
    n = scheme.steps
    for batch in private.loader:
        for group in optimizer.param_groups:
            fraction = private.steps_executed / n if linear else 0.0
            group["lr"] = learning_rate * (1.0 - fraction)
        private.optimizer.zero_grad()
        labels = batch.pop("labels")
        nn.functional.cross_entropy(model(**batch).logits, labels).backward()
        private.optimizer.step()
    assert private.steps_executed == n
    return flat(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "strategy"),
    [
        ("Poisson", "Identity"),
        ({"type": "MinSep", "min_sep": 3}, {"type": "BandMF", "bands": 2}),
        ('{"type": "CyclicPoisson", "cycle": 2}', "BandMF(2)"),
    ],
)
def test_the_weights_are_those_of_a_loop_by_hand(tmp_path, scheme, strategy):
    """Bit for bit, with batches in parts, some of them empty."""
    if strategy == "BandMF(2)":
        strategy = BandMF(bands=2)
    model = bert()
    private = trainer(
        tmp_path,
        model,
        private=privacy(scheme=scheme, strategy=strategy, max_grad_norm=0.5, noise_seed=5),
        more={"optimizers": (torch.optim.SGD(model.parameters(), lr=0.1), None)},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=12,
    )
    result = private.train()
    mechanism = private.private.mechanism
    assert result.global_step == private.private.steps_executed == mechanism.steps == 12
    assert mechanism.scheme.expected_batch_size == pytest.approx(2)
    assert torch.equal(flat(model), by_hand(mechanism.scheme, mechanism.strategy, part=2))


@pytest.mark.slow
def test_empty_batches_are_steps_like_any_other(tmp_path):
    private = trainer(
        tmp_path, private=privacy(scheme={"type": "Poisson"}), data=Texts(20), max_steps=15,
        per_device_train_batch_size=1, gradient_accumulation_steps=1, logging_steps=1,
    )  # fmt: skip
    sizes = []
    private.add_callback(_Counts(private, sizes))
    assert private.train().global_step == 15
    assert 0 in sizes  # of an expected one
    assert private.private.nonfinite_examples == 0
    assert torch.isfinite(flat(private.model)).all()


class _Counts(transformers.TrainerCallback):
    def __init__(self, trainer, sizes):
        self.trainer, self.sizes = trainer, sizes

    def on_step_end(self, *_, **__):
        self.sizes.append(len(self.trainer.private.loader.current.indices))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "steps", "expected"),
    [
        ({"num_train_epochs": 3, "max_steps": -1}, 15, 8),  # 40 rows, 4 x 2 a batch
        ({"num_train_epochs": 0.5, "max_steps": -1}, 3, 8),  # 2.5 steps begun
        ({"max_steps": 7}, 7, 8),
        ({"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 1}, 20, 4),
    ],
)
def test_epochs_and_batch_sizes_become_steps_and_an_expected_batch(
    tmp_path, caplog, args, steps, expected
):
    private = trainer(tmp_path, **args)
    assert private.plan.steps == steps
    assert private.plan.scheme.expected_batch_size == pytest.approx(expected)
    with caplog.at_level(logging.WARNING):
        result = private.train()
    assert result.global_step == private.private.steps_executed == steps
    said = [r.getMessage() for r in caplog.records if "private training:" in r.getMessage()]
    assert len(said) == 1
    epochs = f"{steps * expected / 40:g} epochs of 40 rows"  # also where they are no whole one
    assert f"{epochs} become {steps} steps of Poisson with {expected} examples expected" in said[0]
    assert "ended early" not in caplog.text
    assert private.args.gradient_accumulation_steps == 1


def test_a_scheme_of_whole_epochs_takes_the_trainers_epochs(tmp_path):
    private = trainer(tmp_path, private=privacy(scheme="BallsInBins"), max_steps=-1,
                      num_train_epochs=2)  # fmt: skip
    assert isinstance(private.plan.scheme, BallsInBins)
    assert private.plan.steps == 2 * private.plan.steps_per_epoch == 10


@pytest.mark.slow
def test_a_scheme_that_is_made_already_states_its_steps(tmp_path):
    scheme = MinSep.for_batch_size(batch_size=6, dataset_size=40, min_sep=2, steps=9)
    private = trainer(tmp_path, private=privacy(scheme=scheme), max_steps=-1)
    private.train()
    assert private.private.mechanism.scheme == scheme
    assert private.state.global_step == 9
    with pytest.raises(ValueError, match="max_steps=7 and scheme= with 9 steps"):
        trainer(tmp_path, private=privacy(scheme=scheme), max_steps=7)


@pytest.mark.slow
def test_the_learning_rate_falls_once_a_logical_step(tmp_path):
    private = trainer(tmp_path, logging_steps=1, per_device_train_batch_size=2,
                      gradient_accumulation_steps=4)  # fmt: skip
    private.train()
    seen = [
        entry["learning_rate"] for entry in private.state.log_history if "learning_rate" in entry
    ]
    assert seen == pytest.approx([1e-2 * (1 - k / 6) for k in range(6)])


@pytest.mark.slow
def test_the_noise_is_secret_and_not_of_the_arguments_seed(tmp_path):
    ends = []
    for _ in range(2):
        private = trainer(tmp_path, seed=42, data_seed=42)
        private.train()
        ends.append(flat(private.model))
        assert not any("seed" in note for note in private.guarantee().notes)
    assert not torch.equal(*ends)
    known = trainer(tmp_path, private=privacy(noise_seed=3))
    known.train()
    assert any("seed was set by hand" in note for note in known.guarantee().notes)


@pytest.mark.slow
def test_the_default_max_grad_norm_of_the_arguments_is_not_used(tmp_path):
    """1.0 is its default, and would shorten a noisy gradient of norm far above."""
    ends = []
    for norm in (0.0, 1.0):
        private = trainer(tmp_path, private=privacy(noise_seed=3, noise_multiplier=50.0),
                          max_grad_norm=norm)  # fmt: skip
        private.train()
        ends.append(flat(private.model))
    assert torch.equal(*ends)


# Going on


def resumable(folder, *, dropout=0.1, private=None, of=None, **args):
    common = {"save_strategy": "steps", "save_steps": 3, "max_steps": 8, "logging_steps": 2,
              "eval_strategy": "steps", "eval_steps": 4, **args}  # fmt: skip
    private = private or privacy(
        noise_seed=3,
        scheme={"type": "MinSep", "min_sep": 3},
        strategy={"type": "BandMF", "bands": 3},
    )
    return trainer(folder, bert(dropout), private=private, more={"eval_dataset": Texts(9, 5)},
                   **common)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_a_resumed_trainer_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path, step):
    """With dropout, AdamW, correlated noise, evaluations between and batches in parts."""
    whole = resumable(tmp_path)
    whole.train()
    # Its noise seed is not stated again: it comes from the checkpoint.
    unseeded = privacy(
        scheme={"type": "MinSep", "min_sep": 3}, strategy={"type": "BandMF", "bands": 3}
    )
    goes_on = resumable(tmp_path, private=unseeded)
    result = goes_on.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert result.global_step == goes_on.private.steps_executed == 8
    assert torch.equal(flat(whole.model), flat(goes_on.model))
    evaluated = [
        [entry["eval_loss"] for entry in each.state.log_history if "eval_loss" in entry]
        for each in (whole, goes_on)
    ]
    assert evaluated[0] == evaluated[1]


class _Killed(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 5:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_run_that_is_killed_within_an_epoch_goes_on(tmp_path):
    whole = resumable(tmp_path / "whole", max_steps=-1, num_train_epochs=2)
    whole.train()
    killed = resumable(tmp_path / "killed", max_steps=-1, num_train_epochs=2)
    killed.add_callback(_Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    goes_on = resumable(tmp_path / "killed", max_steps=-1, num_train_epochs=2)
    goes_on.train(resume_from_checkpoint=True)
    assert goes_on.private.steps_executed == 10
    assert torch.equal(flat(whole.model), flat(goes_on.model))


class _Stops(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 4
        control.should_save = control.should_training_stop
        return control


@pytest.mark.slow
def test_a_stop_before_the_plan_is_said_and_can_be_taken_back(tmp_path, caplog):
    known = privacy(noise_seed=3)
    whole = resumable(tmp_path / "whole", private=known)
    whole.train()
    stopped = resumable(tmp_path / "stopped", private=known)
    stopped.add_callback(_Stops())
    stopped.train()
    assert "stopped after 4 of 8 planned steps" in caplog.text
    assert stopped.guarantee().steps_executed == 4
    assert stopped.guarantee().epsilon == whole.guarantee().epsilon  # of the plan
    stopped.remove_callback(_Stops)
    with pytest.raises(ValueError, match=r"has run 4 private steps.*resume_from_checkpoint=True"):
        stopped.train()
    stopped.train(resume_from_checkpoint=True)
    assert torch.equal(flat(whole.model), flat(stopped.model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"max_steps": 9}, r"its run is 8 steps.*the arguments now make 9 steps"),
        ({"gradient_accumulation_steps": 4}, r"its run is 8 steps.*now make 8 steps"),
        (
            {"private": privacy(noise_multiplier=2.0)},
            r"was started with noise_multiplier=1.0, and PrivacyArguments has noise_multiplier=2.0",
        ),
    ],
)
def test_a_checkpoint_of_another_plan_is_refused(tmp_path, change, told):
    resumable(tmp_path, private=privacy(), max_steps=8).train()
    other = resumable(tmp_path, **{"private": privacy(), **change})
    with pytest.raises(ValueError, match=told):
        other.train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_parts_may_have_another_size_when_a_run_goes_on(tmp_path):
    resumable(tmp_path, private=privacy()).train()
    other = resumable(tmp_path, private=privacy(), per_device_train_batch_size=8,
                      gradient_accumulation_steps=1)  # fmt: skip
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert other.private.steps_executed == 8


@pytest.mark.slow
def test_a_checkpoint_without_the_private_state_is_refused(tmp_path):
    resumable(tmp_path, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"there is no private_state\.pt.*save_only_model"):
        resumable(tmp_path).train(resume_from_checkpoint=True)


# Evaluation and what is written


def accuracy(found):
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


@pytest.mark.slow
def test_evaluation_is_that_of_the_plain_trainer(tmp_path):
    model = bert()
    plain = transformers.Trainer(model=model, args=arguments(tmp_path), eval_dataset=Texts(11, 4),
                                 compute_metrics=accuracy)  # fmt: skip
    more = {"eval_dataset": Texts(11, 4), "compute_metrics": accuracy}
    private = trainer(tmp_path, model, more=more)

    def figures(of):
        found = of.evaluate()
        return {name: found[name] for name in ("eval_loss", "eval_accuracy")}

    assert figures(private) == figures(plain)
    private.train()
    assert figures(private) == figures(plain)
    labels = private.predict(Texts(11, 4)).label_ids
    assert list(labels) == [int(Texts(11, 4)[row]["labels"]) for row in range(11)]


@pytest.mark.slow
def test_the_best_model_is_loaded_and_an_early_stop_is_no_accident(tmp_path, caplog):
    more = {
        "eval_dataset": Texts(11, 4),
        "callbacks": [transformers.EarlyStoppingCallback(early_stopping_patience=1)],
    }
    private = trainer(
        tmp_path, more=more, max_steps=30, eval_strategy="steps", eval_steps=2, learning_rate=0.0,
        save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=False,
    )  # fmt: skip
    result = private.train()
    assert result.global_step == 4  # the loss does not fall at a learning rate of 0
    assert "stopped after 4 of 30 planned steps" in caplog.text
    assert private.guarantee().steps_planned == 30
    assert any("chosen by the evaluation data" in note for note in private.guarantee().notes)
    assert private.state.best_model_checkpoint.endswith("checkpoint-2")


PRIVATE = {
    *("private_state.pt", "rng_state.pth", "optimizer.pt", "scheduler.pt"),
    *("trainer_state.json", "training_args.bin"),
}


@pytest.mark.slow
def test_what_save_model_writes_may_be_published(tmp_path):
    private = trainer(tmp_path / "run", private=privacy(epsilon=6.0, noise_multiplier=None))
    private.train()
    private.save_model(str(tmp_path / "published"))
    names = {path.name for path in (tmp_path / "published").iterdir()}
    assert names == {"config.json", "model.safetensors", "privacy_report.json",
                     "privacy_report.md", "README.md"}  # fmt: skip
    assert not names & PRIVATE
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "published")
    assert torch.equal(flat(again), flat(private.model))
    card = metadata_of(tmp_path / "published" / "README.md")
    stated = Guarantee.from_json(
        json.dumps(
            json.loads((tmp_path / "published" / "privacy_report.json").read_text())["guarantee"]
        )
    )
    assert stated == private.guarantee()
    assert card["differential_privacy"]["epsilon"] == stated.epsilon <= 6.0
    assert card["differential_privacy"]["delta"] == 1e-3
    assert "differential-privacy" in card["tags"]
    seeds = private.private.state_dict()["private"]
    for key in (seeds["loader"]["seed"].removeprefix("0x"), str(int(seeds["loader"]["seed"], 16))):
        for path in (tmp_path / "published").iterdir():
            assert key.encode() not in path.read_bytes()


@pytest.mark.slow
def test_a_statement_is_of_the_weights_beside_it(tmp_path):
    """Whatever lay in the folder before, and whatever is done to the model after."""
    folder = tmp_path / "published"
    first = trainer(tmp_path / "a", private=privacy(epsilon=6.0, noise_multiplier=None))
    first.train()
    first.save_model(str(folder))

    def stated():
        reports = {path.name for path in folder.glob("privacy_report.*")}
        return metadata_of(folder / "README.md").get("differential_privacy"), reports

    assert stated()[0]["epsilon"] <= 6.0
    trainer(tmp_path / "b").save_model(str(folder))  # not trained
    assert stated() == (None, set())
    first.save_model(str(folder))
    bare = trainer(tmp_path / "c", private=privacy(noise_multiplier=0.0))
    bare.train()
    bare.save_model(str(folder))
    assert stated() == (None, set())
    first.save_model(str(folder))
    with torch.no_grad():
        next(first.model.parameters()).add_(1.0)
    with pytest.raises(RuntimeError, match="was changed after train"):
        first.save_model(str(folder))
    assert stated() == (None, set())


@pytest.mark.slow
def test_dropout_is_not_of_the_arguments_seed(tmp_path):
    """All rows in every batch and next to no noise: what differs between two runs is dropout."""
    ends = []
    for _ in range(2):
        private = trainer(
            tmp_path, bert(dropout=0.5), private=privacy(noise_multiplier=1e-9), seed=42,
            per_device_train_batch_size=40, gradient_accumulation_steps=1, max_steps=1,
            optim="sgd",
        )  # fmt: skip
        private.train()
        ends.append(flat(private.model))
    assert float((ends[0] - ends[1]).norm()) > 1e-4
    still = []
    for _ in range(2):  # the same without dropout
        private = trainer(
            tmp_path, private=privacy(noise_multiplier=1e-9), seed=42, max_steps=1, optim="sgd",
            per_device_train_batch_size=40, gradient_accumulation_steps=1,
        )  # fmt: skip
        private.train()
        still.append(flat(private.model))
    assert float((still[0] - still[1]).norm()) < 1e-6


@pytest.mark.slow
def test_figures_that_were_asked_for_are_returned_and_go_no_further(tmp_path):
    data = Texts()
    private = trainer(tmp_path, data=data)
    private.train()
    assert "eval_loss" in private.evaluate(data)
    assert not any("eval_loss" in entry for entry in private.state.log_history)
    assert "eval_loss" in private.evaluate(Texts(9, 5))
    assert any("eval_loss" in entry for entry in private.state.log_history)


def metadata_of(path: pathlib.Path):
    return yaml.safe_load(path.read_text(encoding="utf-8").split("---\n")[1])


@pytest.mark.slow
def test_a_checkpoint_is_private_and_readable_by_its_owner_only(tmp_path, caplog):
    private = resumable(tmp_path)
    private.train()
    kept = tmp_path / "checkpoint-3" / "private_state.pt"
    assert kept.stat().st_mode & 0o077 == 0
    private.save_model()
    assert "also holds checkpoint-3" in caplog.text
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0
    for entry in state["log_history"]:
        assert not {"loss", "grad_norm", "train_loss"} & set(entry)


class _Spy(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        self.seen += list(logs)


@pytest.mark.slow
def test_figures_of_training_batches_reach_nobody_but_the_console(tmp_path, capsys, monkeypatch):
    spy, service = _Spy(), _Spy()
    monkeypatch.setattr(
        "dptrain.integrations.transformers.trainer.reports", lambda callback: callback is service
    )
    more = {"callbacks": [spy, service], "eval_dataset": Texts(9, 5)}
    for asked in (False, True):
        spy.seen, service.seen = [], []
        private = trainer(tmp_path, private=privacy(log_training_loss=asked), more=more,
                          logging_steps=2, eval_strategy="steps", eval_steps=2)  # fmt: skip
        result = private.train()
        assert {"learning_rate", "epoch", "eval_loss"} <= set(spy.seen)
        assert not {"loss", "grad_norm", "train_loss", "total_flos"} & set(spy.seen)
        assert ("loss" in service.seen) is asked
        assert [entry["step"] for entry in private.training_log if "loss" in entry] == [2, 4, 6]
        assert "train_loss" not in result.metrics
    assert "loss (not for release)" in capsys.readouterr().out


@pytest.mark.slow
def test_bfloat16_trains_and_goes_on_alike_after_an_evaluation(tmp_path):
    """Evaluation prepares a model for autocast too, and once is enough."""
    whole = resumable(tmp_path, private=privacy(noise_seed=3), bf16=True)
    whole.train()
    assert flat(whole.model).dtype == torch.float32
    goes_on = resumable(tmp_path, private=privacy(), bf16=True)
    goes_on.evaluate()
    goes_on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(flat(whole.model), flat(goes_on.model))


@pytest.mark.slow
def test_checkpointed_activations_and_workers_change_nothing(tmp_path):
    ends = []
    for args in ({}, {"activation_checkpointing": True}, {"dataloader_num_workers": 1}):
        private = trainer(tmp_path, private=privacy(noise_seed=3), **args)
        private.train()
        ends.append(flat(private.model))
    assert torch.equal(ends[0], ends[2])
    # Recomputed activations come from the same operations.
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-6)


def test_the_arguments_come_from_a_command_line():
    parser = transformers.HfArgumentParser([transformers.TrainingArguments, PrivacyArguments])
    words = ["--output_dir", "out", "--epsilon", "3", "--delta", "1e-5", "--strategy", "BandMF"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        _, found = parser.parse_args_into_dataclasses(
            [
                *words,
                "--per_example_max_grad_norm",
                "0.5",
                "--scheme",
                '{"type": "MinSep", "min_sep": 4}',
            ]
        )
    assert (found.epsilon, found.per_example_max_grad_norm) == (3, 0.5)
    assert found.scheme == {"type": "MinSep", "min_sep": 4}
    assert found.strategy == {"type": "BandMF"}
