"""Losses of the heads example by example; adapters of peft, TRL's SFTTrainer, users, collators."""

from __future__ import annotations

import datasets
import pytest
import torch
import transformers
from torch import nn

from dptrain import UserMinSep
from dptrain.integrations.transformers import PrivateTrainer, PrivateTrainerMixin
from tests.integrations.tiny import (
    Texts,
    arguments,
    bert,
    flat,
    llama,
    privacy,
    sentences,
    tokenizer,
    trainer,
)
from tests.integrations.transformers.test_refusals import Tagged, tagger

pytest.importorskip("accelerate")

R = 0.05  # below the norm of some examples' gradients and above that of others


def one_full_step(folder, model, data, *, of=PrivateTrainer, norm=R, more=None, **args):
    """What a step without noise, of all examples at a learning rate of 1, takes off the weights."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = torch.cat([p.detach().flatten().clone() for p in parameters])
    private = trainer(
        folder,
        model,
        data,
        of=of,
        private=privacy(noise_multiplier=0.0, max_grad_norm=norm),
        more={"optimizers": (torch.optim.SGD(parameters, lr=1.0), None), **(more or {})},
        max_steps=1,
        per_device_train_batch_size=len(data),
        gradient_accumulation_steps=1,
        lr_scheduler_type="constant",
        **args,
    )
    private.train()
    return before - torch.cat([p.detach().flatten() for p in parameters])


def one_at_a_time(model, losses, norm=R):
    """The mean of clipped gradients, from one example after another by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    total, shortened, count = 0.0, 0, 0
    for loss in losses:
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
        shortened += bool(gradient.norm() > norm)
        total = total + gradient * min(1.0, norm / float(gradient.norm()))
        count += 1
    assert shortened
    return total / count


def rows_of(data):
    for row in range(len(data)):
        yield {name: value[None] for name, value in data[row].items()}


class Scored(Texts):
    def __getitem__(self, row):
        return {**super().__getitem__(row), "labels": self.ids[row, :1].float() / 50}


class Several(Texts):
    def __getitem__(self, row):
        return {**super().__getitem__(row), "labels": (self.ids[row, :3] > 25).float()}


