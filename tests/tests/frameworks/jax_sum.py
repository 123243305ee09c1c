"""One process per node, as docs/frameworks.md shows it: sums over all devices of all processes."""

import os

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize(
    num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
    process_id=int(os.environ["JAX_PROCESS_ID"]),
)
rank, world = jax.process_index(), jax.process_count()
mesh = Mesh(jax.devices(), ("all",))
local = [jax.device_put(jnp.ones((1,)) * (rank * len(jax.local_devices()) + index + 1), device)
         for index, device in enumerate(jax.local_devices())]
shape = (len(jax.devices()),)
array = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec("all")), local)
total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
print(f"rank={rank} world={world} node={os.environ['SWITCHYARD_NODE_RANK']} local={len(jax.local_devices())} sum={int(total)} version={jax.__version__}", flush=True)
multihost_utils.sync_global_devices("done")
