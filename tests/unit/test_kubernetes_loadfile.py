"""What load tests read of a user's ConfigMap: checked, copied, mounted; and what is told when it can't be."""

import base64
import gzip
import hashlib
from pathlib import Path

import pytest
import yaml
from fake_cluster import NAMESPACE, FakeCluster
from fake_production import OWNER
from pydantic import ValidationError
from test_kubernetes_loadpod import make, request
from tunings import tuning

from tunewright.domain.load import Load, LoadFile
from tunewright.domain.tuning import Tuning
from tunewright.domain.workload import Workload, given_profile, workload_for
from tunewright.kube.resources import CONFIG_MAPS, PODS
from tunewright.loadtest.job import LoadJob
from tunewright.platform.kubernetes import loadfile
from tunewright.platform.kubernetes.loadfile import LoadFiles
from tunewright.platform.kubernetes.loadpod import PENDING_LIMIT
from tunewright.platform.kubernetes.names import Owner
from tunewright.ports import LoadPhase, PortError, Refused
from tunewright.promptsfile import Bounds

SAMPLE = Path(__file__).parents[2] / "deploy" / "samples" / "trace.yaml"
LINE = '{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
TRACE = LINE % 0 + LINE % 1500 + LINE % 3000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,480,44\n2023-11-16 18:17:04,396,109\n"
PROMPTS = '{"prompt": "a"}\n{"prompt": "b"}\n'
REPLAYED = Load.model_validate({"mode": "trace", "trace": {"configMap": "mine"}})
DRAWN = Load.model_validate({"lengths": {"trace": {"configMap": "mine"}}})
TEXTS = Load.model_validate({"promptsConfigMap": "mine"})


def put(cluster: FakeCluster, **more: object) -> None:
    cluster.put(CONFIG_MAPS, {"metadata": {"name": "mine"}, **more})


def packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode())).decode()


def files(cluster: FakeCluster, owner: Owner = OWNER) -> LoadFiles:
    return LoadFiles(cluster, owner, NAMESPACE)  # type: ignore[arg-type]


def keep(cluster: FakeCluster, load: Load = REPLAYED) -> LoadFile:
    found = files(cluster).keep(load)
    assert found is not None
    return found


def copies(cluster: FakeCluster) -> list[str]:
    return [name for plural, _, name in cluster.objects if plural == "configmaps" and "load-file" in name]


@pytest.mark.parametrize(
    ("load", "held", "key", "told"),
    [
        (REPLAYED, {"data": {"trace.jsonl": TRACE, "README": "x"}}, "trace.jsonl", "3 requests over 4s"),
        (DRAWN, {"data": {"trace.csv": AZURE}}, "trace.csv", "2 requests over 2s"),
        (REPLAYED, {"binaryData": {"trace.csv.gz": packed(AZURE)}}, "trace.csv.gz", "2 requests over 2s"),
        (TEXTS, {"data": {"prompts.jsonl": PROMPTS}}, "prompts.jsonl", "2 prompts"),
        (TEXTS, {"binaryData": {"prompts.jsonl.gz": packed(PROMPTS)}}, "prompts.jsonl.gz", "2 prompts"),
    ],
)
def test_a_good_one_is_copied_as_it_is(cluster, load, held, key, told):
    put(cluster, **held)
    kept = keep(cluster, load)
    assert keep(cluster, load) == kept, "it may be taken again after a crash"
    (name,) = copies(cluster)
    copy = cluster.edit(CONFIG_MAPS, name)
    content = base64.b64decode(copy["binaryData"][key])
    given = held.get("data", {}).get(key)
    assert content == (given.encode() if given else base64.b64decode(held["binaryData"][key]))
    assert (copy["immutable"], copy["metadata"]["ownerReferences"][0]["uid"]) == (True, OWNER.uid)
    assert (kept.key, kept.path) == (key, f"/etc/tunewright/configmaps/mine/{key}")
    assert kept.digest == hashlib.sha256(content).hexdigest()
    assert kept.told == f"{key} of ConfigMap mine: {told}, sha256 {kept.digest[:12]}"
    assert load.reading(kept.path).source[2:] == (kept.path, None)


