"""What would break the guarantee of a private trainer is refused by name, with the remedy."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

from dptrain import Gradients, Poisson
from dptrain.integrations.transformers import (
    PrivacyArguments,
    PrivateTrainer,
    PrivateTrainerMixin,
)
from dptrain.integrations.transformers.plan import graph_of
from tests.integrations.tiny import Texts, arguments, bert, flat, privacy, tokenizer, trainer

accelerate = pytest.importorskip("accelerate")

MISTAKES = [
    ({"train_sampling_strategy": "group_by_length"}, r"train_sampling_strategy='group_by_length'.*"
     r"the scheme draws.*PrivacyArguments\(scheme=\.\.\.\)"),
    ({"max_grad_norm": 0.5}, r"max_grad_norm=0.5: .*PrivacyArguments\(per_example_max_grad_norm="),
    ({"auto_find_batch_size": True}, r"auto_find_batch_size=True: .*released twice"),
    ({"ignore_data_skip": True}, r"ignore_data_skip=True: .*leave ignore_data_skip out"),
    ({"dataloader_drop_last": True}, r"dataloader_drop_last=True: batches are sampled"),
    ({"neftune_noise_alpha": 5.0}, r"neftune_noise_alpha=5.0: .*depends on the others"),
    ({"torch_compile": True}, r"torch_compile=True: .*leave torch_compile out"),
    ({"include_num_input_tokens_seen": "all"},
     r"include_num_input_tokens_seen='all': .*is private"),
    ({"optim": "lomo"}, r"optim='lomo': .*neither clipped nor noised.*adamw_torch"),
    ({"optim": "galore_adamw_layerwise", "optim_target_modules": ["x"]},
     r"optim='galore_adamw_layerwise'"),
    ({"lr_scheduler_type": "greedy"}, r"lr_scheduler_type='greedy'"),
    ({"enable_jit_checkpoint": True}, r"enable_jit_checkpoint=True: .*in the middle of a step"),
    ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}},
     r"gradient_accumulation_kwargs.*set gradient_accumulation_steps alone"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "told"), MISTAKES, ids=lambda each: str(each)[:40])
def test_a_training_argument_is_refused_by_name(tmp_path, wrong, told):
    more = {"eval_dataset": Texts(9, 5)} if "lr_scheduler_type" in wrong else {}
    if "lr_scheduler_type" in wrong:
        wrong = {**wrong, "eval_strategy": "steps", "metric_for_best_model": "loss"}
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, more=more, **wrong)


# These need a package or several processes to be made at all; what is asked is their value.
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("fsdp", "full_shard", r"fsdp=.full_shard. was set after the arguments were created"),
        ("deepspeed", {"zero_optimization": {"stage": 2}}, r"deepspeed=.*torchrun"),
        ("parallelism_config", object(), r"parallelism_config=.*spreads an example"),
        ("push_to_hub", True, r"push_to_hub=True: .*save_model\(folder\)"),
        ("use_liger_kernel", True, r"use_liger_kernel=True: .*without per-example gradients"),
    ],
)
def test_a_setting_of_another_backend_is_refused_by_name(tmp_path, name, value, told):
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=told):
        PrivateTrainer(model=bert(), args=args, train_dataset=Texts(), privacy=privacy())


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_what_the_environment_asks_of_accelerate_is_refused(tmp_path, monkeypatch, kind):
    """``accelerate launch --use_fsdp`` says it in the environment, and not in the arguments."""
    found = property(lambda _: accelerate.DistributedType[kind])
    monkeypatch.setattr(accelerate.Accelerator, "distributed_type", found)
    told = f"distributed_type is {kind}.*ACCELERATE_USE_{kind}.*torchrun"
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path)


def test_a_model_that_is_divided_is_refused(tmp_path):
    store = f"file://{tmp_path}/meeting"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"divided by fully_shard.*a loop of your own"):
            trainer(tmp_path, model=fully_shard(bert()))
    finally:
        torch.distributed.destroy_process_group()


class Stream(IterableDataset):
    def __iter__(self):
        yield from Texts()


def test_data_without_rows_are_refused(tmp_path):
    rows = datasets.Dataset.from_dict({"input_ids": [[1]] * 4}).to_iterable_dataset()
    for data in (Stream(), rows):
        with pytest.raises(ValueError, match=r"train_dataset is a .*draws examples by index"):
            trainer(tmp_path, data=data)
    with pytest.raises(ValueError, match="train_dataset= is missing"):
        PrivateTrainer(model=bert(), args=arguments(tmp_path), privacy=privacy())


def test_training_data_are_not_evaluated_on(tmp_path):
    data = Texts()
    with pytest.raises(ValueError, match=r"eval_dataset is train_dataset.*data of other people"):
        trainer(tmp_path, data=data, more={"eval_dataset": data})
    private = trainer(tmp_path, data=data)
    private.evaluate(data)
    assert not any("eval_loss" in entry for entry in private.state.log_history)
    assert any("eval_loss" in entry for entry in private.training_log)


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"delta": 1e-5}, ValueError, r"set epsilon= and delta=.*or noise_multiplier="),
        ({"epsilon": 3}, ValueError, r"delta= is missing"),
        ({"epsilon": 3, "delta": 1e-5, "noise_multiplier": 1}, ValueError, r"both given"),
        ({"epsilon": -1, "delta": 1e-5}, ValueError, r"PrivacyArguments: epsilon=-1"),
        ({"epsilon": 3, "delta": 1e-5, "max_grad_norm": 0}, ValueError, r"max_grad_norm=0"),
        (
            {"epsilon": 3, "delta": 1e-5, "max_grad_norm": 2, "per_example_max_grad_norm": 3},
            ValueError,
            r"names of the same bound",
        ),
        ({"epsilon": 3, "delta": 1e-5, "scheme": 7}, TypeError, r"scheme=7 must be the name"),
        ({"epsilon": 3, "delta": 1e-5, "strategy": "{3"}, ValueError, r"is not valid JSON"),
    ],
)
def test_privacy_arguments_say_what_is_wrong(wrong, kind, told):
    with pytest.raises(kind, match=told):
        PrivacyArguments(**wrong)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"scheme": "Poison"}, r"scheme.type='Poison'.*Poisson"),
        (
            {"scheme": {"type": "MinSep", "min_sep": 2, "batch_size": 4}},
            r"batch_size.*leave it out",
        ),
        ({"scheme": {"type": "MinSep"}}, "min_sep"),
        ({"strategy": "Bands"}, r"strategy.type='Bands'"),
        ({"scheme": {"type": "UserMinSep", "min_sep": 2}}, "needs the users"),
    ],
)
def test_schemes_and_strategies_are_refused_by_name(tmp_path, wrong, told):
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, private=privacy(**wrong))


@pytest.mark.slow
def test_delta_above_one_over_n_is_refused(tmp_path):
    private = trainer(tmp_path, private=privacy(delta=0.1))
    with pytest.raises(ValueError, match=r"target_delta=0\.1"):
        private.train()


@pytest.mark.parametrize("option", [{"mode": "hooks"}, {"views": 2}])
def test_gradients_of_another_kind_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        trainer(tmp_path, more={"gradients": Gradients(**option)})


# Losses


class TokenMean(PrivateTrainer):
    """What the model itself returns: a mean over the tokens of the whole batch."""

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class TokenMeanOutside(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Tagged(Texts):
    """A label for every token, but for the padding."""

    def __getitem__(self, row):
        fields = super().__getitem__(row)
        labels = (self.ids[row] % 3).masked_fill(self.mask[row] == 0, -100)
        return {**fields, "labels": labels}


def tagger():
    return bert(kind=transformers.BertForTokenClassification, num_labels=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TokenMean, TokenMeanOutside])
def test_a_compute_loss_that_mixes_rows_is_refused_before_anything_is_released(tmp_path, kind):
    model = tagger()
    before = flat(model)
    private = trainer(tmp_path, model, Tagged(), of=kind)
    with pytest.raises(
        RuntimeError, match=r"mixes|divides by a number that depends on the whole batch|examples"
    ):
        private.train()
    assert private.private.steps_executed == 0
    assert torch.equal(flat(model), before)


def token_mean(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def contrast(outputs, labels, num_items_in_batch=None):
    scores = outputs.logits.flatten(1)
    return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


@pytest.mark.slow
@pytest.mark.parametrize("loss", [token_mean, contrast])
def test_a_loss_function_that_ties_the_examples_is_refused(tmp_path, loss):
    private = trainer(tmp_path, tagger(), Tagged(), more={"compute_loss_func": loss})
    # A batch, which is drawn in secret, whose first examples have as many labels each tells nothing
    # by its loss; its gradients do.
    together = r"compute_loss_func for . examples together does not give.*Reduce each example"
    with pytest.raises(
        RuntimeError, match=rf"{together}|divides by a number that depends on the whole batch"
    ):
        private.train()
    assert private.private.steps_executed == 0


def test_a_model_without_a_known_head_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"BertForMultipleChoice.*compute_loss_func="):
        trainer(tmp_path, bert(kind=transformers.BertForMultipleChoice))
    with pytest.raises(ValueError, match=r"BertForPreTraining.*reduce_examples"):
        trainer(tmp_path, bert(kind=transformers.BertForPreTraining))
    config = transformers.T5Config(vocab_size=50, d_model=8, d_kv=4, d_ff=8, num_layers=1,
                                   num_heads=2)  # fmt: skip
    with pytest.raises(ValueError, match=r"an encoder-decoder.*compute_loss"):
        trainer(tmp_path, transformers.T5ForConditionalGeneration(config))


# Classes


class OwnLoader(PrivateTrainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset)


class OwnSampler(PrivateTrainer):
    def _get_train_sampler(self, train_dataset=None):
        return None


class SamplerBefore(transformers.Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return None


class WithSampler(PrivateTrainerMixin, SamplerBefore):
    pass


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (OwnLoader, r"OwnLoader overrides get_train_dataloader\(\).*override compute_loss"),
        (OwnSampler, r"OwnSampler._get_train_sampler\(\) draws batches"),
        (WithSampler, r"SamplerBefore._get_train_sampler\(\) draws batches"),
    ],
)
def test_classes_that_go_past_the_run_are_refused(tmp_path, kind, told):
    with pytest.raises(TypeError, match=told):
        trainer(tmp_path, of=kind)


def test_searches_pushes_and_steps_by_hand_are_refused(tmp_path):
    private = trainer(tmp_path)
    with pytest.raises(ValueError, match="trains once per trial"):
        private.hyperparameter_search()
    with pytest.raises(ValueError, match=r"save_model\(folder\)"):
        private.push_to_hub()
    with pytest.raises(RuntimeError, match=r"only be called by train\(\)"):
        private.training_step(private.model, dict(Texts()[0]))
    with pytest.raises(ValueError, match=r"call train\(\) first"):
        private.guarantee()


def test_privacy_has_to_be_stated(tmp_path):
    with pytest.raises(TypeError, match="privacy"):
        PrivateTrainer(model=bert(), args=arguments(tmp_path), train_dataset=Texts())
    with pytest.raises(TypeError, match=r"privacy=8 must be .*PrivacyArguments"):
        trainer(tmp_path, private=8)


@pytest.mark.slow
def test_a_scheme_of_other_data_is_refused(tmp_path):
    scheme = Poisson(probability=0.1, dataset_size=39, steps=6)
    private = trainer(tmp_path, private=privacy(scheme=scheme))
    with pytest.raises(ValueError, match="40 examples but the scheme was made for dataset_size=39"):
        private.train()


def test_padding_on_the_left_to_the_longest_row_is_refused(tmp_path):
    """One row's length would move the absolute positions of all others."""
    left = tokenizer()
    left.padding_side = "left"
    with pytest.raises(ValueError, match=r"padding_side='left'.* = 'right' for training"):
        trainer(tmp_path, more={"processing_class": left})
    same_length = transformers.DataCollatorWithPadding(left, padding="max_length", max_length=12)
    trainer(tmp_path, more={"data_collator": same_length})
    left.padding_side = "right"
    trainer(tmp_path, more={"processing_class": left})


