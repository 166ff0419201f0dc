# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""torchrun, except for how a run ends. Same arguments.

A failed run ends with the rank's own message and exit status, and bad input (2) is not tried again
whatever --max-restarts says. SIGTERM is passed on to the ranks, which save and leave by themselves:
torchrun would kill them 30 seconds later, in the middle of a save. Then the exit status is
LEANGRPO_STOPPED_STATUS, by default 0, or 143 where ranks were ended that had nothing to save yet.
"""

import logging
import os
import signal
import sys

import psutil
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api
from torch.distributed.run import parse_args, run

BAD_INPUT = 2
HANDLED_BY_TORCHRUN = "SIGINT,SIGHUP,SIGQUIT"


class Stop:
    """Whether the launcher has been told to stop; passes the signal on to its ranks."""

    requested = False

    def __call__(self, number: int, frame: object) -> None:
        """Handle SIGTERM."""
        self.requested = True
        ranks = psutil.Process().children()
        if not ranks:
            # Waiting for other nodes: nothing is running and nothing is lost.
            raise SignalException("stopped before the ranks were started", signal.Signals(number))
        for rank in ranks:
            rank.send_signal(number)


def agent_class(stop: Stop) -> type[LocalElasticAgent]:
    """Torchrun's agent, which starts no rank again after SIGTERM or bad input."""

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group):
            result = super()._monitor_workers(worker_group)
            bad_input = any(f.exitcode == BAD_INPUT for f in result.failures.values())
            if stop.requested or bad_input:
                self._remaining_restarts = 0
            return result

    return Agent


def main() -> int:
    """Launch the ranks and return the exit status of the one that failed first."""
    stopped_status = os.environ.get("LEANGRPO_STOPPED_STATUS")
    # The launcher's log lines repeat what the failing rank has said.
    logging.disable(logging.CRITICAL)
    arguments = parse_args(sys.argv[1:])
    arguments.signals_to_handle = HANDLED_BY_TORCHRUN
    stop = Stop()
    signal.signal(signal.SIGTERM, stop)
    api.LocalElasticAgent = agent_class(stop)
    try:
        run(arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        # Killed by a signal, so the rank could not say anything itself.
        name = signal.Signals(-failure.exitcode).name
        if stop.requested:
            return int(stopped_status or 128 - failure.exitcode)
        print(f"leangrpo: error: rank {rank} was killed by {name}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        status = 128 + int(error.sigval)
        return int(stopped_status or status) if stop.requested else status
    except RendezvousError as error:
        where = arguments.rdzv_endpoint or "this node"
        print(
            f"leangrpo: error: the nodes did not meet at {where}: {type(error).__name__} {error} "
            "(MASTER_ADDR, MASTER_PORT and NNODES must be the same on all of them)",
            file=sys.stderr,
        )
        return 1
    return int(stopped_status or 0) if stop.requested else 0


if __name__ == "__main__":
    sys.exit(main())
