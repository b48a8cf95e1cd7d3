# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Int4 experts for Kimi-K3 in the engine, when asked for; docs/int4.md is the guide.

`policy` decides, a pure function; `facts` gathers what the engine knows, with `aiter` and
`expert_format`; `load` converts a layer's experts in place and `packed` lays out those that a
checkpoint holds; `conversion_log` says at the end what became of them. The arithmetic is
`mxfp4_int4`'s; the amendments of `mxfp4`, `compressed_tensors_moe` and `config.vllm` call these.
"""
