"""Networks of convolutions that the zoo does not hold, exported with random weights and stripped of them.

    python benchmarks/convolutions/export.py [NAME ...]

Writes NAME.onnx.xz, in which each weight is its mean and spread (``benchmarks/zoo/hydrate.py`` gives it values again),
and rows of zoo.json, which ``benchmarks/zoo.py --networks benchmarks/convolutions`` measures.  Runs in an environment
of its own: torch, torchvision, timm, onnx and onnxscript.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from skeletons import keep_all  # noqa: E402

OPSET = 18


@dataclass(frozen=True)
class Network:
    """A network of ``source``, a package, by its name there; ``batch`` images of ``shape`` to measure it at.

    ``kind``: "fp16" or "fp32"; ``exporter``: "torchscript" or "dynamo".
    """

    source: str
    architecture: str
    batch: int = 16
    shape: tuple[int, ...] = (3, 224, 224)
    kind: str = "fp16"
    exporter: str = "torchscript"

    @property
    def name(self) -> str:
        """Of the file."""
        return f"{self.architecture}_{self.kind}{'_dynamo' if self.exporter == 'dynamo' else ''}"

    def make(self) -> torch.nn.Module:
        """It, as for inference."""
        return made(self.source, self.architecture).eval().to(torch.float16 if self.kind == "fp16" else torch.float32)


def made(source: str, architecture: str) -> torch.nn.Module:
    """A network with random weights that gives tensors."""
    torch.manual_seed(0)
    if source == "timm":
        import timm

        network: torch.nn.Module = timm.create_model(architecture, pretrained=False, exportable=True)
        return network
    import torchvision

    if source == "segmentation":
        return Out(torchvision.models.get_model(architecture, weights=None, weights_backbone=None))
    alone = {"aux_logits": False, "init_weights": False} if architecture in ("inception_v3", "googlenet") else {}
    return torchvision.models.get_model(architecture, weights=None, **alone)


class Out(torch.nn.Module):
    """A segmentation network, of whose results by name the one that matters is given."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)["out"]


CLASSIFIERS = (
    "alexnet", "vgg16", "squeezenet1_1", "densenet121", "inception_v3", "googlenet", "shufflenet_v2_x1_0",
    "mobilenet_v2", "mobilenet_v3_large", "mnasnet1_0", "regnet_y_400mf", "resnext50_32x4d", "wide_resnet50_2",
    "efficientnet_v2_s")
OF_TIMM = (
    "ghostnet_100", "hrnet_w18_small", "dla34", "dpn68", "res2net50_26w_4s", "resnest14d", "skresnet18", "seresnet50",
    "xception41", "cspdarknet53", "cspresnet50", "repvgg_a0", "rexnet_100", "selecsls42b", "ese_vovnet19b_dw",
    "hardcorenas_a", "tinynet_a", "lcnet_100", "mixnet_s", "fbnetv3_b", "hgnetv2_b0", "edgenext_xx_small",
    "mobileone_s0", "inception_next_tiny", "poolformer_s12", "convnextv2_atto", "darknet53", "gernet_s",
    "semnasnet_075", "mobilenetv4_conv_small", "fastvit_t8", "repghostnet_050", "starnet_s1", "resnetv2_50")
SINGLE = (
    "efficientnet_v2_s", "convnextv2_atto", "fbnetv3_b", "starnet_s1", "xception41", "cspdarknet53", "darknet53",
    "ghostnet_100", "mobileone_s0", "repghostnet_050", "res2net50_26w_4s")
"""In float32: of random weights float16 makes infinity, or the exporter a model that no runtime takes."""

DYNAMO = ("mobilenet_v2", "densenet121", "shufflenet_v2_x1_0", "regnet_y_400mf")


def kind_of(architecture: str) -> str:
    """The type that a network is exported in."""
    return "fp32" if architecture in SINGLE else "fp16"


NETWORKS = (
    *(Network("torchvision", name, shape=(3, 299, 299) if name == "inception_v3" else (3, 224, 224), kind=kind_of(name))
      for name in CLASSIFIERS),
    Network("segmentation", "deeplabv3_resnet50", 2, (3, 256, 256)),
    Network("segmentation", "fcn_resnet50", 2, (3, 256, 256)), Network("segmentation", "lraspp_mobilenet_v3_large", 8),
    Network("torchvision", "r3d_18", 2, (3, 8, 112, 112)), Network("torchvision", "mc3_18", 2, (3, 8, 112, 112)),
    Network("torchvision", "r2plus1d_18", 2, (3, 8, 112, 112)),
    *(Network("timm", name, kind=kind_of(name)) for name in OF_TIMM),
    *(Network("torchvision", name, kind="fp32") for name in ("mobilenet_v2", "squeezenet1_1")),
    *(Network("torchvision", name, exporter="dynamo") for name in DYNAMO),
)


def row(network: Network) -> dict[str, Any]:
    """What zoo.json says of a network."""
    return {
        "spec": network.architecture, "source": network.source, "dtype": network.kind, "exporter": network.exporter,
        "sizes": [[network.batch]],
        "inputs": {"images": {"dtype": "float16" if network.kind == "fp16" else "float32",
                              "shape": ["batch", *network.shape]}}}


def exported(network: Network) -> onnx.ModelProto:
    """The model, with the batch free."""
    module, images = network.make(), torch.randn(2, *network.shape)
    images = images.half() if network.kind == "fp16" else images
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        if network.exporter == "dynamo":
            torch.onnx.export(module, (images,), path, dynamo=True, external_data=False, opset_version=OPSET,
                              input_names=["images"], dynamic_shapes=({0: torch.export.Dim("batch")},))
        else:
            torch.onnx.export(module, (images,), path, dynamo=False, opset_version=OPSET, input_names=["images"],
                              dynamic_axes={"images": {0: "batch"}})
        model = onnx.load(path)
    norms = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    if any(each.name == "training_mode" and each.i for node in norms for each in node.attribute):
        raise ValueError("batch norms in training, as weights are standardised by, have no kernel in ONNX Runtime")
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    first.Clear()
    first.dim_param = "batch"
    return model


if __name__ == "__main__":
    keep_all(HERE, NETWORKS, sys.argv[1:], exported, row)
