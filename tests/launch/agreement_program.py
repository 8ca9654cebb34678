"""The launcher of one host, without tasks: it follows the rounds of its job, and prints each one and each reason for its end."""

import sys
import time

from tfdist.errors import ClusterError
from tfdist.launch.agreement import Agreement, Round
from tfdist.runtime import log


def follow(hosts: str, me: str, wait_seconds: str) -> None:
    addresses = hosts.split(",")
    allowed = range(len(addresses), 0, -1)
    limits = {"join_seconds": 600.0, "wait_seconds": float(wait_seconds)}
    with Agreement(addresses, int(me), 1, allowed, token="same", **limits) as agreement:
        while isinstance(outcome := agreement.next_round(lambda: False), Round):
            print(outcome, flush=True)
            while not (lost := agreement.members_failed()):
                time.sleep(0.05)
            print(lost.why, flush=True)
            agreement.report("failed", why="ended with the others")
        print(outcome, flush=True)


if __name__ == "__main__":
    log.print_always()
    try:
        follow(*sys.argv[1:])
    except ClusterError as e:
        sys.exit(str(e))
