# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first plan
#
# `autopar` takes a function that you already jit, finds out how to run it on several devices, and
# runs it so, with the same result. This notebook needs no accelerator: it splits the CPU into eight
# virtual devices. Both settings must stand before JAX first touches its devices; `NPROC` gives the
# CPU client enough threads for them.

# %%
"""Settings that must stand before JAX touches its devices."""

import os
import tempfile
from itertools import islice
from pathlib import Path

import jax
from IPython.display import SVG

import autopar as ap
from autopar import demo
from autopar.report.picture import plan_picture

os.environ["NPROC"] = "32"
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
len(jax.devices())

# %% [markdown]
# ## A train step
#
# A two-layer transformer that learns to predict the next byte of Python's own manual, with clipped
# AdamW. The step is plain JAX and optax and knows nothing of devices.

# %%
config = demo.DemoConfig(steps=20, batch=16, length=32, layers=2, width=64, heads=8)
train_step = demo.make_step(config)
params, opt_state = demo.init_state(config)
batch = next(demo.batches(config))
sum(leaf.size for leaf in jax.tree.leaves(params))

# %% [markdown]
# ## Parallelise it
#
# One call. Nothing is traced or planned yet; `plan` does so without running anything. The default
# method searches all ways to lay out every op over all logical meshes of the cluster, and says how
# good its answer is known to be.

# %%
step = ap.parallelize(train_step, cluster=ap.Cluster.local(), batch_argnums=(2,))
plan = step.plan(params, opt_state, batch)
print(plan.summary())

# %% [markdown]
# ## Look into it
#
# What will be communicated in a step, with the line of the function that asks for it:

# %%
for line in sorted(plan.collectives, key=lambda line: -line.seconds * line.times)[:8]:
    where = f"{line.kind} over {'+'.join(line.axes)}"
    print(f"{line.times} x {where:22}{line.bytes:9,} bytes  {line.name:28}{line.source}")

# %% [markdown]
# Where the arguments lie, as the `PartitionSpec`s that JAX itself would take:

# %%
arguments, results = plan.partition_specs()
for name in list(arguments)[:8]:
    print(f"{name:38}{arguments[name]}")

# %% [markdown]
# The same as a picture: what part of each argument a device holds, and where the time goes.

# %%
SVG(plan_picture(plan.frozen))

# %% [markdown]
# ## Run it
#
# `step` is called like the function it was made from. The losses are those of a single device.

# %%
single = jax.jit(train_step)
ours, theirs = (params, opt_state), (params, opt_state)
for number, tokens in enumerate(islice(demo.batches(config), config.steps)):
    *ours, loss = step(*ours, tokens)
    *theirs, expected = single(*theirs, tokens)
    if number % 5 == 4:
        print(f"step {number + 1:2}  parallel {loss:.4f}  one device {expected:.4f}")

# %% [markdown]
# ## Do not take its word for it
#
# The audit compiles the program for as many devices in a process of its own, and holds what XLA
# made of it against the plan: no collective may run that is not planned. The check recomputes
# time, memory and feasibility without any of the solver's code.

# %%
print(plan.audit().summary())

# %%
print(plan.check().summary())

# %% [markdown]
# ## Other ways, other hardware, no arrays
#
# A method names a search space: data parallelism, ZeRO, or everything. A cluster is a value, and
# planning needs neither devices nor arrays: here is a model with 25 million parameters, of which
# only the shapes exist, on eight GPUs that nobody has to own.

# %%
large = demo.DemoConfig(batch=32, length=512, layers=2, width=1024, heads=16)
shapes = jax.eval_shape(lambda: demo.init_state(large))
tokens = jax.ShapeDtypeStruct((large.batch, large.length + 1), "int32")
gpus = ap.Cluster.preset("h100-80g", hosts=1, devices_per_host=8)
for method in (ap.DataParallel(), ap.Zero3Parallel(), ap.Auto()):
    other = ap.make_plan(
        demo.make_step(large),
        *shapes,
        {"tokens": tokens},
        cluster=gpus,
        method=method,
        batch_argnums=(2,),
    )
    name, cost = type(method).__name__, other.cost
    print(
        f"{name:14} on mesh {other.mesh!s:8} {cost.step_seconds * 1e3:6.2f} ms predicted "
        f"({cost.communication_seconds / cost.step_seconds:.0%} of it communication), "
        f"{cost.peak_bytes / 2**20:,.0f} MiB a device"
    )

# %% [markdown]
# ## Keep it
#
# A plan is a file of decisions; no program is in it. It is read back without a search, and refused
# if the function has changed since.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "plan.json")
    plan.save(path)
    loaded = ap.load_plan(path)
again = ap.parallelize(train_step, plan=loaded)
*_, loss = again(params, opt_state, batch)
loaded.frozen == plan.frozen, float(loss)


# %%
def changed_step(params, opt_state, batch):
    """Another function: its loss is doubled."""
    params, opt_state, loss = train_step(params, opt_state, batch)
    return params, opt_state, 2 * loss


try:
    loaded.bind(changed_step, params, opt_state, batch)
except ap.errors.PlanError as error:
    print(str(error).splitlines()[0])
