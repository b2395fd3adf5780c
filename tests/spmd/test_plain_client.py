"""ipyparallel's own client on a pool; docs/guides/cells.md shows it too."""

from __future__ import annotations

import ipyparallel
import pytest

from gpupool import Pool

SUM = "t = torch.ones(1); dist.all_reduce(t); t.item()"


def test_a_cell_comes_after_what_a_plain_client_has_asked_of_its_ranks(pool2: Pool) -> None:
    import time

    sleep = pool2.client[1].apply_async(time.sleep, 600)
    assert dict(pool2.run("rank", ranks=0)) == {0: 0}
    cell = pool2.begin(SUM, ranks=[0, 1], on_output=lambda *_: None)
    assert not cell.wait(0.5)
    pool2.client.send_signal("SIGINT", targets=[1], block=True)
    assert {rank: reply.text for rank, reply in cell.result().items()} == {0: "2.0", 1: "2.0"}
    with pytest.raises(ipyparallel.RemoteError, match="KeyboardInterrupt"):
        sleep.get(20)
