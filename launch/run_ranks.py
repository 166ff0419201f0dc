# Copyright 2026 The megatron_leangrpo authors. SPDX-License-Identifier: Apache-2.0
"""torchrun, except that a failed run ends with the rank's own message and exit status.

Plain torchrun adds a traceback of its own and always exits with 1. Same arguments.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run


def main() -> int:
    """Launch the ranks and return the exit status of the one that failed first."""
    # The launcher's log lines repeat what the failing rank has said.
    logging.disable(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode
        # Killed by a signal, so the rank could not say anything itself.
        name = signal.Signals(-failure.exitcode).name
        print(f"leangrpo: error: rank {rank} was killed by {name}", file=sys.stderr)
        return 128 - failure.exitcode
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
