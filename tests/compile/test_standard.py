"""The headers of the C++ standard library that NVRTC gets from us: they are there, and are right."""

import subprocess

import pytest

from attnsweep.compile import nvrtc
from attnsweep.compile.nvrtc import STANDARD, Compiler
from attnsweep.core.errors import CompileError
from attnsweep.core.hardware import ARCHS
from attnsweep.tools.simulator import COMPILER

HEADERS = sorted(path.name for path in STANDARD.iterdir() if path.suffix != ".md")
# What each compiler says of the same lines: g++ has a standard library of its own.
FACTS = r"""
#define SAME(...) static_assert(std::is_same_v<__VA_ARGS__>, "")
enum Short : short { FIRST };
struct Base { int x; };
struct Derived : Base {};
SAME(uint32_t, unsigned);
SAME(std::uint8_t, unsigned char);
SAME(int_least16_t, short);
SAME(std::size_t, size_t);
static_assert(sizeof(int64_t) == 8 && sizeof(uintptr_t) == 8 && sizeof(intmax_t) == 8 && sizeof(int_fast8_t) == 1, "");
static_assert(INT8_MIN == -128 && UINT16_MAX == 65535 && INT64_MIN < 0 && UINT64_MAX == ~0ull && SIZE_MAX == ~0ul, "");
static_assert(CHAR_BIT == 8 && INT_MAX == 2147483647 && LONG_MIN < -9223372036854775807l, "");
static_assert(offsetof(Base, x) == 0, "");
SAME(std::remove_cv_t<const volatile int>, int);
SAME(std::remove_reference_t<int&&>, int);
SAME(std::remove_pointer_t<int*>, int);
SAME(std::remove_extent_t<int[3]>, int);
SAME(std::decay_t<int[3]>, int*);
SAME(std::decay_t<const float&>, float);
SAME(std::decay_t<int(float)>, int (*)(float));
SAME(std::conditional_t<true, int, float>, int);
SAME(std::conditional_t<false, int, float>, float);
SAME(std::enable_if_t<true, int>, int);
SAME(std::underlying_type_t<Short>, short);
SAME(std::make_unsigned_t<int>, unsigned);
SAME(std::make_signed_t<unsigned char>, signed char);
SAME(std::add_pointer_t<int&>, int*);
static_assert(std::is_integral_v<const int> && std::is_integral_v<bool> && !std::is_integral_v<float>, "");
static_assert(std::is_floating_point_v<float> && !std::is_floating_point_v<int>, "");
static_assert(std::is_signed_v<int> && std::is_signed_v<float> && !std::is_signed_v<Base>, "");
static_assert(std::is_unsigned_v<unsigned> && std::is_unsigned_v<bool> && !std::is_unsigned_v<int>, "");
static_assert(std::is_enum_v<Short> && std::is_class_v<Base> && !std::is_class_v<Short>, "");
static_assert(std::is_base_of_v<Base, Derived> && !std::is_base_of_v<Derived, Base>, "");
static_assert(std::is_convertible_v<int, float> && !std::is_convertible_v<Base, int>, "");
static_assert(std::is_trivially_copyable_v<Base> && std::is_constructible_v<int, float>, "");
static_assert(std::is_pointer_v<int* const> && !std::is_pointer_v<int> && std::is_array_v<int[2]>, "");
static_assert(std::is_reference_v<int&> && std::is_const_v<const int> && std::is_void_v<void>, "");
static_assert(std::numeric_limits<float>::max() == FLT_MAX && std::numeric_limits<float>::lowest() == -FLT_MAX, "");
static_assert(std::numeric_limits<float>::infinity() > FLT_MAX, "");
static_assert(std::numeric_limits<float>::quiet_NaN() != std::numeric_limits<float>::quiet_NaN(), "");
static_assert(std::numeric_limits<double>::epsilon() == DBL_EPSILON && DBL_EPSILON == 0x1p-52, "");
static_assert(FLT_EPSILON == 0x1p-23f && FLT_MIN == 0x1p-126f && DBL_MIN == 0x1p-1022, "");
static_assert(FLT_MAX == 0x1.fffffep127f && DBL_MAX == 0x1.fffffffffffffp1023, "");
static_assert(std::numeric_limits<int>::min() == INT_MIN && std::numeric_limits<uint64_t>::max() == UINT64_MAX, "");
static_assert(std::numeric_limits<int>::digits10 == 9 && std::numeric_limits<unsigned long long>::digits10 == 19, "");
static_assert(std::numeric_limits<char>::digits10 == 2 && std::numeric_limits<short>::digits10 == 4, "");
static_assert(std::numeric_limits<long long>::digits10 == 18 && std::numeric_limits<double>::digits == 53, "");
extern "C" __global__ void facts(float* p, std::nullptr_t) {
    assert(p != NULL);
    p[0] = std::sqrt(p[1]) + sqrtf(p[2]) + INFINITY + NAN + float(M_PI) + std::fabs(p[3]) + std::exp(p[4]) + HUGE_VALF;
    SAME(decltype(std::sqrt(1.f)), float);
    if (std::isnan(p[5]) || std::isinf(p[0])) p[6] = FLT_MAX;
    static_assert(std::true_type()() && !std::false_type::value, "");
}
"""
INCLUDES = "".join(f"#include <{name}>\n" for name in HEADERS)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Compiles a text where neither the toolkit nor CCCL is installed."""
    monkeypatch.setattr(nvrtc, "installed_headers", lambda: (STANDARD,))

    def compiled(text):
        (tmp_path / "f.cu").write_text(text)
        return Compiler(ARCHS["sm_90a"], tmp_path / "cache", threads=1).compile(tmp_path / "f.cu", {})

    return compiled


@pytest.mark.parametrize("name", HEADERS)
def test_each_header_is_found_and_stands_alone(compiled, name):
    """They were `cannot open source file`, with the hint to name a directory of theirs."""
    assert compiled(f'#include <{name}>\nextern "C" __global__ void f() {{}}\n').digest


def test_what_they_say_is_right(compiled):
    assert compiled(INCLUDES + FACTS).digest


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
def test_the_standard_library_of_the_host_says_the_same(tmp_path):
    (tmp_path / "facts.cpp").write_text(f"#define __global__\n{INCLUDES}{FACTS}")
    subprocess.run([COMPILER, "-std=c++17", "-fsyntax-only", tmp_path / "facts.cpp"], check=True)


def test_a_change_of_one_is_a_change_of_the_code(compiled, tmp_path, monkeypatch):
    first = compiled('#include <limits.h>\nextern "C" __global__ void f(int* p) { *p = INT_MAX; }\n')
    other = tmp_path / "std"
    other.mkdir()
    for name in ("limits.h", "climits"):
        (other / name).write_text((STANDARD / name).read_text().replace("2147483647", "7"))
    monkeypatch.setattr(nvrtc, "installed_headers", lambda: (other,))
    again = compiled((tmp_path / "f.cu").read_text())
    assert not again.cached
    assert again.digest != first.digest


@pytest.mark.parametrize(("name", "of"), [("array", "array"), ("string.h", "cstring"), ("stdio.h", "cstdio")])
def test_another_one_is_named_as_cccl_has_it(compiled, name, of):
    with pytest.raises(CompileError, match=rf"write <cuda/std/{of}>, of CCCL: pip install nvidia-cuda-cccl"):
        compiled(f'#include <{name}>\nextern "C" __global__ void f() {{}}\n')
