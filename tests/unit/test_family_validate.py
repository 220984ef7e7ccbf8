"""Wrong declarations, as a user meets them: exit code 2, file:line, the fault and how to fix it."""

import re
from dataclasses import replace

import pytest

from attnsweep.core.errors import KernelError
from attnsweep.core.hardware import ARCHS
from attnsweep.core.problem import Problem
from attnsweep.family import validate
from attnsweep.family.discover import load_kernel
from attnsweep.family.family import Config, Launch, TensorMap
from attnsweep.family.launch import l2_bytes_at_once

# Line 1 is the import; a test replaces one part and says on which line the fault is.
IMPORT = "from attnsweep.family.family import Family, Launch, Param, TensorMap\n"
KERNEL = "kernel = Family('mine', summary='', params=(Param('A', (1, 2), ''),))\n"
STAGE = """\
@kernel.stage('fwd')
def fwd(config, problem, arch):
    return Launch('mine', (1, 1, 1), 32, ('q', 'k', 'v', 'o'))
"""
SPEC = """
arch: sm_90a
problems: [{batch: 1, heads: 2, seqlen: 64, head_dim: 64}]
kernels: {mine: {}}
baselines: []
"""


@pytest.fixture
def mine(tmp_path):
    """Write the declaration; returns its path."""
    (tmp_path / "mine.cu").touch()

    def write(text):
        path = tmp_path / "mine.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def dry_run(mine, tmp_path, attnsweep):
    """Write the declaration and count its candidates; returns exit code and stderr."""
    (tmp_path / "mine.yaml").write_text(SPEC)

    def run(text):
        mine(text)
        arguments = (tmp_path / "mine.yaml", "--kernels", tmp_path, "--dry-run")
        done = attnsweep("run", *arguments, width=500)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    return run


def test_a_right_declaration_loads(dry_run):
    assert dry_run(IMPORT + KERNEL + STAGE) == (0, "")


def params(text):
    return KERNEL.replace("(Param('A', (1, 2), ''),)", text)


def kernel(text):
    return KERNEL.replace("summary=''", f"summary='', {text}")


