"""A process that is a cluster of Ray on this machine: `up`, then a command a line on stdin, an answer a line on stdout.

Apart from the tests' own process, which treats warnings as errors, and so that its end ends everything.
"""

import json
import os
import sys
from typing import Any

from ray.cluster_utils import Cluster

_NODE = {"object_store_memory": 80 * 2**20}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={**_NODE, "num_cpus": 0, "include_dashboard": False})
    nodes: dict[str, Any] = {}
    _say(address=cluster.address)
    for line in sys.stdin:
        command, name, *rest = json.loads(line)
        if command == "add":
            os.environ.update(rest[0])
            nodes[name] = cluster.add_node(**_NODE, num_cpus=8, resources={name: 1})
            _say(node=nodes[name].node_id)
        elif command == "remove":  # by SIGKILL: its replicas and their engines die with it
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
            _say()
    cluster.shutdown()


def _say(**answer: str) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
