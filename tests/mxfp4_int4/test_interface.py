# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What `convert_experts` accepts and refuses, what it shares and what it leaves alone."""

from importlib.util import find_spec

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mxfp4_int4 import (
    ConversionDtypeError,
    ConversionInputError,
    ConversionInterruptedError,
    ConvertedExperts,
    convert,
    convert_experts,
    dequantize,
    dequantize_mxfp4,
    lookup,
    lookup_tables,
    native,
)


def random_experts(e=2, n=32, k=128, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(0, 256, (e, n, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(90, 140, (e, n, k // 32), generator=generator, dtype=torch.uint8)
    return weight, scale


def same(a: ConvertedExperts, b: ConvertedExperts) -> bool:
    return torch.equal(a.weight, b.weight) and torch.equal(
        a.scale.view(torch.int16), b.scale.view(torch.int16)
    )


def test_result_types(layout):
    weight, scale = random_experts()
    out = convert_experts(weight, scale, layout=layout)
    shapes = {
        "aiter": ((2, 32, 64), torch.uint8, (2 * 32 * 4,)),
        "pack_quantized": ((2, 32, 16), torch.int32, (2, 32, 4)),
        "plain": ((2, 32, 128), torch.int8, (2, 32, 4)),
    }[layout]
    assert (tuple(out.weight.shape), out.weight.dtype, tuple(out.scale.shape)) == shapes
    assert out.scale.dtype == torch.bfloat16
    assert out.stats is None
    assert out.weight.is_contiguous()
    assert out.scale.is_contiguous()


def test_the_source_is_left_alone(layout, scale_rule):
    weight, scale = random_experts()
    before = weight.clone(), scale.clone()
    convert_experts(weight, scale, layout=layout, scale_rule=scale_rule, collect_stats=True)
    assert torch.equal(weight, before[0])
    assert torch.equal(scale, before[1])


def test_e8m0_dtype(converted_by, layout):
    weight, scale = random_experts()
    typed = scale.view(torch.float8_e8m0fnu)
    assert same(
        converted_by(weight, scale, layout=layout), converted_by(weight, typed, layout=layout)
    )
    assert torch.equal(dequantize_mxfp4(weight, scale), dequantize_mxfp4(weight, typed))


STRIDED = {
    "every other expert": lambda w, s: (w[::2], s[::2]),
    "part of the rows": lambda w, s: (w[:, 16:48], s[:, 16:48]),
    "transposed twice": lambda w, s: (
        w.transpose(0, 1).contiguous().transpose(0, 1),
        s.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    ),
    "part of K": lambda w, s: (w[..., 16:48], s[..., 1:3]),
    "K strided": lambda w, s: (w.repeat_interleave(2, -1)[..., ::2], s),
    "offset by a byte": lambda w, s: (
        torch.cat([w.new_zeros(1), w.flatten()])[1:].view(w.shape),
        s,
    ),
}


@pytest.mark.parametrize("form", STRIDED)
def test_strided_sources(form, converted_by, layout, scale_rule):
    weight, scale = STRIDED[form](*random_experts(e=2, n=48, k=128))
    expected = converted_by(
        weight.contiguous(), scale.contiguous(), layout=layout, scale_rule=scale_rule
    )
    assert same(converted_by(weight, scale, layout=layout, scale_rule=scale_rule), expected)


@pytest.mark.parametrize("form", [None, *STRIDED])
@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("packed", ["aiter", "pack_quantized"])
def test_in_place_takes_the_same_bytes(form, with_stats, packed, scale_rule):
    weight, scale = random_experts(e=4, n=64, k=256)
    if form:
        weight, scale = STRIDED[form](weight, scale)
    expected = convert_experts(weight, scale, layout=packed, scale_rule=scale_rule)
    options = {"layout": packed, "scale_rule": scale_rule, "in_place": True}
    start, copy = weight.data_ptr(), scale.clone()
    if packed == "pack_quantized" and form in ("K strided", "offset by a byte"):
        before = weight.clone()
        with pytest.raises(ConversionInputError, match=r"runs of four.*strides.*contiguous"):
            convert_experts(weight, scale, **options)
        assert torch.equal(weight, before)
        return
    out = convert_experts(weight, scale, collect_stats=with_stats, **options)
    assert same(out, expected)
    assert out.weight.data_ptr() == start
    assert torch.equal(
        weight.contiguous().view(-1), out.weight.contiguous().view(torch.uint8).view(-1)
    )
    assert torch.equal(scale, copy)


@pytest.mark.parametrize("packed", ["aiter", "pack_quantized"])
def test_in_place_by_every_implementation(converted_by, packed, scale_rule):
    weight, scale = random_experts(e=2, n=32, k=192)
    options = {"layout": packed, "scale_rule": scale_rule}
    expected = converted_by(weight, scale, **options)
    assert same(converted_by(weight.clone(), scale, in_place=True, **options), expected)


@pytest.mark.parametrize("chunk", [1, 2, 3, 10**9])
@pytest.mark.parametrize("limit", [1, 3000, 10**6])
def test_chunks_change_nothing(chunk, limit, layout, monkeypatch):
    monkeypatch.setitem(convert.SLAB_BYTES, "cpu", limit)
    weight, scale = random_experts(e=5, n=48, k=128)
    whole = convert_experts(weight, scale, layout=layout, collect_stats=True)
    parts = convert_experts(weight, scale, layout=layout, chunk_experts=chunk, collect_stats=True)
    assert same(parts, whole)
    assert parts.stats == whole.stats


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("block", [1, 3000, 1 << 20])
def test_blocks_and_threads_change_nothing(threads, block, layout, compiled, monkeypatch):
    weight, scale = random_experts(e=3, n=48)
    expected = convert._convert(weight, scale, layout, "mse", 8, False, False, convert.NAIVE)
    monkeypatch.setattr(native, "BLOCK_BYTES", block)
    monkeypatch.setattr(native, "SMALL_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = convert._convert(weight, scale, layout, "mse", 8, False, False, compiled)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out.weight, expected.weight)
    assert torch.equal(out.scale, expected.scale)


def test_buffers_that_are_not_contiguous_are_refused(compiled):
    weight, scale = random_experts()
    out, bits = torch.zeros(2, 32, 128).byte()[..., ::2], torch.zeros(2, 32, 4).short()
    with pytest.raises(ValueError, match="contiguous"):
        compiled.convert(weight, scale, "pack_quantized", "mse", out.view(2, 32, 64), bits)
    assert not out.any()


@pytest.mark.parametrize("shape", [(0, 32, 128), (2, 0, 128), (2, 32, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("in_place", [False, True])
def test_empty(shape, in_place, converted_by, layout):
    if in_place and layout == "plain":
        pytest.skip("plain does not fit the MXFP4 bytes")
    e, n, k = shape
    weight, scale = torch.empty(e, n, k // 2).byte(), torch.empty(e, n, k // 32).byte()
    out = converted_by(weight, scale, layout=layout, in_place=in_place, collect_stats=True)
    assert out.scale.numel() == 0
    assert out.weight.numel() == 0
    assert out.stats.groups == 0
    assert out.stats.relative_squared_error == 0.0
    assert dequantize(out, layout, shape).shape == shape
    assert dequantize_mxfp4(weight, scale).shape == shape


def test_a_parameter_is_converted_like_its_tensor():
    weight, scale = random_experts()
    parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
    out = convert_experts(parameter, scale, layout="aiter", in_place=True)
    assert type(out.weight) is torch.Tensor
    assert out.weight.data_ptr() == parameter.data_ptr()
    assert same(out, convert_experts(weight, scale, layout="aiter"))


W, S = random_experts()
REFUSED = {
    "weight dtype": (
        {"weight": W.float()},
        r"weight: expected dtype torch.uint8, received torch.fl",
    ),
    "scale dtype": ({"scale": S.to(torch.int8)}, r"scale: expected dtype torch.uint8 or .*int8"),
    "no tensor": ({"weight": W.numpy()}, r"weight: expected a torch.Tensor, received ndarray"),
    "none": ({"scale": None}, r"scale: expected a torch.Tensor, received NoneType"),
    "rank": ({"weight": W[0], "scale": S[0]}, r"\[E, N, K/2\].*received weight \[32, 64\]"),
    "K": ({"weight": W[..., :24]}, r"K = 48 is not a multiple of 32"),
    "scale shape": ({"scale": S[..., :3]}, r"needs scale \[2, 32, 4\].*received \[2, 32, 3\]"),
    "experts": ({"scale": S[:1]}, r"needs scale \[2, 32, 4\].*received \[1, 32, 4\]"),
    "layout": ({"layout": "marlin"}, r"layout: expected one of .*aiter.*received 'marlin'"),
    "rule": ({"scale_rule": "max"}, r"scale_rule: expected one of .*mse.*received 'max'"),
    "no chunk": ({"chunk_experts": 0}, r"chunk_experts: expected an integer of 1 .*received 0"),
    "half a chunk": ({"chunk_experts": 2.5}, r"chunk_experts: expected an integer.*2\.5"),
    "meta": ({"weight": W.to("meta")}, r"weight: .*device meta"),
    "both meta": ({"weight": W.to("meta"), "scale": S.to("meta")}, r"weight: .*device meta"),
    "sparse": ({"weight": W.to_sparse()}, r"weight: expected a strided tensor.*sparse"),
    "N for aiter": ({"weight": W[:, :20], "scale": S[:, :20]}, r"N a multiple of 16.*N = 20"),
    "G for aiter": ({"weight": W[..., :48], "scale": S[..., :3]}, r"even number.*3 groups"),
    "plain in place": ({"layout": "plain", "in_place": True}, r"in_place.*twice"),
    "expanded": ({"weight": W[:1].expand(2, -1, -1), "in_place": True}, r"weight share memory"),
    "expanded scale": ({"scale": S[:1].expand(2, -1, -1), "in_place": True}, r"scale share memory"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case):
    changes, message = REFUSED[case]
    before = W.clone()
    arguments = {"weight": W, "scale": S, "layout": "aiter"} | changes
    with pytest.raises(ConversionInputError, match=message) as caught:
        convert_experts(arguments.pop("weight"), arguments.pop("scale"), **arguments)
    assert isinstance(caught.value, ValueError)
    if "dtype" in case or case.startswith("no"):
        assert isinstance(caught.value, ConversionDtypeError) or case == "no chunk"
    assert torch.equal(W, before)


def test_weight_and_scale_in_one_storage():
    storage = torch.zeros(2 * 32 * 64 + 2 * 32 * 4, dtype=torch.uint8)
    weight, scale = storage[: 2 * 32 * 64].view(2, 32, 64), storage[2 * 32 * 64 :].view(2, 32, 4)
    convert_experts(weight, scale, layout="aiter", in_place=True)  # side by side
    with pytest.raises(ConversionInputError, match="weight and scale share memory"):
        convert_experts(weight, storage[: 2 * 32 * 4].view(2, 32, 4), layout="aiter", in_place=True)


def test_inference_tensors():
    with torch.inference_mode():
        weight, scale = random_experts()
        inside = convert_experts(weight.clone(), scale, layout="aiter", in_place=True)
    with pytest.raises(ConversionInputError, match="inference_mode"):
        convert_experts(weight, scale, layout="aiter", in_place=True)
    assert same(convert_experts(weight, scale, layout="aiter"), inside)


@pytest.mark.parametrize("byte", [255, 254, 253])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_bad_group_in_the_last_expert_is_named_and_nothing_is_written(
    byte, in_place, converted_by, scale_rule
):
    weight, scale = random_experts(e=3, n=32, k=128)
    weight[2, 17, 48:] = 0x77  # 6.0 in all of group 3
    scale[2, 17, 3] = byte
    before = weight.clone(), scale.clone()
    with pytest.raises(ConversionInputError, match=rf"expert 2, row 17, group 3 .*byte {byte}"):
        converted_by(weight, scale, layout="aiter", scale_rule=scale_rule, in_place=in_place)
    assert torch.equal(weight, before[0])
    assert torch.equal(scale, before[1])


def test_bad_groups_are_counted():
    weight, scale = random_experts(e=3)
    scale[1, 5, 2] = scale[2, 0, 0] = 255
    with pytest.raises(ConversionInputError, match=r"expert 1, row 5, group 2 .*2 such groups"):
        convert_experts(weight, scale, layout="plain")


@pytest.fixture(params=["lookup", "native"])
def block_of(request):
    """An implementation, and the module and name of what it does for each block."""
    if request.param == "lookup":
        return convert.LOOKUP, lookup, "_convert_rows"
    return request.getfixturevalue("compiled"), native, "_convert_block"


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=repr)
def test_interrupted_in_place(error, with_stats, block_of, monkeypatch):
    """The first blocks are converted, a later one fails: the tensors refuse to be used again."""
    weight, scale = random_experts(e=4, n=64, k=256)
    implementation, module, name = block_of
    real, calls = getattr(module, name), []

    def failing(*job):
        calls.append(job)
        if len(calls) >= 3:
            raise error
        real(*job)

    monkeypatch.setattr(module, name, failing)
    monkeypatch.setattr(native, "BLOCK_BYTES", 8192)
    monkeypatch.setitem(convert.SLAB_BYTES, "cpu", 8192)
    before = weight.clone()
    expected = ConversionInterruptedError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected) as caught:
        convert._convert(weight, scale, "aiter", "mse", 1, True, with_stats, implementation)
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert "load both tensors again" in told
    assert not torch.equal(weight, before)
    assert (scale == 255).all()
    assert dequantize_mxfp4(weight, scale).isnan().all()
    with pytest.raises(ConversionInputError, match=r"expert 0, row 0, group 0 .*NaN"):
        convert_experts(weight, scale, layout="aiter")


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
def test_interrupted_while_the_guard_is_waited_for(error):
    """The device has its work by then, and how far it comes nobody knows."""
    weight, scale = random_experts()

    def wait() -> int:
        raise error

    work = convert.Implementation(
        lambda weight, *arguments, unless: weight.fill_(7),
        lambda layout, groups: True,
        convert.LOOKUP.largest_byte,
        lambda scale: (torch.zeros(1, dtype=torch.int32), wait),
    )
    expected = ConversionInterruptedError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected):
        convert._convert(weight, scale, "aiter", "mse", 8, True, False, work)
    assert (scale == 255).all()


def test_interrupted_elsewhere_leaves_the_source(block_of, monkeypatch):
    weight, scale = random_experts()
    implementation, module, name = block_of
    before = weight.clone(), scale.clone()

    def failing(*job):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, name, failing)
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        convert._convert(weight, scale, "aiter", "mse", 8, False, False, implementation)
    assert torch.equal(weight, before[0])
    assert torch.equal(scale, before[1])


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("trace", ["fake", "vmap", "functionalize"])
def test_tensors_without_data_are_refused(trace):
    """What torch traces with says that it is on the CPU; its address is 0."""
    weight, scale = random_experts(e=1)

    def convert_traced(weight, scale):
        with pytest.raises(ConversionInputError, match="weight: expected a tensor with data"):
            convert_experts(weight, scale, layout="aiter")
        return weight

    if trace == "fake":
        with FakeTensorMode() as mode:
            convert_traced(mode.from_tensor(weight), mode.from_tensor(scale))
    elif trace == "vmap":
        torch.func.vmap(convert_traced)(weight[None], scale[None])
    else:
        torch.func.functionalize(convert_traced)(weight, scale)


def forget_tables():
    lookup_tables.sum_table.cache_clear()
    lookup_tables.code_table.cache_clear()
    if find_spec("triton"):
        from mxfp4_int4 import triton_tables

        triton_tables.tables.cache_clear()


def test_default_device_and_dtype_of_a_model_loader(converted_by, layout):
    """Loaders run under a default dtype of bfloat16 and a default device; neither is taken over."""
    weight, scale = random_experts(e=1)
    expected = converted_by(weight, scale, layout=layout, collect_stats=True)
    forget_tables()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            out = converted_by(weight, scale, layout=layout, collect_stats=True)
            values = dequantize(out, layout, (1, 32, 128)), dequantize_mxfp4(weight, scale)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(out, expected)
    assert out.stats == expected.stats
    assert all(v.device.type == "cpu" and v.dtype == torch.float32 for v in values)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_tables_lie_in_host_memory_whatever_the_default_device(device, scale_rule, layout):
    """So that none outlives a call on a GPU, or lies in a memory pool that is discarded."""
    forget_tables()
    with torch.device(device):
        tables = [lookup_tables.sum_table(), lookup_tables.code_table(scale_rule, layout)]
        if find_spec("triton"):
            from mxfp4_int4 import triton_tables

            tables.append(triton_tables.tables(scale_rule, layout))
    assert {table.device.type for table in tables} == {"cpu"}


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["fastest", "lookup"])
def test_nothing_stays_on_the_gpu_and_a_discarded_pool_does_no_harm(implementation, layout):
    """As vLLM's sleep mode does it: what was allocated in the pool of the first call is gone."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm GPU here")
    chosen = convert.LOOKUP if implementation == "lookup" else None
    weight, scale = (part.cuda() for part in random_experts())
    expected = convert._convert(*random_experts(), layout, "mse", 8, False, False, convert.LOOKUP)
    for _ in range(2):
        pool = torch.cuda.MemPool()
        before = torch.cuda.memory_allocated()
        with torch.cuda.use_mem_pool(pool), torch.device("meta"):
            out = convert._convert(weight, scale, layout, "mse", 8, False, False, chosen)
        assert torch.equal(out.weight.cpu(), expected.weight)
        assert torch.equal(out.scale.cpu(), expected.scale)
        del out
        assert torch.cuda.memory_allocated() == before
        del pool
        torch.cuda.empty_cache()
        torch.full((1 << 24,), 0xFF, dtype=torch.uint8, device="cuda")  # takes the freed memory


def test_dequantize_refuses_what_is_not_of_the_layout():
    weight, scale = random_experts()
    out = convert_experts(weight, scale, layout="aiter")
    with pytest.raises(ConversionInputError, match=r"converted.weight: layout .pack_quantized"):
        dequantize(out, "pack_quantized", (2, 32, 128))
    with pytest.raises(ConversionInputError, match=r"converted.scale"):
        dequantize(out._replace(scale=out.scale[:-1]), "aiter", (2, 32, 128))
    with pytest.raises(ConversionInputError, match="layout: expected one of"):
        dequantize(out, "other", (2, 32, 128))
    with pytest.raises(ConversionDtypeError, match=r"dtype: expected one of"):
        dequantize(out, "aiter", (2, 32, 128), torch.int32)


def test_dequantize_mxfp4_nan_and_the_ends():
    weight = torch.full((1, 1, 16), 0x71, dtype=torch.uint8)  # 0.5 and 6.0
    for byte, low in ((0, 2.0**-128), (254, 2.0**126)):
        scale = torch.full((1, 1, 1), byte, dtype=torch.uint8)
        exact = dequantize_mxfp4(weight, scale, torch.float64)
        assert exact[0, 0, :2].tolist() == [low, 12 * low]
        single = dequantize_mxfp4(weight, scale)
        assert single[0, 0, 0] == low
    assert single[0, 0, 1] == float("inf")
    assert dequantize_mxfp4(weight, torch.full((1, 1, 1), 255, dtype=torch.uint8)).isnan().all()


def test_in_place_over_one_buffer_seen_through_two_storages():
    """Two tensors over one numpy array have storages of their own, yet share bytes."""
    buffer = numpy.full(8192, 120, dtype=numpy.uint8)
    weight = torch.from_numpy(buffer[:4096]).view(2, 32, 64)
    scale = torch.from_numpy(buffer[64:320]).view(2, 32, 4)
    with pytest.raises(ConversionInputError, match="share memory"):
        convert_experts(weight, scale, layout="aiter", in_place=True)
    apart = torch.from_numpy(buffer[4096:4352]).view(2, 32, 4)
    convert_experts(weight, apart, layout="aiter", in_place=True)
