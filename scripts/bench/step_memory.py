"""Peak memory of one side in a process of its own, printed as JSON.

"start" is what there is with libraries, model and data in memory, before anything is wrapped or
trained; "peak" the most there was over five steps. On a CPU it is the resident memory of the
process, on a GPU what torch has allocated.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
from collections.abc import Sequence

import opacus  # noqa: F401 - every side carries the same libraries
import torch

from scripts.bench.step_models import CASES
from scripts.bench.step_sides import SIDES, Side, quiet, reason

STEPS = 5
PROC = pathlib.Path("/proc/self")


def resident(field: str) -> int:
    """Bytes of resident memory: "VmRSS" now, "VmHWM" at most.

    ``getrusage`` will not do: the peak that it tells is inherited from the process that started
    this one.

    Raises:
        RuntimeError: where the system does not say.
    """
    try:
        lines = (PROC / "status").read_text(encoding="ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
    except (OSError, StopIteration) as error:
        raise RuntimeError(
            f"{PROC / 'status'} does not tell {field} here; leave memory out with --no-memory"
        ) from error


def forget_peak() -> None:
    """Make the most so far what there is now; libraries that load take more for a moment.

    Where that is not allowed the peak of loading stays, which a step's is far above.
    """
    try:
        (PROC / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        print("the peak of loading could not be reset", file=sys.stderr)


def measure(side: Side) -> dict[str, int]:
    """Bytes before the first step of a side that is not wrapped yet, and at most."""
    gc.collect()
    cuda = side.device.startswith("cuda")
    if cuda:
        start = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    else:
        start = resident("VmRSS")
        forget_peak()
    side.wrap()
    for _ in range(STEPS):
        side.prepare()
        side.step()
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    return {"start_bytes": start, "peak_bytes": peak}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=list(CASES), required=True)
    parser.add_argument("--side", choices=list(SIDES), required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(argv)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    quiet()
    row = {"model": options.model, "side": options.side}
    try:
        found = measure(Side(options.side, CASES[options.model], options.device))
    except Exception as error:  # what a library refuses belongs in the table, with its reason
        print(json.dumps({**row, "failure": reason(error)}))
    else:
        print(json.dumps({**row, **found}))


if __name__ == "__main__":
    main()