class Copied(Texts):
    """The texts themselves are the targets, but for the padding."""

    def __getitem__(self, row):
        fields = super().__getitem__(row)
        return {**fields, "labels": self.ids[row].masked_fill(self.mask[row] == 0, -100)}


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, pad_token_id=1,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "data"),
    [
        (bert, Texts),
        (lambda: bert(num_labels=1), Scored),
        (lambda: bert(num_labels=3), Several),
        (tagger, Tagged),
        (lambda: bert(kind=transformers.BertForMaskedLM), Copied),
        (gpt2, Copied),
    ],
    ids=["classes", "regression", "several labels", "tagging", "masked", "causal"],
)
def test_the_step_is_made_of_the_models_own_loss_of_one_example_at_a_time(tmp_path, make, data):
    """The model's loss is right for a batch of one: that is the reference."""
    model, examples = make(), data(16)
    expected = one_at_a_time(model, (model(**row).loss for row in rows_of(examples)))
    found = one_full_step(tmp_path, make(), examples)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_label_smoothing_is_that_of_the_trainer_for_every_example(tmp_path):
    smoother = transformers.trainer_pt_utils.LabelSmoother(epsilon=0.2)
    model = tagger()
    losses = (smoother(model(**row), row["labels"]) for row in rows_of(Tagged(16)))
    expected = one_at_a_time(model, losses)
    found = one_full_step(tmp_path, tagger(), Tagged(16), label_smoothing_factor=0.2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def per_row(outputs, labels, num_items_in_batch=None):
    losses = nn.functional.cross_entropy(
        outputs.logits.transpose(1, 2), labels, reduction="none", ignore_index=-100
    )
    return losses.sum(1).mean()


class OwnLoss(transformers.Trainer):
    """A trainer of a user's, whose loss stays his."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = per_row(outputs, labels)
        return (loss, outputs) if return_outputs else loss


class PrivateOwnLoss(PrivateTrainerMixin, OwnLoss):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["function", "class before"])
def test_a_loss_of_the_users_that_keeps_the_examples_apart_is_taken(tmp_path, how):
    model = tagger()
    losses = (per_row(model(**row), row["labels"]) for row in rows_of(Tagged(16)))
    expected = one_at_a_time(model, losses, norm=1.0)
    of, more = (PrivateTrainer, {"compute_loss_func": per_row})
    if how == "class before":
        of, more = PrivateOwnLoss, {}
    found = one_full_step(tmp_path, tagger(), Tagged(16), of=of, more=more, norm=1.0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


# datasets.Dataset, collators


def tokenized(rows=20):
    """Lists of tokens of several lengths, with columns that the model does not take."""
    texts = Texts(rows)
    lists = [texts.ids[k, : int(texts.mask[k].sum())].tolist() for k in range(rows)]
    labels = [int(texts[k]["labels"]) for k in range(rows)]
    return datasets.Dataset.from_dict(
        {"input_ids": lists, "labels": labels, "text": ["a text"] * rows,
         "author": [f"author {k // 2}" for k in range(rows)]}
    )  # fmt: skip


def padding():
    words = tokenizer()
    words.pad_token = "<eos>"  # number 1, as the model's
    return words


@pytest.mark.slow
@pytest.mark.parametrize("as_processing_class", [True, False])
def test_padding_collators_and_unused_columns(tmp_path, as_processing_class):
    words = padding()
    more = {"processing_class": words}
    if not as_processing_class:
        more = {"data_collator": transformers.DataCollatorWithPadding(words)}
    model = bert()
    private = trainer(tmp_path, model, tokenized(), more=more, max_steps=4)
    private.train()
    assert private.private.steps_executed == 4
    private.save_model(str(tmp_path / "published"))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "published")
    assert again.pad_token == "<eos>"


@pytest.mark.slow
def test_random_masks_come_out_the_same_when_a_run_goes_on(tmp_path):
    words = padding()
    words.mask_token = "<unk>"

    def masked(**args):
        data = tokenized().remove_columns(["labels", "text", "author"])
        more = {"data_collator": transformers.DataCollatorForLanguageModeling(words)}
        model = bert(0.1, kind=transformers.BertForMaskedLM)
        return trainer(tmp_path, model, data, private=privacy(noise_seed=3), more=more,
                       save_strategy="steps", save_steps=2, **args)  # fmt: skip

    whole = masked()
    whole.train()
    goes_on = masked()
    goes_on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(flat(whole.model), flat(goes_on.model))


@pytest.mark.slow
def test_a_transform_of_a_data_set_sees_one_row_at_a_time(tmp_path):
    seen = []

    def transform(rows):
        seen.append(len(rows["input_ids"]))
        return {**rows, "input_ids": [torch.tensor(ids[:5]) for ids in rows["input_ids"]]}

    data = tokenized().remove_columns(["text", "author"]).with_transform(transform)
    private = trainer(tmp_path, bert(), data, max_steps=3)
    private.train()
    assert set(seen) == {1}


# Users


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True])
def test_a_column_says_who_is_protected(tmp_path, several):
    data = tokenized()
    if several:
        lists = [[f"author {k // 2}", "both"] if k < 2 else [f"author {k // 2}"] for k in range(20)]
        data = data.remove_columns("author").add_column("author", lists)
    asked = privacy(user_column="author", scheme={"type": "UserMinSep", "min_sep": 2},
                    strategy={"type": "BandMF", "bands": 2})  # fmt: skip
    private = trainer(tmp_path, bert(), data, private=asked, more={"processing_class": padding()},
                      per_device_train_batch_size=2, gradient_accumulation_steps=1,
                      remove_unused_columns=True)  # fmt: skip
    private.train()
    scheme = private.private.mechanism.scheme
    assert isinstance(scheme, UserMinSep)
    assert scheme.graph.users == 10 + several
    assert scheme.graph.examples == 20
    assert private.guarantee().unit.kind == "user"


@pytest.mark.slow
def test_the_column_does_not_reach_the_collator(tmp_path):
    data = tokenized().remove_columns("text")
    asked = privacy(user_column="author", scheme={"type": "UserMinSep", "min_sep": 2})
    for rows in (data, [data[k] for k in range(20)]):
        private = trainer(tmp_path, bert(), rows, private=asked, max_steps=2,
                          more={"processing_class": padding()}, remove_unused_columns=False,
                          per_device_train_batch_size=2, gradient_accumulation_steps=1)  # fmt: skip
        private.train()
        assert private.private.steps_executed == 2


def test_users_are_not_protected_by_a_scheme_of_examples(tmp_path):
    with pytest.raises(ValueError, match="would protect single examples"):
        trainer(tmp_path, bert(), tokenized(), private=privacy(user_column="author"))
    with pytest.raises(ValueError, match="user_column='writer': must be one of the columns"):
        trainer(tmp_path, bert(), tokenized(), private=privacy(user_column="writer"))


# peft and TRL

peft = pytest.importorskip("peft")


def lora():
    return peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])


def adapted():
    model = gpt2()
    torch.manual_seed(1)
    model = peft.get_peft_model(model, lora())
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)  # or the gradients of the other factor are all 0
    return model


@pytest.mark.slow
def test_adapters_are_trained_alone(tmp_path):
    model = adapted()
    expected = one_at_a_time(model, (model(**row).loss for row in rows_of(Copied(16))))
    found = one_full_step(tmp_path, adapted(), Copied(16))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_adapters_are_saved_and_go_on(tmp_path):
    def made():
        return trainer(tmp_path, adapted(), Copied(20), private=privacy(noise_seed=3),
                       save_strategy="steps", save_steps=4)  # fmt: skip

    whole = made()
    whole.train()
    goes_on = made()
    goes_on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(flat(whole.model), flat(goes_on.model))
    whole.save_model(str(tmp_path / "published"))
    again = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "published")
    assert torch.equal(flat(again), flat(whole.model))
    names = {path.name for path in (tmp_path / "published").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors", "README.md",
                     "privacy_report.json", "privacy_report.md"}  # fmt: skip


trl = pytest.importorskip("trl")


class PrivateSFTTrainer(PrivateTrainerMixin, trl.SFTTrainer):
    pass


def sft(folder, *, data=None, private=None, more=None, **args):
    return PrivateSFTTrainer(
        model=llama(),
        args=arguments(folder, kind=trl.SFTConfig, max_length=32, **args),
        train_dataset=sentences() if data is None else data,
        processing_class=tokenizer(),
        privacy=private or privacy(),
        **(more or {}),
    )


@pytest.mark.slow
def test_completions_alone_are_learned_example_by_example(tmp_path):
    """The reference is the model's loss of one example, its prompt masked, by plain autograd."""
    data, model, words = sentences(), llama(), tokenizer()

    def losses():
        for row in data:
            prompt = words(row["prompt"])["input_ids"]
            whole = [*prompt, *words(row["completion"])["input_ids"], words.eos_token_id]
            labels = [-100] * len(prompt) + whole[len(prompt) :]
            yield model(torch.tensor([whole]), labels=torch.tensor([labels])).loss

    expected = one_at_a_time(model, losses(), norm=0.5)
    private = sft(tmp_path, private=privacy(noise_multiplier=0.0, max_grad_norm=0.5), max_steps=1,
                  per_device_train_batch_size=24, gradient_accumulation_steps=1,
                  lr_scheduler_type="constant", learning_rate=1.0, optim="sgd")  # fmt: skip
    before = flat(private.model).clone()
    private.train()
    torch.testing.assert_close(before - flat(private.model), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"peft_config": None}])
