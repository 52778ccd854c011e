"""Networks of fields whose packages are not asked for, as their papers describe them: in PyTorch, random weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

Norm = Callable[[int], nn.Module]


def block(convolution: type[nn.Module], norm: Norm, read: int, written: int) -> nn.Sequential:
    """Two convolutions of three, each with its norm and a leaky ReLU."""
    return nn.Sequential(
        convolution(read, written, 3, padding=1), norm(written), nn.LeakyReLU(0.01),
        convolution(written, written, 3, padding=1), norm(written), nn.LeakyReLU(0.01))


class Segmenter(nn.Module):
    """A U-Net (Ronneberger 2015; nnU-Net with instance norms) over images or volumes."""

    def __init__(self, axes: int, norm: Norm, read: int, classes: int, widths: Sequence[int]) -> None:
        super().__init__()
        convolution = (nn.Conv2d, nn.Conv3d)[axes - 2]
        up = (nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 2]
        self.pool = (nn.MaxPool2d, nn.MaxPool3d)[axes - 2](2)
        self.down = nn.ModuleList(
            block(convolution, norm, before, width) for before, width in zip((read, *widths), widths, strict=False))
        self.up = nn.ModuleList(up(below, above, 2, 2) for above, below in pairwise(widths))
        self.joined = nn.ModuleList(block(convolution, norm, 2 * width, width) for width in widths[:-1])
        self.out = convolution(widths[0], classes, 1)

    def forward(self, given: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for level, down in enumerate(self.down):
            given = down(given if level == 0 else self.pool(given))
            kept.append(given)
        for level in reversed(range(len(self.up))):
            given = self.joined[level](torch.cat((kept[level], self.up[level](given)), 1))
        return self.out(given)


class Translator(nn.Module):
    """The generator of CycleGAN (Zhu 2017): residual blocks with instance norms and mirrored borders."""

    def __init__(self, width: int = 64, blocks: int = 9) -> None:
        super().__init__()

        def layer(read: int, written: int, size: int, stride: int = 1) -> list[nn.Module]:
            return [nn.Conv2d(read, written, size, stride, padding=1 if size == 3 else 0),
                    nn.InstanceNorm2d(written), nn.ReLU()]

        self.head = nn.Sequential(nn.ReflectionPad2d(3), *layer(3, width, 7), *layer(width, 2 * width, 3, 2),
                                  *layer(2 * width, 4 * width, 3, 2))
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.ReflectionPad2d(1), nn.Conv2d(4 * width, 4 * width, 3), nn.InstanceNorm2d(4 * width), nn.ReLU(),
            nn.ReflectionPad2d(1), nn.Conv2d(4 * width, 4 * width, 3), nn.InstanceNorm2d(4 * width))
            for _ in range(blocks))
        self.tail = nn.Sequential(
            nn.ConvTranspose2d(4 * width, 2 * width, 3, 2, 1, 1), nn.InstanceNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 3, 2, 1, 1), nn.InstanceNorm2d(width), nn.ReLU(),
            nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        images = self.head(images)
        for each in self.blocks:
            images = images + each(images)
        return self.tail(images)


class Enlarger(nn.Module):
    """EDSR (Lim 2017): residual blocks without norms, pixels out of channels."""

    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(blocks))
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2),
            nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        given = images = self.head(images)
        for each in self.blocks:
            images = images + 0.1 * each(images)
        return self.tail(images + given)


class Dense(nn.Module):
    """A dense block of ESRGAN (Wang 2018): each convolution reads all that came before it."""

    def __init__(self, width: int = 64, growth: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(width + number * growth, growth if number < 4 else width, 3, padding=1) for number in range(5))

    def forward(self, images: Tensor) -> Tensor:
        known = [images]
        for layer in self.layers[:-1]:
            known.append(functional.leaky_relu(layer(torch.cat(known, 1)), 0.2))
        return images + 0.2 * self.layers[-1](torch.cat(known, 1))


class DenseEnlarger(nn.Module):
    """ESRGAN's generator, with fewer blocks."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.Sequential(*(Dense() for _ in range(blocks)))
        self.middle, self.last = (nn.Conv2d(64, 64, 3, padding=1) for _ in range(2))
        self.tail = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(64, 3, 3, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        images = self.head(images)
        images = functional.interpolate(images + self.middle(self.blocks(images)), scale_factor=2.0, mode="nearest")
        return self.tail(functional.leaky_relu(self.last(images), 0.2))


class Modulated(nn.Module):
    """A convolution of StyleGAN2 (Karras 2020): weights scaled by an image's style, and brought to norm one."""

    def __init__(self, read: int, written: int, style: int, up: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, written, read, 3, 3) / math.sqrt(9 * read))
        self.style, self.up, self.written = nn.Linear(style, read), up, written
        self.bias = nn.Parameter(torch.zeros(1, written, 1, 1))

    def forward(self, images: Tensor, style: Tensor, noise: Tensor) -> Tensor:
        if self.up:
            images = functional.interpolate(images, scale_factor=2.0, mode="bilinear", align_corners=False)
        scale = self.style(style)[:, :, None, None] + 1
        # The scale of what is read and of what is written, in place of weights of each image's own.
        squared = (self.weight[0].float() ** 2).sum((2, 3))
        norm = torch.rsqrt((scale[:, :, 0, 0].float() ** 2) @ squared.t() + 1e-8).to(images.dtype)
        images = functional.conv2d(images * scale, self.weight[0], padding=1) * norm[:, :, None, None]
        return functional.leaky_relu(images + noise + self.bias, 0.2) * math.sqrt(2)


