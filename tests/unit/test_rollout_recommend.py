"""The winner as files that other tools take as they are."""

import pytest
import yaml
from restapi import waiting

from tunewright.domain.candidate import Candidate
from tunewright.domain.phases import Phase
from tunewright.domain.recipe import Recipe
from tunewright.domain.state import TuningRecord
from tunewright.domain.step import update
from tunewright.knobs.catalogue import CATALOGUE
from tunewright.ports import Refused
from tunewright.rollout.recommend import STACK_VALUES, Form, Recommendation, recommendation

BASELINE = Candidate(values={"max_num_seqs": 8, "block_size": 32, "omp_num_threads": 2})
WINNER = Candidate(values={"max_num_seqs": 64, "async_scheduling": True, "enable_prefix_caching": False})
ARGS = ("m", "--max-num-seqs", "64", "--async-scheduling")
DEPLOYED = Recipe(args=ARGS, namespace="team", deployment="llm", container="vllm")


def record(recipe: Recipe | None, winner: Candidate = WINNER) -> TuningRecord:
    return update(waiting(), winner=winner, baseline=BASELINE, recipe=recipe)


def written(found: Recommendation, name: str) -> object:
    return yaml.safe_load(next(file.text for file in found.files if file.name == name))


def test_kustomize_is_a_patch_and_the_line_that_names_it() -> None:
    found = recommendation(record(DEPLOYED), Form.KUSTOMIZE)
    assert written(found, "kustomization.yaml") == {"patches": [{"path": "tunewright-llm.yaml"}]}
    patch = written(found, "tunewright-llm.yaml")
    assert isinstance(patch, dict)
    assert patch["metadata"] == {"name": "llm", "namespace": "team"}
    container = patch["spec"]["template"]["spec"]["containers"][0]
    assert container["name"] == "vllm"
    assert container["args"] == list(ARGS)
    assert container["env"] == [{"name": "OMP_NUM_THREADS", "$patch": "delete"}], "a knob that goes is taken out"
    assert "command" not in container
    assert "max_num_seqs: 8 -> 64" in found.changes


def test_helm_values_of_the_production_stack_chart() -> None:
    recipe = update(DEPLOYED, deployment="stack-llama-deployment-vllm", helm_release="stack", stack_model="llama")
    found = recommendation(record(recipe), Form.HELM)
    values = written(found, "values-tunewright.yaml")
    assert values == {
        "servingEngineSpec": {
            "modelSpec": [
                {
                    "name": "llama",
                    "vllmConfig": {
                        "maxNumSeqs": 64,
                        "enablePrefixCaching": False,
                        "extraArgs": ["--async-scheduling"],
                    },
                }
            ]
        }
    }
    where = found.files[0].where
    assert "entry llama of servingEngineSpec.modelSpec" in where
    assert "take out --block-size, OMP_NUM_THREADS" in where


def test_the_values_of_the_chart_are_of_knobs_that_exist() -> None:
    assert set(STACK_VALUES) <= set(CATALOGUE) | {"max_model_len", "dtype"}


def test_helm_values_of_an_unknown_chart_are_the_plain_list() -> None:
    found = recommendation(record(update(DEPLOYED, helm_release="mine")), Form.HELM)
    assert written(found, "values-tunewright.yaml") == {"args": list(ARGS)}
    assert "release mine" in found.files[0].where


def test_args_of_a_deployment_and_of_a_process() -> None:
    assert written(recommendation(record(DEPLOYED), Form.ARGS), "args.yaml") == {"args": list(ARGS)}
    process = Recipe(args=("vllm", "serve", "a model", "--port", "{port}"), environment={"OMP_NUM_THREADS": "4"})
    file = recommendation(record(process), Form.ARGS).files[0]
    assert file.text == "OMP_NUM_THREADS=4 vllm serve 'a model' --port '{port}'\n"


@pytest.mark.parametrize("form", [Form.KUSTOMIZE, Form.HELM])
def test_processes_have_no_deployment_to_patch(form: Form) -> None:
    with pytest.raises(Refused, match="use --as args"):
        recommendation(record(Recipe(args=("vllm",))), form)


def test_without_a_winner_there_is_nothing_to_recommend() -> None:
    none = update(waiting(), winner=None, recipe=None, phase=Phase.SEARCHING)
    with pytest.raises(Refused, match="has nothing to recommend: it is Searching"):
        recommendation(none, Form.ARGS)
