import json
import math
from pathlib import Path
from typing import Any

import jax
import pytest

from autopar.cluster import Cluster, Piece
from autopar.errors import ArgumentError, ClusterError
from autopar.hardware import Device, Level, Link, load_preset, preset_names
from autopar.ir.mesh import Mesh

MEASURED = Level(
    "host",
    4,
    1e-6,
    1e-11,
    links=(
        Link("all-reduce", 1e-6, 2e-11, 1e6),
        Link("all-reduce", 2e-6, 1e-11),
        Link("all-gather", 1e-6, 1e-11),
    ),
    source="measured",
)


def cluster_of(*levels: Level) -> Cluster:
    return Cluster(levels, Device("d"))


def test_abstract_is_its_numbers() -> None:
    cluster = Cluster.abstract(
        shape=(2, 4),
        alpha=(1e-5, 1e-6),
        beta=(1e-10, 1e-11),
        peak_flops=1e14,
        memory_bandwidth=1e12,
        memory_bytes=80e9,
    )
    assert (cluster.shape, cluster.size, cluster.kind) == ((2, 4), 8, "abstract")
    assert [(level.alpha, level.beta) for level in cluster.levels] == [(1e-5, 1e-10), (1e-6, 1e-11)]
    assert cluster.device.peak("bfloat16") == 1e14
    assert cluster.device.memory_bytes == 80e9


def test_abstract_compute_is_free_unless_given() -> None:
    device = Cluster.abstract((8,)).device
    assert device.peak("float32") == device.memory_bandwidth == device.memory_bytes == math.inf


