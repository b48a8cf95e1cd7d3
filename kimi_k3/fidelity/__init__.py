# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion to int4 did to a checkpoint: `kimi-k3 report`.

`files` finds matrices and their bytes, `measure` compares them (the only module with torch),
`figures` adds up, `run` puts it together; `table` and `page` show it. Nothing is written but the
page that was asked for.
"""
