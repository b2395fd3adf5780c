"""A DTensor over a mesh that forms the process group by itself."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

if dist.is_initialized():
    dist.destroy_process_group()
mesh = init_device_mesh("cpu", (2,))
tensor = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
print(mesh.size(), tuple(tensor.to_local().shape), tensor.sum().full_tensor().item())
dist.destroy_process_group()
