"""Trains a GPT on bytes of Python's documentation; all that it knows of ranks is `dc.parallelize`.

python train.py                                                    one device
mpirun -n 8 python -m distcell.launch --strategy tensor train.py   eight ranks, the same losses
"""

import argparse
import json
import os
import time
from collections import OrderedDict
from pathlib import Path
from pydoc_data.topics import topics

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import distcell as dc

VOCAB, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (HEADS, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in heads)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
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
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        nn.init.normal_(self.pos.weight, std=0.05)
        self.head.weight = self.embed.weight  # one table reads the bytes and writes them

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.drop(self.embed(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device)))
        scores = self.head(self.norm(self.blocks(x)))
        return scores if targets is None else cross_entropy(scores.flatten(0, 1), targets.flatten())


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
    options = {"steps": 400, "batch": 16, "seed": 0, "dropout": 0.1, "metrics": os.devnull}
    for name, default in options.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--dtype", choices=["f32", "f64"], default="f32")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    draws = torch.Generator().manual_seed(args.seed)  # every rank draws the same batches
    data = torch.tensor(list("\n".join(topics.values()).encode()))
    model = Gpt(args.dropout).to({"f32": torch.float32, "f64": torch.float64}[args.dtype])
    model = dc.parallelize(model)  # the one line that a script for one device lacks
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-5)

    is_first = os.environ.get("RANK", "0") == "0"
    path = Path(args.metrics if is_first else os.devnull)  # gets the losses, as JSON lines
    is_drawn = is_first and os.isatty(1)
    with path.open("w") as metrics, Progress(disable=not is_drawn) as bar:
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
            text = f"step {step}/{args.steps}  loss {loss.item():.4f}  {speed:,.0f} tokens/s"
            bar.update(task, advance=1, description=text)
            if is_first and not is_drawn and (step % 20 == 0 or step in (1, args.steps)):
                print(text, flush=True)
            print(json.dumps({"step": step, "loss": loss.item()}), file=metrics, flush=True)
    text = sample(model, "The ", 120, draws)
    if is_first:
        print(text)


if __name__ == "__main__":
    main()
