"""A model sharded by FSDP2 over a device mesh, its checkpoint saved and loaded."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
fully_shard(model[0], mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
weight = model[0].weight
print(type(weight).__name__, tuple(weight.shape), tuple(weight.to_local().shape))

folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
dist.broadcast_object_list(folder)
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state}
dcp.save(state, checkpoint_id=folder[0])
saved = weight.full_tensor().clone()
with torch.no_grad():
    weight.zero_()
dcp.load(state, checkpoint_id=folder[0])
set_state_dict(
    model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
)
print("loaded", torch.equal(saved, model[0].weight.full_tensor()))
