"""Trains a small byte-level GPT on the Python standard library's own sources, with checkpoints by tierd.

The same command starts and resumes: kill it at any instant, run it again, and the loss curve is bit for bit that of an
undisturbed run. This holds on the same machine and device with the same --threads and --steps: another number of
threads adds floats in another order, and the learning rate depends on --steps. All calls to tierd are in `main`.

Under torchrun, on one node or several, each rank has a shard of the model (FSDP2) and data of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
import zlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import tierd_client
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

VOCABULARY = 256  # one token is one byte
CORPUS_BYTES_MAX = 8 << 20
SEED = 1337


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    layers: int
    heads: int
    width: int
    block_size: int = 128  # tokens that the model sees at once
    dropout: float = 0.1


SHAPES = {
    "tiny": Shape(layers=2, heads=4, width=96),  # 0.25 M parameters: for tests
    "default": Shape(layers=6, heads=6, width=384),  # 10.8 M
    "large": Shape(layers=12, heads=12, width=768),  # 85 M
}


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each behind a LayerNorm and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.dropout = shape.dropout
        self.norm_attention = nn.LayerNorm(shape.width)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width)
        self.attention_out = nn.Linear(shape.width, shape.width)
        self.norm_perceptron = nn.LayerNorm(shape.width)
        self.perceptron_in = nn.Linear(shape.width, 4 * shape.width)
        self.perceptron_out = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).split(width, dim=2)
        query, key, value = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y = self.attention_out(y.transpose(1, 2).reshape(batch, length, width))
        x = x + F.dropout(y, self.dropout, self.training)
        y = self.perceptron_out(F.gelu(self.perceptron_in(self.norm_perceptron(x))))
        return x + F.dropout(y, self.dropout, self.training)


class GPT(nn.Module):
    """Bytes in (batch × length, int64), logits of the next byte out (batch × length × 256)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.block_size, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.logits = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.logits.weight = self.tokens.weight  # tied: one tensor reads bytes and predicts them
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


def read_corpus() -> bytes:
    """The standard library's top-level modules, sorted by name: the same bytes at each start on one machine."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    return text[:CORPUS_BYTES_MAX]


class RandomCrops:
    """Batches of crops at random offsets, from its own generator. The generator's state is the position in the data."""

    def __init__(self, corpus: bytes, *, batch_size: int, block_size: int, rank: int = 0) -> None:
        self.tokens = torch.frombuffer(bytearray(corpus), dtype=torch.uint8)
        self.checksum = zlib.crc32(corpus)
        self.batch_size = batch_size
        self.block_size = block_size
        self.generator = torch.Generator().manual_seed(SEED + rank)

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (batch × block, int64): the targets are the inputs shifted by one byte."""
        last = len(self.tokens) - self.block_size - 1
        starts = torch.randint(last + 1, (self.batch_size, 1), generator=self.generator)
        crops = self.tokens[starts + torch.arange(self.block_size + 1)].long()
        return crops[:, :-1], crops[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "corpus_crc32": self.checksum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["corpus_crc32"] != self.checksum:
            raise ValueError("resume training: the text differs from the checkpoint's (another Python version?)")
        self.generator.set_state(state["generator"])


def join_ranks(device: str) -> tuple[int, int]:
    """(rank, number of ranks), as torchrun has set them in the environment."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return dist.get_rank(), dist.get_world_size()


