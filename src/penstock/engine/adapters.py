"""The adapters that requests may name: loaded, replaced and unloaded while requests run. Owns names, and
weights while a request or a name uses them; reads files on the caller's thread."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from penstock.config import ADAPTER_NAME, LoraConfig
from penstock.contract import Adapter, Listener, LoadedAdapter, TokenEvent
from penstock.errors import ConfigError, HandleEnded, InvalidRequest, ModelError, UserError
from penstock.models.adapters import CONFIG_FILE, TENSORS_FILE, AdapterFiles
from penstock.models.lora import AdapterWeights
from penstock.models.progress import Progress

log = logging.getLogger(__name__)

# names are cheap but must be bounded; equal content is kept once, under any number of names
MAX_NAMES = 1024


class AdapterHold:
    """Keeps the weights of one adapter until the hold ends, even if the adapter is unloaded. Ends exactly
    once, from any thread."""

    def __init__(self, store: AdapterStore, adapter: Adapter) -> None:
        self.adapter = adapter
        self._store: AdapterStore | None = store

    def end(self) -> None:
        store, self._store = self._store, None
        if store is None:
            raise HandleEnded(f"the hold on adapter {self.adapter.name} had ended")
        store.let_go(self.adapter)

    def until_finished(self, listener: Listener) -> Listener:
        """`listener`, wrapped so that the hold ends with the last event."""

        def listen(event: TokenEvent) -> None:
            try:
                listener(event)
            finally:
                if event.finish is not None:
                    self.end()

        return listen

    def __enter__(self) -> Adapter:
        return self.adapter

    def __exit__(self, *raised: object) -> None:
        self.end()


class AdapterStore:
    """All methods may be called from any thread; only those that load take long. `read` reads weights from a
    directory. `dropped` is called with the digest of what it has read and is not kept any more."""

    def __init__(
        self,
        base: str,
        read: Callable[[Path], AdapterFiles],
        root: Path | None = None,
        dropped: Callable[[str], None] = lambda digest: None,
    ) -> None:
        self.root = root  # resolved; `load_inside` reads only below it
        self._base = base  # the model's own name, which no adapter may take
        self._read, self._dropped = read, dropped
        self._lock = threading.Lock()
        self._named: dict[str, LoadedAdapter] = {}
        self._weights: dict[str, AdapterWeights] = {}  # by digest: all that are named or held
        self._num_holds: Counter[str] = Counter()  # by digest

    # -------------------------------------------------------------------------------------------------- names

    def load(self, name: str, directory: Path, root: str | None = None) -> LoadedAdapter:
        """Read the adapter in `directory` and give it `name`. If another adapter had the name, its running
        requests finish on it. Blocks while files are read; a failure changes nothing."""
        self._check_name(name)
        files = self._read(directory)
        with self._lock:
            if name not in self._named and len(self._named) >= MAX_NAMES:
                self._dropped(files.digest)
                raise InvalidRequest(
                    f"{MAX_NAMES} adapters are loaded already; unload one first", "lora_name"
                )
            before = self._named.get(name)
            loaded = LoadedAdapter(
                Adapter(name, files.digest), root or str(directory), time.time(), replaced=before is not None
            )
            self._named[name] = loaded
            if self._weights.setdefault(files.digest, files.weights) is not files.weights:
                self._dropped(files.digest)  # it is there twice
            if before is not None:
                self._drop_unused(before.adapter.digest)
        log.info("adapter %s: %.1f MiB from %s", name, files.weights.num_bytes / 2**20, directory)
        return loaded

    def load_inside(self, name: str, path: str) -> LoadedAdapter:
        """As `load`, but only for paths inside `root`, after resolving symbolic links."""
        if self.root is None:
            raise ConfigError("clients may not load adapters: the server has no --lora-dir")
        self._check_name(name)
        try:
            directory = (self.root / path).resolve()
            files = [directory, *((directory / name).resolve() for name in (CONFIG_FILE, TENSORS_FILE))]
            is_inside = all(file.is_relative_to(self.root) for file in files)
        except (OSError, ValueError, RuntimeError):  # a loop of links, or an impossible file name
            is_inside = False
        if not is_inside:
            raise InvalidRequest(
                "lora_path must lie inside the directory that the server was given as --lora-dir", "lora_path"
            )
        try:
            return self.load(name, directory, path)
        except ModelError as error:
            # The client must not learn the server's path.
            raise InvalidRequest(
                str(error).replace(f"{self.root}/", "").replace(str(self.root), "--lora-dir"), "lora_path"
            ) from error

    def unload(self, name: str) -> bool:
        """Forget the name; False if there is none. Its running requests finish."""
        with self._lock:
            loaded = self._named.pop(name, None)
            if loaded is not None:
                self._drop_unused(loaded.adapter.digest)
        return loaded is not None

    def all(self) -> tuple[LoadedAdapter, ...]:
        """In the order in which names were first loaded."""
        with self._lock:
            return tuple(self._named.values())

    def find(self, name: str) -> LoadedAdapter | None:
        with self._lock:
            return self._named.get(name)

    # ------------------------------------------------------------------------------------------------ weights

    def try_hold(self, name: str) -> AdapterHold | None:
        """A hold on the adapter that has the name now; None if none has."""
        with self._lock:
            loaded = self._named.get(name)
            return None if loaded is None else self._hold(loaded.adapter)

    def hold(self, adapter: Adapter) -> AdapterHold:
        """A hold on exactly this content. Raises InvalidRequest if it is not loaded any more."""
        with self._lock:
            if adapter.digest not in self._weights:
                raise InvalidRequest(
                    f"adapter {adapter.name!r} is not loaded, or no longer with this content", "model"
                )
            return self._hold(adapter)

    def weights_of(self, adapter: Adapter) -> AdapterWeights:
        """The caller must have a hold on the adapter."""
        return self._weights[adapter.digest]

    def let_go(self, adapter: Adapter) -> None:
        """Called by a hold when it ends."""
        with self._lock:
            self._num_holds[adapter.digest] -= 1
            self._drop_unused(adapter.digest)

    def _hold(self, adapter: Adapter) -> AdapterHold:
        self._num_holds[adapter.digest] += 1
        return AdapterHold(self, adapter)

    def _drop_unused(self, digest: str) -> None:
        if not self._num_holds[digest]:
            del self._num_holds[digest]
            if all(loaded.adapter.digest != digest for loaded in self._named.values()) and (
                self._weights.pop(digest, None) is not None
            ):
                self._dropped(digest)

    # ------------------------------------------------------------------------------------------------- checks

    def _check_name(self, name: str) -> None:
        if ADAPTER_NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name!r} is not a valid adapter name: use letters, digits and ._:/@+-, at most 128",
                "lora_name",
            )
        if name == self._base:
            raise InvalidRequest(
                f"{name!r} is the name of the model itself; give the adapter another", "lora_name"
            )


def open_store(
    config: LoraConfig,
    base: str,
    read: Callable[[Path], AdapterFiles],
    progress: Progress,
    dropped: Callable[[str], None] = lambda digest: None,
) -> AdapterStore:
    """A store with the configured adapters. Raises ConfigError for any problem with them."""
    root = None
    if config.dir is not None:
        root = Path(os.path.expanduser(config.dir))
        if not root.is_dir():
            raise ConfigError(f"--lora-dir {config.dir} is no directory")
    store = AdapterStore(base, read, None if root is None else root.resolve(), dropped)
    for done, (name, path) in enumerate(config.adapters):
        progress("loading adapters", done, len(config.adapters))
        try:
            store.load(name, Path(os.path.expanduser(path)), path)
        except UserError as error:
            raise ConfigError(f"--lora {name}={path}: {error}") from error
    if config.adapters:
        progress("loading adapters", len(config.adapters), len(config.adapters))
    return store
