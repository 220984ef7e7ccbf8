"""Which cards `--gpus` means."""

import sys
from types import SimpleNamespace

import pytest

from attnsweep.core.errors import NoGpuError, SpecError
from attnsweep.device import cards
from attnsweep.device.cards import InstalledCard, chosen, installed

A, B, C = "GPU-aaaa1111-2222", "GPU-aabb1111-2222", "GPU-cccc1111-2222"
THERE = [InstalledCard(n, uuid, "NVIDIA H200") for n, uuid in enumerate((A, B, C))]


def numbers(text, there=THERE):
    return [card.number for card in chosen(text, there)]


@pytest.mark.parametrize(
    ("text", "found"),
    [("all", [0, 1, 2]), ("0,2", [0, 2]), (" 2 , 0 ", [2, 0]), (B, [1]), ("GPU-cccc", [2]), ("gpu-AAAA,1", [0, 1])],
)
def test_cards_are_named_by_number_or_uuid(text, found):
    assert numbers(text) == found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3", "'3' is no card"),
        ("GPU-aa", "'GPU-aa' is the beginning of several cards"),
        ("0,0", "'0' names a card again"),
        (f"0,{A}", "names a card again"),
        ("", "'' is no card"),
        ("-1", "'-1' is no card"),
        ("MIG-1234", "a part of a card"),
    ],
)
def test_anything_else_is_refused_with_the_cards_that_are_there(text, why):
    with pytest.raises(SpecError) as caught:
        chosen(text, THERE)
    assert why in caught.value.what
    assert "card 1, NVIDIA H200 (GPU-aabb1111)" in caught.value.hint


def test_cards_of_several_kinds_are_refused_by_name():
    mixed = [*THERE, InstalledCard(3, "GPU-dddd", "NVIDIA A100")]
    with pytest.raises(SpecError) as caught:
        chosen("all", mixed)
    assert "several kinds" in caught.value.what
    assert "card 3, NVIDIA A100" in caught.value.hint
    assert numbers("3", mixed) == [3]


def test_no_card_is_another_error(monkeypatch):
    monkeypatch.setenv(cards.VISIBLE, "")
    with pytest.raises(NoGpuError, match="no card is visible here"):
        chosen("all", [])


class Error(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch):
    names = {A: "NVIDIA H200", B: b"NVIDIA H200", C: "NVIDIA H200"}
    library = SimpleNamespace(
        NVMLError=Error,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda number: list(names)[number],
        nvmlDeviceGetUUID=lambda card: card,
        nvmlDeviceGetName=lambda card: names[card],
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv(cards.VISIBLE, raising=False)
    return library


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [A, B, C]),
        ("2,0", [C, A]),
        ("GPU-cccc,GPU-aaaa", [C, A]),
        ("0,7,1", [A]),  # as CUDA: what follows an unknown one is not there
        ("", []),
        ("-1", []),
    ],
)
def test_only_visible_cards_count_in_their_order(nvml, monkeypatch, visible, found):
    if visible is not None:
        monkeypatch.setenv(cards.VISIBLE, visible)
    there = installed()
    assert [card.uuid for card in there] == found
    assert [card.number for card in there] == list(range(len(found)))
    assert {card.name for card in there} <= {"NVIDIA H200"}


def test_a_driver_that_fails_is_no_gpu(nvml, monkeypatch):
    def fail():
        raise Error("driver not loaded")

    nvml.nvmlInit = fail
    with pytest.raises(NoGpuError, match="driver not loaded"):
        installed()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoGpuError, match="--gpus needs nvidia-ml-py"):
        installed()
