"""The prompts of the quality gate in a cluster: a ConfigMap of the tuning's namespace."""

import pytest
from fake_kube import client_of, fake_kube
from pydantic import ValidationError
from tunings import tuning

from tunewright.cluster import config_map_prompts
from tunewright.domain.answers import QualityPrompt
from tunewright.kube.resources import CONFIG_MAPS
from tunewright.ports import Refused


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "there is no ConfigMap mine in namespace team"),
        ({"other": "x"}, "has no key prompts.jsonl"),
        ({"prompts.jsonl": "{}"}, "prompts.jsonl of ConfigMap mine, line 1: prompt must be a text"),
    ],
)
def test_what_is_wrong_with_it_is_told(data: dict[str, str] | None, said: str) -> None:
    with fake_kube() as fake, client_of(fake.url) as kube:
        if data is not None:
            kube.create(CONFIG_MAPS, {"metadata": {"name": "mine"}, "data": data}, "team")
        with pytest.raises(Refused, match=said):
            config_map_prompts(kube, "team", "mine")


def test_a_good_one_is_read() -> None:
    with fake_kube() as fake, client_of(fake.url) as kube:
        kube.create(CONFIG_MAPS, {"metadata": {"name": "mine"}, "data": {"prompts.jsonl": '{"prompt": "a"}'}}, "team")
        assert config_map_prompts(kube, "team", "mine") == (QualityPrompt(prompt="a"),)
        assert config_map_prompts(kube, "team", None) == ()


def test_a_file_is_for_one_machine_and_a_config_map_for_a_cluster() -> None:
    with pytest.raises(ValidationError, match="in a cluster name a ConfigMap"):
        tuning(target={"deployment": "chat"}, quality={"promptsFile": "p.jsonl"})
    with pytest.raises(ValidationError, match="on one machine name a file"):
        tuning(quality={"promptsConfigMap": "p"})
    with pytest.raises(ValidationError, match="only one of"):
        tuning(quality={"promptsConfigMap": "p", "promptsFile": "p.jsonl"})


def test_labels_of_the_canary_are_for_clusters_and_of_the_form_that_kubernetes_takes() -> None:
    with pytest.raises(ValidationError, match="is for clusters"):
        tuning(promotion={"canary": {"labels": {"a": "b"}}})
    for labels in ({"a b": "c"}, {"a": "-"}, {"/x": "y"}):
        with pytest.raises(ValidationError, match="is no label that Kubernetes takes"):
            tuning(target={"deployment": "chat"}, promotion={"canary": {"labels": labels}})
    tuning(target={"deployment": "chat"}, promotion={"canary": {"labels": {"llm-d.ai/model": "llama-3.1"}}})
