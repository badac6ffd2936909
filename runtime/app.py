"""Projects in other languages that run a bundle, made of the sources below ``apps/``.

Those are real programs, built and tested as they lie there; only the words ``@TFX_NAME@`` and ``@TFX_BUNDLE@`` are
filled in. A project's ``tfx-app.json`` says what was written, so that it can be replaced without losing anybody's work.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import BundleError, InputError
from .bundle import Bundle, sha256_file
from .manifest import MANIFEST_NAME, Manifest
from .swap import ensure_free, replace_folder

__all__ = [
    "APPS",
    "LANGUAGES",
    "RECORD_NAME",
    "App",
    "app_name",
    "check_app_destination",
    "next_lines",
    "notes",
    "sources",
    "write_app",
]

APPS = Path(__file__).with_name("apps")
"""The folder of the sources."""

RECORD_NAME = "tfx-app.json"

_BUNDLE = "bundle"
_NAME, _PATH = "@TFX_NAME@", "@TFX_BUNDLE@"

# Valid for a CMake target, an npm package and a program's file alike.
_NAMES = re.compile(r"[a-z][a-z0-9_-]{0,63}")
_TAKEN = frozenset(
    (
        *("all", "clean", "depend", "edit_cache", "help", "install", "package", "package_source", "preinstall"),
        *("rebuild_cache", "test", "tfx", "node_modules", "onnxruntime-node", "onnxruntime-web"),
    )
)
"""Targets that CMake or the sources have themselves, and packages that a package cannot be called like."""

# What stands in the middle of a string in C, JavaScript, CMake and a shell alike.
_UNQUOTED = re.compile(r"""["'\\$`;@<>&|*?\x00-\x1f\x7f]""")

_LOCK = "package-lock.json"

# Made by following a project's README, and not shipped.
_MADE = ("build", "node_modules", _LOCK, "vendor")


@dataclass(frozen=True)
class App:
    """What a project of a language is made of, and what is typed next.

    Attributes:
        parts: (folder of sources, folder in the project, names left out); a folder is taken with all below it.
        build: commands that build it, in its folder.
        check: the command that checks it, in its folder; ``{name}`` is the project's.
    """

    parts: tuple[tuple[str, str, tuple[str, ...]], ...]
    build: tuple[str, ...]
    check: str

    @property
    def by_npm(self) -> bool:
        """Whether its packages come by npm."""
        return self.build[0].startswith("npm ")


_CMAKE = ("cmake -S . -B build", "cmake --build build")
_NPM = "npm install --ignore-scripts"

LANGUAGES = {
    "c": App((("c", "", ()),), _CMAKE, "build/{name} --self-check"),
    "cpp": App(
        (("cpp", "", ()), ("c/include", "core/include", ()), ("c/src", "core/src", ("main.c",))),
        _CMAKE,
        "build/{name} --self-check",
    ),
    "node": App((("node", "", ()), ("js", "core", ())), (_NPM,), "node cli.mjs --self-check"),
    "web": App((("web", "", ()), ("js", "core", ())), ("npm run setup",), "npm start"),
}
"""The languages, by the names that ``--lang`` takes."""


def sources(lang: str) -> Iterator[tuple[str, Path]]:
    """Yield (name in the project, file) of a language, names with ``/``, in order."""
    for source, place, without in LANGUAGES[lang].parts:
        root = APPS / source
        for path in sorted(root.rglob("*")):
            inner = path.relative_to(root)
            hidden = any(part.startswith(".") for part in inner.parts)
            if path.is_file() and not hidden and inner.parts[0] not in (*_MADE, *without):
                yield (Path(place) / inner).as_posix(), path
    yield "LICENSE", APPS / "LICENSE"


