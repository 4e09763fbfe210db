"""Fine-tune a decoder's LoRA adapters with differential privacy for the users of the texts.

Without ``--model`` a tiny GPT-2 is trained on made-up notes, several by each author::

    python examples/lora_decoder.py --output out --epsilon 8 --delta 1e-3
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import datasets
import peft
import tokenizers
import transformers

from dptrain.integrations.transformers import PrivacyArguments, PrivateTrainer

WORDS = [f"word{number}" for number in range(30)]


def notes(rows: int, seed: int) -> datasets.Dataset:
    """Made-up notes in which every word is followed by the next one of the list, mostly."""
    draw = random.Random(seed)
    made = []
    for row in range(rows):
        place, words = draw.randrange(len(WORDS)), []
        for _ in range(draw.randint(5, 12)):
            words.append(WORDS[place])
            place = (place + (1 if draw.random() < 0.9 else 7)) % len(WORDS)
        made.append({"text": " ".join(words), "author": f"author {row // 2}"})
    return datasets.Dataset.from_list(made)


def tiny() -> tuple[Any, Any]:
    """A tokenizer of the words above, and a GPT-2 of two small layers."""
    numbers = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]"
    )
    config = transformers.GPT2Config(
        vocab_size=len(numbers),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=32,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return tokenizer, transformers.GPT2LMHeadModel(config)


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train, evaluate, and write the adapters for release; the metrics of the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="of the hub or a folder; a tiny one by default")
    parser.add_argument("--output", default="out")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)
    transformers.set_seed(0)
    if options.model is None:
        tokenizer, model = tiny()
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    model = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    )

    def read(rows: int, seed: int) -> datasets.Dataset:
        texts = notes(rows, seed)
        return texts.map(lambda row: tokenizer(row["text"], truncation=True, max_length=32))

    trainer = PrivateTrainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=f"{options.output}/run",
            max_steps=options.steps,
            per_device_train_batch_size=10,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        train_dataset=read(options.rows, 1),
        eval_dataset=read(50, 2),
        processing_class=tokenizer,
        privacy=PrivacyArguments(
            epsilon=options.epsilon,
            delta=options.delta,
            user_column="author",
            scheme={"type": "UserMinSep", "min_sep": 1},
        ),
    )
    trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model(f"{options.output}/published")
    print(trainer.guarantee())
    return metrics


if __name__ == "__main__":
    main()
