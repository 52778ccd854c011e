"""Networks of fields that the other sets do not hold, exported with random weights and stripped of them.

    python benchmarks/fields/export.py [NAME ...]

Segmentation, restoration and generation of images, detection, depth, speech and sound, video, ranking, forecasting,
molecules, languages: of transformers and torchvision, or as ``modules.py`` writes them after their papers.  Writes
NAME.onnx.xz and rows of zoo.json, as ``benchmarks/convolutions/export.py`` does, which
``benchmarks/zoo.py --networks benchmarks/fields`` measures.  Runs in an environment of its own: torch, torchvision,
transformers, onnx and onnxscript.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from skeletons import keep_all  # noqa: E402

sys.path.remove(str(HERE.parent))  # which has a kernels.py, as transformers has a package
import modules  # noqa: E402

OPSET = 18
VOCABULARY = 8192
Shape = tuple[int | str, ...]


@dataclass(frozen=True)
class Network:
    """A network: what makes it, and the shape of each of its inputs behind the batch.

    Open axes have names; ``sizes`` are what they, the batch first, are measured at.  ``kind``: "fp16" or "fp32";
    ``exporter``: "torchscript" or "dynamo".
    """

    title: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, Shape]
    sizes: tuple[int, ...] = (1,)
    kind: str = "fp16"
    exporter: str = "torchscript"

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.title}_{self.kind}"

    def dtype(self, name: str) -> str:
        """Of an input, as zoo.json writes it."""
        return "int64" if name == "ids" else {"fp16": "float16", "fp32": "float32"}[self.kind]


class Of(nn.Module):
    """A model of transformers, by its class and what its configuration sets; of its results, what ``result`` names, or
    the first."""

    def __init__(self, name: str, result: str | None = None, reads: str | None = None, **config: Any) -> None:
        super().__init__()
        import transformers

        kind = getattr(transformers, name)
        self.network, self.result, self.reads = kind(kind.config_class(**config)), result, reads

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        found = self.network(given) if self.reads is None else self.network(**{self.reads: given})
        if isinstance(found, torch.Tensor):
            return found
        return found[0] if self.result is None else found[self.result]


class Vision(nn.Module):
    """A network of torchvision, of whose results the last is given."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import torchvision

        self.network = torchvision.models.get_model(name, weights=None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.network(given)


def of(name: str, result: str | None = None, reads: str | None = None, **config: Any) -> Callable[[], nn.Module]:
    return lambda: Of(name, result, reads, **config)


def images(size: int, channels: int = 3) -> dict[str, Shape]:
    return {"given": (channels, size, size)}


IDS: dict[str, Shape] = {"ids": ("sequence",)}
FOUR = {"num_hidden_layers": 4}
WORDS = {**FOUR, "vocab_size": VOCABULARY}

NETWORKS = (
    # Segmentation, with each norm that is usual.
    Network("unet_batch", lambda: modules.Segmenter(2, nn.BatchNorm2d, 3, 2, (64, 128, 256, 512)), images(256), (2,)),
    Network("unet_instance", lambda: modules.Segmenter(
        2, lambda width: nn.InstanceNorm2d(width, affine=True), 1, 4, (32, 64, 128, 256)), images(256, 1), (4,)),
    Network("unet_instance", lambda: modules.Segmenter(
        2, lambda width: nn.InstanceNorm2d(width, affine=True), 1, 4, (32, 64, 128, 256)), images(256, 1), (4,),
        kind="fp32"),
    Network("volumes_instance", lambda: modules.Segmenter(
        3, lambda width: nn.InstanceNorm3d(width, affine=True), 1, 3, (32, 64, 128, 256)), {"given": (1, 64, 64, 64)}),
    Network("volumes_group", lambda: modules.Segmenter(
        3, lambda width: nn.GroupNorm(8, width), 1, 3, (32, 64, 128)), {"given": (1, 64, 64, 64)}),
    # Restoration and generation of images.
    Network("cyclegan", modules.Translator, images(256)),
    Network("edsr", modules.Enlarger, images(128)),
    Network("esrgan", modules.DenseEnlarger, images(128)),
    Network("stylegan2", modules.Painter, {"given": (256,)}, (4,)),
    Network("swin2sr", of("Swin2SRForImageSuperResolution", embed_dim=60, depths=[2, 2], num_heads=[6, 6], upscale=2,
                          image_size=64), images(64), (2,)),
    Network("joint_diffusion", modules.JointDiffusion,
            {"images": (16, 64, 64), "words": (77, 768), "time": (768,)}, (2,), exporter="dynamo"),
    # Detection, depth, and what else is asked of images.
    Network("rtdetr", of("RTDetrModel", encoder_layers=1, decoder_layers=3), images(640), (1,)),
    Network("yolos", of("YolosModel", image_size=[512, 512], **FOUR), images(512), (2,)),
    Network("dpt", of("DPTForDepthEstimation", image_size=384, backbone_out_indices=[0, 1, 2, 3], **FOUR),
            images(384), (1,)),
    Network("glpn", of("GLPNForDepthEstimation"), images(256), (2,)),
    Network("sam_vision", of("SamVisionModel", **FOUR, image_size=512, global_attn_indexes=[1, 3]), images(512), (1,)),
    Network("faces", modules.Faces, images(112), (32,)),
    Network("s3d", lambda: Vision("s3d"), {"given": (3, 16, 224, 224)}, (2,), "fp32"),
    Network("points", modules.Points, {"given": (3, 1024)}, (32,)),
    Network("nerf", modules.Field, {"places": (3,), "views": (3,)}, (65_536,)),
    # Speech and sound.
    Network("hifigan", of("SpeechT5HifiGan"), {"given": (200, 80)}, (1,)),
    Network("wavenet", modules.Waves, {"given": (80, 16_000)}, (1,)),
    Network("tasnet", modules.Separator, {"given": (1, 32_000)}, (2,)),
    Network("conformer", of("Wav2Vec2ConformerModel", **FOUR, position_embeddings_type="rotary"),
            {"given": (64_000,)}, (2,)),
    Network("spectrogram", of("ASTModel", **FOUR), {"given": (1024, 128)}, (2,)),
    Network("encodec", of("EncodecModel"), {"given": (1, 24_000)}, (2,)),
    Network("reader", modules.Reader, {"given": (1, 32, 320)}, (16,)),
    # Ranking and forecasting.
    Network("dlrm", modules.Ranker, {"numbers": (13,), "ids": (26,)}, (2048,)),
    Network("dcn", modules.Crosses, {"numbers": (13,), "ids": (26,)}, (2048,)),
    Network("nbeats", modules.Forecaster, {"series": (336,)}, (1024,)),
    # Molecules, and languages by other means than attention alone.
    Network("folding", modules.Folding, {"pairs": (128, 128, 64)}, (1,)),
    Network("esm", of("EsmModel", **FOUR, vocab_size=VOCABULARY, hidden_size=640, num_attention_heads=20,
                      intermediate_size=2560, position_embedding_type="rotary", pad_token_id=1), IDS, (2, 512)),
    Network("mobilebert", of("MobileBertModel", **WORDS), IDS, (8, 128)),
    Network("squeezebert", of("SqueezeBertModel", **WORDS), IDS, (8, 128)),
    Network("convbert", of("ConvBertModel", **WORDS), IDS, (4, 128)),
    Network("roformer", of("RoFormerModel", **WORDS), IDS, (4, 256)),
    Network("nystromformer", of("NystromformerModel", **WORDS, max_position_embeddings=1024), {"ids": (512,)}, (2,)),
    Network("xlnet", of("XLNetModel", vocab_size=VOCABULARY, n_layer=4, d_model=768, n_head=12, d_inner=3072), IDS,
            (2, 256)),
    Network("longformer", of("LongformerModel", **WORDS, attention_window=128, max_position_embeddings=1026),
            {"ids": (512,)}, (1,)),
    Network("mpt", of("MptModel", n_layers=4, d_model=1024, n_heads=16, vocab_size=VOCABULARY, use_cache=False), IDS,
            (1, 512), exporter="dynamo"),
    Network("falcon", of("FalconModel", num_hidden_layers=4, hidden_size=1024, num_attention_heads=16,
                         vocab_size=VOCABULARY, use_cache=False), IDS, (1, 512), exporter="dynamo"),
    Network("olmo2", of("Olmo2Model", num_hidden_layers=4, hidden_size=1024, num_attention_heads=16,
                        intermediate_size=4096, vocab_size=VOCABULARY, use_cache=False), IDS, (1, 512),
            exporter="dynamo"),
)


def row(network: Network) -> dict[str, Any]:
    """What zoo.json says of a network."""
    return {
        "spec": network.title, "source": "benchmarks/fields", "dtype": network.kind, "exporter": network.exporter,
        "sizes": [list(network.sizes)],
        "inputs": {name: {"dtype": network.dtype(name), "shape": ["batch", *shape]}
                   for name, shape in network.inputs.items()}}


def feeds(network: Network) -> tuple[torch.Tensor, ...]:
    """Inputs of a batch of two."""
    open_axes = dict(zip(("batch", *(name for shape in network.inputs.values() for name in shape
                                     if isinstance(name, str))), (2, *network.sizes[1:]), strict=False))
    found = []
    for name, shape in network.inputs.items():
        sizes = [2, *(open_axes[size] if isinstance(size, str) else size for size in shape)]
        values = torch.randint(2, VOCABULARY, sizes) if name == "ids" else torch.randn(sizes)
        found.append(values.half() if network.kind == "fp16" and name != "ids" else values)
    return tuple(found)


def exported(network: Network) -> onnx.ModelProto:
    """The model, with the open axes free."""
    torch.manual_seed(0)
    module = network.make().eval().to(torch.float16 if network.kind == "fp16" else torch.float32)
    axes = {name: {axis: each for axis, each in enumerate(("batch", *shape)) if isinstance(each, str)}
            for name, shape in network.inputs.items()}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        if network.exporter == "dynamo":
            shapes = tuple({axis: torch.export.Dim(each) for axis, each in named.items()} for named in axes.values())
            torch.onnx.export(module, feeds(network), path, dynamo=True, external_data=False, opset_version=OPSET,
                              input_names=list(axes), dynamic_shapes=(shapes[0],) if len(shapes) == 1 else shapes)
        else:
            torch.onnx.export(module, feeds(network), path, dynamo=False, opset_version=OPSET, input_names=list(axes),
                              dynamic_axes=axes)
        model = onnx.load(path)
    for value in model.graph.input:
        for axis, each in axes[value.name].items():
            value.type.tensor_type.shape.dim[axis].Clear()
            value.type.tensor_type.shape.dim[axis].dim_param = each
    return model


if __name__ == "__main__":
    keep_all(HERE, NETWORKS, sys.argv[1:], exported, row)
