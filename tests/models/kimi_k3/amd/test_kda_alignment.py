# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Every kind of parameter with the padded output dimension: weights, packed weights, scales.

Formats that the CPU platform can build come from their real quantization methods. For the others,
which ask for a GPU's kernels when a layer is built, a method without a kernel registers vLLM's own
parameter classes as those formats do.
"""

import random
from types import SimpleNamespace

import pytest
import torch

from kimi_k3.rehearsal.simulated import simulated_parallel
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader.reload import (
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    BlockQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedColumnParameter,
    PackedvLLMParameter,
)
from vllm.models.kimi_k3.amd import kda
from vllm.utils.torch_utils import set_default_torch_dtype

HEAD_DIM, HIDDEN, TP, RANK = 128, 64, 8, 7
BLOCK = 4


def compressed_tensors(format: str, weight_type: str, strategy: str, activations: str):
    """The real configuration of an 8-bit compressed-tensors checkpoint."""
    weights = {"num_bits": 8, "type": weight_type, "symmetric": True, "strategy": strategy}
    inputs = {**weights, "strategy": activations, "dynamic": activations == "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": [],
    }
    return get_quantization_config("compressed-tensors").from_config(config)


def fp8(scheme: str):
    config = {"quant_method": "fp8", "activation_scheme": scheme}
    return get_quantization_config("fp8").from_config(config)


class ParametersOnly(LinearMethodBase):
    """Registers the parameters of one format and has no kernel; its own configuration, too."""

    online_quantization_config = None
    loader = "weight_loader"

    def __init__(self, register) -> None:
        self.register = register

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, *args, **kwargs
    ):
        layer.weight_block_size = [BLOCK, HIDDEN]
        rows = sum(output_partition_sizes)
        loader = {"weight_loader": getattr(layer, self.loader)}
        for name, param in self.register(rows, input_size_per_partition, loader).items():
            layer.register_parameter(name, param)

    def apply(self, layer, x, bias=None):
        raise NotImplementedError("this method only registers parameters")

    def get_quant_method(self, layer, prefix):
        return self


def mxfp4(rows, k, loader):
    weight = torch.empty(rows, k // 2, dtype=torch.uint8)
    scale = torch.empty(rows, k // 32, dtype=torch.uint8)
    return {
        "weight_packed": ModelWeightParameter(data=weight, input_dim=1, output_dim=0, **loader),
        "weight_scale": GroupQuantScaleParameter(data=scale, input_dim=1, output_dim=0, **loader),
    }


def mxfp8(rows, k, loader):
    weight = torch.empty(rows, k, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows, k // 32, dtype=torch.float8_e8m0fnu)
    return {
        "weight": ModelWeightParameter(data=weight, input_dim=1, output_dim=0, **loader),
        "weight_scale": GroupQuantScaleParameter(data=scale, input_dim=1, output_dim=0, **loader),
    }


def int4_packed_along_input(rows, k, loader):
    weight = torch.empty(rows, k // 8, dtype=torch.int32)
    packed = {"packed_dim": 1, "packed_factor": 8, "input_dim": 1, "output_dim": 0}
    scale = torch.empty(rows, k // 32, dtype=torch.bfloat16)
    shape = torch.empty(2, dtype=torch.int64)
    return {
        "weight_packed": PackedvLLMParameter(data=weight, **packed, **loader),
        "weight_scale": GroupQuantScaleParameter(data=scale, input_dim=1, output_dim=0, **loader),
        "weight_shape": BasevLLMParameter(data=shape, **loader),
    }


def int4_packed_along_output(rows, k, loader):
    weight = torch.empty(k, rows // 8, dtype=torch.int32)
    packed = {"packed_dim": 1, "packed_factor": 8, "input_dim": 0, "output_dim": 1}
    zeros = torch.empty(k // 32 * rows // 8, dtype=torch.int32)
    return {
        "qweight": PackedvLLMParameter(data=weight, **packed, **loader),
        "qzeros": PackedColumnParameter(
            data=zeros.view(-1, rows // 8), packed_dim=1, packed_factor=8, output_dim=1, **loader
        ),
    }


def fp8_block(rows, k, loader):
    weight = torch.empty(rows, k, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows // BLOCK, 1, dtype=torch.float32)
    return {
        "weight": ModelWeightParameter(data=weight, input_dim=1, output_dim=0, **loader),
        "weight_scale_inv": BlockQuantScaleParameter(
            data=scale, input_dim=1, output_dim=0, **loader
        ),
    }


TINY = torch.finfo(torch.float32).tiny
# name -> (configuration, heads, {parameter: (alignment rows, their value as raw or float)})
FORMATS = {
    "int8_channel": (
        lambda: compressed_tensors("int-quantized", "int", "channel", "token"),
        96,
        {"weight": (4, 0), "weight_scale": (4, 1)},
    ),
    "int8_tensor": (
        lambda: compressed_tensors("int-quantized", "int", "tensor", "tensor"),
        96,
        {"weight": (4, 0), "weight_scale": (1, TINY), "input_scale": (0, 0)},
    ),
    "fp8_channel": (
        lambda: compressed_tensors("float-quantized", "float", "channel", "token"),
        96,
        {"weight": (4, 0), "weight_scale": (4, 1)},
    ),
    "fp8_tensor": (
        lambda: fp8("static"),
        96,
        {"weight": (4, 0), "weight_scale": (1, TINY), "input_scale": (1, TINY)},
    ),
    "mxfp4": (
        lambda: ParametersOnly(mxfp4),
        96,
        {"weight_packed": (4, 0), "weight_scale": (4, 127)},
    ),
    "mxfp8": (lambda: ParametersOnly(mxfp8), 96, {"weight": (4, 0), "weight_scale": (4, 1)}),
    "int4_along_input": (
        lambda: ParametersOnly(int4_packed_along_input),
        96,
        {"weight_packed": (4, 0), "weight_scale": (4, 0), "weight_shape": (0, 0)},
    ),
    # 64 heads: 8 of beta's rows and 8 alignment rows a rank, one packed element each.
    "int4_along_output": (
        lambda: ParametersOnly(int4_packed_along_output),
        64,
        {"qweight": (1, 0), "qzeros": (1, 0)},
    ),
    "fp8_block": (
        lambda: ParametersOnly(fp8_block),
        96,
        {"weight": (4, 0), "weight_scale_inv": (1, 1)},
    ),
}


class Projection:
    """A projection built with one quantization configuration, and checkpoint tensors for it."""

    def __init__(self, quant_config, heads: int, rank: int) -> None:
        wide, local = heads * HEAD_DIM, heads // TP
        self.rank = rank
        self.checkpoint_rows = [wide, wide, wide, wide, HEAD_DIM, heads]
        self.local_rows = [wide // TP] * 4 + [HEAD_DIM, local]
        padding = -sum(self.local_rows) % 16
        sizes = [*self.checkpoint_rows, padding * TP] if padding else self.checkpoint_rows
        self.layer = kda._PaddedKimiGDNMergedColumnParallelLinear(
            HIDDEN,
            sizes,
            replicated_shard_id=4,
            tp_size=TP,
            bias=False,
            quant_config=quant_config,
            prefix="model.layers.0.self_attn.in_proj_qkvgfab",
        )
        self.total_rows = sum(self.local_rows) + padding

    def sources(self, name: str, param) -> list[torch.Tensor]:
        """Return random checkpoint tensors of a parameter, one for each shard."""
        dim = getattr(param, "output_dim", None)
        tensors = []
        for rows in self.checkpoint_rows:
            if dim is None:
                shape = [1] if "scale" in name else list(param.shape)
            else:
                shape = list(param.shape)
                shape[dim] = rows * param.shape[dim] // self.total_rows
            bits = torch.randint(0, 100, (*shape, param.element_size()), dtype=torch.uint8)
            tensors.append(bits.view(param.dtype).squeeze(-1))
        return tensors

    def expected(self, param, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return what the parameter's real rows must hold."""
        dim = getattr(param, "output_dim", None)
        if dim is None:
            whole = param.numel() < len(sources) or param.dtype == torch.int64
            return sources[-1] if whole else torch.cat(sources)
        parts = []
        for shard, source in enumerate(sources):
            size = source.shape[dim] if shard == 4 else source.shape[dim] // TP
            parts.append(source.narrow(dim, 0 if shard == 4 else self.rank * size, size))
        return torch.cat(parts, dim)


