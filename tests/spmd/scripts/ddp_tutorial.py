"""As PyTorch's tutorial on multi-GPU training with torchrun, on data made up here."""

import argparse
import os

import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def ddp_setup():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")


class Trainer:
    def __init__(self, model, train_data, optimizer):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.global_rank = int(os.environ["RANK"])
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", self.local_rank) if on_gpu else torch.device("cpu")
        self.train_data = train_data
        self.optimizer = optimizer
        self.model = DDP(model.to(self.device), device_ids=[self.local_rank] if on_gpu else None)

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            self.train_data.sampler.set_epoch(epoch)
            for source, targets in self.train_data:
                self.optimizer.zero_grad()
                output = self.model(source.to(self.device))
                loss = F.mse_loss(output, targets.to(self.device))
                loss.backward()
                self.optimizer.step()
            if epoch == max_epochs - 1:
                print(f"epoch {epoch}, steps {len(self.train_data)}")


def load_train_objs() -> tuple[Dataset, torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    train_set = TensorDataset(torch.rand(64, 20), torch.rand(64, 1))
    model = torch.nn.Linear(20, 1)
    return train_set, model, torch.optim.SGD(model.parameters(), lr=1e-3)


def main(total_epochs, batch_size):
    ddp_setup()
    dataset, model, optimizer = load_train_objs()
    train_data = DataLoader(
        dataset,
        batch_size=batch_size,
        num_workers=2,
        persistent_workers=True,
        shuffle=False,
        sampler=DistributedSampler(dataset),
    )
    trainer = Trainer(model, train_data, optimizer)
    trainer.train(total_epochs)
    weights = trainer.model.module.weight.detach().double().sum().item()
    print(f"weights {weights:.6f}")
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--total_epochs", type=int, default=2)
    parser.add_argument("--batch_size", default=8, type=int)
    args = parser.parse_args()

    main(args.total_epochs, args.batch_size)