def test_sft_runs_the_plan_and_goes_on(tmp_path, more):
    if "peft_config" in more:
        more = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=2,
                                               target_modules=["q_proj", "v_proj"])}  # fmt: skip

    def made():
        torch.manual_seed(0)
        return sft(tmp_path, private=privacy(noise_seed=3), save_strategy="steps", save_steps=4,
                   more={**more, "eval_dataset": sentences(6, 9)})  # fmt: skip

    whole = made()
    whole.train()
    assert whole.private.steps_executed == 6
    figures = whole.evaluate()
    assert {"eval_loss", "eval_mean_token_accuracy"} <= set(figures)
    goes_on = made()
    goes_on.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(flat(whole.model), flat(goes_on.model))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"packing": True}, r"packing=True: it packs several examples.*set packing=False"),
        ({"padding_free": True}, r"padding_free=True: it joins.*set padding_free=False"),
        ({"loss_type": "dft"}, r"loss_type='dft': .*set loss_type='nll'"),
        ({"activation_offloading": True}, r"activation_offloading=True: "),
    ],
)
def test_what_of_sft_joins_examples_is_refused(tmp_path, wrong, told):
    with pytest.raises(ValueError, match=told):
        sft(tmp_path, **wrong)


def test_other_trainers_of_trl_are_refused(tmp_path):
    class PrivateDPOTrainer(PrivateTrainerMixin, trl.DPOTrainer):
        pass

    rows = {"prompt": ["w1"] * 8, "chosen": [" w2"] * 8, "rejected": [" w3"] * 8}
    with pytest.raises(TypeError, match=r"DPOTrainer of TRL.*SFTTrainer is supported"):
        PrivateDPOTrainer(
            model=llama(),
            args=arguments(tmp_path),
            train_dataset=datasets.Dataset.from_dict(rows),
            processing_class=tokenizer(),
            privacy=privacy(),
        )


@pytest.mark.slow
def test_users_of_prompts_and_completions(tmp_path):
    asked = privacy(user_column="author", scheme={"type": "UserMinSep", "min_sep": 2})
    private = sft(tmp_path, private=asked, per_device_train_batch_size=2,
                  gradient_accumulation_steps=1)  # fmt: skip
    private.train()
    assert private.private.mechanism.scheme.graph.users == 8
