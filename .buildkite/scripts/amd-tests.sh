#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
#
# Runs tests of this project on the ROCm build of vLLM that is installed here:
#
#     bash .buildkite/scripts/amd-tests.sh tests/models/kimi_k3/amd
#
# The overlay is laid over that vLLM; neither it nor torch is replaced. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON="${PYTHON:-python3}"

if [ "$#" -eq 0 ]; then
  echo "usage: $0 TEST..." >&2
  exit 2
fi
"$PYTHON" -c 'import torch, sys; sys.exit(0 if torch.version.hip else "error: torch here is no ROCm build: expected an AMD GPU with a ROCm build of vLLM")'
# vLLM and torch are no dependencies of this project, so pip leaves those of the image as they are.
"$PYTHON" -m pip install --quiet --editable . "pytest>=8,<10" "hypothesis>=6.100,<7"
"$PYTHON" -m pip show vllm >/dev/null 2>&1 || echo "note: no distribution named vllm; the module decides"
kimi-k3 status
"$PYTHON" -m pytest -v -m "not network" "$@"
