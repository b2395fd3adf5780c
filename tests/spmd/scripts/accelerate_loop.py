"""As Accelerate's quick tour."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset


def training_function():
    accelerator = Accelerator()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    training_dataloader = DataLoader(dataset, batch_size=4, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for inputs, targets in training_dataloader:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    losses = accelerator.gather(loss.detach().reshape(1))
    accelerator.wait_for_everyone()
    names = (type(model).__name__, accelerator.num_processes, len(training_dataloader))
    print(*names, tuple(losses.shape))
    accelerator.print("said by the main process")
    accelerator.end_training()


if __name__ == "__main__":
    training_function()
