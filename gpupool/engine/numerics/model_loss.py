"""A loss that the network computes itself, as those of Hugging Face do. Runs on engines.

Knows only torch, and of Hugging Face's networks what their attributes show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gpupool.core.errors import TrainingError
from gpupool.data.reading.trees import first_tensor
from gpupool.engine.batches.form import has_part, label_of, main_output, part_of
from gpupool.engine.numerics.class_loss import NO_CLASS, classes_first

Counts = Callable[[Any, int], int | Tensor]


def given_loss(outputs: Any, batch: Any) -> Tensor:
    """What a network gives as its loss."""
    found = _loss_in(outputs)
    if found is None:
        has = f"{type(outputs).__name__} of {', '.join(map(repr, outputs))}"
        shown = has if isinstance(outputs, Mapping) else f"a {type(outputs).__name__}"
        raise TrainingError(
            f"the network gave no loss, only {shown}: networks of Hugging Face do if the batch has "
            "labels (for a language model, collate=transformers."
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them). Or give a loss: "
            "train(model, data, loss)."
        )
    return found


def scored(outputs: Any, batch: Any, *, shifts: bool) -> tuple[Any, Any]:
    """Scores of classes and labels; `shifts`: each token is to predict the next one."""
    scores, labels = main_output(outputs), label_of(batch)
    if not (isinstance(scores, Tensor) and isinstance(labels, Tensor)):
        return scores, labels
    if scores.ndim == 3 and labels.shape == scores.shape[:2]:  # tokens, of Hugging Face
        scores = scores.movedim(-1, 1)
        return (scores[:, :, :-1], labels[:, 1:]) if shifts else (scores, labels)
    return classes_first(scores, labels), labels


def counter(weight: Any, model: nn.Module | None) -> Counts | None:
    """What `TrainingOptions.weight` counts; None: what the loss counts itself."""
    if weight is None:
        return None
    if weight == "samples":
        return samples
    if weight == "tokens":
        return partial(_tokens, shifts=model is not None and predicts_next(model))
    return partial(_counted_by, weight)


def samples(targets: Any, num_here: int) -> int:
    """Counts the samples that are here."""
    return num_here


def tokens_or_samples(batch: Any, num_here: int, *, shifts: bool) -> int | Tensor:
    """A label for each token: the mean is over these; one for each sample: over samples."""
    labels = label_of(batch)
    is_of_tokens = (
        isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point()
    )
    return _tokens(batch, num_here, shifts=shifts) if is_of_tokens else num_here


def predicts_next(model: nn.Module) -> bool:
    """Whether a network of Hugging Face is a causal language model: its loss shifts the labels."""
    inner = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    name = type(model).__name__
    return getattr(model, "loss_type", None) == "ForCausalLM" or (
        hasattr(model, "loss_type") and name.endswith(("LMHeadModel", "ForCausalLM"))
    )


def _counted_by(function: Callable[[Any], Any], targets: Any, num_here: int) -> Tensor:
    number, first = function(targets), first_tensor(targets)
    place = number if isinstance(number, Tensor) else first
    device = None if place is None else place.device
    found = torch.as_tensor(number, dtype=torch.float64, device=device)
    if found.ndim:
        raise TrainingError(
            f"weight= gave shape {tuple(found.shape)}: it must give one number, over how much the "
            "loss of this batch is a mean."
        )
    return found


def _tokens(targets: Any, num_here: int, *, shifts: bool) -> Tensor:
    """Labels that count, of a batch or of labels alone."""
    labels = targets if isinstance(targets, Tensor) else label_of(targets)
    if not isinstance(labels, Tensor):
        raise TrainingError(
            "weight='tokens' counts labels that are not -100, and the batch has no tensor of "
            "labels: give a function that counts, weight=lambda batch: ..."
        )
    return (labels[:, 1:] if shifts else labels).ne(NO_CLASS).sum(dtype=torch.float64)


def _loss_in(outputs: Any) -> Tensor | None:
    """A number; what is called "loss"; of several numbers by name, as detection has, their sum."""
    if isinstance(outputs, Tensor):
        return outputs if not outputs.ndim else None
    if has_part(outputs, "loss"):
        found = part_of(outputs, "loss")
        return found.mean() if isinstance(found, Tensor) else None
    parts = list(outputs.values()) if isinstance(outputs, Mapping) else []
    if parts and all(isinstance(part, Tensor) and not part.ndim for part in parts):
        return torch.stack(parts).sum()
    if isinstance(outputs, tuple):  # (loss, logits), or (logits, loss)
        numbers = [part for part in outputs if isinstance(part, Tensor) and not part.ndim]
        is_clear = len(numbers) == 1 or (numbers and numbers[0] is outputs[0])
        return numbers[0] if is_clear else None
    return None
