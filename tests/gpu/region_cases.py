"""Regions that run here in every way: with products, whose kernels are in no plan before something was measured, and
with rows that few models have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx
from depthwise import subject_of

from onnxfuse.cuda_options import TF32
from onnxfuse.optimised import Optimised
from onnxfuse.pipeline import Options, optimise, written
from onnxfuse.region import Region
from onnxfuse.tuning.subjects import subjects_of

CASES = {
    "a product, bias and GELU": """g (T[197,136] a, T[136,264] b, T[264] c) => (T[197,264] y)
        { p = MatMul(a, b) s = Add(p, c) y = Gelu(s) }""",
    "a product, residual and norm": """g (T[197,136] a, T[136,264] b, T[264] c, T[197,264] r, T[264] s, T[264] t)
        => (T[197,264] y, T[197,264] z)
        { p = MatMul(a, b) q = Add(p, c) z = Add(q, r) y = LayerNormalization(z, s, t) }""",
    "a product and softmax": """g (T[70,136] a, T[1000,136] b, T[1000] c) => (T[70,1000] y)
        { p = Gemm<transB = 1>(a, b, c) y = Softmax(p) }""",
    "a product and softmax in one block": """g (T[9000,136] a, T[136,96] b) => (T[9000,96] y)
        { p = MatMul(a, b) y = Softmax(p) }""",
    "heads": """g (T[3,65,64] a, T[64,96] b, T[96] c) => (T[3,6,65,16] y) <int64[4] h = {0,0,6,16}>
        { p = MatMul(a, b) q = Add(p, c) r = Reshape(q, h) y = Transpose<perm = [0,2,1,3]>(r) }""",
    "a gate": """g (T[130,72] a, T[72,200] b, T[72,200] c) => (T[130,200] y)
        { u = MatMul(a, b) w = MatMul(a, c) s = Sigmoid(u) t = Mul(u, s) y = Mul(t, w) }""",
    "three projections": """g (T[2,65,72] a, T[72,96] b, T[72,96] c, T[72,96] d, T[96] e, T[96] f)
        => (T[2,65,96] q, T[2,6,65,16] k, T[2,65,96] v) <int64[4] h = {0,0,6,16}>
        { p = MatMul(a, b) q = Add(p, e) r = MatMul(a, c) s = Add(r, f) t = Reshape(s, h)
          u = Transpose<perm = [0,2,1,3]>(t) k = Relu(u) v = MatMul(a, d) }""",
    "three projections, no vectors": """g (T[33,31] a, T[31,65] b, T[31,65] c, T[31,65] d, T[65] e)
        => (T[33,65] q, T[33,65] k, T[33,65] v) { p = MatMul(a, b) q = Add(p, e) k = MatMul(a, c) v = MatMul(a, d) }""",
    "four projections": """g (T[130,72] a, T[200,72] b, T[200,72] c, T[200,72] d, T[200,72] e, T[200] f)
        => (T[130,200] q, T[130,200] k, T[130,200] v, T[130,200] w)
        { q = Gemm<transB = 1>(a, b, f) k = Gemm<transB = 1>(a, c) v = Gemm<transB = 1>(a, d)
          r = Gemm<transB = 1>(a, e) w = Sigmoid(r) }""",
    "a residual, no vectors": """g (T[33,31] a, T[31,65] b, T[33,65] r) => (T[33,65] y)
        { p = MatMul(a, b) y = Add(p, r) }""",
    "rows that half a vector divides": """g (T[70,180] a, T[180,84] b, T[84] c) => (T[70,84] y)
        { p = MatMul(a, b) s = Add(p, c) y = Relu(s) }""",
    "rows that a quarter divides": """g (T[133,90] a, T[86,90] b, T[86] c) => (T[133,86] y)
        { p = Gemm<transB = 1>(a, b, c) y = Sigmoid(p) }""",
    "a product as wide as a tile": """g (T[1997,72] a, T[144,72] b, T[144] c, T[1997,144] r) => (T[1997,144] y)
        { p = Gemm<transB = 1>(a, b) s = Add(p, c) t = Add(s, r) y = Relu(t) }""",
    "a product of a batch and two of its results' shape": """g (T[3,197,136] a, T[3,136,264] b, T[3,197,264] c,
        T[3,197,264] d) => (T[3,197,264] y) { p = MatMul(a, b) q = Mul(p, c) y = Add(q, d) }""",
    "a convolution and a residual, in boxes": """g (T[3,32,32,64] x, T[72,3,3,64] w, T[72] c, T[3,32,32,72] r)
        => (T[3,32,32,72] y) { t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          p = Conv<pads = [1,1,1,1]>(t, v, c) q = Transpose<perm = [0,2,3,1]>(p) s = Add(q, r) y = Relu(s) }""",
    "a convolution of few channels, weights that stay": """g (T[9,96,99,32] x, T[64,3,3,32] w, T[64] c)
        => (T[9,48,50,64] y) { t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          p = Conv<pads = [1,1,1,1], strides = [2,2]>(t, v, c) q = Transpose<perm = [0,2,3,1]>(p) y = Relu(q) }""",
    "a convolution of a stage and a half, weights that stay": """g (T[9,51,48,96] x, T[32,3,3,96] w, T[9,51,48,32] r)
        => (T[9,51,48,32] y) { t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          p = Conv<pads = [1,1,1,1]>(t, v) q = Transpose<perm = [0,2,3,1]>(p) y = Add(q, r) }""",
    "a convolution of float32, weights that stay": """g (float[9,51,48,16] x, float[64,3,3,16] w)
        => (float[9,51,48,64] y) { t = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          p = Conv<pads = [1,1,1,1]>(t, v) q = Transpose<perm = [0,2,3,1]>(p) y = Relu(q) }""",
    "a product of few steps, many rows": """g (T[36003,72] a, T[144,72] b, T[144] c) => (T[36003,144] y)
        { p = Gemm<transB = 1>(a, b, c) s = Sigmoid(p) y = Mul(p, s) }""",
    "a recurrent layer, both ways": """g (T[9,5,24] x, T[2,160,24] w, T[2,160,40] r, T[2,320] b, T[2,5,40] h)
        => (T[9,2,5,40] y, T[2,5,40] s, T[2,5,40] c)
        { y, s, c = LSTM<hidden_size = 40, direction = "bidirectional">(x, w, r, b, , h) }""",
    "a recurrent layer with a reset": """g (T[9,19,24] x, T[1,192,24] w, T[1,192,64] r, T[1,384] b)
        => (T[9,1,19,64] y) { y = GRU<hidden_size = 64, linear_before_reset = 1>(x, w, r, b) }""",
    "a convolution": """g (T[2,16,19,17] x, T[24,16,3,3] w, T[24] b) => (T[2,24,19,17] y)
        { c = Conv<pads = [1,1,1,1]>(x, w, b) y = Relu(c) }""",
    "a depthwise convolution": """g (T[2,24,31,33] x, T[24,1,5,5] w, T[24] b) => (T[2,24,31,33] y)
        { c = Conv<group = 24, pads = [2,2,2,2]>(x, w, b) y = Relu(c) }""",
    "a stem": """g (T[2,3,37,35] x, T[24,3,3,3] w) => (T[2,24,19,18] y)
        { c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) s = Sigmoid(c) y = Mul(c, s) }""",
    "a stem, channels last": """g (T[2,3,37,35] x, T[24,3,3,3] w) => (T[2,19,18,24] y)
        { c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a convolution, windows in boxes": """g (T[2,15,13,64] x, T[40,3,3,64] w, T[40] b) => (T[2,8,7,40] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = Conv<pads = [1,1,1,1], strides = [2,2]>(i, v, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a dilated convolution, windows in boxes": """g (T[3,9,17,128] x, T[72,3,2,128] w) => (T[3,7,16,72] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = Conv<pads = [1,2,1,0], dilations = [2,3]>(i, v) y = Transpose<perm = [0,2,3,1]>(c) }""",
    "a transposed convolution": """g (T[2,16,19,17] x, T[16,24,3,3] w, T[24] b) => (T[2,24,38,34] y)
        { c = ConvTranspose<strides = [2,2], pads = [1,1,1,1], output_padding = [1,1]>(x, w, b) y = Relu(c) }""",
    "a transposed convolution, channels last": """g (T[2,19,17,64] x, T[64,4,4,40] w, T[40] b) => (T[2,38,34,40] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = ConvTranspose<strides = [2,2], pads = [1,1,1,1]>(i, v, b) r = Relu(c)
          y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a transposed convolution, as many as a stride": """g (T[2,19,17,64] x, T[64,2,2,40] w, T[40] b)
        => (T[2,38,34,40] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = ConvTranspose<strides = [2,2]>(i, v, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "one row": """g (T[1,264] a, T[264,136] b, T[1,136] r) => (T[1,136] y) { p = MatMul(a, b) y = Add(p, r) }""",
    "nine rows": """g (T[9,264] a, T[136,264] b, T[136] c) => (T[9,136] y)
        { p = Gemm<transB = 1>(a, b, c) y = Relu(p) }""",
    "a product of float32": """g (float[65,72] a, float[72,136] b, float[136] c) => (float[65,136] y)
        { p = MatMul(a, b) s = Add(p, c) y = Tanh(s) }""",
    "a product of float32, copied by a warp": """g (float[197,132] a, float[264,132] b, float[264] c)
        => (float[197,264] y) { p = Gemm<transB = 1>(a, b, c) y = Relu(p) }""",
    "a convolution of float32, windows in boxes": """g (float[2,15,13,48] x, float[40,3,3,48] w, float[40] b)
        => (float[2,8,7,40] y) { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = Conv<pads = [1,1,1,1], strides = [2,2]>(i, v, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a convolution, parts of stages in boxes": """g (T[2,15,13,40] x, T[3,3,40,64] w) => (T[2,15,13,64] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [3,2,0,1]>(w)
          c = Conv<pads = [1,1,1,1]>(i, v) y = Transpose<perm = [0,2,3,1]>(c) }""",
    "a convolution, pixels in vectors": """g (T[2,190,191,16] x, T[24,3,3,16] w, T[24] b) => (T[2,190,191,24] y)
        { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = Conv<pads = [1,1,1,1]>(i, v, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a convolution of float32, pixels in vectors": """g (float[2,190,191,4] x, float[24,3,3,4] w, float[24] b)
        => (float[2,190,191,24] y) { i = Transpose<perm = [0,3,1,2]>(x) v = Transpose<perm = [0,3,1,2]>(w)
          c = Conv<pads = [1,1,1,1]>(i, v, b) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "many rows by few columns": """g (T[16905,40] a, T[24,40] w, T[24] c, T[16905,24] r) => (T[16905,24] y)
        { p = Gemm<transB = 1>(a, w, c) y = Add(p, r) }""",
    "many rows by few columns, one pair of steps": """g (T[2,97,89,24] x, T[72,24,1,1] w, T[72] b) => (T[2,97,89,72] y)
        { i = Transpose<perm = [0,3,1,2]>(x) c = Conv(i, w, b) s = Sigmoid(c) q = Mul(c, s)
          y = Transpose<perm = [0,2,3,1]>(q) }""",
    "many rows by few columns, float32": """g (float[17001,12] a, float[20,12] w) => (float[17001,20] y)
        { p = Gemm<transB = 1>(a, w) y = Relu(p) }""",
    "an image that is scaled, by few columns": """g (T[24,28,27,40] t, T[10,40,1,1] w, T[10] b, T[40,10,1,1] v,
        T[40] e, T[16,40,1,1] k, T[24,28,27,16] r) => (T[24,28,27,16] y) { x = Transpose<perm = [0,3,1,2]>(t)
          m = GlobalAveragePool(x) p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = Sigmoid(q) s = Mul(x, g)
          c = Conv(s, k) l = Transpose<perm = [0,2,3,1]>(c) y = Add(l, r) }""",
    "a stem of float32": """g (float[2,3,37,35] x, float[24,3,3,3] w) => (float[2,19,18,24] y)
        { c = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a convolution of volumes, windows in boxes": """g (T[2,9,11,13,64] x, T[40,3,3,3,64] w, T[40] b)
        => (T[2,5,6,7,40] y) { i = Transpose<perm = [0,4,1,2,3]>(x) v = Transpose<perm = [0,4,1,2,3]>(w)
          c = Conv<pads = [1,1,1,1,1,1], strides = [2,2,2]>(i, v, b) r = Relu(c)
          y = Transpose<perm = [0,2,3,4,1]>(r) }""",
    "a quantised layer": """g (int8[130,272] a, int8[200,272] b, float s, float[200] t, float[200] c, float o)
        => (int8[130,200] y) { x = DequantizeLinear(a, s) w = DequantizeLinear<axis = 0>(b, t)
          p = Gemm<transB = 1>(x, w, c) r = Relu(p) z = Constant<value = int8 {3}>() y = QuantizeLinear(r, o, z) }""",
    "a quantised layer, zero points": """g (uint8[130,272] a, uint8[200,272] b, float s, uint8 z, float t, uint8 u)
        => (float[130,200] y) { x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t, u)
          p = Gemm<transB = 1>(x, w) y = Tanh(p) }""",
    "a quantised layer, columns side by side": """g (uint8[130,272] a, int8[272,208] b, float s, uint8 z, float[208] t)
        => (float[130,208] y) { x = DequantizeLinear(a, s, z) w = DequantizeLinear<axis = 1>(b, t)
          p = MatMul(x, w) y = Relu(p) }""",
    "a quantised layer, no vectors": """g (int8[33,31] a, int8[31,65] b, float s, float[65] t, int8[65] u)
        => (float[33,65] y) { x = DequantizeLinear(a, s) w = DequantizeLinear<axis = 1>(b, t, u)
          p = MatMul(x, w) y = Relu(p) }""",
    "a quantised convolution": """g (uint8[2,37,35,48] a, int8[40,3,3,48] b, float s, uint8 z, float[40] t, float[40] c,
          float o) => (int8[2,19,18,40] y)
        { i = Transpose<perm = [0,3,1,2]>(a) x = DequantizeLinear(i, s, z) v = Transpose<perm = [0,3,1,2]>(b)
          w = DequantizeLinear<axis = 0>(v, t) p = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w, c) r = Relu(p)
          e = Constant<value = int8 {3}>() q = QuantizeLinear(r, o, e) y = Transpose<perm = [0,2,3,1]>(q) }""",
    "a quantised convolution, windows in boxes": """g (uint8[2,15,13,128] a, int8[40,3,3,128] b, float s, float[40] t)
        => (float[2,8,7,40] y)
        { i = Transpose<perm = [0,3,1,2]>(a) x = DequantizeLinear(i, s) v = Transpose<perm = [0,3,1,2]>(b)
          w = DequantizeLinear<axis = 0>(v, t) p = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w) r = Relu(p)
          y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a quantised convolution, channels first, no vectors": """g (int8[2,7,17,15] a, int8[10,7,3,2] b, float s, int8 z,
          float t, int8 u) => (float[2,10,17,14] y)
        { x = DequantizeLinear(a, s, z) w = DequantizeLinear(b, t, u)
          p = Conv<pads = [1,2,1,0], dilations = [1,3]>(x, w) y = Relu(p) }""",
    "few queries of many keys": """g (T[2,3,5,40] q, T[2,3,40,600] k, T[2,3,600,40] v) => (T[2,3,5,40] y)
        { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }""",
    "attention of float32": """g (float[2,3,65,40] q, float[2,3,40,100] k, float[2,3,100,40] v) => (float[2,3,65,40] y)
        { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }""",
    "attention, keys as they lie": """g (T[2,65,3,40] q, T[2,330,3,40] k, T[2,330,3,24] v) => (T[2,3,65,24] y)
        { a = Transpose<perm = [0,2,1,3]>(q) b = Transpose<perm = [0,2,3,1]>(k) w = Transpose<perm = [0,2,1,3]>(v)
          s = MatMul(a, b) p = Softmax(s) y = MatMul(p, w) }""",
    "causal attention": """g (T[1,2,200,72] q, T[1,2,200,72] k, T[1,2,200,72] v) => (T[1,2,200,72] y)
        <int64 nought = {0}, int64 once = {1}, int64 count = {200}, int64[1] axis = {1}>
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) places = Range(nought, count, once)
          rows = Unsqueeze(places, axis) see = LessOrEqual(places, rows) low = Constant<value_float = -inf>()
          deep = CastLike(low, q) c = Where(see, s, deep) p = Softmax(c) y = MatMul(p, v) }""",
    "causal attention, a finite mask": """g (T[1,2,90,64] q, T[1,2,40,64] k, T[1,2,40,64] v) => (T[1,2,90,64] y)
        <int64 nought = {0}, int64 once = {1}, int64 past = {50}, int64 rows = {90}, int64 keys = {40},
         int64[1] axis = {1}>
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) own = Range(nought, rows, once) p = Sub(own, past)
          r = Unsqueeze(p, axis) places = Range(nought, keys, once) see = LessOrEqual(places, r)
          low = Constant<value_float = -60000.0>() deep = CastLike(low, q) c = Where(see, s, deep) w = Softmax(c)
          y = MatMul(w, v) }""",
    "attention": """g (T[2,3,65,40] q, T[2,3,40,97] k, T[2,3,97,40] v, T[2,1,1,97] m) => (T[2,3,65,40] y)
        { s = MatMul(q, k) t = Add(s, m) p = Softmax(t) y = MatMul(p, v) }""",
    "attention, a softmax of float32": """g (T[2,3,65,64] q, T[2,1,260,64] k, T[2,1,260,64] v, T[65,260] m)
        => (T[2,3,65,64] y)
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) a = Add(s, m) f = Cast<to = 1>(a) p = Softmax(f)
          w = CastLike(p, q) y = MatMul(w, v) }""",
    "attention of 128": """g (T[1,2,130,128] q, T[1,2,300,128] k, T[1,2,300,128] v) => (T[1,2,130,128] y)
        { t = Transpose<perm = [0,1,3,2]>(k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }""",
    "attention, powers stored": """g (T[2,3,65,40] q, T[2,3,40,97] k, T[2,3,97,40] v)
        => (T[2,3,65,40] y, T[2,3,65,97] p) { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }""",
    "samples of a grid": """g (T[2,5,17,19] x, T[2,13,11,2] h) => (T[2,5,13,11] y)
        { z = GridSample(x, h) y = Relu(z) }""",
    "samples of a grid, reflected": """g (T[2,5,17,19] x, T[2,13,11,2] h) => (T[2,5,13,11] y)
        { z = GridSample<padding_mode = "reflection">(x, h) y = Relu(z) }""",
    "samples of a grid of volumes, the nearest": """g (T[2,3,5,9,7] x, T[2,5,6,7,3] h) => (T[2,3,5,6,7] y)
        { z = GridSample<mode = "nearest", padding_mode = "border", align_corners = 1>(x, h) y = Relu(z) }""",
    "few long rows": """g (T[5,8208] x, T[8208] g, T[8208] b) => (T[5,8208] y)
        { i = LayerNormalization(x, g, b) y = Relu(i) }""",
    "long rows in pieces": """g (T[2,97,91,24] x, T[6] g, T[6] b, T[24,1,1] w) => (T[2,97,91,24] y)
        <int64[3] s = {0,6,-1}, int64[4] t = {0,24,97,91}>
        { f = Transpose<perm = [0,3,1,2]>(x) r = Reshape(f, s) i = InstanceNormalization(r, g, b) q = Reshape(i, t)
          m = Mul(q, w) y = Transpose<perm = [0,2,3,1]>(m) }""",
    "a linear resize": """g (T[2,19,17,24] x) => (T[2,41,30,24] y) <int64[4] s = {2,24,41,30}>
        { f = Transpose<perm = [0,3,1,2]>(x) i = Resize<mode = "linear">(f, , , s) r = Relu(i)
          y = Transpose<perm = [0,2,3,1]>(r) }""",
    "long rows in pieces, no vectors": """g (T[3,12001,7,3] x) => (T[3,12001,7,3] y, T[3,1,7,1] s)
        <int64[2] a = {1,3}> { u = Tanh(x) s = ReduceLogSumExp(u, a) d = Sub(u, s) e = Neg(d) y = Exp(e) }""",
}


WHOLE = {
    "long columns in pieces": """g (T[2,97,91,24] x, T[24] g, T[24] b) => (T[2,97,91,24] y)
        { f = Transpose<perm = [0,3,1,2]>(x) i = InstanceNormalization(f, g, b) r = Relu(i)
          y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a depthwise convolution, channels last": """g (T[2,31,33,24] x, T[24,1,5,5] w, T[24] b) => (T[2,16,17,24] y)
        { i = Transpose<perm = [0,3,1,2]>(x) c = Conv<group = 24, pads = [2,2,2,2], strides = [2,2]>(i, w, b)
          r = Relu(c) y = Transpose<perm = [0,2,3,1]>(r) }""",
    "a depthwise convolution of 7 x 7, channels last": """g (T[2,15,13,56] x, T[56,1,7,7] w, T[56] b)
        => (T[2,15,13,56] y)
        { i = Transpose<perm = [0,3,1,2]>(x) c = Conv<group = 56, pads = [3,3,3,3]>(i, w, b)
          s = Sigmoid(c) m = Mul(c, s) y = Transpose<perm = [0,2,3,1]>(m) }""",
    "a depthwise convolution, dilated, channels last": """g (T[3,17,19,40] x, T[40,1,3,3] w) => (T[3,16,18,40] y)
        { i = Transpose<perm = [0,3,1,2]>(x) r = Relu(i) c = Conv<group = 40, pads = [1,2,2,1], dilations = [2,2]>(r, w)
          y = Transpose<perm = [0,2,3,1]>(c) }""",
    "a norm ahead of projections": """g (T[2,65,72] x, T[72] s, T[72] b, T[72,96] w, T[72,96] v, T[96] c)
        => (T[2,65,96] q, T[2,65,96] k)
        { n = LayerNormalization(x, s, b) p = MatMul(n, w) q = Add(p, c) k = MatMul(n, v) }""",
    "norms of queries and keys": """g (T[1,2,65,64] q, T[1,2,70,64] k, T[1,2,70,64] v, T[64] s)
        => (T[1,2,65,64] y) { a = LayerNormalization(q, s) t = Transpose<perm = [0,1,3,2]>(k) u = MatMul(a, t)
          p = Softmax(u) y = MatMul(p, v) }""",
    "branches side by side": """g (T[2,19,17,64] x, T[24,1,1,64] w, T[24] b, T[40,3,3,64] v, T[40] c)
        => (T[2,19,17,64] y) { i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w)
          l = Transpose<perm = [0,3,1,2]>(v) p = Conv(i, k, b) r = Relu(p) q = Conv<pads = [1,1,1,1]>(i, l, c)
          s = Relu(q) z = Concat<axis = 1>(r, s) y = Transpose<perm = [0,2,3,1]>(z) }""",
    "a convolution and group norm": """g (T[2,128,64,64] t, T[72,3,3,64] v, T[72] b, T[8] o, T[8] u, T[72,1,1] e)
        => (T[2,128,64,72] y) <int64[3] d = {0,8,-1}, int64[4] f = {-1,72,128,64}>
        { x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v) c = Conv<pads = [1,1,1,1]>(x, w, b)
          r = Reshape(c, d) i = InstanceNormalization(r, o, u) j = Reshape(i, f) m = Mul(j, e) s = Sigmoid(m)
          a = Mul(m, s) y = Transpose<perm = [0,2,3,1]>(a) }""",
    "a convolution of single pixels, residual and group norm": """g (T[2,128,64,64] t, T[72,1,1,64] v,
        T[2,128,64,72] z, T[8] o, T[8] u) => (T[2,128,64,72] y, T[2,128,64,72] q)
        <int64[3] d = {0,8,-1}, int64[4] f = {-1,72,128,64}>
        { x = Transpose<perm = [0,3,1,2]>(t) w = Transpose<perm = [0,3,1,2]>(v) c = Conv(x, w)
          k = Transpose<perm = [0,2,3,1]>(c) q = Add(k, z) h = Transpose<perm = [0,3,1,2]>(q) r = Reshape(h, d)
          i = InstanceNormalization(r, o, u) j = Reshape(i, f) a = Relu(j) y = Transpose<perm = [0,2,3,1]>(a) }""",
    "squeeze and excite": """g (T[3,480,9,7] x, T[20,480,1,1] w, T[20] b, T[480,20,1,1] v, T[480] e)
        => (T[3,480,9,7] y)
        { m = GlobalAveragePool(x) p = Conv(m, w, b) a = Relu(p) q = Conv(a, v, e) g = HardSigmoid(q)
          y = Mul(x, g) }""",
    "squeeze and excite, channels last": """g (T[2,13,11,336] t, T[84,336,1,1] w, T[84] b, T[336,84,1,1] v, T[336] e,
        T[2,13,11,336] z) => (T[2,13,11,336] y)
        { x = Transpose<perm = [0,3,1,2]>(t) m = GlobalAveragePool(x) p = Conv(m, w, b) s = Sigmoid(p) a = Mul(p, s)
          q = Conv(a, v, e) g = Sigmoid(q) k = Mul(x, g) l = Transpose<perm = [0,2,3,1]>(k) y = Add(l, z) }""",
    "squeeze and excite behind a convolution": """g (T[3,13,11,336] t, T[336,1,5,5] d, T[336] f, T[84,336,1,1] w,
        T[84] b, T[336,84,1,1] v, T[336] e) => (T[3,13,11,336] y)
        { i = Transpose<perm = [0,3,1,2]>(t) c = Conv<group = 336, pads = [2,2,2,2]>(i, d, f) o = Sigmoid(c)
          x = Mul(c, o) m = GlobalAveragePool(x) p = Conv(m, w, b) s = Sigmoid(p) a = Mul(p, s) q = Conv(a, v, e)
          g = Sigmoid(q) k = Mul(x, g) y = Transpose<perm = [0,2,3,1]>(k) }""",
    "squeeze and excite behind a convolution in steps, few channels": """g (T[2,61,57,24] t, T[24,1,3,3] d,
        T[6,24,1,1] w, T[24,6,1,1] v) => (T[2,31,29,24] y)
        { i = Transpose<perm = [0,3,1,2]>(t) c = Conv<group = 24, pads = [1,1,1,1], strides = [2,2]>(i, d) x = Relu(c)
          m = GlobalAveragePool(x) p = Conv(m, w) a = Relu(p) q = Conv(a, v) g = HardSigmoid(q) k = Mul(x, g)
          y = Transpose<perm = [0,2,3,1]>(k) }""",
    "branches behind one, beside a window and a copy": """g (T[2,19,17,64] x, T[48,1,1,64] w, T[24] b, T[40,3,3,24] v,
        T[2,20,18,8] u, T[2,19,17,16] t) => (T[2,19,17,88] y) <int64[2] z = {24,24}, int64[2] one = {1,2}>
        { i = Transpose<perm = [0,3,1,2]>(x) k = Transpose<perm = [0,3,1,2]>(w) l = Transpose<perm = [0,3,1,2]>(v)
          p = Conv(i, k) c, d = Split<axis = 1>(p, z) a = Unsqueeze(b, one) r = Add(c, a) o = Relu(r) e = Relu(d)
          f = Transpose<perm = [0,2,3,1]>(e) h = Transpose<perm = [0,3,1,2]>(f) q = Conv<pads = [1,1,1,1]>(h, l)
          m = Transpose<perm = [0,3,1,2]>(u) n = MaxPool<kernel_shape = [2,2]>(m) g = Transpose<perm = [0,3,1,2]>(t)
          s = Concat<axis = 1>(o, q, n, g) y = Transpose<perm = [0,2,3,1]>(s) }""",
    "an attention with its projections": """g (T[2,197,96] x, T[96,288] w, T[288] b, int32[2,197] m) => (T[2,197,96] y)
        { y = com.microsoft.Attention<num_heads = 3>(x, w, b, m) }""",
    "an attention over caches": """g (T[2,1,64] q, T[2,1,32] k, T[2,1,32] v, T[2,2,300,16] a, T[2,2,300,16] c,
        int32[2] n, T[300,8] cos, T[300,8] sin) => (T[2,1,64] y, T[2,2,300,16] d, T[2,2,300,16] e) <int32 t = {280}>
        { y, d, e = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
          (q, k, v, a, c, n, t, cos, sin) }""",
    "an attention of a prompt behind a cache, in a window": """g (T[1,65,96] q, T[1,2,70,16] a, T[1,2,70,16] c,
        int32[1] n) => (T[1,65,32] y, T[1,2,135,16] d, T[1,2,135,16] e) <int32 t = {135}>
        { y, d, e = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 2, local_window_size = 40>
          (q, , , a, c, n, t) }""",
    "squeeze and excite of float32, no vectors": """g (float[2,97,9,7] x, float[13,97] w, float[97,13] v)
        => (float[2,97,9,7] y) <int64[4] f = {0,-1,1,1}>
        { i = GlobalAveragePool(x) m = Flatten(i) p = Gemm<transB = 1>(m, w) a = Relu(p) q = Gemm<transB = 1>(a, v)
          h = Sigmoid(q) g = Reshape(h, f) y = Mul(x, g) }""",
}
"""Cases of which all is one region, as it is in larger models: alone their views would stay outside."""

UNROUNDED = ("a product of float32", "a product of float32, copied by a warp", "attention of float32",
             "a convolution of float32, windows in boxes", "a stem of float32")
"""Cases that run as a session that keeps TF32 off has them, too."""


def cases(target: str) -> Iterator[tuple[str, Region]]:
    """The regions of each case with each of their kernels for a GPU, by the case and the way to run it."""
    for name, text in {**CASES, **WHOLE}.items():
        model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]> '
                                        f'{text.replace("T[", "float16[")}')
        options = Options(target=target, verify=False, database=False, eager=True)
        yield from _ways(name, optimise(model, options))
        if name in UNROUNDED:
            exact = replace(options, provider_options={TF32: "0"})
            yield from _ways(f"{name}, not rounded", optimise(model, exact))


def _ways(name: str, plan: Optimised) -> Iterator[tuple[str, Region]]:
    for subject in [subject_of(plan)] if name in WHOLE else subjects_of(plan)[0]:
        for way, kernel in subject.kernels.items():
            yield f"{name}, {way}", written(replace(subject.fusion, made=kernel))