class Painter(nn.Module):
    """StyleGAN2's generator: a mapping, then convolutions that double an image."""

    def __init__(self, style: int = 256, widths: Sequence[int] = (256, 256, 256, 128, 64, 32)) -> None:
        super().__init__()
        self.mapping = nn.Sequential(*(
            each for _ in range(4) for each in (nn.Linear(style, style), nn.LeakyReLU(0.2))))
        self.start = nn.Parameter(torch.randn(1, widths[0], 4, 4))
        pairs = list(pairwise(widths))
        self.layers = nn.ModuleList(
            nn.ModuleList((Modulated(read, written, style, True), Modulated(written, written, style, False)))
            for read, written in pairs)
        self.noises = nn.ParameterList(torch.randn(1, 1, 8 << level, 8 << level) * 0.1 for level in range(len(pairs)))
        self.colours = nn.ModuleList(nn.Conv2d(written, 3, 1) for _, written in pairs)

    def forward(self, given: Tensor) -> Tensor:
        style = self.mapping(given * torch.rsqrt((given.float() ** 2).mean(1, keepdim=True) + 1e-8).to(given.dtype))
        images, painted = self.start.expand(given.shape[0], -1, -1, -1), None
        for layers, noise, colour in zip(self.layers, self.noises, self.colours, strict=True):
            for layer in layers:
                images = layer(images, style, noise)
            painted = colour(images) if painted is None else colour(images) + functional.interpolate(
                painted, scale_factor=2.0, mode="bilinear")
        return painted


class Faces(nn.Module):
    """A residual network of face recognition (ArcFace, Deng 2019): batch norms before convolutions, PReLU."""

    def __init__(self, widths: Sequence[int] = (64, 64, 128, 256, 512), depth: int = 2) -> None:
        super().__init__()

        def residual(read: int, written: int, stride: int) -> nn.Module:
            return nn.Sequential(
                nn.BatchNorm2d(read), nn.Conv2d(read, written, 3, 1, 1, bias=False), nn.BatchNorm2d(written),
                nn.PReLU(written), nn.Conv2d(written, written, 3, stride, 1, bias=False), nn.BatchNorm2d(written))

        self.head = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.PReLU(64))
        self.blocks, self.shortcuts = nn.ModuleList(), nn.ModuleList()
        for read, written in pairwise(widths):
            for number in range(depth):
                first = number == 0
                self.blocks.append(residual(read if first else written, written, 2 if first else 1))
                self.shortcuts.append(nn.Sequential(nn.Conv2d(read, written, 1, 2, bias=False),
                                                    nn.BatchNorm2d(written)) if first else nn.Identity())
        self.tail = nn.Sequential(nn.BatchNorm2d(512), nn.Flatten(), nn.Linear(512 * 7 * 7, 512), nn.BatchNorm1d(512))

    def forward(self, images: Tensor) -> Tensor:
        images = self.head(images)
        for each, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            images = each(images) + shortcut(images)
        given = self.tail(images)
        return given / given.norm(dim=1, keepdim=True)


