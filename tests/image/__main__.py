"""Build both container images without a Docker daemon, and use them: `make image`. Needs root, buildah, debootstrap.

    python -m tests.image [--keep]

Each Dockerfile in ``deploy/`` is built as it is, by ``buildah`` in a chroot. A base image that its registry does not
give is replaced by a stand-in of the same name: Debian by ``debootstrap`` with this Python in ``/usr/local``, for
TensorRT-LLM's with the package that ``tests/fakes`` has. The images then start as their user: the router's image a
whole pool, which answers a request and ends in order; the worker's image its engine arguments. All of it is in
``build/image`` and removed at the end. The exit status is 1 when an image does not do that, 2 when it cannot be built.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "image"
TOOLS = ("buildah", "debootstrap")
DEBIAN = ("bookworm", "http://deb.debian.org/debian")
LIBRARIES = "ca-certificates,libsqlite3-0,libffi8,libssl3,libreadline8,libbz2-1.0,liblzma5,zlib1g,libexpat1,libuuid1"
"""What an interpreter that was built from source is linked to."""

PYTHON = "docker.io/library/python:3.13-slim"
TRTLLM = "nvcr.io/nvidia/tensorrt-llm/release:1.2.1"
BUILD_TIMEOUT_S, START_TIMEOUT_S = 3600, 180
PIP = {"index-url": "PIP_INDEX_URL", "cert": "PIP_CERT", "timeout": "PIP_DEFAULT_TIMEOUT"}
"""Settings of pip by the variables that this machine has; the build gets them too."""


def buildah(command: str, *words: str, timeout_s: float = BUILD_TIMEOUT_S) -> str:
    """Run one command of buildah in a storage of its own; return its output, or raise ``CalledProcessError``."""
    return subprocess.run(_line(command, *words), check=True, text=True, capture_output=True, timeout=timeout_s).stdout


def _line(command: str, *words: str) -> list[str]:
    own = ["--root", str(PLACE / "storage"), "--runroot", str(PLACE / "run"), "--storage-driver", "vfs"]
    return ["buildah", *own, command, *words]


def base(name: str) -> str:
    """Have a base image; return where it came from."""
    try:
        buildah("pull", "--quiet", name, timeout_s=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        _stand_in(name)
        return "stand-in"
    return "registry"


def _stand_in(name: str) -> None:
    root = PLACE / "debian"
    if not root.exists():
        subprocess.run(["debootstrap", "--variant=minbase", f"--include={LIBRARIES}", DEBIAN[0], str(root), DEBIAN[1]],
                       check=True, stdout=subprocess.DEVNULL, timeout=BUILD_TIMEOUT_S)  # fmt: skip
        _install_python(root / "usr" / "local")
    container = buildah("from", "scratch").strip()
    buildah("add", "--quiet", container, str(root), "/")
    if name == TRTLLM:
        packages = f"/usr/local/lib/python{sysconfig.get_python_version()}/site-packages"
        buildah("add", "--quiet", container, str(ROOT / "tests" / "fakes" / "tensorrt_llm"), f"{packages}/tensorrt_llm")
    buildah("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", container)
    buildah("commit", "--quiet", "--rm", container, name)


def _install_python(into: Path) -> None:
    """Copy this interpreter, its standard library and its pip, as images of Python have them."""
    version = sysconfig.get_python_version()
    prefix, library = Path(sys.base_prefix), Path(sysconfig.get_path("stdlib"))
    leave = shutil.ignore_patterns("site-packages", "test", "__pycache__", "config-*", "*.a")
    shutil.copytree(library, into / "lib" / library.name, symlinks=True, ignore=leave)
    own = into / "lib" / library.name / "site-packages"
    for each in (library / "site-packages").glob("pip*"):
        shutil.copytree(each, own / each.name)
    for shared in (prefix / "lib").glob(f"libpython{version}.so*"):
        shutil.copy2(shared, into / "lib", follow_symlinks=False)
    (into / "bin").mkdir(exist_ok=True)
    shutil.copy2(prefix / "bin" / f"python{version}", into / "bin")
    for other in ("python3", "python"):
        (into / "bin" / other).symlink_to(f"python{version}")
    pip = into / "bin" / "pip"
    pip.write_text('#!/bin/sh\nexec /usr/local/bin/python3 -m pip "$@"\n')
    pip.chmod(0o755)
    subprocess.run(["chroot", str(into.parents[1]), "/sbin/ldconfig"], check=True)


def build(dockerfile: str, image: str) -> None:
    """Build one Dockerfile as it is committed; the way to the package index, and nothing else, is this machine's."""
    reach = PLACE / "pip.conf"
    given = [f"{name} = {os.environ[variable]}\n" for name, variable in PIP.items() if variable in os.environ]
    reach.write_text("".join(["[global]\n", *given]))
    volumes = {Path("/etc/ssl/certs"): "/etc/ssl/certs", reach: "/etc/pip.conf"}
    mounts = [word for place, there in volumes.items() for word in ("--volume", f"{place}:{there}:ro")]
    words = ["--isolation", "chroot", "--pull-never", *mounts, "-f", str(ROOT / "deploy" / dockerfile), "-t", image]
    subprocess.run(_line("bud", *words, str(ROOT)), check=True, timeout=BUILD_TIMEOUT_S)


