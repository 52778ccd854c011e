"""Fused models in ONNX Runtime: register the native library where CUDA runs, and nowhere else."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onnxfuse import cuda_options
from onnxfuse.cuda_options import PlannedOtherwiseWarning
from onnxfuse.errors import KernelError, RuntimeLibraryError
from onnxfuse.runtime import callback, library

if TYPE_CHECKING:
    import onnxruntime

Provider = str | tuple[str, dict[str, Any]]

_CUDA = "CUDAExecutionProvider"


def register(
    session_options: onnxruntime.SessionOptions,
    model: str | os.PathLike[str] | bytes | None = None,
    *,
    device: int = 0,
) -> None:
    """Make sessions of these options run fused nodes as CUDA kernels.

    Call it once for a ``SessionOptions``; the session needs ``CUDAExecutionProvider`` among its providers.  Kernels
    come from the model's embedded images, from the cache on disk, or are compiled while the session is created.

    Args:
        session_options: the options that the session is created with.
        model: the fused model; with it, its distinct kernels are compiled in parallel first, and no more names are
            registered than it needs, which makes sessions start 0.2 s sooner.
        device: ordinal of the GPU that the session will use.

    Raises:
        RuntimeLibraryError: the native library is missing, or ONNX Runtime is older than 1.20 or refuses it.
        KernelError: with ``model``: a kernel does not compile.
        OutputError: with ``model``: ``ONNXFUSE_DUMP`` is set, and a kernel cannot be written there.
        OSError, ValueError: with ``model``: it cannot be read; nothing was registered.
    """
    nodes = None
    if model is not None:
        # These import onnx, which other deployments can do without.
        from onnxfuse.runtime.nodes import fused_nodes, names_needed, sources_of

        nodes = fused_nodes(model)
    path = library.library_path()
    compiler = callback.install()
    if nodes is not None:
        library.load().onnxfuse_expect_names(names_needed(nodes))
    try:
        session_options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime has an exception type per status, all of them plain
        raise RuntimeLibraryError(
            f"ONNX Runtime refuses the native library: {_reason(error)}", place=str(path)
        ) from error
    if nodes is None or compiler is None:
        return
    gpu = _gpu(device)
    if gpu is not None:
        compiler.images(sources_of(nodes, gpu.architecture), gpu.architecture)


def session(
    path: str | os.PathLike[str] | bytes,
    providers: Sequence[Provider] | None = None,
    session_options: onnxruntime.SessionOptions | None = None,
    **arguments: Any,
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session of a fused model, or of any other.

    The native library is registered where the CUDA provider will run the nodes: ``providers`` names it, no TensorRT
    provider comes along (it takes the nodes as functions), and a driver and the GPU are there.  Everywhere else ONNX
    Runtime inlines the functions of the fused nodes and computes what the original model did.

    Args:
        path: model file, or its bytes.
        providers: as ``onnxruntime.InferenceSession`` takes them; by default CUDA where there is a GPU, then the CPU.
        session_options: options to use; ``register`` must not have been called on them.
        arguments: further arguments of ``InferenceSession``.

    Returns:
        The session, one of ONNX Runtime's own.

    Raises:
        KernelError: a kernel cannot be compiled or loaded, or a fused node was given to the CPU.
        RuntimeLibraryError: as ``register``.

    Warns:
        PlannedOtherwiseWarning: the model was planned for other options of the CUDA provider.
    """
    import onnxruntime

    options = session_options or onnxruntime.SessionOptions()
    if providers is None:
        here = _CUDA in onnxruntime.get_available_providers() and _gpu(0) is not None
        providers = [_CUDA, "CPUExecutionProvider"] if here else ["CPUExecutionProvider"]
    settings = _settings(providers, arguments.get("provider_options"))
    device = None if settings is None else int(settings.get("device_id", 0))
    if settings is not None and device is not None and _gpu(device) is not None:
        _preload(onnxruntime)
        for sentence in planned_otherwise(path, settings):
            warnings.warn(sentence, PlannedOtherwiseWarning, stacklevel=2)
        try:
            register(options, path, device=device)
        except (OSError, ValueError):  # ONNX Runtime says what is wrong with the file, or reads what is no protobuf
            register(options, device=device)
    # A second try without the provider that failed would only hide the reason.
    arguments.setdefault("enable_fallback", 0)
    try:
        return onnxruntime.InferenceSession(path, options, providers=providers, **arguments)
    except Exception as error:
        if "onnxfuse: " not in str(error):
            raise
        raise KernelError(_reason(error)) from error


def planned_otherwise(model: str | os.PathLike[str] | bytes, settings: Mapping[str, Any]) -> Iterator[str]:
    """What somebody should know who runs a model with these options of the CUDA provider, if it is a fused one that was
    planned for others; nothing of what cannot be read, which ONNX Runtime has to say."""
    from onnxfuse.runtime.nodes import planned_for

    try:
        planned, hangs_on = planned_for(model)
    except (OSError, ValueError):
        return
    name = "the model" if isinstance(model, bytes) else os.path.basename(model)
    yield from cuda_options.planned_otherwise(planned, hangs_on, settings, name)


def _settings(
    providers: Sequence[Provider], provider_options: Sequence[Mapping[str, Any]] | None
) -> Mapping[str, Any] | None:
    """Options of the CUDA provider by which these providers run fused nodes as kernels; None where they do not."""
    names = [provider if isinstance(provider, str) else provider[0] for provider in providers]
    if _CUDA not in names or any("TensorRT" in name or "Tensorrt" in name for name in names):
        return None
    place = names.index(_CUDA)
    provider = providers[place]
    if not isinstance(provider, str):
        return provider[1]
    return provider_options[place] if provider_options and place < len(provider_options) else {}


def _gpu(ordinal: int) -> library.Gpu | None:
    try:
        gpus = library.gpus()
    except KernelError:
        return None
    return gpus[ordinal] if ordinal < len(gpus) else None


def _preload(onnxruntime: Any) -> None:
    """Let the CUDA provider find cuBLAS and cuDNN where pip put them; ONNX Runtime does not look there by itself."""
    if not hasattr(onnxruntime, "preload_dlls"):  # before 1.21
        return
    if importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.cudnn") is not None:
        onnxruntime.preload_dlls()


def _reason(error: Exception) -> str:
    """The library's own words in an error of ONNX Runtime."""
    text = str(error)
    return text[text.index("onnxfuse: ") + len("onnxfuse: "):] if "onnxfuse: " in text else text