@pytest.mark.parametrize(
    ("load", "held", "said"),
    [
        (REPLAYED, {}, r"^load\.trace\.configMap: ConfigMap mine has no key trace\.jsonl or trace\.csv or "),
        (DRAWN, {"data": {"prompts.jsonl": PROMPTS}}, r"^load\.lengths\.trace\.configMap: ConfigMap mine has no key"),
        (TEXTS, {"data": {"trace.jsonl": TRACE}}, r"^load\.promptsConfigMap: ConfigMap mine has no key prompts\.jsonl"),
        (
            REPLAYED,
            {"data": {"trace.jsonl": TRACE, "trace.csv": AZURE}},
            "has trace.jsonl and trace.csv: leave one of them",
        ),
        (REPLAYED, {"data": {"trace.jsonl": TRACE + "{"}}, r"^load\.trace\.configMap: mine/trace\.jsonl:4: this is no"),
        (REPLAYED, {"data": {"trace.csv": "a,b\n"}}, "mine/trace.csv"),
        (REPLAYED, {"data": {"trace.jsonl": ""}}, "mine/trace.jsonl has no"),
        (TEXTS, {"data": {"prompts.jsonl": "{}"}}, r"mine/prompts\.jsonl, line 1: prompt must be a text"),
        (
            REPLAYED,
            {"binaryData": {"trace.csv.gz": packed(AZURE)[:40]}},
            r"the trace mine/trace\.csv\.gz can't be read: it is damaged gzip",
        ),
        (TEXTS, {"binaryData": {"prompts.jsonl.gz": packed("x" * 300)}}, "it is larger than 0 KiB"),
        (REPLAYED, {"binaryData": {"trace.csv.gz": packed("x" * 300)}}, "larger than 0 KiB: cut it"),
    ],
)
def test_what_is_wrong_with_it_is_told_and_nothing_is_copied(cluster, monkeypatch, load, held, said):
    if "larger" in said:
        monkeypatch.setattr(loadfile, "UNPACKED", 256)
        monkeypatch.setattr(loadfile, "_PROMPTS", Bounds(256, 10))
    put(cluster, **held)
    with pytest.raises(Refused, match=said):
        files(cluster).keep(load)
    assert copies(cluster) == []


def test_one_that_is_not_there_is_waited_for_and_told(cluster):
    with pytest.raises(PortError, match=r"there is no ConfigMap mine in namespace prod; .*--from-file=trace\.jsonl`"):
        files(cluster).keep(REPLAYED)
    put(cluster, data={"trace.jsonl": TRACE})
    assert keep(cluster).key == "trace.jsonl"
    assert files(cluster).keep(Load()) is None


def test_an_edit_makes_another_copy_and_the_one_before_goes(cluster):
    put(cluster, data={"trace.jsonl": TRACE})
    before, others = keep(cluster), Owner("chat-2", "another")
    files(cluster, others).keep(REPLAYED)
    cluster.edit(CONFIG_MAPS, "mine")["data"]["trace.jsonl"] = TRACE + LINE % 4000
    after = keep(cluster)
    assert after.digest != before.digest
    assert sorted(copies(cluster)) == sorted(
        [files(cluster).ensure(after), f"chat-2-load-file-{before.digest[:10]}"]
    ), "another tuning's is not ours to drop"


def test_the_copy_of_an_earlier_tuning_of_this_name_is_waited_for(cluster):
    put(cluster, data={"trace.jsonl": TRACE})
    files(cluster, Owner(OWNER.name, "old")).keep(REPLAYED)
    with pytest.raises(PortError, match="of an earlier tuning and about to go"):
        files(cluster).keep(REPLAYED)
    (name,) = copies(cluster)
    cluster.delete(CONFIG_MAPS, name, NAMESPACE)
    assert files(cluster).ensure(keep(cluster)) == name


def test_a_copy_that_was_deleted_is_made_again_of_the_same_content_alone(cluster):
    put(cluster, data={"trace.jsonl": TRACE})
    kept = keep(cluster)
    (name,) = copies(cluster)
    cluster.delete(CONFIG_MAPS, name, NAMESPACE)
    assert files(cluster).ensure(kept) == name
    cluster.delete(CONFIG_MAPS, name, NAMESPACE)
    cluster.edit(CONFIG_MAPS, "mine")["data"]["trace.jsonl"] = AZURE
    with pytest.raises(Refused, match=r"deleted ConfigMap chat-load-file-.* no longer in ConfigMap mine: further"):
        files(cluster).ensure(kept)
    cluster.delete(CONFIG_MAPS, "mine", NAMESPACE)
    with pytest.raises(Refused, match="no longer in ConfigMap mine"):
        files(cluster).ensure(kept)
    cluster.put(CONFIG_MAPS, {"metadata": OWNER.metadata(name, "load-file"), "data": {"trace.jsonl": AZURE}})
    with pytest.raises(Refused, match="somebody replaced it"):
        files(cluster).ensure(kept)


def start(cluster: FakeCluster, run_id: str, kept: LoadFile) -> tuple[LoadJob, dict]:
    """The job and the pod of a run that reads it."""
    workload = request().workload.model_copy(update={"prompts_file": kept.path})
    make(cluster).start(run_id, request(workload=workload, file=kept))
    text = cluster.edit(CONFIG_MAPS, f"chat-{run_id}-load")["data"]["request.json"]
    return LoadJob.model_validate_json(text), cluster.edit(PODS, f"chat-{run_id}-load")["spec"]


def test_every_load_test_mounts_the_copy_where_its_job_reads_it(cluster):
    put(cluster, data={"prompts.jsonl": PROMPTS})
    kept = keep(cluster, TEXTS)
    specs = []
    for run_id in ("000-x-1", "001-y-1"):
        job, spec = start(cluster, run_id, kept)
        (volume,) = [each for each in spec["volumes"] if each["name"] == "file"]
        (mount,) = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "file"]
        (item,) = volume["configMap"]["items"]
        assert f"{mount['mountPath']}/{item['path']}" == job.workload.prompts_file == kept.path
        assert (item["key"], mount["readOnly"]) == (kept.key, True)
        specs.append(volume)
        cluster.edit(CONFIG_MAPS, "mine")["data"]["prompts.jsonl"] = '{"prompt": "other"}'
    assert specs[0] == specs[1], "an edit between two trials does not change what the second one reads"
    assert specs[0]["configMap"]["name"] in copies(cluster)
    cluster.tick()
    assert make(cluster).poll("001-y-1").detail == "starting"


