"""Submeshes of a cluster: its levels seen as (hosts, devices per host)."""

from __future__ import annotations

import math

from autopar.cluster import Cluster
from autopar.errors import ClusterError
from autopar.solver.inter.submesh import Shape, divisor_submeshes, within_host


def flat_shape(cluster: Cluster) -> Shape:
    """The cluster as (hosts, devices per host)."""
    *outer, inner = cluster.shape
    return math.prod(outer), inner


def submesh_cluster(cluster: Cluster, shape: Shape) -> Cluster:
    """The cluster of a submesh of (hosts, devices of each).

    Raises:
        ClusterError: the shape does not divide the cluster's levels.
    """
    hosts, per_host = shape
    sizes = [1] * (len(cluster.shape) - 1)
    for level in reversed(range(len(sizes))):
        sizes[level] = math.gcd(hosts, cluster.shape[level])
        hosts //= sizes[level]
    if hosts != 1:
        raise ClusterError("a submesh does not fit the cluster", got=f"{shape} of {cluster}")
    return cluster.submesh((*sizes, per_host))


def allowed_shapes(cluster: Cluster) -> tuple[Shape, ...]:
    """Submeshes that one worker can own: on a Ray cluster those inside one host."""
    shapes = divisor_submeshes(flat_shape(cluster))
    return tuple(s for s in shapes if within_host(s)) if cluster.kind == "ray" else shapes
