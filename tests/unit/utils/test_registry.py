"""Names for functions: short ones, a module's, a file's; and what is said when there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightrft.utils.errors import ConfigError
from lightrft.utils.registry import About, Registry, resolve


def double(x: int) -> int:
    """Twice the number.

    And more lines."""
    return 2 * x


@pytest.fixture
def table() -> Registry:
    table: Registry = Registry("shape")
    table.register("double", formula="2x", latex="2x", paper="Euclid")(double)
    return table


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_a_short_name_is_found_and_described(table: Registry) -> None:
    assert table["double"] is double
    assert table.about("double") == About("2x", "2x", "Euclid")
    assert "double" in table
    assert list(table) == ["double"]
    assert len(table) == 1


def test_names_are_listed_in_order(table: Registry) -> None:
    table.register("a")(lambda x: x)
    assert list(table) == ["a", "double"]


def test_a_name_is_given_once(table: Registry) -> None:
    with pytest.raises(ValueError, match="shape 'double' is registered twice"):
        table.register("double")(lambda x: x)
    table.register("double")(double)
    assert table["double"] is double


def test_an_unknown_name_is_met_with_the_nearest_and_all(table: Registry) -> None:
    table.register("halve")(lambda x: x)
    with pytest.raises(ConfigError) as caught:
        table["duoble"]
    assert str(caught.value) == (
        "unknown shape 'duoble'; did you mean 'double'? Known: double, halve; or "
        "package.module:function"
    )
    with pytest.raises(ConfigError, match=r"^unknown shape 'zzz'\. Known: double, halve"):
        table["zzz"]


def test_a_function_of_a_module_is_found_and_described_by_its_docstring(table: Registry) -> None:
    assert table["posixpath:join"]("a", "b") == "a/b"
    assert table.about("posixpath:join").formula.startswith(
        "posixpath:join: Join two or more pathname components"
    )
    assert "posixpath:join" not in table


def test_a_function_of_a_file_is_found_whatever_the_folder(table: Registry, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.py", 'def triple(x):\n    """Three times."""\n    return 3 * x\n')
    assert table[f"{file}:triple"](2) == 6
    assert table.about(f"{file}:triple").formula == f"{file}:triple: Three times."
    assert resolve(f"{file}:triple") is resolve(f"{file}:triple")


@pytest.mark.parametrize("docstring", ["", '    """"""\n', '    """   """\n'])
def test_a_function_without_a_docstring_is_described_by_its_name(
    table: Registry, tmp_path: Path, docstring: str
) -> None:
    file = write(tmp_path / "mute.py", f"def f(x):\n{docstring}    return x\n")
    assert table.about(f"{file}:f").formula == f"{file}:f: no docstring"


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    files = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        files.append(write(tmp_path / str(number) / "same.py", f"def f():\n    return {number}\n"))
    assert [resolve(f"{file}:f")() for file in files] == [1, 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nofunction", "is not of the form package.module:function or file.py:function"),
        (":f", "is not of the form"),
        ("module:", "is not of the form"),
        ("no_such_package.at_all:f", "cannot import no_such_package.at_all"),
        ("posixpath:jion", "posixpath has no 'jion'; did you mean 'join'?"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
    ],
)
def test_what_cannot_be_found_is_said(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(name, "reward")
    assert str(caught.value).startswith(f"reward {name!r}")
    assert message in str(caught.value)


def test_a_name_that_a_file_does_not_have_is_met_with_the_nearest(tmp_path: Path) -> None:
    file = write(tmp_path / "mine2.py", "def triple(x):\n    return x\n")
    with pytest.raises(ConfigError, match="has no 'tripel'; did you mean 'triple'"):
        resolve(f"{file}:tripel")


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('boom')", "1 / 0", "def f(:", "import no_such_package_at_all"]
)
def test_code_that_fails_on_import_is_the_users_to_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    file = write(tmp_path / "broken_on_import.py", f"{body}\n")
    with pytest.raises(ConfigError, match="broken_on_import"):
        resolve(f"{file}:f")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="broken_on_import"):
        resolve("broken_on_import:f")


def test_a_file_that_was_mended_is_read_again(tmp_path: Path) -> None:
    file = write(tmp_path / "mended.py", "1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve(f"{file}:f")
    write(file, "def f():\n    return 'mended'\n")
    assert resolve(f"{file}:f")() == "mended"


def test_a_file_without_a_function_is_answered_with_its_functions(tmp_path):
    file = tmp_path / "rw.py"
    with pytest.raises(ConfigError, match=r"rw\.py:function \(and there is no file"):
        Registry("reward")[str(file)]
    file.write_text(
        "import torch_that_is_not_there\n\ndef _helper(): ...\n\ndef score(r): ...\n\nasync def "
        "judge(r): ...\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"is a file, of which a function must be named: write .*rw\.py:score or .*rw\.py:judge$",
    ):
        Registry("reward")[str(file)]
    file.write_text("def (")
    with pytest.raises(ConfigError, match=r"write .*rw\.py:function$"):
        Registry("reward")[str(file)]
