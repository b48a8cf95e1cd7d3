# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""Activation: before and after the import, again, switched off, half-way up the stack, refused."""

import subprocess
import sys

import pytest

AMENDMENT = '''\
"""Says who wrote the value.

A second paragraph.
"""

from vllm_overlay import require

upstream_value = require(f"{__name__}:value")
value = f"{upstream_value} and overlay"
'''


@pytest.fixture
def amended(sandbox):
    sandbox.upstream({"a/__init__.py": "", "a/b.py": '"""Upstream doc."""\nvalue = "upstream"\n'})
    sandbox.overlay({"a/b.py": AMENDMENT, "a/new.py": "value = 'new'", "a/pack/__init__.py": ""})
    sandbox.overlay({"a/pack/deep.py": "value = 'deep'", "fresh/leaf.py": "value = 'leaf'"})
    return sandbox


def test_amends_a_module_imported_later(amended):
    code = """
    import sys, vllm_overlay
    assert not vllm_overlay.is_active()
    assert vllm_overlay.activate() and vllm_overlay.is_active()
    assert "vllm" not in sys.modules and "torch" not in sys.modules
    print(vllm_overlay.outcomes()[0].state.value)
    import vllm.a.b
    print(vllm.a.b.value, vllm.a.b.__doc__, vllm_overlay.outcomes()[0].reason)
    """
    assert amended.output(code).splitlines() == [
        "waiting",
        "upstream and overlay Upstream doc. Says who wrote the value.",
    ]


def test_amends_a_module_imported_before_and_only_once(amended):
    code = """
    import vllm.a.b, vllm_overlay
    for _ in range(3):
        vllm_overlay.activate()
        vllm_overlay.platform_plugin()
        vllm_overlay.general_plugin()
    print(vllm.a.b.value)
    """
    assert amended.output(code) == "upstream and overlay"


def test_new_modules_are_found_and_upstream_wins(amended):
    amended.upstream({"a/both.py": "value = 'upstream'"})
    code = """
    import vllm_overlay
    vllm_overlay.activate()
    import vllm.a.new, vllm.a.pack.deep, vllm.fresh.leaf, vllm.a.both
    print(vllm.a.new.value, vllm.a.pack.deep.value, vllm.fresh.leaf.value, vllm.a.both.value)
    """
    assert amended.output(code) == "new deep leaf upstream"


def test_new_modules_alone(amended):
    """For showing stock behaviour: nothing of upstream's changes, switched off or not."""
    code = """
    import vllm_overlay
    print(vllm_overlay.activate(amendments=False))
    import vllm.a.b, vllm.a.new
    print(vllm.a.b.value, vllm.a.new.value)
    """
    for switch in ("0", "1"):
        output = amended.output(code, VLLM_KIMI_K3_OVERLAY=switch)
        assert output.splitlines() == ["False", "upstream new"]


def test_switched_off(amended):
    code = """
    import vllm_overlay
    print(vllm_overlay.activate(), vllm_overlay.is_active())
    import vllm.a.b
    print(vllm.a.b.value)
    try:
        import vllm.a.new
    except ModuleNotFoundError:
        print("no new module")
    """
    output = amended.output(code, VLLM_KIMI_K3_OVERLAY="0")
    assert output.splitlines() == ["False False", "upstream", "no new module"]


def test_module_still_running_waits_for_the_next_call(amended):
    """Activated from inside the module's own import, an amendment would be overwritten."""
    amended.upstream(
        {"a/b.py": "import vllm_overlay\nvllm_overlay.activate()\nvalue = 'upstream'\n"}
    )
    code = """
    import vllm.a.b, vllm_overlay
    print(vllm.a.b.value, vllm_overlay.outcomes()[0].state.value)
    vllm_overlay.general_plugin()
    print(vllm.a.b.value, vllm_overlay.outcomes()[0].state.value)
    """
    assert amended.output(code).splitlines() == [
        "upstream waiting",
        "upstream and overlay amended",
    ]


