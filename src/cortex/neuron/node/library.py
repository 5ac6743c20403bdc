"""The models that this node knows, and the locations of their files.

These are the models of `neuron.toml`, every model in the hub cache and in the folders of `model_dirs`, and those that
load requests have named since the start. A model's source is a hub id, a directory or a GGUF file.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from cortex.neuron.config import NeuronConfig
from cortex.neuron.hub_process.resolver import FileSources
from cortex.neuron.node.memory.ceilings import smallest
from cortex.neuron.weights.errors import CheckpointError
from cortex.neuron.weights.hub.cache import RepositoryCache
from cortex.neuron.weights.hub.cache import cache_directory as hub_cache_directory
from cortex.neuron.weights.hub.source import is_hub_id, parse_source
from cortex.wire.errors import InvalidValue, LoadFailed, ModelNotFound, ModelUnsupported, SourceNotAllowed, shorten
from cortex.wire.fields.body import MAX_MODEL_NAME
from cortex.wire.model_names import check_name
from cortex.wire.node.groups import GroupMember
from cortex.wire.node.host_splits import HostSplit
from cortex.wire.node.load_options import ENGINE, PlacedOptions, draft_of, is_path
from cortex.wire.node.neighbours import Neighbour, is_of_path, repository_of
from cortex.wire.node.orders import LoadRequest
from cortex.wire.words import os_error_in_words, plural

MAX_DEPTH = 4
MAX_FOUND = 1000
"""Maximum number of models per folder. A folder with more is probably not a model folder; the rest is ignored."""
SETTLE_S = 5.0
"""Files that changed within this time may still be copied."""
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_NOT_MODELS = ("mmproj", "imatrix")


def scan_folders(folders: Sequence[Path]) -> dict[str, Path]:
    """The models in `folders` by id: the path of the GGUF file without its suffix, or of the checkpoint's directory,
    relative to the folder. Of two with the same id the first counts. Blocks; reads directories only."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in _models_in(folder.expanduser()):
            found.setdefault(_id_of(path, folder.expanduser()), path)
    return found


def _models_in(folder: Path) -> Iterator[Path]:
    newest_s = time.time() - SETTLE_S
    num_found = 0
    for place, directories, names in os.walk(folder):
        here = Path(place)
        if len(here.relative_to(folder).parts) >= MAX_DEPTH:
            directories.clear()
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            directories.clear()
            paths = [here] if all(_is_settled(here / name, newest_s) for name in names) else []
        else:
            paths = [here / name for name in sorted(names) if _is_model(name) and _is_settled(here / name, newest_s)]
        for path in paths:
            num_found += 1
            if num_found > MAX_FOUND:
                return
            yield path


def _is_model(name: str) -> bool:
    """Whether it is a GGUF file, the first one if the model is divided among several."""
    if not name.endswith(".gguf") or any(word in name.lower() for word in _NOT_MODELS):
        return False
    part = _PART.search(name.removesuffix(".gguf"))
    return part is None or int(part[1]) == 1


def _is_settled(path: Path, newest_s: float) -> bool:
    try:
        return path.stat().st_mtime <= newest_s
    except OSError:  # gone, or a link to nowhere
        return False


def _id_of(path: Path, folder: Path) -> str:
    relative = path.relative_to(folder)
    if not relative.parts:
        return folder.name
    return _PART.sub("", relative.as_posix().removesuffix(".gguf"))


FileStamps = tuple[tuple[str, int, int], ...]
"""Name, size and time of the last change of each file of a model."""
_MODEL_SUFFIXES = (".safetensors", ".gguf", ".json", ".jinja", ".model")


def file_stamps(path: Path) -> FileStamps:
    """The stamps of the model at `path`: a directory, or a GGUF file with the further parts of a split model. Empty if
    unreadable. Blocks; opens no file."""
    stamps = []
    try:
        for file in sorted(path.iterdir() if path.is_dir() else path.parent.glob("*.gguf")):
            is_part = path.is_dir() or _PART.sub("", file.stem) == _PART.sub("", path.stem)
            if is_part and file.suffix in _MODEL_SUFFIXES:
                found = file.stat()
                stamps.append((file.name, found.st_size, found.st_mtime_ns))
    except OSError:
        return ()
    return tuple(stamps)


