"""HTTP proxies of the environment, which gRPC would use between the tasks. No TensorFlow here."""

from __future__ import annotations

import os

from tfdist.cluster.spec import ClusterSpec


def bypass_proxies(cluster: ClusterSpec) -> None:
    """Makes gRPC reach the cluster's hosts directly, without `http_proxy` and `https_proxy` (grpc/grpc#9989)."""
    hosts = [address.rsplit(":", 1)[0].strip("[]") for task in cluster.tasks() for address in [cluster.address(task)]]
    os.environ.setdefault("no_proxy", os.environ.get("NO_PROXY", ""))  # other libraries look at no_proxy first
    for name in ("no_grpc_proxy", "no_proxy"):
        known = [each for each in os.environ.get(name, "").split(",") if each]
        if name == "no_proxy" or known:  # gRPC takes no_grpc_proxy before no_proxy
            os.environ[name] = ",".join(dict.fromkeys([*known, *hosts]))
