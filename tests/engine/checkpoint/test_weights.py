"""Weights as other programs leave them: under longer names, beside settings, at any address."""

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
from safetensors.torch import save_file
from torch import Tensor, nn

import gpupool
from gpupool import DataError, load_weights
from tests.support.raising import raises

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
        ([1, 2], "no weights", "list"),
        (b"\xff" * 100, "not safe", ""),
        (None, "missing", ""),
    ],
    ids=str,
)
def test_a_file_without_weights_is_named(
    tmp_path: Path, content: Any, kind: str, shown: str
) -> None:
    path = tmp_path / "w.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with raises(DataError, "w.pth", shown, kind=kind) as caught:
        load_weights(made(), path)
    assert str(caught.value).isprintable()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a folder."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_safetensors_at_an_address_with_a_query(served: str, tmp_path: Path) -> None:
    net = nn.Linear(8, 3)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    url = f"{served}/w.safetensors?of=a/b&X-Amz-Signature=feedf00d"
    assert same(load_weights(nn.Linear(8, 3), url), net)
    assert same(gpupool.load(url, nn.Linear(8, 3)), net)
    with raises(DataError, "weight", kind="other network") as caught:
        load_weights(nn.Linear(9, 3), url)
    assert "feedf00d" not in str(caught.value)
    (tmp_path / "w.safetensors").write_bytes(b"\xff" * 100)
    with raises(DataError, "w.safetensors", kind="no weights"):
        load_weights(net, tmp_path / "w.safetensors")
