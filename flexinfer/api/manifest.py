"""The manifest reader: files and folders in, typed resources out, or every error at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flexinfer.api.base import API_VERSION, GROUP
from flexinfer.api.documents import Document, field_name, parse
from flexinfer.api.documents import Path as FieldPath
from flexinfer.api.errors import ManifestErrors, ManifestProblem
from flexinfer.api.modelcache import ModelCache
from flexinfer.api.modeldeployment import ModelDeployment
from flexinfer.api.notices import Notice, notices_for
from flexinfer.api.problems import closest, problems_of, shown

SUFFIXES = (".yaml", ".yml", ".json")

_KINDS: Mapping[str, type[ModelDeployment] | type[ModelCache]] = {
    "ModelDeployment": ModelDeployment,
    "ModelCache": ModelCache,
}
_LISTS = {"v1": ("List",), API_VERSION: ("List", *(f"{kind}List" for kind in _KINDS))}
_LARGEST_FILE = 8 * 2**20


@dataclass(frozen=True)
class Manifests:
    """What the files hold: resources in reading order, notices on them, and the files read."""

    models: tuple[ModelDeployment, ...] = ()
    caches: tuple[ModelCache, ...] = ()
    notices: tuple[Notice, ...] = ()
    files: tuple[Path, ...] = ()


def read_manifests(paths: Sequence[Path]) -> Manifests:
    """Reads files (YAML, or JSON where the name ends in .json) and folders.

    A folder stands for all files below it that end in .yaml, .yml or .json, sorted, hidden ones
    left out. A file holds any number of documents, also a ``List``. Documents of other API groups
    (a Namespace, a claim) are skipped with a notice, since the same files go to kubectl.

    Raises:
        ManifestErrors: anything is wrong; it carries all that is.
    """
    reader = _Reader()
    for path in paths:
        if not path.exists():
            found = "nothing there"
            reader.problems.append(ManifestProblem(str(path), None, "", found, "a file or folder"))
    files = manifest_files(paths)
    for file in files:
        reader.read(file)
    reader.check_names()
    if reader.problems:
        order = {str(file): index for index, file in enumerate(files)}
        reader.problems.sort(key=lambda found: (order.get(found.file, -1), found.line or 0))
        raise ManifestErrors(reader.problems, files)
    notices = [*reader.notices, *notices_for(reader.models, reader.caches)]
    return Manifests(tuple(reader.models), tuple(reader.caches), tuple(notices), files)


def manifest_files(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The files that `paths` stand for now, each once; a path that does not exist stands for none.
    Reads folders, no files."""
    files: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            found = sorted(_files_below(path))
        elif path.exists():
            found = [path]
        else:
            found = []
        for file in found:
            files.setdefault(file.resolve(), file)
    return tuple(files.values())