class Waves(nn.Module):
    """WaveNet's gated convolutions (van den Oord 2016) as a vocoder's: dilated, with skips."""

    def __init__(self, width: int = 64, layers: int = 20) -> None:
        super().__init__()
        self.head = nn.Conv1d(80, width, 1)
        self.dilated = nn.ModuleList(
            nn.Conv1d(width, 2 * width, 3, padding=2 ** (number % 10), dilation=2 ** (number % 10))
            for number in range(layers))
        self.both = nn.ModuleList(nn.Conv1d(width, 2 * width, 1) for _ in range(layers))
        self.tail = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 1, 1))

    def forward(self, given: Tensor) -> Tensor:
        given, skips = self.head(given), None
        for dilated, both in zip(self.dilated, self.both, strict=True):
            first, gate = dilated(given).chunk(2, 1)
            residual, skip = both(torch.tanh(first) * torch.sigmoid(gate)).chunk(2, 1)
            given = (given + residual) * math.sqrt(0.5)
            skips = skip if skips is None else skips + skip
        return self.tail(skips)


class Separator(nn.Module):
    """Conv-TasNet (Luo 2019): a learned transform, depthwise dilated convolutions with norms over all, and masks."""

    def __init__(self, filters: int = 256, width: int = 128, hidden: int = 256, blocks: int = 16) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, filters, 16, 8, bias=False)
        self.norm, self.inward = nn.GroupNorm(1, filters), nn.Conv1d(filters, width, 1)
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Conv1d(width, hidden, 1), nn.PReLU(), nn.GroupNorm(1, hidden),
            nn.Conv1d(hidden, hidden, 3, padding=2 ** (number % 8), dilation=2 ** (number % 8), groups=hidden),
            nn.PReLU(), nn.GroupNorm(1, hidden), nn.Conv1d(hidden, width, 1)) for number in range(blocks))
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(width, 2 * filters, 1), nn.Sigmoid())
        self.decoder = nn.ConvTranspose1d(filters, 1, 16, 8, bias=False)
        self.filters = filters

    def forward(self, given: Tensor) -> Tensor:
        coded = functional.relu(self.encoder(given))
        mask = self.inward(self.norm(coded))
        for each in self.blocks:
            mask = mask + each(mask)
        first, second = self.masks(mask).chunk(2, 1)
        return torch.cat((self.decoder(coded * first), self.decoder(coded * second)), 1)


