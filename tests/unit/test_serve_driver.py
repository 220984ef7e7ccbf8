"""Launches of a package by a fake driver: what they pass, and how they are remembered and moved."""

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_driver import FakeDriver
from packages import H100, SPLIT, shape, table, winner

from attnsweep.family.family import TensorMap
from attnsweep.serve.runtime import driver as driver_module
from attnsweep.serve.runtime.driver import Device, DriverError, StridedTensor
from attnsweep.serve.runtime.families import WGMMA
from attnsweep.serve.runtime.families import launches as launches_of

TENSORS = dict.fromkeys("qkvo", StridedTensor((1, 4, 256, 64), (65536, 16384, 64, 1)))
POINTERS = {"q": 1 << 20, "k": 2 << 20, "v": 3 << 20, "o": 4 << 20, "lse": 5 << 20}
POINTERS |= {"partial": 6 << 20, "partial_lse": 7 << 20}
NAMES, ADDRESSES = tuple(POINTERS), tuple(POINTERS.values())


def calls(kernel, scale, **options):
    return launches_of(WGMMA, kernel.values, shape(), scale, **options)


def test_a_launch_passes_what_the_template_takes(tmp_path):
    driver = FakeDriver()
    made = table(tmp_path, winner(shape(), SPLIT))
    kernel = made.gpus[H100].winners[0].kernel
    device = Device(made, driver)
    todo = calls(kernel, 0.125, lse=True, strides={"o": (65536, 16384, 64)})
    device.launches(todo, kernel.stages, TENSORS, NAMES).issue(ADDRESSES, 77)
    fwd, join = driver.launches
    assert [m["pointer"] for m in fwd["values"][:4]] == [POINTERS[name] for name in "qkvo"]
    assert fwd["values"][0]["box"] == [64, 64, 1, 1]
    assert fwd["values"][1]["dims"] == [64, 256, 4, 1]
    assert fwd["values"][4:6] == [POINTERS["partial_lse"], POINTERS["partial"]]
    assert fwd["values"][6:11] == [4, 1, 4, 256, 256]
    assert fwd["values"][11] == pytest.approx(0.125 * 1.4426950408889634)
    assert fwd["values"][12:] == [4, 65536, 16384, 64]
    assert join["values"][3] == POINTERS["lse"]
    config = fwd["config"]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (2, 4, 2)
    assert (config.blockDimX, config.hStream) == (384, 77)
    assert config.sharedMemBytes == WGMMA.smem_bytes(kernel.values, shape())
    functions = (fwd["function"][1], join["function"][1])
    assert functions == ("flash_fwd_wgmma", "flash_fwd_wgmma_combine")


@pytest.mark.parametrize(
    ("dims", "box", "passed"),
    [
        ((128, 32, 512, 2), (64, 4, 16, 1), [64, 4, 16, 1]),  # the heads and tokens of a tile, as append_paged_wgmma
        ((64, 512, 2, 32), (64, 64, 2, 1), [64, 64, 1, 1]),  # panels, where the tensor has heads
    ],
)
def test_a_box_has_the_bytes_that_its_kernel_waits_for(tmp_path, dims, box, passed):
    """A kernel never ends that waits for more than a box brings."""
    driver = FakeDriver()
    made = table(tmp_path, winner(shape(), SPLIT))
    kernel = made.gpus[H100].winners[0].kernel
    todo = calls(kernel, 0.125, strides={"o": (65536, 16384, 64)})
    args = [
        replace(arg, dims=dims, box=box) if isinstance(arg, TensorMap) and arg.buffer == "q" else arg
        for arg in todo["fwd"].args
    ]
    todo["fwd"] = replace(todo["fwd"], args=tuple(args))
    tensors = TENSORS | {"q": StridedTensor((2, 512, 32, 128), (2097152, 4096, 128, 1))}
    Device(made, driver).launches(todo, kernel.stages, tensors, NAMES).issue(ADDRESSES, 77)
    assert driver.launches[0]["values"][0]["box"] == passed


