"""Models exported with random weights by exporters other than PyTorch's, one environment an exporter.

    python tests/corpus/exports.py EXPORTER FOLDER

Each function writes one model; which packages its exporter needs stands in ``EXPORTERS``.  Runs in that environment,
where nothing of onnxfuse is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXPORTERS = {
    "tf2onnx": ["tensorflow-cpu==2.21.*", "tf2onnx==1.17.*"],
    "keras": ["tensorflow-cpu==2.21.*", "keras==3.*", "tf2onnx==1.17.*"],
    "paddle2onnx": ["paddlepaddle==3.*", "paddle2onnx==2.1.*", "onnx_graphsurgeon", "packaging"],
    "jax2onnx": ["jax2onnx==0.17.*", "flax==0.12.*"],
    "skl2onnx": ["skl2onnx==1.20.*", "scikit-learn==1.*"],
    "onnxmltools": ["onnxmltools==1.16.*", "skl2onnx==1.20.*", "lightgbm==4.*", "xgboost==3.*", "scikit-learn==1.*",
                    "packaging"],
}
"""Packages of each exporter."""

MAKERS: dict[str, list[Callable[[Path], None]]] = {name: [] for name in EXPORTERS}


def of(exporter: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Registers a model of an exporter."""

    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        MAKERS[exporter].append(make)
        return make

    return register


# -- tf2onnx: functions of TensorFlow ---------------------------------------------------------------------------------


def _convert(function: Any, signature: Any, path: Path) -> None:
    import tensorflow as tf
    import tf2onnx

    tf2onnx.convert.from_function(tf.function(function, input_signature=signature), signature, opset=17,
                                  output_path=str(path))


@of("tf2onnx")
def wrapped_lookup(folder: Path) -> None:
    """Ids that may be negative, as Python's are; layer norm and gelu by hand."""
    import tensorflow as tf

    table, weight = tf.random.normal([97, 64]), tf.random.normal([64, 64])

    def run(ids: Any) -> Any:
        x = tf.gather(table, tf.where(ids < 0, ids + 97, ids))
        mean, variance = tf.nn.moments(x, [-1], keepdims=True)
        x = (x - mean) * tf.math.rsqrt(variance + 1e-6)
        return tf.nn.gelu(x @ weight, approximate=True)

    _convert(run, [tf.TensorSpec([None, None], tf.int32, "ids")], folder / "wrapped_lookup.onnx")


@of("tf2onnx")
def masked_attention(folder: Path) -> None:
    """Attention with lengths for a mask."""
    import tensorflow as tf

    weights = [tf.random.normal([64, 64]) * 0.1 for _ in range(3)]

    def run(x: Any, lengths: Any) -> Any:
        batch, steps = tf.shape(x)[0], tf.shape(x)[1]
        q, k, v = (tf.transpose(tf.reshape(x @ w, [batch, steps, 4, 16]), [0, 2, 1, 3]) for w in weights)
        mask = tf.cast(tf.sequence_mask(lengths, steps), tf.float32)[:, None, None, :]
        scores = tf.matmul(q, k, transpose_b=True) / 4.0 + (1.0 - mask) * -1e9
        y = tf.transpose(tf.matmul(tf.nn.softmax(scores), v), [0, 2, 1, 3])
        return tf.nn.relu(tf.reshape(y, [batch, steps, 64])) + x

    _convert(run, [tf.TensorSpec([None, None, 64], tf.float32, "x"), tf.TensorSpec([None], tf.int32, "lengths")],
             folder / "masked_attention.onnx")


@of("tf2onnx")
def spectrogram(folder: Path) -> None:
    """Frames of a signal, their magnitudes by products, and a logarithm."""
    import numpy as np
    import tensorflow as tf

    angles = 2 * np.pi * np.outer(np.arange(256), np.arange(129)) / 256
    cosines, sines = tf.constant(np.cos(angles), tf.float32), tf.constant(np.sin(angles), tf.float32)

    def run(signal: Any) -> Any:
        frames = tf.signal.frame(signal, 256, 128)
        power = tf.square(frames @ cosines) + tf.square(frames @ sines)
        logs = tf.math.log(tf.maximum(power, 1e-10))
        return (logs - tf.reduce_mean(logs, [1, 2], keepdims=True)) / (tf.math.reduce_std(logs, [1, 2], True) + 1e-5)

    _convert(run, [tf.TensorSpec([None, 4096], tf.float32, "signal")], folder / "spectrogram.onnx")


