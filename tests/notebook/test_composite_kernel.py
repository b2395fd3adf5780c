"""A Composite in a notebook: how it looks, and completion that goes through it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernel import Kernel
from tests.support.waits import until_there


@pytest.fixture(scope="module")
def kernel(clean_kernel: Kernel) -> Kernel:
    """A kernel with a pool of two ranks, whose cells have left a few names."""
    assert clean_kernel.run("%load_ext gpupool\n%gpupool start -n 2 --cpu").status == "ok"
    cell = "%%spmd\nlayer = torch.nn.Linear(2, 3)\nshare = [rank] * (2 + rank)\nsame = 'yes'"
    assert clean_kernel.run(cell).status == "ok"
    return clean_kernel


def ask(kernel: Kernel, kind: str, code: str) -> dict[str, Any]:
    content = {"code": code, "cursor_pos": len(code), "detail_level": 0}
    request = kernel.client.session.msg(kind, content)
    kernel.client.shell_channel.send(request)
    while True:
        reply = kernel.client.get_shell_msg(timeout=120)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            return dict(reply["content"])


def complete(kernel: Kernel, code: str) -> list[str]:
    return list(ask(kernel, "complete_request", code)["matches"])


def inspect(kernel: Kernel, code: str) -> str:
    return str(ask(kernel, "inspect_request", code)["data"]["text/plain"])


def test_it_shows_what_each_rank_has_equal_values_once(kernel: Kernel) -> None:
    assert kernel.run("same").text == "same on 2 ranks\n[0, 1] str of 3  'yes'"
    shown = kernel.run("share")
    assert shown.text == "share on 2 ranks\n[0] list of 2  [0, 0]\n[1] list of 3  [1, 1, 1]"
    assert "<th" in shown.html
    assert "[1, 1, 1]" in shown.html


def test_the_lines_of_a_value_stand_below_each_other(kernel: Kernel) -> None:
    kernel.run("%%spmd\nm = torch.zeros(2, 1)")
    assert kernel.run("m").text.splitlines()[1:] == [
        "[0, 1] Tensor 2x1 float32 cpu  tensor([[0.],",
        "                                       [0.]])",
    ]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("layer.in_", ["in_features"]),
        ("layer.weight.req", ["requires_grad", "requires_grad_"]),
        ("share.app", ["append"]),
        ("same.star", ["startswith"]),
        ("layer.gath", ["gather"]),
    ],
)
def test_completion_knows_the_attributes_of_the_ranks_values(
    kernel: Kernel, code: str, found: list[str]
) -> None:
    assert complete(kernel, code) == found


def test_while_a_cell_runs_completion_does_not_wait_for_it(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    kernel.run(f"%%spmd --nowait -o slow\n{until_there(go)}")
    assert complete(kernel, "share.app") == []
    assert kernel.run("slow.done()").text == "False"
    go.touch()
    kernel.run("slow.result()")
    assert complete(kernel, "share.app") == ["append"]


def test_question_mark_shows_type_and_value(kernel: Kernel) -> None:
    text = inspect(kernel, "same")
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert re.match(r"Composite same on 2 ranks: +\[0, 1\] str of 3  'yes'\nDocstring:\s", text)
    assert "One value per rank" in text
    assert "Signature" not in text
    assert "Signature" in inspect(kernel, "print")


def test_the_pool_offers_what_is_for_users(kernel: Kernel) -> None:
    kernel.run("import gpupool\npool = gpupool.current_pool()")
    offered = {match.rpartition(".")[2] for match in complete(kernel, "pool.")}
    assert {"run", "put", "stop", "restart", "sync_from", "status"} <= offered
    assert not {"ask", "begin", "execute", "forget_listeners", "variables", "turns"} & offered
