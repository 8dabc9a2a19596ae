"""Reads handwritten digits with a CNN, in MindSpore's style: Cells, a loss, a Model that trains.

python examples/digits.py                                          one device
mpirun -n 4 python -m distcell.launch examples/digits.py           four ranks, the same losses
"""

import argparse
import json
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import distcell as dc
from distcell import nn
from distcell.model import Callback, Progress

NUM_TRAIN, NUM_TEST = 1437, 360


class Net(nn.Cell):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)
        self.relu, self.pool, self.flatten = nn.ReLU(), nn.MaxPool2d(2, stride=2), nn.Flatten()
        self.fc1, self.fc2 = nn.Dense(32 * 2 * 2, 64), nn.Dense(64, 10)
        self.drop = nn.Dropout(p=dropout)

    def construct(self, images: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(images))))
        x = self.pool(self.relu(self.bn2(self.conv2(x))))
        x = self.drop(self.relu(self.fc1(self.flatten(x))))
        return self.fc2(x)


class Report(Callback):
    def __init__(self, metrics: Path, every: int) -> None:
        self.is_first, self.every = os.environ.get("RANK", "0") == "0", every
        self.file = (metrics if self.is_first else Path(os.devnull)).open("w")

    def step_end(self, progress: Progress) -> None:
        loss = float(progress.loss)
        print(json.dumps({"step": progress.step, "loss": loss}), file=self.file, flush=True)
        if self.is_first and progress.step % self.every == 0:
            print(f"step {progress.step}  loss {loss:.4f}", flush=True)


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(-1) == labels).float().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    options = {"steps": 200, "batch": 64, "seed": 0, "dropout": 0.1, "metrics": os.devnull}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--dtype", choices=["f32", "f64"], default="f32")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    dtype = {"f32": torch.float32, "f64": torch.float64}[args.dtype]

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=dtype).unsqueeze(1)
    labels = torch.tensor(digits.target)
    draws = torch.Generator().manual_seed(args.seed)  # every rank draws the same batches
    picks = [torch.randint(NUM_TRAIN, (args.batch,), generator=draws) for _ in range(args.steps)]

    net = Net(args.dropout).to(dtype)
    model = dc.Model(
        net,
        loss_fn=nn.CrossEntropyLoss(),
        optimizer=nn.Adam(net.trainable_params(), learning_rate=2e-3, eps=1e-5),
        metrics={"accuracy": accuracy},
    )
    report = Report(Path(args.metrics), every=10)
    model.train(1, [(images[pick], labels[pick]) for pick in picks], callbacks=report)
    found = model.eval([(images[-NUM_TEST:], labels[-NUM_TEST:])])
    if report.is_first:
        print(f"accuracy {found['accuracy']:.4f} on {NUM_TEST} digits that it has not seen")


if __name__ == "__main__":
    main()
