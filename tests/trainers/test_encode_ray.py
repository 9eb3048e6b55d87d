"""The same shards from a Ray Data cluster of this machine, with a worker killed in the middle."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .test_encode import arguments, model, partial_of, read, same, table, wait_for, wanted  # noqa: F401


@pytest.mark.slow
@pytest.mark.alone  # a cluster takes the cores and the memory it finds
def test_a_worker_of_ray_is_killed(table, tmp_path, model, wanted):  # noqa: F811
    """Nothing is lost and nothing is there twice."""
    output = tmp_path / "out"
    words = arguments(table, output, model, "--batch-size", "1", "--workers", "2", "--ray")
    log = (tmp_path / "log").open("w")
    # Ray's workers are nice to others by default, and on a busy machine would hardly begin
    environment = os.environ | {"RAY_worker_niceness": "0"}
    command = [sys.executable, "-m", "moemb.trainers.cli", "encode", *words]
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    try:
        killed = wait_for(lambda: partial_of(output), process, 400)
        assert "ray::" in Path(f"/proc/{killed}/cmdline").read_text(), "it is a worker of Ray"
        os.kill(killed, signal.SIGKILL)
        assert process.wait(timeout=500) == 0, Path(log.name).read_text()
    finally:
        process.terminate()  # takes the cluster down with it
    same(read(output), wanted)
    assert "23 vectors" in Path(log.name).read_text()
