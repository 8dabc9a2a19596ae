"""Trains a GPT on bytes of Python's own documentation, on one device or on many.

python train.py                                                   one device
mpirun -n 8 python -m distcell.launch --strategy tensor train.py  eight ranks, the same losses

It is written for one device. `dc.parallelize` is all that it knows of ranks.
"""

import argparse
import json
import os
import sys
import time
from collections import OrderedDict
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress
from torch import Tensor, nn

import distcell as dc

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 4
DTYPES = {"f32": torch.float32, "f64": torch.float64}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(*(h.transpose(1, 2) for h in heads), is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.ln2, up, down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU(), down=down))
        self.drop = nn.Dropout(dropout)
        nn.init.zeros_(self.attn.o.weight)  # a block that starts as the identity learns faster
        nn.init.zeros_(down.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Gpt(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.head.weight = self.embed.weight  # one table reads the bytes and writes them

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample(model: nn.Module, prompt: str, length: int, draws: torch.Generator) -> str:
    model.eval()
    text = list(prompt.encode())
    for _ in range(length):
        window = text[-CONTEXT:]  # filled up to one size, so that one program serves all calls
        ids = torch.tensor([window + [0] * (CONTEXT - len(window))])
        likely = (model(ids)[0, len(window) - 1] / 0.7).softmax(-1)
        text.append(int(torch.multinomial(likely, 1, generator=draws)))
    return bytes(text).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in {"steps": 400, "batch": 16, "seed": 0, "dropout": 0.1}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--metrics", type=Path, help="a file for the losses, as JSON lines")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    draws = torch.Generator().manual_seed(args.seed)  # every rank draws the same batches
    data = torch.tensor(list("\n".join(topics.values()).encode()))
    model = dc.parallelize(Gpt(args.dropout).to(DTYPES[args.dtype]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-5)

    is_first = os.environ.get("RANK", "0") == "0"
    metrics = args.metrics.open("w") if args.metrics and is_first else None
    columns = "step {task.completed}/{task.total}", BarColumn(), "{task.description}"
    with Progress(*columns, disable=not (is_first and sys.stdout.isatty())) as bar:
        task, begin = bar.add_task("", total=args.steps), 0.0
        for step in range(1, args.steps + 1):
            starts = torch.randint(len(data) - CONTEXT, (args.batch, 1), generator=draws)
            rows = data[starts + torch.arange(CONTEXT + 1)]
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            begin = begin or time.perf_counter()  # the first step prepares the others
            speed = (step - 1) * args.batch * CONTEXT / (time.perf_counter() - begin)
            text = f"loss {loss.item():.4f}   {speed:,.0f} tokens/s"
            bar.update(task, advance=1, description=text)
            if is_first and bar.disable and (step % 20 == 0 or step in (1, args.steps)):
                print(f"step {step}/{args.steps}   {text}", flush=True)
            if metrics:
                print(json.dumps({"step": step, "loss": loss.item()}), file=metrics, flush=True)
    text = sample(model, "The ", 160, draws)
    if is_first:
        print(text)


if __name__ == "__main__":
    main()