# -- Keras: whole networks --------------------------------------------------------------------------------------------


def _exported(model: Any, path: Path) -> None:
    import tensorflow as tf
    import tf2onnx

    signature = [tf.TensorSpec(each.shape, each.dtype, each.name) for each in model.inputs]
    tf2onnx.convert.from_keras(model, input_signature=signature, opset=17, output_path=str(path))


@of("keras")
def mobile(folder: Path) -> None:
    import keras

    _exported(keras.applications.MobileNetV3Small(input_shape=(96, 96, 3), weights=None, classes=10),
              folder / "mobile.onnx")


@of("keras")
def efficient(folder: Path) -> None:
    import keras

    _exported(keras.applications.EfficientNetV2B0(input_shape=(64, 64, 3), weights=None, classes=10),
              folder / "efficient.onnx")


@of("keras")
def recurrent(folder: Path) -> None:
    """Both directions, and a network of time steps."""
    import keras

    inputs = keras.Input((24, 16))
    x = keras.layers.Bidirectional(keras.layers.GRU(32, return_sequences=True, reset_after=False))(inputs)
    x = keras.layers.LSTM(16, return_sequences=True, unroll=True)(x)
    x = keras.layers.LayerNormalization()(x)
    _exported(keras.Model(inputs, keras.layers.Dense(5, activation="softmax")(x)), folder / "recurrent.onnx")


@of("keras")
def transformer(folder: Path) -> None:
    import keras

    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(500, 48)(inputs)
    x = keras.layers.LayerNormalization()(x + keras.layers.MultiHeadAttention(4, 12)(x, x))
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(48)(keras.layers.Dense(96, activation="silu")(x)))
    _exported(keras.Model(inputs, keras.layers.GlobalAveragePooling1D()(x)), folder / "transformer.onnx")


# -- Paddle -----------------------------------------------------------------------------------------------------------


def _paddle(layer: Any, shape: list[Any], path: Path, dtype: str = "float32") -> None:
    import paddle

    layer.eval()
    spec = [paddle.static.InputSpec(shape, dtype, "x")]
    paddle.onnx.export(layer, str(path.with_suffix("")), input_spec=spec, opset_version=14)


@of("paddle2onnx")
def swish_net(folder: Path) -> None:
    """Swish, hard-swish and squeeze-and-excite beside convolutions."""
    from paddle import nn

    class Net(nn.Layer):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.Conv2D(3, 16, 3, 2, 1), nn.BatchNorm2D(16), nn.Swish())
            self.body = nn.Sequential(nn.Conv2D(16, 16, 3, 1, 1, groups=16), nn.BatchNorm2D(16), nn.Hardswish())
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2D(1), nn.Conv2D(16, 4, 1), nn.ReLU(), nn.Conv2D(4, 16, 1),
                                      nn.Hardsigmoid())

        def forward(self, x: Any) -> Any:
            x = self.stem(x)
            y = self.body(x)
            return nn.functional.mish(x + y * self.gate(y))

    _paddle(Net(), [None, 3, None, None], folder / "swish_net.onnx")


@of("paddle2onnx")
def encoder(folder: Path) -> None:
    from paddle import nn

    layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", dropout=0.1)
    _paddle(nn.TransformerEncoder(layer, 2), [None, None, 64], folder / "encoder.onnx")


@of("paddle2onnx")
def reader(folder: Path) -> None:
    """Convolutions, then a recurrent network in both directions, as text is read."""
    from paddle import nn

    class Net(nn.Layer):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2D(3, 32, (8, 3), (8, 1), (0, 1))
            self.rows = nn.LSTM(32, 24, direction="bidirect")
            self.head = nn.Linear(48, 11)

        def forward(self, x: Any) -> Any:
            x = nn.functional.relu(self.convolution(x)).squeeze(2).transpose([0, 2, 1])
            return nn.functional.softmax(self.head(self.rows(x)[0]))

    _paddle(Net(), [1, 3, 8, 40], folder / "reader.onnx")


