# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Updates the weights of a running int4 engine in place, back and forth, in a process of its own.

Started as a script: two checkpoint folders and a file for the answers.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.models.kimi_k3.cpu.support.k3_engine import (
    ENVIRONMENT,
    Answer,
    bind,
    register_kernels_early,
)

PROMPT = list(range(40, 90))
TOKENS = 16
FLAG = {"moe": {"weight": "int4_per_group_32"}}
NAMES = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")


def reload_twice(first: Path, second: Path, folder: Path) -> tuple[list[Answer], list, str]:
    """Serve `first`, update to `second`, update back.

    Returns:
        The answers before, between and after, the addresses of all int4 parameters each time, and
        the log.

    """
    target, log = folder / "answers.json", folder / "log.txt"
    environment = os.environ | ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = bind(1)
    with log.open("w") as output:
        code = subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.models.kimi_k3.cpu.support.int4_reload",
                str(first),
                str(second),
                str(target),
            ],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=200,
            check=False,
        ).returncode
    if code:
        raise RuntimeError(f"the engine process ended with {code}:\n{log.read_text()[-6000:]}")
    result = json.loads(target.read_text())
    return [Answer(**a) for a in result["answers"]], result["addresses"], log.read_text()


def _main(first: str, second: str, target: str) -> None:
    from vllm import LLM, SamplingParams

    register_kernels_early()
    llm = LLM(
        first,
        quantization_config=FLAG,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        max_model_len=256,
        max_num_seqs=4,
    )
    params = SamplingParams(
        temperature=0.0, max_tokens=TOKENS, logprobs=1, ignore_eos=True, detokenize=False
    )

    def answer() -> Answer:
        (request,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        tokens = list(request.outputs[0].token_ids)
        steps = zip(request.outputs[0].logprobs, tokens, strict=True)
        return Answer(tokens, [step[token].logprob for step, token in steps])

    def addresses() -> list[int]:
        (found,) = llm.apply_model(
            lambda model: [
                parameter.data_ptr()
                for name, parameter in model.named_parameters()
                if name.rpartition(".")[2] in NAMES
            ]
        )
        return found

    answers, places = [answer()], [addresses()]
    for folder in (second, first):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        answers.append(answer())
        places.append(addresses())
    Path(target).write_text(
        json.dumps({"answers": [asdict(a) for a in answers], "addresses": places})
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
