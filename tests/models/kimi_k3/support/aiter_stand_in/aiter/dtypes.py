# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""AITER's names for dtypes. A torch without int4 calls packed int4 uint8, as here: the CPU cannot
copy torch.int4."""

import torch

i4x2 = torch.uint8
i8 = torch.int8