def test_abstract_needs_one_figure_a_level() -> None:
    with pytest.raises(ClusterError, match="one alpha and one beta for each level"):
        Cluster.abstract((2, 4), alpha=(1.0,), beta=(1.0, 1.0))
    with pytest.raises(ClusterError, match="at least one level"):
        Cluster.abstract((), alpha=(), beta=())
    with pytest.raises(ClusterError, match="peak_flops"):
        Cluster.abstract((2,), peak_flops=0)


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.abstract((2, 4), alpha=(1.0, 1.0), beta=(1.0, 0.01)),
        Cluster.preset("h100-80g", hosts=8, devices_per_host=8),
        Cluster.ray(2, 4, "10.0.0.1:6379"),
        Cluster.ray(hosts=2, devices_per_host=4),
        cluster_of(Level("network", 3, 0.0, 0.0), MEASURED),
    ],
    ids=str,
)
def test_saved_and_loaded(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    cluster.save(path)
    assert Cluster.load(path) == cluster
    assert Cluster.parse(str(path)) == cluster
    first = path.read_bytes()
    cluster.save(path)
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_local_keeps_ids_and_survives_json(tmp_path: Path) -> None:
    cluster = Cluster.local()
    devices = jax.local_devices()
    assert cluster.kind == "local"
    assert cluster.shape == (len(devices),)
    assert cluster.device_ids == tuple(device.id for device in devices)
    assert cluster == Cluster.local(devices) == Cluster.parse("local")
    assert Cluster.local(devices[-1:]).device_ids == (devices[-1].id,)
    assert Cluster.parse("local:1") == Cluster.local(1) == Cluster.local(devices[:1])
    cluster.save(tmp_path / "local.json")
    assert Cluster.load(tmp_path / "local.json") == cluster


def test_local_refuses_devices_it_has_not() -> None:
    count = len(jax.local_devices()) + 1
    with pytest.raises(ClusterError, match="xla_force_host_platform_device_count"):
        Cluster.local(count)
    with pytest.raises(ClusterError, match="at least one device"):
        Cluster.local([])


class Unheard:
    device_kind = "Quantum 9"
    id = 3


def test_local_of_an_unknown_device_says_whose_figures_it_uses() -> None:
    cluster = Cluster.local([Unheard()])
    assert cluster.device.name == "Quantum 9"
    assert cluster.device.source.startswith("no preset for this device")
    assert cluster.device.peak_flops == load_preset("cpu").device.peak_flops


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "c.json"
    target.mkdir()
    with pytest.raises(ClusterError, match="cannot be written"):
        Cluster.abstract((2,)).save(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]
    with pytest.raises(ClusterError, match="cannot be written"):
        Cluster.abstract((2,)).save(tmp_path / "absent" / "c.json")


def test_infinity_is_null() -> None:
    data = Cluster.abstract((2,)).to_json()
    assert data["device"]["memory_bytes"] is None
    assert data["device"]["peak_flops"] == {"default": None}
    assert "Infinity" not in json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("autopar_cluster",), 2, r"file.json: autopar_cluster(.|\n)*version 1"),
        (("levels", 0, "beta"), "fast", r"file.json: levels\[0\].beta(.|\n)*must be a number"),
        (("levels", 1, "alpha"), -1.0, r"alpha is a finite number(.|\n)*file.json: levels\[1\]"),
        (("levels", 1, "size"), 0, r"at least one unit(.|\n)*file.json: levels\[1\]"),
        (("levels", 1, "size"), True, r"levels\[1\].size(.|\n)*whole number"),
        (("levels", 1, "links", 0, "kind"), "gossip", r"unknown collective(.|\n)*levels\[1\]"),
        (("levels", 1, "links", 0, "max_bytes"), None, r"ranges of all-reduce are out of order"),
        (("levels", 1, "links", 1, "max_bytes"), 9e9, r"ranges of all-reduce are out of order"),
        (("levels",), {}, "file.json: levels(.|\n)*list of objects"),
        (("levels",), [], "at least one level(.|\n)*file.json: top level"),
        (("device", "memory_bytes"), math.nan, "device.memory_bytes(.|\n)*number or null"),
        (("device", "peak_flops"), {}, '"default"(.|\n)*file.json: device'),
        (("device", "memory_bandwith"), 1, "unknown key(.|\n)*'memory_bandwidth'"),
        (("kind",), "cloud", "unknown kind of cluster(.|\n)*file.json"),
        (("kind",), 3, "file.json: kind(.|\n)*must be a string"),
        (("device_ids",), [1], "as many device ids"),
        (("device_ids",), ["a"], "file.json: device_ids"),
        (("address",), 5, "file.json: address"),
    ],
)
def test_malformed_files_name_file_and_key(
    path: tuple[str | int, ...], value: Any, message: str
) -> None:
    data = json.loads(json.dumps(cluster_of(Level("net", 2, 0.0, 0.0), MEASURED).to_json()))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(data, file="file.json")


