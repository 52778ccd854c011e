"""Networks of the zoo as somebody who wants them fast writes them in PyTorch: its attention, one product for queries,
keys and values, batch norms folded, convolutions channels-last.  They stand beside the exports for their times; their
weights are random, and ``PARAMETERS`` in ``compiled.py`` holds their number against the exports'.

Source: the published architectures; sizes are those of the exports in ``benchmarks/zoo``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def _heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads x size) to (batch, heads, tokens, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """(batch, heads, tokens, size) to (batch, tokens, heads x size)."""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Self-attention by one joint projection."""

    def __init__(self, width: int, heads: int, groups: int | None = None, bias: bool = True) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups or heads
        self.parts = (width, *(self.groups * (width // heads),) * 2)
        self.inside = nn.Linear(width, sum(self.parts), bias=bias)
        self.outside = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None,
                turn: tuple[Tensor, Tensor] | None = None) -> Tensor:
        q, k, v = self.inside(x).split(self.parts, -1)
        q, k, v = _heads(q, self.heads), _heads(k, self.groups), _heads(v, self.groups)
        if turn is not None:
            q, k = _rotated(q, *turn), _rotated(k, *turn)
        return self.outside(_joined(functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=self.groups != self.heads)))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Block(nn.Module):
    """A transformer's block; its norms stand before its halves, or behind them."""

    def __init__(self, width: int, heads: int, before: bool, gelu: str = "none") -> None:
        super().__init__()
        self.before, self.gelu = before, gelu
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        if self.before:
            x = x + self.attention(self.first(x), mask, causal)
            return x + self.wide(self.second(x))
        x = self.first(x + self.attention(x, mask, causal))
        return self.second(x + self.wide(x))

    def wide(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate=self.gelu))


class Bert(nn.Module):
    """BERT-base's encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(size, 768) for size in (30522, 512, 2))
        self.norm = nn.LayerNorm(768)
        self.blocks = nn.ModuleList(Block(768, 12, before=False) for _ in range(12))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight[:ids.shape[1]] + self.kinds.weight[0])
        seen = mask.bool()[:, None, None, :].expand(-1, 1, ids.shape[1], -1)
        for block in self.blocks:
            x = block(x, seen)
        return x


class Gpt2(nn.Module):
    """GPT-2's smallest, without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50257, 768), nn.Embedding(1024, 768)
        self.blocks = nn.ModuleList(Block(768, 12, before=True, gelu="tanh") for _ in range(12))
        self.norm = nn.LayerNorm(768)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        return self.norm(x)


class LlamaBlock(nn.Module):
    """RMSNorm, grouped queries with rotary embedding, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(2048, 32, 4, bias=False)
        self.up, self.down = nn.Linear(2048, 2 * 5632, bias=False), nn.Linear(5632, 2048, bias=False)
        self.first, self.second = nn.RMSNorm(2048, 1e-5), nn.RMSNorm(2048, 1e-5)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.first(x), causal=True, turn=turn)
        gate, up = self.up(self.second(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Eight blocks of a LLaMA, without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4096, 2048)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(8))
        self.norm = nn.RMSNorm(2048, 1e-5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        rates = 10000.0 ** (-torch.arange(0, 64, 2, device=ids.device) / 64)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        turn = (torch.cat((angles.cos(),) * 2, -1).to(x.dtype), torch.cat((angles.sin(),) * 2, -1).to(x.dtype))
        for block in self.blocks:
            x = block(x, turn)
        return self.norm(x)


class T5(nn.Module):
    """Eight blocks of a T5 encoder whose feed-forward is gated, one relative bias for all."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(4096, 768), nn.Embedding(32, 12)
        self.attention = nn.ModuleList(Attention(768, 12, bias=False) for _ in range(8))
        self.up = nn.ModuleList(nn.Linear(768, 2 * 2048, bias=False) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(2048, 768, bias=False) for _ in range(8))
        self.norms = nn.ModuleList(nn.RMSNorm(768, 1e-6) for _ in range(17))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.words(ids)
        places = torch.arange(ids.shape[1], device=ids.device)
        bias = self.bias(self._bucket(places[None, :] - places[:, None])).permute(2, 0, 1)[None]
        lowest = torch.finfo(x.dtype).min
        bias = bias + torch.where(mask.bool()[:, None, None, :], 0.0, lowest).to(x.dtype)
        for layer, (attention, up, down) in enumerate(zip(self.attention, self.up, self.down, strict=True)):
            x = x + attention(self.norms[2 * layer](x), bias, scale=1.0)
            gate, wide = up(self.norms[2 * layer + 1](x)).chunk(2, -1)
            x = x + down(functional.gelu(gate, approximate="tanh") * wide)
        return self.norms[16](x)

    @staticmethod
    def _bucket(apart: Tensor) -> Tensor:
        """Of 32 buckets, 16 a direction, half of them exact and half logarithmic to a distance of 128."""
        far = apart.abs()
        large = 8 + (torch.log(far.clamp(min=1) / 8) / 2.772588722239781 * 8).long()
        return torch.where(apart > 0, 16, 0) + torch.where(far < 8, far, large.clamp(max=15))


