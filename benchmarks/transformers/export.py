"""Transformers that the zoo does not hold, exported with random weights and stripped of them.

    python benchmarks/transformers/export.py [NAME ...]

Writes NAME.onnx.xz and rows of zoo.json, as ``benchmarks/convolutions/export.py`` does, which
``benchmarks/zoo.py --networks benchmarks/transformers`` measures.  Runs in an environment of its own: torch,
torchvision, timm, transformers, onnx and onnxscript.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from skeletons import keep_all  # noqa: E402

sys.path.remove(str(HERE.parent))  # which has a kernels.py, as transformers has a package

OPSET = 18
IMAGES = (3, 224, 224)
IDS = ("sequence",)
VOCABULARY = 8192


@dataclass(frozen=True)
class Network:
    """A transformer in float16: ``architecture`` is a name of timm's, or a model class of transformers' with what its
    configuration sets.  ``shape``: of what it reads, behind the batch; ids where its axes are open.  ``sizes``: of the
    open axes, to measure it at.  ``exporter``: "torchscript" or "dynamo", which is for what the former makes a model
    of that no runtime takes."""

    title: str
    architecture: str
    sizes: tuple[int, ...] = (16,)
    shape: tuple[int | str, ...] = IMAGES
    config: Mapping[str, Any] = field(default_factory=dict)
    exporter: str = "torchscript"

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.title}_fp16"

    @property
    def from_timm(self) -> bool:
        """Whether timm has it, or else transformers."""
        return not self.architecture.endswith(("Model", "Encoder"))

    @property
    def reads_ids(self) -> bool:
        """Whether it reads ids of words."""
        return self.shape == IDS

    def make(self) -> torch.nn.Module:
        """It, as for inference."""
        torch.manual_seed(0)
        if self.from_timm:
            import timm

            return timm.create_model(self.architecture, pretrained=False, exportable=True).eval().half()
        import transformers
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        made = {"WhisperEncoder": WhisperEncoder}.get(self.architecture) or getattr(transformers, self.architecture)
        vocabulary = {"vocab_size": VOCABULARY} if self.reads_ids else {}
        return First(made(made.config_class(**vocabulary, **self.config))).eval().half()


class First(torch.nn.Module):
    """A network, of whose results the first is given."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.network(given, return_dict=False)[0]


def of_timm(*architectures: str) -> tuple[Network, ...]:
    return tuple(Network(name, name) for name in architectures)


LAYERS = {"num_hidden_layers": 4}
WIDE = {**LAYERS, "hidden_size": 1024, "num_attention_heads": 16}
MIDDLE = {**LAYERS, "hidden_size": 768, "num_attention_heads": 12}

NETWORKS = (
    *of_timm(
        "swin_tiny_patch4_window7_224", "deit3_small_patch16_224", "beit_base_patch16_224", "maxvit_tiny_tf_224",
        "pvt_v2_b1", "cait_xxs24_224", "xcit_small_12_p16_224", "mixer_b16_224", "eva02_small_patch14_224",
        "caformer_s18", "davit_tiny", "levit_192", "hiera_tiny_224", "tiny_vit_5m_224", "efficientformer_l1",
        "coatnet_0_rw_224", "twins_svt_small", "focalnet_tiny_srf", "mvitv2_tiny", "gmlp_s16_224", "efficientvit_b1"),
    Network("mobilevit_s", "mobilevit_s", shape=(3, 256, 256)),
    Network("crossvit_15_240", "crossvit_15_240", shape=(3, 240, 240)),
    Network("vit_small_patch14_reg4_dinov2", "vit_small_patch14_reg4_dinov2", (4,), (3, 518, 518)),
    Network("segformer", "SegformerModel", (4,), (3, 512, 512)),
    Network("whisper_encoder", "WhisperEncoder", (4,), (80, 3000), {
        "d_model": 768, "encoder_layers": 4, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}),
    Network("wav2vec2", "Wav2Vec2Model", (4,), (64_000,), LAYERS),
    Network("qwen2", "Qwen2Model", (1, 1024), IDS, {
        **LAYERS, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "use_cache": False}, "dynamo"),
    Network("qwen3", "Qwen3Model", (1, 1024), IDS, {
        **WIDE, "intermediate_size": 3072, "num_key_value_heads": 8, "head_dim": 128, "use_cache": False}, "dynamo"),
    Network("gemma2", "Gemma2Model", (1, 1024), IDS, {
        **LAYERS, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "sliding_window": 512, "use_cache": False}, "dynamo"),
    Network("phi", "PhiModel", (2, 512), IDS, {**WIDE, "intermediate_size": 4096, "use_cache": False}, "dynamo"),
    Network("gpt_neox", "GPTNeoXModel", (2, 512), IDS, {**WIDE, "intermediate_size": 4096, "use_cache": False},
            "dynamo"),
    Network("bloom", "BloomModel", (2, 512), IDS, {"hidden_size": 1024, "n_layer": 4, "n_head": 16,
                                                   "use_cache": False}),
    Network("opt", "OPTModel", (4, 256), IDS, {**MIDDLE, "ffn_dim": 3072, "use_cache": False}, "dynamo"),
    Network("deberta_v2", "DebertaV2Model", (4, 256), IDS, {
        **MIDDLE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256,
        "norm_rel_ebd": "layer_norm", "share_att_key": True, "position_biased_input": False}),
    Network("albert", "AlbertModel", (8, 128), IDS, {**MIDDLE, "intermediate_size": 3072}),
    Network("modernbert", "ModernBertModel", (4, 512), IDS, {**MIDDLE, "intermediate_size": 1152, "pad_token_id": 0},
            "dynamo"),
    Network("clip_text", "CLIPTextModel", (16, 77), IDS, LAYERS, "dynamo"),
)


def row(network: Network) -> dict[str, Any]:
    """What zoo.json says of a network."""
    return {
        "spec": network.architecture, "source": "timm" if network.from_timm else "transformers", "dtype": "fp16",
        "exporter": network.exporter, "sizes": [list(network.sizes)],
        "inputs": {"given": {"dtype": "int64" if network.reads_ids else "float16", "shape": ["batch", *network.shape]}}}


def exported(network: Network) -> onnx.ModelProto:
    """The model, with the open axes free."""
    given = torch.randint(1, VOCABULARY, (2, *network.sizes[1:])) if network.reads_ids else (
        torch.randn(2, *(size for size in network.shape if isinstance(size, int))).half())
    axes = {axis: name for axis, name in enumerate(("batch", *network.shape)) if isinstance(name, str)}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        if network.exporter == "dynamo":
            torch.onnx.export(
                network.make(), (given,), path, dynamo=True, external_data=False, opset_version=OPSET,
                input_names=["given"],
                dynamic_shapes=({axis: torch.export.Dim(name) for axis, name in axes.items()},))
        else:
            torch.onnx.export(network.make(), (given,), path, dynamo=False, opset_version=OPSET,
                              input_names=["given"], dynamic_axes={"given": axes})
        model = onnx.load(path)
    shape = model.graph.input[0].type.tensor_type.shape
    for axis, name in axes.items():
        shape.dim[axis].Clear()
        shape.dim[axis].dim_param = name
    return model


if __name__ == "__main__":
    keep_all(HERE, NETWORKS, sys.argv[1:], exported, row)
