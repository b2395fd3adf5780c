"""How previews and checks show in a notebook and in a terminal."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from gpupool.data.datastores.images import ImageDatastore
from gpupool.notebook import formatters
from tests.data.pictures import image_file


@pytest.fixture
def ds(tmp_path: Path) -> ImageDatastore:
    for name, content in {"<b>": image_file(7), "cut": b"no image"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(content)
    return ImageDatastore(str(tmp_path))


@pytest.fixture
def shell() -> InteractiveShell:
    shell = InteractiveShell()
    formatters.register(shell)
    return shell


def shown(shell: InteractiveShell, value: object) -> tuple[str, str]:
    """What a notebook draws, and what a terminal prints."""
    bundle, _ = shell.display_formatter.format(value)  # type: ignore[union-attr]
    return bundle["text/html"], bundle["text/plain"]


def test_a_preview_is_a_grid_of_pictures(shell: InteractiveShell, ds: ImageDatastore) -> None:
    preview = ds.preview()
    html, text = shown(shell, preview)
    assert html.count("<figure") == 2
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert [base64.b64decode(data) for data in pictures] == [preview[0].png]
    assert "<b>" not in html
    assert 'alt="&lt;b&gt;"' in html
    assert ">damaged</div>" in html
    assert text == repr(preview)


def test_a_check_is_a_table(shell: InteractiveShell, ds: ImageDatastore) -> None:
    result = ds.check()
    html, text = shown(shell, result)
    assert "1 of 2 images cannot be used: 1 damaged." in html
    assert html.count("<tr>") == 2
    assert f"{ds.url}/cut/1.png" in html
    assert "is damaged or not an image: it has no header of a known format" in text
    assert text == repr(result)
    html, text = shown(shell, ds.subset([0]).check())
    assert "<table" not in html
    assert text == "All 1 images can be read."