def test_a_thread_without_a_context_gets_the_devices(tmp_path, remember):
    driver = FakeDriver()
    made = table(tmp_path, winner(shape()))
    kernel = made.gpus[H100].winners[0].kernel
    device = Device(made, driver, 3)
    todo = calls(kernel, 1.0, strides={"o": (0, 0, 0)})
    launches = device.launches(todo, kernel.stages, TENSORS, NAMES)
    launches.issue(ADDRESSES, 0)
    assert (driver.contexts.current, driver.retained) == (1003, 1)
    with ThreadPoolExecutor(1) as other:
        other.submit(launches.issue, ADDRESSES, 0).result()
    assert (len(driver.launches), driver.retained) == (2, 2)
    with ThreadPoolExecutor(1) as third:  # which meets new addresses, so that maps are made first
        third.submit(launches.issue, elsewhere(1), 0).result()
    assert (len(driver.launches), driver.retained) == (3, 3)
    remember(of_a_kind=2)
    with ThreadPoolExecutor(1) as fourth:  # which moves launches
        fourth.submit(launches.issue, elsewhere(2), 0).result()
    assert (len(driver.launches), driver.retained) == (4, 4)


def elsewhere(number):
    """Addresses of other tensors."""
    return tuple(address + (number << 30) for address in ADDRESSES)


@pytest.fixture
def split(tmp_path, remember):
    """Makes launches of two kernels, of which three are remembered."""
    remember(of_a_kind=3)
    made = table(tmp_path, winner(shape(), SPLIT))
    kernel = made.gpus[H100].winners[0].kernel
    todo = calls(kernel, 0.125, lse=True, strides={"o": (65536, 16384, 64)})
    return lambda driver: Device(made, driver).launches(todo, kernel.stages, TENSORS, NAMES)


def said(launch):
    values = [v | {"pointer": hex(v["pointer"])} if isinstance(v, dict) else v for v in launch["values"]]
    return launch["function"][1], launch["config"], values


class Strange(FakeDriver):
    """Encodes the address in two places of a map, and replaces one."""

    def cuTensorMapEncodeTiled(self, *arguments):
        status, encoded = super().cuTensorMapEncodeTiled(*arguments)
        ctypes.memmove(encoded.getPtr() + 120, struct.pack("=Q", arguments[2]), 8)
        return status, encoded

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        (first,) = struct.unpack("=Q", ctypes.string_at(parameters, 8))
        if not function[1].endswith("_combine"):
            self.second = struct.unpack("=Q", ctypes.string_at(first + 120, 8))
        return super().cuLaunchKernelEx(config, function, parameters, extra)


@pytest.mark.parametrize("how", ["replaces", "refuses", "is strange"])
def test_launches_at_new_addresses_pass_what_those_made_there_would(split, how):
    """They are moved, or encoded anew where replacing an address does not do."""
    driver, fresh = Strange() if how == "is strange" else FakeDriver(), FakeDriver()
    driver.refuses |= {"cuTensorMapReplaceAddress"} if how == "refuses" else set()
    launches = split(driver)
    for number in (*range(8), 7, 6):
        launches.issue(elsewhere(number), 70 + number)
        split(fresh).issue(elsewhere(number), 70 + number)
        assert how != "is strange" or driver.second == elsewhere(number)[:1]
    # One address is another's; then the oldest of what is remembered is met again.
    for addresses in ((*ADDRESSES[:3], 9 << 30, *ADDRESSES[4:]), elsewhere(6)):
        launches.issue(addresses, 0)
        split(fresh).issue(addresses, 0)
    assert list(map(said, driver.launches)) == list(map(said, fresh.launches))
    assert (driver.replaced > 1) == (how == "replaces")


