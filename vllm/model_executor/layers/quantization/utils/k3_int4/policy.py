# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""May int4 experts be used here, and if not, why: one pure function of facts, `decide`.

The engine asks it before it starts and again for every MoE layer, with what `facts` gathers;
`kimi-k3 doctor` asks it with what it finds on a machine. It looks at nothing itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from k3_checkpoint.formats import INT4_PACKED, MXFP4_PACKED, Format
from mxfp4_int4.definition import GROUP_SIZE

FLAG = "--quantization-config.moe.weight int4_per_group_32"
ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3MTPModel")
# AITER reads the scales of two neighbouring groups along K as one word.
GROUP_PAIR = 2 * GROUP_SIZE
AITER_ENTRY_MODULE = "aiter.ops.flydsl.kernels.moe_2stage_a16wmix"
AITER_ENTRY = "flydsl_a16w4_gemm1"

_NEEDS_AITER = (
    f"AITER with the packed-int4 MoE entry point {AITER_ENTRY_MODULE}.{AITER_ENTRY}(..., act=...) "
    "and the activation Situv2"
)
_NEEDS_MACHINE = "a gfx942 GPU (MI300X, MI308X, MI325X) with AITER, or the CPU platform"


@dataclass(frozen=True)
class Request:
    """What asks for int4 experts.

    Attributes:
        what: As a refusal names it.
        fallback: What to do where int4 experts cannot be, as a sentence without its end.
    """

    what: str
    fallback: str


BY_FLAG = Request(FLAG, "Start without the flag")
BY_CHECKPOINT = Request(
    "the checkpoint of packed int4 experts", "Serve the MXFP4 checkpoint that it was made from"
)


@dataclass(frozen=True)
class Refusal:
    """One reason: what was found, what is needed instead, and what to do."""

    found: str
    needed: str
    remedy: str


class Int4RefusedError(ValueError):
    """Int4 experts were asked for and cannot be. The message says what was found, what is needed
    and what to do."""

    def __init__(self, refusal: Refusal, asked: Request = BY_FLAG) -> None:
        super().__init__(
            f"{asked.what} is refused: found {refusal.found}; needed: {refusal.needed}. "
            f"{refusal.remedy}"
        )


class Target(StrEnum):
    """Where int4 experts are computed."""

    CPU = "cpu"
    GFX942 = "gfx942"


class Platform(StrEnum):
    """What vLLM runs on, as far as it matters here."""

    CPU = "CPU"
    ROCM = "ROCm"
    OTHER = "other"


@dataclass(frozen=True)
class Aiter:
    """What the installed AITER can do.

    Attributes:
        found: Whether there is one that vLLM can use.
        fused_moe: Whether vLLM will use its fused MoE.
        fault: Why it cannot compute SiTU with packed int4 weights; empty if it can, and where
            nobody has looked.
    """

    found: bool
    fused_moe: bool = False
    fault: str = ""


@dataclass(frozen=True)
class Machine:
    """Where experts would be computed.

    Attributes:
        platform: vLLM's.
        name: Of the device, as a message shows it.
        architecture: Of a ROCm GPU, such as ``gfx942``.
        aiter: Asked for on gfx942 only.
    """

    platform: Platform
    name: str = ""
    architecture: str = ""
    aiter: Aiter = Aiter(found=False)


@dataclass(frozen=True)
class Model:
    """A model before it is built.

    Attributes:
        architecture: Name of its class. The rest is of Kimi-K3 only.
        quantization: vLLM's name of its method; None for unquantized weights.
        experts: Format of the routed experts where config.json describes packed int4 ones.
        hidden_act: Activation of the experts.
        dtype: Of activations.
        activation_override: `moe.activation` beside the flag.
        moe_layers: Names of the layers with routed experts; None where nobody has looked.
        kept: Those among them that the ignore list beside the flag keeps in MXFP4.
        ignore: That list.
        unquantized: A name of experts in config.json's own ignore list, if there is one.
    """

    architecture: str | None
    quantization: str | None = None
    experts: Format | None = None
    hidden_act: str = "situ"
    dtype: str = "torch.bfloat16"
    activation_override: str | None = None
    moe_layers: tuple[str, ...] | None = None
    kept: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    unquantized: str | None = None