@pytest.fixture(params=[0, RANK], ids=lambda rank: f"rank{rank}")
def built(request):
    """Return ``build(quant_config, heads)`` at one rank of eight."""
    vllm_config = VllmConfig()
    vllm_config.model_config = SimpleNamespace(dtype=torch.bfloat16, is_multimodal_model=False)
    with (
        simulated_parallel(tensor_parallel_size=TP, rank=request.param),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(torch.bfloat16),
    ):
        yield lambda quant_config, heads: Projection(quant_config, heads, request.param)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("config", "heads", "alignment"), FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("loader", ["weight_loader", "weight_loader_v2"])
@pytest.mark.usefixtures("poisoned_memory")
def test_parameters_of_every_format(built, monkeypatch, config, heads, alignment, loader, seed):
    """Each completes with its last tensor, holds its shards, and a neutral value behind them."""
    # Real methods choose the loader themselves.
    monkeypatch.setattr(ParametersOnly, "loader", loader)
    torch.manual_seed(seed)
    projection = built(config(), heads)
    layer = projection.layer
    # What was loaded is looked at before a kernel rearranges it.
    monkeypatch.setattr(
        type(layer.quant_method), "process_weights_after_loading", lambda self, layer: None
    )
    params = dict(layer.named_parameters())
    assert params.keys() == alignment.keys()
    record_metadata_for_reloading(layer)
    initialize_layerwise_reload(layer)
    sources = {name: projection.sources(name, param) for name, param in params.items()}
    arrivals = [(name, shard) for name in params for shard in range(6)]
    random.Random(seed).shuffle(arrivals)
    # A tensor that repeats what an earlier one already brought ends no wait.
    undivided = [name for name, param in params.items() if None in param.shard_record.shards]
    arrivals.sort(key=lambda arrival: arrival[0] not in undivided)
    for position, (name, shard) in enumerate(arrivals):
        assert getattr(layer, name).is_meta, f"complete after {position} of {len(arrivals)}"
        param = getattr(layer, name)
        param.weight_loader(param, sources[name][shard], shard)
    for name, (rows, value) in alignment.items():
        param = getattr(layer, name)
        assert not param.is_meta
        record = param.shard_record
        assert record.rows == rows
        real = param.narrow(record.dim, 0, param.shape[record.dim] - rows)
        if name in undivided:
            last = [shard for arrived, shard in arrivals if arrived == name][-1]
            assert torch.equal(bits(real), bits(sources[name][last]))
            continue
        assert torch.equal(bits(real), bits(projection.expected(param, sources[name])))
        behind = param.narrow(record.dim, param.shape[record.dim] - rows, rows)
        assert (behind.float() == value).all()
        assert behind.float().isfinite().all()


