"""Files of expert statistics: both forms round trip, and everything that is not one is refused in words."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from twofold.api.errors import ConfigError
from twofold.experts.expert_statistics import read_statistics, write_statistics
from twofold.experts.placement_files import read_placement
from twofold.tools.lab.trace import load_trace

COUNTS = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("name", ["a.npz", "a.pt"])
def test_both_forms_add_up_their_buffers(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    write_statistics(path, COUNTS, model="tiny")
    np.testing.assert_array_equal(read_statistics(path, 3, 4), COUNTS.sum(axis=0))
    write_statistics(path, COUNTS[1])
    np.testing.assert_array_equal(read_statistics(path, 3, 4), COUNTS[1])
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_a_file_of_all_layers_is_read_for_those_with_experts(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    write_statistics(path, COUNTS, moe_layers=[1, 2, 4], num_layers=5)
    assert torch.load(path, weights_only=True)["logical_count"].shape == (2, 5, 4)
    np.testing.assert_array_equal(read_statistics(path, 3, 4, moe_layers=[1, 2, 4]), COUNTS.sum(axis=0))
    with pytest.raises(ConfigError, match="5 layers of 4 experts, the model has 3 layers of 4"):
        read_statistics(path, 3, 4, moe_layers=[0, 1, 2])  # layer 4 has counts


@pytest.mark.parametrize("name", ["a.npz", "a.pt"])
def test_a_file_without_the_mtp_layer_is_read_for_a_model_with_it(tmp_path: Path, name: str) -> None:
    """Recorded by a run without `mtp`: the layer's experts count as the others' mean, so hot experts stay first."""
    path = tmp_path / name
    write_statistics(path, COUNTS, moe_layers=[1, 2, 3], num_layers=4)
    own = COUNTS.sum(axis=0)
    found = read_statistics(path, 4, 4, moe_layers=[1, 2, 3, 4], num_mtp_layers=1)
    np.testing.assert_array_equal(found, [*own, [23] * 4])  # 276 counts of 12 experts
    with_it = np.array([*COUNTS[0], [7, 0, 0, 1]])
    write_statistics(path, with_it)
    found = read_statistics(path, 4, 4, moe_layers=[1, 2, 3, 4], num_mtp_layers=1)
    np.testing.assert_array_equal(found, with_it)
    write_statistics(path, COUNTS[:, :2])
    with pytest.raises(ConfigError, match="2 layers of 4 experts, the model has 4 layers of 4"):
        read_statistics(path, 4, 4, moe_layers=[1, 2, 3, 4], num_mtp_layers=1)


class Unsafe:
    pass


def test_what_is_not_statistics_is_refused(tmp_path: Path) -> None:
    def saved(name: str, what: object) -> Path:
        torch.save(what, tmp_path / name)
        return tmp_path / name

    counts = tmp_path / "counts.npz"
    write_statistics(counts, COUNTS)
    cut = tmp_path / "cut.npz"
    cut.write_bytes(counts.read_bytes()[:60])
    none = tmp_path / "none.npz"
    write_statistics(none, 0 * COUNTS)
    other = tmp_path / "other.npz"
    np.savez(other, ids=COUNTS)
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, logical_count=np.array([Unsafe()], object))
    for path, message in [
        (counts.with_name("counts.txt"), "ends in .npz or .pt"),
        (tmp_path / "missing.pt", "no such file"),
        (cut, "truncated or not an npz"),
        (none, "all counts are zero"),
        (other, "holds ids; expected an npz with 'logical_count'"),
        (pickled, "its arrays hold Python objects"),
        (saved("unsafe.pt", {"logical_count": Unsafe()}), "not a .pt file"),
        (saved("keys.pt", {"records": []}), "holds records; expected what SGLang"),
        (saved("nan.pt", {"logical_count": torch.full((1, 3, 4), float("nan"))}), "cannot be counts"),
        (saved("minus.pt", {"logical_count": torch.full((1, 3, 4), -1)}), "cannot be counts"),
        (
            saved("flat.pt", {"logical_count": torch.ones(12)}),
            r"shape \(12,\); numbers of shape \(buffers, 3, 4\)",
        ),
        (
            saved("model.pt", {"logical_count": torch.ones(1, 3, 8)}),
            "3 layers of 8 experts, the model has 3 layers of 4",
        ),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_statistics(path, 3, 4)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_statistics(tmp_path / "nowhere" / "a.npz", COUNTS)


def foreign_files(folder: Path) -> list[Path]:
    """Files of other kinds, which numpy and torch try to unpickle."""
    (folder / "text.pt").write_text("hello\n")
    (folder / "empty.pt").touch()
    (folder / "protocol4.pt").write_bytes(pickle.dumps({"logical_count": 1}, protocol=4))
    torch.save(torch.nn.Linear(2, 2), folder / "module.pt")
    (folder / "text.npz").write_text("hello\n")
    (folder / "text.txt").write_text("hello\n")
    (folder / "pickle.npz").write_bytes(pickle.dumps(COUNTS))
    objects = np.array([{}], dtype=object)
    np.savez(folder / "objects.npz", logical_count=objects, resident=objects, ids=objects)
    return sorted(folder.iterdir())


@pytest.mark.parametrize(
    "read",
    [lambda path: read_statistics(path, 3, 4), read_placement, load_trace],
    ids=["statistics", "placement", "trace"],
)
def test_a_wrong_file_is_one_plain_line_without_advice_to_unpickle(
    read: Callable[[Path], object],
    tmp_path: Path,
    recwarn: pytest.WarningsRecorder,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for path in foreign_files(tmp_path):
        if read is read_placement and path.suffix == ".pt":
            continue  # it is not opened: its reader is that of statistics
        with pytest.raises(ConfigError) as refused:
            read(path)
        reported = str(refused.value)
        assert reported.startswith(str(path))
        assert "expected" in reported or "ends in .npz or .pt" in reported
        assert reported.isprintable()
        assert not re.search("allow_pickle|weights_only|unsafe|trust|pickle.load|PyTorch", reported)
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")
