"""Names that MATLAB, Keras, Lightning and Hugging Face have for our options. Runs anywhere.

Who gives one of them is answered with ours; names that are nearly ours need no entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

NAMES = {
    "learning_rate": "lr",
    "InitialLearnRate": "lr",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_epochs": "epochs",
    "MaxIterations": "max_steps",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "MiniBatchSize": "batch_size",
    "weight_decay_rate": "weight_decay",
    "L2Regularization": "weight_decay",
    "lr_scheduler": "schedule",
    "scheduler": "schedule",
    "LearnRateSchedule": "schedule",
    "warmup_steps": "warmup",
    "gradient_accumulation_steps": "accumulate",
    "max_grad_norm": "clip",
    "GradientThreshold": "clip",
    "fp16": "precision",
    "bf16": "precision",
    "amp": "precision",
    "num_workers": "workers",
    "early_stopping": "patience",
    "ValidationPatience": "patience",
    "ValidationFrequency": "validate_every",
    "output_dir": "checkpoint",
    "collate_fn": "collate",
}


def meant(name: str, known: Sequence[str], others: Mapping[str, str]) -> str:
    """The one of `known` that somebody means by another name; "" if none is near."""
    plain = {_plain(one): one for one in known}
    named = {_plain(other): ours for other, ours in others.items() if ours in known}
    key = _plain(name)
    near = difflib.get_close_matches(key, plain, 1)
    return plain.get(key) or named.get(key) or (plain[near[0]] if near else "")


def _plain(name: str) -> str:
    """`NumEpochs` and `num_epochs` are one name."""
    return name.replace("_", "").replace("-", "").lower()