def test_a_map_that_cannot_be_moved_any_more_is_an_error(split):
    driver = FakeDriver()
    launches = split(driver)
    for number in range(4):
        launches.issue(elsewhere(number), 0)
    driver.refuses.add("cuTensorMapReplaceAddress")
    with pytest.raises(DriverError, match="refused the tensor map of q, at 0x"):
        launches.issue(elsewhere(4), 0)
    driver.refuses.clear()
    launches.issue(elsewhere(4), 0)
    assert said(driver.launches[-2])[2][0]["pointer"] == hex(elsewhere(4)[0])


def test_addresses_that_no_map_takes(split):
    driver = FakeDriver()
    launches = split(driver)
    for wrong in (0, ADDRESSES[0] + 8):
        for place in range(3):
            with pytest.raises(driver_module.Unaligned):
                launches.issue((*ADDRESSES[:place], wrong, *ADDRESSES[place + 1 :]), 0)
    assert driver.launches == driver.maps == []


def test_the_bindings_own_types_take_what_a_launch_says(split):
    """All but the calls, which need a GPU."""
    binding = pytest.importorskip("cuda.bindings.driver")
    driver = FakeDriver()
    for name in (
        *("CUlaunchConfig", "CUlaunchAttribute", "CUlaunchAttributeID", "CUfunction_attribute", "CUtensorMap"),
        *("CUstreamCaptureMode", "CUtensorMapDataType", "CUtensorMapInterleave", "CUstream"),
        *("CUtensorMapSwizzle", "CUtensorMapL2promotion", "CUtensorMapFloatOOBfill"),
    ):
        setattr(driver, name, getattr(binding, name))
    launches = split(driver)
    for number in range(4):  # three are made, and one is moved
        launches.issue(elsewhere(number), 77 + number)
    fwd, join = (launch["config"] for launch in driver.launches[:2])
    assert (fwd.gridDimX, fwd.gridDimY, fwd.gridDimZ, fwd.numAttrs) == (2, 4, 2, 0)
    assert join.numAttrs == 1
    assert join.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert [m["pointer"] for m in driver.launches[6]["values"][:4]] == list(elsewhere(3)[:4])
    assert [int(launch["config"].hStream) for launch in driver.launches[6:]] == [80, 80]


@pytest.mark.parametrize(("row", "promotion"), [(64, 3), (72, 2), (128, 3), (80, 2), (32, 3), (24, 2)])
def test_the_l2_fetches_less_at_once_where_rows_begin_within_its_lines(row, promotion, tmp_path):
    driver = FakeDriver()
    made = table(tmp_path, winner(shape()))
    kernel = made.gpus[H100].winners[0].kernel
    apart = TENSORS | {"k": StridedTensor((1, 4, 256, 64), (65536 * row, 256 * row, row, 1))}
    todo = calls(kernel, 1.0, strides={"o": (0, 0, 0)})
    launches = Device(made, driver).launches(todo, kernel.stages, apart, NAMES)
    launches.issue(ADDRESSES, 0)
    (of_k,) = (m for m in driver.maps if m["pointer"] == ADDRESSES[1])
    assert of_k["promotion"] == promotion


class Interrupted(FakeDriver):
    """Lets someone else call in between, before it reads what it shall launch."""

    between = None

    def cuLaunchKernelEx(self, *arguments):
        between, self.between = self.between, None
        if between:
            between()
        return super().cuLaunchKernelEx(*arguments)


def test_launches_in_use_are_not_moved(split):
    """As by a thread that comes between when the driver is called."""
    driver = Interrupted()
    launches = split(driver)
    for number in range(3):
        launches.issue(elsewhere(number), 0)
    for own, other in ((0, 5), (6, 0), (6, 6), (7, 8)):
        driver.launches.clear()
        driver.between = lambda other=other: launches.issue(elsewhere(other), 0)
        launches.issue(elsewhere(own), 0)
        seen = [launch["values"][0] for launch in driver.launches[::2]]
        assert [m["pointer"] for m in seen] == [elsewhere(other)[0], elsewhere(own)[0]]
    # One was in the place of another of the same addresses. And those of the trial.
    assert len(driver.maps) <= (4 + 1) * 4 + 2 * 4
