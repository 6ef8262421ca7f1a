"""A pod template taken apart into candidate and rest, and put together for another candidate."""

import copy

import pytest
from fake_production import ARGS, BASELINE, NEW, container, deployment

from tunewright.domain.candidate import Candidate
from tunewright.platform.kubernetes.podtemplate import PodTemplate, SecretKey
from tunewright.platform.kubernetes.shellwords import read_script
from tunewright.platform.kubernetes.workload import Overrides
from tunewright.ports import Refused


def template(**more) -> dict:
    return {"metadata": {"labels": {"app": "x"}}, "spec": {"containers": [container(**more)]}}


def test_args_are_read_and_only_the_changed_knob_is_written():
    given = template()
    before = copy.deepcopy(given)
    read = PodTemplate(given)
    assert read.candidate == BASELINE
    assert read.port == 8000
    rendered = read.render(NEW)
    changed = [word if word != "8" else "64" for word in ARGS]
    assert rendered["spec"]["containers"][0]["args"] == changed
    rendered["spec"]["containers"][0]["args"] = ARGS
    assert rendered == given == before
    assert read.render(BASELINE) == given


def test_what_nobody_knows_is_carried():
    given = template(futureField={"x": [1, {"y": None}]}, env=[{"name": "A", "valueFrom": {"fieldRef": {"z": 1}}}])
    given["spec"]["evenMore"] = {"deep": [True]}
    rendered = PodTemplate(given).render(NEW)
    rendered["spec"]["containers"][0]["args"] = ARGS
    assert rendered == given


@pytest.mark.parametrize(
    ("command", "args", "leaf"),
    [
        (["vllm", "serve"], ["m", "--max-num-seqs", "8"], {"args": ["m", "--max-num-seqs", "64"]}),
        (
            ["vllm", "serve", "m", "--max-num-seqs", "8"],
            None,
            {"command": ["vllm", "serve", "m", "--max-num-seqs", "64"]},
        ),
        (
            ["python3", "-m", "vllm.entrypoints.openai.api_server"],
            ["--model", "m", "--max-num-seqs", "8"],
            {"args": ["--model", "m", "--max-num-seqs", "64"]},
        ),
        (
            ["/bin/sh", "-c"],
            ["exec vllm serve 'some model'  --max-num-seqs 8 \\\n  --seed \"7\"\n"],
            {"args": ["exec vllm serve 'some model'  --max-num-seqs 64 \\\n  --seed \"7\"\n"]},
        ),
        (
            ["bash", "-c", "vllm serve m --max-num-seqs 8"],
            None,
            {"command": ["bash", "-c", "vllm serve m --max-num-seqs 64"]},
        ),
        (
            ["tini", "--"],
            ["vllm", "serve", "m", "--max-num-seqs", "8"],
            {"args": ["vllm", "serve", "m", "--max-num-seqs", "64"]},
        ),
    ],
)
def test_every_form_has_one_leaf_that_changes(command, args, leaf):
    given = template(command=command)
    if args is None:
        del given["spec"]["containers"][0]["args"]
    else:
        given["spec"]["containers"][0]["args"] = args
    read = PodTemplate(given)
    assert read.candidate.values == {"max_num_seqs": 8}
    candidate = Candidate(values={"max_num_seqs": 64})
    assert read.leaves(candidate) == {"name": "vllm", **leaf}
    rendered = read.render(candidate)
    assert PodTemplate(rendered).candidate == candidate
    assert PodTemplate(rendered).base == read.base
    assert PodTemplate(rendered).render(Candidate(values={"max_num_seqs": 8})) == given


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("vllm serve m | tee log", "a pipe"),
        ("cd /x && vllm serve m", "`&`"),
        ("vllm serve $MODEL", "a variable"),
        ('vllm serve "$MODEL"', "a variable"),
        ("vllm serve `cat m`", "a command substitution"),
        ("vllm serve m > log", "a redirection"),
        ("vllm serve m; sleep 9", "`;`"),
        ("set -e\nvllm serve m", "several lines"),
        ("vllm serve m # ours", "a comment"),
        ("X=1 vllm serve m", "put it into `env`"),
        ("vllm serve /models/*", "which the shell expands"),
        ("vllm serve 'm", "a quote that is not closed"),
        ("if true", "begins with `if`"),
        ("  ", "is empty"),
    ],
)
def test_a_script_that_is_more_than_one_simple_command_is_refused(script, reason):
    with pytest.raises(Refused, match=reason):
        PodTemplate(template(command=["sh", "-c"], args=[script]), "vllm")


