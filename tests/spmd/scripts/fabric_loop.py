"""As Fabric's guide converts plain PyTorch."""

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    dataloader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=4))
    model.train()
    for inputs, targets in dataloader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    fabric.barrier()
    print(type(fabric.strategy).__name__, fabric.world_size, len(dataloader))
    print(fabric.all_reduce(torch.tensor(float(fabric.global_rank)), reduce_op="sum").item())


if __name__ == "__main__":
    main()
