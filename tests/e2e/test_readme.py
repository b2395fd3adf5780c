"""README is short; what it and the other pages name is there, and their code is code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

import gpupool
from gpupool.notebook.magics.arguments import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


def test_it_is_short_and_its_first_screen_has_all_to_begin_with() -> None:
    lines = README.splitlines()
    assert len(lines) <= 130
    first = "\n".join(lines[:50])
    assert first.count("```python") == 4
    for wanted in ("<picture>", "pip install", "make demo", "make test", "promises.md"):
        assert wanted in first
    assert max(len(text) for text in lines if not text.startswith("|")) <= 125


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_links_is_there(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    near = [link for link in links if "://" not in link]
    assert [link for link in near if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_code_of_a_page_compiles_and_names_what_is_public(page: Path) -> None:
    for code in re.findall(
        r"^```py(?:thon)?\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    ):
        cell = code.split("\n", 1)[1] if code.startswith("%%spmd") else code
        tree = ast.parse(TransformerManager().transform_cell(cell))
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in names if ast.unparse(node.value) == "gpupool"}
        assert used <= set(gpupool.__all__)


def test_it_names_every_command() -> None:
    # `status` is what %gpupool alone does
    named = set(re.findall(r"\w+", README.split("## At a glance")[1].split("```")[1]))
    assert set(COMMANDS) - named == {"status"}