class Reader(nn.Module):
    """CRNN (Shi 2015): lines of text by convolutions and two bidirectional LSTMs."""

    def __init__(self, classes: int = 6000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        read = 1
        for written, pool, norm in ((64, (2, 2), False), (128, (2, 2), False), (256, None, True), (256, (2, 1), False),
                                    (512, None, True), (512, (2, 1), False)):
            layers += [nn.Conv2d(read, written, 3, padding=1), *([nn.BatchNorm2d(written)] if norm else []), nn.ReLU()]
            layers += [nn.MaxPool2d(pool)] if pool else []
            read = written
        self.layers = nn.Sequential(*layers, nn.Conv2d(512, 512, (2, 1)), nn.ReLU())
        self.lines = nn.LSTM(512, 256, 2, bidirectional=True)
        self.out = nn.Linear(512, classes)

    def forward(self, images: Tensor) -> Tensor:
        lines = self.layers(images).squeeze(2).permute(2, 0, 1)
        return functional.log_softmax(self.out(self.lines(lines)[0]), 2)


class Ranker(nn.Module):
    """DLRM (Naumov 2019): bags of embeddings and the products of all pairs."""

    def __init__(self, tables: int = 26, rows: int = 10_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
                                    nn.Linear(256, width), nn.ReLU())
        pairs = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("flat", pairs[0] * (tables + 1) + pairs[1])
        self.top = nn.Sequential(nn.Linear(width + pairs.shape[1], 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
                                 nn.Linear(256, 1), nn.Sigmoid())

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack([dense, *(table(ids[:, number]) for number, table in enumerate(self.tables))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2)).flatten(1)
        return self.top(torch.cat((dense, products[:, self.flat]), 1))


class Crosses(nn.Module):
    """Deep and cross network v2 (Wang 2021) beside a factorisation machine."""

    def __init__(self, tables: int = 26, rows: int = 10_000, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.table, self.tables = nn.Embedding(tables * rows, width), tables
        self.register_buffer("begins", torch.arange(tables) * rows)
        size = tables * width + 13
        self.norm = nn.BatchNorm1d(13)
        self.crosses = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.deep = nn.Sequential(*(each for read, written in ((size, 1024), (1024, 512)) for each in (
            nn.Linear(read, written), nn.BatchNorm1d(written), nn.ReLU())))
        self.out = nn.Linear(size + 512, 1)

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        rows = self.table(ids + self.begins)
        machine = 0.5 * (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True)
        given = torch.cat((rows.flatten(1), self.norm(numbers)), 1)
        crossed = given
        for each in self.crosses:
            crossed = given * each(crossed) + crossed
        return torch.sigmoid(self.out(torch.cat((crossed, self.deep(given)), 1)) + machine)


class Points(nn.Module):
    """PointNet's classifier (Qi 2017): the same layers for each point, the largest of all, a learned turn."""

    def __init__(self, classes: int = 40) -> None:
        super().__init__()

        def layers(*widths: int) -> nn.Sequential:
            return nn.Sequential(*(each for read, written in pairwise(widths) for each in (
                nn.Conv1d(read, written, 1), nn.BatchNorm1d(written), nn.ReLU())))

        self.turn, self.turned = layers(3, 64, 128, 1024), nn.Linear(1024, 9)
        self.first, self.second = layers(3, 64, 64), layers(64, 64, 128, 1024)
        self.out = nn.Sequential(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, classes))

    def forward(self, points: Tensor) -> Tensor:
        turn = self.turned(self.turn(points).max(2).values).view(-1, 3, 3) + torch.eye(3, dtype=points.dtype)
        points = torch.bmm(points.transpose(1, 2), turn).transpose(1, 2)
        return self.out(self.second(self.first(points)).max(2).values)


class Field(nn.Module):
    """NeRF (Mildenhall 2020): sines of places and directions, and linear layers with a skip."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.register_buffer("places", 2.0 ** torch.arange(10) * math.pi)
        self.register_buffer("views", 2.0 ** torch.arange(4) * math.pi)
        widths = (63, *(width,) * 4, width + 63, *(width,) * 3)
        self.layers = nn.ModuleList(nn.Linear(read, width) for read in widths[:8])
        self.density, self.feature = nn.Linear(width, 1), nn.Linear(width, width)
        self.view, self.colour = nn.Linear(width + 27, width // 2), nn.Linear(width // 2, 3)

    @staticmethod
    def coded(given: Tensor, scales: Tensor) -> Tensor:
        angles = (given[..., None] * scales).flatten(-2)
        return torch.cat((given, torch.sin(angles), torch.cos(angles)), -1)

    def forward(self, places: Tensor, views: Tensor) -> Tensor:
        start = given = self.coded(places, self.places)
        for number, layer in enumerate(self.layers):
            given = functional.relu(layer(given))
            if number == 4:
                given = torch.cat((start, given), -1)
        density = functional.softplus(self.density(given))
        given = torch.cat((self.feature(given), self.coded(views, self.views)), -1)
        return torch.cat((torch.sigmoid(self.colour(functional.relu(self.view(given)))), density), -1)


class Joint(nn.Module):
    """A block of Stable Diffusion 3 (Esser 2024): words and patches attend jointly, each modulated by the time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        for part in ("words", "patches"):
            self.add_module(f"{part}_modulation", nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width)))
            self.add_module(f"{part}_norms", nn.ModuleList(
                nn.LayerNorm(width, elementwise_affine=False, eps=1e-6) for _ in range(2)))
            self.add_module(f"{part}_joint", nn.Linear(width, 3 * width))
            self.add_module(f"{part}_qk", nn.ModuleList(nn.RMSNorm(width // heads, eps=1e-6) for _ in range(2)))
            self.add_module(f"{part}_out", nn.Linear(width, width))
            self.add_module(f"{part}_mlp", nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)))

    def forward(self, words: Tensor, patches: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        parts = {"words": words, "patches": patches}
        modulation = {part: getattr(self, f"{part}_modulation")(time)[:, None].chunk(6, 2) for part in parts}
        joint: list[list[Tensor]] = [[], [], []]
        for part, given in parts.items():
            shift, scale = modulation[part][:2]
            given = getattr(self, f"{part}_norms")[0](given) * (1 + scale) + shift
            three = getattr(self, f"{part}_joint")(given)
            three = three.reshape(given.shape[0], -1, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)
            norms = getattr(self, f"{part}_qk")
            for kept, each in zip(joint, (norms[0](three[0]), norms[1](three[1]), three[2]), strict=True):
                kept.append(each)
        attended = functional.scaled_dot_product_attention(*(torch.cat(each, 2) for each in joint))
        attended = attended.transpose(1, 2).flatten(2)
        split = attended.split([words.shape[1], patches.shape[1]], 1)
        for (part, given), each in zip(parts.items(), split, strict=True):
            _, _, gate, shift, scale, second = modulation[part]
            given = given + gate * getattr(self, f"{part}_out")(each)
            normed = getattr(self, f"{part}_norms")[1](given) * (1 + scale) + shift
            parts[part] = given + second * getattr(self, f"{part}_mlp")(normed)
        return parts["words"], parts["patches"]


class JointDiffusion(nn.Module):
    """Blocks of Stable Diffusion 3 over 32 x 32 patches and 77 words."""

    def __init__(self, width: int = 768, heads: int = 12, blocks: int = 3) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(16, width, 2, 2), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Joint(width, heads) for _ in range(blocks))
        self.norm, self.out = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 64)

    def forward(self, images: Tensor, words: Tensor, time: Tensor) -> Tensor:
        patches, words = self.patches(images).flatten(2).transpose(1, 2), self.words(words)
        for each in self.blocks:
            words, patches = each(words, patches, time)
        return self.out(self.norm(patches))