def build_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only, not for biases and norms."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=True)


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over the first tenth of the steps, then half a cosine down to a tenth of the learning rate."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def open_loss_file(path: Path, start: int) -> BinaryIO:
    """The JSONL loss curve, cut back to the lines of steps up to `start`: later steps are trained again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    file = path.open("r+b")
    kept = 0
    for line in file:
        # A crash can leave an incomplete last line.
        if not line.endswith(b"\n") or json.loads(line)["step"] > start:
            break
        kept += len(line)
    file.truncate(kept)
    file.seek(kept)
    return file


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT; the same command starts and resumes.")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--run", default="gpt-10m", help="name of the run; its checkpoints are found by it")
    parser.add_argument("--socket", help="the daemon's socket (default: $TIERD_SOCKET, else tierd's default)")
    parser.add_argument("--every", type=int, default=10, help="snapshot every so many steps")
    parser.add_argument("--milestone-every", type=int, default=0, help="milestone every so many steps; 0: never")
    parser.add_argument("--loss-file", type=Path, default=Path("loss.jsonl"), help="loss curve, one JSON line a step")
    parser.add_argument("--model-size", choices=list(SHAPES), default="default")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=128, help="tokens that the model sees at once")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice. Changes the result")
    parser.add_argument("--step-delay-s", type=float, default=0.0, help="pause after each step")
    parser.add_argument("--no-tierd", action="store_true", help="no snapshots, no daemon: an undisturbed run")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms on CUDA need it
    torch.use_deterministic_algorithms(True)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    rank, world_size = join_ranks(device)

    preset = SHAPES[args.model_size]
    shape = Shape(layers=preset.layers, heads=preset.heads, width=preset.width, block_size=args.block_size)
    model = GPT(shape).to(device)
    if world_size > 1:
        fully_shard(model, mesh=init_device_mesh(device, (world_size,)))
    optimizer = build_optimizer(model, args.learning_rate)
    scheduler = build_scheduler(optimizer, args.steps)
    data = RandomCrops(read_corpus(), batch_size=args.batch_size, block_size=args.block_size, rank=rank)
    print(f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}", flush=True)

    def train_step() -> float:
        inputs, targets = (tokens.to(device) for tokens in data.next_batch())
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress["tokens"] += world_size * inputs.numel()
        loss = loss.detach()
        if world_size > 1:
            dist.all_reduce(loss)
        return loss.item() / world_size

    # All that a resume needs. TrainingState adds the random number generators of Python, numpy and torch by itself.
    progress = {"tokens": 0}
    state = tierd_client.TrainingState(
        model=model, optimizer=optimizer, scheduler=scheduler, dataloader=data, extra=progress
    )
    client = None if args.no_tierd else tierd_client.connect(run=args.run, socket=args.socket, every_steps=args.every)
    with client or nullcontext():  # handles signals; on exit after a stop, waits until the last snapshot is durable
        found = client.restore(state) if client else None
        start = found.step if found else 0
        if found:
            print(f"resumed at step {found.step} from {found.tier} in {found.seconds:.2f} s", flush=True)
        else:
            print("starting fresh", flush=True)

        shot = None
        with open_loss_file(args.loss_file, start) if rank == 0 else open(os.devnull, "wb") as loss_file:
            for step in range(start + 1, args.steps + 1):
                started = time.monotonic()
                rate = scheduler.get_last_lr()[0]
                loss = train_step()
                loss_file.write(json.dumps({"step": step, "loss": loss, "lr": rate}).encode() + b"\n")
                loss_file.flush()  # before the snapshot: a killed trainer's curve holds what its checkpoints hold
                if step % 10 == 0 or step == args.steps:
                    seconds = time.monotonic() - started
                    print(
                        f"step {step} loss {loss:.4f} lr {rate:.2e} {seconds:.2f} s, {progress['tokens']} tokens",
                        flush=True,
                    )
                if client:
                    milestone = f"step-{step}" if args.milestone_every and step % args.milestone_every == 0 else None
                    if client.due(step) or client.stopping or milestone or step == args.steps:
                        try:
                            shot = client.snapshot(step, state, metrics={"loss": loss}, milestone=milestone)
                        except tierd_client.TierdError as error:
                            # Training continues without a daemon. It must stop if another trainer has taken over
                            # the run, and a failed last snapshot is an error, because no later one replaces it.
                            if isinstance(error, tierd_client.Stale) or client.stopping or step == args.steps:
                                raise
                            print(f"warning: no snapshot of step {step}: {error}", file=sys.stderr, flush=True)
                    if client.stopping:
                        print(f"stopping at step {step}: the same command resumes", flush=True)
                        return 0
                time.sleep(args.step_delay_s)
            if shot:
                shot.wait_persisted(60)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except tierd_client.TierdError as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        sys.exit(refusal.exit_code)