class Vit(nn.Module):
    """ViT-base of 16 x 16 patches, without its head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, 768)), nn.Parameter(torch.zeros(1, 197, 768))
        self.blocks = nn.ModuleList(Block(768, 12, before=True) for _ in range(12))
        self.norm = nn.LayerNorm(768)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Tower(nn.Module):
    """Four layers of 1,024 with a gated residual and Mish, and one output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(1024)) for _ in range(4))
        self.last = nn.Linear(1024, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, shift in zip(self.layers, self.shifts, strict=True):
            made = layer(x)
            gate = made.sigmoid()
            x = functional.mish(x + gate * made + (1 - gate) * shift * made)
        return self.last(x)


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 with a residual."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(before, inner, 1), nn.Conv2d(inner, inner, 3, stride, 1)
        self.three = nn.Conv2d(inner, 4 * inner, 1)
        self.side = nn.Conv2d(before, 4 * inner, 1, stride) if stride > 1 or before != 4 * inner else None

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.two(functional.relu(self.one(x))))
        return functional.relu(self.three(inner) + (x if self.side is None else self.side(x)))


class ResNet50(nn.Module):
    """ResNet-50 without its head, batch norms folded into the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 7, 2, 3)
        blocks, before = [], 64
        for stage, (inner, count) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3), strict=True)):
            for place in range(count):
                blocks.append(Bottleneck(before, inner, 2 if stage and not place else 1))
                before = 4 * inner
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(functional.max_pool2d(functional.relu(self.stem(x)), 3, 2, 1))


class ConvNextBlock(nn.Module):
    """Depthwise 7 x 7, LayerNorm, two products, a factor a channel, a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.factor * self.down(functional.gelu(self.up(y)))).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """ConvNeXt-tiny without its head."""

    def __init__(self) -> None:
        super().__init__()
        widths = (96, 192, 384, 768)
        self.downs = nn.ModuleList(nn.Conv2d(before, width, size, size) for before, width, size in
                                   zip((3, *widths), widths, (4, 2, 2, 2), strict=False))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in (96, *widths[:3]))
        self.stages = nn.ModuleList(nn.Sequential(*(ConvNextBlock(width) for _ in range(count)))
                                    for width, count in zip(widths, (3, 3, 9, 3), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for number, (down, norm, stage) in enumerate(zip(self.downs, self.norms, self.stages, strict=True)):
            x = down(x) if number == 0 else down(self._over_channels(norm, x))
            x = stage(self._over_channels(norm, x) if number == 0 else x)
        return x

    @staticmethod
    def _over_channels(norm: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = norm(x.permute(0, 2, 3, 1))
        return y.permute(0, 3, 1, 2)


class Inverted(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection; with a residual where nothing changes."""

    def __init__(self, before: int, after: int, size: int, stride: int, times: int) -> None:
        super().__init__()
        wide = before * times
        self.expand = nn.Conv2d(before, wide, 1) if times > 1 else None
        low = (size - 1) // 2 if stride == 1 else (size - 2) // 2
        self.pads = (low, size - stride - low) * 2
        self.depthwise = nn.Conv2d(wide, wide, size, stride, low if stride == 1 else 0, groups=wide)
        self.squeeze, self.excite = nn.Conv2d(wide, before // 4, 1), nn.Conv2d(before // 4, wide, 1)
        self.project = nn.Conv2d(wide, after, 1)
        self.same = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else functional.silu(self.expand(x))
        if self.depthwise.stride[0] > 1:
            y = functional.pad(y, self.pads)
        y = functional.silu(self.depthwise(y))
        gate = self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        y = self.project(y * gate)
        return x + y if self.same else y


class EfficientNet(nn.Module):
    """EfficientNet-B0 without its head, batch norms folded into the convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2)
        blocks, before = [], 32
        for after, count, size, stride, times in ((16, 1, 3, 1, 1), (24, 2, 3, 2, 6), (40, 2, 5, 2, 6),
                                                  (80, 3, 3, 2, 6), (112, 3, 5, 1, 6), (192, 4, 5, 2, 6),
                                                  (320, 1, 3, 1, 6)):
            for place in range(count):
                blocks.append(Inverted(before, after, size, 1 if place else stride, times))
                before = after
        self.blocks, self.top = nn.Sequential(*blocks), nn.Conv2d(320, 1280, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.silu(self.stem(functional.pad(x, (0, 1, 0, 1))))
        return functional.silu(self.top(self.blocks(x)))


NETWORKS: dict[str, type[nn.Module]] = {
    "bert_base_fp16": Bert, "gpt2_fp16": Gpt2, "llama_fp16": Llama, "t5_encoder_fp16": T5, "vit_fp16": Vit,
    "tower_fp32": Tower, "resnet50_fp16": ResNet50, "convnext_fp16": ConvNext, "efficientnet_fp16": EfficientNet,
}
"""By the model of the zoo."""


def network(model: str, device: str = "cuda") -> nn.Module:
    """A network ready to run: evaluated, of the export's type, channels-last where it convolves more than once."""
    made: nn.Module = NETWORKS[model]().eval().requires_grad_(False)
    kind = torch.float32 if model.endswith("fp32") else torch.float16
    made = made.to(device=device, dtype=kind)
    return made.to(memory_format=torch.channels_last) if channels_last(model) else made


def channels_last(model: str) -> bool:
    return model.startswith(("resnet", "convnext", "efficientnet"))


def arguments(feeds: dict[str, Any], model: str, device: str = "cuda") -> list[Tensor]:
    """The inputs of a row, in the order of the export's."""
    found = [torch.from_numpy(array).to(device) for array in feeds.values()]
    return [x.to(memory_format=torch.channels_last) for x in found] if channels_last(model) else found
