"""From the pin to a patched llama.cpp source tree, and back from a checkout to patches.

    source.py prepare DEST [--unpatched]   clean pin (+ series) -> DEST, touching only files that changed
    source.py digest                       one line that changes when pin or patches do
    source.py describe                     pin, digest and patches as JSON; CMake fills in the build type
    source.py converter OUT.zip            llama.cpp's Hugging Face converter, which `convert` runs
    source.py checkout DEST                a git repository: the pin, then one commit per patch
    source.py refresh DEST                 that repository's commits -> patches/*.patch and series
    source.py check                        the series is whole, within budget, and applies to the pin

The archive is fetched with pip, once, into the user's cache folder. SPECULOE_LLAMA_SOURCE names an
archive, or a folder that holds one or an unpacked tree, for builds without a network.
Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_PATCHES, MAX_LINES = 5, 300
TRAILERS = ("Why", "Reason", "Upstream", "Remove-when", "Hook", "Test")
# What a build of the libraries reads; the rest of the archive (tests, models, UI) stays packed.
PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "ggml", "include", "src", "vendor")
# What its converter reads. The `gguf` package beside it knows architectures that no release does yet.
CONVERTER = (
    "LICENSE",
    "convert_hf_to_gguf.py",
    "conversion/",
    "gguf-py/gguf/",
    "models/templates/",
)
FORMAT_PATCH = [
    "-c",
    "diff.renames=true",
    "format-patch",
    "-q",
    "--zero-commit",
    "--no-signature",
    "--no-numbered",
    "--keep-subject",
    "--no-stat",
    "--full-index",
]


class SourceTreeError(Exception):
    """One line for the person who builds."""


def read_pin() -> dict[str, str]:
    lines = (line.split("#")[0] for line in (HERE / "PIN").read_text().splitlines())
    return {key.strip(): value.strip() for key, value in (s.split("=") for s in lines if "=" in s)}


def series() -> list[Path]:
    lines = (line.split("#")[0].strip() for line in (HERE / "series").read_text().splitlines())
    return [HERE / name for name in lines if name]


def digest(patched: bool = True) -> str:
    """sha256 over the pin and, in order, the patches."""
    state = hashlib.sha256((HERE / "PIN").read_bytes())
    for patch in series() if patched else ():
        state.update(patch.name.encode() + patch.read_bytes())
    return state.hexdigest()[:16]


def describe() -> str:
    pin = read_pin()
    names = [patch.stem for patch in series()]
    facts = {
        "package": pin["package"],
        "version": pin["version"],
        "digest": digest(),
        "patches": names,
    }
    return json.dumps(facts | {"build_type": "@CMAKE_BUILD_TYPE@"})


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "speculoe-local" / "source"


def archive() -> Path:
    """The pinned source distribution, from SPECULOE_LLAMA_SOURCE, the cache, or pip."""
    pin = read_pin()
    name = f"{pin['package'].replace('-', '_')}-{pin['version']}.tar.gz"
    given = os.environ.get("SPECULOE_LLAMA_SOURCE")
    path = Path(given) if given else cache_folder() / name
    if path.is_dir():
        path = path / name
    if not path.exists():
        if given:
            raise SourceTreeError(
                f"SPECULOE_LLAMA_SOURCE: no {name} at {path}; put it there or unset it"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            print(f"fetching {name} (76 MB)", file=sys.stderr, flush=True)
            run(
                sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:",
                "-d", scratch, f"{pin['package']}=={pin['version']}",
            )  # fmt: skip
            os.replace(Path(scratch) / name, path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != pin["sha256"]:
        raise SourceTreeError(
            f"{path}: sha256 is {found}, the pin says {pin['sha256']}; delete it and retry"
        )
    return path


def unpack(into: Path) -> None:
    """The needed parts of vendor/llama.cpp, straight into `into`."""
    given = os.environ.get("SPECULOE_LLAMA_SOURCE")
    if given and (Path(given) / "src" / "llama-graph.cpp").exists():
        for part in PARTS:
            source = Path(given) / part
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, into / part)
        return
    with tarfile.open(archive()) as tar:
        for member in tar:
            _, _, inner = member.name.partition("/vendor/llama.cpp/")
            if inner.split("/")[0] in PARTS and (member.isfile() or member.isdir()):
                member.name = inner
                tar.extract(member, into, set_attrs=False)


def converter(dest: Path) -> str:
    """llama.cpp's converter as one file `dest`, which the libraries' folder can carry."""
    wanted = f"{read_pin()['sha256']} {' '.join(CONVERTER)}".encode()
    if dest.exists() and zipfile.ZipFile(dest).comment == wanted:
        return f"{dest}: as it was"
    dest.parent.mkdir(parents=True, exist_ok=True)
    fresh = dest.with_name(f".{dest.name}.{os.getpid()}")
    with zipfile.ZipFile(fresh, "w", zipfile.ZIP_DEFLATED) as out:
        for name, content in sorted(converter_files()):
            out.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        out.comment = wanted
    os.replace(fresh, dest)
    return f"{dest}: {dest.stat().st_size} bytes"


def converter_files() -> Iterator[tuple[str, bytes]]:
    given = os.environ.get("SPECULOE_LLAMA_SOURCE")
    if given and (Path(given) / "src" / "llama-graph.cpp").exists():
        for path in Path(given).rglob("*"):
            name = path.relative_to(given).as_posix()
            if name.startswith(CONVERTER) and path.is_file() and "__pycache__" not in name:
                yield name, path.read_bytes()
        return
    with tarfile.open(archive()) as tar:
        for member in tar:
            _, _, name = member.name.partition("/vendor/llama.cpp/")
            file = tar.extractfile(member) if name.startswith(CONVERTER) else None
            if file is not None:
                yield name, file.read()


def run(*command: str, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise SourceTreeError(f"`{' '.join(command[:6])} ...` failed: {last}")
    return done.stdout


def apply_series(tree: Path) -> None:
    for patch in series():
        # The ceiling keeps git from finding a repository around `tree` and skipping every file.
        run("git", "apply", str(patch), cwd=tree, GIT_CEILING_DIRECTORIES=str(tree.parent))


def prepare(dest: Path, patched: bool) -> None:
    """Clean pin -> series -> `dest`. Always from clean; unchanged files keep their times, so that
    a build system compiles only what a patch really changed."""
    stamp = dest / ".digest"
    wanted = digest(patched)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    dest.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=dest.parent) as scratch:
        tree = Path(scratch) / "tree"
        tree.mkdir()
        unpack(tree)
        if patched:
            apply_series(tree)
        fresh = {p.relative_to(tree) for p in tree.rglob("*") if p.is_file()}
        for stale in (
            p for p in dest.rglob("*") if p.is_file() and p.relative_to(dest) not in fresh
        ):
            stale.unlink()
        for path in fresh:
            target = dest / path
            if not target.exists() or not filecmp.cmp(tree / path, target, shallow=False):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / path, target)
    stamp.write_text(wanted)


def checkout(dest: Path) -> None:
    if dest.exists():
        raise SourceTreeError(f"{dest} exists; refresh from it or delete it first")
    dest.mkdir(parents=True)
    unpack(dest)
    who = ("-c", "user.name=speculoe-local", "-c", "user.email=speculoe-local@localhost")
    run("git", "init", "-q", cwd=dest)
    run("git", "add", "-A", "-f", cwd=dest)
    run("git", *who, "commit", "-q", "-m", "pin", cwd=dest)
    run("git", "tag", "pin", cwd=dest)
    for patch in series():
        run("git", *who, "am", "-q", "--keep-non-patch", str(patch), cwd=dest)


def refresh(dest: Path) -> None:
    names: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        run("git", *FORMAT_PATCH, "-o", scratch, "pin..HEAD", cwd=dest)
        known = {subject(patch): patch.name for patch in series()}
        for exported in sorted(Path(scratch).glob("*.patch")):
            name = known.get(subject(exported)) or exported.name[5:]  # drop format-patch's 000N-
            shutil.copyfile(exported, HERE / name)
            names.append(name)
    for gone in {p.name for p in HERE.glob("*.patch")} - set(names):
        (HERE / gone).unlink()
    head = [line for line in (HERE / "series").read_text().splitlines() if line.startswith("#")]
    (HERE / "series").write_text("\n".join(head + names) + "\n")


def subject(patch: Path) -> str:
    found = re.search(r"^Subject: (.*)$", patch.read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def check(apply: bool = True) -> str:
    """Every rule a machine can hold the patches to; raises at the first one broken."""
    patches = series()
    strays = {p.name for p in HERE.glob("*.patch")} ^ {p.name for p in patches}
    if strays:
        raise SourceTreeError(
            f"patches/series and patches/*.patch differ by {', '.join(sorted(strays))}"
        )
    changed = 0
    for patch in patches:
        text = patch.read_text()
        missing = [name for name in TRAILERS if not re.search(rf"^{name}: \S", text, re.MULTILINE)]
        if missing:
            raise SourceTreeError(f"{patch.name} lacks {', '.join(missing)} in its header")
        changed += len(re.findall(r"^[+-](?![+-]{2} )", text, re.MULTILINE))
    if len(patches) > MAX_PATCHES or changed > MAX_LINES:
        raise SourceTreeError(
            f"{len(patches)} patches, {changed} changed lines; at most {MAX_PATCHES} and {MAX_LINES}"
        )
    if apply:
        with tempfile.TemporaryDirectory() as scratch:
            prepare(Path(scratch) / "tree", patched=True)
    return f"{len(patches)} patches, {changed} changed lines of at most {MAX_LINES}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "checkout", "refresh"):
        commands.add_parser(name).add_argument("dest", type=Path)
    commands.choices["prepare"].add_argument("--unpatched", action="store_true")
    commands.add_parser("digest")
    commands.add_parser("describe")
    commands.add_parser("archive")
    commands.add_parser("converter").add_argument("dest", type=Path)
    commands.add_parser("check")
    options = parser.parse_args()
    try:
        if options.command == "prepare":
            prepare(options.dest.resolve(), patched=not options.unpatched)
        elif options.command == "checkout":
            checkout(options.dest.resolve())
        elif options.command == "refresh":
            refresh(options.dest.resolve())
        elif options.command == "converter":
            print(converter(options.dest.resolve()))
        else:
            print(
                {"digest": digest, "describe": describe, "archive": archive, "check": check}[
                    options.command
                ]()
            )
    except SourceTreeError as error:
        print(f"patches: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
