"""Files are written whole, and errors of the disk are recognised."""

import errno
import os

import pytest

from lightrft.utils.atomic_files import disk_problem, is_disk_full


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
