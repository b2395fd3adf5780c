"""Networks and weights in files: the same outputs and knowledge, and nothing run from a file."""

from __future__ import annotations

import argparse
import functools
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gpupool
from gpupool import DataError, TrainingError, load_weights
from gpupool.core.network import NetworkInfo, give, info_of
from tests.engine.training.test_checkpoints import Runs, deflated, saved
from tests.fuzz.limits import only_our_errors
from tests.servers.s3 import SeaweedServer
from tests.support.pools import Pools
from tests.support.raising import raises
from tests.support.trainings import network, samples, train_on

KNOWN = NetworkInfo(("cat", "dog", "owl"), ((0.5,), (0.25,)), (3, 32, 32))


def test_a_copy_of_a_network_is_filled_from_a_bucket(s3: SeaweedServer) -> None:
    model, url = network(), f"{s3.make_bucket('networks')}/run/net.pt"
    options = {"storage_options": s3.storage_options}
    give(model, KNOWN)
    gpupool.save(model, url, **options)
    empty = network(seed=1)
    loaded = gpupool.load(url, empty, **options)
    assert same(loaded, model)
    assert info_of(loaded) == KNOWN
    assert not same(empty, model)
    with raises(DataError, "0.weight", "[16, 8]", "[3, 8]", kind="other network"):
        gpupool.load(url, nn.Sequential(nn.Linear(8, 3)), **options)
    for wrong, where in (("resnet18", url), (model, "net.safetensors")):
        with raises(TrainingError):
            gpupool.save(wrong, where)  # type: ignore[arg-type]


def test_a_trained_network_is_saved_loaded_and_used(pools: Pools, tmp_path: Path) -> None:
    data, path = samples(24), tmp_path / "made" / "net.pt"
    data.classes = ["a", "b", "c"]  # type: ignore[attr-defined]
    settings = {"epochs": 1, "checkpoint": str(tmp_path / "run"), "normalize": "fit"}
    result = train_on(pools[2], network(), data, batch_size=8, **settings)
    gpupool.save(result.model, path)
    expected = result.predict(data, pool=pools[2])
    # Other programs find the weights where they look for them.
    assert list(torch.load(path, weights_only=True)["state_dict"]) == list(network().state_dict())
    for url in (path, str(result.checkpoint)):
        loaded = gpupool.load(url, network(seed=3))
        assert not loaded.training
        assert info_of(loaded) == info_of(result.model)
        assert info_of(loaded).classes == ("a", "b", "c")
        assert torch.equal(gpupool.predict(loaded, data, pool=pools[2]), expected)


# ---- weights as other programs leave them -------------------------------------------------------

State = dict[str, Tensor]


def made(num_classes: int = 3) -> nn.Module:
    """A layer of it is called as a prefix of others."""
    layers = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, num_classes))
    return nn.ModuleDict({"model": layers})


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": {f"_orig_mod.{name}": one for name, one in state.items()}},
        lambda state: {f"module._orig_mod.{name}": one for name, one in state.items()},
        lambda state: {f"_orig_mod.module.{name}": one for name, one in state.items()},
    ],
    ids=["plain", "in a checkpoint", "compiled, in a checkpoint", "DDP", "compiled DDP"],
)
def test_weights_come_from_a_file_as_others_write_it(
    tmp_path: Path, wrapped: Callable[[State], Any]
) -> None:
    model, given, path = made(), made(), tmp_path / "w.pt"
    torch.save(wrapped(model.state_dict()), path)
    assert same(load_weights(given, path), model)
    assert not same(given, model)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_weights_of_another_network_are_named(tmp_path: Path) -> None:
    path, own = tmp_path / "w.pth", made().state_dict()
    others: list[tuple[Any, tuple[str, ...]]] = [
        (made(1000).state_dict(), ("model.2.weight", "[1000, 5]", "[3, 5]")),
        (nn.Linear(4, 5).state_dict(), ("model.0.weight", '"weight"')),
    ]
    for odd in (torch.zeros(2), "text", torch.zeros(()).to_sparse()):
        others.append((own | {"model.1.num_batches_tracked": odd}, ("num_batches_tracked",)))
    for state, named in others:
        torch.save(state, path)
        with raises(DataError, named, kind="other network"):
            load_weights(made(), path)


@pytest.mark.parametrize(
    ("content", "kind", "shown"),
    [
        ({"args": argparse.Namespace(lr=0.1)}, "not safe", "argparse.Namespace"),
        ({"state_dict": Runs()}, "not safe", ""),
        (lambda: deflated(saved({"zeros": torch.zeros(2**24)})), "not safe", "compressed"),
        ([1, 2], "no weights", "list"),
        (b"\xff" * 100, "not safe", ""),
        (None, "missing", ""),
    ],
    ids=["class", "code", "compressed", "list", "noise", "missing"],
)
def test_a_file_without_weights_is_named_and_not_run_or_unpacked(
    tmp_path: Path, content: Any, kind: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, content = tmp_path / "w.pth", content() if callable(content) else content
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else saved(content))
    for read in (load_weights, lambda model, url: gpupool.load(url, model)):
        with only_our_errors(), raises(DataError, "w.pth", shown, kind=kind) as caught:
            read(made(), path)
        assert str(caught.value).isprintable()
    assert {*tmp_path.iterdir()} <= {path}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_weights_at_an_address_with_a_query(served: str, tmp_path: Path) -> None:
    net = nn.Linear(8, 3)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    url = f"{served}/w.pt?of=a/b&X-Amz-Signature=feedf00d"
    assert same(load_weights(nn.Linear(8, 3), url), net)
    assert same(gpupool.load(url, nn.Linear(8, 3)), net)
    with raises(DataError, "weight", kind="other network") as caught:
        load_weights(nn.Linear(9, 3), url)
    assert "feedf00d" not in str(caught.value)
    with raises(TrainingError, "load_file"):
        load_weights(net, f"{served}/w.safetensors?of=a/b")