def test_a_script_keeps_the_bytes_of_what_does_not_change():
    script = read_script(" vllm   serve 'a b'\t--x=\"1 2\" \\\n --y z\\ z\n\n")
    assert script.values == ["vllm", "serve", "a b", "--x=1 2", "--y", "z z"]
    assert script.with_words(script.values) == " vllm   serve 'a b'\t--x=\"1 2\" \\\n --y z\\ z\n\n"
    assert script.with_words([*script.values[:4], "--new", "it's"]) == (
        " vllm   serve 'a b'\t--x=\"1 2\" --new 'it'\"'\"'s'\n\n"
    )
    assert read_script("vllm serve '$x' \"a\\$b\"").values == ["vllm", "serve", "$x", "a$b"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"command": ["/start.sh"], "args": []}, "is not seen to be vLLM"),
        ({"command": ["sh", "-c", "vllm serve m", "x"], "args": []}, "the one script behind it"),
        ({"command": ["bash", "-c"], "args": ["/start.sh serve-all"]}, "does not run vLLM itself"),
        ({"args": [*ARGS, "--uds", "/run/x"]}, "--uds"),
        ({"args": [*ARGS, "--ssl-keyfile", "/k"]}, "TLS"),
        ({"args": [*ARGS, "--host", "127.0.0.1"]}, "only the pod itself"),
        ({"args": [*ARGS, "--nnodes", "2"]}, "several nodes"),
        (
            {"command": ["vllm", "serve", "m", "--max-num-seqs", "4"], "args": ["--seed", "1"]},
            "move the flags into `args`",
        ),
        ({"args": [*ARGS, "--max-num-batched-tokens", "$(TOKENS)"]}, "write a plain value"),
        ({"env": [{"name": "OMP_NUM_THREADS", "valueFrom": {"configMapKeyRef": {}}}]}, "valueFrom"),
    ],
)
def test_what_can_not_be_tuned_is_refused_with_the_reason(more, reason):
    with pytest.raises(Refused, match=reason):
        PodTemplate(template(**more), "vllm")


def test_the_container_is_found_beside_sidecars_or_named():
    given = template()
    given["spec"]["containers"].insert(0, {"name": "proxy", "image": "envoy:1"})
    assert (PodTemplate(given).name, PodTemplate(given).index) == ("vllm", 1)
    with pytest.raises(Refused, match="there are proxy, vllm"):
        PodTemplate(given, "other")
    given["spec"]["containers"].append({"name": "two", "image": "x", "command": ["vllm", "serve", "b"]})
    with pytest.raises(Refused, match="vllm, two all run vLLM"):
        PodTemplate(given)
    assert PodTemplate(given, "two").name == "two"
    with pytest.raises(Refused, match=r"name it: target\.container"):
        PodTemplate({"spec": {"containers": [{"name": "a", "image": "llm:1", "args": ["m"]}]}})


def test_knobs_in_the_environment_are_entries_of_their_own():
    theirs = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        {"name": "OMP_NUM_THREADS", "value": "04"},
    ]
    read = PodTemplate(template(env=theirs))
    assert read.candidate.values["omp_num_threads"] == 4
    same = read.candidate
    assert read.render(same)["spec"]["containers"][0]["env"] == theirs
    assert "env" not in read.leaves(same)
    assert read.leaves(same, {"OMP_NUM_THREADS"})["env"] == [{"name": "OMP_NUM_THREADS", "value": "04"}]
    eight = same.with_value("omp_num_threads", 8)
    assert read.leaves(eight)["env"] == [{"name": "OMP_NUM_THREADS", "value": "8"}]
    assert read.render(eight)["spec"]["containers"][0]["env"] == [theirs[0], {"name": "OMP_NUM_THREADS", "value": "8"}]
    without = same.with_value("omp_num_threads", None)
    assert read.render(without)["spec"]["containers"][0]["env"] == theirs[:1]
    with pytest.raises(Refused, match="can't be taken out"):
        read.leaves(without)
    assert "env" not in read.leaves(without, {"OMP_NUM_THREADS"})


def test_the_base_names_all_but_the_knobs():
    read = PodTemplate(template())
    assert read.base == PodTemplate(template(args=[*ARGS, "--max-num-batched-tokens", "4096"])).base
    assert read.base != PodTemplate(template(image="vllm/vllm-openai:v0.33.0")).base
    assert read.base != PodTemplate(template(args=[*ARGS, "--seed", "4"])).base


def test_keys_are_known_by_reference_and_never_shown():
    by_reference = [{"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "vllm"}}}]
    assert PodTemplate(template(env=by_reference)).api_key == SecretKey("keys", "vllm")
    plain = PodTemplate(template(args=[*ARGS, "--api-key", "sesame"]))
    assert plain.api_key == "sesame"
    assert "sesame" not in plain.show(NEW)
    assert "sesame" not in plain.change(BASELINE, NEW)
    assert "max_num_seqs: 8 → 64" in plain.change(BASELINE, NEW)


def test_overrides_change_the_spare_alone():
    pod = deployment()["spec"]["template"]["spec"]
    Overrides({"gpu": "spare"}, [{"key": "spare", "operator": "Exists"}], 2, "cache").put_on(pod, 0)
    assert pod["nodeSelector"] == {"gpu": "spare"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert pod["tolerations"] == [{"key": "spare", "operator": "Exists"}]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "cache"}
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/root/.cache/vllm"
    assert deployment()["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
