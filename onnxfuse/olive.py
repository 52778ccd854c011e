"""A pass of Olive's, for workflow files: ``"type": "Onnxfuse"``.

Olive finds passes by a package configuration; this writes its own with the pass added:

    python -m onnxfuse.olive > package.json
    olive run --config workflow.json --package-config package.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from olive.model import ONNXModelHandler
from olive.model.utils import resolve_onnx_path
from olive.package_config import OlivePackageConfig
from olive.passes import Pass
from olive.passes.pass_config import PassConfigParam

from onnxfuse.api import optimize
from onnxfuse.pipeline import Options

_PARAMETERS: dict[str, tuple[Any, Any, str]] = {
    "dims": (dict, {}, "Sizes of symbolic dimensions to plan for."),
    "target": (str, None, "GPU to plan for; the one present, else the H100."),
    "embed": (list, [], "Architectures, such as sm_90, whose compiled kernels go into the model."),
    "strategy": (str, "auto", "What to plan for: auto, all-in-one, memory or dynamic."),
    "least_gain": (float, None, "Predicted speed-up that a region must pass to be fused; by default 1.2."),
    "fold_weights": (bool, False, "Fold constants beside products into their weights, where that rounds these too."),
    "rules": (list, [], "Rule files, or folders of them, to use beside the shipped ones."),
    "disable": (list, [], "Rules and stages to leave out."),
    "verify": (bool, True, "Run every fused node against what it replaced, and take back those that fail."),
    "verify_seconds": (float, Options.verify_seconds, "Seconds that verification may take; 0 for no limit."),
}
"""Keywords of ``onnxfuse.optimize`` that a workflow may set: type, what stands where it does not, meaning."""


class Onnxfuse(Pass):  # type: ignore[misc]  # Olive has no types
    """Fuses operators for NVIDIA GPUs."""

    @classmethod
    def _default_config(cls, accelerator_spec: Any) -> dict[str, PassConfigParam]:
        return {name: PassConfigParam(type_=kind, default_value=default, description=meaning)
                for name, (kind, default, meaning) in _PARAMETERS.items()}

    def _run_for_config(self, model: ONNXModelHandler, config: Any, output_model_path: str) -> ONNXModelHandler:
        """The fused model in a folder of its own, with its weights.

        Raises:
            TypeError: the model is none of ONNX.
            OnnxfuseError: as ``onnxfuse.optimize``.
        """
        if not isinstance(model, ONNXModelHandler):
            raise TypeError(f"Onnxfuse fuses ONNX models, and this is a {type(model).__name__}; convert it before")
        path = Path(resolve_onnx_path(output_model_path, Path(model.model_path).name))
        wanted = {name: getattr(config, name) for name in _PARAMETERS}
        optimize(model.model_path, **wanted).save(path, external="copy")
        return ONNXModelHandler(str(path.parent), onnx_file_name=path.name, model_attributes=model.model_attributes)


def package() -> dict[str, Any]:
    """Olive's own package configuration with this pass in it."""
    own: dict[str, Any] = json.loads(Path(OlivePackageConfig.get_default_config_path()).read_text())
    everywhere = {f"supported_{what}": ["*"] for what in ("providers", "accelerators", "precisions")}
    passes = {**own["passes"], Onnxfuse.__name__: {"module_path": "onnxfuse.olive.Onnxfuse", **everywhere}}
    return {**own, "passes": passes}


if __name__ == "__main__":
    print(json.dumps(package(), indent=1))
