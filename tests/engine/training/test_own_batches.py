"""Batches as users make them: any structure and length, on any ranks what one computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gpupool
from gpupool import SpmdError
from tests.engine.training.vectors import DOUBLE, by_hand
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on, weights

WORDS = 11
SETTINGS: dict[str, Any] = {"batch_size": 8, "epochs": 2, "lr": 0.1, "shuffle": "never"}


def sentence(index: int) -> dict[str, Tensor]:
    """2 to 8 words, as a row of a data set of Hugging Face."""
    generator = torch.Generator().manual_seed(index)
    length = int(torch.randint(2, 9, (), generator=generator))
    words = torch.randint(1, WORDS, (length,), generator=generator)
    return {"words": words, "labels": words.roll(-1)}


TEXT = list(map(sentence, range(21)))


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch as long as its longest sentence; what is padded has no label."""
    words = nn.utils.rnn.pad_sequence([row["words"] for row in rows], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([row["labels"] for row in rows], True, padding_value=-100)
    return {"words": words, "mask": words > 0, "labels": labels}


class Reader(nn.Module):
    """Scores (samples, words, classes); what is padded has a part in nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8, dtype=DOUBLE)
        self.head = nn.Linear(8, WORDS, dtype=DOUBLE)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        found = self.embed(words) * mask.unsqueeze(-1)
        mean = found.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head(torch.tanh(found + mean))


def of_batch(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def plain() -> Tensor:
    model = Reader()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        return of_batch(model(batch["words"], batch["mask"]), batch)

    return by_hand(model, TEXT, padded, loss, SETTINGS)


def count(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] >= 0).sum()


@pytest.mark.parametrize("more", [{"weight": count}, {"weight": "tokens", "accumulate": 3}])
def test_a_loss_of_outputs_and_batch_counts_tokens_on_any_ranks(
    pools: Pools, more: dict[str, Any]
) -> None:
    settings = {"loss": of_batch, "collate": padded, **SETTINGS, **more}
    for n in (1, 3):
        trained = train_on(pools[n], Reader(), TEXT, **settings)
        assert (weights(trained.model) - plain()).abs().max() < 1e-12


def test_a_named_loss_of_tokens_is_that_of_torch_and_has_an_accuracy(pools: Pools) -> None:
    """Outputs are (samples, words, classes), torch's loss wants (samples, classes, words)."""
    asked = {"validation": TEXT[:9], "metrics": ["perplexity", "token_accuracy"], "keep": "last"}
    result = train_on(pools[2], Reader(), TEXT, collate=padded, **asked, **SETTINGS)
    assert (weights(result.model) - plain()).abs().max() < 1e-12
    batch = padded(TEXT[:9])
    with torch.no_grad():
        outputs = result.model(batch["words"], batch["mask"])
    last, counts = result.history.validations[-1], batch["labels"] >= 0
    right = (outputs.argmax(-1) == batch["labels"])[counts].double().mean().item()
    assert last.accuracy == pytest.approx(right, abs=1e-12)
    assert last.metrics["token_accuracy"] == pytest.approx(right, abs=1e-12)
    assert last.loss == pytest.approx(of_batch(outputs, batch).item(), abs=1e-12)
    assert last.metrics["perplexity"] == pytest.approx(torch.tensor(last.loss).exp().item())


# ---- a loss over pairs of the batch ------------------------------------------------------------


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(4, 5, dtype=DOUBLE), nn.Linear(4, 5, dtype=DOUBLE)
        self.temperature = nn.Parameter(torch.tensor(0.7, dtype=DOUBLE))

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Tensor]:
        return {"a": self.one(left), "b": self.other(right), "temperature": self.temperature}


def contrastive(outputs: dict[str, Tensor], targets: Any) -> Tensor:
    a, b = (functional.normalize(outputs[name], dim=1) for name in "ab")
    scores = a @ b.T / outputs["temperature"].exp()
    return functional.cross_entropy(scores, torch.arange(len(a)))


