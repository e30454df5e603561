"""A state that is taken apart and put together is the same state; texts that are no layout are refused."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unicron_elastic.state.layout import ITEM_BYTES, Layout, TensorSpec, empty_tensors, flatten, rebuild

keys = st.text(max_size=5) | st.integers(-(2**63), 2**63 - 1)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9)
states = st.recursive(
    leaves,
    lambda part: st.lists(part, max_size=4) | st.tuples(part, part) | st.dictionaries(keys, part, max_size=4),
    max_leaves=20,
)


def round_trip(state: Any) -> Any:
    """The state that another process makes of it."""
    layout, tensors = flatten(state)
    received = Layout.parse(layout.to_json())
    assert received == layout
    assert received.to_json() == layout.to_json()
    return rebuild(received, tensors)


@settings(max_examples=300, deadline=None)
@given(states)
def test_plain_values_come_back(state: Any) -> None:
    assert repr(round_trip(state)) == repr(state)  # repr tells 1, 1.0 and True, 0.0 and -0.0; and nan equals nan


@pytest.mark.parametrize("name", ITEM_BYTES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_every_type_that_is_listed_is_torchs_and_has_its_size(name: str) -> None:
    tensor = torch.empty(3, 2, dtype=getattr(torch, name))
    layout, tensors = flatten([tensor])
    assert layout.specs == (TensorSpec(name, (3, 2), 6 * ITEM_BYTES[name]),)
    assert tensor.element_size() == ITEM_BYTES[name]
    assert tensors[0].data_ptr() == tensor.data_ptr()
    assert [t.dtype for t in empty_tensors(Layout.parse(layout.to_json()))] == [tensor.dtype]


def test_tensors_are_the_live_ones_each_once() -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    layout, tensors = flatten({"a": weight, "tied": weight.detach(), "turned": weight.detach().t(), "rows": weight[1:]})
    assert [spec.shape for spec in layout.specs] == [(2, 3), (1, 3)]
    assert tensors[0].data_ptr() == weight.data_ptr()
    assert not tensors[0].requires_grad
    made = rebuild(layout, tensors)
    assert made["a"] is made["tied"]
    assert torch.equal(made["turned"], weight.t())


@pytest.mark.parametrize("dims", [(2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (2, 3, 0, 5)])
def test_a_tensor_lies_in_memory_as_it_lay(dims: tuple[int, ...]) -> None:
    tensor = torch.randn(dims).contiguous(memory_format=torch.channels_last)
    layout, tensors = flatten([tensor])
    assert tensors[0].data_ptr() == tensor.data_ptr()  # it is not copied
    (made,) = round_trip([tensor])
    assert torch.equal(made, tensor)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.is_contiguous() == tensor.is_contiguous()
    assert layout.total_bytes == tensor.nbytes


def test_memory_with_gaps_is_copied() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    made = round_trip({"columns": tensor[:, ::2], "row": tensor[0].expand(2, 4), "turned": tensor[:, :2].t()})
    assert torch.equal(made["columns"], tensor[:, ::2])
    assert torch.equal(made["row"], tensor[0].expand(2, 4))
    assert torch.equal(made["turned"], tensor[:, :2].t())


def test_numpy_and_torch_kinds_come_back() -> None:
    state = {
        "array": numpy.arange(6, dtype=numpy.uint32).reshape(2, 3)[:, ::-1],
        "scalar": numpy.float64(1.5),
        "size": torch.Size([1, 2]),
        "blob": bytes(range(256)) * 30,
        "counter": Counter({30: 1, 80: 2}),
        "factory": defaultdict(list, a=[1]),
        "order": OrderedDict(b=1, a=2),
    }
    made = round_trip(state)
    assert made["array"].dtype == numpy.uint32
    assert (made["array"] == state["array"]).all()
    assert type(made["scalar"]) is numpy.float64
    for name in ("size", "blob", "counter", "order"):
        assert (type(made[name]), made[name]) == (type(state[name]), state[name])
    assert made["factory"] == {"a": [1]}


def test_an_array_that_is_changed_on_its_way_arrives_as_it_was() -> None:
    """Of a tensor's changes torch tells; nobody tells of an array's."""
    array = numpy.zeros(3)
    layout, tensors = flatten({"array": array, "same": array, "row": numpy.ones((2, 2))[:, 0]})
    array += 1
    made = rebuild(layout, tensors)
    assert made["array"].tolist() == [0.0, 0.0, 0.0]
    assert len(tensors) == 2, "one array is sent once"
    assert made["row"].tolist() == [1.0, 1.0]


def test_a_modules_state_keeps_its_versions() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    made = round_trip(state)
    assert made._metadata == state._metadata
    torch.nn.BatchNorm1d(2).load_state_dict(made)


def test_an_optimizer_and_a_scheduler_go_on_with_what_came() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    for one in (optimizer, scheduler):
        one.load_state_dict(round_trip(one.state_dict()))
    optimizer.step()
    scheduler.step()
    assert math.isclose(optimizer.param_groups[0]["lr"], 1e-5)


class Foo:
    """Something that cannot be sent."""


@pytest.mark.parametrize(
    ("state", "complaint"),
    [
        ({"optimizer": {"state": {0: {"foo": Foo()}}}}, r"^optimizer\.state\[0\]\.foo is a Foo, which cannot be sent"),
        ([Foo()], r"^the state\[0\] is a Foo"),
        (Foo(), "^the state is a Foo"),
        ({"a": {1.5: 2}}, r"^a has the key 1\.5; keys that can be sent are str"),
        ({True: 2}, "has the key True"),
        ({"a": torch.eye(2).to_sparse()}, r"^a is a Tensor \(sparse_coo, float32, cpu\)"),
        ({"a": torch.empty(2, device="meta")}, "^a is a Tensor"),
        ({"a": numpy.array(["x"])}, "^a is an array of str"),
        ({"a": lambda: None}, "^a is a function"),
    ],
)
def test_what_cannot_be_sent_is_named(state: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        flatten(state)


def test_a_state_that_holds_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(TypeError, match="nested deeper than 100 levels, or holds itself"):
        flatten(state)


def test_tensors_of_another_layout_are_refused() -> None:
    layout, tensors = flatten([torch.zeros(2)])
    with pytest.raises(ValueError, match="has 1 tensors, and 2 were given"):
        rebuild(layout, tensors * 2)
    with pytest.raises(ValueError, match=r"tensor 0 is float32 \[3\], and the layout has float32 \[2\]"):
        rebuild(layout, [torch.zeros(3)])


def test_digests_tell_what_python_calls_equal() -> None:
    assert len({flatten([value])[0].digest for value in (1, 1.0, True, "1")}) == 4


def told(skeleton: Any, tensors: Any = ()) -> str:
    return json.dumps({"skeleton": skeleton, "tensors": list(tensors)})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "nested deeper|no JSON"),
        ("[]", "a JSON object with skeleton and tensors"),
        ('{"skeleton": NaN, "tensors": []}', "neither a plain value"),
        ('{"skeleton": 1e999, "tensors": []}', "neither a plain value"),
        (told(2**63), "neither a plain value"),
        (told([]), "neither a plain value"),
        (told({}), "neither a plain value"),
        (told(["tensor", 0]), "of the kind 'tensor'"),
        (told(["tensor", -1], [["int8", [1]]]), "of the kind 'tensor'"),
        (told(["tensor", True], [["int8", [1]], ["int8", [1]]]), "of the kind 'tensor'"),
        (told(["turned", 1, 0], [["int8", [1]]]), "of the kind 'turned'"),
        (told(["turned", 0, 0], [["int8", [1, 1]]]), "not each named once"),
        (told(["turned", 0, 0, 0], [["int8", [1, 1]]]), "not each named once"),
        (told(["turned", 0, 1, True], [["int8", [1, 1]]]), "not each named once"),
        (told(["eval", "1"]), "of the kind 'eval'"),
        (told(["int", "0x1"]), "of the kind 'int'"),
        (told(["bytes", "!"]), "of the kind 'bytes'"),
        (told(["float", "1"]), "of the kind 'float'"),
        (told(["size", "x"]), "a size of something"),
        (told(["dict", [[], 1]]), "not a key"),
        (told(["dict", ["a", 1], ["a", 2]]), "a key twice"),
        (told(["module", None, ["dict"]]), "a module's state without"),
        (told(None, [["object", [1]]]), "of the type 'object'"),
        (told(None, [["int8", [-1]]]), "shape"),
        (told(None, [["int8", [1] * 65]]), "shape"),
        (told(None, [["int8", [2**40, 2**40]]]), "more than"),
        (told(None, [["int8"]]), "its type and its shape"),
        ('{"skeleton": null, "tensors": 3}', "list of at most"),
    ],
)
def test_what_is_no_layout_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Layout.parse(text)


def test_a_layout_may_be_as_deep_as_it_can_be_sent() -> None:
    state: Any = 1
    for _ in range(99):
        state = [state]
    assert round_trip(state) == state
    with pytest.raises(TypeError, match="nested deeper"):
        flatten([state])


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["dict", "tensor", "turned", "list", "module", "int"]),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=3), part, max_size=2),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(
    anything, st.lists(st.tuples(st.sampled_from(["int8", "float32", "x"]), st.lists(st.integers(-1, 3), max_size=3)))
)
def test_whatever_is_told_is_a_layout_that_can_be_made_or_a_value_error(skeleton: Any, specs: Any) -> None:
    try:
        layout = Layout.parse(told(skeleton, specs))
    except ValueError:
        return
    rebuild(layout, empty_tensors(layout))