LOADED = {
    "rule without parentheses": (KERNEL + STAGE + "@kernel.rule\ndef no(config, problem, arch):\n    return False\n", 6,
        "a rule's description is text, not <function no", '@kernel.rule("what it says"), with parentheses'),
    "rule decorates nothing": (KERNEL + STAGE + "kernel.rule('why')\n", 6, "rule('why') decorates no function",
        "write it as a decorator"),
    "rule of one argument": (KERNEL + STAGE + "@kernel.rule('why')\ndef no(config):\n    return False\n", 6,
        "rule no is called with config, problem, arch: too many positional", "write def name(config, problem, arch)"),
    "two rules": (KERNEL + STAGE + 2 * "@kernel.rule('why')\ndef no(c, p, a):\n    return True\n", 9,
        "mine has two rules called no", "rename one"),
    "stage without parentheses": (KERNEL + STAGE.replace("('fwd')", ""), 3,
        "a stage's name is a C identifier in quotes, not <function fwd", '@kernel.stage("fwd"), with parentheses'),
    "stage's name": (KERNEL + STAGE.replace("'fwd'", "'my stage'"), 3, "not 'my stage'", '@kernel.stage("fwd")'),
    "stage twice": (KERNEL + STAGE + STAGE.replace("'fwd'", "'FWD'"), 6, "two stages called FWD", "rename one"),
    "stage's params": (KERNEL + STAGE.replace("'fwd'", "'fwd', params=('NOPE',)"), 3,
        "stage fwd: params names 'NOPE'; there are A", "or declare NOPE"),
    "stage's constants": (KERNEL + STAGE.replace("'fwd'", "'fwd', constants=('NOPE',)"), 3,
        "constants names 'NOPE'; there are HEAD_DIM, IS_BF16, CAUSAL", "declare NOPE"),
    "stage of two arguments": (KERNEL + STAGE.replace("config, problem, arch", "config, problem"), 3,
        "stage fwd is called with config, problem, arch", "write def name(config, problem, arch)"),
    "no stage": (KERNEL, 2, "declares no stage", "add @kernel.stage"),
    "no kernel": ("x = 1\n", 1, "defines no `kernel = Family(...)`", "begin with `_`"),
    "no template": (KERNEL.replace("mine", "absent") + STAGE, 2, "its template absent.cu is not next to it",
        "correct the name in Family(...)"),
    "exit while loading": (KERNEL + STAGE + "raise SystemExit(0)\n", 6, "SystemExit: 0", ""),
    "kernel's name": (KERNEL.replace("'mine'", "'a/b'"), 2, "cannot be 'a/b'", "C identifier"),
    "param twice": (params("2 * (Param('A', (1,), ''),)"), 2, "a parameter is declared twice: A", "rename one"),
    "param's name": (params("(Param('A-B', (1,), ''),)"), 2, "'A-B' is no C identifier", "TILE_K"),
    "param int": (params("(Param('int', (1,), ''),)"), 2, "'int' is reserved", "TILE_K"),
    "param HEAD_DIM": (params("(Param('HEAD_DIM', (1,), ''),)"), 2, "'HEAD_DIM' is a constant that attnsweep defines",
        "TILE_K"),
    "param's values": (params("(Param('A', 64, ''),)"), 2, "must be a tuple, not 64", "(64,)"),
    "param's no values": (params("(Param('A', (), ''),)"), 2, "A: it has no values", "(64,)"),
    "param's float": (params("(Param('A', (0.5,), ''),)"), 2, "whole numbers, bools", "units"),
    "param's option": (params("(Param('A', ('-a b',), ''),)"), 2, "not one option", "spaces"),
    "param's arch": (params("(Param('A', ('-arch=sm_80',), ''),)"), 2, "itself", "min_arch"),
    "min_arch": (kernel("min_arch=['sm_80']"), 2, "min_arch is one of", 'min_arch="sm_80"'),
    "dtypes": (kernel("dtypes=(['fp16'],)"), 2, "dtypes are a tuple", 'dtypes=("fp16",)'),
    "head_dims": (kernel("head_dims=(0, 64)"), 2, "head_dims are above 0, not 0", "(64, 128)"),
    "rounds_scores": (kernel("rounds_scores=None"), 2, "rounds_scores is a count", "write 1"),
    "deterministic": (kernel("deterministic='no'"), 2, "deterministic is not 'no'", "False"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADED)
def test_a_wrong_declaration_is_refused_when_it_is_loaded(name, mine, attnsweep):
    text, line, what, fix = LOADED[name]
    path = mine(IMPORT + text)
    done = attnsweep("list", "--kernels", path.parent, width=500)
    assert done.returncode == 2
    assert f"{path}:{line}: " in done.stderr
    assert what in done.stderr
    assert fix in done.stderr
    assert "Traceback" not in done.stderr


def test_other_files_beside_a_declaration_are_not_imported(mine, attnsweep):
    """A directory may have others' scripts, and `--kernels .` ran them."""
    path = mine(IMPORT + KERNEL + STAGE)
    (path.parent / "f.py").write_text("print('a kernel of theirs')\nimport nothere\n")
    (path.parent / "aside").mkdir()
    (path.parent / "aside" / "g.py").write_text("raise SystemExit(9)\n")
    done = attnsweep("list", "--kernels", path.parent, width=500)
    assert (done.returncode, done.stderr) == (0, "")
    assert "mine" in done.stdout
    assert "theirs" not in done.stdout
    path.unlink()
    done = attnsweep("list", "--kernels", path.parent, width=500)
    assert done.returncode == 2
    assert "has no kernel families: no NAME.py with `kernel = Family(...)`" in done.stderr


def returning(text):
    """A stage that returns this."""
    return KERNEL + STAGE.replace("Launch('mine', (1, 1, 1), 32, ('q', 'k', 'v', 'o'))", text)


def workspace(text):
    """A workspace builder that returns this."""
    builder = f"@kernel.workspace\ndef w(config, problem):\n    return {text}\n"
    return KERNEL + STAGE + builder


def rule(text):
    return KERNEL + STAGE + f"@kernel.rule('why')\ndef no(config, problem, arch):\n    {text}\n"


EXIT = "__import__('sys').exit(0)"
MAP = "TensorMap('q', {}, (128, 8192), (64, 64, 1))"
ASKED = {
    "rule exits": (rule(EXIT), 8, "rule no of mine raised SystemExit: 0", ""),
    "rule raises": (rule("1 / 0"), 8, "rule no of mine raised ZeroDivisionError", ""),
    "rule raises what cannot be said": (rule("raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})"), 8,
        "rule no of mine raised Mute\n", "config A=1"),
    "rule returns nothing": (rule("pass"), 6, "returned nothing", "return True to keep"),
    "workspace None": (workspace("None"), 6, "workspace of mine returned None", "{} for none"),
    "workspace of 10**30": (workspace("{'s': 10**30}"), 6, "gives s 1000000", "2**72"),
    "workspace q": (workspace("{'q': 8}"), 6, "a buffer 'q', which is one of", "another name"),
    "no launch": (returning("None"), 3, "no stage of mine has a launch", "return a Launch"),
    "no parameter": (rule("return config.B > 0"), 8, "no parameter 'B'; it has A", ""),
    "grid of 0.5": (returning("Launch('f', (0.5, 1, 1), 32, ())"), 3, "needs three ints", ""),
    "buffer": (returning("Launch('f', (1, 1, 1), 32, ('qq',))"), 3, "names the buffer 'qq'", ""),
    "argument": (returning("Launch('f', (1, 1, 1), 32, (None,))"), 3, "passes None", ""),
    "function": (returning("Launch(3, (1, 1, 1), 32, ())"), 3, "has function 3", 'extern "C"'),
    "grid": (returning("Launch('f', [1, 1, 1], 32, ())"), 3, "has grid [1, 1, 1]", "use //"),
    "threads": (returning("Launch('f', (1, 1, 1), -32, ())"), 3, "threads -32", "at least 1"),
    "args": (returning("Launch('f', (1, 1, 1), 32, 'q')"), 3, "has args 'q'", "(x,)"),
    "int32": (returning("Launch('f', (1, 1, 1), 32, (2**31,))"), 3, "is no int32", "two ints"),
    "carveout": (returning("Launch('f', (1, 1, 1), 32, (), carveout=101)"), 3, "carveout 101", ""),
    "defines": (returning("Launch('f', (1, 1, 1), 32, (), defines={'A B': 1})"), 3,
        "defines of 'A B', which is no C identifier", "another name"),
    "defines STAGE": (returning("Launch('f', (1, 1, 1), 32, (), defines={'STAGE_X': 1})"), 3, "which attnsweep defines",
        "another name"),
    "map's dims": (returning(f"Launch('f', (1, 1, 1), 32, ({MAP.format('(64, 64, -1)')},))"), 3,
        "a TensorMap of q with dims (64, 64, -1)", "ints above 0"),
    "map's rank": (returning(f"Launch('f', (1, 1, 1), 32, ({MAP.format('(64, 64)')},))"), 3,
        "with 2 dims, 2 strides and 3 sizes of the box", "1 to 5 dims"),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_what_a_declaration_answers_is_refused_with_the_config_it_was_asked_about(name, dry_run):
    text, line, what, fix = ASKED[name]
    code, err = dry_run(IMPORT + text)
    assert code == 2
    assert f"mine.py:{line}: " in err
    assert what in err
    assert "config A=1, problem (1,2,64,64) fp16 full" in err
    assert fix in err


def test_ctrl_c_in_a_declaration_is_no_fault_of_it(mine):
    path = mine(IMPORT + KERNEL + STAGE + "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_kernel(path)


def test_a_function_without_code_of_its_own_is_placed_at_the_kernel(mine):
    text = IMPORT + KERNEL + STAGE + "import functools\n"
    partial = "functools.partial(lambda more, c, p, a: None, 1)"
    path = mine(text + f"kernel.keep_if(('partial', '', {partial}))\n")
    loaded = load_kernel(path)
    with pytest.raises(KernelError, match="rule partial of mine returned nothing") as caught:
        loaded.refused_by(Config({"A": 1}), Problem(1, 2, 2, 64, 64, 64), ARCHS["sm_90a"])
    assert caught.value.where == f"{path}:2"


MADE = TensorMap("q", (64, 64, 2), (128, 8192), (64, 64, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strides": (100, 8192)}, "strides (100, 8192)"),
        ({"box": (64, 257, 1)}, "box (64, 257, 1)"),
        ({"box": (64, 64)}, "2 sizes of the box"),
        ({"dims": [64, 64, 2]}, "dims [64, 64, 2]"),
        ({"swizzle_bytes": 16}, "swizzle_bytes 16"),
        ({"buffer": "qq"}, "names the buffer 'qq'"),
        ({"buffer": 3}, "passes TensorMap"),
    ],
    ids=str,
)
def test_a_descriptor_that_the_driver_would_refuse(changes, words):
    launch = Launch("f", (1, 1, 1), 32, (MADE,))
    assert validate.of_launch(launch, validate.TENSORS) is None
    wrong = replace(launch, args=(replace(MADE, **changes),))
    fault = validate.of_launch(wrong, validate.TENSORS)
    assert fault is not None
    assert re.search(re.escape(words), fault.what)


def test_a_descriptor_of_one_dimension_has_no_row_to_begin_within_a_line():
    launch = Launch("f", (1, 1, 1), 32, (replace(MADE, dims=(64,), strides=(), box=(64,)),))
    assert validate.of_launch(launch, validate.TENSORS) is None
    assert l2_bytes_at_once(()) == 256


@pytest.mark.parametrize(
    ("strides", "nbytes"),
    [
        ((256, 256 * 100, 256 * 1600), 256),
        ((64, 64 * 101, 64 * 1616), 256),  # two rows share a line
        ((144, 144 * 128), 128),
        ((144 * 16, 144), 128),  # heads beside each other: 16 rows of 144 bytes begin a line together
        ((128 * 16, 128), 256),
        ((0, 144), 128),  # one row for all
    ],
)
def test_the_l2_fetches_256_bytes_for_rows_that_begin_with_lines(strides, nbytes):
    assert l2_bytes_at_once(strides) == nbytes
