"""What a rank has to know so that its tracebacks name the notebook's cells. Runs on the client."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable


def sources_of(filenames: Iterable[str]) -> dict[str, tuple[int, str]]:
    """File name -> (number of the cell, its text), for the names that IPython gave to cells.

    Args:
        filenames: `co_filename` of the code that travels; files on disk are left out.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    return {
        name: (numbers[name], "".join(linecache.getlines(name)))
        for name in set(filenames) & set(numbers)
    }
