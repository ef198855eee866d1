"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc


def spare_startup() -> None:
    """Take what start-up made out of the garbage collector's sight; call it once, when the process is ready.

    A full collection would walk hundreds of thousands of objects of libraries while no token moves. Without them it is
    cheap and may come often, as it should: only it empties CPython's lists of free tuples, 2,000 for each length up to
    20, which several requests at a time fill by some 100 bytes each.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # it takes the number of objects left for the measure of when the next is due
    gc.set_threshold(*gc.get_threshold()[:2], 2)
