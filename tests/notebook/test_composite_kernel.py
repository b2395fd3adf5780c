"""A Composite in a notebook: how it looks, and completion that goes through it."""

from __future__ import annotations

from pathlib import Path

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


def complete(kernel: Kernel, code: str) -> list[str]:
    content = {"code": code, "cursor_pos": len(code)}
    request = kernel.client.session.msg("complete_request", content)
    kernel.client.shell_channel.send(request)
    while True:
        reply = kernel.client.get_shell_msg(timeout=30)
        if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
            return list(reply["content"]["matches"])


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


def test_html_of_a_value_is_text(kernel: Kernel) -> None:
    kernel.run("%%spmd\nbad = '<script>alert(1)</script>'")
    assert "<script>" not in kernel.run("bad").html


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


def test_its_help_tells_what_it_is(kernel: Kernel) -> None:
    assert kernel.run("share?").status == "ok"
    assert kernel.run("hasattr(share, 'nonsense'), len(share)").text == "(False, 2)"
