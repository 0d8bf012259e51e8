"""A Ray cluster of several nodes on this machine, for programs that tests start: code to put before theirs."""

NODES = """
import logging, sys
from contextlib import contextmanager

@contextmanager
def nodes(count, cpus=1):
    if not count:
        yield None
        return
    import ray
    from ray.cluster_utils import Cluster

    logging.disable(logging.WARNING)
    here = {"num_cpus": cpus, "memory": 8 << 30, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
    try:
        for _ in range(count - 1):
            cluster.add_node(**here)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
"""
