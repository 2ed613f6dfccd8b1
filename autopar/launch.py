"""Virtual CPU devices for this process; only for programs that own it, such as the command line.

Both settings are read when JAX first touches its CPU backend, and count for nothing afterwards.
"""

from __future__ import annotations

import os

import jax

from autopar.errors import ClusterError

MOST_DEVICES = 1024
"""Virtual devices are threads and buffers of one process: more would take minutes to start."""

THREADS_PER_DEVICE = 4
"""Threads of the CPU client for each virtual device; with fewer than two a collective can wait for
partners that hold no thread, and XLA ends the process."""


def request_cpu_devices(count: int) -> None:
    """Ask for `count` CPU devices, with the threads they need.

    Accelerators are left alone. Where the backend is up already, nothing changes: whether there
    are enough devices is found out by who uses them.

    Raises:
        ClusterError: more than MOST_DEVICES.
    """
    if count > MOST_DEVICES:
        raise ClusterError(
            f"{count} virtual CPU devices are too many for one process",
            why=f"each takes threads and memory; {MOST_DEVICES} is the limit here",
            remedy=f"abstract:{count} plans for as many without starting them",
        )
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # the backend is up
        return
    threads = int(os.environ.get("NPROC", "0") or 0)
    os.environ["NPROC"] = str(max(threads, THREADS_PER_DEVICE * count))
