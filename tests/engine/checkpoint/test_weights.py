"""Weights as other programs leave them: under longer names, beside settings, at any address."""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gpupool
from gpupool import DataError, load_weights
from tests.support.raising import raises


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize(
    "parts", list(itertools.permutations(("module.", "_orig_mod.", "model."), 2))
)
def test_prefixes_come_off_in_any_order(tmp_path: Path, parts: tuple[str, str]) -> None:
    net, path = nn.Linear(8, 3), tmp_path / "w.pt"
    torch.save({"".join(parts) + name: one for name, one in net.state_dict().items()}, path)
    assert same(load_weights(nn.Linear(8, 3), path), net)


def test_a_layer_may_be_called_as_a_prefix(tmp_path: Path) -> None:
    def made() -> nn.Module:
        return nn.ModuleDict({"model": nn.ModuleDict({"module": nn.Linear(8, 3)})})

    net, path = made(), tmp_path / "w.pt"
    torch.save(net.state_dict(), path)
    assert same(load_weights(made(), path), net)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (argparse.Namespace(lr=0.1), "argparse.Namespace"),
        (np.float64(1), ".multiarray.scalar"),
        (datetime.date(2026, 1, 1), "datetime.date"),
    ],
)
def test_what_stands_beside_weights_and_would_run_code_is_named(
    tmp_path: Path, value: object, shown: str
) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": nn.Linear(8, 3).state_dict(), "args": value}, path)
    advice = 'torch.save(checkpoint["model"], ...)'
    with raises(DataError, shown, advice, kind="not safe") as caught:
        load_weights(nn.Linear(8, 3), path)
    assert str(caught.value).isprintable()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a folder."""
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_address_may_have_a_query(served: str, tmp_path: Path) -> None:
    net = nn.Linear(8, 3)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    url = f"{served}/w.safetensors?of=a/b&X-Amz-Signature=feedf00d"
    assert same(load_weights(nn.Linear(8, 3), url), net)
    assert same(gpupool.load(url, nn.Linear(8, 3)), net)
    with raises(DataError, "weight", kind="other network") as caught:
        load_weights(nn.Linear(9, 3), url)
    assert "feedf00d" not in str(caught.value)
