"""Everything that `init_process_group` can be told, and groups of its own."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

cuda = torch.cuda.is_available()
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group(
    backend="nccl" if cuda else "gloo",
    init_method="env://",
    rank=rank,
    world_size=world_size,
    timeout=timedelta(minutes=5),
    device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else None,
)
device = torch.device("cuda" if cuda else "cpu")
total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)
alone = dist.new_group([0])
if rank == 0:
    dist.all_reduce(total, group=alone)
    dist.destroy_process_group(alone)
dist.barrier()
print("total", total.item(), dist.get_world_size())
dist.destroy_process_group()
print("initialized", dist.is_initialized())
