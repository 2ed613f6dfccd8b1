"""Virtual CPU devices for this process; only for programs that own it, such as the command line.

Both settings are read when JAX first touches its CPU backend, and count for nothing afterwards.
"""

from __future__ import annotations

import os

import jax

THREADS_PER_DEVICE = 4
"""Threads of the CPU client for each virtual device; with fewer than two a collective can wait for
partners that hold no thread, and XLA ends the process."""


def request_cpu_devices(count: int) -> None:
    """Ask for `count` CPU devices, with the threads they need.

    Accelerators are left alone. Where the backend is up already, nothing changes: whether there
    are enough devices is found out by who uses them.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend is up
        return
    threads = int(os.environ.get("NPROC", "0") or 0)
    os.environ["NPROC"] = str(max(threads, THREADS_PER_DEVICE * count))
