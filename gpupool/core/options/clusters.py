"""How the hosts of a pool are found and reached: presets, `gpupool.toml`, and what is wrong there.

Runs on the client. Nothing here starts anything: `pool/launchers/allocation.py` does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Three command lines, and what the hosts need: see docs/guides/clusters.md.

    Command lines are split as a shell would, and no shell runs them; `{n}`, `{host}` and `{job}`
    stand in them.
    """

    name: str
    """As it was asked for: "slurm", or the name of a table in gpupool.toml."""
    via: str
    """The preset it is made from: ssh, slurm, mpi, kubernetes, sky, or own."""
    hold: str = ""
    """Gets the hosts, and keeps them until its stdin closes. When it has them it prints one line:
    "gpupool JOB HOST[:RANKS] HOST[:RANKS] ...". Empty: nothing has to be held."""
    hosts: tuple[str, ...] = ()
    """HOST or HOST:RANKS, where no `hold` says them."""
    find: str = ""
    """A command that prints them instead, one a line."""
    run: str = ""
    """Runs what is put behind it on `{host}`, with its stdin and stdout here."""
    quotes: bool = False
    """Whether `run` gives the rest to a shell over there, as ssh does."""
    is_private: bool = False
    """Whether nobody on the network can read what crosses the line of `run`: keys may."""
    state: str = ""
    """Prints how the job stands: "STATE|reason|expected start or end" (ISO times)."""
    cancel: str = ""
    """Ends the job, should its `hold` not have."""
    down: str = ""
    """What `%gpupool stop --down` runs."""
    python: str = ""
    """The Python of the hosts; empty: this notebook's."""
    network: str = ""
    """The network that the hosts share, as "10.1.0.0/16"; empty: what all can reach."""
    ports: str = ""
    """Ports to listen at, as "42000-42040", where a firewall leaves these open."""
    env: tuple[str, ...] = ()
    """Names or globs of variables that the hosts get from here."""


def names() -> tuple[str, ...]:
    """What a pool can be started on beside this machine: presets, and tables of gpupool.toml."""
    return "ssh", "slurm", "mpi", "kubernetes", "sky"
