# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Int4 experts for Kimi-K3 in the engine, when `FLAG` asks for them; docs/int4.md is the guide.

`policy` reads the flag and refuses what cannot be done, `aiter` looks at the installed AITER,
`load` converts a layer's experts in place, `report` says at the end what became of them. The
arithmetic is `mxfp4_int4`'s; the amendments of `mxfp4` and `config.vllm` call these.
"""
