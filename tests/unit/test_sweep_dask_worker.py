"""What a worker of a cluster makes of the lines that come to it; no Dask is needed for that."""

import base64
import hashlib

import pytest

from attnsweep.core.files import shipped
from attnsweep.sweep.dask_worker import Carrier, digest_of, texts_of

CODE = b"\x7fELF machine code"


@pytest.fixture
def carrier(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNSWEEP_CACHE_DIR", str(tmp_path / "cache"))
    return Carrier(tmp_path / "job", lambda message: None)


def cubin(code=CODE, of=CODE):
    """The message that brings machine code."""
    digest = hashlib.sha256(of).hexdigest()
    return {"do": "cubin", "data": base64.b64encode(code).decode(), "digest": digest}


def opening(texts):
    """The message that brings kernels."""
    known = digest_of(texts_of(shipped("kernels")))
    return {"do": "open", "shipped": known, "texts": {"0": texts}, "text": "", "families": {}}


def test_machine_code_is_kept_by_its_content(carrier):
    first, again = cubin(), cubin()
    assert carrier.here(first) is None
    assert carrier.here(again) is None
    assert first["path"] == again["path"]
    with open(first["path"], "rb") as file:
        assert file.read() == CODE
    other = cubin(b"other", b"other")
    assert carrier.here(other) is None
    assert other["path"] != first["path"]


def test_machine_code_that_was_damaged_on_disk_is_written_again(carrier):
    """As by a disk that was full: the next sweep would have loaded what is left of it."""
    message = cubin()
    carrier.here(message)
    with open(message["path"], "wb") as file:
        file.write(CODE[:4])
    again = cubin()
    assert carrier.here(again) is None
    with open(again["path"], "rb") as file:
        assert file.read() == CODE


def test_machine_code_that_arrives_damaged_is_not_kept(carrier, tmp_path):
    assert carrier.here(cubin(CODE[:4])) == "machine code arrived damaged"
    assert not list(tmp_path.rglob("*.cubin"))


def test_kernels_are_written_below_the_job_and_nowhere_else(carrier, tmp_path):
    (tmp_path / "job").mkdir()
    assert carrier.here(opening({"a/b.cu": "text"})) is None
    assert (tmp_path / "job/0/a/b.cu").read_text() == "text"
    assert "leads elsewhere" in carrier.here(opening({"../../out.cu": "text"}))
    assert not (tmp_path / "out.cu").exists()
