"""The store of adapters by itself: names, what may be loaded from where, and weights that live as long as
somebody uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import LoraConfig
from penstock.engine.adapters import AdapterStore, open_store
from penstock.errors import ConfigError, InvalidRequest, ModelError
from penstock.models.adapters import AdapterFiles, adapter_files
from penstock.models.lora import AdapterWeights


def store_in(root: Path | None) -> AdapterStore:
    return AdapterStore("base", read, root)


def opened(config: LoraConfig) -> AdapterStore:
    return open_store(config, "base", read, lambda *step: None)


def read(directory: Path) -> AdapterFiles:
    """Content is the text of one file."""
    return AdapterFiles(adapter_files(directory)[0].read_text(), AdapterWeights(()))


def folder(path: Path, content: str = "x") -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(content)
    (path / "adapter_model.safetensors").write_text("")
    return path


def test_only_what_lies_inside_the_directory_is_loaded_from_it(tmp_path: Path) -> None:
    root, outside = tmp_path / "allowed", folder(tmp_path / "outside")
    inside = folder(root / "group" / "inside")
    folder(tmp_path / "allowed-not")
    (root / "link").symlink_to(outside)
    (root / "good-link").symlink_to(inside)
    (root / "loop").symlink_to(root / "loop")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        borrowed = folder(root / f"borrowed-{name}")
        (borrowed / name).unlink()
        (borrowed / name).symlink_to(outside / name)
    store = store_in(root.resolve())
    for path in (
        "group/inside",
        str(inside),
        "good-link",
        "group/../group/inside",
        f"{tmp_path}/outside/../allowed/good-link",
    ):
        assert store.load_inside("a", path).root == path
    escapes = [
        "../outside",
        str(outside),
        "link",
        "group/../../outside",
        "../allowed-not",
        "/",
        "..",
        "/etc",
        "loop",
        "a\0b",
    ]
    escapes += [
        "borrowed-adapter_config.json",
        "borrowed-adapter_model.safetensors",
        str(tmp_path / "nowhere"),
    ]
    before = store.all()
    for path in escapes:
        with pytest.raises(InvalidRequest) as refused:
            store.load_inside("b", path)
        assert refused.value.param == "lora_path"
        assert str(refused.value) == (
            "lora_path must lie inside the directory that the server was given as --lora-dir"
        )
    assert store.all() == before


def test_errors_do_not_tell_where_the_directory_lies(tmp_path: Path) -> None:
    store = store_in(tmp_path.resolve())
    for path in ("nowhere", "."):
        with pytest.raises(InvalidRequest) as refused:
            store.load_inside("a", path)
        assert "adapter_config.json" in str(refused.value) and str(tmp_path) not in str(refused.value)
    with pytest.raises(InvalidRequest, match="cannot be read: File name too long"):
        store.load_inside("a", "x" * 300)


@pytest.mark.parametrize("name", ["", "base", " a", "a b", "-a", ".", "a\n", "ä", "a=b", "a" * 129, "a\0"])
def test_names_that_could_be_confused_are_refused(tmp_path: Path, name: str) -> None:
    store = store_in(tmp_path.resolve())
    folder(tmp_path / "a")
    for load in (lambda: store.load(name, tmp_path / "a"), lambda: store.load_inside(name, "a")):
        with pytest.raises(InvalidRequest) as refused:
            load()
        assert refused.value.param == "lora_name"
    assert store.all() == ()


def test_a_failed_load_leaves_what_had_the_name(tmp_path: Path) -> None:
    store = store_in(None)
    first = store.load("a", folder(tmp_path / "a"))
    with pytest.raises(ModelError):
        store.load("a", tmp_path / "nowhere")
    assert store.find("a") == first and not first.replaced
    assert store.load("a", folder(tmp_path / "b", "y")).replaced
    assert store.unload("a") and not store.unload("a")


# ---------------------------------------------------------------------------------------------------- weights


def test_weights_live_while_they_are_named_or_held(tmp_path: Path) -> None:
    store = store_in(None)
    first = store.load("a", folder(tmp_path / "one")).adapter
    weights = store.weights_of(first)
    holds = [store.try_hold("a"), store.hold(first)]
    second = store.load("a", folder(tmp_path / "two", "y")).adapter
    assert store.weights_of(first) is weights is not store.weights_of(second)
    store.hold(first).end()
    for hold in holds:
        assert store.weights_of(first) is weights
        hold.end()
    assert set(store._weights) == {second.digest}
    with pytest.raises(InvalidRequest, match="no longer with this content"):
        store.hold(first)


# ---------------------------------------------------------------------------------------- as it is configured


def test_the_directory_may_be_written_as_a_home_a_relative_path_or_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What clients may load lies inside it all the same."""
    folder(tmp_path / "adapters" / "a")
    folder(tmp_path / "outside")
    (tmp_path / "link").symlink_to(tmp_path / "adapters")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for written in ("~/adapters", "adapters", "./link", str(tmp_path / "link")):
        store = opened(LoraConfig(dir=written))
        assert store.load_inside("one", "a").root == "a", written
        with pytest.raises(InvalidRequest, match="must lie inside"):
            store.load_inside("other", "../outside")
    with pytest.raises(ConfigError, match="--lora-dir ~/nowhere is no directory"):
        opened(LoraConfig(dir="~/nowhere"))


def test_adapters_of_the_configuration_are_loaded_in_order_and_what_is_wrong_names_the_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "x")
    folder(tmp_path / "y", "y")
    monkeypatch.setenv("HOME", str(tmp_path))
    store = opened(LoraConfig(adapters=(("one", "~/x"), ("two", str(tmp_path / "y")))))
    assert [(loaded.adapter.name, loaded.root) for loaded in store.all()] == [
        ("one", "~/x"),
        ("two", str(tmp_path / "y")),
    ]
    for name, path, why in (
        ("one", "~/nowhere", "is no directory"),
        ("base", "~/x", "is the name of the model itself"),
    ):
        with pytest.raises(ConfigError, match=f"^--lora {name}={path}: .*{why}"):
            opened(LoraConfig(adapters=((name, path),)))
