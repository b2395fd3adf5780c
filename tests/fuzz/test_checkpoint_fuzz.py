"""Files that are named and marked as checkpoints, or hold weights, whatever is in them."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gpupool
from gpupool.engine.training.checkpoints import _MARK, Checkpoints
from tests.engine.training.test_checkpoints import zipped
from tests.fuzz.limits import fuzzed, only_our_errors


def made(save: Callable[[Any, Any], None]) -> bytes:
    buffer = io.BytesIO()
    model = nn.Linear(3, 2)
    state = {"format": 1, "model": model.state_dict(), "nest": [1, 2.0, None, ("a", b"b")]}
    save(state, buffer)
    return buffer.getvalue()


ZIPPED = made(torch.save)
OLDER = made(lambda state, file: torch.save(state, file, _use_new_zipfile_serialization=False))
with zipfile.ZipFile(io.BytesIO(ZIPPED)) as archive:
    ENTRIES = {name: archive.read(name) for name in archive.namelist()}
PICKLED = "archive/data.pkl"
PICKLE = ENTRIES[PICKLED]


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A real file with bytes changed, numbers made large, pieces lost, doubled or moved.

    Or one with such a pickle in it and the right checksums: torch asks for them.
    """
    original = draw(st.sampled_from([ZIPPED, OLDER, PICKLE]))
    content = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(content)))
        end = min(len(content), at + draw(st.integers(1, 64)))
        match draw(st.sampled_from(["bytes", "number", "move", "cut"])):
            case "bytes":
                content[at:end] = draw(st.binary(max_size=64))
            case "number":
                number = draw(st.sampled_from([0, 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]))
                content[at : at + 8] = struct.pack("<Q", number)
            case "move":
                piece = content[at:end]
                del content[at:end]
                to = draw(st.integers(0, len(content)))
                content[to:to] = piece * draw(st.integers(0, 2))
            case "cut":
                del content[at:]
    return zipped(ENTRIES | {PICKLED: bytes(content)}) if original == PICKLE else bytes(content)


@fuzzed
@given(mutations() | st.binary(max_size=200))
def test_a_checkpoint_or_weights_of_any_content(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-checkpoints"
    folder.mkdir(exist_ok=True)
    path = folder / "step-00000009.pt"
    path.write_bytes(content + _MARK)
    with only_our_errors():
        assert isinstance(Checkpoints(str(folder)).load(path.name), dict)
    with only_our_errors():
        assert isinstance(gpupool.load_weights(nn.Linear(3, 2), path), nn.Linear)
