"""What a cluster is made of: presets, gpupool.toml, and the sentence for what is wrong there."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpupool.core.errors import OptionsError
from gpupool.core.options.clusters import Cluster, cluster_of, hosts_of
from gpupool.core.options.pool_options import PoolOptions
from tests.support.raising import raises

POD = "image = 'registry/gpupool:1'\nqueue = 'gpus'\nwords = ['--context', 'lab']"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))


def made(profile: str, file: str = "", **options: Any) -> Cluster:
    if file:
        Path("gpupool.toml").write_text(file)
        Path("gpupool.toml").chmod(0o644)
    cluster = cluster_of(PoolOptions(profile=profile, **options))
    assert cluster is not None
    return cluster


def test_what_is_no_host() -> None:
    for wrong in (["a", "a:2"], ["-oProxyCommand=x"], ["a:0"], ["a:b"], ["a b"], [""], []):
        with pytest.raises(OptionsError):
            hosts_of(wrong)


def test_slurm_is_asked_for_ranks_each_with_a_gpu_unless_words_say_how() -> None:
    words = ("-p", "gpu", "-t", "4:00:00")
    hold = shlex.split(made("slurm", n=16, words=words).hold)
    assert hold[:-3] == ["salloc", "-K", "-n", "16", "--gpus-per-task=1", *words]
    for options in ({"device": "cpu"}, {"words": ("--gres=gpu:2",)}):
        assert "--gpus-per-task=1" not in made("slurm", n=2, **options).hold
    assert "TASKS" not in made("slurm", words=("-N2",)).hold


def test_a_pod_for_each_host() -> None:
    cluster = made("lab", f"[lab]\nvia = 'kubernetes'\nhosts = 2\n{POD}", n=8)
    name, number, manifest, *words = shlex.split(cluster.hold)[4:]
    assert (number, words) == ("2", ["--context", "lab"])
    job = yaml.safe_load(manifest)
    assert job["metadata"] == {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "gpus"}}
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (2, 2)
    (pod,) = job["spec"]["template"]["spec"]["containers"]
    assert pod["image"] == "registry/gpupool:1"
    assert pod["resources"] == {"limits": {"nvidia.com/gpu": 4}}


@pytest.mark.long
def test_what_is_asked_for_is_a_job_of_kubernetes() -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    cluster = made("kubernetes", f"[kubernetes]\n{POD}", n=2)
    job = yaml.safe_load(shlex.split(cluster.hold)[6])
    kubernetes.validate(job, kubernetes.latest_version(), strict=True)


def test_inside_a_job_its_hosts_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert made("mpi", hosts=("a",)).hold == ""
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    assert "scontrol show hostnames" in made("ssh").hold
    assert "-uSLURM_GPUS_PER_TASK" in shlex.split(made("slurm").run)


def test_a_cluster_of_ones_own(tmp_path: Path) -> None:
    file = "[lab]\nrun = 'oarsh {host}'\nhold = 'oarsub -l {n}'\nnetwork = '10.1.0.0/16'\nn = 3"
    lab = made("lab", f"{file}\nis_private = true")
    assert (lab.hold, lab.n, lab.network, lab.is_private) == ("oarsub -l 3", 3, "10.1.0.0/16", True)
    assert "$(./list -a)" in made("lab", "[lab]\nrun = 'rsh {host}'\nhosts = './list -a'").hold
    assert made("ssh", "[ssh]\nhosts = ['a']\nrun = 'ssh -J x {host}'").is_private
    Path("gpupool.toml").rename(tmp_path / "elsewhere")
    (tmp_path / "settings/gpupool").mkdir(parents=True)
    (tmp_path / "settings/gpupool/gpupool.toml").symlink_to(tmp_path / "elsewhere")
    assert made("ssh").hosts == ("a",)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("[lab]\nrum = 'x'", "'run'"),
        ("[lab]\nhosts = 'a'", "run"),
        ("[lab]\nvia = 'ssh'", "--hosts"),
        ("[lab]\nvia = 'ssh'\nhosts = ['a']\nn = '1'", "n='1'"),
        ("[lab]\nvia = 'sky'\nhosts = '0'", "'0'"),
        ("[lab]\nvia = 'ssh'\nhosts = ['a:2']\nn = 2", "n=2"),
        ("[lab]\nvia = 'ssh'\nhosts = ['a']\nwords = ['x']", "words"),
        ("[lab]\nvia = 'ssh'\nhosts = ['a']\nnetwork = '10.1'", "'10.1'"),
        ("[lab]\nvia = 'ssh'\nhosts = ['a']\nrun = \"ssh 'x\"", "quotation"),
        ("[lab]\nvia = 'kubernetes'\nn = 2", "image"),
        ("[lab]\nvia = 'kubernetes'\nn = 3\nhosts = 2\nimage = 'x'", "2"),
        ("[lab]\napi_key = 'hunter22'", "api_key"),
        ("[lab]\nrun = 'x https://me:hunter22@h/ {host}'", "run"),
        ("[lab]\nenv = ['X=hunter22']", "env"),
        ("[lab\nhunter22 = 1", "line 1"),
        ("hunter22 = 1", "[NAME]"),
        ("[lob]", "'lob'"),
    ],
)
def test_what_is_wrong_in_the_file(file: str, said: str) -> None:
    with raises(OptionsError, said, "lab" if said == "'lob'" else "gpupool.toml") as caught:
        made("lab", file)
    assert "hunter22" not in str(caught.value).replace("hunter22 is in no table", "")


def test_a_file_that_others_can_write_runs_nothing() -> None:
    made("ssh", "[ssh]\nhosts = ['a']")
    for mode, user in (0o664, -1), (0o646, -1), (0o644, 65534):
        if user < 0 or os.getuid() == 0:  # only root can give a file away
            os.chown("gpupool.toml", user, -1)
            Path("gpupool.toml").chmod(mode)
            with raises(OptionsError, "chmod go-w gpupool.toml"):
                made("ssh", hosts=("a",))
