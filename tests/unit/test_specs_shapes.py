"""Shapes as a user writes them, and what answers to a wrong one."""

import contextlib
import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnsweep.core.errors import AttnsweepError, ProblemError
from attnsweep.core.problem import DTYPE_BYTES, Problem
from attnsweep.specs.shapes import read_csv, read_shapes


def labels(*arguments, **options):
    return [problem.label for problem in read_shapes(arguments, **options)]


@st.composite
def problems(draw):
    kv = draw(st.integers(1, 64))
    heads = kv * draw(st.integers(1, 64))
    dtype = draw(st.sampled_from([*DTYPE_BYTES]))
    sizes, most = {}, 2**30 // heads  # elements; a head_dim of 16 makes more
    for name in draw(st.permutations(["batch", "seqlen_k", "head_dim"])):
        sizes[name] = draw(st.integers(1, most))
        most //= sizes[name]
    q, k = draw(st.integers(1, sizes["seqlen_k"])), sizes["seqlen_k"]
    causal = draw(st.booleans())
    if not causal and draw(st.booleans()):
        q, k = k, q
    head_dim = sizes["head_dim"]
    if dtype.startswith("e4m3"):
        head_dim = max(16, head_dim // 16 * 16)
    return Problem(sizes["batch"], heads, kv, q, k, head_dim, dtype, causal=causal)


def named(problem):
    """A problem in the named form, with the names in upper case."""
    p = problem
    mask = "causal" if p.causal else "full"
    return f"B={p.batch} H={p.heads} Hkv={p.heads_kv} Sq={p.seqlen_q} Sk={p.seqlen_k} D={p.head_dim} {p.dtype} {mask}"


class TestWhatFits:
    @pytest.mark.parametrize(
        ("arguments", "label"),
        [
            (["4,32,4096,128"], "(4,32,4096,128) fp16 full"),
            (["2,32/8,512x2048,128"], "(2,32/8,512x2048,128) fp16 full"),
            (["B=4", "H=32", "Hkv=8", "S=4096", "D=128"], "(4,32/8,4096,128) fp16 full"),
            (["batch=4 heads=32 seqlen_q=1 Sk=9 head_dim=64"], "(4,32,1x9,64) fp16 full"),
            (["4,32,4096,128", "bf16", "causal"], "(4,32,4096,128) bf16 causal"),
            (["4,32,4096,128,bf16,causal"], "(4,32,4096,128) bf16 causal"),
            (["1,2,3,64", "window(2,0)", "bf16"], "(1,2,3,64) bf16 window(2,0)"),
            (["(1,2,3,64) fp16 window(-1,1)"], "(1,2,3,64) fp16 window(all,1)"),
        ],
    )
    def test_one_shape(self, arguments, label):
        assert labels(*arguments) == [label]

    def test_the_options_are_for_shapes_that_do_not_say(self):
        found = labels("1,2,3,64", "1,2,4,64 fp16 full", dtype="bf16", causal=True)
        assert found == ["(1,2,3,64) bf16 causal", "(1,2,4,64) fp16 full"]

    @given(problems())
    def test_a_label_is_a_shape(self, problem):
        assert read_shapes([problem.label]) == [problem]
        assert read_shapes(problem.label.split()) == [problem]

    @given(st.lists(problems(), min_size=1, max_size=4, unique=True))
    def test_the_named_form_is_one_too(self, some):
        text = " ".join(map(named, some))
        assert read_shapes([text]) == some
        assert read_shapes(text.lower().split(), dtype="fp32", causal=True) == some

    @given(st.text(st.sampled_from("0123456789,x/=()BHSDKqkv bf16 causal#\t-.²４é"), max_size=40))
    def test_any_text_is_shapes_or_a_problem_error(self, text):
        with contextlib.suppress(ProblemError):
            assert all(isinstance(found, Problem) for found in read_shapes([text]))


class TestWhatDoesNot:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["4,32,4096"], ["'4,32,4096'", "four numbers, not 3", "B=4 H=32 Hkv=8"]),
            (["4x32x4096x128"], ["write commas: 4,32,4096,128"]),
            (["4,32,4k,128"], ["seqlen must be a whole number, not '4k'", "write 4096"]),
            (["4,32,4096," + "9" * 5000], ["head_dim must be 1 to 2147483647"]),
            (["4,32/5,4096,128"], ["heads_kv must divide heads"]),
            (["B=4", "H=32", "S=4096"], ["D (head_dim) is missing"]),
            (["B=4 H=2 S=1 Sq=2 D=64"], ["S sets both Sq and Sk"]),
            (["B=4", "head=32"], ["'head' is no part of a shape", "'heads'"]),
            (["4,32,64,64", "casual"], ["'casual' is no shape", "did you mean 'causal'?"]),
            (["bf16", "4,32,64,64"], ["'bf16' stands before its shape"]),
            (["4,32,64,64 bf16 fp16"], ["'fp16' is the second dtype"]),
            # By its letters bfloat16 is nearest to fp16.
            (["B=1 H=1 S=1 D=64 dtype=bfloat16"], ["did you mean 'bf16'?"]),
            ([], ["no shape"]),
            (["nowhere.csv"], ["nowhere.csv: cannot be read"]),
        ],
    )
    def test_the_answer_says_what_was_read_and_what_fits(self, arguments, words):
        with pytest.raises(ProblemError) as caught:
            read_shapes(arguments)
        for word in words:
            assert word in str(caught.value)

    def test_an_option_is_named(self):
        with pytest.raises(ProblemError, match=r"^--problem 'B=1 H=3 Hkv=2 S=4 D=64': heads_kv"):
            read_shapes(["B=1 H=3 Hkv=2 S=4 D=64"], option="--problem")


