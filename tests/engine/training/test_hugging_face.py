"""Networks and data sets of Hugging Face go into training as they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import gpupool
from gpupool import SpmdError
from tests.engine.training.vectors import by_hand
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import train_on, weights

pytestmark = pytest.mark.long

datasets, peft, transformers = map(pytest.importorskip, ("datasets", "peft", "transformers"))

WORDS = 13
SETTINGS: dict[str, Any] = {"batch_size": 6, "epochs": 2, "lr": 0.05, "shuffle": "never"}


def sentences(num: int = 17) -> datasets.Dataset:
    """Rows as a tokenizer leaves them: lists of several lengths, a label, and the text."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 8, (num,), generator=generator).tolist()
    words = [torch.randint(1, WORDS, (n,), generator=generator).tolist() for n in lengths]
    rows = {
        "text": [" ".join(map(str, one)) for one in words],
        "input_ids": words,
        "attention_mask": [[1] * n for n in lengths],
        "label": [one[0] % 2 for one in words],
    }
    return datasets.Dataset.from_dict(rows)


def padded(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What DataCollatorWithPadding makes, without a tokenizer."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(name: str, by: int) -> Tensor:
        return torch.tensor([row[name] + [by] * (longest - len(row[name])) for row in rows])

    batch = {name: filled(name, 0) for name in ("input_ids", "attention_mask")}
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


def as_text(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What DataCollatorForLanguageModeling makes: the words are the labels."""
    batch = padded(rows)
    labels = batch["input_ids"].where(batch["attention_mask"] > 0, -100)
    return {**batch, "labels": labels}


def classifier() -> transformers.BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(vocab_size=WORDS, intermediate_size=16, **sizes, **dropouts)
    return transformers.BertForSequenceClassification(config).double()


def writer() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **sizes, **dropouts
    )
    return transformers.GPT2LMHeadModel(config).double()


def plain(model: Any, collate: Any) -> Tensor:
    return by_hand(model, sentences(), collate, lambda batch: model(**batch).loss, SETTINGS)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("make", "collate"), [(classifier, padded), (writer, as_text)], ids=["classes", "text"]
)
def test_a_network_trains_by_its_own_loss(
    pools: Pools, make: Any, collate: Any, size: int, tmp_path: Any
) -> None:
    result = train_on(pools[size], make(), sentences(), collate=collate, loss="auto", **SETTINGS)
    # Its loss of text is computed in float32, whatever the network is.
    limit = 1e-12 if make is classifier else 1e-6
    assert (weights(result.model) - plain(make(), collate)).abs().max() < limit
    assert type(result.model) is type(make())
    result.model.save_pretrained(tmp_path)
    again = type(result.model).from_pretrained(tmp_path, dtype=torch.float64)
    assert torch.equal(weights(again), weights(result.model))


def test_each_word_predicts_the_next_one(pools: Pools) -> None:
    """The loss shifts the labels: so do accuracy and perplexity."""
    data = sentences()
    asked = {"validation": data, "metrics": ["perplexity", "token_accuracy"], "keep": "last"}
    result = train_on(pools[2], writer(), data, loss=None, collate=as_text, **asked, **SETTINGS)
    batch = as_text([data[i] for i in range(len(data))])
    with torch.no_grad():
        scores = result.model(**batch).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    counts = labels >= 0
    right = (scores.argmax(-1) == labels)[counts].double().mean().item()
    last = result.history.validations[-1]
    assert last.accuracy == last.metrics["token_accuracy"] == pytest.approx(right, abs=1e-12)
    loss = torch.nn.functional.cross_entropy(scores[counts], labels[counts]).item()
    assert last.loss == pytest.approx(loss, abs=1e-6)
    assert last.metrics["perplexity"] == pytest.approx(math.exp(loss), abs=1e-6)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT's own
def test_a_part_of_a_network_is_tuned(pools: Pools) -> None:
    def tuned() -> Any:
        config = peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True)
        return peft.get_peft_model(writer(), config)

    torch.manual_seed(1)
    network = tuned()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    result = train_on(pools[2], network, sentences(), collate=as_text, loss="auto", **SETTINGS)
    changed = {
        name for name, value in result.model.state_dict().items() if (value != before[name]).any()
    }
    assert changed
    assert all("lora" in name for name in changed)
    assert (weights(result.model) - plain(network, as_text)).abs().max() < 1e-6


def test_rows_of_one_length_need_no_collate(pools: Pools) -> None:
    """Lists of numbers become tensors, `label` is `labels`, and text is left out."""
    data = sentences().filter(lambda row: len(row["input_ids"]) > 3)
    data = data.map(lambda row: {name: row[name][:4] for name in ("input_ids", "attention_mask")})
    result = train_on(pools[2], classifier(), data, loss="auto", **SETTINGS)
    assert result.history.accuracy[-1] is not None
    found = gpupool.predict(result.model, data, pool=pools[2])["logits"]
    assert found.shape == (len(data), 2)
    measured = gpupool.evaluate(result.model, data, "accuracy", pool=pools[2])["accuracy"]
    right = (found.argmax(1) == torch.tensor(data["label"])).double().mean().item()
    assert measured == pytest.approx(right)


def test_rows_of_several_lengths_are_answered_with_what_pads_them(pools: Pools) -> None:
    with raises(SpmdError, "input_ids", ename="DataError"):
        train_on(pools[2], classifier(), sentences(), loss="auto", **SETTINGS)
