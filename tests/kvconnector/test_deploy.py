"""The recipes agree with one another, with the connector's settings, and with what they say of themselves."""

import importlib.util
import json
import re

import pytest
import yaml
from kvconnector.config import KeyNames, read_config

from kvsim.workload.load import load_trace
from tests.house.test_dashboard import faults
from tests.kvconnector.recipes import DEPLOY, command_of, engine_of
from tests.kvconnector.test_record import shared_blocks, write

READMES = sorted(DEPLOY.rglob("README.md"))
TRANSFERS = sorted(path for path in DEPLOY.rglob("*.json") if "kv_connector" in path.read_text(encoding="utf-8"))
OURS = [
    path for path in TRANSFERS if json.loads(path.read_text(encoding="utf-8")).get("kv_connector") == "KVTwinConnector"
]
NAMED = re.compile(r"vllm:kvtwin_\w+(?:\{[^}]*\})?")


def load(path):
    return json.loads((DEPLOY / path).read_text(encoding="utf-8"))


def config_of(mooncake, transfer):
    """As the connector reads them."""
    settings = load(transfer)
    environment = {"MOONCAKE_CONFIG_PATH": str(DEPLOY / mooncake)}
    return read_config(settings["kv_connector_extra_config"], settings["kv_role"], environment)


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_a_recipe_is_short_and_the_files_that_it_names_are_there(readme):
    text = readme.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (readme.parent / link).exists()] == []
    assert [fault for query in NAMED.findall(text) for fault in faults(query)] == []


def test_the_recipes_files_are_named_by_one_of_them():
    linked = {
        (readme.parent / link).resolve()
        for readme in READMES
        for link in re.findall(r"\]\(([^)#:]+)\)", readme.read_text(encoding="utf-8"))
    }
    ours = [path for part in ("embedded", "standalone", "rolling-over") for path in (DEPLOY / part).iterdir()]
    assert [path for path in [*ours, *DEPLOY.glob("*.*")] if path.resolve() not in linked and path not in READMES] == []