class Container:
    """A container of an image, whose commands run as its user."""

    def __init__(self, image: str) -> None:
        self._name = buildah("from", "--pull-never", image).strip()
        self.configuration = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]["config"]

    def line(self, *words: str) -> list[str]:
        return _line("run", "--isolation", "chroot", self._name, "--", *self.configuration["Entrypoint"], *words)

    def output(self, *words: str) -> str:
        return subprocess.run(self.line(*words), check=True, text=True, capture_output=True, timeout=120).stdout


def check_router(image: str) -> list[str]:
    """Start a pool in the image, ask it once, and end it; return what is wrong."""
    container = Container(image)
    problems = [] if container.configuration["User"] == "10001" else ["the image's user is not 10001"]
    line = container.line("up", "--workers", "1", "--port", "0", "--data-dir", "/data")
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as pool:
        assert pool.stdout is not None
        word, _, url = pool.stdout.readline().strip().partition(" ")
        if word != "ready":
            return [*problems, f"the pool did not start: {word} {url}"]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        if answer.status_code != 200:
            problems.append(f"a completion got {answer.status_code}: {answer.text}")
        _signal_children(pool.pid)
        status = pool.wait(60)
        if status:
            problems.append(f"the pool ended with status {status}")
    return problems


def _signal_children(pid: int) -> None:
    """Signal `poolgrid up` itself, as a container runtime does with the first process."""
    import psutil

    for each in psutil.Process(pid).children(recursive=True):
        if "up" in each.cmdline() and "buildah" not in each.name():
            each.send_signal(signal.SIGTERM)
            return


def check_worker(image: str) -> list[str]:
    """Ask the worker's image for its engine arguments, and whether the base's own package is what it imports."""
    container = Container(image)
    words = ("worker", "--engine", "trtllm", "--model-path", "m", "--tensor-parallel-size", "4", "--print-engine-args")
    found = container.output(*words)
    return [] if "tensor_parallel_size: 4" in found else [f"its engine arguments are {found[-500:]!r}"]


def main(arguments: Sequence[str]) -> int:
    """Build and use both images; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.image", description="Both images, without a daemon.")
    parser.add_argument("--keep", action="store_true", help="keep images and stand-ins in build/image")
    options = parser.parse_args(arguments)
    missing = [each for each in TOOLS if shutil.which(each) is None]
    if missing:
        sys.stderr.write(f"{', '.join(missing)} not found: apt-get install {' '.join(TOOLS)}\n")
        return 2
    PLACE.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    try:
        for name, dockerfile, image, check in (
            (PYTHON, "Dockerfile", "poolgrid", check_router),
            (TRTLLM, "Dockerfile.trtllm", "poolgrid-trtllm", check_worker),
        ):
            began = time.monotonic()
            source = base(name)
            build(dockerfile, image)
            found = [f"{image}: {each}" for each in check(image)]
            problems += found
            said = f"{len(found)} problems" if found else "works"
            sys.stdout.write(f"{image}: base {name} ({source}), {time.monotonic() - began:.0f} s: {said}\n")
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{error}\n{getattr(error, 'stderr', '') or ''}")
        return 2
    finally:
        if not options.keep:
            subprocess.run(_line("rm", "--all"), check=False, capture_output=True)
            shutil.rmtree(PLACE, ignore_errors=True)
    for each in problems:
        sys.stdout.write(f"{each}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