def app_name(out: str | Path, name: str | None = None) -> str:
    """Return the name of a project.

    Args:
        out: the folder that it is written to; its name is taken, as far as it can be, when ``name`` is None.
        name: the name that was asked for.

    Raises:
        InputError: ``name`` is no name for a CMake target and an npm package.
    """
    if name is None:
        plain = re.sub(r"[^a-z0-9_-]+", "-", Path(os.path.abspath(out)).name.lower()).strip("-_")[:64]  # noqa: PTH100
        return plain if _NAMES.fullmatch(plain) and plain not in _TAKEN else "tfx-app"
    if not _NAMES.fullmatch(name):
        raise InputError(
            f'name: found "{name}", wanted 1 to 64 lower case letters, digits, "-" and "_", beginning with a letter'
        )
    if name in _TAKEN:
        raise InputError(f'name: "{name}" is taken by a build tool or a package that the project needs')
    return name


def check_app_destination(out: str | Path, force: bool = False) -> Path:
    """Check that a project can be written to a folder, as ``write_app`` does; errors are the same."""
    return ensure_free(out, force, _check_replaceable)


def write_app(
    bundle: Bundle, lang: str, out: str | Path, *, name: str | None = None, copy: bool = True, force: bool = False
) -> Path:
    """Write a project that runs a bundle, whole or not at all.

    The bundle's files are copied, not linked: a link would share the file with the original, and a program that
    writes into that one in place would change, or break in the middle of a run, what was deployed with the project.

    Args:
        bundle: an opened one.
        lang: one of ``LANGUAGES``.
        out: the folder to make.
        name: of the program; None takes the folder's.
        copy: put the bundle's files into the project's folder ``bundle``. False writes down where the bundle lies,
            which a page cannot read.
        force: replace a project that is there. Its ``package-lock.json`` is kept, since people commit it.

    Returns:
        The absolute folder.

    Raises:
        InputError: ``lang`` or ``name`` is none, or the bundle cannot be used that way.
        BundleError: the folder exists without ``force``, or holds anything that no project of tfx wrote, or files that
            were changed since, or cannot be written.
    """
    if lang not in LANGUAGES:
        raise InputError(f'lang: found "{lang}", wanted one of {", ".join(LANGUAGES)}')
    name = app_name(out, name)
    place = _BUNDLE if copy else str(bundle.path)
    if not copy:
        _check_path(lang, place)

    lock = Path(out) / _LOCK
    if force and lock.exists() and not LANGUAGES[lang].by_npm:
        raise BundleError(f"{out}: holds {_LOCK}, which a project in {lang} does not have; remove it yourself")

    def fill(folder: Path) -> None:
        files = write_sources(folder, lang, name, place)
        if force and lock.exists():
            shutil.copyfile(lock, folder / _LOCK)
        if copy:
            (folder / _BUNDLE).mkdir()
            for file in (MANIFEST_NAME, *bundle.manifest.files):
                shutil.copyfile(bundle.path / file, folder / _BUNDLE / file)
                files[f"{_BUNDLE}/{file}"] = sha256_file(folder / _BUNDLE / file)
            _check_copy(bundle, files)
        record = {"format": 1, "tfx": __version__, "lang": lang, "name": name, "bundle": place, "files": files}
        (folder / RECORD_NAME).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    return replace_folder(out, fill, force=force, replaceable=_check_replaceable, subfolders=True)


def write_sources(folder: Path, lang: str, name: str, place: str) -> dict[str, str]:
    """Write the sources of a project without its bundle into a folder that is there.

    Args:
        folder: an empty one.
        lang: one of ``LANGUAGES``.
        name: of the program.
        place: where it looks for its bundle: an absolute path, or one from the folder.

    Returns:
        {file: sha256} of what was written.
    """
    files: dict[str, str] = {}
    for target, source in sources(lang):
        content = source.read_text(encoding="utf-8").replace(_NAME, name).replace(_PATH, place)
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (folder / target).write_text(content, encoding="utf-8", newline="\n")
        files[target] = hashlib.sha256(content.encode()).hexdigest()
    return files