@dataclass(frozen=True)
class Layer:
    """One layer of routed experts on one rank, before it has weights.

    Attributes:
        activation: Its name.
        betas: SiTU's two constants, by their names in config.json.
        hidden: Hidden size (of the latent space where there is one), K of stage 1.
        inner: Intermediate size per rank, K of stage 2.
    """

    activation: str
    betas: Mapping[str, float | None]
    hidden: int
    inner: int


@dataclass(frozen=True)
class Facts:
    """What a decision stands on; what is None is not known yet and not judged.

    Attributes:
        asked: By what int4 experts are asked for, if at all.
        machine: Where.
        backend: ``--moe-backend``.
        model: Before an engine starts.
        layer: When a layer is built.
    """

    asked: Request | None
    machine: Machine
    backend: str = "auto"
    model: Model | None = None
    layer: Layer | None = None


@dataclass(frozen=True)
class Decision:
    """Whether this project's int4 experts are used.

    Attributes:
        asked: By what; None where nobody did.
        target: Where they are computed; None where they are not used: not asked for, refused, or
            upstream's own to serve.
        refusals: Why they cannot be, all reasons.
    """

    asked: Request | None = None
    target: Target | None = None
    refusals: tuple[Refusal, ...] = ()

    def require(self) -> Target | None:
        """Return the target, or raise.

        Raises:
            Int4RefusedError: There is a reason against it; the message has the first one.
        """
        if self.asked is not None and self.refusals:
            raise Int4RefusedError(self.refusals[0], self.asked)
        return self.target


def decide(facts: Facts) -> Decision:
    """Decide whether experts are int4 here."""
    asked = facts.asked
    if asked is None or (asked is BY_CHECKPOINT and _is_upstreams(facts.machine, facts.backend)):
        return Decision(asked)
    target = Target.CPU if facts.machine.platform is Platform.CPU else Target.GFX942
    refusals: list[Refusal] = []
    if facts.model is not None:
        refusals += _of_model(facts.model, asked, target)
    # A model that cannot have int4 experts anywhere: the machine is beside the point.
    if not refusals:
        refusals += _of_machine(facts.machine, asked, facts.backend)
    if not refusals and facts.layer is not None:
        refusals += _of_layer(facts.layer, asked)
    return Decision(asked, None if refusals else target, tuple(refusals))


def _is_upstreams(machine: Machine, backend: str) -> bool:
    """Tell whether upstream serves a packed checkpoint, or refuses it itself."""
    if machine.platform is Platform.CPU:
        return backend not in ("auto", "cpu")
    if machine.architecture == "gfx950" and backend == "flydsl":
        return False
    return machine.architecture != Target.GFX942 or backend not in ("auto", "aiter")


def _of_model(model: Model, asked: Request, target: Target) -> Iterator[Refusal]:
    without = f"{asked.fallback}."
    if asked is BY_CHECKPOINT:
        if target is Target.CPU:
            return
        if model.dtype != "torch.bfloat16":
            yield Refusal(
                f"activations in {model.dtype}",
                "bfloat16, the only ones that AITER's int4 kernels take",
                "Leave --dtype out, or give bfloat16.",
            )
        if model.experts is Format.MIXED:
            yield Refusal(
                "experts in MXFP4 beside those in int4",
                "int4 throughout: gfx942 has no kernel for SiTU with MXFP4",
                "To convert all of them, run kimi-k3 convert without --include and --exclude.",
            )
        return
    if model.architecture not in ARCHITECTURES:
        yield Refusal(
            f"the model {model.architecture}",
            f"Kimi-K3 ({', '.join(ARCHITECTURES)}), the only model whose experts it converts",
            without,
        )
        return
    if model.experts in (Format.INT4, Format.MIXED):
        yield Refusal(
            f"a checkpoint whose experts are int4 already ({INT4_PACKED}, groups of 32)",
            "routed experts in MXFP4, which the flag converts",
            f"{asked.fallback}: the checkpoint is served as it is, with the scales it holds.",
        )
        return
    if model.quantization != "mxfp4":
        yield Refusal(
            f"a checkpoint with {model.quantization or 'unquantized weights'}",
            f"routed experts in MXFP4 (format {MXFP4_PACKED})",
            f"There is nothing to convert. {without}",
        )
    if model.hidden_act != "situ":
        yield Refusal(f"hidden_act {model.hidden_act!r}", "hidden_act 'situ'", without)
    if model.activation_override is not None:
        yield Refusal(
            f"a moe.activation override ({model.activation_override})",
            "bfloat16 activations, the only ones that the int4 experts take",
            "Leave moe.activation out.",
        )
    if model.unquantized is not None:
        yield Refusal(
            f"{model.unquantized} in config.json's ignore list, so that its weights are not "
            "quantized",
            "every routed expert in MXFP4",
            f"Take config.json from the model's own repository. {without}",
        )
    layers = model.moe_layers
    if layers == ():
        yield Refusal("a model without MoE layers", "at least one", without)
    elif layers is not None and model.kept == layers:
        yield Refusal(
            f"an ignore list, {list(model.ignore)}, that holds all {len(layers)} MoE layers "
            f"({layers[0]} to {layers[-1]})",
            "at least one MoE layer to convert",
            "Name only the layers that are to stay in MXFP4, or start without the flag.",
        )