class Pairs(nn.Module):
    """A block over pairs of residues (AlphaFold 2, Jumper 2021): triangle products, triangle attention, transition."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.first, self.middle = nn.LayerNorm(width), nn.LayerNorm(width)
        self.left, self.right, self.out, self.gate = (nn.Linear(width, width) for _ in range(4))
        self.left_gate, self.right_gate = (nn.Linear(width, width) for _ in range(2))
        self.norm, self.bias = nn.LayerNorm(width), nn.Linear(width, heads, bias=False)
        self.three, self.attended, self.shut = (nn.Linear(width, size) for size in (3 * width, width, width))
        self.transition = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(),
                                        nn.Linear(4 * width, width))

    def forward(self, pairs: Tensor) -> Tensor:
        given = self.first(pairs)
        left = torch.sigmoid(self.left_gate(given)) * self.left(given)
        right = torch.sigmoid(self.right_gate(given)) * self.right(given)
        product = torch.einsum("bikc,bjkc->bijc", left, right)
        pairs = pairs + torch.sigmoid(self.gate(given)) * self.out(self.middle(product))
        given = self.norm(pairs)
        batch, rows, columns, _ = given.shape
        three = self.three(given).view(batch, rows, columns, 3, self.heads, -1).permute(3, 0, 1, 4, 2, 5)
        bias = self.bias(given).permute(0, 3, 1, 2)[:, None]
        scores = three[0] @ three[1].transpose(-1, -2) / math.sqrt(self.width // self.heads) + bias
        read = (torch.softmax(scores, -1) @ three[2]).transpose(2, 3).flatten(3)
        pairs = pairs + self.attended(torch.sigmoid(self.shut(given)) * read)
        return pairs + self.transition(pairs)


class Folding(nn.Module):
    """Blocks over pairs of 128 residues."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Pairs() for _ in range(blocks)))

    def forward(self, pairs: Tensor) -> Tensor:
        return self.blocks(pairs)


class Forecaster(nn.Module):
    """N-BEATS (Oreshkin 2020): blocks of linear layers, each of what those before it left."""

    def __init__(self, past: int = 336, future: int = 96, width: int = 512, blocks: int = 6) -> None:
        super().__init__()
        self.past, self.future = past, future
        self.blocks = nn.ModuleList(nn.Sequential(
            nn.Linear(past, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, past + future)) for _ in range(blocks))

    def forward(self, series: Tensor) -> Tensor:
        forecast = None
        for each in self.blocks:
            back, ahead = each(series).split([self.past, self.future], 1)
            series = series - back
            forecast = ahead if forecast is None else forecast + ahead
        return forecast
