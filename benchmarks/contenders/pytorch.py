"""PyTorch: a plain loop, and the same loop with DistributedDataParallel over Gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from fit_times import FitTimes, measure
from models import MODELS, VOCABULARY
from torch import nn

from contenders.task import WARM_UP_STEPS, Task


def plain(task: Task) -> None:
    """A loop as PyTorch's users write it."""
    torch.set_num_threads(1)
    for name in task.models:
        train(task, name, lambda model: model)


def ddp(task: Task) -> None:
    """The loop with DistributedDataParallel, each rank on data of its own."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for name in task.models:
        train(task, name, nn.parallel.DistributedDataParallel)
    torch.distributed.destroy_process_group()


def train(task: Task, name: str, wrap: Callable[[Any], Any]) -> None:
    """Trains a model for some steps, then for the epoch that is measured, and reports."""
    x, y = (torch.from_numpy(array) for array in task.own_data(name))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()  # channels first
    model = wrap(NETWORKS[name]())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    warm_up = WARM_UP_STEPS * MODELS[name].batch
    epoch(model, optimizer, x[:warm_up], y[:warm_up], MODELS[name].batch)
    times = epoch(model, optimizer, x, y, MODELS[name].batch)
    task.report(name, times, [each.detach().numpy() for each in model.parameters()])


def epoch(model: Any, optimizer: Any, x: Any, y: Any, batch: int) -> FitTimes:
    """Trains on all rows in a new order. A loop has no `fit` around its epoch: the two take the same time."""
    loss_of = nn.CrossEntropyLoss()
    started = time.perf_counter()
    ends = []
    total = torch.zeros(())
    for rows in torch.randperm(len(x)).split(batch):
        optimizer.zero_grad()
        loss = loss_of(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        total += loss.detach()
        ends.append(time.perf_counter())
    ended = time.perf_counter()
    return measure(started, started, ends, ended, ended)


def mlp() -> nn.Module:
    """The small MLP."""
    return dense(784, 128, 64, 10)


def wide() -> nn.Module:
    """The MLP of 22 million parameters."""
    return dense(784, 4096, 4096, 512, 10)


def dense(*widths: int) -> nn.Sequential:
    """Returns dense layers, with ReLU between them."""
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """The network of Keras' MNIST example."""
    convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolutions, *dense(9216, 128, 10))


def normed(before: int, after: int, size: int, stride: int) -> nn.Sequential:
    """Returns a convolution and its batch normalisation."""
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))


class Residual(nn.Module):
    """A block of ResNet-20."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.inner = nn.Sequential(normed(before, after, 3, stride), nn.ReLU(), normed(after, after, 3, 1))
        self.shortcut = nn.Identity() if stride == 1 else normed(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Adds the shortcut."""
        return torch.relu(self.inner(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """ResNet-20."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Residual(before, after) for before, after in zip(widths, widths[1:], strict=False)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(normed(3, 16, 3, 1), nn.ReLU(), *blocks, *head)


class Transformer(nn.Module):
    """An embedding and one block of a Transformer. The embedding's gradient is dense, which is PyTorch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 128)
        self.block = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits."""
        return self.head(self.block(self.embedding(tokens)).mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "wide": wide,
    "resnet": resnet,
    "transformer": Transformer,
}
