"""A loss that the network gives, as those of Hugging Face do; over how much a loss is a mean.

Runs on engines; knows only torch, and of Hugging Face's networks what their attributes show.
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

NO_CLASS = -100  # of torch's cross_entropy
Counts = Callable[[Any, int], int | Tensor]


def given_loss(outputs: Any, batch: Any) -> Tensor:
    """A number; what is called "loss"; of several numbers by name, as detection has, their sum."""
    is_named, parts = isinstance(outputs, Mapping), [outputs]
    if has_part(outputs, "loss"):
        parts = [part_of(outputs, "loss").mean()]
    elif isinstance(outputs, (Mapping, tuple)):
        parts = list(outputs.values() if isinstance(outputs, Mapping) else outputs)
    numbers = [part for part in parts if isinstance(part, Tensor) and not part.ndim]
    # Of a tuple, (loss, logits) or (logits, loss), it is the first part, or the only number.
    if numbers and (len(numbers) == len(parts) if is_named else numbers[0] is parts[0]):
        return torch.stack(numbers).sum() if is_named else numbers[0]
    if len(numbers) == 1 and not is_named:
        return numbers[0]
    names = f" of {', '.join(map(repr, outputs))}" if is_named else ""
    raise TrainingError(
        f"the network gave no loss, only a {type(outputs).__name__}{names}: networks of Hugging "
        "Face do if the batch has labels (for a language model, collate=transformers."
        "DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them). Or give a loss: "
        "train(model, data, loss)."
    )


def scores_and_labels(outputs: Any, batch: Any, *, shifts: bool) -> tuple[Any, Any]:
    """Scores of classes and labels; `shifts`: each token is to predict the next one."""
    scores, labels = main_output(outputs), label_of(batch)
    are_tokens = isinstance(scores, Tensor) and isinstance(labels, Tensor) and scores.ndim == 3
    if are_tokens and labels.shape == scores.shape[:2]:
        scores = scores.movedim(-1, 1)
        return (scores[:, :, :-1], labels[:, 1:]) if shifts else (scores, labels)
    return scores, labels


def samples(targets: Any, num_here: int) -> int:
    """Counts the samples that are here."""
    return num_here


def counter(weight: Any, shifts: bool) -> Counts:
    """What `TrainingOptions.weight` counts; None: labels of tokens where there are, else samples.

    `shifts`: the loss leaves the first label of each sample out.
    """
    if callable(weight):
        return partial(_counted_by, weight)
    return samples if weight == "samples" else partial(_tokens, weight == "tokens", shifts)


def predicts_next(model: nn.Module | None) -> bool:
    """Whether a network of Hugging Face is a causal language model: its loss shifts the labels."""
    inner = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    is_named_so = type(model).__name__.endswith(("LMHeadModel", "ForCausalLM"))
    return getattr(model, "loss_type", None) == "ForCausalLM" or (
        hasattr(model, "loss_type") and is_named_so
    )


def _counted_by(function: Callable[[Any], Any], targets: Any, num_here: int) -> Tensor:
    number, first = function(targets), first_tensor(targets)
    place = number if isinstance(number, Tensor) else first
    found = torch.as_tensor(number, dtype=torch.float64, device=getattr(place, "device", None))
    if found.ndim:
        raise TrainingError(
            f"weight= gave shape {tuple(found.shape)}: it must give one number, over how much the "
            "loss of this batch is a mean."
        )
    return found


def _tokens(must_be: bool, shifts: bool, targets: Any, num_here: int) -> int | Tensor:
    """Labels that count, of a batch or of labels alone; samples, where there is one for each."""
    labels = targets if isinstance(targets, Tensor) and must_be else label_of(targets)
    is_tensor = isinstance(labels, Tensor)
    if is_tensor and (must_be or (labels.ndim == 2 and not labels.is_floating_point())):
        return (labels[:, 1:] if shifts else labels).ne(NO_CLASS).sum(dtype=torch.float64)
    if must_be:
        raise TrainingError(
            "weight='tokens' counts labels that are not -100, and the batch has no tensor of "
            "labels: give a function that counts, weight=lambda batch: ..."
        )
    return num_here