@pytest.mark.parametrize(
    ("text", "message"), [("{\n1", r"c.json:2"), ("[]", "one JSON object"), ("", "not JSON")]
)
def test_files_that_are_no_objects(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        Cluster.load(path)


def test_missing_file_and_missing_key(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"absent.json"):
        Cluster.parse(str(tmp_path / "absent.json"))
    with pytest.raises(ClusterError, match=r"autopar_cluster(.|\n)*no such key"):
        Cluster.from_json({})


def test_parse_texts() -> None:
    assert Cluster.parse("h100-80g:8x8") == Cluster.preset("h100-80g", hosts=8, devices_per_host=8)
    assert Cluster.parse("a100-40g:4").shape == (1, 4)
    assert Cluster.parse("ray:2x4") == Cluster.ray(2, 4)
    assert Cluster.parse("ray:2x4").address is None
    abstract = Cluster.parse("abstract:2x4")
    assert (abstract.kind, abstract.shape) == ("abstract", (2, 4))
    assert abstract.device == load_preset("abstract").device
    assert Cluster.parse("abstract:8").shape == (8,)
    assert Cluster.parse("abstract:2x2x2").shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-80gb:8x8", "'h100-80gb'(.|\n)*h100-80g"),
        ("h10080g", "h100-80g"),
        ("zzz:1x1", "one of a100-40g"),
        ("h100-80g", "sizes from 1, such as 2x4"),
        ("h100-80g:8x8x8", "too many sizes"),
        ("h100-80g:0x8", "sizes from 1, such as 2x4"),
        ("local:2x2", "too many sizes"),
        ("ray", "PRESET:HxD"),
        ("ray:x", "PRESET:HxD"),
        ("", "PRESET:HxD"),
        (":4", "PRESET:HxD"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.parse(text)


def test_ray_only_describes() -> None:
    cluster = Cluster.ray(2, 4, "auto", device="h200")
    assert (cluster.kind, cluster.shape, cluster.address) == ("ray", (2, 4), "auto")
    assert cluster.device == load_preset("h200").device


def test_axis_costs_by_level() -> None:
    cluster = Cluster.abstract((2, 4), alpha=(5.0, 1.0), beta=(0.5, 0.1))
    outer, inner = (0, 5.0, 0.5), (1, 1.0, 0.1)

    def piece(size: int, level: tuple[int, float, float]) -> Piece:
        return Piece(level[0], size, level[1], level[2])

    assert cluster.axis_costs(Mesh.of(8)) == ((piece(4, inner), piece(2, outer)),)
    assert cluster.axis_costs(Mesh.of(2, 4)) == ((piece(2, outer),), (piece(4, inner),))
    assert cluster.axis_costs(Mesh.of(4, 2)) == (
        (piece(2, inner), piece(2, outer)),
        (piece(2, inner),),
    )
    assert cluster.axis_costs(Mesh.of(1, 8, 1)) == ((), (piece(4, inner), piece(2, outer)), ())
    with pytest.raises(ArgumentError, match="does not fit 8"):
        cluster.axis_costs(Mesh.of(4))


@pytest.mark.parametrize("mesh", [Mesh.of(4), Mesh.of(4, 1)])
def test_axis_costs_of_a_flat_mesh(mesh: Mesh) -> None:
    cluster = Cluster.abstract(shape=(4, 1), alpha=(1, 1), beta=(1, 1))
    assert cluster.axis_costs(mesh)[0] == (Piece(0, 4, 1.0, 1.0),)


def test_an_axis_that_straddles_hosts_has_the_slowest_figures() -> None:
    cluster = Cluster.abstract((2, 3), alpha=(1.0, 7.0), beta=(0.5, 0.1))
    assert cluster.axis_costs(Mesh.of(3, 2)) == (
        (Piece(0, 3, 7.0, 0.5),),
        (Piece(0, 2, 7.0, 0.5),),
    )


def test_submesh() -> None:
    cluster = Cluster.preset("a100-80g", hosts=4, devices_per_host=8)
    part = cluster.submesh((1, 4))
    assert part.shape == (1, 4)
    assert [level.beta for level in part.levels] == [level.beta for level in cluster.levels]
    assert Cluster.local().submesh((1,)).device_ids == ()
    for shape in ((1, 3), (8,), (0, 8)):
        with pytest.raises(ClusterError, match="divisor of each level"):
            cluster.submesh(shape)


def test_describe_and_text() -> None:
    cluster = Cluster.preset("h100-80g", hosts=8, devices_per_host=8)
    text = cluster.describe()
    assert text.splitlines()[0] == "preset cluster of 64 devices, 8x8"
    assert "network: 8" in text
    assert "host: 8" in text
    assert "bfloat16 9.895e+14 FLOP/s" in text
    assert str(cluster) == "preset:h100-80g:8x8"
    assert "3 measured" in cluster_of(MEASURED).describe()
    assert "free bytes" in cluster_of(Level("l", 2, 0.0, 0.0)).describe()


def test_presets_named_in_the_contract_ship() -> None:
    needed = {"v100-16g", "v100-32g", "a100-40g", "a100-80g", "h100-80g", "h200", "b200", "cpu"}
    assert needed | {"tpu-v5e", "abstract"} <= set(preset_names())
