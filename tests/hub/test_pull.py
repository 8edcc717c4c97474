"""Downloads from a hub on loopback: which files, interruption and resumption, hashes, disk space, errors."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from twofold.api.errors import ConfigError, ModelLoadError
from twofold.hub.cache import cached_models
from twofold.hub.pull import Report, find_cached, local_model, pull_model
from twofold.hub.reference import HubModel, parse_hub_name
from twofold.vision.source import find_projector

from tests.hub.small_hub import COMMIT, Repository, SmallHub

QUIET = Report()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-30B-A3B", HubModel("Qwen/Qwen3-30B-A3B")),
        ("hf:a/b:Q4_K_M", HubModel("a/b", "Q4_K_M")),
        ("a/b:Q4_K_M@v1.2", HubModel("a/b", "Q4_K_M", "v1.2")),
        ("a/b@refs/pr/3", HubModel("a/b", None, "refs/pr/3")),
        ("a/b:sub/file.gguf", None),
        ("a/b.gguf", None),
        ("/a/b", None),
        ("../a/b", None),
        ("model", None),
        ("a/b/c", None),
    ],
)
def test_names(text: str, expected: HubModel | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_hub_name(text) == expected


def test_an_existing_path_takes_precedence_over_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert parse_hub_name("models/missing") is None
    assert parse_hub_name("hf:models/missing") == HubModel("models/missing")
    with pytest.raises(ConfigError, match="'hf:one' was given; expected hf:ORG/REPO"):
        parse_hub_name("hf:one")
    with pytest.raises(ConfigError, match="different revisions"):
        parse_hub_name("a/b@x", "y")


def test_only_weights_configuration_and_tokenizer_are_fetched(tiny: SmallHub, cache: Path) -> None:
    lines: list[str] = []
    shown: list[tuple[int, int]] = []
    report = Report(lines.append, lambda done, total, name: shown.append((done, total)))
    found = pull_model(HubModel("test/Tiny-MoE"), report)
    names = {file.name for file in found.path.iterdir()}
    repository = tiny.repositories["test/Tiny-MoE"].files
    assert names == repository.keys() - {"modeling_tiny.py", "pytorch_model.bin", "README.md"}
    assert all((found.path / name).read_bytes() == repository[name] for name in names)
    assert found.path == cache / "models--test--Tiny-MoE" / "snapshots" / COMMIT
    assert (cache / "models--test--Tiny-MoE/refs/main").read_text() == COMMIT
    assert shown[-1] == (found.num_bytes, found.num_bytes)
    assert COMMIT[:12] in lines[0]
    assert str(cache) in lines[0]
    tiny.requests.clear()
    assert local_model(HubModel("test/Tiny-MoE"), QUIET) == found
    assert not tiny.requests, "a complete model needs no hub"


def test_the_token_reaches_the_hub_alone(tiny: SmallHub) -> None:
    pull_model(HubModel("test/Tiny-MoE"), QUIET)
    sent = {path.startswith("/cdn/"): headers.get("authorization") for path, headers in tiny.requests}
    assert sent == {False: "Bearer hf_secret", True: None}


def test_a_pull_fetches_the_newest_commit_and_keeps_the_old_one(tiny: SmallHub) -> None:
    model = HubModel("test/Tiny-MoE")
    old = pull_model(model, QUIET)
    repository = tiny.repositories["test/Tiny-MoE"]
    repository.commit = "b" * 40
    repository.files["generation_config.json"] = b"{}"
    assert local_model(model, QUIET) == old
    new = pull_model(model, QUIET)
    assert new.commit == "b" * 40
    assert (new.path / "generation_config.json").read_bytes() == b"{}"
    assert local_model(model, QUIET) == new
    pinned = HubModel("test/Tiny-MoE", revision=COMMIT)
    assert local_model(pinned, QUIET).path == old.path


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_an_interrupted_file_continues_where_it_stopped(tiny: SmallHub, ignores_ranges: bool) -> None:
    size = len(tiny.repositories["test/Tiny-MoE"].files["model.safetensors"])
    tiny.cut_after = size // 3 + 1
    tiny.ignores_ranges = ignores_ranges
    if ignores_ranges:
        with pytest.raises(ModelLoadError, match="run the command again: what was downloaded is kept"):
            pull_model(HubModel("test/Tiny-MoE"), QUIET)
        assert find_cached(HubModel("test/Tiny-MoE")) is None
        tiny.cut_after = None
    pull_model(HubModel("test/Tiny-MoE"), QUIET)
    begins = [int(requested.removeprefix("bytes=").partition("-")[0]) for requested in tiny.ranges()]
    cut = size // 3 + 1
    assert begins[-1] == (cut if ignores_ranges else 2 * cut)
    assert find_cached(HubModel("test/Tiny-MoE")) is not None


def test_another_process_continues_a_partial_file(tiny: SmallHub, cache: Path) -> None:
    content = tiny.repositories["test/Tiny-MoE"].files["model.safetensors"]
    digest = tiny.repositories["test/Tiny-MoE"].sibling("model.safetensors")["lfs"]["sha256"]
    blobs = cache / "models--test--Tiny-MoE" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(content[:1000])
    lines: list[str] = []
    pull_model(HubModel("test/Tiny-MoE"), Report(lines.append))
    assert tiny.ranges() == ["bytes=1000-"]
    assert not list(blobs.glob("*.incomplete"))


def test_a_damaged_file_is_refused_and_fetched_again(tiny: SmallHub) -> None:
    tiny.damage = b"damage"
    with pytest.raises(ModelLoadError, match=r"model\.safetensors arrived damaged"):
        pull_model(HubModel("test/Tiny-MoE"), QUIET)
    tiny.damage = None
    assert pull_model(HubModel("test/Tiny-MoE"), QUIET).path.is_dir()


def test_a_full_disk_is_detected_before_the_download(tiny: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(2**40, 2**40 - 2**20, 2**20))
    with pytest.raises(ModelLoadError, match=r"which has 1\.05 MB free; free space, name another disk"):
        pull_model(HubModel("test/Tiny-MoE"), QUIET)
    assert not tiny.ranges()


def test_offline_uses_the_cache_and_names_what_is_missing(
    tiny: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pull_model(HubModel("test/Tiny-MoE"), QUIET)
    tiny.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull_model(HubModel("test/Tiny-MoE"), QUIET) == found
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids"):
        local_model(HubModel("test/Other"), QUIET)
    assert not tiny.requests


def test_an_incomplete_model_is_not_used(tiny: SmallHub) -> None:
    found = pull_model(HubModel("test/Tiny-MoE"), QUIET)
    (found.path / "model.safetensors").unlink()
    assert find_cached(HubModel("test/Tiny-MoE")) is None
    assert not list(cached_models())
    assert local_model(HubModel("test/Tiny-MoE"), QUIET) == found


@pytest.mark.parametrize(
    ("quant", "files"),
    [
        (None, ["M-Q4_K_M.gguf"]),
        ("q8_0", ["M-Q8_0.gguf"]),
        (
            "Q2_K_XL",
            ["UD-Q2_K_XL/M-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL/M-UD-Q2_K_XL-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_quantisation_is_fetched_with_all_its_parts(
    ggufs: SmallHub, quant: str | None, files: list[str]
) -> None:
    model = HubModel("test/Tiny-GGUF", quant)
    found = pull_model(model, QUIET)
    assert list(found.variant.files) == files
    assert str(found.path).endswith(files[0])
    assert [path for path, _ in ggufs.requests if "/resolve/" in path] == [
        f"/test/Tiny-GGUF/resolve/{COMMIT}/{name}" for name in ("mmproj-F16.gguf", *files)
    ]
    assert find_cached(model) == found
    projector = find_projector(found.path)
    assert projector is not None
    assert projector.read_bytes() == b"mmproj-F16.gguf" * 50


@pytest.mark.parametrize(
    ("names", "projector"),
    [
        (["M-Q4_K_M.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-BF16.gguf"),
        (["M-Q4_K_M.gguf", "M.mmproj-Q8_0.gguf", "M.mmproj-f16.gguf"], "M.mmproj-f16.gguf"),
        (["Q4_K_M/M-Q4_K_M.gguf", "Q4_K_M/mmproj-Q8_0.gguf", "mmproj-BF16.gguf"], "Q4_K_M/mmproj-Q8_0.gguf"),
        (["Q4_K_M/M-Q4_K_M.gguf", "other/mmproj-F16.gguf"], ""),
        (["M-Q4_K_M.gguf", "mmprojector.txt"], ""),
    ],
)
def test_the_projector_of_a_quantisation(hub: SmallHub, names: list[str], projector: str) -> None:
    hub.repositories["test/M"] = Repository({name: name.encode() * 50 for name in names})
    found = pull_model(HubModel("test/M"), QUIET)
    assert found.variant.projector == projector
    fetched = [name for name in names if (found.folder.snapshot(COMMIT) / name).exists()]
    assert sorted(fetched) == sorted(found.variant.downloads)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (HubModel("test/Nothing"), "no such repository, or it is private.*HF_TOKEN"),
        (HubModel("test/Gated"), "test/Gated is gated: accept its conditions.*HF_TOKEN"),
        (
            HubModel("test/Tiny-GGUF", "Q9_9"),
            "no Q9_9; give test/Tiny-GGUF:NAME with one of Q4_K_M, Q8_0, UD-Q2_K_XL",
        ),
        (HubModel("test/Tiny-GGUF", None, "v9"), "no revision 'v9'"),
        (
            HubModel("test/Pickles"),
            "expected safetensors weights .* or GGUF files; the repository has files of bin, py",
        ),
        (HubModel("test/Plain", "Q4_K_M"), "has safetensors weights and no GGUF file; give test/Plain"),
        (HubModel("test/Outside"), "a name outside the repository"),
    ],
)
def test_errors_name_a_remedy(ggufs: SmallHub, model: HubModel, message: str) -> None:
    plain = {"config.json": b"{}", "model.safetensors": b"x"}
    ggufs.repositories |= {
        "test/Gated": Repository(plain, gated=True),
        "test/Pickles": Repository({"pytorch_model.bin": b"x", "model.py": b""}),
        "test/Plain": Repository(plain),
        "test/Outside": Repository(plain | {"../../outside.gguf": b"x"}),
    }
    with pytest.raises(ModelLoadError, match=message) as refused:
        pull_model(model, QUIET)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/", "no description of a repository, as when a proxy or a login page"),
        ("/cdn/", r"sent a web page in place of model\S*\.safetensors, as a proxy or a login page"),
        ("/test/", r"sent a web page in place of \S+, as a proxy or a login page"),
    ],
)
def test_a_login_page_in_place_of_the_hub_is_named(tiny: SmallHub, path: str, message: str) -> None:
    tiny.page_at = path
    with pytest.raises(ModelLoadError, match=message) as refused:
        pull_model(HubModel("test/Tiny-MoE"), QUIET)
    assert "\n" not in str(refused.value)
    assert "check HF_ENDPOINT and the proxy" in str(refused.value)
    requested = [path for path, _ in tiny.requests]
    assert len(requested) == len(set(requested)), "a page is no interruption: nothing is asked again"
    tiny.page_at = None
    assert pull_model(HubModel("test/Tiny-MoE"), QUIET).path.is_dir()


def test_a_hub_that_does_not_answer(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelLoadError, match=r"the hub did not answer .*; check the network, HF_ENDPOINT"):
        pull_model(HubModel("test/Tiny-MoE"), QUIET)
