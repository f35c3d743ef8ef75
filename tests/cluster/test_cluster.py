"""Failures on a local Ray and a local Dask cluster; `make cluster` installs both. Elsewhere these tests are skipped."""

import importlib.util
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import cnorm
from cnorm.scoring import score
from cnorm.serving import UnknownSession

HEAD = {"num_cpus": 1, "include_dashboard": False, "resources": {"first": 1}}
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_streams" / "ray_streams.py"


@pytest.fixture(scope="module")
def nodes():
    """A Ray cluster of two nodes on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    second = cluster.add_node(num_cpus=1, resources={"second": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster, second
    ray.shutdown()
    cluster.shutdown()


def wait_until_lost(shard):
    """The actors of a node answer for some time after Ray has killed it."""
    import ray

    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            ray.get(shard.process.remote("nobody", 1, np.zeros((1, 12), np.float32)), timeout=30)
        except ray.exceptions.RayActorError:
            return
        except UnknownSession:
            time.sleep(0.02)
    raise AssertionError("the shard still answers")


@pytest.mark.filterwarnings("ignore")  # of Ray, about its own sockets
@pytest.mark.parametrize("what", ["actor", "node"])
def test_a_ray_actor_or_its_node_is_killed_in_the_middle_of_64_sessions(nodes, what):
    import ray

    spec = importlib.util.spec_from_file_location("ray_streams", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    cluster, second = nodes
    shards = [example.Shard.options(resources={name: 0.1}).remote() for name in ("first", "second")]

    def kill():
        if what == "actor":
            ray.kill(shards[1], no_restart=False)
        else:
            cluster.remove_node(second, allow_graceful=False)
            wait_until_lost(shards[1])

    x, outputs, _, replays = example.run(shards, ticks=40, kill=kill)
    assert 10 < replays < 64
    for one, y in zip(x, outputs, strict=True):
        assert y.tobytes() == cnorm.demo_model().stream().process(one).tobytes()


@pytest.mark.filterwarnings("ignore")  # of distributed, about its own sockets
def test_a_dask_worker_is_killed_in_the_middle_of_scoring():
    distributed = pytest.importorskip("distributed")
    model = cnorm.demo_model()
    x = [np.random.default_rng(k).standard_normal((k % 40, 12), np.float32) for k in range(400)]
    x[100] = x[100][:, :5]
    rows = []
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        for row in score(model, x, client.get_executor(), chunk=4, pending=8):
            rows.append(row)
            if len(rows) == 60:
                os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)
    assert [row.index for row in rows] == list(range(400))
    assert [row.index for row in rows if row.error] == [100]
    for row, one in zip(rows, x, strict=True):
        assert row.error or row.y.tobytes() == model.run(one).tobytes()