def test_stands_down(amended):
    amended.overlay(
        {"a/b.py": "from vllm_overlay import stand_down\nx = 1\nstand_down('upstream has it')\n"}
    )
    code = """
    import vllm_overlay
    vllm_overlay.activate()
    import vllm.a.b
    print(vllm.a.b.value, hasattr(vllm.a.b, "x"), vllm_overlay.outcomes()[0])
    """
    output = amended.output(code)
    assert output.startswith("upstream False")
    assert "STOOD_DOWN" in output
    assert "upstream has it" in output


FAILURES = [
    ("from vllm_overlay import require\nrequire(f'{__name__}:gone')", "OverlayMismatchError"),
    ("raise RuntimeError('broken overlay')", "RuntimeError"),
    ("import a_module_that_nobody_has", "ModuleNotFoundError"),
    ("this is no Python", "SyntaxError"),
]


@pytest.fixture
def subject(amended):
    """The package that the tree is for, with one module."""
    amended.upstream({"models/__init__.py": "", "models/kimi_k3/__init__.py": ""})
    amended.upstream({"models/kimi_k3/b.py": "value = 'upstream'\n"})
    return amended


@pytest.mark.parametrize(("body", "error"), FAILURES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_failing_amendment_fails_every_import_and_leaves_nothing(subject, body, error, order):
    """Not only the first import: a caller that catches it and tries again gets no stock module."""
    subject.overlay({"models/kimi_k3/b.py": f"value = 'half'\nextra = 1\n{body}\n"})
    if order == "before":
        code = """
        import sys, vllm_overlay
        vllm_overlay.activate()
        for _ in range(3):
            try:
                import vllm.models.kimi_k3.b
            except Exception as error:
                print(type(error).__name__, "vllm.models.kimi_k3.b" in sys.modules)
        try:
            vllm_overlay.general_plugin()
        except Exception as error:
            print(type(error).__name__)
        """
        expected = [f"{error} False"] * 3 + [error]
    else:
        code = """
        import vllm.models.kimi_k3.b as b, vllm_overlay
        for _ in range(3):
            try:
                vllm_overlay.activate()
            except Exception as error:
                print(type(error).__name__, b.value, hasattr(b, "extra"))
        """
        expected = [f"{error} upstream False"] * 3
    assert subject.output(code).splitlines() == expected


@pytest.mark.parametrize(("body", "error"), FAILURES)
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_failing_amendment_elsewhere_refuses_nobody_else(subject, body, error, order):
    """A shared module stays as it was and loads; only the tree's own subject cannot be used."""
    subject.overlay({"a/b.py": f"value = 'half'\nextra = 1\n{body}\n"})
    imports = ["import vllm_overlay; vllm_overlay.activate()", "import vllm.a.b"]
    lines = imports if order == "before" else imports[::-1]
    code = "\n".join([*lines, "vllm_overlay.general_plugin()"])
    code += """
print(vllm.a.b.value, hasattr(vllm.a.b, "extra"), vllm_overlay.outcomes()[0].state.value)
for _ in range(2):
    try:
        import vllm.models.kimi_k3.b
    except Exception as error:
        print(type(error).__name__)
"""
    assert subject.output(code).splitlines() == ["upstream False refused", error, error]


def test_a_refusal_after_the_subject_was_imported_fails_at_once(subject):
    subject.overlay({"a/b.py": FAILURES[0][0]})
    code = """
    import vllm_overlay, vllm.models.kimi_k3.b
    vllm_overlay.activate()
    import vllm.a.b
    """
    assert "OverlayMismatchError" in subject.run(code).stderr


@pytest.mark.parametrize(("body", "error"), FAILURES[:3])
def test_an_optional_amendment_stands_down_with_one_warning(subject, body, error):
    subject.overlay({"a/b.py": f"OVERLAY_OPTIONAL = True\nvalue = 'half'\n{body}\n"})
    code = """
    import logging, sys
    logging.basicConfig(level=logging.WARNING, stream=sys.stdout, format="%(levelname)s")
    import vllm_overlay
    vllm_overlay.activate()
    import vllm.a.b, vllm.models.kimi_k3.b
    vllm_overlay.general_plugin()
    print(vllm.a.b.value, vllm_overlay.outcomes()[0].state.value)
    """
    assert subject.output(code).splitlines() == ["WARNING", "upstream stood down"]


def test_a_failed_amendment_is_undone_whole(amended):
    """Also what it did to classes and containers, in its own module or imported into it."""
    amended.upstream(
        {
            "a/base.py": "class Base:\n    def f(self):\n        return 'upstream'\n",
            "a/b.py": """
            import enum
            from vllm.a.base import Base
            table, names, kinds = {"x": 1}, ["x"], {"x"}
            class Kind(enum.Enum):
                A = 1
            class Own(Base):
                @staticmethod
                def g():
                    return 'upstream'
            """,
        }
    )
    amended.overlay(
        {
            "a/b.py": """
            from wrapt import patch_function_wrapper
            from vllm_overlay import require
            @patch_function_wrapper(__name__, "Base.f")
            def f(wrapped, instance, args, kwargs):
                return 'ours'
            @patch_function_wrapper(__name__, "Own.g")
            def g(wrapped, instance, args, kwargs):
                return 'ours'
            Own.extra = Kind.extra = 1
            table["y"] = 2
            table["x"] = 3
            names.append("y")
            kinds.add("y")
            require(f"{__name__}:gone")
            """
        }
    )
    code = """
    import vllm_overlay
    vllm_overlay.activate()
    from vllm.a.b import Base, Kind, Own, kinds, names, table
    print(Own().f(), Base().f(), Own.g(), hasattr(Own, "extra"), hasattr(Kind, "extra"))
    print(table, names, kinds, type(vars(Own)["g"]).__name__)
    """
    assert amended.output(code).splitlines() == [
        "upstream upstream upstream False False",
        "{'x': 1} ['x'] {'x'} staticmethod",
    ]


def test_a_lost_target_is_reported_and_no_new_module(amended):
    amended.overlay({"a/gone.py": '"""Amends.\n\nLedger\n    What: x\n"""\nvalue = 1\n'})
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm_overlay
    vllm_overlay.general_plugin()
    import vllm.a.new
    try:
        import vllm.a.gone
    except ModuleNotFoundError as error:
        print(error)
    """
    lines = amended.output(code).splitlines()
    assert "lost its target: a.gone" in lines[0]
    assert lines[1].startswith("import of vllm.a.gone halted")


def test_a_missed_hook_is_made_good_by_the_next_call(amended):
    """While somebody looks for a module, wrapt overlooks an import of it in another thread."""
    code = """
    import importlib.util, sys, vllm_overlay, wrapt
    vllm_overlay.activate()
    finder = next(f for f in sys.meta_path if type(f).__name__ == "ImportHookFinder")
    finder.in_progress["vllm.a.b"] = True
    import vllm.a.b
    del finder.in_progress["vllm.a.b"]
    print(vllm.a.b.value)
    vllm_overlay.general_plugin()
    print(vllm.a.b.value)
    """
    assert amended.output(code).splitlines() == ["upstream", "upstream and overlay"]


def test_an_import_begun_in_another_thread_is_not_amended_half_way(amended):
    amended.upstream({"a/b.py": "import time\ntime.sleep(1)\nvalue = 'upstream'\n"})
    code = """
    import sys, threading, time, vllm_overlay
    from vllm_overlay import activation
    vllm_overlay.activate(amendments=False)
    file = activation._lay().amendments["vllm.a.b"]
    thread = threading.Thread(target=__import__, args=("vllm.a.b",))
    thread.start()
    while "vllm.a.b" not in sys.modules:
        time.sleep(0.01)
    activation._outcomes["vllm.a.b"] = activation.Outcome("vllm.a.b", activation.State.WAITING)
    activation._hook("vllm.a.b", file)
    thread.join()
    vllm_overlay.activate()
    print(sys.modules["vllm.a.b"].value)
    """
    assert amended.output(code) == "upstream and overlay"


def test_traceback_points_at_the_amendment(amended):
    amended.overlay({"a/b.py": "def fail():\n    raise RuntimeError('here')\n"})
    process = amended.run(
        "import vllm_overlay; vllm_overlay.activate(); import vllm.a.b; vllm.a.b.fail()"
    )
    assert "tree/vllm/a/b.py" in process.stderr
    assert "raise RuntimeError('here')" in process.stderr


def test_one_line_says_what_was_done(amended):
    amended.upstream({"a/c.py": "", "a/d.py": ""})
    amended.overlay({"a/c.py": "from vllm_overlay import stand_down\nstand_down('merged')"})
    amended.overlay({"a/d.py": "x = 1"})
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm_overlay, vllm.a.b, vllm.a.c
    vllm_overlay.general_plugin()
    vllm_overlay.general_plugin()
    """
    lines = [line for line in amended.output(code).splitlines() if "vllm-kimi-k3" in line]
    assert len(lines) == 1
    assert "over vLLM 0.32.0: amended on import: a.d; amended: a.b; stood down: a.c" in lines[0]
    assert "outside" not in lines[0]


def test_the_line_waits_for_the_log(amended):
    """`vllm serve` loads plugins before it sets up logging; the line must not be lost."""
    code = """
    import logging, sys, vllm_overlay
    vllm_overlay.general_plugin()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm.a.b
    vllm_overlay.general_plugin()
    """
    assert amended.output(code).count("vllm-kimi-k3") == 1


def test_expected_stand_down_is_no_news(amended):
    amended.overlay(
        {"a/b.py": "from vllm_overlay import stand_down\nstand_down('a CPU', expected=True)"}
    )
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm_overlay
    vllm_overlay.activate()
    import vllm.a.b
    print(vllm_overlay.outcomes()[0].state.value)
    """
    assert amended.output(code) == "stood down"


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0.dev3+rocm", "nonsense"])
def test_untested_version_is_noted_and_not_refused(amended, version):
    amended.upstream({"_version.py": f"__version__ = version = '{version}'"})
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm_overlay
    vllm_overlay.general_plugin()
    import vllm.a.b
    print(vllm.a.b.value)
    """
    output = amended.output(code)
    assert f"vLLM {version} is outside the tested 0.32.x and 0.33.x" in output
    assert output.endswith("upstream and overlay")


def test_development_build_of_a_tested_version(amended):
    amended.upstream({"_version.py": "__version__ = version = '0.33.1.dev12+g0123abc.rocm700'"})
    code = """
    import logging, sys
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import vllm_overlay
    vllm_overlay.general_plugin()
    """
    assert "outside" not in amended.output(code)


def test_without_vllm(sandbox, tmp_path):
    """A checkout's own tree is a namespace, not an installed vLLM."""
    (sandbox.site / "vllm" / "__init__.py").unlink()
    # -S and -E keep the vLLM that runs these tests out of sight.
    process = subprocess.run(
        [sys.executable, "-S", "-E", "-c", "import vllm_overlay; vllm_overlay.activate()"],
        cwd=sandbox.site,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "ModuleNotFoundError: no vLLM is installed in this environment" in process.stderr
    assert "0.32.x and 0.33.x" in process.stderr


def test_import_is_cheap_and_brings_in_neither_torch_nor_vllm():
    code = """
import sys, time
start = time.perf_counter()
import vllm_overlay
elapsed = time.perf_counter() - start
assert not {"torch", "vllm", "wrapt"} & sys.modules.keys()
print(elapsed)
"""

    def seconds() -> float:
        command = [sys.executable, "-c", code]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # The best of five: the figure is the code's, not that of whatever else the machine is doing.
    assert min(seconds() for _ in range(5)) < 0.05


@pytest.mark.parametrize("value", ["maybe", "false", " 0"])
def test_a_switch_that_is_neither_on_nor_off_is_refused(amended, value):
    process = amended.run(
        "import vllm_overlay; vllm_overlay.activate()", VLLM_KIMI_K3_OVERLAY=value
    )
    assert f"VLLM_KIMI_K3_OVERLAY: expected 0 (off) or 1 (on, the default), found {value!r}" in (
        process.stderr
    )


def test_an_empty_switch_is_the_default(amended):
    code = "import vllm_overlay; print(vllm_overlay.activate())"
    assert amended.output(code, VLLM_KIMI_K3_OVERLAY="") == "True"
