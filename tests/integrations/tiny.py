"""Tiny models, made-up texts, and private trainers of them."""

from __future__ import annotations

import datasets
import tokenizers
import torch
import transformers
from torch.utils.data import Dataset

from dptrain.integrations.transformers import PrivacyArguments, PrivateTrainer

VOCABULARY, LENGTH = 50, 12
WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(40))]


class Texts(Dataset):
    """Texts of some tokens, with a label each that follows from the first; 1 is padding."""

    def __init__(self, rows=40, seed=1):
        draws = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=draws)
        lengths = torch.randint(5, LENGTH + 1, (rows, 1), generator=draws)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.ids[self.mask == 0] = 1

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        label = (self.ids[row, 0] > VOCABULARY // 2).long()
        return {"input_ids": self.ids[row], "attention_mask": self.mask[row], "labels": label}


def bert(dropout=0.0, kind=transformers.BertForSequenceClassification, **config):
    torch.manual_seed(0)
    settings = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        pad_token_id=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **config,
    )
    return kind(settings)


def llama():
    torch.manual_seed(0)
    settings = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return transformers.LlamaForCausalLM(settings)


def tokenizer():
    model = tokenizers.models.WordLevel(
        {word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"
    )
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sentences(rows=24, seed=2, authors=8):
    """Prompts with completions of other lengths, by authors with three examples each."""
    draws = torch.Generator().manual_seed(seed)

    def words(count):
        return " ".join(f"w{int(k)}" for k in torch.randint(0, 40, (count,), generator=draws))

    return datasets.Dataset.from_list(
        [
            {
                "prompt": words(3 + row % 4),
                "completion": " " + words(2 + row % 5),
                "author": f"author {row % authors}",
            }
            for row in range(rows)
        ]
    )


def arguments(folder, kind=transformers.TrainingArguments, **more):
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,  # TRL's default is True
        **more,
    }
    return kind(**settings)


def privacy(**more):
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, **more}
    if settings.get("epsilon") is not None:
        settings.pop("noise_multiplier")
    return PrivacyArguments(**settings)


def trainer(folder, model=None, data=None, *, private=None, of=PrivateTrainer, more=None, **args):
    """A private trainer of a tiny BERT; ``args`` are training arguments, ``more`` the trainer's."""
    return of(
        model=bert() if model is None else model,
        args=arguments(folder, **args),
        train_dataset=Texts() if data is None else data,
        privacy=privacy() if private is None else private,
        **(more or {}),
    )


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
