"""Fine-tune a classifier of texts with differential privacy, by the Trainer of Hugging Face.

Without ``--model`` a tiny BERT is trained on made-up reviews, which takes seconds::

    python examples/bert_classification.py --output out --epsilon 8 --delta 1e-4
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import datasets
import tokenizers
import transformers

from dptrain.integrations.transformers import PrivacyArguments, PrivateTrainer

GOOD, BAD = ("lovely", "bright", "kind", "warm"), ("dull", "cold", "rude", "slow")
OTHER = ("the", "room", "was", "and", "people", "food", "very", "rather", "we", "found")


def reviews(rows: int, seed: int) -> datasets.Dataset:
    """Made-up reviews with a label: 1 if the words of praise outnumber the others."""
    draw = random.Random(seed)
    made = []
    for _ in range(rows):
        label = draw.randrange(2)
        words = draw.choices(OTHER, k=draw.randint(4, 10)) + draw.choices((BAD, GOOD)[label], k=3)
        draw.shuffle(words)
        made.append({"text": " ".join(words), "label": label})
    return datasets.Dataset.from_list(made)


def tiny() -> tuple[Any, Any]:
    """A tokenizer of the words above, and a BERT of two small layers."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    numbers = {word: number for number, word in enumerate(words)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        pad_token_id=0,
        num_labels=2,
    )
    return tokenizer, transformers.BertForSequenceClassification(config)


def accuracy(found: Any) -> dict[str, float]:
    """The share of texts whose label is right."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, and write what may be published; the metrics of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="of the hub or a folder; a tiny one by default")
    parser.add_argument("--output", default="out")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--epochs", type=float, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    options = parser.parse_args(words)
    transformers.set_seed(0)
    if options.model is None:
        tokenizer, model = tiny()
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            options.model, num_labels=2
        )

    def read(rows: int, seed: int) -> datasets.Dataset:
        texts = reviews(rows, seed)
        return texts.map(lambda row: tokenizer(row["text"], return_token_type_ids=False))

    trainer = PrivateTrainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=f"{options.output}/run",
            num_train_epochs=options.epochs,
            per_device_train_batch_size=50,
            gradient_accumulation_steps=4,
            learning_rate=options.learning_rate,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=read(options.rows, 1),
        eval_dataset=read(300, 2),
        processing_class=tokenizer,
        compute_metrics=accuracy,
        privacy=PrivacyArguments(epsilon=options.epsilon, delta=options.delta),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(f"{options.output}/published")
    print(trainer.guarantee())
    return metrics


if __name__ == "__main__":
    main()
