# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""What a conversion to int4 did to a checkpoint: `kimi-k3 report`.

`files` finds matrices and their bytes, `measure` compares them (the only module with torch),
`figures` adds up, `comparison` puts it together. The result is one `Comparison`; `text_tables`,
`html_page` (the only module with jinja2) and `Comparison.as_dict` are its three prints.
"""
