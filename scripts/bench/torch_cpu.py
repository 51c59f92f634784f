#!/usr/bin/env python3
"""PyTorch peer for the CPU speed comparison: trains a Llama-like model, prints tokens per second.

The model is plain PyTorch (1.13 or later, no transformers): RMSNorm, half-split rope, causal
multi-head attention, SwiGLU, untied head, fp32, AdamW, gradient clipping. It is written for speed
within that: packed qkv and gate_up projections, rope on q and k at once, an in-place additive mask
before softmax, AdamW over lists of tensors (foreach). One step is one micro-batch: forward,
backward, clip, update.

Each step draws its rows at random from a quern token file, or draws random tokens. Reported is the
median over the timed steps, and the best, which is the one to quote from a busy machine.

    OMP_NUM_THREADS=2 python3 scripts/bench/torch_cpu.py [--tokens train.bin] [--json]

PyTorch must find an optimised BLAS: Debian's python3-torch with the reference BLAS, which Debian
installs by default, is twenty times slower (install libopenblas0-openmp).
"""

import argparse
import ctypes
import json
import math
import statistics
import struct
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class RmsNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope_tables(length, head_dim, theta=10000.0):
    """cos and signed sin, (T, 1, D): rope(x) = x cos + swap_halves(x) sin."""
    freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


class Block(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.heads, self.head_dim = args.heads, args.head_dim
        inner = args.heads * args.head_dim
        self.attention_norm = RmsNorm(args.width)
        self.qkv = nn.Linear(args.width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, args.width, bias=False)
        self.ffn_norm = RmsNorm(args.width)
        self.gate_up = nn.Linear(args.width, 2 * args.ffn, bias=False)
        self.down = nn.Linear(args.ffn, args.width, bias=False)

    def attention(self, x, cos, sin, mask):
        b, t, _ = x.shape
        h, d = self.heads, self.head_dim
        qk, v = self.qkv(x).view(b, t, 3 * h, d).split((2 * h, h), dim=2)
        qk = qk * cos + qk.roll(d // 2, -1) * sin  # (B, T, 2H, D)
        q, k = qk.split((h, h), dim=2)
        q, k, v = (y.transpose(1, 2).reshape(b * h, t, d) for y in (q, k, v))
        scores = torch.baddbmm(mask, q, k.transpose(1, 2), alpha=d**-0.5)  # (BH, T, T)
        y = torch.bmm(scores.softmax(-1), v)
        return self.out(y.view(b, h, t, d).transpose(1, 2).reshape(b, t, h * d))

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.attention_norm(x), cos, sin, mask)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.width)
        self.blocks = nn.ModuleList(Block(args) for _ in range(args.layers))
        self.norm = RmsNorm(args.width)
        self.head = nn.Linear(args.width, args.vocab, bias=False)
        cos, sin = rope_tables(args.sequence, args.head_dim)
        mask = torch.full((args.sequence, args.sequence), -math.inf).triu(1)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)
        self.register_buffer("mask", mask)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin, self.mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def read_tokens(path):
    """A quern token file: 64-byte header (magic, u64 count at 16, u32 vocabulary at 24, u32 bytes
    per token at 28), then the tokens, little-endian. Returns (tokens, vocabulary)."""
    try:
        with open(path, "rb") as file:
            header = file.read(64)
    except OSError as error:
        sys.exit(f"{path}: {error.strerror}")
    if len(header) < 64 or header[:8] != b"QUERNTOK":
        sys.exit(f"{path}: not a quern token file: starts with {header[:8]!r}, expected b'QUERNTOK'")
    count, vocab, size = struct.unpack_from("<QII", header, 16)
    if size not in (2, 4):
        sys.exit(f"{path}: {size} bytes per token, expected 2 or 4")
    tokens = np.memmap(path, np.dtype(f"<u{size}"), mode="r", offset=64)
    if len(tokens) < count:
        sys.exit(f"{path}: header says {count} tokens, the file holds {len(tokens)}")
    return tokens[:count], vocab


def batches(args):
    """Yields (tokens, targets), each (B, T) int64, without end."""
    rng = np.random.default_rng(args.seed)
    if args.tokens is None:
        data = rng.integers(0, args.vocab, 1 << 20)
    else:
        data, vocab = read_tokens(args.tokens)
        if vocab > args.vocab:
            sys.exit(f"{args.tokens}: vocabulary {vocab} exceeds --vocab {args.vocab}")
        if len(data) <= args.sequence:
            sys.exit(f"{args.tokens}: {len(data)} tokens, need more than --sequence {args.sequence}")
    while True:
        starts = rng.integers(0, len(data) - args.sequence, args.micro_batch)
        rows = np.stack([data[s:s + args.sequence + 1] for s in starts]).astype(np.int64)
        rows = torch.from_numpy(rows)
        yield rows[:, :-1], rows[:, 1:]


def train(args):
    """Returns (seconds of each timed step, losses of all steps)."""
    torch.manual_seed(args.seed)
    model = Model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95),
                                  weight_decay=0.1, foreach=True)
    source = batches(args)
    seconds, losses = [], []
    for step in range(args.warmup + args.steps):
        start = time.perf_counter()
        loss = model(*next(source))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    return seconds, losses


def keep_freed_memory():
    """Makes glibc's malloc keep large blocks, as the allocators that PyTorch users preload do.

    Without it each large tensor is mapped, faulted in page by page and unmapped: 10-20% of a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    mallopt(m_mmap_max, 0)
    mallopt(m_trim_threshold, 2**31 - 1)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", help="quern token file (default: random tokens)")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing (default 3)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps (default 20)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main():
    args = parse_arguments()
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    seconds, losses = train(args)
    tokens = args.micro_batch * args.sequence
    result = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "best_tokens_per_second": tokens / min(seconds),
        "milliseconds_per_step": 1e3 * statistics.median(seconds),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "torch": torch.__version__,
        "options": vars(args),
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{result['tokens_per_second']:.0f} tok/s (median of {args.steps} steps; best "
              f"{result['best_tokens_per_second']:.0f}), {args.threads} threads, torch "
              f"{torch.__version__}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