# -- JAX --------------------------------------------------------------------------------------------------------------


def _jax(function: Any, inputs: list[Any], path: Path) -> None:
    from jax2onnx import to_onnx

    to_onnx(function, inputs, model_name=path.stem, return_mode="file", output_path=str(path))


@of("jax2onnx")
def norms(folder: Path) -> None:
    """Root-mean-square norm, layer norm without scale, a gated activation."""
    import jax
    import jax.numpy as jnp

    def run(x: Any) -> Any:
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        mean = jnp.mean(scaled, axis=-1, keepdims=True)
        plain = (scaled - mean) / jnp.sqrt(jnp.var(scaled, axis=-1, keepdims=True) + 1e-5)
        return jax.nn.silu(plain) * jax.nn.gelu(x)

    _jax(run, [("B", 8, 64)], folder / "norms.onnx")


@of("jax2onnx")
def attention(folder: Path) -> None:
    """Attention of one head with a causal mask."""
    import jax
    import jax.numpy as jnp

    def run(q: Any, k: Any, v: Any) -> Any:
        scores = q @ jnp.swapaxes(k, -1, -2) / 8.0
        mask = jnp.arange(16)[:, None] >= jnp.arange(16)[None, :]
        return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ v

    _jax(run, [("B", 16, 64)] * 3, folder / "attention.onnx")


@of("jax2onnx")
def network(folder: Path) -> None:
    """Layers of Flax."""
    import jax.numpy as jnp
    from flax import nnx

    class Net(nnx.Module):  # type: ignore[misc]
        def __init__(self, rngs: Any) -> None:
            self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)
            self.norm = nnx.LayerNorm(32, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(x + self.second(nnx.gelu(self.first(x)))) * jnp.tanh(x)

    _jax(Net(nnx.Rngs(0)), [("B", 12, 32)], folder / "network.onnx")


# -- scikit-learn and trees -------------------------------------------------------------------------------------------


def _table() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.standard_normal((200, 12)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(np.int64)


def _sklearn(model: Any, path: Path) -> None:
    from skl2onnx import to_onnx

    x, y = _table()
    model.fit(x, y)
    path.write_bytes(to_onnx(model, x[:1], options={"zipmap": False}, target_opset=17).SerializeToString())


@of("skl2onnx")
def perceptron(folder: Path) -> None:
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    _sklearn(make_pipeline(StandardScaler(), MLPClassifier((32, 16), activation="tanh", max_iter=30)),
             folder / "perceptron.onnx")


@of("skl2onnx")
def processes(folder: Path) -> None:
    """Distances and exponentials."""
    from sklearn.gaussian_process import GaussianProcessClassifier
    from sklearn.gaussian_process.kernels import RBF

    _sklearn(GaussianProcessClassifier(RBF(1.0)), folder / "processes.onnx")


@of("skl2onnx")
def mixture(folder: Path) -> None:
    from skl2onnx import to_onnx
    from sklearn.mixture import GaussianMixture

    x, _ = _table()
    model = GaussianMixture(3, random_state=0).fit(x)
    (folder / "mixture.onnx").write_bytes(to_onnx(model, x[:1], target_opset=17).SerializeToString())


@of("onnxmltools")
def boosted(folder: Path) -> None:
    import lightgbm
    from onnx.version_converter import convert_version
    from onnxmltools import convert_lightgbm
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = _table()
    model = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(x, y)
    made = convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, 12]))], target_opset=15, zipmap=False)
    made = convert_version(made, 15)  # target_opset is the most that the exporter takes; it takes the least, 9
    (folder / "boosted.onnx").write_bytes(made.SerializeToString())


@of("onnxmltools")
def gradient(folder: Path) -> None:
    import xgboost
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    x, y = _table()
    model = xgboost.XGBClassifier(n_estimators=10).fit(x, y)
    made = convert_xgboost(model, initial_types=[("x", FloatTensorType([None, 12]))], target_opset=15)
    (folder / "gradient.onnx").write_bytes(made.SerializeToString())


def main() -> None:
    exporter, folder = sys.argv[1], Path(sys.argv[2])
    for make in MAKERS[exporter]:
        make(folder)
        print(f"{exporter}/{make.__name__}", flush=True)


if __name__ == "__main__":
    main()