def test_int8_projection_computes_as_without_padding(built):
    """Loaded and run through the real kernel: finite, and the real columns do not depend on it."""
    projection = built(FORMATS["int8_channel"][0](), 96)
    layer = projection.layer
    for name, param in layer.named_parameters():
        for shard, source in enumerate(projection.sources(name, param)):
            value = torch.rand_like(source) if name == "weight_scale" else source
            param.weight_loader(param, value, shard)
    rows = sum(projection.local_rows)
    weight = layer.weight.float() * layer.weight_scale
    layer.quant_method.process_weights_after_loading(layer)
    x = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    output, _ = layer(x)
    assert output.isfinite().all()
    assert not output[:, rows:].any()
    product = x.float() @ weight[:rows].T
    # Dynamic int8 activations err by half a step of amax/127, the output by one bf16 rounding.
    step = x.abs().amax(1, keepdim=True).float() / 127
    bound = step * weight[:rows].abs().sum(1) + product.abs() / 256
    assert ((output[:, :rows].float() - product).abs() <= bound).all()


@pytest.mark.parametrize("register", [mxfp4, int4_packed_along_input])
def test_attention_with_a_packed_projection(rank_of, register):
    """Upstream's constructor zeroes rows of `weight`, which these formats do not have."""
    with rank_of(heads=96, rank=RANK, quant=ParametersOnly(register)) as rank:
        assert rank.projection.weight_packed.weight_loader_numel == (
            rank.real_rows * rank.projection.weight_packed.shape[1]
        )
        assert not hasattr(rank.projection, "weight")


def test_packed_rows_that_split_a_shard_are_refused(built):
    with pytest.raises(ValueError, match="packs 8 output rows into one element") as error:
        built(ParametersOnly(int4_packed_along_output), 96)
    assert "in_proj_qkvgfab.qweight" in str(error.value)
    assert "expected multiples of 8" in str(error.value)


@pytest.mark.parametrize("format", FORMATS)
def test_without_padding_nothing_is_described(built, format):
    projection = built(FORMATS[format][0](), 128)
    assert all(not hasattr(p, "shard_record") for p in projection.layer.parameters())
    assert all(not hasattr(p, "weight_loader_numel") for p in projection.layer.parameters())
