"""The same llama in PyTorch, for `bench_gpu.py`: eager modules under `torch.compile`, fused attention and AdamW."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def rotate(x, positions):
    """Rotary positions of [batch, heads, seq, head_dim]."""
    half = x.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)
    a = x[..., :half]
    b = x[..., half:]
    cos = angle.cos()
    sin = angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width, heads, mlp):
        super().__init__()
        self.heads = heads
        self.attn_norm = nn.RMSNorm(width, 1e-5)
        self.mlp_norm = nn.RMSNorm(width, 1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)

    def forward(self, x, positions):
        b, s, d = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, d))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """A decoder with the sizes of a `meshpar.Llama`, and as many key heads as query heads."""

    def __init__(self, model):
        super().__init__()
        self.table = nn.Embedding(model.padded_vocab, model.hidden_size)
        blocks = [Block(model.hidden_size, model.num_heads, model.intermediate_size) for _ in range(model.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(model.hidden_size, 1e-5)
        self.head = nn.Linear(model.hidden_size, model.padded_vocab, bias=False)

    def forward(self, tokens, targets):
        x = self.table(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        for block in self.blocks:
            x = block(x, positions)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_step(model, batch_size, seq_len):
    """A function without arguments that runs one training step and waits for it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    decoder = torch.compile(Decoder(model).to(device))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-4, fused=device == "cuda")
    tokens = torch.randint(model.vocab_size, (batch_size, seq_len + 1), device=device)

    def step():
        with torch.autocast(device, torch.bfloat16):
            loss = decoder(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step