def _files_below(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(SUFFIXES) and not name.startswith("."):
                yield Path(here, name)


@dataclass(frozen=True)
class _Place:
    """A resource in a file: the document and the path of the resource in it."""

    file: str
    document: Document
    at: FieldPath

    def problem(
        self, path: FieldPath, found: str, allowed: str, suggestion: str | None = None
    ) -> ManifestProblem:
        path = (*self.at, *path)
        line = self.document.mark(path).line
        return ManifestProblem(self.file, line, field_name(path), found, allowed, suggestion)


@dataclass
class _Reader:
    models: list[ModelDeployment] = field(default_factory=list)
    caches: list[ModelCache] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    problems: list[ManifestProblem] = field(default_factory=list)
    # Raw, so that a name that is taken is reported beside the other errors of its resource.
    raw: list[tuple[_Place, str, Mapping[str, Any]]] = field(default_factory=list)

    def read(self, file: Path) -> None:
        try:
            with file.open("rb") as stream:
                data = stream.read(_LARGEST_FILE + 1)
            if len(data) > _LARGEST_FILE:
                raise ValueError(f"more than {_LARGEST_FILE >> 20} MiB")
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            found = f"the byte 0x{data[error.start]:02x}"
            self.problems.append(ManifestProblem(str(file), line, "", found, "text in UTF-8"))
            return
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            found = reason or str(error)
            self.problems.append(ManifestProblem(str(file), None, "", found, "a readable manifest"))
            return
        documents, problems = parse(str(file), text)
        self.problems += problems
        for document in documents:
            self._document(_Place(str(file), document, ()), document.value)

    def _document(self, place: _Place, value: Any) -> None:
        if not isinstance(value, Mapping):
            allowed = "a mapping with apiVersion, kind, metadata and spec"
            self.problems.append(place.problem((), shown(value), allowed))
            return
        version, kind = value.get("apiVersion"), value.get("kind")
        if isinstance(version, str) and kind in _LISTS.get(version, ()):
            self._list(place, value)
        elif self._is_foreign(version, kind):
            self._skip(place, str(kind), value)
        elif not isinstance(kind, str) or kind not in _KINDS:
            meant = closest(kind, _KINDS) if isinstance(kind, str) else None
            hint = f"did you mean {meant}?" if meant else None
            allowed = "one of " + ", ".join(_KINDS)
            self.problems.append(place.problem(("kind",), shown(kind), allowed, hint))
            self._check_version(place, version)
        else:
            self._check_version(place, version)
            self._resource(place, kind, value)

    def _list(self, place: _Place, value: Mapping[str, Any]) -> None:
        for key in value.keys() - {"apiVersion", "kind", "metadata", "items"}:
            allowed = "the fields apiVersion, kind, metadata, items"
            self.problems.append(place.problem((key,), "an unknown field", allowed))
        items = value.get("items")
        if items is None:
            return
        if not isinstance(items, list):
            self.problems.append(place.problem(("items",), shown(items), "a list"))
            return
        for index, item in enumerate(items):
            inner = _Place(place.file, place.document, (*place.at, "items", index))
            self._document(inner, item)

    @staticmethod
    def _is_foreign(version: Any, kind: Any) -> bool:
        """Whether a document is well formed and belongs to somebody else."""
        if not isinstance(version, str) or not isinstance(kind, str) or not version or not kind:
            return False
        ours = {name.lower() for name in _KINDS}
        return "flexinfer" not in version.lower() and kind.lower().rstrip("s") not in ours

    def _skip(self, place: _Place, kind: str, value: Mapping[str, Any]) -> None:
        metadata = value.get("metadata")
        metadata = metadata if isinstance(metadata, Mapping) else {}
        resource = f"{kind}/{metadata.get('namespace', 'default')}/{metadata.get('name', '')}"
        line = place.document.mark(place.at).line
        message = f"skipped {place.file}:{line}: only the group {GROUP} is read here"
        self.notices.append(Notice("DocumentSkipped", message, resource, "apiVersion"))

    def _check_version(self, place: _Place, version: Any) -> None:
        if version is None:
            problem = place.problem(("apiVersion",), "nothing", API_VERSION)
        elif version != API_VERSION:
            found = shown(version, place.document.mark((*place.at, "apiVersion")).plain)
            problem = place.problem(("apiVersion",), found, API_VERSION)
        else:
            return
        self.problems.append(problem)

    def _resource(self, place: _Place, kind: str, value: Mapping[str, Any]) -> None:
        model = _KINDS[kind]
        self.raw.append((place, kind, value))
        # The version has been checked, and would be reported twice.
        value = {**value, "apiVersion": API_VERSION}
        try:
            resource = model.model_validate(value, by_alias=True, by_name=False)
        except ValidationError as error:
            self.problems += problems_of(error, model, place.document, place.at, place.file)
            return
        if isinstance(resource, ModelDeployment):
            self.models.append(resource)
        else:
            self.caches.append(resource)

    def check_names(self) -> None:
        """Reports names that two resources share."""
        models: dict[str, tuple[_Place, FieldPath]] = {}
        caches: dict[tuple[str, str], tuple[_Place, FieldPath]] = {}
        for place, kind, value in self.raw:
            metadata = value.get("metadata")
            metadata = metadata if isinstance(metadata, Mapping) else {}
            name, namespace = metadata.get("name"), metadata.get("namespace", "default")
            if kind == "ModelCache":
                if isinstance(name, str) and isinstance(namespace, str):
                    self._claim(caches, (namespace, name), place, ("metadata", "name"), name)
                continue
            for path, claimed in _names(value):
                self._claim(models, claimed, place, path, claimed)

    def _claim(
        self,
        taken: dict[Any, tuple[_Place, FieldPath]],
        key: Any,
        place: _Place,
        path: FieldPath,
        name: str,
    ) -> None:
        first, its_path = taken.setdefault(key, (place, path))
        # One resource may say a name twice: its alias may be its own name.
        if first is not place:
            line = first.document.mark((*first.at, *its_path)).line
            allowed = f"a name that nothing else has; {first.file}:{line} has it"
            self.problems.append(place.problem(path, name, allowed))


def _names(value: Mapping[str, Any]) -> Iterator[tuple[FieldPath, str]]:
    metadata, spec = value.get("metadata"), value.get("spec")
    if isinstance(metadata, Mapping) and isinstance(metadata.get("name"), str):
        yield ("metadata", "name"), metadata["name"]
    if not isinstance(spec, Mapping):
        return
    if isinstance(spec.get("servedModelName"), str):
        yield ("spec", "servedModelName"), spec["servedModelName"]
    aliases = spec.get("aliases")
    for index, alias in enumerate(aliases if isinstance(aliases, list) else []):
        if isinstance(alias, str):
            yield ("spec", "aliases", index), alias
