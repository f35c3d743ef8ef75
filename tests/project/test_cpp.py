"""cnorm.hpp: objects that were moved from, and errors."""

import subprocess
import sys
from pathlib import Path

import pytest

import cnorm

ROOT = Path(__file__).parents[2]
PROGRAM = r"""
#include <cnorm.hpp>
#include <cassert>
#include <fstream>
#include <iterator>
#include <type_traits>

template <class F> cnorm_status status_of(F f)
{
    try {
        f();
    } catch (const cnorm::error &error) {
        return error.status;
    }
    return CNORM_OK;
}

int main(int, char **arguments)
{
    static_assert(std::is_nothrow_move_constructible_v<cnorm::stream>);
    static_assert(std::is_nothrow_move_assignable_v<cnorm::stream>);
    static_assert(!std::is_copy_constructible_v<cnorm::stream>);
    float x[12] = {1}, y[9] = {0}, expected[9];
    cnorm::model model = cnorm::model::map(arguments[1]);
    cnorm::stream whole(model), first(model);
    whole.step(x, expected);
    whole.step(x, expected);
    first.step(x, y);
    cnorm::stream second = std::move(first);
    const auto use = [&] { first.step(x, y); };
    const auto save = [&] { (void)first.save(); };
    const auto restore = [&] { first.restore(x, sizeof x); };
    assert(status_of(use) == CNORM_ERROR_NULL && status_of(save) == CNORM_ERROR_NULL);
    assert(status_of(restore) == CNORM_ERROR_NULL);
    first.reset();
    const cnorm::model other = std::move(model);
    assert(model.inputs() == 12 && other.inputs() == 12);
    second.step(x, y);
    for (int i = 0; i < 9; ++i) assert(y[i] == expected[i]);
    first = std::move(second);
    first.reset();
    first.step(x, y);
    assert(first.frames() == 1 && status_of([&] { second.step(x, y); }) == CNORM_ERROR_NULL);
    for (const char *path : {"/", "/no such file"}) {
        try {
            (void)cnorm::model::map(path);
            assert(false);
        } catch (const std::system_error &error) {
            assert(error.code() == (path[1] ? std::errc::no_such_file_or_directory : std::errc::is_a_directory));
        }
    }
    assert(status_of([&] { (void)cnorm::model::map(arguments[0]); }) == CNORM_ERROR_FORMAT);
    std::ifstream file(arguments[1], std::ios::binary);
    std::vector<char> bytes(1, 0); // so that the model lies at an odd address
    bytes.insert(bytes.end(), std::istreambuf_iterator<char>(file), {});
    const char *odd = bytes.data() + 1;
    const auto size = static_cast<std::ptrdiff_t>(bytes.size() - 1);
    assert(status_of([&] { (void)cnorm::model::of(odd, size); }) == CNORM_ERROR_ALIGN);
    assert(status_of([&] { (void)cnorm::model::copy(odd, size - 1); }) == CNORM_ERROR_DAMAGED);
    assert(status_of([&] { (void)cnorm::model::copy(nullptr, 0); }) != CNORM_OK);
    cnorm::stream of_copy(cnorm::model::copy(odd, size));
    bytes.assign(bytes.size(), 0);
    of_copy.step(x, y);
    of_copy.step(x, y);
    for (int i = 0; i < 9; ++i) assert(y[i] == expected[i]);
}
"""


@pytest.mark.parametrize("flags", [[], ["-fsanitize=address,undefined"]], ids=["plain", "sanitized"])
def test_moved_streams_and_errors(flags, tmp_path):
    objects = sorted((ROOT / "build" / f"cp{sys.version_info.major}{sys.version_info.minor}" / "src").rglob("*.o"))
    assert objects, "build the project first"
    cnorm.demo_model().save_packed(tmp_path / "demo.cnorm")
    (tmp_path / "program.cpp").write_text(PROGRAM)
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", *flags]
    command += [f"-I{ROOT / 'src' / 'include'}", tmp_path / "program.cpp", *objects, "-lm", "-o", tmp_path / "program"]
    subprocess.run(command, check=True)
    subprocess.run([tmp_path / "program", tmp_path / "demo.cnorm"], check=True)
