"""What a process that serves asks of its Python interpreter."""

from __future__ import annotations

import gc
import sys

SWITCH_S = 2e-4


def prepare_to_serve() -> None:
    """Take what start-up made out of the garbage collector's sight, and let waiting threads in soon; call it once, when
    the process is ready.

    A full collection would walk hundreds of thousands of objects of libraries while no token moves. Without them it is
    cheap and may come often, as it should: only it empties CPython's lists of free tuples, 2,000 for each length up to
    20, which several requests at a time fill by some 100 bytes each.

    A thread that wakes up asks the one that computes to let it in after a time that Python sets to 5 ms. A hand-over
    passes six threads, and a token's way out two.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # it takes the number of objects left for the measure of when the next is due
    gc.set_threshold(*gc.get_threshold()[:2], 2)
    sys.setswitchinterval(SWITCH_S)