@pytest.mark.parametrize("transfer", OURS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_connector_takes_the_settings(transfer):
    settings = json.loads(transfer.read_text(encoding="utf-8"))
    read_config(settings["kv_connector_extra_config"], settings["kv_role"], {"MOONCAKE_MASTER": "m:1"})


def test_engines_of_a_standalone_store_lend_nothing_and_embedded_ones_do():
    standalone, embedded = (config_of(f"{name}/mooncake.json", f"{name}/kv-transfer.json").pool for name in RECIPES)
    assert (standalone.global_segment_bytes, embedded.global_segment_bytes) == (0, 64 << 30)
    assert standalone.master_server_address == embedded.master_server_address == "mooncake-master:50051"


RECIPES = ("standalone", "embedded")


def test_a_change_over_keeps_the_keys_and_then_gives_them_up():
    before = load("rolling-over/before.json")
    during, after = (config_of("rolling-over/mooncake.json", f"rolling-over/{stage}.json") for stage in STAGES)
    assert (before["kv_connector"], before["kv_connector_extra_config"]["cache_prefix"]) == (
        "MooncakeStoreConnector",
        during.cache_prefix,
    )
    assert (during.key_format, after.key_format) == (KeyNames.VLLM, KeyNames.KVTWIN)


STAGES = ("during", "after")


def test_an_engine_is_started_with_the_recipes_settings_and_whatever_else_is_said(tmp_path):
    arguments, config, environment = engine_of(
        DEPLOY, "standalone/mooncake.json", "standalone/kv-transfer.json", tmp_path
    )
    assert arguments == ["serve", "MODEL", "--port", "8000"]
    assert config == load("standalone/kv-transfer.json")
    assert environment == {"MOONCAKE_CONFIG_PATH": str(DEPLOY / "standalone/mooncake.json"), "PYTHONHASHSEED": "0"}


# -- logs of several engines, as one -----------------------------------------------------------------------------------


def sweep():
    spec = importlib.util.spec_from_file_location("sweep", DEPLOY / "pool-sizing" / "sweep.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def begun_later(path, seconds):
    """The same log, of an engine that began so much later."""
    header, *rows = path.read_text().splitlines()
    header = {**json.loads(header), "started_unix_ns": json.loads(header)["started_unix_ns"] + seconds * 10**9}
    path.write_text("\n".join([json.dumps(header), *rows]) + '\n{"half a line')
    return path


def test_logs_of_several_engines_are_one_trace(tmp_path):
    first = write(tmp_path / "first", ["aaaabbbbcccc", "aaaabbbbdddd"])
    second = begun_later(write(tmp_path / "second", ["aaaabbbbccccdddd", "aaaabbbbcccceeee", "xxxx"]), 10)
    merged = tmp_path / "merged"
    merged.write_text("".join(json.dumps(line) + "\n" for line in sweep().merge([first, second])))
    trace = load_trace(merged, use_cache=False)
    assert trace.input_len.tolist() == [12, 12, 16, 16, 4]
    starts_s = [start_ps / 1e12 for start_ps in trace.arrival_ps.tolist()]
    assert starts_s == pytest.approx([0, 1, 10, 11, 12], abs=0.5)
    contents = [trace.segments(row, 4) for row in range(5)]
    assert [shared_blocks(contents[0], other) for other in contents[1:]] == [2, 3, 3, 0]


def test_logs_that_name_content_differently_are_not_merged(tmp_path):
    logs = [write(tmp_path / f"log{key}", ["aaaa"], key=key) for key in ("", "secret")]
    with pytest.raises(AssertionError, match="differ in ids"):
        sweep().merge(logs)


# -- Kubernetes --------------------------------------------------------------------------------------------------------


def manifests(text):
    """{(kind, name): manifest}."""
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(text)}


def manifest_faults(text):
    """In what the manifests differ from the units and files that they are to be the same as, or from one another."""
    found, all_of = [], manifests(text)
    for kind, name, unit in (
        ("Deployment", "mooncake-master", "master.service"),
        ("DaemonSet", "mooncake-owner", OWNER),
    ):
        spec = all_of[kind, name]["spec"]
        (container,) = spec["template"]["spec"]["containers"]
        flags = {flag.replace("$(HOST)", "%H") for flag in container["command"][1:]}
        found += [f"{name} {flag}" for flag in flags ^ set(command_of(DEPLOY / unit)[1:])]
        labels = spec["template"]["metadata"]["labels"]
        found += [f"{name} selects others"] if spec["selector"]["matchLabels"] != labels else []
    service = all_of["Service", "mooncake-master"]["spec"]
    ports = {port["port"] for port in service["ports"]}
    (master,) = all_of["Deployment", "mooncake-master"]["spec"]["template"]["spec"]["containers"]
    found += [f"port {port}" for port in ports ^ {port["containerPort"] for port in master["ports"]}]
    files = all_of["ConfigMap", "kvtwin"]["data"]
    found += [name for name, content in files.items() if json.loads(content) != load(f"standalone/{name}")]
    return found


OWNER = "standalone/owner.service"
KUBERNETES = (DEPLOY / "standalone" / "kubernetes.yaml").read_text(encoding="utf-8")


def test_the_manifests_are_the_units_in_a_cluster():
    assert manifest_faults(KUBERNETES) == []
    assert len(manifests(KUBERNETES)) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("--protocol=tcp", "--protocol=rdma"),
        ("--client_ttl=10", "--client_ttl=20"),
        ("labels: {app: mooncake-owner}", "labels: {app: mooncake-owners}"),
        ("port: 9003}", "port: 9004}"),
        ('"local_buffer_size": "64MB"', '"local_buffer_size": "4GB"'),
    ],
)
def test_control_a_manifest_that_differs_is_found_out(old, new):
    assert KUBERNETES.count(old) == 1
    assert manifest_faults(KUBERNETES.replace(old, new)) != []