class TestCsv:
    def read(self, tmp_path, text, **options):
        path = tmp_path / "shapes.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [problem.label for problem in read_csv(path, **options)]

    def error_of(self, tmp_path, text):
        with pytest.raises(AttnsweepError) as caught:
            self.read(tmp_path, text)
        return str(caught.value).replace(f"{tmp_path}/", "")

    @pytest.mark.parametrize("delimiter", [",", ";", "\t"])
    def test_names_in_any_order(self, tmp_path, delimiter):
        text = "\ufeffhead_dim,Batch,H,Hkv,S,dtype\n64,1,32,8,512,bf16\n\n128,2,4,,1024,\n"
        found = self.read(tmp_path, text.replace(",", delimiter), dtype="fp16", causal=True)
        assert found == ["(1,32/8,512,64) bf16 causal", "(2,4,1024,128) fp16 causal"]

    def test_no_names(self, tmp_path):
        text = '# what we serve\n4,32,4096,128\n4, 32/8, 1x4096, "128", bf16, full # decode\n'
        assert self.read(tmp_path, text) == ["(4,32,4096,128) fp16 full", "(4,32/8,1x4096,128) bf16 full"]

    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("B,H,S,D\n1,2,x,64\n", "shapes.csv:2: seqlen must be a whole number, not 'x'"),
            ("B,H,S,D\n1,2,3\n", "shapes.csv:2: D (head_dim) is missing"),
            ("B,H,S,D\n1,2,3,64,5\n", "shapes.csv:2: 5 cells below 4 names of columns"),
            ("B,head,S,D\n", "shapes.csv:1: unknown column 'head'\n  did you mean 'heads'?"),
            ("", "shapes.csv: holds no shape"),
            ("B,H,S,D\n", "shapes.csv: has names of columns and no row below them"),
            (b"B,H,S,D\n1,2,\xff,64\n", "shapes.csv: not UTF-8"),
        ],
    )
    def test_the_answer_has_the_line(self, tmp_path, text, answer):
        assert self.error_of(tmp_path, text).startswith(answer)

    def test_several_wrong_rows_are_told_at_once(self, tmp_path):
        said = self.error_of(tmp_path, "B,H,S,D\n" + "1,2,3,x\n" * 9 + "1,2,3,64\n")
        assert re.findall(r"shapes.csv:(\d+):", said) == ["2", "3", "4", "5", "6"]
        assert "and 4 more rows like these" in said

    def test_a_csv_stands_among_shapes(self, tmp_path):
        path = tmp_path / "more.CSV"
        path.write_text("4,32,4096,128\n")
        assert labels("1,2,3,64", str(path), "1,2,4,64")[1] == "(4,32,4096,128) fp16 full"