@pytest.mark.parametrize(
    ("users", "told"),
    [
        ([1, "1"], r"users of the types int, str: one person written in two ways"),
        (["", "b"], r"row 0 has an empty text as its user"),
        ([None, None], r"row 0 has a NoneType as its user: must be a text or an integer"),
        ([1.5, 2.0], r"row 0 has a float as its user"),
    ],
)
def test_users_who_cannot_be_told_apart_are_refused(tmp_path, users, told):
    rows = [{"input_ids": [3, 4], "labels": 0, "user": users[k % 2]} for k in range(20)]
    private = privacy(user_column="user", scheme={"type": "UserMinSep", "min_sep": 1})
    with pytest.raises(ValueError, match=told):
        trainer(tmp_path, data=Listed(rows), private=private)


def test_users_come_in_other_formats_too(tmp_path):
    """Arrays and tensors of numbers are the numbers in them."""
    plain = [[k % 5] for k in range(20)]
    for form in (lambda u: u[0], torch.tensor, np.array, lambda u: np.int64(u[0])):
        rows = [{"input_ids": [3, 4], "labels": 0, "user": form(users)} for users in plain]
        assert graph_of(Listed(rows), "user").users == 5


class Listed(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return self.rows[row]


def test_a_part_of_the_training_data_is_no_evaluation_data(tmp_path):
    data = Texts()
    for evaluated in (torch.utils.data.Subset(data, range(5)), {"a": Texts(9, 5), "b": data}):
        with pytest.raises(ValueError, match="eval_dataset is train_dataset, or contains it"):
            trainer(tmp_path, data=data, more={"eval_dataset": evaluated})


def test_sizes_that_change_after_the_plan_are_refused(tmp_path):
    made = trainer(tmp_path)
    made.args.max_steps = 12
    with pytest.raises(ValueError, match=r"max_steps was 6 .* now it is 12: create a new trainer"):
        made.train()


def test_a_batch_that_cannot_be_drawn_names_the_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"per_device_train_batch_size × .* = 128 of 40 rows"):
        trainer(tmp_path, per_device_train_batch_size=64)
    with pytest.raises(ValueError, match="train_dataset is empty"):
        trainer(tmp_path, data=Listed([]))
    trainer(tmp_path, max_grad_norm=None)
