"""Do maps of tensors say what NumPy does: each step, composed, as strided views, and written down?"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.geometry import Box, LayoutError
from shardwise.geometry.state_map import MappedTensor, MapTerm, StateMap, TensorShape, terms_of_view

Array = npt.NDArray[Any]


def filled(**shapes: tuple[int, ...]) -> dict[str, Array]:
    """Arrays without equal values."""
    made, start = {}, 1
    for name, shape in shapes.items():
        made[name] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return made


def types(arrays: dict[str, Array]) -> dict[str, TensorShape]:
    return {name: TensorShape(array.shape, "i64") for name, array in arrays.items()}


def apply(state_map: StateMap, arrays: dict[str, Array]) -> dict[str, Array]:
    """What a map makes of arrays, element by element of its terms."""
    made = {}
    for name, tensor in state_map.checked().targets.items():
        made[name] = np.full(tensor.shape, -1)
        for term in tensor.terms:
            if term.source is None:
                made[name][term.box.slices] = term.fill
            else:
                made[name][term.box.slices] = arrays[term.source][term.index].transpose(term.order)[term.widen]
    return made


def test_each_step_is_what_numpy_does() -> None:
    a = filled(q=(4, 3), k=(2, 3), e0=(2, 3), e1=(2, 3))
    m = StateMap.identity(types(a))
    fused = m.fuse(["q", "k"], "qk").stack(["e0", "e1"], "e", dim=1).transpose("e", [2, 0, 1])
    got = apply(fused.pad("qk", dim=0, to=8, value=7).tie("qk", "other"), a)
    assert list(got) == ["e", "qk", "other"]
    qk = np.concatenate([a["q"], a["k"], np.full((2, 3), 7)])
    assert (got["qk"] == qk).all() and (got["other"] == qk).all()
    assert (got["e"] == np.stack([a["e0"], a["e1"]], axis=1).transpose(2, 0, 1)).all()
    parts = apply(fused.split("qk", ["x", "y"], sizes=[1, 5]).rename({"y": "z"}).only(["x", "z"]), a)
    assert (parts["x"] == qk[:1]).all() and (parts["z"] == qk[1:6]).all()
    assert apply(m.transpose("q").split("q", ["l", "m", "r"], dim=-2), a)["m"].tolist() == [a["q"][:, 1].tolist()]


@st.composite
def steps(draw: st.DrawFn) -> tuple[StateMap, dict[str, Array], dict[str, Array]]:
    """A map of one to four steps on two matrices, the arrays, and what NumPy makes of them."""
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    arrays = filled(a=(rows, columns), b=(rows, columns))
    m, now = StateMap.identity(types(arrays)), dict(arrays)
    for number in range(draw(st.integers(1, 4))):
        name, dim = draw(st.sampled_from(sorted(now))), draw(st.integers(0, 1))
        length = now[name].shape[dim]
        match draw(st.sampled_from(["split", "fuse", "transpose", "pad"])):
            case "split":
                cut, x = draw(st.integers(0, length)), now.pop(name)
                left, right = f"l{number}", f"r{number}"
                m = m.split(name, [left, right], dim, [cut, length - cut])
                now[left], now[right] = np.split(x, [cut], axis=dim)
            case "fuse":
                other = now[name].shape
                alike = [n for n in now if n != name and now[n].shape == other]
                names = [name, *alike[:1]]
                m = m.fuse(names, f"f{number}", dim)
                now[f"f{number}"] = np.concatenate([now.pop(n) for n in names], axis=dim)
            case "transpose":
                m, now[name] = m.transpose(name), now[name].T
            case _:
                extra = draw(st.integers(0, 2))
                m = m.pad(name, dim, length + extra, value=-2)
                pads = [(0, extra if d == dim else 0) for d in range(2)]
                now[name] = np.pad(now[name], pads, constant_values=-2)
    return m, arrays, now


@given(steps())
def test_maps_of_several_steps(case: tuple[StateMap, dict[str, Array], dict[str, Array]]) -> None:
    m, arrays, wanted = case
    got = apply(m, arrays)
    assert got.keys() == wanted.keys()
    assert all(np.array_equal(got[name], wanted[name]) for name in wanted)
    again = StateMap.from_json(json.loads(json.dumps(m.to_json())))
    assert again == m and hash(again) == hash(m)


@given(steps(), st.data())
def test_composed_maps_do_one_after_the_other(
    case: tuple[StateMap, dict[str, Array], dict[str, Array]], data: st.DataObject
) -> None:
    m, arrays, middle = case
    after = StateMap.identity({n: TensorShape(a.shape, "i64") for n, a in middle.items()})
    name = data.draw(st.sampled_from(sorted(middle)))
    length = middle[name].shape[1]
    cut = data.draw(st.integers(0, length))
    after = after.split(name, ["p", "q"], 1, [cut, length - cut]).transpose("q")
    wanted = apply(after, middle)
    got = apply(m.then(after), arrays)
    assert all(np.array_equal(got[n], wanted[n]) for n in wanted)


def test_interleaved_rows_compose() -> None:
    """Steps greater than one: every second row, then every third of those."""
    a = filled(w=(24, 2))
    second = MapTerm(Box((0, 0), (12, 2)), "w", (1, 0), (2, 1), (0, 1))
    m = StateMap(types(a), {"v": MappedTensor((12, 2), "i64", (second,))}).checked()
    third = MapTerm(Box((0, 0), (4, 2)), "v", (2, 0), (3, 1), (0, 1))
    after = StateMap({"v": TensorShape((12, 2), "i64")}, {"u": MappedTensor((4, 2), "i64", (third,))})
    assert (apply(m.then(after), a)["u"] == a["w"][1::2][2::3]).all()
    assert (apply(m.split("v", ["x", "y"], sizes=[5, 7]), a)["y"] == a["w"][11::2]).all()


@given(st.data())
def test_strided_views_become_terms(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    w = np.arange(math.prod(shape)).reshape(shape)
    view: Array = w
    for _ in range(data.draw(st.integers(0, 4))):
        match data.draw(st.sampled_from(["slice", "transpose", "reshape", "select", "repeat"])):
            case "slice" if view.ndim:
                d = data.draw(st.integers(0, view.ndim - 1))
                low = data.draw(st.integers(0, max(0, view.shape[d] - 1)))
                view = view[(slice(None),) * d + (slice(low, None, data.draw(st.integers(1, 3))),)]
            case "transpose":
                view = view.transpose(data.draw(st.permutations(range(view.ndim))))
            case "reshape" if view.flags.c_contiguous and view.size:
                n = data.draw(st.sampled_from([k for k in range(1, view.size + 1) if view.size % k == 0]))
                view = view.reshape(n, view.size // n)
            case "select" if view.ndim > 1:
                view = view[data.draw(st.integers(0, view.shape[0] - 1))]
            case "repeat" if view.ndim < 4:
                view = np.broadcast_to(view, (2, *view.shape))
            case _:
                pass
    start = (view.__array_interface__["data"][0] - w.__array_interface__["data"][0]) // 8
    strides = [s // 8 for s in view.strides]
    terms = tuple(terms_of_view((0,) * view.ndim, view.shape, "w", shape, start, strides))
    m = StateMap({"w": TensorShape(shape, "i64")}, {"v": MappedTensor(view.shape, "i64", terms)})
    assert np.array_equal(apply(m, {"w": w})["v"], view)


def test_views_of_dense_tensors_stay_few_terms() -> None:
    heads = list(terms_of_view((0, 0), (8 * 16, 32), "w", (8, 16, 32), 0, (32, 1)))
    assert len(heads) == 8  # one dim of the view over two dims of the source
    assert len(list(terms_of_view((0, 0), (64, 32), "w", (128, 32), 64 * 32, (32, 1)))) == 1
    assert len(list(terms_of_view((0, 0), (32, 64), "w", (128, 32), 0, (1, 64)))) == 1  # every second row, turned


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m: m.rename({"x": "y"}), "there is no tensor 'x'; there are q, k"),
        (lambda m: m.rename({"q": "k"}), "two tensors would be called k"),
        (lambda m: m.rename({"q": "z", "k": "z"}), "gives two tensors one name"),
        (lambda m: m.split("q", ["a", "b"], 0, [1, 1]), "dim 0 has 4 indices and the sizes for 2 names are"),
        (lambda m: m.split("q", ["a", "a"]), "a name appears twice"),
        (lambda m: m.fuse(["q", "k"], "qk", dim=1), "not joined along dim 1"),
        (lambda m: m.fuse([], "qk"), "needs one tensor or more"),
        (lambda m: m.stack([], "qk"), "needs one tensor or more"),
        (lambda m: m.transpose("q", [0, 0]), "it has 2 dims, the order of dims is"),
        (lambda m: m.pad("q", 0, 2), "dim 0 has 4 indices, which are more than 2"),
        (lambda m: m.pad("q", 5, 2), "has no dim 5"),
        (lambda m: m.cast("q", "f33"), "unknown dtype 'f33'"),
        (lambda m: m.then(StateMap.identity({"q": TensorShape((1,), "i64")})), "q is made as"),
        (lambda m: m.then(StateMap.identity({"z": TensorShape((1,), "i64")})), "there is no tensor 'z'"),
    ],
)
def test_errors_say_what_is_wrong(change: Any, text: str) -> None:
    m = StateMap.identity(types(filled(q=(4, 3), k=(2, 3))))
    with pytest.raises(LayoutError, match=text):
        change(m)


GOOD = StateMap.identity({"w": TensorShape((4, 2), "f32")}).to_json()


def damaged(**changes: Any) -> dict[str, Any]:
    return {**GOOD, **changes}


def target(*rows: Any) -> list[Any]:
    return [["w", "f32", [4, 2], list(rows)]]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "not a map of tensors in JSON"),
        (damaged(format="x"), "has the format"),
        (damaged(targets=target()), "no piece covers"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0, 0], [1, 1], [0, 1]], [[0, 0], [1, 1], -1, 0.0])), "overlap"),
        (damaged(targets=target([[0, 0], [4, 2], 1, [0, 0], [1, 1], [0, 1]])), "takes source tensor 1 of 1"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [1, 0], [1, 1], [0, 1]])), "reaches beyond w"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0, 0], [2, 1], [0, 1]])), "reaches beyond w"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [3, 0], [-1, 1], [0, 1]])), "reaches beyond w"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0, 0], [1, 1], [0, 0]])), "does not fit the 2 dims"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0, 0], [1, 1], [0, 7]])), "does not fit the 2 dims"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0, 0], [1, 1], [0, -3]])), "dims or -1"),
        (damaged(targets=target([[0, 0], [4, 2], 0, [0], [1], [0]])), "does not fit the 2 dims"),
        (damaged(targets=target([[0], [4], 0, [0, 0], [1, 1], [0, 1]])), "the box .* of a term 1"),
        (damaged(sources=[["w", "f32", [-1]]]), "no negative lengths"),
    ],
)
def test_damaged_maps_are_refused(data: Any, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        StateMap.from_json(data)


def test_many_terms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.geometry.state_map.MAX_TERMS", 0)
    with pytest.raises(LayoutError, match="at most 0 terms"):
        StateMap.from_json(GOOD)


def test_a_long_map_is_printed_in_part() -> None:
    m = StateMap.identity({f"w{i}": TensorShape((1,), "f32") for i in range(300)})
    assert str(m).endswith("... and 400 more lines")
