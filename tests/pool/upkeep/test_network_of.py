"""What NCCL says of the network that it has chosen, in its own words."""

from __future__ import annotations

import pytest

from gpupool.pool.upkeep.forming import network_of

LINE = "gpu1:603:604 [0] NCCL INFO {}\n".format
SOCKET = LINE("NET/IB : No device found.") + LINE("NET/Socket : Using [0]ens7:10.128.0.32<0>")
SOCKET += LINE("Assigned NET plugin Socket to comm") + LINE("Using network Socket")
IB = LINE("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB eth0:10.0.0.1<0>")
IB += LINE("Using network IB") + LINE("comm 0x55f0 rank 0 nranks 2 cudaDev 0 - Init START")
OFI = LINE("NET/OFI Selected Provider is efa (found 16 nics)") + LINE("Using network AWS Libfabric")


@pytest.mark.parametrize(
    ("log", "network"),
    [(SOCKET, "Socket"), (IB, "IB"), (OFI, "AWS Libfabric"), (SOCKET + IB, "IB"), ("", "")],
)
def test_the_network_is_that_which_nccl_has_named_last(log: str, network: str) -> None:
    assert network_of(log) == network
