"""As the course of Hugging Face trains a model, with one made from a small configuration."""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class FailsOnRankOne(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 1 and state.global_step == 3:
            raise ValueError("a bad batch")


def main(*callbacks):
    set_seed(1)
    config = BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    model = BertForSequenceClassification(config)
    words = torch.randint(0, 32, (64, 8))
    train_dataset = [{"input_ids": row, "labels": row[0] % 2} for row in words]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            num_train_epochs=3,
            learning_rate=1e-2,
            logging_steps=8,
            report_to="none",
        )
        trainer = Trainer(
            model=model, args=args, train_dataset=train_dataset, callbacks=list(callbacks)
        )
        trainer.train()
    return model, (type(trainer.model_wrapped).__name__, args.world_size, trainer.state.global_step)
