# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What the conversion refuses, by kind. Never raised for anything but the caller's input or an
interruption; every message names the thing, what was expected, what was found and what to do."""


class ConversionError(Exception):
    """Base of everything this package raises on purpose."""


class ConversionInputError(ConversionError, ValueError):
    """A shape, an option, a device or a value that cannot be converted. Nothing was written."""


class ConversionDtypeError(ConversionInputError, TypeError):
    """A tensor of another dtype, or no tensor at all. Nothing was written."""


class ConversionInterruptedError(ConversionError, RuntimeError):
    """An in-place conversion stopped half way. The bytes are a mixture of MXFP4 and int4; every
    scale byte of the source was set to 255 (NaN), so that they cannot be used by mistake."""


class NativeCodeError(ConversionError, RuntimeError):
    """The compiled form of the CPU path cannot be had. Raised where the environment insists on it;
    otherwise torch's form takes its place. Nothing was written."""