def test_a_pod_that_waits_for_a_deleted_copy_is_given_up_with_the_cause(cluster):
    put(cluster, data={"prompts.jsonl": PROMPTS})
    kept = keep(cluster, TEXTS)
    start(cluster, "000-x-1", kept)
    (name,) = copies(cluster)
    cluster.delete(CONFIG_MAPS, name, NAMESPACE)
    cluster.tick()
    status = make(cluster).poll("000-x-1")
    assert (status.phase, status.detail) == (LoadPhase.RUNNING, "container load waits: ContainerCreating")
    cluster.tick(PENDING_LIMIT)
    status = make(cluster).poll("000-x-1")
    assert status.phase is LoadPhase.FAILED
    assert status.detail.endswith(f"ContainerCreating; ConfigMap {name}, which it mounts, is gone")
    make(cluster).cancel("000-x-1")
    cluster.tick()
    start(cluster, "000-x-2", kept)
    cluster.tick()
    assert make(cluster).poll("000-x-2").detail == "starting", "the next attempt made it again"


def test_a_file_is_for_one_machine_and_a_config_map_for_a_cluster() -> None:
    for load, here, there in (
        ({"mode": "trace", "trace": {"speed": 2}}, "trace.file", "trace.configMap"),
        ({"lengths": {"trace": {}}}, "lengths.trace.file", "lengths.trace.configMap"),
        ({}, "promptsFile", "promptsConfigMap"),
    ):

        def named(path: str, load: dict = load) -> dict:
            """The load with its file named at `path`."""
            *blocks, field = path.split(".")
            found: dict = {**load}
            inner = found
            for block in blocks:
                inner[block] = dict(inner[block])
                inner = inner[block]
            inner[field] = "p"
            return found

        cluster = {"deployment": "chat"}
        with pytest.raises(
            ValidationError, match=rf"load\.{here} is a file on this machine.*name a ConfigMap, load\.{there}"
        ):
            tuning(target=cluster, load=named(here))
        with pytest.raises(
            ValidationError, match=rf"load\.{there} is for clusters: on one machine name a file, load\.{here}"
        ):
            tuning(load=named(there))
        assert tuning(target=cluster, load=named(there)).spec.load.source.field == there
        assert tuning(load=named(here)).spec.load.source.field == here
    for both in (
        {"promptsFile": "p", "promptsConfigMap": "p"},
        {"lengths": {"trace": {"file": "p", "configMap": "p"}}},
    ):
        with pytest.raises(ValidationError, match=r"name (only )?one of"):
            tuning(load=both)
    with pytest.raises(ValidationError, match="promptsConfigMap can't be with mode highestRate"):
        tuning(target=cluster, load={"mode": "highestRate", "promptsConfigMap": "p"})
    with pytest.raises(ValidationError, match="promptsConfigMap can't be with mode trace"):
        tuning(target=cluster, load={"mode": "trace", "trace": {"configMap": "p"}, "promptsConfigMap": "p"})


def test_the_sample_is_one_that_works(cluster) -> None:
    config_map, document = yaml.safe_load_all(SAMPLE.read_text())
    cluster.put(CONFIG_MAPS, config_map)
    kept = keep(cluster, Tuning.model_validate(document).spec.load)
    assert kept.told.startswith("trace.csv of ConfigMap llm-trace: 6 requests over 4s, ")


def test_a_name_that_no_config_map_has_is_refused() -> None:
    with pytest.raises(ValidationError, match="configMap"):
        tuning(target={"deployment": "chat"}, load={"mode": "trace", "trace": {"configMap": "../etc"}})


def test_another_config_map_starts_anew_and_a_workload_is_never_of_a_name_alone() -> None:
    loads = ({"promptsConfigMap": "a"}, {"promptsConfigMap": "b"}, {"lengths": {"trace": {"configMap": "a"}}}, {})
    assert len({tuning(target={"deployment": "chat"}, load=load).spec.spec_hash for load in loads}) == len(loads)
    profile = given_profile(Load(concurrency=2, prompt_tokens=8, output_tokens=4), 0.0)
    for load in (REPLAYED, DRAWN, TEXTS):
        with pytest.raises(AssertionError, match="the copy of the ConfigMap is wanted"):
            workload_for(load, profile)
    for load in (REPLAYED, DRAWN):
        workload = workload_for(load.reading("/there"), profile)
        assert (workload.trace or workload.pairs_of).path == "/there"
    assert workload_for(TEXTS.reading("/there"), profile).prompts_file == "/there"
    lengths = {"prompt_tokens": {"fixed": 1}, "output_tokens": {"fixed": 1}}
    with pytest.raises(ValidationError, match="a load test reads a trace from a file"):
        Workload.model_validate({"trace": {"config_map": "mine"}, **lengths})
