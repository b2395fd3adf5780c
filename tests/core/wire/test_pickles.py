"""Values on their way: what is packed comes out the same, in the message or in mapped memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpupool.core.wire.pickles import (
    MemoryFile,
    Packer,
    Source,
    TooLargeError,
    pack,
    to_wire,
    unpack,
)

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=20,
)
ARRAYS = arrays.arrays(
    st.sampled_from(["u1", "i8", "f4", "f8", "?", "M8[s]", "U3", "c8"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
)


def through_memory(value: object) -> object:
    packer = Packer()
    packer.dump(value)
    file = MemoryFile()
    source = Source(to_wire(packer.stream(), packer.buffers, file))
    file.close()  # who has opened it keeps it
    return source.load()


@given(PLAIN)
def test_plain_values_come_out_as_they_were(value: object) -> None:
    assert unpack(pack(value)) == value
    assert through_memory(value) == value


@given(ARRAYS, st.booleans(), st.booleans())
def test_arrays_come_out_as_they_were(array: np.ndarray, fortran: bool, readonly: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    array.flags.writeable = not readonly
    for found in (unpack(pack(array)), through_memory(array)):
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype
        # numpy keeps times in the pickle, without that flag
        assert found.flags.writeable == array.flags.writeable or array.dtype.kind == "M"


TENSORS = {
    "scalar": torch.tensor(3.5),
    "bfloat16": torch.arange(6).to(torch.bfloat16).reshape(2, 3),
    "slice": torch.arange(100)[10:20:2],
    "grad": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "sparse": torch.eye(3).to_sparse(),
    "complex": torch.view_as_complex(torch.ones(2, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_come_out_as_they_were(name: str) -> None:
    tensor = TENSORS[name]
    for found in (unpack(pack(tensor)), through_memory(tensor)):
        assert type(found) is type(tensor)
        assert torch.equal(found.to_dense().detach(), tensor.to_dense().detach())
        assert (found.dtype, found.requires_grad) == (tensor.dtype, tensor.requires_grad)


def test_tensors_that_share_memory_share_it_afterwards() -> None:
    whole = torch.zeros(1 << 20)
    layer = torch.nn.Linear(2, 2)
    value = {"whole": whole, "part": whole[5:], "a": layer, "b": layer.weight}
    packer = Packer()
    packer.dump(value)
    assert packer.num_bytes < 1.1 * whole.nbytes
    assert whole.data_ptr() in {np.asarray(buffer).ctypes.data for buffer in packer.buffers}
    for found in (unpack(pack(value)), through_memory(value)):
        found["whole"][5] = 7
        assert found["part"][0] == 7
        assert found["a"].weight is found["b"]


@pytest.mark.parametrize(
    "value", [np.zeros(2000, np.uint8), torch.zeros(2000, dtype=torch.uint8), b"x" * 2000]
)
def test_what_is_too_large_is_told(value: object) -> None:
    assert len(pack(value, 2100)) > 2000
    with pytest.raises(TooLargeError) as caught:
        pack(value, 1000)
    assert 2000 <= caught.value.num_bytes < 2200