_SAMPLES, _SAMPLED_BYTES = 64, 4096
"""Of each file."""


def files_sample(path: Path) -> str:
    """Equal for the same files on different hosts: their names, sizes, and bytes from all over each. It takes
    milliseconds; to read all bytes of them would take minutes before each load. Blocks. Raises LoadFailed."""
    found = hashlib.sha256()
    folder = path if path.is_dir() else path.parent
    try:
        for name, num_bytes, _ in file_stamps(path):
            found.update(f"{name}\0{num_bytes}\0".encode())
            with (folder / name).open("rb", buffering=0) as file:
                for start in range(0, num_bytes, max(_SAMPLED_BYTES, num_bytes // _SAMPLES)):
                    found.update(os.pread(file.fileno(), _SAMPLED_BYTES, start))
    except OSError as error:
        raise LoadFailed(f"the files at {path} cannot be read: {os_error_in_words(error)}") from error
    return found.hexdigest()


_CACHE_PREFIX = "models--"
_NAME = "model_id"
"""In the cached copy of another node's path: the id of its model."""
_NOWHERE = Path()
"""Inside no root, because roots are absolute."""
MAX_ADOPTED = 1000
"""Maximum number of ids that load requests may add. They are kept until the daemon ends."""


class KnownModel(PlacedOptions, frozen=True, kw_only=True):
    """A model that can be loaded, and its options, with their defaults where none are given."""

    id: str
    source: str
    harness: str = ENGINE
    memory_bytes: int | None = None
    """Memory limit of one replica."""
    min_context_tokens: int | None = None
    """Minimum context: with less, a load is rejected. None: this node decides the context, and what is unloaded for
    it."""
    host_split: HostSplit | None = None
    """Weights of this load in host memory, as the node has decided; None for none."""
    replicas: int = 1
    max_replicas: int = 1
    """Maximum number of replicas, including those added while requests wait; at most `replicas` means none are
    added."""

    member: GroupMember | None = None
    """Its place in the group that runs it on several nodes; None if this node runs it alone."""

    @property
    def num_members(self) -> int:
        """How many nodes run it together."""
        return 1 if self.member is None else len(self.member.members)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._fill_defaults()

    @property
    def num_devices(self) -> int:
        """How many devices it takes on this node, each replica its own."""
        return self.tensor_parallel * self.pipeline_parallel * self.replicas

    @property
    def is_divided(self) -> bool:
        return self.tensor_parallel > 1 or self.pipeline_parallel > 1

    @property
    def may_grow(self) -> bool:
        """Whether it gets more replicas while requests wait."""
        return self.max_replicas > self.replicas and not self.is_divided


Fetch = Callable[[str, Path, str | None, Callable[[int, int], None], Callable[[], bool], FileSources], Path]
"""(source, cache, quant, progress(done, total), cancelled, sources) → local path. Blocks; may use the network."""


def _with_own_quant(model: KnownModel) -> KnownModel:
    """The model with the quantisation in its source, as in `owner/name:q4`, unless it sets one."""
    if model.quant is not None:
        return model
    try:
        parsed = parse_source(model.source)
    except (CheckpointError, OSError, ValueError):
        return model  # the load says why
    if isinstance(parsed, Path) or parsed.quant is None:
        return model
    return replace(model, quant=parsed.quant)


def _requested(known: KnownModel, request: LoadRequest) -> KnownModel:
    """The model with the options of a load request, and its own for the rest."""
    # A gateway divides a model among the devices that it names, but does not know of replicas. Stages are preferred to
    # a division of every layer: where either program is configured for them, the links need them.
    stages, shares = known.pipeline_parallel, known.tensor_parallel
    if known.replicas == 1:
        stages = max(stages, request.pipeline_parallel)
        shares = 1 if stages > 1 else max(shares, request.tensor_parallel)
    max_bytes = None if request.max_bytes is None else max(1, request.max_bytes // known.replicas)
    model = replace(
        request.over(known),
        devices=request.devices or known.devices,
        tensor_parallel=shares,
        pipeline_parallel=stages,
        memory_bytes=smallest(known.memory_bytes, max_bytes),
        min_context_tokens=request.min_context_tokens,
        member=request.member,
    )
    return _with_own_quant(model)


def _check_placement(known: KnownModel, request: LoadRequest) -> None:
    """Raises ModelUnsupported for devices that the entry of the model does not permit, or too few of them."""
    if not request.devices:
        return
    if excluded := [index for index in request.devices if known.devices and index not in known.devices]:
        raise ModelUnsupported(
            f"{known.id} may not use device {excluded[0]} of this node, only {', '.join(map(str, known.devices))}: "
            "name those, or change `devices` of its entry in neuron.toml"
        )
    if len(request.devices) < known.num_devices:
        raise ModelUnsupported(
            f"{known.id} takes {plural(known.num_devices, 'device')} of this node by its entry in neuron.toml, but the "
            f"request names {len(request.devices)}: name more, or none"
        )


class Library:
    """Belongs to the daemon's loop."""

    def __init__(self, config: NeuronConfig, env: Mapping[str, str] = os.environ) -> None:
        self.cache = cache_directory(config, env)
        self._models: dict[str, KnownModel] = {}
        self._configured: frozenset[str] = frozenset()
        self._roots: tuple[Path, ...] = ()
        """Roots that paths of load requests must be in, including the operator's own sources."""
        self.folders: tuple[Path, ...] = ()
        self.use(config)
        self._in_folders: frozenset[str] = frozenset()
        """Models that were found there."""
        self._adopted: set[str] = set()
        """Models that load requests have named."""
        self._neighbours: dict[str, tuple[Neighbour, ...]] = {}
        """By repository: the nodes named in its latest order."""

    def use(self, config: NeuronConfig) -> list[str]:
        """Use the models and folders of another configuration. Returns the ids that are no longer configured."""
        configured = {model.id: _with_own_quant(model) for model in _configured(config)}
        gone = sorted(self._configured - configured.keys())
        self._models |= configured
        self._configured = frozenset(configured)
        own = (Path(model.source) for model in configured.values() if is_path(model.source))
        self._roots = tuple(_resolved(path) for path in (self.cache, *config.model_roots, *config.model_dirs, *own))
        self.folders = config.model_dirs
        return gone

    def __iter__(self) -> Iterator[KnownModel]:
        return iter(tuple(self._models.values()))

    def find(self, model_id: str) -> KnownModel:
        """Raises ModelNotFound, which lists similar names."""
        if (model := self._models.get(model_id)) is not None:
            return model
        # The cost of a comparison grows with the name, and a name this long is not a typo.
        near = difflib.get_close_matches(model_id, self._models, n=3) if len(model_id) <= MAX_MODEL_NAME else []
        hint = f"did you mean {', '.join(near)}?" if near else "GET /models lists the models"
        raise ModelNotFound(f"this node knows no model {shorten(model_id)!r}; {hint}", param="model")

    def draft_of(self, model: KnownModel) -> KnownModel | None:
        """The draft model of `model`, named by the id or source of a model; None without one."""
        name = draft_of(model.speculation)
        if name is None:
            return None
        return self._models.get(name) or KnownModel(id=name, source=name)

    def is_adopted(self, model_id: str) -> bool:
        """Whether only load requests have named it."""
        return model_id in self._adopted

    def is_configured(self, model_id: str) -> bool:
        return model_id in self._configured

    def takes_options(self, model: KnownModel) -> bool:
        """Whether load requests decide the options of this model: it is not configured, and its files are those that
        this node has found, unless only load requests have named it."""
        is_found = self.find(model.id).source == model.source
        return not self.is_configured(model.id) and (is_found or self.is_adopted(model.id))

    def adopt(self, request: LoadRequest) -> KnownModel:
        """The model with the options of a load request, and configured ones for the rest. A new id is kept with its
        source; other options apply to this load only (but see `keep_options`, `remember_quant`).

        Raises ModelNotFound for an id that is neither known, nor a hub id, nor an existing path. Raises
        SourceNotAllowed for a path outside the model roots, whether or not it exists, LoadFailed for that of its draft
        model, and ModelUnsupported for devices that its entry does not permit.
        """
        request = self._with_own_source(request)
        known = self._models.get(request.model_id)
        if request.source is not None and (known is None or request.source != known.source):
            request = replace(request, source=self._or_copy(request.source, has_senders=bool(request.neighbours)))
        source = request.source or (known.source if known is not None else request.model_id)
        if known is None or source != known.source:
            self._check_source(source)
        draft = draft_of(request.speculation)
        if draft is not None and draft not in self._models and (known is None or draft != draft_of(known.speculation)):
            try:
                self._check_source(draft)  # the name of a draft model that is not known is its source
            except SourceNotAllowed as error:
                raise LoadFailed(f"draft model: {error.message}") from error
        if request.neighbours and (repository := repository_of(source)) is not None:
            self._neighbours[repository] = request.neighbours
            if len(self._neighbours) > MAX_ADOPTED:
                del self._neighbours[next(iter(self._neighbours))]
        if known is not None and self.is_configured(known.id):
            _check_placement(known, request)
        elif known is not None and 0 < len(request.devices) < known.num_devices:
            # The devices decide how it is divided, not the options of an earlier request.
            known = replace(known, tensor_parallel=1, pipeline_parallel=1)
        if known is None:
            if request.source is None and not _names_a_model(source):
                return self.find(request.model_id)
            if len(self._adopted) >= MAX_ADOPTED:
                raise LoadFailed(
                    f"load requests have named {MAX_ADOPTED} models on this node, which is the limit; restart it, or"
                    " list the models that it serves in neuron.toml"
                )
            self._adopted.add(request.model_id)
            known = self._models[request.model_id] = KnownModel(id=request.model_id, source=source)
        return _requested(known, request)

    def _with_own_source(self, request: LoadRequest) -> LoadRequest:
        """The request with the files of a known model, if its source is that model's name."""
        base = self._models.get(request.source or "")
        if base is None:
            return request
        own = {"quant": request.quant or base.quant, "harness": request.harness or base.harness}
        return replace(request, source=base.source, **own)

    def _or_copy(self, source: str, *, has_senders: bool) -> str:
        """The source, or the repository with a copy of another node's files at this path, if they are not here.
        `has_senders`: a copy can be made."""
        repository = repository_of(source) if is_path(source) else None
        if repository is None or (self._is_allowed(source) and _exists(source)):
            return source
        return repository if has_senders or RepositoryCache(self.cache, repository).root.is_dir() else source

    def name_copy(self, model: KnownModel) -> None:
        """If the model's files are a copy of another node's path, keep their name for later starts. Blocks. Raises
        OSError."""
        if is_of_path(model.source):
            (RepositoryCache(self.cache, model.source).root / _NAME).write_text(model.id)

    def neighbours(self, model: KnownModel) -> tuple[Neighbour, ...]:
        """The nodes that may have its files."""
        return self._neighbours.get(repository_of(model.source) or "", ())

    def keep_options(self, request: LoadRequest) -> KnownModel:
        """Keep the options of an adopted request, for the size of a model that takes them and for later loads without
        options. Replaces options kept before."""
        request = self._with_own_source(request)
        before = self.find(request.model_id)
        source = before.source
        if request.source is not None:
            source = self._or_copy(request.source, has_senders=bool(request.neighbours))
        quant = None if is_path(source) else before.quant  # files from the hub keep their quantisation
        kept = _requested(KnownModel(id=before.id, source=source, quant=quant), request)
        own = {"devices": (), "memory_bytes": None, "min_context_tokens": None, "member": None}
        kept = self._models[before.id] = replace(kept, **own)
        return kept

    def remember_quant(self, model_id: str, quant: str | None) -> None:
        """Use `quant` for later loads that name none, unless the model is configured: `owner/name` pulled as Q4_K_M is
        loaded as that."""
        known = self._models.get(model_id)
        if known is not None and model_id not in self._configured:
            self._models[model_id] = replace(known, quant=quant)

    def forget(self, model_id: str) -> None:
        """The model's files are gone. A configured model stays: it can be downloaded again."""
        if model_id not in self._configured:
            self._models.pop(model_id, None)
            self._in_folders -= {model_id}
            self._adopted.discard(model_id)

    def found_in_folders(self, found: Mapping[str, Path]) -> list[str]:
        """Adds models found in the folders of `model_dirs`. Returns the ids of those that are gone."""
        new = {model_id for model_id in found if model_id not in self._models}
        self._models.update({model_id: KnownModel(id=model_id, source=str(found[model_id])) for model_id in new})
        gone = sorted(self._in_folders - found.keys())
        self._in_folders |= new
        return gone

    def _check_source(self, source: str) -> None:
        """Raises SourceNotAllowed for a path that load requests may not name."""
        if not is_path(source) and not _exists(source):
            return  # not a path: the hub or the caller rejects unknown names
        if not self._is_allowed(source):
            raise SourceNotAllowed(
                f"the path {shorten(source)!r} is outside the model roots of this node; add its directory to"
                " `model_roots` in neuron.toml, or list the model there"
            )

    def _is_allowed(self, source: str) -> bool:
        """Whether the path is in the model roots."""
        try:
            path = _resolved(Path(source))
        except (OSError, RuntimeError, ValueError):  # no valid name, an unknown user, a loop of links
            path = _NOWHERE
        return any(path.is_relative_to(root) for root in self._roots)

    def discovered(self, sources: Mapping[str, str]) -> list[str]:
        """Adds models found in the cache, by id. Returns the new ids."""
        new = [model_id for model_id in sources if model_id not in self._models]
        self._models.update({model_id: KnownModel(id=model_id, source=sources[model_id]) for model_id in new})
        return new


def cache_directory(config: NeuronConfig, env: Mapping[str, str]) -> Path:
    """The hub cache: from the config, then `HF_HUB_CACHE`, then `$HF_HOME/hub`, then the hub's default."""
    if config.harness.torch.hf_cache is not None:
        return config.harness.torch.hf_cache.expanduser()
    return hub_cache_directory(env)


def scan_cache(cache: Path) -> dict[str, str]:
    """The sources of the models in the hub cache that have weights on disk, by id: the same, or for a copy of another
    node's path the id that it has there. Blocks; reads directories and those ids only.

    Folders that cannot be read or whose name is not a hub id are skipped.
    """
    try:
        folders = sorted(folder for folder in cache.iterdir() if folder.name.startswith(_CACHE_PREFIX))
    except OSError:
        return {}
    found = {}
    for folder in folders:
        source = folder.name.removeprefix(_CACHE_PREFIX).replace("--", "/")
        if is_hub_id(source) and _has_weights(folder) and (model_id := _id_in_cache(folder, source)) is not None:
            found[model_id] = source
    return found


def _id_in_cache(folder: Path, source: str) -> str | None:
    """None for a copy whose name is not known."""
    if not is_of_path(source):
        return source
    try:
        name = (folder / _NAME).read_text()
        check_name(name, "model")
    except (OSError, ValueError, InvalidValue):
        return None
    return name


def _has_weights(folder: Path) -> bool:
    try:
        return any(next(folder.glob(f"snapshots/*/{pattern}"), None) for pattern in ("*.safetensors", "*.gguf"))
    except OSError:
        return False


def _exists(source: str) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long, an unknown user, or no valid name
        return False


def _resolved(path: Path) -> Path:
    """The place that `path` leads to, links followed."""
    return path.expanduser().resolve()


def _names_a_model(source: str) -> bool:
    """Whether `source` is an existing path or a possible hub id. A relative path must begin with `.` or `~`, so that
    the working directory of the daemon does not change the meaning of a name."""
    try:
        parsed = parse_source(source)
    except (CheckpointError, OSError, ValueError):
        return False
    return not isinstance(parsed, Path) or source.startswith(("/", "./", "../", "~"))


def _configured(config: NeuronConfig) -> Iterator[KnownModel]:
    for options in (*config.models, *map(config.completed, config.default_models)):
        memory_bytes = options.memory_mb << 20 if options.memory_mb else None
        yield options.over(KnownModel(id=options.id, source=options.id, memory_bytes=memory_bytes))
