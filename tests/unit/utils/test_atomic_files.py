"""Files are written whole, and errors of the disk are recognised."""

import errno
import os
from pathlib import Path

import pytest

from lightrft.utils.atomic_files import disk_problem, is_disk_full, path_problem


def test_an_error_that_names_a_file_by_its_number_is_judged_by_its_kind() -> None:
    reading, writing = os.pipe()
    with pytest.raises(NotADirectoryError) as caught:
        os.listdir(reading)  # noqa: PTH208  pathlib takes no number
    os.close(reading)
    os.close(writing)
    assert caught.value.filename == reading
    assert disk_problem(caught.value) == ""
    assert disk_problem(OSError(errno.EIO, "broken", reading)) == os.strerror(errno.EIO)


def test_an_error_that_gives_its_number_in_its_text_alone_is_judged_by_it() -> None:
    full = OSError(f"cannot write (os error {errno.ENOSPC})")
    assert full.errno is None
    assert disk_problem(full) == os.strerror(errno.ENOSPC)
    assert is_disk_full(full)


def test_a_limit_of_the_size_of_files_is_a_disk_without_room() -> None:
    limited = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    assert disk_problem(limited) == os.strerror(errno.EFBIG)
    assert is_disk_full(limited)


def test_a_path_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="File exists") as below:
        (file / "x").parent.mkdir(parents=True, exist_ok=True)
    assert path_problem(below.value) == f"{os.strerror(errno.EEXIST)}: {file}"
    with pytest.raises(OSError, match="directory") as opened:
        tmp_path.read_text()
    assert path_problem(opened.value) == f"{os.strerror(errno.EISDIR)}: {tmp_path}"
    refused = PermissionError(errno.EACCES, "Permission denied", "/x")
    assert path_problem(refused) == f"{os.strerror(errno.EACCES)}: /x"
    # It names no path: a port below 1024, say.
    assert path_problem(PermissionError(errno.EACCES, "Permission denied")) == ""
    assert path_problem(ValueError("File exists: /x")) == ""
