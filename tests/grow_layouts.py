"""Random graphs grow by an operator that lays elements out anew, picks some of them, or numbers them."""

from __future__ import annotations

import numpy as np
from graph_builder import BOOL, EXACT_TO, INT64, MOST_ELEMENTS, Builder, Known, grows
from reference import FLOATS

from onnxfuse.graph.dims import dim, product, symbol


@grows("Transpose")
def transpose(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) > 1)
    if x is None:
        return None
    axes = b.rng.sample(range(len(x.shape)), len(x.shape))
    return b.add(name, [x], [x.shape[axis] for axis in axes], x.bound, dtype=x.dtype, exact=x.exact, perm=axes)


@grows("Reshape")
def reshape(b: Builder, name: str) -> Known | None:
    """Two axes become one, or one two; at most one size is not a number."""
    x = b.choose(lambda v: len(v.shape) > 1)
    if x is None:
        return None
    place = b.rng.randint(0, len(x.shape) - 2)
    size = x.shape[place]
    if size.value is not None and size.value % 4 == 0 and b.flip():
        shape = (*x.shape[:place], dim(4), dim(size.value // 4), *x.shape[place + 1 :])
    else:
        shape = (*x.shape[:place], product(x.shape[place : place + 2]), *x.shape[place + 2 :])
    target = [0 if axis < place and size == x.shape[axis] else size.value for axis, size in enumerate(shape)]
    if target.count(None) > 1 or len(shape) > 5:
        return None
    return b.add(
        name,
        [x, b.ints(*(-1 if size is None else size for size in target))],
        shape,
        x.bound,
        dtype=x.dtype,
        exact=x.exact,
    )


@grows("Unsqueeze", "Squeeze", "Flatten")
def ranks(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: 1 <= len(v.shape) < 5)
    if x is None:
        return None
    keep = {"dtype": x.dtype, "exact": x.exact}
    if name == "Flatten":
        return b.add(name, [x], [x.shape[0], product(x.shape[1:])], x.bound, **keep)
    place = b.rng.randint(0, len(x.shape))
    shape = (*x.shape[:place], dim(1), *x.shape[place:])
    inputs, attributes = b.axes("Unsqueeze", 13, [place])
    made = b.add("Unsqueeze", [x, *inputs], shape, x.bound, **keep, **attributes)
    return made if name == "Unsqueeze" else b.add(name, [made, *inputs], x.shape, x.bound, **keep, **attributes)


@grows("Expand")
def expand(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) < 4 and product(v.shape).evaluate(b.limits) * 3 <= MOST_ELEMENTS)
    ones = [1] * len(x.shape) if x else []
    return x and b.add(name, [x, b.ints(3, *ones)], (dim(3), *x.shape), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Tile")
def tile(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.limits) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    repeats = [2] + [1] * (len(x.shape) - 1)
    return b.add(name, [x, b.ints(*repeats)], (x.shape[0] * 2, *x.shape[1:]), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Slice", "Split")
def part(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: any((size.value or 0) >= 4 and (size.value or 1) % 2 == 0 for size in v.shape))
    if x is None:
        return None
    axis = b.rng.choice([a for a, s in enumerate(x.shape) if (s.value or 0) >= 4 and (s.value or 1) % 2 == 0])
    size = x.shape[axis].value or 0
    shape = (*x.shape[:axis], dim(size // 2), *x.shape[axis + 1 :])
    keep = {"dtype": x.dtype, "exact": x.exact}
    if name == "Split":
        count = {"num_outputs": 2} if b.opset >= 18 else {}
        made = b.add(name, [x], shape, x.bound, outputs=2, axis=axis, **count, **keep)
        b.known.append(Known(f"{made.name}_1", x.dtype, shape, x.bound, x.exact))
        return made
    start, step = b.rng.choice(((0, 1), (size // 2, 1), (1, 2), (size - 1, -2)))
    end = start + step * (size // 2)
    return b.add(
        name,
        [x, b.ints(start), b.ints(end if end >= 0 else -size - 1), b.ints(axis), b.ints(step)],
        shape,
        x.bound,
        **keep,
    )


@grows("Concat")
def concat(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and product(v.shape).evaluate(b.limits) * 2 <= MOST_ELEMENTS)
    if x is None:
        return None
    z = b.choose(lambda v: v.dtype == x.dtype and v.shape == x.shape)
    axis = b.rng.randint(0, len(x.shape) - 1)
    shape = (*x.shape[:axis], x.shape[axis] * 2, *x.shape[axis + 1 :])
    return z and b.add(name, [x, z], shape, max(x.bound, z.bound), dtype=x.dtype, exact=x.exact and z.exact, axis=axis)


@grows("Trilu")
def trilu(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=2)
    return x and b.add(name, [x], x.shape, x.bound, exact=x.exact, upper=b.rng.randint(0, 1))


@grows("DepthToSpace", "SpaceToDepth")
def blocks(b: Builder, name: str) -> Known | None:
    x = b.choose(
        lambda v: (
            v.dtype == b.kind
            and len(v.shape) == 4
            and all((size.value or 1) % 4 == 0 for size in ((v.shape[1],) if name == "DepthToSpace" else v.shape[2:]))
        )
    )
    if x is None:
        return None
    n, c, h, w = x.shape
    shape = (n, c // 4, h * 2, w * 2) if name == "DepthToSpace" else (n, c * 4, h // 2, w // 2)
    return b.add(name, [x], shape, x.bound, dtype=x.dtype, exact=x.exact, blocksize=2)


@grows("GatherElements")
def gather(b: Builder, name: str) -> Known | None:
    x = b.choose(lambda v: len(v.shape) >= 1 and (v.shape[-1].value or 0) >= 3 and len(v.shape) == 1)
    return x and b.add(name, [x, b.ints(2, 0, -1)], (dim(3),), x.bound, dtype=x.dtype, exact=x.exact, axis=0)


@grows("GatherND")
def elements_of(b: Builder, name: str) -> Known | None:
    """Fixed places of the first axis, or of two."""
    depth = b.rng.choice((1, 2))
    x = b.choose(lambda v: 4 > len(v.shape) >= depth and all((size.value or 0) >= 2 for size in v.shape[:depth]))
    if x is None:
        return None
    places = b.constant(np.array([[1, 0], [0, -1], [-1, 1]], np.int64)[:, :depth])
    return b.add(name, [x, places], (dim(3), *x.shape[depth:]), x.bound, dtype=x.dtype, exact=x.exact)


@grows("Gather")
def rows_of(b: Builder, name: str) -> Known | None:
    """Some places of an axis: fixed ones, or those that an input names."""
    x = b.choose(lambda v: any((size.value or 0) >= 3 for size in v.shape) and len(v.shape) < 4)
    if x is None:
        return None
    axis = b.rng.choice([axis for axis, size in enumerate(x.shape) if (size.value or 0) >= 3])
    shape = (dim(2), symbol("N")) if b.flip() else (symbol("L"),)
    given = b.flip()
    places = b.ints(2, 0, 1, 1) if given else b.input(Known("", INT64, shape, 2.0, True))
    shape = (*x.shape[:axis], *((dim(4),) if given else shape), *x.shape[axis + 1 :])
    if product(shape).evaluate(b.limits) > MOST_ELEMENTS:
        return None
    return b.add(name, [x, places], shape, x.bound, dtype=x.dtype, exact=x.exact, axis=axis)


@grows("Pad")
def padded(b: Builder, name: str) -> Known | None:
    x = b.floating(rank=1)
    if x is None or product(x.shape).evaluate(b.limits) * 2 > MOST_ELEMENTS:
        return None
    axis = b.rng.randint(0, len(x.shape) - 1)
    before, after = b.rng.randint(0, 2), b.rng.randint(0, 2)
    pads = [0] * (2 * len(x.shape))
    pads[axis], pads[axis + len(x.shape)] = before, after
    shape = (*x.shape[:axis], x.shape[axis] + (before + after), *x.shape[axis + 1 :])
    if (x.shape[axis].value or 0) > 2 and b.flip():
        mode = b.rng.choice(["edge", "reflect"])
        return b.add(name, [x, b.ints(*pads)], shape, x.bound, exact=x.exact, mode=mode)
    return b.add(name, [x, b.ints(*pads), b.number(0.5)], shape, max(x.bound, 0.5), exact=x.exact)


@grows("Resize")
def repeated(b: Builder, name: str) -> Known | None:
    """Every element of an axis twice or three times."""
    x = b.floating(rank=1)
    if x is None or product(x.shape).evaluate(b.limits) * 3 > MOST_ELEMENTS:
        return None
    axis, times = b.rng.randint(0, len(x.shape) - 1), b.rng.choice([2, 3])
    scales = np.array([times if place == axis else 1 for place in range(len(x.shape))], np.float32)
    shape = (*x.shape[:axis], x.shape[axis] * times, *x.shape[axis + 1 :])
    way = b.rng.choice([("asymmetric", "floor"), ("half_pixel", "round_prefer_floor")])
    region = b.constant(np.zeros(0, np.float32)) if b.opset < 13 else ""
    return b.add(name, [x, region, b.constant(scales)], shape, x.bound, exact=x.exact,
                 coordinate_transformation_mode=way[0], nearest_mode=way[1])


@grows("ScatterND", "ScatterElements")
def scattered(b: Builder, name: str) -> Known | None:
    """Two places of an axis written over by parts of another value, or of the value itself."""
    numbers = name == "ScatterElements"  # its indices are as many as the updates
    x = b.choose(lambda v: len(v.shape) >= 1 and (v.shape[0].value or 0) >= 3 and v.dtype in FLOATS and (
        not numbers or all(size.value for size in v.shape)))
    z = x and b.choose(lambda v: v.dtype == x.dtype and v.shape == x.shape)
    if x is None or z is None:
        return None
    sizes = (dim(2), *x.shape[1:])
    updates = b.hidden("Slice", [z, b.ints(1), b.ints(3), b.ints(0)], sizes, x.dtype)
    places = np.array(b.rng.choice([[0, 1], [-2, -1], [2, 0], [0, 2]]), np.int64)
    if numbers:
        spread = np.broadcast_to(places.reshape(2, *(1 for _ in x.shape[1:])), [size.value or 0 for size in sizes])
        indices, more = b.constant(np.ascontiguousarray(spread)), {"axis": 0}
    else:
        indices, more = b.constant(places[:, None]), {}
    return b.add(name, [x, indices, updates], x.shape, max(x.bound, z.bound), dtype=x.dtype, exact=x.exact and z.exact,
                 **more)


@grows("OneHot")
def one_hot(b: Builder, name: str) -> Known | None:
    """Added to something, so that it is no constant."""
    x = b.floating(rank=1)
    if x is None or x.shape[-1].value is None:
        return None
    count = x.shape[-1].value
    places = b.input(Known("", INT64, (x.shape[-2] if len(x.shape) > 1 else dim(1),), float(count - 1), True))
    depth, values = b.constant(np.array(count, np.int64)), b.constant(np.array([0, 1]).astype(FLOATS[b.kind]))
    hot = b.hidden(name, [places, depth, values], [*places.shape, x.shape[-1]], b.kind)
    return b.add("Add", [x, hot], x.shape if len(x.shape) > 1 else (dim(1), *x.shape), x.bound + 1, exact=x.exact)


@grows("Range")
def counted(b: Builder, name: str) -> Known | None:
    """0, 1, 2 and so on along the last axis, as masks are made of them."""
    x = b.floating(rank=1, exact=True)
    if x is None or b.opset < 13:
        return None
    zero, one = (b.constant(np.array(number, np.int64)) for number in (0, 1))
    places = b.hidden(name, [zero, b.size_of(x, -1), one], [x.shape[-1]])
    numbers = b.add("Cast", [places], [x.shape[-1]], float(x.shape[-1].evaluate(b.limits)), exact=True, to=b.kind)
    if numbers.bound > EXACT_TO[b.kind]:
        return numbers
    return b.add("Greater", [x, numbers], x.shape, 1, dtype=BOOL, exact=True)
