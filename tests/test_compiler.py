"""What kernels are compiled for: the same as if Triton were asked to launch them. And how its cache knows them."""

from __future__ import annotations

import os
import threading
from importlib.metadata import PathDistribution
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")
from aot import cached_call, cached_calls, calls_of, kernels_and_tensors
from cases import BF16, HALF, spec
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flashtile.backends.compiler import contents_of_wheel, described, instead, target_of
from flashtile.backends.triton.config import choose

CASE = spec((1000, 777), (6, 2), (80, 48), HALF, scale=-0.3, left=300, right=40, softcap=20.0)


def odd(x):
    """The same where no address is a multiple of 16, in memory of more than 2 GB."""
    memory = torch.empty((1 << 32) // x.dtype.itemsize, dtype=x.dtype, device="meta")
    return memory[1:].as_strided(x.shape, x.stride())


def portable(arch, change=lambda x: x):
    for kernel, tensors in kernels_and_tensors(CASE, arch).values():
        changed = [x if x is None else change(x) for x in tensors]
        launch = kernel.describe(CASE, choose(kernel.role, CASE, arch), *changed)
        yield kernel.fn, (*changed, *launch.arguments)


def over_a_cache(arch):
    call = cached_call(spec((1, 1 << 15), (32, 8), (128, 128), BF16, right=0), torch.float8_e4m3fn, page_size=16)
    for launched in cached_calls(call, arch):
        yield launched.fn, launched.arguments


def hopper(arch):
    from flashtile.backends.hopper.launch import FORWARD

    case = spec((1000, 777), (6, 2), (128, 128), BF16)
    q, k = (torch.zeros(case.batch, n, heads, 128, dtype=BF16) for n, heads in ((1000, 6), (777, 2)))
    with mock.patch("flashtile.backends.hopper.launch.programs_on", return_value=132):
        (launched,) = calls_of(FORWARD, case, q, k, k, q, torch.zeros(case.batch, 6, 1000))
    yield launched.fn, launched.arguments


LAUNCHES = {
    "portable, sm_90": ("sm_90", portable),
    "portable, gfx942": ("gfx942", portable),
    "portable, odd addresses": ("gfx942", lambda arch: portable(arch, odd)),
    "over a cache, sm_90": ("sm_90", over_a_cache),
    "over a cache, gfx942": ("gfx942", over_a_cache),
    "hopper": ("sm_90", hopper),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_kernel_is_compiled_for_what_triton_itself_makes_of_its_arguments(name):
    arch, launches = LAUNCHES[name]
    for fn, arguments in launches(arch):
        backend = make_backend(target_of(arch))
        bound, found, _ = create_function_from_signature(fn.signature, fn.params, backend)(*arguments)
        _, signature, constants, attributes = fn._pack_args(backend, {}, bound, found, {})
        source = described(fn, arguments, arch).source
        assert source.signature == signature
        assert source.constants == constants
        assert source.attrs == {at: promised for at, promised in attributes.items() if promised}


def install(place: Path, contents: str = "compiles") -> tuple[Path, PathDistribution]:
    """A package in `place`, as a wheel's installer leaves it, and what is known of it."""
    package, info = place / "package", place / "package-1.0.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "compiler.py").write_text(contents)
    record = f"package/compiler.py,sha256={contents.encode().hex()},{len(contents)}\n../bin/tool,sha256=1,1\n"
    (info / "RECORD").write_text(record + "package-1.0.dist-info/RECORD,,\n")
    return package, PathDistribution(info)


def test_a_package_is_known_by_what_its_wheel_holds_wherever_it_lies(tmp_path):
    package, wheel = install(tmp_path / "one")
    elsewhere, same_wheel = install(tmp_path / "two")
    later, later_wheel = install(tmp_path / "three", "compiles better")
    contents = contents_of_wheel(wheel, package)
    assert contents is not None
    assert contents_of_wheel(same_wheel, elsewhere) == contents
    assert contents_of_wheel(later_wheel, later) not in (contents, None)


def longer(package):
    (package / "compiler.py").write_text("compiles otherwise")


def newer(package):
    written = (package.parent / "package-1.0.dist-info/RECORD").stat().st_mtime_ns
    os.utime(package / "compiler.py", ns=(written + 1, written + 1))


def without_a_record(package):
    (package.parent / "package-1.0.dist-info/RECORD").unlink()


def without_a_file(package):
    (package / "compiler.py").unlink()


def without_a_size(package):
    record = package.parent / "package-1.0.dist-info/RECORD"
    record.write_text(record.read_text().replace(",8\n", ",\n"))


@pytest.mark.parametrize("changed", [longer, newer, without_a_record, without_a_file, without_a_size])
def test_a_package_that_is_not_as_its_wheel_says_is_not_known_by_it(tmp_path, changed):
    package, wheel = install(tmp_path)
    changed(package)
    assert contents_of_wheel(wheel, package) is None


def test_a_package_that_lies_elsewhere_is_not_known_by_a_wheel(tmp_path):
    _, wheel = install(tmp_path / "installed")
    package, _ = install(tmp_path / "source")
    assert contents_of_wheel(wheel, package) is None


def test_a_function_is_another_in_one_thread_alone():
    module = SimpleNamespace(key=lambda: "theirs")
    theirs, elsewhere = module.key, []
    with instead(module, "key", lambda: "ours"):
        thread = threading.Thread(target=lambda: elsewhere.append(module.key()))
        thread.start()
        thread.join()
        assert module.key() == "ours"
    assert elsewhere == ["theirs"]
    assert module.key is theirs