class Sentences(Reader):
    """One vector for each sentence, and the same of its words backwards."""

    def forward(self, words: Tensor, mask: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        scores = super().forward(words, mask) * mask.unsqueeze(-1)
        places = torch.arange(1, words.shape[1] + 1, dtype=DOUBLE)[:, None]
        return {"a": scores.sum(1), "b": (scores / places).sum(1), "temperature": torch.zeros(())}


def test_what_differs_in_more_than_the_number_of_samples_cannot_be_gathered(pools: Pools) -> None:
    settings = {"loss": of_batch, "collate": padded, "gather": True}
    with raises(SpmdError, "gather", ename="TrainingError"):
        train_on(pools[2], Reader(), TEXT, **SETTINGS | settings)
    assert pools[2].run(lambda: 1)[1] == 1


def mixed(rows: list[Any], training: bool = True) -> Any:
    """As MixUp does, but for what is only measured."""
    inputs, kinds = torch.utils.data.default_collate(rows)
    if not training:
        return inputs, kinds
    soft = functional.one_hot(kinds, 3).to(DOUBLE)
    return (inputs + inputs.flip(0)) / 2, (soft + soft.flip(0)) / 2


def test_a_collate_that_mixes_leaves_the_validation_alone(pools: Pools) -> None:
    data, held = samples(64, DOUBLE), samples(32, DOUBLE, seed=1)
    settings = {"collate": mixed, "validation": held, "epochs": 1, "keep": "last", "batch_size": 16}
    result = train_on(pools[2], network(DOUBLE), data, **settings)
    measured = gpupool.evaluate(
        result.model, held, ["accuracy"], loss="cross_entropy", pool=pools[2]
    )
    last = result.history.validations[-1]
    assert last.loss == pytest.approx(measured["loss"], abs=1e-12)
    assert last.accuracy == measured["accuracy"]
    assert result.history.steps[0].accuracy is None  # of mixtures


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8, dtype=DOUBLE), network(DOUBLE)

    def forward(self, inputs: Tensor) -> Any:
        return checkpoint(self.last, self.first(inputs), use_reentrant=True)


class Graphs:
    """A batch that is one object, which goes to the device by its own method."""

    def __init__(self, nodes: Tensor, places: Tensor, labels: Tensor) -> None:
        self.nodes, self.places, self.labels = nodes, places, labels

    def to(self, device: torch.device) -> Graphs:
        return Graphs(*(part.to(device) for part in (self.nodes, self.places, self.labels)))


def as_graphs(rows: list[Any]) -> Graphs:
    sizes = torch.tensor([len(row["words"]) for row in rows])
    nodes = torch.cat([row["words"] for row in rows])
    labels = torch.stack([row["words"][0] for row in rows])
    return Graphs(nodes, torch.arange(len(rows)).repeat_interleave(sizes), labels)


class Sum(nn.Embedding):
    def forward(self, graphs: Graphs) -> Tensor:
        out = torch.zeros(len(graphs.labels), WORDS, dtype=DOUBLE)
        return out.index_add(0, graphs.places, super().forward(graphs.nodes))


def of_graphs(outputs: Tensor, batch: Graphs) -> Tensor:
    return functional.cross_entropy(outputs, batch.labels)


class Scored(nn.Module):
    """Gives (scores, loss), and without targets no loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network(DOUBLE)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Any:
        scores = self.inner(inputs)
        return scores, None if targets is None else functional.cross_entropy(scores, targets)


POINTS = samples(21, DOUBLE).tensors[0]
PAIRS = [(x[:4], x[4:]) for x in POINTS]
GATHERED = {"loss": contrastive, "gather": True}


@pytest.mark.parametrize(
    ("model", "data", "settings"),
    [
        (nn.Linear(8, 8, dtype=DOUBLE), list(POINTS), {"loss": "mse"}),  # as of an autoencoder
        (Sum(WORDS, WORDS, dtype=DOUBLE), TEXT, {"loss": of_graphs, "collate": as_graphs}),
        (Pairs(), PAIRS, {"validation": PAIRS, "inputs": (0, 1), "targets": "batch", **GATHERED}),
        # ranks have padded to other lengths, at which the loss does not look
        (Sentences(), TEXT, {"collate": padded, **GATHERED}),
        (Scored(), samples(21, DOUBLE), {"loss": "output"}),
        (Marked(), samples(21, DOUBLE), {}),  # what is computed again is no unused part
    ],
)
def test_any_number_of_ranks_gives_what_one_does(
    pools: Pools, model: nn.Module, data: Any, settings: dict[str, Any]
) -> None:
    results = [train_on(pool, model, data, **SETTINGS | settings) for pool in pools.values()]
    for result in results[1:]:
        assert result.history.loss == pytest.approx(results[0].history.loss, abs=1e-12)
        validated = [[v.loss for v in one.history.validations] for one in (result, results[0])]
        assert validated[0] == pytest.approx(validated[1], abs=1e-12)
        assert (weights(result.model) - weights(results[0].model)).abs().max() < 1e-12
