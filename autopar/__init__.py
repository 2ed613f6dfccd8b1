"""Automatic parallelisation for JAX.

import autopar as ap

step = ap.parallelize(train_step)        # plain or jax.jit-ed
params, opt_state, loss = step(params, opt_state, batch)
print(step.plan(params, opt_state, batch).summary())
"""

from autopar import errors
from autopar.api import ParallelFunction, load_plan, make_plan, parallelize
from autopar.cluster import Cluster
from autopar.ir.mesh import Mesh
from autopar.methods import (
    Auto,
    AutoLayers,
    AutoStages,
    DataParallel,
    ManualParallel,
    ManualStages,
    PipeshardParallel,
    ShardParallel,
    UniformStages,
    Zero2Parallel,
    Zero3Parallel,
)
from autopar.plans import Plan
from autopar.staged import StagedPlan

__all__ = [
    "Auto",
    "AutoLayers",
    "AutoStages",
    "Cluster",
    "DataParallel",
    "ManualParallel",
    "ManualStages",
    "Mesh",
    "ParallelFunction",
    "PipeshardParallel",
    "Plan",
    "ShardParallel",
    "StagedPlan",
    "UniformStages",
    "Zero2Parallel",
    "Zero3Parallel",
    "errors",
    "load_plan",
    "make_plan",
    "parallelize",
]
__version__ = "0.1.0"