def _of_machine(machine: Machine, asked: Request, backend: str) -> Iterator[Refusal]:
    if machine.platform is Platform.OTHER:
        yield Refusal(
            f"the platform {machine.name}",
            _NEEDS_MACHINE,
            f"{asked.fallback}: the experts are then served in MXFP4 where the platform can.",
        )
        return
    if machine.architecture == "gfx950" and asked is BY_CHECKPOINT:
        yield Refusal(
            "--moe-backend flydsl",
            "a kernel that computes SiTU: vLLM calls this one for SiLU, whatever the model wants",
            "Leave --moe-backend out.",
        )
        return
    if machine.platform is Platform.ROCM:
        if machine.architecture != Target.GFX942:
            yield Refusal(
                f"the GPU {machine.architecture}",
                _NEEDS_MACHINE,
                f"{asked.fallback}: gfx950 computes MXFP4 itself, and int4 would only lose.",
            )
            return
        yield from _of_aiter(machine.aiter, asked)
    backends = ("auto", "cpu" if machine.platform is Platform.CPU else "aiter")
    if backend not in backends:
        yield Refusal(
            f"--moe-backend {backend}",
            f"one of {', '.join(backends)}",
            "Leave --moe-backend out.",
        )


def _of_aiter(aiter: Aiter, asked: Request) -> Iterator[Refusal]:
    remedy = f"Install an AITER that has it, or {asked.fallback[0].lower()}{asked.fallback[1:]}."
    if not aiter.found:
        yield Refusal("no AITER in this environment", _NEEDS_AITER, remedy)
    elif not aiter.fused_moe:
        yield Refusal(
            "AITER's fused MoE switched off",
            "it is the only kernel for int4 experts on gfx942",
            "Set VLLM_ROCM_USE_AITER=1 and VLLM_ROCM_USE_AITER_MOE=1.",
        )
    elif aiter.fault:
        yield Refusal(aiter.fault, _NEEDS_AITER, remedy)


def _of_layer(layer: Layer, asked: Request) -> Iterator[Refusal]:
    instead = f"{asked.fallback}."
    if layer.activation != "situ":
        found = f"experts with the activation {layer.activation}"
        yield Refusal(found, "SiTU, Kimi-K3's activation", instead)
        return
    for name, beta in layer.betas.items():
        if beta is None:
            yield Refusal(
                f"no {name} in the model's config.json",
                "both SiTU constants (Kimi-K3: 4.0 and 25.0)",
                "Take config.json from the model's own repository.",
            )
    if layer.inner % GROUP_SIZE:
        yield Refusal(
            f"an intermediate size of {layer.inner} per rank",
            f"a multiple of {GROUP_SIZE}: a group of {GROUP_SIZE} values has one scale and cannot "
            "be split",
            "Use fewer tensor-parallel ranks or --enable-expert-parallel.",
        )
    if layer.hidden % GROUP_PAIR:
        yield Refusal(
            f"a (latent) hidden size of {layer.hidden}",
            f"a multiple of {GROUP_PAIR}: the kernel reads two groups of {GROUP_SIZE} at a time",
            instead,
        )