def next_lines(lang: str, out: str, name: str) -> list[str]:
    """Return the lines that build and check a project, to be typed where ``tfx app`` was."""
    app = LANGUAGES[lang]
    return [f"cd {shlex.quote(out)}", *app.build, app.check.format(name=name)]


def notes(lang: str, manifest: Manifest) -> list[str]:
    """Return what a user of a project should know about a bundle: what it cannot do, or not as well as another."""
    found = []
    if manifest.tokenizer is None:
        found.append("the bundle has no tokenizer, so the project cannot take texts; its self-check works")
    elif manifest.pooling is None:
        found.append("the bundle has no pooling: the project gives the vectors of tokens (--raw), none of whole texts")
    if lang == "web" and manifest.target != "web":
        found.append(
            f"the bundle is for target {manifest.target}; tfx export --target web writes what browsers run best"
        )
    return found


def _check_path(lang: str, place: str) -> None:
    if lang == "web":
        raise InputError("bundle: a page reads files of its own folder only; leave --no-copy out")
    found = _UNQUOTED.search(place)
    if found is not None:
        raise InputError(
            f"bundle: {place} has {found[0]!r} in it, which cannot stand in source code; leave --no-copy out"
        )


def _check_copy(bundle: Bundle, files: dict[str, str]) -> None:
    """Refuse a copy of a bundle that was replaced meanwhile."""
    for name, entry in bundle.manifest.files.items():
        if files[f"{_BUNDLE}/{name}"] != entry["sha256"]:
            raise BundleError(f"{bundle.path / name}: was changed while it was copied")


def _check_replaceable(path: Path, shown: str) -> None:
    """Refuse to replace anything but an empty folder or a project as it was written, built or not."""
    if path.is_symlink() or not path.is_dir():
        raise BundleError(f"{shown}: is no folder; --force only replaces projects of tfx app")
    if not any(path.iterdir()):
        return
    record = _recorded(path)
    if record is None:
        raise BundleError(f"{shown}: is no project of tfx app (no {RECORD_NAME}); --force only replaces those")
    files, made = record["files"], _made(path, str(record.get("lang")))
    for file in sorted(path.rglob("*")):
        inner = file.relative_to(path)
        name = inner.as_posix()
        if inner.parts[0] in made or name in (RECORD_NAME, *made) or (file.is_dir() and not file.is_symlink()):
            continue
        wanted = files.get(name)
        if wanted is None:
            raise BundleError(f"{shown}: holds {inner}, which tfx did not write; remove the folder yourself")
        if file.is_symlink() or not file.is_file() or sha256_file(file) != wanted:
            raise BundleError(f"{shown}: {inner} was changed since tfx wrote it; remove the folder yourself")


def _made(path: Path, lang: str) -> set[str]:
    """Return what the tools of a project's README have made in it: folders, and files of its own folder or below."""
    if lang not in LANGUAGES:
        return set()
    if not LANGUAGES[lang].by_npm:
        # A folder "build" may be anybody's; CMake leaves its mark in those that it made.
        return {"build"} if (path / "build" / "CMakeCache.txt").is_file() else set()
    found = {"node_modules", _LOCK}
    if lang == "web" and not (path / "vendor").is_symlink():
        with contextlib.suppress(OSError, UnicodeError):  # of a project without it, nothing in vendor/ is known
            copied = re.findall(r'\["([^"]+)", "([^"]+)"\]', (path / "vendor.mjs").read_text(encoding="utf-8"))
            for package, file in copied:
                own = f"{package.rpartition('/')[2]}-{file}"
                found.add(f"vendor/{file.removeprefix('dist/') if file.startswith('dist/') else own}")
    return found


def _recorded(path: Path) -> dict[str, Any] | None:
    """Return the record of a project, None when it is none."""
    try:
        record = json.loads((path / RECORD_NAME).read_bytes())
        return record if isinstance(record["files"], dict) else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return None
