"""The face: magics and views. The only folder that knows IPython's display and ipywidgets."""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext gpupool` calls: registers the magics, and has torch imported by the time it
    is needed, in another process in the background."""
    from gpupool.core import current
    from gpupool.pool.launchers import starter

    if current.find_pool() is None:
        starter.warm()  # first: it imports torch while this process imports the magics

    from gpupool.notebook.magics import magics

    magics.register(shell)
