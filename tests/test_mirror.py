# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Tests mirror the tree: a module has its file of tests under the same path, and a file of tests
its module. What is otherwise is listed here, with the reason, and only as long as it is so."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("vllm_overlay", "mxfp4_int4", "k3_checkpoint", "vllm", "kimi_k3")
SCRIPTS = ("benchmarks", "tools")

AMENDMENTS = "tests/models/kimi_k3/cpu/test_amendments.py"

# A module, or a folder of them, without tests of its own: the file that tests it, and why there.
TESTED_IN = {
    "vllm_overlay/outcome.py": ("tests/vllm_overlay/test_activation.py", "records it returns"),
    "mxfp4_int4/": (
        "tests/mxfp4_int4/test_interface.py",
        "every implementation goes through the same tests, by what they claim",
    ),
    "k3_checkpoint/": (
        "tests/k3_checkpoint/test_check.py",
        "a written checkpoint is checked: one proof of both",
    ),
    "vllm/config/vllm.py": (
        "tests/model_executor/layers/quantization/utils/k3_int4/test_policy.py",
        "calls the policy and nothing else",
    ),
    "vllm/model_executor/layers/fused_moe/": (AMENDMENTS, "one line of upstream amended each"),
    "vllm/model_executor/layers/quantization/": (
        "tests/models/kimi_k3/test_gfx942_int4.py",
        "from the flag to the kernel's arguments, over a stand-in for AITER",
    ),
    "vllm/model_executor/model_loader/base_loader.py": (
        "tests/model_executor/model_loader/reload/test_streaming.py",
        "a load with its account, as it is seen from outside",
    ),
    "vllm/model_executor/model_loader/fastsafetensors_cpu.py": (
        "tests/model_executor/model_loader/test_weight_utils.py",
        "the work of that amendment",
    ),
    "vllm/model_executor/model_loader/reload/": (
        "tests/model_executor/model_loader/reload/test_streaming.py",
        "a load with its account, as it is seen from outside",
    ),
    "vllm/model_executor/models/utils.py": (
        "tests/model_executor/model_loader/test_expert_index.py",
        "names the tensors for the index",
    ),
    "vllm/models/kimi_k3/amd/": (AMENDMENTS, "one name of upstream rebound each"),
    "vllm/models/kimi_k3/cpu/": ("tests/models/kimi_k3/cpu/test_kda.py", "forms compared"),
    "kimi_k3/cli/plan.py": ("tests/kimi_k3/cli/test_cli.py", "printed beside `rehearse`"),
    "kimi_k3/cli/memory_tables.py": (
        "tests/kimi_k3/cli/test_rehearse.py",
        "printed by `plan` and `rehearse`",
    ),
    "kimi_k3/convert/": (
        "tests/kimi_k3/convert/test_resume.py",
        "seen from outside: files on disk, after every kind of interruption",
    ),
    "kimi_k3/doctor/amendments.py": ("tests/kimi_k3/cli/test_status.py", "what status prints"),
    "kimi_k3/rehearsal/": (
        "tests/kimi_k3/cli/test_rehearse.py",
        "a rehearsal is compared with a real load",
    ),
}

# Files of tests of no single module: what they are of.
OF_SEVERAL = {
    "tests/buildkite/": "the pipelines",
    "tests/docs/": "the pages and the site",
    "tests/kimi_k3/cli/test_cli.py": "the command line as a whole",
    "tests/kimi_k3/cli/test_console_script.py": "the installed command",
    "tests/kimi_k3/convert/test_resume.py": "a conversion that was killed",
    "tests/model_executor/layers/quantization/utils/k3_int4/test_real_aiter.py": (
        "one layer of experts over a real AITER"
    ),
    "tests/model_executor/model_loader/reload/test_streaming.py": "a load with its account",
    "tests/model_executor/model_loader/test_mismatch.py": "a vLLM that lacks a name",
    "tests/models/kimi_k3/amd/test_kda_account.py": "KDA's layers with the account",
    "tests/models/kimi_k3/amd/test_kda_scope.py": "what the amendment of KDA leaves alone",
    "tests/models/kimi_k3/cpu/": "the engine and the server on a CPU",
    "tests/models/kimi_k3/test_gfx942_int4.py": "int4 experts on a simulated gfx942",
    "tests/models/kimi_k3/test_gfx942_int4_scope.py": "what they leave alone",
    "tests/mxfp4_int4/": "claims that hold for every implementation",
    "tests/test_mirror.py": "this file",
    "tests/tools/test_upstream_versions.py": "the next release of vLLM",
    "tests/vllm_overlay/test_wheel.py": "the wheel",
}


def files(folder: str, pattern: str) -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for file in (ROOT / folder).rglob(pattern)
        if "__pycache__" not in file.parts
    }


def mirror(module: str) -> str:
    """The file of tests of a module: vLLM's own tests lie in folders without vLLM's name."""
    *folders, name = Path(module).parts
    folders = folders[1:] if folders[0] == "vllm" else folders
    return str(Path("tests", *folders, f"test_{name.lstrip('_')}"))


def listed(path: str, table: dict) -> str | None:
    """The entry for `path`: itself, or the innermost folder that is listed."""
    folders = [f"{folder}/" for folder in Path(path).parents]
    return next((entry for entry in (path, *folders) if entry in table), None)


MODULES = {module for package in PACKAGES for module in files(package, "[!_]*.py")}
TESTS = files("tests", "test_*.py")
OTHERS = {mirror(file) for folder in SCRIPTS for file in files(folder, "*.py")}
OTHERS |= {mirror(file) for package in PACKAGES for file in files(package, "_[!_]*.py")}


def test_modules_have_tests():
    alone = {module for module in MODULES if mirror(module) not in TESTS}
    missing = sorted(module for module in alone if listed(module, TESTED_IN) is None)
    assert not missing, f"write {mirror(missing[0])}, or list the module with a reason: {missing}"
    needless = TESTED_IN.keys() - {listed(module, TESTED_IN) for module in alone}
    assert not needless, f"these modules have tests of their own, or are gone: {sorted(needless)}"


def test_tests_have_modules():
    alone = TESTS - {mirror(module) for module in MODULES} - OTHERS
    missing = sorted(test for test in alone if listed(test, OF_SEVERAL) is None)
    assert not missing, f"rename these after their modules, or list them with a reason: {missing}"
    needless = OF_SEVERAL.keys() - {listed(test, OF_SEVERAL) for test in alone}
    assert not needless, f"these have modules, or are gone: {sorted(needless)}"


def test_listed_tests_exist():
    gone = {test for test, _ in TESTED_IN.values()} - TESTS
    assert not gone