def test_numbers_that_stand_apart_are_joined_in_the_hint():
    with pytest.raises(ProblemError, match="stand together") as caught:
        read_shapes(["4", "32", "4096", "128", "causal"])
    assert "4,32,4096,128" in caught.value.render()
    with pytest.raises(ProblemError, match="a shape has four numbers, not 1"):
        read_shapes(["4", "32"])


HUGE = "(99999,128,131072,128) fp16 full: its tensors need 1,599,984 GiB, and the largest card"


@pytest.mark.parametrize(
    ("command", "where"),
    [
        ("tune 99999,128,131072,128 --dry-run --arch sm_90a", "'99999,128,131072,128'"),
        ("tune huge.csv --dry-run --arch sm_90a", "huge.csv:2"),
        ("run quickstart --dry-run --problem 99999,128,131072,128", "--problem '99999,128,1310"),
        ("run huge.yaml --dry-run", "huge.yaml:2:5"),
    ],
)
def test_a_shape_that_no_card_holds_is_refused_where_it_is_named(attnsweep, tmp_path, monkeypatch, command, where):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "huge.csv").write_text("1,1,1024,64\n99999,128,131072,128\n")
    (tmp_path / "huge.yaml").write_text(
        "problems:\n  - {batch: 99999, heads: 128, seqlen: 131072, head_dim: 128}\nkernels: {naive: {}}\n"
    )
    done = attnsweep(*shlex.split(command), width=1000)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {where}")
    assert f"{HUGE} has 288 GiB\n" in done.stderr
    assert "kernels/" not in done.stderr


def test_a_shape_that_the_largest_card_holds_is_planned(attnsweep):
    done = attnsweep("run", "h100", "--dry-run", "--problem", "1,1,100000000,128", width=1000)
    assert done.returncode == 0, done.stderr
    Problem(1, 1, 1, 2**29, 2**29, 64)


# -- ranges ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("S=1024:65536:*2", [1024 << n for n in range(7)]),
        ("S=1000:9000:*3", [1000, 3000, 9000]),
        ("S=512:1100:256", [512, 768, 1024]),
        ("S=7:7:1", [7]),
    ],
)
def test_a_range_is_a_shape_for_each_size(text, lengths):
    assert [p.seqlen_q for p in read_shapes(["B=1", "H=2", "D=64", text])] == lengths
    size = text.removeprefix("S=")
    problems = read_shapes([f"1,2,{size},64 bf16 causal"])
    assert [p.seqlen_k for p in problems] == lengths
    assert {p.label.partition(") ")[2] for p in problems} == {"bf16 causal"}


def test_ranges_of_several_sizes_are_combined_and_a_file_may_have_them(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("batch,heads,seqlen,head_dim\n1:2:1,8,128:256:*2,64\n")
    sizes = [(p.batch, p.seqlen_q) for p in read_shapes([str(path)])]
    assert sizes == [(1, 128), (1, 256), (2, 128), (2, 256)]
    assert len(read_shapes(["1,2,64:128:*2x256,64"])) == 2


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("1024:4096", "'1024:4096' is no range of seqlen"),
        ("4096:1024:*2", "its first is larger than its last"),
        ("1:8:*1", "a factor is 2 or more"),
        ("1:2000000000:1", "has 2000000000 values; a sweep may have 1000"),
    ],
)
def test_a_range_that_is_none_is_refused_at_once(text, what):
    with pytest.raises(ProblemError, match=re.escape(what)):
        read_shapes([f"1,2,{text},64"])
    with pytest.raises(ProblemError, match="810000 shapes; a sweep may have 1000"):
        read_shapes(["1:900:1,2,1:900:1,64"])
