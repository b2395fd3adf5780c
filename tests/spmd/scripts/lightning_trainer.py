"""As Lightning's guide trains a module on two processes."""

import tempfile

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class LitModel(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)


class FailsOnRankOne(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            raise ValueError("a bad batch")


def main(*callbacks):
    pl.seed_everything(1, verbose=False)
    inputs = torch.randn(64, 4)
    train_set = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = LitModel()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=2,
            num_nodes=1,
            strategy="ddp",
            max_epochs=3,
            default_root_dir=folder,
            callbacks=list(callbacks),
        )
        trainer.fit(model, DataLoader(train_set, batch_size=4, shuffle=True))
    return model, (type(trainer.strategy).__name__, trainer.world_size, trainer.global_step)
